//! [`at_fork_of_program`] registers handlers of forks in the program's C library.

use std::ffi::{c_int, c_void};
use std::ptr;

/// `pthread_atfork` of the program's C library. The C library of this namespace would register
/// handlers that never run.
pub(crate) unsafe extern "C" fn at_fork_of_program(
    before: Handler,
    in_parent: Handler,
    in_child: Handler,
) -> c_int {
    type Register = unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> c_int;
    // SAFETY: the name is a string, and the library is loaded already.
    let library = unsafe {
        libc::dlmopen(
            libc::LM_ID_BASE,
            c"libc.so.6".as_ptr(),
            libc::RTLD_LAZY | libc::RTLD_NOLOAD,
        )
    };
    if library.is_null() {
        return libc::ENOSYS;
    }
    // SAFETY: the handle is valid, and the name is a string.
    let register = unsafe { libc::dlsym(library, c"__register_atfork".as_ptr()) };
    if register.is_null() {
        return libc::ENOSYS;
    }
    // SAFETY: the function has this type since glibc 2.3.2. Without a handle of a library, the
    // handlers are never removed.
    unsafe {
        std::mem::transmute::<*mut c_void, Register>(register)(
            before,
            in_parent,
            in_child,
            ptr::null_mut(),
        )
    }
}

type Handler = Option<unsafe extern "C" fn()>;
