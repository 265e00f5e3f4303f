//! [`Gpu`]: the properties of a GPU that programs can query.
//!
//! They change what PyTorch allocates. The workspaces of cuBLAS and attention depend on the compute
//! capability; temporary memory of sorts and reductions depends on the number of multiprocessors.
//! So every result names the GPU.

use std::sync::LazyLock;

use harness_allocator::units::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A GPU as its driver describes it. Unknown clocks and widths are 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub struct Gpu {
    /// Its name in options and results, in lower case.
    pub name: String,
    /// The name that the driver returns.
    pub device: String,
    /// All memory that CUDA reports.
    pub memory: Bytes,
    /// Compute capability, for example 9 and 0.
    pub capability: (u32, u32),
    pub multiprocessors: u32,
    pub clock_khz: u32,
    pub memory_clock_khz: u32,
    pub memory_bus_bits: u32,
    pub l2_cache: u32,
    /// The generation of PCI Express, unless the GPU has another link to the host.
    pub pcie: Option<u8>,
    /// Whether GPUs of this kind reach each other's memory, if it differs from
    /// [`Gpu::reaches_peers`] for its name.
    pub peer_access: Option<bool>,
    /// Whether its memory is the host's, if it differs from [`Gpu::has_memory_of_host`] for its
    /// compute capability.
    pub shares_host_memory: Option<bool>,
    /// The source of its memory.
    pub source: String,
}

/// Limits of a compute capability: "Technical Specifications per Compute Capability" in the CUDA
/// C++ Programming Guide,
/// <https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications>.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuLimits {
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

/// The compute capabilities that can be simulated, with threads, blocks and KiB of shared memory.
const CAPABILITIES: [((u32, u32), [u32; 4]); 12] = [
    ((7, 2), [2048, 32, 96, 96]),
    ((7, 5), [1024, 16, 64, 64]),
    ((8, 0), [2048, 32, 164, 163]),
    ((8, 6), [1536, 16, 100, 99]),
    ((8, 7), [1536, 16, 164, 163]),
    ((8, 9), [1536, 24, 100, 99]),
    ((9, 0), [2048, 32, 228, 227]),
    ((10, 0), [2048, 32, 228, 227]),
    ((10, 3), [2048, 32, 228, 227]),
    ((11, 0), [1536, 24, 228, 227]),
    ((12, 0), [1536, 24, 100, 99]),
    ((12, 1), [1536, 24, 100, 99]),
];

/// The GPUs that ship with the program: the rows of `gpus.tsv`, which lists the sources.
pub static GPUS: LazyLock<Vec<Gpu>> = LazyLock::new(|| rows().filter_map(of_row).collect());

fn rows() -> impl Iterator<Item = &'static str> {
    include_str!("gpus.tsv")
        .lines()
        .filter(|line| !line.starts_with('#'))
}

fn of_row(row: &str) -> Option<Gpu> {
    let fields: Vec<&str> = row.split('\t').collect();
    let [
        name,
        device,
        memory,
        capability,
        multiprocessors,
        clock,
        memory_clock,
        bus,
        l2_kib,
        pcie,
        source,
    ] = fields[..]
    else {
        return None;
    };
    let number = |text: &str| {
        if text == "-" {
            Some(0)
        } else {
            text.parse().ok()
        }
    };
    Some(Gpu {
        name: name.to_owned(),
        device: device.to_owned(),
        memory: Bytes::parse(memory).ok()?,
        capability: capability
            .split_once('.')
            .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)))?,
        multiprocessors: multiprocessors.parse().ok()?,
        clock_khz: number(clock)? * 1000,
        memory_clock_khz: number(memory_clock)? * 1000,
        memory_bus_bits: number(bus)?,
        l2_cache: number(l2_kib)? << 10,
        pcie: pcie.parse().ok(),
        peer_access: None,
        shares_host_memory: None,
        source: source.to_owned(),
    })
}

/// As its name if it ships with the program, otherwise with all properties.
impl Serialize for Gpu {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match Self::named(&self.name) {
            Some(shipped) if shipped == self => serializer.serialize_str(&self.name),
            _ => Self::serialize(self, serializer),
        }
    }
}

impl<'de> Deserialize<'de> for &'static Gpu {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error as _;

        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Wire {
            Name(String),
            Properties(#[serde(deserialize_with = "Gpu::deserialize")] Gpu),
        }

        match Wire::deserialize(deserializer)? {
            Wire::Name(name) => Gpu::named(&name)
                .ok_or_else(|| D::Error::custom(format_args!("`{name}` is not a GPU"))),
            Wire::Properties(gpu) => Ok(gpu.leak()),
        }
    }
}

impl Gpu {
    /// Returns whether GPUs of this kind reach each other's memory, over NVLink or PCI Express.
    /// GeForce GPUs, MIG instances and the GPUs of systems on a chip do not. NVIDIA has no list;
    /// `deviceQuery` prints "Peer access: Yes" for T4, A40, A100, RTX A6000 and RTX 6000 Ada, and
    /// "No" for RTX 3090 and 4090.
    pub fn reaches_peers(&self) -> bool {
        self.peer_access.unwrap_or(
            !self.is_of_system()
                && !["GeForce", " MIG "]
                    .iter()
                    .any(|kind| self.device.contains(kind)),
        )
    }

    /// Returns whether a GPU of this kind has no memory of its own: programs and the system use the
    /// same memory. A GPU of a system on a chip has none.
    pub const fn has_memory_of_host(&self) -> bool {
        match self.shares_host_memory {
            Some(shares) => shares,
            None => self.is_of_system(),
        }
    }

    /// Returns whether GPUs of this compute capability exist only in systems on a chip: Xavier,
    /// Orin, Thor and GB10 (<https://developer.nvidia.com/cuda-gpus>). GH200 has another one: its
    /// GPU has memory of its own.
    const fn is_of_system(&self) -> bool {
        matches!(self.capability, (7, 2) | (8, 7) | (11, 0) | (12, 1))
    }

    /// Finds the GPU with this name, also with the unit of its memory as in `A100-80GB`, with this
    /// alias, or else the only one whose name or alias begins with the text, or ends with it after
    /// the brand, as `4090` or `3090 Ti`. Case, spaces and dashes do not count.
    pub fn named(name: &str) -> Option<&'static Self> {
        if let Some(exact) = GPUS.iter().find(|gpu| gpu.name == name) {
            return Some(exact);
        }
        let wanted = plain(name);
        let without_unit = wanted.strip_suffix("gb");
        let only = |is_meant: &dyn Fn(&str) -> bool| {
            let mut meant = GPUS
                .iter()
                .filter(|gpu| gpu.spellings().iter().any(|spelling| is_meant(spelling)));
            meant.next().filter(|_| meant.next().is_none())
        };
        if wanted.is_empty() {
            None
        } else {
            only(&|known| known == wanted)
                .or_else(|| {
                    GPUS.iter()
                        .find(|gpu| Some(&*plain(&gpu.name)) == without_unit)
                })
                .or_else(|| only(&|known| known.starts_with(&wanted)))
                .or_else(|| only(&|known| known.strip_prefix("rtx") == Some(&wanted)))
        }
    }

    /// The name without its memory, and the driver's name without the vendor, if only this GPU has
    /// them.
    pub fn aliases(&self) -> Vec<String> {
        let model = self
            .name
            .rsplit_once('-')
            .map(|(model, _)| model.to_owned());
        let driver = self
            .device
            .replace("NVIDIA ", "")
            .replace("GeForce ", "")
            .to_lowercase()
            .replace(' ', "-");
        let mut aliases: Vec<String> = model
            .into_iter()
            .chain([driver])
            .filter(|alias| *alias != self.name)
            .collect();
        aliases.retain(|alias| Self::named(alias).is_some_and(|gpu| gpu.name == self.name));
        aliases.dedup();
        aliases
    }

    fn spellings(&self) -> [String; 3] {
        let model = self
            .name
            .rsplit_once('-')
            .map_or(&*self.name, |(model, _)| model);
        [&*self.name, model, &*self.device].map(plain)
    }

    /// Keeps a GPU that does not ship with the program until the process ends.
    pub fn leak(self) -> &'static Self {
        Box::leak(Box::new(self))
    }

    /// Returns whether a compute capability can be simulated.
    pub fn has_limits(capability: (u32, u32)) -> bool {
        CAPABILITIES.iter().any(|(known, _)| *known == capability)
    }

    /// The compute capabilities that can be simulated, as in `7.5, 8.0`.
    pub fn capabilities() -> String {
        CAPABILITIES
            .map(|((major, minor), _)| format!("{major}.{minor}"))
            .join(", ")
    }

    pub fn limits(&self) -> GpuLimits {
        let known = CAPABILITIES
            .iter()
            .find(|(capability, _)| *capability == self.capability);
        let [threads, blocks, shared_memory, shared_memory_of_a_block] =
            known.unwrap_or(&CAPABILITIES[6]).1;
        GpuLimits {
            threads,
            blocks,
            shared_memory: shared_memory << 10,
            shared_memory_of_a_block: shared_memory_of_a_block << 10,
        }
    }
}

fn plain(name: &str) -> String {
    let lower = name
        .to_lowercase()
        .replace("nvidia", "")
        .replace("geforce", "");
    lower
        .chars()
        .filter(|letter| letter.is_alphanumeric())
        .collect()
}

#[cfg(test)]
mod tests;
