//! [`DeviceCall`]: the calls of a device that can be made to fail, under the driver's names; and [`Numbered`]: which of them are meant.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::units::Bytes;

/// Declares the calls once: what the variant is, and the driver's name.
macro_rules! calls {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal,)*) => {
        /// A call to a device. The names are those of the CUDA runtime, of the driver where the runtime has no such call, and of NVML.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum DeviceCall { $($(#[doc = $doc])+ $variant,)* }

        impl DeviceCall {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The function.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }
        }
    };
}

calls! {
    /// [`crate::device::Device::malloc`].
    Malloc = "cudaMalloc",
    /// One page of [`crate::device::MappedDevice::map`].
    Create = "cuMemCreate",
    /// [`crate::device::PooledDevice::malloc_async`].
    MallocAsync = "cudaMallocAsync",
    /// [`crate::device::Device::free`].
    Free = "cudaFree",
    /// [`crate::device::MappedDevice::reserve`].
    Reserve = "cuMemAddressReserve",
    /// [`crate::device::MappedDevice::unreserve`].
    Unreserve = "cuMemAddressFree",
    /// [`crate::device::MappedDevice::unmap`].
    Unmap = "cuMemUnmap",
    /// [`crate::device::PooledDevice::free_async`].
    FreeAsync = "cudaFreeAsync",
    /// [`crate::device::PooledDevice::create_pool`].
    CreatePool = "cudaMemPoolCreate",
    /// [`crate::device::PooledDevice::destroy_pool`].
    DestroyPool = "cudaMemPoolDestroy",
    /// [`crate::device::PooledDevice::trim_pool`].
    TrimPool = "cudaMemPoolTrimTo",
    /// [`crate::device::PooledDevice::pool_memory`] and [`crate::device::PooledDevice::pool_reserved`].
    PoolAttribute = "cudaMemPoolGetAttribute",
    /// [`crate::device::Device::free_memory`].
    MemGetInfo = "cudaMemGetInfo",
    /// [`crate::device::Device::create_stream`].
    CreateStream = "cudaStreamCreate",
    /// [`crate::device::Device::destroy_stream`].
    DestroyStream = "cudaStreamDestroy",
    /// [`crate::device::Device::synchronize_stream`].
    SynchronizeStream = "cudaStreamSynchronize",
    /// [`crate::device::Device::wait_event`].
    WaitEvent = "cudaStreamWaitEvent",
    /// [`crate::device::Device::create_event`] and [`crate::device::TestDevice::create_timed_event`].
    CreateEvent = "cudaEventCreate",
    /// [`crate::device::Device::destroy_event`].
    DestroyEvent = "cudaEventDestroy",
    /// [`crate::device::Device::record_event`].
    RecordEvent = "cudaEventRecord",
    /// [`crate::device::Device::event_done`].
    QueryEvent = "cudaEventQuery",
    /// [`crate::device::Device::synchronize_event`].
    SynchronizeEvent = "cudaEventSynchronize",
    /// [`crate::device::Device::synchronize`].
    Synchronize = "cudaDeviceSynchronize",
    /// Work on a stream: [`crate::device::TestDevice::fill`], `verify`, `verify_later` and `busy`.
    LaunchKernel = "cudaLaunchKernel",
    /// [`crate::device::TestDevice::host_alloc`] of pinned memory.
    HostAlloc = "cuMemHostAlloc",
    /// [`crate::device::TestDevice::host_alloc`] of other memory of the host.
    HostMap = "mmap",
    /// [`crate::device::TestDevice::host_free`].
    HostFree = "cuMemFreeHost",
    /// [`crate::device::TestDevice::copy_to_host`].
    CopyToHost = "cuMemcpyDtoHAsync",
    /// [`crate::device::TestDevice::copy_to_device`].
    CopyToDevice = "cuMemcpyHtoDAsync",
    /// [`crate::device::TestDevice::memory`].
    NvmlMemory = "nvmlDeviceGetMemoryInfo",
}

impl DeviceCall {
    /// The call of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|call| call.name() == name)
    }

    /// Whether it gets device memory, and so can run out of it.
    #[must_use]
    pub const fn gets_memory(self) -> bool {
        matches!(self, Self::Malloc | Self::Create | Self::MallocAsync)
    }

    /// Whether it gets memory of the host, and so can run out of it.
    #[must_use]
    pub const fn gets_host_memory(self) -> bool {
        matches!(self, Self::HostAlloc | Self::HostMap)
    }

    /// Whether it names a stream.
    #[must_use]
    pub const fn is_of_a_stream(self) -> bool {
        matches!(
            self,
            Self::MallocAsync
                | Self::FreeAsync
                | Self::DestroyStream
                | Self::SynchronizeStream
                | Self::WaitEvent
                | Self::RecordEvent
                | Self::LaunchKernel
                | Self::CopyToHost
                | Self::CopyToDevice
        )
    }

    /// Whether it asks how much memory there is.
    #[must_use]
    pub const fn tells_memory(self) -> bool {
        matches!(self, Self::MemGetInfo | Self::NvmlMemory)
    }

    /// Whether a harness asks it for its own checks: how often it is made says nothing of the program.
    #[must_use]
    pub const fn is_of_checks(self) -> bool {
        matches!(self, Self::NvmlMemory | Self::PoolAttribute)
    }
}

impl fmt::Display for DeviceCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// All calls that get device memory, counted together, where a call is wanted.
pub const ANY: &str = "any";

/// Which calls of a kind are meant: `FIRST[:COUNT][:MIN_SIZE]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Numbered {
    /// The first of them, counted from 1.
    pub first: u64,
    pub count: u64,
    /// Smaller calls do not count.
    pub min_size: Bytes,
}

impl Numbered {
    /// Reads `CALL:FIRST[:COUNT][:MIN_SIZE]`: the name of the call, and which of them; `None` for the latter where it has another form.
    #[must_use]
    pub fn parse(text: &str) -> (&str, Option<Self>) {
        let (call, numbers) = text.split_once(':').unwrap_or((text, ""));
        (call, Self::of_numbers(numbers))
    }

    fn of_numbers(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let first = parts.next()?.parse().ok().filter(|first| *first > 0)?;
        let count = parts.next().map_or(Ok(1), str::parse).ok()?;
        let min_size = parts.next().map_or(Ok(Bytes::ZERO), Bytes::parse).ok()?;
        parts.next().is_none().then_some(Self { first, count, min_size })
    }
}
