//! [`Call`]: the CUDA calls that can fail or be delayed on request, on simulated and real GPUs.

use harness_allocator::{device::faulty::DeviceCall, named_enum};
use serde::{Deserialize, Serialize};

named_enum! {
    /// A call with an injectable delay. Names of the runtime include the driver's functions. The
    /// files of a run store its position.
    #[derive(Serialize, Deserialize)]
    Call {
        Malloc = DeviceCall::Malloc.name(),
        Create = DeviceCall::Create.name(),
        MallocAsync = DeviceCall::MallocAsync.name(),
        HostAlloc = "cudaHostAlloc",
        Free = DeviceCall::Free.name(),
        FreeAsync = DeviceCall::FreeAsync.name(),
        Unmap = DeviceCall::Unmap.name(),
        CublasCreate = "cublasCreate",
        /// A product of 16-bit numbers, for which cuBLAS loads more code. Its failures are counted,
        /// not injected.
        CublasGemm = "cublasGemmEx",
        CudnnCreate = "cudnnCreate",
        CusolverCreate = "cusolverDnCreate",
        CusparseCreate = "cusparseCreate",
        CufftPlan = "cufftXtMakePlanMany",
        /// All functions of the driver that load a module or a library.
        ModuleLoad = "cuModuleLoadData",
        /// A launch or an upload of a graph that needs more physical memory.
        GraphLaunch = "cudaGraphLaunch",
    }
}

impl Call {
    /// Returns whether it is a driver's or runtime's request for device memory, as PyTorch's
    /// allocator makes.
    pub const fn requests_device_memory(self) -> bool {
        matches!(
            self,
            Self::Malloc | Self::Create | Self::MallocAsync | Self::GraphLaunch
        )
    }

    /// Returns whether it creates a handle, a plan or a module, which takes memory besides that of
    /// PyTorch's allocator.
    pub const fn is_of_library(self) -> bool {
        matches!(
            self,
            Self::CublasCreate
                | Self::CublasGemm
                | Self::CudnnCreate
                | Self::CusolverCreate
                | Self::CusparseCreate
                | Self::CufftPlan
                | Self::ModuleLoad
        )
    }

    /// Returns whether failures can be injected.
    pub const fn can_fail(self) -> bool {
        self.requests_device_memory()
            || matches!(self, Self::HostAlloc)
            || (self.is_of_library() && !matches!(self, Self::CublasGemm))
    }
}
