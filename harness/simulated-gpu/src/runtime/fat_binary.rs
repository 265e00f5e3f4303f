//! Fat binaries: the code of a program for several compute capabilities. Their layout is not documented; `cuobjdump --list-elf` shows the same entries.

use std::ptr;

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
}

const WRAPPER_MAGIC: u32 = 0x4662_43b1;
const HEADER_MAGIC: u32 = 0xba55_ed50;
/// Kinds of entries: text that the driver compiles, and machine code.
const PTX: u16 = 1;
const CUBIN: u16 = 2;

/// Returns the capability of the code that a driver chooses for a device of this capability. Machine code runs on later devices of its generation, PTX
/// on all later devices. Kernels are no-ops, so a device without such code gets the latest older code, or else the oldest code. `None` without any code.
///
/// # Safety
/// The address is zero or that of a fat binary that a program registered.
pub(crate) unsafe fn chosen_code(wrapper: usize, device: u32) -> Option<u32> {
    let wrapper = ptr::with_exposed_provenance::<Wrapper>(wrapper);
    // SAFETY: the program registered the structure, and its pointers lead to constants of the program. The magic numbers confirm the layout.
    unsafe {
        let header = wrapper.as_ref().filter(|wrapper| wrapper.magic == WRAPPER_MAGIC)?.header;
        let Header { magic, size, entries, .. } = header.as_ref()?;
        if *magic != HEADER_MAGIC {
            return None;
        }
        let mut at = header.byte_add(usize::from(*size)).cast::<Entry>();
        let end = at.byte_add(usize::try_from(*entries).ok()?);
        let (mut chosen, mut older, mut oldest) = (None, None, None);
        while at < end {
            let entry = at.read_unaligned();
            let is_code = matches!(entry.kind, PTX | CUBIN);
            let code = Some(entry.capability).filter(|_| is_code);
            older = older.max(code.filter(|code| *code <= device));
            chosen = chosen.max(code.filter(|code| *code <= device && (entry.kind == PTX || code / 10 == device / 10)));
            oldest = oldest.into_iter().chain(code).min();
            let size = entry.header_size as usize + usize::try_from(entry.size).ok()?;
            if size == 0 {
                break;
            }
            at = at.byte_add(size);
        }
        chosen.or(older).or(oldest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(kind: u16, capability: u32) -> Vec<u8> {
        let mut bytes = [kind.to_ne_bytes(), 1_u16.to_ne_bytes()].concat();
        bytes.extend(64_u32.to_ne_bytes());
        bytes.extend(8_u64.to_ne_bytes());
        bytes.extend([0; 12]);
        bytes.extend(capability.to_ne_bytes());
        bytes.resize(64 + 8, 0);
        bytes
    }

    #[test]
    fn the_newest_code_for_a_device_is_chosen() {
        let entries = [entry(CUBIN, 75), entry(CUBIN, 80), entry(CUBIN, 86), entry(CUBIN, 90), entry(PTX, 90)].concat();
        let mut bytes = [HEADER_MAGIC.to_ne_bytes().as_slice(), &1_u16.to_ne_bytes(), &16_u16.to_ne_bytes()].concat();
        bytes.extend((entries.len() as u64).to_ne_bytes());
        bytes.extend(entries);
        let aligned: Vec<u64> =
            bytes.chunks(8).map(|word| u64::from_ne_bytes(word.try_into().expect("the length is a multiple of 8"))).collect();
        let wrapper = Wrapper { magic: WRAPPER_MAGIC, version: 1, header: aligned.as_ptr().cast() };
        let address = ptr::from_ref(&wrapper).expose_provenance();
        // SAFETY: the fat binary was just built.
        let chosen = [75, 89, 90, 100, 70].map(|device| unsafe { chosen_code(address, device) });
        assert_eq!(chosen, [75, 86, 90, 90, 75].map(Some));
        // SAFETY: as above.
        assert_eq!(unsafe { chosen_code(0, 89) }, None);
    }
}
