//! cuDNN 9: handles and descriptors here, convolutions and attention in `backend`, recurrent networks in `rnn`.

mod backend;
mod rnn;

use std::ffi::{c_char, c_int};
use std::slice;

use crate::unmodelled::{delete_object, new_object};
use crate::world::machine;

#[unsafe(no_mangle)]
extern "C" fn cudnnGetVersion() -> usize {
    machine().settings.cudnn as usize
}

/// Major, minor and patch level of the version.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnGetProperty(kind: c_int, value: *mut c_int) -> c_int {
    let version = c_int::try_from(machine().settings.cudnn).unwrap_or(0);
    // SAFETY: the program passes a pointer to a number.
    unsafe {
        *value = match kind {
            0 => version / 10_000,
            1 => version / 100 % 100,
            _ => version % 100,
        }
    };
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetCudartVersion() -> usize {
    usize::try_from(machine().settings.cuda.driver_version()).unwrap_or(0)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetErrorString(status: c_int) -> *const c_char {
    if status == 0 { c"CUDNN_STATUS_SUCCESS".as_ptr() } else { c"CUDNN_STATUS_NOT_SUPPORTED".as_ptr() }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnGetLastErrorString(text: *mut c_char, room: usize) {
    if room > 0 {
        // SAFETY: the program passes an array of `room` characters.
        unsafe { *text = 0 };
    }
}

/// A handle is an object that begins with its stream.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnCreate(handle: *mut *mut u8) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    unsafe { *handle = new_object() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnDestroy(handle: *mut u8) -> c_int {
    // SAFETY: the program gives back what it was given, once.
    unsafe { delete_object(handle) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnSetStream(handle: *mut usize, stream: usize) -> c_int {
    // SAFETY: the program passes a handle.
    unsafe { *handle = stream };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnGetStream(handle: *const usize, stream: *mut usize) -> c_int {
    // SAFETY: the program passes a handle and a pointer to another.
    unsafe { *stream = *handle };
    0
}

/// The most dimensions of a tensor.
const DIMENSIONS: usize = 8;

/// A tensor or a filter; it lies at the start of an object.
#[repr(C)]
struct Tensor {
    kind: c_int,
    count: c_int,
    sizes: [c_int; DIMENSIONS],
    strides: [c_int; DIMENSIONS],
}

impl Tensor {
    fn set(&mut self, kind: c_int, sizes: &[c_int], strides: &[c_int]) {
        let count = sizes.len().min(DIMENSIONS);
        (self.kind, self.count) = (kind, c_int::try_from(count).unwrap_or(0));
        self.sizes[..count].copy_from_slice(&sizes[..count]);
        let strides = &strides[..strides.len().min(count)];
        self.strides[..strides.len()].copy_from_slice(strides);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnSetTensorNdDescriptor(
    tensor: *mut Tensor,
    kind: c_int,
    count: c_int,
    sizes: *const c_int,
    strides: *const c_int,
) -> c_int {
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: the program passes a descriptor and two arrays of `count` numbers.
    unsafe { (*tensor).set(kind, slice::from_raw_parts(sizes, count), slice::from_raw_parts(strides, count)) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnGetTensorNdDescriptor(
    tensor: *const Tensor,
    requested: c_int,
    kind: *mut c_int,
    count: *mut c_int,
    sizes: *mut c_int,
    strides: *mut c_int,
) -> c_int {
    // SAFETY: the program passes a descriptor, pointers to numbers, and two arrays of `requested` numbers.
    unsafe {
        let tensor = &*tensor;
        (*kind, *count) = (tensor.kind, tensor.count);
        for index in 0..usize::try_from(requested.min(tensor.count)).unwrap_or(0) {
            *sizes.add(index) = tensor.sizes[index];
            *strides.add(index) = tensor.strides[index];
        }
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnSetFilterNdDescriptor(filter: *mut Tensor, kind: c_int, _: c_int, count: c_int, sizes: *const c_int) -> c_int {
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: the program passes a descriptor and an array of `count` numbers.
    unsafe { (*filter).set(kind, slice::from_raw_parts(sizes, count), &[]) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnGetFilterNdDescriptor(
    filter: *const Tensor,
    requested: c_int,
    kind: *mut c_int,
    format: *mut c_int,
    count: *mut c_int,
    sizes: *mut c_int,
) -> c_int {
    // SAFETY: the program passes a descriptor, pointers to numbers, and an array of `requested` numbers.
    unsafe {
        let filter = &*filter;
        (*kind, *format, *count) = (filter.kind, 0, filter.count);
        for index in 0..usize::try_from(requested.min(filter.count)).unwrap_or(0) {
            *sizes.add(index) = filter.sizes[index];
        }
    }
    0
}

/// The state of a dropout is one of a generator for each resident thread; a model.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnDropoutGetStatesSize(_: usize, bytes: *mut usize) -> c_int {
    let gpu = machine().settings.gpu;
    // SAFETY: the program passes a pointer to a number.
    unsafe { *bytes = 16 * gpu.multiprocessors as usize * gpu.limits().threads as usize };
    0
}
