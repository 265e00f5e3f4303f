//! The executor of traces: [`Executor`] runs a trace on anything that allocates, once or many times. Replay, the comparison with recordings and
//! all timing use it.
//!
//! A trace is prepared first, so that nothing is looked up while it runs: ids become slots of a table, and streams become the device's own.
//! A [`Target`] is what the trace runs on. An [`Observer`] sees each operation begin and end. Both are known when the program is compiled, so a
//! pass without an observer ([`Unobserved`]) is the bare loop.

mod streams;
mod target;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

use harness_allocator::allocator::{AllocatorError, PrivatePoolError, Request};
use harness_allocator::device::{DeviceError, StreamId, TestDevice};
use harness_allocator::units::Bytes;

use crate::trace::TraceEvent;

pub use self::streams::{MAX_STREAMS, Streams};
pub use self::target::{ByHandle, ByPointer, Target};

/// A trace that is ready to run, and what it has live. `L` is what an allocation is freed by: [`Target::Live`].
#[derive(Debug)]
pub struct Executor<L> {
    operations: Arc<[Operation]>,
    /// By slot.
    live: Vec<Option<L>>,
    /// The slots of what the trace never frees, in the order of their allocations.
    left: Arc<[u32]>,
    streams: Streams,
    /// Memory that others hold now. Asking the device for it would take time.
    pressure: Bytes,
}

/// One operation. An id that the trace frees gives its slot to the next allocation, so the table is as small as the trace allows.
#[derive(Clone, Copy, Debug)]
enum Operation {
    Allocate { slot: u32, request: Request },
    Free { slot: u32 },
    Rare(Rare),
}

/// An operation that is no allocation and no free: kept out of the loop, which is timed.
#[derive(Clone, Copy, Debug)]
enum Rare {
    RecordStream {
        slot: u32,
        stream: StreamId,
    },
    /// A free or a use of an id that cannot be live here.
    Ignored,
    Other(TraceEvent),
}

/// A trace that cannot be prepared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum PrepareError {
    /// An id is allocated twice without a free between. Give the second allocation an id of its own.
    #[error("operation {operation}: id {id} is allocated twice; an id must never be used again")]
    IdReused {
        /// Counted from 1.
        operation: usize,
        id: u64,
    },
    /// The trace names more streams than [`MAX_STREAMS`]. Use fewer.
    #[error("operation {operation}: a trace names at most {MAX_STREAMS} streams beside the default stream, and this is one more")]
    TooManyStreams {
        /// The first that names one more, counted from 1.
        operation: usize,
    },
    /// The device cannot make the streams that the trace names.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Why a run stopped before the end of its trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum Stopped<E> {
    /// The device failed. An out-of-memory is no failure.
    #[error("operation {operation}: {source}")]
    Device {
        /// Counted from 1; one more than the trace has where the frees at its end failed.
        operation: usize,
        source: DeviceError,
    },
    /// The observer said so.
    #[error("{0}")]
    Observer(E),
}

impl From<Stopped<Infallible>> for DeviceError {
    fn from(stopped: Stopped<Infallible>) -> Self {
        match stopped {
            Stopped::Device { source, .. } => source,
            Stopped::Observer(never) => match never {},
        }
    }
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum Outcome {
    Done = 0,
    /// There was no memory.
    OutOfMemory = 1,
    /// Its id, or the private pool it releases, is not live: nothing was done.
    Ignored = 2,
}

/// Which kind of operation an observer sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum Kind {
    Allocate,
    /// A free of something live.
    Free,
    Other,
}

/// What a run did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Allocations, refused ones included.
    pub allocations: u64,
    /// Allocations that found no memory.
    pub refused: u64,
    /// Frees of something live.
    pub frees: u64,
}

impl Counts {
    /// Allocations and frees.
    #[must_use]
    pub const fn operations(&self) -> u64 {
        self.allocations + self.frees
    }
}

/// Sees the operations of a run. [`Executor::pass`] does not show it the frees behind the end of the trace.
pub trait Observer<T: Target> {
    /// Why it stops a run.
    type Error;

    /// The target is called next.
    #[inline(always)]
    fn before(&mut self, kind: Kind) {
        let _ = kind;
    }

    /// Operation `index` of the trace, counted from 0, is over.
    ///
    /// # Errors
    /// What stops the run.
    fn after(&mut self, index: usize, kind: Kind, outcome: Outcome, target: &mut T) -> Result<(), Self::Error>;

    /// A private pool was misused by operation `index`, and nothing was done. Passed over unless the observer says otherwise: a pool that was
    /// released with blocks still live cannot be opened again, so a second pass may misuse what the first one used rightly.
    ///
    /// # Errors
    /// What stops the run.
    fn pool_misused(&mut self, index: usize, error: PrivatePoolError) -> Result<(), Self::Error> {
        let _ = (index, error);
        Ok(())
    }
}

/// No observer.
#[derive(Clone, Copy, Debug)]
pub struct Unobserved;

impl<T: Target> Observer<T> for Unobserved {
    type Error = Infallible;

    #[inline(always)]
    fn after(&mut self, _: usize, _: Kind, _: Outcome, _: &mut T) -> Result<(), Infallible> {
        Ok(())
    }
}

impl<L> Executor<L> {
    /// Prepares a trace, and makes the streams that it names on the device that it will run on.
    ///
    /// # Errors
    /// [`PrepareError`].
    pub fn new(events: &[TraceEvent], device: &mut dyn TestDevice) -> Result<Self, PrepareError> {
        Self::with_live(0..0, &[], events, device)
    }

    /// The same for a trace that begins with these ids live, whose allocations [`Executor::start_with`] gives. These streams are made whether the
    /// trace names them or not.
    ///
    /// # Errors
    /// [`PrepareError`].
    pub fn with_live(
        ids: Range<u64>,
        streams: &[StreamId],
        events: &[TraceEvent],
        device: &mut dyn TestDevice,
    ) -> Result<Self, PrepareError> {
        let streams = Streams::make(streams, events, device)?;
        let mut slots = Slots::default();
        for id in ids {
            slots.take(id).ok_or(PrepareError::IdReused { operation: 0, id })?;
        }
        let mut operations = Vec::with_capacity(events.len());
        for (index, &event) in events.iter().enumerate() {
            operations.push(match streams.on_device(event) {
                TraceEvent::Allocate { id, size, stream } => {
                    let slot = slots.take(id).ok_or(PrepareError::IdReused { operation: index + 1, id })?;
                    Operation::Allocate { slot, request: Request { size, stream } }
                }
                TraceEvent::Free { id } => slots.give_back(id).map_or(Operation::Rare(Rare::Ignored), |slot| Operation::Free { slot }),
                TraceEvent::RecordStream { id, stream } => {
                    Operation::Rare(slots.of(id).map_or(Rare::Ignored, |slot| Rare::RecordStream { slot, stream }))
                }
                other => Operation::Rare(Rare::Other(other)),
            });
        }
        let live = (0..slots.count).map(|_| None).collect();
        Ok(Self { operations: operations.into(), live, left: slots.left().into(), streams, pressure: Bytes::ZERO })
    }

    /// The same trace for another device, ready to run from its start: only what is live is not shared. Makes the streams there.
    ///
    /// # Errors
    /// [`PrepareError::Device`], also where the device numbers its streams in another way than the first one: take a new one of the same kind.
    pub fn for_device(&self, device: &mut dyn TestDevice) -> Result<Self, PrepareError> {
        self.streams.make_again(device)?;
        let live = self.live.iter().map(|_| None).collect();
        let (operations, left, streams) = (Arc::clone(&self.operations), Arc::clone(&self.left), self.streams.clone());
        Ok(Self { operations, live, left, streams, pressure: Bytes::ZERO })
    }

    /// Gives the allocations of the ids that are live at the start, in the order of [`Executor::with_live`].
    pub fn start_with(&mut self, live: impl IntoIterator<Item = L>) {
        // Nothing was allocated before them, so their slots are the first ones, in their order.
        for (slot, allocation) in self.live.iter_mut().zip(live) {
            *slot = Some(allocation);
        }
    }

    /// The streams of the trace.
    #[must_use]
    pub const fn streams(&self) -> &Streams {
        &self.streams
    }

    /// Runs the trace once, and frees what it leaves live, so that the next pass finds what this one found.
    ///
    /// # Errors
    /// [`Stopped`].
    #[inline]
    pub fn pass<T: Target<Live = L>, O: Observer<T>>(&mut self, target: &mut T, observer: &mut O) -> Result<Counts, Stopped<O::Error>> {
        let mut counts = self.run(target, observer)?;
        for &slot in &*self.left {
            if let Some(live) = self.live[slot as usize].take() {
                counts.frees += 1;
                target.free(live).map_err(|source| Stopped::Device { operation: self.operations.len() + 1, source })?;
            }
        }
        Ok(counts)
    }

    /// Runs the trace once. What it leaves live stays.
    ///
    /// # Errors
    /// [`Stopped`].
    #[inline(always)]
    pub fn run<T: Target<Live = L>, O: Observer<T>>(&mut self, target: &mut T, observer: &mut O) -> Result<Counts, Stopped<O::Error>> {
        let mut counts = Counts::default();
        for (index, operation) in self.operations.iter().enumerate() {
            let device_failed = |source| Stopped::Device { operation: index + 1, source };
            let (kind, outcome) = match *operation {
                Operation::Allocate { slot, request } => {
                    counts.allocations += 1;
                    observer.before(Kind::Allocate);
                    let outcome = match target.allocate(request) {
                        Ok(live) => {
                            self.live[slot as usize] = Some(live);
                            Outcome::Done
                        }
                        Err(error) => {
                            counts.refused += 1;
                            refused(error).map_err(device_failed)?
                        }
                    };
                    (Kind::Allocate, outcome)
                }
                Operation::Free { slot } => match self.live[slot as usize].take() {
                    Some(live) => {
                        counts.frees += 1;
                        observer.before(Kind::Free);
                        target.free(live).map_err(device_failed)?;
                        (Kind::Free, Outcome::Done)
                    }
                    None => (Kind::Other, Outcome::Ignored),
                },
                Operation::Rare(ref operation) => {
                    let outcome = rare(index, operation, &self.live, &mut self.pressure, target, observer)?;
                    (Kind::Other, outcome)
                }
            };
            observer.after(index, kind, outcome, target).map_err(Stopped::Observer)?;
        }
        Ok(counts)
    }
}

/// An allocation that was refused is an outcome, unless the device is broken.
#[cold]
#[expect(clippy::boxed_local, reason = "the loop hands on what it got, and moves no error through its own frame")]
fn refused(error: Box<AllocatorError>) -> Result<Outcome, DeviceError> {
    match *error {
        AllocatorError::OutOfMemory(_) | AllocatorError::TooLarge { .. } => Ok(Outcome::OutOfMemory),
        AllocatorError::Device(source) => Err(source),
    }
}

/// Why one of the rare operations failed.
enum Failed {
    Device(DeviceError),
    Pool(PrivatePoolError),
}

impl From<DeviceError> for Failed {
    fn from(error: DeviceError) -> Self {
        Self::Device(error)
    }
}

impl From<PrivatePoolError> for Failed {
    fn from(error: PrivatePoolError) -> Self {
        match error {
            PrivatePoolError::Device(error) => Self::Device(error),
            error => Self::Pool(error),
        }
    }
}

/// Does what is no allocation and no free.
#[inline(never)]
fn rare<T: Target, O: Observer<T>>(
    index: usize,
    operation: &Rare,
    live: &[Option<T::Live>],
    pressure: &mut Bytes,
    target: &mut T,
    observer: &mut O,
) -> Result<Outcome, Stopped<O::Error>> {
    let device_failed = |source| Stopped::Device { operation: index + 1, source };
    match *operation {
        Rare::RecordStream { slot, stream } => match &live[slot as usize] {
            Some(live) => {
                observer.before(Kind::Other);
                target.record_stream(live, stream).map(|()| Outcome::Done).map_err(device_failed)
            }
            None => Ok(Outcome::Ignored),
        },
        Rare::Ignored => Ok(Outcome::Ignored),
        Rare::Other(event) => {
            observer.before(Kind::Other);
            match other(target, pressure, event) {
                Ok(outcome) => Ok(outcome),
                Err(Failed::Device(source)) => Err(device_failed(source)),
                Err(Failed::Pool(error)) => observer.pool_misused(index, error).map(|()| Outcome::Ignored).map_err(Stopped::Observer),
            }
        }
    }
}

/// Does what concerns no allocation.
fn other<T: Target>(target: &mut T, pressure: &mut Bytes, event: TraceEvent) -> Result<Outcome, Failed> {
    match event {
        TraceEvent::SynchronizeStream(stream) => target.with_device(|device| device.synchronize_stream(stream))?,
        TraceEvent::Synchronize => target.with_device(|device| device.synchronize())?,
        TraceEvent::EmptyCache => target.empty_cache()?,
        TraceEvent::SetFraction(fraction) => target.set_memory_fraction(fraction),
        TraceEvent::ResetPeaks => target.reset_peaks(),
        TraceEvent::BeginPool(pool) => target.begin_pool(pool)?,
        TraceEvent::EndPool(pool) => target.end_pool(pool)?,
        TraceEvent::ReleasePool(pool) => match target.release_pool(pool) {
            Err(PrivatePoolError::Unknown(_)) => return Ok(Outcome::Ignored),
            released => released?,
        },
        TraceEvent::Pressure(change) => {
            let wanted = Bytes(pressure.0.saturating_add_signed(change));
            *pressure = target.with_device(|device| device.set_pressure(wanted))?;
        }
        // These have operations of their own.
        TraceEvent::Allocate { .. } | TraceEvent::Free { .. } | TraceEvent::RecordStream { .. } => {}
    }
    Ok(Outcome::Done)
}

/// The slots of ids while a trace is prepared.
#[derive(Default)]
struct Slots {
    count: u32,
    /// Given back, the last one to be taken next.
    vacant: Vec<u32>,
    /// Of ids that may be live, with the place of their allocation among all allocations.
    of_ids: BTreeMap<u64, (u32, usize)>,
    allocations: usize,
}

impl Slots {
    /// A slot for an id that is allocated; `None` where it may be live already.
    fn take(&mut self, id: u64) -> Option<u32> {
        if self.of_ids.contains_key(&id) {
            return None;
        }
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.count += 1;
            self.count - 1
        });
        self.of_ids.insert(id, (slot, self.allocations));
        self.allocations += 1;
        Some(slot)
    }

    /// The slot of an id that is freed.
    fn give_back(&mut self, id: u64) -> Option<u32> {
        let (slot, _) = self.of_ids.remove(&id)?;
        self.vacant.push(slot);
        Some(slot)
    }

    fn of(&self, id: u64) -> Option<u32> {
        self.of_ids.get(&id).map(|&(slot, _)| slot)
    }

    /// The slots of what is never freed, in the order of allocation.
    fn left(self) -> Vec<u32> {
        let mut left: Vec<_> = self.of_ids.into_values().collect();
        left.sort_unstable_by_key(|&(_, allocation)| allocation);
        left.into_iter().map(|(slot, _)| slot).collect()
    }
}

#[cfg(test)]
mod tests;
