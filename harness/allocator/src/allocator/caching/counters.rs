//! The running counters behind [`MemoryStats`], kept so that each operation changes as few as possible: sums over pools, decreases, and
//! everything *active* are derived when somebody asks.

use crate::stats::{MemoryStats, PoolKind, PooledStat, Stat};

/// One quantity of one pool. What has gone is what came and is not there any more.
#[derive(Clone, Copy, Debug, Default)]
struct Gauge {
    current: u64,
    /// Stands between the two that change together. Side by side the compiler loads both at once, and that load waits for an earlier store of
    /// one of them.
    peak: u64,
    /// The sum of all increases.
    total: u64,
}

impl Gauge {
    fn stat(self) -> Stat {
        Stat { current: self.current, peak: self.peak, allocated: self.total, freed: self.total - self.current }
    }
}

/// One quantity by pool, and the high-water mark of the sum.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pooled {
    pools: [Gauge; 2],
    peak: u64,
}

impl Pooled {
    /// Raises the quantity.
    #[inline]
    pub(super) fn increase(&mut self, pool: PoolKind, amount: u64) {
        let gauge = &mut self.pools[pool as usize];
        gauge.current += amount;
        gauge.total += amount;
        self.observe(pool);
    }

    /// Lowers it.
    #[inline]
    pub(super) fn decrease(&mut self, pool: PoolKind, amount: u64) {
        let gauge = &mut self.pools[pool as usize];
        debug_assert!(gauge.current >= amount, "a statistic fell below zero");
        gauge.current -= amount;
    }

    /// One net change, as PyTorch counts it: the sums of increases and decreases depend on that.
    #[inline]
    fn change(&mut self, pool: PoolKind, before: u64, after: u64) {
        let gauge = &mut self.pools[pool as usize];
        debug_assert!(gauge.current + after >= before, "a statistic fell below zero");
        gauge.current = gauge.current + after - before;
        gauge.total += after.saturating_sub(before);
        self.observe(pool);
    }

    /// Raises the high-water marks where they were passed. They move seldom, so a branch is cheaper than a store.
    #[inline]
    fn observe(&mut self, pool: PoolKind) {
        let current = self.current();
        let gauge = &mut self.pools[pool as usize];
        if gauge.current > gauge.peak {
            gauge.peak = gauge.current;
        }
        if current > self.peak {
            self.peak = current;
        }
    }

    /// Both pools together.
    #[inline]
    pub(super) fn current(&self) -> u64 {
        self.pools[0].current + self.pools[1].current
    }

    fn reset_peak(&mut self) {
        self.pools.iter_mut().for_each(|gauge| gauge.peak = gauge.current);
        self.peak = self.current();
    }

    fn stat(&self) -> PooledStat {
        let [small, large] = self.pools.map(Gauge::stat);
        let (allocated, freed) = (small.allocated + large.allocated, small.freed + large.freed);
        PooledStat { all: Stat { current: self.current(), peak: self.peak, allocated, freed }, small_pool: small, large_pool: large }
    }
}

/// What was freed but waits for events, of one quantity.
///
/// Active is what is allocated and what waits. While nothing waits the two are equal, so only the rest has to be followed: active's
/// high-water mark is that of allocated, or the highest it reached while something waited, whichever is higher.
#[derive(Clone, Copy, Debug, Default)]
struct Pending {
    current: [u64; 2],
    /// Highest active of each pool while that pool had something waiting, and of both while any had.
    peaks: [u64; 2],
    peak: u64,
}

impl Pending {
    fn observe(&mut self, allocated: &Pooled) {
        for pool in 0..2 {
            if self.current[pool] > 0 {
                self.peaks[pool] = self.peaks[pool].max(allocated.pools[pool].current + self.current[pool]);
            }
        }
        let waiting = self.current[0] + self.current[1];
        if waiting > 0 {
            self.peak = self.peak.max(allocated.current() + waiting);
        }
    }

    fn reset_peak(&mut self, allocated: &Pooled) {
        (self.peaks, self.peak) = ([0; 2], 0);
        self.observe(allocated);
    }

    fn active(&self, allocated: &Pooled) -> PooledStat {
        let mut stat = allocated.stat();
        for (pool, (stat, waiting)) in [&mut stat.small_pool, &mut stat.large_pool].into_iter().zip(self.current).enumerate() {
            stat.current += waiting;
            stat.freed -= waiting;
            stat.peak = stat.peak.max(self.peaks[pool]);
        }
        let waiting = self.current[0] + self.current[1];
        stat.all.current += waiting;
        stat.all.freed -= waiting;
        stat.all.peak = stat.all.peak.max(self.peak);
        stat
    }
}

/// All counters of a caching allocator.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    allocated_bytes: Pooled,
    requested_bytes: Pooled,
    allocations: Pooled,
    pending_bytes: Pending,
    pending: Pending,
    pub(super) reserved_bytes: Pooled,
    pub(super) segments: Pooled,
    inactive_split_bytes: Pooled,
    inactive_splits: Pooled,
    pub(super) num_alloc_retries: u64,
    pub(super) num_ooms: u64,
    pub(super) num_sync_all_streams: u64,
    pub(super) num_device_alloc: u64,
    pub(super) num_device_free: u64,
}

impl Counters {
    /// A block was handed out. As a call of its own it would be a fiftieth of a cache hit; the compiler's choice changes with other code.
    #[inline(always)]
    pub(super) fn handed_out(&mut self, pool: PoolKind, size: u64, requested: u64) {
        self.allocated_bytes.increase(pool, size);
        self.requested_bytes.increase(pool, requested);
        self.allocations.increase(pool, 1);
        if self.pending.current != [0; 2] {
            self.observe_pending();
        }
    }

    /// A free block was cut: `taken` bytes of it were handed out and `rest` stay free. It was a piece of a partly used segment, or a whole
    /// segment.
    #[inline(always)]
    pub(super) fn piece_was_cut(&mut self, pool: PoolKind, was_piece: bool, taken: u64, rest: u64) {
        if was_piece {
            self.inactive_split_bytes.decrease(pool, taken);
        } else {
            self.inactive_splits.increase(pool, 1);
            self.inactive_split_bytes.increase(pool, rest);
        }
    }

    /// A free piece of a partly used segment is there from the start.
    pub(super) fn piece_was_there(&mut self, pool: PoolKind, size: u64) {
        self.inactive_splits.increase(pool, 1);
        self.inactive_split_bytes.increase(pool, size);
    }

    /// A free piece of a partly used segment was handed out whole.
    #[inline(always)]
    pub(super) fn piece_was_taken(&mut self, pool: PoolKind, size: u64) {
        self.inactive_splits.decrease(pool, 1);
        self.inactive_split_bytes.decrease(pool, size);
    }

    /// A block of `size` bytes became free and one with so many free neighbours, and is a piece of a partly used segment.
    #[inline(always)]
    pub(super) fn piece_was_freed(&mut self, pool: PoolKind, neighbours: u64, size: u64) {
        self.inactive_splits.change(pool, neighbours, 1);
        self.inactive_split_bytes.increase(pool, size);
    }

    /// So many free pieces with so many bytes became one with a block that was freed, and that is a whole segment now.
    #[inline(always)]
    pub(super) fn pieces_became_whole(&mut self, pool: PoolKind, pieces: u64, bytes: u64) {
        self.inactive_splits.decrease(pool, pieces);
        self.inactive_split_bytes.decrease(pool, bytes);
    }

    /// A block was freed by its owner, and can be reused at once. As [`Counters::handed_out`].
    #[inline(always)]
    pub(super) fn freed(&mut self, pool: PoolKind, size: u64, requested: u64) {
        self.allocated_bytes.decrease(pool, size);
        self.requested_bytes.decrease(pool, requested);
        self.allocations.decrease(pool, 1);
    }

    /// A block was freed by its owner, but waits for events.
    pub(super) fn free_is_pending(&mut self, pool: PoolKind, size: u64) {
        self.pending_bytes.current[pool as usize] += size;
        self.pending.current[pool as usize] += 1;
        // Before the block leaves the allocated ones it was active too: the sum is the same before and after.
        self.allocated_bytes.decrease(pool, size);
        self.allocations.decrease(pool, 1);
        self.observe_pending();
    }

    /// A block that waited can be reused.
    pub(super) fn pending_free_is_done(&mut self, pool: PoolKind, size: u64, requested: u64) {
        self.pending_bytes.current[pool as usize] -= size;
        self.pending.current[pool as usize] -= 1;
        self.requested_bytes.decrease(pool, requested);
    }

    /// Handed out, both pools together.
    pub(super) fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes.current()
    }

    /// Makes the present values the high-water marks.
    pub(super) fn reset_peaks(&mut self) {
        for pooled in [
            &mut self.allocated_bytes,
            &mut self.requested_bytes,
            &mut self.allocations,
            &mut self.reserved_bytes,
            &mut self.segments,
            &mut self.inactive_split_bytes,
            &mut self.inactive_splits,
        ] {
            pooled.reset_peak();
        }
        self.pending_bytes.reset_peak(&self.allocated_bytes);
        self.pending.reset_peak(&self.allocations);
    }

    /// As PyTorch tells them.
    pub(super) fn stats(&self) -> MemoryStats {
        MemoryStats {
            allocated_bytes: self.allocated_bytes.stat(),
            reserved_bytes: self.reserved_bytes.stat(),
            active_bytes: self.pending_bytes.active(&self.allocated_bytes),
            inactive_split_bytes: self.inactive_split_bytes.stat(),
            requested_bytes: self.requested_bytes.stat(),
            allocation: self.allocations.stat(),
            segment: self.segments.stat(),
            active: self.pending.active(&self.allocations),
            inactive_split: self.inactive_splits.stat(),
            num_alloc_retries: self.num_alloc_retries,
            num_ooms: self.num_ooms,
            num_sync_all_streams: self.num_sync_all_streams,
            num_device_alloc: self.num_device_alloc,
            num_device_free: self.num_device_free,
        }
    }

    fn observe_pending(&mut self) {
        self.pending_bytes.observe(&self.allocated_bytes);
        self.pending.observe(&self.allocations);
    }
}
