//! NCCL for processes with a device each on one machine, by a model: every rank is taken to hold what this rank holds. So a gather writes this
//! rank's data into every slot, a scatter its own slice, and a reduction or a broadcast copies. Results that depend on other ranks' data are wrong,
//! and are said to be a model in every report.

use std::ffi::{c_char, c_int, c_void};

use crate::runtime::copy_on_device;
use crate::world::machine;

/// The version that is told: 2.28.9.
const VERSION: c_int = 22_809;

struct Communicator {
    ranks: c_int,
    rank: c_int,
}

/// `ncclUniqueId`, passed by value.
#[repr(C)]
struct UniqueId([u64; 16]);

/// Bytes of an element, by `ncclDataType_t`.
const fn element(kind: c_int) -> usize {
    match kind {
        0 | 1 | 10 | 11 => 1,
        6 | 9 => 2,
        2 | 3 | 7 => 4,
        _ => 8,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { *version = VERSION };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    // SAFETY: the program passes a pointer to an id. Programs hand it round and compare nothing.
    unsafe { *id = UniqueId([u64::from(std::process::id()); 16]) };
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(status: c_int) -> *const c_char {
    if status == 0 { c"no error".as_ptr() } else { c"unknown result code".as_ptr() }
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_: usize) -> *const c_char {
    c"".as_ptr()
}

/// # Safety
/// `into` may be written.
unsafe fn create(into: *mut *mut Communicator, ranks: c_int, rank: c_int) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { *into = Box::into_raw(Box::new(Communicator { ranks, rank })) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitRank(into: *mut *mut Communicator, ranks: c_int, _: UniqueId, rank: c_int) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    unsafe { create(into, ranks, rank) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitRankConfig(
    into: *mut *mut Communicator,
    ranks: c_int,
    _: UniqueId,
    rank: c_int,
    _: *const c_void,
) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    unsafe { create(into, ranks, rank) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitRankScalable(
    into: *mut *mut Communicator,
    ranks: c_int,
    rank: c_int,
    _: c_int,
    _: *const UniqueId,
    _: *const c_void,
) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    unsafe { create(into, ranks, rank) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitAll(into: *mut *mut Communicator, ranks: c_int, _: *const c_int) -> c_int {
    for rank in 0..ranks {
        // SAFETY: the program passes an array of as many handles.
        unsafe { create(into.add(usize::try_from(rank).unwrap_or(0)), ranks, rank) };
    }
    0
}

/// A communicator of the ranks of one color: which others have it is not known, so it is taken for all.
#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommSplit(
    parent: *const Communicator,
    _: c_int,
    _: c_int,
    into: *mut *mut Communicator,
    _: *const c_void,
) -> c_int {
    // SAFETY: the program passes a communicator and a pointer to a handle.
    unsafe { create(into, (*parent).ranks, (*parent).rank) }
}

/// # Safety
/// The communicator is one of this library, given back once.
unsafe fn delete(communicator: *mut Communicator) -> c_int {
    // SAFETY: as the caller promises.
    drop(unsafe { Box::from_raw(communicator) });
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommDestroy(communicator: *mut Communicator) -> c_int {
    // SAFETY: the program gives a communicator back once.
    unsafe { delete(communicator) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommAbort(communicator: *mut Communicator) -> c_int {
    // SAFETY: the program gives a communicator back once.
    unsafe { delete(communicator) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommCount(communicator: *const Communicator, count: *mut c_int) -> c_int {
    // SAFETY: the program passes a communicator and a pointer to a number.
    unsafe { *count = (*communicator).ranks };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommUserRank(communicator: *const Communicator, rank: *mut c_int) -> c_int {
    // SAFETY: the program passes a communicator and a pointer to a number.
    unsafe { *rank = (*communicator).rank };
    0
}

/// Copies as many bytes between buffers of a device.
fn copy(from: usize, to: usize, bytes: usize) {
    machine().tick();
    if from != to {
        copy_on_device(to, from, bytes);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclAllGather(
    from: usize,
    to: usize,
    count: usize,
    kind: c_int,
    communicator: *const Communicator,
    _: usize,
) -> c_int {
    let bytes = count * element(kind);
    // SAFETY: the program passes a communicator.
    let ranks = usize::try_from(unsafe { (*communicator).ranks }).unwrap_or(0);
    (0..ranks).for_each(|rank| copy(from, to + rank * bytes, bytes));
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclReduceScatter(
    from: usize,
    to: usize,
    count: usize,
    kind: c_int,
    _: c_int,
    communicator: *const Communicator,
    _: usize,
) -> c_int {
    let bytes = count * element(kind);
    // SAFETY: the program passes a communicator.
    let rank = usize::try_from(unsafe { (*communicator).rank }).unwrap_or(0);
    copy(from + rank * bytes, to, bytes);
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllReduce(from: usize, to: usize, count: usize, kind: c_int, _: c_int, _: *const Communicator, _: usize) -> c_int {
    copy(from, to, count * element(kind));
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclReduce(from: usize, to: usize, count: usize, kind: c_int, _: c_int, _: c_int, _: *const Communicator, _: usize) -> c_int {
    copy(from, to, count * element(kind));
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclBroadcast(from: usize, to: usize, count: usize, kind: c_int, _: c_int, _: *const Communicator, _: usize) -> c_int {
    copy(from, to, count * element(kind));
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclBcast(_: usize, _: usize, _: c_int, _: c_int, _: *const Communicator, _: usize) -> c_int {
    machine().tick();
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclAlltoAll(from: usize, to: usize, count: usize, kind: c_int, communicator: *const Communicator, _: usize) -> c_int {
    // SAFETY: the program passes a communicator.
    let ranks = usize::try_from(unsafe { (*communicator).ranks }).unwrap_or(0);
    copy(from, to, count * element(kind) * ranks);
    0
}
