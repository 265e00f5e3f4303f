//! Fat binaries: the code of a program for several compute capabilities. Their layout is not
//! documented; `cuobjdump --list-elf` shows the same entries.

use std::ffi::CStr;
use std::{ptr, slice};

use harness_allocator::units::Bytes;

use crate::image::{Image, Kernel};

/// The structure that a program registers.
#[repr(C)]
struct Wrapper {
    magic: u32,
    version: u32,
    header: *const Header,
}

/// The header before all entries.
#[repr(C)]
struct Header {
    magic: u32,
    version: u16,
    size: u16,
    /// Bytes of all entries.
    entries: u64,
}

/// The header of an entry, as far as it is read here.
#[repr(C)]
struct Entry {
    kind: u16,
    version: u16,
    header_size: u32,
    size: u64,
    unread: [u32; 3],
    /// The compute capability, for example 86.
    capability: u32,
    also_unread: [u64; 3],
    /// The bytes of the code before compression. Zero for code that is not compressed.
    uncompressed: u64,
}

const WRAPPER_MAGIC: u32 = 0x4662_43b1;
const HEADER_MAGIC: u32 = 0xba55_ed50;
/// Kinds of entries: text that the driver compiles, and machine code.
const PTX: u16 = 1;
const CUBIN: u16 = 2;

/// Returns the capability of the code that a driver chooses for a device of this capability.
/// Machine code runs on later devices of its generation, PTX on all later devices. Kernels are
/// no-ops, so a device without such code gets the latest older code, or else the oldest code.
/// `None` without any code.
///
/// # Safety
/// The address is zero or that of a fat binary that a program registered.
pub(crate) unsafe fn chosen_code(wrapper: usize, device: u32) -> Option<u32> {
    // SAFETY: as the caller promises.
    let entries = unsafe { entries(wrapper) };
    let capabilities = || entries.iter().map(|entry| entry.capability);
    let older = || entries.iter().filter(|entry| entry.capability <= device);
    let runs = |entry: &&Entry| entry.kind == PTX || entry.capability / 10 == device / 10;
    let chosen = older().filter(runs).map(|entry| entry.capability).max();
    chosen
        .or_else(|| capabilities().filter(|code| *code <= device).max())
        .or_else(|| capabilities().min())
}

/// What a kernel needs by the machine code for a capability, unless that is compressed.
///
/// # Safety
/// The address is zero or that of a fat binary that a program registered.
pub(crate) unsafe fn kernel(wrapper: usize, capability: u32, name: &str) -> Option<Kernel> {
    // SAFETY: as the caller promises.
    let mut codes = unsafe { entries_with_code(wrapper) }.into_iter();
    let (_, code) = codes.find(|(entry, code)| {
        entry.kind == CUBIN && entry.capability == capability && code.starts_with(b"\x7fELF")
    })?;
    Image::of(code).kernel(name)
}

/// Returns the size of the machine code in an image that a program loads: of an ELF file, or of the
/// largest one in a fat binary before compression, because the driver loads one of them. Zero for
/// other images, such as PTX, whose machine code has an unknown size.
///
/// # Safety
/// The address is zero or that of an image.
pub(crate) unsafe fn code_bytes(image: usize) -> Bytes {
    // SAFETY: as the caller promises, and the magic number of ELF confirms the layout.
    unsafe {
        if !starts_with(image, *b"\x7fELF") {
            return Bytes(
                entries(image)
                    .iter()
                    .filter(|entry| entry.kind == CUBIN)
                    .map(|entry| entry.size.max(entry.uncompressed))
                    .max()
                    .unwrap_or(0),
            );
        }
        let start = ptr::with_exposed_provenance::<u8>(image);
        let read = |at: usize| u64::from(start.add(at).cast::<u16>().read_unaligned());
        // The table of sections is at the end. Its offset has eight bytes, the size and number of
        // its entries have two.
        Bytes(
            start
                .add(0x28)
                .cast::<u64>()
                .read_unaligned()
                .saturating_add(read(0x3a) * read(0x3c)),
        )
    }
}

/// The kernels and variables of an image that a program loads. Those of compressed code are
/// unknown.
///
/// # Safety
/// The address is zero or that of an image.
pub(crate) unsafe fn image(address: usize) -> Image {
    let start = ptr::with_exposed_provenance::<u8>(address);
    // SAFETY: as the caller promises. PTX ends with a NUL, machine code with its table of sections,
    // and an entry has this size.
    unsafe {
        if starts_with(address, *b"\x7fELF") {
            let size = usize::try_from(code_bytes(address).0).unwrap_or(0);
            return Image::of(slice::from_raw_parts(start, size));
        }
        if address != 0 && matches!(start.read(), b'.' | b'/' | b'\n') {
            return Image::of(CStr::from_ptr(start.cast()).to_bytes());
        }
        let code = entries_with_code(address).into_iter().map(|(_, code)| code);
        code.filter(|code| code.starts_with(b"\x7fELF"))
            .map(Image::of)
            .next_back()
            .unwrap_or_default()
    }
}

/// Compares the first bytes. Reads none after the first difference: a text can be shorter.
///
/// # Safety
/// The address is zero or that of an image.
unsafe fn starts_with(image: usize, magic: [u8; 4]) -> bool {
    let start = ptr::with_exposed_provenance::<u8>(image);
    // SAFETY: as the caller promises.
    image != 0
        && magic
            .iter()
            .enumerate()
            .all(|(at, byte)| unsafe { start.add(at).read() } == *byte)
}

/// The entries with code of a fat binary.
///
/// # Safety
/// The address is zero or that of an image. The magic numbers confirm the layout of a fat binary,
/// whose pointers lead to constants of the program.
unsafe fn entries(image: usize) -> Vec<Entry> {
    // SAFETY: as the caller promises.
    let found = unsafe { entries_with_code(image) };
    found.into_iter().map(|(entry, _)| entry).collect()
}

/// The same entries, each with its code.
///
/// # Safety
/// As above.
unsafe fn entries_with_code<'a>(image: usize) -> Vec<(Entry, &'a [u8])> {
    let mut found = Vec::new();
    let wrapper = ptr::with_exposed_provenance::<Wrapper>(image);
    // SAFETY: as the caller promises.
    unsafe {
        let header = if starts_with(image, WRAPPER_MAGIC.to_le_bytes()) {
            (*wrapper).header
        } else {
            wrapper.cast()
        };
        if !starts_with(header.expose_provenance(), HEADER_MAGIC.to_le_bytes()) {
            return found;
        }
        let Header { size, entries, .. } = *header;
        let mut at = header.byte_add(usize::from(size)).cast::<Entry>();
        let end = at.byte_add(usize::try_from(entries).unwrap_or(0));
        while at < end && end.byte_offset_from_unsigned(at) >= size_of::<Entry>() {
            let entry = at.read_unaligned();
            let (kind, size) = (
                entry.kind,
                u64::from(entry.header_size).saturating_add(entry.size),
            );
            if matches!(kind, PTX | CUBIN) && at.wrapping_byte_add(size as usize) <= end {
                let code = at.cast::<u8>().wrapping_add(entry.header_size as usize);
                let code = slice::from_raw_parts(code, entry.size as usize);
                found.push((entry, code));
            }
            match usize::try_from(size) {
                Ok(size) if size > 0 => at = at.wrapping_byte_add(size),
                _ => break,
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An entry with code, and this size before compression.
    fn entry_of(kind: u16, capability: u32, uncompressed: u64, code: &[u8]) -> Vec<u8> {
        let mut bytes = [kind.to_ne_bytes(), 1_u16.to_ne_bytes()].concat();
        bytes.extend(64_u32.to_ne_bytes());
        bytes.extend((code.len().next_multiple_of(8) as u64).to_ne_bytes());
        bytes.extend([0; 12]);
        bytes.extend(capability.to_ne_bytes());
        bytes.extend([0; 24]);
        bytes.extend(uncompressed.to_ne_bytes());
        bytes.extend(code);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    fn entry(kind: u16, capability: u32, uncompressed: u64) -> Vec<u8> {
        entry_of(kind, capability, uncompressed, &[0; 8])
    }

    /// The words of a fat binary with these entries.
    fn fat_binary(entries: &[Vec<u8>]) -> Vec<u64> {
        let entries = entries.concat();
        let mut bytes = [
            HEADER_MAGIC.to_ne_bytes().as_slice(),
            &1_u16.to_ne_bytes(),
            &16_u16.to_ne_bytes(),
        ]
        .concat();
        bytes.extend((entries.len() as u64).to_ne_bytes());
        bytes.extend(entries);
        bytes
            .chunks(8)
            .map(|word| u64::from_ne_bytes(word.try_into().expect("the length is a multiple of 8")))
            .collect()
    }

    #[test]
    fn the_needs_of_a_kernel_are_those_of_the_code_for_the_device() {
        let cubin = include_bytes!("../image/kernels.cubin");
        let words = fat_binary(&[
            entry(CUBIN, 75, 1 << 20),
            entry_of(PTX, 90, 0, cubin),
            entry_of(CUBIN, 90, 0, cubin),
        ]);
        let address = words.as_ptr().expose_provenance();
        // SAFETY: the fat binary was just built.
        let registers = |capability, name| unsafe {
            kernel(address, capability, name).map(|known| (known.registers, known.shared))
        };
        assert_eq!(registers(90, "first"), Some((10, 4096)));
        assert_eq!(registers(90, "third"), None);
        assert_eq!(registers(75, "first"), None, "it is compressed");
    }

    #[test]
    fn the_newest_code_for_a_device_is_chosen_and_has_its_size_before_compression() {
        let aligned = fat_binary(&[
            entry(CUBIN, 75, 0),
            entry(CUBIN, 80, 0),
            entry(CUBIN, 86, 4096),
            entry(CUBIN, 90, 0),
            entry(PTX, 90, 1 << 20),
        ]);
        let wrapper = Wrapper {
            magic: WRAPPER_MAGIC,
            version: 1,
            header: aligned.as_ptr().cast(),
        };
        let address = ptr::from_ref(&wrapper).expose_provenance();
        // SAFETY: the fat binary was just built.
        let chosen = [75, 89, 90, 100, 70].map(|device| unsafe { chosen_code(address, device) });
        assert_eq!(chosen, [75, 86, 90, 90, 75].map(Some));
        // SAFETY: as above.
        assert_eq!(unsafe { chosen_code(0, 89) }, None);
        // SAFETY: as above.
        assert_eq!(unsafe { code_bytes(address) }, Bytes(4096));
    }

    #[test]
    fn an_elf_image_ends_with_its_table_of_sections() {
        let mut image = [0_u64; 8];
        image[0] = u64::from_le_bytes(*b"\x7fELF\0\0\0\0");
        image[5] = 4096;
        // 64 bytes for each of three sections.
        image[7] = 64 << 16 | 3 << 32;
        assert_eq!(
            // SAFETY: the image was just built.
            unsafe { code_bytes(image.as_ptr().expose_provenance()) },
            Bytes(4096 + 3 * 64)
        );
        let ptx = *b".version 8.8\0\0\0\0";
        assert_eq!(
            // SAFETY: as above.
            unsafe { code_bytes(ptx.as_ptr().expose_provenance()) },
            Bytes::ZERO
        );
    }
}
