//! Memory mapping of the simulated device: [`MappedDevice`] for [`SimDevice`].

use super::addresses::{AddressOrder, Addresses, RESERVATIONS};
use super::{GRANULARITY, SimDevice, races::Conflict, refused};
use crate::device::{
    Access, AccessKind, DeviceError, DevicePtr, MappedDevice, MemoryRange, StreamId,
    pages::PageTable,
};
use crate::units::{Bytes, Nanos};

/// The unreserved gap after each reservation.
const GUARD: Bytes = GRANULARITY;

#[derive(Clone, Debug)]
pub(super) struct Mapping {
    addresses: Addresses,
    pub(super) table: PageTable<()>,
}

impl Mapping {
    pub(super) fn new(order: AddressOrder) -> Self {
        let addresses = Addresses::new(RESERVATIONS, GUARD, order);
        Self {
            addresses,
            table: PageTable::new(GRANULARITY),
        }
    }

    pub(super) fn contains(&self, ptr: DevicePtr) -> bool {
        RESERVATIONS.contains(&ptr.0) || self.table.is_reserved(ptr)
    }

    /// The addresses of the next reservation: the requested ones, or else the next unused ones.
    pub(super) fn next_address(&mut self, size: Bytes, wanted: Option<DevicePtr>) -> Option<u64> {
        match wanted {
            Some(at) => {
                self.addresses.take_at(at.0, size);
                Some(at.0)
            }
            None => self.addresses.take(size),
        }
    }
}

impl MappedDevice for SimDevice {
    fn reserve(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        if size == Bytes::ZERO || !size.0.is_multiple_of(GRANULARITY.0) {
            return Err(refused("reserve", "request a multiple of the granularity"));
        }
        let no_addresses = DeviceError::OutOfMemory {
            requested: size,
            free: self.free_bytes(),
        };
        let wanted = self.next_reservation(size);
        let start = DevicePtr(
            self.mapping
                .next_address(size, wanted)
                .ok_or(no_addresses)?,
        );
        self.mapping.table.reserve(start, size);
        Ok(start)
    }

    fn unreserve(&mut self, start: DevicePtr) -> Result<(), DeviceError> {
        let Mapping { addresses, table } = &mut self.mapping;
        let size = table
            .check_unreservable(start)
            .ok_or(DeviceError::InvalidFree {
                ptr: start,
                place: self.place,
            })?;
        table.unreserve(start);
        addresses.give_back(start.0, size);
        Ok(())
    }

    fn map(&mut self, range: MemoryRange, page: Bytes) -> Result<(), DeviceError> {
        self.check_mappable(range, page)?;
        let (pages, free) = (range.len.0 / page.0, self.free_bytes());
        let fitting = pages.min(free.0 / page.0);
        let asked = if fitting < pages { fitting + 1 } else { pages };
        self.calls.create += asked;
        self.spend(Nanos(
            self.config.cost.map_page.value.0.saturating_mul(asked),
        ));
        if fitting < pages {
            self.calls.release += fitting;
            return Err(DeviceError::OutOfMemory {
                requested: range.len,
                free,
            });
        }
        self.charged += range.len;
        for index in 0..pages {
            self.mapping
                .table
                .map(range.start.offset(Bytes(index * page.0)), page, ());
        }
        Ok(())
    }

    fn unmap(&mut self, range: MemoryRange) -> Result<(), DeviceError> {
        for size in self.unmap_pages(range)? {
            self.release_page(size);
        }
        Ok(())
    }
}

/// Creating and mapping physical memory as separate calls, as in the driver.
impl SimDevice {
    fn check_mappable(&self, range: MemoryRange, page: Bytes) -> Result<(), DeviceError> {
        let access = Access {
            kind: AccessKind::Write,
            stream: StreamId::DEFAULT,
            place: self.place,
        };
        let checked = self.mapping.table.check_mappable(range, page);
        checked.map_err(|why| DeviceError::InvalidAccess { range, access, why })
    }

    /// Creates physical memory without an address, as `cuMemCreate` does. Fails with
    /// [`DeviceError::OutOfMemory`]; [`DeviceError::Driver`] for a size that is not a multiple of
    /// the granularity.
    pub fn create_page(&mut self, size: Bytes) -> Result<(), DeviceError> {
        if size == Bytes::ZERO || !size.0.is_multiple_of(GRANULARITY.0) {
            return Err(refused(
                "create_page",
                "request a multiple of the granularity",
            ));
        }
        self.calls.create += 1;
        self.spend(self.config.cost.map_page.value);
        let free = self.free_bytes();
        if size > free {
            return Err(DeviceError::OutOfMemory {
                requested: size,
                free,
            });
        }
        self.charged += size;
        Ok(())
    }

    /// Releases the physical memory of [`SimDevice::create_page`]. It must not be mapped.
    pub fn release_page(&mut self, size: Bytes) {
        self.calls.release += 1;
        self.charged -= size;
    }

    /// Maps created memory to a range that has none. Fails with [`DeviceError::InvalidAccess`] for
    /// a range that is not reserved or already mapped.
    pub fn map_page(&mut self, range: MemoryRange) -> Result<(), DeviceError> {
        self.check_mappable(range, range.len)?;
        self.mapping.table.map(range.start, range.len, ());
        Ok(())
    }

    /// Unmaps a range of whole pages without releasing their memory. Returns the size of each page.
    /// Fails like [`MappedDevice::unmap`].
    pub fn unmap_pages(&mut self, range: MemoryRange) -> Result<Vec<Bytes>, DeviceError> {
        let mapped = self.mapping.table.whole_pages(range).is_some();
        if let Some(Conflict {
            range,
            first: access,
        }) = self.races.unseen_by_host(range).filter(|_| mapped)
        {
            return Err(DeviceError::InUse {
                range,
                access,
                place: self.place,
            });
        }
        self.unmap_pages_in_use(range)
    }

    /// The same, but does not check for unfinished work, as a driver does. That work then accesses
    /// unmapped memory. Fails with [`DeviceError::InvalidFree`] if the range does not consist of
    /// whole mapped pages.
    pub fn unmap_pages_in_use(&mut self, range: MemoryRange) -> Result<Vec<Bytes>, DeviceError> {
        let pages = self
            .mapping
            .table
            .whole_pages(range)
            .ok_or(DeviceError::InvalidFree {
                ptr: range.start,
                place: self.place,
            })?;
        for (start, ..) in &pages {
            self.mapping.table.unmap(*start);
        }
        self.contents.forget(range);
        // All work on the range was waited for or accesses unmapped memory. Both come before all
        // later work, so no race is missed.
        self.races.forget(range);
        self.spend(Nanos(
            self.config
                .cost
                .unmap_page
                .value
                .0
                .saturating_mul(pages.len() as u64),
        ));
        Ok(pages.into_iter().map(|(_, size, _)| size).collect())
    }
}
