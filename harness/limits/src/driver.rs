//! Functions of the driver, for programs that call it directly and for libraries with a statically linked runtime.
#![allow(non_snake_case, reason = "wrappers have the names of the functions")]

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use harness_allocator::units::Bytes;
use harness_gpu_settings::arrays::{ArrayDescriptor, FlatDescriptor};
use harness_gpu_settings::calls::Call;
use harness_gpu_settings::ffi::{Out, Text, again, written};

use crate::limiter::{OUT_OF_MEMORY, SUCCESS, limiter};
use crate::real::{self, functions, is_nested, limit_info, nested, real};

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_DEVICE: c_int = 1;
/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD_STREAM: c_ulonglong = 2;
/// Suffixes of wrapped functions; programs that ask for no version get the first.
const VERSIONS: [&str; 2] = ["_v2", ""];
/// The same for programs whose default stream is per thread.
const PER_THREAD_VERSIONS: [&str; 3] = ["_ptsz", "_v2", ""];
/// Longer than any wrapped name with its suffix.
const LONGEST_NAME: usize = 64;

/// The start of `CUmemAllocationProp`.
#[repr(C)]
struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
}

type AllocateInOrder = unsafe extern "C" fn(Out<'_, usize>, usize, usize) -> c_int;
type AllocateFromPool = unsafe extern "C" fn(Out<'_, usize>, usize, usize, usize) -> c_int;
type FreeInOrder = unsafe extern "C" fn(usize, usize) -> c_int;

functions! {
    cuMemAllocManaged: unsafe extern "C" fn(Out<'_, usize>, usize, c_uint) -> c_int,
    cuMemAllocPitch_v2: unsafe extern "C" fn(Out<'_, usize>, Out<'_, usize>, usize, usize, c_uint) -> c_int,
    cuArrayCreate_v2: unsafe extern "C" fn(Out<'_, usize>, Option<&FlatDescriptor>) -> c_int,
    cuArray3DCreate_v2: unsafe extern "C" fn(Out<'_, usize>, Option<&ArrayDescriptor>) -> c_int,
    cuArrayDestroy: unsafe extern "C" fn(usize) -> c_int,
    cuMipmappedArrayCreate: unsafe extern "C" fn(Out<'_, usize>, Option<&ArrayDescriptor>, c_uint) -> c_int,
    cuMipmappedArrayDestroy: unsafe extern "C" fn(usize) -> c_int,
    cuMemAlloc_v2: unsafe extern "C" fn(Out<'_, usize>, usize) -> c_int,
    cuMemFree_v2: unsafe extern "C" fn(usize) -> c_int,
    cuMemAllocAsync: AllocateInOrder,
    cuMemAllocAsync_ptsz: AllocateInOrder,
    cuMemAllocFromPoolAsync: AllocateFromPool,
    cuMemAllocFromPoolAsync_ptsz: AllocateFromPool,
    cuMemFreeAsync: FreeInOrder,
    cuMemFreeAsync_ptsz: FreeInOrder,
    cuMemCreate: unsafe extern "C" fn(Out<'_, usize>, usize, Option<&AllocationProperties>, c_ulonglong) -> c_int,
    cuMemRelease: unsafe extern "C" fn(u64) -> c_int,
    cuMemRetainAllocationHandle: unsafe extern "C" fn(Out<'_, u64>, usize) -> c_int,
    cuMemMap: unsafe extern "C" fn(usize, usize, usize, u64, c_ulonglong) -> c_int,
    cuMemUnmap: unsafe extern "C" fn(usize, usize) -> c_int,
    cuMemGetInfo_v2: unsafe extern "C" fn(Out<'_, usize>, Out<'_, usize>) -> c_int,
    cuDeviceTotalMem_v2: unsafe extern "C" fn(Out<'_, usize>, c_int) -> c_int,
    cuGetProcAddress: unsafe extern "C" fn(Text<'_>, Option<&mut *mut c_void>, c_int, c_ulonglong) -> c_int,
    cuGetProcAddress_v2: unsafe extern "C" fn(Text<'_>, Option<&mut *mut c_void>, c_int, c_ulonglong, *mut c_int) -> c_int,
}

/// Requests device memory with `get`, which takes the place for the address or handle.
fn allocate(call: Call, place: Out<'_, usize>, size: usize, get: impl FnMut(Out<'_, usize>) -> c_int) -> c_int {
    real::allocate(call, place, size, get).unwrap_or(OUT_OF_MEMORY)
}

extern "C" fn cuMemAlloc_v2(address: Out<'_, usize>, size: usize) -> c_int {
    allocate(Call::Malloc, address, size, |address| real!(cuMemAlloc_v2(address, size)))
}

/// Charges the full size, although pages may be on the host.
extern "C" fn cuMemAllocManaged(address: Out<'_, usize>, size: usize, flags: c_uint) -> c_int {
    allocate(Call::Malloc, address, size, |address| real!(cuMemAllocManaged(address, size, flags)))
}

/// Charges rows of the requested length, then corrects the charge with the driver's row length.
extern "C" fn cuMemAllocPitch_v2(
    mut address: Out<'_, usize>,
    mut pitch: Out<'_, usize>,
    width: usize,
    height: usize,
    element: c_uint,
) -> c_int {
    let get = |address: Out<'_, usize>| real!(cuMemAllocPitch_v2(address, again(&mut pitch), width, height, element));
    let code = allocate(Call::Malloc, again(&mut address), width.saturating_mul(height), get);
    // SAFETY: the driver wrote both.
    let written = if code == SUCCESS && !is_nested() { unsafe { written(&address).zip(written(&pitch)) } } else { None };
    if let Some((address, pitch)) = written {
        limiter().correct(address as u64, pitch.saturating_mul(height));
    }
    code
}

/// Creates an array. An array of unknown size is not charged.
fn create_array(array: Out<'_, usize>, bytes: Option<Bytes>, mut create: impl FnMut(Out<'_, usize>) -> c_int) -> c_int {
    match bytes {
        Some(bytes) => allocate(Call::Malloc, array, bytes.0 as usize, create),
        None => create(array),
    }
}

extern "C" fn cuArrayCreate_v2(array: Out<'_, usize>, descriptor: Option<&FlatDescriptor>) -> c_int {
    let bytes = descriptor.and_then(|descriptor| ArrayDescriptor::from(*descriptor).bytes(1));
    create_array(array, bytes, |array| real!(cuArrayCreate_v2(array, descriptor)))
}

extern "C" fn cuArray3DCreate_v2(array: Out<'_, usize>, descriptor: Option<&ArrayDescriptor>) -> c_int {
    let bytes = descriptor.and_then(|descriptor| descriptor.bytes(1));
    create_array(array, bytes, |array| real!(cuArray3DCreate_v2(array, descriptor)))
}

extern "C" fn cuMipmappedArrayCreate(array: Out<'_, usize>, descriptor: Option<&ArrayDescriptor>, levels: c_uint) -> c_int {
    let bytes = descriptor.and_then(|descriptor| descriptor.bytes(levels));
    create_array(array, bytes, |array| real!(cuMipmappedArrayCreate(array, descriptor, levels)))
}

extern "C" fn cuArrayDestroy(array: usize) -> c_int {
    limiter().free(Call::Free, array as u64, || real!(cuArrayDestroy(array)))
}

extern "C" fn cuMipmappedArrayDestroy(array: usize) -> c_int {
    limiter().free(Call::Free, array as u64, || real!(cuMipmappedArrayDestroy(array)))
}

extern "C" fn cuMemFree_v2(address: usize) -> c_int {
    limiter().free(Call::Free, address as u64, || real!(cuMemFree_v2(address)))
}

/// Stream-ordered functions, for the default stream of the process or of the thread.
macro_rules! in_order {
    ($allocate:ident, $allocate_from_pool:ident, $free:ident) => {
        extern "C" fn $allocate(address: Out<'_, usize>, size: usize, stream: usize) -> c_int {
            allocate(Call::MallocAsync, address, size, |address| real!($allocate(address, size, stream)))
        }

        extern "C" fn $allocate_from_pool(address: Out<'_, usize>, size: usize, pool: usize, stream: usize) -> c_int {
            let get = |address: Out<'_, usize>| real!($allocate_from_pool(address, size, pool, stream));
            allocate(Call::MallocAsync, address, size, get)
        }

        extern "C" fn $free(address: usize, stream: usize) -> c_int {
            limiter().free(Call::FreeAsync, address as u64, || real!($free(address, stream)))
        }
    };
}

in_order!(cuMemAllocAsync, cuMemAllocFromPoolAsync, cuMemFreeAsync);
in_order!(cuMemAllocAsync_ptsz, cuMemAllocFromPoolAsync_ptsz, cuMemFreeAsync_ptsz);

extern "C" fn cuMemCreate(handle: Out<'_, usize>, size: usize, properties: Option<&AllocationProperties>, flags: c_ulonglong) -> c_int {
    let get = |handle: Out<'_, usize>| real!(cuMemCreate(handle, size, properties, flags));
    match properties.is_some_and(|properties| properties.location_kind == ON_DEVICE) {
        true => allocate(Call::Create, handle, size, get),
        false => get(handle),
    }
}

extern "C" fn cuMemRelease(handle: u64) -> c_int {
    if is_nested() { real!(cuMemRelease(handle)) } else { limiter().release(handle, || real!(cuMemRelease(handle))) }
}

extern "C" fn cuMemRetainAllocationHandle(mut handle: Out<'_, u64>, address: usize) -> c_int {
    let code = nested(|| real!(cuMemRetainAllocationHandle(again(&mut handle), address)));
    if code == SUCCESS && !is_nested() {
        // SAFETY: the driver wrote it.
        unsafe { written(&handle) }.into_iter().for_each(|handle| limiter().retain(handle));
    }
    code
}

extern "C" fn cuMemMap(address: usize, size: usize, offset: usize, handle: u64, flags: c_ulonglong) -> c_int {
    let code = nested(|| real!(cuMemMap(address, size, offset, handle, flags)));
    if code == SUCCESS && !is_nested() {
        limiter().map(address as u64, handle);
    }
    code
}

extern "C" fn cuMemUnmap(address: usize, size: usize) -> c_int {
    if !is_nested() {
        limiter().delay(Call::Unmap);
    }
    let code = nested(|| real!(cuMemUnmap(address, size)));
    if code == SUCCESS && !is_nested() {
        limiter().unmap(address as u64, size);
    }
    code
}

extern "C" fn cuMemGetInfo_v2(free: Out<'_, usize>, total: Out<'_, usize>) -> c_int {
    limit_info(free, total, |free, total| real!(cuMemGetInfo_v2(free, total)))
}

extern "C" fn cuDeviceTotalMem_v2(total: Out<'_, usize>, device: c_int) -> c_int {
    let mut free = std::mem::MaybeUninit::new(0);
    limit_info(Some(&mut free), total, |_, total| real!(cuDeviceTotalMem_v2(total, device)))
}

extern "C" fn cuGetProcAddress(name: Text<'_>, function: Option<&mut *mut c_void>, version: c_int, flags: c_ulonglong) -> c_int {
    replace_found(name, function, flags, |function| real!(cuGetProcAddress(name, function, version, flags)))
}

extern "C" fn cuGetProcAddress_v2(
    name: Text<'_>,
    function: Option<&mut *mut c_void>,
    version: c_int,
    flags: c_ulonglong,
    status: *mut c_int,
) -> c_int {
    let find = |function: Option<&mut *mut c_void>| real!(cuGetProcAddress_v2(name, function, version, flags, status));
    // In CUDA 11 the function of this name has fewer arguments than the wrapper.
    let is_old_version_of_this = version < 12_000 && name.get() == Some(c"cuGetProcAddress");
    if is_old_version_of_this { find(function) } else { replace_found(name, function, flags, find) }
}

/// Calls a function that finds a driver function by its name without a version, and replaces the result with its wrapper.
pub(crate) fn replace_found(
    name: Text<'_>,
    mut function: Option<&mut *mut c_void>,
    flags: c_ulonglong,
    find: impl FnOnce(Option<&mut *mut c_void>) -> c_int,
) -> c_int {
    let code = find(function.as_deref_mut());
    if let (SUCCESS, Some(name), Some(found)) = (code, name.get(), function.filter(|found| !found.is_null())) {
        let versions = if flags & PER_THREAD_STREAM != 0 { &PER_THREAD_VERSIONS[..] } else { &VERSIONS[..] };
        let wrapper = versions.iter().find_map(|version| {
            // Does not allocate, for the same reason as `audit`.
            let (mut buffer, name) = ([0; LONGEST_NAME], name.to_bytes());
            let len = name.len() + version.len();
            buffer.get_mut(..name.len())?.copy_from_slice(name);
            buffer.get_mut(name.len()..len)?.copy_from_slice(version.as_bytes());
            wrapper(&buffer[..len], *found)
        });
        if let Some(wrapper) = wrapper {
            *found = wrapper.address;
        }
    }
    code
}
