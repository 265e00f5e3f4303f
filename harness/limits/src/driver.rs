//! Functions of the driver, for programs that call it themselves, and for libraries whose runtime is linked into them.
#![allow(non_snake_case, reason = "wrappers have the names of the functions")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use harness_allocator::units::Bytes;
use harness_gpu_settings::arrays::{ArrayDescriptor, FlatDescriptor};
use harness_gpu_settings::calls::{FaultyCall, SlowCall};

use crate::accounts::Kind;
use crate::limiter::{OUT_OF_MEMORY, SUCCESS, limiter};
use crate::real::{functions, inside, is_inside, real};

/// The kind of a location in `CUmemAllocationProp` that is a device, and where it stands, in words of 32 bits.
const ON_DEVICE: c_int = 1;
const LOCATION: usize = 2;
/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD_STREAM: c_ulonglong = 2;
/// Versions of a function that are wrapped, the one first that programs get without a version.
const VERSIONS: [&str; 2] = ["_v2", ""];
/// The same of a function for programs whose default stream is that of the thread.
const PER_THREAD_VERSIONS: [&str; 3] = ["_ptsz", "_v2", ""];
/// Room for the name of a function with its version: names that are wrapped are shorter.
const ROOM: usize = 64;

type AllocateInOrder = unsafe extern "C" fn(*mut usize, usize, usize) -> c_int;
type AllocateFromPool = unsafe extern "C" fn(*mut usize, usize, usize, usize) -> c_int;
type FreeInOrder = unsafe extern "C" fn(usize, usize) -> c_int;

functions! {
    cuMemAllocManaged: unsafe extern "C" fn(*mut usize, usize, c_uint) -> c_int,
    cuMemAllocPitch_v2: unsafe extern "C" fn(*mut usize, *mut usize, usize, usize, c_uint) -> c_int,
    cuArrayCreate_v2: unsafe extern "C" fn(*mut usize, *const FlatDescriptor) -> c_int,
    cuArray3DCreate_v2: unsafe extern "C" fn(*mut usize, *const ArrayDescriptor) -> c_int,
    cuArrayDestroy: unsafe extern "C" fn(usize) -> c_int,
    cuMipmappedArrayCreate: unsafe extern "C" fn(*mut usize, *const ArrayDescriptor, c_uint) -> c_int,
    cuMipmappedArrayDestroy: unsafe extern "C" fn(usize) -> c_int,
    cuMemAlloc_v2: unsafe extern "C" fn(*mut usize, usize) -> c_int,
    cuMemFree_v2: unsafe extern "C" fn(usize) -> c_int,
    cuMemAllocAsync: AllocateInOrder,
    cuMemAllocAsync_ptsz: AllocateInOrder,
    cuMemAllocFromPoolAsync: AllocateFromPool,
    cuMemAllocFromPoolAsync_ptsz: AllocateFromPool,
    cuMemFreeAsync: FreeInOrder,
    cuMemFreeAsync_ptsz: FreeInOrder,
    cuMemCreate: unsafe extern "C" fn(*mut u64, usize, *const c_int, c_ulonglong) -> c_int,
    cuMemRelease: unsafe extern "C" fn(u64) -> c_int,
    cuMemRetainAllocationHandle: unsafe extern "C" fn(*mut u64, usize) -> c_int,
    cuMemMap: unsafe extern "C" fn(usize, usize, usize, u64, c_ulonglong) -> c_int,
    cuMemUnmap: unsafe extern "C" fn(usize, usize) -> c_int,
    cuMemGetInfo_v2: unsafe extern "C" fn(*mut usize, *mut usize) -> c_int,
    cuDeviceTotalMem_v2: unsafe extern "C" fn(*mut usize, c_int) -> c_int,
    cuGetProcAddress: unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, c_ulonglong) -> c_int,
    cuGetProcAddress_v2: unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, c_ulonglong, *mut c_int) -> c_int,
}

/// Gets device memory by a call that writes its address.
///
/// # Safety
/// The address may be written.
unsafe fn allocate((call, kind): (FaultyCall, Kind), (address, size): (*mut usize, usize), get: impl FnOnce() -> c_int) -> c_int {
    // A size of zero is an error, and the driver's to tell.
    if is_inside() || size == 0 || address.is_null() {
        return get();
    }
    let got = limiter().allocate((call, kind, size), || {
        let code = get();
        // SAFETY: as the caller promises; where the call failed, it is not looked at.
        (code, if code == SUCCESS { unsafe { *address as u64 } } else { 0 })
    });
    got.unwrap_or(OUT_OF_MEMORY)
}

unsafe extern "C" fn cuMemAlloc_v2(address: *mut usize, size: usize) -> c_int {
    let get = || real!(cuMemAlloc_v2(address, size));
    // SAFETY: the program passes a pointer to a pointer.
    unsafe { allocate((FaultyCall::Malloc, Kind::Pages), (address, size), get) }
}

/// Its pages may lie on the host too; all of them are charged.
unsafe extern "C" fn cuMemAllocManaged(address: *mut usize, size: usize, flags: c_uint) -> c_int {
    let get = || real!(cuMemAllocManaged(address, size, flags));
    // SAFETY: the program passes a pointer to a pointer.
    unsafe { allocate((FaultyCall::Malloc, Kind::Pages), (address, size), get) }
}

/// The driver says how long its rows are; until then they are taken for as long as the program asks for.
unsafe extern "C" fn cuMemAllocPitch_v2(address: *mut usize, pitch: *mut usize, width: usize, height: usize, element: c_uint) -> c_int {
    let get = || real!(cuMemAllocPitch_v2(address, pitch, width, height, element));
    // SAFETY: the program passes a pointer to a pointer.
    let code = unsafe { allocate((FaultyCall::Malloc, Kind::Pages), (address, width.saturating_mul(height)), get) };
    if code == SUCCESS && !is_inside() && !address.is_null() && !pitch.is_null() {
        // SAFETY: the driver wrote both.
        unsafe { limiter().correct(*address as u64, (*pitch).saturating_mul(height)) };
    }
    code
}

/// Gets an array of so many bytes; where that is not known, it is not charged.
///
/// # Safety
/// The handle may be written.
unsafe fn create_array(array: *mut usize, bytes: Option<Bytes>, get: impl FnOnce() -> c_int) -> c_int {
    match bytes {
        // SAFETY: as the caller promises.
        Some(bytes) => unsafe { allocate((FaultyCall::Malloc, Kind::Pages), (array, bytes.0 as usize), get) },
        None => get(),
    }
}

unsafe extern "C" fn cuArrayCreate_v2(array: *mut usize, descriptor: *const FlatDescriptor) -> c_int {
    // SAFETY: the program passes a description, or null, which the driver refuses.
    let bytes = unsafe { descriptor.as_ref() }.and_then(|descriptor| ArrayDescriptor::from(*descriptor).bytes(1));
    let get = || real!(cuArrayCreate_v2(array, descriptor));
    // SAFETY: the program passes a pointer to a handle.
    unsafe { create_array(array, bytes, get) }
}

unsafe extern "C" fn cuArray3DCreate_v2(array: *mut usize, descriptor: *const ArrayDescriptor) -> c_int {
    // SAFETY: as for the other function.
    let bytes = unsafe { descriptor.as_ref() }.and_then(|descriptor| descriptor.bytes(1));
    let get = || real!(cuArray3DCreate_v2(array, descriptor));
    // SAFETY: the program passes a pointer to a handle.
    unsafe { create_array(array, bytes, get) }
}

unsafe extern "C" fn cuMipmappedArrayCreate(array: *mut usize, descriptor: *const ArrayDescriptor, levels: c_uint) -> c_int {
    // SAFETY: as for the other functions.
    let bytes = unsafe { descriptor.as_ref() }.and_then(|descriptor| descriptor.bytes(levels));
    let get = || real!(cuMipmappedArrayCreate(array, descriptor, levels));
    // SAFETY: the program passes a pointer to a handle.
    unsafe { create_array(array, bytes, get) }
}

unsafe extern "C" fn cuArrayDestroy(array: usize) -> c_int {
    if is_inside() { real!(cuArrayDestroy(array)) } else { limiter().free(SlowCall::Free, array as u64, || real!(cuArrayDestroy(array))) }
}

unsafe extern "C" fn cuMipmappedArrayDestroy(array: usize) -> c_int {
    let destroy = || real!(cuMipmappedArrayDestroy(array));
    if is_inside() { destroy() } else { limiter().free(SlowCall::Free, array as u64, destroy) }
}

unsafe extern "C" fn cuMemFree_v2(address: usize) -> c_int {
    if is_inside() { real!(cuMemFree_v2(address)) } else { limiter().free(SlowCall::Free, address as u64, || real!(cuMemFree_v2(address))) }
}

/// Calls in the order of a stream, as the default stream of the process or of the thread.
macro_rules! in_order {
    ($allocate:ident, $allocate_from_pool:ident, $free:ident) => {
        unsafe extern "C" fn $allocate(address: *mut usize, size: usize, stream: usize) -> c_int {
            let get = || real!($allocate(address, size, stream));
            // SAFETY: the program passes a pointer to a pointer.
            unsafe { allocate((FaultyCall::MallocAsync, Kind::Pooled), (address, size), get) }
        }

        unsafe extern "C" fn $allocate_from_pool(address: *mut usize, size: usize, pool: usize, stream: usize) -> c_int {
            let get = || real!($allocate_from_pool(address, size, pool, stream));
            // SAFETY: the program passes a pointer to a pointer.
            unsafe { allocate((FaultyCall::MallocAsync, Kind::Pooled), (address, size), get) }
        }

        unsafe extern "C" fn $free(address: usize, stream: usize) -> c_int {
            let free = || real!($free(address, stream));
            if is_inside() { free() } else { limiter().free(SlowCall::FreeAsync, address as u64, free) }
        }
    };
}

in_order!(cuMemAllocAsync, cuMemAllocFromPoolAsync, cuMemFreeAsync);
in_order!(cuMemAllocAsync_ptsz, cuMemAllocFromPoolAsync_ptsz, cuMemFreeAsync_ptsz);

unsafe extern "C" fn cuMemCreate(handle: *mut u64, size: usize, properties: *const c_int, flags: c_ulonglong) -> c_int {
    let get = || real!(cuMemCreate(handle, size, properties, flags));
    // SAFETY: the program passes a structure that begins with words of 32 bits, or null, which the driver refuses.
    let is_on_device = !properties.is_null() && unsafe { *properties.add(LOCATION) } == ON_DEVICE;
    if is_inside() || !is_on_device || handle.is_null() {
        return get();
    }
    let got = limiter().create(size, || {
        let code = get();
        // SAFETY: the driver wrote it; where the call failed, it is not looked at.
        (code, if code == SUCCESS { unsafe { *handle } } else { 0 })
    });
    got.unwrap_or(OUT_OF_MEMORY)
}

unsafe extern "C" fn cuMemRelease(handle: u64) -> c_int {
    if is_inside() { real!(cuMemRelease(handle)) } else { limiter().release(handle, || real!(cuMemRelease(handle))) }
}

unsafe extern "C" fn cuMemRetainAllocationHandle(handle: *mut u64, address: usize) -> c_int {
    let code = inside(|| real!(cuMemRetainAllocationHandle(handle, address)));
    if code == SUCCESS && !is_inside() {
        // SAFETY: the driver wrote it.
        limiter().retain(unsafe { *handle });
    }
    code
}

unsafe extern "C" fn cuMemMap(address: usize, size: usize, offset: usize, handle: u64, flags: c_ulonglong) -> c_int {
    let code = inside(|| real!(cuMemMap(address, size, offset, handle, flags)));
    if code == SUCCESS && !is_inside() {
        limiter().map(address as u64, handle);
    }
    code
}

unsafe extern "C" fn cuMemUnmap(address: usize, size: usize) -> c_int {
    if !is_inside() {
        limiter().delay(SlowCall::Unmap);
    }
    let code = inside(|| real!(cuMemUnmap(address, size)));
    if code == SUCCESS && !is_inside() {
        limiter().unmap(address as u64, size);
    }
    code
}

unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    let code = inside(|| real!(cuMemGetInfo_v2(free, total)));
    if code == SUCCESS && !is_inside() && !free.is_null() && !total.is_null() {
        // SAFETY: the driver wrote both.
        unsafe { (*free, *total) = limiter().seen(*free, *total) };
    }
    code
}

unsafe extern "C" fn cuDeviceTotalMem_v2(total: *mut usize, device: c_int) -> c_int {
    let code = inside(|| real!(cuDeviceTotalMem_v2(total, device)));
    if code == SUCCESS && !is_inside() && !total.is_null() {
        // SAFETY: the driver wrote it.
        unsafe { *total = limiter().seen(0, *total).1 };
    }
    code
}

unsafe extern "C" fn cuGetProcAddress(name: *const c_char, function: *mut *mut c_void, version: c_int, flags: c_ulonglong) -> c_int {
    let code = real!(cuGetProcAddress(name, function, version, flags));
    // SAFETY: the name is the program's, and the driver wrote the address.
    unsafe { unversioned(code, name, function, flags) }
}

unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: c_ulonglong,
    status: *mut c_int,
) -> c_int {
    let code = real!(cuGetProcAddress_v2(name, function, version, flags, status));
    // SAFETY: as for the other function. One of CUDA 11 is left as it is: it takes fewer arguments than the one of this name with a version.
    if unsafe { version < 12_000 && is_itself(name) } { code } else { unsafe { unversioned(code, name, function, flags) } }
}

/// Whether the function that finds functions is asked for.
///
/// # Safety
/// The name is a string or null.
unsafe fn is_itself(name: *const c_char) -> bool {
    // SAFETY: as the caller promises.
    !name.is_null() && unsafe { CStr::from_ptr(name) } == c"cuGetProcAddress"
}

/// Puts the wrapper in place of a function of the driver that was found by its name without a version, if it has one.
///
/// # Safety
/// Where `code` is success, `name` is a string, and `function` points to the address that was found.
pub(crate) unsafe fn unversioned(code: c_int, name: *const c_char, function: *mut *mut c_void, flags: c_ulonglong) -> c_int {
    if code != SUCCESS || name.is_null() || function.is_null() {
        return code;
    }
    // SAFETY: as the caller promises.
    let (name, real) = unsafe { (CStr::from_ptr(name).to_bytes(), *function) };
    let versions = if flags & PER_THREAD_STREAM != 0 { &PER_THREAD_VERSIONS[..] } else { &VERSIONS[..] };
    let found = versions.iter().find_map(|version| {
        // Without allocating, as in `audit`.
        let (mut room, len) = ([0; ROOM], name.len() + version.len());
        room.get_mut(..name.len())?.copy_from_slice(name);
        room.get_mut(name.len()..len)?.copy_from_slice(version.as_bytes());
        wrapper(&room[..len], real)
    });
    if let Some(found) = found.filter(|_| !real.is_null()) {
        // SAFETY: as the caller promises.
        unsafe { *function = found.address };
    }
    code
}
