//! [`Replays`] of the first run with our allocator predict other runs.

use std::path::Path;

use harness_allocator::{allocator::AllocatorSpec, units::Bytes};
use harness_explain::{fidelity, grid::Configuration};
use harness_trace::program::{
    Placement, PreparedReplay, ProgramError, RecordedProgram, ReplaySetup,
};
use harness_trace::snapshot::Snapshot;

use super::{Observed, Trial};
use crate::record::Record;

/// Why a run is no base for replays. The text follows the words "the program".
const DIFFERS: &str = "makes requests that a replay cannot repeat";

/// Returns the allocations and the snapshot of a run on the simulated GPU if one process made the
/// allocations on one device, none failed, and a replay agrees with them. `memory` is what the
/// process can allocate. Otherwise returns the reason.
pub(super) fn recorded(
    record: &Record,
    observed: &Observed,
    run: &Path,
    memory: Bytes,
) -> Result<(RecordedProgram, Snapshot), &'static str> {
    if observed.ooms.is_some_and(|ooms| ooms > 0) {
        return Err("runs out of memory in its first run");
    }
    let snapshots = record.snapshots(run).unwrap_or_default();
    let ([file], 1) = (snapshots.as_slice(), observed.processes) else {
        return Err("uses the GPU in several processes, or records nothing");
    };
    let snapshot = Snapshot::read(&file.path).map_err(|_| DIFFERS)?;
    let devices = snapshot.devices();
    let [device] = devices.as_slice() else {
        return Err("uses several GPUs");
    };
    let (program, fidelity) =
        fidelity::recover(&snapshot, *device, Some(memory)).map_err(|_| DIFFERS)?;
    if fidelity.faithful {
        Ok((program, snapshot))
    } else {
        Err(DIFFERS)
    }
}

/// Returns how to replay a program as in this trial; `None` if that is unknown.
pub(super) fn setup(
    program: &RecordedProgram,
    trial: &Trial,
    context_overhead: Bytes,
) -> Option<ReplaySetup> {
    let config = &program.config;
    let allocator = match &trial.alloc_conf {
        Some(conf) => {
            Configuration::of_settings(config.torch, conf)
                .ok()?
                .allocator
        }
        None => AllocatorSpec::caching(config.clone()),
    };
    Some(ReplaySetup {
        allocator,
        memory: trial.memory.saturating_sub(context_overhead),
        placement: Placement::InOrder(trial.addresses?),
    })
}

pub struct Replays<'a> {
    program: PreparedReplay<'a>,
    first: &'a Observed,
    context_overhead: Bytes,
    /// Driver calls outside of PyTorch's allocator, which no setting changes.
    other_calls: u64,
}

impl<'a> Replays<'a> {
    /// `trial` is that of the first run. Returns the reason if a replay of it has other figures.
    pub fn new(
        program: &'a RecordedProgram,
        trial: &Trial,
        first: &'a Observed,
        context_overhead: Bytes,
    ) -> Result<Self, &'static str> {
        let program = program.prepare().map_err(|_| DIFFERS)?;
        let mut replays = Self {
            program,
            first,
            context_overhead,
            other_calls: 0,
        };
        let again = replays.predict(trial).ok_or(DIFFERS)?;
        replays.other_calls = first
            .driver_calls
            .checked_sub(again.driver_calls)
            .ok_or(DIFFERS)?;
        if (Observed {
            driver_calls: first.driver_calls,
            ..again
        }) == *first
        {
            Ok(replays)
        } else {
            Err(DIFFERS)
        }
    }

    /// Predicts a run that makes the same requests as the first; `None` if that is unknown. The
    /// prediction ends at the first failed request, which [`Observed::ooms`] shows.
    pub fn predict(&self, trial: &Trial) -> Option<Observed> {
        let setup = setup(self.program.program(), trial, self.context_overhead)?;
        match self.program.replay(&setup) {
            Ok(replayed) => Some(Observed {
                peak_reserved: Bytes(replayed.stats.reserved_bytes.all.peak),
                peak_allocated: Some(Bytes(replayed.stats.allocated_bytes.all.peak)),
                retries: Some(replayed.stats.num_alloc_retries),
                ooms: Some(replayed.oom.is_some().into()),
                driver_calls: replayed.calls.memory_calls() + self.other_calls,
                ..self.first.clone()
            }),
            Err(ProgramError::TooLittleMemory { .. } | ProgramError::DoNotFit { .. }) => {
                Some(Observed {
                    ooms: Some(1),
                    ..self.first.clone()
                })
            }
            Err(_) => None,
        }
    }
}
