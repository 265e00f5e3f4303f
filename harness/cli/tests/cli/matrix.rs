//! `harness exec --matrix`: rows of many runs, over interruptions, shards and launchers.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::{fs, thread, time::Duration};

use serde_json::Value;
use tempfile::TempDir;

/// A command in this folder.
fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
    command
        .args(arguments)
        .current_dir(folder)
        .env_remove("CARGO")
        .env("NO_COLOR", "1");
    command
}

/// Runs a command to its end. Returns the exit code and all output.
fn harness(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command(folder, arguments).output().unwrap();
    let text = [stdout, stderr].concat();
    (status.code(), String::from_utf8_lossy(&text).into_owned())
}

/// A folder with a matrix of 24 runs, each of which appends its number to `log`.
fn matrix() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(
        folder.path().join("run.sh"),
        "#!/bin/sh\necho $1 >> log\nexit $2\n",
    )
    .unwrap();
    fs::set_permissions(
        folder.path().join("run.sh"),
        fs::Permissions::from_mode(0o755),
    )
    .unwrap();
    let numbers: Vec<String> = (0..12).map(|number| number.to_string()).collect();
    let matrix = format!(
        "programs: {{ a: './run.sh a{{n}} {{code}}', b: './run.sh b{{n}} {{code}}' }}\ncode: 0\n\
         n: [{}]\n",
        numbers.join(", ")
    );
    fs::write(folder.path().join("runs.yaml"), matrix).unwrap();
    folder
}

/// The rows of a file, by the program and its number.
fn rows(folder: &Path, file: &str) -> BTreeMap<String, Value> {
    let text = fs::read(folder.join(file)).unwrap_or_default();
    let mut rows = BTreeMap::new();
    for line in text.split(|byte| *byte == b'\n').skip(1) {
        if let Ok(row) = serde_json::from_slice::<Value>(line) {
            let name = format!("{} {}", row["program"], row["values"]["n"]).replace('"', "");
            assert_eq!(
                rows.insert(name.clone(), row),
                None,
                "{name} is there twice"
            );
        }
    }
    rows
}

/// Waits until some rows are there, and then sends a signal.
fn interrupt(mut child: Child, folder: &Path, rows_there: usize, signal: &str) -> Option<i32> {
    while rows(folder, "runs.jsonl").len() < rows_there && child.try_wait().unwrap().is_none() {
        thread::sleep(Duration::from_millis(5));
    }
    let pid = child.id().to_string();
    Command::new("kill").args([signal, &pid]).status().unwrap();
    child.wait().unwrap().code()
}

#[test]
fn killed_and_interrupted_runs_continue_and_no_row_is_lost_or_repeated() {
    let folder = matrix();
    let folder = folder.path();
    let start = || {
        let mut command = command(folder, &["exec", "--matrix", "runs.yaml", "--jobs", "2"]);
        command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    for rows_there in [1, 4, 8] {
        interrupt(start(), folder, rows_there, "-KILL");
    }
    let file = folder.join("runs.jsonl");
    let mut torn = fs::read(&file).unwrap();
    torn.extend(b"{\"version\":1,\"program\":\"a\",\"val");
    fs::write(&file, torn).unwrap();
    let before = rows(folder, "runs.jsonl");
    // A further row shows that the process handles the signal.
    let code = interrupt(start(), folder, before.len() + 1, "-INT");
    assert!(
        code == Some(130) || rows(folder, "runs.jsonl").len() == 24,
        "{code:?}"
    );
    let (code, text) = harness(folder, &["exec", "--matrix", "runs.yaml"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("24 of 24 runs ended with exit code 0."),
        "{text}"
    );
    let after = rows(folder, "runs.jsonl");
    assert_eq!(after.len(), 24);
    for (name, row) in before {
        assert_eq!(after[&name], row, "a row that was there is kept");
    }
    // A run of a killed process repeats, but no run whose row is there.
    let log = fs::read_to_string(folder.join("log")).unwrap();
    let (code, _) = harness(folder, &["exec", "--matrix", "runs.yaml"]);
    assert_eq!(code, Some(0));
    assert_eq!(fs::read_to_string(folder.join("log")).unwrap(), log);
    // Another program is another run.
    fs::write(folder.join("run.sh"), "#!/bin/sh\nexit 3\n").unwrap();
    let (code, text) = harness(folder, &["exec", "--matrix", "runs.yaml"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("0 of 24 runs ended with exit code 0."),
        "{text}"
    );
    assert_eq!(rows(folder, "runs.jsonl").len(), 24);
}

#[test]
fn a_merge_has_each_row_once_and_names_those_that_are_missing() {
    let folder = matrix();
    let folder = folder.path();
    for (shard, file) in [("1/3", "1.jsonl"), ("2/3", "2.jsonl"), ("3/3", "3.jsonl")] {
        let arguments = [
            "exec",
            "--matrix",
            "runs.yaml",
            "--shard",
            shard,
            "--rows",
            file,
        ];
        let (code, text) = harness(folder, &arguments);
        assert_eq!(code, Some(0), "{text}");
        assert_eq!(rows(folder, file).len(), 8);
    }
    let merge = |files: &[&str]| {
        let arguments = [&["report", "merge"], files, &["-o", "all.jsonl"]].concat();
        harness(folder, &arguments)
    };
    let (code, text) = merge(&["1.jsonl", "3.jsonl", "2.jsonl"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("24 of 24 runs"), "{text}");
    assert_eq!(rows(folder, "all.jsonl").len(), 24);
    let (code, text) = merge(&["1.jsonl", "3.jsonl"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(
        text.contains("missing: 8 of 24 rows: `a code=0 n=1`, "),
        "{text}"
    );
    // The merged rows are those of the whole matrix.
    let log = fs::read_to_string(folder.join("log")).unwrap();
    let whole = ["exec", "--matrix", "runs.yaml", "--rows", "all.jsonl"];
    assert_eq!(harness(folder, &whole).0, Some(0));
    assert_eq!(fs::read_to_string(folder.join("log")).unwrap(), log);
    let other = fs::read_to_string(folder.join("2.jsonl")).unwrap();
    let changed = other.replace("\"took_ms\":", "\"took_ms\":1");
    fs::write(folder.join("4.jsonl"), changed).unwrap();
    let (_, text) = merge(&["1.jsonl", "2.jsonl", "3.jsonl", "4.jsonl"]);
    assert!(
        text.contains("2.jsonl and 4.jsonl differ in the row `a code=0 n=1`"),
        "{text}"
    );
    fs::write(folder.join("5.jsonl"), other.replace("code: 0", "code: 1")).unwrap();
    let (_, text) = merge(&["1.jsonl", "5.jsonl", "3.jsonl"]);
    assert!(
        text.contains("1.jsonl and 5.jsonl have different matrices"),
        "{text}"
    );
    let head_end = other.find('\n').unwrap() + 1;
    let (head, rows) = other.split_at(head_end);
    let newer = |text: &str| text.replacen("\"version\":1", "\"version\":2", 1);
    for (content, expected) in [
        (
            newer(&other),
            "first.jsonl: a newer harness wrote these rows",
        ),
        (
            head.to_owned() + &newer(rows),
            "first.jsonl: a newer harness wrote these rows",
        ),
        (String::new(), "first.jsonl: there are no rows"),
        (
            head[..head_end / 2].to_owned(),
            "first.jsonl: this is no file of rows",
        ),
    ] {
        fs::write(folder.join("first.jsonl"), content).unwrap();
        let (code, text) = merge(&["first.jsonl", "1.jsonl", "3.jsonl"]);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn a_merge_into_parquet_has_all_rows_of_a_matrix_and_no_other_reports() {
    let folder = matrix();
    let folder = folder.path();
    let arguments = ["exec", "--matrix", "runs.yaml"];
    assert_eq!(harness(folder, &arguments).0, Some(0));
    let merge = |file: &str| harness(folder, &["report", "merge", file, "-o", "all.parquet"]);
    let (code, text) = merge("runs.jsonl");
    let columns = fs::read(folder.join("all.parquet")).ok();
    if cfg!(feature = "parquet") {
        assert!(code == Some(0) && text.contains("24 of 24 runs"), "{text}");
        let columns = columns.unwrap();
        assert!(columns.starts_with(b"PAR1") && columns.ends_with(b"PAR1"));
    } else {
        assert!(code == Some(2) && columns.is_none(), "{text}");
        assert!(
            text.contains("this harness is built without Parquet"),
            "{text}"
        );
    }
    let (code, text) = merge("runs.yaml");
    assert_eq!(code, Some(2), "{text}");
    assert!(
        text.contains("only rows of `harness exec --matrix`"),
        "{text}"
    );
}

#[test]
fn files_that_the_rows_would_destroy_are_refused_and_unchanged() {
    let folder = matrix();
    let folder = folder.path();
    std::os::unix::fs::symlink("runs.yaml", folder.join("link")).unwrap();
    fs::write(folder.join("notes"), "no rows, and no end of the line").unwrap();
    fs::write(folder.join("runs.jsonl"), "{\"version\":1").unwrap();
    let cases = [
        (["--rows", "notes"], "notes: this is no file of rows"),
        (
            ["--rows", "link"],
            "link: the rows would replace the matrix",
        ),
        (
            ["--rows", "./runs.yaml"],
            "the rows would replace the matrix",
        ),
        (
            ["--compare", "./runs.jsonl"],
            "./runs.jsonl: the rows would replace EARLIER",
        ),
    ];
    let files = ["notes", "runs.yaml", "runs.jsonl"];
    let content = || files.map(|file| fs::read(folder.join(file)).unwrap());
    let before = content();
    for (options, expected) in cases {
        let arguments = [&["exec", "--matrix", "runs.yaml"], &options[..]].concat();
        let (code, text) = harness(folder, &arguments);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains(expected), "{text}");
        assert_eq!(content(), before, "{options:?}");
    }
}

#[test]
fn a_launcher_makes_each_run_and_one_without_figures_is_a_failed_row_that_runs_again() {
    let folder = matrix();
    let folder = folder.path();
    let launcher = folder.join("launch");
    // Runs the command in another folder, except that of one row.
    let script = "#!/bin/sh\ncase \"$*\" in *' a7 '*) echo no node is free >&2; exit 5;; esac\n\
        echo \"$1\" >> launched\nshift\nexec \"$@\"\n";
    fs::write(&launcher, script).unwrap();
    fs::set_permissions(&launcher, fs::Permissions::from_mode(0o755)).unwrap();
    let start = ["exec", "--matrix", "runs.yaml", "--launch", "./launch -n1"];
    let (code, text) = harness(folder, &start);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("23 of 24 runs ended with exit code 0."),
        "{text}"
    );
    for (words, why) in [("", "expected a command"), ("a 'b c'", "quotes")] {
        let (code, text) = harness(
            folder,
            &["exec", "--matrix", "runs.yaml", "--launch", words],
        );
        assert!(code == Some(2) && text.contains(why), "{text}");
    }
    let failed = &rows(folder, "runs.jsonl")["a 7"];
    assert_eq!(
        failed["failure"],
        "`./launch` ended with exit code 5 and no figures: no node is free"
    );
    assert_eq!(failed["exit_code"], Value::Null);
    let launched = fs::read_to_string(folder.join("launched")).unwrap();
    assert_eq!(launched, "-n1\n".repeat(23));
    fs::write(&launcher, "#!/bin/sh\nshift\nexec \"$@\"\n").unwrap();
    let (code, text) = harness(folder, &start);
    assert_eq!(code, Some(0), "{text}");
    let log = fs::read_to_string(folder.join("log")).unwrap();
    assert_eq!(log.lines().count(), 24);
    let left = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    assert_eq!(
        left.filter(|name| name.to_string_lossy().starts_with('.'))
            .count(),
        0
    );
}

#[test]
fn a_run_that_its_launcher_does_not_end_stops_with_the_matrix() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let program = "touch started; exec sleep 100";
    let matrix = format!("programs: {{ wait: [sh, -c, '{program}'] }}\n");
    fs::write(folder.join("runs.yaml"), matrix).unwrap();
    // This test starts the command that the launcher hands over.
    let script = "#!/bin/sh\nprintf '%s\\n' \"$@\" > new && mv new queue && exec sleep 100\n";
    let launcher = folder.join("launch");
    fs::write(&launcher, script).unwrap();
    fs::set_permissions(&launcher, fs::Permissions::from_mode(0o755)).unwrap();
    let start = ["exec", "--matrix", "runs.yaml", "--launch", "./launch"];
    let mut start = command(folder, &start);
    let mut matrix = start.stderr(Stdio::null()).spawn().unwrap();
    let appears = |file: &str| {
        while !folder.join(file).exists() {
            thread::sleep(Duration::from_millis(5));
        }
    };
    appears("queue");
    let words = fs::read_to_string(folder.join("queue")).unwrap();
    let words: Vec<&str> = words.lines().collect();
    let mut left = Command::new(words[0]);
    let mut left = left.args(&words[1..]).current_dir(folder).spawn().unwrap();
    appears("started");
    let pid = matrix.id().to_string();
    Command::new("kill").args(["-INT", &pid]).status().unwrap();
    assert_eq!(matrix.wait().unwrap().code(), Some(130));
    assert_eq!(left.wait().unwrap().code(), Some(130));
}

#[test]
fn peaks_that_are_larger_than_before_are_listed() {
    let folder = matrix();
    let folder = folder.path();
    assert_eq!(
        harness(folder, &["exec", "--matrix", "runs.yaml"]).0,
        Some(0)
    );
    let text = fs::read_to_string(folder.join("runs.jsonl")).unwrap();
    let later = text.replacen("\"peak_reserved\":0", "\"peak_reserved\":3145728", 1);
    fs::write(folder.join("runs.jsonl"), later).unwrap();
    fs::write(folder.join("before.jsonl"), text).unwrap();
    let compare = ["exec", "--matrix", "runs.yaml", "--compare", "before.jsonl"];
    let (code, text) = harness(folder, &compare);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("24 of 24 runs ended with exit code 0; 1 peak larger"),
        "{text}"
    );
    assert!(
        text.contains("a n=0: peak reserved is 3 MiB more: 3 MiB instead of 0 B"),
        "{text}"
    );
    let without = [
        "exec",
        "--matrix",
        "runs.yaml",
        "--compare",
        "nothing.jsonl",
    ];
    assert_eq!(harness(folder, &without).0, Some(2));
    for unused in [&["--gpu", "h200"][..], &["--expect", "recovers"]] {
        let arguments = [&["exec", "--matrix", "runs.yaml"], unused].concat();
        assert_eq!(harness(folder, &arguments).0, Some(2), "{unused:?}");
    }
}
