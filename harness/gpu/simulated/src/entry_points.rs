use std::ffi::{CStr, CString, c_int, c_void};
use std::{mem::MaybeUninit, ptr, sync::Once};

use harness_gpu_settings::ffi::{Out, Text, write};

use crate::code::{Code, put};
use crate::world::machine;

/// Writes the address of a function, and whether it is missing. Returns `false` if it is missing.
pub(crate) fn find(
    name: Text<'_>,
    place: Out<'_, *mut c_void>,
    status: Out<'_, c_int>,
) -> Result<bool, Code> {
    let name = name.get().ok_or(Code::InvalidValue)?;
    let found = function(name);
    note_tables(name, found);
    write(status, c_int::from(found.is_null()));
    put(place, found)?;
    Ok(!found.is_null())
}

/// Lists the function by which CUDA's runtime that is linked into a program finds internal tables
/// of NVIDIA's driver. Without them its start fails. Other missing functions are optional.
fn note_tables(name: &CStr, found: *mut c_void) {
    static NOTED: Once = Once::new();
    if found.is_null() && name == c"cuGetExportTable" {
        NOTED.call_once(|| machine().counters.note_unmodelled(name.to_bytes()));
    }
}

/// The address of the newest version of a driver function, by its name without a version. Null if
/// there is no such function.
fn function(name: &CStr) -> *mut c_void {
    let named = |version: &[u8]| CString::new([name.to_bytes(), version].concat()).ok();
    let versions = [&b"_v3"[..], b"_v2", b""].into_iter().filter_map(named);
    versions
        .map(|name| exported(&name))
        .find(|address| !address.is_null())
        .unwrap_or(ptr::null_mut())
}

/// The address of an exported function of this library, or null.
fn exported(name: &CStr) -> *mut c_void {
    let mut here = MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: the address is in this library, and the first call initializes the result. The
    // library stays loaded.
    unsafe {
        if libc::dladdr(exported as *const c_void, here.as_mut_ptr()) == 0 {
            return ptr::null_mut();
        }
        let library = libc::dlopen(
            here.assume_init().dli_fname,
            libc::RTLD_NOW | libc::RTLD_NOLOAD,
        );
        if library.is_null() {
            ptr::null_mut()
        } else {
            libc::dlsym(library, name.as_ptr())
        }
    }
}
