//! [`Front`]: one allocator on one device, for all threads of a program that names memory by its address.
//!
//! PyTorch's allocator is the shared one, whose cache hits do not wait for driver calls of other threads. The others, and whatever is recorded, stand
//! with their device behind one lock.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use harness_allocator::allocator::shared::{Cores, SharedAllocator};
use harness_allocator::allocator::{Allocation, Allocator, MemoryFraction, Request};
use harness_allocator::device::{Device as _, DeviceError, DevicePtr, Place, StreamId};
use harness_allocator::stats::MemoryStats;
use harness_allocator::units::Bytes;
use harness_cuda::CudaDevice;
use harness_cuda::device::CUstream;
use harness_trace::snapshot::{Recorder, Settings as RecordedSettings, Snapshot, Value};

use crate::failure::Failure;
use crate::settings::{self, Kind, Settings};
use crate::streams::Streams;

pub(crate) struct Front {
    streams: Streams,
    allocator: Threads,
}

/// How threads share the allocator.
enum Threads {
    Shared(Box<SharedAllocator<CudaDevice>>),
    Locked(Box<Mutex<Locked>>),
}

/// An allocator, its device, and what is handed out by address.
struct Locked {
    allocator: Box<dyn Allocator>,
    device: CudaDevice,
    live: BTreeMap<u64, Allocation>,
    recorder: Option<Recorder>,
}

/// The device of a [`Locked`].
struct LockedDevice<'a>(MutexGuard<'a, Locked>);

impl Deref for LockedDevice<'_> {
    type Target = CudaDevice;
    fn deref(&self) -> &CudaDevice {
        &self.0.device
    }
}

impl DerefMut for LockedDevice<'_> {
    fn deref_mut(&mut self) -> &mut CudaDevice {
        &mut self.0.device
    }
}

impl Front {
    /// An allocator of this kind on a device, as the environment has its settings.
    pub(crate) fn open(kind: Kind, device: u32) -> Result<Self, Failure> {
        let (settings, is_recorded) = (kind.settings()?, settings::is_recorded()?);
        let device = CudaDevice::open_for_allocation(device)?;
        let allocator = match settings {
            // One core, as PyTorch has one: peaks are exact then.
            Settings::Caching(config) if !is_recorded => Threads::Shared(Box::new(SharedAllocator::new(device, config, Cores::One))),
            settings => Threads::Locked(Box::new(Mutex::new(Locked::new(settings, device, is_recorded)))),
        };
        Ok(Self { streams: Streams::default(), allocator })
    }

    /// Hands out memory: its address, 0 for no bytes.
    ///
    /// # Safety
    /// The stream lives until it is released, or to the end of the process.
    pub(crate) unsafe fn allocate(&self, size: Bytes, stream: CUstream) -> Result<u64, Failure> {
        // SAFETY: as the caller promises.
        let request = Request::new(size).on(unsafe { self.stream(stream) }?);
        Ok(match &self.allocator {
            Threads::Shared(allocator) => {
                let allocation = allocator.allocate(request)?;
                allocation.ptr().0
            }
            Threads::Locked(locked) => lock(locked).allocate(request)?,
        })
    }

    /// Takes memory back. The null pointer is passed over.
    pub(crate) fn free(&self, address: u64) -> Result<(), Failure> {
        Ok(match &self.allocator {
            Threads::Shared(allocator) => allocator.free(DevicePtr(address)),
            Threads::Locked(locked) => lock(locked).free(address),
        }?)
    }

    /// Notes that work on the stream uses the memory too.
    ///
    /// # Safety
    /// The stream lives until it is released, or to the end of the process.
    pub(crate) unsafe fn record_stream(&self, address: u64, stream: CUstream) -> Result<(), Failure> {
        // SAFETY: as the caller promises.
        let stream = unsafe { self.stream(stream) }?;
        Ok(match &self.allocator {
            Threads::Shared(allocator) => allocator.record_stream(DevicePtr(address), stream),
            Threads::Locked(locked) => lock(locked).record_stream(address, stream),
        }?)
    }

    /// Lets go of a stream that the program is about to destroy. One that was never named is passed over.
    pub(crate) fn release_stream(&self, stream: CUstream) -> Result<(), Failure> {
        let Some(number) = self.streams.known(stream).filter(|number| *number != StreamId::DEFAULT) else { return Ok(()) };
        match &self.allocator {
            Threads::Shared(allocator) => {
                allocator.release_stream(number)?;
                allocator.device().release_stream(number)?;
            }
            Threads::Locked(locked) => {
                let Locked { allocator, device, .. } = &mut *lock(locked);
                allocator.release_stream(device, number)?;
                device.release_stream(number)?;
            }
        }
        self.streams.forget(stream);
        Ok(())
    }

    pub(crate) fn empty_cache(&self) -> Result<(), Failure> {
        Ok(match &self.allocator {
            Threads::Shared(allocator) => allocator.empty_cache(),
            Threads::Locked(locked) => {
                let Locked { allocator, device, .. } = &mut *lock(locked);
                allocator.empty_cache(device)
            }
        }?)
    }

    pub(crate) fn set_memory_fraction(&self, fraction: MemoryFraction) {
        match &self.allocator {
            Threads::Shared(allocator) => allocator.set_memory_fraction(fraction),
            Threads::Locked(locked) => {
                let Locked { allocator, device, .. } = &mut *lock(locked);
                allocator.set_memory_fraction(device, fraction);
            }
        }
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        match &self.allocator {
            Threads::Shared(allocator) => allocator.stats(),
            Threads::Locked(locked) => lock(locked).allocator.stats(),
        }
    }

    /// What it holds and what it did, as PyTorch's own memory snapshot has them; `None` where it is not recorded.
    pub(crate) fn snapshot(&self) -> Option<Snapshot> {
        let Threads::Locked(locked) = &self.allocator else { return None };
        let locked = lock(locked);
        locked.recorder.as_ref().map(|recorder| recorder.snapshot(&*locked.allocator))
    }

    /// # Safety
    /// As [`Streams::number`].
    unsafe fn stream(&self, stream: CUstream) -> Result<StreamId, DeviceError> {
        match &self.allocator {
            // SAFETY: as the caller promises.
            Threads::Shared(allocator) => unsafe { self.streams.number(stream, || allocator.device()) },
            // SAFETY: as the caller promises.
            Threads::Locked(locked) => unsafe { self.streams.number(stream, || LockedDevice(lock(locked))) },
        }
    }
}

/// Nothing in here is left half done by a panic: it would be a mistake of the allocator's own.
fn lock(locked: &Mutex<Locked>) -> MutexGuard<'_, Locked> {
    locked.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Locked {
    fn new(settings: Settings, device: CudaDevice, is_recorded: bool) -> Self {
        let conf = match &settings {
            Settings::Caching(config) => vec![("PYTORCH_CUDA_ALLOC_CONF".to_owned(), Value::Text(config.to_string()))],
            Settings::Bfc(_) | Settings::RmmPool(_) => Vec::new(),
        };
        let recorder = is_recorded.then(|| Recorder::new(Some(RecordedSettings::new(conf))));
        let allocator = match &recorder {
            Some(recorder) => Box::new(recorder.around(settings.build())),
            None => settings.build(),
        };
        Self { allocator, device, live: BTreeMap::new(), recorder }
    }

    fn allocate(&mut self, request: Request) -> Result<u64, Failure> {
        let allocation = self.allocator.allocate(&mut self.device, request)?;
        let address = allocation.ptr().0;
        if !allocation.is_null() {
            self.live.insert(address, allocation);
        }
        Ok(address)
    }

    fn free(&mut self, address: u64) -> Result<(), DeviceError> {
        match self.live.remove(&address) {
            Some(allocation) => self.allocator.free(&mut self.device, allocation),
            None if address == 0 => Ok(()),
            None => Err(not_live(address)),
        }
    }

    fn record_stream(&mut self, address: u64, stream: StreamId) -> Result<(), DeviceError> {
        match self.live.get(&address) {
            Some(allocation) => self.allocator.record_stream(allocation, stream),
            None if address == 0 => Ok(()),
            None => Err(not_live(address)),
        }
    }
}

fn not_live(address: u64) -> DeviceError {
    DeviceError::InvalidFree { ptr: DevicePtr(address), place: Place::default() }
}
