//! Runs `scenarios/claims` with torch 2.11.0 on the simulated GPU.
//!
//! Verdicts and figures are compared with `kept_report/claims.txt`, and the sections of `reports/claims/report.md` with those of a new report.
//! `HARNESS_TEST_PYTHON` names the Python with torch; without it the test is shown as ignored.
//! `UPDATE=1 cargo test --test claims_report` rewrites both.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails")]

mod kept_report;

use std::process::{Command, ExitCode};
use std::{collections::BTreeMap, ffi::OsString, os::unix::process::CommandExt, path::Path};

use harness_report::store;
use libtest_mimic::{Arguments, Trial};

/// Names a Python with torch 2.11.0.
const PYTHON: &str = "HARNESS_TEST_PYTHON";
const REPORT: &str = "reports/claims";

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let python = std::env::var_os(PYTHON).filter(|python| !python.is_empty());
    if python.is_none() && !arguments.list {
        eprintln!("claims: ignored, {PYTHON} names no Python with torch 2.11.0; `ci/torch` makes one and prints its path");
    }
    let name = "the claims have the kept verdicts and figures";
    let is_ignored = python.is_none();
    let trial = Trial::test(name, move || {
        compare(python.unwrap_or_default());
        Ok(())
    });
    libtest_mimic::run(&arguments, vec![trial.with_ignored_flag(is_ignored)]).exit_code()
}

fn compare(python: OsString) {
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
    let (made, kept) = (made.path(), root.join(REPORT));
    kept_report::compare_figures(&store::read(made).unwrap(), &root.join("harness/cli/tests/kept_report/claims.txt"));
    if kept_report::updates() {
        kept_report::replace(made, &kept);
    }
    assert_eq!(sections(&kept), sections(made), "{REPORT} has other sections than a new report: run with UPDATE=1");
}

/// The files of a report, each with the anchors of its sections.
fn sections(folder: &Path) -> BTreeMap<String, Vec<String>> {
    let anchors = |text: &str| text.lines().filter(|line| line.starts_with("<a id=")).map(str::to_owned).collect();
    kept_report::files(folder).into_iter().map(|(name, text)| (name, anchors(&text))).collect()
}
