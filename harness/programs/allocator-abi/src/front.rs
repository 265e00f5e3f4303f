//! [`Front`]: one allocator on one device, for all threads of a program that names memory by its
//! address.

use std::cell::Cell;

use harness_allocator::allocator::shared::{Locked, SharedAllocator};
use harness_allocator::allocator::{Allocator, MemoryFraction, Request};
use harness_allocator::device::{DevicePtr, StreamId, wrapper::DeviceWrapper};
use harness_allocator::{stats::MemoryStats, units::Bytes};
use harness_cuda::{CudaDevice, KeptContext, device::CUstream};
use harness_trace::snapshot::{RecordedSettings, Recorder, Snapshot};

use crate::settings::{self, Kind, Settings};
use crate::{failure::Failure, streams::Streams};

pub(crate) struct Front {
    streams: Streams,
    allocator: SharedAllocator<Gpu, Box<dyn Allocator>>,
    recorder: Option<Recorder>,
}

thread_local! {
    /// The context that the calling thread had before the first driver call of an operation.
    static SAVED_CONTEXT: Cell<Option<KeptContext>> = const { Cell::new(None) };
}

/// The GPU. It saves the calling thread's CUDA context before the first driver call, so a cache hit
/// never touches the context.
struct Gpu(CudaDevice);

impl DeviceWrapper for Gpu {
    type Inner = CudaDevice;

    fn inner(&self) -> &CudaDevice {
        &self.0
    }

    /// Every call that may reach the driver goes through here.
    fn inner_mut(&mut self) -> &mut CudaDevice {
        // A thread that is ending has no context to keep.
        let _ = SAVED_CONTEXT
            .try_with(|saved| saved.set(saved.take().or_else(|| KeptContext::new().ok())));
        &mut self.0
    }
}

struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        let _ = SAVED_CONTEXT.try_with(Cell::take);
    }
}

impl Front {
    /// Opens an allocator of this kind on a device, with the settings from the environment.
    pub(crate) fn open(kind: Kind, device: u32) -> Result<Self, Failure> {
        let (settings, is_recorded) = (kind.settings()?, settings::is_recorded()?);
        let _saved = KeptContext::new()?;
        let device = Gpu(CudaDevice::open_for_allocation(device)?);
        let recorded = match &settings {
            Settings::Caching(config) => RecordedSettings::of(config),
            Settings::Bfc(_) | Settings::RmmPool(_) => RecordedSettings::default(),
        };
        let recorder = is_recorded.then(|| Recorder::new(Some(recorded)));
        let allocator = match &recorder {
            Some(recorder) => Box::new(recorder.around(settings.build())),
            None => settings.build(),
        };
        Ok(Self {
            streams: Streams::default(),
            allocator: SharedAllocator::new(allocator, device),
            recorder,
        })
    }

    /// Allocates memory and returns its address, 0 for a request of 0 bytes.
    ///
    /// # Safety
    /// The stream lives until [`Front::release_stream`] or the end of the process.
    pub(crate) unsafe fn allocate(&self, size: Bytes, stream: CUstream) -> Result<u64, Failure> {
        // SAFETY: the caller guarantees that the stream lives long enough.
        let request = Request::new(size).on(unsafe { self.stream(stream) }?);
        Ok(self.locked(|locked| locked.allocate(request))?.ptr().0)
    }

    /// Frees memory. Ignores the null pointer.
    pub(crate) fn free(&self, address: u64) -> Result<(), Failure> {
        Ok(self.locked(|locked| locked.free(DevicePtr(address)))?)
    }

    /// Records that work on the stream uses the memory too.
    ///
    /// # Safety
    /// The stream lives until [`Front::release_stream`] or the end of the process.
    pub(crate) unsafe fn record_stream(
        &self,
        address: u64,
        stream: CUstream,
    ) -> Result<(), Failure> {
        // SAFETY: the caller guarantees that the stream lives long enough.
        let stream = unsafe { self.stream(stream) }?;
        Ok(self.locked(|locked| locked.record_stream(DevicePtr(address), stream))?)
    }

    /// Releases what the allocator keeps for a stream that the program is about to destroy. Ignores
    /// unknown streams.
    pub(crate) fn release_stream(&self, stream: CUstream) -> Result<(), Failure> {
        let Some(number) = self
            .streams
            .known(stream)
            .filter(|number| *number != StreamId::DEFAULT)
        else {
            return Ok(());
        };
        self.locked(
            |Locked {
                 allocator, device, ..
             }| {
                allocator.release_stream(device, number)?;
                device.release_stream(number)
            },
        )?;
        self.streams.forget(stream);
        Ok(())
    }

    pub(crate) fn empty_cache(&self) -> Result<(), Failure> {
        Ok(self.locked(
            |Locked {
                 allocator, device, ..
             }| allocator.empty_cache(device),
        )?)
    }

    pub(crate) fn set_memory_fraction(&self, fraction: MemoryFraction) {
        self.locked(
            |Locked {
                 allocator, device, ..
             }| allocator.set_memory_fraction(device, fraction),
        );
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        self.locked(|locked| locked.allocator.stats())
    }

    /// Returns a memory snapshot with its history, or `None` if the allocator is not recorded.
    pub(crate) fn snapshot(&self) -> Option<Snapshot> {
        self.recorder
            .as_ref()
            .map(|recorder| self.locked(|locked| recorder.snapshot(&*locked.allocator)))
    }

    fn locked<T>(&self, act: impl FnOnce(&mut Locked<Gpu, Box<dyn Allocator>>) -> T) -> T {
        let mut locked = self.allocator.lock();
        let _restore = Restore;
        act(&mut locked)
    }

    /// Returns the number of a stream, which the device borrows from the program at its first use.
    ///
    /// # Safety
    /// The stream lives until [`Front::release_stream`] or the end of the process.
    unsafe fn stream(&self, stream: CUstream) -> Result<StreamId, Failure> {
        // SAFETY: the caller guarantees that the stream lives long enough.
        let borrow =
            || self.locked(|locked| unsafe { locked.device.inner_mut().borrow_stream(stream) });
        Ok(self.streams.number(stream, borrow)?)
    }
}
