//! The functions by which the dynamic linker asks an auditing library which function a symbol is bound to
//! (<https://man7.org/linux/man-pages/man7/rtld-audit.7.html>).
//!
//! Nothing here allocates: a forked child may ask while another thread of its parent was allocating.

use std::ffi::{CStr, c_char, c_long, c_uint, c_void};

use crate::{driver, nvml, runtime};

/// The newest version of the interface that these functions were written for.
const NEWEST: c_uint = 2;
/// Bindings to symbols of a library are told, and bindings from it.
const BIND_TO: c_uint = 1;
const BIND_FROM: c_uint = 2;
/// Calls need not be told.
const NO_CALLS: c_uint = 1 | 2;
/// What is noted of a library: whether it is one of CUDA's.
const IS_CUDA: usize = 1;
const IS_OTHER: usize = 0;

/// Libraries whose functions are wrapped, by the beginning of the file name: the runtime, also under the names that packages give it, the driver, NVML,
/// and what stands in for all of them on a simulated GPU.
const LIBRARIES: [&[u8]; 4] = [b"libcudart.", b"libcuda.so", b"libnvidia-ml.so", b"libharness_simulated_gpu.so"];

/// The beginning of `struct link_map`.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const c_char,
}

/// `Elf64_Sym`.
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: u64,
}

/// Tells the dynamic linker which version of the interface is spoken: its own where that is older.
#[unsafe(no_mangle)]
extern "C" fn la_version(version: c_uint) -> c_uint {
    version.min(NEWEST)
}

/// A library was loaded: notes whether it is one of CUDA's.
///
/// # Safety
/// The pointers are valid, as the interface promises.
#[unsafe(no_mangle)]
unsafe extern "C" fn la_objopen(map: *const LinkMap, _namespace: c_long, cookie: *mut usize) -> c_uint {
    // SAFETY: as the caller promises; the program itself may have no name.
    let name = unsafe { (*map).name.as_ref().map_or(&b""[..], |name| CStr::from_ptr(name).to_bytes()) };
    let is_cuda = is_cuda(name);
    // SAFETY: as the caller promises.
    unsafe { *cookie = if is_cuda { IS_CUDA } else { IS_OTHER } };
    if is_cuda { BIND_TO | BIND_FROM } else { BIND_FROM }
}

/// A symbol is bound: returns the address that the caller gets.
///
/// # Safety
/// The pointers are valid, as the interface promises, and the cookies are those that [`la_objopen`] noted.
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
    let wrapper = |real| wrapped(name.to_bytes(), std::ptr::with_exposed_provenance_mut::<c_void>(real)).expose_provenance();
    if is_cuda && real != 0 { wrapper(real) } else { real }
}

/// The address that the program gets for the real function of this name: that of its wrapper, if it has one.
fn wrapped(name: &[u8], real: *mut c_void) -> *mut c_void {
    if let Some(wrapper) = runtime::wrapper(name, real) {
        // A process may have several runtimes. Others than the first one are seen by what they ask of the driver, of which there is one.
        return if wrapper.is_of_this { wrapper.address } else { real };
    }
    driver::wrapper(name, real).or_else(|| nvml::wrapper(name, real)).map_or(real, |wrapper| wrapper.address)
}

fn is_cuda(path: &[u8]) -> bool {
    let file = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
    LIBRARIES.iter().any(|library| file.starts_with(library))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_cuda_are_known_by_their_file_names() {
        let known = ["/usr/lib/x86_64-linux-gnu/libcuda.so.1", "libcudart.so.13", "/site/libcudart.8774224f.so.12", "libnvidia-ml.so.1"];
        assert!(known.iter().all(|path| is_cuda(path.as_bytes())));
        let others = ["", "/opt/libcuda.so.1/libc.so.6", "libcudnn.so.9", "libtorch_cuda.so", "libc10_cuda.so"];
        assert!(!others.iter().any(|path| is_cuda(path.as_bytes())));
    }
}
