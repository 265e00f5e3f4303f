//! What a scenario's names stand for while it runs: buffers, streams, events, measures, reports, storms.
//!
//! * `look_up`: what metrics come to;
//! * `needs`: what has to be kept for them, as the steps ask for it;
//! * `live_blocks` and `requests`: what storms, replays and inferences hold.

pub(crate) mod live_blocks;
pub(crate) mod look_up;
pub(crate) mod needs;
pub(crate) mod requests;

use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::allocator::caching::Config;
use harness_allocator::allocator::{AllocatorSpec, PrivatePoolId};
use harness_allocator::device::{Clock, EventId, StreamId};
use harness_allocator::stats::{MemoryStats, StatKey};

use self::live_blocks::LiveBlocks;
use self::needs::{asks_for_memory, evicts, looks_at_sites, sizes_use_measured_memory};
use self::requests::Requests;
use crate::processes::{Inside, Processes};
use crate::rig::{Buffer, ProgramId, Rig, Stop, unstruck};
use crate::shared_memory::SharedMemory;
use harness_scenario::steps::Action;
use harness_scenario::{
    BufferName, BufferRef, DeviceKind, EventName, GrowthSite, MeasureName, Number, PoolName, ProgramName, Readings, ReportKey, Scenario,
    StepName, StreamName, VariableName,
};

/// See the module. The checks of the language have made sure that every name is used as it may be.
pub(crate) struct World {
    pub(crate) rig: Rig,
    /// The name of the allocator's arm.
    pub(crate) arm: String,
    /// The kind of device that it runs on.
    pub(crate) device: DeviceKind,
    pub(crate) seed: u64,
    /// Whether a size refers to the device's memory at a `measure` step: then a timed run has to ask for it there.
    sizes_use_measured_memory: bool,
    buffers: BTreeMap<BufferKey, Buffer>,
    /// When each buffer was used last: the number of that use. Buffers that are gone stay in it until their name is used again.
    last_used: BTreeMap<BufferKey, u64>,
    uses: u64,
    /// Whether a policy asks for the buffer that was used longest ago: otherwise nobody counts uses.
    evicts: bool,
    /// Buffers that lost their name to a later one.
    leaked: Vec<Buffer>,
    /// By number of the name.
    programs: Vec<ProgramId>,
    /// Of each data-parallel training, the programs of its ranks but for the first.
    ranks: BTreeMap<StepName, Vec<ProgramId>>,
    /// What was told of each rank.
    rank_figures: BTreeMap<StepName, Vec<RankFigures>>,
    /// Each program numbers its private pools itself.
    pools: BTreeMap<(ProgramId, PoolName), PrivatePoolId>,
    /// Variables of the loops around the step at hand.
    variables: BTreeMap<VariableName, Number>,
    /// What `growth(…)` saw the last time, by place.
    last_seen: BTreeMap<GrowthSite, u64>,
    /// What expectations between arms are to be judged by.
    figures: Figures,
    /// By number of the name; number 0 is the default stream.
    streams: Vec<StreamId>,
    events: BTreeMap<EventName, EventId>,
    measures: BTreeMap<MeasureName, Readings>,
    /// What each site held at a measure, where sites are looked at.
    sites_at: BTreeMap<MeasureName, Vec<u64>>,
    reports: BTreeMap<StepName, BTreeMap<ReportKey, u64>>,
    storms: BTreeMap<StepName, LiveBlocks>,
    /// Those of the inference that is trying to get memory.
    pub(crate) requests: Requests,
    /// Settings of PyTorch's allocator of the arm; `None` where it is another allocator.
    pub(crate) alloc_conf: Option<Config>,
    /// Counters of the torch of programs that were run, by the name of their step. Empty where no process told them.
    pub(crate) torch_stats: BTreeMap<StepName, BTreeMap<StatKey, u64>>,
    /// Optional programs that could not be run here.
    pub(crate) not_run: BTreeSet<StepName>,
    /// What the programs share; made when the first one is run.
    pub(crate) shared_memory: Option<SharedMemory>,
    /// The processes beside this one, where the scenario has any.
    pub(crate) processes: Option<Processes>,
    /// Which of them does the step at hand; `None` where this one does.
    pub(crate) inside: Option<Inside>,
}

/// What is told of one rank of a data-parallel training.
#[derive(Clone, Debug)]
pub(crate) struct RankFigures {
    /// The counters of its allocator, when the training was over.
    pub(crate) stats: MemoryStats,
    /// What it counted of itself.
    pub(crate) reports: BTreeMap<ReportKey, u64>,
}

/// A buffer's name and, of numbered ones, its number.
pub(crate) type BufferKey = (BufferName, Option<i64>);

/// Figures of one arm for the scenario's [comparisons](Scenario::comparisons): by the number of the comparison and the place of the figure
/// in it.
pub(crate) type Figures = BTreeMap<(usize, usize), Number>;

impl World {
    /// Makes the scenario's streams and takes the measure `start`.
    pub(crate) fn new(mut rig: Rig, scenario: &Scenario, arm: &AllocatorSpec, seed: u64) -> Result<Self, Box<(Rig, Vec<StreamId>, Stop)>> {
        let mut streams = vec![StreamId::DEFAULT];
        if let Err(stop) = create_streams(&mut rig, &scenario.streams, &mut streams).and_then(|()| rig.unstruck(Rig::begin_scenario)) {
            return Err(Box::new((rig, streams, stop)));
        }
        if scenario.all_steps().iter().any(|step| looks_at_sites(&step.action)) {
            rig.watch_sites();
        }
        let programs = scenario.programs.iter().map(|_| rig.add_program(arm.build())).collect();
        let ranks = add_ranks(&mut rig, scenario, arm);
        let mut world = Self {
            device: device_kind(rig.info().clock),
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
            processes: None,
            inside: None,
        };
        let faults = world.rig.faults().cloned();
        match unstruck(faults.as_ref(), || world.readings(true)) {
            Ok(readings) => {
                world.measures.insert(MeasureName::start(), readings);
                Ok(world)
            }
            Err(stop) => Err(Box::new((world.rig, world.streams, stop))),
        }
    }

    pub(crate) fn stream(&self, name: &StreamName) -> StreamId {
        self.streams[name.index()]
    }

    /// The event of that name, made on first use.
    pub(crate) fn event(&mut self, name: &EventName) -> Result<EventId, Stop> {
        if let Some(&event) = self.events.get(name) {
            return Ok(event);
        }
        let event = self.rig.create_event()?;
        self.events.insert(name.clone(), event);
        Ok(event)
    }

    /// Enters a program; the main one if none is named.
    pub(crate) fn enter(&mut self, program: Option<&ProgramName>) {
        self.rig.enter(program.map_or(ProgramId::FIRST, |name| self.programs[name.index()]));
    }

    /// The entered program's private pool of that name, numbered on first use.
    pub(crate) fn pool(&mut self, name: &PoolName) -> PrivatePoolId {
        let key = (self.rig.entered(), name.clone());
        if let Some(&pool) = self.pools.get(&key) {
            return pool;
        }
        let pool = self.rig.name_private_pool();
        self.pools.insert(key, pool);
        pool
    }

    /// Gives the variables of loops their values.
    pub(crate) fn set_variables<'v>(&mut self, variables: impl Iterator<Item = (&'v VariableName, Number)>) {
        self.variables.clear();
        self.variables.extend(variables.map(|(name, value)| (name.clone(), value)));
    }

    /// Which buffer is meant now. The inner error says in words why none is.
    pub(crate) fn key(&mut self, buffer: &BufferRef) -> Result<Result<BufferKey, String>, Stop> {
        let Some(index) = &buffer.index else { return Ok(Ok((buffer.name.clone(), None))) };
        let now = self.readings(index.quantities().into_iter().any(asks_for_memory))?;
        let number = match index.evaluate(&mut |metric| self.look_up(metric, &now)) {
            Ok(number) => number,
            Err(why) => return Ok(Err(why.to_string())),
        };
        let whole = number.is_integer().then(|| i64::try_from(number.to_integer()).ok()).flatten();
        Ok(whole.map(|index| (buffer.name.clone(), Some(index))).ok_or_else(|| format!("the number of `{buffer}` comes to {number}")))
    }

    /// Keeps a buffer under a name; one that has the name already loses it and stays allocated.
    pub(crate) fn keep(&mut self, key: BufferKey, buffer: Buffer) {
        self.used(&key);
        self.leaked.extend(self.buffers.insert(key, buffer));
    }

    /// Whether a buffer of that name is live.
    pub(crate) fn is_live(&self, key: &BufferKey) -> bool {
        self.buffers.contains_key(key)
    }

    /// Takes a buffer out; `None` where a recovery policy has freed it.
    pub(crate) fn take(&mut self, key: &BufferKey) -> Option<Buffer> {
        self.buffers.remove(key)
    }

    /// Takes all numbered buffers of a name out.
    pub(crate) fn take_elements(&mut self, name: &BufferName) -> Vec<Buffer> {
        self.elements(name).into_iter().filter_map(|index| self.buffers.remove(&(name.clone(), Some(index)))).collect()
    }

    /// The numbers of the live buffers of a name, in order.
    pub(crate) fn elements(&self, name: &BufferName) -> Vec<i64> {
        let all = self.buffers.range((name.clone(), None)..).take_while(|((other, _), _)| other == name);
        all.filter_map(|((_, index), _)| *index).collect()
    }

    /// Does something with a live buffer; nothing, and `false`, where there is none.
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

    /// Of the live buffers of some names, the one whose last use is the longest ago.
    pub(crate) fn least_recently_used(&self, names: &[BufferName]) -> Option<BufferKey> {
        let keys = names.iter().flat_map(|name| {
            let numbered = self.elements(name).into_iter().map(|index| (name.clone(), Some(index)));
            std::iter::once((name.clone(), None)).chain(numbered)
        });
        keys.filter(|key| self.is_live(key)).min_by_key(|key| self.last_used.get(key).copied().unwrap_or(0))
    }

    /// Compares what the buffers hold with what was written last, where their own stream wrote it and nothing is queued on it. Others are compared when they
    /// are freed: until then the program may order their streams.
    pub(crate) fn verify_live(&mut self) -> Result<(), Stop> {
        self.buffers.values().filter(|buffer| buffer.is_own_work()).try_for_each(|buffer| self.rig.verify_at_rest(buffer))
    }

    /// The same of the live blocks of storms.
    pub(crate) fn verify_storms(&mut self) -> Result<(), Stop> {
        let blocks = self.storms.values().flat_map(|storm| storm.blocks.values());
        blocks.filter(|buffer| buffer.is_own_work()).try_for_each(|buffer| self.rig.verify_at_rest(buffer))
    }

    pub(crate) fn storm(&mut self, id: &StepName) -> &mut LiveBlocks {
        self.storms.entry(id.clone()).or_default()
    }

    /// Keeps all accounts as they are now. A timed run asks the device for its memory only where a size refers to it.
    pub(crate) fn measure(&mut self, name: MeasureName) -> Result<(), Stop> {
        let readings = self.readings(!self.rig.is_timed() || self.sizes_use_measured_memory)?;
        self.sites_at.extend(self.rig.site_bytes().map(|held| (name.clone(), held.to_vec())));
        self.measures.insert(name, readings);
        Ok(())
    }

    /// What each site held at a measure, by its number; nothing at one that was not taken, as at the start.
    pub(crate) fn sites_at(&self, measure: &MeasureName) -> &[u64] {
        self.sites_at.get(measure).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn report(&mut self, id: StepName, reports: BTreeMap<ReportKey, u64>) {
        self.reports.insert(id, reports);
    }

    /// The programs of a data-parallel training's ranks, but for the first.
    pub(crate) fn programs_of_ranks(&self, id: &StepName) -> Vec<ProgramId> {
        self.ranks.get(id).cloned().unwrap_or_default()
    }

    /// Keeps what is told of each rank.
    pub(crate) fn report_ranks(&mut self, id: StepName, figures: Vec<RankFigures>) {
        self.rank_figures.insert(id, figures);
    }

    /// All accounts now, the device's memory only if it is wanted: its answer may take milliseconds. The clock comes last, so that a time since
    /// this moment begins behind the answer.
    pub(crate) fn readings(&mut self, memory: bool) -> Result<Readings, Stop> {
        let (stats, calls) = (self.rig.stats(), self.rig.calls());
        let memory = if memory { Some(self.rig.memory()?) } else { None };
        Ok(Readings { stats, memory, calls, now: self.rig.now() })
    }

    /// Keeps a figure of this arm for an expectation between arms.
    pub(crate) fn keep_figure(&mut self, comparison: usize, place: usize, figure: Number) {
        self.figures.insert((comparison, place), figure);
    }

    /// What expectations between arms are to be judged by.
    pub(crate) fn take_figures(&mut self) -> Figures {
        std::mem::take(&mut self.figures)
    }

    /// Frees everything that is still live.
    pub(crate) fn free_everything(&mut self) -> Result<(), Stop> {
        for buffer in std::mem::take(&mut self.buffers).into_values().chain(std::mem::take(&mut self.leaked)) {
            self.rig.free(buffer)?;
        }
        for blocks in std::mem::take(&mut self.storms).into_values() {
            for buffer in blocks.into_blocks() {
                self.rig.free(buffer)?;
            }
        }
        Ok(())
    }

    /// Gives the device's handles back, whatever state the run ended in.
    pub(crate) fn close(self) -> Result<(), Stop> {
        // Those that still run are killed: the run has failed.
        drop(self.processes);
        let streams = self.streams.into_iter().skip(1).collect();
        self.rig.close(streams, self.events.into_values().collect())
    }
}

/// Makes the scenario's streams behind the default one. Those that were made are added, however it ends.
fn create_streams(rig: &mut Rig, names: &[StreamName], streams: &mut Vec<StreamId>) -> Result<(), Stop> {
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

/// Adds the programs of each data-parallel training's ranks, but for the first.
fn add_ranks(rig: &mut Rig, scenario: &Scenario, arm: &AllocatorSpec) -> BTreeMap<StepName, Vec<ProgramId>> {
    let trainings = scenario.all_steps().into_iter().filter_map(|step| match &step.action {
        Action::Train(train) => train.ranks.as_ref().map(|ranks| (train.id.clone(), ranks.count())),
        _ => None,
    });
    trainings.map(|(id, count)| (id, (1..count).map(|_| rig.add_program(arm.build())).collect())).collect()
}

const fn device_kind(clock: Clock) -> DeviceKind {
    match clock {
        Clock::Simulated => DeviceKind::Simulated,
        Clock::Measured => DeviceKind::Gpu,
    }
}
