//! A model of NCCL for processes on one machine. With [`Values::Cpu`], the processes exchange their data ([`peers`]). Otherwise, or if one process has
//! all ranks, all ranks have the data of the calling rank: most values are unknown, and ranks whose known values differ would go different ways.
//!
//! A collective is done when its call returns. Receives wait for the end of their group, so exchanges within a group do not wait for each other.

mod peers;
mod reduce;

use std::ffi::{CString, c_char, c_int, c_void};
use std::hash::{Hash as _, Hasher as _};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::{cell::RefCell, env, mem::MaybeUninit, path::Path};

use harness_allocator::hash::Mixer;
use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, write};
use harness_gpu_settings::settings::{RUN, Values};

use self::peers::{Failure, Peers};
use crate::contents;
use crate::world::{State, machine};

/// Version 2.28.9.
const VERSION: c_int = 22_809;

/// `NCCL_SPLIT_NOCOLOR`: the rank joins no new communicator.
const NO_COLOR: c_int = -1;
/// `ncclSystemError`.
const SYSTEM_ERROR: c_int = 2;
/// `ncclInvalidUsage`.
const INVALID_USAGE: c_int = 5;
/// `ncclRemoteError`.
const REMOTE_ERROR: c_int = 6;

struct Communicator {
    ranks: usize,
    rank: usize,
    /// The number of splits so far.
    splits: AtomicU32,
    /// The other ranks, if each has a process.
    peers: Option<Peers>,
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
    ncclCommCount(communicator: &Communicator, count: Out<'_, c_int>) = answer(write(count, communicator.ranks as c_int));
    ncclCommUserRank(communicator: &Communicator, rank: Out<'_, c_int>) = answer(write(rank, communicator.rank as c_int));
    ncclAllGather(from: usize, to: usize, count: usize, kind: c_int, communicator: &Communicator, _: usize) =
        communicator.gather("all_gather", None, from, to, count * element(kind));
    ncclGather(from: usize, to: usize, count: usize, kind: c_int, root: c_int, communicator: &Communicator, _: usize) =
        communicator.gather("gather", Some(root), from, to, count * element(kind));
    ncclAlltoAll(from: usize, to: usize, count: usize, kind: c_int, communicator: &Communicator, _: usize) =
        communicator.all_to_all(from, to, count * element(kind));
    ncclScatter(from: usize, to: usize, count: usize, kind: c_int, root: c_int, communicator: &Communicator, _: usize) =
        communicator.scatter(root, from, to, count * element(kind));
    ncclReduceScatter(from: usize, to: usize, count: usize, kind: c_int, operation: c_int, communicator: &Communicator, _: usize) =
        communicator.reduce("reduce_scatter", None, [from, to, count], kind, operation);
    ncclAllReduce(from: usize, to: usize, count: usize, kind: c_int, operation: c_int, communicator: &Communicator, _: usize) =
        communicator.reduce("all_reduce", None, [from, to, count], kind, operation);
    ncclReduce(from: usize, to: usize, count: usize, kind: c_int, operation: c_int, root: c_int, communicator: &Communicator, _: usize) =
        communicator.reduce("reduce", Some(root), [from, to, count], kind, operation);
    ncclRedOpCreatePreMulSum(operation: Out<'_, c_int>, scalar: *const u8, kind: c_int, residence: c_int, _: *const Communicator) = {
        let len = element(kind);
        let bytes = match residence {
            // SAFETY: the program passes an element in host memory.
            1 => Some(unsafe { std::slice::from_raw_parts(scalar, len) }.to_vec()),
            _ => contents::read(&mut machine().state(), scalar.expose_provenance() as u64, len),
        };
        let mut factors = FACTORS.lock().unwrap_or_else(PoisonError::into_inner);
        factors.push(bytes.map_or(1.0, |bytes| reduce::number(&bytes, kind)));
        answer(write(operation, FIRST_FACTOR + factors.len() as c_int - 1))
    };
    ncclRedOpDestroy(_: c_int, _: *const Communicator) = 0;
    ncclGroupStart() = in_group(|group| group.depth += 1);
    ncclGroupEnd() = in_group(|group| group.depth = group.depth.saturating_sub(1));
    ncclBroadcast(from: usize, to: usize, count: usize, kind: c_int, root: c_int, communicator: &Communicator, _: usize) =
        communicator.broadcast(root, from, to, count * element(kind));
    ncclBcast(buffer: usize, count: usize, kind: c_int, root: c_int, communicator: &Communicator, stream: usize) =
        ncclBroadcast(buffer, buffer, count, kind, root, communicator, stream);
    ncclSend(from: usize, count: usize, kind: c_int, peer: c_int, communicator: &Communicator, _: usize) =
        communicator.send(peer as usize, Buffer { address: from, bytes: count * element(kind) });
    ncclRecv(to: usize, count: usize, kind: c_int, peer: c_int, communicator: &Communicator, _: usize) = in_group(|group| {
        let buffer = Buffer { address: to, bytes: count * element(kind) };
        match communicator.others() {
            Some(_) => group.from_others.push(Receive { communicator, peer: peer as usize, buffer }),
            None => group.received.push(buffer),
        }
    });
}

/// The factors of the operations that multiply before the sum. Their numbers begin with [`FIRST_FACTOR`].
static FACTORS: Mutex<Vec<f64>> = Mutex::new(Vec::new());
/// `ncclNumOps`.
const FIRST_FACTOR: c_int = 5;

impl UniqueId {
    /// The first word is unique within the run.
    fn new() -> Self {
        static IDS: AtomicU32 = AtomicU32::new(0);
        Self([u64::from(std::process::id()) << 32 | u64::from(IDS.fetch_add(1, Ordering::Relaxed)); 16])
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(status: c_int) -> *const c_char {
    match status {
        0 => c"no error",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        INVALID_USAGE => c"invalid usage",
        _ => c"unknown result code",
    }
    .as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_: usize) -> *const c_char {
    LAST_FAILURE.with_borrow(|text| text.as_ptr())
}

thread_local! {
    static LAST_FAILURE: RefCell<CString> = RefCell::default();
}

/// Names a failed exchange, and returns its error code.
fn failed(failure: &Failure) -> c_int {
    eprintln!("simulated GPU: {failure}");
    LAST_FAILURE.set(CString::new(failure.to_string()).unwrap_or_default());
    match failure {
        Failure::Ended { .. } => REMOTE_ERROR,
        Failure::Mismatch { .. } => INVALID_USAGE,
        Failure::Io(_) => SYSTEM_ERROR,
    }
}

fn create(into: Out<'_, *mut Communicator>, ranks: c_int, rank: c_int, id: Option<u64>) -> c_int {
    let (ranks, rank) = (ranks as usize, rank as usize);
    let joined = match (id.filter(|_| ranks > 1), env::var_os(RUN)) {
        (Some(id), Some(folder)) => Peers::join(Path::new(&folder), id, ranks, rank).map(Some),
        _ => Ok(None),
    };
    let Ok(peers) = joined else { return SYSTEM_ERROR };
    answer(write(into, Box::into_raw(Box::new(Communicator { ranks, rank, splits: AtomicU32::new(0), peers }))))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitAll(into: *mut MaybeUninit<*mut Communicator>, ranks: c_int, _: *const c_int) -> c_int {
    for rank in 0..ranks {
        // SAFETY: the program passes an array of `ranks` handles.
        create(unsafe { into.add(usize::try_from(rank).unwrap_or(0)).as_mut() }, ranks, rank, None);
    }
    0
}

/// Waits until all ranks have called. Members of a color are ordered by key, then by rank. Without other processes, the new communicator is the same.
#[unsafe(no_mangle)]
extern "C" fn ncclCommSplit(parent: &Communicator, color: c_int, key: c_int, into: Out<'_, *mut Communicator>, _: *const c_void) -> c_int {
    let Some(peers) = &parent.peers else { return create(into, parent.ranks as c_int, parent.rank as c_int, None) };
    let parts = match peers.exchange("split".to_owned(), [color, key].map(i32::to_ne_bytes).concat(), |_| true) {
        Ok(parts) => parts,
        Err(failure) => return failed(&failure),
    };
    if color == NO_COLOR {
        return answer(write(into, std::ptr::null_mut()));
    }
    let mut members: Vec<(c_int, usize)> = Vec::new();
    for (rank, part) in parts.iter().enumerate() {
        if let [theirs, key] = *part.as_chunks().0
            && i32::from_ne_bytes(theirs) == color
        {
            members.push((i32::from_ne_bytes(key), rank));
        }
    }
    members.sort_unstable();
    let rank = members.iter().position(|member| *member == (key, parent.rank)).unwrap_or(0);
    let mut hasher = Mixer::default();
    (peers.id(), parent.splits.fetch_add(1, Ordering::Relaxed), color).hash(&mut hasher);
    create(into, members.len() as c_int, rank as c_int, Some(hasher.finish()))
}

/// Writes bytes to device memory, or zeros if there are none.
fn set(state: &mut State, address: usize, len: usize, bytes: Option<&[u8]>) {
    contents::write(state, address as u64, len, bytes);
}

impl Communicator {
    const fn is(&self, rank: c_int) -> bool {
        self.rank == rank as usize
    }

    /// The other ranks if they exchange data.
    fn others(&self) -> Option<&Peers> {
        self.peers.as_ref().filter(|_| machine().settings.values == Values::Cpu)
    }

    /// Exchanges the bytes at an address. If this rank needs the bytes of any ranks, `finish` receives the bytes of all, which are empty if they are
    /// zeros or not needed.
    fn collective(
        &self,
        call: String,
        (from, len): (usize, usize),
        needs: impl Fn(usize) -> bool,
        finish: impl FnOnce(&mut State, &[Vec<u8>]),
    ) -> c_int {
        let machine = machine();
        machine.tick();
        let data = contents::read(&mut machine.state(), from as u64, len).unwrap_or_default();
        let parts = match self.others() {
            Some(peers) => peers.exchange(call, data, &needs),
            None => Ok(vec![data; self.ranks]),
        };
        match parts {
            Ok(parts) if (0..self.ranks).any(needs) => finish(&mut machine.state(), &parts),
            Ok(_) => {}
            Err(failure) => return failed(&failure),
        }
        0
    }

    /// Gathers at a root, or at all ranks.
    fn gather(&self, name: &str, root: Option<c_int>, from: usize, to: usize, len: usize) -> c_int {
        let needs = |_| root.is_none_or(|root| self.is(root));
        self.collective(format!("{name} of {len} bytes{}", at(root)), (from, len), needs, |state, parts| {
            parts.iter().enumerate().for_each(|(rank, data)| set(state, to + rank * len, len, data.get(..len)));
        })
    }

    fn all_to_all(&self, from: usize, to: usize, len: usize) -> c_int {
        let own = self.rank * len;
        self.collective(
            format!("all_to_all of {len} bytes"),
            (from, len * self.ranks),
            |_| true,
            |state, parts| {
                parts.iter().enumerate().for_each(|(rank, data)| set(state, to + rank * len, len, data.get(own..own + len)));
            },
        )
    }

    fn scatter(&self, root: c_int, from: usize, to: usize, len: usize) -> c_int {
        let (own, sent) = (self.rank * len, if self.is(root) { len * self.ranks } else { 0 });
        self.collective(
            format!("scatter of {len} bytes{}", at(Some(root))),
            (from, sent),
            |rank| rank == root as usize,
            |state, parts| {
                set(state, to, len, parts[root as usize].get(own..own + len));
            },
        )
    }

    fn broadcast(&self, root: c_int, from: usize, to: usize, len: usize) -> c_int {
        if self.others().is_none() {
            return in_group(|group| {
                let data = Buffer { address: from, bytes: len };
                if self.is(root) {
                    group.own.push(data);
                } else if from != to {
                    group.sent.push(data);
                }
                group.received.push(Buffer { address: to, bytes: len });
            });
        }
        let sent = if self.is(root) { len } else { 0 };
        self.collective(
            format!("broadcast of {len} bytes{}", at(Some(root))),
            (from, sent),
            |rank| rank == root as usize,
            |state, parts| {
                set(state, to, len, parts[root as usize].get(..len));
            },
        )
    }

    /// Reduces at a root, or at all ranks. The count is that of the result.
    fn reduce(&self, name: &str, root: Option<c_int>, [from, to, count]: [usize; 3], kind: c_int, operation: c_int) -> c_int {
        let len = count * element(kind);
        let (sent, own) = if name == "reduce_scatter" { (len * self.ranks, len * self.rank) } else { (len, 0) };
        let factor = usize::try_from(operation - FIRST_FACTOR).ok();
        let factor = factor.and_then(|index| FACTORS.lock().unwrap_or_else(PoisonError::into_inner).get(index).copied());
        let needs = |_| root.is_none_or(|root| self.is(root));
        self.collective(format!("{name} of {len} bytes{}", at(root)), (from, sent), needs, |state, parts| {
            // Without other ranks, the result is this rank's data.
            let counted = if self.others().is_some() { parts } else { &parts[..1] };
            let slices: Vec<&[u8]> = counted.iter().map(|data| data.get(own..own + len).unwrap_or(&[])).collect();
            set(state, to, len, reduce::reduce(&slices, len, kind, operation, factor.unwrap_or(1.0)).as_deref());
        })
    }

    fn send(&self, peer: usize, buffer: Buffer) -> c_int {
        let Some(peers) = self.others() else {
            return in_group(|group| if peer == self.rank { group.own.push(buffer) } else { group.sent.push(buffer) });
        };
        machine().tick();
        let data = contents::read(&mut machine().state(), buffer.address as u64, buffer.bytes).unwrap_or_default();
        peers.send(peer, &data).map_or_else(|failure| failed(&failure), |()| 0)
    }
}

/// The root in the name of a collective.
fn at(root: Option<c_int>) -> String {
    root.map(|root| format!(" with root {root}")).unwrap_or_default()
}

/// A buffer that a group sends or fills.
#[derive(Clone, Copy)]
struct Buffer {
    address: usize,
    bytes: usize,
}

/// A receive from another process.
struct Receive {
    communicator: *const Communicator,
    peer: usize,
    buffer: Buffer,
}

/// The open group of a thread. The first lists are for communicators without other processes.
#[derive(Default)]
struct Group {
    depth: u32,
    /// What this rank sends to itself.
    own: Vec<Buffer>,
    /// What it sends to other ranks.
    sent: Vec<Buffer>,
    received: Vec<Buffer>,
    from_others: Vec<Receive>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Changes the open group. Outside of a group, each call is a group.
fn in_group(change: impl FnOnce(&mut Group)) -> c_int {
    GROUP.with_borrow_mut(|group| {
        change(group);
        if group.depth == 0 { end_group(group) } else { 0 }
    })
}

/// Fills each received buffer. Without other processes, it gets data of its size: what this rank sends to itself, because the other ranks would send the
/// same, or else what it sends to another rank. PyTorch gathers with one broadcast per rank, and exchanges with a send and a receive per rank.
fn end_group(group: &mut Group) -> c_int {
    let Group { own, sent, received, from_others, .. } = std::mem::take(group);
    let machine = machine();
    for buffer in received {
        machine.tick();
        let state = &mut *machine.state();
        if let Some(data) = own.iter().chain(&sent).find(|data| data.bytes == buffer.bytes && data.address != buffer.address) {
            let bytes = contents::read(state, data.address as u64, data.bytes);
            set(state, buffer.address, buffer.bytes, bytes.as_deref());
        }
    }
    for Receive { communicator, peer, buffer } in from_others {
        machine.tick();
        // SAFETY: the program keeps the communicator until the group ends.
        let Some(peers) = unsafe { communicator.as_ref() }.and_then(Communicator::others) else { continue };
        match peers.receive(peer) {
            Ok(data) => set(&mut machine.state(), buffer.address, buffer.bytes, data.get(..buffer.bytes)),
            Err(failure) => return failed(&failure),
        }
    }
    0
}
