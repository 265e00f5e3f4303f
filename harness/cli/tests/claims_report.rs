//! The report in reports/claims is what this build makes of scenarios/claims with torch 2.11.0 on the simulated device, byte for byte.
//!
//! The Python with torch is named by HARNESS_TEST_PYTHON; without it nothing is compared. `UPDATE=1 cargo test --test claims_report` writes the report
//! anew.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Names a Python with torch 2.11.0.
const PYTHON: &str = "HARNESS_TEST_PYTHON";
const REPORT: &str = "reports/claims";

#[test]
fn the_report_of_claims_is_what_their_scenarios_give() {
    let Some(python) = std::env::var_os(PYTHON).filter(|python| !python.is_empty()) else {
        eprintln!("ignored, {PYTHON} names no Python with torch 2.11.0; `ci/torch` makes one and prints its path");
        return;
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let made = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
    command.arg0("harness").current_dir(&root).env("HARNESS_PYTHON", python);
    for variable in ["CARGO", "COLUMNS", "HARNESS_DEVICE", "NO_COLOR"] {
        command.env_remove(variable);
    }
    command.args(["run", "scenarios/claims", "--device", "sim", "--report"]).arg(made.path());
    let output = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    let (made, kept) = (files(made.path()), root.join(REPORT));
    if std::env::var_os("UPDATE").is_some() {
        drop(fs::remove_dir_all(&kept));
        fs::create_dir_all(&kept).unwrap();
        made.iter().for_each(|(name, content)| fs::write(kept.join(name), content).unwrap());
    }
    let kept = files(&kept);
    assert_eq!(made.keys().collect::<Vec<_>>(), kept.keys().collect::<Vec<_>>(), "other files: run with UPDATE=1");
    for (name, content) in &made {
        assert!(kept[name] == *content, "{REPORT}/{name} is not what this build makes: run with UPDATE=1 and look at the difference");
    }
}

/// The report and its pictures, without the records that it was made of.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let shown = paths.filter(|path| path.extension().is_some_and(|ending| ending == "md" || ending == "svg"));
    shown.map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap())).collect()
}
