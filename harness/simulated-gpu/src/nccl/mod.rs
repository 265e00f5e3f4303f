//! A model of NCCL for processes with one device each on one machine. It assumes that all ranks have the data of this rank. So a gather writes this
//! rank's data into every slot, a scatter copies its slice, and a reduction or broadcast copies. Broadcasts, sends and receives of a group end with the
//! group ([`end_group`]). Results that depend on other ranks' data are wrong; every report names them as a model.

mod split;

use std::ffi::{c_char, c_int, c_void};
use std::hash::{Hash as _, Hasher as _};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{cell::RefCell, env, mem::MaybeUninit, path::Path};

use harness_allocator::hash::Mixer;
use harness_gpu_settings::ffi::{Out, write};
use harness_gpu_settings::{export, settings::RUN};

use self::split::{Member, split};
use crate::{runtime::copy_on_device, world::machine};

/// Version 2.28.9.
const VERSION: c_int = 22_809;

/// `NCCL_SPLIT_NOCOLOR`: the rank joins no new communicator.
const NO_COLOR: c_int = -1;
/// `ncclSystemError`.
const SYSTEM_ERROR: c_int = 2;

struct Communicator {
    ranks: c_int,
    rank: c_int,
    /// The same on all ranks. `None` if one process has all ranks.
    id: Option<u64>,
    /// The number of splits so far.
    splits: AtomicU32,
}

/// `ncclUniqueId`, passed by value.
#[repr(C)]
struct UniqueId([u64; 16]);

/// Bytes per element, by `ncclDataType_t`.
const fn element(kind: c_int) -> usize {
    match kind {
        0 | 1 | 10 | 11 => 1,
        6 | 9 => 2,
        2 | 3 | 7 => 4,
        _ => 8,
    }
}

/// Success, or `ncclInvalidArgument` after a null pointer.
fn answer(written: bool) -> c_int {
    if written { 0 } else { 4 }
}

export! {
    ncclGetVersion(version: Out<'_, c_int>) = answer(write(version, VERSION));
    ncclGetUniqueId(id: Out<'_, UniqueId>) = answer(write(id, UniqueId::new()));
    ncclCommInitRank(into: Out<'_, *mut Communicator>, ranks: c_int, id: UniqueId, rank: c_int) = create(into, ranks, rank, Some(id.0[0]));
    ncclCommInitRankConfig(into: Out<'_, *mut Communicator>, ranks: c_int, id: UniqueId, rank: c_int, _: *const c_void) =
        create(into, ranks, rank, Some(id.0[0]));
    ncclCommInitRankScalable(
        into: Out<'_, *mut Communicator>, ranks: c_int, rank: c_int, _: c_int, ids: Option<&UniqueId>, _: *const c_void
    ) = create(into, ranks, rank, ids.map(|first| first.0[0]));
    ncclCommDestroy, ncclCommAbort(_: Option<Box<Communicator>>) = 0;
    ncclCommCount(communicator: &Communicator, count: Out<'_, c_int>) = answer(write(count, communicator.ranks));
    ncclCommUserRank(communicator: &Communicator, rank: Out<'_, c_int>) = answer(write(rank, communicator.rank));
    ncclAllGather(from: usize, to: usize, count: usize, kind: c_int, communicator: &Communicator, _: usize) = {
        let bytes = count * element(kind);
        (0..communicator.ranks as usize).fold(0, |_, rank| copy(from, to + rank * bytes, bytes))
    };
    ncclGather(from: usize, to: usize, count: usize, kind: c_int, root: c_int, communicator: &Communicator, stream: usize) =
        if root == communicator.rank { ncclAllGather(from, to, count, kind, communicator, stream) } else { 0 };
    ncclReduceScatter(from: usize, to: usize, count: usize, kind: c_int, _: c_int, communicator: &Communicator, _: usize) = {
        let bytes = count * element(kind);
        copy(from + communicator.rank as usize * bytes, to, bytes)
    };
    ncclAllReduce(from: usize, to: usize, count: usize, kind: c_int, _: c_int, _: *const Communicator, _: usize) =
        copy(from, to, count * element(kind));
    ncclReduce(from: usize, to: usize, count: usize, kind: c_int, _: c_int, _: c_int, _: *const Communicator, _: usize) =
        copy(from, to, count * element(kind));
    ncclAlltoAll(from: usize, to: usize, count: usize, kind: c_int, communicator: &Communicator, _: usize) =
        copy(from, to, count * element(kind) * communicator.ranks as usize);
}

impl UniqueId {
    /// The first word is unique within the run.
    fn new() -> Self {
        static IDS: AtomicU32 = AtomicU32::new(0);
        Self([u64::from(std::process::id()) << 32 | u64::from(IDS.fetch_add(1, Ordering::Relaxed)); 16])
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(status: c_int) -> *const c_char {
    if status == 0 { c"no error".as_ptr() } else { c"unknown result code".as_ptr() }
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_: usize) -> *const c_char {
    c"".as_ptr()
}

fn create(into: Out<'_, *mut Communicator>, ranks: c_int, rank: c_int, id: Option<u64>) -> c_int {
    answer(write(into, Box::into_raw(Box::new(Communicator { ranks, rank, id, splits: AtomicU32::new(0) }))))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitAll(into: *mut MaybeUninit<*mut Communicator>, ranks: c_int, _: *const c_int) -> c_int {
    for rank in 0..ranks {
        // SAFETY: the program passes an array of `ranks` handles.
        create(unsafe { into.add(usize::try_from(rank).unwrap_or(0)).as_mut() }, ranks, rank, None);
    }
    0
}

/// Waits until all ranks have called. The new communicator keeps all ranks if the run has no folder or one process has all ranks.
#[unsafe(no_mangle)]
extern "C" fn ncclCommSplit(parent: &Communicator, color: c_int, key: c_int, into: Out<'_, *mut Communicator>, _: *const c_void) -> c_int {
    let (Some(id), Some(folder)) = (parent.id, env::var_os(RUN)) else { return create(into, parent.ranks, parent.rank, parent.id) };
    let number = parent.splits.fetch_add(1, Ordering::Relaxed);
    let file = Path::new(&folder).join(format!("nccl-{id:x}-{number}"));
    let ranks = usize::try_from(parent.ranks).unwrap_or(0);
    match split(&file, ranks, Member { rank: parent.rank, color, key }) {
        Ok(_) if color == NO_COLOR => answer(write(into, std::ptr::null_mut())),
        Ok((ranks, rank)) => {
            let mut hasher = Mixer::default();
            (id, number, color).hash(&mut hasher);
            create(into, ranks as c_int, rank as c_int, Some(hasher.finish()))
        }
        Err(_) => SYSTEM_ERROR,
    }
}

/// Copies bytes between two buffers of a device.
fn copy(from: usize, to: usize, bytes: usize) -> c_int {
    machine().tick();
    if from != to {
        copy_on_device(to, from, bytes);
    }
    0
}

/// A buffer that a group sends or fills.
#[derive(Clone, Copy)]
struct Buffer {
    address: usize,
    bytes: usize,
}

/// The open group of a thread.
#[derive(Default)]
struct Group {
    depth: u32,
    /// What this rank sends to itself.
    own: Vec<Buffer>,
    /// What it sends to other ranks.
    sent: Vec<Buffer>,
    received: Vec<Buffer>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Changes the open group. Outside of a group, each call is a group.
fn in_group(change: impl FnOnce(&mut Group)) -> c_int {
    GROUP.with_borrow_mut(|group| {
        change(group);
        if group.depth == 0 {
            end_group(group);
        }
    });
    0
}

/// Fills each received buffer with data of its size: what this rank sends to itself, because the other ranks would send the same, or else what it sends
/// to another rank. PyTorch gathers with one broadcast per rank, and exchanges with a send and a receive per rank.
fn end_group(group: &mut Group) {
    let Group { own, sent, received, .. } = std::mem::take(group);
    for buffer in received {
        let data = own.iter().chain(&sent).find(|data| data.bytes == buffer.bytes);
        copy(data.map_or(buffer.address, |data| data.address), buffer.address, buffer.bytes);
    }
}

export! {
    ncclGroupStart() = in_group(|group| group.depth += 1);
    ncclGroupEnd() = in_group(|group| group.depth = group.depth.saturating_sub(1));
    ncclBroadcast(from: usize, to: usize, count: usize, kind: c_int, root: c_int, communicator: &Communicator, _: usize) = in_group(|group| {
        let bytes = count * element(kind);
        let data = Buffer { address: from, bytes };
        if root == communicator.rank {
            group.own.push(data);
        } else if from != to {
            group.sent.push(data);
        }
        group.received.push(Buffer { address: to, bytes });
    });
    ncclSend(from: usize, count: usize, kind: c_int, peer: c_int, communicator: &Communicator, _: usize) = in_group(|group| {
        let sent = if peer == communicator.rank { &mut group.own } else { &mut group.sent };
        sent.push(Buffer { address: from, bytes: count * element(kind) });
    });
    ncclRecv(to: usize, count: usize, kind: c_int, _: c_int, _: *const Communicator, _: usize) =
        in_group(|group| group.received.push(Buffer { address: to, bytes: count * element(kind) }));
    ncclBcast(buffer: usize, count: usize, kind: c_int, root: c_int, communicator: &Communicator, stream: usize) =
        ncclBroadcast(buffer, buffer, count, kind, root, communicator, stream);
}
