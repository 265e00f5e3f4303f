//! The interface of a device: [`Device`] for allocators, [`TestDevice`] for test rigs.
//!
//! [`sim`] is the simulated device, [`limited`] gives any device a smaller memory, [`faulty`]
//! injects failures into any device, and [`wrapper`] is for devices that wrap a device. CUDA
//! devices are in the crate `harness-cuda`.

pub mod faulty;
mod host;
pub mod limited;
pub mod pages;
pub mod sim;
pub mod wrapper;

use std::fmt;

pub use host::{HostId, HostMemory};
use serde::{Deserialize, Serialize};

use crate::units::{Bytes, Nanos};

/// An address in device memory. Zero is the null pointer.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    pub const NULL: Self = Self(0);

    /// Returns the address plus `bytes`. Saturates at the last address.
    pub const fn offset(self, bytes: Bytes) -> Self {
        Self(self.0.saturating_add(bytes.0))
    }
}

impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A stream of one device. Stream 0 is the default stream. Numbers are never reused.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct StreamId(pub u32);

impl StreamId {
    pub const DEFAULT: Self = Self(0);
}

/// An event of one device. Numbers may be reused after [`Device::destroy_event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventId(pub u32);

/// The place in the caller's program that makes the next device calls. A strict device names it in
/// its errors. The harness uses the step number; 0 means unknown.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct CallSite(pub u32);

impl fmt::Display for CallSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            f.write_str("an unknown step")
        } else {
            write!(f, "step {}", self.0)
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRange {
    pub start: DevicePtr,
    pub len: Bytes,
}

impl MemoryRange {
    pub const fn new(start: DevicePtr, len: Bytes) -> Self {
        Self { start, len }
    }

    /// The first address after the range.
    pub const fn end(self) -> DevicePtr {
        self.start.offset(self.len)
    }
}

impl fmt::Display for MemoryRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end())
    }
}

/// The value that `fill` writes to each 8-byte word of a range and that `verify` expects. A shorter
/// tail holds its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub u64);

/// The kind of clock that a device uses. Times of different kinds are never compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Clock {
    /// A virtual clock that a cost model advances.
    Simulated,
    /// The monotonic clock of the host and the event timers of the device.
    Measured,
}

/// The description of a device. It does not change while the device is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// The product name, such as `NVIDIA H200` or `simulated`.
    pub name: String,
    pub clock: Clock,
    /// The memory that an allocator may use: `totalGlobalMem` of a GPU, or the limit of a limited
    /// device.
    pub total: Bytes,
    /// Device memory is charged in multiples of this.
    pub granularity: Bytes,
    /// The allowed difference between used device memory and the sum of allocations: zero on a
    /// simulated device. A real driver takes memory for modules and streams.
    pub used_tolerance: Bytes,
    /// The properties that make two runs comparable.
    pub fingerprint: Fingerprint,
}

/// Two runs are comparable if these properties are equal. `None` means that the property could not
/// be read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// The physical memory of the device, without any limit.
    pub memory: Option<Bytes>,
    /// A hash of the GPU's UUID. It distinguishes devices without naming them.
    pub uuid_hash: Option<String>,
    /// Version of the kernel driver, for example `580.65.06`.
    pub driver: Option<String>,
    pub cuda: Option<String>,
    pub mig: Option<bool>,
    pub ecc: Option<bool>,
    /// Streaming-multiprocessor and memory clocks in MHz when the device was opened.
    pub clocks_mhz: Option<(u32, u32)>,
    pub throttle_reasons: Vec<String>,
    /// The number of other processes that used memory of this device when it was opened.
    pub other_processes: Option<u32>,
    /// The name and version of a simulated device's cost model.
    pub cost_model: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// As [`DeviceInfo::total`].
    pub total: Bytes,
    /// An upper bound on the next allocation.
    pub free: Bytes,
    /// The used memory of the whole device according to NVML: context overhead, this process and
    /// all others. Without NVML, the driver's total minus its free memory.
    pub used: Bytes,
    /// The memory of this process according to NVML, if NVML knows it.
    pub process: Option<Bytes>,
    /// The used memory before this process's first allocation: its context, its modules and other
    /// processes.
    pub context_overhead: Bytes,
    /// Memory in use by others, simulated with [`TestDevice::set_external_memory`].
    pub external_memory: Bytes,
    /// Memory of other processes of the same run, including their contexts.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub processes: Bytes,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub process_contexts: Bytes,
}

impl DeviceMemory {
    /// Returns the used memory without the contexts of this process and of the run's other
    /// processes.
    pub fn used_without_contexts(&self) -> Bytes {
        self.used
            .saturating_sub(self.context_overhead + self.process_contexts)
    }
}

#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde hands out a reference"
)]
fn is_zero(bytes: &Bytes) -> bool {
    *bytes == Bytes::ZERO
}

/// The number of calls since the device was opened, failed ones included unless noted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceCalls {
    pub malloc: u64,
    /// Calls of [`Device::malloc`] that failed with out of memory.
    pub malloc_failures: u64,
    pub free: u64,
    /// Physical pages requested by [`MappedDevice::map`].
    pub create: u64,
    /// Physical pages released, including those of a failed mapping.
    pub release: u64,
    pub malloc_async: u64,
    pub free_async: u64,
    pub event_record: u64,
    pub event_query: u64,
    /// Waits of the host for an event, a stream or the whole device.
    pub synchronize: u64,
}

impl DeviceCalls {
    pub fn since(&self, earlier: &Self) -> Self {
        self.combine(earlier, |now, before| now - before)
    }

    pub(crate) fn and(&self, other: &Self) -> Self {
        self.combine(other, |one, other| one + other)
    }

    fn combine(&self, other: &Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            malloc: combine(self.malloc, other.malloc),
            malloc_failures: combine(self.malloc_failures, other.malloc_failures),
            free: combine(self.free, other.free),
            create: combine(self.create, other.create),
            release: combine(self.release, other.release),
            malloc_async: combine(self.malloc_async, other.malloc_async),
            free_async: combine(self.free_async, other.free_async),
            event_record: combine(self.event_record, other.event_record),
            event_query: combine(self.event_query, other.event_query),
            synchronize: combine(self.synchronize, other.synchronize),
        }
    }

    /// Calls that reach the driver's memory manager. A caching allocator exists to avoid them.
    pub const fn memory_calls(&self) -> u64 {
        self.malloc + self.free + self.create + self.release + self.malloc_async + self.free_async
    }
}

/// The functions that every allocator device requires: memory, streams, events and, optionally,
/// memory mapping and pools. Implement it to run these allocators on your own device.
/// [`TestDevice`] is for test rigs only.
///
/// One host thread at a time makes the calls. Work on one stream runs in order. Work on different
/// streams is unordered unless an event orders it. A handle of another device gives
/// [`DeviceError::UnknownHandle`].
pub trait Device: Send {
    fn info(&self) -> &DeviceInfo;

    /// Returns an upper bound on the next allocation. Asks only the driver, because NVML may take
    /// milliseconds, and timed code calls this.
    fn free_memory(&mut self) -> Result<Bytes, DeviceError>;

    /// Allocates `size` bytes (not zero) of device memory. The address is at least 256-byte
    /// aligned. Fails with [`DeviceError::OutOfMemory`]: the call has changed nothing.
    fn malloc(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError>;

    /// Frees the memory that [`Device::malloc`] returned. As on CUDA, waits for work in flight on
    /// the memory.
    fn free(&mut self, ptr: DevicePtr) -> Result<(), DeviceError>;

    /// Makes a stream that does not synchronize with the default stream.
    fn create_stream(&mut self) -> Result<StreamId, DeviceError>;

    /// Waits for the work of a stream made by [`Device::create_stream`] and destroys it. Fails with
    /// [`DeviceError::UnknownHandle`], also for the default stream and for borrowed streams, which
    /// need [`Device::release_stream`].
    fn destroy_stream(&mut self, stream: StreamId) -> Result<(), DeviceError>;

    /// Forgets the number of a borrowed stream: a stream that the program made and passed to
    /// `CudaDevice::borrow_stream`. Does not wait, and leaves the driver's stream alone. Call it
    /// before the program destroys the stream and after the allocator has released it. Fails with
    /// [`DeviceError::UnknownHandle`] if the stream is not borrowed.
    fn release_stream(&mut self, stream: StreamId) -> Result<(), DeviceError>;

    /// Makes an event that is not recorded yet.
    fn create_event(&mut self) -> Result<EventId, DeviceError>;

    /// Destroys an event. Queued waits for it stay valid.
    fn destroy_event(&mut self, event: EventId) -> Result<(), DeviceError>;

    /// Queues the event after all work of the stream so far. A new record replaces the earlier one.
    fn record_event(&mut self, event: EventId, stream: StreamId) -> Result<(), DeviceError>;

    /// Returns true if all work before the event's last record is complete. A never recorded event
    /// is complete. If the answer is yes, the host and all work it submits later are ordered after
    /// that work.
    fn event_done(&mut self, event: EventId) -> Result<bool, DeviceError>;

    /// Makes all later work of the stream wait for the event's last record. The host does not wait.
    fn wait_event(&mut self, stream: StreamId, event: EventId) -> Result<(), DeviceError>;

    fn synchronize_event(&mut self, event: EventId) -> Result<(), DeviceError>;

    fn synchronize_stream(&mut self, stream: StreamId) -> Result<(), DeviceError>;

    /// Waits for all work of all streams.
    fn synchronize(&mut self) -> Result<(), DeviceError>;

    fn mapped(&mut self) -> Option<&mut dyn MappedDevice> {
        None
    }

    fn pooled(&mut self) -> Option<&mut dyn PooledDevice> {
        None
    }

    /// As [`Device::mapped`].
    /// Fails with [`DeviceError::Unavailable`] if the device cannot map memory.
    fn required_mapped(&mut self) -> Result<&mut dyn MappedDevice, DeviceError> {
        self.mapped()
            .ok_or_else(|| DeviceError::unsupported("memory mapping"))
    }

    /// As [`Device::pooled`].
    /// Fails with [`DeviceError::Unavailable`] if the device has no pools.
    fn required_pooled(&mut self) -> Result<&mut dyn PooledDevice, DeviceError> {
        self.pooled()
            .ok_or_else(|| DeviceError::unsupported("memory pools"))
    }
}

/// A device with the instruments of a test rig: a clock, memory contents, memory in use by others,
/// leaks and costs.
pub trait TestDevice: Device {
    /// Returns the present memory figures. They are read one after the other, and NVML's figures
    /// lag behind the driver's calls: read again before you report a difference. Does not wait for
    /// any work.
    fn memory(&mut self) -> Result<DeviceMemory, DeviceError>;

    /// Returns this process's own part of [`DeviceMemory::context_overhead`]: its context and its
    /// modules. Fails with [`DeviceError::Unavailable`] if the part cannot be determined, with the
    /// reason.
    fn own_context(&self) -> Result<Bytes, DeviceError>;

    /// The index of the device among those that this process sees, or `None` if no other process
    /// can choose it.
    fn ordinal(&self) -> Option<u32> {
        None
    }

    /// The time since the device was opened: virtual on a simulated device, monotonic host time on
    /// a real one.
    fn now(&mut self) -> Nanos;

    fn calls(&self) -> DeviceCalls;

    fn set_call_site(&mut self, place: CallSite);

    /// Makes an event with a timestamp, for [`TestDevice::elapsed`]. On a GPU it costs more than an
    /// event of [`Device::create_event`].
    fn create_timed_event(&mut self) -> Result<EventId, DeviceError>;

    /// Returns the device time between two completed events of [`TestDevice::create_timed_event`].
    /// Fails with [`DeviceError::UnknownHandle`] for an event without a timestamp;
    /// [`DeviceError::NotReady`] for an event that is not recorded or not complete.
    fn elapsed(&mut self, start: EventId, end: EventId) -> Result<Nanos, DeviceError>;

    /// Queues work on the stream that writes the tag to every byte of the range (not empty).
    /// On a strict device, fails with [`DeviceError::InvalidAccess`] or [`DeviceError::Race`].
    fn fill(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError>;

    /// Reads every byte of the range (not empty) on the stream, after its work so far, and waits
    /// for the result. Fails with [`DeviceError::Corrupted`] if a byte does not match the tag; on a
    /// strict device also as [`TestDevice::fill`].
    fn verify(&mut self, stream: StreamId, range: MemoryRange, tag: Tag)
    -> Result<(), DeviceError>;

    /// Queues a read of every byte of the range (not empty) on the stream and does not wait. The
    /// stream compares each byte with the tag when the read runs;
    /// [`TestDevice::finish_verifications`] returns the result. A real device waits here for the
    /// oldest read if too many are queued. On a strict device, fails like [`TestDevice::fill`].
    fn verify_later(
        &mut self,
        stream: StreamId,
        range: MemoryRange,
        tag: Tag,
    ) -> Result<(), DeviceError>;

    /// Waits for all reads queued on the stream by [`TestDevice::verify_later`] and returns their
    /// result. Reads of a destroyed stream are forgotten. Fails with [`DeviceError::Corrupted`] for
    /// the first read, in stream order, that found a byte that does not match its tag.
    fn finish_verifications(&mut self, stream: StreamId) -> Result<(), DeviceError>;

    /// Queues work that keeps the stream busy for about `duration`.
    fn busy(&mut self, stream: StreamId, duration: Nanos) -> Result<(), DeviceError>;

    /// Advances the clock while the host does nothing: virtual time on a simulated device, real
    /// time on a real one. Queued work continues.
    fn sleep(&mut self, duration: Nanos);

    /// Simulates other programs that use `bytes` of the device, limited to the free memory. Returns
    /// the bytes they use now. A real device makes plain allocations for this.
    fn set_external_memory(&mut self, held: Bytes) -> Result<Bytes, DeviceError>;

    /// Allocates `size` bytes (not zero) of host memory for copies.
    /// Fails with [`DeviceError::HostMemory`]: the call has changed nothing.
    fn host_alloc(&mut self, size: Bytes, memory: &HostMemory) -> Result<HostId, DeviceError>;

    /// Frees host memory after all copies queued on it.
    fn host_free(&mut self, host: HostId) -> Result<(), DeviceError>;

    /// Queues a copy of the range (not empty) to the first bytes of host memory. The host never
    /// waits if the memory is pinned. It may wait otherwise, but that orders nothing: a reader of
    /// the host memory must still be ordered after the copy by its stream, an event or a wait.
    /// (<https://docs.nvidia.com/cuda/cuda-driver-api/api-sync-behavior.html>) Fails with
    /// [`DeviceError::HostRange`] if the host memory is smaller; on a strict device as
    /// [`TestDevice::fill`], also for races on the host memory.
    fn copy_to_host(
        &mut self,
        stream: StreamId,
        from: MemoryRange,
        to: HostId,
    ) -> Result<(), DeviceError>;

    /// Queues a copy of the first bytes of host memory to the range (not empty). Otherwise as
    /// [`TestDevice::copy_to_host`].
    fn copy_to_device(
        &mut self,
        stream: StreamId,
        from: HostId,
        to: MemoryRange,
    ) -> Result<(), DeviceError>;

    /// Returns the handles and memory that the caller still holds. The harness checks them at the
    /// end of a run.
    fn leaks(&self) -> Leaks;

    /// The costs that a simulated device charges for calls and work. A real device has none.
    fn cost_figures(&self) -> Vec<CostFigure> {
        Vec::new()
    }
}

/// Address space and physical memory as separate objects, as in CUDA's virtual memory management
/// (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html>). Sizes and starts of
/// ranges are multiples of [`DeviceInfo::granularity`].
pub trait MappedDevice {
    /// Reserves addresses without mapped memory.
    /// Fails with [`DeviceError::OutOfMemory`] if the address space is exhausted.
    fn reserve(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError>;

    /// Frees a reservation of [`MappedDevice::reserve`]. Nothing may be mapped in it.
    fn unreserve(&mut self, start: DevicePtr) -> Result<(), DeviceError>;

    /// Maps new memory to a range that has none, as separate pages of `page` bytes, and makes it
    /// accessible. If one page fails, the pages before it are released again. Fails with
    /// [`DeviceError::OutOfMemory`]; [`DeviceError::InvalidAccess`] for a range that is not
    /// reserved or already mapped.
    fn map(&mut self, range: MemoryRange, page: Bytes) -> Result<(), DeviceError>;

    /// Unmaps a range of whole pages. Does not wait: the host must have waited for all work on the
    /// range. Fails with [`DeviceError::InvalidFree`] if the range does not consist of whole mapped
    /// pages. On a strict device [`DeviceError::InUse`] for unfinished work; on a GPU the context
    /// breaks.
    fn unmap(&mut self, range: MemoryRange) -> Result<(), DeviceError>;
}

/// Stream-ordered memory pools of the driver
/// (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MALLOC__ASYNC.html>).
///
/// An allocation is valid for later work of its stream and for work of other streams that is
/// ordered after it. A free takes effect in stream order; every access must be ordered before it.
/// The same stream reuses freed memory immediately. Another stream reuses it only if an event or a
/// wait of the host orders the free before that stream's next work. Two more kinds of reuse are
/// switched off because they make runs differ: `CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC` and
/// `CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES`.
pub trait PooledDevice {
    /// Makes an empty pool. If it has reserved more than the threshold, it releases unused memory
    /// when the host next waits for an event, a stream or the device
    /// (`CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`).
    fn create_pool(&mut self, release_threshold: Bytes) -> Result<PoolId, DeviceError>;

    /// Waits for all work and releases the pool with all its memory.
    /// Fails with [`DeviceError::UnknownHandle`], also if an allocation of the pool is still live.
    fn destroy_pool(&mut self, pool: PoolId) -> Result<(), DeviceError>;

    /// Allocates `size` bytes (not zero) from the pool in stream order. The address is at least
    /// 256-byte aligned. Fails with [`DeviceError::OutOfMemory`]: the call has changed nothing,
    /// except that the pool may have released unused memory. On a real GPU the pool then may have
    /// reserved all free memory: on an H200 it kept 137 GiB until it was trimmed.
    fn malloc_async(
        &mut self,
        pool: PoolId,
        size: Bytes,
        stream: StreamId,
    ) -> Result<DevicePtr, DeviceError>;

    /// Frees an allocation of [`PooledDevice::malloc_async`] in the order of `stream`, which may
    /// differ from the stream of the allocation.
    fn free_async(&mut self, ptr: DevicePtr, stream: StreamId) -> Result<(), DeviceError>;

    /// Releases unused memory down to `keep` reserved bytes. Memory counts as used until the host
    /// has waited for its free.
    fn trim_pool(&mut self, pool: PoolId, keep: Bytes) -> Result<(), DeviceError>;

    /// Returns [`PoolMemory::reserved`] with one driver call; [`PooledDevice::pool_memory`] makes
    /// four.
    fn pool_reserved(&mut self, pool: PoolId) -> Result<Bytes, DeviceError> {
        Ok(self.pool_memory(pool)?.reserved)
    }

    fn pool_memory(&mut self, pool: PoolId) -> Result<PoolMemory, DeviceError>;
}

/// A pool of one device. Numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub u32);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolMemory {
    /// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`.
    pub reserved: Bytes,
    pub reserved_high: Bytes,
    /// `CU_MEMPOOL_ATTR_USED_MEM_CURRENT`, as the driver rounds it.
    pub used: Bytes,
    pub used_high: Bytes,
}

/// One figure of a cost model, as text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CostFigure {
    /// The item, for example `device allocation`.
    pub name: String,
    pub value: String,
    /// The source of the figure: a measurement with date and device, a publication, or the reason
    /// for an assumption.
    pub source: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leaks {
    /// Live allocations, including those of pools.
    pub allocations: u64,
    /// Reservations of [`MappedDevice::reserve`].
    pub reservations: u64,
    pub pools: u64,
    /// The charged bytes of allocations, mapped pages and pools.
    pub bytes: Bytes,
    /// Streams without the default stream.
    pub streams: u64,
    pub events: u64,
    /// Allocations of host memory.
    pub host: u64,
}

impl Leaks {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Leaks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            allocations,
            reservations,
            pools,
            bytes,
            streams,
            events,
            host,
        } = *self;
        let things = [
            (allocations, "allocation", "allocations"),
            (reservations, "reservation", "reservations"),
            (pools, "pool", "pools"),
            (streams, "stream", "streams"),
            (events, "event", "events"),
            (host, "piece of host memory", "pieces of host memory"),
        ];
        let held = things.into_iter().filter(|(number, ..)| *number > 0);
        let held: Vec<String> = held
            .map(|(number, one, many)| format!("{number} {}", if number == 1 { one } else { many }))
            .collect();
        match (held.is_empty(), bytes) {
            (true, Bytes::ZERO) => f.write_str("nothing"),
            (true, bytes) => write!(f, "{bytes}"),
            (false, Bytes::ZERO) => f.write_str(&held.join(", ")),
            (false, bytes) => write!(f, "{bytes} in {}", held.join(", ")),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    pub kind: AccessKind,
    pub stream: StreamId,
    pub place: CallSite,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            AccessKind::Write => "written",
            AccessKind::Read => "read",
            AccessKind::Free => "freed",
        };
        write!(f, "{kind} on stream {} at {}", self.stream.0, self.place)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessKind {
    /// By `fill`.
    Write,
    /// By `verify`.
    Read,
    /// By [`PooledDevice::free_async`], which runs in stream order.
    Free,
}

/// A failed device call. Out of memory is a normal answer; the other errors are bugs of the caller
/// or a broken machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The device has too little memory. Free some and try again, or request less.
    #[error("the device has {free} free, but {requested} were requested")]
    OutOfMemory { requested: Bytes, free: Bytes },
    #[error("{ptr} is freed at {second}, but was already freed at {first}")]
    DoubleFree {
        ptr: DevicePtr,
        first: CallSite,
        second: CallSite,
    },
    #[error("{ptr} is freed at {place}, but no allocation starts there")]
    InvalidFree { ptr: DevicePtr, place: CallSite },
    #[error("{range} is {access}, but {why}")]
    InvalidAccess {
        range: MemoryRange,
        access: Access,
        why: String,
    },
    /// Two streams accessed the same memory without an order between them. Put an event between
    /// them.
    #[error(
        "{range} is {second} while it may still be {first}: no event or synchronization orders the \
         two"
    )]
    Race {
        range: MemoryRange,
        first: Access,
        second: Access,
    },
    /// Memory was unmapped while work on it may be unfinished. First wait for its stream or for an
    /// event after the work.
    #[error(
        "{range} is unmapped at {place} while it may still be {access}: the host has not waited \
         for that work"
    )]
    InUse {
        range: MemoryRange,
        access: Access,
        place: CallSite,
    },
    /// Memory does not contain the written tag: another writer has changed it.
    #[error("the byte at {at} of {range} does not hold tag {expected:#x}: {found}")]
    Corrupted {
        range: MemoryRange,
        at: DevicePtr,
        expected: u64,
        found: String,
    },
    /// Host memory is exhausted. Request less, or another kind.
    #[error("{call} of {requested} failed: {why}")]
    HostMemory {
        call: &'static str,
        requested: Bytes,
        why: String,
    },
    #[error("{copied} are copied to or from host memory {number}, which has {size}")]
    HostRange {
        number: u32,
        copied: Bytes,
        size: Bytes,
    },
    /// A stream or event that this device does not have (any more).
    #[error("the device has no {kind} {number}")]
    UnknownHandle { kind: &'static str, number: u32 },
    /// The event is not recorded or not complete. Synchronize first.
    #[error("event {0} is not done")]
    NotReady(u32),
    /// The driver refused a call. The advice says what to do.
    #[error("{call} failed: {name} ({code}). {advice}")]
    Driver {
        call: &'static str,
        code: u32,
        name: String,
        advice: &'static str,
    },
    /// The call would wait for ever, for work that never ends. End the process.
    #[error("{call} never returns: it waits for work that does not end")]
    NeverReturns { call: &'static str },
    /// An allocator library violated its interface or cannot be used. Fix the library.
    #[error("the library {path}: {why}")]
    Library { path: String, why: String },
    /// The device does not exist or lacks a feature.
    #[error("{what}: {why}")]
    Unavailable { what: String, why: String },
}

impl DeviceError {
    pub const fn unknown_handle(kind: &'static str, number: u32) -> Self {
        Self::UnknownHandle { kind, number }
    }

    fn unsupported(feature: &str) -> Self {
        Self::Unavailable {
            what: feature.to_owned(),
            why: "this device does not support it".to_owned(),
        }
    }

    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. })
    }
}
