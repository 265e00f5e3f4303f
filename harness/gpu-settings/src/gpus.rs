//! [`Gpu`]: the properties of a GPU that programs can query, except its memory.
//!
//! They change what PyTorch allocates. The workspaces of cuBLAS and attention depend on the compute capability; temporary memory of sorts and
//! reductions depends on the number of multiprocessors. So every result names the GPU.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A GPU as its driver describes it.
#[derive(Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The name of a device profile or a compute capability such as `sm_90`, in lower case.
    pub name: &'static str,
    /// The name that the driver returns.
    pub device: &'static str,
    /// Compute capability, for example 9 and 0.
    pub capability: (u32, u32),
    pub multiprocessors: u32,
    pub clock_khz: u32,
    pub memory_clock_khz: u32,
    pub memory_bus_bits: u32,
    /// In bytes.
    pub l2_cache: u32,
}

/// Limits of a compute capability: "Technical Specifications per Compute Capability" in the CUDA C++ Programming Guide,
/// <https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications>.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Resident threads per multiprocessor.
    pub threads: u32,
    /// Resident blocks per multiprocessor.
    pub blocks: u32,
    /// Bytes of shared memory per multiprocessor.
    pub shared_memory: u32,
    /// Bytes of shared memory per block that a kernel can opt in to.
    pub shared_memory_of_a_block: u32,
}

/// Registers per multiprocessor and per block.
pub const REGISTERS: u32 = 65_536;
/// Bytes of shared memory per block without opt-in.
pub const SHARED_MEMORY: u32 = 48 << 10;
/// Threads per block.
pub const BLOCK_THREADS: u32 = 1024;

/// The GPUs that can be simulated. Multiprocessors, clocks, bus and L2 cache come from NVIDIA's data sheets and architecture white papers:
/// T4 <https://www.nvidia.com/en-us/data-center/tesla-t4/>, A100
/// <https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf>, H100 and H200
/// <https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper>, L4 and RTX 4090
/// <https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf>. Clocks do not affect allocations.
pub const GPUS: [Gpu; 7] = [
    Gpu::new("t4-16", "Tesla T4", (7, 5), 40, [1_590_000, 5_001_000], 256, 4 << 20),
    Gpu::new("l4-24", "NVIDIA L4", (8, 9), 58, [2_040_000, 6_251_000], 192, 48 << 20),
    Gpu::new("rtx4090-24", "NVIDIA GeForce RTX 4090", (8, 9), 128, [2_520_000, 10_501_000], 384, 72 << 20),
    Gpu::new("a100-40", "NVIDIA A100-SXM4-40GB", (8, 0), 108, [1_410_000, 1_215_000], 5120, 40 << 20),
    Gpu::new("a100-80", "NVIDIA A100-SXM4-80GB", (8, 0), 108, [1_410_000, 1_593_000], 5120, 40 << 20),
    Gpu::new("h100-80", "NVIDIA H100 80GB HBM3", (9, 0), 132, [1_980_000, 2_619_000], 5120, 50 << 20),
    Gpu::new("h200-141", "NVIDIA H200", (9, 0), 132, [1_980_000, 3_201_000], 6144, 60 << 20),
];

/// As its name.
impl Serialize for Gpu {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

impl<'de> Deserialize<'de> for &'static Gpu {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Gpu::named(&name).ok_or_else(|| D::Error::custom(format_args!("`{name}` is not a GPU")))
    }
}

impl Gpu {
    const fn new(
        name: &'static str,
        device: &'static str,
        capability: (u32, u32),
        multiprocessors: u32,
        [clock_khz, memory_clock_khz]: [u32; 2],
        memory_bus_bits: u32,
        l2_cache: u32,
    ) -> Self {
        Self { name, device, capability, multiprocessors, clock_khz, memory_clock_khz, memory_bus_bits, l2_cache }
    }

    pub fn named(name: &str) -> Option<&'static Self> {
        GPUS.iter().find(|gpu| gpu.name == name)
    }

    pub const fn limits(&self) -> Limits {
        let [threads, blocks, shared_memory, shared_memory_of_a_block] = match self.capability {
            (7, _) => [1024, 16, 64, 64],
            (8, 0) => [2048, 32, 164, 163],
            (8, 6) => [1536, 16, 100, 99],
            (8, _) => [1536, 24, 100, 99],
            _ => [2048, 32, 228, 227],
        };
        Limits { threads, blocks, shared_memory: shared_memory << 10, shared_memory_of_a_block: shared_memory_of_a_block << 10 }
    }
}
