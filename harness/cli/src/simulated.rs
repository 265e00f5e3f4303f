use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use harness_base::packed;
use harness_record::{RunRecord, Verdict};
use harness_reduce::scenario::{Engine as _, Simulated};
use harness_scenario::Scenario;

use super::error::CliError;

/// Runs a scenario with each of its allocators, on a simulated device that has enough memory.
pub(crate) fn run(text: &str, trace: Option<(&str, &str)>) -> Result<Vec<RunRecord>, CliError> {
    Ok(Simulated.run(
        &parse(text, Path::new("scenario.yaml"), trace)?,
        &mut |_| ControlFlow::Continue(()),
    )?)
}

/// Parses a scenario and names it after `path`, which need not exist.
pub(crate) fn parse(
    text: &str,
    path: &Path,
    trace: Option<(&str, &str)>,
) -> Result<Scenario, CliError> {
    let internal = |error: std::io::Error| {
        let message =
            format!("the scenario cannot be written to the folder for temporary files: {error}");
        CliError::internal(
            message,
            "free disk space there, or set TMPDIR to another folder",
        )
    };
    let folder = tempfile::tempdir().map_err(internal)?;
    if let Some((name, trace)) = trace {
        std::fs::write(folder.path().join(name), packed::pack(trace)).map_err(internal)?;
    }
    let name = path
        .file_name()
        .map_or_else(|| "scenario.yaml".into(), PathBuf::from);
    let mut scenario = Scenario::parse(text, &folder.path().join(name))?;
    scenario.path = path.to_owned();
    Ok(scenario)
}

pub(crate) fn pass(records: &[RunRecord]) -> bool {
    records
        .iter()
        .all(|record| record.verdict == Verdict::Passed)
}
