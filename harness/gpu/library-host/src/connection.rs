//! The socket to the harness, which is this process's standard input, and calls over it.

use std::ffi::{CStr, c_char, c_int};
use std::io::{BufReader, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::{cell::Cell, fs::File, os::fd::FromRawFd, time::Instant};

use harness_allocator::allocator::library::wire::{self, Code, LibraryCall, Order, Reply};
use harness_allocator::sync::lock;

pub(crate) struct Connection {
    from: BufReader<File>,
    to: File,
    /// `true` while the harness waits for the result of an order; only then it answers calls.
    pub(crate) has_order: bool,
}

/// Used by the thread that executes an order, and by the library's own threads.
pub(crate) fn connection() -> MutexGuard<'static, Option<Connection>> {
    static CONNECTION: Mutex<Option<Connection>> = Mutex::new(None);
    lock(&CONNECTION)
}

/// Takes standard input as the socket and replaces it with an empty file.
pub(crate) fn connect() -> bool {
    // SAFETY: standard input is open: the harness started this process with its socket there. The
    // duplicate belongs to this library.
    let socket = unsafe { libc::fcntl(0, libc::F_DUPFD_CLOEXEC, 3) };
    if socket < 0 {
        return false;
    }
    // SAFETY: the path is a C string. Standard input becomes an empty file, and its old descriptor
    // is not needed.
    unsafe {
        let nothing = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY);
        libc::dup2(nothing, 0);
        libc::close(nothing);
    }
    // SAFETY: the descriptor was just created, and nothing else uses it.
    let from = unsafe { File::from_raw_fd(socket) };
    let Ok(to) = from.try_clone() else {
        return false;
    };
    *connection() = Some(Connection {
        from: BufReader::new(from),
        to,
        has_order: false,
    });
    true
}

impl Connection {
    pub(crate) fn say(&mut self, reply: &Reply) {
        // If the harness has ended, no further order arrives.
        let _ = wire::send(&mut self.to, reply).and_then(|()| self.to.flush());
    }

    pub(crate) fn next(&mut self) -> Option<Order> {
        wire::receive(&mut self.from).ok().flatten()
    }
}

thread_local! {
    /// The last error code of this thread, for `cudaGetLastError`.
    static LAST: Cell<c_int> = const { Cell::new(0) };
}

/// Stores the thread's last error, like the runtime.
pub(crate) fn remember(code: Code) -> c_int {
    let code = code as c_int;
    if code != 0 && code != Code::NotReady as c_int {
        LAST.set(code);
    }
    code
}

/// Returns the thread's last error and optionally resets it.
pub(crate) fn last_error(forget: bool) -> c_int {
    if forget { LAST.take() } else { LAST.get() }
}

/// Nanoseconds that calls waited for the harness.
static WAITED: AtomicU64 = AtomicU64::new(0);

/// Returns the nanoseconds that calls have waited for the harness since this process began.
pub(crate) fn waited() -> u64 {
    WAITED.load(Ordering::Relaxed)
}

pub(crate) fn ask(call: LibraryCall) -> Result<u64, Code> {
    let began = Instant::now();
    let answer = ask_now(call);
    WAITED.fetch_add(nanos_since(began), Ordering::Relaxed);
    answer
}

pub(crate) fn nanos_since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

fn ask_now(call: LibraryCall) -> Result<u64, Code> {
    let mut connection = connection();
    let connection = connection
        .as_mut()
        .filter(|connection| connection.has_order)
        .ok_or(Code::Unknown)?;
    connection.say(&Reply::Call(call));
    match connection.next() {
        Some(Order::Answer {
            code: Code::Success,
            value,
        }) => Ok(value),
        Some(Order::Answer { code, .. }) => Err(code),
        _ => Err(Code::Unknown),
    }
}

/// Reports a function that this library lacks.
pub(crate) fn unanswered(name: &str) -> Code {
    if let Some(connection) = connection()
        .as_mut()
        .filter(|connection| connection.has_order)
    {
        connection.say(&Reply::Unanswered(name.to_owned()));
    }
    Code::NotSupported
}

/// The target of all stubs. `r11` contains the stub's descriptor, which begins with the function's
/// name.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
extern "C" fn harness_gpu_unmodelled() {
    std::arch::naked_asm!("mov rdi, r11", "jmp {answer}", answer = sym answer_stub)
}

unsafe extern "C" fn answer_stub(descriptor: *const *const c_char) -> c_int {
    // SAFETY: a stub passes its own descriptor, whose first field is a C string; both live as long
    // as their library.
    let name = unsafe { CStr::from_ptr(*descriptor) };
    remember(unanswered(&name.to_string_lossy()))
}
