//! `harness bench` as a user meets it: what it prints, its exit code, and what it leaves on disk.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use driver_double::{Config, Staging};
use harness::bench::record::{EntryOutcome, NightRecord, Quantity, Shard, Stopped};
use harness_allocator::device::Clock;
use tempfile::TempDir;

/// A folder to work in, and a machine.
struct World {
    folder: TempDir,
    staging: Staging,
}

struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Ran {
    fn told(&self) -> String {
        let code = self.code.map_or_else(|| "none".to_owned(), |code| code.to_string());
        format!("exit: {code}\n--- stdout ---\n{}--- stderr ---\n{}", self.out, self.err)
    }
}

const SMALL: &str = "about: Small.
needs: { memory: 64MiB }
arms: [caching, direct]
time:
  - latency: { sizes: [1MiB, 2MiB] }
";

impl World {
    fn without_gpu() -> Self {
        Self { folder: TempDir::new().unwrap(), staging: Staging::without_driver().unwrap() }
    }

    fn with(self, name: &str, text: &str) -> Self {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
        command.arg0("harness").arg("bench").args(arguments).current_dir(self.folder.path()).stdin(Stdio::null());
        for variable in ["CARGO", "COLUMNS", "HARNESS_DEVICE", "NO_COLOR"] {
            command.env_remove(variable);
        }
        self.staging.apply(&mut command);
        command
    }

    fn bench(&self, arguments: &[&str]) -> Ran {
        let output = self.command(arguments).output().unwrap();
        Ran { code: output.status.code(), out: String::from_utf8(output.stdout).unwrap(), err: String::from_utf8(output.stderr).unwrap() }
    }

    fn night(&self, folder: &str) -> NightRecord {
        serde_json::from_str(&fs::read_to_string(self.path(folder).join("night.json")).unwrap()).unwrap()
    }
}

#[test]
fn a_night_is_printed_and_written_whole() {
    let world = World::without_gpu().with("scenarios/bench/small.yaml", SMALL);
    let ran = world.bench(&["--device", "sim", "--report", "night"]);
    assert_eq!(ran.code, Some(0), "{}", ran.told());
    // How long it took differs from run to run.
    let steady: Vec<&str> = ran.out.lines().filter(|line| !line.contains("entries in") && !line.starts_with("contended")).collect();
    insta::assert_snapshot!(steady.join("\n"));
    let night = world.night("night");
    assert_eq!((night.suites.len(), night.suites[0].entries.len(), night.suites[0].stopped), (1, 12, Stopped::Deterministic));
    assert_eq!((night.machine.clock, night.seed, night.shard), (Clock::Simulated, 0, None));
    assert_eq!(night.reproduce, "harness bench --device sim --seed 0");
    assert!(!night.conditions.cost_figures.is_empty(), "a model tells its figures");
    assert_eq!(fs::read_dir(world.path("night")).unwrap().count(), 1, "nothing else is left");
}

#[test]
fn json_is_the_whole_record_and_nothing_else() {
    let world = World::without_gpu().with("small.yaml", SMALL);
    let ran = world.bench(&["small.yaml", "--device", "sim", "--no-report", "--format", "json", "--seed", "5", "--shard", "1/1"]);
    let night: NightRecord = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((night.seed, night.shard), (5, Some(Shard { index: 1, count: 1 })));
    let samples = night.suites[0].entries.iter().map(|entry| match &entry.outcome {
        EntryOutcome::Measured(measured) => measured.rounds.iter().flatten().count(),
        _ => 0,
    });
    assert!(samples.min() > Some(0), "all samples are there");
    assert!(!world.path("reports").exists());
}

#[test]
fn without_a_folder_named_a_night_goes_to_one_named_after_date_and_device() {
    let world = World::without_gpu().with("small.yaml", SMALL);
    assert_eq!(world.bench(&["small.yaml", "--device", "sim", "--quiet"]).told(), "exit: 0\n--- stdout ---\n--- stderr ---\n");
    let mut names = fs::read_dir(world.path("reports/nightly")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let name = names.next().unwrap();
    assert!(name.starts_with("20") && name.ends_with("-simulated"), "{name}");
}

#[test]
fn what_is_asked_for_wrongly_is_answered_with_what_there_is() {
    let world = World::without_gpu().with("scenarios/bench/small.yaml", SMALL).with("other/small.yaml", SMALL).with("none/x.txt", "");
    let wrong: [&[&str]; 7] = [
        &["smal"],
        &["nothing.yaml"],
        &["none"],
        &["small", "other/small.yaml"],
        &["--shard", "3/2"],
        &["--budget", "0s"],
        &["--device", "cuda:0"],
    ];
    let told: Vec<String> =
        wrong.iter().map(|arguments| format!("$ harness bench {}\n{}", arguments.join(" "), world.bench(arguments).told())).collect();
    insta::assert_snapshot!(told.join("\n"));
    assert!(!world.path("reports").exists(), "nothing is written");
}

#[test]
fn suites_are_listed() {
    let world = World::without_gpu().with("scenarios/bench/small.yaml", SMALL);
    insta::assert_snapshot!(world.bench(&["--list"]).out);
}

#[test]
fn what_fails_ends_with_exit_code_1_and_is_in_the_record() {
    let scenario = "about: x\nneeds: { memory: 64MiB }\nsteps:\n  - alloc: { buffer: a, size: 1MiB }\n  - expect: num_ooms == 1\n";
    let suite = "about: x\nneeds: { memory: 64MiB }\narms: [caching]\ntime: [scenario: { file: wrong.yaml }]\n";
    let world = World::without_gpu().with("s/wrong.yaml", scenario).with("suite.yaml", &suite.replace("wrong.yaml", "s/wrong.yaml"));
    let ran = world.bench(&["suite.yaml", "--device", "sim", "--report", "night"]);
    assert_eq!(ran.code, Some(1), "{}", ran.told());
    assert!(matches!(world.night("night").suites[0].entries[0].outcome, EntryOutcome::Failed { .. }));
    assert!(ran.out.contains("failed: wrong, caching: s/wrong.yaml:5:"), "{}", ran.out);
}

#[test]
fn an_interrupted_night_saves_nothing() {
    let long = "about: Long.\nneeds: { memory: 64MiB }\narms: [caching]\nprecision: 0.0001%\nbudget: 60s\nrounds: { least: 1000, most: 1000 }\ntime: [threads: { counts: [1, 2] }]\n";
    let world = World::without_gpu().with("long.yaml", long);
    let mut child = world
        .command(&["long.yaml", "--device", "sim", "--report", "night"])
        .stderr(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The handler is there before anything is measured; where the signal came first, the program ended by it, and has saved nothing either.
    std::thread::sleep(Duration::from_millis(500));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let began = Instant::now();
    let status = child.wait().unwrap();
    assert!(began.elapsed() < Duration::from_secs(20), "it stops at once");
    assert!(matches!(status.code(), Some(130) | None), "{status}");
    assert!(!world.path("night").exists());
}

/// Over the CUDA device's own code, on the double: its times say nothing of any GPU, but what timing adds to them is the harness's own.
#[test]
fn on_a_cuda_device_host_calls_are_measured_and_timing_adds_next_to_nothing() {
    let text = "about: Measured.
needs: { memory: 256MiB }
arms: [caching, expandable, async_pool, direct]
time:
  - latency: { sizes: [2MiB, 64MiB] }
  - empty_cache: { segments: [1, 8] }
  - record_stream: { streams: [0, 1] }
  - recovery: { sizes: [32MiB] }
  - pipeline: { sizes: [32MiB] }
  - trace: { file: trace.txt }
";
    let trace: String = (0..200).map(|id| format!("a {id} 4096 0\nf {id}\n")).collect();
    let world = World { staging: Staging::new(&Config::default()).unwrap(), ..World::without_gpu() }
        .with("cuda.yaml", text)
        .with("trace.txt", &trace);
    let ran = world.bench(&["cuda.yaml", "--device", "cuda:0", "--budget", "3s", "--report", "night"]);
    assert_eq!(ran.code, Some(0), "{}", ran.told());
    let night = world.night("night");
    let suite = &night.suites[0];
    for entry in &suite.entries {
        let device = (entry.group == "pipeline", entry.quantity == Quantity::DeviceTime);
        assert!(entry.quantity != Quantity::ModelTime && device.0 == device.1, "{}, {}: {:?}", entry.case(), entry.arm, entry.quantity);
    }
    for entry in suite.entries.iter().filter(|entry| entry.quantity == Quantity::HostTime) {
        let EntryOutcome::Measured(measured) = &entry.outcome else { panic!("{}, {}: {:?}", entry.case(), entry.arm, entry.outcome) };
        let region = measured.summary.median * measured.batch;
        // What stands alone is a call to the driver, which takes a real one far longer than the double.
        let alone = measured.batch == 1;
        assert!(alone || suite.overhead_ps * 50 < region, "{}, {}: {} ps beside {region} ps", entry.case(), entry.arm, suite.overhead_ps);
    }
}
