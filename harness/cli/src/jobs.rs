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

/// Reads a trace and its text. The format does not contain the device's memory, so `memory` is required.
pub(crate) fn trace(path: &Path, memory: Option<Bytes>) -> Result<(Trace, String, Bytes), CliError> {
    let invalid = |(why, help): (String, String)| CliError::input(format!("{}: {why}", path.display()), help);
    let (trace, text) = Trace::read_with_text(path).map_err(invalid)?;
    Ok((trace, text, required(memory, path, "a trace")?))
}

/// The device's memory, which this kind of file does not contain.
pub(crate) fn required(memory: Option<Bytes>, path: &Path, what: &str) -> Result<Bytes, CliError> {
    memory.ok_or_else(|| {
        let message = format!("{}: {what} does not contain the device's memory", path.display());
        CliError::input(message, "give `--memory`, as in `--memory 24GiB`")
    })
}

/// Reads the requests of a trace or an RMM log; `None` for other files. Neither format contains the device's memory, so `memory` is required.
pub(crate) fn requests(path: &Path, memory: Option<Bytes>) -> Option<Result<(Requests, Bytes), CliError>> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match kind::of(path)? {
        Kind::Trace => Some(trace(path, memory).map(|(trace, _, memory)| {
            let operations = trace.events.iter().enumerate();
            let operations = operations.map(|(index, &event)| (event, trace.line(index), trace.site(index)));
            (Requests::of_trace(&name, operations), memory)
        })),
        Kind::RmmLog => {
            let log = snapshots::read(path);
            Some(log.and_then(|log| Ok((Requests::of_log(&name, &log), required(memory, path, "an RMM log")?))))
        }
        Kind::Pickle | Kind::Recording => None,
    }
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
