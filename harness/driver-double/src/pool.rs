//! Stream-ordered pools: what each has reserved, handed out, and taken back behind work that is not done.
//!
//! Every allocation has host memory of its own, which goes when its free takes its turn in the stream; a pool is an account of bytes. So a
//! pool never has too little in one piece, as if the driver had moved its memory behind the addresses. What is freed may be handed out on
//! another stream once that stream is behind the free in time; a driver that is set not to reuse by chance wants an event in between.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::memory::{code, map, unmap};

/// A pool reserves multiples of this; no documentation tells what a driver does.
const CHUNK: u64 = 32 << 20;
/// Allocations count in multiples of this.
const ALIGNMENT: u64 = 512;

/// All pools of a GPU, by handle.
#[derive(Default)]
pub(crate) struct Pools {
    pools: BTreeMap<usize, Pool>,
    /// By address.
    allocations: BTreeMap<u64, Allocation>,
}

#[derive(Default)]
struct Pool {
    threshold: u64,
    reserved: u64,
    reserved_high: u64,
    used: u64,
    used_high: u64,
}

struct Allocation {
    pool: usize,
    size: u64,
    freed: Option<Freed>,
}

/// A free that has not taken its turn.
struct Freed {
    stream: usize,
    done_at: Instant,
    /// What of the pool's memory waits for it; less than the allocation where later ones of its stream took some.
    held: u64,
}

impl Pools {
    /// What all pools have reserved.
    pub(crate) fn reserved(&self) -> u64 {
        self.pools.values().map(|pool| pool.reserved).sum()
    }

    /// How many pools live, and allocations that were not freed.
    pub(crate) fn left(&self) -> (usize, usize) {
        (self.pools.len(), self.allocations.values().filter(|allocation| allocation.freed.is_none()).count())
    }

    /// Makes a pool under a handle.
    pub(crate) fn create(&mut self, handle: usize) {
        self.pools.insert(handle, Pool::default());
    }

    /// Removes a pool at once. A driver waits with that while anything of the pool is in use.
    pub(crate) fn destroy(&mut self, handle: usize) -> Result<(), u32> {
        if self.allocations.values().any(|allocation| allocation.pool == handle) {
            return Err(code::NOT_SUPPORTED);
        }
        self.pools.remove(&handle).map(drop).ok_or(code::INVALID_VALUE)
    }

    /// An attribute of 64 bits, by its number in cuda.h.
    pub(crate) fn attribute(&self, handle: usize, attribute: u32) -> Result<u64, u32> {
        let pool = self.pools.get(&handle).ok_or(code::INVALID_VALUE)?;
        match attribute {
            4 => Ok(pool.threshold),
            5 => Ok(pool.reserved),
            6 => Ok(pool.reserved_high),
            7 => Ok(pool.used),
            8 => Ok(pool.used_high),
            _ => Err(code::INVALID_VALUE),
        }
    }

    /// Sets the release threshold.
    pub(crate) fn set_threshold(&mut self, handle: usize, threshold: u64) -> Result<(), u32> {
        self.pools.get_mut(&handle).ok_or(code::INVALID_VALUE)?.threshold = threshold;
        Ok(())
    }

    /// Whether there is such a pool.
    pub(crate) fn contains(&self, handle: usize) -> bool {
        self.pools.contains_key(&handle)
    }

    /// Takes memory for a stream whose work so far is done at `ready_at`; `free` is what the GPU has.
    pub(crate) fn allocate(&mut self, handle: usize, size: u64, stream: usize, ready_at: Instant, free: u64) -> Result<u64, u32> {
        let pool = self.pools.get_mut(&handle).ok_or(code::INVALID_VALUE)?;
        if size == 0 {
            return Err(code::INVALID_VALUE);
        }
        let rounded = size.checked_next_multiple_of(ALIGNMENT).ok_or(code::OUT_OF_MEMORY)?;
        let waiting: Vec<&mut Freed> =
            self.allocations.values_mut().filter(|other| other.pool == handle).filter_map(|other| other.freed.as_mut()).collect();
        let held: u64 = waiting.iter().map(|freed| freed.held).sum();
        let idle = pool.reserved - pool.used - held;
        let mut usable: Vec<_> = waiting.into_iter().filter(|freed| freed.stream == stream || freed.done_at <= ready_at).collect();
        let mut missing = rounded.saturating_sub(idle);
        let growth = missing.saturating_sub(usable.iter().map(|freed| freed.held).sum());
        let growth = growth.checked_next_multiple_of(CHUNK).filter(|growth| *growth <= free).ok_or(code::OUT_OF_MEMORY)?;
        let address = map(size)?;
        missing = missing.saturating_sub(growth);
        for freed in &mut usable {
            let taken = missing.min(freed.held);
            freed.held -= taken;
            missing -= taken;
        }
        pool.reserved += growth;
        pool.used += rounded;
        pool.reserved_high = pool.reserved_high.max(pool.reserved);
        pool.used_high = pool.used_high.max(pool.used);
        self.allocations.insert(address, Allocation { pool: handle, size, freed: None });
        Ok(address)
    }

    /// Takes memory back behind a stream's work, which is done at `done_at`.
    pub(crate) fn free(&mut self, address: u64, stream: usize, done_at: Instant) -> Result<(), u32> {
        let allocation = self.allocations.get_mut(&address).filter(|known| known.freed.is_none()).ok_or(code::INVALID_VALUE)?;
        let held = allocation.size.next_multiple_of(ALIGNMENT);
        allocation.freed = Some(Freed { stream, done_at, held });
        if let Some(pool) = self.pools.get_mut(&allocation.pool) {
            pool.used -= held;
        }
        Ok(())
    }

    /// A free takes its turn: its memory is gone.
    pub(crate) fn finish(&mut self, address: u64) {
        if let Some(allocation) = self.allocations.remove(&address) {
            unmap(address, allocation.size);
        }
    }

    /// Gives unused memory of a pool back, so that at least `keep` stays.
    pub(crate) fn trim(&mut self, handle: usize, keep: u64) -> Result<(), u32> {
        let pool = self.pools.get_mut(&handle).ok_or(code::INVALID_VALUE)?;
        let waiting = self.allocations.values().filter(|other| other.pool == handle).filter_map(|other| other.freed.as_ref());
        let least = keep.max(pool.used + waiting.map(|freed| freed.held).sum::<u64>());
        pool.reserved -= pool.reserved.saturating_sub(least) / CHUNK * CHUNK;
        Ok(())
    }

    /// The host has waited for something: pools over their thresholds give memory back.
    pub(crate) fn release(&mut self) {
        let thresholds: Vec<_> = self.pools.iter().map(|(handle, pool)| (*handle, pool.threshold)).collect();
        for (handle, threshold) in thresholds {
            let kept = self.trim(handle, threshold);
            debug_assert!(kept.is_ok(), "the pool is of this table");
        }
    }

    /// Whether the bytes are inside one allocation whose free, if any, has not taken its turn.
    pub(crate) fn is_live(&self, address: u64, len: u64) -> bool {
        let around = self.allocations.range(..=address).next_back();
        around.is_some_and(|(start, allocation)| len <= allocation.size && address - start <= allocation.size - len)
    }

    /// Gives everything back.
    pub(crate) fn clear(&mut self) {
        for (address, allocation) in std::mem::take(&mut self.allocations) {
            unmap(address, allocation.size);
        }
        self.pools.clear();
    }
}
