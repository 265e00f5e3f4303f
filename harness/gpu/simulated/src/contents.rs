//! Copies between the contents of devices, for [`Values::Cpu`], and the functions exported here,
//! through which the Python module `cpu_values` computes operations on them.
//!
//! An operation runs twice: on the device, where kernels are no-ops, and then on the CPU. During
//! the first run, copies change no contents, and those to the host return zeros, or the numbers
//! that [`harness_values_begin`] announced, one per eight bytes.
//!
//! [`Values::Cpu`]: harness_gpu_settings::settings::Values::Cpu

use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{cell::Cell, cell::RefCell, collections::VecDeque, ptr, slice};

use harness_allocator::units::Bytes;
use harness_gpu_settings::{export, settings::Values};

use crate::world::{State, is_device_memory, machine};

/// An operation that runs on the device.
#[derive(Default)]
struct Operation {
    /// The numbers that it reads next.
    numbers: VecDeque<i64>,
    /// Whether it has copied from the device to the host.
    has_read: bool,
}

thread_local! {
    static OPERATION: RefCell<Option<Operation>> = const { RefCell::new(None) };
    static ENDED: Cell<u64> = const { Cell::new(0) };
}

/// The number of runs of operations that have ended in this thread, with or without an error.
pub(crate) fn ended() -> u64 {
    ENDED.get()
}

/// Counts captures of streams.
#[unsafe(no_mangle)]
pub(crate) static harness_values_captures: AtomicU64 = AtomicU64::new(0);

pub(crate) fn capture_begins() {
    harness_values_captures.fetch_add(1, Ordering::Relaxed);
}

/// The dispatch keys of torch through which operations arrive, and the functions of torch that read
/// and change the keys of a thread.
struct Keys {
    is_included: extern "C" fn(u16) -> bool,
    include: extern "C" fn(u16, bool),
    outer: u16,
    inner: u16,
}

static KEYS: OnceLock<Keys> = OnceLock::new();

/// The number of launches outside of operations, and of results of special contents, which are not
/// computed.
static NOT_COMPUTED: AtomicU64 = AtomicU64::new(0);

fn in_operation() -> bool {
    OPERATION.with_borrow(Option::is_some)
}

pub(crate) fn launched() {
    if machine().settings.values == Values::Cpu && !in_operation() {
        not_computed();
    }
}

pub(crate) fn not_computed() {
    NOT_COMPUTED.fetch_add(1, Ordering::Relaxed);
}

/// The host memory with the contents of a range, or the range itself if it is not on a device.
/// `None` without contents.
fn host(state: &mut State, address: u64, size: usize) -> Option<usize> {
    if !is_device_memory(address) {
        return Some(address as usize);
    }
    let (start, len, host) = state.device_at(address).ok()?.contents()?.around(address)?;
    (address - start + size as u64 <= len).then_some(host + (address - start) as usize)
}

/// Copies bytes. Without contents, device memory reads as zeros.
///
/// # Safety
/// Host addresses belong to the program and have `size` bytes.
pub(crate) unsafe fn copy(state: &mut State, to: u64, from: u64, size: usize) {
    let pointer = ptr::with_exposed_provenance_mut::<u8>;
    if size == 0 {
        return; // The addresses may be null.
    }
    if in_operation() && (is_device_memory(to) || is_device_memory(from)) {
        if !is_device_memory(to) {
            // SAFETY: as the caller promises.
            let words =
                unsafe { slice::from_raw_parts_mut(pointer(to as usize), size) }.chunks_mut(8);
            OPERATION.with_borrow_mut(|operation| {
                let Operation { numbers, has_read } = operation.get_or_insert_default();
                *has_read = true;
                words.for_each(|word| {
                    word.copy_from_slice(
                        &numbers.pop_front().unwrap_or(0).to_le_bytes()[..word.len()],
                    )
                });
            });
        }
        return;
    }
    let (Some(host_to), host_from) = (host(state, to, size), host(state, from, size)) else {
        return;
    };
    // SAFETY: both ranges are mapped, or belong to the program as the caller promises; `ptr::copy`
    // allows an overlap.
    unsafe {
        match host_from {
            Some(from) => ptr::copy(pointer(from).cast_const(), pointer(host_to), size),
            None => pointer(host_to).write_bytes(0, size),
        }
    }
}

/// The host memory with the contents of a range. `None` without contents, for the null address of
/// an empty range, and in the run of an operation on the device.
///
/// # Safety
/// A host address belongs to the program and has `len` bytes, and no other reference to the range
/// exists.
unsafe fn slice(state: &mut State, address: u64, len: usize) -> Option<&mut [u8]> {
    let host = host(state, address, len).filter(|host| *host != 0 && !in_operation())?;
    // SAFETY: the range is mapped, or belongs to the program as the caller promises. The lock of
    // the state keeps it mapped.
    Some(unsafe { slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut::<u8>(host), len) })
}

/// Passes the bytes of a range to `act`, up to the first unknown one; none for zeros.
pub(crate) fn read<T>(
    state: &mut State,
    address: u64,
    len: usize,
    act: impl FnOnce(&[u8]) -> T,
) -> T {
    match machine().settings.values {
        Values::Copies => {
            let mut bytes = vec![0; state.copied.known_first(address, len as u64) as usize];
            state.copied.read(address, &mut bytes);
            act(&bytes)
        }
        // SAFETY: the program passes a range, and `act` has no other reference to it.
        Values::Cpu => act(unsafe { slice(state, address, len) }.unwrap_or_default()),
        Values::Zeros => act(&[]),
    }
}

/// Writes the bytes that `fill` writes to its argument, or zeros if it returns `false`.
pub(crate) fn write(
    state: &mut State,
    address: u64,
    len: usize,
    fill: impl FnOnce(&mut [u8]) -> bool,
) {
    match machine().settings.values {
        Values::Zeros => {}
        Values::Copies => {
            let mut bytes = vec![0; len];
            if fill(&mut bytes) {
                state.copied.write(address, &bytes);
            } else {
                state.copied.forget(address, len as u64);
            }
        }
        Values::Cpu => {
            // SAFETY: as above.
            if let Some(into) = unsafe { slice(state, address, len) }
                && !fill(into)
            {
                into.fill(0);
            }
        }
    }
}

pub(crate) fn fill(state: &mut State, address: u64, size: usize, pattern: &[u8]) {
    // SAFETY: the program passes a range.
    let Some(into) = (unsafe { slice(state, address, size) }) else {
        return;
    };
    into.chunks_mut(pattern.len())
        .for_each(|into| into.copy_from_slice(&pattern[..into.len()]));
}

/// Begins the run of an operation on the device. It reads these numbers, one by one.
///
/// # Safety
/// There are `count` numbers.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_values_begin(numbers: *const i64, count: usize) {
    // SAFETY: as the caller promises.
    let numbers = (0..count)
        .map(|index| unsafe { numbers.add(index).read() })
        .collect();
    OPERATION.set(Some(Operation {
        numbers,
        has_read: false,
    }));
}

/// Ends the run of an operation on the device. Returns whether it has read values.
#[unsafe(no_mangle)]
extern "C" fn harness_values_end() -> c_int {
    c_int::from(OPERATION.take().is_some_and(|operation| operation.has_read))
}

/// Sets the dispatch keys, and `c10::impl::tls_is_dispatch_key_included` and
/// `c10::impl::tls_set_dispatch_key_included` of torch.
#[unsafe(no_mangle)]
extern "C" fn harness_values_keys(
    is_included: extern "C" fn(u16) -> bool,
    include: extern "C" fn(u16, bool),
    outer: u16,
    inner: u16,
) {
    let _ = KEYS.set(Keys {
        is_included,
        include,
        outer,
        inner,
    });
}

/// Begins the run of an operation on the device, in which further operations do not arrive. Returns
/// whether they arrived through the outer key.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn harness_values_enter() -> c_int {
    let Some(keys) = KEYS.get() else { return 0 };
    let is_outer = (keys.is_included)(keys.outer);
    (keys.include)(keys.outer, false);
    (keys.include)(keys.inner, false);
    OPERATION.set(Some(Operation::default()));
    c_int::from(is_outer)
}

/// Ends what [`harness_values_enter`] began.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn harness_values_leave(is_outer: c_int) {
    OPERATION.set(None);
    ENDED.set(ENDED.get() + 1);
    let Some(keys) = KEYS.get() else { return };
    (keys.include)(keys.outer, is_outer != 0);
    (keys.include)(keys.inner, true);
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn harness_values_clear(address: u64, size: u64) {
    if let Some(contents) = machine()
        .state()
        .device_at(address)
        .ok()
        .and_then(|memory| memory.contents())
    {
        contents.clear(address, size);
    }
}

export! {
    /// Writes start, size and host address of the contents around an address. Returns whether there
    /// are any.
    harness_values_range(address: u64, into: &mut [u64; 3]) -> bool = {
        let mut state = machine().state();
        let range =
            state.device_at(address).ok().and_then(|memory| memory.contents()?.around(address));
        if let Some((start, size, host)) = range {
            *into = [start, size, host as u64];
        }
        range.is_some()
    };
    /// Returns whether the contents may grow by this many bytes. The devices of the run share the
    /// host memory equally.
    harness_values_fit(bytes: u64) -> bool = {
        let machine = machine();
        let mut state = machine.state();
        let used: Vec<Bytes> = state
            .devices
            .iter_mut()
            .filter_map(|memory| Some(memory.contents()?.in_use()))
            .filter(|used| used.0 > 0)
            .collect();
        let share = machine.settings.host_memory.0 / u64::from(machine.settings.devices);
        used.iter().map(|used| used.0).sum::<u64>() + bytes <= share * (used.len() as u64).max(1)
    };
    harness_values_not_computed() -> u64 = NOT_COMPUTED.load(Ordering::Relaxed);
}
