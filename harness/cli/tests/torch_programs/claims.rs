//! Runs `scenarios/claims` on the simulated GPU.
//!
//! Verdicts and figures are compared with `kept_report/claims.txt`, and the sections of
//! `reports/claims/report.md` with those of a new report. `UPDATE=1 cargo test --test
//! torch_programs claims` rewrites both.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails")]

use std::process::Command;
use std::{collections::BTreeMap, os::unix::process::CommandExt, path::Path};

use harness_report::store;

use crate::kept_report;

const REPORT: &str = "reports/claims";

pub(crate) fn have_the_kept_figures(python: &Path) {
    let root = crate::root();
    let made = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
    command
        .arg0("harness")
        .current_dir(&root)
        .env("HARNESS_PYTHON", python);
    for variable in ["CARGO", "COLUMNS", "HARNESS_DEVICE", "NO_COLOR"] {
        command.env_remove(variable);
    }
    command
        .args(["run", "scenarios/claims", "--device", "sim", "--report"])
        .arg(made.path());
    let output = command.output().unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{out}{err}");
    let (made, kept) = (made.path(), root.join(REPORT));
    kept_report::compare_figures(
        &store::read(made).unwrap(),
        &root.join("harness/cli/tests/kept_report/claims.txt"),
    );
    if kept_report::updates() {
        kept_report::replace(made, &kept);
    }
    assert_eq!(
        sections(&kept),
        sections(made),
        "{REPORT} has other sections than a new report: run with UPDATE=1"
    );
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
