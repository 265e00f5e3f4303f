//! The functions of the CUDA driver, looked up and checked before the first call. cudarc declares
//! them.
//!
//! [`Driver::get`] loads `libcuda.so.1`, or returns an error that names the missing functions;
//! cudarc would panic. [`cuda`] calls a function. It reads the result as a plain number, because a
//! value that cudarc's enumeration lacks is undefined behavior.

use std::sync::OnceLock;

use cudarc::driver::sys::CUresult;

use crate::library::{self, Address, LoadError, Refusal};
use harness_allocator::device::DeviceError;

/// The library named in errors.
const WHAT: &str = "CUDA driver (libcuda.so.1)";

/// Code of `cuMemAlloc` and others: no memory.
pub(super) const OUT_OF_MEMORY: u32 = CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;
/// Code of `cuInit` and others: no device.
pub(super) const NO_DEVICE: u32 = CUresult::CUDA_ERROR_NO_DEVICE as u32;
/// Code of `cuEventQuery` and `cuStreamQuery`: the work is not done.
pub(super) const NOT_READY: u32 = CUresult::CUDA_ERROR_NOT_READY as u32;

/// Declares the table of functions. Every device for allocators requires the first group. The
/// second group is for streams, events, pages, pools and kernels, which only some allocators use.
macro_rules! functions {
    (for_allocation: $($basic:ident)+; further: $($further:ident)+) => {
        /// The addresses of the functions that the library has.
        #[allow(non_snake_case, reason = "the driver's own names")]
        #[derive(Debug)]
        pub(super) struct Driver {
            $(pub(super) $basic: Option<Address>,)+
            $(pub(super) $further: Option<Address>,)+
        }

        impl Driver {
            fn look_up(find: impl Fn(&str) -> Option<Address>) -> Self {
                Self {
                    $($basic: find(stringify!($basic)),)+
                    $($further: find(stringify!($further)),)+
                }
            }

            fn missing(&self, only_for_allocation: bool) -> Vec<&'static str> {
                let mut functions = vec![$((stringify!($basic), self.$basic)),+];
                if !only_for_allocation {
                    functions.extend([$((stringify!($further), self.$further)),+]);
                }
                functions.retain(|(_, found)| found.is_none());
                functions.into_iter().map(|(name, _)| name).collect()
            }
        }
    };
}

functions! {
    for_allocation:
        cuInit cuDriverGetVersion cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceTotalMem_v2
        cuDeviceGetAttribute cuDeviceGetUuid_v2 cuDevicePrimaryCtxRetain
        cuDevicePrimaryCtxRelease_v2 cuCtxSetCurrent cuCtxGetCurrent cuCtxSynchronize
        cuMemGetInfo_v2 cuMemAlloc_v2 cuMemFree_v2;
    further:
        cuMemAddressReserve cuMemAddressFree cuMemGetAllocationGranularity cuMemCreate
        cuMemRelease cuMemMap cuMemSetAccess cuMemUnmap cuMemPoolCreate cuMemPoolDestroy
        cuMemPoolGetAttribute cuMemPoolSetAttribute cuMemPoolTrimTo cuMemAllocFromPoolAsync
        cuMemFreeAsync
        cuMemcpyDtoHAsync_v2 cuMemcpyHtoDAsync_v2 cuMemHostAlloc cuMemFreeHost cuMemsetD8Async
        cuStreamCreate cuStreamDestroy_v2 cuStreamGetCtx cuStreamSynchronize cuStreamWaitEvent
        cuEventCreate cuEventDestroy_v2 cuEventRecord cuEventQuery cuEventSynchronize
        cuEventElapsedTime
        cuModuleLoadData cuModuleUnload cuModuleGetFunction cuModuleGetGlobal_v2 cuLaunchKernel
}

/// Calls a function of the driver: `cuda!(driver, cuMemAlloc_v2(&mut address, size))`. A nonzero
/// code is a [`Refusal`].
///
/// All handles and addresses of a call are live: they are in the tables of a device, which drop
/// them after the call that ends them. References are outputs, or inputs that the driver reads
/// before it returns. The context of the handles is current.
macro_rules! cuda {
    (any $argument:expr) => { _ };
    ($driver:expr, $function:ident($($argument:expr),* $(,)?)) => {{
        let declared: unsafe fn($(cuda!(any $argument)),*) -> cudarc::driver::sys::CUresult =
            cudarc::driver::sys::$function;
        $crate::device::driver::call($driver.$function, stringify!($function), |address| {
            // SAFETY: the address is that of this function, and cudarc checks the types of the
            // arguments, which live as described above.
            unsafe { $crate::device::driver::Declared::at(declared, address)($($argument),*) }
        })
    }};
}

pub(super) use cuda;

pub(super) fn call(
    found: Option<Address>,
    call: &'static str,
    function: impl FnOnce(Address) -> u32,
) -> Result<(), Refusal> {
    match found.map_or(library::MISSING, function) {
        0 => Ok(()),
        code => Err(Refusal { call, code }),
    }
}

/// The type of a function as cudarc declares it.
pub(super) trait Declared {
    /// The function of the library. C returns the 32-bit enumeration like a `u32`.
    type Function;

    /// # Safety
    /// The address is that of the declared function.
    unsafe fn at(self, address: Address) -> Self::Function;
}

macro_rules! declared {
    ($( ($($argument:ident)*) )*) => {$(
        impl<$($argument),*> Declared for unsafe fn($($argument),*) -> CUresult {
            type Function = unsafe extern "C" fn($($argument),*) -> u32;

            unsafe fn at(self, address: Address) -> Self::Function {
                // SAFETY: as the caller guarantees.
                unsafe { std::mem::transmute::<Address, Self::Function>(address) }
            }
        }
    )*};
}

declared! { () (A) (A B) (A B C) (A B C D) (A B C D E) (A B C D E F G H I J K) }

impl Driver {
    /// Returns the initialized driver. The library is loaded once; an error is remembered. Fails
    /// with [`DeviceError::Unavailable`] if the library or one of its functions is missing;
    /// [`DeviceError::Driver`] if `cuInit` fails.
    pub(super) fn get() -> Result<&'static Self, DeviceError> {
        Self::initialised(Self::uninitialised()?)
    }

    /// Returns the initialized driver for a device that only serves allocators. Calls of further
    /// missing functions fail.
    pub(super) fn for_allocation() -> Result<&'static Self, DeviceError> {
        Self::initialised(Self::loaded(true)?)
    }

    fn initialised(driver: &'static Self) -> Result<&'static Self, DeviceError> {
        cuda!(driver, cuInit(0))?;
        Ok(driver)
    }

    /// Returns the driver before `cuInit`, which is enough to read its version.
    pub(super) fn uninitialised() -> Result<&'static Self, DeviceError> {
        Self::loaded(false)
    }

    fn loaded(only_for_allocation: bool) -> Result<&'static Self, DeviceError> {
        static DRIVER: OnceLock<Result<Driver, DeviceError>> = OnceLock::new();
        let load = || {
            let library = library::load("libcuda.so.1").map_err(|error| not_loaded(&error))?;
            Ok(Self::look_up(|name| library::find(library, name)))
        };
        let driver = DRIVER.get_or_init(load).as_ref().map_err(Clone::clone)?;
        let missing = driver.missing(only_for_allocation);
        if missing.is_empty() {
            Ok(driver)
        } else {
            Err(missing_functions(&missing))
        }
    }
}

fn not_loaded(error: &LoadError) -> DeviceError {
    let why = match error {
        LoadError::Absent => "no such library is on the loader's path, so no GPU can be used; \
             install the NVIDIA driver, or give the \
                              container access to the GPU (--gpus all), and see `ldconfig -p | \
                              grep libcuda`"
            .to_owned(),
        LoadError::Unloadable(text) => format!(
            "the library exists but cannot be loaded: {text}; reinstall the NVIDIA driver, or \
             remove a wrong file from LD_LIBRARY_PATH"
        ),
    };
    DeviceError::Unavailable {
        what: WHAT.to_owned(),
        why,
    }
}

fn missing_functions(missing: &[&str]) -> DeviceError {
    let why = format!(
        "it lacks {}: the driver is too old, install one for CUDA 12 or later (525 or newer)",
        missing.join(", ")
    );
    DeviceError::Unavailable {
        what: WHAT.to_owned(),
        why,
    }
}

#[cfg(test)]
mod tests;
