//! Reserved addresses, and the physical pages behind them.

use std::collections::BTreeMap;

use super::GRANULARITY;
use crate::device::{DevicePtr, MemoryRange};
use crate::units::Bytes;

/// Reservations begin here and go upward, far from allocations, and are never reused.
const FIRST_ADDRESS: u64 = 0x2000_0000_0000;
/// Unreserved addresses behind each reservation.
const GUARD: Bytes = GRANULARITY;

/// Reservations and pages by address.
#[derive(Debug)]
pub(super) struct AddressSpace {
    next: u64,
    reservations: BTreeMap<u64, Bytes>,
    pages: BTreeMap<u64, Bytes>,
}

impl Default for AddressSpace {
    fn default() -> Self {
        Self { next: FIRST_ADDRESS, reservations: BTreeMap::new(), pages: BTreeMap::new() }
    }
}

impl AddressSpace {
    /// Reserves addresses; `None` where there are none left.
    pub(super) fn reserve(&mut self, size: Bytes) -> Option<DevicePtr> {
        let start = self.next;
        self.next = start.checked_add(size.0)?.checked_add(GUARD.0)?;
        self.reservations.insert(start, size);
        Some(DevicePtr(start))
    }

    /// Gives a reservation back; why not, in words, where that cannot be.
    pub(super) fn unreserve(&mut self, start: DevicePtr) -> Result<(), &'static str> {
        let size = *self.reservations.get(&start.0).ok_or("no reservation starts there")?;
        if self.pages.range(start.0..start.0 + size.0).next().is_some() {
            return Err("memory is still mapped in the reservation");
        }
        self.reservations.remove(&start.0);
        Ok(())
    }

    /// Whether pages of that size may be mapped to the range; why not, in words.
    pub(super) fn check_mappable(&self, range: MemoryRange, page: Bytes) -> Result<(), String> {
        let end = range.start.0.checked_add(range.len.0).ok_or("the range goes beyond the address space")?;
        let aligned = |n: u64| n.is_multiple_of(GRANULARITY.0);
        if range.len == Bytes::ZERO
            || page == Bytes::ZERO
            || !range.len.0.is_multiple_of(page.0)
            || !aligned(range.start.0)
            || !aligned(page.0)
        {
            return Err(format!("a mapping is a whole number of pages, each a multiple of {GRANULARITY}, and begins at one"));
        }
        let reservation = self.reservations.range(..=range.start.0).next_back();
        if reservation.is_none_or(|(&start, &size)| end > start + size.0) {
            return Err("the addresses are not reserved".to_owned());
        }
        let before = self.pages.range(..range.start.0).next_back().is_some_and(|(&start, &size)| start + size.0 > range.start.0);
        if before || self.pages.range(range.start.0..end).next().is_some() {
            return Err("memory is mapped there already".to_owned());
        }
        Ok(())
    }

    /// Maps pages to a range that was checked.
    pub(super) fn map(&mut self, range: MemoryRange, page: Bytes) {
        for index in 0..range.len.0 / page.0 {
            self.pages.insert(range.start.0 + index * page.0, page);
        }
    }

    /// Unmaps a range of whole pages and says how many there were; `None` where it is not one.
    pub(super) fn unmap(&mut self, range: MemoryRange) -> Option<u64> {
        if !self.is_mapped(range) || !self.pages.contains_key(&range.start.0) {
            return None;
        }
        let end = range.end().0;
        let inside: Vec<u64> = self.pages.range(range.start.0..end).map(|(&start, _)| start).collect();
        let last = inside.last().and_then(|start| Some(start + self.pages.get(start)?.0));
        if last != Some(end) {
            return None;
        }
        for start in &inside {
            self.pages.remove(start);
        }
        Some(inside.len() as u64)
    }

    /// Whether there is memory behind every byte of the range.
    pub(super) fn is_mapped(&self, range: MemoryRange) -> bool {
        let mut next = range.start.0;
        let from = self.pages.range(..=next).next_back().map_or(next, |(&start, _)| start);
        for (&start, &size) in self.pages.range(from..) {
            if next >= range.end().0 || start > next {
                break;
            }
            next = next.max(start + size.0);
        }
        next >= range.end().0 && range.len > Bytes::ZERO
    }

    /// Whether an address is one of those that reservations are made of.
    pub(super) const fn contains(ptr: DevicePtr) -> bool {
        ptr.0 >= FIRST_ADDRESS && ptr.0 < super::FIRST_ADDRESS
    }

    /// Reservations that live.
    pub(super) fn reservations(&self) -> u64 {
        self.reservations.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, mib: u64) -> MemoryRange {
        MemoryRange::new(DevicePtr(start), Bytes::mib(mib))
    }

    #[test]
    fn reservations_stand_apart_and_pages_map_once() {
        let mut space = AddressSpace::default();
        let first = space.reserve(Bytes::mib(40)).expect("there is room").0;
        let second = space.reserve(Bytes::mib(40)).expect("there is room").0;
        assert_eq!((first, second), (FIRST_ADDRESS, FIRST_ADDRESS + (42 << 20)));
        assert!(space.check_mappable(range(first, 42), Bytes::mib(2)).is_err(), "beyond its end");
        assert!(space.check_mappable(range(first + 1, 2), Bytes::mib(2)).is_err(), "not at a page");
        space.map(range(first, 20), Bytes::mib(20));
        assert!(space.check_mappable(range(first + (10 << 20), 2), Bytes::mib(2)).is_err(), "mapped already");
        space.map(range(first + (20 << 20), 4), Bytes::mib(2));
        assert!(space.is_mapped(range(first, 24)) && !space.is_mapped(range(first, 26)));
        assert_eq!(space.unmap(range(first, 10)), None, "half a page");
        assert_eq!(space.unmap(range(first, 22)), Some(2));
        assert!(space.unreserve(DevicePtr(first)).is_err());
        assert_eq!(space.unmap(range(first + (22 << 20), 2)), Some(1));
        assert_eq!(space.unreserve(DevicePtr(first)), Ok(()));
        assert_eq!(space.reservations(), 1);
    }
}
