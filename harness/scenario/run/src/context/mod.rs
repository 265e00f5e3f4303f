//! The state of a running scenario: buffers, streams, events, measures, reports, storms.
//!
//! * `buffers` and `handles`: the objects that the scenario names;
//! * `look_up`: the values of metrics;
//! * `needs`: decides what must be tracked for them;
//! * `live_blocks` and `requests`: the blocks of storms, replays and inferences.

mod buffers;
mod handles;
pub(crate) mod live_blocks;
pub(crate) mod look_up;
pub(crate) mod needs;
pub(crate) mod requests;

use std::collections::BTreeMap;

use harness_allocator::allocator::{AllocatorSpec, PrivatePoolId, caching::Config};
use harness_allocator::device::{Clock, DeviceInfo, EventId, StreamId};

pub(crate) use self::buffers::{BufferKey, buffer_name};
pub(crate) use self::look_up::{Figures, RankFigures};
use self::needs::{asks_for_memory, looks_at_sites, sizes_use_measured_memory};
use self::{buffers::Buffers, handles::Handles, handles::create_streams, look_up::Values};
use self::{live_blocks::LiveBlocks, requests::Requests};
use crate::processes::{Inside, Processes};
use crate::rig::{Buffer, Peaks, ProgramId, Rig, Stop, without_faults};
use crate::shared_memory::SharedMemory;
use harness_record::{MemoryFigures, ProcessFigures, RunProcesses};
use harness_scenario::{
    BufferRef, DeviceKind, EventName, MeasureName, Number, PoolName, ProgramName, Readings,
    Scenario, StepName, StreamName, VariableName,
};

/// See the module. The scenario has been checked, so every name refers to something of the right
/// kind.
pub(crate) struct RunContext {
    pub(crate) rig: Rig,
    pub(crate) setup: ArmSetup,
    pub(crate) buffers: Buffers,
    pub(crate) handles: Handles,
    pub(crate) values: Values,
    storms: BTreeMap<StepName, LiveBlocks>,
    pub(crate) requests: Requests,
    /// Device memory shared by the programs, created with the first one.
    pub(crate) shared_memory: Option<SharedMemory>,
    pub(crate) processes: Processes,
    /// The process that runs the current step, and the loops around the step; `None` for this
    /// process.
    pub(crate) inside: Option<Inside>,
}

/// What stays the same during a run.
pub(crate) struct ArmSetup {
    pub(crate) arm: String,
    pub(crate) device: DeviceKind,
    pub(crate) seed: u64,
    /// The settings of PyTorch's allocator; `None` for other allocators.
    pub(crate) alloc_conf: Option<Config>,
    /// True if a size refers to the device's memory at a `measure` step.
    sizes_use_measured_memory: bool,
}

impl RunContext {
    /// Creates the scenario's streams and takes the measure `start`. Closes the rig if that fails.
    pub(crate) fn new(
        mut rig: Rig,
        scenario: &Scenario,
        arm: &AllocatorSpec,
        seed: u64,
    ) -> Result<Self, Stop> {
        let mut streams = vec![StreamId::DEFAULT];
        if let Err(stop) = create_streams(&mut rig, &scenario.streams, &mut streams)
            .and_then(|()| rig.without_faults(Rig::begin_scenario))
        {
            return Err(close_failed(rig, streams, stop));
        }
        if scenario
            .all_steps()
            .iter()
            .any(|step| looks_at_sites(&step.action))
        {
            rig.watch_sites();
        }
        let mut ctx = Self {
            setup: ArmSetup {
                arm: arm.to_string(),
                device: kind_of(rig.info()),
                seed,
                alloc_conf: arm.effective(),
                sizes_use_measured_memory: sizes_use_measured_memory(&scenario.steps),
            },
            buffers: Buffers::new(scenario),
            handles: Handles::new(&mut rig, scenario, arm, streams),
            values: Values::default(),
            storms: BTreeMap::new(),
            requests: Requests::default(),
            shared_memory: None,
            processes: Processes::default(),
            inside: None,
            rig,
        };
        let faults = ctx.rig.faults().cloned();
        match without_faults(faults.as_ref(), || ctx.readings(true)) {
            Ok(readings) => {
                ctx.values.measures.insert(MeasureName::start(), readings);
                Ok(ctx)
            }
            Err(stop) => {
                // An error of closing would hide the reason.
                let _ = ctx.handles.close(ctx.rig);
                Err(stop)
            }
        }
    }

    pub(crate) fn stream(&self, name: &StreamName) -> StreamId {
        self.handles.stream(name)
    }

    pub(crate) fn event(&mut self, name: &EventName) -> Result<EventId, Stop> {
        self.handles.event(name, &mut self.rig)
    }

    pub(crate) fn enter(&mut self, program: Option<&ProgramName>) {
        self.rig.enter(self.handles.program(program));
    }

    pub(crate) fn pool(&mut self, name: &PoolName) -> PrivatePoolId {
        self.handles.pool(name, &mut self.rig)
    }

    pub(crate) fn set_variables<'v>(
        &mut self,
        variables: impl Iterator<Item = (&'v VariableName, Number)>,
    ) {
        self.values.variables = variables
            .map(|(name, value)| (name.clone(), value))
            .collect();
    }

    /// Evaluates the number of a buffer reference. The inner error explains why there is no such
    /// number.
    pub(crate) fn key(&mut self, buffer: &BufferRef) -> Result<Result<BufferKey, String>, Stop> {
        let Some(index) = &buffer.index else {
            return Ok(Ok((buffer.name.clone(), None)));
        };
        let now = self.readings(index.quantities().into_iter().any(asks_for_memory))?;
        let number = match index.evaluate(&mut |metric| self.look_up(metric, &now)) {
            Ok(number) => number,
            Err(why) => return Ok(Err(why.to_string())),
        };
        let whole = number
            .is_integer()
            .then(|| i64::try_from(number.to_integer()).ok())
            .flatten();
        Ok(whole
            .map(|index| (buffer.name.clone(), Some(index)))
            .ok_or_else(|| format!("the number of `{buffer}` evaluates to {number}")))
    }

    /// Calls `act` with a live buffer. Returns false if there is no live buffer of that name.
    pub(crate) fn with_buffer(
        &mut self,
        key: &BufferKey,
        act: impl FnOnce(&mut Rig, &mut Buffer) -> Result<(), Stop>,
    ) -> Result<bool, Stop> {
        match self.buffers.use_of(key) {
            Some(buffer) => act(&mut self.rig, buffer).map(|()| true),
            None => Ok(false),
        }
    }

    /// Verifies the contents of buffers that their own stream wrote last and that have no queued
    /// work.
    pub(crate) fn verify_live(&mut self) -> Result<(), Stop> {
        self.buffers
            .live()
            .filter(|buffer| buffer.is_own_work())
            .try_for_each(|buffer| self.rig.verify_at_rest(buffer))
    }

    pub(crate) fn verify_storms(&mut self) -> Result<(), Stop> {
        let blocks = self.storms.values().flat_map(|storm| storm.blocks.values());
        blocks
            .filter(|buffer| buffer.is_own_work())
            .try_for_each(|buffer| self.rig.verify_at_rest(buffer))
    }

    pub(crate) fn storm(&mut self, id: &StepName) -> &mut LiveBlocks {
        self.storms.entry(id.clone()).or_default()
    }

    /// Stores all readings under a name. A timed run queries the device's memory only if a size
    /// refers to it.
    pub(crate) fn measure(&mut self, name: MeasureName) -> Result<(), Stop> {
        let readings =
            self.readings(!self.rig.is_timed() || self.setup.sizes_use_measured_memory)?;
        self.values.sites_at.extend(
            self.rig
                .site_bytes()
                .map(|held| (name.clone(), held.to_vec())),
        );
        self.values.measures.insert(name, readings);
        Ok(())
    }

    pub(crate) fn readings(&mut self, memory: bool) -> Result<Readings, Stop> {
        let (stats, calls) = (self.rig.stats(), self.rig.calls());
        let memory = if memory {
            Some(self.rig.memory()?)
        } else {
            None
        };
        Ok(Readings {
            stats,
            memory,
            calls,
            now: self.rig.now(),
        })
    }

    /// The name of the current program; `None` for the main one.
    pub(crate) fn name_of_program(&self, scenario: &Scenario) -> Option<String> {
        let place = self
            .handles
            .programs
            .iter()
            .position(|&program| program == self.rig.entered())?;
        scenario.programs.get(place).map(ToString::to_string)
    }

    /// The figures of each program and process; `None` if there is only the main one.
    pub(crate) fn figures_of_processes(&self, scenario: &Scenario) -> Option<RunProcesses> {
        let named = |name: String, program: ProgramId| ProcessFigures {
            name,
            figures: self.rig.figures_of(program),
        };
        let programs = scenario
            .programs
            .iter()
            .zip(&self.handles.programs)
            .map(|(name, &program)| named(name.to_string(), program));
        let ranks = self.handles.ranks.iter().flat_map(|(step, programs)| {
            programs
                .iter()
                .zip(1..)
                .map(move |(&program, rank)| named(format!("rank {rank} of {step}"), program))
        });
        let mut each: Vec<ProcessFigures> = programs
            .chain(ranks)
            .chain(self.processes.figures.iter().cloned())
            .collect();
        if each.is_empty() {
            return None;
        }
        let main = named("main process".to_owned(), ProgramId::FIRST);
        if main.figures != Peaks::default().figures(0, 0) {
            each.insert(0, main);
        }
        let sum = |counter: fn(&MemoryFigures) -> Option<u64>| {
            each.iter()
                .map(|one| counter(&one.figures))
                .sum::<Option<u64>>()
        };
        let peaks = self.rig.together().figures(0, 0);
        let is_allocation_known = !self.processes.has_parallel_programs
            && each.iter().all(|one| one.figures.peak_allocated.is_some());
        let together = MemoryFigures {
            peak_reserved: peaks.peak_reserved,
            peak_allocated: peaks.peak_allocated.filter(|_| is_allocation_known),
            ooms: sum(|one| one.ooms),
            retries: sum(|one| one.retries),
        };
        Some(RunProcesses { each, together })
    }

    pub(crate) fn free_everything(&mut self) -> Result<(), Stop> {
        for buffer in self.buffers.take_all() {
            self.rig.free(buffer)?;
        }
        for blocks in std::mem::take(&mut self.storms).into_values() {
            for buffer in blocks.into_blocks() {
                self.rig.free(buffer)?;
            }
        }
        Ok(())
    }

    pub(crate) fn close(self) -> Result<(), Stop> {
        // Kills processes that still run: the run has failed.
        drop(self.processes);
        self.handles.close(self.rig)
    }
}

fn close_failed(rig: Rig, streams: Vec<StreamId>, stop: Stop) -> Stop {
    // Errors of closing would hide the reason.
    let _ = rig.close(streams.into_iter().skip(1).collect(), Vec::new());
    stop
}

pub(crate) const fn kind_of(info: &DeviceInfo) -> DeviceKind {
    match info.clock {
        Clock::Simulated => DeviceKind::Simulated,
        Clock::Measured => DeviceKind::Gpu,
    }
}
