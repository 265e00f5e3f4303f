//! Managed and pitched memory, and arrays. Managed memory is charged to the device in full, an
//! array by the bytes of its elements.

use std::ffi::{c_int, c_uint};

use harness_allocator::units::Bytes;
use harness_gpu_settings::arrays::{ArrayDescriptor, FlatDescriptor};
use harness_gpu_settings::ffi::{Out, again, written};
use harness_gpu_settings::{calls::Call, export};

use crate::clock::captures::Caller;
use crate::code::{Code, answer, put, put_address};
use crate::context::{by_kernel_mode, call, in_context};
use crate::runtime::boxes::allocate_rows;
use crate::runtime::streams::allow_unsafe;
use crate::runtime::{allocate, allocate_managed, free};
use crate::world::{Machine, State, current_device, machine};

export! {
    cuMemAllocManaged(address: Out<'_, usize>, size: usize, _: c_uint) =
        request(THIS, address, Some(Bytes(size as u64)), allocate_managed);
    cuMemAllocPitch_v2(
        address: Out<'_, usize>, pitch: Out<'_, usize>, width: usize, height: usize, _: c_uint
    ) = by_kernel_mode(
        THIS,
        || answer(rows(address, pitch, width, height)),
        || Err(Code::NotSupported),
    );
    cuArrayCreate_v2(array: Out<'_, usize>, descriptor: Option<&FlatDescriptor>) =
        create(array, descriptor.map(|flat| ArrayDescriptor::from(*flat)), 1);
    cuArray3DCreate_v2(array: Out<'_, usize>, descriptor: Option<&ArrayDescriptor>) =
        create(array, descriptor.copied(), 1);
    cuMipmappedArrayCreate(
        array: Out<'_, usize>, descriptor: Option<&ArrayDescriptor>, levels: c_uint
    ) = create(array, descriptor.copied(), levels);
    cuArrayGetDescriptor_v2(into: Out<'_, FlatDescriptor>, array: usize) =
        answer(descriptor(array).and_then(
            |ArrayDescriptor { width, height, format, channels, .. }| {
                put(into, FlatDescriptor { width, height, format, channels })
            },
        ));
    cuArray3DGetDescriptor_v2(into: Out<'_, ArrayDescriptor>, array: usize) =
        answer(descriptor(array).and_then(|found| put(into, found)));
    cuArrayDestroy, cuMipmappedArrayDestroy(array: usize) = {
        machine().delay(Call::Free);
        call("cuArrayDestroy", || answer(allow_unsafe().and_then(|()| free(array as u64))))
    };
}

/// Creates an array. The handle is the address of its memory, in which rows follow each other.
fn create(mut array: Out<'_, usize>, wanted: Option<ArrayDescriptor>, levels: c_uint) -> c_int {
    let size = wanted.and_then(|wanted| wanted.bytes(levels));
    let code = request("cuArrayCreate", again(&mut array), size, on_device);
    // SAFETY: the request has written the handle if it succeeded.
    if let (0, Some(array), Some(wanted)) = (code, unsafe { written(&array) }, wanted) {
        machine().state().arrays.insert(array, wanted);
    }
    code
}

/// The description of an array.
pub(super) fn descriptor(array: usize) -> Result<ArrayDescriptor, Code> {
    let known = machine().state().arrays.get(&array).copied();
    known.ok_or(Code::InvalidHandle)
}

fn rows(
    address: Out<'_, usize>,
    pitch: Out<'_, usize>,
    width: usize,
    height: usize,
) -> Result<(), Code> {
    let rows = Some(height).filter(|height| *height > 0 && width > 0);
    let (start, distance) = allocate_rows(width, rows)?;
    put(pitch, distance).and(put(address, start))
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
