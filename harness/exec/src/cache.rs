//! The folder with the doubles for one PyTorch, the extensions beside it, and one core library: made once, kept in the user's cache, checked each time it is used.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher as _};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use harness_base::temporary;
use serde::{Deserialize, Serialize};

use crate::doubles::doubles;
use crate::imports::{self, Imports, ImportsError};

/// To be raised when other files are written for the same inputs.
const FORMAT: u32 = 2;
/// What is in the folder, and what it was made from.
const MANIFEST: &str = "manifest.json";
/// Folders that nobody used for so long are removed when another one is made.
const KEPT: Duration = Duration::from_secs(30 * 24 * 3600);

/// The libraries that stand in for NVIDIA's.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Libraries {
    pub folder: PathBuf,
    /// The file name of the core library.
    pub core: String,
    /// The file names of the doubles.
    pub doubles: Vec<String>,
}

impl Libraries {
    /// The core library.
    #[must_use]
    pub fn core(&self) -> PathBuf {
        self.folder.join(&self.core)
    }
}

/// Why there are no doubles.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum CacheError {
    /// Name another folder by HARNESS_CACHE.
    #[error("the libraries of the simulated GPU cannot be kept in `{}`: {source}", folder.display())]
    Unwritable {
        folder: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Set HARNESS_CACHE or HOME.
    #[error("there is no place for the libraries of the simulated GPU: neither HARNESS_CACHE nor XDG_CACHE_HOME nor HOME is set")]
    Nowhere,
    /// Name another folder by HARNESS_CACHE.
    #[error("the libraries of the simulated GPU cannot be kept in `{}`: the dynamic linker takes no path with a colon or a space", .0.display())]
    Separator(PathBuf),
    /// Install PyTorch again.
    #[error(transparent)]
    Imports(#[from] ImportsError),
    /// Install a PyTorch that uses CUDA's shared libraries.
    #[error("the PyTorch in `{}` needs no `libcudart.so`: CUDA is linked into it, and cannot be replaced", .0.display())]
    StaticCuda(PathBuf),
}

/// The user's cache folder of this program.
///
/// # Errors
/// That none is known.
pub fn folder(variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, CacheError> {
    let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let own = path("HARNESS_CACHE");
    let of_user = || path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache"))).map(|cache| cache.join("harness"));
    let folder = own.or_else(of_user).ok_or(CacheError::Nowhere)?;
    let separates = |byte: &u8| byte.is_ascii_whitespace() || *byte == b':';
    let folder = std::path::absolute(&folder).map_err(|source| CacheError::Unwritable { folder, source })?;
    if folder.as_os_str().as_encoded_bytes().iter().any(separates) { Err(CacheError::Separator(folder)) } else { Ok(folder) }
}

/// A file that decides what the doubles are.
#[derive(Clone, Serialize, Deserialize, PartialEq, Eq)]
struct Input {
    name: String,
    size: u64,
    /// The mark of the linker, or where there is none the time of the last change in nanoseconds.
    build: String,
}

/// A file that was made.
#[derive(Serialize, Deserialize, PartialEq, Eq)]
struct Made {
    name: String,
    size: u64,
    hash: u64,
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    format: u32,
    inputs: Vec<Input>,
    core: String,
    doubles: Vec<Made>,
    core_made: Made,
}

/// The libraries for the PyTorch in this folder and extensions of other packages, with this core library: those that are in the cache folder, or new ones.
///
/// # Errors
/// That they cannot be made or kept.
pub fn libraries(cache: &Path, torch: &Path, extensions: &[PathBuf], core: &Path) -> Result<Libraries, CacheError> {
    let objects = imports::shared_objects(torch)?;
    let mut inputs = objects.iter().map(PathBuf::as_path).chain([core]).map(Input::of).collect::<Result<Vec<_>, _>>()?;
    // An extension that cannot be read is the business of the program that loads it.
    inputs.extend(extensions.iter().filter_map(|extension| Input::of(extension).ok()));
    let all = cache.join("doubles");
    let folder = all.join(key(&inputs));
    if let Some(found) = Libraries::open(&folder, &inputs) {
        return Ok(found);
    }
    let unwritable = |source| CacheError::Unwritable { folder: all.clone(), source };
    fs::create_dir_all(&all).map_err(unwritable)?;
    // One process makes them; others that wait for it find them made.
    let maker = File::open(&all).map_err(unwritable)?;
    let _alone = maker.lock();
    if let Some(found) = Libraries::open(&folder, &inputs) {
        return Ok(found);
    }
    let mut imports = Imports::of(&objects)?;
    if imports.soname("libcudart").is_none() {
        return Err(CacheError::StaticCuda(torch.to_owned()));
    }
    imports.add_extensions(extensions);
    let exports = imports::exports(core)?;
    temporary::tidy(&all);
    forget_old(&all);
    let made = make(&all, &folder, &inputs, core, &imports, &exports);
    // Where the file system has no locks, another process may have been faster, and its folder is as good.
    Libraries::open(&folder, &inputs).ok_or_else(|| unwritable(made.err().unwrap_or_else(|| io::ErrorKind::InvalidData.into())))
}

impl Libraries {
    /// Those in a folder, if it is whole and was made from these files.
    fn open(folder: &Path, inputs: &[Input]) -> Option<Self> {
        let manifest = folder.join(MANIFEST);
        let read: Manifest = serde_json::from_slice(&fs::read(&manifest).ok()?).ok()?;
        let is_whole = |made: &Made| fs::read(folder.join(&made.name)).is_ok_and(|bytes| Made::new(&made.name, &bytes) == *made);
        if read.format != FORMAT || read.inputs != inputs || !read.doubles.iter().chain([&read.core_made]).all(is_whole) {
            return None;
        }
        // When it was used last. A cache that cannot be written to is not cleared either.
        let _ = File::options().append(true).open(&manifest).and_then(|file| file.set_modified(SystemTime::now()));
        let doubles = read.doubles.into_iter().map(|made| made.name).collect();
        Some(Self { folder: folder.to_owned(), core: read.core, doubles })
    }
}

impl Input {
    fn of(path: &Path) -> Result<Self, CacheError> {
        let unreadable = |source| ImportsError::Unreadable { path: path.to_owned(), source };
        let metadata = path.metadata().map_err(unreadable)?;
        let changed = || {
            let changed = metadata.modified().ok()?.duration_since(SystemTime::UNIX_EPOCH).ok()?;
            Some(changed.as_nanos().to_string())
        };
        let build = imports::build_id(path)?.or_else(changed).unwrap_or_default();
        Ok(Self { name: file_name(path), size: metadata.len(), build })
    }
}

impl Made {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let mut hasher = DefaultHasher::new();
        hasher.write(bytes);
        Self { name: name.to_owned(), size: bytes.len() as u64, hash: hasher.finish() }
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The name of the folder. What it was really made from stands in the manifest.
fn key(inputs: &[Input]) -> String {
    let mut hasher = DefaultHasher::new();
    hasher.write_u32(FORMAT);
    for Input { name, size, build } in inputs {
        hasher.write(format!("{name}\0{size}\0{build}\0").as_bytes());
    }
    format!("{:016x}", hasher.finish())
}

/// Writes all files into a new folder, which then gets its name. The caller is the only one who does.
fn make(all: &Path, folder: &Path, inputs: &[Input], core: &Path, imports: &Imports, exports: &BTreeSet<String>) -> io::Result<()> {
    let (new, _held) = temporary::folder_in(all)?;
    let write = |name: &str, bytes: &[u8]| fs::write(new.path().join(name), bytes).map(|()| Made::new(name, bytes));
    // A copy, so that a running program keeps the one that it was started with.
    let core_name = file_name(core);
    let core_made = write(&core_name, &fs::read(core)?)?;
    let doubles =
        doubles(imports, &core_name, exports).iter().map(|double| write(&double.soname, &double.bytes)).collect::<io::Result<_>>()?;
    let manifest = Manifest { format: FORMAT, inputs: inputs.to_vec(), core: core_name, doubles, core_made };
    fs::write(new.path().join(MANIFEST), serde_json::to_vec_pretty(&manifest)?)?;
    // A damaged one makes room.
    if folder.exists() {
        fs::rename(folder, all.join(format!("{}damaged-{}", temporary::PREFIX, std::process::id())))?;
    }
    fs::rename(new.path(), folder)?;
    // It has another name now, and its owner has nothing left to remove.
    let _ = new.keep();
    temporary::tidy(all);
    Ok(())
}

/// Removes what was not used for long. What cannot be removed stays.
fn forget_old(all: &Path) {
    for entry in fs::read_dir(all).into_iter().flatten().flatten() {
        let used = entry.path().join(MANIFEST).metadata().and_then(|manifest| manifest.modified());
        if used.is_ok_and(|used| used.elapsed().is_ok_and(|age| age > KEPT)) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests;
