use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use harness_record::{RunRecord, Verdict};
use harness_reduce::scenario::{Engine as _, Simulated};
use harness_scenario::{Scenario, Trace};

use super::error::CliError;

/// Runs a scenario with each of its allocators, on a simulated device that has enough memory.
/// `replay` steps get the trace, if there is one.
pub(crate) fn run(text: &str, trace: Option<&Arc<Trace>>) -> Result<Vec<RunRecord>, CliError> {
    let scenario = Scenario::parse_with_trace(text, Path::new("scenario.yaml"), trace)?;
    Ok(Simulated.run(&scenario, &mut |_| ControlFlow::Continue(()))?)
}

pub(crate) fn pass(records: &[RunRecord]) -> bool {
    records
        .iter()
        .all(|record| record.verdict == Verdict::Passed)
}
