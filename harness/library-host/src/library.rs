//! The allocator library's functions ([`Functions`]).

use std::ffi::{CStr, c_char, c_int, c_void};

use harness_allocator::allocator::library::wire::Order;

use crate::handles::Stream;

type Allocate = unsafe extern "C" fn(isize, c_int, Stream) -> *mut c_void;
type Free = unsafe extern "C" fn(*mut c_void, isize, c_int, Stream);
type RecordStream = unsafe extern "C" fn(*mut c_void, Stream);
type EmptyCache = unsafe extern "C" fn();

/// The functions of the library.
pub(crate) struct Functions {
    pub(crate) allocate: Allocate,
    pub(crate) free: Free,
    pub(crate) record_stream: Option<RecordStream>,
    pub(crate) empty_cache: Option<EmptyCache>,
}

impl Functions {
    /// # Safety
    /// The arguments are C strings: the library's path, and the names of its functions or null. The functions have the types of
    /// the library interface.
    pub(crate) unsafe fn load(path: *const c_char, names: [*const c_char; 4]) -> Result<Self, String> {
        // SAFETY: the path is a C string. This process exists only to run the library, including its initializers.
        let library = unsafe { libc::dlopen(path, libc::RTLD_NOW) };
        if library.is_null() {
            return Err(format!("it cannot be loaded: {}", loader_error()));
        }
        let find = |name: *const c_char| -> Result<*mut c_void, String> {
            // SAFETY: the library is loaded, and the name is a C string.
            let found = unsafe { libc::dlsym(library, name) };
            if found.is_null() { Err(format!("it cannot be used: {}", loader_error())) } else { Ok(found) }
        };
        let optional = |name: *const c_char| if name.is_null() { Ok(None) } else { find(name).map(Some) };
        let [alloc, free, record_stream, empty_cache] = names;
        let (alloc, free) = (find(alloc)?, find(free)?);
        let (record_stream, empty_cache) = (optional(record_stream)?, optional(empty_cache)?);
        // SAFETY: the user guarantees that these functions take these arguments.
        Ok(unsafe {
            Self {
                allocate: std::mem::transmute::<*mut c_void, Allocate>(alloc),
                free: std::mem::transmute::<*mut c_void, Free>(free),
                record_stream: record_stream.map(|function| std::mem::transmute::<*mut c_void, RecordStream>(function)),
                empty_cache: empty_cache.map(|function| std::mem::transmute::<*mut c_void, EmptyCache>(function)),
            }
        })
    }

    /// # Safety
    /// The order's addresses were returned by the library.
    pub(crate) unsafe fn call(&self, order: Order) -> u64 {
        let pointer = |address: u64| std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: guaranteed by the caller.
        unsafe {
            match order {
                Order::Allocate { size, stream } => {
                    let size = isize::try_from(size).unwrap_or(isize::MAX);
                    return (self.allocate)(size, 0, Stream::new(stream)).expose_provenance() as u64;
                }
                Order::Free { address, size, stream } => {
                    (self.free)(pointer(address), isize::try_from(size).unwrap_or(isize::MAX), 0, Stream::new(stream));
                }
                Order::RecordStream { address, stream } => {
                    self.record_stream.iter().for_each(|function| function(pointer(address), Stream::new(stream)));
                }
                Order::EmptyCache => self.empty_cache.iter().for_each(|function| function()),
                Order::Load | Order::Time(_) | Order::End | Order::Answer { .. } => {}
            }
        }
        0
    }
}

/// Returns the dynamic linker's last error.
fn loader_error() -> String {
    // SAFETY: the function has no precondition.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the dynamic linker gives no reason".to_owned();
    }
    // SAFETY: the text is a C string that lives until this thread's next call of the linker.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
