//! Records an allocator's events like PyTorch's memory history. [`Recorder::around`] wraps an
//! allocator in [`Recorded`]; [`Recorder::snapshot`] returns the events and the current state.
//!
//! Driver calls are found by comparing the allocator's segments before and after each operation
//! whose counters changed. A segment that one operation frees and allocates again at the same
//! address is therefore missed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use harness_allocator::allocator::{
    Allocation, Allocator, AllocatorError, OomCause, PrivatePoolError, PrivatePoolId, PrivatePools,
    Request, wrapper::AllocatorWrapper,
};
use harness_allocator::device::{Device, DeviceError, StreamId};
use harness_allocator::sync::lock;
use harness_allocator::{stats::SegmentInfo, units::Bytes};

use super::{
    Action, Event, ExtraId, Frame, FrameId, MempoolId, RecordedSettings, Segment, Snapshot,
    StackId, Value, is_pending,
};

/// The history of an allocator. Clones share one history.
#[derive(Clone, Debug, Default)]
pub struct Recorder(Arc<Mutex<Log>>);

impl Recorder {
    pub fn new(settings: Option<RecordedSettings>) -> Self {
        let recorder = Self::default();
        recorder.log().snapshot.settings = settings;
        recorder
    }

    /// Wraps an allocator. Its existing blocks count as allocated before the recording.
    pub fn around<A: Allocator>(&self, allocator: A) -> Recorded<A> {
        let mut log = self.log();
        log.counted = counted(&allocator);
        log.held = Held::of(&allocator.snapshot());
        drop(log);
        Recorded {
            allocator,
            recorder: self.clone(),
        }
    }

    /// Sets the current call stack, innermost frame first.
    pub fn set_place(&self, frames: impl IntoIterator<Item = Frame>) {
        let mut log = self.log();
        let ids: Vec<FrameId> = frames
            .into_iter()
            .map(|frame| log.snapshot.stacks.intern_frame(frame))
            .collect();
        log.stack = log.snapshot.stacks.intern(&ids);
    }

    pub fn set_inner_place(&self, frame: Frame) {
        let mut log = self.log();
        let inner = log.snapshot.stacks.intern_frame(frame);
        let ids: Vec<FrameId> = std::iter::once(inner)
            .chain(log.snapshot.stacks.ids(log.stack).iter().copied())
            .collect();
        log.stack = log.snapshot.stacks.intern(&ids);
    }

    pub fn place(&self) -> StackId {
        self.log().stack
    }

    pub fn go_back_to(&self, place: StackId) {
        self.log().stack = place;
    }

    pub fn set_time(&self, time_us: u64) {
        self.log().time_us = Some(time_us);
    }

    pub fn set_label(&self, label: Option<&str>) {
        let mut log = self.log();
        log.label = label.map(str::to_owned);
        log.extras_known = None;
    }

    /// Returns the events so far and the allocator's current segments. Stream numbers serve as
    /// handles; private pool N becomes `(0, N + 1)`.
    pub fn snapshot(&self, allocator: &dyn Allocator) -> Snapshot {
        let mut log = self.log();
        log.settle(allocator);
        let mut snapshot = log.snapshot.clone();
        snapshot.segments = allocator
            .snapshot()
            .iter()
            .map(|segment| log.segment(segment))
            .collect();
        snapshot.traces = vec![log.events.clone()];
        snapshot
    }

    /// The history stays consistent if a thread panics.
    fn log(&self) -> MutexGuard<'_, Log> {
        lock(&self.0)
    }
}

#[derive(Debug)]
pub struct Recorded<A> {
    allocator: A,
    recorder: Recorder,
}

impl<A: Allocator> Recorded<A> {
    /// Calls the allocator, and records driver calls and completed frees.
    fn settled<T>(&mut self, call: impl FnOnce(&mut A) -> T) -> T {
        let answer = call(&mut self.allocator);
        self.recorder.log().settle(&self.allocator);
        answer
    }

    fn pools(&mut self, pool: PrivatePoolId) -> Result<&mut dyn PrivatePools, PrivatePoolError> {
        self.allocator
            .private_pools()
            .ok_or(PrivatePoolError::Unknown(pool))
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

    fn allocate(
        &mut self,
        device: &mut dyn Device,
        request: Request,
    ) -> Result<Allocation, AllocatorError> {
        let allocated = self.settled(|allocator| allocator.allocate(device, request));
        let mut log = self.recorder.log();
        match &allocated {
            Ok(allocation) if allocation.is_null() => {}
            Ok(allocation) => log.allocated(Live {
                address: allocation.ptr().0,
                size: allocation.requested(),
                stream: allocation.stream(),
            }),
            Err(error) if error.is_out_of_memory() => {
                let (free, extra) = (free_memory(error, device), log.extra_of_request());
                log.add(
                    Action::Oom,
                    Live {
                        address: free.0,
                        size: request.size,
                        stream: request.stream,
                    },
                    extra,
                );
            }
            Err(_) => {}
        }
        allocated
    }

    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        let block = Live {
            address: allocation.ptr().0,
            size: allocation.requested(),
            stream: allocation.stream(),
        };
        let is_null = allocation.is_null();
        let freed = self.allocator.free(device, allocation);
        if !is_null && freed.is_ok() {
            let mut log = self.recorder.log();
            log.freed(Action::FreeRequested, block);
            log.pending.push(block);
        }
        self.settled(|_| freed)
    }

    fn release_stream(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        self.settled(|allocator| allocator.release_stream(device, stream))
    }

    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.settled(|allocator| allocator.empty_cache(device))
    }

    fn private_pools(&mut self) -> Option<&mut dyn PrivatePools> {
        self.allocator
            .private_pools()
            .is_some()
            .then_some(self as &mut dyn PrivatePools)
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.settled(|allocator| allocator.close(device))
    }
}

impl<A: Allocator> PrivatePools for Recorded<A> {
    fn begin(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.pools(pool)?.begin(pool)?;
        self.recorder.log().open_pools.push(pool);
        Ok(())
    }

    fn end(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.pools(pool)?.end(pool)?;
        self.recorder.log().open_pools.retain(|open| *open != pool);
        Ok(())
    }

    fn release(
        &mut self,
        device: &mut dyn Device,
        pool: PrivatePoolId,
    ) -> Result<(), PrivatePoolError> {
        let released = self.pools(pool)?.release(device, pool);
        self.settled(|_| released)
    }
}

/// The device's free memory when a request failed.
fn free_memory(error: &AllocatorError, device: &mut dyn Device) -> Bytes {
    match error {
        AllocatorError::OutOfMemory(failed) if let OomCause::Device { free } = failed.cause => free,
        _ => device.free_memory().unwrap_or(Bytes::ZERO),
    }
}

/// Counters that change with every driver call for memory.
type Counted = [u64; 3];

fn counted(allocator: &dyn Allocator) -> Counted {
    let stats = allocator.stats();
    [
        stats.num_device_alloc,
        stats.num_device_free,
        stats.reserved_bytes.all.current,
    ]
}

/// A requested block. For a failed request, `address` is the device's free memory.
#[derive(Clone, Copy, Debug)]
struct Live {
    address: u64,
    size: Bytes,
    stream: StreamId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    size: Bytes,
    stream: StreamId,
    private_pool: Option<u32>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Owner {
    stack: StackId,
    extra: ExtraId,
}

#[derive(Debug, Default)]
struct Log {
    /// Holds the stacks and settings.
    snapshot: Snapshot,
    events: Vec<Event>,
    stack: StackId,
    time_us: Option<u64>,
    label: Option<String>,
    /// Open private pools, innermost last.
    open_pools: Vec<PrivatePoolId>,
    /// The unknown keys of new events, cached until the label or pool changes.
    extras_known: Option<(Option<PrivatePoolId>, ExtraId)>,
    counted: Counted,
    held: Held,
    /// Freed blocks that wait for other streams, oldest first.
    pending: Vec<Live>,
    /// By address: the last allocation of a block or segment there.
    blocks: BTreeMap<u64, Owner>,
    segments: BTreeMap<u64, StackId>,
}

impl Log {
    fn add(&mut self, action: Action, block: Live, extra: ExtraId) {
        self.events.push(Event {
            time_us: self.time_us,
            stack: self.stack,
            extra,
            ..Event::new(action, block.address, block.size, block.stream.0.into())
        });
    }

    fn allocated(&mut self, block: Live) {
        let extra = self.extra_of_request();
        self.blocks.insert(
            block.address,
            Owner {
                stack: self.stack,
                extra,
            },
        );
        self.add(Action::Alloc, block, extra);
    }

    /// Records a step of a free, with the metadata of the allocation.
    fn freed(&mut self, action: Action, block: Live) {
        let Owner { extra, .. } = self.blocks.get(&block.address).copied().unwrap_or_default();
        self.add(action, block, extra);
    }

    /// Records a range reserved from the driver or returned to it.
    fn moved(&mut self, action: Action, address: u64, range: Range) {
        if action.reserves() {
            self.segments.insert(address, self.stack);
        }
        let pool = pool_key(range.private_pool);
        let extra = self.snapshot.extras.intern(vec![pool]);
        let Range { size, stream, .. } = range;
        self.add(
            action,
            Live {
                address,
                size,
                stream,
            },
            extra,
        );
    }

    /// The unknown keys of a request that is made now.
    fn extra_of_request(&mut self) -> ExtraId {
        let pool = self.open_pools.last().copied();
        if let Some((_, known)) = self.extras_known.filter(|(known, _)| *known == pool) {
            return known;
        }
        let label = self
            .label
            .iter()
            .map(|label| ("user_metadata".to_owned(), Value::Text(label.clone())));
        let extra = self
            .snapshot
            .extras
            .intern(label.chain([pool_key(pool.map(|pool| pool.0))]).collect());
        self.extras_known = Some((pool, extra));
        extra
    }

    /// Records completed frees, then memory returned to the driver, then new memory from it.
    fn settle(&mut self, allocator: &dyn Allocator) {
        let complete: Vec<Live> = self
            .pending
            .extract_if(.., |block| !is_pending(allocator, block.address))
            .collect();
        complete
            .into_iter()
            .for_each(|block| self.freed(Action::FreeCompleted, block));
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
            ranges
                .into_iter()
                .for_each(|(address, range)| self.moved(action, address, range));
        }
    }

    fn segment(&self, segment: &SegmentInfo) -> Segment {
        let stack = |address| self.blocks.get(&address).copied().unwrap_or_default().stack;
        let stream = segment.stream.unwrap_or_default().0.into();
        let made = self
            .segments
            .get(&segment.address.0)
            .copied()
            .unwrap_or_default();
        Segment {
            stack: made,
            ..Segment::of(segment, stream, pool_id(segment.private_pool), stack)
        }
    }
}

impl Snapshot {
    /// A snapshot of an allocator that has just refused a request, with the device's free memory.
    /// `private_pool` serves the request.
    pub fn of_refusal(
        segments: &[SegmentInfo],
        request: Request,
        private_pool: Option<u32>,
        free: Bytes,
    ) -> Self {
        let mut snapshot = Self::default();
        let extra = snapshot.extras.intern(vec![pool_key(private_pool)]);
        let segment = |segment: &SegmentInfo| {
            let stream = segment.stream.unwrap_or_default().0.into();
            Segment::of(segment, stream, pool_id(segment.private_pool), |_| {
                StackId::EMPTY
            })
        };
        snapshot.segments = segments.iter().map(segment).collect();
        let stream = request.stream.0.into();
        snapshot.traces = vec![vec![Event {
            extra,
            ..Event::new(Action::Oom, free.0, request.size, stream)
        }]];
        snapshot
    }
}

/// Converts private pool N to `(0, N + 1)`.
fn pool_id(private_pool: Option<u32>) -> MempoolId {
    private_pool.map_or(MempoolId::DEFAULT, |pool| MempoolId(0, u64::from(pool) + 1))
}

/// The key `pool_id`, as PyTorch versions after 2.11 write it.
fn pool_key(private_pool: Option<u32>) -> (String, Value) {
    let MempoolId(first, second) = pool_id(private_pool);
    (
        "pool_id".to_owned(),
        Value::Tuple(vec![Value::Int(first.into()), Value::Int(second.into())]),
    )
}

#[derive(Clone, Debug, Default)]
struct Held {
    segments: BTreeMap<u64, Range>,
    /// Mapped ranges of expandable segments.
    mapped: BTreeMap<u64, Range>,
}

impl Held {
    fn of(segments: &[SegmentInfo]) -> Self {
        let mut held = Self::default();
        for segment in segments {
            let ranges = if segment.expandable {
                &mut held.mapped
            } else {
                &mut held.segments
            };
            let (stream, private_pool) = (segment.stream.unwrap_or_default(), segment.private_pool);
            ranges.insert(
                segment.address.0,
                Range {
                    size: segment.size,
                    stream,
                    private_pool,
                },
            );
        }
        held
    }

    fn segments_beyond(&self, other: &Self) -> Vec<(u64, Range)> {
        let beyond = self
            .segments
            .iter()
            .filter(|&(address, segment)| other.segments.get(address) != Some(segment));
        beyond
            .map(|(&address, &segment)| (address, segment))
            .collect()
    }

    fn mapped_beyond(&self, other: &Self) -> Vec<(u64, Range)> {
        let mut beyond = Vec::new();
        for (&start, &range) in &self.mapped {
            let (mut from, end) = (start, start + range.size.0);
            let mut part = |from: u64, to: u64| {
                if from < to {
                    beyond.push((
                        from,
                        Range {
                            size: Bytes(to - from),
                            ..range
                        },
                    ));
                }
            };
            for (&known, known_range) in other
                .mapped
                .range(..end)
                .filter(|&(&known, known_range)| known + known_range.size.0 > start)
            {
                part(from, known);
                from = from.max(known + known_range.size.0);
            }
            part(from, end);
        }
        beyond
    }
}
