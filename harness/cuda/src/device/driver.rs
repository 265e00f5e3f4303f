//! The CUDA driver as a table of functions: loaded, looked up whole and checked before the first call.
//!
//! [`Driver::get`] loads `libcuda.so.1` and answers with the table or with the sentence that says what is missing. The functions return
//! plain `u32` codes, so a code that the bindings do not know is only a number ([`super::codes`] names it); each argument list is checked
//! against cudarc's bindings when this file compiles.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use cudarc::driver::sys;
pub(super) use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle,
    CUmemLocation, CUmemPool_attribute as CUmemPoolAttribute, CUmemPoolProps, CUmemoryPool, CUmodule, CUstream, CUuuid,
};

use super::codes::Refusal;
use harness_allocator::device::DeviceError;

/// What was looked for where the driver is missing.
const WHAT: &str = "CUDA driver (libcuda.so.1)";

impl Driver {
    /// The driver of this process, initialised. The library is loaded once; a failure is remembered, as no library appears later.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] without a library or with one that lacks a function; [`DeviceError::Driver`] where `cuInit` fails.
    pub(super) fn get() -> Result<&'static Self, DeviceError> {
        let driver = Self::uninitialised()?;
        // SAFETY: the flags of cuInit must be 0; it may be called any number of times.
        unsafe { driver.init(0) }?;
        Ok(driver)
    }

    /// The driver before `cuInit`: good for asking its version.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`].
    pub(super) fn uninitialised() -> Result<&'static Self, DeviceError> {
        static DRIVER: OnceLock<Result<Driver, DeviceError>> = OnceLock::new();
        DRIVER.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self, DeviceError> {
        // SAFETY: loads the library and drops it again; the driver's initialisers have no precondition.
        if !unsafe { sys::is_culib_present() } {
            let why = "no such library is on the loader's path, so no GPU can be used; install the NVIDIA driver, or give the container \
                       access to the GPU (--gpus all), and see `ldconfig -p | grep libcuda`";
            return Err(DeviceError::Unavailable { what: WHAT.to_owned(), why: why.to_owned() });
        }
        // SAFETY: as above; the library was just seen to load, so this does not panic. It stays loaded until the process ends.
        let library = unsafe { sys::culib() };
        let find = |name: &str| {
            // SAFETY: only the symbol's address is taken, as a pointer; `look_up` gives it its type.
            unsafe { library.get::<*mut c_void>(name.as_bytes()) }.ok().and_then(|symbol| NonNull::new(*symbol))
        };
        // SAFETY: the addresses come from the driver's library, whose functions have the argument lists of cudarc's bindings, with which
        // those below are compared at compile time.
        unsafe { Self::look_up(find) }.map_err(|missing| missing_functions(&missing))
    }
}

/// The sentence for a library without the functions that will be called.
fn missing_functions(missing: &[&str]) -> DeviceError {
    let why = format!("it lacks {}: the driver is too old, install one for CUDA 12 or later (525 or newer)", missing.join(", "));
    DeviceError::Unavailable { what: WHAT.to_owned(), why }
}

/// Declares the table, its look-up, and one method a function that turns its code into a [`Refusal`].
macro_rules! driver_functions {
    ($( $(#[$doc:meta])* $method:ident = $function:ident($($argument:ident: $type:ty),*); )*) => {
        /// The driver's functions that the CUDA device calls.
        #[derive(Clone, Debug)]
        pub(super) struct Driver { $( $method: unsafe extern "C" fn($($type),*) -> u32, )* }

        #[expect(clippy::too_many_arguments, reason = "the driver's own argument lists")]
        impl Driver {
            /// Finds every function, or names all that are missing.
            ///
            /// # Safety
            /// What `find` returns for a name must be the driver's function of that name.
            unsafe fn look_up(find: impl Fn(&str) -> Option<NonNull<c_void>>) -> Result<Self, Vec<&'static str>> {
                let missing: Vec<_> = [$( stringify!($function) ),*].into_iter().filter(|name| find(name).is_none()).collect();
                $( let Some($method) = find(stringify!($function)) else { return Err(missing) }; )*
                Ok(Self { $(
                    // SAFETY: the address is that of a C function with this argument list, as the caller promised; a driver code is a
                    // 32-bit enum in C, which is returned as a u32 is.
                    $method: unsafe { std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn($($type),*) -> u32>($method) },
                )* })
            }

            $(
                $(#[$doc])*
                ///
                /// # Safety
                /// As the CUDA driver API demands of this function.
                pub(super) unsafe fn $method(&self, $($argument: $type),*) -> Result<(), Refusal> {
                    // SAFETY: passed on to the caller of this method.
                    match unsafe { (self.$method)($($argument),*) } {
                        0 => Ok(()),
                        code => Err(Refusal { call: stringify!($function), code }),
                    }
                }
            )*
        }

        // The bindings' functions take exactly these arguments, or this does not compile.
        $( const _: unsafe fn($($type),*) -> sys::CUresult = sys::$function; )*
    };
}

driver_functions! {
    /// Initialises the driver.
    init = cuInit(flags: c_uint);
    /// CUDA version that the driver supports: 1000 × major + 10 × minor.
    driver_version = cuDriverGetVersion(version: *mut c_int);
    /// Number of devices that this process may use.
    device_count = cuDeviceGetCount(count: *mut c_int);
    /// Handle of the device with an ordinal.
    device = cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    /// Name of a device.
    device_name = cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
    /// Memory of a device.
    device_total = cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    /// An attribute of a device.
    device_attribute = cuDeviceGetAttribute(value: *mut c_int, attribute: sys::CUdevice_attribute, device: CUdevice);
    /// UUID of a device, of the instance where it is one of a multi-instance GPU.
    device_uuid = cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
    /// Takes a reference to the device's primary context.
    retain_context = cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    /// Gives the reference back; the last one destroys the context.
    release_context = cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    /// Makes a context the calling thread's.
    set_context = cuCtxSetCurrent(context: CUcontext);
    /// Waits for all work of the context.
    synchronize = cuCtxSynchronize();
    /// Free and total memory of the device.
    memory_info = cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    /// Allocates device memory.
    allocate = cuMemAlloc_v2(address: *mut CUdeviceptr, size: usize);
    /// Frees device memory.
    free = cuMemFree_v2(address: CUdeviceptr);
    /// Reserves addresses without memory behind them.
    reserve_addresses = cuMemAddressReserve(
        address: *mut CUdeviceptr, size: usize, alignment: usize, wish: CUdeviceptr, flags: c_ulonglong
    );
    /// Gives reserved addresses back.
    free_addresses = cuMemAddressFree(address: CUdeviceptr, size: usize);
    /// What sizes of pages and addresses of mappings are multiples of.
    page_granularity = cuMemGetAllocationGranularity(
        granularity: *mut usize, property: *const CUmemAllocationProp, option: sys::CUmemAllocationGranularity_flags
    );
    /// Makes a page of physical memory.
    create_page = cuMemCreate(
        page: *mut CUmemGenericAllocationHandle, size: usize, property: *const CUmemAllocationProp, flags: c_ulonglong
    );
    /// Gives a page back, once it is mapped nowhere.
    release_page = cuMemRelease(page: CUmemGenericAllocationHandle);
    /// Puts a page behind reserved addresses.
    map_page = cuMemMap(address: CUdeviceptr, size: usize, offset: usize, page: CUmemGenericAllocationHandle, flags: c_ulonglong);
    /// Lets devices access mapped addresses.
    set_access = cuMemSetAccess(address: CUdeviceptr, size: usize, allowed: *const CUmemAccessDesc, count: usize);
    /// Takes whole pages from behind addresses.
    unmap_pages = cuMemUnmap(address: CUdeviceptr, size: usize);
    /// Makes a stream-ordered pool.
    create_pool = cuMemPoolCreate(pool: *mut CUmemoryPool, property: *const CUmemPoolProps);
    /// Removes a pool.
    destroy_pool = cuMemPoolDestroy(pool: CUmemoryPool);
    /// Asks a pool for an attribute.
    pool_attribute = cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: CUmemPoolAttribute, value: *mut c_void);
    /// Sets an attribute of a pool.
    set_pool_attribute = cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: CUmemPoolAttribute, value: *mut c_void);
    /// Makes a pool give unused memory back.
    trim_pool = cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize);
    /// Allocates from a pool, in the order of a stream.
    allocate_in_order = cuMemAllocFromPoolAsync(address: *mut CUdeviceptr, size: usize, pool: CUmemoryPool, stream: CUstream);
    /// Frees to the pool, in the order of a stream.
    free_in_order = cuMemFreeAsync(address: CUdeviceptr, stream: CUstream);
    /// Queues a copy to the host.
    copy_to_host = cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, size: usize, stream: CUstream);
    /// Queues setting bytes.
    set_bytes = cuMemsetD8Async(to: CUdeviceptr, byte: u8, count: usize, stream: CUstream);
    /// Makes a stream.
    create_stream = cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    /// Removes a stream.
    destroy_stream = cuStreamDestroy_v2(stream: CUstream);
    /// Waits for a stream's work.
    synchronize_stream = cuStreamSynchronize(stream: CUstream);
    /// Makes a stream wait for an event.
    wait_event = cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    /// Makes an event.
    create_event = cuEventCreate(event: *mut CUevent, flags: c_uint);
    /// Removes an event.
    destroy_event = cuEventDestroy_v2(event: CUevent);
    /// Queues an event on a stream.
    record_event = cuEventRecord(event: CUevent, stream: CUstream);
    /// Asks whether an event is done.
    query_event = cuEventQuery(event: CUevent);
    /// Waits for an event.
    synchronize_event = cuEventSynchronize(event: CUevent);
    /// Milliseconds between two events.
    elapsed = cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
    /// Translates PTX and loads it.
    load_module = cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    /// Unloads a module.
    unload_module = cuModuleUnload(module: CUmodule);
    /// Finds a kernel of a module.
    module_function = cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    /// Finds a variable of a module.
    module_global = cuModuleGetGlobal_v2(address: *mut CUdeviceptr, size: *mut usize, module: CUmodule, name: *const c_char);
    /// Queues a kernel.
    launch = cuLaunchKernel(
        function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void
    );
}

/// Code of `cuMemAlloc` and others: no memory.
pub(super) const OUT_OF_MEMORY: u32 = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;
/// Code of `cuInit` and others: no device.
pub(super) const NO_DEVICE: u32 = sys::CUresult::CUDA_ERROR_NO_DEVICE as u32;
/// Code of `cuEventQuery`: the work in front is not done.
pub(super) const NOT_READY: u32 = sys::CUresult::CUDA_ERROR_NOT_READY as u32;
/// Attributes: compute capability.
pub(super) const CAPABILITY_MAJOR: sys::CUdevice_attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
/// See [`CAPABILITY_MAJOR`].
pub(super) const CAPABILITY_MINOR: sys::CUdevice_attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
/// Attribute: whether addresses and physical memory can be had apart.
pub(super) const VIRTUAL_MEMORY_MANAGEMENT: sys::CUdevice_attribute =
    sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
/// Attribute: whether the device has stream-ordered pools.
pub(super) const MEMORY_POOLS: sys::CUdevice_attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
/// Attribute of a pool: hand out what happens to be free by now.
pub(super) const POOL_REUSE_BY_CHANCE: CUmemPoolAttribute = CUmemPoolAttribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC;
/// Attribute of a pool: make streams wait so that memory can be handed out.
pub(super) const POOL_REUSE_BY_OWN_WAITS: CUmemPoolAttribute = CUmemPoolAttribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
/// Attribute of a pool: what it may hold on to.
pub(super) const POOL_RELEASE_THRESHOLD: CUmemPoolAttribute = CUmemPoolAttribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
/// Attribute of a pool: what it holds from the device.
pub(super) const POOL_RESERVED: CUmemPoolAttribute = CUmemPoolAttribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
/// The most that [`POOL_RESERVED`] ever was.
pub(super) const POOL_RESERVED_HIGH: CUmemPoolAttribute = CUmemPoolAttribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH;
/// Attribute of a pool: what it has handed out.
pub(super) const POOL_USED: CUmemPoolAttribute = CUmemPoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
/// The most that [`POOL_USED`] ever was.
pub(super) const POOL_USED_HIGH: CUmemPoolAttribute = CUmemPoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
/// Option of `cuMemGetAllocationGranularity`: the least that works.
pub(super) const MINIMUM_GRANULARITY: sys::CUmemAllocationGranularity_flags =
    sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
/// Flag of `cuMemSetAccess`.
pub(super) const READ_AND_WRITE: sys::CUmemAccess_flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
/// Flag of `cuStreamCreate`: no implicit synchronization with the default stream.
pub(super) const STREAM_NON_BLOCKING: c_uint = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
/// Flag of `cuEventCreate`: with timing, and a host that waits by spinning.
pub(super) const EVENT_DEFAULT: c_uint = sys::CUevent_flags::CU_EVENT_DEFAULT as c_uint;

/// The place "this device".
pub(super) fn location_of(device: CUdevice) -> CUmemLocation {
    CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

/// Physical memory of a device, shared with no other process.
pub(super) fn pinned_on(device: CUdevice) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: location_of(device),
        win32HandleMetaData: ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 { compressionType: 0, gpuDirectRDMACapable: 0, usage: 0, reserved: [0; 4] },
    }
}

/// A pool of pinned memory of a device, shared with no other process and without a limit.
pub(super) fn pool_on(device: CUdevice) -> CUmemPoolProps {
    CUmemPoolProps {
        allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        handleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: location_of(device),
        win32SecurityAttributes: ptr::null_mut(),
        maxSize: 0,
        usage: 0,
        reserved: [0; 54],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn never_called() -> u32 {
        0
    }

    /// Looks every function up in a library that lacks some.
    fn look_up_without(missing: &'static [&'static str]) -> Result<Driver, Vec<&'static str>> {
        let find = |name: &str| (!missing.contains(&name)).then(|| NonNull::new(never_called as *mut c_void)).flatten();
        // SAFETY: nothing of the table is ever called.
        unsafe { Driver::look_up(find) }
    }

    #[test]
    fn a_library_with_every_function_gives_a_table() {
        assert!(look_up_without(&[]).is_ok());
    }

    #[test]
    fn every_missing_function_is_named() {
        let missing = look_up_without(&["cuInit", "cuDeviceGetUuid_v2", "cuLaunchKernel"]).expect_err("functions are missing");
        assert_eq!(missing, ["cuInit", "cuDeviceGetUuid_v2", "cuLaunchKernel"]);
        let sentence = missing_functions(&missing).to_string();
        assert_eq!(
            sentence,
            "CUDA driver (libcuda.so.1): it lacks cuInit, cuDeviceGetUuid_v2, cuLaunchKernel: the driver is too old, install one for \
             CUDA 12 or later (525 or newer)"
        );
    }
}
