//! Calls of `libnvidia-ml.so.1` (<https://docs.nvidia.com/deploy/nvml-api/>), which `nvml-wrapper-sys` declares, and the meaning of their
//! codes. Only queries.
#![allow(non_upper_case_globals, reason = "names of the bindings")]

use std::sync::OnceLock;

use nvml_wrapper_sys::bindings::*;

use crate::library::{LoadError, MISSING, Refusal};

/// Calls a function: `nvml!(nvml, nvmlDeviceGetPowerUsage(device, &mut milliwatts))`. A nonzero code is a [`Refusal`], and so is a
/// function that an older or newer library lacks.
///
/// Device handles come from NVML. References are outputs, or strings and structs that NVML reads before it returns.
macro_rules! nvml {
    ($nvml:expr, $function:ident($($argument:expr),*)) => {
        match &$nvml.$function {
            // SAFETY: the bindings check the types of the arguments, which are valid as described above.
            Ok(function) => match unsafe { function($($argument),*) } {
                nvml_wrapper_sys::bindings::nvmlReturn_enum_NVML_SUCCESS => Ok(()),
                code => Err($crate::library::Refusal { call: stringify!($function), code }),
            },
            Err(_) => Err($crate::library::Refusal { call: stringify!($function), code: $crate::library::MISSING }),
        }
    };
}

pub(super) use nvml;

/// Returns the initialized NVML. The library is loaded once and never shut down; an error is remembered.
pub(super) fn library() -> Result<&'static NvmlLib, String> {
    static LIBRARY: OnceLock<Result<NvmlLib, String>> = OnceLock::new();
    LIBRARY.get_or_init(load).as_ref().map_err(Clone::clone)
}

fn load() -> Result<NvmlLib, String> {
    const NAME: &str = "libnvidia-ml.so.1";
    // SAFETY: the initializers of NVIDIA's libraries have no precondition.
    let nvml = unsafe { NvmlLib::new(NAME) }.map_err(|error| not_loaded(&LoadError::new(NAME, &error)))?;
    nvml!(nvml, nvmlInit_v2()).map_err(sentence)?;
    Ok(nvml)
}

/// Returns the newer function's result. If it failed, tries the deprecated one.
pub(super) fn newer_first<T>(newer: Result<T, Refusal>, older: impl FnOnce() -> Result<T, Refusal>) -> Result<T, Refusal> {
    newer.or_else(|refusal| match older() {
        // If the deprecated function is missing, the newer one's error counts.
        Err(Refusal { code: MISSING | nvmlReturn_enum_NVML_ERROR_DEPRECATED, .. }) => Err(refusal),
        answer => answer,
    })
}

fn not_loaded(error: &LoadError) -> String {
    match error {
        LoadError::Absent => "libnvidia-ml.so.1 is not on the loader's path; install the NVIDIA driver's utilities, in containers with \
             NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            .to_owned(),
        LoadError::Unloadable(text) => format!(
            "libnvidia-ml.so.1 exists but cannot be loaded: {text}; reinstall the NVIDIA driver's utilities, or remove a wrong file from \
             LD_LIBRARY_PATH"
        ),
    }
}

/// Explains an error of NVML, with advice if there is any.
pub(super) fn sentence(Refusal { call, code }: Refusal) -> String {
    let what = match code {
        MISSING => return format!("this libnvidia-ml.so.1 has no {call}; install a driver of CUDA 12 or later (525 or newer)"),
        nvmlReturn_enum_NVML_ERROR_NO_PERMISSION => return "this user has no permission to use NVML".to_owned(),
        nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED => {
            return "the NVIDIA kernel driver is not loaded; `modprobe nvidia`, and see `dmesg | grep NVRM`".to_owned();
        }
        nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST => {
            return "the GPU has fallen off the bus; see `dmesg | grep Xid` and drain the node".to_owned();
        }
        nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH => {
            return "the NVML library and the loaded kernel driver have different versions; reboot, or reload the nvidia modules"
                .to_owned();
        }
        nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED => "the GPU does not support it",
        nvmlReturn_enum_NVML_ERROR_NOT_FOUND => "no such device or process",
        nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED => "the GPU needs a reset",
        nvmlReturn_enum_NVML_ERROR_NO_DATA => "no data is available",
        nvmlReturn_enum_NVML_ERROR_DEPRECATED => "NVML has removed this function",
        nvmlReturn_enum_NVML_ERROR_UNKNOWN => "NVML gives no reason; see `dmesg | grep Xid`",
        _ => "look the code up under nvmlReturn_t in nvml.h",
    };
    format!("{call} failed with code {code}: {what}")
}

#[cfg(test)]
mod tests;
