//! [`DeviceCall`]: the device calls that can fail, with the driver's names. [`Numbered`]: a range of calls by number.

use serde::{Deserialize, Serialize};

use crate::{named::named_enum, units::Bytes};

named_enum! {
    /// A device call. The names are those of the CUDA runtime, of the driver if the runtime has no such call, and of NVML.
    #[derive(Serialize, Deserialize)]
    DeviceCall {
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
        /// [`crate::device::TestDevice::host_alloc`] of pageable memory.
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
}

impl DeviceCall {
    /// Returns true if it allocates device memory.
    pub const fn gets_memory(self) -> bool {
        matches!(self, Self::Malloc | Self::Create | Self::MallocAsync)
    }

    /// Returns true if it allocates host memory.
    pub const fn gets_host_memory(self) -> bool {
        matches!(self, Self::HostAlloc | Self::HostMap)
    }

    /// Returns true if it names a stream.
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

    /// Returns true if it returns an amount of memory.
    pub const fn tells_memory(self) -> bool {
        matches!(self, Self::MemGetInfo | Self::NvmlMemory)
    }

    /// Returns true if the harness makes it for its own checks. Its count says nothing about the program.
    pub const fn is_of_checks(self) -> bool {
        matches!(self, Self::NvmlMemory | Self::PoolAttribute)
    }
}

/// The name for all calls that allocate device memory, counted together.
pub const ANY: &str = "any";

/// A range of calls of one kind: `FIRST[:COUNT][:MIN_SIZE]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbered {
    /// The first call, counted from 1.
    pub first: u64,
    pub count: u64,
    /// Smaller calls are not counted.
    pub min_size: Bytes,
}

impl Numbered {
    /// Parses `CALL:FIRST[:COUNT][:MIN_SIZE]` into the call's name and the range. The range is `None` if its form is wrong.
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
