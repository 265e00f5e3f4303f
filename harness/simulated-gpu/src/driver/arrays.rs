//! Managed and pitched memory, and arrays, each charged as an allocation of the device: managed memory all of it, as if it were used there alone, and an
//! array by the bytes of its elements.

use std::ffi::{c_int, c_uint};

use harness_allocator::units::Bytes;
use harness_gpu_settings::arrays::{ArrayDescriptor, FlatDescriptor};
use harness_gpu_settings::calls::{FaultyCall, SlowCall};

use super::put;
use crate::code::{Code, answer};
use crate::context::{call, in_context};
use crate::runtime::{allocate, free, write_address};
use crate::world::machine;

/// What rows are aligned to.
const PITCH: usize = 512;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocManaged(address: *mut usize, size: usize, _: c_uint) -> c_int {
    // SAFETY: the program passes a pointer to a pointer.
    unsafe { get("cuMemAllocManaged", address, Some(Bytes(size as u64))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocPitch_v2(address: *mut usize, pitch: *mut usize, width: usize, height: usize, _: c_uint) -> c_int {
    let row = width.checked_next_multiple_of(PITCH);
    let size = row.and_then(|row| row.checked_mul(height));
    // SAFETY: the program passes pointers to a pointer and to a number.
    let code = unsafe { get("cuMemAllocPitch_v2", address, size.map(|size| Bytes(size as u64))) };
    // SAFETY: as above.
    if code == 0 { answer(unsafe { put(pitch, row.unwrap_or(0)) }) } else { code }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuArrayCreate_v2(array: *mut usize, descriptor: *const FlatDescriptor) -> c_int {
    // SAFETY: the program passes a description, or null, which is refused.
    let bytes = unsafe { descriptor.as_ref() }.and_then(|descriptor| ArrayDescriptor::from(*descriptor).bytes(1));
    // SAFETY: the program passes a pointer to a handle.
    unsafe { get("cuArrayCreate_v2", array, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuArray3DCreate_v2(array: *mut usize, descriptor: *const ArrayDescriptor) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cuMipmappedArrayCreate(array, descriptor, 1) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMipmappedArrayCreate(array: *mut usize, descriptor: *const ArrayDescriptor, levels: c_uint) -> c_int {
    // SAFETY: the program passes a description, or null, which is refused.
    let bytes = unsafe { descriptor.as_ref() }.and_then(|descriptor| descriptor.bytes(levels));
    // SAFETY: the program passes a pointer to a handle.
    unsafe { get("cuMipmappedArrayCreate", array, bytes) }
}

#[unsafe(no_mangle)]
extern "C" fn cuArrayDestroy(array: usize) -> c_int {
    machine().delay(SlowCall::Free);
    call("cuArrayDestroy", || answer(free(array as u64)))
}

#[unsafe(no_mangle)]
extern "C" fn cuMipmappedArrayDestroy(array: usize) -> c_int {
    cuArrayDestroy(array)
}

/// Allocates on the current device; what has no size that is known is refused.
///
/// # Safety
/// The place is null, which is refused, or may be written.
unsafe fn get(function: &'static str, place: *mut usize, bytes: Option<Bytes>) -> c_int {
    machine().delay(SlowCall::Malloc);
    in_context(function, |machine, state| {
        let bytes = bytes.filter(|bytes| *bytes > Bytes::ZERO && !place.is_null()).ok_or(Code::InvalidValue)?;
        // SAFETY: as the caller promises.
        unsafe { write_address(place, allocate(machine, state, FaultyCall::Malloc, bytes)) }
    })
}
