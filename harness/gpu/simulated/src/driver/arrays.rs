//! Managed and pitched memory, and arrays. Managed memory is charged to the device in full, an
//! array by the bytes of its elements.

use std::ffi::{c_int, c_uint};

use harness_allocator::units::Bytes;
use harness_gpu_settings::arrays::{ArrayDescriptor, FlatDescriptor};
use harness_gpu_settings::{calls::Call, export, ffi::Out};

use crate::clock::captures::Caller;
use crate::code::{Code, answer, put, put_address};
use crate::context::{call, in_context};
use crate::runtime::streams::allow_unsafe;
use crate::runtime::{allocate, allocate_managed, free};
use crate::world::{Machine, State, current_device, machine};

/// The alignment of rows.
const PITCH: usize = 512;

export! {
    cuMemAllocManaged(address: Out<'_, usize>, size: usize, _: c_uint) = request(THIS, address, Some(Bytes(size as u64)), allocate_managed);
    cuMemAllocPitch_v2(address: Out<'_, usize>, pitch: Out<'_, usize>, width: usize, height: usize, _: c_uint) =
        allocate_rows(address, pitch, width, height);
    cuArrayCreate_v2(array: Out<'_, usize>, descriptor: Option<&FlatDescriptor>) =
        request(THIS, array, descriptor.and_then(|flat| ArrayDescriptor::from(*flat).bytes(1)), on_device);
    cuArray3DCreate_v2(array: Out<'_, usize>, descriptor: Option<&ArrayDescriptor>) = cuMipmappedArrayCreate(array, descriptor, 1);
    cuMipmappedArrayCreate(array: Out<'_, usize>, descriptor: Option<&ArrayDescriptor>, levels: c_uint) =
        request(THIS, array, descriptor.and_then(|descriptor| descriptor.bytes(levels)), on_device);
    cuArrayDestroy, cuMipmappedArrayDestroy(array: usize) = {
        machine().delay(Call::Free);
        call("cuArrayDestroy", || answer(allow_unsafe().and_then(|()| free(array as u64))))
    };
}

fn allocate_rows(
    address: Out<'_, usize>,
    pitch: Out<'_, usize>,
    width: usize,
    height: usize,
) -> c_int {
    let row = width.checked_next_multiple_of(PITCH);
    let size = row.and_then(|row| row.checked_mul(height));
    let code = request(
        "cuMemAllocPitch_v2",
        address,
        size.map(|size| Bytes(size as u64)),
        on_device,
    );
    if code == 0 {
        answer(put(pitch, row.unwrap_or(0)))
    } else {
        code
    }
}

fn on_device(machine: &Machine, state: &mut State, size: Bytes) -> Result<u64, Code> {
    allocate(machine, state, current_device(), (Call::Malloc, size))
}

/// Requests memory for the current device. Refuses unknown sizes and zero.
fn request(
    function: &'static str,
    place: Out<'_, usize>,
    bytes: Option<Bytes>,
    get: fn(&Machine, &mut State, Bytes) -> Result<u64, Code>,
) -> c_int {
    machine().delay(Call::Malloc);
    in_context(function, |machine, state| {
        state.streams.allow_unsafe(Caller::current())?;
        let bytes = bytes
            .filter(|bytes| *bytes > Bytes::ZERO && place.is_some())
            .ok_or(Code::InvalidValue)?;
        put_address(place, get(machine, state, bytes))
    })
}
