//! [`PageTable`]: the reserved and mapped addresses. Every device with [`super::MappedDevice`]
//! keeps one, so invalid calls are refused alike, before any driver call.

use std::collections::BTreeMap;

use super::{DevicePtr, MemoryRange};
use crate::units::Bytes;

/// Reservations and mapped pages by address. `H` is the device's handle of a page's physical
/// memory.
#[derive(Clone, Debug)]
pub struct PageTable<H> {
    /// The unit of reservations, mappings and pages.
    granularity: Bytes,
    reservations: BTreeMap<u64, Bytes>,
    pages: BTreeMap<u64, Page<H>>,
}

#[derive(Clone, Copy, Debug)]
struct Page<H> {
    size: Bytes,
    memory: H,
}

impl<H: Copy> PageTable<H> {
    pub const fn new(granularity: Bytes) -> Self {
        Self {
            granularity,
            reservations: BTreeMap::new(),
            pages: BTreeMap::new(),
        }
    }

    pub fn reserve(&mut self, start: DevicePtr, size: Bytes) {
        self.reservations.insert(start.0, size);
    }

    /// Returns the size of a reservation that can be freed: it starts there and has no mapped
    /// memory.
    pub fn check_unreservable(&self, start: DevicePtr) -> Option<Bytes> {
        let size = *self.reservations.get(&start.0)?;
        self.pages
            .range(start.0..start.0 + size.0)
            .next()
            .is_none()
            .then_some(size)
    }

    pub fn unreserve(&mut self, start: DevicePtr) {
        self.reservations.remove(&start.0);
    }

    /// Checks whether pages of this size can be mapped to the range. The error is the reason in
    /// words.
    pub fn check_mappable(&self, range: MemoryRange, page: Bytes) -> Result<(), String> {
        let end = range
            .start
            .0
            .checked_add(range.len.0)
            .ok_or("the range exceeds the address space")?;
        let aligned = |n: u64| n.is_multiple_of(self.granularity.0);
        let whole_pages =
            page > Bytes::ZERO && range.len > Bytes::ZERO && range.len.0.is_multiple_of(page.0);
        if !whole_pages || !aligned(range.start.0) || !aligned(page.0) {
            return Err(format!(
                "a mapping needs whole pages, and its start and page size must be multiples of {}",
                self.granularity
            ));
        }
        let reservation = self.reservations.range(..=range.start.0).next_back();
        if reservation.is_none_or(|(&start, &size)| end > start + size.0) {
            return Err("the addresses are not reserved".to_owned());
        }
        let before = self
            .pages
            .range(..range.start.0)
            .next_back()
            .is_some_and(|(&start, page)| start + page.size.0 > range.start.0);
        if before || self.pages.range(range.start.0..end).next().is_some() {
            return Err("memory is already mapped there".to_owned());
        }
        Ok(())
    }

    pub fn map(&mut self, start: DevicePtr, size: Bytes, memory: H) {
        self.pages.insert(start.0, Page { size, memory });
    }

    /// The pages of the range as address, size and memory, or `None` if it does not consist of
    /// whole pages.
    pub fn whole_pages(&self, range: MemoryRange) -> Option<Vec<(DevicePtr, Bytes, H)>> {
        if !self.is_mapped(range) || !self.pages.contains_key(&range.start.0) {
            return None;
        }
        let inside = self.pages.range(range.start.0..range.end().0);
        let pages: Vec<_> = inside
            .map(|(&start, page)| (DevicePtr(start), page.size, page.memory))
            .collect();
        let &(start, size, _) = pages.last()?;
        (start.offset(size) == range.end()).then_some(pages)
    }

    pub fn unmap(&mut self, start: DevicePtr) {
        self.pages.remove(&start.0);
    }

    /// Returns true if every byte of the range (not empty) is mapped.
    pub fn is_mapped(&self, range: MemoryRange) -> bool {
        let Some(end) = range.start.0.checked_add(range.len.0) else {
            return false;
        };
        let mut next = range.start.0;
        let from = self
            .pages
            .range(..=next)
            .next_back()
            .map_or(next, |(&start, _)| start);
        for (&start, page) in self.pages.range(from..) {
            if next >= end || start > next {
                break;
            }
            next = next.max(start + page.size.0);
        }
        next >= end && range.len > Bytes::ZERO
    }

    pub fn is_reserved(&self, ptr: DevicePtr) -> bool {
        self.reservations
            .range(..=ptr.0)
            .next_back()
            .is_some_and(|(&start, &size)| ptr.0 < start + size.0)
    }

    pub fn overlaps(&self, range: MemoryRange) -> bool {
        let before = self.reservations.range(..range.end().0).next_back();
        before.is_some_and(|(&start, &size)| start + size.0 > range.start.0)
    }

    /// Live reservations, as start and size.
    pub fn reservations(&self) -> impl ExactSizeIterator<Item = (DevicePtr, Bytes)> {
        self.reservations
            .iter()
            .map(|(&start, &size)| (DevicePtr(start), size))
    }

    /// Every mapped page, as address, size and memory.
    pub fn pages(&self) -> impl Iterator<Item = (DevicePtr, Bytes, H)> {
        self.pages
            .iter()
            .map(|(&start, page)| (DevicePtr(start), page.size, page.memory))
    }
}

#[cfg(test)]
mod tests;
