//! Records what an allocator does as PyTorch's own history does: [`Recorder::around`] puts a [`Recorded`] around the allocator, and
//! [`Recorder::snapshot`] gives the events so far with the present state.
//!
//! The allocator says what it hands out. What it takes from the driver and gives back is seen by comparing its segments wherever its counters of driver
//! calls have moved: a segment that is given back and made again at the same place within one operation is not seen.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use harness_allocator::allocator::wrapper::AllocatorWrapper;
use harness_allocator::allocator::{Allocation, Allocator, AllocatorError, OomCause, Request};
use harness_allocator::device::{Device, DeviceError, DevicePtr, StreamId};
use harness_allocator::stats::{BlockInfo, BlockState, SegmentInfo};
use harness_allocator::units::Bytes;

use super::{Action, Block, Event, ExtraId, Frame, FrameId, PoolId, Segment, Settings, Snapshot, StackId};

/// What an allocator has done. Clones are handles of the same recording.
#[derive(Clone, Debug, Default)]
pub struct Recorder(Arc<Mutex<Log>>);

impl Recorder {
    /// A recording that is still empty, of an allocator with these settings.
    #[must_use]
    pub fn new(settings: Option<Settings>) -> Self {
        let recorder = Self::default();
        recorder.log().snapshot.settings = settings;
        recorder
    }

    /// An allocator that is recorded from now on. What it already holds is taken for older than the recording.
    pub fn around<A: Allocator>(&self, allocator: A) -> Recorded<A> {
        let mut log = self.log();
        log.counted = counted(&allocator);
        log.held = Held::of(&allocator.snapshot());
        drop(log);
        Recorded { allocator, recorder: self.clone() }
    }

    /// Where the program is from now on, the innermost frame first, and when: microseconds since any moment.
    pub fn set_place(&self, frames: impl IntoIterator<Item = Frame>, time_us: Option<u64>) {
        let mut log = self.log();
        let ids: Vec<FrameId> = frames.into_iter().map(|frame| log.snapshot.stacks.intern_frame(frame)).collect();
        log.stack = log.snapshot.stacks.intern(&ids);
        log.time_us = time_us;
    }

    /// The events so far, and what the recorded allocator holds now. Streams have their numbers as handles; private pool N is `(0, N + 1)`.
    #[must_use]
    pub fn snapshot(&self, allocator: &dyn Allocator) -> Snapshot {
        let log = self.log();
        let mut snapshot = log.snapshot.clone();
        snapshot.segments = allocator.snapshot().iter().map(|segment| log.segment(segment)).collect();
        snapshot.traces = vec![log.events.clone()];
        snapshot
    }

    /// A panic of another thread leaves a recording that is still whole.
    fn log(&self) -> MutexGuard<'_, Log> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An allocator that is recorded.
#[derive(Debug)]
pub struct Recorded<A> {
    allocator: A,
    recorder: Recorder,
}

impl<A: Allocator> Recorded<A> {
    /// Records what the last operation has done besides handing out and taking back blocks.
    fn settle(&self) {
        self.recorder.log().settle(&self.allocator);
    }
}

impl<A: Allocator> AllocatorWrapper for Recorded<A> {
    type Inner = A;

    fn inner(&self) -> &A {
        &self.allocator
    }

    fn inner_mut(&mut self) -> &mut A {
        &mut self.allocator
    }

    fn allocate(&mut self, device: &mut dyn Device, request: Request) -> Result<Allocation, AllocatorError> {
        let allocated = self.allocator.allocate(device, request);
        self.settle();
        let mut log = self.recorder.log();
        match &allocated {
            Ok(allocation) if allocation.is_null() => {}
            Ok(allocation) => log.add(Action::Alloc, allocation.ptr().0, allocation.requested(), allocation.stream()),
            Err(error) if error.is_out_of_memory() => {
                let free = free_memory(error, device);
                log.add(Action::Oom, free.0, request.size, request.stream);
            }
            Err(_) => {}
        }
        allocated
    }

    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        let block = Live { address: allocation.ptr().0, size: allocation.requested(), stream: allocation.stream() };
        let is_null = allocation.is_null();
        let freed = self.allocator.free(device, allocation);
        if !is_null && freed.is_ok() {
            let mut log = self.recorder.log();
            log.add(Action::FreeRequested, block.address, block.size, block.stream);
            log.pending.push(block);
        }
        self.settle();
        freed
    }

    fn release_stream(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<(), DeviceError> {
        let released = self.allocator.release_stream(device, stream);
        self.settle();
        released
    }

    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let emptied = self.allocator.empty_cache(device);
        self.settle();
        emptied
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let closed = self.allocator.close(device);
        self.settle();
        closed
    }
}

/// What was free on the device when a request failed.
fn free_memory(error: &AllocatorError, device: &mut dyn Device) -> Bytes {
    match error {
        AllocatorError::OutOfMemory(failed) => match failed.cause {
            OomCause::Device { free } => free,
            OomCause::Fraction { .. } | OomCause::Limit { .. } => device.free_memory().unwrap_or(Bytes::ZERO),
        },
        _ => device.free_memory().unwrap_or(Bytes::ZERO),
    }
}

/// What moves with every call to the driver for memory.
type Counted = [u64; 3];

fn counted(allocator: &dyn Allocator) -> Counted {
    let stats = allocator.stats();
    [stats.num_device_alloc, stats.num_device_free, stats.reserved_bytes.all.current]
}

#[derive(Clone, Copy, Debug)]
struct Live {
    address: u64,
    size: Bytes,
    stream: StreamId,
}

#[derive(Debug, Default)]
struct Log {
    /// Stacks and settings.
    snapshot: Snapshot,
    events: Vec<Event>,
    stack: StackId,
    time_us: Option<u64>,
    counted: Counted,
    held: Held,
    /// Blocks that were freed and wait for events of other streams, oldest first.
    pending: Vec<Live>,
    /// By address: who allocated the block, or made the segment, that was there last.
    blocks: BTreeMap<u64, StackId>,
    segments: BTreeMap<u64, StackId>,
}

impl Log {
    fn add(&mut self, action: Action, address: u64, size: Bytes, stream: StreamId) {
        match action {
            Action::Alloc => drop(self.blocks.insert(address, self.stack)),
            Action::SegmentAlloc | Action::SegmentMap => drop(self.segments.insert(address, self.stack)),
            _ => {}
        }
        let (time_us, stack) = (self.time_us, self.stack);
        self.events.push(Event { action, address, size, stream: stream.0.into(), time_us, stack, extra: ExtraId::NONE });
    }

    /// Frees that are complete now, then what went back to the driver, then what was taken from it.
    fn settle(&mut self, allocator: &dyn Allocator) {
        let is_pending = |live: &Live| {
            let segment = allocator.segment_at(DevicePtr(live.address));
            segment.is_some_and(|segment| {
                segment.blocks.iter().any(|block| block.address.0 == live.address && block.state == BlockState::PendingFree)
            })
        };
        let (pending, complete) = std::mem::take(&mut self.pending).into_iter().partition(is_pending);
        self.pending = pending;
        for Live { address, size, stream } in complete {
            self.add(Action::FreeCompleted, address, size, stream);
        }
        let counted = counted(allocator);
        if counted == self.counted {
            return;
        }
        self.counted = counted;
        let now = Held::of(&allocator.snapshot());
        let before = std::mem::replace(&mut self.held, now.clone());
        for (action, ranges) in [
            (Action::SegmentFree, before.segments_beyond(&now)),
            (Action::SegmentUnmap, before.mapped_beyond(&now)),
            (Action::SegmentAlloc, now.segments_beyond(&before)),
            (Action::SegmentMap, now.mapped_beyond(&before)),
        ] {
            ranges.into_iter().for_each(|Live { address, size, stream }| self.add(action, address, size, stream));
        }
    }

    /// A segment as it is now, with the stacks of those who made it and its blocks.
    fn segment(&self, segment: &SegmentInfo) -> Segment {
        let block = |block: &BlockInfo| Block {
            address: block.address.0,
            size: block.size,
            requested: block.requested,
            state: block.state,
            stack: match block.state {
                BlockState::Inactive => StackId::EMPTY,
                BlockState::Allocated | BlockState::PendingFree => self.blocks.get(&block.address.0).copied().unwrap_or_default(),
            },
            extra: ExtraId::NONE,
        };
        Segment {
            device: 0,
            address: segment.address.0,
            size: segment.size,
            stream: segment.stream.unwrap_or_default().0.into(),
            pool: segment.pool,
            private_pool: segment.private_pool.map_or(PoolId::DEFAULT, |pool| PoolId(0, u64::from(pool) + 1)),
            expandable: segment.expandable,
            stack: self.segments.get(&segment.address.0).copied().unwrap_or_default(),
            blocks: segment.blocks.iter().map(block).collect(),
            extra: ExtraId::NONE,
        }
    }
}

/// What is held from the driver, by address: sizes and streams.
#[derive(Clone, Debug, Default)]
struct Held {
    segments: BTreeMap<u64, (Bytes, StreamId)>,
    /// Mapped ranges of expandable segments.
    mapped: BTreeMap<u64, (Bytes, StreamId)>,
}

impl Held {
    fn of(segments: &[SegmentInfo]) -> Self {
        let mut held = Self::default();
        for segment in segments {
            let ranges = if segment.expandable { &mut held.mapped } else { &mut held.segments };
            ranges.insert(segment.address.0, (segment.size, segment.stream.unwrap_or_default()));
        }
        held
    }

    /// The segments that the other one does not have.
    fn segments_beyond(&self, other: &Self) -> Vec<Live> {
        let beyond = self.segments.iter().filter(|&(address, segment)| other.segments.get(address) != Some(segment));
        beyond.map(|(&address, &(size, stream))| Live { address, size, stream }).collect()
    }

    /// The parts of mapped ranges that the other one does not have.
    fn mapped_beyond(&self, other: &Self) -> Vec<Live> {
        let mut beyond = Vec::new();
        for (&start, &(size, stream)) in &self.mapped {
            let (mut from, end) = (start, start + size.0);
            let mut part = |from: u64, to: u64| {
                if from < to {
                    beyond.push(Live { address: from, size: Bytes(to - from), stream });
                }
            };
            for (&known, &(known_size, _)) in other.mapped.range(..end).filter(|&(&known, &(known_size, _))| known + known_size.0 > start) {
                part(from, known);
                from = from.max(known + known_size.0);
            }
            part(from, end);
        }
        beyond
    }
}
