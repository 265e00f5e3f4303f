//! What allocators need of a device, [`Device`], and what a test rig needs beyond that, [`TestDevice`].
//!
//! [`sim`] is the simulated device, [`limited`] gives any device a smaller memory, [`faulty`] lets any device fail, [`wrapper`] is for devices around
//! a device. CUDA devices are in the crate `harness-cuda`.

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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The null pointer.
    pub const NULL: Self = Self(0);

    /// The address `bytes` further on, at most the last one.
    #[must_use]
    pub const fn offset(self, bytes: Bytes) -> Self {
        Self(self.0.saturating_add(bytes.0))
    }
}

impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A stream of one device, numbered from 0, the default stream. Numbers are never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct StreamId(pub u32);

impl StreamId {
    /// The default stream, which every device has.
    pub const DEFAULT: Self = Self(0);
}

/// An event of one device. Numbers may be reused after [`Device::destroy_event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventId(pub u32);

/// Where in the caller's program the next device calls come from; a strict device names it in its errors.
/// The harness uses the number of the step; 0 means "not told".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Place(pub u32);

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { f.write_str("an unnamed place") } else { write!(f, "step {}", self.0) }
    }
}

/// A contiguous range of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct MemoryRange {
    pub start: DevicePtr,
    pub len: Bytes,
}

impl MemoryRange {
    /// `len` bytes from `start`.
    #[must_use]
    pub const fn new(start: DevicePtr, len: Bytes) -> Self {
        Self { start, len }
    }

    /// The first address behind the range.
    #[must_use]
    pub const fn end(self) -> DevicePtr {
        self.start.offset(self.len)
    }
}

impl fmt::Display for MemoryRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end())
    }
}

/// What `fill` writes and `verify` expects: each 8-byte word of the range holds this value (a shorter tail holds its first bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub u64);

/// Whose clock a device runs on. Times of the two are never compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Clock {
    /// A virtual clock, moved by a cost model.
    Simulated,
    /// The monotonic clock of the host and the event timers of the device.
    Measured,
}

/// What a device is. Does not change while it is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// As a user would recognise it: `NVIDIA H200`, `simulated`.
    pub name: String,
    /// Whose clock it runs on.
    pub clock: Clock,
    /// All of its memory as an allocator may use it: `totalGlobalMem` of a GPU, the limit of a limited device.
    pub total: Bytes,
    /// Device memory is charged in whole multiples of this.
    pub granularity: Bytes,
    /// How far device used may stray from what allocations add up to: nothing on a simulated device; on a real one the driver's own
    /// needs, which come and go with modules and streams.
    pub used_tolerance: Bytes,
    /// What makes two runs comparable.
    pub fingerprint: Fingerprint,
}

/// What must be equal for two runs' figures to be compared, as far as the device can tell. `None`: it could not be read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// All memory of the device itself, whatever limit it runs under.
    pub memory: Option<Bytes>,
    /// A hash of the GPU's UUID: tells devices apart without naming them.
    pub uuid_hash: Option<String>,
    /// Version of the kernel driver, for example `580.65.06`.
    pub driver: Option<String>,
    /// CUDA version that the driver supports, for example `13.0`.
    pub cuda: Option<String>,
    /// Whether multi-instance mode is on.
    pub mig: Option<bool>,
    /// Whether error correction is on.
    pub ecc: Option<bool>,
    /// Streaming-multiprocessor and memory clocks in MHz when the device was opened.
    pub clocks_mhz: Option<(u32, u32)>,
    /// Why the clocks were held down when the device was opened, if they were.
    pub throttle_reasons: Vec<String>,
    /// Other processes that held memory of this device when it was opened.
    pub other_processes: Option<u32>,
    /// The cost model of a simulated device: its name and version.
    pub cost_model: Option<String>,
}

/// The state of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// All of it, as [`DeviceInfo::total`].
    pub total: Bytes,
    /// What the next allocation could take at most.
    pub free: Bytes,
    /// What NVML reports as used on the whole device: context overhead, this process and all others.
    /// Where there is no NVML, total minus free as the driver tells it.
    pub used: Bytes,
    /// What NVML attributes to this process, where it can tell.
    pub process: Option<Bytes>,
    /// Device used before the first allocation of this process: its context, the modules, and what others held.
    pub context_overhead: Bytes,
    /// Memory held by others through [`TestDevice::set_pressure`].
    pub pressure: Bytes,
    /// Memory held by other processes of the same run, their contexts included.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub processes: Bytes,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands out a reference")]
fn is_zero(bytes: &Bytes) -> bool {
    *bytes == Bytes::ZERO
}

/// Calls made to the device since it was opened, failed ones included where not said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct DeviceCalls {
    /// Calls of [`Device::malloc`].
    pub malloc: u64,
    /// Those of them that failed for lack of memory.
    pub malloc_failures: u64,
    /// Calls of [`Device::free`].
    pub free: u64,
    /// Physical pages asked for by [`MappedDevice::map`], failed ones included.
    pub create: u64,
    /// Physical pages given back, those of a failed mapping included.
    pub release: u64,
    /// Calls of [`PooledDevice::malloc_async`].
    pub malloc_async: u64,
    /// Calls of [`PooledDevice::free_async`].
    pub free_async: u64,
    pub event_record: u64,
    /// Events asked whether they are done.
    pub event_query: u64,
    /// Waits of the host for an event, a stream or the whole device.
    pub synchronize: u64,
}

impl DeviceCalls {
    /// The calls since an earlier count.
    #[must_use]
    pub const fn since(&self, earlier: &Self) -> Self {
        Self {
            malloc: self.malloc - earlier.malloc,
            malloc_failures: self.malloc_failures - earlier.malloc_failures,
            free: self.free - earlier.free,
            create: self.create - earlier.create,
            release: self.release - earlier.release,
            malloc_async: self.malloc_async - earlier.malloc_async,
            free_async: self.free_async - earlier.free_async,
            event_record: self.event_record - earlier.event_record,
            event_query: self.event_query - earlier.event_query,
            synchronize: self.synchronize - earlier.synchronize,
        }
    }

    /// Calls that reach the driver's memory manager: what a caching allocator exists to avoid.
    #[must_use]
    pub const fn memory_calls(&self) -> u64 {
        self.malloc + self.free + self.create + self.release + self.malloc_async + self.free_async
    }
}

/// What an allocator needs of a device: memory, streams and events, and where the device has them, mapping and pools. Implement it to run the
/// allocators of this library on a device of your own; [`TestDevice`] is for test rigs only.
///
/// All calls are made by one host thread at a time. Work on one stream runs in order; work on different streams is unordered unless an
/// event orders it. Handles of another device are the caller's mistake and answered with [`DeviceError::UnknownHandle`].
pub trait Device: Send {
    /// What this device is.
    fn info(&self) -> &DeviceInfo;

    /// What the next allocation could take at most. One question to the driver and none to NVML, whose answers may take milliseconds: so it
    /// may stand where time is measured, as in the error of a refused allocation.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    fn free_memory(&mut self) -> Result<Bytes, DeviceError>;

    /// Takes `size` bytes (not zero) of device memory; the address is at least 256-byte aligned.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] where it does not fit: nothing has changed then.
    fn malloc(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError>;

    /// Gives back what [`Device::malloc`] returned. As on CUDA, work in flight on the memory is waited for.
    ///
    /// # Errors
    /// [`DeviceError::DoubleFree`], [`DeviceError::InvalidFree`].
    fn free(&mut self, ptr: DevicePtr) -> Result<(), DeviceError>;

    /// Makes a stream that does not synchronize with the default stream.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    fn create_stream(&mut self) -> Result<StreamId, DeviceError>;

    /// Waits for the work of a stream made by [`Device::create_stream`] and destroys it. Its number is not used again.
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`], also for the default stream, and for a borrowed stream: see [`Device::release_stream`].
    fn destroy_stream(&mut self, stream: StreamId) -> Result<(), DeviceError>;

    /// Forgets the number of a borrowed stream: one that the program made itself and named to the device, as by `CudaDevice::borrow_stream`.
    /// The driver's stream stays as it is, with its work, and nothing waits. Call it before the program destroys the stream, and with an
    /// allocator in between after the allocator has released the stream.
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`] for a number that is not of a borrowed stream; always, for a device that borrows none.
    fn release_stream(&mut self, stream: StreamId) -> Result<(), DeviceError>;

    /// Makes an event, not yet recorded.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    fn create_event(&mut self) -> Result<EventId, DeviceError>;

    /// Removes an event; waits that are already queued keep their meaning.
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`].
    fn destroy_event(&mut self, event: EventId) -> Result<(), DeviceError>;

    /// Queues the event behind all work of the stream so far. Recording again forgets the earlier record.
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`].
    fn record_event(&mut self, event: EventId, stream: StreamId) -> Result<(), DeviceError>;

    /// Whether everything in front of the event's last record is done. An event never recorded is done.
    /// Where the answer is yes, the host and all work it submits from now on are ordered behind that work.
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`].
    fn event_done(&mut self, event: EventId) -> Result<bool, DeviceError>;

    /// Makes all later work of the stream wait for the event's last record; the host does not wait.
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`].
    fn wait_event(&mut self, stream: StreamId, event: EventId) -> Result<(), DeviceError>;

    /// Waits for the event's last record.
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`].
    fn synchronize_event(&mut self, event: EventId) -> Result<(), DeviceError>;

    /// Waits for all work of the stream.
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`].
    fn synchronize_stream(&mut self, stream: StreamId) -> Result<(), DeviceError>;

    /// Waits for all work of all streams.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    fn synchronize(&mut self) -> Result<(), DeviceError>;

    /// Address space and physical memory apart, where the device has that.
    fn mapped(&mut self) -> Option<&mut dyn MappedDevice> {
        None
    }

    /// The driver's stream-ordered pools, where the device has them.
    fn pooled(&mut self) -> Option<&mut dyn PooledDevice> {
        None
    }
}

/// A device with the instruments of a test rig: its clock, its contents, memory held by others, what is left on it, and what it costs.
pub trait TestDevice: Device {
    /// Its memory now, each figure read once and one after the other. NVML's figures follow the driver's calls with a delay: a caller that
    /// finds them wrong reads them again before it blames anybody. Does not wait for any work.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    fn memory(&mut self) -> Result<DeviceMemory, DeviceError>;

    /// What of [`DeviceMemory::context_overhead`] is this process's own: its context and the modules, without what others held.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] where nothing tells the two apart, with the reason.
    fn own_context(&self) -> Result<Bytes, DeviceError>;

    /// The number of the device among those that this process sees, by which others can choose it; `None` for one that only this process has.
    fn ordinal(&self) -> Option<u32> {
        None
    }

    /// Time since the device was opened: virtual on a simulated device, monotonic host time on a real one. The only clock there is.
    fn now(&mut self) -> Nanos;

    /// Calls made so far.
    fn calls(&self) -> DeviceCalls;

    /// Says where in the caller's program the next calls come from.
    fn set_place(&mut self, place: Place);

    /// Makes an event that keeps the time of its record, for [`TestDevice::elapsed`]. It costs more than one of [`Device::create_event`], which
    /// on a GPU keeps none.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    fn create_timed_event(&mut self) -> Result<EventId, DeviceError>;

    /// Device time from one completed event to another, both made by [`TestDevice::create_timed_event`].
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`] where one of them keeps no time; [`DeviceError::NotReady`] where one was not recorded or is not done.
    fn elapsed(&mut self, start: EventId, end: EventId) -> Result<Nanos, DeviceError>;

    /// Queues work on the stream that writes the tag to every byte of the range (not empty).
    ///
    /// # Errors
    /// A strict device: [`DeviceError::InvalidAccess`], [`DeviceError::Race`].
    fn fill(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError>;

    /// Reads every byte of the range (not empty) on the stream, behind its work so far, and waits for the answer.
    ///
    /// # Errors
    /// [`DeviceError::Corrupted`] where a byte is not of the tag; a strict device also as [`TestDevice::fill`].
    fn verify(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError>;

    /// Queues a read of every byte of the range (not empty) on the stream, behind its work so far, and does not wait. Each byte is compared with
    /// the tag as the stream comes to it; [`TestDevice::finish_verifications`] tells the result. A real device may wait here for the oldest of
    /// these reads where very many are queued.
    ///
    /// # Errors
    /// A strict device: as [`TestDevice::fill`].
    fn verify_later(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError>;

    /// Waits for all reads that were queued on the stream by [`TestDevice::verify_later`], and tells what they found. Reads of a stream that is
    /// destroyed before are forgotten.
    ///
    /// # Errors
    /// [`DeviceError::Corrupted`] for the first read, in the order of the stream, that met another byte than one of its tag.
    fn finish_verifications(&mut self, stream: StreamId) -> Result<(), DeviceError>;

    /// Queues work that keeps the stream busy for about `duration`.
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`].
    fn busy(&mut self, stream: StreamId, duration: Nanos) -> Result<(), DeviceError>;

    /// Lets time pass on the device's clock while the host does nothing: virtual time on a simulated device, real time on a real one. Queued work goes on.
    fn sleep(&mut self, duration: Nanos);

    /// Makes others hold `held` bytes of the device, at most what is free, and returns what they hold now. A simulated device books it;
    /// a real one takes plain allocations apart from everybody else's.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    fn set_pressure(&mut self, held: Bytes) -> Result<Bytes, DeviceError>;

    /// Takes `size` bytes (not zero) of host memory that the device copies to and from.
    ///
    /// # Errors
    /// [`DeviceError::HostMemory`] where it cannot be had: nothing has changed then.
    fn host_alloc(&mut self, size: Bytes, memory: &HostMemory) -> Result<HostId, DeviceError>;

    /// Gives it back. Waits for the copies that are queued on it.
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`].
    fn host_free(&mut self, host: HostId) -> Result<(), DeviceError>;

    /// Queues a copy of the range (not empty) to the first bytes of host memory. Only of pinned memory the host never waits; that it may wait for other
    /// memory orders nothing: what reads the host memory must be behind the copy by its stream, an event or a wait.
    /// (<https://docs.nvidia.com/cuda/cuda-driver-api/api-sync-behavior.html>)
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`]; [`DeviceError::HostRange`] where the host memory is smaller; a strict device: as [`TestDevice::fill`], and
    /// [`DeviceError::Race`] of the host memory too.
    fn copy_to_host(&mut self, stream: StreamId, from: MemoryRange, to: HostId) -> Result<(), DeviceError>;

    /// Queues a copy of the first bytes of host memory to the range (not empty), as [`TestDevice::copy_to_host`] in the other direction.
    ///
    /// # Errors
    /// As [`TestDevice::copy_to_host`].
    fn copy_to_device(&mut self, stream: StreamId, from: HostId, to: MemoryRange) -> Result<(), DeviceError>;

    /// What the caller has not given back: checked at the end of a run.
    fn leaks(&self) -> Leaks;

    /// What a simulated device charges for its calls and work; a real one takes the time it takes.
    fn cost_figures(&self) -> Vec<CostFigure> {
        Vec::new()
    }
}

/// Address space and physical memory apart, as CUDA's virtual memory management has them
/// (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html>). Sizes and starts of ranges are multiples of
/// [`DeviceInfo::granularity`].
pub trait MappedDevice {
    /// Reserves addresses without memory behind them.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] where so many addresses are not left; [`DeviceError::Driver`].
    fn reserve(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError>;

    /// Gives a reservation back, as [`MappedDevice::reserve`] returned it. Nothing may be mapped in it any more.
    ///
    /// # Errors
    /// [`DeviceError::InvalidFree`].
    fn unreserve(&mut self, start: DevicePtr) -> Result<(), DeviceError>;

    /// Puts memory behind a range that has none, in pages of `page` bytes, each made for itself, and lets the device access it.
    /// All or nothing: where one page cannot be had, those made before are given back.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`]; [`DeviceError::InvalidAccess`] for a range that is not reserved, or mapped already.
    fn map(&mut self, range: MemoryRange, page: Bytes) -> Result<(), DeviceError>;

    /// Takes the memory from behind a range of whole pages. Does not wait: the host must have waited for all work on the range.
    ///
    /// # Errors
    /// [`DeviceError::InvalidFree`] for a range that is not mapped by whole pages; a strict device: [`DeviceError::InUse`], where a GPU's
    /// context breaks.
    fn unmap(&mut self, range: MemoryRange) -> Result<(), DeviceError>;
}

/// Pools of memory that the driver keeps and hands out in the order of streams, as CUDA's stream-ordered memory allocator does
/// (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MALLOC__ASYNC.html>).
///
/// An allocation is there for work of its stream that is submitted later, and for work of other streams that is ordered behind that. A free
/// takes its turn in its stream; every access must be ordered in front of it. What was freed is handed out again on the same stream at
/// once, and on another stream only if the free is ordered before that stream's next work by an event or a wait of the host. What the
/// driver could do beyond that, reuse by chance (`CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC`) and waits that it adds itself
/// (`CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES`), is switched off: a run must come out the same again.
pub trait PooledDevice {
    /// Makes a pool that holds nothing. When it has reserved more than the threshold, it tries to give unused memory back at the next
    /// wait of the host for an event, a stream or the device (`CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`).
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    fn create_pool(&mut self, release_threshold: Bytes) -> Result<PoolId, DeviceError>;

    /// Waits for all work, and gives the pool and all it has reserved back.
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`], also where something allocated from it was not freed.
    fn destroy_pool(&mut self, pool: PoolId) -> Result<(), DeviceError>;

    /// Takes `size` bytes (not zero) from the pool, in the order of the stream; the address is at least 256-byte aligned.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] where it does not fit: nothing has changed then, but that the pool may have given unused memory back.
    fn malloc_async(&mut self, pool: PoolId, size: Bytes, stream: StreamId) -> Result<DevicePtr, DeviceError>;

    /// Gives back what [`PooledDevice::malloc_async`] returned, in the order of the stream, which may be another one.
    ///
    /// # Errors
    /// [`DeviceError::DoubleFree`], [`DeviceError::InvalidFree`]; a strict device: [`DeviceError::Race`].
    fn free_async(&mut self, ptr: DevicePtr, stream: StreamId) -> Result<(), DeviceError>;

    /// Gives unused memory back, but so that at least `keep` stays reserved. Memory whose free the host has not waited for may count as
    /// used.
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`].
    fn trim_pool(&mut self, pool: PoolId, keep: Bytes) -> Result<(), DeviceError>;

    /// [`PoolMemory::reserved`] alone: one question to the driver, where [`PooledDevice::pool_memory`] asks four.
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`].
    fn pool_reserved(&mut self, pool: PoolId) -> Result<Bytes, DeviceError> {
        Ok(self.pool_memory(pool)?.reserved)
    }

    /// What the pool holds, as the driver tells it.
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`].
    fn pool_memory(&mut self, pool: PoolId) -> Result<PoolMemory, DeviceError>;
}

/// A pool of one device. Numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub u32);

/// What a pool holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolMemory {
    /// Held from the device (`CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`).
    pub reserved: Bytes,
    /// The most that ever was.
    pub reserved_high: Bytes,
    /// Handed out, as the driver rounds it (`CU_MEMPOOL_ATTR_USED_MEM_CURRENT`).
    pub used: Bytes,
    /// The most that ever was.
    pub used_high: Bytes,
}

/// One figure of a cost model, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CostFigure {
    /// What is charged for, for example `device allocation`.
    pub name: String,
    /// How much, with its unit.
    pub value: String,
    /// Where the figure comes from: a measurement with date and device, a publication, or that it is assumed and why.
    pub source: String,
}

/// Handles and memory still held by the caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leaks {
    /// Allocations not freed, those of pools included.
    pub allocations: u64,
    /// Reservations of addresses not given back, by [`MappedDevice::reserve`].
    pub reservations: u64,
    /// Pools not destroyed.
    pub pools: u64,
    /// Bytes of allocations and of mapped pages, as charged, and what pools have reserved.
    pub bytes: Bytes,
    /// Streams not destroyed, the default stream apart.
    pub streams: u64,
    /// Events not destroyed.
    pub events: u64,
    /// Pieces of host memory not given back, by [`TestDevice::host_free`].
    pub host: u64,
}

impl Leaks {
    /// Whether everything was given back.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Leaks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { allocations, reservations, pools, bytes, streams, events, host } = *self;
        let things = [
            (allocations, "allocation", "allocations"),
            (reservations, "reservation", "reservations"),
            (pools, "pool", "pools"),
            (streams, "stream", "streams"),
            (events, "event", "events"),
            (host, "piece of host memory", "pieces of host memory"),
        ];
        let held = things.into_iter().filter(|(number, ..)| *number > 0);
        let held: Vec<String> = held.map(|(number, one, many)| format!("{number} {}", if number == 1 { one } else { many })).collect();
        match (held.is_empty(), bytes) {
            (true, Bytes::ZERO) => f.write_str("nothing"),
            (true, bytes) => write!(f, "{bytes}"),
            (false, Bytes::ZERO) => f.write_str(&held.join(", ")),
            (false, bytes) => write!(f, "{bytes} in {}", held.join(", ")),
        }
    }
}

/// One access to memory, as a strict device remembers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Access {
    pub kind: AccessKind,
    pub stream: StreamId,
    /// From where in the caller's program.
    pub place: Place,
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

/// Kinds of access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessKind {
    /// `fill`.
    Write,
    /// `verify`.
    Read,
    /// [`PooledDevice::free_async`], which takes its turn in a stream as other work does.
    Free,
}

/// What went wrong on a device. Out of memory is an answer, everything else a mistake or a broken machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum DeviceError {
    /// The memory is not there. Give something back and ask again, or ask for less.
    #[error("the device has {free} free, {requested} were asked for")]
    OutOfMemory {
        /// What was asked for.
        requested: Bytes,
        /// What the device had free.
        free: Bytes,
    },
    /// An address was freed twice. The caller's accounts are wrong: stop.
    #[error("{ptr} is freed at {second}, but was freed before at {first}")]
    DoubleFree {
        ptr: DevicePtr,
        /// Where it was freed.
        first: Place,
        /// Where it was freed again.
        second: Place,
    },
    /// An address was freed that no allocation starts at. The caller's accounts are wrong: stop.
    #[error("{ptr} is freed at {place}, but no allocation starts there")]
    InvalidFree {
        ptr: DevicePtr,
        /// Where it was freed.
        place: Place,
    },
    /// Memory was touched that is not (or no longer) allocated. The caller's accounts are wrong: stop.
    #[error("{range} is {access}, but {why}")]
    InvalidAccess {
        range: MemoryRange,
        access: Access,
        /// What is wrong with it, for example where it was freed.
        why: String,
    },
    /// Two streams touched the same memory and nothing orders them. Put an event between them.
    #[error("{range} is {second} while it may still be {first}: no event or synchronization orders the two")]
    Race {
        range: MemoryRange,
        /// The earlier access in program order.
        first: Access,
        /// The later one.
        second: Access,
    },
    /// Memory was taken away while work on it may not be done. Wait for its stream, or for an event behind the work, first.
    #[error("{range} is unmapped at {place} while it may still be {access}: the host has not waited for that")]
    InUse {
        /// What the access touched.
        range: MemoryRange,
        /// The access that may not be done.
        access: Access,
        /// Where the memory was taken away.
        place: Place,
    },
    /// Memory does not hold what was written. Somebody else wrote there.
    #[error("the byte at {at} of {range} does not hold tag {expected:#x}: {found}")]
    Corrupted {
        range: MemoryRange,
        /// The first wrong byte.
        at: DevicePtr,
        /// The tag it should hold.
        expected: u64,
        /// What is there instead, in words.
        found: String,
    },
    /// The host's memory is not there. Ask for less, or for another kind.
    #[error("{call} of {requested} failed: {why}")]
    HostMemory {
        /// The call that got none.
        call: &'static str,
        requested: Bytes,
        why: String,
    },
    /// A copy is larger than the host memory that it goes to or comes from. The caller's accounts are wrong: stop.
    #[error("{copied} are copied to or from host memory {number}, which has {size}")]
    HostRange { number: u32, copied: Bytes, size: Bytes },
    /// A stream or an event that this device does not have (any more).
    #[error("the device has no {kind} {number}")]
    UnknownHandle {
        /// `stream`, `event` or `host memory`.
        kind: &'static str,
        number: u32,
    },
    /// The event was never recorded, or is not done: synchronize first.
    #[error("event {0} is not done")]
    NotReady(u32),
    /// The driver refused a call. The advice says what the user can do.
    #[error("{call} failed: {name} ({code}). {advice}")]
    Driver {
        call: &'static str,
        code: u32,
        /// The code's name, or "unknown driver code".
        name: String,
        /// What to do about it.
        advice: &'static str,
    },
    /// A call would wait for ever: work in front of it never ends. End the process.
    #[error("{call} never returns: it waits for work that does not end")]
    NeverReturns { call: &'static str },
    /// A shared library that allocates did not do what its interface promises, or cannot be used. Correct the library.
    #[error("the library {path}: {why}")]
    Library {
        path: String,
        /// What it did.
        why: String,
    },
    /// There is no such device to open. The reason says what is missing and what follows.
    #[error("{what}: {why}")]
    Unavailable {
        /// What was looked for.
        what: String,
        /// Why it is not there.
        why: String,
    },
}

impl DeviceError {
    /// Whether this is the answer "no memory", which allocators handle.
    #[must_use]
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. })
    }
}
