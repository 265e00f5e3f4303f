//! Calls of CUDA that can be made to fail ([`FaultyCall`]) or to take longer ([`SlowCall`]), on a simulated GPU and on a real one.

use harness_allocator::device::faulty::DeviceCall;

/// A call that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultyCall {
    /// `cudaMalloc`.
    Malloc,
    /// `cuMemCreate`.
    Create,
    /// `cudaMallocAsync`.
    MallocAsync,
    /// `cudaHostAlloc`.
    HostAlloc,
}

impl FaultyCall {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Malloc, Self::Create, Self::MallocAsync, Self::HostAlloc];

    /// The function.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Malloc => DeviceCall::Malloc.name(),
            Self::Create => DeviceCall::Create.name(),
            Self::MallocAsync => DeviceCall::MallocAsync.name(),
            Self::HostAlloc => "cudaHostAlloc",
        }
    }
}

/// A call that can be made to take longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SlowCall {
    /// `cudaMalloc`, and the driver's own.
    Malloc,
    /// `cuMemCreate`.
    Create,
    /// `cudaMallocAsync`, and the driver's own.
    MallocAsync,
    /// `cudaHostAlloc`.
    HostAlloc,
    /// `cudaFree`, and the driver's own.
    Free,
    /// `cudaFreeAsync`, and the driver's own.
    FreeAsync,
    /// `cuMemUnmap`.
    Unmap,
}

impl SlowCall {
    /// All of them.
    pub const ALL: [Self; 7] = [Self::Malloc, Self::Create, Self::MallocAsync, Self::HostAlloc, Self::Free, Self::FreeAsync, Self::Unmap];

    /// The function.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Malloc => FaultyCall::Malloc.name(),
            Self::Create => FaultyCall::Create.name(),
            Self::MallocAsync => FaultyCall::MallocAsync.name(),
            Self::HostAlloc => FaultyCall::HostAlloc.name(),
            Self::Free => DeviceCall::Free.name(),
            Self::FreeAsync => DeviceCall::FreeAsync.name(),
            Self::Unmap => DeviceCall::Unmap.name(),
        }
    }

    pub(crate) const fn gets_device_memory(self) -> bool {
        matches!(self, Self::Malloc | Self::Create | Self::MallocAsync)
    }
}

impl From<FaultyCall> for SlowCall {
    fn from(call: FaultyCall) -> Self {
        match call {
            FaultyCall::Malloc => Self::Malloc,
            FaultyCall::Create => Self::Create,
            FaultyCall::MallocAsync => Self::MallocAsync,
            FaultyCall::HostAlloc => Self::HostAlloc,
        }
    }
}
