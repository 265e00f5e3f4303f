//! A real GPU through the CUDA driver, without a toolkit. The driver is loaded at run time and
//! checked before use.
//!
//! [`CudaDevice`] implements [`Device`] on the device's primary context. It keeps a table of its
//! callers' allocations and checks each free and access against it first, because an invalid access
//! on a GPU breaks the context for good.

mod codes;
mod driver;
mod external_memory;
mod host;
mod kernels;
mod mapping;
mod pool;
pub mod probe;
mod reads;

use std::{collections::BTreeMap, ptr, time::Instant};

pub use cudarc::driver::sys::CUstream;
use cudarc::driver::sys::{CUcontext, CUdevice, CUevent, CUevent_flags, CUstream_flags};

use self::driver::{Driver, cuda};
use self::kernels::{Kernels, Mismatch};
use self::reads::{Reads, corrupted};
use self::{external_memory::ExternalMemory, host::Host, mapping::Mapping, pool::CudaPools};
use crate::library::{Address, Refusal};
use crate::machine::no_such_device;
use crate::nvml::{NOT_KNOWN, NvmlDevice};
use harness_allocator::device::{
    Access, AccessKind, CallSite, Clock, Device, DeviceCalls, DeviceError, DeviceInfo,
    DeviceMemory, DevicePtr, EventId, Fingerprint, HostId, HostMemory, Leaks, MappedDevice,
    MemoryRange, PooledDevice, StreamId, Tag, TestDevice,
};
use harness_allocator::units::{Bytes, Nanos};

/// The driver allocates device memory in pages of 2 MiB. Small allocations may share a page, so
/// sums of rounded sizes are an upper bound. Source:
/// <https://developer.nvidia.com/blog/introducing-low-level-gpu-virtual-memory-management/> gives a
/// granularity of 2 MiB, also for `cudaMalloc`.
const GRANULARITY: Bytes = Bytes::mib(2);

/// Allowed difference between device used and the allocated bytes, for memory that the driver takes
/// for streams and events. An assumption, not a measurement.
const USED_TOLERANCE: Bytes = Bytes::mib(8);

/// `CU_STREAM_LEGACY`: another handle of the default stream.
const LEGACY_STREAM: usize = 1;
const PER_THREAD_STREAM: usize = 2;

/// A GPU opened through the CUDA driver.
///
/// Dropping it waits for its work and frees everything, including memory that callers still hold.
pub struct CudaDevice {
    info: DeviceInfo,
    ordinal: u32,
    opened: Instant,
    context_overhead: Bytes,
    own_context: Result<Bytes, String>,
    place: CallSite,
    calls: DeviceCalls,
    live: BTreeMap<u64, Bytes>,
    /// Freed addresses that have not been allocated again, and where they were freed.
    freed: BTreeMap<u64, CallSite>,
    streams: BTreeMap<u32, Stream>,
    next_stream: u32,
    events: BTreeMap<u32, Event>,
    next_event: u32,
    mapping: Option<Mapping>,
    pools: Option<CudaPools>,
    external_memory: ExternalMemory,
    host: Host,
    nvml: Result<NvmlDevice, String>,
    /// `None` for a device that only serves allocators.
    kernels: Option<Kernels>,
    reads: Reads,
    // The last field, because fields are dropped in order and everything above needs the context.
    context: Context,
}

// SAFETY: the raw handles belong to the driver and are valid in every thread of the process. Each
// method first makes the context current in the calling thread, and `&mut self` serializes calls.
unsafe impl Send for CudaDevice {}

/// A stream that callers can name.
#[derive(Clone, Copy)]
struct Stream {
    handle: CUstream,
    /// `true` if this device created the stream and will destroy it.
    own: bool,
}

impl Stream {
    const DEFAULT: Self = Self {
        handle: ptr::null_mut(),
        own: false,
    };
}

struct Event {
    handle: CUevent,
    recorded: bool,
    timed: bool,
}

impl CudaDevice {
    /// Opens the CUDA device with this ordinal, numbered as the process sees them. Fails with
    /// [`DeviceError::Unavailable`] without a driver, device or function; [`DeviceError::Driver`]
    /// if a driver call fails.
    pub fn open(ordinal: u32) -> Result<Self, DeviceError> {
        Self::open_with(
            driver_with_devices(ordinal, Driver::get())?,
            ordinal,
            |driver| Kernels::load(driver).map(Some),
        )
    }

    /// Opens the device for allocators in a program with its own kernels. Loads no kernels, so it
    /// takes no device memory; writing, reading and spinning are refused.
    pub fn open_for_allocation(ordinal: u32) -> Result<Self, DeviceError> {
        Self::open_with(
            driver_with_devices(ordinal, Driver::for_allocation())?,
            ordinal,
            |_| Ok(None),
        )
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
        // Read before the context exists, so the list does not contain this process under any
        // process ID.
        let facts = match &nvml {
            Ok(nvml) => nvml.fingerprint(),
            Err(_) => Fingerprint {
                throttle_reasons: vec![NOT_KNOWN.to_owned()],
                ..Fingerprint::default()
            },
        };
        let known = || nvml.as_ref().map_err(String::clone);
        let listed = known().and_then(NvmlDevice::process_numbers);
        let used_before = known().and_then(NvmlDevice::used);
        let fingerprint = Fingerprint {
            memory: Some(found.total),
            uuid_hash: Some(found.uuid.hash()),
            cuda: Some(probe::cuda_version(driver)?),
            ..facts
        };
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
            streams: BTreeMap::from([(StreamId::DEFAULT.0, Stream::DEFAULT)]),
            next_stream: 1,
            events: BTreeMap::new(),
            next_event: 0,
            mapping,
            pools,
            external_memory: ExternalMemory::default(),
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

    /// Returns why NVML is unavailable. Without NVML, [`DeviceMemory::used`] comes from the CUDA
    /// driver.
    pub fn nvml_problem(&self) -> Option<&str> {
        self.nvml.as_ref().err().map(String::as_str)
    }

    /// Makes this device's context current and returns the driver's functions.
    fn driver(&self) -> Result<&'static Driver, Refusal> {
        self.context.make_current()
    }

    fn driver_free(&self) -> Result<Bytes, Refusal> {
        let (mut free, mut total) = (0, 0);
        cuda!(self.driver()?, cuMemGetInfo_v2(&mut free, &mut total))?;
        Ok(Bytes(free as u64))
    }

    /// Returns the error of a refused request, with the free memory if the device has too little.
    fn granted(&self, requested: Bytes, answer: Result<(), Refusal>) -> Result<(), DeviceError> {
        match answer {
            Err(Refusal {
                code: driver::OUT_OF_MEMORY,
                ..
            }) => Err(DeviceError::OutOfMemory {
                requested,
                free: self.driver_free()?,
            }),
            answer => Ok(answer?),
        }
    }

    /// Returns device used: NVML's figure, or without NVML the memory that is not free.
    fn used(&self, free: Bytes) -> Result<Bytes, DeviceError> {
        match &self.nvml {
            Ok(nvml) => nvml.used().map_err(|why| DeviceError::Unavailable {
                what: "memory used, as NVML reports it".to_owned(),
                why,
            }),
            Err(_) => Ok(self.info.total.saturating_sub(free)),
        }
    }

    /// Returns the memory that this process has taken since `before` was used. Uses NVML's figure
    /// for the process if there is one. Otherwise takes the difference, which is right if no other
    /// process allocated or freed memory at that moment.
    fn taken_since(&self, before: Bytes) -> Result<Bytes, String> {
        let nvml = self.nvml.as_ref().map_err(String::clone)?;
        if let Ok(Some(own)) = nvml.used_by_this_process() {
            return Ok(own);
        }
        // A context always takes some memory.
        let taken = nvml.used()?.saturating_sub(before);
        if taken > Bytes::ZERO {
            Ok(taken)
        } else {
            Err("other processes released memory while the context was created".to_owned())
        }
    }

    /// Returns the driver's handle of a stream, for launches by other libraries; null for the
    /// default stream. The handle is valid until the stream is destroyed or this device is dropped.
    pub fn raw_stream(&self, stream: StreamId) -> Result<CUstream, DeviceError> {
        self.stream(stream)
    }

    /// Borrows a stream that the program created with any CUDA binding, so requests can name it.
    /// This device never destroys it. A stream that is already borrowed keeps its number; the
    /// driver's default stream is [`StreamId::DEFAULT`].
    ///
    /// [`Device::release_stream`] ends the loan. It waits for the stream only if copies or reads
    /// are queued on it. Allocators keep free memory and events by stream, so release the stream
    /// there first (`Allocator::release_stream`). Fails with [`DeviceError::Unavailable`] for a
    /// stream of another context than the device's primary one, and for `CU_STREAM_PER_THREAD`,
    /// which is a different stream in each thread. [`DeviceError::Driver`] if the driver does not
    /// know the stream.
    ///
    /// # Safety
    /// The stream must live until it is released or this device is dropped.
    pub unsafe fn borrow_stream(&mut self, stream: CUstream) -> Result<StreamId, DeviceError> {
        let refused = |why: &str| DeviceError::Unavailable {
            what: "stream to borrow".to_owned(),
            why: why.to_owned(),
        };
        match stream.addr() {
            0 | LEGACY_STREAM => return Ok(StreamId::DEFAULT),
            PER_THREAD_STREAM => {
                return Err(refused(
                    "CU_STREAM_PER_THREAD is a different stream in each thread: create a stream",
                ));
            }
            _ => {}
        }
        if let Some((number, _)) = self
            .streams
            .iter()
            .find(|(_, known)| known.handle == stream)
        {
            return Ok(StreamId(*number));
        }
        let mut context = ptr::null_mut();
        cuda!(self.driver()?, cuStreamGetCtx(stream, &mut context))?;
        if context != self.context.handle {
            return Err(refused(
                "it belongs to another context: create it in the primary context of this device",
            ));
        }
        Ok(self.add_stream(Stream {
            handle: stream,
            own: false,
        }))
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
        self.streams
            .get(&stream.0)
            .copied()
            .ok_or(DeviceError::UnknownHandle {
                kind: "stream",
                number: stream.0,
            })
    }

    /// Checks that [`TestDevice::verify`] works on this GPU. It must accept a range that holds its
    /// tag, and find each wrong byte in a range with odd start and end. Without this check, a run
    /// without reported corruption would prove nothing. Not counted in [`TestDevice::calls`]. Fails
    /// with [`DeviceError::Unavailable`] if verification does not work; [`DeviceError`] if memory
    /// cannot be allocated or used.
    pub fn check_verification(&mut self) -> Result<(), DeviceError> {
        let calls = self.calls;
        let start = self.malloc(GRANULARITY)?;
        let checked = self.verification_works(start);
        let freed = self.free(start);
        self.calls = calls;
        checked.and(freed)
    }

    fn verification_works(&mut self, start: DevicePtr) -> Result<(), DeviceError> {
        // Both ends are odd, so the byte kernels and the word kernel take part. No byte of the tag
        // is zero.
        let (range, tag, wrong) = (
            MemoryRange::new(start.offset(Bytes(3)), Bytes(4099)),
            Tag(0x1122_3344_5566_7788),
            Tag(0),
        );
        let fails = |why: String| DeviceError::Unavailable {
            what: "verification of GPU memory".to_owned(),
            why: format!(
                "{why}: the program's own kernels do not work on this GPU, so their results are \
                 meaningless"
            ),
        };
        self.fill(StreamId::DEFAULT, range, tag)?;
        self.verify(StreamId::DEFAULT, range, tag)
            .map_err(|error| {
                fails(format!(
                    "a correct range was reported as corrupted ({error})"
                ))
            })?;
        for offset in [0, 4, 5, 2050, 4096, 4098] {
            let byte = MemoryRange::new(range.start.offset(Bytes(offset)), Bytes(1));
            self.fill(StreamId::DEFAULT, byte, wrong)?;
            match self.verify(StreamId::DEFAULT, range, tag) {
                Err(DeviceError::Corrupted { at, .. }) if at == byte.start => {}
                Err(DeviceError::Corrupted { at, .. }) => {
                    return Err(fails(format!(
                        "a wrong byte at {} was reported at {at}",
                        byte.start
                    )));
                }
                Err(error) => return Err(error),
                Ok(()) => {
                    return Err(fails(format!(
                        "a wrong byte at offset {offset} of {} was not found",
                        range.len
                    )));
                }
            }
            self.fill(StreamId::DEFAULT, range, tag)?;
        }
        self.synchronize()
    }

    fn kernels(&self) -> Result<&Kernels, DeviceError> {
        self.kernels
            .as_ref()
            .ok_or_else(|| DeviceError::Unavailable {
                what: "kernels of this device".to_owned(),
                why: "it was opened for allocators only; open it with `CudaDevice::open`"
                    .to_owned(),
            })
    }

    /// If reads are queued on the stream, waits for it and collects their results.
    fn finish_reads(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        if self.reads.are_on(stream) {
            let findings = self
                .kernels()?
                .findings(self.driver()?, self.stream(stream)?)?;
            self.reads.finish(stream, &findings);
        }
        Ok(())
    }

    fn make_event(&mut self, timed: bool) -> Result<EventId, DeviceError> {
        let mut handle = ptr::null_mut();
        // Without timing, an event is cheaper to record and to query.
        let flags = if timed {
            CUevent_flags::CU_EVENT_DEFAULT
        } else {
            CUevent_flags::CU_EVENT_DISABLE_TIMING
        };
        cuda!(self.driver()?, cuEventCreate(&mut handle, flags as u32))?;
        let number = self.next_event;
        self.next_event += 1;
        self.events.insert(
            number,
            Event {
                handle,
                recorded: false,
                timed,
            },
        );
        Ok(EventId(number))
    }

    fn event(&mut self, event: EventId) -> Result<&mut Event, DeviceError> {
        self.events
            .get_mut(&event.0)
            .ok_or(DeviceError::UnknownHandle {
                kind: "event",
                number: event.0,
            })
    }

    fn wrong_free(&self, ptr: DevicePtr) -> DeviceError {
        match self.freed.get(&ptr.0) {
            Some(&first) => DeviceError::DoubleFree {
                ptr,
                first,
                second: self.place,
            },
            None => DeviceError::InvalidFree {
                ptr,
                place: self.place,
            },
        }
    }

    /// Refuses a range that is neither inside one live allocation nor fully mapped.
    fn check_access(
        &self,
        range: MemoryRange,
        kind: AccessKind,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        let plain = self.live.range(..=range.start.0).next_back();
        let pooled = self
            .pools
            .as_ref()
            .and_then(|pools| pools.live.range(..=range.start.0).next_back());
        let allocation = plain
            .into_iter()
            .chain(pooled.map(|(start, (size, _))| (start, size)))
            .max();
        let table = self.mapping.as_ref().map(|mapping| &mapping.table);
        let why = match allocation {
            _ if table.is_some_and(|table| table.is_mapped(range)) => return Ok(()),
            _ if table.is_some_and(|table| table.is_reserved(range.start)) => {
                "no memory is mapped to all of it".to_owned()
            }
            Some((start, size))
                if range.len <= size.saturating_sub(Bytes(range.start.0 - start)) =>
            {
                return Ok(());
            }
            Some((start, size)) if range.start.0 < start + size.0 => {
                format!(
                    "the allocation at {} ends at {}",
                    DevicePtr(*start),
                    DevicePtr(start + size.0)
                )
            }
            _ => match self.freed.get(&range.start.0) {
                Some(place) => format!("it was freed at {place}"),
                None => "this device has no allocation there".to_owned(),
            },
        };
        Err(DeviceError::InvalidAccess {
            range,
            access: Access {
                kind,
                stream,
                place: self.place,
            },
            why,
        })
    }
}

/// Replaces the driver's error for missing devices with one that names `ordinal`.
fn driver_with_devices(
    ordinal: u32,
    driver: Result<&'static Driver, DeviceError>,
) -> Result<&'static Driver, DeviceError> {
    driver.map_err(|error| match error {
        DeviceError::Driver {
            call: "cuInit",
            code: driver::NO_DEVICE,
            ..
        } => no_such_device(ordinal, 0),
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
        let answer = cuda!(
            driver,
            cuMemAlloc_v2(&mut address, usize::try_from(size.0).unwrap_or(usize::MAX))
        );
        self.calls.malloc_failures += u64::from(matches!(
            answer,
            Err(Refusal {
                code: driver::OUT_OF_MEMORY,
                ..
            })
        ));
        self.granted(size, answer)?;
        self.live.insert(address, size);
        self.freed.remove(&address);
        Ok(DevicePtr(address))
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), DeviceError> {
        self.calls.free += 1;
        if !self.live.contains_key(&ptr.0) {
            return Err(self.wrong_free(ptr));
        }
        // The driver waits for work in flight.
        cuda!(self.driver()?, cuMemFree_v2(ptr.0))?;
        self.live.remove(&ptr.0);
        self.freed.insert(ptr.0, self.place);
        Ok(())
    }

    fn create_stream(&mut self) -> Result<StreamId, DeviceError> {
        let mut handle = ptr::null_mut();
        // Without implicit synchronization with the default stream.
        cuda!(
            self.driver()?,
            cuStreamCreate(&mut handle, CUstream_flags::CU_STREAM_NON_BLOCKING as u32)
        )?;
        Ok(self.add_stream(Stream { handle, own: true }))
    }

    fn destroy_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        let Stream { handle, own } = self.known_stream(stream)?;
        if !own {
            return Err(DeviceError::UnknownHandle {
                kind: "own stream",
                number: stream.0,
            });
        }
        let driver = self.driver()?;
        cuda!(driver, cuStreamSynchronize(handle))?;
        cuda!(driver, cuStreamDestroy_v2(handle))?;
        self.streams.remove(&stream.0);
        self.reads.forget(stream);
        Ok(())
    }

    /// Waits if reads of [`TestDevice::verify_later`] or copies with host memory are queued on the
    /// stream.
    fn release_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        let is_borrowed = stream != StreamId::DEFAULT
            && self.streams.get(&stream.0).is_some_and(|known| !known.own);
        if !is_borrowed {
            return Err(DeviceError::UnknownHandle {
                kind: "borrowed stream",
                number: stream.0,
            });
        }
        if self.host.is_copying(stream) {
            let handle = self.stream(stream)?;
            cuda!(self.driver()?, cuStreamSynchronize(handle))?;
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
        // Queued waits stay valid: the driver frees an event in use when it completes.
        cuda!(self.driver()?, cuEventDestroy_v2(handle))?;
        self.events.remove(&event.0);
        Ok(())
    }

    fn record_event(&mut self, event: EventId, stream: StreamId) -> Result<(), DeviceError> {
        let queue = self.stream(stream)?;
        let handle = self.event(event)?.handle;
        self.calls.event_record += 1;
        cuda!(self.driver()?, cuEventRecord(handle, queue))?;
        self.event(event)?.recorded = true;
        Ok(())
    }

    fn event_done(&mut self, event: EventId) -> Result<bool, DeviceError> {
        let handle = self.event(event)?.handle;
        self.calls.event_query += 1;
        // The driver reports an event that was never recorded as done.
        match cuda!(self.driver()?, cuEventQuery(handle)) {
            Ok(()) => Ok(true),
            Err(Refusal {
                code: driver::NOT_READY,
                ..
            }) => Ok(false),
            Err(refusal) => Err(refusal.into()),
        }
    }

    fn wait_event(&mut self, stream: StreamId, event: EventId) -> Result<(), DeviceError> {
        let queue = self.stream(stream)?;
        let handle = self.event(event)?.handle;
        Ok(cuda!(self.driver()?, cuStreamWaitEvent(queue, handle, 0))?)
    }

    fn synchronize_event(&mut self, event: EventId) -> Result<(), DeviceError> {
        let handle = self.event(event)?.handle;
        self.calls.synchronize += 1;
        Ok(cuda!(self.driver()?, cuEventSynchronize(handle))?)
    }

    fn synchronize_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        let handle = self.stream(stream)?;
        self.calls.synchronize += 1;
        Ok(cuda!(self.driver()?, cuStreamSynchronize(handle))?)
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.calls.synchronize += 1;
        Ok(cuda!(self.driver()?, cuCtxSynchronize())?)
    }

    fn mapped(&mut self) -> Option<&mut dyn MappedDevice> {
        if self.mapping.is_some() {
            Some(self)
        } else {
            None
        }
    }

    fn pooled(&mut self) -> Option<&mut dyn PooledDevice> {
        if self.pools.is_some() {
            Some(self)
        } else {
            None
        }
    }
}

impl TestDevice for CudaDevice {
    fn memory(&mut self) -> Result<DeviceMemory, DeviceError> {
        let free = self.driver_free()?;
        Ok(DeviceMemory {
            total: self.info.total,
            free,
            used: self.used(free)?,
            process: self
                .nvml
                .as_ref()
                .ok()
                .and_then(|nvml| nvml.used_by_this_process().ok().flatten()),
            context_overhead: self.context_overhead,
            external_memory: self.external_memory.held(),
            processes: Bytes::ZERO,
            process_contexts: Bytes::ZERO,
        })
    }

    fn ordinal(&self) -> Option<u32> {
        Some(self.ordinal)
    }

    fn own_context(&self) -> Result<Bytes, DeviceError> {
        let unavailable = |why| DeviceError::Unavailable {
            what: "memory of this process's context".to_owned(),
            why,
        };
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
                return Err(DeviceError::UnknownHandle {
                    kind: "timed event",
                    number: event.0,
                });
            }
            if !known.recorded {
                return Err(DeviceError::NotReady(event.0));
            }
            *handle = known.handle;
        }
        let driver = self.driver()?;
        for (event, handle) in [start, end].into_iter().zip(handles) {
            match cuda!(driver, cuEventQuery(handle)) {
                Err(Refusal {
                    code: driver::NOT_READY,
                    ..
                }) => return Err(DeviceError::NotReady(event.0)),
                answer => answer?,
            }
        }
        let mut milliseconds = 0.0;
        // Declared here, because cudarc's declaration has another name from CUDA 13 on.
        type ElapsedTime = unsafe extern "C" fn(&mut f32, CUevent, CUevent) -> u32;
        driver::call(driver.cuEventElapsedTime, "cuEventElapsedTime", |address| {
            // SAFETY: the function has this type; both events are live, recorded, and have timing.
            unsafe {
                std::mem::transmute::<Address, ElapsedTime>(address)(
                    &mut milliseconds,
                    handles[0],
                    handles[1],
                )
            }
        })?;
        // An end before its start gives a negative time, which counts as zero.
        Ok(Nanos(
            (f64::from(milliseconds) * 1e6).round().max(0.0) as u64
        ))
    }

    fn fill(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError> {
        let queue = self.stream(stream)?;
        self.check_access(range, AccessKind::Write, stream)?;
        Ok(self.kernels()?.fill(self.driver()?, queue, range, tag)?)
    }

    fn verify(
        &mut self,
        stream: StreamId,
        range: MemoryRange,
        tag: Tag,
    ) -> Result<(), DeviceError> {
        let queue = self.stream(stream)?;
        self.check_access(range, AccessKind::Read, stream)?;
        let mismatch = self.kernels()?.verify(self.driver()?, queue, range, tag)?;
        mismatch.map_or(Ok(()), |Mismatch { found, word }| {
            Err(corrupted(range, tag, found, Some(&word)))
        })
    }

    fn verify_later(
        &mut self,
        stream: StreamId,
        range: MemoryRange,
        tag: Tag,
    ) -> Result<(), DeviceError> {
        let queue = self.stream(stream)?;
        self.check_access(range, AccessKind::Read, stream)?;
        let slot = loop {
            match (self.reads.free_slot(), self.reads.oldest()) {
                (Some(slot), _) => break slot,
                (None, Some(oldest)) => self.finish_reads(oldest)?,
                (None, None) => unreachable!("every slot is free or belongs to a queued read"),
            }
        };
        self.kernels()?
            .queue_verify(self.driver()?, queue, range, tag, slot)?;
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
        Ok(self
            .external_memory
            .resize(driver, held, self.info.granularity)?)
    }

    fn host_alloc(&mut self, size: Bytes, memory: &HostMemory) -> Result<HostId, DeviceError> {
        let driver = self.driver()?;
        self.host.take(driver, size, memory)
    }

    fn host_free(&mut self, host: HostId) -> Result<(), DeviceError> {
        let driver = self.driver()?;
        // A destroyed or released stream was waited for.
        for handle in self
            .host
            .copying(host)?
            .into_iter()
            .filter_map(|stream| self.stream(stream).ok())
        {
            cuda!(driver, cuStreamSynchronize(handle))?;
        }
        self.host.free(driver, host)
    }

    fn copy_to_host(
        &mut self,
        stream: StreamId,
        from: MemoryRange,
        to: HostId,
    ) -> Result<(), DeviceError> {
        let queue = self.stream(stream)?;
        self.check_access(from, AccessKind::Read, stream)?;
        let (driver, to) = (self.driver()?, self.host.copied(to, from.len, stream)?);
        // Freeing either side waits for the copy.
        Ok(cuda!(
            driver,
            cuMemcpyDtoHAsync_v2(to, from.start.0, from.len.0 as usize, queue)
        )?)
    }

    fn copy_to_device(
        &mut self,
        stream: StreamId,
        from: HostId,
        to: MemoryRange,
    ) -> Result<(), DeviceError> {
        let queue = self.stream(stream)?;
        self.check_access(to, AccessKind::Write, stream)?;
        let (driver, from) = (self.driver()?, self.host.copied(from, to.len, stream)?);
        Ok(cuda!(
            driver,
            cuMemcpyHtoDAsync_v2(to.start.0, from, to.len.0 as usize, queue)
        )?)
    }

    fn leaks(&self) -> Leaks {
        let charged = |size: &Bytes| size.checked_round_up(GRANULARITY).unwrap_or(*size);
        let table = self.mapping.as_ref().map(|mapping| &mapping.table);
        let pages: Bytes = table
            .into_iter()
            .flat_map(|table| table.pages())
            .map(|(_, size, _)| size)
            .sum();
        let driver = self.driver().ok();
        let pooled = self
            .pools
            .as_ref()
            .zip(driver)
            .map_or(Bytes::ZERO, |(pools, driver)| pools.reserved(driver));
        Leaks {
            reservations: table.map_or(0, |table| table.reservations().len() as u64),
            allocations: (self.live.len() + self.pools.as_ref().map_or(0, |pools| pools.live.len()))
                as u64,
            pools: self.pools.as_ref().map_or(0, CudaPools::count),
            bytes: self.live.values().map(charged).sum::<Bytes>() + pages + pooled,
            streams: self.streams.values().filter(|stream| stream.own).count() as u64,
            events: self.events.len() as u64,
            host: self.host.count(),
        }
    }
}

impl Drop for CudaDevice {
    /// Frees everything and ignores errors: after a broken kernel every call fails, and the context
    /// ends anyway.
    fn drop(&mut self) {
        let Ok(driver) = self.driver() else { return };
        // The wait comes first, so no work uses what is freed.
        let _ = cuda!(driver, cuCtxSynchronize());
        for event in self.events.values() {
            let _ = cuda!(driver, cuEventDestroy_v2(event.handle));
        }
        for stream in self.streams.values().filter(|stream| stream.own) {
            let _ = cuda!(driver, cuStreamDestroy_v2(stream.handle));
        }
        for address in self.live.keys() {
            let _ = cuda!(driver, cuMemFree_v2(*address));
        }
        if let Some(mapping) = &mut self.mapping {
            mapping.release(driver);
        }
        if let Some(pools) = &mut self.pools {
            pools.release(driver);
        }
        self.external_memory.release(driver);
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
    fn retain(driver: &'static Driver, device: CUdevice) -> Result<Self, Refusal> {
        let mut handle = ptr::null_mut();
        cuda!(driver, cuDevicePrimaryCtxRetain(&mut handle, device))?;
        let context = Self {
            driver,
            device,
            handle,
        };
        context.make_current()?;
        Ok(context)
    }

    /// Makes the context current: the call may come from another thread, or other code may have
    /// changed the current context.
    fn make_current(&self) -> Result<&'static Driver, Refusal> {
        cuda!(self.driver, cuCtxSetCurrent(self.handle))?;
        Ok(self.driver)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // A thread that still has the context current gets an error from its next call, according
        // to the driver's documentation of primary contexts.
        let _ = cuda!(self.driver, cuDevicePrimaryCtxRelease_v2(self.device));
    }
}

/// Restores the calling thread's current context when dropped. For libraries within a program that
/// manages contexts itself, because each call of a [`CudaDevice`] makes its own context current.
#[derive(Debug)]
pub struct KeptContext {
    driver: &'static Driver,
    handle: CUcontext,
}

impl KeptContext {
    pub fn new() -> Result<Self, DeviceError> {
        let driver = Driver::for_allocation()?;
        let mut handle = ptr::null_mut();
        cuda!(driver, cuCtxGetCurrent(&mut handle))?;
        Ok(Self { driver, handle })
    }
}

impl Drop for KeptContext {
    fn drop(&mut self) {
        // The program keeps its context alive; null means no context.
        let _ = cuda!(self.driver, cuCtxSetCurrent(self.handle));
    }
}
