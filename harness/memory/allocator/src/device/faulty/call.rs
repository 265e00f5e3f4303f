//! [`DeviceCall`]: the device calls that can fail, with the driver's names. [`Numbered`]: a range
//! of calls by number.

use serde::{Deserialize, Serialize};

use crate::{named::named_enum, units::Bytes};

named_enum! {
    /// A device call. The names are those of the CUDA runtime, of the driver if the runtime has no
    /// such call, and of NVML.
    #[derive(Serialize, Deserialize)]
    DeviceCall {
        Malloc = "cudaMalloc",
        /// One page of [`crate::device::MappedDevice::map`].
        Create = "cuMemCreate",
        MallocAsync = "cudaMallocAsync",
        Free = "cudaFree",
        Reserve = "cuMemAddressReserve",
        Unreserve = "cuMemAddressFree",
        Unmap = "cuMemUnmap",
        FreeAsync = "cudaFreeAsync",
        CreatePool = "cudaMemPoolCreate",
        DestroyPool = "cudaMemPoolDestroy",
        TrimPool = "cudaMemPoolTrimTo",
        /// [`crate::device::PooledDevice::pool_memory`] and
        /// [`crate::device::PooledDevice::pool_reserved`].
        PoolAttribute = "cudaMemPoolGetAttribute",
        MemGetInfo = "cudaMemGetInfo",
        CreateStream = "cudaStreamCreate",
        DestroyStream = "cudaStreamDestroy",
        SynchronizeStream = "cudaStreamSynchronize",
        WaitEvent = "cudaStreamWaitEvent",
        /// [`crate::device::Device::create_event`] and
        /// [`crate::device::TestDevice::create_timed_event`].
        CreateEvent = "cudaEventCreate",
        DestroyEvent = "cudaEventDestroy",
        RecordEvent = "cudaEventRecord",
        QueryEvent = "cudaEventQuery",
        SynchronizeEvent = "cudaEventSynchronize",
        Synchronize = "cudaDeviceSynchronize",
        /// Work on a stream: [`crate::device::TestDevice::fill`], `verify`, `verify_later` and
        /// `busy`.
        LaunchKernel = "cudaLaunchKernel",
        /// [`crate::device::TestDevice::host_alloc`] of pinned memory.
        HostAlloc = "cuMemHostAlloc",
        /// [`crate::device::TestDevice::host_alloc`] of pageable memory.
        HostMap = "mmap",
        HostFree = "cuMemFreeHost",
        CopyToHost = "cuMemcpyDtoHAsync",
        CopyToDevice = "cuMemcpyHtoDAsync",
        NvmlMemory = "nvmlDeviceGetMemoryInfo",
    }
}

impl DeviceCall {
    pub const fn gets_memory(self) -> bool {
        matches!(self, Self::Malloc | Self::Create | Self::MallocAsync)
    }

    pub const fn gets_host_memory(self) -> bool {
        matches!(self, Self::HostAlloc | Self::HostMap)
    }

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

    pub const fn tells_memory(self) -> bool {
        matches!(self, Self::MemGetInfo | Self::NvmlMemory)
    }

    /// Returns true if the harness makes it for its own checks. Its count says nothing about the
    /// program.
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
    /// Parses `CALL:FIRST[:COUNT][:MIN_SIZE]` into the call's name and the range. The range is
    /// `None` if its form is wrong.
    pub fn parse(text: &str) -> (&str, Option<Self>) {
        let (call, numbers) = text.split_once(':').unwrap_or((text, ""));
        (call, Self::of_numbers(numbers))
    }

    fn of_numbers(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let first = parts.next()?.parse().ok().filter(|first| *first > 0)?;
        let count = parts.next().map_or(Ok(1), str::parse).ok()?;
        let min_size = parts.next().map_or(Ok(Bytes::ZERO), Bytes::parse).ok()?;
        parts.next().is_none().then_some(Self {
            first,
            count,
            min_size,
        })
    }
}
