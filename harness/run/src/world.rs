//! What a scenario's names stand for while it runs: buffers, streams, events, measures, reports, storms; and what a step leaves behind
//! ([`Done`]).

use std::collections::BTreeMap;

use harness_allocator::device::{DevicePtr, EventId, StreamId};
use harness_allocator::units::Nanos;

use crate::rig::{Buffer, Halt, Rig};
use harness_record::{Outcome, Shortage, Table};
use harness_scenario::{
    Account, BufferName, DeviceMetric, EventName, MeasureName, Metric, Position, Readings, ReportKey, Scenario, Step, StepName, StreamName,
};

/// See the module. The checks of the language have made sure that every name is used as it may be.
pub(crate) struct World {
    pub(crate) rig: Rig,
    /// The name of the allocator's arm.
    pub(crate) arm: String,
    pub(crate) seed: u64,
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
    /// Asking the device ended the run.
    #[error("the device failed")]
    Halt(Halt),
}

impl World {
    /// Makes the scenario's streams and takes the measure `start`.
    pub(crate) fn new(mut rig: Rig, scenario: &Scenario, arm: String, seed: u64) -> Result<Self, Box<(Rig, Vec<StreamId>, Halt)>> {
        let mut streams = vec![StreamId::DEFAULT];
        for _ in scenario.streams.iter().skip(1) {
            match rig.create_stream() {
                Ok(stream) => streams.push(stream),
                Err(halt) => return Err(Box::new((rig, streams, halt))),
            }
        }
        let mut world = Self {
            rig,
            arm,
            seed,
            buffers: BTreeMap::new(),
            streams,
            events: BTreeMap::new(),
            measures: BTreeMap::new(),
            reports: BTreeMap::new(),
            storms: BTreeMap::new(),
        };
        match world.measure(MeasureName::start()) {
            Ok(()) => Ok(world),
            Err(halt) => Err(Box::new((world.rig, world.streams, halt))),
        }
    }

    pub(crate) fn stream(&self, name: &StreamName) -> StreamId {
        self.streams[name.index()]
    }

    /// The event of that name, made on first use.
    pub(crate) fn event(&mut self, name: &EventName) -> Result<EventId, Halt> {
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
        act: impl FnOnce(&mut Rig, &mut Buffer) -> Result<(), Halt>,
    ) -> Result<(), Halt> {
        match self.buffers.get_mut(name) {
            Some(buffer) => act(&mut self.rig, buffer),
            None => Ok(()),
        }
    }

    pub(crate) fn storm(&mut self, id: &StepName) -> &mut LiveBlocks {
        self.storms.entry(id.clone()).or_default()
    }

    pub(crate) fn measure(&mut self, name: MeasureName) -> Result<(), Halt> {
        let moment = self.moment()?;
        self.measures.insert(name, moment);
        Ok(())
    }

    pub(crate) fn report(&mut self, id: StepName, reports: BTreeMap<ReportKey, u64>) {
        self.reports.insert(id, reports);
    }

    /// The value of a metric now.
    pub(crate) fn look_up(&mut self, metric: &Metric) -> Result<u64, LookUpError> {
        let (account, moment) = match metric {
            // Neither needs the device's memory, whose answer takes time.
            Metric::Now(Account::Stat(key)) => return Ok(self.rig.stats().get(*key)),
            Metric::Now(Account::Device(DeviceMetric::Now)) => return Ok(self.rig.now().0),
            Metric::Now(account) => (account, self.moment().map_err(LookUpError::Halt)?),
            Metric::At(name, account) => {
                (account, self.measures.get(name).copied().ok_or_else(|| LookUpError::NotReported(metric.to_string()))?)
            }
            Metric::Report(step, key) => {
                let value = self.reports.get(step).and_then(|reports| reports.get(key));
                return value.copied().ok_or_else(|| LookUpError::NotReported(metric.to_string()));
            }
        };
        moment.get(*account).ok_or_else(|| LookUpError::Unknown(metric.to_string()))
    }

    /// Frees everything that is still live.
    pub(crate) fn free_everything(&mut self) -> Result<(), Halt> {
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
    pub(crate) fn close(self) -> Result<(), Halt> {
        let streams = self.streams.into_iter().skip(1).collect();
        self.rig.close(streams, self.events.into_values().collect())
    }

    /// All accounts now. The clock comes last: a time since this moment begins behind the device's answer.
    fn moment(&mut self) -> Result<Readings, Halt> {
        let (stats, memory, calls) = (self.rig.stats(), self.rig.memory()?, self.rig.calls());
        Ok(Readings { stats, memory, calls, now: self.rig.now() })
    }
}

/// What a step did.
#[derive(Clone, Debug)]
pub(crate) struct Done {
    pub(crate) outcome: Outcome,
    pub(crate) reports: BTreeMap<ReportKey, u64>,
    pub(crate) notes: Vec<String>,
    pub(crate) tables: Vec<Table>,
    pub(crate) missed: Vec<Missed>,
    pub(crate) shortage: Option<Shortage>,
}

impl Default for Done {
    fn default() -> Self {
        let (reports, notes, tables, missed, shortage) = Default::default();
        Self { outcome: Outcome::Done, reports, notes, tables, missed, shortage }
    }
}

impl Done {
    /// What the step reports, its duration included.
    pub(crate) fn reports_with_time(&self, duration: Nanos) -> BTreeMap<ReportKey, u64> {
        let mut reports = self.reports.clone();
        reports.entry(ReportKey::Time).or_insert(duration.0);
        reports
    }
}

/// Something that was expected and not seen.
#[derive(Clone, Debug)]
pub(crate) struct Missed {
    pub(crate) at: Position,
    pub(crate) expected: String,
    pub(crate) seen: String,
}

impl Missed {
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
