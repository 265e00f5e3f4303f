//! Address space and physical memory apart: [`MappedDevice`] for [`CudaDevice`], by the driver's virtual memory management
//! (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html>). [`Mapping`] is what it keeps.

use super::driver::{self, Driver};
use super::types::{CUdevice, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle};
use super::{CudaDevice, GRANULARITY};
use crate::library::Refusal;
use harness_allocator::device::pages::PageTable;
use harness_allocator::device::{Access, AccessKind, DeviceError, DevicePtr, MappedDevice, MemoryRange, StreamId};
use harness_allocator::units::Bytes;

/// Reservations and mapped pages of a device that can tell them apart.
pub(super) struct Mapping {
    /// Where pages are made: on the device, pinned, shared with nobody.
    property: CUmemAllocationProp,
    pub(super) table: PageTable<CUmemGenericAllocationHandle>,
}

impl Mapping {
    /// `None` where the device lacks virtual memory management (virtual GPUs may), or takes pages only in sizes that do not divide the
    /// granularity of its other allocations.
    pub(super) fn of(driver: &Driver, device: CUdevice) -> Result<Option<Self>, Refusal> {
        let (mut supported, mut granularity) = (0, 0);
        // SAFETY: `supported` is a place for the answer.
        unsafe { driver.device_attribute(&raw mut supported, driver::VIRTUAL_MEMORY_MANAGEMENT, device) }?;
        if supported == 0 {
            return Ok(None);
        }
        let property = driver::pinned_on(device);
        // SAFETY: the property is whole, and `granularity` is a place for the answer.
        unsafe { driver.page_granularity(&raw mut granularity, &raw const property, driver::MINIMUM_GRANULARITY) }?;
        let fits = granularity > 0 && GRANULARITY.0.is_multiple_of(granularity as u64);
        Ok(fits.then(|| Self { property, table: PageTable::new(GRANULARITY) }))
    }

    /// Makes pages; where one cannot be had, those made before go back. The numbers of pages asked for and given back are added to the
    /// pair in any case.
    fn create(
        &self,
        driver: &Driver,
        page: Bytes,
        count: u64,
        calls: &mut (u64, u64),
    ) -> Result<Vec<CUmemGenericAllocationHandle>, Refusal> {
        let mut handles = Vec::new();
        for _ in 0..count {
            calls.0 += 1;
            let mut handle = 0;
            // SAFETY: `handle` is a place for the answer, and the property is whole; the only flags are 0.
            match unsafe { driver.create_page(&raw mut handle, page.0 as usize, &raw const self.property, 0) } {
                Ok(()) => handles.push(handle),
                Err(refusal) => {
                    release(driver, &handles, calls);
                    return Err(refusal);
                }
            }
        }
        Ok(handles)
    }

    /// Maps pages just made side by side, and lets the device access them. Where that fails nothing is mapped, and the pages are still
    /// the caller's.
    fn attach(&self, driver: &Driver, start: DevicePtr, page: Bytes, handles: &[CUmemGenericAllocationHandle]) -> Result<(), Refusal> {
        let size = page.0 as usize;
        let mut next = start;
        let mut answer = Ok(());
        for handle in handles {
            // SAFETY: the addresses are reserved and nothing is mapped to them, as the table says; the page is whole and mapped once.
            answer = unsafe { driver.map_page(next.0, size, 0, *handle, 0) };
            if answer.is_err() {
                break;
            }
            next = next.offset(page);
        }
        let allowed = CUmemAccessDesc { location: self.property.location, flags: driver::READ_AND_WRITE };
        // SAFETY: every byte from `start` to `next` was just mapped; one description is told and read.
        answer = answer.and_then(|()| unsafe { driver.set_access(start.0, (next.0 - start.0) as usize, &raw const allowed, 1) });
        if answer.is_err() {
            while next > start {
                next = DevicePtr(next.0 - page.0);
                // SAFETY: the page was mapped by the call above, and no address of it was handed out. The first refusal is the one to return.
                let _ = unsafe { driver.unmap_pages(next.0, size) };
            }
        }
        answer
    }

    /// Gives everything back as far as the driver lets it; for the end of the device.
    pub(super) fn release(&mut self, driver: &Driver) {
        // SAFETY: mappings, pages and reservations live, as the table says, and it ends here; all work was waited for.
        unsafe {
            for (start, size, handle) in self.table.pages() {
                let _ = driver.unmap_pages(start.0, size.0 as usize);
                let _ = driver.release_page(handle);
            }
            for (start, size) in self.table.reservations() {
                let _ = driver.free_addresses(start.0, size.0 as usize);
            }
        }
    }
}

/// Gives pages back that are mapped nowhere.
fn release(driver: &Driver, handles: &[CUmemGenericAllocationHandle], calls: &mut (u64, u64)) {
    for handle in handles {
        calls.1 += 1;
        // SAFETY: the page was made by the caller of this, who forgets it. There is no more to do where the driver refuses.
        let _ = unsafe { driver.release_page(*handle) };
    }
}

impl CudaDevice {
    fn mapping(&mut self) -> Result<&mut Mapping, DeviceError> {
        let why = || DeviceError::Unavailable { what: "memory mapping".to_owned(), why: "this device does not support it".to_owned() };
        self.mapping.as_mut().ok_or_else(why)
    }

    fn invalid_free(&self, ptr: DevicePtr) -> DeviceError {
        DeviceError::InvalidFree { ptr, place: self.place }
    }
}

impl MappedDevice for CudaDevice {
    fn reserve(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        let driver = self.driver()?;
        let mut start = 0;
        // SAFETY: `start` is a place for the answer; no address is wished for, and the only flags are 0.
        let reserved = unsafe {
            driver.reserve_addresses(&raw mut start, usize::try_from(size.0).unwrap_or(usize::MAX), GRANULARITY.0 as usize, 0, 0)
        };
        match reserved {
            Ok(()) => {}
            Err(Refusal { code: driver::OUT_OF_MEMORY, .. }) => {
                return Err(DeviceError::OutOfMemory { requested: size, free: self.driver_free()? });
            }
            Err(refusal) => return Err(refusal.into()),
        }
        self.mapping()?.table.reserve(DevicePtr(start), size);
        self.freed.remove(&start);
        Ok(DevicePtr(start))
    }

    fn unreserve(&mut self, start: DevicePtr) -> Result<(), DeviceError> {
        let size = self.mapping()?.table.check_unreservable(start).ok_or_else(|| self.invalid_free(start))?;
        // SAFETY: the reservation lives and nothing is mapped in it, as the table says, and it is forgotten once it is given back.
        unsafe { self.driver()?.free_addresses(start.0, size.0 as usize) }?;
        self.mapping()?.table.unreserve(start);
        Ok(())
    }

    fn map(&mut self, range: MemoryRange, page: Bytes) -> Result<(), DeviceError> {
        let access = Access { kind: AccessKind::Write, stream: StreamId::DEFAULT, place: self.place };
        let driver = self.driver()?;
        let mapping = self.mapping()?;
        mapping.table.check_mappable(range, page).map_err(|why| DeviceError::InvalidAccess { range, access, why })?;
        let mut calls = (0, 0);
        let made = mapping.create(driver, page, range.len.0 / page.0, &mut calls);
        let mapped = made.and_then(|handles| match mapping.attach(driver, range.start, page, &handles) {
            Ok(()) => Ok(handles),
            Err(refusal) => {
                release(driver, &handles, &mut calls);
                Err(refusal)
            }
        });
        let mapped = mapped.map(|handles| {
            for (handle, index) in handles.into_iter().zip(0..) {
                mapping.table.map(range.start.offset(Bytes(index * page.0)), page, handle);
            }
        });
        self.calls.create += calls.0;
        self.calls.release += calls.1;
        match mapped {
            Err(Refusal { code: driver::OUT_OF_MEMORY, .. }) => {
                Err(DeviceError::OutOfMemory { requested: range.len, free: self.driver_free()? })
            }
            other => Ok(other?),
        }
    }

    /// Page by page, as the pages were mapped: where the driver refuses one, those in front of it are gone and the rest stays.
    fn unmap(&mut self, range: MemoryRange) -> Result<(), DeviceError> {
        let pages = self.mapping()?.table.whole_pages(range).ok_or_else(|| self.invalid_free(range.start))?;
        let driver = self.driver()?;
        for (start, size, handle) in pages {
            // SAFETY: the page is mapped there, as the table says, and is forgotten once it is not; the caller waited for work on it.
            unsafe { driver.unmap_pages(start.0, size.0 as usize) }?;
            self.mapping()?.table.unmap(start);
            self.calls.release += 1;
            // SAFETY: the page is mapped nowhere now, and was forgotten.
            unsafe { driver.release_page(handle) }?;
        }
        Ok(())
    }
}
