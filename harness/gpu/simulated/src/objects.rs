//! Objects of CUDA's libraries without contents: callers only pass their handles around.

use std::alloc::{Layout, alloc_zeroed, dealloc};

/// The size of objects, which callers never access.
const OBJECT: Layout = match Layout::from_size_align(512, 16) {
    Ok(layout) => layout,
    Err(_) => panic!("512 is a multiple of 16"),
};

/// A new zeroed object. Callers only pass its handle around.
pub(crate) fn new_object() -> *mut u8 {
    // SAFETY: the layout is not empty.
    unsafe { alloc_zeroed(OBJECT) }
}

/// Destroys an object.
///
/// # Safety
/// It is null, or [`new_object`] returned it and it is not destroyed yet.
pub(crate) unsafe fn delete_object(object: *mut u8) {
    if !object.is_null() {
        // SAFETY: as the caller promises; all objects have this layout.
        unsafe { dealloc(object, OBJECT) };
    }
}
