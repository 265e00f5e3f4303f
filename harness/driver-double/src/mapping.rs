//! Addresses and physical memory apart: reservations, pages, and what is mapped where, with memory of the host behind what may be accessed.
//!
//! Reserved addresses are host addresses that cannot be touched, so that a mistake of the double itself is noticed by the system.
//! A page is mapped once, whole, and its contents last as long as its mapping; what a driver offers beyond that is refused.

use std::collections::BTreeMap;
use std::ptr;

use crate::memory::{GRANULARITY, code, unmap};

/// What a process holds of a GPU apart from plain allocations.
#[derive(Default)]
pub(crate) struct Mapping {
    reservations: BTreeMap<u64, u64>,
    pages: BTreeMap<u64, Page>,
    /// By address.
    mapped: BTreeMap<u64, Mapped>,
}

/// Physical memory by its handle.
struct Page {
    size: u64,
    /// Whether the handle was not given back: memory lives while it is held or mapped.
    held: bool,
}

/// A page behind addresses.
struct Mapped {
    size: u64,
    page: u64,
    accessible: bool,
}

impl Mapping {
    /// What the pages are charged.
    pub(crate) fn charged(&self) -> u64 {
        self.pages.values().map(|page| page.size).sum()
    }

    /// How many reservations and pages live.
    pub(crate) fn left(&self) -> (usize, usize) {
        (self.reservations.len(), self.pages.len())
    }

    /// Reserves addresses, aligned to a granule.
    pub(crate) fn reserve(&mut self, size: u64, alignment: u64) -> Result<u64, u32> {
        if !is_whole(size) || !(alignment == 0 || alignment.is_power_of_two()) {
            return Err(code::INVALID_VALUE);
        }
        if alignment > GRANULARITY {
            return Err(code::NOT_SUPPORTED);
        }
        let around = size.checked_add(GRANULARITY).ok_or(code::OUT_OF_MEMORY)?;
        let first = no_access(None, around)?;
        let start = first.next_multiple_of(GRANULARITY);
        give_back(first, start - first);
        give_back(start + size, first + around - start - size);
        self.reservations.insert(start, size);
        Ok(start)
    }

    /// Gives a whole reservation back, in which nothing is mapped.
    pub(crate) fn unreserve(&mut self, start: u64, size: u64) -> Result<(), u32> {
        let whole = self.reservations.get(&start) == Some(&size);
        if !whole || self.mapped.range(start..start + size).next().is_some() {
            return Err(code::INVALID_VALUE);
        }
        self.reservations.remove(&start);
        give_back(start, size);
        Ok(())
    }

    /// Makes a page under a handle; `free` is what the GPU has.
    pub(crate) fn create(&mut self, handle: u64, size: u64, free: u64) -> Result<(), u32> {
        if !is_whole(size) {
            return Err(code::INVALID_VALUE);
        }
        if size > free {
            return Err(code::OUT_OF_MEMORY);
        }
        self.pages.insert(handle, Page { size, held: true });
        Ok(())
    }

    /// Gives a handle back. The memory goes with it, or with its mapping.
    pub(crate) fn release(&mut self, handle: u64) -> Result<(), u32> {
        let page = self.pages.get_mut(&handle).filter(|page| page.held).ok_or(code::INVALID_VALUE)?;
        page.held = false;
        if self.mapped.values().all(|mapped| mapped.page != handle) {
            self.pages.remove(&handle);
        }
        Ok(())
    }

    /// Puts a whole page behind reserved addresses that have none. It cannot be accessed yet.
    pub(crate) fn map(&mut self, start: u64, size: u64, handle: u64) -> Result<(), u32> {
        let page = self.pages.get(&handle).filter(|page| page.held).ok_or(code::INVALID_VALUE)?;
        let end = start.checked_add(size).ok_or(code::INVALID_VALUE)?;
        let reserved = self.reservations.range(..=start).next_back().is_some_and(|(first, len)| end <= first + len);
        let behind = self.mapped.range(..end).next_back().is_some_and(|(first, mapped)| first + mapped.size > start);
        if page.size != size || !start.is_multiple_of(GRANULARITY) || !reserved || behind {
            return Err(code::INVALID_VALUE);
        }
        if self.mapped.values().any(|mapped| mapped.page == handle) {
            return Err(code::NOT_SUPPORTED);
        }
        self.mapped.insert(start, Mapped { size, page: handle, accessible: false });
        Ok(())
    }

    /// Lets the device read and write whole mappings.
    pub(crate) fn allow(&mut self, start: u64, size: u64) -> Result<(), u32> {
        let inside = self.whole_mappings(start, size)?;
        for address in inside {
            if let Some(mapped) = self.mapped.get_mut(&address) {
                accessible(address, mapped.size)?;
                mapped.accessible = true;
            }
        }
        Ok(())
    }

    /// Takes whole mappings away; what was in them is lost.
    pub(crate) fn unmap(&mut self, start: u64, size: u64) -> Result<(), u32> {
        for address in self.whole_mappings(start, size)? {
            let Some(mapped) = self.mapped.remove(&address) else { continue };
            no_access(Some(address), mapped.size)?;
            if self.pages.get(&mapped.page).is_some_and(|page| !page.held) {
                self.pages.remove(&mapped.page);
            }
        }
        Ok(())
    }

    /// Whether the device may access every one of the bytes.
    pub(crate) fn is_live(&self, address: u64, len: u64) -> bool {
        let Some(end) = address.checked_add(len) else { return false };
        let mut next = address;
        while next < end {
            match self.mapped.range(..=next).next_back() {
                Some((start, mapped)) if mapped.accessible && next < start + mapped.size => next = start + mapped.size,
                _ => return false,
            }
        }
        len > 0
    }

    /// Gives everything back.
    pub(crate) fn clear(&mut self) {
        for (start, size) in std::mem::take(&mut self.reservations) {
            give_back(start, size);
        }
        *self = Self::default();
    }

    /// The addresses of the mappings that the bytes consist of, gaps being a mistake.
    fn whole_mappings(&self, start: u64, size: u64) -> Result<Vec<u64>, u32> {
        let end = start.checked_add(size).filter(|end| *end > start).ok_or(code::INVALID_VALUE)?;
        let (mut next, mut found) = (start, Vec::new());
        while next < end {
            let mapped = self.mapped.get(&next).ok_or(code::INVALID_VALUE)?;
            found.push(next);
            next += mapped.size;
        }
        if next == end { Ok(found) } else { Err(code::INVALID_VALUE) }
    }
}

const fn is_whole(size: u64) -> bool {
    size > 0 && size.is_multiple_of(GRANULARITY)
}

/// Host addresses that nobody can touch, wherever the system likes, or in place of what is at `place`.
fn no_access(place: Option<u64>, size: u64) -> Result<u64, u32> {
    let fixed = if place.is_some() { libc::MAP_FIXED } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    let place = place.map_or(ptr::null_mut(), |place| place as *mut libc::c_void);
    // SAFETY: a new mapping, or one in place of a mapping inside a reservation of this table, which the double alone touches.
    let address = unsafe { libc::mmap(place, size as usize, libc::PROT_NONE, flags, -1, 0) };
    if address == libc::MAP_FAILED { Err(code::OUT_OF_MEMORY) } else { Ok(address as u64) }
}

/// Makes host addresses readable and writable, zeroed where they were not before.
fn accessible(address: u64, size: u64) -> Result<(), u32> {
    // SAFETY: the addresses are a mapping inside a reservation of this table.
    let answer = unsafe { libc::mprotect(address as *mut libc::c_void, size as usize, libc::PROT_READ | libc::PROT_WRITE) };
    if answer == 0 { Ok(()) } else { Err(code::OUT_OF_MEMORY) }
}

/// Gives host addresses back.
fn give_back(address: u64, size: u64) {
    if size > 0 {
        unmap(address, size);
    }
}
