//! [`Call`]: the CUDA calls that can fail or be delayed on request, on simulated and real GPUs.

use harness_allocator::device::faulty::DeviceCall;
use serde::{Deserialize, Serialize};

/// A call with an injectable delay. Names of the runtime include the driver's functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Call {
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

impl Call {
    /// The files of a run store the position of a call in this list.
    pub const ALL: [Self; 7] = [Self::Malloc, Self::Create, Self::MallocAsync, Self::HostAlloc, Self::Free, Self::FreeAsync, Self::Unmap];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Malloc => DeviceCall::Malloc.name(),
            Self::Create => DeviceCall::Create.name(),
            Self::MallocAsync => DeviceCall::MallocAsync.name(),
            Self::HostAlloc => "cudaHostAlloc",
            Self::Free => DeviceCall::Free.name(),
            Self::FreeAsync => DeviceCall::FreeAsync.name(),
            Self::Unmap => DeviceCall::Unmap.name(),
        }
    }

    pub(crate) const fn requests_device_memory(self) -> bool {
        matches!(self, Self::Malloc | Self::Create | Self::MallocAsync)
    }

    /// Returns whether it requests memory, so that failures can be injected.
    pub(crate) const fn can_fail(self) -> bool {
        self.requests_device_memory() || matches!(self, Self::HostAlloc)
    }
}
