//! Recorded programs that the user names: memory snapshots of PyTorch, and traces and RMM logs,
//! which contain only the requests.

use std::path::Path;

use clap::Args;
use harness_allocator::{allocator::caching::TorchVersion, units::Bytes};
use harness_explain::fidelity::{self, Fidelity};
use harness_explain::{requests::Requests, state::main_device};
use harness_scenario::Trace;
use harness_trace::program::{ProgramError, RecordedProgram};
use harness_trace::snapshot::Snapshot;

use super::kind::{self, Kind};
use super::{device, error::CliError, snapshots};

const RECORD_EARLIER: &str = "call torch.cuda.memory._record_memory_history() before the part of \
     the program that matters; `harness explain` needs only segments";

// A doc comment here would replace the descriptions of the commands.
#[derive(Args, Default)]
pub(crate) struct RecordingOptions {
    /// The index of the device, for a recording of several devices [default: the one that ran out
    /// of memory, else the one with the most reserved memory].
    #[arg(long, value_name = "N")]
    device: Option<u32>,
    /// The version of PyTorch whose allocator is replayed [default: for a snapshot, the newest one
    /// that agrees with it; else the newest].
    #[arg(long, value_name = "VERSION", value_parser = device::torch_version)]
    pub(crate) torch: Option<TorchVersion>,
}

impl RecordingOptions {
    /// Returns the chosen device, and if `known` has several, a sentence about the choice.
    fn choose(
        &self,
        path: &Path,
        snapshot: &Snapshot,
        known: &[u32],
    ) -> Result<Option<(u32, Option<String>)>, CliError> {
        if let Some(device) = self.device {
            check_device(path, "events of device", device, known)?;
        }
        let has_several = known.len() > 1;
        Ok(match self.device {
            Some(device) => Some((
                device,
                has_several.then(|| format!("This is about device {device}.")),
            )),
            None => main_device(snapshot, known).map(|(device, has_failed)| {
                let why = if has_failed {
                    "ran out of memory"
                } else {
                    "has the most reserved memory"
                };
                let others = format!(
                    "This is about device {device}, which {why}. `--device` chooses one of {}.",
                    listed(known)
                );
                (device, has_several.then_some(others))
            }),
        })
    }
}

/// The devices about which a snapshot contains something.
pub(crate) fn devices(path: &Path, snapshot: &Snapshot) -> Result<Vec<u32>, CliError> {
    let devices = snapshot.devices();
    if devices.is_empty() {
        let message = format!(
            "{}: the snapshot has neither segments nor events",
            path.display()
        );
        return Err(CliError::input(
            message,
            "take the snapshot in the process that uses the GPU, before it frees its memory",
        ));
    }
    Ok(devices)
}

/// Rejects a device about which a snapshot contains nothing.
pub(crate) fn check_device(
    path: &Path,
    what: &str,
    device: u32,
    known: &[u32],
) -> Result<(), CliError> {
    if known.contains(&device) {
        return Ok(());
    }
    let message = format!(
        "{}: the snapshot does not contain {what} {device}",
        path.display()
    );
    Err(CliError::input(
        message,
        format!(
            "choose another `--device`: the snapshot contains {}",
            listed(known)
        ),
    ))
}

fn listed(devices: &[u32]) -> String {
    devices
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

pub(crate) struct Recovered {
    /// A sentence about the device, if the recording has several.
    pub(crate) about_device: Option<String>,
    pub(crate) snapshot: Snapshot,
    pub(crate) job: RecordedProgram,
    /// The comparison of its replay with the recording. `None` for traces and RMM logs, which
    /// contain only requests.
    pub(crate) fidelity: Option<Fidelity>,
}

/// Reads a snapshot and recovers the program of a device that has events. `memory` counts as the
/// memory of the recorded device if a replay with it equals the recording.
pub(crate) fn read(
    path: &Path,
    memory: Option<Bytes>,
    options: &RecordingOptions,
) -> Result<Recovered, CliError> {
    let snapshot = Snapshot {
        given_torch: options.torch,
        ..snapshots::read(path)?
    };
    let known: Vec<u32> = devices(path, &snapshot)?
        .into_iter()
        .filter(|&device| !snapshot.events_of(device).is_empty())
        .collect();
    let Some((device, about_device)) = options.choose(path, &snapshot, &known)? else {
        let message = format!(
            "{}: the snapshot has segments, but no events to replay",
            path.display()
        );
        return Err(CliError::input(message, RECORD_EARLIER));
    };
    let (job, fidelity) =
        fidelity::recover(&snapshot, device, memory).map_err(|error| of_job(path, &error))?;
    Ok(Recovered {
        about_device,
        snapshot,
        job,
        fidelity: Some(fidelity),
    })
}

pub(crate) fn trace(path: &Path, memory: Option<Bytes>) -> Result<(Trace, Bytes), CliError> {
    let invalid =
        |(why, help): (String, String)| CliError::input(format!("{}: {why}", path.display()), help);
    let trace = Trace::read(path).map_err(invalid)?;
    Ok((trace, required(memory, path, "a trace")?))
}

/// The device's memory, which this kind of file does not contain.
pub(crate) fn required(memory: Option<Bytes>, path: &Path, what: &str) -> Result<Bytes, CliError> {
    memory.ok_or_else(|| {
        let message = format!(
            "{}: {what} does not contain the device's memory",
            path.display()
        );
        CliError::input(message, "give `--memory`, as in `--memory 24GiB`")
    })
}

/// Reads the requests of a trace or an RMM log; `None` for other files. Neither format contains the
/// device's memory, so `memory` is required.
pub(crate) fn requests(
    path: &Path,
    memory: Option<Bytes>,
) -> Option<Result<(Requests, Bytes), CliError>> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match kind::of(path)? {
        Kind::Trace => Some(trace(path, memory).map(|(trace, memory)| {
            let operations = trace.events.iter().enumerate();
            let operations =
                operations.map(|(index, &event)| (event, trace.line(index), trace.site(index)));
            (Requests::of_trace(&name, operations), memory)
        })),
        Kind::RmmLog => {
            let log = snapshots::read(path);
            Some(log.and_then(|log| {
                Ok((
                    Requests::of_log(&name, &log),
                    required(memory, path, "an RMM log")?,
                ))
            }))
        }
        Kind::Pickle | Kind::Recording => None,
    }
}

pub(crate) fn of_job(path: &Path, error: &ProgramError) -> CliError {
    let help = match error {
        ProgramError::NoRequests { .. } => RECORD_EARLIER,
        ProgramError::TooLittleMemory { .. }
        | ProgramError::DoNotFit { .. }
        | ProgramError::NotConstructed { .. } => "give more `--memory`",
        ProgramError::Settings { .. } => {
            "harness knows the settings of PyTorch 2.4 to 2.15: choose another `--torch`, or \
             record the program again with other settings"
        }
        _ => "record the program again; if that does not help, report this with the snapshot",
    };
    CliError::input(format!("{}: {error}", path.display()), help)
}
