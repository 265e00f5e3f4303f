//! Functions of the driver by name, as programs ask for them: [`function`].

use std::ffi::{CStr, CString, c_void};
use std::mem::MaybeUninit;
use std::ptr;

/// The address of a function of the driver by its name without a version: the newest version that there is. Null where there is none.
pub(crate) fn function(name: &CStr) -> *mut c_void {
    let named = |version: &[u8]| CString::new([name.to_bytes(), version].concat()).ok();
    let versions = [&b"_v3"[..], b"_v2", b""].into_iter().filter_map(named);
    versions.map(|name| exported(&name)).find(|address| !address.is_null()).unwrap_or(ptr::null_mut())
}

/// The address of a function of this library; null where it has none.
fn exported(name: &CStr) -> *mut c_void {
    let mut here = MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: the address is of code in this library, and the result has room for what is known of it. The library stays open, so that
    // its handle and the addresses in it stay valid.
    unsafe {
        if libc::dladdr(exported as *const c_void, here.as_mut_ptr()) == 0 {
            return ptr::null_mut();
        }
        let library = libc::dlopen(here.assume_init().dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD);
        if library.is_null() { ptr::null_mut() } else { libc::dlsym(library, name.as_ptr()) }
    }
}
