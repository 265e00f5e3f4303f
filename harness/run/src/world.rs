//! What a scenario's names stand for while it runs: buffers, streams, events, measures, reports, storms; and what a step leaves behind
//! ([`StepResult`]).

use std::collections::BTreeMap;

use harness_allocator::device::{DevicePtr, EventId, StreamId};
use harness_allocator::units::{Bytes, Nanos};

use crate::rig::{Buffer, Rig, Stop};
use harness_record::{Outcome, Shortage, Table};
use harness_scenario::steps::Action;
use harness_scenario::steps::free::Free;
use harness_scenario::{
    Account, Amount, BufferName, DeviceMetric, EventName, MeasureName, Metric, Position, Readings, ReportKey, Scenario, Step, StepName,
    StreamName, Unit,
};

/// See the module. The checks of the language have made sure that every name is used as it may be.
pub(crate) struct World {
    pub(crate) rig: Rig,
    /// The name of the allocator's arm.
    pub(crate) arm: String,
    pub(crate) seed: u64,
    /// Whether a size refers to the device's memory at a `measure` step: then a timed run has to ask for it there.
    sizes_use_measured_memory: bool,
    buffers: BTreeMap<BufferName, Buffer>,
    /// By number of the name; number 0 is the default stream.
    streams: Vec<StreamId>,
    events: BTreeMap<EventName, EventId>,
    measures: BTreeMap<MeasureName, Readings>,
    reports: BTreeMap<StepName, BTreeMap<ReportKey, u64>>,
    storms: BTreeMap<StepName, LiveBlocks>,
}

/// Why a metric has no value: in words, for the failed expectation.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum LookUpError {
    /// The device cannot tell.
    #[error("{0} is not known: NVML does not tell what belongs to this process")]
    Unknown(String),
    /// The step did not report it.
    #[error("{0} was not reported")]
    NotReported(String),
}

impl World {
    /// Makes the scenario's streams and takes the measure `start`.
    pub(crate) fn new(mut rig: Rig, scenario: &Scenario, arm: String, seed: u64) -> Result<Self, Box<(Rig, Vec<StreamId>, Stop)>> {
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
        if let Err(stop) = begun.and_then(|()| rig.begin_scenario()) {
            return Err(Box::new((rig, streams, stop)));
        }
        let mut world = Self {
            rig,
            arm,
            seed,
            sizes_use_measured_memory: sizes_use_measured_memory(&scenario.steps),
            buffers: BTreeMap::new(),
            streams,
            events: BTreeMap::new(),
            measures: BTreeMap::new(),
            reports: BTreeMap::new(),
            storms: BTreeMap::new(),
        };
        match world.readings(true) {
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

    pub(crate) fn keep(&mut self, name: &BufferName, buffer: Buffer) {
        let before = self.buffers.insert(name.clone(), buffer);
        debug_assert!(before.is_none(), "a live name is not given twice: the check of the language saw to it");
    }

    /// Takes a buffer out; `None` where a recovery policy has freed it.
    pub(crate) fn take(&mut self, name: &BufferName) -> Option<Buffer> {
        self.buffers.remove(name)
    }

    /// Does something with a live buffer; nothing where a recovery policy has freed it.
    pub(crate) fn with_buffer(
        &mut self,
        name: &BufferName,
        act: impl FnOnce(&mut Rig, &mut Buffer) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        match self.buffers.get_mut(name) {
            Some(buffer) => act(&mut self.rig, buffer),
            None => Ok(()),
        }
    }

    pub(crate) fn storm(&mut self, id: &StepName) -> &mut LiveBlocks {
        self.storms.entry(id.clone()).or_default()
    }

    /// Keeps all accounts as they are now. A timed run asks the device for its memory only where a size refers to it.
    pub(crate) fn measure(&mut self, name: MeasureName) -> Result<(), Stop> {
        let readings = self.readings(!self.rig.is_timed() || self.sizes_use_measured_memory)?;
        self.measures.insert(name, readings);
        Ok(())
    }

    pub(crate) fn report(&mut self, id: StepName, reports: BTreeMap<ReportKey, u64>) {
        self.reports.insert(id, reports);
    }

    /// All accounts now, the device's memory only if it is wanted: its answer may take milliseconds. The clock comes last, so that a time since
    /// this moment begins behind the answer.
    pub(crate) fn readings(&mut self, memory: bool) -> Result<Readings, Stop> {
        let (stats, calls) = (self.rig.stats(), self.rig.calls());
        let memory = if memory { Some(self.rig.memory()?) } else { None };
        Ok(Readings { stats, memory, calls, now: self.rig.now() })
    }

    /// The value of a metric. Those of the present are taken from `now`, so that all of one expression are of one moment.
    pub(crate) fn look_up(&self, metric: &Metric, now: &Readings) -> Result<u64, LookUpError> {
        let value = match metric {
            Metric::Now(account) => now.get(*account),
            Metric::At(name, account) => {
                let readings = self.measures.get(name).ok_or_else(|| LookUpError::NotReported(metric.to_string()))?;
                readings.get(*account)
            }
            Metric::Report(step, key) => {
                let value = self.reports.get(step).and_then(|reports| reports.get(key));
                return value.copied().ok_or_else(|| LookUpError::NotReported(metric.to_string()));
            }
        };
        value.ok_or_else(|| LookUpError::Unknown(metric.to_string()))
    }

    /// Frees everything that is still live.
    pub(crate) fn free_everything(&mut self) -> Result<(), Stop> {
        for buffer in std::mem::take(&mut self.buffers).into_values() {
            self.rig.free(buffer)?;
        }
        for blocks in std::mem::take(&mut self.storms).into_values() {
            for buffer in blocks.into_buffers() {
                self.rig.free(buffer)?;
            }
        }
        Ok(())
    }

    /// Gives the device's handles back, whatever state the run ended in.
    pub(crate) fn close(self) -> Result<(), Stop> {
        let streams = self.streams.into_iter().skip(1).collect();
        self.rig.close(streams, self.events.into_values().collect())
    }
}

/// Whether some size refers to the device's memory as it was at a `measure` step.
fn sizes_use_measured_memory(steps: &[Step]) -> bool {
    let of = |amount: &Amount| amount.metrics().any(|metric| matches!(metric, Metric::At(..)) && asks_for_memory(metric));
    steps.iter().any(|step| match &step.action {
        Action::Alloc(alloc) => of(&alloc.size),
        Action::Pressure(pressure) => of(&pressure.held),
        Action::Free(Free::Pinning { request, .. }) => of(request),
        Action::Repeat(repeat) => sizes_use_measured_memory(&repeat.steps),
        _ => false,
    })
}

/// Whether the device has to be asked for its memory to know the metric.
pub(crate) fn asks_for_memory(metric: &Metric) -> bool {
    let account = match metric {
        Metric::Now(account) | Metric::At(_, account) => account,
        Metric::Report(..) => return false,
    };
    match account {
        Account::Stat(_) => false,
        Account::Device(metric) => match metric {
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
}

impl Default for StepResult {
    fn default() -> Self {
        let (reports, notes, tables, unmet, shortage, size) = Default::default();
        Self { outcome: Outcome::Done, reports, notes, tables, unmet, shortage, size }
    }
}

impl StepResult {
    /// What the step reports. Its times are reported by a timed run only: in a checked run they are those of the checks too.
    pub(crate) fn reports_with(&self, duration: Option<Nanos>) -> BTreeMap<ReportKey, u64> {
        let mut reports = self.reports.clone();
        match duration {
            Some(duration) => drop(reports.insert(ReportKey::Time, duration.0)),
            None => reports.retain(|key, _| key.unit() != Unit::Time),
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
}

/// The live blocks of a storm, by the operation at which each is due and the order of their making.
#[derive(Debug, Default)]
pub(crate) struct LiveBlocks {
    blocks: BTreeMap<(u64, u64), Buffer>,
    bytes: u64,
    made: u64,
}

impl LiveBlocks {
    /// How many there are.
    pub(crate) fn count(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Requested bytes of all of them.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// All of them, those due first in front.
    pub(crate) fn into_buffers(self) -> impl Iterator<Item = Buffer> {
        self.blocks.into_values()
    }

    /// Where they lie.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = DevicePtr> {
        self.blocks.values().map(|buffer| buffer.range().start)
    }

    /// Takes those out that a condition on their address selects.
    pub(crate) fn take_where(&mut self, select: impl Fn(DevicePtr) -> bool) -> Vec<Buffer> {
        let keys: Vec<(u64, u64)> = self.blocks.iter().filter(|(_, buffer)| select(buffer.range().start)).map(|(&key, _)| key).collect();
        keys.into_iter().filter_map(|key| self.take(key)).collect()
    }

    pub(crate) fn insert(&mut self, due: u64, buffer: Buffer) {
        self.bytes += buffer.requested().0;
        self.made += 1;
        self.blocks.insert((due, self.made), buffer);
    }

    /// The block due next, if it is due by then.
    pub(crate) fn take_due(&mut self, by: u64) -> Option<Buffer> {
        let key = *self.blocks.first_key_value().filter(|((due, _), _)| *due <= by)?.0;
        self.take(key)
    }

    fn take(&mut self, key: (u64, u64)) -> Option<Buffer> {
        let buffer = self.blocks.remove(&key)?;
        self.bytes -= buffer.requested().0;
        Some(buffer)
    }
}
