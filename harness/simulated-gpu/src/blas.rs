//! cuBLAS and cublasLt: handles with their settings, and one algorithm for every product. Products are no-ops.

use std::ffi::{c_char, c_int, c_void};

use harness_gpu_settings::ffi::{Out, write};

use crate::unmodelled::{delete_object, new_object};

/// The settings of a cuBLAS handle, at the start of an object.
#[repr(C)]
struct Handle {
    stream: usize,
    math_mode: c_int,
    pointer_mode: c_int,
}

/// The version of cuBLAS.
const VERSION: c_int = 130_100;

#[unsafe(no_mangle)]
extern "C" fn cublasCreate_v2(handle: Out<'_, *mut u8>) -> c_int {
    // A zeroed object is a handle on the default stream with the default modes.
    answer(write(handle, new_object()))
}

/// Success, or `CUBLAS_STATUS_INVALID_VALUE` after a null pointer.
fn answer(written: bool) -> c_int {
    if written { 0 } else { 7 }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasDestroy_v2(handle: *mut u8) -> c_int {
    // SAFETY: a function here created the object, and the program destroys it once.
    unsafe { delete_object(handle) };
    0
}

/// Exports a function that sets or gets a field of a handle.
macro_rules! field {
    (set $name:ident, $field:ident: $type:ty) => {
        #[unsafe(no_mangle)]
        extern "C" fn $name(handle: Option<&mut Handle>, value: $type) -> c_int {
            answer(handle.map(|handle| handle.$field = value).is_some())
        }
    };
    (get $name:ident, $field:ident: $type:ty) => {
        #[unsafe(no_mangle)]
        extern "C" fn $name(handle: Option<&Handle>, value: Out<'_, $type>) -> c_int {
            answer(handle.is_some_and(|handle| write(value, handle.$field)))
        }
    };
}

field!(set cublasSetStream_v2, stream: usize);
field!(get cublasGetStream_v2, stream: usize);
field!(set cublasSetMathMode, math_mode: c_int);
field!(get cublasGetMathMode, math_mode: c_int);
field!(set cublasSetPointerMode_v2, pointer_mode: c_int);
field!(get cublasGetPointerMode_v2, pointer_mode: c_int);

#[unsafe(no_mangle)]
extern "C" fn cublasGetVersion_v2(_: usize, version: Out<'_, c_int>) -> c_int {
    answer(write(version, VERSION))
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetStatusString(status: c_int) -> *const c_char {
    if status == 0 { c"success".as_ptr() } else { c"unknown status of cuBLAS".as_ptr() }
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetStatusName(status: c_int) -> *const c_char {
    if status == 0 { c"CUBLAS_STATUS_SUCCESS".as_ptr() } else { c"CUBLAS_STATUS_UNKNOWN".as_ptr() }
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtGetVersion() -> usize {
    VERSION as usize
}

/// `cublasLtMatmulHeuristicResult_t`: an algorithm, its workspace, its status, and its number of waves of blocks.
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
        Self { algorithm, workspace: 0, status: 0, waves: 1.0, reserved: [0; 4] }
    }
}

/// Returns one algorithm without a workspace. Without an algorithm, a program fails.
#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    requested: c_int,
    results: Out<'_, Heuristic>,
    returned: Out<'_, c_int>,
) -> c_int {
    if requested > 0 && !write(results, Heuristic::of([0; 8])) {
        return answer(false);
    }
    answer(write(returned, requested.min(1)))
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulAlgoCheck(
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    algorithm: Option<&[u64; 8]>,
    result: Out<'_, Heuristic>,
) -> c_int {
    answer(algorithm.is_some_and(|algorithm| write(result, Heuristic::of(*algorithm))))
}
