//! The interface of an audit library, through which the dynamic linker reports libraries and symbol
//! bindings (<https://man7.org/linux/man-pages/man7/rtld-audit.7.html>).
//!
//! Nothing here allocates after the start: at a fork another thread may hold the lock of this
//! namespace's allocator, and the child must still bind symbols.

use std::ffi::{CStr, c_char, c_long, c_uint, c_void};

use harness_gpu_settings::audit::{self, LinkMap};

use crate::{driver, nvml, runtime};

/// Flags: report bindings to symbols of this library, and bindings from it.
const BIND_TO: c_uint = 1;
const BIND_FROM: c_uint = 2;
/// Flags: do not report calls.
const NO_CALLS: c_uint = 1 | 2;
/// Cookies of CUDA's libraries and of others.
const IS_CUDA: usize = 1;
const IS_OTHER: usize = 0;

/// Prefixes of the file names of wrapped libraries: the runtime, also under the names in Python
/// packages, the driver, NVML, and the simulated GPU.
const LIBRARIES: [&[u8]; 4] = [
    b"libcudart.",
    b"libcuda.so",
    b"libnvidia-ml.so",
    b"libharness_simulated_gpu.so",
];

#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: u64,
}

#[unsafe(no_mangle)]
extern "C" fn la_version(version: c_uint) -> c_uint {
    // SAFETY: the dynamic linker calls this before it starts the program.
    unsafe { audit::begin(version) }
}

/// Stores in the cookie of a loaded library whether it is one of CUDA's.
///
/// # Safety
/// The pointers are valid, as the interface promises.
#[unsafe(no_mangle)]
unsafe extern "C" fn la_objopen(
    map: *const LinkMap,
    _namespace: c_long,
    cookie: *mut usize,
) -> c_uint {
    // SAFETY: as the caller promises.
    let path = unsafe { (*map).path() };
    let is_cuda = is_cuda(path);
    // SAFETY: as the caller promises.
    unsafe { *cookie = if is_cuda { IS_CUDA } else { IS_OTHER } };
    if is_cuda {
        BIND_TO | BIND_FROM
    } else {
        BIND_FROM
    }
}

/// Returns the address that a symbol is bound to.
///
/// # Safety
/// The pointers are valid, as the interface promises, and [`la_objopen`] wrote the cookies.
#[unsafe(no_mangle)]
unsafe extern "C" fn la_symbind64(
    symbol: *const Symbol,
    _index: c_uint,
    _from: *const usize,
    to: *const usize,
    flags: *mut c_uint,
    name: *const c_char,
) -> usize {
    // SAFETY: as the caller promises.
    let (real, is_cuda, name) = unsafe {
        *flags |= NO_CALLS;
        ((*symbol).value, *to == IS_CUDA, CStr::from_ptr(name))
    };
    let wrapper = |real| {
        wrapped(
            name.to_bytes(),
            std::ptr::with_exposed_provenance_mut::<c_void>(real),
        )
        .expose_provenance()
    };
    if is_cuda && real != 0 {
        wrapper(real)
    } else {
        real
    }
}

/// The address that the program gets for a real function: its wrapper, if there is one.
fn wrapped(name: &[u8], real: *mut c_void) -> *mut c_void {
    if let Some(wrapper) = runtime::wrapper(name, real) {
        // A process may load several runtimes. Only the first is wrapped; requests of the others
        // are seen in the driver.
        return if wrapper.calls_this {
            wrapper.address
        } else {
            real
        };
    }
    driver::wrapper(name, real)
        .or_else(|| nvml::wrapper(name, real))
        .map_or(real, |wrapper| wrapper.address)
}

fn is_cuda(path: &[u8]) -> bool {
    LIBRARIES
        .iter()
        .any(|library| file_name(path).starts_with(library))
}

fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests;
