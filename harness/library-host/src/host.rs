//! The loop over orders of the harness.

use std::ffi::{CStr, c_char, c_int, c_void};

use harness_allocator::allocator::library::wire::{Order, Reply};

use crate::connection::{connect, connection};
use crate::handles::Stream;
use crate::timed;

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

/// Loads a library and does what the harness orders, until it orders the end or has gone. The process is to end then.
///
/// # Safety
/// Four C strings: the library's path and the names of its functions for allocation and free, then those of the others or null. Standard input is
/// the socket to the harness.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_library_host(
    path: *const c_char,
    alloc: *const c_char,
    free: *const c_char,
    record_stream: *const c_char,
    empty_cache: *const c_char,
) -> c_int {
    // SAFETY: the process is to end with the harness, whatever the library does meanwhile.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    if !connect() {
        return 1;
    }
    let mut functions = None;
    while let Some(order) = next_order() {
        let done = match (order, &functions) {
            (Order::End, _) => {
                // Destructors of the library may still call, and are answered until the process has ended.
                return 0;
            }
            (Order::Load, _) => {
                // SAFETY: as the caller promises.
                match unsafe { Functions::load(path, [alloc, free, record_stream, empty_cache]) } {
                    Ok(loaded) => {
                        functions = Some(loaded);
                        Reply::Done(0)
                    }
                    Err(why) => Reply::Refused(why),
                }
            }
            // SAFETY: as for the other orders.
            (Order::Time(program), Some(functions)) => Reply::Timed(unsafe { timed::run(functions, &program) }),
            // SAFETY: the arguments are what the library's interface has, and addresses are its own.
            (order, Some(functions)) => Reply::Done(unsafe { functions.call(order) }),
            (_, None) => Reply::Refused("it is not loaded".to_owned()),
        };
        if let Some(connection) = connection().as_mut() {
            connection.has_order = false;
            connection.say(&done);
        }
    }
    0
}

/// Waits for the harness. Calls of the library are listened to from then on.
fn next_order() -> Option<Order> {
    let mut connection = connection();
    let connection = connection.as_mut()?;
    let order = connection.next();
    connection.has_order = true;
    order
}

impl Functions {
    /// # Safety
    /// As for [`harness_library_host`].
    unsafe fn load(path: *const c_char, names: [*const c_char; 4]) -> Result<Self, String> {
        // SAFETY: the path is a C string. What initialisers of the library do is its own business: this process is there for it alone.
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
        // SAFETY: the user says that these are functions with these arguments.
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
    /// The order's addresses are those that the library has handed out.
    unsafe fn call(&self, order: Order) -> u64 {
        let pointer = |address: u64| std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: as the caller promises.
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

/// What the dynamic linker says of its last failure.
fn loader_error() -> String {
    // SAFETY: the linker's function has no precondition.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the dynamic linker does not say why".to_owned();
    }
    // SAFETY: the text is a C string, which lives until the next call of the linker's in this thread.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
