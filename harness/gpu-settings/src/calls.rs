//! CUDA calls that can fail ([`FaultyCall`]) or be delayed ([`SlowCall`]) on request, on simulated and real GPUs.

use harness_allocator::device::faulty::DeviceCall;

/// A call with injectable failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultyCall {
    Malloc,
    /// `cuMemCreate`.
    Create,
    MallocAsync,
    HostAlloc,
}

impl FaultyCall {
    pub const ALL: [Self; 4] = [Self::Malloc, Self::Create, Self::MallocAsync, Self::HostAlloc];

    /// The name of the CUDA function.
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

/// A call with an injectable delay. Names of the runtime include the driver's functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SlowCall {
    Malloc,
    /// `cuMemCreate`.
    Create,
    MallocAsync,
    HostAlloc,
    Free,
    FreeAsync,
    /// `cuMemUnmap`.
    Unmap,
}

impl SlowCall {
    pub const ALL: [Self; 7] = [Self::Malloc, Self::Create, Self::MallocAsync, Self::HostAlloc, Self::Free, Self::FreeAsync, Self::Unmap];

    /// The name of the CUDA function.
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

    pub(crate) const fn requests_device_memory(self) -> bool {
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
