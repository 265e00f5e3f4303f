//! The runtime compiler. Every program compiles to an empty binary.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr;
use std::sync::Mutex;

use harness_allocator::sync::lock;
use harness_gpu_settings::ffi::{Out, Text, write};
use harness_gpu_settings::{export, settings::Cuda};

use crate::objects::{delete_object, new_object};
use crate::world::machine;

/// Names that programs asked for. They stay here because programs have pointers to them.
static NAMES: Mutex<BTreeMap<Vec<u8>, CString>> = Mutex::new(BTreeMap::new());

/// The size of a binary, which is zeros.
const BINARY: usize = 16;

/// What `nvrtcGetSupportedArchs` of NVRTC 12.8.93 and 13.0.88 returns.
const ARCHITECTURES_12: [c_int; 17] = [
    50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 120,
];
const ARCHITECTURES_13: [c_int; 12] = [75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121];

fn architectures() -> &'static [c_int] {
    if machine().settings.cuda == Cuda::V13 {
        &ARCHITECTURES_13
    } else {
        &ARCHITECTURES_12
    }
}

/// Success, or `NVRTC_ERROR_INVALID_INPUT` after a null pointer.
fn answer(written: bool) -> c_int {
    if written { 0 } else { 3 }
}

export! {
    nvrtcVersion(major: Out<'_, c_int>, minor: Out<'_, c_int>) = {
        let version = if machine().settings.cuda == Cuda::V13 { (13, 0) } else { (12, 8) };
        answer(write(major, version.0) && write(minor, version.1))
    };
    nvrtcGetNumSupportedArchs(count: Out<'_, c_int>) =
        answer(write(count, architectures().len() as c_int));
    /// The program passes an array of this length.
    nvrtcGetSupportedArchs(list: *mut c_int) = {
        if !list.is_null() {
            // SAFETY: the array is as long as `nvrtcGetNumSupportedArchs` says.
            unsafe {
                ptr::copy_nonoverlapping(architectures().as_ptr(), list, architectures().len())
            };
        }
        answer(!list.is_null())
    };
    nvrtcCreateProgram(
        program: Out<'_, *mut u8>, _: *const c_char, _: *const c_char, _: c_int,
        _: *const *const c_char, _: *const *const c_char
    ) = answer(write(program, new_object()));
    nvrtcDestroyProgram(program: Option<&mut *mut u8>) = {
        // SAFETY: `nvrtcCreateProgram` created the object, and the program destroys it once.
        program.into_iter().for_each(|program| unsafe { delete_object(*program) });
        0
    };
    nvrtcGetCUBINSize, nvrtcGetPTXSize(_: usize, size: Out<'_, usize>) =
        answer(write(size, BINARY));
    nvrtcGetCUBIN, nvrtcGetPTX(_: usize, binary: Out<'_, [u8; BINARY]>) =
        answer(write(binary, [0; BINARY]));
    /// The log is empty and has only its terminator.
    nvrtcGetProgramLogSize(_: usize, size: Out<'_, usize>) = answer(write(size, 1));
    nvrtcGetProgramLog(_: usize, log: Out<'_, u8>) = answer(write(log, 0));
    /// Returns the expression itself.
    nvrtcGetLoweredName(_: usize, expression: Text<'_>, lowered: Out<'_, *const c_char>) =
        answer(expression.get().is_some_and(|name| write(lowered, kept(name))));
    nvrtcGetErrorString(status: c_int) -> *const c_char =
        if status == 0 { c"NVRTC_SUCCESS".as_ptr() } else { c"NVRTC_ERROR".as_ptr() };
}

fn kept(name: &CStr) -> *const c_char {
    let mut names = lock(&NAMES);
    // The text of a `CString` is on the heap, so it does not move with the map.
    names
        .entry(name.to_bytes().to_vec())
        .or_insert_with(|| name.to_owned())
        .as_ptr()
}
