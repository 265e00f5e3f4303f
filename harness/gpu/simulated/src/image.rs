//! [`Image`]: the kernels and variables of code that a program loads. Those of machine code come
//! from the metadata in its ELF file, those of PTX from its text.
//!
//! The metadata has no public description. The sections and attributes read here are those of
//! ptxas 13.0 for capabilities 7.5 to 12.0, compared with what `ptxas -v` prints.

use std::collections::BTreeMap;

use object::read::elf::{FileHeader, SectionHeader as _, Sym as _};
use object::{Endianness, elf, pod::bytes_of_slice};

use harness_gpu_settings::gpus::{BLOCK_THREADS, GpuLimits, REGISTERS};

/// The kernels and variables of an image, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Image {
    /// `None` if the names of the kernels are unknown.
    pub(crate) kernels: Option<BTreeMap<String, Kernel>>,
    /// Offset and size of the parameters of kernels.
    pub(crate) parameters: BTreeMap<String, Vec<(usize, usize)>>,
    /// The sizes of variables.
    pub(crate) variables: BTreeMap<String, u64>,
}

/// What a kernel needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kernel {
    /// Registers of a thread.
    pub(crate) registers: u32,
    /// Bytes of shared memory of a block, without those of a launch.
    pub(crate) shared: u32,
    /// Bytes of constants.
    pub(crate) constant: u32,
    /// Bytes of local memory of a thread.
    pub(crate) local: u32,
    /// The most threads of a block in its launch bounds.
    pub(crate) threads: u32,
}

impl Default for Kernel {
    /// A model for kernels without metadata.
    fn default() -> Self {
        Self {
            registers: 32,
            shared: 0,
            constant: 0,
            local: 0,
            threads: BLOCK_THREADS,
        }
    }
}

fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_ne_bytes(word)
}

type Header = elf::FileHeader64<Endianness>;

/// Attributes in `.nv.info` and in the section of a kernel: `EIATTR_REGCOUNT`,
/// `EIATTR_FRAME_SIZE`, `EIATTR_KPARAM_INFO`, `EIATTR_MAX_THREADS` and `EIATTR_REQNTID`.
const REGISTER_COUNT: u8 = 0x2f;
const FRAME_SIZE: u8 = 0x11;
const PARAMETER: u8 = 0x17;
const MAX_THREADS: u8 = 0x05;
const REQUIRED_THREADS: u8 = 0x10;
/// The format of attributes with a size and a value. Others have four bytes.
const SIZED: u8 = 0x04;

/// From this capability, the section of a kernel's shared memory contains what the system reserves.
const RESERVES: u32 = 90;
const RESERVED: u32 = 1 << 10;

impl Image {
    /// The image of an ELF file or of PTX text. Unknown code has unknown kernels.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        if bytes.starts_with(b"\x7fELF") {
            // The headers are read in place, so they must be aligned.
            let words: Vec<u64> = bytes.chunks(8).map(word).collect();
            Self::of_elf(&bytes_of_slice(&words)[..bytes.len()]).unwrap_or_default()
        } else {
            Self::of_ptx(&String::from_utf8_lossy(bytes))
        }
    }

    fn of_elf(bytes: &[u8]) -> Option<Self> {
        let header = Header::parse(bytes).ok()?;
        let endian = header.endian().ok()?;
        let flags = header.e_flags(endian);
        // Since version 8 of the file format, the capability is in the second byte.
        let capability = if bytes.get(8).is_some_and(|version| *version >= 8) {
            flags >> 8 & 0xff
        } else {
            flags & 0xff
        };
        let sections = header.sections(endian, bytes).ok()?;
        let symbols = sections.symbols(endian, bytes, elf::SHT_SYMTAB).ok()?;
        let section_name = |index: usize| {
            let section = sections.section(object::SectionIndex(index)).ok()?;
            let name = sections.section_name(endian, section).ok()?;
            std::str::from_utf8(name).ok()
        };
        let mut kernels = BTreeMap::new();
        let mut variables = BTreeMap::new();
        let mut names = BTreeMap::new();
        let mut parameters = BTreeMap::new();
        for (index, symbol) in symbols.enumerate() {
            let place = usize::from(symbol.st_shndx(endian));
            let (Ok(name), Some(section)) =
                (symbol.name(endian, symbols.strings()), section_name(place))
            else {
                continue;
            };
            let name = String::from_utf8_lossy(name).into_owned();
            match symbol.st_type() {
                elf::STT_FUNC if section.strip_prefix(".text.") == Some(&name) => {
                    names.insert(index.0 as u32, name.clone());
                    kernels.insert(name, Kernel::default());
                }
                elf::STT_OBJECT
                    if section.starts_with(".nv.global") || section == ".nv.constant3" =>
                {
                    variables.insert(name, symbol.st_size(endian));
                }
                _ => {}
            }
        }
        for section in sections.iter() {
            let name = sections.section_name(endian, section).unwrap_or_default();
            let size = u32::try_from(section.sh_size(endian)).unwrap_or(u32::MAX);
            let data = section.data(endian, bytes).unwrap_or_default();
            let name = String::from_utf8_lossy(name);
            match &*name {
                ".nv.info" => of_symbols(&mut kernels, &names, data),
                ".nv.constant3" => kernels
                    .values_mut()
                    .for_each(|kernel| kernel.constant = size),
                section => {
                    of_section(&mut kernels, section, (size, data), capability);
                    if let Some(kernel) = section.strip_prefix(".nv.info.") {
                        parameters.insert(kernel.to_owned(), parameters_of(data));
                    }
                }
            }
        }
        Some(Self {
            kernels: Some(kernels),
            parameters,
            variables,
        })
    }

    /// Reads declarations such as `.global .align 4 .b8 table[64];`.
    fn of_ptx(text: &str) -> Self {
        let mut variables = BTreeMap::new();
        for line in text.lines() {
            let mut words = line.split_whitespace();
            if !words.any(|word| matches!(word, ".global" | ".const")) {
                continue;
            }
            let mut bits = None;
            for word in words {
                let known = word
                    .strip_prefix(['.'])
                    .map(|kind| kind.trim_start_matches(char::is_alphabetic));
                match known.and_then(|digits| digits.parse::<u64>().ok()) {
                    Some(number) => bits = Some(number),
                    None if word.starts_with(|letter: char| {
                        letter.is_alphabetic() || "_$%".contains(letter)
                    }) =>
                    {
                        let declared = word.split(['=', ';']).next().unwrap_or_default();
                        let mut parts = declared.split('[');
                        let name = parts.next().unwrap_or_default();
                        let elements =
                            parts.map(|part| part.trim_end_matches(']').parse().unwrap_or(0));
                        let size = bits.unwrap_or(0) / 8 * elements.fold(1, u64::saturating_mul);
                        variables.insert(name.to_owned(), size);
                        break;
                    }
                    None => {}
                }
            }
        }
        Self {
            kernels: None,
            parameters: BTreeMap::new(),
            variables,
        }
    }

    /// A kernel, if the image may have one of this name.
    pub(crate) fn kernel(&self, name: &str) -> Option<Kernel> {
        match &self.kernels {
            Some(kernels) => kernels.get(name).copied(),
            None => Some(Kernel::default()),
        }
    }
}

/// Reads a section of one kernel: its attributes, or the size of its shared memory.
fn of_section(
    kernels: &mut BTreeMap<String, Kernel>,
    section: &str,
    (size, data): (u32, &[u8]),
    capability: u32,
) {
    let name = |prefix| section.strip_prefix(prefix).unwrap_or_default();
    if let Some(kernel) = kernels.get_mut(name(".nv.info.")) {
        let bounds = attributes(data)
            .filter(|(number, _)| [MAX_THREADS, REQUIRED_THREADS].contains(number))
            .map(|(_, value)| words(value).into_iter().fold(1, u32::saturating_mul))
            .filter(|threads| *threads > 0);
        kernel.threads = bounds.min().unwrap_or(BLOCK_THREADS).min(BLOCK_THREADS);
    } else if let Some(kernel) = kernels.get_mut(name(".nv.shared.")) {
        kernel.shared = if capability >= RESERVES {
            size.saturating_sub(RESERVED)
        } else {
            size
        };
    }
}

/// Reads the attributes of all kernels, which name their symbols.
fn of_symbols(kernels: &mut BTreeMap<String, Kernel>, names: &BTreeMap<u32, String>, data: &[u8]) {
    for (number, value) in attributes(data) {
        let [symbol, figure] = words(value)[..] else {
            continue;
        };
        let Some(kernel) = names.get(&symbol).and_then(|name| kernels.get_mut(name)) else {
            continue;
        };
        match number {
            REGISTER_COUNT => kernel.registers = figure,
            FRAME_SIZE => kernel.local = figure,
            _ => {}
        }
    }
}

/// Reads offset and size of the parameters of a kernel, in their order.
fn parameters_of(data: &[u8]) -> Vec<(usize, usize)> {
    let found = attributes(data).filter(|(number, _)| *number == PARAMETER);
    let found: BTreeMap<u32, (usize, usize)> = found
        .filter_map(|(_, value)| {
            let [_, place, size] = words(value)[..] else {
                return None;
            };
            // The number is in the lower half, and the size above other bits.
            Some((
                place & 0xffff,
                ((place >> 16) as usize, (size >> 18) as usize),
            ))
        })
        .collect();
    found.into_values().collect()
}

/// The numbers and values of attributes with a size.
fn attributes(data: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    let mut rest = data;
    std::iter::from_fn(move || {
        loop {
            let (&[format, number, low, high], after) = rest.split_first_chunk()?;
            if format != SIZED {
                rest = after;
                continue;
            }
            let (value, after) = after.split_at_checked(u16::from_le_bytes([low, high]).into())?;
            rest = after;
            return Some((number, value));
        }
    })
}

fn words(value: &[u8]) -> Vec<u32> {
    let chunks = value.as_chunks().0.iter();
    chunks.map(|word| u32::from_le_bytes(*word)).collect()
}

/// Threads of a warp, and multiples in which a multiprocessor gives registers to warps, shared
/// memory to blocks, and warps to its four parts, from the tables of NVIDIA's occupancy calculator.
const WARP: u32 = 32;
const REGISTER_UNIT: u32 = 256;
const SHARED_UNIT: u64 = 128;
const PARTS: u32 = 4;

impl Kernel {
    fn warps(self, limits: &GpuLimits) -> u32 {
        let of_warp = (self.registers.max(1) * WARP).next_multiple_of(REGISTER_UNIT);
        let by_registers = REGISTERS / of_warp / PARTS * PARTS;
        by_registers.min(limits.threads / WARP)
    }

    /// The most threads of a block that the kernel's bounds and its registers allow.
    pub(crate) fn most_threads(self, limits: &GpuLimits) -> u32 {
        self.threads.min(self.warps(limits) * WARP)
    }

    /// Blocks that a multiprocessor runs at once, each with `dynamic` bytes of shared memory.
    pub(crate) fn active_blocks(
        self,
        limits: &GpuLimits,
        reserved: u32,
        block: u32,
        dynamic: usize,
    ) -> u32 {
        if block == 0 || block > self.most_threads(limits) {
            return 0;
        }
        let shared = (u64::from(self.shared) + dynamic as u64 + u64::from(reserved))
            .next_multiple_of(SHARED_UNIT);
        let by_memory = u64::from(limits.shared_memory)
            .checked_div(shared)
            .map_or(u32::MAX, |blocks| u32::try_from(blocks).unwrap_or(u32::MAX));
        let by_warps = self.warps(limits) / block.div_ceil(WARP);
        by_warps.min(by_memory).min(limits.blocks)
    }
}

#[cfg(test)]
mod tests;
