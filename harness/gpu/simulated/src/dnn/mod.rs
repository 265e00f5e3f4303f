//! cuDNN 9: handles and descriptors. `backend` has convolutions and attention, from the `library`
//! if there is one, `rnn` recurrent networks.

mod backend;
mod library;
mod rnn;

use std::ffi::{c_char, c_int};
use std::slice;

use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, write};

use crate::libraries::{CUDNN_ALLOC_FAILED, set_stream, stream_of};
use crate::{objects::delete_object, world::machine};

/// Success, or `CUDNN_STATUS_BAD_PARAM_NULL_POINTER` after a null pointer.
fn answer(written: bool) -> c_int {
    if written { 0 } else { 2002 }
}

export! {
    cudnnGetVersion() -> usize = machine().settings.cudnn as usize;
    /// The major, minor or patch level of the version.
    cudnnGetProperty(kind: c_int, value: Out<'_, c_int>) = {
        let version = c_int::try_from(machine().settings.cudnn).unwrap_or(0);
        let level = match kind {
            0 => version / 10_000,
            1 => version / 100 % 100,
            _ => version % 100,
        };
        answer(write(value, level))
    };
    cudnnGetCudartVersion() -> usize =
        usize::try_from(machine().settings.cuda.driver_version()).unwrap_or(0);
    cudnnGetErrorString(status: c_int) -> *const c_char =
        match status {
            0 => c"CUDNN_STATUS_SUCCESS",
            2 => c"CUDNN_STATUS_ALLOC_FAILED",
            CUDNN_ALLOC_FAILED => c"CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
            _ => c"CUDNN_STATUS_NOT_SUPPORTED",
        }
        .as_ptr();
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetLastErrorString(text: Out<'_, c_char>, len: usize) {
    if len > 0 {
        write(text, 0);
    }
}

/// Exported, because torch does not import it, but other programs do.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnDestroy(handle: *mut u8) -> c_int {
    // SAFETY: `cudnnCreate` created the object, and the program destroys it once.
    unsafe { delete_object(handle) };
    0
}

export! {
    cudnnSetStream(handle: usize, stream: usize) = answer(set_stream(handle, stream));
    cudnnGetStream(handle: usize, stream: Out<'_, usize>) =
        answer(handle != 0 && write(stream, stream_of(handle)));
}

/// The most dimensions of a tensor.
const DIMENSIONS: usize = 8;

/// A tensor or a filter, at the start of an object.
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

    /// Copies sizes or strides to an array of `requested` numbers.
    fn copy_numbers(&self, numbers: &[c_int; DIMENSIONS], into: *mut c_int, requested: c_int) {
        let count = usize::try_from(requested.min(self.count))
            .unwrap_or(0)
            .min(DIMENSIONS);
        // SAFETY: the program passes an array of this length; `numbers` has `DIMENSIONS` elements.
        unsafe { std::ptr::copy_nonoverlapping(numbers.as_ptr(), into, count) };
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnSetTensorNdDescriptor(
    tensor: Option<&mut Tensor>,
    kind: c_int,
    count: c_int,
    sizes: *const c_int,
    strides: *const c_int,
) -> c_int {
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: the program passes two arrays of `count` numbers.
    let [sizes, strides] =
        [sizes, strides].map(|numbers| unsafe { slice::from_raw_parts(numbers, count) });
    answer(
        tensor
            .map(|tensor| tensor.set(kind, sizes, strides))
            .is_some(),
    )
}

export! {
    cudnnGetTensorNdDescriptor(
        tensor: Option<&Tensor>, requested: c_int, kind: Out<'_, c_int>, count: Out<'_, c_int>,
        sizes: *mut c_int, strides: *mut c_int
    ) = {
        let Some(tensor) = tensor else { return answer(false) };
        tensor.copy_numbers(&tensor.sizes, sizes, requested);
        tensor.copy_numbers(&tensor.strides, strides, requested);
        answer(write(kind, tensor.kind) && write(count, tensor.count))
    };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnSetFilterNdDescriptor(
    filter: Option<&mut Tensor>,
    kind: c_int,
    _: c_int,
    count: c_int,
    sizes: *const c_int,
) -> c_int {
    // SAFETY: the program passes an array of `count` numbers.
    let sizes = unsafe { slice::from_raw_parts(sizes, usize::try_from(count).unwrap_or(0)) };
    answer(filter.map(|filter| filter.set(kind, sizes, &[])).is_some())
}

export! {
    cudnnGetFilterNdDescriptor(
        filter: Option<&Tensor>, requested: c_int, kind: Out<'_, c_int>, format: Out<'_, c_int>,
        count: Out<'_, c_int>, sizes: *mut c_int
    ) = {
        let Some(filter) = filter else { return answer(false) };
        filter.copy_numbers(&filter.sizes, sizes, requested);
        answer(write(kind, filter.kind) && write(format, 0) && write(count, filter.count))
    };
}

export! {
    /// The state of a generator per resident thread, as on an H200.
    cudnnDropoutGetStatesSize(_: usize, bytes: Out<'_, usize>) = {
        let gpu = machine().settings.gpu;
        answer(write(bytes, 24 * gpu.multiprocessors as usize * gpu.limits().threads as usize))
    };
}
