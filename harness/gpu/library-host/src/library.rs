use std::ffi::{c_int, c_void};
use std::{mem, path, ptr};

use harness_allocator::allocator::library::LibrarySpec;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::handles::Stream;

pub(crate) struct Functions {
    allocate: unsafe extern "C" fn(isize, c_int, Stream) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void, isize, c_int, Stream),
    record_stream: Option<unsafe extern "C" fn(*mut c_void, Stream)>,
    empty_cache: Option<unsafe extern "C" fn()>,
}

impl Functions {
    /// Loads a library, which is never unloaded.
    ///
    /// # Safety
    /// The functions have the types of the library interface.
    pub(crate) unsafe fn load(spec: &LibrarySpec) -> Result<Self, String> {
        let path =
            path::absolute(&spec.path).map_err(|error| format!("it cannot be loaded: {error}"))?;
        // SAFETY: this process exists only to run the library, including its initializers.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|error| format!("it cannot be loaded: {error}"))?;
        // SAFETY: the user guarantees that these functions take these arguments.
        let functions = unsafe {
            Self {
                allocate: find(&library, &spec.alloc)?,
                free: find(&library, &spec.free)?,
                record_stream: spec
                    .record_stream
                    .as_deref()
                    .map(|name| find(&library, name))
                    .transpose()?,
                empty_cache: spec
                    .empty_cache
                    .as_deref()
                    .map(|name| find(&library, name))
                    .transpose()?,
            }
        };
        mem::forget(library);
        Ok(functions)
    }

    /// Returns the address of new memory, or zero.
    pub(crate) fn allocate(&self, size: u64, stream: u32) -> u64 {
        // SAFETY: the arguments match the library's interface.
        unsafe { (self.allocate)(signed(size), 0, Stream::new(stream)).expose_provenance() as u64 }
    }

    /// # Safety
    /// The library returned the address, and it is freed once.
    pub(crate) unsafe fn free(&self, address: u64, size: u64, stream: u32) {
        // SAFETY: as the caller promises.
        unsafe { (self.free)(pointer(address), signed(size), 0, Stream::new(stream)) };
    }

    /// # Safety
    /// The library returned the address, and it is not freed.
    pub(crate) unsafe fn record_stream(&self, address: u64, stream: u32) {
        if let Some(record_stream) = self.record_stream {
            // SAFETY: as the caller promises.
            unsafe { record_stream(pointer(address), Stream::new(stream)) };
        }
    }

    pub(crate) fn empty_cache(&self) {
        if let Some(empty_cache) = self.empty_cache {
            // SAFETY: the function has no arguments.
            unsafe { empty_cache() };
        }
    }
}

/// # Safety
/// The function has this type.
unsafe fn find<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
    // SAFETY: as the caller promises.
    unsafe { library.get::<T>(name) }
        .map(|function| *function)
        .map_err(|error| format!("it cannot be used: {error}"))
}

fn signed(size: u64) -> isize {
    isize::try_from(size).unwrap_or(isize::MAX)
}

fn pointer(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}
