//! Tests of `harness bench` from a user's view: output, exit code, and files.

use std::process::{Command, Stdio};
use std::time::Duration;
use std::{fs, os::unix::fs::PermissionsExt as _};

use harness_allocator::{device::Clock, units::Bytes};
use harness_bench::record::{BenchRun, EntryResult, Quantity, Shard, Stopped};
use harness_gpu_settings::settings::Settings;
use harness_staging::{Staging, strict};

use super::world::{SMALL, World};

#[test]
fn a_run_is_printed_and_written_whole() {
    let world = World::without_gpu().with("scenarios/bench/small.yaml", SMALL);
    let ran = world.bench(&["--device", "sim", "--report", "run"]);
    assert_eq!(ran.code, Some(0), "{}", ran.told());
    // The duration differs between runs, and the profile between builds.
    let differs = |line: &str| {
        line.contains("entries in")
            || line.starts_with("contended")
            || line.starts_with("BUILT WITH THE PROFILE")
    };
    let steady: Vec<&str> = ran.out.lines().filter(|line| !differs(line)).collect();
    insta::assert_snapshot!(steady.join("\n"));
    let run = world.run("run");
    assert_eq!(
        (
            run.suites.len(),
            run.suites[0].entries.len(),
            run.suites[0].stopped
        ),
        (1, 12, Stopped::Deterministic)
    );
    assert_eq!(
        (run.machine.clock, run.seed, run.shard),
        (Clock::Simulated, 0, None)
    );
    assert_eq!(run.reproduce, "harness bench --device sim --seed 0");
    assert!(
        !run.conditions.cost_figures.is_empty(),
        "a model names its figures"
    );
    let mut names: Vec<_> = fs::read_dir(world.path("run"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(
        names,
        ["benchmark.json", "report.md"],
        "nothing else is left"
    );
}

#[test]
fn json_is_the_whole_record_and_nothing_else() {
    let world = World::without_gpu().with("small.yaml", SMALL);
    let quiet = world.bench(&["small.yaml", "--device", "sim", "--no-report", "--quiet"]);
    assert_eq!(quiet.told(), "exit: 0\n--- stdout ---\n--- stderr ---\n");
    let ran = world.bench(&[
        "small.yaml",
        "--device",
        "sim",
        "--no-report",
        "--format",
        "json",
        "--seed",
        "5",
        "--shard",
        "1/1",
    ]);
    let run: BenchRun = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(
        (run.seed, run.shard),
        (5, Some(Shard { index: 1, count: 1 }))
    );
    let rounds = run.suites[0].entries.iter().map(|entry| {
        entry
            .outcome
            .measured()
            .map_or(0, |measured| measured.rounds.len())
    });
    assert!(rounds.min() > Some(0), "all rounds are there");
    assert!(!world.path("reports").exists());
}

#[test]
fn each_run_is_compared_with_the_last_one_and_added_to_the_index() {
    let world = World::without_gpu().with("small.yaml", SMALL);
    let run = ["small.yaml", "--device", "sim", "--reports", "reports"];
    world.bench(&run);
    world.rewrite_first_run(|_| {});
    let second = world.bench(&run);
    assert_eq!(second.code, Some(5), "{}", second.told());
    assert!(
        second
            .out
            .contains("Nothing changed, of 12 entries compared"),
        "{}",
        second.out
    );
    let mut names: Vec<String> = fs::read_dir(world.path("reports/nightly"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    // If midnight was between the two runs, both have the plain name of their date.
    assert!(
        names.len() == 2 && names[0].starts_with("20") && names[0].ends_with("-sim"),
        "{names:?}"
    );
    let index = fs::read_to_string(world.path("reports/README.md")).unwrap();
    assert!(
        names
            .iter()
            .all(|name| index.contains(&format!("nightly/{name}/report.md"))),
        "{index}"
    );
}

#[test]
fn a_worse_entry_gives_exit_code_1_and_annotations() {
    // An accepted build whose model times are all a picosecond.
    let faster = format!(
        "#!/bin/sh\n{} \"$@\" | sed -u 's/\"Ok\":\\[[0-9]*\\]/\"Ok\":[1]/'\n",
        env!("CARGO_BIN_EXE_harness")
    );
    let world = World::without_gpu()
        .with("small.yaml", SMALL)
        .with_program("faster", &faster);
    let run = ["small.yaml", "--device", "sim", "--accepted", "./faster"];
    let files = [
        "--summary",
        "summary.md",
        "--junit",
        "junit.xml",
        "--smaller-is-better",
        "bench.json",
    ];
    let output = world
        .command(&[&run[..], &files].concat())
        .env("GITHUB_ACTIONS", "true")
        .output()
        .unwrap();
    let out = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{out}");
    assert!(
        out.contains("10 worse") && out.lines().any(|line| line.starts_with("::")),
        "{out}"
    );
    assert!(
        fs::read_to_string(world.path("summary.md"))
            .unwrap()
            .contains("10 worse")
    );
    assert!(
        fs::read_to_string(world.path("junit.xml"))
            .unwrap()
            .contains("failures=\"10\"")
    );
    let figures: Vec<serde_json::Value> =
        serde_json::from_str(&fs::read_to_string(world.path("bench.json")).unwrap()).unwrap();
    assert_eq!(figures.len(), 12);
}

#[test]
fn errors_for_wrong_arguments_list_the_valid_ones() {
    let world = World::without_gpu()
        .with("scenarios/bench/small.yaml", SMALL)
        .with("other/small.yaml", SMALL)
        .with("none/x.txt", "");
    let wrong: [(&[&str], &[&str]); 7] = [
        (&["smal"], &["exit: 2", "`smal`", "suites: small"]),
        (&["nothing.yaml"], &["exit: 2", "nothing.yaml"]),
        (&["none"], &["exit: 2", "none: ", ".yaml"]),
        (
            &["small", "other/small.yaml"],
            &["exit: 2", "scenarios/bench/small.yaml", "other/small.yaml"],
        ),
        (&["--shard", "3/2"], &["exit: 2", "'3/2'", "`1/2`"]),
        (&["--budget", "0s"], &["exit: 2", "'0s'", "`60s`"]),
        (
            &["--device", "cuda:0"],
            &["exit: 3", "libcuda.so.1", "harness doctor"],
        ),
    ];
    for (arguments, needles) in wrong {
        let told = world.bench(arguments).told();
        assert!(
            needles.iter().all(|needle| told.contains(needle)),
            "{needles:?}: {told}"
        );
    }
    assert!(!world.path("reports").exists(), "nothing is written");
}

#[test]
fn a_run_that_could_not_be_saved_is_refused_before_anything_is_measured() {
    let world = World::without_gpu()
        .with("small.yaml", SMALL)
        .with("mine/report.md", "mine")
        .with("pages/README.md", "mine");
    fs::create_dir(world.path("closed")).unwrap();
    fs::set_permissions(world.path("closed"), fs::Permissions::from_mode(0o555)).unwrap();
    let root = fs::write(world.path("closed/try"), "").is_ok();
    let places: &[&[&str]] = &[
        &["--report", "mine"],
        &["--reports", "pages"],
        &["--report", "small.yaml"],
        &["--report", "closed/run"],
    ];
    // A user with all rights can write to every folder.
    let places = if root { &places[..3] } else { places };
    for place in places {
        let ran = world.bench(&[&["small.yaml", "--device", "sim"], *place].concat());
        assert!(
            matches!(ran.code, Some(2 | 4)) && ran.out.is_empty(),
            "{}",
            ran.told()
        );
        assert!(ran.err.contains(place[1]), "{}", ran.err);
    }
    assert_eq!(
        fs::read_to_string(world.path("mine/report.md")).unwrap(),
        "mine"
    );
    assert_eq!(
        fs::read_to_string(world.path("pages/README.md")).unwrap(),
        "mine"
    );
    assert!(!world.path("pages/nightly").exists());
}

#[test]
fn suites_are_listed() {
    let world = World::without_gpu().with("scenarios/bench/small.yaml", SMALL);
    insta::assert_snapshot!(world.bench(&["--list"]).out);
}

#[test]
fn what_fails_ends_with_exit_code_1_and_is_in_the_record() {
    let scenario = "about: x\nneeds: { memory: 64MiB }\nsteps:\n  - alloc: { buffer: a, size: 1MiB \
         }\n  - expect: num_ooms == 1\n";
    let suite = "about: x\nneeds: { memory: 64MiB }\narms: [caching]\ntime: [scenario: { file: \
         wrong.yaml }]\n";
    let world = World::without_gpu()
        .with("s/wrong.yaml", scenario)
        .with("suite.yaml", &suite.replace("wrong.yaml", "s/wrong.yaml"));
    let ran = world.bench(&["suite.yaml", "--device", "sim", "--report", "run"]);
    assert_eq!(ran.code, Some(1), "{}", ran.told());
    assert!(matches!(
        world.run("run").suites[0].entries[0].outcome,
        EntryResult::Failed { .. }
    ));
    assert!(
        ran.out.contains("failed: wrong, caching: s/wrong.yaml:5:"),
        "{}",
        ran.out
    );
}

#[test]
fn an_interrupted_run_saves_nothing() {
    let long = "about: Long.\nneeds: { memory: 64MiB }\narms: [caching]\nprecision: \
         0.0001%\nbudget: 60s\nrounds: { least: 1000, most: 1000 }\ntime: [threads: { counts: [1, \
         2] }]\n";
    let world = World::without_gpu().with("long.yaml", long);
    let mut child = world
        .command(&["long.yaml", "--device", "sim", "--report", "run"])
        .stderr(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The handler is installed before the first measurement. A signal that came earlier ended the
    // program, which has saved nothing either.
    std::thread::sleep(Duration::from_millis(500));
    assert!(
        Command::new("kill")
            .args(["-INT", &child.id().to_string()])
            .status()
            .unwrap()
            .success()
    );
    let status = child.wait().unwrap();
    assert!(matches!(status.code(), Some(130) | None), "{status}");
    assert!(!world.path("run").exists());
}

#[test]
fn the_context_size_excludes_other_processes_and_is_skipped_if_unknown() {
    let text = "about: x\nneeds: { memory: 64MiB }\narms: [caching]\nrounds: { least: 1, most: 1 \
         }\ntime: [start_up]\n";
    let context = |config: Settings| {
        let world = World {
            staging: Staging::new(&config).unwrap(),
            ..World::without_gpu()
        }
        .with("start.yaml", text);
        let ran = world.bench(&["start.yaml", "--device", "cuda:0", "--report", "run"]);
        assert_eq!(ran.code, Some(0), "{}", ran.told());
        let entries = world.run("run").suites[0].entries.clone();
        let measured = entries
            .iter()
            .filter(|entry| matches!(entry.outcome, EntryResult::Measured(_)));
        let others: Vec<_> = measured
            .filter(|entry| entry.quantity == Quantity::HostTime)
            .map(|entry| entry.group.clone())
            .collect();
        assert_eq!(others, ["start_up", "start_up: opening the device"]);
        entries
            .into_iter()
            .find(|entry| entry.group == "start_up: context overhead")
            .expect("it has an entry")
            .outcome
    };
    let EntryResult::Measured(alone) = context(Settings {
        others: Bytes::mib(64),
        ..strict()
    }) else {
        panic!("NVML tells it")
    };
    assert_eq!(alone.rounds, [Some(300 << 20)]);
    let EntryResult::Skipped { reason } = context(Settings {
        nvml: false,
        ..strict()
    }) else {
        panic!("nobody tells it")
    };
    assert!(
        reason.starts_with(
            "memory of this process's context: libnvidia-ml.so.1 exists but cannot be loaded: "
        ),
        "{reason}"
    );
}

/// Runs the CUDA device's code on the simulated GPU. The GPU's times have no meaning.
#[test]
fn on_a_cuda_device_host_calls_are_measured_and_short_ones_together() {
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
    let trace: String = (0..200)
        .map(|id| format!("a {id} 4096 0\nf {id}\n"))
        .collect();
    let world = World {
        staging: Staging::new(&strict()).unwrap(),
        ..World::without_gpu()
    }
    .with("cuda.yaml", text)
    .with("trace.txt", &trace);
    let ran = world.bench(&[
        "cuda.yaml",
        "--device",
        "cuda:0",
        "--budget",
        "3s",
        "--report",
        "run",
    ]);
    assert_eq!(ran.code, Some(0), "{}", ran.told());
    let run = world.run("run");
    let suite = &run.suites[0];
    for entry in &suite.entries {
        let device = (
            entry.group == "pipeline",
            entry.quantity == Quantity::DeviceTime,
        );
        assert!(
            entry.quantity != Quantity::ModelTime && device.0 == device.1,
            "{}, {}: {:?}",
            entry.case(),
            entry.arm,
            entry.quantity
        );
    }
    for entry in suite
        .entries
        .iter()
        .filter(|entry| entry.quantity == Quantity::HostTime)
    {
        let EntryResult::Measured(measured) = &entry.outcome else {
            panic!("{}, {}: {:?}", entry.case(), entry.arm, entry.outcome)
        };
        // A hit of the cache calls no driver function.
        assert!(
            measured.batch > 1 || (entry.group.as_str(), entry.arm.as_str()) != ("hit", "caching"),
            "{}",
            entry.case()
        );
    }
}
