//! Recorded programs that the user names: memory snapshots of PyTorch, and traces and RMM logs, which contain only the requests.

use std::path::Path;

use harness_allocator::units::Bytes;
use harness_explain::fidelity::{self, Fidelity};
use harness_explain::requests::Requests;
use harness_scenario::Trace;
use harness_trace::program::{ProgramError, RecordedProgram};
use harness_trace::snapshot::Snapshot;

use super::error::CliError;
use super::kind::{self, Kind};
use super::snapshots;

/// A recorded program, its snapshot, and the comparison of its replay with the recording.
pub(crate) struct Recovered {
    pub(crate) snapshot: Snapshot,
    pub(crate) job: RecordedProgram,
    pub(crate) fidelity: Fidelity,
}

/// Reads a snapshot and recovers the program on the first device that has events. `memory` counts as the memory of the recorded device if a
/// replay with it equals the recording.
pub(crate) fn read(path: &Path, memory: Option<Bytes>) -> Result<Recovered, CliError> {
    let snapshot = snapshots::read(path)?;
    let device = (0_u32..).zip(&snapshot.traces).find(|(_, events)| !events.is_empty()).map(|(device, _)| device);
    let Some(device) = device else {
        let message = format!("{}: the snapshot has segments, but no events to replay", path.display());
        let help = "call torch.cuda.memory._record_memory_history() before the part of the program that matters; `harness explain` needs only segments";
        return Err(CliError::input(message, help));
    };
    let (job, fidelity) = fidelity::recover(&snapshot, device, memory).map_err(|error| of_job(path, &error))?;
    Ok(Recovered { snapshot, job, fidelity })
}

/// Reads the requests of a trace or an RMM log; `None` for other files. Neither format contains the device's memory, so `memory` is required.
pub(crate) fn requests(path: &Path, memory: Option<Bytes>) -> Option<Result<(Requests, Bytes), CliError>> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let read_trace = || {
        let invalid = |(why, help): (String, String)| CliError::input(format!("{}: {why}", path.display()), help);
        let trace = Trace::read(path).map_err(invalid)?;
        let operations = trace.events.iter().enumerate();
        Ok(Requests::of_trace(&name, operations.map(|(index, &event)| (event, trace.line(index), trace.site(index)))))
    };
    let (what, read) = match kind::of(path)? {
        Kind::Trace => ("a trace", read_trace()),
        Kind::RmmLog => ("an RMM log", snapshots::read(path).map(|log| Requests::of_log(&name, &log))),
        Kind::Pickle | Kind::Recording => return None,
    };
    let help = "give `--memory`, as in `--memory 24GiB`";
    let no_memory = || CliError::input(format!("{}: {what} does not contain the device's memory", path.display()), help);
    Some(read.and_then(|requests| Ok((requests, memory.ok_or_else(no_memory)?))))
}

/// The error for a program that cannot be recovered or replayed.
pub(crate) fn of_job(path: &Path, error: &ProgramError) -> CliError {
    let help = match error {
        ProgramError::TooLittleMemory { .. } => "give more `--memory`",
        ProgramError::Settings { .. } => "this version of the harness follows PyTorch 2.11; correct the settings in a new recording",
        _ => "record the program again; if that does not help, report this with the snapshot",
    };
    CliError::input(format!("{}: {error}", path.display()), help)
}
