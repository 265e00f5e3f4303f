//! Scenarios that a command makes itself, run once on the simulated device, to see how they end.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use harness_base::packed;
use harness_devices::DeviceSource;
use harness_record::{RunRecord, Verdict};
use harness_run::session::{Plan, Selection};
use harness_scenario::Scenario;

use super::error::CliError;

/// Runs the text of a scenario with each of its allocators; `trace` is the packed trace beside it, with its file name.
pub(crate) fn run(text: &str, trace: Option<(&str, &str)>) -> Result<Vec<RunRecord>, CliError> {
    let scenario = parse(text, Path::new("scenario.yaml"), trace)?;
    let (selection, program) = (Selection::default(), "harness".to_owned());
    let plan =
        Plan { scenarios: vec![scenario], selection, seed: None, memory: None, repetitions: 1, audit: true, fail_fast: false, program };
    Ok(plan.run(&DeviceSource::simulated(), &Arc::default())?.runs)
}

/// The scenario of a text, under the name of `path`, which need not be there.
pub(crate) fn parse(text: &str, path: &Path, trace: Option<(&str, &str)>) -> Result<Scenario, CliError> {
    let internal = |error: &dyn std::fmt::Display| CliError::Internal {
        message: format!("a scenario cannot be made in the folder for temporary files: {error}"),
        help: "make room there, or let the variable TMPDIR name another folder",
    };
    let folder = tempfile::tempdir().map_err(|error| internal(&error))?;
    if let Some((name, trace)) = trace {
        std::fs::write(folder.path().join(name), packed::pack(trace)).map_err(|error| internal(&error))?;
    }
    let name = path.file_name().map_or_else(|| "scenario.yaml".into(), PathBuf::from);
    let mut scenario = Scenario::parse(text, &folder.path().join(name))?;
    scenario.path = path.to_owned();
    Ok(scenario)
}

/// Whether all of them end as they should.
pub(crate) fn pass(records: &[RunRecord]) -> bool {
    records.iter().all(|record| record.verdict == Verdict::Passed)
}
