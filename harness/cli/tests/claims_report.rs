//! The report in reports/claims is what this build makes of scenarios/claims with torch 2.11.0 on the simulated device, byte for byte.
//!
//! The Python with torch is named by HARNESS_TEST_PYTHON; without it nothing is compared. `UPDATE=1 cargo test --test claims_report` writes the report
//! anew.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod kept_report;

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
    kept_report::compare(made.path(), &root.join(REPORT));
}
