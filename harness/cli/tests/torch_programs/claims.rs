//! Runs `scenarios/claims` on the simulated GPU, each night all of them, otherwise [`SAMPLE`].
//!
//! Verdicts and figures are compared with `kept_report/claims.txt`, and the sections of
//! `reports/claims/report.md` with those of a new report of all claims. `UPDATE=1
//! HARNESS_TEST_ALL=1 cargo test --test torch_programs claims` rewrites both.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails")]

use std::process::Command;
use std::{collections::BTreeMap, os::unix::process::CommandExt, path::Path};

use harness_report::store;

use crate::kept_report;

const REPORT: &str = "reports/claims";

/// Claims whose programs are short: retries, splits, expandable segments, and settings of PyTorch.
const SAMPLE: [&str; 4] = [
    "after_del",
    "growing_sizes",
    "halving_recovers",
    "without_cache",
];

pub(crate) fn of_the_sample_have_the_kept_figures(python: &Path) {
    let made = tempfile::tempdir().unwrap();
    let files = SAMPLE.map(|name| format!("scenarios/claims/{name}.yaml"));
    run(&files.each_ref().map(String::as_str), python, made.path());
    compare_figures(made.path(), true);
}

pub(crate) fn have_the_kept_figures(python: &Path) {
    let made = tempfile::tempdir().unwrap();
    let (made, kept) = (made.path(), crate::root().join(REPORT));
    run(&["scenarios/claims"], python, made);
    compare_figures(made, false);
    if kept_report::updates() {
        kept_report::replace(made, &kept);
    }
    assert_eq!(
        sections(&kept),
        sections(made),
        "{REPORT} has other sections than a new report: run with UPDATE=1"
    );
}

fn compare_figures(report: &Path, is_sample: bool) {
    let kept = crate::root().join("harness/cli/tests/kept_report/claims.txt");
    kept_report::compare_figures(&store::read(report).unwrap(), &kept, is_sample);
}

/// Runs scenarios, and writes their report to a folder.
fn run(scenarios: &[&str], python: &Path, report: &Path) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
    command
        .arg0("harness")
        .current_dir(crate::root())
        .env("HARNESS_PYTHON", python);
    for variable in ["CARGO", "COLUMNS", "HARNESS_DEVICE", "NO_COLOR"] {
        command.env_remove(variable);
    }
    command.arg("run").args(scenarios);
    let output = command
        .args(["--device", "sim", "--report"])
        .arg(report)
        .output()
        .unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{out}{err}");
}

/// The files of a report, each with the anchors of its sections.
fn sections(folder: &Path) -> BTreeMap<String, Vec<String>> {
    let anchors = |text: &str| {
        text.lines()
            .filter(|line| line.starts_with("<a id="))
            .map(str::to_owned)
            .collect()
    };
    kept_report::files(folder)
        .into_iter()
        .map(|(name, text)| (name, anchors(&text)))
        .collect()
}
