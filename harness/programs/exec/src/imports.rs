//! [`Imports`] lists what the shared objects of a PyTorch import from NVIDIA's libraries, by
//! library, with version nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use harness_base::shared_object::{self, SharedObjectError};
use object::read::elf::{Dyn as _, FileHeader as _, ProgramHeader as _, SectionTable, Sym as _};
use object::{Endianness, ReadCache, ReadRef, elf};

use crate::stub_library::{Kind, Symbol};

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
            needed: needed(endian, &sections, data)?,
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
                Kind::Variable
            } else {
                Kind::Function
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

/// Returns whether a file is a shared object for x86-64 that needs one of NVIDIA's libraries and is
/// not itself one of them. Reads only its headers and its list of needed libraries.
pub(crate) fn needs_nvidia(path: &Path) -> bool {
    let needs = || -> Option<bool> {
        let file = open(path).ok()?;
        let header = Header::parse(&file).ok()?;
        let (endian, sections) = sections(&file).ok()?;
        let is_here = header.e_machine(endian) == elf::EM_X86_64;
        Some(
            is_here
                && needed(endian, &sections, &file)
                    .ok()?
                    .iter()
                    .any(|needed| library_of_file(needed).is_some()),
        )
    };
    path.file_name().is_some_and(|name| name.to_str().is_some())
        && !is_nvidia_library(path)
        && needs().unwrap_or(false)
}

pub(crate) fn is_nvidia_library(path: &Path) -> bool {
    path.file_name()
        .and_then(|name| library_of_file(name.to_str()?))
        .is_some()
}

/// Returns whether the GNU C library's dynamic linker starts this program for x86-64.
pub(crate) fn is_linked_dynamically(program: &Path) -> bool {
    let linker = || -> Option<bool> {
        let file = open(program).ok()?;
        let header = Header::parse(&file).ok()?;
        let endian = header.endian().ok()?;
        let parts = header.program_headers(endian, &file).ok()?;
        let linker = parts
            .iter()
            .find(|part| part.p_type(endian) == elf::PT_INTERP)?
            .data(endian, &file)
            .ok()?;
        Some(text(linker).contains("ld-linux-x86-64"))
    };
    linker().unwrap_or(false)
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

fn needed<'data>(
    endian: Endianness,
    sections: &SectionTable<'data, Header, &'data ReadCache<File>>,
    data: &'data ReadCache<File>,
) -> object::read::Result<Vec<String>> {
    let Some((entries, link)) = sections.dynamic(endian, data)? else {
        return Ok(Vec::new());
    };
    let strings = sections.strings(endian, data, link)?;
    let needed = entries
        .iter()
        .filter(|entry| entry.tag32(endian) == Some(elf::DT_NEEDED));
    Ok(needed
        .filter_map(|entry| strings.get(entry.val32(endian)?).ok())
        .map(text)
        .collect())
}

#[cfg(test)]
mod tests;
