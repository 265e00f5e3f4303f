//! Attributes of a device, by number, and `cudaDeviceProp`, by offset.
//!
//! Numbers and offsets come from the headers of CUDA 12.8 and 13.0 (`cuda.h`, `driver_types.h`).

use harness_gpu_settings::gpus::{BLOCK_THREADS, REGISTERS, SHARED_MEMORY};
use harness_gpu_settings::settings::{Cuda, Settings, SharedMemory};

/// The value of an attribute; zero for unknown attributes.
pub(crate) fn attribute(settings: &Settings, number: i32, pci_bus: u32) -> u32 {
    let (gpu, limits) = (settings.gpu, settings.gpu.limits());
    match number {
        // Threads per block and the extent of a block; the extent of a grid follows.
        1..=3 => BLOCK_THREADS,
        4 => 64,
        5 => i32::MAX as u32,
        6 | 7 => 65_535,
        8 => SHARED_MEMORY,
        9 => 64 << 10,
        10 => 32,
        11 => i32::MAX as u32,
        12 | 82 => REGISTERS,
        13 => gpu.clock_khz,
        14 => 512,
        16 => gpu.multiprocessors,
        // Integrated: the GPU shares the host's memory.
        18 => (settings.shared_memory != SharedMemory::None).into(),
        // Mapped host memory, concurrent kernels, unified addressing, stream priorities,
        // cooperative launches, host registration.
        19 | 31 | 41 | 78 | 95 | 99 => 1,
        33 => pci_bus,
        36 => gpu.memory_clock_khz,
        37 => gpu.memory_bus_bits,
        38 => gpu.l2_cache,
        39 => limits.threads,
        40 => 2,
        75 => gpu.capability.0,
        76 => gpu.capability.1,
        81 => limits.shared_memory,
        97 => limits.shared_memory_of_a_block,
        106 => limits.blocks,
        // The shared memory that each block reserves.
        111 if gpu.capability.0 >= 8 => 1 << 10,
        102 => settings.mapping.into(),
        115 => settings.pools.into(),
        _ => 0,
    }
}

/// The size of `cudaDeviceProp`.
pub(crate) const fn properties_size(cuda: Cuda) -> usize {
    match cuda {
        Cuda::V12 => 1032,
        Cuda::V13 => 1008,
    }
}

/// Fields of four bytes in `cudaDeviceProp`: the offset in CUDA 13, the offset in CUDA 12, the
/// attribute.
const PROPERTIES: [(usize, usize, i32); 25] = [
    (304, 304, 12),
    (308, 308, 10),
    (320, 320, 1),
    (324, 324, 2),
    (328, 328, 3),
    (332, 332, 4),
    (336, 336, 5),
    (340, 340, 6),
    (344, 344, 7),
    (360, 360, 75),
    (364, 364, 76),
    (384, 388, 16),
    (388, 396, 18),
    (392, 400, 19),
    (560, 576, 31),
    (568, 584, 33),
    (584, 600, 40),
    (588, 604, 41),
    (592, 612, 37),
    (596, 616, 38),
    (604, 624, 39),
    (608, 628, 78),
    (632, 648, 82),
    (668, 688, 95),
    (688, 712, 106),
];

/// Fields of eight bytes, likewise.
const LARGE_PROPERTIES: [(usize, usize, i32); 6] = [
    (296, 296, 8),
    (312, 312, 11),
    (352, 352, 9),
    (368, 368, 14),
    (624, 640, 81),
    (672, 696, 97),
];

/// The bytes of a device's `cudaDeviceProp`.
pub(crate) fn properties(settings: &Settings, index: u32) -> Vec<u8> {
    let mut bytes = vec![0; properties_size(settings.cuda)];
    let mut put =
        |offset: usize, value: &[u8]| bytes[offset..offset + value.len()].copy_from_slice(value);
    put(0, settings.gpu.device.as_bytes());
    put(256, &uuid(index));
    put(288, &settings.memory.0.to_le_bytes());
    let offset = |of_13: usize, of_12: usize| {
        if settings.cuda == Cuda::V13 {
            of_13
        } else {
            of_12
        }
    };
    for (of_13, of_12, number) in PROPERTIES {
        put(
            offset(of_13, of_12),
            &attribute(settings, number, pci_bus(index)).to_le_bytes(),
        );
    }
    for (of_13, of_12, number) in LARGE_PROPERTIES {
        put(
            offset(of_13, of_12),
            &u64::from(attribute(settings, number, pci_bus(index))).to_le_bytes(),
        );
    }
    bytes
}

/// The PCI bus of a device; bus 0 is the host's.
pub(crate) const fn pci_bus(index: u32) -> u32 {
    index + 1
}

pub(crate) fn pci_address(index: u32) -> String {
    format!("00000000:{:02X}:00.0", pci_bus(index))
}

pub(crate) fn uuid(index: u32) -> [u8; 16] {
    let mut bytes = *b"simulated-gpu\0\0\0";
    bytes[15] = u8::try_from(index).unwrap_or(u8::MAX);
    bytes
}

#[cfg(test)]
mod tests {
    use harness_allocator::units::Bytes;

    use super::*;
    use harness_gpu_settings::gpus::Gpu;

    #[test]
    fn properties_have_the_offsets_of_each_release() {
        let mut settings =
            Settings::new(Gpu::named("h100-80").expect("find the GPU"), Bytes::gib(24));
        let figure = |settings: &Settings, offset: usize| {
            let bytes = properties(settings, 0);
            u32::from_le_bytes(
                bytes[offset..offset + 4]
                    .try_into()
                    .expect("read four bytes"),
            )
        };
        assert_eq!(
            (
                figure(&settings, 360),
                figure(&settings, 384),
                figure(&settings, 604)
            ),
            (9, 132, 2048)
        );
        settings.cuda = Cuda::V12;
        assert_eq!(
            (
                figure(&settings, 360),
                figure(&settings, 388),
                figure(&settings, 624)
            ),
            (9, 132, 2048)
        );
        assert_eq!(properties(&settings, 3).len(), 1032);
        assert_eq!(figure(&settings, 396), 0);
        settings.shared_memory = SharedMemory::Pinned;
        assert_eq!(figure(&settings, 396), 1);
        settings.cuda = Cuda::V13;
        assert_eq!(figure(&settings, 388), 1);
    }
}
