//! [`Addresses`]: chooses the next addresses, within the address ranges of the simulated device.
//!
//! Expandable segments reserve more addresses than the device has memory, for each pool and stream. So the ranges are larger than
//! the 47 to 49 address bits of a GPU: even a device of 1 PiB does not exhaust them.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::units::Bytes;

/// The range of allocations.
pub(super) const ALLOCATIONS: Range<u64> = 0x7000_0000_0000..1 << 51;
/// The range of pool chunks.
pub(super) const POOLS: Range<u64> = 1 << 51..1 << 52;
/// The range of reservations.
pub(super) const RESERVATIONS: Range<u64> = 1 << 52..1 << 60;

/// The range of host memory, which orders and compares copies. It contains no device memory.
pub(super) const HOST: Range<u64> = 1 << 60..1 << 62;

/// The order in which addresses are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressOrder {
    /// From the lowest upward. Freed addresses are reused only when no others remain, so a use of freed memory is noticed.
    #[default]
    Up,
    /// From the highest downward. Otherwise as `Up`.
    Down,
    /// The lowest free address, as a driver may choose. This finds allocators that confuse an address with its earlier use.
    Reuse,
}

/// A range of addresses that are used in one order.
#[derive(Clone, Debug)]
pub(super) struct Addresses {
    /// The part that was never used.
    fresh: Range<u64>,
    /// The unused gap after each stretch.
    guard: Bytes,
    /// Freed stretches, by start, with their end. They never touch.
    free: BTreeMap<u64, u64>,
    order: AddressOrder,
}

impl Addresses {
    pub(super) const fn new(range: Range<u64>, guard: Bytes, order: AddressOrder) -> Self {
        Self { fresh: range, guard, free: BTreeMap::new(), order }
    }

    /// Returns a stretch of `len` bytes: a never used one, or else the lowest freed one. Constant time for the former, linear in
    /// the freed stretches for the latter.
    pub(super) fn take(&mut self, len: Bytes) -> Option<u64> {
        let len = len.0.checked_add(self.guard.0)?;
        match self.order {
            AddressOrder::Up | AddressOrder::Down => self.take_new(len).or_else(|| self.take_again(len)),
            AddressOrder::Reuse => self.take_again(len).or_else(|| self.take_new(len)),
        }
    }

    fn take_new(&mut self, len: u64) -> Option<u64> {
        if self.fresh.end - self.fresh.start < len {
            return None;
        }
        if self.order == AddressOrder::Down {
            self.fresh.end -= len;
            return Some(self.fresh.end);
        }
        self.fresh.start += len;
        Some(self.fresh.start - len)
    }

    /// Uses a given free stretch. Ignores stretches outside the range.
    pub(super) fn take_at(&mut self, start: u64, len: Bytes) {
        let end = start.saturating_add(len.0).saturating_add(self.guard.0);
        // The addresses between it and the used ones stay unused.
        match self.order {
            AddressOrder::Down if end > self.fresh.start => self.fresh.end = start.clamp(self.fresh.start, self.fresh.end),
            AddressOrder::Up | AddressOrder::Reuse if start < self.fresh.end => {
                self.fresh.start = end.clamp(self.fresh.start, self.fresh.end)
            }
            _ => {}
        }
        let overlapping = self.free.range(..end).rev().take_while(|&(_, &free_end)| free_end > start);
        let cut: Vec<(u64, u64)> = overlapping.map(|(&free_start, &free_end)| (free_start, free_end)).collect();
        for (free_start, free_end) in cut {
            self.free.remove(&free_start);
            if free_start < start {
                self.free.insert(free_start, start);
            }
            if end < free_end {
                self.free.insert(end, free_end);
            }
        }
    }

    fn take_again(&mut self, len: u64) -> Option<u64> {
        let (start, end) = self.free.iter().map(|(&start, &end)| (start, end)).find(|(start, end)| end - start >= len)?;
        self.free.remove(&start);
        if end - start > len {
            self.free.insert(start + len, end);
        }
        Some(start)
    }

    /// Frees a used stretch.
    pub(super) fn give_back(&mut self, start: u64, len: Bytes) {
        let (mut start, mut end) = (start, start + len.0 + self.guard.0);
        if let Some(after) = self.free.remove(&end) {
            end = after;
        }
        if let Some((&before, &touching)) = self.free.range(..start).next_back()
            && touching == start
        {
            start = before;
        }
        self.free.insert(start, end);
    }
}

#[cfg(test)]
mod tests;
