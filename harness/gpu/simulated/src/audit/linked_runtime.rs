//! The CUDA runtime that is linked into a program or a library, as `nvcc` does by default. Its
//! calls do not pass the dynamic linker. Before code of the object runs, this module writes a jump
//! at the beginning of each function of that runtime, which continues in ours.
//!
//! The functions come from the symbol table of the file. A stripped object keeps its runtime; its
//! first use is an error (`entry_points`).

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::{fmt, fs, fs::File, ptr};

use harness_gpu_settings::functions::of_runtime;
use harness_gpu_settings::settings::end_for_linked_runtime;
use object::read::elf::{Dyn as _, FileHeader, ProgramHeader as _, SectionHeader as _};
use object::read::elf::{SectionTable, Sym as _};
use object::{Endianness, ReadCache, ReadRef as _, SectionIndex, elf};

type Header = elf::FileHeader64<Endianness>;
type Section = <Header as FileHeader>::SectionHeader;
type Symbol = <Header as FileHeader>::Sym;

/// A function that the compiler calls in each program with kernels, and that only a runtime has.
const MARK: &[u8] = b"\0__cudaRegisterFatBinaryEnd\0";
/// Functions that only the runtime of one release has.
const ONLY_IN: [(&str, &str); 2] = [
    ("cudaGetDeviceProperties_v2", "12"),
    ("cudaMemGetDefaultMemPool", "13"),
];
/// The size of a jump with a distance of 32 bits.
const JUMP: usize = 5;
/// The size of an entry of an [`Island`].
const ENTRY: usize = 16;
/// Beyond it, a jump cannot reach.
const FARTHEST: usize = 1 << 30;
/// The granularity of a search for free addresses.
const STEP: usize = 1 << 16;

/// The runtime in an object.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LinkedRuntime {
    functions: Vec<Function>,
    segments: Vec<Segment>,
    release: &'static str,
}

#[derive(Debug, PartialEq, Eq)]
struct Function {
    name: String,
    /// The place before relocation.
    place: u64,
    /// What the file has there.
    start: [u8; JUMP],
}

/// A range of the object with executable code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    place: u64,
    size: u64,
    offset: u64,
    flags: u32,
}

/// Why a linked runtime cannot be replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Obstacle {
    Small(String),
    Changed(String),
    Release,
    OtherRelease(&'static str),
    Memory,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Small(name) => write!(f, "its function `{name}` is too small for a jump"),
            Self::Changed(name) => {
                write!(f, "its function `{name}` differs in memory from the file")
            }
            Self::Release => f.write_str("it is neither of CUDA 12 nor of CUDA 13"),
            Self::OtherRelease(release) => write!(
                f,
                "it is of CUDA {release}, and the simulated one is not; use `--cuda {release}`"
            ),
            Self::Memory => f.write_str("the memory around it cannot be used"),
        }
    }
}

impl LinkedRuntime {
    /// The runtime that is linked into a file; none if there is none or the file is not readable.
    pub(super) fn of(path: &Path) -> Option<Result<Self, Obstacle>> {
        let file = ReadCache::new(File::open(path).ok()?);
        let object = Object::parse(&file)?;
        // Reading all names of PyTorch's libraries, which need the runtime, would take long.
        if object.needs_runtime().ok()? {
            return None;
        }
        let (symbols, names) = object.symbols(elf::SHT_SYMTAB)?;
        if !contains(names, MARK) {
            return None;
        }
        let defined = object.functions(symbols, names);
        let exported = object
            .symbols(elf::SHT_DYNSYM)
            .map(|(symbols, names)| object.functions(symbols, names))
            .unwrap_or_default();
        let known = of_runtime();
        // An object that exports them is a runtime, or replaces it. Functions without a size only
        // forward to a library that the object opens itself, as in the plugin of JAX 0.12.
        let inside: Vec<(&str, Range<u64>)> = defined
            .into_iter()
            .filter(|(name, code)| {
                known.contains(name) && !exported.contains_key(name) && !code.is_empty()
            })
            .collect();
        (!inside.is_empty()).then(|| object.linked_runtime(symbols, inside))
    }

    /// Makes each function of the object, which is loaded at this base, continue in the library
    /// `runtime`.
    ///
    /// # Safety
    /// The object is mapped, and none of its code has run.
    pub(super) unsafe fn redirect(&self, base: usize, runtime: &Path) -> Result<(), Obstacle> {
        let library = CString::new(runtime.as_os_str().as_bytes()).map_err(|_| Obstacle::Memory)?;
        let library: &'static _ = Box::leak(library.into_boxed_c_str());
        let targets: Vec<Target> = self
            .functions
            .iter()
            .filter_map(|function| {
                Some(Target {
                    address: AtomicPtr::default(),
                    name: CString::new(function.name.as_str()).ok()?.into_raw(),
                    runtime: library.as_ptr(),
                })
            })
            .collect();
        let places: Vec<usize> = self
            .functions
            .iter()
            .map(|function| base.wrapping_add(function.place as usize))
            .collect();
        let island = island(&places, Box::leak(targets.into_boxed_slice()))?;
        for segment in &self.segments {
            // SAFETY: as the caller promises.
            unsafe { segment.protect(base, libc::PROT_READ | libc::PROT_WRITE)? };
        }
        let mut written = Ok(());
        for (index, (function, &place)) in self.functions.iter().zip(&places).enumerate() {
            let entry = island + index * ENTRY;
            let distance = entry.wrapping_sub(place + JUMP) as i32;
            let jump: Vec<u8> = [0xe9].into_iter().chain(distance.to_le_bytes()).collect();
            let code = ptr::with_exposed_provenance_mut::<u8>(place);
            // SAFETY: the function is in a segment of the object, which is writable here, and has
            // this many bytes.
            unsafe {
                if code.cast::<[u8; JUMP]>().read_unaligned() != function.start {
                    written = Err(Obstacle::Changed(function.name.clone()));
                    break;
                }
                ptr::copy_nonoverlapping(jump.as_ptr(), code, JUMP);
            }
        }
        for segment in &self.segments {
            // SAFETY: as the caller promises.
            unsafe { segment.protect(base, protection(segment.flags))? };
        }
        written
    }
}

/// A file of code for x86-64.
struct Object<'a> {
    file: &'a ReadCache<File>,
    endian: Endianness,
    header: &'a Header,
    sections: SectionTable<'a, Header, &'a ReadCache<File>>,
}

impl<'a> Object<'a> {
    fn parse(file: &'a ReadCache<File>) -> Option<Self> {
        let header = Header::parse(file).ok()?;
        let endian = header.endian().ok()?;
        (header.e_machine(endian) == elf::EM_X86_64).then_some(())?;
        Some(Self {
            file,
            endian,
            header,
            sections: header.sections(endian, file).ok()?,
        })
    }

    /// Returns whether the dynamic linker loads the runtime for it.
    fn needs_runtime(&self) -> object::read::Result<bool> {
        let Some((entries, link)) = self.sections.dynamic(self.endian, self.file)? else {
            return Ok(false);
        };
        let strings = self.sections.strings(self.endian, self.file, link)?;
        Ok(entries.iter().any(|entry| {
            entry.tag32(self.endian) == Some(elf::DT_NEEDED)
                && u32::try_from(entry.d_val(self.endian)).is_ok_and(|place| {
                    strings
                        .get(place)
                        .is_ok_and(|name| name.starts_with(b"libcudart"))
                })
        }))
    }

    /// A symbol table and the names of its symbols.
    fn symbols(&self, kind: u32) -> Option<(&'a [Symbol], &'a [u8])> {
        let is_kind = |section: &&Section| section.sh_type(self.endian) == kind;
        let section = self.sections.iter().find(is_kind)?;
        let link = SectionIndex(section.sh_link(self.endian) as usize);
        let names = self.sections.section(link).ok()?;
        Some((
            section.data_as_array(self.endian, self.file).ok()?,
            names.data(self.endian, self.file).ok()?,
        ))
    }

    /// The functions of a symbol table that the object defines.
    fn functions(&self, symbols: &[Symbol], names: &'a [u8]) -> BTreeMap<&'a str, Range<u64>> {
        let name = |symbol: &Symbol| {
            let rest = names.get(symbol.st_name(self.endian) as usize..)?;
            let len = rest.iter().position(|byte| *byte == 0)?;
            std::str::from_utf8(&rest[..len]).ok()
        };
        let range = |symbol: &Symbol| {
            let place = symbol.st_value(self.endian);
            place..place.saturating_add(symbol.st_size(self.endian))
        };
        symbols
            .iter()
            .filter(|symbol| {
                symbol.st_type() == elf::STT_FUNC && symbol.st_shndx(self.endian) != elf::SHN_UNDEF
            })
            .filter_map(|symbol| Some((name(symbol)?, range(symbol))))
            .collect()
    }

    fn segments(&self) -> object::read::Result<Vec<Segment>> {
        let parts = self.header.program_headers(self.endian, self.file)?.iter();
        let executable = parts.filter(|part| {
            part.p_type(self.endian) == elf::PT_LOAD && part.p_flags(self.endian) & elf::PF_X != 0
        });
        Ok(executable
            .map(|part| Segment {
                place: part.p_vaddr(self.endian),
                size: part.p_filesz(self.endian),
                offset: part.p_offset(self.endian),
                flags: part.p_flags(self.endian),
            })
            .collect())
    }

    /// The runtime with these functions, if each has space for a jump.
    fn linked_runtime(
        &self,
        symbols: &[Symbol],
        inside: Vec<(&str, Range<u64>)>,
    ) -> Result<LinkedRuntime, Obstacle> {
        let segments = self.segments().unwrap_or_default();
        let starts: BTreeSet<u64> = symbols
            .iter()
            .filter(|symbol| symbol.st_type() == elf::STT_FUNC)
            .map(|symbol| symbol.st_value(self.endian))
            .collect();
        let start = |code: &Range<u64>| -> Option<[u8; JUMP]> {
            let segment = segments.iter().find(|part| part.has(code.start))?;
            // The space up to the next function is padding.
            let next = starts.range(code.start + 1..).next();
            if next.unwrap_or(&code.end) - code.start < JUMP as u64 {
                return None;
            }
            let offset = segment.offset + (code.start - segment.place);
            self.file
                .read_bytes_at(offset, JUMP as u64)
                .ok()?
                .try_into()
                .ok()
        };
        let release = ONLY_IN
            .iter()
            .find(|(only, _)| inside.iter().any(|(name, _)| name == only))
            .map(|(_, release)| *release)
            .ok_or(Obstacle::Release)?;
        let functions = inside.into_iter().map(|(name, code)| {
            Ok(Function {
                name: name.to_owned(),
                place: code.start,
                start: start(&code).ok_or_else(|| Obstacle::Small(name.to_owned()))?,
            })
        });
        Ok(LinkedRuntime {
            functions: functions.collect::<Result<_, _>>()?,
            segments: segments.clone(),
            release,
        })
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    // SAFETY: both slices are readable.
    let found = unsafe {
        libc::memmem(
            text.as_ptr().cast(),
            text.len(),
            part.as_ptr().cast(),
            part.len(),
        )
    };
    !found.is_null()
}

const fn protection(flags: u32) -> c_int {
    let mut protection = libc::PROT_EXEC;
    if flags & elf::PF_R != 0 {
        protection |= libc::PROT_READ;
    }
    if flags & elf::PF_W != 0 {
        protection |= libc::PROT_WRITE;
    }
    protection
}

impl Segment {
    const fn has(&self, place: u64) -> bool {
        place >= self.place && place + JUMP as u64 <= self.place + self.size
    }

    /// Changes the protection of the pages of the segment.
    ///
    /// # Safety
    /// The object is mapped at this base, and does not run.
    unsafe fn protect(&self, base: usize, protection: c_int) -> Result<(), Obstacle> {
        let page = page_size();
        let first = base.wrapping_add(self.place as usize);
        let start = first / page * page;
        let len = (first + self.size as usize).next_multiple_of(page) - start;
        // SAFETY: the pages belong to the segment.
        let changed = unsafe {
            libc::mprotect(ptr::with_exposed_provenance_mut(start), len, protection) == 0
        };
        changed.then_some(()).ok_or(Obstacle::Memory)
    }
}

fn page_size() -> usize {
    // SAFETY: the call only returns a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// A function of the simulated runtime, and its address after the first call.
#[repr(C)]
struct Target {
    address: AtomicPtr<c_void>,
    name: *const c_char,
    runtime: *const c_char,
}

/// Writes an entry for each target within the reach of all places, and returns the first.
fn island(places: &[usize], targets: &'static [Target]) -> Result<usize, Obstacle> {
    let mut code = Vec::new();
    let continues = targets.len() * ENTRY;
    for (index, target) in targets.iter().enumerate() {
        code.extend([0x49, 0xbb]); // movabs r11, …
        code.extend(ptr::from_ref(target).expose_provenance().to_le_bytes());
        code.extend([0xff, 0x25]); // jmp [rip + …]
        code.extend(((continues - (index + 1) * ENTRY) as u32).to_le_bytes());
    }
    code.extend((continue_in_runtime as *const () as usize).to_le_bytes());
    let (Some(&first), Some(&last)) = (places.iter().min(), places.iter().max()) else {
        return Err(Obstacle::Memory);
    };
    let size = code.len().next_multiple_of(page_size());
    let start = free_addresses(first, last, size).ok_or(Obstacle::Memory)?;
    // SAFETY: the mapping is new and has at least this size.
    let is_executable = unsafe {
        ptr::copy_nonoverlapping(code.as_ptr(), start.cast(), code.len());
        libc::mprotect(start, size, libc::PROT_READ | libc::PROT_EXEC) == 0
    };
    is_executable
        .then(|| start.expose_provenance())
        .ok_or(Obstacle::Memory)
}

/// Maps memory within the reach of both places. Below the object first, because the heap of a
/// program grows above it.
fn free_addresses(first: usize, last: usize, size: usize) -> Option<*mut c_void> {
    let below = (0..FARTHEST / STEP).filter_map(|step| {
        (first / STEP * STEP)
            .checked_sub(size.next_multiple_of(STEP) + step * STEP)
            .filter(|start| *start >= STEP && last - start < FARTHEST)
    });
    let above = (1..FARTHEST / STEP)
        .map(|step| last.next_multiple_of(STEP) + step * STEP)
        .filter(|start| start + size - first < FARTHEST);
    below.chain(above).find_map(|start| {
        // SAFETY: the mapping replaces no other.
        let mapped = unsafe {
            libc::mmap(
                ptr::with_exposed_provenance_mut(start),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
                -1,
                0,
            )
        };
        (mapped != libc::MAP_FAILED).then_some(mapped)
    })
}

/// The end of every entry of an island, with its [`Target`] in `r11` and the arguments of the
/// function in place.
#[unsafe(naked)]
extern "C" fn continue_in_runtime() {
    std::arch::naked_asm!(
        "cmp qword ptr [r11], 0",
        "jne 2f",
        "push rbp",
        "mov rbp, rsp",
        "sub rsp, 192",
        "mov [rsp], rdi",
        "mov [rsp + 8], rsi",
        "mov [rsp + 16], rdx",
        "mov [rsp + 24], rcx",
        "mov [rsp + 32], r8",
        "mov [rsp + 40], r9",
        "mov [rsp + 48], r11",
        "movups [rsp + 64], xmm0",
        "movups [rsp + 80], xmm1",
        "movups [rsp + 96], xmm2",
        "movups [rsp + 112], xmm3",
        "movups [rsp + 128], xmm4",
        "movups [rsp + 144], xmm5",
        "movups [rsp + 160], xmm6",
        "movups [rsp + 176], xmm7",
        "mov rdi, r11",
        "call {find}",
        "mov rdi, [rsp]",
        "mov rsi, [rsp + 8]",
        "mov rdx, [rsp + 16]",
        "mov rcx, [rsp + 24]",
        "mov r8, [rsp + 32]",
        "mov r9, [rsp + 40]",
        "mov r11, [rsp + 48]",
        "movups xmm0, [rsp + 64]",
        "movups xmm1, [rsp + 80]",
        "movups xmm2, [rsp + 96]",
        "movups xmm3, [rsp + 112]",
        "movups xmm4, [rsp + 128]",
        "movups xmm5, [rsp + 144]",
        "movups xmm6, [rsp + 160]",
        "movups xmm7, [rsp + 176]",
        "leave",
        "2: jmp [r11]",
        find = sym find,
    );
}

/// Finds the function in the program's namespace. No lock of ours is held, because the dynamic
/// linker's lock may belong to a thread that waits for it here.
extern "C" fn find(target: &Target) {
    // SAFETY: the name is a string that lives forever.
    let library = unsafe { libc::dlmopen(libc::LM_ID_BASE, target.runtime, libc::RTLD_NOW) };
    if library.is_null() {
        end_for_linked_runtime("the library of the simulated CUDA runtime cannot be loaded");
    }
    // SAFETY: the name is a string that lives forever, and the library stays loaded.
    let address = unsafe { libc::dlsym(library, target.name) };
    if address.is_null() {
        // SAFETY: as above.
        let name = unsafe { CStr::from_ptr(target.name) }.to_string_lossy();
        end_for_linked_runtime(&format!(
            "the simulated CUDA runtime has no function `{name}`"
        ));
    }
    target.address.store(address, Ordering::Release);
}

/// The file of the program. If a command starts the dynamic linker with the program as an argument,
/// that linker is the executed file, and only the mappings show the program.
fn program() -> PathBuf {
    // SAFETY: the call only reads what the kernel and the dynamic linker wrote.
    let headers = unsafe { libc::getauxval(libc::AT_PHDR) };
    let maps = fs::read("/proc/self/maps").unwrap_or_default();
    mapped_file(&maps, headers).unwrap_or_else(|| PathBuf::from("/proc/self/exe"))
}

/// Returns the file that is mapped at an address.
fn mapped_file(maps: &[u8], address: u64) -> Option<PathBuf> {
    let line = maps.split(|byte| *byte == b'\n').find(|line| {
        let range = line.split(|byte| *byte == b' ').next().unwrap_or_default();
        let ends = str::from_utf8(range).ok().and_then(|it| it.split_once('-'));
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        ends.and_then(|(start, end)| Some(number(start)?..number(end)?))
            .is_some_and(|range| range.contains(&address))
    })?;
    let path = line.iter().position(|byte| *byte == b'/')?;
    Some(PathBuf::from(OsStr::from_bytes(&line[path..])))
}

/// Replaces the runtime that is linked into an object by the library of its release, or ends the
/// process with the reason.
///
/// # Safety
/// The object is mapped at this base, and none of its code has run.
pub(super) unsafe fn replace<'a>(
    path: &OsStr,
    base: usize,
    library: impl Fn(&str) -> Option<&'a Path>,
) {
    let path = if path.is_empty() {
        program()
    } else {
        PathBuf::from(path)
    };
    let Some(linked) = LinkedRuntime::of(&path) else {
        return;
    };
    let replaced = linked.and_then(|linked| {
        let other = Obstacle::OtherRelease(linked.release);
        let library = library(linked.release).ok_or(other)?;
        // SAFETY: as the caller promises.
        unsafe { linked.redirect(base, library) }
    });
    if let Err(obstacle) = replaced {
        let path = path.canonicalize().unwrap_or(path);
        end_for_linked_runtime(&format!(
            "the CUDA runtime that is linked into `{}` cannot be replaced: {obstacle}",
            path.display()
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_the_file_that_contains_its_headers() {
        let maps = b"00400000-00401000 r--p 00000000 fe:00 7      /home/a b/prog\n\
            7f0000000000-7f0000001000 r--p 00000000 fe:00 8  /lib64/ld-linux-x86-64.so.2\n\
            7ffc00000000-7ffc00001000 rw-p 00000000 00:00 0  [stack]\n";
        let file = |address| mapped_file(maps, address);
        assert_eq!(file(0x40_0040), Some(PathBuf::from("/home/a b/prog")));
        assert_eq!([0, 0x7ffc_0000_0000].map(file), [None, None]);
        assert_eq!(
            program(),
            fs::canonicalize("/proc/self/exe").unwrap_or_default()
        );
    }
}
