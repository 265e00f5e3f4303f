//! Finds functions of the driver by name: [`function`].

use std::ffi::{CStr, CString, c_void};
use std::mem::MaybeUninit;
use std::ptr;

/// The address of the newest version of a driver function, by its name without a version. Null if there is no such function.
pub(crate) fn function(name: &CStr) -> *mut c_void {
    let named = |version: &[u8]| CString::new([name.to_bytes(), version].concat()).ok();
    let versions = [&b"_v3"[..], b"_v2", b""].into_iter().filter_map(named);
    versions.map(|name| exported(&name)).find(|address| !address.is_null()).unwrap_or(ptr::null_mut())
}

/// The address of an exported function of this library, or null.
fn exported(name: &CStr) -> *mut c_void {
    let mut here = MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: the address is in this library, and the first call initializes the result. The library stays loaded.
    unsafe {
        if libc::dladdr(exported as *const c_void, here.as_mut_ptr()) == 0 {
            return ptr::null_mut();
        }
        let library = libc::dlopen(here.assume_init().dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD);
        if library.is_null() { ptr::null_mut() } else { libc::dlsym(library, name.as_ptr()) }
    }
}
