//! Runs traces on any allocator, once or many times. Replays, comparisons and benchmarks all use
//! [`Executor`].
//!
//! A trace is prepared first: ids become slots of a table, and the trace's streams become device
//! streams. No lookup remains in the timed loop. A [`Target`] is an allocator on a device. An
//! [`OperationObserver`] is called before and after each operation. Both are type parameters, so a
//! pass with [`Unobserved`] compiles to the bare loop.

mod streams;
mod target;

use std::{collections::BTreeMap, convert::Infallible, ops::Range, sync::Arc};

use harness_allocator::allocator::{Allocator, AllocatorError, PrivatePoolError, Request};
use harness_allocator::device::{DeviceError, StreamId, TestDevice};
use harness_allocator::units::Bytes;

use crate::trace::TraceEvent;

pub use self::streams::{MAX_STREAMS, Streams};
pub use self::target::{ByHandle, ByPointer, Target};

/// A prepared trace and its live allocations. `L` is the handle that frees an allocation:
/// [`Target::Live`].
#[derive(Debug)]
pub struct Executor<L> {
    operations: Arc<[Operation]>,
    live: Vec<Option<L>>,
    /// The slots of allocations that the trace never frees, in order of allocation.
    left: Arc<[u32]>,
    streams: Streams,
    /// The current external memory. Querying the device would cost time.
    external_memory: Bytes,
    continues_unsupported: bool,
}

/// One operation. After a free, the next allocation reuses its slot, which keeps the table small.
#[derive(Clone, Copy, Debug)]
enum Operation {
    Allocate { slot: u32, request: Request },
    Free { slot: u32 },
    Rare(Rare),
}

#[derive(Clone, Copy, Debug)]
enum Rare {
    /// A live allocation on another stream.
    RecordStream { slot: u32, stream: StreamId },
    /// A free or use of an id that is not live.
    Ignored,
    /// An operation without allocations.
    Other(TraceEvent),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrepareError {
    /// The second allocation needs another id.
    #[error("operation {operation}: id {id} is allocated twice; use each id once")]
    IdReused { operation: usize, id: u64 },
    #[error(
        "operation {operation}: a trace may use at most {MAX_STREAMS} streams besides the default \
         stream, and this is one more"
    )]
    TooManyStreams { operation: usize },
    #[error(transparent)]
    Device(#[from] DeviceError),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PassStopped<E> {
    /// The device failed, other than with out of memory. Operations count from 1; one more than the
    /// trace has is a final free.
    #[error("operation {operation}: {source}")]
    Device {
        operation: usize,
        source: DeviceError,
    },
    #[error("{0}")]
    Observer(E),
}

impl From<PassStopped<Infallible>> for DeviceError {
    fn from(stopped: PassStopped<Infallible>) -> Self {
        match stopped {
            PassStopped::Device { source, .. } => source,
            PassStopped::Observer(never) => match never {},
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationOutcome {
    Done = 0,
    OutOfMemory = 1,
    /// Nothing was done, because the id or private pool is not live.
    Ignored = 2,
    /// This version of PyTorch refuses such a request.
    Unsupported = 3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Allocate,
    Free,
    Other,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationCounts {
    pub allocations: u64,
    pub refused: u64,
    pub frees: u64,
}

impl OperationCounts {
    pub const fn operations(&self) -> u64 {
        self.allocations + self.frees
    }
}

/// Receives the operations of a run. [`Executor::pass`] does not show the frees that follow the
/// trace.
pub trait OperationObserver<T: Target> {
    type Error;

    #[inline(always)]
    fn before(&mut self, kind: Kind) {
        let _ = kind;
    }

    /// Called after operation `index` of the trace, counted from 0. An error stops the run.
    fn after(
        &mut self,
        index: usize,
        kind: Kind,
        outcome: OperationOutcome,
        target: &mut T,
    ) -> Result<(), Self::Error>;

    /// Called when operation `index` misuses a private pool. Nothing was done. An error stops the
    /// run; by default the misuse is ignored. A second pass can misuse a pool that the first one
    /// used correctly, because a pool released with live blocks cannot be reopened.
    fn pool_misused(&mut self, index: usize, error: PrivatePoolError) -> Result<(), Self::Error> {
        let _ = (index, error);
        Ok(())
    }
}

/// A function that receives each finished operation.
impl<T: Target, E, F: FnMut(usize, Kind, OperationOutcome, &mut T) -> Result<(), E>>
    OperationObserver<T> for F
{
    type Error = E;

    #[inline(always)]
    fn after(
        &mut self,
        index: usize,
        kind: Kind,
        outcome: OperationOutcome,
        target: &mut T,
    ) -> Result<(), E> {
        self(index, kind, outcome, target)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Unobserved;

impl<T: Target> OperationObserver<T> for Unobserved {
    type Error = Infallible;

    #[inline(always)]
    fn after(
        &mut self,
        _: usize,
        _: Kind,
        _: OperationOutcome,
        _: &mut T,
    ) -> Result<(), Infallible> {
        Ok(())
    }
}

impl<L> Executor<L> {
    pub fn new(events: &[TraceEvent], device: &mut dyn TestDevice) -> Result<Self, PrepareError> {
        Self::with_live(0..0, &[], events, device)
    }

    /// Prepares a trace that starts with live ids; [`Executor::start_with`] provides their
    /// allocations. Creates `streams` even if the trace does not use them.
    pub fn with_live(
        ids: Range<u64>,
        streams: &[StreamId],
        events: &[TraceEvent],
        device: &mut dyn TestDevice,
    ) -> Result<Self, PrepareError> {
        let streams = Streams::make(streams, events, device)?;
        let mut slots = Slots::default();
        for id in ids {
            slots
                .take(id)
                .ok_or(PrepareError::IdReused { operation: 0, id })?;
        }
        let mut operations = Vec::with_capacity(events.len());
        for (index, &event) in events.iter().enumerate() {
            operations.push(match streams.on_device(event) {
                TraceEvent::Allocate { id, size, stream } => {
                    let slot = slots.take(id).ok_or(PrepareError::IdReused {
                        operation: index + 1,
                        id,
                    })?;
                    Operation::Allocate {
                        slot,
                        request: Request { size, stream },
                    }
                }
                TraceEvent::Free { id } => slots
                    .give_back(id)
                    .map_or(Operation::Rare(Rare::Ignored), |slot| Operation::Free {
                        slot,
                    }),
                TraceEvent::RecordStream { id, stream } => Operation::Rare(
                    slots
                        .of(id)
                        .map_or(Rare::Ignored, |slot| Rare::RecordStream { slot, stream }),
                ),
                other => Operation::Rare(Rare::Other(other)),
            });
        }
        let live = (0..slots.count).map(|_| None).collect();
        Ok(Self {
            operations: operations.into(),
            live,
            left: slots.left().into(),
            streams,
            external_memory: Bytes::ZERO,
            continues_unsupported: false,
        })
    }

    /// Copies the prepared trace for another device and creates its streams there. Live allocations
    /// are not copied. Fails with [`PrepareError::Device`], also if the other device numbers its
    /// streams differently. Use a new device of the same kind.
    pub fn for_device(&self, device: &mut dyn TestDevice) -> Result<Self, PrepareError> {
        self.streams.make_again(device)?;
        let live = self.live.iter().map(|_| None).collect();
        let (operations, left, streams) = (
            Arc::clone(&self.operations),
            Arc::clone(&self.left),
            self.streams.clone(),
        );
        Ok(Self {
            operations,
            live,
            left,
            streams,
            external_memory: Bytes::ZERO,
            continues_unsupported: false,
        })
    }

    /// Sets the allocations of the ids that are live at the start, in the order of
    /// [`Executor::with_live`].
    pub fn start_with(&mut self, live: impl IntoIterator<Item = L>) {
        // These ids were numbered first, so they have the first slots.
        for (slot, allocation) in self.live.iter_mut().zip(live) {
            *slot = Some(allocation);
        }
    }

    /// Continues after requests that this version of PyTorch does not support. The caller has
    /// called [`Allocator::check_device`], so nothing else is unavailable.
    pub fn continuing_unsupported(self) -> Self {
        Self {
            continues_unsupported: true,
            ..self
        }
    }

    pub const fn streams(&self) -> &Streams {
        &self.streams
    }

    /// Runs the trace once and frees all live allocations, so the next pass starts from the same
    /// state.
    #[inline]
    pub fn pass<T: Target<Live = L>, O: OperationObserver<T>>(
        &mut self,
        target: &mut T,
        observer: &mut O,
    ) -> Result<OperationCounts, PassStopped<O::Error>> {
        let mut counts = self.run(target, observer)?;
        for &slot in &*self.left {
            if let Some(live) = self.live[slot as usize].take() {
                counts.frees += 1;
                target.free(live).map_err(|source| PassStopped::Device {
                    operation: self.operations.len() + 1,
                    source,
                })?;
            }
        }
        Ok(counts)
    }

    /// Runs the trace once. Keeps allocations that the trace does not free.
    #[inline(always)]
    pub fn run<T: Target<Live = L>, O: OperationObserver<T>>(
        &mut self,
        target: &mut T,
        observer: &mut O,
    ) -> Result<OperationCounts, PassStopped<O::Error>> {
        let mut counts = OperationCounts::default();
        for (index, operation) in self.operations.iter().enumerate() {
            let device_failed = |source| PassStopped::Device {
                operation: index + 1,
                source,
            };
            let (kind, outcome) = match *operation {
                Operation::Allocate { slot, request } => {
                    counts.allocations += 1;
                    observer.before(Kind::Allocate);
                    let outcome = match target.allocate(request) {
                        Ok(live) => {
                            self.live[slot as usize] = Some(live);
                            OperationOutcome::Done
                        }
                        Err(error) => {
                            counts.refused += 1;
                            refused(error, self.continues_unsupported).map_err(device_failed)?
                        }
                    };
                    (Kind::Allocate, outcome)
                }
                Operation::Free { slot } => match self.live[slot as usize].take() {
                    Some(live) => {
                        counts.frees += 1;
                        observer.before(Kind::Free);
                        target.free(live).map_err(device_failed)?;
                        (Kind::Free, OperationOutcome::Done)
                    }
                    None => (Kind::Other, OperationOutcome::Ignored),
                },
                Operation::Rare(ref operation) => {
                    let outcome = rare(
                        index,
                        operation,
                        &self.live,
                        &mut self.external_memory,
                        target,
                        observer,
                    )?;
                    (Kind::Other, outcome)
                }
            };
            observer
                .after(index, kind, outcome, target)
                .map_err(PassStopped::Observer)?;
        }
        Ok(counts)
    }
}

/// Returns a refused allocation as an outcome. Only a failed device is an error.
#[cold]
#[expect(
    clippy::boxed_local,
    reason = "the loop returns the result unchanged, without moving errors through its frame"
)]
fn refused(
    error: Box<AllocatorError>,
    continues_unsupported: bool,
) -> Result<OperationOutcome, DeviceError> {
    match *error {
        AllocatorError::OutOfMemory(_) | AllocatorError::TooLarge { .. } => {
            Ok(OperationOutcome::OutOfMemory)
        }
        AllocatorError::Device(DeviceError::Unavailable { .. }) if continues_unsupported => {
            Ok(OperationOutcome::Unsupported)
        }
        AllocatorError::Device(source) => Err(source),
    }
}

#[inline(never)]
fn rare<T: Target, O: OperationObserver<T>>(
    index: usize,
    operation: &Rare,
    live: &[Option<T::Live>],
    external_memory: &mut Bytes,
    target: &mut T,
    observer: &mut O,
) -> Result<OperationOutcome, PassStopped<O::Error>> {
    let device_failed = |source| PassStopped::Device {
        operation: index + 1,
        source,
    };
    match *operation {
        Rare::RecordStream { slot, stream } => match &live[slot as usize] {
            Some(live) => {
                observer.before(Kind::Other);
                target
                    .record_stream(live, stream)
                    .map(|()| OperationOutcome::Done)
                    .map_err(device_failed)
            }
            None => Ok(OperationOutcome::Ignored),
        },
        Rare::Ignored => Ok(OperationOutcome::Ignored),
        Rare::Other(event) => {
            observer.before(Kind::Other);
            match target.with(|allocator, device| other(allocator, device, external_memory, event))
            {
                Ok(outcome) => Ok(outcome),
                Err(PrivatePoolError::Device(source)) => Err(device_failed(source)),
                Err(error) => observer
                    .pool_misused(index, error)
                    .map(|()| OperationOutcome::Ignored)
                    .map_err(PassStopped::Observer),
            }
        }
    }
}

/// Runs an operation that involves no allocation. Ignores private pools if the allocator has none.
fn other(
    allocator: &mut (impl Allocator + ?Sized),
    device: &mut dyn TestDevice,
    external_memory: &mut Bytes,
    event: TraceEvent,
) -> Result<OperationOutcome, PrivatePoolError> {
    match event {
        TraceEvent::SynchronizeStream(stream) => device.synchronize_stream(stream)?,
        TraceEvent::Synchronize => device.synchronize()?,
        TraceEvent::EmptyCache => allocator.empty_cache(device)?,
        TraceEvent::SetFraction(fraction) => allocator.set_memory_fraction(device, fraction),
        TraceEvent::ResetPeaks => allocator.reset_peaks(),
        TraceEvent::BeginPool(pool) => allocator
            .private_pools()
            .map_or(Ok(()), |pools| pools.begin(pool))?,
        TraceEvent::EndPool(pool) => allocator
            .private_pools()
            .map_or(Ok(()), |pools| pools.end(pool))?,
        TraceEvent::ReleasePool(pool) => match allocator
            .private_pools()
            .map_or(Ok(()), |pools| pools.release(device, pool))
        {
            Err(PrivatePoolError::Unknown(_)) => return Ok(OperationOutcome::Ignored),
            released => released?,
        },
        TraceEvent::ExternalMemory(change) => {
            *external_memory = device
                .set_external_memory(Bytes(external_memory.0.saturating_add_signed(change)))?;
        }
        // Other variants handle these.
        TraceEvent::Allocate { .. } | TraceEvent::Free { .. } | TraceEvent::RecordStream { .. } => {
        }
    }
    Ok(OperationOutcome::Done)
}

#[derive(Default)]
struct Slots {
    count: u32,
    vacant: Vec<u32>,
    /// Ids that may be live: each with its slot and the position of its allocation among all
    /// allocations.
    of_ids: BTreeMap<u64, (u32, usize)>,
    allocations: usize,
}

impl Slots {
    /// Assigns a slot to an allocated id, or returns `None` if the id may be live.
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

    fn give_back(&mut self, id: u64) -> Option<u32> {
        let (slot, _) = self.of_ids.remove(&id)?;
        self.vacant.push(slot);
        Some(slot)
    }

    fn of(&self, id: u64) -> Option<u32> {
        self.of_ids.get(&id).map(|&(slot, _)| slot)
    }

    /// The slots of ids that are never freed, in order of allocation.
    fn left(self) -> Vec<u32> {
        let mut left: Vec<_> = self.of_ids.into_values().collect();
        left.sort_unstable_by_key(|&(_, allocation)| allocation);
        left.into_iter().map(|(slot, _)| slot).collect()
    }
}

#[cfg(test)]
mod tests;
