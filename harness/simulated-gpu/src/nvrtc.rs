//! The runtime compiler. Every program compiles to an empty binary.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int};
use std::sync::{Mutex, PoisonError};

use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, Text, write};
use harness_gpu_settings::settings::Cuda;

use crate::unmodelled::{delete_object, new_object};
use crate::world::machine;

/// Names that programs asked for. They stay here because programs have pointers to them.
static NAMES: Mutex<BTreeMap<Vec<u8>, CString>> = Mutex::new(BTreeMap::new());

/// The size of a binary, which is zeros.
const BINARY: usize = 16;

#[unsafe(no_mangle)]
extern "C" fn nvrtcVersion(major: Out<'_, c_int>, minor: Out<'_, c_int>) -> c_int {
    let version = if machine().settings.cuda == Cuda::V13 { (13, 0) } else { (12, 8) };
    answer(write(major, version.0) && write(minor, version.1))
}

/// Success, or `NVRTC_ERROR_INVALID_INPUT` after a null pointer.
fn answer(written: bool) -> c_int {
    if written { 0 } else { 3 }
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcCreateProgram(
    program: Out<'_, *mut u8>,
    _: *const c_char,
    _: *const c_char,
    _: c_int,
    _: *const *const c_char,
    _: *const *const c_char,
) -> c_int {
    answer(write(program, new_object()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcDestroyProgram(program: Option<&mut *mut u8>) -> c_int {
    if let Some(program) = program {
        // SAFETY: a function here created the object, and the program destroys it once.
        unsafe { delete_object(*program) };
    }
    0
}

export! {
    nvrtcGetCUBINSize(_: usize, size: Out<'_, usize>) = answer(write(size, BINARY));
    nvrtcGetPTXSize(_: usize, size: Out<'_, usize>) = answer(write(size, BINARY));
    nvrtcGetCUBIN(_: usize, binary: Out<'_, [u8; BINARY]>) = answer(write(binary, [0; BINARY]));
    nvrtcGetPTX(_: usize, binary: Out<'_, [u8; BINARY]>) = answer(write(binary, [0; BINARY]));
    /// The log is empty and has only its terminator.
    nvrtcGetProgramLogSize(_: usize, size: Out<'_, usize>) = answer(write(size, 1));
    nvrtcGetProgramLog(_: usize, log: Out<'_, u8>) = answer(write(log, 0));
}

/// Returns the expression itself.
#[unsafe(no_mangle)]
extern "C" fn nvrtcGetLoweredName(_: usize, expression: Text<'_>, lowered: Out<'_, *const c_char>) -> c_int {
    let Some(name) = expression.get() else { return answer(false) };
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    let kept = names.entry(name.to_bytes().to_vec()).or_insert_with(|| name.to_owned());
    // The text of a `CString` is on the heap, so it does not move with the map.
    answer(write(lowered, kept.as_ptr()))
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetErrorString(status: c_int) -> *const c_char {
    if status == 0 { c"NVRTC_SUCCESS".as_ptr() } else { c"NVRTC_ERROR".as_ptr() }
}
