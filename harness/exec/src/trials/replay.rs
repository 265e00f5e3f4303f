//! Predicts runs by replays of the first run with our allocator.

use std::path::Path;

use harness_allocator::{allocator::AllocatorSpec, units::Bytes};
use harness_explain::{fidelity, grid::Configuration};
use harness_trace::program::{Placement, Prepared, ProgramError, RecordedProgram, Setup};
use harness_trace::snapshot::Snapshot;

use super::{Observed, Trial};
use crate::record::Record;

/// Returns the allocations of a run on the simulated GPU if one process made them on one device, none failed, and a replay agrees with them. `memory` is
/// what the process can allocate.
pub(super) fn recorded(record: &Record, observed: &Observed, run: &Path, memory: Bytes) -> Option<RecordedProgram> {
    let snapshots = record.snapshots(run).ok()?;
    let [file] = snapshots.as_slice() else { return None };
    let snapshot = Snapshot::read(&file.path).ok()?;
    let devices = snapshot.devices();
    let ([device], 1, 0) = (devices.as_slice(), observed.processes, observed.ooms) else { return None };
    let (program, fidelity) = fidelity::recover(&snapshot, *device, Some(memory)).ok()?;
    fidelity.faithful.then_some(program)
}

/// Returns whether no request fails in a run that makes the same requests; `None` if that is unknown.
pub fn is_enough(program: &Prepared<'_>, trial: &Trial, context_overhead: Bytes) -> Option<bool> {
    let config = &program.program().config;
    let allocator = match &trial.alloc_conf {
        Some(conf) => Configuration::of_settings(config.torch, conf).ok()?.allocator,
        None => AllocatorSpec::caching(config.clone()),
    };
    let memory = trial.memory.saturating_sub(context_overhead);
    match program.replay(&Setup { allocator, memory, placement: Placement::InOrder(trial.addresses?) }) {
        Ok(replayed) => Some(replayed.oom.is_none()),
        Err(ProgramError::TooLittleMemory { .. } | ProgramError::DoNotFit { .. }) => Some(false),
        Err(_) => None,
    }
}
