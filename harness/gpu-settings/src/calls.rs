//! [`Call`]: the CUDA calls that can fail or be delayed on request, on simulated and real GPUs.

use harness_allocator::{device::faulty::DeviceCall, named_enum};
use serde::{Deserialize, Serialize};

named_enum! {
    /// A call with an injectable delay. Names of the runtime include the driver's functions. The files of a run store its position.
    #[derive(Serialize, Deserialize)]
    Call {
        Malloc = DeviceCall::Malloc.name(),
        Create = DeviceCall::Create.name(),
        MallocAsync = DeviceCall::MallocAsync.name(),
        HostAlloc = "cudaHostAlloc",
        Free = DeviceCall::Free.name(),
        FreeAsync = DeviceCall::FreeAsync.name(),
        Unmap = DeviceCall::Unmap.name(),
    }
}

impl Call {
    pub(crate) const fn requests_device_memory(self) -> bool {
        matches!(self, Self::Malloc | Self::Create | Self::MallocAsync)
    }

    /// Returns whether it requests memory, so that failures can be injected.
    pub(crate) const fn can_fail(self) -> bool {
        self.requests_device_memory() || matches!(self, Self::HostAlloc)
    }
}
