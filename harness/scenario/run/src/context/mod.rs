//! The state of a running scenario: buffers, streams, events, measures, reports, storms.
//!
//! * `look_up`: evaluates metrics;
//! * `needs`: decides what must be tracked for them;
//! * `live_blocks` and `requests`: the blocks of storms, replays and inferences.

pub(crate) mod live_blocks;
pub(crate) mod look_up;
pub(crate) mod needs;
pub(crate) mod requests;

use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::allocator::{AllocatorSpec, PrivatePoolId, caching::Config};
use harness_allocator::device::{Clock, DeviceInfo, EventId, StreamId};
use harness_allocator::stats::{MemoryStats, StatKey};
use harness_allocator::units::Bytes;

use self::needs::{asks_for_memory, evicts, looks_at_sites, sizes_use_measured_memory};
use self::{live_blocks::LiveBlocks, requests::Requests};
use crate::processes::{Inside, Processes};
use crate::rig::{Buffer, Peaks, ProgramId, Rig, Stop, without_faults};
use crate::shared_memory::SharedMemory;
use harness_record::{MemoryFigures, ProcessFigures, RunProcesses};
use harness_scenario::{
    BufferName, BufferRef, DeviceKind, EventName, GrowthSite, MeasureName, Number, PoolName,
    ProgramName, Readings, ReportKey, Scenario, StepName, StreamName, VariableName, steps::Action,
};

/// See the module. The scenario has been checked, so every name refers to something of the right
/// kind.
pub(crate) struct RunContext {
    pub(crate) rig: Rig,
    pub(crate) arm: String,
    pub(crate) device: DeviceKind,
    pub(crate) seed: u64,
    /// True if a size refers to the device's memory at a `measure` step.
    sizes_use_measured_memory: bool,
    buffers: BTreeMap<BufferKey, Buffer>,
    /// The number of each buffer's last use. Entries of freed buffers stay until their name is
    /// reused.
    last_used: BTreeMap<BufferKey, u64>,
    uses: u64,
    /// True if a policy evicts the least recently used buffer. Otherwise uses are not counted.
    evicts: bool,
    /// Buffers that lost their name to a later one.
    leaked: Vec<Buffer>,
    /// By index of the name.
    programs: Vec<ProgramId>,
    /// The programs of the ranks of each data-parallel training, without the first rank.
    pub(crate) ranks: BTreeMap<StepName, Vec<ProgramId>>,
    pub(crate) rank_figures: BTreeMap<StepName, Vec<RankFigures>>,
    /// Each program numbers its own private pools.
    pools: BTreeMap<(ProgramId, PoolName), PrivatePoolId>,
    variables: BTreeMap<VariableName, Number>,
    /// The last value of each `growth(…)`, by its position.
    last_seen: BTreeMap<GrowthSite, u64>,
    pub(crate) figures: Figures,
    /// By index of the name; index 0 is the default stream.
    streams: Vec<StreamId>,
    events: BTreeMap<EventName, EventId>,
    measures: BTreeMap<MeasureName, Readings>,
    /// The bytes of each site at a measure, if sites are tracked. Nothing for the measure `start`.
    pub(crate) sites_at: BTreeMap<MeasureName, Vec<u64>>,
    pub(crate) reports: BTreeMap<StepName, BTreeMap<ReportKey, u64>>,
    storms: BTreeMap<StepName, LiveBlocks>,
    pub(crate) requests: Requests,
    /// The settings of PyTorch's allocator; `None` for other allocators.
    pub(crate) alloc_conf: Option<Config>,
    /// The torch counters of programs, by the name of their step. Empty if no process reported
    /// them.
    pub(crate) torch_stats: BTreeMap<StepName, BTreeMap<StatKey, u64>>,
    /// Optional programs that cannot run here.
    pub(crate) not_run: BTreeSet<StepName>,
    /// Device memory shared by the programs, created with the first one.
    pub(crate) shared_memory: Option<SharedMemory>,
    pub(crate) processes: Processes,
    /// The process that runs the current step, and the loops around the step; `None` for this
    /// process.
    pub(crate) inside: Option<Inside>,
}

#[derive(Clone, Debug)]
pub(crate) struct RankFigures {
    pub(crate) stats: MemoryStats,
    pub(crate) reports: BTreeMap<ReportKey, u64>,
}

/// A buffer's name and, for a numbered one, its number.
pub(crate) type BufferKey = (BufferName, Option<i64>);

pub(crate) fn buffer_name((name, index): &BufferKey) -> String {
    index.map_or_else(|| name.to_string(), |index| format!("{name}[{index}]"))
}

/// The figures of one allocator for the scenario's [comparisons](Scenario::comparisons), by
/// comparison and by index within it.
pub(crate) type Figures = BTreeMap<(usize, usize), Number>;

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
        let programs = scenario
            .programs
            .iter()
            .map(|_| rig.add_program(arm.build()))
            .collect();
        let ranks = add_ranks(&mut rig, scenario, arm);
        let mut ctx = Self {
            device: kind_of(rig.info()),
            rig,
            arm: arm.to_string(),
            seed,
            sizes_use_measured_memory: sizes_use_measured_memory(&scenario.steps),
            buffers: BTreeMap::new(),
            last_used: BTreeMap::new(),
            uses: 0,
            evicts: evicts(scenario),
            leaked: Vec::new(),
            programs,
            ranks,
            rank_figures: BTreeMap::new(),
            pools: BTreeMap::new(),
            variables: BTreeMap::new(),
            last_seen: BTreeMap::new(),
            figures: Figures::new(),
            streams,
            events: BTreeMap::new(),
            measures: BTreeMap::new(),
            sites_at: BTreeMap::new(),
            reports: BTreeMap::new(),
            storms: BTreeMap::new(),
            requests: Requests::default(),
            alloc_conf: arm.effective(),
            torch_stats: BTreeMap::new(),
            not_run: BTreeSet::new(),
            shared_memory: None,
            processes: Processes::default(),
            inside: None,
        };
        let faults = ctx.rig.faults().cloned();
        match without_faults(faults.as_ref(), || ctx.readings(true)) {
            Ok(readings) => {
                ctx.measures.insert(MeasureName::start(), readings);
                Ok(ctx)
            }
            Err(stop) => Err(close_failed(ctx.rig, ctx.streams, stop)),
        }
    }

    pub(crate) fn stream(&self, name: &StreamName) -> StreamId {
        self.streams[name.index()]
    }

    pub(crate) fn event(&mut self, name: &EventName) -> Result<EventId, Stop> {
        if let Some(&event) = self.events.get(name) {
            return Ok(event);
        }
        let event = self.rig.create_event()?;
        self.events.insert(name.clone(), event);
        Ok(event)
    }

    pub(crate) fn enter(&mut self, program: Option<&ProgramName>) {
        self.rig
            .enter(program.map_or(ProgramId::FIRST, |name| self.programs[name.index()]));
    }

    pub(crate) fn pool(&mut self, name: &PoolName) -> PrivatePoolId {
        let key = (self.rig.entered(), name.clone());
        if let Some(&pool) = self.pools.get(&key) {
            return pool;
        }
        let pool = self.rig.name_private_pool();
        self.pools.insert(key, pool);
        pool
    }

    pub(crate) fn set_variables<'v>(
        &mut self,
        variables: impl Iterator<Item = (&'v VariableName, Number)>,
    ) {
        self.variables.clear();
        self.variables
            .extend(variables.map(|(name, value)| (name.clone(), value)));
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

    /// Stores a buffer under a name. An older buffer of that name stays allocated without a name.
    pub(crate) fn keep(&mut self, key: BufferKey, buffer: Buffer) {
        self.used(&key);
        self.leaked.extend(self.buffers.insert(key, buffer));
    }

    pub(crate) fn is_live(&self, key: &BufferKey) -> bool {
        self.buffers.contains_key(key)
    }

    /// Removes a buffer; `None` if a recovery policy has already freed it.
    pub(crate) fn take(&mut self, key: &BufferKey) -> Option<Buffer> {
        self.buffers.remove(key)
    }

    /// The numbers of the live buffers of a name, in ascending order.
    pub(crate) fn elements(&self, name: &BufferName) -> Vec<i64> {
        let all = self
            .buffers
            .range((name.clone(), None)..)
            .take_while(|((other, _), _)| other == name);
        all.filter_map(|((_, index), _)| *index).collect()
    }

    /// Calls `act` with a live buffer. Returns false if there is no live buffer of that name.
    pub(crate) fn with_buffer(
        &mut self,
        key: &BufferKey,
        act: impl FnOnce(&mut Rig, &mut Buffer) -> Result<(), Stop>,
    ) -> Result<bool, Stop> {
        self.used(key);
        match self.buffers.get_mut(key) {
            Some(buffer) => act(&mut self.rig, buffer).map(|()| true),
            None => Ok(false),
        }
    }

    fn used(&mut self, key: &BufferKey) {
        if self.evicts {
            self.uses += 1;
            self.last_used.insert(key.clone(), self.uses);
        }
    }

    pub(crate) fn least_recently_used(&self, names: &[BufferName]) -> Option<BufferKey> {
        let keys = names.iter().flat_map(|name| {
            let numbered = self
                .elements(name)
                .into_iter()
                .map(|index| (name.clone(), Some(index)));
            std::iter::once((name.clone(), None)).chain(numbered)
        });
        keys.filter(|key| self.is_live(key))
            .min_by_key(|key| self.last_used.get(key).copied().unwrap_or(0))
    }

    /// Verifies the contents of buffers that their own stream wrote last and that have no queued
    /// work.
    pub(crate) fn verify_live(&mut self) -> Result<(), Stop> {
        self.buffers
            .values()
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
        let readings = self.readings(!self.rig.is_timed() || self.sizes_use_measured_memory)?;
        self.sites_at.extend(
            self.rig
                .site_bytes()
                .map(|held| (name.clone(), held.to_vec())),
        );
        self.measures.insert(name, readings);
        Ok(())
    }

    /// Takes all readings.
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
            .zip(&self.programs)
            .map(|(name, &program)| named(name.to_string(), program));
        let ranks = self.ranks.iter().flat_map(|(step, programs)| {
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
        let is_known = |peak: fn(&MemoryFigures) -> Option<Bytes>| {
            !self.processes.has_parallel_programs
                && each.iter().all(|one| peak(&one.figures).is_some())
        };
        let together = MemoryFigures {
            peak_reserved: peaks
                .peak_reserved
                .filter(|_| is_known(|one| one.peak_reserved)),
            peak_allocated: peaks
                .peak_allocated
                .filter(|_| is_known(|one| one.peak_allocated)),
            ooms: sum(|one| one.ooms),
            retries: sum(|one| one.retries),
        };
        Some(RunProcesses { each, together })
    }

    pub(crate) fn free_everything(&mut self) -> Result<(), Stop> {
        for buffer in std::mem::take(&mut self.buffers)
            .into_values()
            .chain(std::mem::take(&mut self.leaked))
        {
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
        let streams = self.streams.into_iter().skip(1).collect();
        self.rig.close(streams, self.events.into_values().collect())
    }
}

fn close_failed(rig: Rig, streams: Vec<StreamId>, stop: Stop) -> Stop {
    // Errors of closing would hide the reason.
    let _ = rig.close(streams.into_iter().skip(1).collect(), Vec::new());
    stop
}

fn create_streams(
    rig: &mut Rig,
    names: &[StreamName],
    streams: &mut Vec<StreamId>,
) -> Result<(), Stop> {
    if let Some(default) = names.first() {
        rig.name_stream(StreamId::DEFAULT, &default.to_string());
    }
    for name in names.iter().skip(1) {
        let stream = rig.create_stream()?;
        rig.name_stream(stream, &name.to_string());
        streams.push(stream);
    }
    Ok(())
}

/// Adds the programs of each data-parallel training's ranks, without the first rank.
fn add_ranks(
    rig: &mut Rig,
    scenario: &Scenario,
    arm: &AllocatorSpec,
) -> BTreeMap<StepName, Vec<ProgramId>> {
    let trainings = scenario
        .all_steps()
        .into_iter()
        .filter_map(|step| match &step.action {
            Action::Train(train) => train
                .ranks
                .as_ref()
                .map(|ranks| (train.id.clone(), ranks.count())),
            _ => None,
        });
    trainings
        .map(|(id, count)| {
            (
                id,
                (1..count).map(|_| rig.add_program(arm.build())).collect(),
            )
        })
        .collect()
}

pub(crate) const fn kind_of(info: &DeviceInfo) -> DeviceKind {
    match info.clock {
        Clock::Simulated => DeviceKind::Simulated,
        Clock::Measured => DeviceKind::Gpu,
    }
}
