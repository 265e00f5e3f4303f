//! A caching allocator that tells one lie, and counts the blocks that the audit reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use harness_allocator::allocator::caching::{CachingAllocator, Config};
use harness_allocator::allocator::{
    Allocation, Allocator, AllocatorError, MemoryFraction, Request,
};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{Device, DeviceError, DevicePtr, MemoryRange, StreamId};
use harness_allocator::stats::{
    BlockInfo, BlockState, MemoryStats, PoolKind, PooledStat, SegmentInfo, Stat, StatFamily,
};
use harness_allocator::units::Bytes;

/// The size of the request that starts most lies. No other request has this size.
pub(crate) const TOLD: Bytes = Bytes(1000);

/// The excess in a pending block's size: more than all active memory.
const PENDING_SURCHARGE: Bytes = Bytes::mib(32);

/// A single error of an allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lie {
    /// None: the control.
    Nothing,
    /// A counter is one too high.
    Counter(StatFamily),
    /// A peak is below its current value.
    Peak,
    /// A cumulative counter is one too high.
    SumOfIncreases,
    /// A free block starts after its true address, or before it.
    Gap,
    Overlap,
    /// A free block is listed and counted twice.
    Unmerged,
    /// An allocation overlaps another one: at the same address, or at its end.
    HandedOutTwice,
    HandedOutOverlapping,
    /// The structure has a wrong request or a wrong stream; the sums are right.
    SwappedRequests,
    ListedForAnotherStream,
    /// A free block in the segment of one stream is listed for another stream.
    HoldsABlockOfAnotherStream,
    /// Returns half of the requested size, or memory for another stream, or nothing.
    TooSmall,
    WrongStream,
    Null,
    /// A live allocation silently gets other memory at its address.
    LosesContents,
    /// Ignores `record_stream`: reuses a block while another stream uses it.
    ForgetsStreams,
    /// Takes all memory from another device.
    FromNowhere,
    /// Charges blocks that wait for events with more than their size.
    ChargesPending,
    /// A device allocation that no account shows, freed at the end.
    Hoards,
    /// Does not count an OOM, or drops all live memory on OOM.
    OomUncounted,
    OomDropsLive,
    /// `empty_cache` does nothing.
    KeepsTheCache,
    /// Never lifts a memory fraction.
    KeepsTheFraction,
    /// Leaks an event or a stream.
    LeaksAnEvent,
    LeaksAStream,
    LeaksItsSegments,
}

/// The number of blocks that the audit read.
#[derive(Debug, Default)]
pub(crate) struct Reads {
    pub(crate) snapshots: AtomicU64,
    pub(crate) segments: AtomicU64,
    pub(crate) blocks: AtomicU64,
}

impl Reads {
    pub(crate) fn whole(&self) -> u64 {
        self.snapshots.load(Ordering::Relaxed)
    }
}

pub(crate) struct Lying {
    lie: Lie,
    told: bool,
    inner: CachingAllocator,
    /// Another device with the same addresses as the rig's, as all new simulated devices have.
    elsewhere: SimDevice,
    /// An allocator on that device.
    twin: CachingAllocator,
    first: Option<MemoryRange>,
    hoard: Option<DevicePtr>,
    reads: Arc<Reads>,
}

impl Lying {
    pub(crate) fn new(lie: Lie) -> (Self, Arc<Reads>) {
        let reads = Arc::<Reads>::default();
        let allocator = Self {
            lie,
            told: false,
            inner: CachingAllocator::new(Config {
                expandable_segments: lie == Lie::LosesContents,
                ..Config::default()
            }),
            elsewhere: SimDevice::new(SimConfig::default()),
            twin: CachingAllocator::default(),
            first: None,
            hoard: None,
            reads: Arc::clone(&reads),
        };
        (allocator, reads)
    }

    /// The effect of the lie on the request at which it begins.
    fn tell(
        &mut self,
        device: &mut dyn Device,
        request: Request,
    ) -> Result<Allocation, AllocatorError> {
        match self.lie {
            // The second allocator has no allocations, so it starts at the first block's address.
            Lie::HandedOutTwice | Lie::HandedOutOverlapping => {
                return self.twin.allocate(&mut self.elsewhere, request);
            }
            Lie::TooSmall => {
                return self.inner.allocate(
                    device,
                    Request {
                        size: Bytes(request.size.0 / 2),
                        ..request
                    },
                );
            }
            Lie::WrongStream => {
                return self
                    .inner
                    .allocate(device, request.on(StreamId(request.stream.0 + 1)));
            }
            Lie::Null => {
                return self.inner.allocate(
                    device,
                    Request {
                        size: Bytes::ZERO,
                        ..request
                    },
                );
            }
            Lie::LosesContents => self.swap_memory(device)?,
            Lie::Hoards => self.hoard = Some(device.malloc(Bytes::mib(2))?),
            Lie::LeaksAnEvent => drop(device.create_event()?),
            Lie::LeaksAStream => drop(device.create_stream()?),
            _ => {}
        }
        self.inner.allocate(device, request)
    }

    /// Maps a new page over the first allocation.
    fn swap_memory(&self, device: &mut dyn Device) -> Result<(), DeviceError> {
        const PAGE: Bytes = Bytes::mib(2);
        let first = self.first.expect("something was handed out before").start;
        let page = MemoryRange::new(DevicePtr(first.0 - first.0 % PAGE.0), PAGE);
        device.synchronize()?;
        let mapped = device.mapped().expect("the simulated device maps memory");
        mapped.unmap(page)?;
        mapped.map(page, PAGE)
    }

    fn lies(&self, lie: Lie) -> bool {
        self.told && self.lie == lie
    }

    fn twist(&self, mut segment: SegmentInfo) -> SegmentInfo {
        let last = segment
            .blocks
            .last()
            .copied()
            .filter(|block| block.state == BlockState::Inactive && segment.blocks.len() > 1);
        if let (true, Some(last)) = (self.told, last) {
            let place = segment.blocks.len() - 1;
            match self.lie {
                Lie::Gap => segment.blocks[place].address = last.address.offset(Bytes(512)),
                Lie::Overlap => segment.blocks[place].address = DevicePtr(last.address.0 - 512),
                Lie::Unmerged
                    if segment.address == self.first.expect("handed out before").start =>
                {
                    segment.blocks[place].size = Bytes(512);
                    let rest = Bytes(last.size.0 - 512);
                    segment.blocks.push(BlockInfo {
                        address: last.address.offset(Bytes(512)),
                        size: rest,
                        ..last
                    });
                }
                Lie::SwappedRequests
                    if segment.address == self.first.expect("handed out before").start =>
                {
                    let earlier = segment.blocks[place - 2].requested;
                    segment.blocks[place - 2].requested =
                        std::mem::replace(&mut segment.blocks[place - 1].requested, earlier);
                }
                Lie::ListedForAnotherStream => {
                    segment.stream = segment.stream.map(|stream| StreamId(stream.0 + 1));
                    segment
                        .blocks
                        .iter_mut()
                        .for_each(|block| block.stream = StreamId(block.stream.0 + 1));
                }
                Lie::HoldsABlockOfAnotherStream => {
                    segment.blocks[place].stream = StreamId(last.stream.0 + 1)
                }
                _ => {}
            }
        }
        if self.lie == Lie::ChargesPending {
            for block in segment
                .blocks
                .iter_mut()
                .filter(|block| block.state == BlockState::PendingFree)
            {
                block.requested += PENDING_SURCHARGE;
            }
        }
        segment
    }

    fn read(&self, segments: &[SegmentInfo]) {
        let blocks: usize = segments.iter().map(|segment| segment.blocks.len()).sum();
        self.reads
            .blocks
            .fetch_add(blocks as u64, Ordering::Relaxed);
    }
}

fn family(stats: &mut MemoryStats, family: StatFamily) -> &mut PooledStat {
    match family {
        StatFamily::AllocatedBytes => &mut stats.allocated_bytes,
        StatFamily::ReservedBytes => &mut stats.reserved_bytes,
        StatFamily::ActiveBytes => &mut stats.active_bytes,
        StatFamily::InactiveSplitBytes => &mut stats.inactive_split_bytes,
        StatFamily::RequestedBytes => &mut stats.requested_bytes,
        StatFamily::Allocation => &mut stats.allocation,
        StatFamily::Segment => &mut stats.segment,
        StatFamily::Active => &mut stats.active,
        StatFamily::InactiveSplit => &mut stats.inactive_split,
    }
}

impl Allocator for Lying {
    fn name(&self) -> &'static str {
        "lying"
    }

    fn allocate(
        &mut self,
        device: &mut dyn Device,
        request: Request,
    ) -> Result<Allocation, AllocatorError> {
        if self.lie == Lie::FromNowhere {
            return self.inner.allocate(&mut self.elsewhere, request);
        }
        let answer = if request.size == TOLD {
            self.told = true;
            self.tell(device, request)
        } else {
            self.inner.allocate(device, request)
        };
        match &answer {
            Ok(allocation) if self.first.is_none() => self.first = Some(allocation.range()),
            Err(AllocatorError::OutOfMemory(_)) if self.lie == Lie::OomDropsLive => {
                self.inner.close(device)?
            }
            _ => {}
        }
        answer
    }

    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        if self.lie == Lie::FromNowhere {
            return self.inner.free(&mut self.elsewhere, allocation);
        }
        self.inner.free(device, allocation)
    }

    fn record_stream(
        &mut self,
        allocation: &Allocation,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        if self.lie == Lie::ForgetsStreams {
            return Ok(());
        }
        self.inner.record_stream(allocation, stream)
    }

    fn release_stream(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        self.inner.release_stream(device, stream)
    }

    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        if self.lie == Lie::KeepsTheCache {
            return Ok(());
        }
        self.inner.empty_cache(device)
    }

    fn set_memory_fraction(&mut self, device: &dyn Device, fraction: MemoryFraction) {
        if self.lie != Lie::KeepsTheFraction || fraction != MemoryFraction::ALL {
            self.inner.set_memory_fraction(device, fraction);
        }
    }

    fn reset_peaks(&mut self) {
        self.inner.reset_peaks();
    }

    fn stats(&self) -> MemoryStats {
        let mut stats = self.inner.stats();
        match self.lie {
            Lie::Counter(counter) if self.told => {
                let Stat {
                    current,
                    peak,
                    allocated,
                    ..
                } = &mut family(&mut stats, counter).all;
                *current += 1;
                *peak += 1;
                *allocated += 1;
            }
            Lie::Peak if self.told => {
                stats.active_bytes.all.peak = stats.active_bytes.all.current - 1
            }
            Lie::SumOfIncreases if self.told => stats.segment.large_pool.allocated += 1,
            // Counted as it is listed.
            Lie::Unmerged if self.told => stats.inactive_split.increase(PoolKind::Small, 1),
            Lie::ChargesPending => {
                let pending = self
                    .inner
                    .snapshot()
                    .into_iter()
                    .flat_map(|segment| segment.blocks);
                for _ in pending.filter(|block| block.state == BlockState::PendingFree) {
                    stats
                        .requested_bytes
                        .increase(PoolKind::Large, PENDING_SURCHARGE.0);
                }
            }
            Lie::OomUncounted => stats.num_ooms = 0,
            _ => {}
        }
        stats
    }

    fn snapshot(&self) -> Vec<SegmentInfo> {
        self.reads.snapshots.fetch_add(1, Ordering::Relaxed);
        let segments: Vec<_> = self
            .inner
            .snapshot()
            .into_iter()
            .map(|segment| self.twist(segment))
            .collect();
        self.read(&segments);
        segments
    }

    fn segment_at(&self, address: DevicePtr) -> Option<SegmentInfo> {
        self.reads.segments.fetch_add(1, Ordering::Relaxed);
        let segment = self.twist(self.inner.segment_at(address)?);
        self.read(std::slice::from_ref(&segment));
        Some(segment)
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        if let Some(hoard) = self.hoard.take() {
            device.free(hoard)?;
        }
        if self.lie == Lie::FromNowhere {
            return self.inner.close(&mut self.elsewhere);
        }
        if self.lies(Lie::LeaksItsSegments) {
            return Ok(());
        }
        self.inner.close(device)
    }
}
