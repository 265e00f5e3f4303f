//! What a scenario's names stand for while it runs: buffers, streams, events, measures, reports, storms; and what a step leaves behind
//! ([`StepResult`]).

use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::allocator::caching::Config;
use harness_allocator::allocator::{AllocatorSpec, PrivatePoolId};
use harness_allocator::device::{Clock, DevicePtr, EventId, StreamId};
use harness_allocator::stats::{MemoryStats, StatKey};
use harness_allocator::units::{Bytes, Nanos};

use crate::processes::{Inside, Processes};
use crate::rig::{Buffer, ProgramId, Rig, Stop, unstruck};
use crate::shared_memory::SharedMemory;
use crate::workload::infer::Requests;
use harness_record::{Cause, CauseKind, Outcome, Recovery, Shortage, Table, causes};
use harness_scenario::steps::Action;
use harness_scenario::steps::free::Free;
use harness_scenario::{
    Account, Amount, BufferName, BufferRef, Chain, DeviceKind, DeviceMetric, EventName, GrowthSite, MeasureName, Metric, Number,
    PolicyKind, PoolName, Position, ProgramName, RankFigure, Readings, ReportKey, Scenario, Step, StepName, StreamName, VariableName,
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

/// Why a metric has no value: in words, for the failed expectation.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum LookUpError {
    /// The device cannot tell.
    #[error("{0} is not known: NVML does not tell what belongs to this process")]
    Unknown(String),
    /// The step did not report it.
    #[error("{0} was not reported")]
    NotReported(String),
    /// No process of a program told it.
    #[error("{0} is not known: no process of the program told counters of torch, since none imported it, or it was ended before it could")]
    NotTold(String),
    /// Its step was passed over: the program cannot be run here.
    #[error("{0} is not known: the program was not run")]
    NotRun(String),
    /// A growth has nothing to be compared with yet.
    #[error("{0} is seen for the first time")]
    FirstTime(String),
    /// It is of another arm.
    #[error("{0} is known when all allocators have run")]
    OtherArm(String),
}

impl World {
    /// Makes the scenario's streams and takes the measure `start`.
    pub(crate) fn new(mut rig: Rig, scenario: &Scenario, arm: &AllocatorSpec, seed: u64) -> Result<Self, Box<(Rig, Vec<StreamId>, Stop)>> {
        let mut streams = vec![StreamId::DEFAULT];
        let mut begun = Ok(());
        if let Some(default) = scenario.streams.first() {
            rig.name_stream(StreamId::DEFAULT, &default.to_string());
        }
        for name in scenario.streams.iter().skip(1) {
            match rig.create_stream() {
                Ok(stream) => {
                    rig.name_stream(stream, &name.to_string());
                    streams.push(stream);
                }
                Err(stop) => {
                    begun = Err(stop);
                    break;
                }
            }
        }
        if let Err(stop) = begun.and_then(|()| rig.unstruck(Rig::begin_scenario)) {
            return Err(Box::new((rig, streams, stop)));
        }
        if scenario.all_steps().iter().any(|step| looks_at_sites(&step.action)) {
            rig.watch_sites();
        }
        let programs = scenario.programs.iter().map(|_| rig.add_program(arm.build())).collect();
        let trainings = scenario.all_steps().into_iter().filter_map(|step| match &step.action {
            Action::Train(train) => train.ranks.as_ref().map(|ranks| (train.id.clone(), ranks.count())),
            _ => None,
        });
        let ranks = trainings.map(|(id, count)| (id, (1..count).map(|_| rig.add_program(arm.build())).collect())).collect();
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

    /// The value of a metric. Those of the present are taken from `now`, so that all of one expression are of one moment.
    pub(crate) fn look_up(&self, metric: &Metric, now: &Readings) -> Result<Number, LookUpError> {
        let value = match metric {
            Metric::Variable(name, _) => {
                return self.variables.get(name).copied().ok_or_else(|| LookUpError::NotReported(metric.to_string()));
            }
            Metric::Now(account) => now.get(*account),
            Metric::At(name, account) => {
                let readings = self.measures.get(name).ok_or_else(|| LookUpError::NotReported(metric.to_string()))?;
                readings.get(*account)
            }
            Metric::Program(program, key) => Some(self.rig.stats_of(self.programs[program.index()]).get(*key)),
            Metric::Rank(step, rank, figure) => {
                let figures = self.rank_figures.get(step).and_then(|ranks| ranks.get(*rank));
                let figures = figures.ok_or_else(|| LookUpError::NotReported(metric.to_string()))?;
                let value = match figure {
                    RankFigure::Report(key) => figures.reports.get(key).copied(),
                    RankFigure::Stat(key) => Some(figures.stats.get(*key)),
                };
                return value.map(whole).ok_or_else(|| LookUpError::NotReported(metric.to_string()));
            }
            Metric::Process(process, account) => {
                let readings = self.processes.as_ref().and_then(|processes| processes.readings(process));
                readings.ok_or_else(|| LookUpError::NotReported(metric.to_string()))?.get(*account)
            }
            Metric::Growth(site, account) => {
                let value = now.get(*account).ok_or_else(|| LookUpError::Unknown(metric.to_string()))?;
                let last = self.last_seen.get(site).ok_or_else(|| LookUpError::FirstTime(metric.to_string()))?;
                return Ok(Number::from_integer(i128::from(value) - i128::from(*last)));
            }
            Metric::Report(step, _) | Metric::Torch(step, _) if self.not_run.contains(step) => {
                return Err(LookUpError::NotRun(metric.to_string()));
            }
            Metric::Report(step, key) => {
                let value = self.reports.get(step).and_then(|reports| reports.get(key)).copied();
                return value.map(whole).ok_or_else(|| LookUpError::NotReported(metric.to_string()));
            }
            Metric::Torch(step, key) => {
                let stats = self.torch_stats.get(step).ok_or_else(|| LookUpError::NotReported(metric.to_string()))?;
                return stats.get(key).copied().map(whole).ok_or_else(|| LookUpError::NotTold(metric.to_string()));
            }
            Metric::Arm(..) => return Err(LookUpError::OtherArm(metric.to_string())),
        };
        value.map(whole).ok_or_else(|| LookUpError::Unknown(metric.to_string()))
    }

    /// Remembers what the growths of an expectation are to be compared with the next time.
    pub(crate) fn remember<'m>(&mut self, metrics: impl Iterator<Item = &'m Metric>, now: &Readings) {
        for metric in metrics {
            if let Metric::Growth(site, account) = metric
                && let Some(value) = now.get(*account)
            {
                self.last_seen.insert(*site, value);
            }
        }
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

/// Whether a policy of the scenario frees the buffer that was used longest ago.
fn evicts(scenario: &Scenario) -> bool {
    let steps = scenario.all_steps();
    let mut policies = steps.iter().filter_map(|step| step.action.on_oom()).flat_map(Chain::policies);
    policies.any(|policy| policy.kind() == PolicyKind::Evict)
}

/// Whether a step wants to know what each site holds.
const fn looks_at_sites(action: &Action) -> bool {
    matches!(action, Action::Compare(_)) || action.leak_check().is_some()
}

fn whole(value: u64) -> Number {
    Number::from_integer(i128::from(value))
}

const fn device_kind(clock: Clock) -> DeviceKind {
    match clock {
        Clock::Simulated => DeviceKind::Simulated,
        Clock::Measured => DeviceKind::Gpu,
    }
}

/// Whether some size refers to the device's memory as it was at a `measure` step.
fn sizes_use_measured_memory(steps: &[Step]) -> bool {
    let of = |amount: &Amount| amount.quantities().into_iter().any(|metric| matches!(metric, Metric::At(..)) && asks_for_memory(metric));
    steps.iter().any(|step| {
        let own = match &step.action {
            Action::Alloc(alloc) => of(&alloc.size),
            Action::Pressure(pressure) => of(&pressure.held),
            Action::Free(Free::Pinning { request, .. }) => of(request),
            _ => false,
        };
        own || sizes_use_measured_memory(step.action.steps()) || sizes_use_measured_memory(&step.meanwhile)
    })
}

/// Whether the device has to be asked for its memory to know the metric.
pub(crate) fn asks_for_memory(metric: &Metric) -> bool {
    let metric = if let Metric::Arm(_, metric) = metric { metric } else { metric };
    match metric.account() {
        None | Some(Account::Stat(_)) => false,
        Some(Account::Device(metric)) => match metric {
            DeviceMetric::Used
            | DeviceMetric::Free
            | DeviceMetric::Total
            | DeviceMetric::ContextOverhead
            | DeviceMetric::Pressure
            | DeviceMetric::Process => true,
            DeviceMetric::MallocCalls
            | DeviceMetric::MallocFailures
            | DeviceMetric::FreeCalls
            | DeviceMetric::MemoryCalls
            | DeviceMetric::Synchronizations
            | DeviceMetric::Now => false,
        },
    }
}

/// What a step did.
#[derive(Clone, Debug)]
pub(crate) struct StepResult {
    pub(crate) outcome: Outcome,
    pub(crate) reports: BTreeMap<ReportKey, u64>,
    pub(crate) notes: Vec<String>,
    pub(crate) tables: Vec<Table>,
    pub(crate) unmet: Vec<Unmet>,
    pub(crate) shortage: Option<Shortage>,
    /// What the size of a request came to.
    pub(crate) size: Option<Bytes>,
    /// Of a step with recovery policies, what they did.
    pub(crate) recovery: Option<Recovery>,
}

impl Default for StepResult {
    fn default() -> Self {
        let (reports, notes, tables, unmet, shortage, size, recovery) = Default::default();
        Self { outcome: Outcome::Done, reports, notes, tables, unmet, shortage, size, recovery }
    }
}

impl StepResult {
    /// What the step reports. Its times are reported by a timed run only: in a checked run they are those of the checks too.
    pub(crate) fn reports_with(&self, duration: Option<Nanos>) -> BTreeMap<ReportKey, u64> {
        let mut reports = self.reports.clone();
        match duration {
            Some(duration) => drop(reports.insert(ReportKey::Time, duration.0)),
            None => reports.retain(|key, _| !key.is_timed()),
        }
        reports
    }
}

/// Something that was expected and not seen.
#[derive(Clone, Debug)]
pub(crate) struct Unmet {
    pub(crate) at: Position,
    pub(crate) expected: String,
    pub(crate) seen: String,
}

impl Unmet {
    pub(crate) fn at(step: &Step, expected: impl Into<String>, seen: impl Into<String>) -> Self {
        Self { at: step.position, expected: expected.into(), seen: seen.into() }
    }

    /// A request failed, and not for the cause that is expected. A timed run does not look for causes.
    pub(crate) fn other_cause(step: &Step, expected: CauseKind, shortage: Option<&Shortage>) -> Option<Self> {
        let causes: Vec<CauseKind> = causes(shortage?).iter().map(Cause::kind).collect();
        if causes.contains(&expected) {
            return None;
        }
        let names: Vec<String> = causes.iter().map(|cause| format!("`{cause}` ({})", cause.about())).collect();
        let seen = if names.is_empty() { "no cause that the figures show".to_owned() } else { names.join(", ") };
        Some(Self::at(step, format!("the cause `{expected}`: {}", expected.about()), seen))
    }
}

/// The live blocks of a storm or a replay, by the operation at which each is due, or by its id in the trace, and the order of their making.
#[derive(Debug)]
pub(crate) struct LiveBlocks<B = Buffer> {
    blocks: BTreeMap<(u64, u64), B>,
    bytes: u64,
    made: u64,
}

/// A block that somebody asked for.
pub(crate) trait Block {
    /// How much was asked for.
    fn requested(&self) -> Bytes;
}

impl Block for Buffer {
    fn requested(&self) -> Bytes {
        Self::requested(self)
    }
}

impl<B> Default for LiveBlocks<B> {
    fn default() -> Self {
        Self { blocks: BTreeMap::new(), bytes: 0, made: 0 }
    }
}

impl LiveBlocks {
    /// Where they lie.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = DevicePtr> {
        self.blocks.values().map(|buffer| buffer.range().start)
    }

    /// Takes those out that a condition on their address selects.
    pub(crate) fn take_where(&mut self, select: impl Fn(DevicePtr) -> bool) -> Vec<Buffer> {
        let keys: Vec<(u64, u64)> = self.blocks.iter().filter(|(_, buffer)| select(buffer.range().start)).map(|(&key, _)| key).collect();
        keys.into_iter().filter_map(|key| self.take(key)).collect()
    }
}

impl<B: Block> LiveBlocks<B> {
    /// How many there are.
    pub(crate) fn count(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Requested bytes of all of them.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// All of them, those due first in front.
    pub(crate) fn into_blocks(self) -> impl Iterator<Item = B> {
        self.blocks.into_values()
    }

    pub(crate) fn insert(&mut self, due: u64, buffer: B) {
        self.bytes += buffer.requested().0;
        self.made += 1;
        self.blocks.insert((due, self.made), buffer);
    }

    /// The block due next, if it is due by then.
    pub(crate) fn take_due(&mut self, by: u64) -> Option<B> {
        let key = *self.blocks.first_key_value().filter(|((due, _), _)| *due <= by)?.0;
        self.take(key)
    }

    /// The block with that id.
    pub(crate) fn take_of(&mut self, id: u64) -> Option<B> {
        let (&key, _) = self.blocks.range((id, 0)..=(id, u64::MAX)).next()?;
        self.take(key)
    }

    fn take(&mut self, key: (u64, u64)) -> Option<B> {
        let buffer = self.blocks.remove(&key)?;
        self.bytes -= buffer.requested().0;
        Some(buffer)
    }
}
