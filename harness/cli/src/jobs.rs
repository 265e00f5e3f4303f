//! Jobs that the user names: recovered from memory snapshots of PyTorch, with the word whether a replay does what was recorded.

use std::path::Path;

use harness_allocator::units::Bytes;
use harness_explain::fidelity::{self, Fidelity};
use harness_trace::job::{Job, JobError};
use harness_trace::snapshot::Snapshot;

use super::error::CliError;
use super::snapshots;

/// A job, and what it was recovered from.
pub(crate) struct Recovered {
    pub(crate) snapshot: Snapshot,
    pub(crate) job: Job,
    pub(crate) fidelity: Fidelity,
}

/// Reads a snapshot. The job's device is the first that has events. The memory given is taken for that of the device at the time of the recording where
/// a replay with it does what was recorded.
pub(crate) fn read(path: &Path, memory: Option<Bytes>) -> Result<Recovered, CliError> {
    let snapshot = snapshots::read(path)?;
    let device = (0_u32..).zip(&snapshot.traces).find(|(_, events)| !events.is_empty()).map(|(device, _)| device);
    let Some(device) = device else {
        let message = format!("{}: nothing was recorded: the snapshot has segments, but no events to replay", path.display());
        let help = "call torch.cuda.memory._record_memory_history() before the part of the program that matters; `harness explain` takes the segments";
        return Err(CliError::input(message, help));
    };
    let (job, fidelity) = fidelity::recover(&snapshot, device, memory).map_err(|error| of_job(path, &error))?;
    Ok(Recovered { snapshot, job, fidelity })
}

/// A job that cannot be recovered or replayed.
pub(crate) fn of_job(path: &Path, error: &JobError) -> CliError {
    let help = match error {
        JobError::TooLittleMemory { .. } => "give more `--memory`",
        JobError::Settings { .. } => "this version of the harness follows PyTorch 2.11; correct the settings in a new recording",
        _ => "record the program anew; where that does not help, report this with the snapshot",
    };
    CliError::input(format!("{}: {error}", path.display()), help)
}
