//! [`Imports`]: what the shared objects of a PyTorch import from NVIDIA's libraries, by library, with version nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use harness_base::shared_object::{self, SharedObjectError};
use object::elf;
use object::read::elf::{Dyn as _, FileHeader as _, SectionTable, Sym as _};
use object::{Endianness, ReadCache, ReadRef};

use crate::thin::{Kind, Symbol};

type Header = elf::FileHeader64<Endianness>;

/// How the names of a library's functions begin.
struct Family {
    /// The library's file name without `.so` and version.
    stem: &'static str,
    prefixes: &'static [&'static str],
}

/// NVIDIA's libraries. Of prefixes the longest decides; `cu` alone is the driver's.
const FAMILIES: [Family; 19] = [
    Family { stem: "libcuda", prefixes: &["cu"] },
    Family { stem: "libcudart", prefixes: &["cuda", "__cuda"] },
    Family { stem: "libcublas", prefixes: &["cublas"] },
    Family { stem: "libcublasLt", prefixes: &["cublasLt"] },
    Family { stem: "libcudnn", prefixes: &["cudnn"] },
    Family { stem: "libcudss", prefixes: &["cudss"] },
    Family { stem: "libcufft", prefixes: &["cufft"] },
    Family { stem: "libcufile", prefixes: &["cuFile"] },
    Family { stem: "libcupti", prefixes: &["cupti"] },
    Family { stem: "libcurand", prefixes: &["curand"] },
    Family { stem: "libcusolver", prefixes: &["cusolver"] },
    Family { stem: "libcusolverMg", prefixes: &["cusolverMg"] },
    Family { stem: "libcusparse", prefixes: &["cusparse"] },
    Family { stem: "libcusparseLt", prefixes: &["cusparseLt"] },
    Family { stem: "libnccl", prefixes: &["nccl", "pnccl"] },
    Family { stem: "libnvidia-ml", prefixes: &["nvml"] },
    Family { stem: "libnvJitLink", prefixes: &["nvJitLink", "__nvJitLink"] },
    Family { stem: "libnvrtc", prefixes: &["nvrtc"] },
    Family { stem: "libnvshmem_host", prefixes: &["nvshmem"] },
];

/// The library of this file name, if it is NVIDIA's: `libcudart` of `libcudart.so.13`. Copies under other names, as
/// `libcudart.8774224f.so.13` of torchvision, are somebody else's.
fn family_of(file: &str) -> Option<&'static str> {
    let (stem, version) = file.split_once(".so")?;
    let is_version = version.is_empty() || version.starts_with('.');
    FAMILIES.iter().map(|family| family.stem).find(|library| is_version && *library == stem)
}

/// The library that a function's name tells.
fn family_of_symbol(name: &str) -> Option<&'static str> {
    let prefixes = FAMILIES.iter().flat_map(|family| family.prefixes.iter().map(|prefix| (*prefix, family.stem)));
    let longest = prefixes.filter(|(prefix, _)| name.starts_with(prefix)).max_by_key(|(prefix, _)| prefix.len())?;
    let is_driver = longest.1 != "libcuda" || name[2..].starts_with(|first: char| first.is_ascii_uppercase());
    is_driver.then_some(longest.1)
}

/// What is imported from one library.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Library {
    /// Its version nodes that are referred to.
    pub nodes: BTreeSet<String>,
    /// What is imported, each name once.
    pub symbols: BTreeMap<String, Symbol>,
}

/// What is imported, by the SONAMEs of NVIDIA's libraries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Imports {
    /// Also libraries that are only named as needed.
    pub libraries: BTreeMap<String, Library>,
}

/// Why the imports of a file are not known.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum ImportsError {
    /// Check the rights of the file, or install PyTorch again.
    #[error("`{}` cannot be read: {source}", path.display())]
    Unreadable {
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Install PyTorch again: the file is damaged, or of another kind of machine.
    #[error("`{}` is not a shared library for x86-64: {reason}", path.display())]
    NotALibrary {
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

impl Imports {
    /// What these files import.
    ///
    /// # Errors
    /// That one of them is not a shared library for x86-64.
    pub fn of(files: &[PathBuf]) -> Result<Self, ImportsError> {
        Self::with(files, &[])
    }

    /// The same where these libraries of NVIDIA's are loaded in any case, unless a file needs another release of one.
    ///
    /// # Errors
    /// That one of the files is not a shared library for x86-64.
    pub fn with(files: &[PathBuf], loaded: &[&str]) -> Result<Self, ImportsError> {
        let objects = files.iter().map(|file| Undefined::of(file)).collect::<Result<Vec<_>, _>>()?;
        let mut imports = Self::default();
        for needed in objects.iter().flat_map(|object| &object.needed).filter(|needed| family_of(needed).is_some()) {
            imports.libraries.entry(needed.clone()).or_default();
        }
        for soname in loaded {
            if family_of(soname).is_some_and(|family| imports.soname(family).is_none()) {
                imports.libraries.entry((*soname).to_owned()).or_default();
            }
        }
        for (symbol, file) in objects.into_iter().flat_map(|object| object.symbols) {
            imports.add(symbol, file);
        }
        Ok(imports)
    }

    /// Adds what extensions of other packages import. Those that cannot be read, and those for another release of a library than is needed already, are left out:
    /// they cannot be loaded beside it.
    pub fn add_extensions(&mut self, files: &[PathBuf]) {
        for object in files.iter().filter_map(|file| Undefined::of(file).ok()) {
            let needed: Vec<&String> = object.needed.iter().filter(|needed| family_of(needed).is_some()).collect();
            let is_other_release =
                |needed: &&String| family_of(needed).and_then(|family| self.soname(family)).is_some_and(|known| known != needed.as_str());
            if needed.iter().any(is_other_release) {
                continue;
            }
            for needed in needed {
                self.libraries.entry(needed.clone()).or_default();
            }
            for (symbol, file) in object.symbols {
                self.add(symbol, file);
            }
        }
    }

    /// A symbol that no version ties to a file goes by its name to a library that is needed.
    fn add(&mut self, symbol: Symbol, file: Option<String>) {
        let by_name = || {
            let family = family_of_symbol(&symbol.name)?;
            self.libraries.keys().find(|soname| family_of(soname) == Some(family)).cloned()
        };
        let Some(soname) = file.or_else(by_name).filter(|file| family_of(file).is_some()) else { return };
        let library = self.libraries.entry(soname).or_default();
        library.nodes.extend(symbol.node.clone());
        // A versioned reference is the better one to keep.
        let known = library.symbols.entry(symbol.name.clone()).or_insert_with(|| symbol.clone());
        if known.node.is_none() {
            *known = symbol;
        }
    }

    /// The SONAME of a library by its name without version, as in `libcudart`.
    #[must_use]
    pub fn soname(&self, library: &str) -> Option<&str> {
        self.libraries.keys().map(String::as_str).find(|soname| family_of(soname) == Some(library))
    }
}

/// What one file leaves to others.
struct Undefined {
    needed: Vec<String>,
    /// With the file that its version names.
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
        let mut undefined = Self { needed: needed(endian, &sections, data)?, symbols: Vec::new() };
        for (index, symbol) in symbols.enumerate().filter(|(_, symbol)| symbol.is_undefined(endian)) {
            let name = text(symbol.name(endian, symbols.strings())?);
            let version = versions.version(versions.version_index(endian, index))?;
            let file = version.and_then(|version| version.file()).map(text);
            if file.is_none() && family_of_symbol(&name).is_none() {
                continue;
            }
            let node = version.map(|version| text(version.name()));
            let kind = if symbol.st_type() == elf::STT_OBJECT { Kind::Variable } else { Kind::Function };
            undefined.symbols.push((Symbol { name, node, kind }, file));
        }
        Ok(undefined)
    }
}

/// The names that a shared library exports.
///
/// # Errors
/// That the file is not a shared library for x86-64.
pub fn exports(path: &Path) -> Result<BTreeSet<String>, ImportsError> {
    shared_object::exports(path).map_err(|error| match error {
        SharedObjectError::Unreadable(source) => ImportsError::Unreadable { path: path.to_owned(), source },
        SharedObjectError::NotALibrary(error) => not_a_library(path, &error),
        error @ SharedObjectError::ThirtyTwoBits => ImportsError::NotALibrary { path: path.to_owned(), reason: error.to_string() },
    })
}

/// The mark that a linker gave this file, in hexadecimal digits; `None` where there is none.
///
/// # Errors
/// That the file is not a shared library for x86-64.
pub fn build_id(path: &Path) -> Result<Option<String>, ImportsError> {
    let file = open(path)?;
    let read = || -> object::read::Result<Option<String>> {
        let (endian, sections) = sections(&file)?;
        for section in sections.iter() {
            let Some(mut notes) = object::read::elf::SectionHeader::notes(section, endian, &file)? else { continue };
            while let Some(note) = notes.next()? {
                if note.name() == elf::ELF_NOTE_GNU && note.n_type(endian) == elf::NT_GNU_BUILD_ID {
                    return Ok(Some(note.desc().iter().map(|byte| format!("{byte:02x}")).collect()));
                }
            }
        }
        Ok(None)
    };
    read().map_err(|error| not_a_library(path, &error))
}

/// The shared objects of a PyTorch that can import names of NVIDIA, by name.
///
/// # Errors
/// That the folder cannot be read.
pub fn shared_objects(torch: &Path) -> Result<Vec<PathBuf>, ImportsError> {
    let mut found = Vec::new();
    let functorch = torch.with_file_name("functorch");
    for (folder, begin) in [(torch.join("lib"), "lib"), (torch.to_owned(), "_C"), (functorch, "_C")] {
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries.map_err(|source| ImportsError::Unreadable { path: folder.clone(), source })?,
        };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let is_library = |name: &String| name.starts_with(begin) && is_shared_object(name);
        found.extend(names.filter(is_library).map(|name| folder.join(name)));
    }
    found.sort();
    Ok(found)
}

/// Whether a file of this name is one.
pub(crate) fn is_shared_object(name: &str) -> bool {
    name.ends_with(".so") || name.contains(".so.")
}

/// Whether a file is a shared object for x86-64 that needs one of NVIDIA's libraries, and none of these itself. Only its headers and its list of what it needs are read.
pub(crate) fn needs_nvidia(path: &Path) -> bool {
    let is_one = path.file_name().and_then(|name| name.to_str()).is_none_or(|name| family_of(name).is_some());
    let needs = || -> Option<bool> {
        let file = open(path).ok()?;
        let header = Header::parse(&file).ok()?;
        let (endian, sections) = sections(&file).ok()?;
        let is_here = header.e_machine(endian) == elf::EM_X86_64;
        Some(is_here && needed(endian, &sections, &file).ok()?.iter().any(|needed| family_of(needed).is_some()))
    };
    !is_one && needs().unwrap_or(false)
}

fn open(path: &Path) -> Result<ReadCache<File>, ImportsError> {
    File::open(path).map(ReadCache::new).map_err(|source| ImportsError::Unreadable { path: path.to_owned(), source })
}

fn not_a_library(path: &Path, error: &object::read::Error) -> ImportsError {
    ImportsError::NotALibrary { path: path.to_owned(), reason: error.to_string() }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn sections<'data, R: ReadRef<'data>>(data: R) -> object::read::Result<(Endianness, SectionTable<'data, Header, R>)> {
    let header = Header::parse(data)?;
    let endian = header.endian()?;
    Ok((endian, header.sections(endian, data)?))
}

fn needed<'data>(
    endian: Endianness,
    sections: &SectionTable<'data, Header, &'data ReadCache<File>>,
    data: &'data ReadCache<File>,
) -> object::read::Result<Vec<String>> {
    let Some((entries, link)) = sections.dynamic(endian, data)? else { return Ok(Vec::new()) };
    let strings = sections.strings(endian, data, link)?;
    let needed = entries.iter().filter(|entry| entry.tag32(endian) == Some(elf::DT_NEEDED));
    Ok(needed.filter_map(|entry| strings.get(entry.val32(endian)?).ok()).map(text).collect())
}

#[cfg(test)]
mod tests;
