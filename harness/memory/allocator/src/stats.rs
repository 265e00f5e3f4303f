//! The counters and the structure of an allocator, with the names of `torch.cuda.memory_stats()`.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::device::{DevicePtr, StreamId};
use crate::{named::named_enum, units::Bytes};

mod summary;

/// One counted quantity, in bytes or blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    pub current: u64,
    /// The maximum since the last reset.
    pub peak: u64,
    pub allocated: u64,
    pub freed: u64,
}

impl Stat {
    pub fn increase(&mut self, amount: u64) {
        self.current += amount;
        self.allocated += amount;
        self.peak = self.peak.max(self.current);
    }

    pub fn decrease(&mut self, amount: u64) {
        debug_assert!(self.current >= amount, "the statistic is not negative");
        self.current -= amount;
        self.freed += amount;
    }

    pub fn reset_peak(&mut self) {
        self.peak = self.current;
    }
}

named_enum! {
    /// The pool of a block, by its rounded size.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    PoolKind {
        /// Blocks of at most 1 MiB.
        Small = "small",
        Large = "large",
    }
}

impl PoolKind {
    pub const LARGEST_SMALL: Bytes = Bytes::mib(1);

    pub const fn of_block(size: Bytes) -> Self {
        if size.0 <= Self::LARGEST_SMALL.0 {
            Self::Small
        } else {
            Self::Large
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PooledStat {
    /// Both pools together. The peak is that of the sum, not the sum of peaks.
    pub all: Stat,
    pub small_pool: Stat,
    pub large_pool: Stat,
}

impl PooledStat {
    pub fn increase(&mut self, pool: PoolKind, amount: u64) {
        self.all.increase(amount);
        self.of(pool).increase(amount);
    }

    pub fn decrease(&mut self, pool: PoolKind, amount: u64) {
        self.all.decrease(amount);
        self.of(pool).decrease(amount);
    }

    /// Sets the quantity of a pool that has all of it.
    pub(crate) fn set(&mut self, pool: PoolKind, amount: u64) {
        if amount >= self.all.current {
            self.increase(pool, amount - self.all.current);
        } else {
            self.decrease(pool, self.all.current - amount);
        }
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

impl MemoryStats {
    /// Returns the value of one key of `torch.cuda.memory_stats()`.
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
}

/// Declares the counters of an allocator, and the keys that select one of them.
macro_rules! memory_stats {
    (pooled { $(#[doc = $doc:literal] $field:ident: $family:ident,)* }
     counters { $(#[doc = $text:literal] $number:ident: $counter:ident,)* }) => {
        /// The running counters of an allocator. Field names are the first part of the keys of
        /// `torch.cuda.memory_stats()`
        /// (<https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html>).
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub struct MemoryStats {
            $(#[doc = $doc] pub $field: PooledStat,)*
            $(#[doc = $text] pub $number: u64,)*
        }

        named_enum! {
            /// The first part of a pooled key.
            StatFamily { $(#[doc = $doc] $family = stringify!($field),)* }
        }

        named_enum! {
            /// A key without parts.
            StatCounter { $(#[doc = $text] $counter = stringify!($number),)* }
        }

        impl StatFamily {
            pub fn about(self) -> &'static str {
                match self { $(Self::$family => $doc.trim(),)* }
            }
        }

        impl StatCounter {
            pub fn about(self) -> &'static str {
                match self { $(Self::$counter => $text.trim(),)* }
            }
        }

        impl MemoryStats {
            fn family(&self, family: StatFamily) -> &PooledStat {
                match family { $(StatFamily::$family => &self.$field,)* }
            }

            fn counter(&self, counter: StatCounter) -> u64 {
                match counter { $(StatCounter::$counter => self.$number,)* }
            }

            pub fn reset_peaks(&mut self) {
                $(self.$field.reset_peak();)*
            }
        }
    };
}

memory_stats! {
    pooled {
        /// Bytes of allocated blocks, after rounding.
        allocated_bytes: AllocatedBytes,
        /// Bytes of segments from the driver.
        reserved_bytes: ReservedBytes,
        /// Bytes of blocks that are allocated, or freed but still in use by a stream.
        active_bytes: ActiveBytes,
        /// Bytes of free blocks in partly used segments, which cannot be released to the driver.
        inactive_split_bytes: InactiveSplitBytes,
        /// Bytes that callers requested.
        requested_bytes: RequestedBytes,
        /// Allocated blocks.
        allocation: Allocation,
        /// Segments from the driver.
        segment: Segment,
        /// Blocks that are allocated, or freed but still in use by a stream.
        active: Active,
        /// Free blocks in partly used segments.
        inactive_split: InactiveSplit,
    }
    counters {
        /// Failed driver allocations that released the cache. A final OOM counts too.
        num_alloc_retries: NumAllocRetries,
        /// Requests that failed.
        num_ooms: NumOoms,
        /// Waits of the allocator for all streams.
        num_sync_all_streams: NumSyncAllStreams,
        /// Successful driver allocations.
        num_device_alloc: NumDeviceAlloc,
        /// Driver frees.
        num_device_free: NumDeviceFree,
    }
}

impl StatFamily {
    pub(crate) fn is_bytes(self) -> bool {
        self.name().ends_with("_bytes")
    }
}

named_enum! {
    /// The second part of a pooled key.
    StatPool {
        All = "all",
        SmallPool = "small_pool",
        LargePool = "large_pool",
    }
}

named_enum! {
    /// The third part of a pooled key.
    StatField {
        Current = "current",
        Peak = "peak",
        Allocated = "allocated",
        Freed = "freed",
    }
}

/// A valid key of `torch.cuda.memory_stats()`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StatKey {
    /// For example `num_ooms`.
    Counter(StatCounter),
    /// For example `reserved_bytes.all.peak`.
    Pooled(StatFamily, StatPool, StatField),
}

impl StatKey {
    /// Parses a key, or returns `None` if `torch.cuda.memory_stats()` has no such key.
    pub fn from_name(name: &str) -> Option<Self> {
        let mut parts = name.split('.');
        let first = parts.next()?;
        let (Some(pool), Some(field), None) = (parts.next(), parts.next(), parts.next()) else {
            return if name.contains('.') {
                None
            } else {
                StatCounter::from_name(first).map(Self::Counter)
            };
        };
        Some(Self::Pooled(
            StatFamily::from_name(first)?,
            StatPool::from_name(pool)?,
            StatField::from_name(field)?,
        ))
    }

    pub fn is_bytes(self) -> bool {
        matches!(self, Self::Pooled(family, ..) if family.is_bytes())
    }

    /// All keys, counters last.
    pub fn all() -> impl Iterator<Item = Self> {
        let pooled = StatFamily::ALL.iter().flat_map(|&family| {
            StatPool::ALL.iter().flat_map(move |&pool| {
                StatField::ALL
                    .iter()
                    .map(move |&field| Self::Pooled(family, pool, field))
            })
        });
        pooled.chain(
            StatCounter::ALL
                .iter()
                .map(|&counter| Self::Counter(counter)),
        )
    }
}

impl fmt::Display for StatKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Counter(counter) => counter.fmt(f),
            Self::Pooled(family, pool, field) => write!(f, "{family}.{pool}.{field}"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockState {
    /// Free for its stream.
    Inactive,
    /// Freed, but waiting for events of other streams.
    PendingFree,
    Allocated,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockInfo {
    pub address: DevicePtr,
    pub size: Bytes,
    /// The stream of its request. For a free block, the stream that may reuse it without a wait.
    pub stream: StreamId,
    /// The requested bytes. A free block keeps the figure of its last owner.
    pub requested: Bytes,
    pub state: BlockState,
}

/// One segment. Its blocks are in address order and without gaps.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SegmentInfo {
    pub address: DevicePtr,
    pub size: Bytes,
    /// The stream of all its blocks, if it serves only one stream.
    pub stream: Option<StreamId>,
    pub pool: PoolKind,
    /// The private pool that owns it, if any.
    pub private_pool: Option<u32>,
    /// True if it can grow and shrink by pages.
    pub expandable: bool,
    pub blocks: Vec<BlockInfo>,
}

#[cfg(test)]
mod tests;
