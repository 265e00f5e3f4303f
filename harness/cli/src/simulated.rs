//! Runs scenarios that a command generates, once, on the simulated device.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use harness_base::packed;
use harness_devices::DeviceSource;
use harness_record::{RunRecord, Verdict};
use harness_run::session::{Plan, Selection};
use harness_scenario::Scenario;

use super::error::CliError;
use super::program;

/// Runs a scenario with each of its allocators, on a simulated device that has enough memory. `trace` is the file name and the text of the
/// trace that it replays.
pub(crate) fn run(text: &str, trace: Option<(&str, &str)>) -> Result<Vec<RunRecord>, CliError> {
    let scenario = parse(text, Path::new("scenario.yaml"), trace)?;
    let source = DeviceSource::simulated().with_room_for(scenario.needs.memory);
    let (selection, program) = (Selection::default(), program::name());
    let plan =
        Plan { scenarios: vec![scenario], selection, seed: None, memory: None, repetitions: 1, audit: true, fail_fast: false, program };
    Ok(plan.run(&source, &Arc::default())?.runs)
}

/// Parses a scenario and names it after `path`, which need not exist.
pub(crate) fn parse(text: &str, path: &Path, trace: Option<(&str, &str)>) -> Result<Scenario, CliError> {
    let internal = |error: &dyn std::fmt::Display| {
        let message = format!("the scenario cannot be written to the folder for temporary files: {error}");
        CliError::internal(message, "free disk space there, or set TMPDIR to another folder")
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

pub(crate) fn pass(records: &[RunRecord]) -> bool {
    records.iter().all(|record| record.verdict == Verdict::Passed)
}
