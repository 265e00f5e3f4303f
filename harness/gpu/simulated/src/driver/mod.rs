//! Functions of the CUDA driver (<https://docs.nvidia.com/cuda/cuda-driver-api/>) for PyTorch, its
//! compilers, and this project's CUDA device. This file has the driver itself, devices and
//! contexts.
//!
//! If kernels execute, the functions fail like a driver's: before `cuInit`, without a context, and
//! after work broke the context.

mod arrays;
mod contexts;
mod copies;
mod mapping;
mod memory;
mod modules;
pub(crate) mod occupancy;
mod pools;
mod streams;

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::{ptr, sync::atomic::Ordering};

use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, Text, write};

use crate::code::{Code, answer, of_driver, put};
use crate::context::{
    call, checked_device, context_of, current_context, device_of_stream, initialized, pop_context,
    push_context, release, retain, set_context,
};
use crate::runtime::{device, put_attribute};
use crate::world::{current_device, machine};
use crate::{device_properties::uuid, entry_points::find};

fn initialize(flags: c_uint) -> Result<(), Code> {
    if flags != 0 {
        return Err(Code::InvalidValue);
    }
    let machine = machine();
    // Shows that the process asked for a GPU.
    machine.counters.open();
    machine.usable()?;
    machine
        .initialized
        .store(!machine.visible.is_empty(), Ordering::Relaxed);
    if machine.visible.is_empty() {
        Err(Code::NoDevice)
    } else {
        Ok(())
    }
}

/// Runs a call about a device. `body` gets the real number of the device.
fn of_device(
    function: &'static str,
    index: c_int,
    body: impl FnOnce(u32) -> Result<(), Code>,
) -> c_int {
    call(function, || {
        answer(initialized().and_then(|()| body(device(index)?)))
    })
}

export! {
    cuGetProcAddress_v2(
        name: Text<'_>, function: Out<'_, *mut c_void>, version: c_int, flags: c_ulonglong,
        status: Out<'_, c_int>
    ) = answer(
        find(name, version, flags, function, status)
            .and_then(|found| if found { Ok(()) } else { Err(Code::NotFound) }),
    );
    cuGetProcAddress(
        name: Text<'_>, function: Out<'_, *mut c_void>, version: c_int, flags: c_ulonglong
    ) = cuGetProcAddress_v2(name, function, version, flags, None);
    cuInit(flags: c_uint) = call(THIS, || answer(initialize(flags)));
    /// Works before `cuInit`.
    cuDriverGetVersion(version: Out<'_, c_int>) =
        call(THIS, || answer(put(version, machine().settings.cuda.driver_version())));
    cuDeviceGetCount(count: Out<'_, c_int>) = call(THIS, || {
        answer(initialized().and_then(|()| put(count, machine().visible.len() as c_int)))
    });
    cuDeviceGet(handle: Out<'_, c_int>, index: c_int) =
        of_device(THIS, index, |_| put(handle, index));
    cuDeviceGetName(text: *mut u8, len: c_int, index: c_int) =
        of_device(THIS, index, |_| write_name(text, len));
    cuDeviceGetAttribute(value: Out<'_, c_int>, number: c_int, index: c_int) =
        of_device(THIS, index, |device| put_attribute(value, number, device));
    cuDeviceTotalMem_v2(bytes: Out<'_, usize>, index: c_int) =
        of_device(THIS, index, |_| put(bytes, machine().memory().0 as usize));
    cuDeviceGetUuid, cuDeviceGetUuid_v2(into: Out<'_, [u8; 16]>, index: c_int) =
        of_device(THIS, index, |number| put(into, uuid(number)));
    cuDevicePrimaryCtxGetState(_: c_int, flags: Out<'_, c_uint>, active: Out<'_, c_int>) =
        answer(put(flags, 0).and(put(active, 1)));
    cuDevicePrimaryCtxRetain(context: Out<'_, usize>, index: c_int) =
        of_device(THIS, index, |_| put(context, retain(index as usize)));
    cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2(index: c_int) =
        of_device(THIS, index, |_| release(index as usize));
    cuCtxGetCurrent(context: Out<'_, usize>) = answer(put(context, current_context()));
    cuCtxSetCurrent(context: usize) = call(THIS, || answer(set_context(context)));
    cuCtxPushCurrent, cuCtxPushCurrent_v2(context: usize) =
        call(THIS, || answer(push_context(context)));
    /// The popped context may have no place.
    cuCtxPopCurrent, cuCtxPopCurrent_v2(context: Out<'_, usize>) =
        call(THIS, || answer(pop_context().map(|popped| write(context, popped)).map(drop)));
    cuCtxGetDevice(handle: Out<'_, c_int>) =
        answer(put(handle, c_int::try_from(current_device()).unwrap_or(0)));
    /// Compilers query and set limits; any value works.
    cuCtxGetLimit, cudaDeviceGetLimit(value: Out<'_, usize>, _: c_int) =
        answer(put(value, 1 << 10));
    cuCtxSetLimit(_: c_int, _: usize) = 0;
    cuCtxGetDevice_v2(handle: Out<'_, c_int>, context: usize) =
        call(THIS, || answer(device_of_context(context).and_then(|device| put(handle, device))));
    /// No stream belongs to a green context.
    cuStreamGetCtx_v2(stream: usize, context: Out<'_, usize>, green: Out<'_, usize>) = {
        write(green, 0);
        cuStreamGetCtx(stream, context)
    };
    cuStreamGetCtx(stream: usize, context: Out<'_, usize>) = call(THIS, || {
        answer(device_of(stream).and_then(|device| put(context, context_of(device))))
    });
    cuGetErrorName(number: c_int, text: Out<'_, *const c_char>) =
        answer(put_text(text, of_driver(number).map(|(name, _)| name)));
    cuGetErrorString(number: c_int, text: Out<'_, *const c_char>) =
        answer(put_text(text, of_driver(number).map(|(_, message)| message)));
}

/// Writes a text, or null for an unknown error.
fn put_text(place: Out<'_, *const c_char>, text: Option<&'static CStr>) -> Result<(), Code> {
    put(place, text.map_or(ptr::null(), CStr::as_ptr))?;
    text.map(drop).ok_or(Code::InvalidValue)
}

/// The program passes an array of `len` characters.
fn write_name(text: *mut u8, len: c_int) -> Result<(), Code> {
    let device_name = machine().settings.device_name().as_bytes();
    let len = usize::try_from(len)
        .unwrap_or(0)
        .checked_sub(1)
        .ok_or(Code::InvalidValue)?
        .min(device_name.len());
    // SAFETY: the array has more than `len` characters.
    unsafe {
        ptr::copy_nonoverlapping(device_name.as_ptr(), text, len);
        *text.add(len) = 0;
    }
    Ok(())
}

/// Null is the current context.
fn device_of_context(context: usize) -> Result<c_int, Code> {
    let index = if context == 0 {
        current_device()
    } else {
        checked_device(context)?.ok_or(Code::InvalidContext)?
    };
    c_int::try_from(index).map_err(|_| Code::InvalidContext)
}

fn device_of(stream: usize) -> Result<usize, Code> {
    machine().usable()?;
    if machine().executes_kernels() {
        return device_of_stream(stream);
    }
    machine()
        .state()
        .streams
        .stream(stream, current_device())
        .map(|stream| stream.device)
}
