//! A model of NCCL for processes on one machine, which meet in each collective ([`peers`]) and
//! exchange their data: all of it with [`Values::Cpu`], and otherwise what is known. What a rank
//! receives is unknown if a part of it is. If one process has all ranks, a result is unknown, or
//! with [`Values::Cpu`] the data of the calling rank.
//!
//! With [`Values::Cpu`], a collective is done when its call returns. Otherwise its call waits a
//! moment, and the next call of the host that waits for its stream waits for the rest ([`settle`]),
//! as on a GPU. Receives wait for the end of their group, so exchanges within a group do not wait
//! for each other.

mod peers;
mod reduce;

use std::ffi::{CString, c_char, c_int, c_void};
use std::hash::{Hash, Hasher as _};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::{cell::RefCell, env, io, mem::MaybeUninit, path::Path, slice, time::Duration};

use harness_allocator::sync::lock;
use harness_allocator::{hash::Mixer, units::Bytes};
use harness_gpu_settings::collectives::{CollectiveCall, Operation};
use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, write};
use harness_gpu_settings::settings::{RUN, Values};

use self::peers::{Failure, Needs, PART, PATIENCE, Parts, Peers};
use crate::clock::{Streams, work::Work};
use crate::world::{State, current_device, machine};
use crate::{contents, runtime};

/// Version 2.28.9.
const VERSION: c_int = 22_809;

/// `ncclUnhandledCudaError`.
const CUDA_ERROR: c_int = 1;
/// `NCCL_SPLIT_NOCOLOR`: the rank joins no new communicator.
const NO_COLOR: c_int = -1;
/// `ncclSystemError`.
const SYSTEM_ERROR: c_int = 2;
/// `ncclInvalidUsage`.
const INVALID_USAGE: c_int = 5;
/// `ncclRemoteError`.
const REMOTE_ERROR: c_int = 6;
/// [`PATIENCE`] if this rank's data is known: work behind the call may copy and read the result.
const PATIENCE_FOR_KNOWN: Duration = Duration::from_secs(60);
/// Larger data counts as unknown without computed values. No larger copy is stored.
const MOST_KNOWN: usize = 1 << 20;

struct Communicator {
    ranks: usize,
    rank: usize,
    /// The number of communicators made of it so far.
    children: AtomicU32,
    /// The other ranks, if each has a process.
    peers: Option<Arc<Peers>>,
    /// The buffers of collectives, and those of sends and receives, after the first of them.
    buffers: Mutex<[Option<u64>; 2]>,
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
    ncclCommInitRank(into: Out<'_, *mut Communicator>, ranks: c_int, id: UniqueId, rank: c_int) =
        create(into, ranks, rank, Some(id.0[0]));
    ncclCommInitRankConfig(
        into: Out<'_, *mut Communicator>, ranks: c_int, id: UniqueId, rank: c_int, _: *const c_void
    ) = create(into, ranks, rank, Some(id.0[0]));
    ncclCommInitRankScalable(
        into: Out<'_, *mut Communicator>, ranks: c_int, rank: c_int, _: c_int,
        ids: Option<&UniqueId>, _: *const c_void
    ) = create(into, ranks, rank, ids.map(|first| first.0[0]));
    ncclCommDestroy(communicator: Option<Box<Communicator>>) = {
        settle(Streams::all_work);
        communicator.map_or(0, |communicator| communicator.leave(false))
    };
    ncclCommAbort(communicator: Option<Box<Communicator>>) =
        communicator.map_or(0, |communicator| communicator.leave(true));
    ncclCommRevoke(communicator: &Communicator, _: c_int) = communicator.leave(true);
    ncclCommFinalize(_: *const Communicator) = {
        settle(Streams::all_work);
        0
    };
    ncclCommGetUniqueId(_: *const Communicator, id: Out<'_, UniqueId>) = ncclGetUniqueId(id);
    ncclMemAlloc(address: Out<'_, usize>, size: usize) =
        cuda_status(runtime::cudaMalloc(address, size));
    ncclMemFree(address: usize) = cuda_status(runtime::cudaFree(address));
    ncclCommCount(communicator: &Communicator, count: Out<'_, c_int>) =
        answer(write(count, communicator.ranks as c_int));
    ncclCommUserRank(communicator: &Communicator, rank: Out<'_, c_int>) =
        answer(write(rank, communicator.rank as c_int));
    ncclRedOpCreatePreMulSum(
        operation: Out<'_, c_int>, scalar: *const u8, kind: c_int, residence: c_int,
        _: *const Communicator
    ) = {
        let len = element(kind);
        let bytes = match residence {
            // SAFETY: the program passes an element in host memory.
            1 => Some(unsafe { slice::from_raw_parts(scalar, len) }.to_vec()),
            _ => contents::read(
                &mut machine().state(),
                scalar.expose_provenance() as u64,
                len,
                known,
            ),
        };
        let mut factors = lock(&FACTORS);
        factors.push(bytes.map_or(1.0, |bytes| reduce::number(&bytes, kind)));
        answer(write(operation, FIRST_FACTOR + factors.len() as c_int - 1))
    };
    ncclRedOpDestroy(_: c_int, _: *const Communicator) = 0;
    ncclGroupStart() = in_group(|group| group.depth += 1);
    ncclGroupEnd() = in_group(|group| group.depth = group.depth.saturating_sub(1));
    ncclBcast(
        buffer: usize, count: usize, kind: c_int, root: c_int, communicator: &Communicator,
        stream: usize
    ) = ncclBroadcast(buffer, buffer, count, kind, root, communicator, stream);
    ncclSend(
        from: usize, count: usize, kind: c_int, peer: c_int, communicator: &Communicator,
        stream: usize
    ) = communicator
        .on(stream)
        .send(peer as usize, buffer(from, count * element(kind)), element(kind));
    ncclRecv(
        to: usize, count: usize, kind: c_int, peer: c_int, communicator: &Communicator,
        stream: usize
    ) = communicator
        .on(stream)
        .receive(peer as usize, buffer(to, count * element(kind)));
}

/// Exports collectives, one per row: `function(arguments after the type) = method Operation, root,
/// further arguments of the method;`.
macro_rules! collectives {
    ($(
        $name:ident($($more:ident),*) = $method:ident $operation:ident, $root:expr $(, $last:expr)?;
    )*) => {
        export! { $(
            $name(
                from: usize, to: usize, count: usize, kind: c_int, $($more: c_int,)*
                communicator: &Communicator, stream: usize
            ) = communicator
                .on(stream)
                .$method(call(Operation::$operation, $root, count, kind), from, to $(, $last)?);
        )* }
    };
}

collectives! {
    ncclAllGather() = gather AllGather, None;
    ncclGather(root) = gather Gather, Some(root);
    ncclAlltoAll() = all_to_all AllToAll, None;
    ncclScatter(root) = scatter Scatter, Some(root);
    ncclBroadcast(root) = broadcast Broadcast, Some(root);
    ncclReduceScatter(operation) = reduce ReduceScatter, None, operation;
    ncclAllReduce(operation) = reduce AllReduce, None, operation;
    ncclReduce(operation, root) = reduce Reduce, Some(root), operation;
}

/// The factors of the operations that multiply before the sum. Their numbers begin with
/// [`FIRST_FACTOR`].
static FACTORS: Mutex<Vec<f64>> = Mutex::new(Vec::new());
/// `ncclNumOps`.
const FIRST_FACTOR: c_int = 5;

impl UniqueId {
    /// The first word is unique within the run.
    fn new() -> Self {
        static IDS: AtomicU32 = AtomicU32::new(0);
        Self(
            [u64::from(std::process::id()) << 32 | u64::from(IDS.fetch_add(1, Ordering::Relaxed));
                16],
        )
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(status: c_int) -> *const c_char {
    match status {
        0 => c"no error",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        INVALID_USAGE => c"invalid usage",
        CUDA_ERROR => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
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
        Failure::Aborted => REMOTE_ERROR,
        Failure::Mismatch { .. } => INVALID_USAGE,
        Failure::Io(_) => SYSTEM_ERROR,
        Failure::Memory(_) => CUDA_ERROR,
    }
}

fn create(into: Out<'_, *mut Communicator>, ranks: c_int, rank: c_int, id: Option<u64>) -> c_int {
    let (ranks, rank) = (ranks as usize, rank as usize);
    let joined = match (id.filter(|_| ranks > 1), env::var_os(RUN)) {
        (Some(id), Some(folder)) => Peers::join(
            Path::new(&folder),
            id,
            ranks,
            rank,
            machine().settings.values == Values::Cpu,
        )
        .map(|peers| Some(Arc::new(peers))),
        _ => Ok(None),
    };
    match joined {
        Ok(peers) => answer(write(
            into,
            Box::into_raw(Box::new(Communicator {
                ranks,
                rank,
                children: AtomicU32::new(0),
                peers,
                buffers: Default::default(),
            })),
        )),
        Err(error) => failed(&error.into()),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitAll(
    into: *mut MaybeUninit<*mut Communicator>,
    ranks: c_int,
    _: *const c_int,
) -> c_int {
    for rank in 0..ranks {
        // SAFETY: the program passes an array of `ranks` handles.
        create(
            unsafe { into.add(usize::try_from(rank).unwrap_or(0)).as_mut() },
            ranks,
            rank,
            None,
        );
    }
    0
}

/// Waits until all ranks have called. Members of a color are ordered by key, then by rank. Without
/// other processes, the new communicator is the same.
#[unsafe(no_mangle)]
extern "C" fn ncclCommSplit(
    parent: &Communicator,
    color: c_int,
    key: c_int,
    into: Out<'_, *mut Communicator>,
    _: *const c_void,
) -> c_int {
    let Some(peers) = &parent.peers else {
        return create(into, parent.ranks as c_int, parent.rank as c_int, None);
    };
    let parts = match peers.exchange(
        call(Operation::Split, None, 0, 0),
        [color, key].map(i32::to_ne_bytes).as_flattened(),
    ) {
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
    let rank = members
        .iter()
        .position(|member| *member == (key, parent.rank))
        .unwrap_or(0);
    create(
        into,
        members.len() as c_int,
        rank as c_int,
        parent.child(&color),
    )
}

/// Makes a communicator without some ranks, which do not call this.
#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommShrink(
    parent: &Communicator,
    excluded: *const c_int,
    count: c_int,
    into: Out<'_, *mut Communicator>,
    _: *const c_void,
    _: c_int,
) -> c_int {
    let excluded = if count > 0 {
        // SAFETY: the program passes an array with this many ranks.
        unsafe { slice::from_raw_parts(excluded, count as usize) }
    } else {
        &[]
    };
    let is_member = |rank: &usize| !excluded.contains(&(*rank as c_int));
    let (ranks, rank) = (
        (0..parent.ranks).filter(is_member).count(),
        (0..parent.rank).filter(is_member).count(),
    );
    create(
        into,
        ranks as c_int,
        rank as c_int,
        parent.child(&(ranks, excluded)),
    )
}

/// Adds ranks to a communicator. A new rank passes its number, and an old one its communicator. Of
/// those, only one knows the ID.
#[unsafe(no_mangle)]
extern "C" fn ncclCommGrow(
    parent: Option<&Communicator>,
    ranks: c_int,
    id: Option<&UniqueId>,
    rank: c_int,
    into: Out<'_, *mut Communicator>,
    _: *const c_void,
) -> c_int {
    let id = id.map(|id| id.0[0]);
    let Some(parent) = parent else {
        return create(into, ranks, rank, id);
    };
    let Some(peers) = &parent.peers else {
        return create(into, ranks, parent.rank as c_int, id);
    };
    match peers.exchange(
        call(Operation::Grow, None, 0, 0),
        id.map(u64::to_ne_bytes).as_ref().map_or(&[], |id| id),
    ) {
        Ok(parts) => {
            let id = parts
                .iter()
                .find_map(|part| part.first_chunk())
                .map(|id| u64::from_ne_bytes(*id));
            create(into, ranks, parent.rank as c_int, id)
        }
        Err(failure) => failed(&failure),
    }
}

/// `ncclUnhandledCudaError` for any error of CUDA.
fn cuda_status(status: c_int) -> c_int {
    c_int::from(status != 0)
}

fn call(operation: Operation, root: Option<c_int>, count: usize, kind: c_int) -> CollectiveCall {
    CollectiveCall {
        operation,
        root: root.map(|root| root as usize),
        count,
        kind: kind as u8,
    }
}

/// What waits for other ranks: tries for a time, and returns whether it is done.
type Attempt = Box<dyn FnMut(Option<Duration>) -> Result<bool, Failure> + Send>;

/// A collective that other ranks did not join while its call waited.
struct Late {
    /// The work of its stream up to it.
    work: Work,
    attempt: Attempt,
}

/// In order.
static LATE: Mutex<Vec<Late>> = Mutex::new(Vec::new());
static IS_LATE: AtomicBool = AtomicBool::new(false);
/// A message has arrived later than its call waited. Later calls then do not wait.
static REQUESTS_EARLY: AtomicBool = AtomicBool::new(false);
/// A call has waited as long as [`PATIENCE_FOR_KNOWN`] allows. Other ranks may wait for this one.
static IS_LEFT: AtomicBool = AtomicBool::new(false);

/// Attempts what waits for other ranks. Without computed values, it may stay undone until
/// [`settle`]. `work` is that of its stream up to it.
fn perform(patience: Duration, work: Work, mut attempt: Attempt) -> c_int {
    let is_computed = machine().settings.values == Values::Cpu;
    if IS_LATE.load(Ordering::Acquire) {
        lock(&LATE).retain_mut(|late| matches!((late.attempt)(Some(Duration::ZERO)), Ok(false)));
    }
    match attempt((!is_computed).then_some(patience)) {
        Ok(true) => 0,
        Ok(false) => {
            IS_LEFT.fetch_or(patience == PATIENCE_FOR_KNOWN, Ordering::Relaxed);
            let mut late = lock(&LATE);
            late.push(Late { work, attempt });
            IS_LATE.store(true, Ordering::Release);
            0
        }
        Err(failure) => failed(&failure),
    }
}

/// Waits for the ranks of the collectives in the work for which the host waits. Other ranks may
/// join the others only after this one has gone on. The caller does not hold the state.
pub(crate) fn settle(work: impl FnOnce(&Streams) -> Work) {
    if !IS_LATE.load(Ordering::Acquire) {
        return;
    }
    let mut late = lock(&LATE);
    let settled: Vec<Late> = {
        let streams = &machine().state().streams;
        let work = work(streams);
        late.extract_if(.., |late| streams.ends_with(&late.work, &work))
            .collect()
    };
    IS_LATE.store(!late.is_empty(), Ordering::Release);
    drop(late);
    for mut late in settled {
        // A failure is that of an aborted communicator.
        let _ = (late.attempt)(None);
    }
}

/// A copy of bytes, of which none are zeros.
fn known(bytes: &[u8]) -> Option<Vec<u8>> {
    Some(bytes.to_vec()).filter(|bytes| !bytes.is_empty())
}

/// Writes the bytes that `fill` writes to its argument to device memory, or zeros if it returns
/// `false`.
fn set(state: &mut State, address: usize, len: usize, fill: impl FnOnce(&mut [u8]) -> bool) {
    contents::write(state, address as u64, len, fill);
}

/// Writes the first bytes of a buffer. The others are unknown.
fn set_first(
    state: &mut State,
    Buffer { address, bytes }: Buffer,
    count: usize,
    fill: impl FnOnce(&mut [u8]) -> bool,
) {
    set(state, address, count, fill);
    set(state, address + count, bytes - count, |_| false);
}

/// Writes what a rank has sent from an offset.
fn set_part(state: &mut State, buffer: Buffer, parts: &Parts<'_>, rank: usize, from: usize) {
    let sent = parts.sent(rank, from, buffer.bytes);
    set_first(state, buffer, sent, |into| parts.read(rank, from, into));
}

/// Writes received bytes.
fn set_received(state: &mut State, buffer: Buffer, received: &[u8]) {
    let count = received.len().min(buffer.bytes);
    set_first(state, buffer, count, |into| copy(received, into));
}

/// Copies the first bytes of `from`. Returns `false` if it has fewer.
fn copy(from: &[u8], into: &mut [u8]) -> bool {
    from.get(..into.len())
        .map(|from| into.copy_from_slice(from))
        .is_some()
}

/// The bytes that a rank sends, none for unknown ones. Of elements of one byte, those before the
/// first unknown one: PyTorch sends objects as bytes, and pads the shorter ones.
fn sent<T>(address: usize, len: usize, element: usize, act: impl FnOnce(&[u8]) -> T) -> T {
    let state = &mut *machine().state();
    let is_sent = machine().settings.values != Values::Copies
        || len <= MOST_KNOWN
            && (element == 1 || state.copied.knows_all(address as u64, len as u64));
    if is_sent {
        contents::read(state, address as u64, len, act)
    } else {
        act(&[])
    }
}

/// Publishes a collective with the bytes at an address, and says how long to wait for the others.
fn publish(
    peers: &Peers,
    call: CollectiveCall,
    (from, len): (usize, usize),
    needs: Needs,
) -> (io::Result<u32>, Duration) {
    sent(from, len, element(c_int::from(call.kind)), |data| {
        let is_left = IS_LEFT.load(Ordering::Relaxed);
        let patience = match data {
            [_, ..] if needs == Needs::All && !is_left => PATIENCE_FOR_KNOWN,
            _ => PATIENCE,
        };
        (peers.publish(call, data), patience)
    })
}

/// A buffer that other ranks will fill.
struct Expected {
    buffer: Buffer,
    /// The number of [`CopiedBytes::expect`](crate::copied::CopiedBytes::expect), if the data is
    /// late.
    late: Option<u64>,
}

impl Expected {
    /// Forgets the buffer.
    fn new(buffer: Buffer) -> Self {
        if machine().settings.values == Values::Copies {
            let state = &mut *machine().state();
            state
                .copied
                .forget(buffer.address as u64, buffer.bytes as u64);
        }
        Self { buffer, late: None }
    }

    /// Notes whether the data has arrived before the call returns, after which the program may use
    /// the buffer again.
    fn note(&mut self, has_arrived: bool) {
        if !has_arrived && self.late.is_none() && machine().settings.values == Values::Copies {
            let state = &mut *machine().state();
            let Buffer { address, bytes } = self.buffer;
            self.late = Some(state.copied.expect(address as u64, bytes as u64));
        }
    }

    /// Returns whether the buffer has no other data by now.
    fn arrives(&self, state: &mut State) -> bool {
        let mut is_expected = |number| state.copied.arrives(self.buffer.address as u64, number);
        self.late.is_none_or(&mut is_expected)
    }
}

/// How a collective reduces the data of a number of ranks.
#[derive(Clone, Copy)]
struct Reduction {
    ranks: usize,
    kind: c_int,
    operation: c_int,
    factor: f64,
}

impl Reduction {
    /// Reduces the data from an offset. Returns `false` if the result is zeros.
    fn reduce(self, parts: &Parts<'_>, from: usize, into: &mut [u8]) -> bool {
        let Self {
            ranks,
            kind,
            operation,
            factor,
        } = self;
        let is_computed = machine().settings.values == Values::Cpu;
        if !is_computed && !self.is_known(parts, from + into.len()) {
            return false;
        }
        let blocks = into.chunks_mut(PART).enumerate();
        let reduced = blocks.map(|(index, into)| {
            reduce::reduce(into, ranks, (kind, operation, factor), |rank, into| {
                parts.read(rank, from + index * PART, into)
            })
        });
        reduced.fold(false, |is_known, reduced| is_known | reduced)
    }

    /// Returns whether the result is that of a GPU: all ranks have sent their data up to an end,
    /// and the order of the ranks does not change it, as it does in sums of many 16-bit numbers.
    fn is_known(self, parts: &Parts<'_>, end: usize) -> bool {
        let is_order_free = self.ranks <= 2
            || !matches!(self.kind, 6 | 9)
            || [reduce::MAXIMUM, reduce::MINIMUM].contains(&self.operation);
        let is_modelled = self.kind < 10 && self.operation < FIRST_FACTOR;
        is_modelled && is_order_free && (0..self.ranks).all(|rank| parts.sent(rank, 0, end) == end)
    }
}

impl Communicator {
    /// Submits a call to a stream.
    fn on(&self, stream: usize) -> Submission<'_> {
        machine().submit_for_library(stream);
        let device = current_device();
        Submission {
            communicator: self,
            work: machine().state().streams.submitted_by(stream, device),
        }
    }

    /// The number of a new communicator with ranks of this one, which all of them compute.
    fn child(&self, what: &impl Hash) -> Option<u64> {
        let mut hasher = Mixer::default();
        (
            self.peers.as_ref()?.id(),
            self.children.fetch_add(1, Ordering::Relaxed),
            what,
        )
            .hash(&mut hasher);
        Some(hasher.finish())
    }

    fn leave(&self, is_aborted: bool) -> c_int {
        if let Some(peers) = &self.peers {
            peers.leave(is_aborted);
        }
        for start in lock(&self.buffers).iter_mut().filter_map(Option::take) {
            let state = &mut *machine().state();
            if let Ok(index) = state.device_at(start).map(|memory| memory.index()) {
                // A failure means that the program has reset the device.
                let _ = state.release(index, |memory| memory.free(start));
            }
        }
        0
    }

    /// Allocates the buffers of the first collective, or of the first send or receive. These
    /// allocations are no attempts that can be failed.
    fn allocate_buffers(&self, is_point_to_point: bool) -> c_int {
        let Some(table) = &machine().settings.nccl_memory else {
            return 0;
        };
        let size = table.of(self.ranks, is_point_to_point);
        let buffers = &mut lock(&self.buffers)[usize::from(is_point_to_point)];
        if size == Bytes::ZERO || buffers.is_some() {
            return 0;
        }
        match machine()
            .state()
            .on_device(current_device(), |memory| memory.allocate(size))
        {
            Ok(start) => *buffers = Some(start),
            Err(_) => return failed(&Failure::Memory(size)),
        }
        0
    }

    /// The data of each rank if all are in this process; none if it is unknown.
    fn own_parts(&self, from: usize, len: usize) -> Vec<u8> {
        if self.ranks == 1 || machine().settings.values == Values::Cpu {
            contents::read(&mut machine().state(), from as u64, len, <[u8]>::to_vec)
        } else {
            Vec::new()
        }
    }
}

/// A call that a stream has got.
struct Submission<'a> {
    communicator: &'a Communicator,
    /// The work of the stream up to the call.
    work: Work,
}

impl Deref for Submission<'_> {
    type Target = Communicator;

    fn deref(&self) -> &Communicator {
        self.communicator
    }
}

impl Submission<'_> {
    /// Exchanges the bytes at an address. If this rank needs the bytes of any ranks, `finish`
    /// receives them and fills a buffer. With a reduction, the ranks first reduce their data
    /// together: each has the result.
    fn collective(
        &self,
        call: CollectiveCall,
        (from, len): (usize, usize),
        (needs, filled): (Needs, Buffer),
        reduction: Option<Reduction>,
        finish: impl FnOnce(&mut State, &Parts<'_>) + Send + 'static,
    ) -> c_int {
        let is_point_to_point = matches!(
            call.operation,
            Operation::AllToAll | Operation::Gather | Operation::Scatter
        );
        let status = self.allocate_buffers(is_point_to_point);
        if status != 0 {
            return status;
        }
        let machine = machine();
        machine.tick();
        let mut finish = Some(finish).filter(|_| needs != Needs::Nothing);
        let Some(peers) = self.peers.clone() else {
            let parts = &self.own_parts(from, len);
            if let Some(finish) = finish {
                finish(&mut machine.state(), &Parts::equal(parts, self.ranks));
            }
            return 0;
        };
        let (published, patience) = publish(&peers, call, (from, len), needs);
        let filled = finish.as_ref().map_or(buffer(0, 0), |_| filled);
        let mut expected = Expected::new(filled);
        let number = match published {
            Ok(number) => number,
            Err(error) => return failed(&error.into()),
        };
        let reduce = move |peers: &Peers, parts: &Parts<'_>| match reduction {
            Some(reduction) => peers.reduce(number, parts, len, |from, into| {
                reduction.reduce(parts, from, into)
            }),
            None => Ok(()),
        };
        // The last rank reduces small data before the others wake.
        let completed = peers.complete((number, call), |parts| match len <= PART {
            true => reduce(&peers, parts),
            false => Ok(()),
        });
        if let Err(failure) = completed {
            return failed(&failure);
        }
        let attempt = move |patience| {
            let finished = peers.collect((number, call), needs, patience, |parts| {
                reduce(&peers, parts)?;
                if reduction.is_some() {
                    peers.wait_for_reduction(number)?;
                }
                let state = &mut *machine.state();
                if let Some(finish) = finish.take()
                    && expected.arrives(state)
                {
                    finish(state, parts);
                }
                Ok(())
            });
            let is_done = match finished {
                Err(Failure::Mismatch { .. }) => return Err(peers.wait_in_vain(number)),
                finished => finished?.is_some(),
            };
            expected.note(is_done);
            Ok(is_done)
        };
        perform(patience, self.work.clone(), Box::new(attempt))
    }

    /// What this rank needs in a collective. If there is a root, only the root gets a result.
    fn needs_at_root(&self, root: Option<usize>) -> Needs {
        if root.is_none_or(|root| root == self.rank) {
            Needs::All
        } else {
            Needs::Nothing
        }
    }

    /// Gathers at a root, or at all ranks.
    fn gather(&self, call: CollectiveCall, from: usize, to: usize) -> c_int {
        let len = bytes(call);
        let ranks = self.ranks;
        self.collective(
            call,
            (from, len),
            (self.needs_at_root(call.root), buffer(to, len * ranks)),
            None,
            move |state, parts| {
                (0..ranks).for_each(|rank| {
                    set_part(state, buffer(to + rank * len, len), parts, rank, 0);
                });
            },
        )
    }

    fn all_to_all(&self, call: CollectiveCall, from: usize, to: usize) -> c_int {
        let (len, rank, ranks) = (bytes(call), self.rank, self.ranks);
        self.collective(
            call,
            (from, len * ranks),
            (Needs::All, buffer(to, len * ranks)),
            None,
            move |state, parts| {
                (0..ranks).for_each(|other| {
                    set_part(
                        state,
                        buffer(to + other * len, len),
                        parts,
                        other,
                        rank * len,
                    );
                });
            },
        )
    }

    fn scatter(&self, call: CollectiveCall, from: usize, to: usize) -> c_int {
        let (len, root) = (bytes(call), call.root.unwrap_or(0));
        let (own, sent) = (
            self.rank * len,
            if root == self.rank {
                len * self.ranks
            } else {
                0
            },
        );
        self.collective(
            call,
            (from, sent),
            (Needs::Rank(root), buffer(to, len)),
            None,
            move |state, parts| {
                set_part(state, buffer(to, len), parts, root, own);
            },
        )
    }

    fn broadcast(&self, call: CollectiveCall, from: usize, to: usize) -> c_int {
        let (len, root) = (bytes(call), call.root.unwrap_or(0));
        if self.peers.is_none() {
            return in_group(|group| {
                let data = buffer(from, len);
                if root == self.rank {
                    group.own.push(data);
                } else if from != to {
                    group.sent.push(data);
                }
                group.received.push(buffer(to, len));
            });
        }
        let sent = if root == self.rank { len } else { 0 };
        self.collective(
            call,
            (from, sent),
            (Needs::Rank(root), buffer(to, len)),
            None,
            move |state, parts| {
                set_part(state, buffer(to, len), parts, root, 0);
            },
        )
    }

    /// Reduces at a root, or at all ranks. The count is that of the result.
    fn reduce(&self, call: CollectiveCall, from: usize, to: usize, operation: c_int) -> c_int {
        let len = bytes(call);
        let factor = usize::try_from(operation - FIRST_FACTOR).ok();
        let factor = factor
            .and_then(|index| lock(&FACTORS).get(index).copied())
            .unwrap_or(1.0);
        // Without other ranks, the result is this rank's data.
        let ranks = self.peers.as_ref().map_or(1, |_| self.ranks);
        let reduction = Reduction {
            ranks,
            kind: c_int::from(call.kind),
            operation,
            factor,
        };
        let is_computed = machine().settings.values == Values::Cpu;
        if call.operation == Operation::AllReduce && ranks > 1 && is_computed {
            return self.collective(
                call,
                (from, len),
                (Needs::All, buffer(to, len)),
                Some(reduction),
                move |state, parts| {
                    set(state, to, len, |into| {
                        parts
                            .of_len(len)
                            .is_some_and(|rank| parts.read(rank, 0, into))
                    });
                },
            );
        }
        let (sent, own) = if call.operation == Operation::ReduceScatter {
            (len * self.ranks, len * self.rank)
        } else {
            (len, 0)
        };
        self.collective(
            call,
            (from, sent),
            (self.needs_at_root(call.root), buffer(to, len)),
            None,
            move |state, parts| {
                set(state, to, len, |into| reduction.reduce(parts, own, into));
            },
        )
    }

    fn send(&self, peer: usize, buffer: Buffer, element: usize) -> c_int {
        let status = self.allocate_buffers(true);
        if status != 0 {
            return status;
        }
        let Some(peers) = &self.peers else {
            return in_group(|group| {
                if peer == self.rank {
                    group.own.push(buffer)
                } else {
                    group.sent.push(buffer)
                }
            });
        };
        machine().tick();
        let data = sent(buffer.address, buffer.bytes, element, <[u8]>::to_vec);
        peers
            .send(peer, &data)
            .map_or_else(|failure| failed(&failure), |()| 0)
    }

    fn receive(&self, peer: usize, buffer: Buffer) -> c_int {
        let status = self.allocate_buffers(true);
        if status != 0 {
            return status;
        }
        in_group(|group| match &self.peers {
            Some(peers) => {
                let message = (Arc::clone(peers), peer, buffer, self.work.clone());
                group.from_others.push(message);
            }
            None => group.received.push(buffer),
        })
    }
}

/// The bytes of the elements of a collective.
fn bytes(call: CollectiveCall) -> usize {
    call.count * element(c_int::from(call.kind))
}

/// A buffer that a group sends or fills.
#[derive(Clone, Copy)]
struct Buffer {
    address: usize,
    bytes: usize,
}

const fn buffer(address: usize, bytes: usize) -> Buffer {
    Buffer { address, bytes }
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
    /// What it receives from other processes.
    from_others: Vec<(Arc<Peers>, usize, Buffer, Work)>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Changes the open group. Outside of a group, each call is a group.
fn in_group(change: impl FnOnce(&mut Group)) -> c_int {
    GROUP.with_borrow_mut(|group| {
        change(group);
        if group.depth == 0 {
            end_group(group)
        } else {
            0
        }
    })
}

/// Fills each received buffer. Without other processes, it gets data of its size: what this rank
/// sends to itself, because the other ranks would send the same, or else what it sends to another
/// rank. PyTorch gathers with one broadcast per rank, and exchanges with a send and a receive per
/// rank. Without computed values, it is unknown if several have this size.
fn end_group(group: &mut Group) -> c_int {
    let Group {
        own,
        sent,
        received,
        from_others,
        ..
    } = std::mem::take(group);
    let machine = machine();
    for buffer in received {
        machine.tick();
        let state = &mut *machine.state();
        let fits = |data: &&Buffer| data.bytes == buffer.bytes;
        let is_other = |data: &&Buffer| fits(data) && data.address != buffer.address;
        if let Some(data) = own.iter().chain(&sent).find(is_other) {
            let is_clear = machine.settings.values == Values::Cpu
                || own.iter().chain(&sent).filter(fits).count() == 1;
            let bytes =
                contents::read(state, data.address as u64, data.bytes, known).filter(|_| is_clear);
            set_received(state, buffer, &bytes.unwrap_or_default());
        }
    }
    for (peers, peer, buffer, work) in from_others {
        machine.tick();
        let mut expected = Expected::new(buffer);
        let number = peers.expect(peer);
        let mut is_late = false;
        let attempt = move |patience| {
            let Some(data) = peers.receive(peer, number, patience)? else {
                is_late = true;
                expected.note(false);
                return Ok(false);
            };
            REQUESTS_EARLY.fetch_or(is_late, Ordering::Relaxed);
            let state = &mut *machine.state();
            if expected.arrives(state) {
                set_received(state, buffer, &data);
            }
            Ok(true)
        };
        let patience = if REQUESTS_EARLY.load(Ordering::Relaxed) {
            Duration::ZERO
        } else {
            PATIENCE
        };
        let status = perform(patience, work, Box::new(attempt));
        if status != 0 {
            return status;
        }
    }
    0
}
