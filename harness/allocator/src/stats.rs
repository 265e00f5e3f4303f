//! What an allocator counts and what its structure looks like: plain data, named as `torch.cuda.memory_stats()` names it.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::device::{DevicePtr, StreamId};
use crate::units::Bytes;

mod summary;

/// One counted quantity, in bytes or in pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    /// What it is now.
    pub current: u64,
    /// The high-water mark since the last reset.
    pub peak: u64,
    /// The sum of all increases.
    pub allocated: u64,
    /// The sum of all decreases.
    pub freed: u64,
}

impl Stat {
    /// Raises the quantity and, with it, the peak.
    pub fn increase(&mut self, amount: u64) {
        self.current += amount;
        self.allocated += amount;
        self.peak = self.peak.max(self.current);
    }

    /// Lowers the quantity; the peak stays.
    pub fn decrease(&mut self, amount: u64) {
        debug_assert!(self.current >= amount, "a statistic fell below zero");
        self.current -= amount;
        self.freed += amount;
    }

    /// Makes the present value the high-water mark.
    pub fn reset_peak(&mut self) {
        self.peak = self.current;
    }
}

/// Which pool a block belongs to: by its rounded size, small up to and including 1 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolKind {
    /// Blocks of at most 1 MiB.
    Small,
    /// Everything above.
    Large,
}

impl PoolKind {
    /// The largest block of the small pool.
    pub const LARGEST_SMALL: Bytes = Bytes::mib(1);

    /// The pool of blocks of that (rounded) size.
    #[must_use]
    pub const fn of_block(size: Bytes) -> Self {
        if size.0 <= Self::LARGEST_SMALL.0 { Self::Small } else { Self::Large }
    }
}

/// A quantity by pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PooledStat {
    /// Both pools together (its peak is of the sum, not the sum of peaks).
    pub all: Stat,
    /// Blocks of at most 1 MiB.
    pub small_pool: Stat,
    /// Larger blocks.
    pub large_pool: Stat,
}

impl PooledStat {
    /// Raises the quantity of one pool and of the whole.
    pub fn increase(&mut self, pool: PoolKind, amount: u64) {
        self.all.increase(amount);
        self.of(pool).increase(amount);
    }

    /// Lowers the quantity of one pool and of the whole.
    pub fn decrease(&mut self, pool: PoolKind, amount: u64) {
        self.all.decrease(amount);
        self.of(pool).decrease(amount);
    }

    fn of(&mut self, pool: PoolKind) -> &mut Stat {
        match pool {
            PoolKind::Small => &mut self.small_pool,
            PoolKind::Large => &mut self.large_pool,
        }
    }

    fn reset_peak(&mut self) {
        self.all.reset_peak();
        self.small_pool.reset_peak();
        self.large_pool.reset_peak();
    }
}

/// The running counters of an allocator. Field names are the first part of the keys of `torch.cuda.memory_stats()`
/// (<https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html>).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryStats {
    /// Rounded bytes handed out.
    pub allocated_bytes: PooledStat,
    /// Bytes held from the driver.
    pub reserved_bytes: PooledStat,
    /// Bytes handed out, or freed but waiting for an event.
    pub active_bytes: PooledStat,
    /// Bytes of free pieces in partly used segments, which cannot go back to the driver.
    pub inactive_split_bytes: PooledStat,
    /// Bytes the callers asked for.
    pub requested_bytes: PooledStat,
    /// Live allocations.
    pub allocation: PooledStat,
    /// Segments held from the driver.
    pub segment: PooledStat,
    /// Blocks handed out, or freed but waiting for an event.
    pub active: PooledStat,
    /// Free pieces in partly used segments.
    pub inactive_split: PooledStat,
    /// Driver allocations that failed and made the allocator give its cache back (a final OOM counts here too).
    pub num_alloc_retries: u64,
    /// Requests that failed for good.
    pub num_ooms: u64,
    /// Times the allocator waited for all streams.
    pub num_sync_all_streams: u64,
    /// Successful driver allocations.
    pub num_device_alloc: u64,
    /// Driver frees.
    pub num_device_free: u64,
}

impl MemoryStats {
    /// The value of one key of `torch.cuda.memory_stats()`.
    #[must_use]
    pub fn get(&self, key: StatKey) -> u64 {
        let (family, pool, field) = match key {
            StatKey::Counter(counter) => return self.counter(counter),
            StatKey::Pooled(family, pool, field) => (family, pool, field),
        };
        let pooled = self.family(family);
        let stat = match pool {
            StatPool::All => &pooled.all,
            StatPool::SmallPool => &pooled.small_pool,
            StatPool::LargePool => &pooled.large_pool,
        };
        match field {
            StatField::Current => stat.current,
            StatField::Peak => stat.peak,
            StatField::Allocated => stat.allocated,
            StatField::Freed => stat.freed,
        }
    }

    /// Makes every present value its own high-water mark.
    pub fn reset_peaks(&mut self) {
        let Self {
            allocated_bytes,
            reserved_bytes,
            active_bytes,
            inactive_split_bytes,
            requested_bytes,
            allocation,
            segment,
            active,
            inactive_split,
            num_alloc_retries: _,
            num_ooms: _,
            num_sync_all_streams: _,
            num_device_alloc: _,
            num_device_free: _,
        } = self;
        for stat in [
            allocated_bytes,
            reserved_bytes,
            active_bytes,
            inactive_split_bytes,
            requested_bytes,
            allocation,
            segment,
            active,
            inactive_split,
        ] {
            stat.reset_peak();
        }
    }

    fn family(&self, family: StatFamily) -> &PooledStat {
        match family {
            StatFamily::AllocatedBytes => &self.allocated_bytes,
            StatFamily::ReservedBytes => &self.reserved_bytes,
            StatFamily::ActiveBytes => &self.active_bytes,
            StatFamily::InactiveSplitBytes => &self.inactive_split_bytes,
            StatFamily::RequestedBytes => &self.requested_bytes,
            StatFamily::Allocation => &self.allocation,
            StatFamily::Segment => &self.segment,
            StatFamily::Active => &self.active,
            StatFamily::InactiveSplit => &self.inactive_split,
        }
    }

    fn counter(&self, counter: StatCounter) -> u64 {
        match counter {
            StatCounter::NumAllocRetries => self.num_alloc_retries,
            StatCounter::NumOoms => self.num_ooms,
            StatCounter::NumSyncAllStreams => self.num_sync_all_streams,
            StatCounter::NumDeviceAlloc => self.num_device_alloc,
            StatCounter::NumDeviceFree => self.num_device_free,
        }
    }
}

/// Declares a plain enum whose variants have a name in texts, with `ALL`, `name` and `from_name`.
macro_rules! named_enum {
    ($(#[$meta:meta])* $type:ident { $($(#[$doc:meta])* $variant:ident = $name:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $type { $($(#[$doc])* $variant,)* }

        impl $type {
            /// Every one, in the order of the documentation.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// Its part of the key.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)* _ => None }
            }
        }
    };
}

named_enum! {
    /// First part of a pooled key.
    StatFamily {
        /// Rounded bytes handed out.
        AllocatedBytes = "allocated_bytes",
        /// Bytes held from the driver.
        ReservedBytes = "reserved_bytes",
        /// Bytes handed out, or freed but waiting for an event.
        ActiveBytes = "active_bytes",
        /// Bytes of free pieces in partly used segments.
        InactiveSplitBytes = "inactive_split_bytes",
        /// Bytes asked for.
        RequestedBytes = "requested_bytes",
        /// Live allocations.
        Allocation = "allocation",
        /// Segments held from the driver.
        Segment = "segment",
        /// Blocks handed out or waiting for an event.
        Active = "active",
        /// Free pieces in partly used segments.
        InactiveSplit = "inactive_split",
    }
}

named_enum! {
    /// Second part of a pooled key.
    StatPool {
        /// Both pools.
        All = "all",
        /// Blocks of at most 1 MiB.
        SmallPool = "small_pool",
        /// Larger blocks.
        LargePool = "large_pool",
    }
}

named_enum! {
    /// Third part of a pooled key.
    StatField {
        /// The value now.
        Current = "current",
        /// The high-water mark.
        Peak = "peak",
        /// The sum of increases.
        Allocated = "allocated",
        /// The sum of decreases.
        Freed = "freed",
    }
}

named_enum! {
    /// A key without parts.
    StatCounter {
        /// Driver allocations that failed and made the allocator give its cache back.
        NumAllocRetries = "num_alloc_retries",
        /// Requests that failed for good.
        NumOoms = "num_ooms",
        /// Waits for all streams.
        NumSyncAllStreams = "num_sync_all_streams",
        /// Successful driver allocations.
        NumDeviceAlloc = "num_device_alloc",
        /// Driver frees.
        NumDeviceFree = "num_device_free",
    }
}

/// A key of `torch.cuda.memory_stats()`, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StatKey {
    /// For example `num_ooms`.
    Counter(StatCounter),
    /// For example `reserved_bytes.all.peak`.
    Pooled(StatFamily, StatPool, StatField),
}

impl StatKey {
    /// Reads a key; `None` where `torch.cuda.memory_stats()` has no such key.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let mut parts = name.split('.');
        let first = parts.next()?;
        let (Some(pool), Some(field), None) = (parts.next(), parts.next(), parts.next()) else {
            return if name.contains('.') { None } else { StatCounter::from_name(first).map(Self::Counter) };
        };
        Some(Self::Pooled(StatFamily::from_name(first)?, StatPool::from_name(pool)?, StatField::from_name(field)?))
    }

    /// Whether its values are bytes (the others are counts).
    #[must_use]
    pub fn is_bytes(self) -> bool {
        matches!(self, Self::Pooled(family, ..) if family.name().ends_with("_bytes"))
    }

    /// Every key, counters last.
    pub fn all() -> impl Iterator<Item = Self> {
        let pooled = StatFamily::ALL.iter().flat_map(|&family| {
            StatPool::ALL.iter().flat_map(move |&pool| StatField::ALL.iter().map(move |&field| Self::Pooled(family, pool, field)))
        });
        pooled.chain(StatCounter::ALL.iter().map(|&counter| Self::Counter(counter)))
    }
}

impl fmt::Display for StatKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Counter(counter) => f.write_str(counter.name()),
            Self::Pooled(family, pool, field) => {
                write!(f, "{}.{}.{}", family.name(), pool.name(), field.name())
            }
        }
    }
}

/// What a block is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum BlockState {
    /// Free, ready to be handed out on its stream.
    Inactive,
    /// Freed by its owner, waiting for events of other streams.
    PendingFree,
    Allocated,
}

/// One block of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct BlockInfo {
    pub address: DevicePtr,
    pub size: Bytes,
    /// The stream it was made for; of a free block the stream that may reuse it without waiting.
    pub stream: StreamId,
    /// What its owner asked for; a free block keeps the figure of its last owner.
    pub requested: Bytes,
    /// What it is doing.
    pub state: BlockState,
}

/// One segment, its blocks in address order and without gaps.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct SegmentInfo {
    pub address: DevicePtr,
    /// Its length: bytes held from the driver.
    pub size: Bytes,
    /// The stream whose requests it serves, if it serves one only: then all of its blocks are of that stream.
    pub stream: Option<StreamId>,
    /// Small or large blocks.
    pub pool: PoolKind,
    /// The private pool it belongs to, if any.
    pub private_pool: Option<u32>,
    /// Whether it can grow and shrink by pages.
    pub expandable: bool,
    pub blocks: Vec<BlockInfo>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_reads_back_from_its_name() {
        assert_eq!(StatKey::all().count(), 9 * 3 * 4 + 5);
        for key in StatKey::all() {
            assert_eq!(StatKey::from_name(&key.to_string()), Some(key));
        }
        for wrong in ["", "num_oom", "reserved_bytes", "reserved_bytes.all", "reserved_bytes.all.now", "num_ooms.all.peak"] {
            assert_eq!(StatKey::from_name(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_peak_of_the_whole_is_the_peak_of_the_sum() {
        let mut stat = PooledStat::default();
        stat.increase(PoolKind::Small, 10);
        stat.decrease(PoolKind::Small, 10);
        stat.increase(PoolKind::Large, 12);
        assert_eq!((stat.all.peak, stat.small_pool.peak, stat.large_pool.peak), (12, 10, 12));
        assert_eq!((stat.all.allocated, stat.all.freed), (22, 10));
    }
}
