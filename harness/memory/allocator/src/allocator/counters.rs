//! The running counters behind [`MemoryStats`]. Each operation changes as few as possible. Sums
//! over pools, decreases, and all *active* figures are derived on request.

use crate::stats::{MemoryStats, PoolKind, PooledStat, Stat};

/// One quantity of one pool. The decreases are the increases minus the current value.
#[derive(Clone, Copy, Debug, Default)]
struct Gauge {
    current: u64,
    /// Separates two fields that change together. If they were adjacent, the compiler would load
    /// both at once, and that load would wait for an earlier store of one of them.
    peak: u64,
    total: u64,
}

impl Gauge {
    fn stat(self) -> Stat {
        Stat {
            current: self.current,
            peak: self.peak,
            allocated: self.total,
            freed: self.total - self.current,
        }
    }
}

/// One quantity by pool, and the peak of the sum.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pooled {
    pools: [Gauge; 2],
    peak: u64,
}

impl Pooled {
    #[inline]
    pub(super) fn increase(&mut self, pool: PoolKind, amount: u64) {
        let gauge = &mut self.pools[pool as usize];
        gauge.current += amount;
        gauge.total += amount;
        self.observe(pool);
    }

    #[inline]
    pub(super) fn decrease(&mut self, pool: PoolKind, amount: u64) {
        let gauge = &mut self.pools[pool as usize];
        debug_assert!(gauge.current >= amount, "the statistic is not negative");
        gauge.current -= amount;
    }

    /// Applies one net change. As in PyTorch, it counts as one increase or decrease.
    #[inline]
    fn change(&mut self, pool: PoolKind, before: u64, after: u64) {
        let gauge = &mut self.pools[pool as usize];
        debug_assert!(
            gauge.current + after >= before,
            "the statistic is not negative"
        );
        gauge.current = gauge.current + after - before;
        gauge.total += after.saturating_sub(before);
        self.observe(pool);
    }

    /// Updates the peaks. They change rarely, so a branch is cheaper than a store.
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

    #[inline]
    pub(super) fn current(&self) -> u64 {
        self.pools[0].current + self.pools[1].current
    }

    fn reset_peak(&mut self) {
        self.pools
            .iter_mut()
            .for_each(|gauge| gauge.peak = gauge.current);
        self.peak = self.current();
    }

    fn stat(&self) -> PooledStat {
        let [small, large] = self.pools.map(Gauge::stat);
        let (allocated, freed) = (small.allocated + large.allocated, small.freed + large.freed);
        PooledStat {
            all: Stat {
                current: self.current(),
                peak: self.peak,
                allocated,
                freed,
            },
            small_pool: small,
            large_pool: large,
        }
    }
}

/// The pending frees, for one quantity.
///
/// Active is allocated plus pending. The two are equal while nothing is pending, so only the
/// pending part is tracked. The peak of active is the larger of the peak of allocated and the peak
/// while something was pending.
#[derive(Clone, Copy, Debug, Default)]
struct Pending {
    current: [u64; 2],
    /// The peak of active while something was pending, per pool and for both.
    peaks: [u64; 2],
    peak: u64,
}

impl Pending {
    fn observe(&mut self, allocated: &Pooled) {
        for pool in 0..2 {
            if self.current[pool] > 0 {
                self.peaks[pool] =
                    self.peaks[pool].max(allocated.pools[pool].current + self.current[pool]);
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
        for (pool, (stat, waiting)) in [&mut stat.small_pool, &mut stat.large_pool]
            .into_iter()
            .zip(self.current)
            .enumerate()
        {
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
    /// Counts an allocation. Without inlining it would take 2 % of a cache hit.
    #[inline(always)]
    pub(super) fn handed_out(&mut self, pool: PoolKind, size: u64, requested: u64) {
        self.allocated_bytes.increase(pool, size);
        self.requested_bytes.increase(pool, requested);
        self.allocations.increase(pool, 1);
        if self.pending.current != [0; 2] {
            self.observe_pending();
        }
    }

    /// Counts a split: `taken` bytes are allocated and `rest` bytes stay free. The block was a
    /// split piece of a segment or a whole segment.
    #[inline(always)]
    pub(super) fn piece_was_cut(&mut self, pool: PoolKind, was_piece: bool, taken: u64, rest: u64) {
        if was_piece {
            self.inactive_split_bytes.decrease(pool, taken);
        } else {
            self.inactive_splits.increase(pool, 1);
            self.inactive_split_bytes.increase(pool, rest);
        }
    }

    pub(super) fn piece_was_there(&mut self, pool: PoolKind, size: u64) {
        self.inactive_splits.increase(pool, 1);
        self.inactive_split_bytes.increase(pool, size);
    }

    /// Counts a freed block of `size` bytes that merged with free neighbors and is still a split
    /// piece of a segment.
    #[inline(always)]
    pub(super) fn piece_was_freed(&mut self, pool: PoolKind, neighbours: u64, size: u64) {
        self.inactive_splits.change(pool, neighbours, 1);
        self.inactive_split_bytes.increase(pool, size);
    }

    /// Counts free split pieces that were allocated whole, or merged with a freed block into a
    /// whole segment.
    #[inline(always)]
    pub(super) fn pieces_are_gone(&mut self, pool: PoolKind, pieces: u64, bytes: u64) {
        self.inactive_splits.decrease(pool, pieces);
        self.inactive_split_bytes.decrease(pool, bytes);
    }

    /// Counts a free of a block that can be reused immediately. Inlined as
    /// [`Counters::handed_out`].
    #[inline(always)]
    pub(super) fn freed(&mut self, pool: PoolKind, size: u64, requested: u64) {
        self.allocated_bytes.decrease(pool, size);
        self.requested_bytes.decrease(pool, requested);
        self.allocations.decrease(pool, 1);
    }

    pub(super) fn free_is_pending(&mut self, pool: PoolKind, size: u64) {
        self.pending_bytes.current[pool as usize] += size;
        self.pending.current[pool as usize] += 1;
        // The block was active as an allocated one before, so the sum stays the same.
        self.allocated_bytes.decrease(pool, size);
        self.allocations.decrease(pool, 1);
        self.observe_pending();
    }

    pub(super) fn pending_free_is_done(&mut self, pool: PoolKind, size: u64, requested: u64) {
        self.pending_bytes.current[pool as usize] -= size;
        self.pending.current[pool as usize] -= 1;
        self.requested_bytes.decrease(pool, requested);
    }

    pub(super) fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes.current()
    }

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

    /// The counters with PyTorch's names.
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
