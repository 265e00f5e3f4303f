//! [`Addresses`]: chooses the next addresses, within the address ranges of the simulated device.
//!
//! Expandable segments reserve more addresses than the device has memory, for each pool and stream. So the ranges are larger than
//! the 47 to 49 address bits of a GPU: even a device of 1 PiB does not exhaust them.

use std::ops::Range;

use super::ranges::RangeMap;
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
    /// Freed stretches.
    free: RangeMap<()>,
    order: AddressOrder,
}

impl Addresses {
    pub(super) fn new(range: Range<u64>, guard: Bytes, order: AddressOrder) -> Self {
        Self { fresh: range, guard, free: RangeMap::default(), order }
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
        self.free.remove(start, end);
    }

    fn take_again(&mut self, len: u64) -> Option<u64> {
        let (start, _, ()) = self.free.overlapping(0, u64::MAX).find(|(start, end, ())| end - start >= len)?;
        self.free.remove(start, start + len);
        Some(start)
    }

    /// Frees a used stretch.
    pub(super) fn give_back(&mut self, start: u64, len: Bytes) {
        self.free.insert(start, start + len.0 + self.guard.0, ());
    }
}

#[cfg(test)]
mod tests;
