//! Compares the declarations with cudarc's, and checks the errors for unusable drivers.

use std::ffi::c_void;
use std::mem::offset_of;
use std::ptr::NonNull;

use cudarc::driver::sys;

use super::super::types;
use super::*;
use crate::library::argument_sizes;

macro_rules! sizes_in_cudarc {
    ($( $function:ident($($argument:ty),*) ),* $(,)?) => {
        vec![$( (stringify!($function), argument_sizes::of(sys::$function as unsafe fn($($argument),*) -> _)) ),*]
    };
}

#[test]
fn every_function_has_the_arguments_that_cudarc_declares() {
    let cudarc = sizes_in_cudarc![
        cuInit(_),
        cuDriverGetVersion(_),
        cuDeviceGetCount(_),
        cuDeviceGet(_, _),
        cuDeviceGetName(_, _, _),
        cuDeviceTotalMem_v2(_, _),
        cuDeviceGetAttribute(_, _, _),
        cuDeviceGetUuid_v2(_, _),
        cuDevicePrimaryCtxRetain(_, _),
        cuDevicePrimaryCtxRelease_v2(_),
        cuCtxSetCurrent(_),
        cuCtxGetCurrent(_),
        cuCtxSynchronize(),
        cuMemGetInfo_v2(_, _),
        cuMemAlloc_v2(_, _),
        cuMemFree_v2(_),
        cuMemAddressReserve(_, _, _, _, _),
        cuMemAddressFree(_, _),
        cuMemGetAllocationGranularity(_, _, _),
        cuMemCreate(_, _, _, _),
        cuMemRelease(_),
        cuMemMap(_, _, _, _, _),
        cuMemSetAccess(_, _, _, _),
        cuMemUnmap(_, _),
        cuMemPoolCreate(_, _),
        cuMemPoolDestroy(_),
        cuMemPoolGetAttribute(_, _, _),
        cuMemPoolSetAttribute(_, _, _),
        cuMemPoolTrimTo(_, _),
        cuMemAllocFromPoolAsync(_, _, _, _),
        cuMemFreeAsync(_, _),
        cuMemcpyDtoHAsync_v2(_, _, _, _),
        cuMemcpyHtoDAsync_v2(_, _, _, _),
        cuMemHostAlloc(_, _, _),
        cuMemFreeHost(_),
        cuMemsetD8Async(_, _, _, _),
        cuStreamCreate(_, _),
        cuStreamDestroy_v2(_),
        cuStreamGetCtx(_, _),
        cuStreamSynchronize(_),
        cuStreamWaitEvent(_, _, _),
        cuEventCreate(_, _),
        cuEventDestroy_v2(_),
        cuEventRecord(_, _),
        cuEventQuery(_),
        cuEventSynchronize(_),
        cuEventElapsedTime(_, _, _),
        cuModuleLoadData(_, _),
        cuModuleUnload(_),
        cuModuleGetFunction(_, _, _),
        cuModuleGetGlobal_v2(_, _, _, _),
        cuLaunchKernel(_, _, _, _, _, _, _, _, _, _, _),
    ];
    assert_eq!(Driver::argument_sizes(), cudarc);
}

#[test]
fn every_struct_is_laid_out_as_cudarc_declares_it() {
    assert_eq!(size_of::<types::CUuuid>(), size_of::<sys::CUuuid>());
    assert_eq!(
        (size_of::<CUmemLocation>(), offset_of!(CUmemLocation, id)),
        (size_of::<sys::CUmemLocation>(), offset_of!(sys::CUmemLocation, id))
    );
    let (ours, theirs) = (size_of::<CUmemAllocationProp>(), size_of::<sys::CUmemAllocationProp>());
    assert_eq!(ours, theirs);
    assert_eq!(offset_of!(CUmemAllocationProp, handle_types), offset_of!(sys::CUmemAllocationProp, requestedHandleTypes));
    assert_eq!(offset_of!(CUmemAllocationProp, location), offset_of!(sys::CUmemAllocationProp, location));
    assert_eq!(offset_of!(CUmemAllocationProp, win32_handle_metadata), offset_of!(sys::CUmemAllocationProp, win32HandleMetaData));
    assert_eq!(offset_of!(CUmemAllocationProp, flags), offset_of!(sys::CUmemAllocationProp, allocFlags));
    let (ours, theirs) = (size_of::<CUmemAccessDesc>(), size_of::<sys::CUmemAccessDesc>());
    assert_eq!((ours, offset_of!(CUmemAccessDesc, flags)), (theirs, offset_of!(sys::CUmemAccessDesc, flags)));
    let (ours, theirs) = (size_of::<CUmemPoolProps>(), size_of::<sys::CUmemPoolProps>());
    assert_eq!(ours, theirs);
    assert_eq!(offset_of!(CUmemPoolProps, handle_types), offset_of!(sys::CUmemPoolProps, handleTypes));
    assert_eq!(offset_of!(CUmemPoolProps, location), offset_of!(sys::CUmemPoolProps, location));
    assert_eq!(offset_of!(CUmemPoolProps, win32_security_attributes), offset_of!(sys::CUmemPoolProps, win32SecurityAttributes));
    assert_eq!(offset_of!(CUmemPoolProps, max_size), offset_of!(sys::CUmemPoolProps, maxSize));
    assert_eq!(offset_of!(CUmemPoolProps, usage), offset_of!(sys::CUmemPoolProps, usage));
    assert_eq!(offset_of!(CUmemPoolProps, reserved), offset_of!(sys::CUmemPoolProps, reserved));
}

#[test]
fn every_constant_is_the_one_that_cudarc_declares() {
    use sys::CUdevice_attribute as Attribute;
    use sys::CUmemPool_attribute as Pool;
    use sys::CUresult as Code;
    let pairs = [
        (OUT_OF_MEMORY, Code::CUDA_ERROR_OUT_OF_MEMORY as u32),
        (NO_DEVICE, Code::CUDA_ERROR_NO_DEVICE as u32),
        (NOT_READY, Code::CUDA_ERROR_NOT_READY as u32),
        (CAPABILITY_MAJOR, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as u32),
        (CAPABILITY_MINOR, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as u32),
        (VIRTUAL_MEMORY_MANAGEMENT, Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED as u32),
        (MEMORY_POOLS, Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED as u32),
        (POOL_REUSE_BY_CHANCE, Pool::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC as u32),
        (POOL_REUSE_BY_OWN_WAITS, Pool::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES as u32),
        (POOL_RELEASE_THRESHOLD, Pool::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as u32),
        (POOL_RESERVED, Pool::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT as u32),
        (POOL_RESERVED_HIGH, Pool::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH as u32),
        (POOL_USED, Pool::CU_MEMPOOL_ATTR_USED_MEM_CURRENT as u32),
        (POOL_USED_HIGH, Pool::CU_MEMPOOL_ATTR_USED_MEM_HIGH as u32),
        (MINIMUM_GRANULARITY, sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM as u32),
        (READ_AND_WRITE, sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u32),
        (ON_DEVICE, sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32),
        (PINNED, sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32),
        (STREAM_NON_BLOCKING, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32),
        (EVENT_WITH_TIMING, sys::CUevent_flags::CU_EVENT_DEFAULT as u32),
        (EVENT_WITHOUT_TIMING, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32),
    ];
    assert_eq!(NOT_SHARED, sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE.0);
    for (index, (ours, theirs)) in pairs.into_iter().enumerate() {
        assert_eq!(ours, theirs, "constant {index}");
    }
}

extern "C" fn never_called() -> u32 {
    0
}

/// Looks up every function in a library that lacks some.
fn look_up_without(missing: &'static [&'static str]) -> Driver {
    let find = |name: &str| (!missing.contains(&name)).then(|| NonNull::new(never_called as *mut c_void)).flatten();
    // SAFETY: no function of the table is ever called.
    unsafe { Driver::look_up(find) }
}

#[test]
fn every_missing_function_is_named() {
    assert_eq!(look_up_without(&[]).missing(), [""; 0]);
    let missing = look_up_without(&["cuInit", "cuDeviceGetUuid_v2", "cuLaunchKernel"]).missing();
    assert_eq!(missing, ["cuInit", "cuDeviceGetUuid_v2", "cuLaunchKernel"]);
    let sentence = missing_functions(&missing).to_string();
    assert_eq!(
        sentence,
        "CUDA driver (libcuda.so.1): it lacks cuInit, cuDeviceGetUuid_v2, cuLaunchKernel: the driver is too old, install one for \
         CUDA 12 or later (525 or newer)"
    );
}

#[test]
fn a_missing_driver_and_an_unloadable_one_have_different_errors() {
    let absent = not_loaded(&LoadError::Absent).to_string();
    assert!(absent.starts_with("CUDA driver (libcuda.so.1): no such library is on the loader's path, so no GPU can be used"), "{absent}");
    let broken = not_loaded(&LoadError::Unloadable("libcuda.so.1: file too short".to_owned())).to_string();
    assert!(
        broken.starts_with("CUDA driver (libcuda.so.1): the library exists but cannot be loaded: libcuda.so.1: file too short; "),
        "{broken}"
    );
}
