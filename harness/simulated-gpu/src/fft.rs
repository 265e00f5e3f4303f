//! cuFFT, as a model: plans have no workspace.

use std::ffi::{c_int, c_longlong};

use harness_gpu_settings::ffi::{Out, write};

/// Ignores the arguments that describe the transform.
#[unsafe(no_mangle)]
extern "C" fn cufftXtMakePlanMany(
    _: c_int,
    _: c_int,
    _: *const c_longlong,
    _: *const c_longlong,
    _: c_longlong,
    _: c_longlong,
    _: c_int,
    _: *const c_longlong,
    _: c_longlong,
    _: c_longlong,
    _: c_int,
    _: c_longlong,
    workspace: Out<'_, usize>,
    _: c_int,
) -> c_int {
    // `CUFFT_INVALID_VALUE` is 4.
    if write(workspace, 0) { 0 } else { 4 }
}
