//! A plain form of the rules of PyTorch's caching allocator: a list of segments, each with a list
//! of blocks, linear scans, and counters recomputed after every step. It shares only data types
//! with the allocator under test.
//!
//! The simulated device is part of the model: addresses only grow, charges are multiples of 2 MiB,
//! and events complete when waited for.

use std::collections::BTreeMap;

use harness_allocator::allocator::MemoryFraction;
use harness_allocator::allocator::caching::{Config, Quirks, TieOrder};
use harness_allocator::device::{DevicePtr, StreamId};
use harness_allocator::stats::{
    BlockInfo, BlockState, MemoryStats, PoolKind, PooledStat, SegmentInfo, Stat,
};
use harness_allocator::units::Bytes;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// The first address of the simulated device.
const FIRST_ADDRESS: u64 = 0x7000_0000_0000;

/// The owner of memory: a size class and possibly a private pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Pool {
    kind: PoolKind,
    owner: Option<u32>,
}

#[derive(Clone, Debug)]
struct Block {
    address: u64,
    size: u64,
    requested: u64,
    state: BlockState,
    /// Other streams that use it, and whether they were recorded while a pool context was open.
    uses: BTreeMap<u32, bool>,
    /// The number of events before it is free.
    events: u32,
    /// The look-ups in its pool when it became free.
    born: u64,
    /// Its number, if blocks are numbered.
    number: u64,
}

#[derive(Clone, Debug)]
struct Segment {
    address: u64,
    stream: u32,
    pool: Pool,
    blocks: Vec<Block>,
}

impl Segment {
    fn size(&self) -> u64 {
        self.blocks.iter().map(|block| block.size).sum()
    }

    fn is_whole_and_free(&self) -> bool {
        self.blocks.len() == 1 && self.blocks[0].state == BlockState::Inactive
    }
}

/// An event of a freed block on another stream.
#[derive(Clone, Debug)]
struct Event {
    stream: u32,
    block: u64,
    done: bool,
}

/// The driver or the limit has no memory for a segment.
struct Full;

/// The reason why a request fails.
enum Refusal {
    /// Without release and retry.
    AtOnce,
    AfterRetries,
}

/// The blocks that a quantity counts.
type Which = fn(&Segment, &Block) -> bool;
/// The amount that each of them adds.
type Worth = fn(&Block) -> u64;

/// The model.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    config: Config,
    /// The fraction of the limit, if there is a limit.
    fraction: Option<f64>,
    capacity: u64,
    next_address: u64,
    next_number: u64,
    /// In address order, because addresses only grow.
    segments: Vec<Segment>,
    /// In the order of recording.
    events: Vec<Event>,
    /// Blocks freed while a pool context was open. Their events are not recorded yet.
    put_off: Vec<u64>,
    lookups: BTreeMap<Pool, u64>,
    open: Vec<u32>,
    released: Vec<u32>,
    stats: MemoryStats,
    /// Driver calls: allocations, failed allocations, frees.
    pub(crate) calls: [u64; 3],
}

impl Model {
    pub(crate) fn new(config: Config, capacity: Bytes) -> Self {
        Self {
            fraction: Some(config.memory_fraction.get()).filter(|&fraction| fraction < 1.0),
            config,
            capacity: capacity.0,
            next_address: FIRST_ADDRESS,
            next_number: 0,
            segments: Vec::new(),
            events: Vec::new(),
            put_off: Vec::new(),
            lookups: BTreeMap::new(),
            open: Vec::new(),
            released: Vec::new(),
            stats: MemoryStats::default(),
            calls: [0; 3],
        }
    }

    /// The address and size of the block, or `None` for out of memory.
    pub(crate) fn allocate(&mut self, n: u64, stream: u32) -> Option<(u64, u64)> {
        if n == 0 {
            return Some((0, 0));
        }
        if !self.is_capturing() {
            self.file_put_off();
            self.poll();
        }
        let size = self.round(n);
        let pool = Pool {
            kind: if size <= MIB {
                PoolKind::Small
            } else {
                PoolKind::Large
            },
            owner: self.serving(),
        };
        if self.config.garbage_collection_threshold.is_some() && self.limit().is_some() {
            *self.lookups.entry(pool).or_default() += 1;
        }
        let found = match self.find(pool, stream, size) {
            Some(found) => Ok(found),
            None => self.take_from_driver(pool, stream, size),
        };
        let address = match found {
            Ok(address) => address,
            Err(Refusal::AtOnce) => return None,
            Err(Refusal::AfterRetries) => {
                self.stats.num_ooms += 1;
                return None;
            }
        };
        Some((address, self.hand_out(address, pool, size, n)))
    }

    pub(crate) fn free(&mut self, address: u64) {
        if address == 0 {
            return;
        }
        let block = self.block(address);
        block.state = BlockState::PendingFree;
        let shared = !block.uses.is_empty();
        self.count();
        match (shared, !self.is_capturing()) {
            (false, _) => self.make_free(address),
            (true, true) => self.record_events(address, |_| true),
            (true, false) => self.put_off.push(address),
        }
    }

    pub(crate) fn record_stream(&mut self, address: u64, stream: u32) {
        let in_context = self.is_capturing();
        if address != 0 && self.segment(address).stream != stream {
            *self.block(address).uses.entry(stream).or_default() |= in_context;
        }
    }

    pub(crate) fn synchronize(&mut self, stream: u32) {
        self.events
            .iter_mut()
            .filter(|event| event.stream == stream)
            .for_each(|event| event.done = true);
    }

    pub(crate) fn synchronize_all(&mut self) {
        self.events.iter_mut().for_each(|event| event.done = true);
    }

    pub(crate) fn empty_cache(&mut self) {
        if !self.is_capturing() {
            self.wait_for_events(|_| true);
            self.give_back(|segment| segment.pool.owner.is_none() && segment.is_whole_and_free());
        }
        let released = self.released.clone();
        self.give_back(|segment| {
            segment.is_whole_and_free()
                && segment
                    .pool
                    .owner
                    .is_some_and(|owner| released.contains(&owner))
        });
    }

    pub(crate) fn set_fraction(&mut self, fraction: MemoryFraction) {
        let limits = fraction.get() < 1.0 || self.config.torch.whole_fraction_limits();
        self.fraction = limits.then_some(fraction.get());
    }

    pub(crate) fn reset_peaks(&mut self) {
        self.stats.reset_peaks();
    }

    pub(crate) fn begin(&mut self, pool: u32) {
        self.open.push(pool);
    }

    pub(crate) fn end(&mut self, pool: u32) {
        self.open.retain(|&open| open != pool);
    }

    pub(crate) fn release(&mut self, pool: u32) {
        self.released.push(pool);
        self.wait_for_events(|segment| segment.pool.owner == Some(pool));
        self.give_back(|segment| segment.pool.owner == Some(pool) && segment.is_whole_and_free());
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        self.stats
    }

    pub(crate) fn snapshot(&self) -> Vec<SegmentInfo> {
        let describe = |block: &Block, stream| BlockInfo {
            address: DevicePtr(block.address),
            size: Bytes(block.size),
            stream,
            requested: Bytes(block.requested),
            state: block.state,
        };
        let segments = self.segments.iter().map(|segment| SegmentInfo {
            address: DevicePtr(segment.address),
            size: Bytes(segment.size()),
            stream: Some(StreamId(segment.stream)),
            pool: segment.pool.kind,
            private_pool: segment.pool.owner,
            expandable: false,
            blocks: segment
                .blocks
                .iter()
                .map(|block| describe(block, StreamId(segment.stream)))
                .collect(),
        });
        segments.collect()
    }

    /// Returns true if open contexts count as captures, whether one is open or not.
    pub(crate) fn captures(&self) -> bool {
        self.config.torch.contexts_are_captures()
    }

    fn is_capturing(&self) -> bool {
        self.captures() && !self.open.is_empty()
    }

    /// The pool of the context that serves requests.
    fn serving(&self) -> Option<u32> {
        if self.config.torch.first_context_serves() {
            self.open.first().copied()
        } else {
            self.open.last().copied()
        }
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    // Sizes.

    fn round(&self, n: u64) -> u64 {
        let interval = (n.ilog2() as i64 - 20).clamp(0, 15) as usize;
        let divisions = self.config.roundup_power2_divisions[interval];
        if divisions > 1 && n > 512 * divisions {
            let below = 1 << n.ilog2();
            return if n == below {
                n
            } else {
                n.next_multiple_of(below / divisions)
            };
        }
        n.next_multiple_of(512)
    }

    fn segment_size(&self, size: u64) -> u64 {
        if size <= MIB {
            2 * MIB
        } else if size < 10 * MIB {
            self.config.large_segment_size.0
        } else {
            size.next_multiple_of(2 * MIB)
        }
    }

    fn max_split_size(&self) -> u64 {
        self.config.max_split_size.map_or(u64::MAX, |size| size.0)
    }

    fn limit(&self) -> Option<u64> {
        self.fraction
            .map(|fraction| (fraction * self.capacity as f64) as u64)
    }

    fn reserved(&self) -> u64 {
        self.segments.iter().map(Segment::size).sum()
    }

    // Finding memory.

    /// The best fit on the same stream: among equals the one with the lowest address, or the lowest
    /// number. Addresses only grow, so the oldest segment has the lowest ones. The oversize rules
    /// judge only this candidate.
    fn find(&self, pool: Pool, stream: u32, wanted: u64) -> Option<u64> {
        let mut best: Option<(u64, u64, u64)> = None;
        for (_, block) in self.free_blocks(pool, stream) {
            let key = self.key(block);
            if block.size >= wanted && best.is_none_or(|best| key < best) {
                best = Some(key);
            }
        }
        let (size, _, address) = best?;
        let most = self.max_split_size();
        let too_large = if wanted < most {
            size >= most
        } else {
            size >= wanted + self.config.max_non_split_rounding.0
        };
        (!too_large).then_some(address)
    }

    fn free_blocks(&self, pool: Pool, stream: u32) -> impl Iterator<Item = (&Segment, &Block)> {
        let segments = self
            .segments
            .iter()
            .filter(move |segment| segment.pool == pool && segment.stream == stream);
        let blocks =
            segments.flat_map(|segment| segment.blocks.iter().map(move |block| (segment, block)));
        blocks.filter(|(_, block)| block.state == BlockState::Inactive)
    }

    /// The order of free blocks: size, number if blocks are numbered, address.
    fn key(&self, block: &Block) -> (u64, u64, u64) {
        let number = if self.config.torch.ties() == TieOrder::Block {
            block.number
        } else {
            0
        };
        (block.size, number, block.address)
    }

    fn take_from_driver(&mut self, pool: Pool, stream: u32, size: u64) -> Result<u64, Refusal> {
        self.collect_garbage();
        if let Ok(address) = self.new_segment(pool, stream, size)? {
            return Ok(address);
        }
        if self.release_available(pool, stream, size)
            && let Ok(address) = self.new_segment(pool, stream, size)?
        {
            return Ok(address);
        }
        if self.is_capturing() {
            return Err(Refusal::AfterRetries);
        }
        self.empty_cache();
        self.stats.num_alloc_retries += 1;
        self.new_segment(pool, stream, size)?
            .map_err(|Full| Refusal::AfterRetries)
    }

    fn new_segment(
        &mut self,
        pool: Pool,
        stream: u32,
        size: u64,
    ) -> Result<Result<u64, Full>, Refusal> {
        let size = self.segment_size(size);
        if self
            .limit()
            .is_some_and(|limit| self.reserved() + size > limit)
        {
            return Ok(Err(Full));
        }
        if self.config.throw_on_malloc_oom
            && self.reserved() + size > self.config.memory_fraction.of(Bytes(self.capacity)).0
        {
            return Err(Refusal::AtOnce);
        }
        self.calls[0] += 1;
        let charged: u64 = self
            .segments
            .iter()
            .map(|segment| segment.size().next_multiple_of(2 * MIB))
            .sum();
        if charged + size.next_multiple_of(2 * MIB) > self.capacity {
            self.calls[1] += 1;
            return Ok(Err(Full));
        }
        let address = self.next_address;
        self.next_address += size.next_multiple_of(2 * MIB);
        let block = Block {
            address,
            size,
            requested: 0,
            state: BlockState::Inactive,
            uses: BTreeMap::new(),
            events: 0,
            born: 0,
            number: self.number(),
        };
        self.segments.push(Segment {
            address,
            stream,
            pool,
            blocks: vec![block],
        });
        self.stats.num_device_alloc += 1;
        self.count();
        Ok(Ok(address))
    }

    /// Splits a block if the rules say so. Returns the charged size.
    fn hand_out(&mut self, address: u64, pool: Pool, wanted: u64, n: u64) -> u64 {
        let large_may = wanted < self.max_split_size();
        let now = self.lookups.get(&pool).copied().unwrap_or(0);
        let (segment, index) = self.place(address);
        let blocks = &mut self.segments[segment].blocks;
        let remaining = blocks[index].size - wanted;
        let split = match pool.kind {
            PoolKind::Small => remaining >= 512,
            PoolKind::Large => large_may && remaining > MIB,
        };
        if split {
            let rest = Block {
                address: address + wanted,
                size: remaining,
                born: now,
                ..blocks[index].clone()
            };
            blocks[index].size = wanted;
            blocks.insert(index + 1, rest);
            self.next_number += 1;
            blocks[index].number = self.next_number;
        }
        blocks[index].state = BlockState::Allocated;
        blocks[index].requested = n;
        let size = blocks[index].size;
        self.count();
        size
    }

    // Releasing memory.

    fn give_back(&mut self, which: impl Fn(&Segment) -> bool) {
        let before = self.segments.len();
        self.segments.retain(|segment| !which(segment));
        let gone = (before - self.segments.len()) as u64;
        self.stats.num_device_free += gone;
        self.calls[2] += gone;
        self.count();
    }

    /// The smallest cached block that is large enough, or oversize ones from the largest down until
    /// they add up to the size.
    fn release_available(&mut self, pool: Pool, stream: u32, size: u64) -> bool {
        let Some(Bytes(most)) = self.config.max_split_size else {
            return false;
        };
        let wanted = size.max(most);
        let mut oversize: Vec<(u64, u64, u64)> = Vec::new();
        oversize.extend(
            self.free_blocks(pool, stream)
                .map(|(_, block)| self.key(block))
                .filter(|&(size, ..)| size >= most),
        );
        oversize.sort_unstable();
        if let Some(&(_, _, address)) = oversize.iter().find(|&&(size, ..)| size >= wanted) {
            self.give_back(|segment| segment.address == address);
            return true;
        }
        let mut sum = 0;
        while sum < wanted
            && let Some((size, _, address)) = oversize.pop()
        {
            sum += size;
            self.give_back(|segment| segment.address == address);
        }
        sum >= wanted
    }

    fn collect_garbage(&mut self) {
        let (Some(threshold), Some(limit)) =
            (self.config.garbage_collection_threshold, self.limit())
        else {
            return;
        };
        let allowed = (threshold * limit as f64) as u64;
        let Some(target) = self.reserved().checked_sub(allowed) else {
            return;
        };
        let pool = Pool {
            kind: PoolKind::Large,
            owner: None,
        };
        let now = self.lookups.get(&pool).copied().unwrap_or(0);
        let start = self.reserved();
        while start - self.reserved() < target {
            let is_candidate =
                |segment: &&Segment| segment.pool == pool && segment.is_whole_and_free();
            let ages: Vec<u64> = self
                .segments
                .iter()
                .filter(is_candidate)
                .map(|segment| now - segment.blocks[0].born)
                .collect();
            if ages.is_empty() {
                return;
            }
            let mean = ages.iter().sum::<u64>() as f64 / ages.len() as f64;
            self.give_back(|segment| {
                is_candidate(&segment) && (now - segment.blocks[0].born) as f64 >= mean
            });
        }
    }

    // Deferred frees.

    /// Records an event on each of the block's other streams that counts.
    fn record_events(&mut self, address: u64, counts: impl Fn(bool) -> bool) {
        let uses = std::mem::take(&mut self.block(address).uses);
        let streams: Vec<u32> = uses
            .into_iter()
            .filter(|&(_, in_context)| counts(in_context))
            .map(|(stream, _)| stream)
            .collect();
        self.block(address).events = streams.len() as u32;
        self.events.extend(streams.iter().map(|&stream| Event {
            stream,
            block: address,
            done: false,
        }));
        if streams.is_empty() {
            self.make_free(address);
        }
    }

    fn file_put_off(&mut self) {
        let forgetful = self.config.quirks == Quirks::AsTorch;
        for address in std::mem::take(&mut self.put_off) {
            self.record_events(address, |in_context| !(forgetful && in_context));
        }
    }

    /// Stream by stream, up to the first incomplete event.
    fn poll(&mut self) {
        let mut seen = Vec::new();
        let streams: std::collections::BTreeSet<u32> =
            self.events.iter().map(|event| event.stream).collect();
        for stream in streams {
            while let Some(index) = self
                .events
                .iter()
                .position(|event| event.stream == stream)
                .filter(|&index| self.events[index].done)
            {
                seen.push(self.events.remove(index).block);
            }
        }
        seen.into_iter().for_each(|block| self.event_seen(block));
    }

    fn wait_for_events(&mut self, of_interest: impl Fn(&Segment) -> bool) {
        self.stats.num_sync_all_streams += 1;
        self.file_put_off();
        let mut events = std::mem::take(&mut self.events);
        events.sort_by_key(|event| event.stream);
        let (seen, mut left): (Vec<Event>, Vec<Event>) = {
            let wanted: Vec<bool> = events
                .iter()
                .map(|event| of_interest(self.segment(event.block)))
                .collect();
            // Waiting for an event completes the earlier ones of its stream.
            for index in 0..events.len() {
                let stream = events[index].stream;
                events[index].done |= (index..events.len())
                    .any(|later| wanted[later] && events[later].stream == stream);
            }
            let (seen, left): (Vec<_>, Vec<_>) = events
                .into_iter()
                .zip(wanted)
                .partition(|&(_, wanted)| wanted);
            (
                seen.into_iter().map(|(event, _)| event).collect(),
                left.into_iter().map(|(event, _)| event).collect(),
            )
        };
        self.events.append(&mut left);
        seen.into_iter()
            .for_each(|event| self.event_seen(event.block));
    }

    fn event_seen(&mut self, address: u64) {
        let block = self.block(address);
        block.events -= 1;
        if block.events == 0 {
            self.make_free(address);
        }
    }

    /// Frees a block and merges it with its free neighbors.
    fn make_free(&mut self, address: u64) {
        let (segment, mut index) = self.place(address);
        let now = self
            .lookups
            .get(&self.segments[segment].pool)
            .copied()
            .unwrap_or(0);
        let blocks = &mut self.segments[segment].blocks;
        blocks[index].state = BlockState::Inactive;
        blocks[index].born = now;
        if blocks
            .get(index + 1)
            .is_some_and(|next| next.state == BlockState::Inactive)
        {
            blocks[index].size += blocks.remove(index + 1).size;
        }
        if index > 0 && blocks[index - 1].state == BlockState::Inactive {
            let previous = blocks.remove(index - 1);
            index -= 1;
            blocks[index].address = previous.address;
            blocks[index].size += previous.size;
        }
        self.count();
    }

    // Look-up and counting.

    fn place(&self, address: u64) -> (usize, usize) {
        for (index, segment) in self.segments.iter().enumerate() {
            if let Some(block) = segment
                .blocks
                .iter()
                .position(|block| block.address == address)
            {
                return (index, block);
            }
        }
        panic!("no block at {address:#x}")
    }

    fn segment(&self, address: u64) -> &Segment {
        &self.segments[self.place(address).0]
    }

    fn block(&mut self, address: u64) -> &mut Block {
        let (segment, block) = self.place(address);
        &mut self.segments[segment].blocks[block]
    }

    /// Recomputes the counters from the structure. Each changes once per step.
    fn count(&mut self) {
        let Self {
            segments, stats, ..
        } = self;
        let blocks = |pool: PoolKind, kind: Which, worth: Worth| -> u64 {
            let segments = segments.iter().filter(|segment| segment.pool.kind == pool);
            segments
                .flat_map(|segment| segment.blocks.iter().filter(|block| kind(segment, block)))
                .map(worth)
                .sum()
        };
        let allocated: Which = |_, block| block.state == BlockState::Allocated;
        let active: Which = |_, block| block.state != BlockState::Inactive;
        let split: Which =
            |segment, block| block.state == BlockState::Inactive && segment.blocks.len() > 1;
        let first: Which = |segment, block| block.address == segment.address;
        let any: Which = |_, _| true;
        let (one, bytes): (Worth, Worth) = (|_| 1, |block| block.size);
        for (stat, kind, worth) in [
            (&mut stats.allocated_bytes, allocated, bytes),
            (&mut stats.reserved_bytes, any, bytes),
            (&mut stats.active_bytes, active, bytes),
            (&mut stats.inactive_split_bytes, split, bytes),
            (&mut stats.requested_bytes, active, |block: &Block| {
                block.requested
            }),
            (&mut stats.allocation, allocated, one),
            (&mut stats.segment, first, one),
            (&mut stats.active, active, one),
            (&mut stats.inactive_split, split, one),
        ] {
            set(
                stat,
                blocks(PoolKind::Small, kind, worth),
                blocks(PoolKind::Large, kind, worth),
            );
        }
    }
}

fn set(stat: &mut PooledStat, small: u64, large: u64) {
    let change = |stat: &mut Stat, now: u64| {
        stat.allocated += now.saturating_sub(stat.current);
        stat.freed += stat.current.saturating_sub(now);
        stat.current = now;
        stat.peak = stat.peak.max(now);
    };
    change(&mut stat.all, small + large);
    change(&mut stat.small_pool, small);
    change(&mut stat.large_pool, large);
}

/// Sizes around every boundary of the rules.
pub(crate) fn interesting_sizes() -> Vec<u64> {
    let edges = [
        2 * KIB,
        MIB,
        2 * MIB,
        3 * MIB,
        5 * MIB,
        10 * MIB,
        11 * MIB,
        19 * MIB,
        20 * MIB,
        24 * MIB,
        40 * MIB,
        64 * MIB,
    ];
    let around = edges.into_iter().flat_map(|edge| {
        [
            edge - 513,
            edge - 512,
            edge - 511,
            edge - 1,
            edge,
            edge + 1,
            edge + 512,
        ]
    });
    let exact = [
        0,
        1,
        511,
        512,
        513,
        100 * KIB,
        600 * KIB,
        30 * MIB,
        50 * MIB,
        90 * MIB,
        100 * MIB,
    ];
    around.chain(exact).collect()
}
