//! [`Imports`] lists what the shared objects of a program import from NVIDIA's libraries, by
//! library, with version nodes. A CUDA release has libraries that programs open by name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use harness_base::shared_object::{self, SharedObjectError};
use harness_gpu_settings::settings::Cuda;
use memchr::memmem;
use object::read::elf::{
    Dyn as _, FileHeader as _, ProgramHeader as _, SectionHeader as _, SectionTable, Sym as _,
};
use object::{Endianness, ReadCache, ReadRef, elf};

use crate::stub_library::{Symbol, SymbolKind};

type Header = elf::FileHeader64<Endianness>;

/// NVIDIA's libraries: the file name without `.so` and version, the prefixes of the functions, and
/// the subfolder of `nvidia` in which PyTorch opens the library by path. The longest matching
/// prefix decides; `cu` alone belongs to the driver.
const NVIDIA_LIBRARIES: [(&str, &[&str], &str); 20] = [
    ("libcuda", &["cu"], ""),
    ("libcudart", &["cuda", "__cuda"], "cuda_runtime"),
    ("libcublas", &["cublas"], "cublas"),
    ("libcublasLt", &["cublasLt"], ""),
    ("libcudnn", &["cudnn"], "cudnn"),
    ("libcudss", &["cudss"], ""),
    ("libcufft", &["cufft"], "cufft"),
    ("libcufile", &["cuFile"], "cufile"),
    ("libcupti", &["cupti"], "cuda_cupti"),
    ("libcurand", &["curand"], "curand"),
    ("libcusolver", &["cusolver"], "cusolver"),
    ("libcusolverMg", &["cusolverMg"], ""),
    ("libcusparse", &["cusparse"], "cusparse"),
    ("libcusparseLt", &["cusparseLt"], "cusparselt"),
    ("libnccl", &["nccl", "pnccl"], "nccl"),
    ("libnvidia-ml", &["nvml"], ""),
    ("libnvJitLink", &["nvJitLink", "__nvJitLink"], "nvjitlink"),
    ("libnvToolsExt", &["nvtx"], "nvtx"),
    ("libnvrtc", &["nvrtc", "__nvrtc"], "cuda_nvrtc"),
    ("libnvshmem_host", &["nvshmem"], "nvshmem"),
];

/// The version in the SONAME of each library that programs open by name, under CUDA 12 and 13.
const RELEASES: [(&str, [&str; 2]); 12] = [
    ("libcuda", ["1", "1"]),
    ("libcudart", ["12", "13"]),
    ("libcublas", ["12", "13"]),
    ("libcublasLt", ["12", "13"]),
    ("libcudnn", ["9", "9"]),
    ("libcufft", ["11", "12"]),
    ("libcupti", ["12", "13"]),
    ("libcurand", ["10", "10"]),
    ("libcusolver", ["11", "12"]),
    ("libcusparse", ["12", "12"]),
    ("libnccl", ["2", "2"]),
    ("libnvidia-ml", ["1", "1"]),
];

/// Returns the SONAMEs of a CUDA release that programs open by name.
fn sonames(release: Cuda) -> impl Iterator<Item = String> {
    RELEASES
        .iter()
        .map(move |(stem, versions)| format!("{stem}.so.{}", versions[release as usize]))
}

/// Returns the CUDA release that alone has a library with this SONAME.
fn release_of(soname: &str) -> Option<Cuda> {
    let mut releases = Cuda::ALL
        .iter()
        .filter(|release| sonames(**release).any(|known| known == soname));
    let release = *releases.next()?;
    releases.next().is_none().then_some(release)
}

/// The folders of NVIDIA's packages that have the CUDA runtime of a release.
const FOLDERS: [(&str, Cuda); 2] = [
    ("/nvidia/cuda_runtime/lib", Cuda::V12),
    ("/nvidia/cu13/lib", Cuda::V13),
];

/// Returns the CUDA releases whose libraries these files need, or look for in the folders of
/// NVIDIA's packages, each with such a file. Skips unreadable files.
pub(crate) fn releases(files: &[PathBuf]) -> BTreeMap<Cuda, PathBuf> {
    let mut found = BTreeMap::new();
    for file in files {
        let (needed, folders) = linked(file).unwrap_or_default();
        let of_folders = FOLDERS
            .iter()
            .filter(|(name, _)| folders.iter().any(|list| list.contains(name)))
            .map(|(_, release)| *release);
        let of_needed = needed.iter().filter_map(|soname| release_of(soname));
        for release in of_needed.chain(of_folders) {
            found.entry(release).or_insert_with(|| file.clone());
        }
    }
    found
}

/// Returns the NVIDIA library with this file name, such as `libcudart` for `libcudart.so.13`.
/// Bundled copies under other names, such as torchvision's `libnvjpeg.36e11081.so.13`, do not
/// match.
pub(crate) fn library_of_file(file: &str) -> Option<&'static str> {
    let (stem, version) = file.split_once(".so")?;
    let is_version = version.is_empty() || version.starts_with('.');
    NVIDIA_LIBRARIES
        .iter()
        .map(|(known, ..)| *known)
        .find(|known| is_version && *known == stem)
}

/// Returns the version, such as `13`, of a copy of the CUDA runtime that a wheel bundles under a
/// name such as `libcudart.8774224f.so.13`.
pub(crate) fn version_of_copy(file: &str) -> Option<&str> {
    let (mark, version) = file.strip_prefix("libcudart")?.split_once(".so.")?;
    mark.starts_with(['.', '-']).then_some(version)
}

pub(crate) fn library_of_symbol(name: &str) -> Option<&'static str> {
    let prefixes = NVIDIA_LIBRARIES
        .iter()
        .flat_map(|(stem, prefixes, _)| prefixes.iter().map(|prefix| (*prefix, *stem)));
    let longest = prefixes
        .filter(|(prefix, _)| name.starts_with(prefix))
        .max_by_key(|(prefix, _)| prefix.len())?;
    let is_driver =
        longest.1 != "libcuda" || name[2..].starts_with(|first: char| first.is_ascii_uppercase());
    is_driver.then_some(longest.1)
}

/// The subfolders of `nvidia` in which PyTorch opens libraries by path.
pub(crate) fn packages() -> impl Iterator<Item = &'static str> {
    NVIDIA_LIBRARIES
        .iter()
        .map(|(.., package)| *package)
        .filter(|package| !package.is_empty())
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Library {
    /// The version nodes that are referenced.
    pub nodes: BTreeSet<String>,
    pub symbols: BTreeMap<String, Symbol>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Imports {
    /// Includes libraries that are needed but provide no symbol.
    pub libraries: BTreeMap<String, Library>,
    /// File names of bundled copies of the CUDA runtime.
    pub copies: BTreeSet<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum ImportsError {
    #[error("cannot read `{}`: {source}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    /// The file is damaged or made for another architecture.
    #[error("`{}` is not a shared library for x86-64: {reason}", path.display())]
    NotALibrary { path: PathBuf, reason: String },
}

impl Imports {
    /// Reads the imports of these files. The libraries in `loaded` are always included, unless a
    /// file needs another version of one.
    pub fn of(files: &[PathBuf], loaded: &[&str]) -> Result<Self, ImportsError> {
        let objects = files
            .iter()
            .map(|file| Undefined::of(file))
            .collect::<Result<Vec<_>, _>>()?;
        let mut imports = Self::default();
        for needed in objects.iter().flat_map(|object| &object.needed) {
            imports.add_library(needed);
        }
        for soname in loaded {
            if library_of_file(soname).is_some_and(|library| imports.soname(library).is_none()) {
                imports.add_library(soname);
            }
        }
        for (symbol, file) in objects.into_iter().flat_map(|object| object.symbols) {
            imports.add(symbol, file);
        }
        Ok(imports)
    }

    /// Adds the libraries of a CUDA release that programs open by name, unless a file needs another
    /// version of one.
    pub fn add_release(&mut self, release: Cuda) {
        for soname in sonames(release) {
            if library_of_file(&soname).is_some_and(|library| self.soname(library).is_none()) {
                self.add_library(&soname);
            }
        }
    }

    fn add_library(&mut self, soname: &str) {
        if library_of_file(soname).is_some() {
            self.libraries.entry(soname.to_owned()).or_default();
        }
    }

    /// Adds the imports of other packages' extensions. Skips unreadable files, and files that need
    /// a different version of a library: they cannot be loaded in the same process.
    pub fn add_extensions(&mut self, files: &[PathBuf]) {
        let names = files.iter().filter_map(|file| file.file_name()?.to_str());
        self.copies.extend(
            names
                .filter(|name| version_of_copy(name).is_some())
                .map(str::to_owned),
        );
        for object in files.iter().filter_map(|file| Undefined::of(file).ok()) {
            let is_other_release = |needed: &String| {
                library_of_file(needed)
                    .and_then(|library| self.soname(library))
                    .is_some_and(|known| known != needed.as_str())
            };
            if object.needed.iter().any(is_other_release) {
                continue;
            }
            object
                .needed
                .iter()
                .for_each(|needed| self.add_library(needed));
            for (symbol, file) in object.symbols {
                self.add(symbol, file);
            }
        }
        for name in files.iter().flat_map(|file| names_in(file)) {
            let symbol = Symbol {
                name,
                node: None,
                kind: SymbolKind::Function,
            };
            self.add(symbol, None);
        }
    }

    /// Assigns a symbol to the file of its version, or else, by its name, to a needed library.
    fn add(&mut self, symbol: Symbol, file: Option<String>) {
        let by_name = || {
            let library = library_of_symbol(&symbol.name)?;
            self.libraries
                .keys()
                .find(|soname| library_of_file(soname) == Some(library))
                .cloned()
        };
        let Some(soname) = file
            .or_else(by_name)
            .filter(|file| library_of_file(file).is_some())
        else {
            return;
        };
        let library = self.libraries.entry(soname).or_default();
        library.nodes.extend(symbol.node.clone());
        // Prefers a versioned reference.
        let known = library
            .symbols
            .entry(symbol.name.clone())
            .or_insert_with(|| symbol.clone());
        if known.node.is_none() {
            *known = symbol;
        }
    }

    pub fn soname(&self, library: &str) -> Option<&str> {
        self.libraries
            .keys()
            .map(String::as_str)
            .find(|soname| library_of_file(soname) == Some(library))
    }
}

struct Undefined {
    needed: Vec<String>,
    /// Each with the file that its version refers to.
    symbols: Vec<(Symbol, Option<String>)>,
}

impl Undefined {
    fn of(path: &Path) -> Result<Self, ImportsError> {
        let file = open(path)?;
        Self::read(&file).map_err(|error| not_a_library(path, &error))
    }

    fn read(data: &ReadCache<File>) -> object::read::Result<Self> {
        let (endian, sections) = sections(data)?;
        let symbols = sections.symbols(endian, data, elf::SHT_DYNSYM)?;
        let versions = sections.versions(endian, data)?.unwrap_or_default();
        let mut undefined = Self {
            needed: dynamic_texts(elf::DT_NEEDED, endian, &sections, data)?,
            symbols: Vec::new(),
        };
        for (index, symbol) in symbols
            .enumerate()
            .filter(|(_, symbol)| symbol.is_undefined(endian))
        {
            let name = text(symbol.name(endian, symbols.strings())?);
            let version = versions.version(versions.version_index(endian, index))?;
            let file = version.and_then(|version| version.file()).map(text);
            if file.is_none() && library_of_symbol(&name).is_none() {
                continue;
            }
            let node = version.map(|version| text(version.name()));
            let kind = if symbol.st_type() == elf::STT_OBJECT {
                SymbolKind::Variable
            } else {
                SymbolKind::Function
            };
            undefined.symbols.push((Symbol { name, node, kind }, file));
        }
        Ok(undefined)
    }
}

pub fn exports(path: &Path) -> Result<BTreeSet<String>, ImportsError> {
    shared_object::exports(path).map_err(|error| match error {
        SharedObjectError::Unreadable(source) => ImportsError::Unreadable {
            path: path.to_owned(),
            source,
        },
        SharedObjectError::NotALibrary(error) => not_a_library(path, &error),
        error @ SharedObjectError::ThirtyTwoBits => ImportsError::NotALibrary {
            path: path.to_owned(),
            reason: error.to_string(),
        },
    })
}

/// Returns the text in a section of a library; `None` if another file is there, or the section is
/// missing.
pub(crate) fn section(path: &Path, name: &str) -> Option<String> {
    let file = open(path).ok()?;
    let (endian, sections) = sections(&file).ok()?;
    let (_, section) = sections.section_by_name(endian, name.as_bytes())?;
    Some(text(section.data(endian, &file).ok()?))
}

/// Returns the linker's build ID in hexadecimal, if the file has one.
pub fn build_id(path: &Path) -> Result<Option<String>, ImportsError> {
    let file = open(path)?;
    let read = || -> object::read::Result<Option<String>> {
        let (endian, sections) = sections(&file)?;
        for section in sections.iter() {
            let Some(mut notes) = object::read::elf::SectionHeader::notes(section, endian, &file)?
            else {
                continue;
            };
            while let Some(note) = notes.next()? {
                if note.name() == elf::ELF_NOTE_GNU && note.n_type(endian) == elf::NT_GNU_BUILD_ID {
                    return Ok(Some(
                        note.desc()
                            .iter()
                            .map(|byte| format!("{byte:02x}"))
                            .collect(),
                    ));
                }
            }
        }
        Ok(None)
    };
    read().map_err(|error| not_a_library(path, &error))
}

/// Returns the shared objects of a PyTorch that can import names of NVIDIA, sorted by path.
pub fn shared_objects(torch: &Path) -> Result<Vec<PathBuf>, ImportsError> {
    let mut found = Vec::new();
    let functorch = torch.with_file_name("functorch");
    for (folder, begin) in [
        (torch.join("lib"), "lib"),
        (torch.to_owned(), "_C"),
        (functorch, "_C"),
    ] {
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries.map_err(|source| ImportsError::Unreadable {
                path: folder.clone(),
                source,
            })?,
        };
        let names = entries
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok());
        let is_library = |name: &String| name.starts_with(begin) && is_shared_object(name);
        found.extend(names.filter(is_library).map(|name| folder.join(name)));
    }
    found.sort();
    Ok(found)
}

pub(crate) fn is_shared_object(name: &str) -> bool {
    name.ends_with(".so") || name.contains(".so.")
}

/// Returns whether a file is a shared object for x86-64 that uses one of NVIDIA's libraries and is
/// not itself one of them: it needs the library, or contains the name of the driver's or the
/// runtime's file, which it opens later.
pub(crate) fn uses_nvidia(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_str().is_some())
        && !is_nvidia_library(path)
        && linked(path).is_some_and(|(needed, _)| {
            needed
                .iter()
                .any(|needed| library_of_file(needed).is_some())
                || opens_cuda(&constants(path))
        })
}

/// Beginnings of the names by which programs open the driver and the runtime.
const OPENED: [&[u8]; 2] = [b"libcuda.so", b"libcudart.so"];

fn opens_cuda(constants: &[Vec<u8>]) -> bool {
    let mut sections = constants.iter();
    sections.any(|section| {
        OPENED
            .iter()
            .any(|name| memmem::find(section, name).is_some())
    })
}

/// Returns the names of functions of NVIDIA's libraries among the constants of a file that opens
/// these libraries itself: it looks for the functions by name.
fn names_in(path: &Path) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let constants = constants(path);
    if !opens_cuda(&constants) {
        return names;
    }
    for section in constants {
        let texts = section.split(|byte| *byte == 0);
        let is_name = |text: &&[u8]| {
            (4..=MOST_NAME).contains(&text.len())
                && text
                    .iter()
                    .all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
        };
        let found = texts
            .filter(is_name)
            .filter_map(|text| std::str::from_utf8(text).ok())
            .filter(|name| library_of_symbol(name).is_some());
        names.extend(found.map(str::to_owned));
    }
    names
}

/// Longer texts are no names of functions.
const MOST_NAME: usize = 96;
/// The sections that compilers place texts in.
const CONSTANTS: &[u8] = b".rodata";

/// Returns the contents of a file's sections of constants, which can be large. Empty if it cannot
/// be read.
fn constants(path: &Path) -> Vec<Vec<u8>> {
    let Ok(file) = open(path) else {
        return Vec::new();
    };
    let Ok((endian, sections)) = sections(&file) else {
        return Vec::new();
    };
    let is_constant = |section: &&elf::SectionHeader64<Endianness>| {
        sections
            .section_name(endian, section)
            .is_ok_and(|name| name.starts_with(CONSTANTS))
    };
    let found = sections
        .iter()
        .filter(is_constant)
        .filter_map(|section| section.data(endian, &file).ok());
    found.map(<[u8]>::to_vec).collect()
}

/// Returns the SONAMEs that a file for x86-64 needs, and the folders that it names for them.
fn linked(path: &Path) -> Option<(Vec<String>, Vec<String>)> {
    let file = open(path).ok()?;
    let header = Header::parse(&file).ok()?;
    let (endian, sections) = sections(&file).ok()?;
    let texts = |tag: u32| dynamic_texts(tag, endian, &sections, &file).ok();
    if header.e_machine(endian) != elf::EM_X86_64 {
        return None;
    }
    let folders = [texts(elf::DT_RPATH)?, texts(elf::DT_RUNPATH)?].concat();
    Some((texts(elf::DT_NEEDED)?, folders))
}

/// Returns the libraries that a file needs, as far as they are in the folders that it names or in
/// the given ones.
pub(crate) fn linked_libraries(path: &Path, given: &[PathBuf]) -> Vec<PathBuf> {
    let Some((needed, folders)) = linked(path) else {
        return Vec::new();
    };
    let origin = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let origin = origin.parent().unwrap_or(Path::new("/")).to_string_lossy();
    let own = folders
        .iter()
        .flat_map(|list| list.split(':'))
        .map(|folder| {
            folder
                .replace("${ORIGIN}", &origin)
                .replace("$ORIGIN", &origin)
        });
    let folders: Vec<PathBuf> = own
        .map(PathBuf::from)
        .chain(given.iter().cloned())
        .collect();
    needed
        .iter()
        .filter(|soname| library_of_file(soname).is_none())
        .filter_map(|soname| {
            let places = folders.iter().map(|folder| folder.join(soname));
            places.into_iter().find(|place| place.is_file())
        })
        .collect()
}

pub(crate) fn is_nvidia_library(path: &Path) -> bool {
    path.file_name()
        .and_then(|name| library_of_file(name.to_str()?))
        .is_some()
}

/// How the system starts an executable file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Executable {
    /// By the GNU C library's dynamic linker for x86-64.
    Dynamic,
    Static,
    /// By the dynamic linker of another C library.
    OtherLinker(String),
    /// It is built for another processor.
    OtherMachine(String),
    /// It is no ELF file, or it cannot be read.
    Unknown,
}

/// The names of processors other than x86-64 in ELF files.
const MACHINES: [(u16, &str); 5] = [
    (elf::EM_386, "32-bit x86"),
    (elf::EM_AARCH64, "aarch64"),
    (elf::EM_ARM, "32-bit Arm"),
    (elf::EM_PPC64, "ppc64"),
    (elf::EM_RISCV, "RISC-V"),
];

impl Executable {
    pub(crate) fn of(program: &Path) -> Self {
        Self::read(program).unwrap_or(Self::Unknown)
    }

    fn read(program: &Path) -> Option<Self> {
        let file = open(program).ok()?;
        let start = file.read_bytes_at(0, 20).ok()?;
        let (magic, rest) = start.split_first_chunk::<4>()?;
        if *magic != elf::ELFMAG {
            return None;
        }
        // The byte order is that of the second byte; all known processors here but one have this.
        let machine = u16::from_le_bytes([rest[14], rest[15]]);
        if machine != elf::EM_X86_64 {
            let known = MACHINES.iter().find(|(number, _)| *number == machine);
            return Some(Self::OtherMachine(known.map_or_else(
                || format!("a processor with the ELF number {machine}"),
                |(_, name)| (*name).to_owned(),
            )));
        }
        let header = Header::parse(&file).ok()?;
        let endian = header.endian().ok()?;
        let parts = header.program_headers(endian, &file).ok()?;
        let interpreter = parts
            .iter()
            .find(|part| part.p_type(endian) == elf::PT_INTERP);
        let Some(interpreter) = interpreter else {
            return Some(Self::Static);
        };
        let linker = text(interpreter.data(endian, &file).ok()?);
        Some(if linker.contains("ld-linux-x86-64") {
            Self::Dynamic
        } else {
            Self::OtherLinker(linker.trim_end_matches('\0').to_owned())
        })
    }
}

/// Returns whether the GNU C library's dynamic linker starts this program for x86-64.
pub(crate) fn is_linked_dynamically(program: &Path) -> bool {
    Executable::of(program) == Executable::Dynamic
}

fn open(path: &Path) -> Result<ReadCache<File>, ImportsError> {
    regular_file(path)
        .and_then(|()| File::open(path))
        .map(ReadCache::new)
        .map_err(|source| ImportsError::Unreadable {
            path: path.to_owned(),
            source,
        })
}

/// Fails for anything but a regular file: opening a FIFO would block until something writes to it.
fn regular_file(path: &Path) -> io::Result<()> {
    if path.metadata()?.is_file() {
        Ok(())
    } else {
        Err(io::Error::other("it is not a regular file"))
    }
}

fn not_a_library(path: &Path, error: &object::read::Error) -> ImportsError {
    ImportsError::NotALibrary {
        path: path.to_owned(),
        reason: error.to_string(),
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn sections<'data, R: ReadRef<'data>>(
    data: R,
) -> object::read::Result<(Endianness, SectionTable<'data, Header, R>)> {
    let header = Header::parse(data)?;
    let endian = header.endian()?;
    Ok((endian, header.sections(endian, data)?))
}

fn dynamic_texts<'data>(
    tag: u32,
    endian: Endianness,
    sections: &SectionTable<'data, Header, &'data ReadCache<File>>,
    data: &'data ReadCache<File>,
) -> object::read::Result<Vec<String>> {
    let Some((entries, link)) = sections.dynamic(endian, data)? else {
        return Ok(Vec::new());
    };
    let strings = sections.strings(endian, data, link)?;
    let found = entries
        .iter()
        .filter(|entry| entry.tag32(endian) == Some(tag));
    Ok(found
        .filter_map(|entry| strings.get(entry.val32(endian)?).ok())
        .map(text)
        .collect())
}

#[cfg(test)]
mod tests;
