//! The functions of the CUDA driver (<https://docs.nvidia.com/cuda/cuda-driver-api/>) that PyTorch, its compilers and its caches call, and the CUDA
//! device of this project: here the driver itself, its devices and contexts.
//!
//! Where kernels are done they refuse what a driver refuses: calls before `cuInit`, calls without a context, and all calls once work has broken
//! the context.

mod arrays;
mod mapping;
mod memory;
mod modules;
mod pools;
mod streams;

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;
use std::sync::atomic::Ordering;

use crate::code::{Code, answer, name, sentence};
use crate::context::{call, context_of, current_context, device_of_stream, either, initialised, release, retain, set_context};
use crate::device_figures::{attribute, pci_bus, uuid};
use crate::entry_points::function;
use crate::runtime::device;
use crate::world::{current_device, machine};

/// Writes an answer to the caller's place.
///
/// # Safety
/// `place` is null or valid for a write.
unsafe fn put<T>(place: *mut T, value: T) -> Result<(), Code> {
    if place.is_null() {
        return Err(Code::InvalidValue);
    }
    // SAFETY: not null, so valid, as the caller promises.
    unsafe { place.write(value) };
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    function_out: *mut *mut c_void,
    _: c_int,
    _: c_ulonglong,
    status: *mut c_int,
) -> c_int {
    // SAFETY: the program passes a name and pointers to results, of which the status may be null.
    let found = unsafe {
        *function_out = function(CStr::from_ptr(name));
        let found = !(*function_out).is_null();
        if !status.is_null() {
            *status = c_int::from(!found);
        }
        found
    };
    answer(if found { Ok(()) } else { Err(Code::NotFound) })
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
        machine.initialised.store(!machine.visible.is_empty(), Ordering::Relaxed);
        answer(if machine.visible.is_empty() { Err(Code::NoDevice) } else { Ok(()) })
    })
}

/// Needs no initialisation.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    call("cuDriverGetVersion", || answer(unsafe { put(version, machine().settings.cuda.driver_version()) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    call("cuDeviceGetCount", || {
        let devices = c_int::try_from(machine().visible.len()).unwrap_or(0);
        // SAFETY: the program passes a pointer to a number.
        answer(initialised().and_then(|()| unsafe { put(count, devices) }))
    })
}

/// Answers a call about the device with an index, given as its real number.
fn of_device(function: &'static str, index: c_int, body: impl FnOnce(u32) -> Result<(), Code>) -> c_int {
    call(function, || answer(initialised().and_then(|()| body(device(index)?))))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(handle: *mut c_int, index: c_int) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    of_device("cuDeviceGet", index, |_| unsafe { put(handle, index) })
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
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, number: c_int, index: c_int) -> c_int {
    of_device("cuDeviceGetAttribute", index, |device| {
        let figure = attribute(&machine().settings, number, pci_bus(device));
        // SAFETY: the program passes a pointer to a number.
        unsafe { put(value, c_int::try_from(figure).unwrap_or(c_int::MAX)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, index: c_int) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    of_device("cuDeviceTotalMem_v2", index, |_| unsafe { put(bytes, machine().settings.memory.0 as usize) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(into: *mut [u8; 16], index: c_int) -> c_int {
    // SAFETY: the program passes a pointer to sixteen bytes.
    of_device("cuDeviceGetUuid_v2", index, |number| unsafe { put(into, uuid(number)) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxGetState(_: c_int, flags: *mut c_uint, active: *mut c_int) -> c_int {
    // SAFETY: the program passes pointers to numbers.
    unsafe { (*flags, *active) = (0, 1) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, index: c_int) -> c_int {
    of_device("cuDevicePrimaryCtxRetain", index, |_| {
        retain(index as usize);
        // SAFETY: the program passes a pointer to a handle.
        unsafe { put(context, context_of(index as usize)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(index: c_int) -> c_int {
    of_device("cuDevicePrimaryCtxRelease_v2", index, |_| release(index as usize))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut usize) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    answer(unsafe { put(context, current_context()) })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: usize) -> c_int {
    call("cuCtxSetCurrent", || answer(set_context(context)))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: usize) -> c_int {
    cuCtxSetCurrent(context)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut usize) -> c_int {
    // SAFETY: the pointer is null or points to a handle.
    if context.is_null() { 0 } else { unsafe { cuCtxGetCurrent(context) } }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetDevice(handle: *mut c_int) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    unsafe { *handle = c_int::try_from(current_device()).unwrap_or(0) };
    0
}

/// Limits are asked for and set by compilers; any serves.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetLimit(value: *mut usize, _: c_int) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { *value = 1 << 10 };
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetLimit(_: c_int, _: usize) -> c_int {
    0
}

/// The context that a stream was made in.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamGetCtx(stream: usize, context: *mut usize) -> c_int {
    let skipped = || {
        let device = machine().state().streams.stream(stream, current_device()).map(|stream| stream.device);
        // SAFETY: the program passes a pointer to a handle.
        answer(device.and_then(|device| unsafe { put(context, context_of(device)) }))
    };
    // SAFETY: as above.
    either("cuStreamGetCtx", skipped, || unsafe { put(context, context_of(device_of_stream(stream)?)) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(number: c_int, text: *mut *const c_char) -> c_int {
    // SAFETY: the program passes a pointer to a string.
    unsafe { *text = sentence(number).as_ptr() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(number: c_int, text: *mut *const c_char) -> c_int {
    // SAFETY: the program passes a pointer to a string.
    unsafe { *text = name(number).as_ptr() };
    0
}
