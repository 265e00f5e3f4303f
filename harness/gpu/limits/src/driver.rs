//! Functions of the driver, for programs that call it directly and for libraries with a statically
//! linked runtime.
#![allow(non_snake_case, reason = "wrappers have the names of the functions")]

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::mem::MaybeUninit;

use harness_allocator::units::Bytes;
use harness_gpu_settings::arrays::{ArrayDescriptor, FlatDescriptor};
use harness_gpu_settings::calls::Call;
use harness_gpu_settings::ffi::{Out, Text, again, written};

use crate::limiter::{OUT_OF_MEMORY, SUCCESS, limiter};
use crate::nesting::{is_nested, nested};
use crate::real::{self, limit_info, noted, wrap};

const ON_DEVICE: c_int = 1;
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

/// Requests device memory with `get`, which takes the place for the address or handle.
fn allocate(
    call: Call,
    place: Out<'_, usize>,
    size: usize,
    get: impl FnMut(Out<'_, usize>) -> c_int,
) -> c_int {
    real::allocate(call, place, size, get).unwrap_or(OUT_OF_MEMORY)
}

wrap! {
    cuMemAlloc_v2(address: Out<'_, usize>, size: usize) =
        allocate(Call::Malloc, address, size, |address| real(address, size));
    /// Charges the full size, although pages may be on the host.
    cuMemAllocManaged(address: Out<'_, usize>, size: usize, flags: c_uint) =
        allocate(Call::Malloc, address, size, |address| real(address, size, flags));
    cuMemAllocPitch_v2(
        address: Out<'_, usize>, pitch: Out<'_, usize>, width: usize, height: usize, element: c_uint
    ) = allocate_rows(address, pitch, [width, height], |address, pitch| {
        real(address, pitch, width, height, element)
    });
    cuArrayCreate_v2(array: Out<'_, usize>, descriptor: Option<&FlatDescriptor>) =
        create_array(
            array,
            descriptor.and_then(|flat| ArrayDescriptor::from(*flat).bytes(1)),
            |array| real(array, descriptor),
        );
    cuArray3DCreate_v2(array: Out<'_, usize>, descriptor: Option<&ArrayDescriptor>) =
        create_array(array, descriptor.and_then(|descriptor| descriptor.bytes(1)), |array| {
            real(array, descriptor)
        });
    cuMipmappedArrayCreate(
        array: Out<'_, usize>, descriptor: Option<&ArrayDescriptor>, levels: c_uint
    ) =
        create_array(array, descriptor.and_then(|descriptor| descriptor.bytes(levels)), |array| {
            real(array, descriptor, levels)
        });
    cuMemFree_v2, cuArrayDestroy, cuMipmappedArrayDestroy(address: usize) =
        limiter().free(Call::Free, address as u64, || real(address));
    cuMemAllocAsync, cuMemAllocAsync_ptsz(address: Out<'_, usize>, size: usize, stream: usize) =
        allocate(Call::MallocAsync, address, size, |address| real(address, size, stream));
    cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz(
        address: Out<'_, usize>, size: usize, pool: usize, stream: usize
    ) = allocate(Call::MallocAsync, address, size, |address| real(address, size, pool, stream));
    cuMemFreeAsync, cuMemFreeAsync_ptsz(address: usize, stream: usize) =
        limiter().free(Call::FreeAsync, address as u64, || real(address, stream));
    cuMemCreate(
        handle: Out<'_, usize>, size: usize, properties: Option<&AllocationProperties>,
        flags: c_ulonglong
    ) = match properties.is_some_and(|properties| properties.location_kind == ON_DEVICE) {
        true => {
            allocate(Call::Create, handle, size, |handle| real(handle, size, properties, flags))
        }
        false => real(handle, size, properties, flags),
    };
    cuMemRelease(handle: u64) =
        if is_nested() { real(handle) } else { limiter().release(handle, || real(handle)) };
    cuMemRetainAllocationHandle(handle: Out<'_, u64>, address: usize) =
        retain(handle, |handle| real(handle, address));
    cuMemMap(address: usize, size: usize, offset: usize, handle: u64, flags: c_ulonglong) =
        noted(
            || real(address, size, offset, handle, flags),
            || limiter().map(address as u64, handle),
        );
    cuMemUnmap(address: usize, size: usize) = unmap(address, size, || real(address, size));
    cuMemGetInfo_v2(free: Out<'_, usize>, total: Out<'_, usize>) = limit_info(free, total, real);
    cuDeviceTotalMem_v2(total: Out<'_, usize>, device: c_int) =
        limit_info(Some(&mut MaybeUninit::new(0)), total, |_, total| real(total, device));
    cuGetProcAddress(
        name: Text<'_>, function: Option<&mut *mut c_void>, version: c_int, flags: c_ulonglong
    ) = replace_found(name, function, flags, |function| real(name, function, version, flags));
    cuGetProcAddress_v2(
        name: Text<'_>, function: Option<&mut *mut c_void>, version: c_int, flags: c_ulonglong,
        status: *mut c_int
    ) =
        // In CUDA 11 the function of this name has fewer arguments than the wrapper.
        match version < 12_000 && name.get() == Some(c"cuGetProcAddress") {
            true => real(name, function, version, flags, status),
            false => replace_found(name, function, flags, |function| {
                real(name, function, version, flags, status)
            }),
        };
}

/// Charges rows of the requested length, then corrects the charge with the driver's row length.
fn allocate_rows(
    mut address: Out<'_, usize>,
    mut pitch: Out<'_, usize>,
    [width, height]: [usize; 2],
    get: impl Fn(Out<'_, usize>, Out<'_, usize>) -> c_int,
) -> c_int {
    let code = allocate(
        Call::Malloc,
        again(&mut address),
        width.saturating_mul(height),
        |address| get(address, again(&mut pitch)),
    );
    let written = if code == SUCCESS && !is_nested() {
        // SAFETY: the driver wrote both.
        unsafe { written(&address).zip(written(&pitch)) }
    } else {
        None
    };
    if let Some((address, pitch)) = written {
        limiter().correct(address as u64, pitch.saturating_mul(height));
    }
    code
}

/// Creates an array. An array of unknown size is not charged.
fn create_array(
    array: Out<'_, usize>,
    bytes: Option<Bytes>,
    mut create: impl FnMut(Out<'_, usize>) -> c_int,
) -> c_int {
    match bytes {
        Some(bytes) => allocate(Call::Malloc, array, bytes.0 as usize, create),
        None => create(array),
    }
}

fn retain(mut handle: Out<'_, u64>, get: impl FnOnce(Out<'_, u64>) -> c_int) -> c_int {
    let code = nested(|| get(again(&mut handle)));
    if code == SUCCESS && !is_nested() {
        // SAFETY: the driver wrote it.
        unsafe { written(&handle) }
            .into_iter()
            .for_each(|handle| limiter().retain(handle));
    }
    code
}

fn unmap(address: usize, size: usize, unmap: impl FnOnce() -> c_int) -> c_int {
    if !is_nested() {
        limiter().delay(Call::Unmap);
    }
    noted(unmap, || limiter().unmap(address as u64, size))
}

/// Calls a function that finds a driver function by its name without a version, and replaces the
/// result with its wrapper.
pub(crate) fn replace_found(
    name: Text<'_>,
    mut function: Option<&mut *mut c_void>,
    flags: c_ulonglong,
    find: impl FnOnce(Option<&mut *mut c_void>) -> c_int,
) -> c_int {
    let code = find(function.as_deref_mut());
    if let (SUCCESS, Some(name), Some(found)) =
        (code, name.get(), function.filter(|found| !found.is_null()))
    {
        let versions = if flags & PER_THREAD_STREAM != 0 {
            &PER_THREAD_VERSIONS[..]
        } else {
            &VERSIONS[..]
        };
        let wrapper = versions.iter().find_map(|version| {
            // Does not allocate, for the same reason as `audit`.
            let (mut buffer, name) = ([0; LONGEST_NAME], name.to_bytes());
            let len = name.len() + version.len();
            buffer.get_mut(..name.len())?.copy_from_slice(name);
            buffer
                .get_mut(name.len()..len)?
                .copy_from_slice(version.as_bytes());
            wrapper(&buffer[..len], *found)
        });
        if let Some(wrapper) = wrapper {
            *found = wrapper.address;
        }
    }
    code
}
