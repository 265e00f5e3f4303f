//! Functions of the CUDA driver (<https://docs.nvidia.com/cuda/cuda-driver-api/>) for PyTorch, its compilers, and this project's CUDA device. This
//! file has the driver itself, devices and contexts.
//!
//! If kernels execute, the functions fail like a driver's: before `cuInit`, without a context, and after work broke the context.

mod arrays;
mod graphs;
mod mapping;
mod memory;
mod modules;
mod pools;
mod streams;

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;
use std::sync::atomic::Ordering;

use harness_gpu_settings::ffi::{Out, Text, write};

use crate::code::{Code, answer, message, name, put};
use crate::context::{
    call, context_of, current_context, device_of_stream, initialized, pop_context, push_context, release, retain, set_context,
};
use crate::device_properties::{attribute, pci_bus, uuid};
use crate::entry_points::function;
use crate::runtime::device;
use crate::world::{current_device, machine};

#[unsafe(no_mangle)]
extern "C" fn cuGetProcAddress_v2(
    name: Text<'_>,
    function_out: Out<'_, *mut c_void>,
    _: c_int,
    _: c_ulonglong,
    status: Out<'_, c_int>,
) -> c_int {
    answer(name.get().ok_or(Code::InvalidValue).and_then(|name| {
        let found = function(name);
        write(status, c_int::from(found.is_null()));
        put(function_out, found)?;
        if found.is_null() { Err(Code::NotFound) } else { Ok(()) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: c_uint) -> c_int {
    call("cuInit", || {
        if flags != 0 {
            return answer(Err(Code::InvalidValue));
        }
        let machine = machine();
        if let unusable @ Err(_) = machine.usable() {
            return answer(unusable);
        }
        machine.initialized.store(!machine.visible.is_empty(), Ordering::Relaxed);
        answer(if machine.visible.is_empty() { Err(Code::NoDevice) } else { Ok(()) })
    })
}

/// Works before `cuInit`.
#[unsafe(no_mangle)]
extern "C" fn cuDriverGetVersion(version: Out<'_, c_int>) -> c_int {
    call("cuDriverGetVersion", || answer(put(version, machine().settings.cuda.driver_version())))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetCount(count: Out<'_, c_int>) -> c_int {
    call("cuDeviceGetCount", || {
        let devices = c_int::try_from(machine().visible.len()).unwrap_or(0);
        answer(initialized().and_then(|()| put(count, devices)))
    })
}

/// Runs a call about a device. `body` gets the real number of the device.
fn of_device(function: &'static str, index: c_int, body: impl FnOnce(u32) -> Result<(), Code>) -> c_int {
    call(function, || answer(initialized().and_then(|()| body(device(index)?))))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGet(handle: Out<'_, c_int>, index: c_int) -> c_int {
    of_device("cuDeviceGet", index, |_| put(handle, index))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(text: *mut u8, len: c_int, index: c_int) -> c_int {
    of_device("cuDeviceGetName", index, |_| {
        let device_name = machine().settings.device_name().as_bytes();
        let len = usize::try_from(len).unwrap_or(0).checked_sub(1).ok_or(Code::InvalidValue)?.min(device_name.len());
        // SAFETY: the program passes an array of more than `len` characters.
        unsafe {
            ptr::copy_nonoverlapping(device_name.as_ptr(), text, len);
            *text.add(len) = 0;
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetAttribute(value: Out<'_, c_int>, number: c_int, index: c_int) -> c_int {
    of_device("cuDeviceGetAttribute", index, |device| {
        let found = attribute(&machine().settings, number, pci_bus(device));
        put(value, c_int::try_from(found).unwrap_or(c_int::MAX))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceTotalMem_v2(bytes: Out<'_, usize>, index: c_int) -> c_int {
    of_device("cuDeviceTotalMem_v2", index, |_| put(bytes, machine().settings.memory.0 as usize))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetUuid_v2(into: Out<'_, [u8; 16]>, index: c_int) -> c_int {
    of_device("cuDeviceGetUuid_v2", index, |number| put(into, uuid(number)))
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxGetState(_: c_int, flags: Out<'_, c_uint>, active: Out<'_, c_int>) -> c_int {
    answer(put(flags, 0).and(put(active, 1)))
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRetain(context: Out<'_, usize>, index: c_int) -> c_int {
    of_device("cuDevicePrimaryCtxRetain", index, |_| {
        retain(index as usize);
        put(context, context_of(index as usize))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(index: c_int) -> c_int {
    of_device("cuDevicePrimaryCtxRelease_v2", index, |_| release(index as usize))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetCurrent(context: Out<'_, usize>) -> c_int {
    answer(put(context, current_context()))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: usize) -> c_int {
    call("cuCtxSetCurrent", || answer(set_context(context)))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: usize) -> c_int {
    call("cuCtxPushCurrent_v2", || answer(push_context(context)))
}

/// The popped context may have no place.
#[unsafe(no_mangle)]
extern "C" fn cuCtxPopCurrent_v2(context: Out<'_, usize>) -> c_int {
    call("cuCtxPopCurrent_v2", || {
        answer(pop_context().map(|popped| {
            write(context, popped);
        }))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetDevice(handle: Out<'_, c_int>) -> c_int {
    answer(put(handle, c_int::try_from(current_device()).unwrap_or(0)))
}

/// Compilers query and set limits; any value works.
#[unsafe(no_mangle)]
extern "C" fn cuCtxGetLimit(value: Out<'_, usize>, _: c_int) -> c_int {
    answer(put(value, 1 << 10))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetLimit(_: c_int, _: usize) -> c_int {
    0
}

/// The context of a stream.
#[unsafe(no_mangle)]
extern "C" fn cuStreamGetCtx(stream: usize, context: Out<'_, usize>) -> c_int {
    let device = || {
        machine().usable()?;
        if machine().executes_kernels() {
            return device_of_stream(stream);
        }
        machine().state().streams.stream(stream, current_device()).map(|stream| stream.device)
    };
    call("cuStreamGetCtx", || answer(device().and_then(|device| put(context, context_of(device)))))
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorString(number: c_int, text: Out<'_, *const c_char>) -> c_int {
    answer(put(text, message(number).as_ptr()))
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(number: c_int, text: Out<'_, *const c_char>) -> c_int {
    answer(put(text, name(number).as_ptr()))
}
