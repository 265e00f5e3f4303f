//! cuBLAS and cublasLt: handles that remember what was set, and one algorithm for every product. Products themselves do nothing.

use std::ffi::{c_char, c_int, c_void};

use crate::unmodelled::{delete_object, new_object};

/// What a handle of cuBLAS remembers; it lies at the start of an object.
#[repr(C)]
struct Handle {
    stream: usize,
    math_mode: c_int,
    pointer_mode: c_int,
}

/// The version of cuBLAS that is told.
const VERSION: c_int = 130_100;

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasCreate_v2(handle: *mut *mut u8) -> c_int {
    // SAFETY: the program passes a pointer to a handle. A zeroed object is a handle on the default stream with the default modes.
    unsafe { *handle = new_object() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasDestroy_v2(handle: *mut u8) -> c_int {
    // SAFETY: the program gives back what it was given, once.
    unsafe { delete_object(handle) };
    0
}

/// A function that stores a field of a handle, or reads it.
macro_rules! field {
    (set $name:ident, $field:ident: $type:ty) => {
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(handle: *mut Handle, value: $type) -> c_int {
            // SAFETY: the program passes a handle of `cublasCreate_v2`.
            unsafe { (*handle).$field = value };
            0
        }
    };
    (get $name:ident, $field:ident: $type:ty) => {
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(handle: *mut Handle, value: *mut $type) -> c_int {
            // SAFETY: the program passes a handle of `cublasCreate_v2` and a pointer to a value.
            unsafe { *value = (*handle).$field };
            0
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
unsafe extern "C" fn cublasGetVersion_v2(_: *mut Handle, version: *mut c_int) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { *version = VERSION };
    0
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

/// `cublasLtMatmulHeuristicResult_t`: an algorithm, its workspace, its status, and how many waves of blocks it runs in.
#[repr(C)]
struct Heuristic {
    algorithm: [u64; 8],
    workspace: usize,
    status: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// One algorithm that needs no workspace: a program takes none for an error.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    requested: c_int,
    results: *mut Heuristic,
    returned: *mut c_int,
) -> c_int {
    // SAFETY: the program passes an array of as many results as it requests, and a pointer to their number.
    unsafe {
        if requested > 0 {
            *results = Heuristic { algorithm: [0; 8], workspace: 0, status: 0, waves: 1.0, reserved: [0; 4] };
        }
        *returned = requested.min(1);
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulAlgoCheck(
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    algorithm: *const [u64; 8],
    result: *mut Heuristic,
) -> c_int {
    // SAFETY: the program passes an algorithm and a pointer to a result.
    unsafe { *result = Heuristic { algorithm: *algorithm, workspace: 0, status: 0, waves: 1.0, reserved: [0; 4] } };
    0
}
