//! What all cores together hold from the driver. It changes under the slow-path lock only, so its high-water marks are exact.

use std::collections::BTreeMap;

use crate::stats::{MemoryStats, PooledStat, Stat};

/// A quantity by pool: small, large.
type ByPool = [u64; 2];

/// What one core holds, or all.
#[derive(Clone, Copy, Debug, Default)]
struct Holding {
    bytes: ByPool,
    segments: ByPool,
}

/// The high-water mark of a quantity by pool, and of the sum.
#[derive(Clone, Copy, Debug, Default)]
struct Peak {
    pools: ByPool,
    all: u64,
}

#[derive(Debug, Default)]
pub(super) struct Held {
    by_core: BTreeMap<u32, Holding>,
    sum: Holding,
    bytes: Peak,
    segments: Peak,
}

impl Held {
    /// Takes over what a core's own counters say.
    pub(super) fn set(&mut self, key: u32, stats: &MemoryStats) {
        let now = Holding { bytes: current(&stats.reserved_bytes), segments: current(&stats.segment) };
        let before = self.by_core.insert(key, now).unwrap_or_default();
        for pool in 0..2 {
            self.sum.bytes[pool] = self.sum.bytes[pool] - before.bytes[pool] + now.bytes[pool];
            self.sum.segments[pool] = self.sum.segments[pool] - before.segments[pool] + now.segments[pool];
        }
        self.bytes.raise(self.sum.bytes);
        self.segments.raise(self.sum.segments);
    }

    /// Forgets a core that holds nothing.
    pub(super) fn remove(&mut self, key: u32) {
        self.set(key, &MemoryStats::default());
        self.by_core.remove(&key);
    }

    /// Bytes held by the other cores.
    pub(super) fn reserved_by_siblings(&self, key: u32) -> u64 {
        let own = self.by_core.get(&key).map_or(0, |own| own.bytes.iter().sum());
        self.sum.bytes.iter().sum::<u64>() - own
    }

    pub(super) fn reset_peaks(&mut self) {
        (self.bytes, self.segments) = (Peak::default(), Peak::default());
        self.bytes.raise(self.sum.bytes);
        self.segments.raise(self.sum.segments);
    }

    /// The counters of all cores as one. See [`super::SharedAllocator::stats`] for what their peaks are.
    pub(super) fn sum(&self, parts: &[MemoryStats]) -> MemoryStats {
        let pooled = |quantity: fn(&MemoryStats) -> &PooledStat| add(parts.iter().map(quantity));
        let count = |quantity: fn(&MemoryStats) -> u64| parts.iter().map(quantity).sum();
        // Bytes of every other kind are part of what is reserved, at every moment.
        let bytes = |quantity| self.bytes.bound(pooled(quantity));
        MemoryStats {
            allocated_bytes: bytes(|part| &part.allocated_bytes),
            reserved_bytes: self.bytes.of(pooled(|part| &part.reserved_bytes)),
            active_bytes: bytes(|part| &part.active_bytes),
            inactive_split_bytes: bytes(|part| &part.inactive_split_bytes),
            requested_bytes: bytes(|part| &part.requested_bytes),
            allocation: pooled(|part| &part.allocation),
            segment: self.segments.of(pooled(|part| &part.segment)),
            active: pooled(|part| &part.active),
            inactive_split: pooled(|part| &part.inactive_split),
            num_alloc_retries: count(|part| part.num_alloc_retries),
            num_ooms: count(|part| part.num_ooms),
            num_sync_all_streams: count(|part| part.num_sync_all_streams),
            num_device_alloc: count(|part| part.num_device_alloc),
            num_device_free: count(|part| part.num_device_free),
        }
    }
}

impl Peak {
    fn raise(&mut self, [small, large]: ByPool) {
        self.pools = [self.pools[0].max(small), self.pools[1].max(large)];
        self.all = self.all.max(small + large);
    }

    /// The same quantity with these peaks.
    fn of(&self, mut stat: PooledStat) -> PooledStat {
        [stat.small_pool.peak, stat.large_pool.peak] = self.pools;
        stat.all.peak = self.all;
        stat
    }

    /// A part of the quantity, whose peaks cannot be above these.
    fn bound(&self, mut stat: PooledStat) -> PooledStat {
        for (stat, peak) in
            [&mut stat.small_pool, &mut stat.large_pool, &mut stat.all].into_iter().zip([self.pools[0], self.pools[1], self.all])
        {
            stat.peak = stat.peak.min(peak);
        }
        at_most_its_pools(stat)
    }
}

const fn current(stat: &PooledStat) -> ByPool {
    [stat.small_pool.current, stat.large_pool.current]
}

fn add<'a>(parts: impl Iterator<Item = &'a PooledStat>) -> PooledStat {
    let mut sum = PooledStat::default();
    for part in parts {
        for (sum, part) in [(&mut sum.all, &part.all), (&mut sum.small_pool, &part.small_pool), (&mut sum.large_pool, &part.large_pool)] {
            let &Stat { current, peak, allocated, freed } = part;
            sum.current += current;
            sum.peak += peak;
            sum.allocated += allocated;
            sum.freed += freed;
        }
    }
    at_most_its_pools(sum)
}

/// The peak of a sum is at most the sum of the peaks.
fn at_most_its_pools(mut stat: PooledStat) -> PooledStat {
    stat.all.peak = stat.all.peak.min(stat.small_pool.peak + stat.large_pool.peak);
    stat
}
