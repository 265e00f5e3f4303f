//! Jobs that the user names: memory snapshots of PyTorch.

use std::path::Path;

use harness_allocator::units::Bytes;
use harness_trace::job::{Job, JobError};
use harness_trace::snapshot::Snapshot;

use super::error::CliError;

/// Reads a snapshot. The job's device is the first that has events.
pub(crate) fn read(path: &Path) -> Result<(Snapshot, Job), CliError> {
    let help = "name a file that torch.cuda.memory._dump_snapshot() wrote, as it is or packed by gzip";
    let snapshot = Snapshot::read(path).map_err(|error| CliError::input(format!("{}: {error}", path.display()), help))?;
    let device = (0_u32..).zip(&snapshot.traces).find(|(_, events)| !events.is_empty()).map(|(device, _)| device);
    let Some(device) = device else {
        let message = format!("{}: nothing was recorded: the snapshot has segments, but no events to replay", path.display());
        let help = "call torch.cuda.memory._record_memory_history() before the part of the program that matters; `harness explain` takes the segments";
        return Err(CliError::input(message, help));
    };
    let job = Job::recover(&snapshot, device).map_err(|error| of_job(path, &error))?;
    Ok((snapshot, job))
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

/// The memory of the job's device: given, or known from the recording.
pub(crate) fn memory(given: Option<Bytes>, job: &Job) -> Option<Bytes> {
    given.or(job.memory)
}
