//! [`MappedDevice`] for [`CudaDevice`], through the driver's virtual memory management
//! (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html>). [`Mapping`] is its state.

use cudarc::driver::sys::{
    CUdevice, CUdevice_attribute, CUmemAccess_flags, CUmemAccessDesc,
    CUmemAllocationGranularity_flags, CUmemAllocationProp, CUmemAllocationType,
    CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType,
};

use super::driver::{Driver, cuda};
use super::{CudaDevice, GRANULARITY, probe::attribute};
use crate::library::Refusal;
use harness_allocator::device::{
    Access, AccessKind, DeviceError, DevicePtr, MappedDevice, MemoryRange, StreamId,
    pages::PageTable,
};
use harness_allocator::units::Bytes;

/// Reservations and mapped pages of a device with virtual memory management.
pub(super) struct Mapping {
    /// Properties of created pages: pinned device memory that no other process shares.
    property: CUmemAllocationProp,
    pub(super) table: PageTable<CUmemGenericAllocationHandle>,
}

impl Mapping {
    /// Returns `None` if the device lacks virtual memory management, as some virtual GPUs do, or if
    /// its page granularity does not divide the allocation granularity.
    pub(super) fn of(driver: &Driver, device: CUdevice) -> Result<Option<Self>, Refusal> {
        if attribute(
            driver,
            device,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        )? == 0
        {
            return Ok(None);
        }
        let mut granularity = 0;
        let least = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let property = pinned_on(device);
        cuda!(
            driver,
            cuMemGetAllocationGranularity(&mut granularity, &property, least)
        )?;
        let fits = granularity > 0 && GRANULARITY.0.is_multiple_of(granularity as u64);
        Ok(fits.then(|| Self {
            property,
            table: PageTable::new(GRANULARITY),
        }))
    }

    /// Creates pages. On failure, releases the pages created before. Always adds the numbers of
    /// created and released pages to `calls`.
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
            match cuda!(
                driver,
                cuMemCreate(&mut handle, page.0 as usize, &self.property, 0)
            ) {
                Ok(()) => handles.push(handle),
                Err(refusal) => {
                    release(driver, &handles, calls);
                    return Err(refusal);
                }
            }
        }
        Ok(handles)
    }

    /// Maps new pages consecutively and enables access. On failure nothing stays mapped, and the
    /// caller still owns the pages.
    fn attach(
        &self,
        driver: &Driver,
        start: DevicePtr,
        page: Bytes,
        handles: &[CUmemGenericAllocationHandle],
    ) -> Result<(), Refusal> {
        let size = page.0 as usize;
        let mut next = start;
        let mut answer = Ok(());
        for handle in handles {
            answer = cuda!(driver, cuMemMap(next.0, size, 0, *handle, 0));
            if answer.is_err() {
                break;
            }
            next = next.offset(page);
        }
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let allowed = CUmemAccessDesc {
            location: self.property.location,
            flags,
        };
        answer = answer.and_then(|()| {
            cuda!(
                driver,
                cuMemSetAccess(start.0, (next.0 - start.0) as usize, &allowed, 1)
            )
        });
        if answer.is_err() {
            while next > start {
                next = DevicePtr(next.0 - page.0);
                // The first error is returned.
                let _ = cuda!(driver, cuMemUnmap(next.0, size));
            }
        }
        answer
    }

    /// Releases everything and ignores errors, when the device is dropped.
    pub(super) fn release(&mut self, driver: &Driver) {
        for (start, size, handle) in self.table.pages() {
            let _ = cuda!(driver, cuMemUnmap(start.0, size.0 as usize));
            let _ = cuda!(driver, cuMemRelease(handle));
        }
        for (start, size) in self.table.reservations() {
            let _ = cuda!(driver, cuMemAddressFree(start.0, size.0 as usize));
        }
    }
}

fn release(driver: &Driver, handles: &[CUmemGenericAllocationHandle], calls: &mut (u64, u64)) {
    for handle in handles {
        calls.1 += 1;
        // An error cannot be handled.
        let _ = cuda!(driver, cuMemRelease(*handle));
    }
}

/// Physical memory of a device, shared with no other process.
fn pinned_on(device: CUdevice) -> CUmemAllocationProp {
    // SAFETY: zero is a valid value of each field.
    let nothing: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        location: location_of(device),
        ..nothing
    }
}

pub(super) fn location_of(device: CUdevice) -> CUmemLocation {
    // SAFETY: the struct consists of its kind and the device's number; newer versions of cudarc
    // have a union for the number.
    unsafe {
        std::mem::transmute([
            CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as CUdevice,
            device,
        ])
    }
}

impl CudaDevice {
    fn mapping(&mut self) -> Result<&mut Mapping, DeviceError> {
        let why = || DeviceError::Unavailable {
            what: "memory mapping".to_owned(),
            why: "this device does not support it".to_owned(),
        };
        self.mapping.as_mut().ok_or_else(why)
    }

    fn invalid_free(&self, ptr: DevicePtr) -> DeviceError {
        DeviceError::InvalidFree {
            ptr,
            place: self.place,
        }
    }
}

impl MappedDevice for CudaDevice {
    fn reserve(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        let driver = self.driver()?;
        let mut start = 0;
        let (bytes, alignment) = (
            usize::try_from(size.0).unwrap_or(usize::MAX),
            GRANULARITY.0 as usize,
        );
        self.granted(
            size,
            cuda!(
                driver,
                cuMemAddressReserve(&mut start, bytes, alignment, 0, 0)
            ),
        )?;
        self.mapping()?.table.reserve(DevicePtr(start), size);
        self.freed.remove(&start);
        Ok(DevicePtr(start))
    }

    fn unreserve(&mut self, start: DevicePtr) -> Result<(), DeviceError> {
        let size = self
            .mapping()?
            .table
            .check_unreservable(start)
            .ok_or_else(|| self.invalid_free(start))?;
        cuda!(self.driver()?, cuMemAddressFree(start.0, size.0 as usize))?;
        self.mapping()?.table.unreserve(start);
        Ok(())
    }

    fn map(&mut self, range: MemoryRange, page: Bytes) -> Result<(), DeviceError> {
        let access = Access {
            kind: AccessKind::Write,
            stream: StreamId::DEFAULT,
            place: self.place,
        };
        let driver = self.driver()?;
        let mapping = self.mapping()?;
        mapping
            .table
            .check_mappable(range, page)
            .map_err(|why| DeviceError::InvalidAccess { range, access, why })?;
        let mut calls = (0, 0);
        let made = mapping.create(driver, page, range.len.0 / page.0, &mut calls);
        let mapped =
            made.and_then(
                |handles| match mapping.attach(driver, range.start, page, &handles) {
                    Ok(()) => Ok(handles),
                    Err(refusal) => {
                        release(driver, &handles, &mut calls);
                        Err(refusal)
                    }
                },
            );
        let mapped = mapped.map(|handles| {
            for (handle, index) in handles.into_iter().zip(0..) {
                mapping
                    .table
                    .map(range.start.offset(Bytes(index * page.0)), page, handle);
            }
        });
        self.calls.create += calls.0;
        self.calls.release += calls.1;
        self.granted(range.len, mapped)
    }

    /// Unmaps page by page. If the driver refuses one, the earlier pages are unmapped and the rest
    /// stays mapped.
    fn unmap(&mut self, range: MemoryRange) -> Result<(), DeviceError> {
        let pages = self
            .mapping()?
            .table
            .whole_pages(range)
            .ok_or_else(|| self.invalid_free(range.start))?;
        let driver = self.driver()?;
        for (start, size, handle) in pages {
            cuda!(driver, cuMemUnmap(start.0, size.0 as usize))?;
            self.mapping()?.table.unmap(start);
            self.calls.release += 1;
            cuda!(driver, cuMemRelease(handle))?;
        }
        Ok(())
    }
}
