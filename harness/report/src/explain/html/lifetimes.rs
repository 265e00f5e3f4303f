//! Allocated and reserved memory at every moment of a recording: [`Lifetimes::of`].
//!
//! *Moment* `k` is the state after the first `k` events, so `n` events have the moments `0..=n`. A
//! lifetime `start..end` is half open; an `end` of `n + 1` means that it outlives the recording.
//!
//! Segments are traced backward from the final state, and blocks forward to it. So a recording
//! without its first events is correct from its first recorded event.

use std::collections::{BTreeMap, HashMap};

use harness_allocator::stats::{BlockState, PoolKind};
use harness_allocator::units::Bytes;
use harness_explain::state::{History, Sizes};
use harness_trace::snapshot::{Action, Block, Event, MempoolId, Segment, Snapshot, StackId};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lifetimes {
    pub events: usize,
    /// By start, then in recorded order.
    pub blocks: Vec<BlockLife>,
    /// By start, then address.
    pub segments: Vec<SegmentLife>,
    pub contradictions: Contradictions,
}

/// One allocation, from `alloc` to `free_completed`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockLife {
    pub address: u64,
    /// From [`History::sizes`], because events contain the requested size only.
    pub size: Bytes,
    pub requested: Bytes,
    pub stream: u64,
    pub stack: StackId,
    /// The first moment of its life; 0 if it predates the recording.
    pub start: usize,
    /// The first moment after the program freed it.
    pub freed: usize,
    /// The first moment at which the allocator can reuse it.
    pub end: usize,
}

/// One range reserved from the driver: a segment, or pages of an expandable segment that were
/// mapped and unmapped together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentLife {
    pub address: u64,
    pub size: Bytes,
    pub stream: u64,
    /// Known for segments of the final state only, because events do not name the pool.
    pub pool: Option<(PoolKind, MempoolId)>,
    pub expandable: bool,
    pub start: usize,
    pub end: usize,
}

/// Counts of contradictions. All are zero if the device's whole history was recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contradictions {
    /// Blocks allocated over a live block, whose free was not recorded.
    pub missing_frees: usize,
    /// Blocks that are live after all events but missing from the final state.
    pub missing_blocks: usize,
    /// Bytes of segments that were allocated, but neither released nor in the final state.
    pub missing_segment_bytes: u64,
}

impl BlockLife {
    pub const fn is_there(&self, moment: usize) -> bool {
        self.start <= moment && moment < self.end
    }

    pub const fn is_allocated(&self, moment: usize) -> bool {
        self.start <= moment && moment < self.freed
    }
}

impl Lifetimes {
    /// Traces the events of one device. Takes `n log n` time for `n` events.
    pub fn of(snapshot: &Snapshot, device: u32) -> Self {
        let events = snapshot.events_of(device);
        let held: Vec<&Segment> = snapshot.segments_of(device).collect();
        let mut contradictions = Contradictions::default();
        let config = snapshot.config().unwrap_or_default();
        let sizes = History::new(snapshot, device, config).sizes();
        let blocks = block_lives(events, &held, &sizes, &mut contradictions);
        let segments = segment_lives(events, &held, &mut contradictions);
        Self {
            events: events.len(),
            blocks,
            segments,
            contradictions,
        }
    }

    /// Bytes allocated, waiting for events, and reserved at a moment. Linear in the number of
    /// lifetimes.
    pub fn at(&self, moment: usize) -> LifeFigures {
        let sum = |of: &dyn Fn(&BlockLife) -> bool| {
            self.blocks
                .iter()
                .filter(|life| of(life))
                .map(|life| life.size.0)
                .sum()
        };
        let segments = self
            .segments
            .iter()
            .filter(|life| life.start <= moment && moment < life.end);
        LifeFigures {
            allocated: Bytes(sum(&|life| life.is_allocated(moment))),
            pending: Bytes(sum(&|life| {
                life.is_there(moment) && !life.is_allocated(moment)
            })),
            reserved: Bytes(segments.map(|life| life.size.0).sum()),
        }
    }

    pub fn peak_allocated(&self) -> (usize, Bytes) {
        self.peak(
            self.blocks
                .iter()
                .map(|life| (life.start, life.freed, life.size)),
        )
    }

    pub fn peak_reserved(&self) -> (usize, Bytes) {
        self.peak(
            self.segments
                .iter()
                .map(|life| (life.start, life.end, life.size)),
        )
    }

    fn peak(&self, lives: impl Iterator<Item = (usize, usize, Bytes)>) -> (usize, Bytes) {
        let (mut added, mut removed) = (vec![0_u64; self.events + 2], vec![0_u64; self.events + 2]);
        for (start, end, size) in lives.filter(|(start, end, _)| start < end) {
            added[start] += size.0;
            removed[end] += size.0;
        }
        let (mut held, mut peak) = (0, (0, Bytes::ZERO));
        for moment in 0..=self.events {
            held = held + added[moment] - removed[moment];
            if Bytes(held) > peak.1 {
                peak = (moment, Bytes(held));
            }
        }
        peak
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LifeFigures {
    pub allocated: Bytes,
    /// Freed, but waiting for events of other streams.
    pub pending: Bytes,
    pub reserved: Bytes,
}

/// Traces blocks forward and reconciles the live ones with the final state.
fn block_lives(
    events: &[Event],
    held: &[&Segment],
    sizes: &Sizes,
    contradictions: &mut Contradictions,
) -> Vec<BlockLife> {
    let never = events.len() + 1;
    let mut lives: Vec<BlockLife> = Vec::new();
    let mut open: HashMap<u64, usize> = HashMap::new();
    for (index, event) in events.iter().enumerate() {
        let moment = index + 1;
        let life = BlockLife {
            address: event.address,
            size: sizes.allocated_by(index).unwrap_or(event.size),
            requested: event.size,
            stream: event.stream,
            stack: event.stack,
            start: moment,
            freed: never,
            end: never,
        };
        match event.action {
            Action::Alloc => {
                if let Some(before) = open.insert(event.address, lives.len()) {
                    contradictions.missing_frees += 1;
                    lives[before].freed = lives[before].freed.min(moment);
                    lives[before].end = moment;
                }
                lives.push(life);
            }
            Action::FreeRequested => {
                let index = *open.entry(event.address).or_insert(lives.len());
                if index == lives.len() {
                    lives.push(before_recording(life, sizes));
                }
                lives[index].freed = lives[index].freed.min(moment);
            }
            Action::FreeCompleted => match open.remove(&event.address) {
                Some(index) => {
                    lives[index].freed = lives[index].freed.min(moment);
                    lives[index].end = moment;
                }
                None => lives.push(BlockLife {
                    freed: 0,
                    end: moment,
                    ..before_recording(life, sizes)
                }),
            },
            _ => {}
        }
    }
    contradictions.missing_blocks = reconcile(&mut lives, open, held, never);
    lives.sort_by_key(|life| life.start);
    lives
}

/// Reconciles the blocks that are live after the last event with the final state. Returns how many
/// of them the state lacks.
fn reconcile(
    lives: &mut Vec<BlockLife>,
    mut open: HashMap<u64, usize>,
    held: &[&Segment],
    never: usize,
) -> usize {
    for segment in held {
        for block in segment
            .blocks
            .iter()
            .filter(|block| block.state != BlockState::Inactive)
        {
            let index = open.remove(&block.address).unwrap_or_else(|| {
                // A block without events lived during the whole recording.
                lives.push(BlockLife {
                    address: block.address,
                    stream: segment.stream,
                    end: never,
                    ..BlockLife::default()
                });
                lives.len() - 1
            });
            fit(&mut lives[index], block, never);
        }
    }
    let missing = open.len();
    for index in open.into_values() {
        lives[index].end = never - 1;
        lives[index].freed = lives[index].freed.min(never - 1);
    }
    missing
}

fn before_recording(life: BlockLife, sizes: &Sizes) -> BlockLife {
    BlockLife {
        start: 0,
        stack: StackId::EMPTY,
        size: sizes.before(life.address).unwrap_or(life.size),
        ..life
    }
}

fn fit(life: &mut BlockLife, block: &Block, never: usize) {
    life.size = block.size;
    life.requested = block.requested;
    if life.stack == StackId::EMPTY {
        life.stack = block.stack;
    }
    match block.state {
        BlockState::Allocated => life.freed = never,
        // The time of the free is unknown; it is the last event at the latest.
        BlockState::PendingFree => life.freed = life.freed.min(never - 1),
        BlockState::Inactive => {}
    }
}

/// Reserved ranges by address, while events are traced backward. Their `start` is not yet known.
type Ranges = BTreeMap<u64, SegmentLife>;

fn segment_lives(
    events: &[Event],
    held: &[&Segment],
    contradictions: &mut Contradictions,
) -> Vec<SegmentLife> {
    let never = events.len() + 1;
    let mut lives = Vec::new();
    let final_range = |segment: &&Segment| {
        let life = SegmentLife {
            address: segment.address,
            size: segment.size,
            stream: segment.stream,
            pool: Some((segment.pool, segment.private_pool)),
            expandable: segment.expandable,
            start: 0,
            end: never,
        };
        (life.address, life)
    };
    let mut ranges: Ranges = held.iter().map(final_range).collect();
    for (index, event) in events.iter().enumerate().rev() {
        let moment = index + 1;
        if !event.action.reserves() && !event.action.releases() {
            continue;
        }
        let inside = cut_out(&mut ranges, event.address, event.size.0);
        let found: u64 = inside.iter().map(|range| range.size.0).sum();
        lives.extend(inside.into_iter().map(|range| SegmentLife {
            start: moment,
            ..range
        }));
        if event.action.reserves() {
            contradictions.missing_segment_bytes += event.size.0 - found;
        } else {
            // A range that is already reserved here was allocated by an unrecorded event.
            let life = SegmentLife {
                address: event.address,
                size: event.size,
                stream: event.stream,
                expandable: event.action == Action::SegmentUnmap,
                end: moment,
                ..SegmentLife::default()
            };
            ranges.insert(life.address, life);
        }
    }
    lives.extend(ranges.into_values());
    lives.sort_by_key(|life| (life.start, life.address));
    lives
}

/// Removes and returns `address..address + size`. A larger range is cut, and its rest remains.
fn cut_out(ranges: &mut Ranges, address: u64, size: u64) -> Vec<SegmentLife> {
    let end = address.saturating_add(size);
    let end_of = |range: &SegmentLife| range.address.saturating_add(range.size.0);
    let first = ranges
        .range(..=address)
        .next_back()
        .filter(|(_, range)| end_of(range) > address)
        .map_or(address, |(&first, _)| first);
    let hit: Vec<u64> = ranges
        .range(first..end.max(first))
        .map(|(&start, _)| start)
        .collect();
    let mut inside = Vec::with_capacity(hit.len());
    for start in hit {
        let Some(range) = ranges.remove(&start) else {
            continue;
        };
        let (from, to) = (range.address.max(address), end_of(&range).min(end));
        if range.address < from {
            ranges.insert(
                range.address,
                SegmentLife {
                    size: Bytes(from - range.address),
                    ..range
                },
            );
        }
        if to < end_of(&range) {
            ranges.insert(
                to,
                SegmentLife {
                    address: to,
                    size: Bytes(end_of(&range) - to),
                    ..range
                },
            );
        }
        inside.push(SegmentLife {
            address: from,
            size: Bytes(to - from),
            ..range
        });
    }
    inside
}
