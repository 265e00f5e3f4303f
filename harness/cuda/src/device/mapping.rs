//! [`MappedDevice`] for [`CudaDevice`], through the driver's virtual memory management
//! (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html>). [`Mapping`] is its state.

use super::driver::{self, Driver};
use super::types::{CUdevice, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle};
use super::{CudaDevice, GRANULARITY};
use crate::library::Refusal;
use harness_allocator::device::pages::PageTable;
use harness_allocator::device::{Access, AccessKind, DeviceError, DevicePtr, MappedDevice, MemoryRange, StreamId};
use harness_allocator::units::Bytes;

/// Reservations and mapped pages of a device with virtual memory management.
pub(super) struct Mapping {
    /// Properties of created pages: pinned device memory that no other process shares.
    property: CUmemAllocationProp,
    pub(super) table: PageTable<CUmemGenericAllocationHandle>,
}

impl Mapping {
    /// Returns `None` if the device lacks virtual memory management, as some virtual GPUs do, or if its page granularity does not
    /// divide the allocation granularity.
    pub(super) fn of(driver: &Driver, device: CUdevice) -> Result<Option<Self>, Refusal> {
        let (mut supported, mut granularity) = (0, 0);
        // SAFETY: `supported` is a valid output.
        unsafe { driver.device_attribute(&raw mut supported, driver::VIRTUAL_MEMORY_MANAGEMENT, device) }?;
        if supported == 0 {
            return Ok(None);
        }
        let property = driver::pinned_on(device);
        // SAFETY: the property is fully initialized, and `granularity` is a valid output.
        unsafe { driver.page_granularity(&raw mut granularity, &raw const property, driver::MINIMUM_GRANULARITY) }?;
        let fits = granularity > 0 && GRANULARITY.0.is_multiple_of(granularity as u64);
        Ok(fits.then(|| Self { property, table: PageTable::new(GRANULARITY) }))
    }

    /// Creates pages. On failure, releases the pages created before. Always adds the numbers of created and released pages to
    /// `calls`.
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
            // SAFETY: `handle` is a valid output, and the property is fully initialized; the flags must be 0.
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

    /// Maps new pages consecutively and enables access. On failure nothing stays mapped, and the caller still owns the pages.
    fn attach(&self, driver: &Driver, start: DevicePtr, page: Bytes, handles: &[CUmemGenericAllocationHandle]) -> Result<(), Refusal> {
        let size = page.0 as usize;
        let mut next = start;
        let mut answer = Ok(());
        for handle in handles {
            // SAFETY: the table shows that the addresses are reserved and unmapped; the page is whole and mapped once.
            answer = unsafe { driver.map_page(next.0, size, 0, *handle, 0) };
            if answer.is_err() {
                break;
            }
            next = next.offset(page);
        }
        let allowed = CUmemAccessDesc { location: self.property.location, flags: driver::READ_AND_WRITE };
        // SAFETY: all bytes from `start` to `next` were just mapped, and one description is passed.
        answer = answer.and_then(|()| unsafe { driver.set_access(start.0, (next.0 - start.0) as usize, &raw const allowed, 1) });
        if answer.is_err() {
            while next > start {
                next = DevicePtr(next.0 - page.0);
                // SAFETY: the call above mapped the page, and its addresses were not handed out. The first error is returned.
                let _ = unsafe { driver.unmap_pages(next.0, size) };
            }
        }
        answer
    }

    /// Releases everything and ignores errors, when the device is dropped.
    pub(super) fn release(&mut self, driver: &Driver) {
        // SAFETY: the table lists mappings, pages and reservations as live, and ends here; the device is idle.
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

/// Releases unmapped pages.
fn release(driver: &Driver, handles: &[CUmemGenericAllocationHandle], calls: &mut (u64, u64)) {
    for handle in handles {
        calls.1 += 1;
        // SAFETY: the caller created the page and drops it. An error cannot be handled.
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
        // SAFETY: `start` is a valid output; no address is requested, and the flags must be 0.
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
        // SAFETY: the table shows that the reservation lives and contains no mapping, and drops it after the call.
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

    /// Unmaps page by page. If the driver refuses one, the earlier pages are unmapped and the rest stays mapped.
    fn unmap(&mut self, range: MemoryRange) -> Result<(), DeviceError> {
        let pages = self.mapping()?.table.whole_pages(range).ok_or_else(|| self.invalid_free(range.start))?;
        let driver = self.driver()?;
        for (start, size, handle) in pages {
            // SAFETY: the table shows the page as mapped there, and drops it after the call; the caller waited for work on it.
            unsafe { driver.unmap_pages(start.0, size.0 as usize) }?;
            self.mapping()?.table.unmap(start);
            self.calls.release += 1;
            // SAFETY: the page is no longer mapped, and the table has dropped it.
            unsafe { driver.release_page(handle) }?;
        }
        Ok(())
    }
}
