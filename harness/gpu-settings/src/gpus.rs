//! [`Gpu`]: what a program is told of a GPU besides its memory.
//!
//! The figures change what PyTorch allocates: workspaces of cuBLAS and attention go by the compute capability, temporaries of sorts and
//! reductions by the number of multiprocessors. So the GPU is named with every result.

/// A GPU as its driver describes it.
#[derive(Debug, PartialEq, Eq)]
pub struct Gpu {
    /// As a user names it, in small letters: the name of a device profile, or a compute capability as in `sm_90`.
    pub name: &'static str,
    /// As the driver names it.
    pub device: &'static str,
    /// Compute capability, for example 9 and 0.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Clock of the multiprocessors in kHz.
    pub clock_khz: u32,
    /// Clock of the memory in kHz.
    pub memory_clock_khz: u32,
    /// Width of the memory bus in bits.
    pub memory_bus_bits: u32,
    /// Size of the L2 cache in bytes.
    pub l2_cache: u32,
}

/// What all GPUs of one compute capability share: "Technical Specifications per Compute Capability" in the CUDA C++ Programming Guide,
/// <https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications>.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Resident threads of a multiprocessor.
    pub threads: u32,
    /// Resident blocks of a multiprocessor.
    pub blocks: u32,
    /// Shared memory of a multiprocessor in bytes.
    pub shared_memory: u32,
    /// Shared memory that one block can have in bytes, where the kernel asks for it.
    pub shared_memory_of_a_block: u32,
}

/// Registers of a multiprocessor, and of a block.
pub const REGISTERS: u32 = 65_536;
/// Shared memory of a block in bytes without asking.
pub const SHARED_MEMORY: u32 = 48 << 10;
/// Threads of a block.
pub const BLOCK_THREADS: u32 = 1024;

/// The GPUs that programs can be told of. Multiprocessors, clocks, bus and L2 cache are of NVIDIA's data sheets and architecture white papers:
/// T4 <https://www.nvidia.com/en-us/data-center/tesla-t4/>, A100
/// <https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf>, H100 and H200
/// <https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper>, L4 and RTX 4090
/// <https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf>. Clocks do not change what is allocated.
pub const GPUS: [Gpu; 7] = [
    Gpu::new("t4-16", "Tesla T4", (7, 5), 40, [1_590_000, 5_001_000], 256, 4 << 20),
    Gpu::new("l4-24", "NVIDIA L4", (8, 9), 58, [2_040_000, 6_251_000], 192, 48 << 20),
    Gpu::new("rtx4090-24", "NVIDIA GeForce RTX 4090", (8, 9), 128, [2_520_000, 10_501_000], 384, 72 << 20),
    Gpu::new("a100-40", "NVIDIA A100-SXM4-40GB", (8, 0), 108, [1_410_000, 1_215_000], 5120, 40 << 20),
    Gpu::new("a100-80", "NVIDIA A100-SXM4-80GB", (8, 0), 108, [1_410_000, 1_593_000], 5120, 40 << 20),
    Gpu::new("h100-80", "NVIDIA H100 80GB HBM3", (9, 0), 132, [1_980_000, 2_619_000], 5120, 50 << 20),
    Gpu::new("h200-141", "NVIDIA H200", (9, 0), 132, [1_980_000, 3_201_000], 6144, 60 << 20),
];

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

    /// The GPU of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        GPUS.iter().find(|gpu| gpu.name == name)
    }

    /// What its compute capability allows.
    #[must_use]
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
