//! Recorded programs: `harness advise`, `shrink`, `import`, and `run` of a trace or a snapshot.
//!
//! The project contains four real snapshots. Others are outside of it, in `../shared/snapshots`; a
//! test prints which of them are missing.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use harness_allocator::stats::{BlockState, PoolKind};
use harness_allocator::units::Bytes;
use harness_trace::snapshot::{
    Action, Block, Event, ExtraId, MempoolId, Segment, Snapshot, StackId,
};
use serde_json::Value;

fn harness(arguments: &[&str], folder: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_harness"))
        .args(arguments)
        .env_remove("CARGO")
        .current_dir(folder)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A block of 4 MiB pins a segment of 40 MiB. Then 64 MiB are requested on a device of 88 MiB.
const PINNED: &str = "a 7 41943040 0 # model.py:10\nf 7\na 8 4194304 0 # model.py:20\na 9 1000 \
     0\nf 9\na 10 67108864 0 # model.py:30\n";

fn folder_with_trace() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("job.trace"), PINNED).unwrap();
    folder
}

/// A snapshot in the project.
fn recorded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../snapshot/explain/tests/snapshots")
        .join(format!("{name}.pickle.gz"))
        .canonicalize()
        .unwrap()
}

/// A snapshot outside of the project.
fn snapshot(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/snapshots")
        .join(name);
    if !path.exists() {
        println!("skipped: {} is missing", path.display());
    }
    path.exists().then(|| path.canonicalize().unwrap())
}

#[test]
fn a_trace_runs_as_a_scenario_of_one_step() {
    let folder = folder_with_trace();
    let run = |arguments: &[&str]| {
        harness(
            &[
                &["run", "job.trace", "--device", "sim", "--no-report"],
                arguments,
            ]
            .concat(),
            folder.path(),
        )
    };
    let failed = run(&[
        "--memory",
        "88MiB",
        "--alloc-conf",
        "expandable_segments:True",
        "--format",
        "json",
    ]);
    assert_eq!(failed.status.code(), Some(1), "{}", text(&failed.stderr));
    let document: Value = serde_json::from_slice(&failed.stdout).unwrap();
    let verdicts: Vec<&str> = document["runs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|run| run["verdict"]["kind"].as_str().unwrap_or_default())
        .collect();
    assert_eq!(verdicts.len(), 2, "{document:#}");
    let shown = text(&run(&["--memory", "88MiB"]).stdout);
    assert!(
        shown.contains("model.py:20") && shown.contains("no free block is large enough"),
        "{shown}"
    );
    assert_eq!(run(&["--memory", "1GiB"]).status.code(), Some(0));
    let without = run(&[]);
    assert_eq!(without.status.code(), Some(2));
    assert!(
        text(&without.stderr).contains("a trace does not contain the device's memory"),
        "{}",
        text(&without.stderr)
    );
}

#[test]
fn a_trace_is_reduced_to_a_scenario_that_fails_as_it_says() {
    let folder = folder_with_trace();
    let shrunk = harness(
        &[
            "shrink",
            "job.trace",
            "--memory",
            "88MiB",
            "--out",
            "small.yaml",
        ],
        folder.path(),
    );
    assert_eq!(shrunk.status.code(), Some(0), "{}", text(&shrunk.stderr));
    let scenario = std::fs::read_to_string(folder.path().join("small.yaml")).unwrap();
    insta::assert_snapshot!(scenario);
    for command in [
        &["run", "small.yaml", "--device", "sim", "--no-report"][..],
        &["check", "small.yaml"],
    ] {
        assert_eq!(harness(command, folder.path()).status.code(), Some(0));
    }
    let again = harness(&["shrink", "job.trace", "--memory", "88MiB"], folder.path());
    assert_eq!(text(&again.stdout), scenario, "the same every time");
    let small = harness(
        &[
            "shrink",
            "job.trace",
            "--memory",
            "88MiB",
            "--out",
            "small.trace",
        ],
        folder.path(),
    );
    assert_eq!(small.status.code(), Some(0));
    let replayed = harness(
        &[
            "replay",
            "small.trace",
            "--memory",
            "88MiB",
            "--stats",
            "/dev/null",
        ],
        folder.path(),
    );
    assert_eq!(replayed.status.code(), Some(0));
}

/// The second configuration fails: an adapter stays in the segment of the model.
const PINNED_SCENARIO: &str = "\
about: A model does not fit again.
needs: { memory: 1GiB }
allocators: [expandable, caching]
steps:
  - alloc: { buffer: model, size: 700MiB }   # 13 layers
  - free: model
  - alloc: { buffer: adapter, size: 32MiB }
  - repeat: 5
    steps:
      - alloc: { buffer: scratch, size: 3MiB }
      - free: scratch
  - alloc: { buffer: reloaded, size: 700MiB }
";

#[test]
fn a_scenario_that_fails_is_reduced_to_one_that_is_a_test_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("given.yaml"), PINNED_SCENARIO).unwrap();
    let shrunk = harness(
        &["shrink", "given.yaml", "--out", "small.yaml"],
        folder.path(),
    );
    assert_eq!(shrunk.status.code(), Some(0), "{}", text(&shrunk.stderr));
    let message = text(&shrunk.stderr);
    assert!(
        message.starts_with("reduced 7 steps to 4, in ")
            && message.contains(" runs with caching: a request runs out of memory"),
        "{message}"
    );
    insta::assert_snapshot!(std::fs::read_to_string(folder.path().join("small.yaml")).unwrap());
    for command in [
        &["run", "small.yaml", "--device", "sim", "--no-report"][..],
        &["check", "small.yaml"],
    ] {
        assert_eq!(harness(command, folder.path()).status.code(), Some(0));
    }
    let stopped = harness(
        &[
            "shrink",
            "given.yaml",
            "--time-limit",
            "0s",
            "--out",
            "stopped.yaml",
        ],
        folder.path(),
    );
    assert!(
        text(&stopped.stderr)
            .contains("stopped by the time limit or Ctrl-C, so a smaller result may exist"),
        "{}",
        text(&stopped.stderr)
    );
    assert_eq!(
        harness(
            &["run", "stopped.yaml", "--device", "sim", "--no-report"],
            folder.path()
        )
        .status
        .code(),
        Some(0)
    );
}

#[test]
fn a_scenario_that_cannot_be_reduced_is_answered_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("given.yaml"), PINNED_SCENARIO).unwrap();
    let on_gpu = PINNED_SCENARIO.replace("needs: {", "needs: { device: gpu,");
    std::fs::write(folder.path().join("gpu.yaml"), on_gpu).unwrap();
    let answers = [
        &["given.yaml", "--arm", "expandable"][..],
        &["given.yaml", "--arm", "cachng"],
        &["given.yaml", "--preserve", "invariant"],
        &["given.yaml", "--preserve", "conf-differs"],
        &["given.yaml", "--memory", "2GiB"],
        &["gpu.yaml"],
        &["missing.yaml"],
    ]
    .map(|arguments| {
        let failed = harness(&[&["shrink"], arguments].concat(), folder.path());
        assert_eq!(failed.status.code(), Some(2), "{arguments:?}");
        format!("{}\n{}", arguments.join(" "), text(&failed.stderr))
    });
    insta::assert_snapshot!(answers.join("\n"));
}

#[test]
fn two_settings_that_end_differently_are_both_arms_of_the_reduced_scenario() {
    let folder = folder_with_trace();
    let arguments = [
        "shrink",
        "job.trace",
        "--memory",
        "88MiB",
        "--preserve",
        "conf-differs",
        "--alloc-conf",
        "expandable_segments:True",
    ];
    let shrunk = harness(
        &[&arguments[..], &["--out", "small.yaml"]].concat(),
        folder.path(),
    );
    assert_eq!(shrunk.status.code(), Some(0), "{}", text(&shrunk.stderr));
    let scenario = std::fs::read_to_string(folder.path().join("small.yaml")).unwrap();
    assert!(
        scenario.contains("fails: { oom: fragmented }, serves: fits"),
        "{scenario}"
    );
    assert_eq!(
        harness(
            &["run", "small.yaml", "--device", "sim", "--no-report"],
            folder.path()
        )
        .status
        .code(),
        Some(0)
    );
}

#[test]
fn helpful_settings_and_sufficient_memory_are_shown_above_the_results() {
    let folder = folder_with_trace();
    let run = harness(
        &[
            "run",
            "job.trace",
            "--memory",
            "88MiB",
            "--device",
            "sim",
            "--no-report",
            "--try-settings",
            "--least-memory",
        ],
        folder.path(),
    );
    assert_eq!(run.status.code(), Some(1), "{}", text(&run.stderr));
    let shown = text(&run.stdout);
    let lines: Vec<&str> = shown.lines().take(2).collect();
    assert!(
        lines[0].starts_with("job: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes it pass"),
        "{shown}"
    );
    assert_eq!(
        lines[1],
        "job with caching: 104 MiB would be enough, and 102 MiB would not (on the simulated \
         device)."
    );
}

#[test]
fn a_trace_that_cannot_be_reduced_gets_an_error_with_a_remedy() {
    let folder = folder_with_trace();
    for (arguments, message) in [
        (
            &["--memory", "1GiB"][..],
            "the trace does not run out of memory: every request succeeds with 1 GiB",
        ),
        (&[], "a trace does not contain the device's memory"),
        (
            &["--memory", "88MiB", "--preserve", "conf-differs"],
            "takes one or two",
        ),
        (
            &["--memory", "88MiB", "--alloc-conf", "max_splt_size_mb:20"],
            "is not a setting of PyTorch",
        ),
        (
            &["--memory", "88MiB", "--preserve", "invariant"],
            "no invariant is violated while the trace is replayed in 88 MiB",
        ),
        (
            &["--memory", "88MiB", "--arm", "caching"],
            "`--arm` and `--any-figures` are for scenarios",
        ),
    ] {
        let failed = harness(
            &[&["shrink", "job.trace"], arguments].concat(),
            folder.path(),
        );
        assert_eq!(failed.status.code(), Some(2));
        assert!(
            text(&failed.stderr).contains(message),
            "{}",
            text(&failed.stderr)
        );
    }
}

#[test]
fn real_programs_that_run_out_of_memory_are_reduced_to_fewer_than_20_operations() {
    let folder = tempfile::tempdir().unwrap();
    let further = ["gt-serve-kv.default", "resnet152-b96-oom"]
        .map(|name| Some((name, snapshot(&format!("{name}.pickle.gz"))?)));
    let own = ["features", "kept-features", "collect-stats"].map(|name| (name, recorded(name)));
    for (name, path) in own.into_iter().chain(further.into_iter().flatten()) {
        let out = format!("{name}.yaml");
        let shrunk = harness(
            &["shrink", path.to_str().unwrap(), "--out", &out],
            folder.path(),
        );
        assert_eq!(shrunk.status.code(), Some(0), "{}", text(&shrunk.stderr));
        let steps = std::fs::read_to_string(folder.path().join(&out))
            .unwrap()
            .lines()
            .filter(|line| line.starts_with("  - "))
            .count();
        assert!(steps < 20, "{name}: {steps}");
        let run = harness(
            &["run", &out, "--device", "sim", "--no-report"],
            folder.path(),
        );
        assert_eq!(run.status.code(), Some(0), "{name}: {}", text(&run.stdout));
    }
}

#[test]
fn advice_on_given_settings_has_the_documented_format() {
    let folder = tempfile::tempdir().unwrap();
    let path = recorded("kept-features");
    let advised = harness(
        &[
            "advise",
            path.to_str().unwrap(),
            "--alloc-conf",
            "max_split_size_mb:128",
            "--only",
            "--format",
            "json",
        ],
        folder.path(),
    );
    assert_eq!(advised.status.code(), Some(0), "{}", text(&advised.stderr));
    let document: Value = serde_json::from_slice(&advised.stdout).unwrap();
    let first = &document["configurations"][0];
    let expected = serde_json::json!({
        "version": 1, "faithful": true, "complete": false, "device": 0, "configurations": [{
        "conf": "max_split_size_mb:128", "oom": false, "oom_event": null,
        "peak_reserved": first["peak_reserved"], "peak_allocated": 1_754_705_920,
        "num_alloc_retries": first["num_alloc_retries"], "num_ooms": 0,
        "device_allocs": document["configurations"][0]["device_allocs"]
    }] });
    assert_eq!(document, expected);
}

/// A recording of two devices. Device 1 has the events of `features`, which ends with an
/// out-of-memory error; device 0 succeeds.
fn two_devices(folder: &Path) {
    let mut snapshot = Snapshot::read(&recorded("features")).unwrap();
    snapshot
        .segments
        .iter_mut()
        .for_each(|segment| segment.device = 1);
    let block = |action| Event {
        action,
        address: 0x7f00_0000_0000,
        size: Bytes::mib(20),
        stream: 0,
        time_us: None,
        stack: StackId::EMPTY,
        extra: ExtraId::NONE,
    };
    let first = [
        Action::SegmentAlloc,
        Action::Alloc,
        Action::FreeRequested,
        Action::FreeCompleted,
        Action::SegmentFree,
    ]
    .map(block);
    snapshot.traces.insert(0, first.into());
    let mut bytes = Vec::new();
    snapshot.write(&mut bytes).unwrap();
    std::fs::write(folder.join("two.pickle"), bytes).unwrap();
}

#[test]
fn of_several_devices_the_one_that_ran_out_of_memory_is_chosen() {
    let folder = tempfile::tempdir().unwrap();
    two_devices(folder.path());
    let run = |arguments: &[&str]| {
        harness(
            &[&[arguments[0], "two.pickle"], &arguments[1..]].concat(),
            folder.path(),
        )
    };
    let about = "This is about device 1, which ran out of memory. `--device` chooses one of 0, 1.";
    let only = ["--only", "--alloc-conf", "max_split_size_mb:128"];
    let advised = run(&[&["advise"][..], &only].concat());
    assert!(advised.status.success(), "{}", text(&advised.stderr));
    let advised = text(&advised.stdout);
    assert!(
        advised.starts_with(&format!("{about}\n\n"))
            && advised.contains("recording ends at the OOM"),
        "{advised}"
    );
    let first = run(&[&["advise", "--device", "0"][..], &only].concat());
    assert!(first.status.success(), "{}", text(&first.stderr));
    let first = text(&first.stdout);
    assert!(
        first.starts_with("This is about device 0.\n\n") && first.contains("1 of 1 allocations"),
        "{first}"
    );
    let first = text(&run(&["advise", "--device", "0"]).stdout);
    assert!(
        first.contains(
            "\n\nIt needs 20 MiB without a change, and no setting of PyTorch saves much.\n"
        ),
        "{first}"
    );
    let json: Value =
        serde_json::from_slice(&run(&[&["advise", "--format", "json"][..], &only].concat()).stdout)
            .unwrap();
    assert_eq!(
        (&json["device"], &json["complete"]),
        (&Value::from(1), &Value::from(false))
    );
    for command in [
        &["shrink", "--out", "small.yaml"][..],
        &["import", "--out", "whole.yaml"],
    ] {
        let done = run(command);
        assert!(
            done.status.success() && text(&done.stderr).starts_with(about),
            "{command:?}: {}",
            text(&done.stderr)
        );
    }
    let whole = std::fs::read_to_string(folder.path().join("whole.yaml")).unwrap();
    assert!(
        whole.contains("Of several devices, it contains device 1."),
        "{whole}"
    );
    let explained = text(&run(&["explain"]).stdout);
    assert!(
        explained.contains("\ntwo.pickle (device 1): out of memory"),
        "{explained}"
    );
    let explained = text(&run(&["explain", "--device", "0"]).stdout);
    assert!(
        explained.starts_with("two.pickle (device 0): ") && !explained.contains("device 1"),
        "{explained}"
    );
    for (command, what) in [
        ("advise", "events of device 2"),
        ("shrink", "events of device 2"),
        ("explain", "device 2"),
    ] {
        let refused = run(&[command, "--device", "2"]);
        let message = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{message}");
        assert!(
            message.contains(&format!("the snapshot does not contain {what}"))
                && message.contains("contains 0, 1"),
            "{message}"
        );
    }
}

#[test]
fn of_several_devices_that_did_not_fail_the_one_with_the_most_memory_is_chosen() {
    let folder = tempfile::tempdir().unwrap();
    let mut snapshot = Snapshot::read(&recorded("streams")).unwrap();
    snapshot
        .segments
        .iter_mut()
        .for_each(|segment| segment.device = 3);
    let of_first = snapshot.traces[0].clone();
    snapshot.traces = vec![
        of_first
            .iter()
            .filter(|event| event.action == Action::Snapshot)
            .copied()
            .collect(),
        vec![],
        vec![],
        of_first,
    ];
    let small = Segment {
        device: 0,
        size: Bytes::mib(2),
        blocks: Vec::new(),
        ..snapshot.segments[0].clone()
    };
    let blocks = Block::free(small.address, small.address + small.size.0)
        .into_iter()
        .collect();
    snapshot.segments.push(Segment { blocks, ..small });
    let mut bytes = Vec::new();
    snapshot.write(&mut bytes).unwrap();
    std::fs::write(folder.path().join("four.pickle"), bytes).unwrap();
    let explained = text(&harness(&["explain", "four.pickle"], folder.path()).stdout);
    assert!(
        explained.contains("\nfour.pickle (device 3): "),
        "{explained}"
    );
    let advised = harness(
        &["advise", "four.pickle", "--only", "--alloc-conf", ""],
        folder.path(),
    );
    let shown = text(&advised.stdout);
    assert!(advised.status.success(), "{}", text(&advised.stderr));
    assert!(!shown.contains("about device 0"), "{shown}");
}

#[test]
fn a_recording_without_requests_gets_no_advice() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, snapshot: &Snapshot| {
        let mut bytes = Vec::new();
        snapshot.write(&mut bytes).unwrap();
        std::fs::write(folder.path().join(name), bytes).unwrap();
    };
    let (address, size, stream, stack, extra) = (
        0x7f00_0000_0000,
        Bytes::mib(20),
        0,
        StackId::EMPTY,
        ExtraId::NONE,
    );
    let with = |state: BlockState, actions: &[Action]| {
        let event = |&action: &Action| Event {
            action,
            address,
            size,
            stream,
            time_us: None,
            stack,
            extra,
        };
        let blocks = vec![Block {
            address,
            size,
            requested: size,
            state,
            stack,
            extra,
        }];
        let (pool, private_pool, expandable) = (PoolKind::Large, MempoolId::DEFAULT, false);
        let segment = Segment {
            device: 0,
            address,
            size,
            stream,
            pool,
            private_pool,
            expandable,
            stack,
            blocks,
            extra,
        };
        Snapshot {
            traces: vec![actions.iter().map(event).collect()],
            segments: vec![segment],
            ..Snapshot::default()
        }
    };
    write(
        "frees.pickle",
        &with(
            BlockState::Inactive,
            &[Action::FreeRequested, Action::FreeCompleted],
        ),
    );
    write(
        "segments.pickle",
        &with(BlockState::Inactive, &[Action::SegmentAlloc]),
    );
    write("nothing.pickle", &with(BlockState::Allocated, &[]));
    write(
        "empty.pickle",
        &Snapshot {
            traces: vec![Vec::new(); 2],
            ..Snapshot::default()
        },
    );
    let none =
        "the recording of device 0 contains no request for memory, so there is nothing to replay";
    for (file, why) in [
        ("frees.pickle", none),
        ("segments.pickle", none),
        (
            "nothing.pickle",
            "the snapshot has segments, but no events to replay",
        ),
        (
            "empty.pickle",
            "the snapshot has neither segments nor events",
        ),
    ] {
        for command in [
            &["advise", file][..],
            &["shrink", file],
            &["import", file, "--out", "x.yaml"],
        ] {
            let refused = harness(command, folder.path());
            let message = text(&refused.stderr)
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
                .replace(" │ ", " ");
            assert_eq!(
                (refused.status.code(), text(&refused.stdout)),
                (Some(2), String::new()),
                "{command:?}: {message}"
            );
            assert!(
                message.contains(&format!("{file}: {why}")),
                "{command:?}: {message}"
            );
        }
        let is_empty = file == "empty.pickle";
        for command in [&["explain", file][..], &["compare", file, file]] {
            let done = harness(command, folder.path());
            assert_eq!(
                done.status.code(),
                Some(if is_empty { 2 } else { 0 }),
                "{command:?}: {}",
                text(&done.stderr)
            );
            let shown = text(&done.stdout) + &text(&done.stderr);
            assert!(
                !shown.contains("0 of 0") && (shown.contains(why) || !is_empty),
                "{command:?}: {shown}"
            );
        }
    }
    // The size of this device is unknown.
    write(
        "one.pickle",
        &with(
            BlockState::Allocated,
            &[Action::SegmentAlloc, Action::Alloc],
        ),
    );
    let advised = text(&harness(&["advise", "-v", "one.pickle"], folder.path()).stdout);
    assert!(
        advised.contains("1 of 1 allocations at the recorded address")
            && !advised.contains("512 GiB"),
        "{advised}"
    );
    assert!(
        advised.contains(
            "not tried: rmm_pool: it reserves half of the device's memory, which is unknown\n"
        ),
        "{advised}"
    );
}

/// 44 blocks of 1.5 MiB are live in the only segment, and the device has no more memory. The driver
/// needs 2 MiB for each.
#[test]
fn settings_that_cannot_be_tried_are_listed_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let mut snapshot = Snapshot {
        traces: vec![Vec::new()],
        ..Snapshot::default()
    };
    let (address, size, stream, stack, extra) = (
        0x7f00_0000_0000,
        Bytes::mib(66),
        0,
        StackId::EMPTY,
        ExtraId::NONE,
    );
    let block = |number: u64| {
        let (size, state) = (Bytes::kib(1536), BlockState::Allocated);
        Block {
            address: address + number * size.0,
            size,
            requested: size,
            state,
            stack,
            extra,
        }
    };
    let blocks = (0..44).map(block).collect();
    let (pool, private_pool, expandable) = (PoolKind::Large, MempoolId::DEFAULT, false);
    snapshot.segments.push(Segment {
        device: 0,
        address,
        size,
        stream,
        pool,
        private_pool,
        expandable,
        stack,
        blocks,
        extra,
    });
    snapshot.traces[0].push(Event {
        action: Action::Oom,
        address: 0,
        size: Bytes::mib(2),
        stream,
        time_us: None,
        stack,
        extra,
    });
    let mut bytes = Vec::new();
    snapshot.write(&mut bytes).unwrap();
    std::fs::write(folder.path().join("late.pickle"), bytes).unwrap();
    let advised = harness(&["advise", "-v", "late.pickle"], folder.path());
    let shown = text(&advised.stdout);
    assert_eq!(advised.status.code(), Some(0), "{}", text(&advised.stderr));
    let reason = "not tried: direct: the blocks that were live before the recording do not fit in \
         66 MiB with this allocator";
    assert!(
        shown.contains(reason) && shown.contains("\n(no settings) and "),
        "{shown}"
    );
    assert!(
        shown.contains(
            "A replay of the recording confirms this: 1 of 1 refused requests as recorded.\n"
        ),
        "{shown}"
    );
    let json: Value = serde_json::from_slice(
        &harness(
            &["advise", "late.pickle", "--format", "json"],
            folder.path(),
        )
        .stdout,
    )
    .unwrap();
    let not_tried = json["not_tried"].as_array().unwrap();
    assert!(
        not_tried.iter().any(|setting| setting["conf"] == "direct"),
        "{json:#}"
    );
}

#[test]
fn expandable_segments_are_not_recommended_if_they_are_the_cause() {
    let folder = tempfile::tempdir().unwrap();
    let path = recorded("collect-stats");
    let advised = harness(
        &["advise", path.to_str().unwrap(), "--format", "json"],
        folder.path(),
    );
    let document: Value = serde_json::from_slice(&advised.stdout).unwrap();
    let recommended = document["recommended"].as_str().unwrap();
    assert!(
        !recommended.contains("expandable_segments"),
        "{recommended}"
    );
    let shown = text(&harness(&["advise", path.to_str().unwrap()], folder.path()).stdout);
    assert!(
        shown.starts_with(
            "It runs past the point where the recording ends in 3 GiB without any settings: \
             expandable_segments:True is the cause."
        ),
        "{shown}"
    );
}

#[test]
fn changes_of_the_program_are_listed_and_written_as_scenarios() {
    let folder = tempfile::tempdir().unwrap();
    let path = recorded("kept-features");
    let arguments = [
        "advise",
        path.to_str().unwrap(),
        "--explain-advice",
        "1",
        "--out",
        "first.yaml",
    ];
    let advised = harness(&arguments, folder.path());
    assert_eq!(advised.status.code(), Some(0), "{}", text(&advised.stderr));
    let shown = text(&advised.stdout);
    assert!(
        shown.contains(
            "  1. allocating the 21 blocks that extract_features.py:28 main keeps \
             first, in order of falling size"
        ),
        "{shown}"
    );
    assert!(
        shown.contains(
            "a separate pool (torch.cuda.MemPool) for the 21 blocks of extract_features.py:28 main"
        ),
        "{shown}"
    );
    let run = harness(
        &["run", "first.yaml", "--device", "sim", "--no-report"],
        folder.path(),
    );
    assert_eq!(run.status.code(), Some(0), "{}", text(&run.stdout));
    let none = harness(
        &[
            "advise",
            path.to_str().unwrap(),
            "--explain-advice",
            "99",
            "--out",
            "none.yaml",
        ],
        folder.path(),
    );
    assert_eq!(none.status.code(), Some(2));
}

#[test]
fn a_real_program_becomes_a_scenario_that_passes() {
    let folder = tempfile::tempdir().unwrap();
    let path = recorded("collect-stats");
    let imported = harness(
        &[
            "import",
            path.to_str().unwrap(),
            "--out",
            "scenarios/stats.yaml",
        ],
        folder.path(),
    );
    assert_eq!(
        imported.status.code(),
        Some(0),
        "{}",
        text(&imported.stderr)
    );
    assert!(
        text(&imported.stderr).contains("the program runs out of memory"),
        "{}",
        text(&imported.stderr)
    );
    assert!(folder.path().join("scenarios/stats.trace.gz").exists());
    let run = harness(
        &["run", "scenarios", "--device", "sim", "--no-report"],
        folder.path(),
    );
    assert_eq!(run.status.code(), Some(0), "{}", text(&run.stdout));
    let large = harness(
        &[
            "import",
            path.to_str().unwrap(),
            "--memory",
            "192GiB",
            "--out",
            "scenarios/large.yaml",
        ],
        folder.path(),
    );
    assert_eq!(large.status.code(), Some(0), "{}", text(&large.stderr));
    assert!(
        text(&large.stderr).contains("every request succeeds"),
        "{}",
        text(&large.stderr)
    );
    let refused = harness(
        &[
            "run",
            path.to_str().unwrap(),
            "--device",
            "sim",
            "--no-report",
        ],
        folder.path(),
    );
    assert_eq!(refused.status.code(), Some(1), "{}", text(&refused.stdout));
}

#[test]
fn advice_needs_a_faithful_replay_unless_it_is_forced() {
    let folder = tempfile::tempdir().unwrap();
    let mut altered = Snapshot::read(&recorded("features")).unwrap();
    let last = altered.traces[0]
        .iter()
        .rposition(|event| event.action == Action::Alloc)
        .unwrap();
    altered.traces[0][last].address += 512;
    let mut bytes = Vec::new();
    altered.write(&mut bytes).unwrap();
    std::fs::write(folder.path().join("altered.pickle"), bytes).unwrap();
    let refused = harness(&["advise", "altered.pickle"], folder.path());
    let message = text(&refused.stderr);
    assert_eq!(
        (refused.status.code(), text(&refused.stdout).as_str()),
        (Some(1), ""),
        "{message}"
    );
    assert!(
        message
            .contains("no advice: a replay with the recorded settings differs from the recording"),
        "{message}"
    );
    assert!(
        message.contains(&format!("First divergence at event {last}")),
        "{message}"
    );
    let document: Value = serde_json::from_slice(
        &harness(
            &["advise", "altered.pickle", "--format", "json"],
            folder.path(),
        )
        .stdout,
    )
    .unwrap();
    assert_eq!(
        (&document["faithful"], &document["configurations"]),
        (&Value::Bool(false), &Value::Array(Vec::new()))
    );
    let forced = harness(&["advise", "altered.pickle", "--force"], folder.path());
    assert_eq!(forced.status.code(), Some(0), "{}", text(&forced.stderr));
    assert!(
        text(&forced.stdout).contains("NOT CONFIRMED: a replay differs from the recording."),
        "{}",
        text(&forced.stdout)
    );
}

/// The program of `PINNED` in the log format of RMM.
const RMM_LOG: &str = "Thread,Time,Action,Pointer,Size,Stream
7,10:00:00.000001,allocate,0x7f0000000000,41943040,0x1
7,10:00:00.000002,free,0x7f0000000000,41943040,0x1
7,10:00:00.000003,allocate,0x7f0000000000,4194304,0x1
7,10:00:00.000004,allocate,0x7f0004000000,67108864,0x1
";

#[test]
fn traces_and_rmm_logs_are_explained_by_their_replay() {
    let folder = folder_with_trace();
    std::fs::write(folder.path().join("rmm.csv"), RMM_LOG).unwrap();
    for (file, site) in [
        ("job.trace", "model.py:20"),
        ("rmm.csv", "rmm.csv thread 7, stream 0x1"),
    ] {
        let explained = harness(
            &["explain", file, "--memory", "88MiB", "--format", "json"],
            folder.path(),
        );
        assert_eq!(
            explained.status.code(),
            Some(0),
            "{}",
            text(&explained.stderr)
        );
        let document: Value = serde_json::from_slice(&explained.stdout).unwrap();
        assert_eq!(
            (&document["device_total"], &document["why"][0]),
            (&Value::from(88 << 20), &Value::from("fragmented")),
            "{document:#}"
        );
        assert!(text(&explained.stdout).contains(site), "{document:#}");
        let without = harness(&["explain", file], folder.path());
        assert_eq!(without.status.code(), Some(2));
        let message = text(&without.stderr);
        assert!(
            message.contains("does not contain the device's memory")
                && message.contains("--memory"),
            "{message}"
        );
    }
}

/// 96 MiB are free in total, in two parts, and 90 MiB are requested.
#[test]
fn explain_shrink_and_advise_name_one_cause_of_a_nearly_full_device() {
    const MIB: u64 = 1 << 20;
    let folder = tempfile::tempdir().unwrap();
    let trace = format!(
        "a 1 {} 0\na 2 {} 0\na 3 {} 0\nf 3\na 4 {} 0\n",
        900 * MIB,
        4 * MIB,
        16 * MIB,
        90 * MIB
    );
    std::fs::write(folder.path().join("full.trace"), trace).unwrap();
    let run = |command: &str, more: &[&str]| {
        harness(
            &[&[command, "full.trace", "--memory", "1000MiB"], more].concat(),
            folder.path(),
        )
    };
    let told = "Nearly all memory is in use, and the rest is fragmented: ";
    let explained: Value =
        serde_json::from_slice(&run("explain", &["--format", "json"]).stdout).unwrap();
    assert!(
        explained["headline"].as_str().unwrap().starts_with(told),
        "{explained:#}"
    );
    assert_eq!(
        explained["why"],
        Value::Array(vec![Value::from("fragmented")])
    );
    let advised: Value =
        serde_json::from_slice(&run("advise", &["--format", "json"]).stdout).unwrap();
    assert!(
        advised["headline"].as_str().unwrap().starts_with(told),
        "{advised:#}"
    );
    let shrunk = run("shrink", &["--out", "small.yaml"]);
    let message = text(&shrunk.stderr);
    assert!(
        message.contains(
            "enough memory is free in total, but it is fragmented: no free block is large enough"
        ),
        "{message}"
    );
    assert!(
        std::fs::read_to_string(folder.path().join("small.yaml"))
            .unwrap()
            .contains("oom: fragmented"),
        "{message}"
    );
}

#[test]
fn traces_and_rmm_logs_are_advised_on_to_their_end() {
    let folder = folder_with_trace();
    std::fs::write(folder.path().join("rmm.csv"), RMM_LOG).unwrap();
    for file in ["job.trace", "rmm.csv"] {
        let advised = harness(&["advise", file, "--memory", "88MiB"], folder.path());
        let shown = text(&advised.stdout);
        assert_eq!(advised.status.code(), Some(0), "{}", text(&advised.stderr));
        assert!(
            shown.starts_with("It runs in 88 MiB with")
                && shown.contains("expandable_segments:True"),
            "{shown}"
        );
        assert!(
            shown.contains("there is no recording to compare them with"),
            "{shown}"
        );
        let without = harness(&["advise", file], folder.path());
        assert_eq!(without.status.code(), Some(2));
        assert!(
            text(&without.stderr).contains("does not contain the device's memory"),
            "{}",
            text(&without.stderr)
        );
    }
}

#[test]
fn an_option_reads_no_named_pipe_and_no_device() {
    let folder = tempfile::tempdir().unwrap();
    for pipe in ["pipe.tsv", "pipe.so"] {
        let made = Command::new("mkfifo")
            .arg(folder.path().join(pipe))
            .status()
            .unwrap();
        assert!(made.success());
    }
    for endless in ["endless.tsv", "endless.so"] {
        std::os::unix::fs::symlink("/dev/zero", folder.path().join(endless)).unwrap();
    }
    let of_exec =
        |option: &str, value: &str| ["exec", option, value, "--", "true"].map(str::to_owned);
    let scenario = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/leak_check.yaml");
    let library = |path: &str| {
        let allocator = format!("library(path:{path},alloc:m,free:f)");
        [
            "run",
            &scenario.to_string_lossy(),
            "--allocator",
            &allocator,
        ]
        .map(str::to_owned)
    };
    for (name, is) in [
        ("pipe", "this is a named pipe"),
        ("endless", "this is a device"),
    ] {
        let [table, object] = ["tsv", "so"].map(|ending| format!("./{name}.{ending}"));
        let commands: [Vec<String>; 5] = [
            of_exec("--nccl-memory", &table).into(),
            of_exec("--cudnn-workspace", &table).into(),
            of_exec("--cudnn-workspace", &object).into(),
            of_exec("--baseline", &table).into(),
            library(&object).into(),
        ];
        for command in commands {
            let arguments: Vec<&str> = command.iter().map(String::as_str).collect();
            let ran = harness(&arguments, folder.path());
            assert!(
                ran.status.code() == Some(2) && text(&ran.stderr).contains(is),
                "{command:?}: {ran:?}"
            );
        }
    }
}
