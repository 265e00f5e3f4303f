//! Address space and physical pages apart, on the simulated device: [`MappedDevice`] for [`SimDevice`].

use super::{GRANULARITY, SimDevice, pool, refused};
use crate::device::pages::PageTable;
use crate::device::{Access, AccessKind, DeviceError, DevicePtr, MappedDevice, MemoryRange, StreamId};
use crate::units::{Bytes, Nanos};

/// Reservations begin here and go upward, far from allocations, and are never reused.
const FIRST_ADDRESS: u64 = 0x2000_0000_0000;
/// Unreserved addresses behind each reservation.
const GUARD: Bytes = GRANULARITY;

/// Reservations and pages, and where the next reservation goes.
#[derive(Debug)]
pub(super) struct AddressSpace {
    next: u64,
    pub(super) table: PageTable<()>,
}

impl Default for AddressSpace {
    fn default() -> Self {
        Self { next: FIRST_ADDRESS, table: PageTable::new(GRANULARITY) }
    }
}

impl AddressSpace {
    /// Reserves addresses; `None` where there are none left.
    fn reserve(&mut self, size: Bytes) -> Option<DevicePtr> {
        let start = DevicePtr(self.next);
        self.next = start.0.checked_add(size.0)?.checked_add(GUARD.0).filter(|next| *next <= pool::FIRST_ADDRESS)?;
        self.table.reserve(start, size);
        Some(start)
    }

    /// Whether an address is one of those that reservations are made of.
    pub(super) const fn contains(ptr: DevicePtr) -> bool {
        ptr.0 >= FIRST_ADDRESS && ptr.0 < pool::FIRST_ADDRESS
    }
}

impl MappedDevice for SimDevice {
    fn reserve(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        if size == Bytes::ZERO || !size.0.is_multiple_of(GRANULARITY.0) {
            return Err(refused("reserve", "ask for a multiple of the granularity"));
        }
        self.addresses.reserve(size).ok_or_else(|| refused("reserve", "every address was used"))
    }

    fn unreserve(&mut self, start: DevicePtr) -> Result<(), DeviceError> {
        let table = &mut self.addresses.table;
        table.check_unreservable(start).ok_or(DeviceError::InvalidFree { ptr: start, place: self.place })?;
        table.unreserve(start);
        Ok(())
    }

    fn map(&mut self, range: MemoryRange, page: Bytes) -> Result<(), DeviceError> {
        let access = Access { kind: AccessKind::Write, stream: StreamId::DEFAULT, place: self.place };
        self.addresses.table.check_mappable(range, page).map_err(|why| DeviceError::InvalidAccess { range, access, why })?;
        let (pages, free) = (range.len.0 / page.0, self.free_bytes());
        let fitting = pages.min(free.0 / page.0);
        let asked = if fitting < pages { fitting + 1 } else { pages };
        self.calls.create += asked;
        self.spend(Nanos(self.config.cost.map_page.value.0.saturating_mul(asked)));
        if fitting < pages {
            self.calls.release += fitting;
            return Err(DeviceError::OutOfMemory { requested: range.len, free });
        }
        self.held.charged += range.len;
        for index in 0..pages {
            self.addresses.table.map(range.start.offset(Bytes(index * page.0)), page, ());
        }
        Ok(())
    }

    fn unmap(&mut self, range: MemoryRange) -> Result<(), DeviceError> {
        let pages = self.addresses.table.whole_pages(range).ok_or(DeviceError::InvalidFree { ptr: range.start, place: self.place })?;
        for (start, ..) in &pages {
            self.addresses.table.unmap(*start);
        }
        self.calls.release += pages.len() as u64;
        self.held.charged -= range.len;
        self.contents.forget(range);
        self.races.forget(range);
        self.spend(Nanos(self.config.cost.unmap_page.value.0.saturating_mul(pages.len() as u64)));
        Ok(())
    }
}
