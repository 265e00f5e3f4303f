//! Small programs for a rig: operations on numbered buffers, and the place of the first error.

use std::collections::{BTreeMap, btree_map::Entry};
use std::sync::Arc;

use harness_allocator::allocator::{Allocator, AllocatorSpec, MemoryFraction, Request};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{EventId, StreamId};
use harness_allocator::units::{Bytes, Nanos};
use harness_run::rig::{Buffer, Finding, Rig, RigOptions, Stop};
use harness_run::run::RunRequest;
use harness_scenario::Scenario;

/// Runs a scenario with an audit and seed 0, without interruption.
pub(crate) fn request<'a>(scenario: &'a Scenario, allocator: &'a AllocatorSpec) -> RunRequest<'a> {
    RunRequest {
        scenario,
        allocator,
        seed: 0,
        repetition: 0,
        reproduce: String::new(),
        audit: true,
        interrupt: Arc::default(),
    }
}

/// The memory of programs, without the context.
pub(crate) const MEMORY: Bytes = Bytes::mib(64);
/// Streams besides the default one.
pub(crate) const STREAMS: usize = 2;

/// Streams are numbered from 0, the default stream. These programs are correct: an event orders the
/// streams that share a buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Op {
    Alloc(usize, Bytes, usize),
    Fill(usize),
    /// Another stream uses the buffer, ordered after the last use.
    HandOver(usize, usize),
    Verify(usize),
    Work(usize, Nanos),
    Free(usize),
    Synchronize,
    EmptyCache,
    ExternalMemory(Bytes),
    /// A fraction of [`MEMORY`], not of the device, which also holds a context.
    Fraction(f64),
    EndStep,
}

/// The step and the reason of a stop.
#[derive(Debug, PartialEq)]
pub(crate) struct Stopped {
    /// The operation, or `the end`, or `closing`.
    pub(crate) at: String,
    pub(crate) stop: Stop,
}

impl Stopped {
    pub(crate) fn findings(&self) -> &[Finding] {
        match &self.stop {
            Stop::Violated(findings) => findings,
            Stop::Device(_) | Stop::Process { .. } | Stop::Interrupted => panic!("{self:?}"),
        }
    }
}

/// A rig with the buffers and streams of a program.
pub(crate) struct Machine {
    pub(crate) rig: Rig,
    streams: Vec<StreamId>,
    event: EventId,
    /// Each buffer with its last stream.
    buffers: BTreeMap<usize, (Buffer, StreamId)>,
    step: u32,
    /// The number of failed requests.
    pub(crate) ooms: u64,
}

impl Machine {
    pub(crate) fn new(allocator: Box<dyn Allocator>) -> Self {
        let mut config = SimConfig::default();
        config.total = config.context_overhead + MEMORY;
        let mut rig = Rig::new(
            Box::new(SimDevice::new(config)),
            allocator,
            &RigOptions::default(),
        )
        .unwrap();
        let mut streams = vec![StreamId::DEFAULT];
        streams.extend((0..STREAMS).map(|_| rig.create_stream().unwrap()));
        let event = rig.create_event().unwrap();
        rig.begin_step(1);
        Self {
            rig,
            streams,
            event,
            buffers: BTreeMap::new(),
            step: 1,
            ooms: 0,
        }
    }

    /// Runs a program, frees everything, and checks the end.
    pub(crate) fn run(mut self, program: &[Op]) -> Result<(), Stopped> {
        for &op in program {
            self.op(op).map_err(|stop| Stopped {
                at: format!("{op:?}"),
                stop,
            })?;
        }
        self.finish()
    }

    pub(crate) fn finish(mut self) -> Result<(), Stopped> {
        for (buffer, _) in std::mem::take(&mut self.buffers).into_values() {
            self.rig.free(buffer).map_err(|stop| Stopped {
                at: "the last frees".to_owned(),
                stop,
            })?;
        }
        self.rig.finish().map_err(|stop| Stopped {
            at: "the end".to_owned(),
            stop,
        })?;
        self.close().map_err(|stop| Stopped {
            at: "closing".to_owned(),
            stop,
        })
    }

    /// Closes without freeing anything first, as after a failure.
    pub(crate) fn close(self) -> Result<(), Stop> {
        self.rig
            .close(self.streams.into_iter().skip(1).collect(), vec![self.event])
    }

    /// Operations on missing buffers do nothing; their requests may have failed.
    pub(crate) fn op(&mut self, op: Op) -> Result<(), Stop> {
        let rig = &mut self.rig;
        match op {
            Op::Alloc(slot, size, stream) => {
                let stream = self.streams[stream];
                if let Entry::Vacant(free) = self.buffers.entry(slot) {
                    match rig.allocate(Request { size, stream })? {
                        Ok(buffer) => drop(free.insert((buffer, stream))),
                        Err(_) => self.ooms += 1,
                    }
                }
            }
            Op::Fill(slot) => {
                if let Some((buffer, stream)) = self.buffers.get_mut(&slot) {
                    rig.fill(buffer, *stream)?;
                }
            }
            Op::HandOver(slot, to) => {
                if let Some((buffer, stream)) = self.buffers.get_mut(&slot) {
                    rig.record(self.event, *stream)?;
                    *stream = self.streams[to];
                    rig.wait(*stream, self.event)?;
                    rig.record_stream(buffer, *stream)?;
                    rig.fill(buffer, *stream)?;
                }
            }
            Op::Verify(slot) => {
                if let Some((buffer, stream)) = self.buffers.get(&slot) {
                    rig.verify(buffer, *stream)?;
                }
            }
            Op::Work(stream, duration) => rig.work(self.streams[stream], duration)?,
            Op::Free(slot) => {
                if let Some((buffer, _)) = self.buffers.remove(&slot) {
                    rig.free(buffer)?;
                }
            }
            Op::Synchronize => rig.synchronize()?,
            Op::EmptyCache => drop(rig.empty_cache()?),
            Op::ExternalMemory(held) => drop(rig.set_external_memory(held)?),
            Op::Fraction(fraction) => {
                let share = if fraction < 1.0 {
                    fraction * MEMORY.0 as f64 / rig.info().total.0 as f64
                } else {
                    1.0
                };
                rig.set_memory_fraction(MemoryFraction::new(share).unwrap());
            }
            Op::EndStep => {
                rig.end_step(false)?;
                self.step += 1;
                rig.begin_step(self.step);
            }
        }
        Ok(())
    }
}
