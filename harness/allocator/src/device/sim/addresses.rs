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
mod tests {
    use super::*;

    #[test]
    fn without_reuse_freed_addresses_are_used_last() {
        let mut addresses = Addresses::new(100..130, Bytes(2), AddressOrder::Up);
        assert_eq!((addresses.take(Bytes(8)), addresses.take(Bytes(8))), (Some(100), Some(110)));
        addresses.give_back(100, Bytes(8));
        assert_eq!((addresses.take(Bytes(9)), addresses.take(Bytes(8))), (None, Some(120)));
        assert_eq!((addresses.take(Bytes(8)), addresses.take(Bytes(1))), (Some(100), None));
    }

    #[test]
    fn downward_order_starts_at_the_highest_address() {
        let mut addresses = Addresses::new(100..130, Bytes(2), AddressOrder::Down);
        assert_eq!((addresses.take(Bytes(8)), addresses.take(Bytes(8))), (Some(120), Some(110)));
        addresses.give_back(120, Bytes(8));
        assert_eq!((addresses.take(Bytes(8)), addresses.take(Bytes(8)), addresses.take(Bytes(1))), (Some(100), Some(120), None));
        let mut addresses = Addresses::new(100..130, Bytes::ZERO, AddressOrder::Down);
        addresses.take_at(110, Bytes(10));
        assert_eq!((addresses.take(Bytes(4)), addresses.take(Bytes(8))), (Some(106), None));
    }

    #[test]
    fn a_given_stretch_is_used_once() {
        let mut addresses = Addresses::new(100..200, Bytes::ZERO, AddressOrder::Reuse);
        addresses.take_at(110, Bytes(10));
        assert_eq!(addresses.take(Bytes(5)), Some(120), "addresses below it are ignored");
        addresses.give_back(110, Bytes(10));
        addresses.take_at(112, Bytes(4));
        let starts: Vec<_> = (0..3).filter_map(|_| addresses.take(Bytes(2))).collect();
        assert_eq!(starts, [110, 116, 118]);
        addresses.take_at(50, Bytes(10));
        addresses.take_at(300, Bytes(10));
        assert_eq!(addresses.take(Bytes(75)), Some(125), "a stretch outside the range uses no part of it");
    }

    #[test]
    fn freed_addresses_are_merged_and_the_lowest_fitting_ones_reused() {
        let mut addresses = Addresses::new(100..200, Bytes(2), AddressOrder::Reuse);
        let starts: Vec<_> = (0..4).filter_map(|_| addresses.take(Bytes(8))).collect();
        assert_eq!(starts, [100, 110, 120, 130]);
        for start in [110, 130, 120] {
            addresses.give_back(start, Bytes(8));
        }
        assert_eq!(addresses.take(Bytes(28)), Some(110), "three adjacent stretches");
        addresses.give_back(110, Bytes(28));
        assert_eq!((addresses.take(Bytes(8)), addresses.take(Bytes(18)), addresses.take(Bytes(8))), (Some(110), Some(120), Some(140)));
        assert_eq!(addresses.take(Bytes(u64::MAX)), None);
    }
}
