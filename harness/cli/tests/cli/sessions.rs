//! Runs that end early: killed, interrupted, or stopped by a time limit. The report keeps the
//! finished steps and lists the missing ones.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use harness_record::{Rule, Verdict};
use harness_report::store;
use harness_staging::{Staging, strict, wait_for};
use tempfile::TempDir;

const GOOD: &str = "about: Fits.
needs: { memory: 64MiB }
allocators: [caching, direct]
steps:
  - alloc: { buffer: a, size: 3MiB }
  - free: a
";

/// Takes minutes.
const LONG: &str = "about: Many requests.
needs: { memory: 1GiB }
allocators: [caching]
steps:
  - alloc: { buffer: a, size: 3MiB }
  - storm: { id: storm, operations: 9000000, sizes: { min: 1KiB, max: 1MiB }, live: 512MiB,
        lifetime: { min: 1, max: 1000 } }
";

/// A folder and a machine.
struct World {
    folder: TempDir,
    staging: Staging,
}

impl World {
    fn new(staging: Staging, files: &[(&str, &str)]) -> Self {
        let folder = TempDir::new().unwrap();
        for (name, content) in files {
            fs::write(folder.path().join(name), content).unwrap();
        }
        Self { folder, staging }
    }

    fn without_gpu(files: &[(&str, &str)]) -> Self {
        Self::new(Staging::without_driver().unwrap(), files)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
        command
            .args(arguments)
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        for variable in ["CARGO", "COLUMNS", "HARNESS_DEVICE", "NO_COLOR"] {
            command.env_remove(variable);
        }
        self.staging.apply(&mut command);
        command
    }

    fn ran(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Starts a run of `good.yaml` and `long.yaml` into `report`, and waits until the first step of
    /// the long one is saved.
    fn started(&self) -> Child {
        let mut child = self
            .command(&[
                "run",
                "good.yaml",
                "long.yaml",
                "good.yaml",
                "--repeat",
                "2",
                "--report",
                "report",
            ])
            .spawn()
            .unwrap();
        let events = self.path("report").join(store::EVENTS);
        let is_there = || fs::read_to_string(&events).is_ok_and(|text| text.lines().count() >= 11);
        wait_for("the first step of the long run", || {
            let ended = child.try_wait().unwrap();
            assert_eq!(ended, None, "the program ended");
            is_there().then_some(())
        });
        child
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn signal(child: &Child, name: &str) {
    assert!(
        Command::new("kill")
            .args([name, &child.id().to_string()])
            .status()
            .unwrap()
            .success()
    );
}

/// Expects two passed runs, one that stopped after its first step, and three that did not start.
fn assert_incomplete(report: &Path) {
    let records = store::read(report).unwrap();
    let runs: Vec<(&str, &str, bool)> = records
        .runs
        .iter()
        .map(|run| {
            (
                run.scenario.name.as_str(),
                run.allocator.as_str(),
                run.verdict == Verdict::Passed,
            )
        })
        .collect();
    assert_eq!(
        runs,
        [
            ("good", "caching", true),
            ("good", "direct", true),
            ("long", "caching", false)
        ]
    );
    assert_eq!(
        (&records.runs[2].verdict, records.runs[2].steps.len()),
        (&Verdict::Interrupted, 1)
    );
    assert_eq!(records.not_started.len(), 3);
}

#[test]
fn the_report_of_a_killed_run_has_its_steps_and_lists_missing_runs() {
    let world = World::without_gpu(&[("good.yaml", GOOD), ("long.yaml", LONG)]);
    let mut child = world.started();
    signal(&child, "-KILL");
    child.wait().unwrap();
    let report = world.path("report");
    assert_incomplete(&report);
    let rendered = world.ran(&["report", "render", "report"]);
    assert_eq!(
        rendered.status.code(),
        Some(0),
        "{}",
        text(&rendered.stderr)
    );
    assert_incomplete(&report);
    let page = fs::read_to_string(report.join(store::REPORT)).unwrap();
    let missing = "Incomplete: 3 of 6 runs did not start: `good` with `caching`, `good` with \
         `direct`, `long` with `caching`.";
    assert!(
        page.contains(missing) && page.contains("stopped early"),
        "{page}"
    );
    assert!(
        !report.join(store::EVENTS).exists(),
        "the report has taken their place"
    );
}

#[test]
fn an_interrupted_run_keeps_its_steps_and_lists_runs_that_did_not_start() {
    let world = World::without_gpu(&[("good.yaml", GOOD), ("long.yaml", LONG)]);
    let child = world.started();
    signal(&child, "-INT");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert!(
        text(&output.stdout).contains("Incomplete: 3 of 6 runs did not start"),
        "{}",
        text(&output.stdout)
    );
    assert_incomplete(&world.path("report"));
}

#[test]
fn an_interrupt_after_the_last_operation_ends_with_130() {
    let world = World::without_gpu(&[("good.yaml", GOOD)]);
    let arguments = [
        "run",
        "good.yaml",
        "--no-report",
        "--device",
        "sim",
        "--repeat",
        "200",
        "--format",
        "json",
    ];
    let mut child = world.command(&arguments).spawn().unwrap();
    // The records do not fit into the pipe. After the first byte, all runs are over, and the
    // program waits for a reader.
    let mut out = child.stdout.take().unwrap();
    let mut first = [0];
    out.read_exact(&mut first).unwrap();
    signal(&child, "-INT");
    let mut err = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    err.read_line(&mut line).unwrap();
    assert!(line.starts_with("interrupted"), "{line}");
    out.read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn a_step_past_its_time_limit_fails_with_its_place_and_the_next_run_goes_on() {
    let limited = format!("{}    timeout: 50ms\n", LONG);
    let world = World::without_gpu(&[("good.yaml", GOOD), ("long.yaml", &limited)]);
    let output = world.ran(&[
        "run",
        "long.yaml",
        "good.yaml",
        "--report",
        "report",
        "--device",
        "sim",
    ]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let records = store::read(&world.path("report")).unwrap();
    let Verdict::Failed { first, .. } = &records.runs[0].verdict else {
        panic!("{:?}", records.runs[0].verdict)
    };
    assert_eq!(
        (&first.rule, first.step, first.at.as_ref().unwrap().line),
        (&Rule::TimeLimit, 2, 6)
    );
    assert!(
        first.expected.starts_with("step 2 (line 6: storm ")
            && first.expected.ends_with(" to take at most 50.0 ms"),
        "{first}"
    );
    assert!(
        first.seen.contains("the last call that it began is "),
        "{first}"
    );
    assert!(
        records.runs[1..]
            .iter()
            .all(|run| run.verdict == Verdict::Passed)
            && records.is_complete()
    );
}

#[test]
fn a_call_that_never_returns_is_named_and_the_program_ends() {
    let waits = "about: The driver hangs.
needs: { memory: 64MiB }
allocators: [direct]
steps:
  - alloc: { buffer: a, size: 3MiB }
  - free: a
    timeout: 100ms
";
    // The first free belongs to the check that wrong contents are found.
    let staging = Staging::new(&strict().hanging("cuMemFree_v2", 2)).unwrap();
    let world = World::new(staging, &[("waits.yaml", waits), ("good.yaml", GOOD)]);
    let output = world.ran(&[
        "run",
        "waits.yaml",
        "good.yaml",
        "--device",
        "cuda",
        "--repeat",
        "1",
        "--report",
        "report",
    ]);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{out}{err}");
    assert!(
        err.contains("gave up: step 2 (line 6: free a): it has not ended after "),
        "{err}"
    );
    assert!(
        err.contains(
            "the last call that it began is the allocator's `free`; no further scenario is run"
        ),
        "{err}"
    );
    let records = store::read(&world.path("report")).unwrap();
    assert_eq!(
        (
            records.runs.len(),
            records.runs[0].steps.len(),
            records.not_started.len()
        ),
        (1, 1, 2)
    );
    assert!(
        matches!(&records.runs[0].verdict, Verdict::Failed { first, .. }
            if first.rule == Rule::TimeLimit)
    );
}

#[test]
fn two_runs_into_one_folder_do_not_mix() {
    let world = World::without_gpu(&[("good.yaml", GOOD), ("long.yaml", LONG)]);
    let mut child = world.started();
    let second = world.ran(&["run", "good.yaml", "--report", "report", "--device", "sim"]);
    signal(&child, "-KILL");
    child.wait().unwrap();
    assert!(
        text(&second.stderr).contains("`report` is being written by another `harness run`"),
        "{}",
        text(&second.stderr)
    );
    assert_eq!(second.status.code(), Some(2));
    assert_incomplete(&world.path("report"));
}

#[test]
fn an_arm_that_the_user_adds_is_observed_and_not_judged() {
    let exact = "about: Exact.
needs: { memory: 64MiB }
allocators: [caching]
steps:
  - alloc: { buffer: a, size: 30MiB }
  - expect: reserved_bytes.all.current == 30MiB
";
    let world = World::without_gpu(&[("exact.yaml", exact)]);
    let output = world.ran(&[
        "run",
        "exact.yaml",
        "--no-report",
        "--device",
        "sim",
        "--alloc-conf",
        "expandable_segments:True",
    ]);
    let out = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{out}");
    assert!(
        out.contains(
            "observed: exact with caching(expandable_segments:True): not judged: line \
         6 expects reserved_bytes"
        ),
        "{out}"
    );
}
