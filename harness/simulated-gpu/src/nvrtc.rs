//! The runtime compiler: every program compiles, to nothing.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::{Mutex, PoisonError};

use crate::unmodelled::{delete_object, new_object};
use crate::world::machine;
use harness_gpu_settings::settings::Cuda;

/// Names that programs were asked for, kept so that pointers to them stay valid.
static NAMES: Mutex<BTreeMap<Vec<u8>, CString>> = Mutex::new(BTreeMap::new());

/// The size of a binary: a few zeros.
const BINARY: usize = 16;

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int {
    let version = if machine().settings.cuda == Cuda::V13 { (13, 0) } else { (12, 8) };
    // SAFETY: the program passes pointers to numbers.
    unsafe { (*major, *minor) = version };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCreateProgram(
    program: *mut *mut u8,
    _: *const c_char,
    _: *const c_char,
    _: c_int,
    _: *const *const c_char,
    _: *const *const c_char,
) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    unsafe { *program = new_object() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcDestroyProgram(program: *mut *mut u8) -> c_int {
    // SAFETY: the program passes a pointer to a handle that it was given, once.
    unsafe { delete_object(*program) };
    0
}

/// Writes the size of a binary.
///
/// # Safety
/// The pointer may be written.
unsafe fn write_size(size: *mut usize) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { *size = BINARY };
    0
}

/// Writes a binary.
///
/// # Safety
/// There is room for [`BINARY`] bytes.
unsafe fn write_binary(binary: *mut u8) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { binary.write_bytes(0, BINARY) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetCUBINSize(_: usize, size: *mut usize) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { write_size(size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetPTXSize(_: usize, size: *mut usize) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { write_size(size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetCUBIN(_: usize, binary: *mut u8) -> c_int {
    // SAFETY: the program passes as much room as it was told.
    unsafe { write_binary(binary) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetPTX(_: usize, binary: *mut u8) -> c_int {
    // SAFETY: the program passes as much room as it was told.
    unsafe { write_binary(binary) }
}

/// A log of one empty line.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetProgramLogSize(_: usize, size: *mut usize) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { *size = 1 };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetProgramLog(_: usize, log: *mut u8) -> c_int {
    // SAFETY: the program passes as much room as it was told.
    unsafe { *log = 0 };
    0
}

/// The name in the binary is the name that was asked for.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetLoweredName(_: usize, expression: *const c_char, lowered: *mut *const c_char) -> c_int {
    // SAFETY: the program passes a string.
    let name = unsafe { CStr::from_ptr(expression) };
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    let kept = names.entry(name.to_bytes().to_vec()).or_insert_with(|| name.to_owned());
    // SAFETY: the program passes a pointer to a string. What is kept is never moved: the text of a `CString` lies on the heap.
    unsafe { *lowered = kept.as_ptr() };
    0
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetErrorString(status: c_int) -> *const c_char {
    if status == 0 { c"NVRTC_SUCCESS".as_ptr() } else { c"NVRTC_ERROR".as_ptr() }
}
