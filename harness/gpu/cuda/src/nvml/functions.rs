//! Loads `libnvidia-ml.so.1` (<https://docs.nvidia.com/deploy/nvml-api/>), calls the functions that
//! `nvml-wrapper` lacks, and explains errors.

use std::{ffi::OsStr, sync::OnceLock};

use nvml_wrapper::{Nvml, error::NvmlError};

use crate::library::LoadError;

const NAME: &str = "libnvidia-ml.so.1";

/// Calls a function with the handle of a device and further arguments: `nvml!(device,
/// nvmlDeviceGetTemperatureV(&mut now))`.
///
/// References are outputs, or structs that NVML reads before it returns.
macro_rules! nvml {
    ($device:expr, $function:ident($($argument:expr),*)) => {
        nvml_wrapper::error::nvml_sym($device.nvml().lib().$function.as_ref()).and_then(|function| {
            // SAFETY: the handle comes from NVML, which is never shut down. The bindings check the
            // types of the arguments, which are valid as described above.
            nvml_wrapper::error::nvml_try(unsafe { function($device.handle() $(, $argument)*) })
        })
    };
}

pub(super) use nvml;

/// Returns the initialized NVML. The library is loaded once and never shut down; an error is
/// remembered.
pub(crate) fn library() -> Result<&'static Nvml, String> {
    static LIBRARY: OnceLock<Result<Nvml, String>> = OnceLock::new();
    let load = || {
        Nvml::builder()
            .lib_path(OsStr::new(NAME))
            .init()
            .map_err(|error| sentence("nvmlInit_v2", error))
    };
    LIBRARY.get_or_init(load).as_ref().map_err(Clone::clone)
}

fn not_loaded(error: &LoadError) -> String {
    match error {
        LoadError::Absent => "libnvidia-ml.so.1 is not on the loader's path; install the NVIDIA \
             driver's utilities, in containers with \
             NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            .to_owned(),
        LoadError::Unloadable(text) => format!(
            "libnvidia-ml.so.1 exists but cannot be loaded: {text}; reinstall the NVIDIA driver's \
             utilities, or remove a wrong file from \
             LD_LIBRARY_PATH"
        ),
    }
}

/// Explains why a function failed, with advice if there is any.
pub(super) fn sentence(call: &str, error: NvmlError) -> String {
    let what = match error {
        NvmlError::LibloadingError(error) => return not_loaded(&LoadError::new(NAME, &error)),
        NvmlError::FailedToLoadSymbol(_) => {
            return format!(
                "this libnvidia-ml.so.1 has no {call}; install a driver of CUDA 12 or later (525 \
                 or newer)"
            );
        }
        NvmlError::NoPermission => return "this user has no permission to use NVML".to_owned(),
        NvmlError::DriverNotLoaded => {
            return "the NVIDIA kernel driver is not loaded; `modprobe nvidia`, and see `dmesg | \
                 grep NVRM`"
                .to_owned();
        }
        NvmlError::GpuLost => {
            return "the GPU has fallen off the bus; see `dmesg | grep Xid` and drain the node"
                .to_owned();
        }
        NvmlError::LibRmVersionMismatch => {
            return "the NVML library and the loaded kernel driver have different versions; reboot, \
                 or reload the nvidia modules"
                .to_owned();
        }
        NvmlError::Unknown => "NVML gives no reason; see `dmesg | grep Xid`".to_owned(),
        NvmlError::UnexpectedVariant(code) => {
            format!("code {code}; look it up under nvmlReturn_t in nvml.h")
        }
        error => error.to_string(),
    };
    format!("{call} failed: {what}")
}

#[cfg(test)]
mod tests;
