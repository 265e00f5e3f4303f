//! A real GPU, through the CUDA driver alone: no toolkit, nothing linked, everything probed before it is called.
//!
//! [`CudaDevice`] implements [`Device`] on the device's primary context. It keeps its own table of what callers hold, so a wrong free or an
//! access to memory that nobody holds is noticed before the driver is asked: on a GPU such an access would break the context for good.
//!
//! * `driver` is the table of driver functions, `codes` names what they answer;
//! * `host` is memory of the host that is copied to and from;
//! * `kernels` and `kernels.ptx` fill, verify and spin;
//! * `mapping` is address space and physical memory apart, [`harness_allocator::device::MappedDevice`];
//! * `pool` is the driver's stream-ordered pools, [`harness_allocator::device::PooledDevice`];
//! * `reads` keeps what was queued by [`TestDevice::verify_later`];
//! * `pressure` is the memory of [`TestDevice::set_external_memory`];
//! * [`probe`] looks at GPUs without opening one.

mod codes;
mod driver;
mod host;
mod kernels;
mod mapping;
mod pool;
mod pressure;
pub mod probe;
mod reads;
mod types;

use std::collections::BTreeMap;
use std::ptr;
use std::time::Instant;

use self::driver::Driver;
use self::host::Host;
use self::kernels::{Kernels, Mismatch};
use self::mapping::Mapping;
use self::pool::CudaPools;
use self::pressure::Pressure;
use self::reads::{Reads, corrupted};
use self::types::{CUcontext, CUdevice, CUevent};
pub use self::types::{CUstream, CUstream_st};
use crate::library::Refusal;
use crate::machine::no_such_device;
use crate::nvml::{NOT_KNOWN, NvmlDevice};
use harness_allocator::device::{
    Access, AccessKind, Clock, Device, DeviceCalls, DeviceError, DeviceInfo, DeviceMemory, DevicePtr, EventId, Fingerprint, HostId,
    HostMemory, Leaks, MappedDevice, MemoryRange, CallSite, PooledDevice, StreamId, Tag, TestDevice,
};
use harness_allocator::units::{Bytes, Nanos};

/// The driver takes device memory in pages of 2 MiB. Several small allocations may share one, so figures rounded to it are an upper bound
/// for those. Source: <https://developer.nvidia.com/blog/introducing-low-level-gpu-virtual-memory-management/>, which gives 2 MiB as the
/// granularity of device memory, also for `cudaMalloc`.
const GRANULARITY: Bytes = Bytes::mib(2);

/// How far device used may stray from what is allocated: room for what the driver takes for streams and events as they are made. An
/// allowance, not a measured figure: a few granules, and small beside the megabytes that a scenario moves.
const USED_TOLERANCE: Bytes = Bytes::mib(8);

/// `CU_STREAM_LEGACY`: the default stream by another name.
const LEGACY_STREAM: usize = 1;
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD_STREAM: usize = 2;

/// A GPU opened through the CUDA driver.
///
/// Dropping it waits for its work and gives everything back, also what callers still hold.
pub struct CudaDevice {
    info: DeviceInfo,
    ordinal: u32,
    opened: Instant,
    context_overhead: Bytes,
    own_context: Result<Bytes, String>,
    place: CallSite,
    calls: DeviceCalls,
    /// Live allocations of callers, by address.
    live: BTreeMap<u64, Bytes>,
    /// Addresses freed and not handed out again, and where they were freed.
    freed: BTreeMap<u64, CallSite>,
    streams: BTreeMap<u32, Stream>,
    next_stream: u32,
    events: Vec<Option<Event>>,
    free_events: Vec<u32>,
    mapping: Option<Mapping>,
    pools: Option<CudaPools>,
    pressure: Pressure,
    host: Host,
    nvml: Result<NvmlDevice, String>,
    /// `None` for a device that serves allocators alone.
    kernels: Option<Kernels>,
    reads: Reads,
    // Last, as fields are dropped in order: everything above lives in it.
    context: Context,
}

// SAFETY: the raw handles in here are the driver's, valid in every thread of the process; each method makes the context the calling thread's
// first, and `&mut self` keeps calls one at a time.
unsafe impl Send for CudaDevice {}

/// A stream that callers may name.
#[derive(Clone, Copy)]
struct Stream {
    handle: CUstream,
    /// Whether this device made it, and destroys it.
    own: bool,
}

struct Event {
    handle: CUevent,
    recorded: bool,
    /// Whether it keeps the time of its record.
    timed: bool,
}

impl CudaDevice {
    /// Opens the CUDA device with this ordinal, as the process sees them.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] without driver, device or function, in a sentence; [`DeviceError::Driver`] where a call is refused.
    pub fn open(ordinal: u32) -> Result<Self, DeviceError> {
        Self::open_with(driver_with_devices(ordinal, Driver::get())?, ordinal, |driver| Kernels::load(driver).map(Some))
    }

    /// Opens it for allocators alone, as within a program that has kernels of its own: none are loaded, so nothing is taken from the device. To
    /// write, read or busy it is refused.
    ///
    /// # Errors
    /// As [`CudaDevice::open`].
    pub fn open_for_allocation(ordinal: u32) -> Result<Self, DeviceError> {
        Self::open_with(driver_with_devices(ordinal, Driver::for_allocation())?, ordinal, |_| Ok(None))
    }

    fn open_with(
        driver: &'static Driver,
        ordinal: u32,
        load: impl FnOnce(&Driver) -> Result<Option<Kernels>, Refusal>,
    ) -> Result<Self, DeviceError> {
        let count = probe::device_count(driver)?;
        if ordinal >= count {
            return Err(no_such_device(ordinal, count));
        }
        let (device, found) = probe::describe(driver, ordinal)?;
        let nvml = NvmlDevice::find(found.uuid);
        // Before the context, so that this process is not in the list, whatever number it has in the driver's namespace.
        let facts = match &nvml {
            Ok(nvml) => nvml.fingerprint(),
            Err(_) => Fingerprint { throttle_reasons: vec![NOT_KNOWN.to_owned()], ..Fingerprint::default() },
        };
        let listed = nvml.as_ref().map_err(String::clone).and_then(NvmlDevice::process_numbers);
        let used_before = nvml.as_ref().map_err(String::clone).and_then(NvmlDevice::used);
        let (memory, uuid_hash) = (Some(found.total), Some(found.uuid.hash()));
        let fingerprint = Fingerprint { memory, uuid_hash, cuda: Some(probe::cuda_version(driver)?), ..facts };
        let context = Context::retain(driver, device)?;
        if let (Ok(nvml), Ok(listed)) = (&nvml, &listed) {
            nvml.notice_this_process(listed);
        }
        let (mapping, pools) = (Mapping::of(driver, device)?, CudaPools::of(driver, device)?);
        let kernels = load(driver)?;
        let info = DeviceInfo {
            name: found.name,
            clock: Clock::Measured,
            total: found.total,
            granularity: GRANULARITY,
            used_tolerance: USED_TOLERANCE,
            fingerprint,
        };
        let mut device = Self {
            info,
            ordinal,
            opened: Instant::now(),
            context_overhead: Bytes::ZERO,
            own_context: Ok(Bytes::ZERO),
            place: CallSite::default(),
            calls: DeviceCalls::default(),
            live: BTreeMap::new(),
            freed: BTreeMap::new(),
            streams: BTreeMap::from([(StreamId::DEFAULT.0, Stream { handle: ptr::null_mut(), own: false })]),
            next_stream: 1,
            events: Vec::new(),
            free_events: Vec::new(),
            mapping,
            pools,
            pressure: Pressure::default(),
            host: Host::default(),
            nvml,
            kernels,
            reads: Reads::default(),
            context,
        };
        device.context_overhead = device.used(device.driver_free()?)?;
        device.own_context = used_before.and_then(|before| device.taken_since(before));
        Ok(device)
    }

    /// Why NVML tells nothing of this device, where it does not: [`DeviceMemory::used`] then comes from the CUDA driver.
    #[must_use]
    pub fn nvml_problem(&self) -> Option<&str> {
        self.nvml.as_ref().err().map(String::as_str)
    }

    /// The driver's functions, with this device's context made the calling thread's.
    fn driver(&self) -> Result<&'static Driver, Refusal> {
        self.context.make_current()
    }

    /// What the driver says is free.
    fn driver_free(&self) -> Result<Bytes, Refusal> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are places for the answers.
        unsafe { self.driver()?.memory_info(&raw mut free, &raw mut total) }?;
        Ok(Bytes(free as u64))
    }

    /// Device used: NVML's figure, or where there is no NVML what is not free.
    fn used(&self, free: Bytes) -> Result<Bytes, DeviceError> {
        match &self.nvml {
            Ok(nvml) => nvml.used().map_err(|why| DeviceError::Unavailable { what: "memory used, as NVML tells it".to_owned(), why }),
            Err(_) => Ok(self.info.total.saturating_sub(free)),
        }
    }

    /// What this process has taken since so much was used: by its own account where NVML keeps one, otherwise what is used beyond that, which
    /// holds if no other process took or gave back memory in that moment.
    fn taken_since(&self, before: Bytes) -> Result<Bytes, String> {
        let nvml = self.nvml.as_ref().map_err(String::clone)?;
        if let Ok(Some(own)) = nvml.used_by_this_process() {
            return Ok(own);
        }
        // A context always takes something.
        let taken = nvml.used()?.saturating_sub(before);
        if taken > Bytes::ZERO { Ok(taken) } else { Err("others gave memory back while the context was made".to_owned()) }
    }

    /// The driver's handle of a stream, for launches by other libraries; null for the default stream. Valid until the stream is destroyed
    /// or this is dropped.
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`].
    pub fn raw_stream(&self, stream: StreamId) -> Result<CUstream, DeviceError> {
        self.stream(stream)
    }

    /// Takes a stream that the program has made, by whatever binding to CUDA, so that requests can name it. It stays the program's: this device
    /// never destroys it. A stream that is borrowed already keeps its number; the driver's default stream is [`StreamId::DEFAULT`].
    ///
    /// [`Device::release_stream`] ends it, without waiting for the stream's work. An allocator keeps free memory and events by stream: let it
    /// go of the stream first (`Allocator::release_stream`).
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] for a stream of another context than the device's primary one, and for `CU_STREAM_PER_THREAD`, which is
    /// another stream in each thread; [`DeviceError::Driver`] where the driver does not know the stream.
    ///
    /// # Safety
    /// The stream must live until it is released or this device is dropped.
    pub unsafe fn borrow_stream(&mut self, stream: CUstream) -> Result<StreamId, DeviceError> {
        let refused = |why: &str| DeviceError::Unavailable { what: "a stream to borrow".to_owned(), why: why.to_owned() };
        match stream.addr() {
            0 | LEGACY_STREAM => return Ok(StreamId::DEFAULT),
            PER_THREAD_STREAM => return Err(refused("CU_STREAM_PER_THREAD is another stream in each thread: make a stream")),
            _ => {}
        }
        if let Some((number, _)) = self.streams.iter().find(|(_, known)| known.handle == stream) {
            return Ok(StreamId(*number));
        }
        let mut context = ptr::null_mut();
        // SAFETY: `context` is a place for the answer; the caller says that the stream lives.
        unsafe { self.driver()?.stream_context(stream, &raw mut context) }?;
        if context != self.context.handle {
            return Err(refused("it is of another context: make it in the primary context of this device"));
        }
        Ok(self.add_stream(Stream { handle: stream, own: false }))
    }

    fn add_stream(&mut self, stream: Stream) -> StreamId {
        let number = self.next_stream;
        self.next_stream += 1;
        self.streams.insert(number, stream);
        StreamId(number)
    }

    fn stream(&self, stream: StreamId) -> Result<CUstream, DeviceError> {
        self.known_stream(stream).map(|known| known.handle)
    }

    fn known_stream(&self, stream: StreamId) -> Result<Stream, DeviceError> {
        self.streams.get(&stream.0).copied().ok_or(DeviceError::UnknownHandle { kind: "stream", number: stream.0 })
    }

    /// Shows that [`TestDevice::verify`] works here: it must pass a range that holds its tag, and find each wrong byte in a range that begins
    /// and ends at odd addresses. Without that a run whose contents are never wrong would prove nothing. Not counted in
    /// [`TestDevice::calls`].
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] where it does not; [`DeviceError`] where memory cannot be had or used.
    pub fn check_verification(&mut self) -> Result<(), DeviceError> {
        let calls = self.calls;
        let start = self.malloc(GRANULARITY)?;
        let checked = self.verification_works(start);
        let freed = self.free(start);
        self.calls = calls;
        checked.and(freed)
    }

    fn verification_works(&mut self, start: DevicePtr) -> Result<(), DeviceError> {
        // Odd at both ends, so that the kernels for single bytes and the one for words take part; no byte of the tag is zero.
        let (range, tag, wrong) = (MemoryRange::new(start.offset(Bytes(3)), Bytes(4099)), Tag(0x1122_3344_5566_7788), Tag(0));
        let fails = |why: String| DeviceError::Unavailable {
            what: "verification of GPU memory".to_owned(),
            why: format!("{why}: the program's own kernels do not work on this GPU, so that no result of theirs means anything"),
        };
        self.fill(StreamId::DEFAULT, range, tag)?;
        self.verify(StreamId::DEFAULT, range, tag).map_err(|error| fails(format!("a right range was refused ({error})")))?;
        for offset in [0, 4, 5, 2050, 4096, 4098] {
            let byte = MemoryRange::new(range.start.offset(Bytes(offset)), Bytes(1));
            self.fill(StreamId::DEFAULT, byte, wrong)?;
            match self.verify(StreamId::DEFAULT, range, tag) {
                Err(DeviceError::Corrupted { at, .. }) if at == byte.start => {}
                Err(DeviceError::Corrupted { at, .. }) => {
                    return Err(fails(format!("a wrong byte at {} was reported at {at}", byte.start)));
                }
                Err(error) => return Err(error),
                Ok(()) => return Err(fails(format!("a wrong byte at offset {offset} of {} was not found", range.len))),
            }
            self.fill(StreamId::DEFAULT, range, tag)?;
        }
        self.synchronize()
    }

    /// The kernels, where they are loaded.
    fn kernels(&self) -> Result<&Kernels, DeviceError> {
        self.kernels.as_ref().ok_or_else(|| DeviceError::Unavailable {
            what: "kernels of this device".to_owned(),
            why: "it was opened for allocators alone; open it by `CudaDevice::open`".to_owned(),
        })
    }

    /// Waits for the stream if reads are queued on it, and looks at what they found.
    fn finish_reads(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        if self.reads.are_on(stream) {
            let findings = self.kernels()?.findings(self.driver()?, self.stream(stream)?)?;
            self.reads.finish(stream, &findings);
        }
        Ok(())
    }

    fn make_event(&mut self, timed: bool) -> Result<EventId, DeviceError> {
        let mut handle = ptr::null_mut();
        let flags = if timed { driver::EVENT_WITH_TIMING } else { driver::EVENT_WITHOUT_TIMING };
        // SAFETY: `handle` is a place for the answer.
        unsafe { self.driver()?.create_event(&raw mut handle, flags) }?;
        let event = Some(Event { handle, recorded: false, timed });
        if let Some(number) = self.free_events.pop() {
            self.events[number as usize] = event;
            return Ok(EventId(number));
        }
        self.events.push(event);
        Ok(EventId(self.events.len() as u32 - 1))
    }

    fn event(&mut self, event: EventId) -> Result<&mut Event, DeviceError> {
        let slot = self.events.get_mut(event.0 as usize).and_then(Option::as_mut);
        slot.ok_or(DeviceError::UnknownHandle { kind: "event", number: event.0 })
    }

    /// The error for freeing an address that nothing lives at.
    fn wrong_free(&self, ptr: DevicePtr) -> DeviceError {
        match self.freed.get(&ptr.0) {
            Some(&first) => DeviceError::DoubleFree { ptr, first, second: self.place },
            None => DeviceError::InvalidFree { ptr, place: self.place },
        }
    }

    /// Refuses a range that is not wholly inside one live allocation, nor wholly mapped.
    fn check_access(&self, range: MemoryRange, kind: AccessKind, stream: StreamId) -> Result<(), DeviceError> {
        let plain = self.live.range(..=range.start.0).next_back();
        let pooled = self.pools.as_ref().and_then(|pools| pools.live.range(..=range.start.0).next_back());
        let allocation = plain.into_iter().chain(pooled.map(|(start, (size, _))| (start, size))).max();
        let table = self.mapping.as_ref().map(|mapping| &mapping.table);
        let why = match allocation {
            _ if table.is_some_and(|table| table.is_mapped(range)) => return Ok(()),
            _ if table.is_some_and(|table| table.is_reserved(range.start)) => "no memory is mapped to all of it".to_owned(),
            Some((start, size)) if range.len <= size.saturating_sub(Bytes(range.start.0 - start)) => return Ok(()),
            Some((start, size)) if range.start.0 < start + size.0 => {
                format!("the allocation at {} ends at {}", DevicePtr(*start), DevicePtr(start + size.0))
            }
            _ => match self.freed.get(&range.start.0) {
                Some(place) => format!("it was freed at {place}"),
                None => "no allocation of this device lies there".to_owned(),
            },
        };
        Err(DeviceError::InvalidAccess { range, access: Access { kind, stream, place: self.place }, why })
    }
}

/// The driver, where it has any device; the error for `ordinal` otherwise.
fn driver_with_devices(ordinal: u32, driver: Result<&'static Driver, DeviceError>) -> Result<&'static Driver, DeviceError> {
    driver.map_err(|error| match error {
        DeviceError::Driver { call: "cuInit", code: driver::NO_DEVICE, .. } => no_such_device(ordinal, 0),
        other => other,
    })
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_memory(&mut self) -> Result<Bytes, DeviceError> {
        Ok(self.driver_free()?)
    }

    fn malloc(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        self.calls.malloc += 1;
        let driver = self.driver()?;
        let mut address = 0;
        // SAFETY: `address` is a place for the answer.
        match unsafe { driver.allocate(&raw mut address, usize::try_from(size.0).unwrap_or(usize::MAX)) } {
            Ok(()) => {
                self.live.insert(address, size);
                self.freed.remove(&address);
                Ok(DevicePtr(address))
            }
            Err(Refusal { code: driver::OUT_OF_MEMORY, .. }) => {
                self.calls.malloc_failures += 1;
                Err(DeviceError::OutOfMemory { requested: size, free: self.driver_free()? })
            }
            Err(refusal) => Err(refusal.into()),
        }
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), DeviceError> {
        self.calls.free += 1;
        if !self.live.contains_key(&ptr.0) {
            return Err(self.wrong_free(ptr));
        }
        let driver = self.driver()?;
        // SAFETY: the address is a live allocation of this context, as the table says, and is forgotten once it is freed. The driver itself
        // waits for work in flight.
        unsafe { driver.free(ptr.0) }?;
        self.live.remove(&ptr.0);
        self.freed.insert(ptr.0, self.place);
        Ok(())
    }

    fn create_stream(&mut self) -> Result<StreamId, DeviceError> {
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is a place for the answer.
        unsafe { self.driver()?.create_stream(&raw mut handle, driver::STREAM_NON_BLOCKING) }?;
        Ok(self.add_stream(Stream { handle, own: true }))
    }

    fn destroy_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        let Stream { handle, own } = self.known_stream(stream)?;
        if !own {
            return Err(DeviceError::UnknownHandle { kind: "stream of its own", number: stream.0 });
        }
        let driver = self.driver()?;
        // SAFETY: the handle is a live stream of this context, as the table says, and is forgotten once it is destroyed.
        unsafe {
            driver.synchronize_stream(handle)?;
            driver.destroy_stream(handle)?;
        }
        self.streams.remove(&stream.0);
        self.reads.forget(stream);
        Ok(())
    }

    /// Waits where reads of [`TestDevice::verify_later`] are queued on the stream.
    fn release_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        let is_borrowed = stream != StreamId::DEFAULT && self.streams.get(&stream.0).is_some_and(|known| !known.own);
        if !is_borrowed {
            return Err(DeviceError::UnknownHandle { kind: "borrowed stream", number: stream.0 });
        }
        self.finish_reads(stream)?;
        self.reads.forget(stream);
        self.streams.remove(&stream.0);
        Ok(())
    }

    fn create_event(&mut self) -> Result<EventId, DeviceError> {
        self.make_event(false)
    }

    fn destroy_event(&mut self, event: EventId) -> Result<(), DeviceError> {
        let handle = self.event(event)?.handle;
        // SAFETY: the handle is a live event of this context, as the table says, and is forgotten once it is destroyed. Waits that are
        // queued keep their meaning: the driver releases an event that is in use when it completes.
        unsafe { self.driver()?.destroy_event(handle) }?;
        self.events[event.0 as usize] = None;
        self.free_events.push(event.0);
        Ok(())
    }

    fn record_event(&mut self, event: EventId, stream: StreamId) -> Result<(), DeviceError> {
        let queue = self.stream(stream)?;
        let handle = self.event(event)?.handle;
        self.calls.event_record += 1;
        // SAFETY: both handles are live and of this context, as the tables say.
        unsafe { self.driver()?.record_event(handle, queue) }?;
        self.event(event)?.recorded = true;
        Ok(())
    }

    fn event_done(&mut self, event: EventId) -> Result<bool, DeviceError> {
        let handle = self.event(event)?.handle;
        self.calls.event_query += 1;
        // SAFETY: the handle is a live event of this context, as the table says. One never recorded is answered with success.
        match unsafe { self.driver()?.query_event(handle) } {
            Ok(()) => Ok(true),
            Err(Refusal { code: driver::NOT_READY, .. }) => Ok(false),
            Err(refusal) => Err(refusal.into()),
        }
    }

    fn wait_event(&mut self, stream: StreamId, event: EventId) -> Result<(), DeviceError> {
        let queue = self.stream(stream)?;
        let handle = self.event(event)?.handle;
        // SAFETY: both handles are live and of this context, as the tables say; the only flags are 0.
        Ok(unsafe { self.driver()?.wait_event(queue, handle, 0) }?)
    }

    fn synchronize_event(&mut self, event: EventId) -> Result<(), DeviceError> {
        let handle = self.event(event)?.handle;
        self.calls.synchronize += 1;
        // SAFETY: the handle is a live event of this context, as the table says.
        Ok(unsafe { self.driver()?.synchronize_event(handle) }?)
    }

    fn synchronize_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        let handle = self.stream(stream)?;
        self.calls.synchronize += 1;
        // SAFETY: the handle is a live stream of this context, as the table says.
        Ok(unsafe { self.driver()?.synchronize_stream(handle) }?)
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.calls.synchronize += 1;
        // SAFETY: the context is the calling thread's.
        Ok(unsafe { self.driver()?.synchronize() }?)
    }

    fn mapped(&mut self) -> Option<&mut dyn MappedDevice> {
        if self.mapping.is_some() { Some(self) } else { None }
    }

    fn pooled(&mut self) -> Option<&mut dyn PooledDevice> {
        if self.pools.is_some() { Some(self) } else { None }
    }
}

impl TestDevice for CudaDevice {
    fn memory(&mut self) -> Result<DeviceMemory, DeviceError> {
        let free = self.driver_free()?;
        Ok(DeviceMemory {
            total: self.info.total,
            free,
            used: self.used(free)?,
            process: self.nvml.as_ref().ok().and_then(|nvml| nvml.used_by_this_process().ok().flatten()),
            context_overhead: self.context_overhead,
            pressure: self.pressure.held(),
            processes: Bytes::ZERO,
        })
    }

    fn ordinal(&self) -> Option<u32> {
        Some(self.ordinal)
    }

    fn own_context(&self) -> Result<Bytes, DeviceError> {
        let unavailable = |why| DeviceError::Unavailable { what: "memory of this process's context alone".to_owned(), why };
        self.own_context.clone().map_err(unavailable)
    }

    fn now(&mut self) -> Nanos {
        Nanos(u64::try_from(self.opened.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    fn calls(&self) -> DeviceCalls {
        self.calls
    }

    fn set_call_site(&mut self, place: CallSite) {
        self.place = place;
    }

    fn create_timed_event(&mut self) -> Result<EventId, DeviceError> {
        self.make_event(true)
    }

    fn elapsed(&mut self, start: EventId, end: EventId) -> Result<Nanos, DeviceError> {
        let mut handles = [ptr::null_mut(); 2];
        for (event, handle) in [start, end].into_iter().zip(&mut handles) {
            let known = self.event(event)?;
            if !known.timed {
                return Err(DeviceError::UnknownHandle { kind: "timed event", number: event.0 });
            }
            if !known.recorded {
                return Err(DeviceError::NotReady(event.0));
            }
            *handle = known.handle;
        }
        let driver = self.driver()?;
        for (event, handle) in [start, end].into_iter().zip(handles) {
            // SAFETY: the handle is a live event of this context, as the table says.
            match unsafe { driver.query_event(handle) } {
                Err(Refusal { code: driver::NOT_READY, .. }) => return Err(DeviceError::NotReady(event.0)),
                answer => answer?,
            }
        }
        let mut milliseconds = 0.0;
        // SAFETY: `milliseconds` is a place for the answer; both events are live, recorded, with timing.
        unsafe { driver.elapsed(&raw mut milliseconds, handles[0], handles[1]) }?;
        // An end in front of its start is a negative time: none has passed.
        Ok(Nanos((f64::from(milliseconds) * 1e6).round().max(0.0) as u64))
    }

    fn fill(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError> {
        let queue = self.stream(stream)?;
        self.check_access(range, AccessKind::Write, stream)?;
        Ok(self.kernels()?.fill(self.driver()?, queue, range, tag)?)
    }

    fn verify(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError> {
        let queue = self.stream(stream)?;
        self.check_access(range, AccessKind::Read, stream)?;
        let mismatch = self.kernels()?.verify(self.driver()?, queue, range, tag)?;
        mismatch.map_or(Ok(()), |Mismatch { found, word }| Err(corrupted(range, tag, found, Some(&word))))
    }

    fn verify_later(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError> {
        let queue = self.stream(stream)?;
        self.check_access(range, AccessKind::Read, stream)?;
        let slot = loop {
            match (self.reads.free_slot(), self.reads.oldest()) {
                (Some(slot), _) => break slot,
                (None, Some(oldest)) => self.finish_reads(oldest)?,
                (None, None) => unreachable!("every slot is free or of a queued read"),
            }
        };
        self.kernels()?.queue_verify(self.driver()?, queue, range, tag, slot)?;
        self.reads.add(stream, range, tag);
        Ok(())
    }

    fn finish_verifications(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        self.stream(stream)?;
        self.finish_reads(stream)?;
        self.reads.take_result(stream)
    }

    fn busy(&mut self, stream: StreamId, duration: Nanos) -> Result<(), DeviceError> {
        let queue = self.stream(stream)?;
        Ok(self.kernels()?.busy(self.driver()?, queue, duration)?)
    }

    fn sleep(&mut self, duration: Nanos) {
        std::thread::sleep(std::time::Duration::from_nanos(duration.0));
    }

    fn set_external_memory(&mut self, held: Bytes) -> Result<Bytes, DeviceError> {
        let driver = self.driver()?;
        Ok(self.pressure.resize(driver, held, self.info.granularity)?)
    }

    fn host_alloc(&mut self, size: Bytes, memory: &HostMemory) -> Result<HostId, DeviceError> {
        let driver = self.driver()?;
        self.host.take(driver, size, memory)
    }

    fn host_free(&mut self, host: HostId) -> Result<(), DeviceError> {
        let driver = self.driver()?;
        // A stream that is gone was waited for.
        for handle in self.host.copying(host)?.into_iter().filter_map(|stream| self.stream(stream).ok()) {
            // SAFETY: the handle is a live stream of this context, as the table says.
            unsafe { driver.synchronize_stream(handle) }?;
        }
        self.host.give_back(driver, host)
    }

    fn copy_to_host(&mut self, stream: StreamId, from: MemoryRange, to: HostId) -> Result<(), DeviceError> {
        let queue = self.stream(stream)?;
        self.check_access(from, AccessKind::Read, stream)?;
        let (driver, to) = (self.driver()?, self.host.copied(to, from.len, stream)?);
        // SAFETY: both sides have so many bytes, as the tables say, and stay until the copy is done: a free of either waits for it.
        Ok(unsafe { driver.copy_to_host(to, from.start.0, from.len.0 as usize, queue) }?)
    }

    fn copy_to_device(&mut self, stream: StreamId, from: HostId, to: MemoryRange) -> Result<(), DeviceError> {
        let queue = self.stream(stream)?;
        self.check_access(to, AccessKind::Write, stream)?;
        let (driver, from) = (self.driver()?, self.host.copied(from, to.len, stream)?);
        // SAFETY: as for the other direction.
        Ok(unsafe { driver.copy_from_host(to.start.0, from, to.len.0 as usize, queue) }?)
    }

    fn leaks(&self) -> Leaks {
        let charged = |size: &Bytes| size.checked_round_up(GRANULARITY).unwrap_or(*size);
        let table = self.mapping.as_ref().map(|mapping| &mapping.table);
        let pages: Bytes = table.into_iter().flat_map(|table| table.pages()).map(|(_, size, _)| size).sum();
        let driver = self.driver().ok();
        let pooled = self.pools.as_ref().zip(driver).map_or(Bytes::ZERO, |(pools, driver)| pools.reserved(driver));
        Leaks {
            reservations: table.map_or(0, |table| table.reservations().len() as u64),
            allocations: (self.live.len() + self.pools.as_ref().map_or(0, |pools| pools.live.len())) as u64,
            pools: self.pools.as_ref().map_or(0, CudaPools::count),
            bytes: self.live.values().map(charged).sum::<Bytes>() + pages + pooled,
            streams: self.streams.values().filter(|stream| stream.own).count() as u64,
            events: self.events.iter().flatten().count() as u64,
            host: self.host.count(),
        }
    }
}

impl Drop for CudaDevice {
    /// Gives everything back. Refusals are passed over: after a broken kernel every call is refused, and the context goes in any case.
    fn drop(&mut self) {
        let Ok(driver) = self.driver() else { return };
        // SAFETY: each handle and address is live, as the tables say, and the tables end here; the wait comes first, so no work uses them.
        unsafe {
            let _ = driver.synchronize();
            for event in self.events.iter().flatten() {
                let _ = driver.destroy_event(event.handle);
            }
            for stream in self.streams.values().filter(|stream| stream.own) {
                let _ = driver.destroy_stream(stream.handle);
            }
            for address in self.live.keys() {
                let _ = driver.free(*address);
            }
        }
        if let Some(mapping) = &mut self.mapping {
            mapping.release(driver);
        }
        if let Some(pools) = &mut self.pools {
            pools.release(driver);
        }
        self.pressure.release(driver);
        self.host.release(driver);
        let _ = self.kernels.take().map(|kernels| kernels.unload(driver));
    }
}

/// A reference to a device's primary context.
struct Context {
    driver: &'static Driver,
    device: CUdevice,
    handle: CUcontext,
}

impl Context {
    /// Takes a reference, makes the context if this is the first, and makes it the calling thread's.
    fn retain(driver: &'static Driver, device: CUdevice) -> Result<Self, Refusal> {
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is a place for the answer; the device's handle came from the driver.
        unsafe { driver.retain_context(&raw mut handle, device) }?;
        let context = Self { driver, device, handle };
        context.make_current()?;
        Ok(context)
    }

    /// Makes it the calling thread's, where it may not be: another thread may call, or other code may have changed it.
    fn make_current(&self) -> Result<&'static Driver, Refusal> {
        // SAFETY: the context is retained until `self` is dropped.
        unsafe { self.driver.set_context(self.handle) }?;
        Ok(self.driver)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the reference was taken in `retain` and is given back once. A thread whose context it was gets an error from its next
        // call, not undefined behaviour, as the driver's documentation of the primary context says.
        let _ = unsafe { self.driver.release_context(self.device) };
    }
}

/// Keeps the calling thread's context: what was current when it was made is current again when it is dropped. For libraries within a program that
/// chooses its devices itself, since each call of a [`CudaDevice`] makes its own context current.
#[derive(Debug)]
pub struct KeptContext {
    driver: &'static Driver,
    handle: CUcontext,
}

impl KeptContext {
    /// Takes note of the current context.
    ///
    /// # Errors
    /// [`DeviceError`] where there is no driver.
    pub fn new() -> Result<Self, DeviceError> {
        let driver = Driver::for_allocation()?;
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is a place for the answer.
        unsafe { driver.current_context(&raw mut handle) }?;
        Ok(Self { driver, handle })
    }
}

impl Drop for KeptContext {
    fn drop(&mut self) {
        // SAFETY: the context was the thread's own, whose program keeps it; null is allowed, and means none.
        let _ = unsafe { self.driver.set_context(self.handle) };
    }
}
