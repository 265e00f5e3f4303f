//! Tests of `harness explain` and `harness compare`: their output, and their errors for wrong files
//! and options.

use std::path::{Path, PathBuf};
use std::{fs, os::unix::process::CommandExt, process::Command};

use serde_json::Value;
use tempfile::TempDir;

/// A recording that is part of the project.
fn recorded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../snapshot/explain/tests/snapshots")
        .join(format!("{name}.pickle.gz"))
}

/// Returns the exit code, standard output, and standard error without its line breaks.
fn harness(folder: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
    command
        .arg0("harness")
        .args(arguments)
        .current_dir(folder)
        .env_remove("CARGO")
        .env_remove("NO_COLOR");
    let output = command.output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap().replace('│', " ");
    let err = err.split_whitespace().collect::<Vec<_>>().join(" ");
    (
        output.status.code(),
        String::from_utf8(output.stdout).unwrap(),
        err,
    )
}

/// A folder with the snapshots of three ranks. The second rank ran out of memory.
fn ranks() -> TempDir {
    let folder = TempDir::new().unwrap();
    for (rank, name) in [(0, "streams"), (2, "features"), (10, "streams")] {
        fs::copy(
            recorded(name),
            folder.path().join(format!("rank{rank}.pickle.gz")),
        )
        .unwrap();
    }
    fs::write(folder.path().join("notes.txt"), "no snapshot").unwrap();
    folder
}

#[test]
fn the_json_of_one_snapshot_adds_up_to_the_memory_given() {
    let folder = TempDir::new().unwrap();
    let file = recorded("features").display().to_string();
    let (code, out, err) = harness(
        folder.path(),
        &["explain", &file, "--memory", "2GiB", "--format", "json"],
    );
    assert_eq!((code, err.as_str()), (Some(0), ""));
    let document: Value = serde_json::from_str(&out).unwrap();
    let sum: u64 = document["causes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|cause| cause["bytes"].as_u64().unwrap())
        .sum();
    assert_eq!(
        (document["device_total"].as_u64(), sum),
        (Some(2 << 30), 2 << 30)
    );
    assert_eq!(document["why"][0], "fragmented");
}

#[test]
fn a_folder_of_ranks_shows_and_explains_the_failed_rank() {
    let folder = ranks();
    let (code, out, _) = harness(folder.path(), &["explain", "."]);
    assert_eq!(code, Some(0));
    assert!(
        out.contains("1 of 3 snapshots ends with an out-of-memory error: ./rank2.pickle.gz."),
        "{out}"
    );
    let rows = out
        .lines()
        .filter(|line| line.starts_with("./rank") && !line.contains(": "));
    let rows: Vec<Vec<&str>> = rows
        .map(|row| row.split_whitespace().take(2).collect())
        .collect();
    assert_eq!(
        rows,
        [
            ["./rank0.pickle.gz", "well"],
            ["./rank2.pickle.gz", "out"],
            ["./rank10.pickle.gz", "well"]
        ],
        "{out}"
    );
    assert!(
        out.contains("./rank2.pickle.gz: out of memory, after event 1883"),
        "the one that failed is shown in full: {out}"
    );
}

#[test]
fn what_can_be_read_is_explained_although_another_file_cannot() {
    let folder = ranks();
    fs::write(folder.path().join("rank3.pickle"), b"\x80\x04}").unwrap();
    let (code, out, err) = harness(folder.path(), &["explain", "."]);
    assert_eq!(code, Some(2), "{err}");
    assert!(
        out.contains("1 of 3 snapshots") && err.contains("rank3.pickle: is truncated"),
        "{out}{err}"
    );
}

#[test]
fn a_markdown_file_has_a_picture_in_its_folder() {
    let folder = TempDir::new().unwrap();
    let file = recorded("features").display().to_string();
    let (code, out, err) = harness(
        folder.path(),
        &[
            "explain",
            &file,
            "--format",
            "markdown",
            "--out",
            "memory.md",
        ],
    );
    assert_eq!((code, out.as_str(), err.as_str()), (Some(0), "", ""));
    assert!(
        fs::read_to_string(folder.path().join("memory.md"))
            .unwrap()
            .contains("](memory.svg)")
    );
    assert!(
        fs::read_to_string(folder.path().join("memory.svg"))
            .unwrap()
            .starts_with("<svg")
    );
    let (_, printed, _) = harness(folder.path(), &["explain", &file, "--format", "markdown"]);
    assert!(
        printed.starts_with("# Where the memory was") && !printed.contains(".svg"),
        "{printed}"
    );
}

#[test]
fn errors_for_wrong_files_and_options_contain_advice() {
    let folder = TempDir::new().unwrap();
    let file = recorded("streams").display().to_string();
    fs::write(
        folder.path().join("code.pickle"),
        b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    )
    .unwrap();
    fs::write(folder.path().join("weights.pt"), b"PK\x03\x04").unwrap();
    fs::write(folder.path().join("job.trace"), "a 1 1024 0\nf 1\n").unwrap();
    fs::write(folder.path().join("empty.pickle"), b"\x80\x04].").unwrap();
    assert!(
        Command::new("mkfifo")
            .arg(folder.path().join("pipe.pickle"))
            .status()
            .unwrap()
            .success()
    );
    std::os::unix::fs::symlink("/dev/zero", folder.path().join("endless.pickle")).unwrap();
    let is_pipe = "pipe.pickle: cannot be read: this is a named pipe, not a file";
    for (arguments, is) in [
        (
            &["explain", "nothing.pickle"][..],
            "nothing.pickle: there is no such file",
        ),
        (&["explain", "pipe.pickle"], is_pipe),
        (&["explain", "."], is_pipe),
        (
            &["explain", "endless.pickle"],
            "endless.pickle: cannot be read: this is a device, not a file",
        ),
        (&["advise", "pipe.pickle"], is_pipe),
        (&["compare", "pipe.pickle", &file], is_pipe),
        (&["import", "pipe.pickle", "--out", "x.yaml"], is_pipe),
        (&["shrink", "pipe.pickle"], is_pipe),
        (&["explain", "code.pickle"], "calls code at byte"),
        (
            &["explain", "weights.pt"],
            "a zip file, as torch.save() writes it",
        ),
        (
            &["explain", "job.trace"],
            "a trace does not contain the device's memory",
        ),
        (
            &["compare", "job.trace", "job.trace"],
            "this is an allocation trace, not a memory snapshot",
        ),
        (
            &["explain", "empty.pickle"],
            "the snapshot has neither segments nor events",
        ),
        (&["explain", "."], "code.pickle: calls code at byte"),
        (
            &["explain", &file, "--memory", "1GiB"],
            "the device's memory cannot be 1 GiB: the snapshot shows 8.30 GiB",
        ),
        (
            &["explain", &file, "--at", "oom"],
            "no request failed in the recording of device 0: use `peak` or `end`",
        ),
        (
            &["explain", &file, "--at", "2368"],
            "event 2368 does not exist: the recording of device 0 has 2368 events",
        ),
        (
            &["explain", &file, "--at", "noon"],
            "a moment is `oom`, `peak`, `end`, or the index of an event",
        ),
        (&["compare", &file, "code.pickle"], "calls code at byte"),
        (
            &["compare", &file, &file, "--device", "3"],
            "the snapshot does not contain device 3",
        ),
    ] {
        let (code, out, err) = harness(folder.path(), arguments);
        assert!(
            code == Some(2) && out.is_empty() && err.contains(is),
            "{arguments:?}: {code:?} {out}{err}"
        );
    }
    let bare = TempDir::new().unwrap();
    let (code, _, err) = harness(bare.path(), &["explain", "."]);
    assert!(
        code == Some(2) && err.contains("there is no snapshot in this folder"),
        "{err}"
    );
}

#[test]
fn two_snapshots_are_compared_for_people_and_for_programs() {
    let folder = TempDir::new().unwrap();
    let [a, b] = ["features", "collect-stats"].map(|name| recorded(name).display().to_string());
    let (code, out, _) = harness(folder.path(), &["compare", &a, &b]);
    assert!(
        code == Some(0) && out.contains("Peak reserved from 1.79 GiB to 2.48 GiB (+38.3 %)"),
        "{out}"
    );
    let (_, json, _) = harness(folder.path(), &["compare", &a, &b, "--format", "json"]);
    let document: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        document["before"]["peak_reserved"].as_u64(),
        Some(1_927_282_688)
    );
    assert_eq!(document["sites"][0]["before"].as_u64(), Some(0));
}

#[test]
fn what_runs_and_benchmark_runs_leave_is_compared_by_another_command_that_is_named() {
    let folder = TempDir::new().unwrap();
    for (name, file, what) in [
        ("runs", "records.json", "a run"),
        ("nightly", "benchmark.json", "a benchmark run"),
    ] {
        fs::create_dir(folder.path().join(name)).unwrap();
        fs::write(folder.path().join(name).join(file), "{}").unwrap();
        let file = format!("{name}/{file}");
        for given in [[name, name], [file.as_str(), file.as_str()]] {
            let (code, out, err) = harness(folder.path(), &["compare", given[0], given[1]]);
            assert_eq!((code, out.as_str()), (Some(2), ""), "{err}");
            assert!(
                err.contains(&format!(
                    "{}: this is the record of {what}, not a memory snapshot",
                    given[0]
                )),
                "{err}"
            );
            // Paths may contain line breaks too.
            let without_spaces = |text: &str| text.split_whitespace().collect::<String>();
            let command = format!("`harness report compare {} {}`", given[0], given[1]);
            assert!(
                without_spaces(&err).contains(&without_spaces(&command)),
                "{err}"
            );
        }
    }
}
