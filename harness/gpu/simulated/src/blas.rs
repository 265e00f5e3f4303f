//! cuBLAS and cublasLt: handles with their settings, and one algorithm for every product. Products
//! are no-ops.

use std::ffi::{c_char, c_int, c_void};

use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, write};

use crate::libraries::{CUBLAS_ALLOC_FAILED, set_stream, stream_of};
use crate::objects::new_object;
use crate::versions::{Library, number};

/// The settings of a cuBLAS handle, at the start of an object of `unmodelled.tsv`. A zeroed object
/// uses the default modes.
#[repr(C)]
struct Handle {
    math_mode: c_int,
    pointer_mode: c_int,
}

/// Success, or `CUBLAS_STATUS_INVALID_VALUE` after a null pointer.
fn answer(written: bool) -> c_int {
    if written { 0 } else { 7 }
}

export! {
    cublasSetStream_v2(handle: usize, stream: usize) = answer(set_stream(handle, stream));
    cublasGetStream_v2(handle: usize, stream: Out<'_, usize>) =
        answer(handle != 0 && write(stream, stream_of(handle)));
    cublasSetMathMode(handle: Option<&mut Handle>, mode: c_int) =
        answer(handle.map(|handle| handle.math_mode = mode).is_some());
    cublasGetMathMode(handle: Option<&Handle>, mode: Out<'_, c_int>) =
        answer(handle.is_some_and(|handle| write(mode, handle.math_mode)));
    cublasSetPointerMode_v2(handle: Option<&mut Handle>, mode: c_int) =
        answer(handle.map(|handle| handle.pointer_mode = mode).is_some());
    cublasGetPointerMode_v2(handle: Option<&Handle>, mode: Out<'_, c_int>) =
        answer(handle.is_some_and(|handle| write(mode, handle.pointer_mode)));
    cublasGetVersion_v2(_: usize, version: Out<'_, c_int>) =
        answer(write(version, number(Library::Cublas, 10_000)));
    cublasGetStatusString(status: c_int) -> *const c_char = match status {
        0 => c"success",
        CUBLAS_ALLOC_FAILED => c"the resource allocation failed",
        _ => c"unknown status of cuBLAS",
    }
    .as_ptr();
    cublasGetStatusName(status: c_int) -> *const c_char = match status {
        0 => c"CUBLAS_STATUS_SUCCESS",
        CUBLAS_ALLOC_FAILED => c"CUBLAS_STATUS_ALLOC_FAILED",
        _ => c"CUBLAS_STATUS_UNKNOWN",
    }
    .as_ptr();
    /// A layout starts with the type of its elements.
    cublasLtMatrixLayoutCreate(layout: Out<'_, *mut u8>, kind: c_int, _: u64, _: u64, _: i64) = {
        let object = new_object();
        // SAFETY: objects are larger and aligned to 16 bytes, and nobody else has this one yet.
        unsafe { object.cast::<c_int>().write(kind) };
        answer(write(layout, object))
    };
    cublasLtMatrixLayoutInit_internal(
        layout: Out<'_, c_int>, _: usize, kind: c_int, _: u64, _: u64, _: i64
    ) = answer(write(layout, kind));
    cublasLtGetVersion() -> usize = number(Library::Cublas, 10_000) as usize;
}

/// `cublasLtMatmulHeuristicResult_t`: an algorithm, its workspace, its status, and its number of
/// waves of blocks.
#[repr(C)]
struct Heuristic {
    algorithm: [u64; 8],
    workspace: usize,
    status: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

impl Heuristic {
    const fn of(algorithm: [u64; 8]) -> Self {
        Self {
            algorithm,
            workspace: 0,
            status: 0,
            waves: 1.0,
            reserved: [0; 4],
        }
    }
}

export! {
    /// Returns one algorithm without a workspace. Without an algorithm, a program fails.
    cublasLtMatmulAlgoGetHeuristic(
        _: *mut c_void, _: *mut c_void, _: *mut c_void, _: *mut c_void, _: *mut c_void,
        _: *mut c_void, _: *mut c_void, requested: c_int, results: Out<'_, Heuristic>,
        returned: Out<'_, c_int>
    ) = {
        if requested > 0 && !write(results, Heuristic::of([0; 8])) {
            return answer(false);
        }
        answer(write(returned, requested.min(1)))
    };
    cublasLtMatmulAlgoCheck(
        _: *mut c_void, _: *mut c_void, _: *mut c_void, _: *mut c_void, _: *mut c_void,
        _: *mut c_void, algorithm: Option<&[u64; 8]>, result: Out<'_, Heuristic>
    ) = answer(algorithm.is_some_and(|algorithm| write(result, Heuristic::of(*algorithm))));
}
