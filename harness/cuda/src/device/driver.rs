//! The table of CUDA driver functions, looked up and checked before the first call.
//!
//! [`Driver::get`] loads `libcuda.so.1` and returns the table, or an error that names the missing functions. Functions return
//! plain `u32` codes, so an unknown code is only a number ([`super::codes`] names codes). The declarations follow `cuda.h`
//! (<https://docs.nvidia.com/cuda/cuda-driver-api/>), whose published function names never change their arguments. The tests
//! compare them with cudarc's bindings.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;
use std::sync::OnceLock;

use super::types::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmemAccessDesc, CUmemAllocationFlags, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmemLocation, CUmemPoolProps, CUmemoryPool, CUmodule, CUstream, CUuuid,
};
use crate::library::{self, LoadError, function_table};
use harness_allocator::device::DeviceError;

/// The library named in errors.
const WHAT: &str = "CUDA driver (libcuda.so.1)";

impl Driver {
    /// Returns the initialized driver. The library is loaded once; an error is remembered.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] if the library or one of its functions is missing; [`DeviceError::Driver`] if `cuInit` fails.
    pub(super) fn get() -> Result<&'static Self, DeviceError> {
        Self::initialised(Self::uninitialised()?)
    }

    /// Returns the initialized driver for a device that only serves allocators. Only the functions of [`FOR_ALLOCATION`] must
    /// exist; calls of other missing functions fail.
    pub(super) fn for_allocation() -> Result<&'static Self, DeviceError> {
        let driver = Self::loaded()?;
        let missing = driver.missing().into_iter().filter(|name| FOR_ALLOCATION.contains(name)).collect::<Vec<_>>();
        if missing.is_empty() { Self::initialised(driver) } else { Err(missing_functions(&missing)) }
    }

    fn initialised(driver: &'static Self) -> Result<&'static Self, DeviceError> {
        // SAFETY: the flags of cuInit must be 0; repeated calls are allowed.
        unsafe { driver.init(0) }?;
        Ok(driver)
    }

    /// Returns the driver before `cuInit`, which is enough to read its version.
    pub(super) fn uninitialised() -> Result<&'static Self, DeviceError> {
        let driver = Self::loaded()?;
        match driver.missing()[..] {
            [] => Ok(driver),
            ref missing => Err(missing_functions(missing)),
        }
    }

    /// Loads the library and looks up all functions that it has.
    fn loaded() -> Result<&'static Self, DeviceError> {
        static DRIVER: OnceLock<Result<Driver, DeviceError>> = OnceLock::new();
        let load = || {
            let library = library::load("libcuda.so.1").map_err(|error| not_loaded(&error))?;
            // SAFETY: the addresses come from the driver's library.
            Ok(unsafe { Self::look_up(|name| library::find(library, name)) })
        };
        DRIVER.get_or_init(load).as_ref().map_err(Clone::clone)
    }
}

/// Returns the error for a library that cannot be loaded.
fn not_loaded(error: &LoadError) -> DeviceError {
    let why = match error {
        LoadError::Absent => "no such library is on the loader's path, so no GPU can be used; install the NVIDIA driver, or give the \
                              container access to the GPU (--gpus all), and see `ldconfig -p | grep libcuda`"
            .to_owned(),
        LoadError::Unloadable(text) => format!(
            "the library exists but cannot be loaded: {text}; reinstall the NVIDIA driver, or remove a wrong file from LD_LIBRARY_PATH"
        ),
    };
    DeviceError::Unavailable { what: WHAT.to_owned(), why }
}

/// Returns the error for a library without some required functions.
fn missing_functions(missing: &[&str]) -> DeviceError {
    let why = format!("it lacks {}: the driver is too old, install one for CUDA 12 or later (525 or newer)", missing.join(", "));
    DeviceError::Unavailable { what: WHAT.to_owned(), why }
}

function_table! {
    /// Driver functions that the CUDA device calls.
    Driver;

    /// Initializes the driver.
    init = cuInit(flags: c_uint);
    /// CUDA version that the driver supports: 1000 × major + 10 × minor.
    driver_version = cuDriverGetVersion(version: *mut c_int);
    /// Number of visible devices.
    device_count = cuDeviceGetCount(count: *mut c_int);
    /// Handle of the device with an ordinal.
    device = cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    /// Name of a device.
    device_name = cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
    /// Memory of a device.
    device_total = cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    /// An attribute of a device.
    device_attribute = cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: CUdevice);
    /// UUID of a device, or of a multi-instance slice.
    device_uuid = cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
    /// Retains the primary context.
    retain_context = cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    /// Releases the primary context; the last release destroys it.
    release_context = cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    /// Makes a context current.
    set_context = cuCtxSetCurrent(context: CUcontext);
    /// The current context, or null.
    current_context = cuCtxGetCurrent(context: *mut CUcontext);
    /// Waits for the context's work.
    synchronize = cuCtxSynchronize();
    /// Free and total memory.
    memory_info = cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    /// Allocates device memory.
    allocate = cuMemAlloc_v2(address: *mut CUdeviceptr, size: usize);
    /// Frees device memory.
    free = cuMemFree_v2(address: CUdeviceptr);
    /// Reserves addresses.
    reserve_addresses = cuMemAddressReserve(
        address: *mut CUdeviceptr, size: usize, alignment: usize, wish: CUdeviceptr, flags: c_ulonglong
    );
    /// Frees reserved addresses.
    free_addresses = cuMemAddressFree(address: CUdeviceptr, size: usize);
    /// Granularity of page sizes and mapped addresses.
    page_granularity = cuMemGetAllocationGranularity(
        granularity: *mut usize, property: *const CUmemAllocationProp, option: c_uint
    );
    /// Creates physical memory.
    create_page = cuMemCreate(
        page: *mut CUmemGenericAllocationHandle, size: usize, property: *const CUmemAllocationProp, flags: c_ulonglong
    );
    /// Releases unmapped physical memory.
    release_page = cuMemRelease(page: CUmemGenericAllocationHandle);
    /// Maps physical memory at reserved addresses.
    map_page = cuMemMap(address: CUdeviceptr, size: usize, offset: usize, page: CUmemGenericAllocationHandle, flags: c_ulonglong);
    /// Sets the access rights of mapped addresses.
    set_access = cuMemSetAccess(address: CUdeviceptr, size: usize, allowed: *const CUmemAccessDesc, count: usize);
    /// Unmaps whole pages.
    unmap_pages = cuMemUnmap(address: CUdeviceptr, size: usize);
    /// Creates a stream-ordered pool.
    create_pool = cuMemPoolCreate(pool: *mut CUmemoryPool, property: *const CUmemPoolProps);
    /// Destroys a pool.
    destroy_pool = cuMemPoolDestroy(pool: CUmemoryPool);
    /// Reads an attribute of a pool.
    pool_attribute = cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: c_uint, value: *mut c_void);
    /// Sets an attribute of a pool.
    set_pool_attribute = cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: c_uint, value: *mut c_void);
    /// Releases a pool's unused memory.
    trim_pool = cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize);
    /// Allocates from a pool, in stream order.
    allocate_in_order = cuMemAllocFromPoolAsync(address: *mut CUdeviceptr, size: usize, pool: CUmemoryPool, stream: CUstream);
    /// Frees to the pool, in stream order.
    free_in_order = cuMemFreeAsync(address: CUdeviceptr, stream: CUstream);
    /// Queues a copy to the host.
    copy_to_host = cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, size: usize, stream: CUstream);
    /// Queues a copy from the host.
    copy_from_host = cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, size: usize, stream: CUstream);
    /// Allocates pinned host memory.
    allocate_host = cuMemHostAlloc(address: *mut *mut c_void, size: usize, flags: c_uint);
    /// Frees pinned host memory.
    free_host = cuMemFreeHost(address: *mut c_void);
    /// Queues a fill with a byte.
    set_bytes = cuMemsetD8Async(to: CUdeviceptr, byte: u8, count: usize, stream: CUstream);
    /// Creates a stream.
    create_stream = cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    /// Destroys a stream.
    destroy_stream = cuStreamDestroy_v2(stream: CUstream);
    /// The context of a stream.
    stream_context = cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
    /// Waits for a stream.
    synchronize_stream = cuStreamSynchronize(stream: CUstream);
    /// Makes a stream wait for an event.
    wait_event = cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    /// Creates an event.
    create_event = cuEventCreate(event: *mut CUevent, flags: c_uint);
    /// Destroys an event.
    destroy_event = cuEventDestroy_v2(event: CUevent);
    /// Records an event on a stream.
    record_event = cuEventRecord(event: CUevent, stream: CUstream);
    /// Queries an event.
    query_event = cuEventQuery(event: CUevent);
    /// Waits for an event.
    synchronize_event = cuEventSynchronize(event: CUevent);
    /// Milliseconds between two events.
    elapsed = cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
    /// Compiles and loads PTX.
    load_module = cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    /// Unloads a module.
    unload_module = cuModuleUnload(module: CUmodule);
    /// Finds a kernel of a module.
    module_function = cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    /// Finds a variable of a module.
    module_global = cuModuleGetGlobal_v2(address: *mut CUdeviceptr, size: *mut usize, module: CUmodule, name: *const c_char);
    /// Launches a kernel.
    launch = cuLaunchKernel(
        function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void
    );
}

/// Functions that every allocator device requires. Functions for streams, events and pages are only needed by allocators that use
/// them.
const FOR_ALLOCATION: [&str; 16] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetAttribute",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSetCurrent",
    "cuCtxGetCurrent",
    "cuCtxSynchronize",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
];

/// Code of `cuMemAlloc` and others: no memory.
pub(super) const OUT_OF_MEMORY: u32 = 2;
/// Code of `cuInit` and others: no device.
pub(super) const NO_DEVICE: u32 = 100;
/// Code of `cuEventQuery` and `cuStreamQuery`: the work is not done.
pub(super) const NOT_READY: u32 = 600;

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`.
pub(super) const CAPABILITY_MAJOR: c_uint = 75;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR`.
pub(super) const CAPABILITY_MINOR: c_uint = 76;
/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`: whether addresses and physical memory can be had apart.
pub(super) const VIRTUAL_MEMORY_MANAGEMENT: c_uint = 102;
/// `CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED`: whether the device has stream-ordered pools.
pub(super) const MEMORY_POOLS: c_uint = 115;

/// `CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC`: hand out what happens to be free by now.
pub(super) const POOL_REUSE_BY_CHANCE: c_uint = 2;
/// `CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES`: make streams wait so that memory can be handed out.
pub(super) const POOL_REUSE_BY_OWN_WAITS: c_uint = 3;
/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`: what the pool may hold on to.
pub(super) const POOL_RELEASE_THRESHOLD: c_uint = 4;
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`: what the pool holds from the device.
pub(super) const POOL_RESERVED: c_uint = 5;
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH`: the most that ever was.
pub(super) const POOL_RESERVED_HIGH: c_uint = 6;
/// `CU_MEMPOOL_ATTR_USED_MEM_CURRENT`: what the pool has handed out.
pub(super) const POOL_USED: c_uint = 7;
/// `CU_MEMPOOL_ATTR_USED_MEM_HIGH`: the most that ever was.
pub(super) const POOL_USED_HIGH: c_uint = 8;

/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`: the least page size that works.
pub(super) const MINIMUM_GRANULARITY: c_uint = 0;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub(super) const READ_AND_WRITE: c_uint = 3;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_DEVICE: c_uint = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: c_uint = 1;
/// `CU_MEM_HANDLE_TYPE_NONE`: shared with no other process.
const NOT_SHARED: c_uint = 0;

/// `CU_STREAM_NON_BLOCKING`: no implicit synchronization with the default stream.
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DEFAULT`: the event keeps the time of its record.
pub(super) const EVENT_WITH_TIMING: c_uint = 0;
/// `CU_EVENT_DISABLE_TIMING`: cheaper to record and to ask.
pub(super) const EVENT_WITHOUT_TIMING: c_uint = 2;

/// The place "this device".
const fn location_of(device: CUdevice) -> CUmemLocation {
    CUmemLocation { kind: ON_DEVICE, id: device }
}

/// Physical memory of a device, shared with no other process.
pub(super) const fn pinned_on(device: CUdevice) -> CUmemAllocationProp {
    CUmemAllocationProp {
        kind: PINNED,
        handle_types: NOT_SHARED,
        location: location_of(device),
        win32_handle_metadata: ptr::null_mut(),
        flags: CUmemAllocationFlags { compression: 0, gpu_direct_rdma: 0, usage: 0, reserved: [0; 4] },
    }
}

/// A pool of pinned memory of a device, shared with no other process and without a limit.
pub(super) const fn pool_on(device: CUdevice) -> CUmemPoolProps {
    CUmemPoolProps {
        kind: PINNED,
        handle_types: NOT_SHARED,
        location: location_of(device),
        win32_security_attributes: ptr::null_mut(),
        max_size: 0,
        usage: 0,
        reserved: [0; 54],
    }
}

#[cfg(test)]
mod tests;
