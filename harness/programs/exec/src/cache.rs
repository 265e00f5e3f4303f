//! The cache of stub libraries for the shared objects of one program and one core library. They are
//! written once, kept in the user's cache and checked at each use.

use std::fs::{self, DirBuilder, File};
use std::hash::{DefaultHasher, Hasher as _};
use std::io::{self, Write as _};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{collections::BTreeMap, ffi::OsString};

use harness_base::temporary;
use harness_gpu_settings::settings::Cuda;
use serde::{Deserialize, Serialize};

use crate::imports::{self, Imports, ImportsError};
use crate::own_libraries::{CORE, is_loadable};
use crate::stubs::stub_files;

/// Increase this when the same inputs produce different files.
const FORMAT: u32 = 8;
/// Lists the files in the folder and the inputs they were made from.
const MANIFEST: &str = "manifest.json";
const STUBS: &str = "stubs";
const OWN_FOLDER: &str = "set HARNESS_CACHE to a folder of your own with a short path";
/// A folder unused for this long is removed when a new one is written.
const KEPT: Duration = Duration::from_secs(30 * 24 * 3600);

/// The libraries that replace NVIDIA's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Libraries {
    pub folder: PathBuf,
    pub core: String,
    /// File names of the stub libraries.
    pub stubs: Vec<String>,
}

impl Libraries {
    pub fn core(&self) -> PathBuf {
        self.folder.join(&self.core)
    }
}

#[derive(Debug, thiserror::Error, miette::Diagnostic)]
pub enum CacheError {
    #[error("cannot write the simulated GPU's libraries to `{}`: {source}; set HARNESS_CACHE to \
         another folder", folder.display())]
    #[diagnostic(help("{OWN_FOLDER}"))]
    Unwritable { folder: PathBuf, source: io::Error },
    #[error(
        "no cache folder for the simulated GPU's libraries: set HARNESS_CACHE, XDG_CACHE_HOME or \
         HOME"
    )]
    #[diagnostic(help("{OWN_FOLDER}"))]
    Nowhere,
    #[error(
        "the simulated GPU's libraries cannot be loaded from `{}`: the path must contain no colon, \
         space or `$`, and have at most about 200 bytes; \
         set HARNESS_CACHE to another folder",
        .0.display()
    )]
    #[diagnostic(help("{OWN_FOLDER}"))]
    UnloadablePath(PathBuf),
    #[error("the cache of the simulated GPU's libraries is not safe: {0}")]
    #[diagnostic(help("{OWN_FOLDER}"))]
    Untrusted(String),
    #[error(transparent)]
    #[diagnostic(help("install torch again"))]
    Imports(#[from] ImportsError),
    #[error(
        "the PyTorch in `{}` does not load `libcudart.so`: CUDA is linked into it statically and \
         cannot be replaced; install a PyTorch that uses \
         CUDA's shared libraries",
        .0.display()
    )]
    #[diagnostic(help("install torch from PyPI, which uses CUDA's shared libraries"))]
    StaticCuda(PathBuf),
}

/// Returns the program's cache folder: HARNESS_CACHE, or `harness` in the user's cache folder.
pub fn folder(variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, CacheError> {
    let path = |name: &str| {
        variable(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let own = path("HARNESS_CACHE");
    let of_user = || {
        path("XDG_CACHE_HOME")
            .or_else(|| Some(path("HOME")?.join(".cache")))
            .map(|cache| cache.join("harness"))
    };
    let folder = own.or_else(of_user).ok_or(CacheError::Nowhere)?;
    let folder =
        std::path::absolute(&folder).map_err(|source| CacheError::Unwritable { folder, source })?;
    // The longest path below it, for a core library of a usual name.
    let library = folder.join(STUBS).join("0123456789abcdef").join(CORE);
    if is_loadable(&library) {
        Ok(folder)
    } else {
        Err(CacheError::UnloadablePath(folder))
    }
}

#[derive(Clone, Serialize, Deserialize, PartialEq, Eq)]
struct Input {
    name: String,
    size: u64,
    /// The linker's build ID; without one, the modification time in nanoseconds.
    build: String,
}

/// What the stub libraries are made from.
#[derive(PartialEq, Eq)]
struct Inputs {
    cuda: Cuda,
    files: Vec<Input>,
}

#[derive(Serialize, Deserialize, PartialEq, Eq)]
struct CachedFile {
    name: String,
    size: u64,
    hash: u64,
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    format: u32,
    cuda: Cuda,
    inputs: Vec<Input>,
    core: String,
    stubs: Vec<CachedFile>,
}

/// The shared objects that stub libraries are made for.
#[derive(Clone, Copy, Debug)]
pub struct Objects<'a> {
    /// The folder of a PyTorch that is built for this release.
    pub torch: Option<&'a Path>,
    /// The program's own files and those of other packages.
    pub others: &'a [PathBuf],
    pub cuda: Cuda,
}

/// Returns the libraries for these shared objects. Reuses the cached ones or writes new ones.
pub fn libraries(
    cache: &Path,
    shared_objects: Objects<'_>,
    core: &Path,
) -> Result<Libraries, CacheError> {
    let Objects {
        torch,
        others,
        cuda,
    } = shared_objects;
    let objects = torch.map_or_else(|| Ok(Vec::new()), imports::shared_objects)?;
    let mut inputs = objects
        .iter()
        .map(PathBuf::as_path)
        .chain([core])
        .map(Input::of)
        .collect::<Result<Vec<_>, _>>()?;
    // An unreadable file is skipped: the program that loads it reports the problem.
    inputs.extend(others.iter().filter_map(|other| Input::of(other).ok()));
    let inputs = &Inputs {
        cuda,
        files: inputs,
    };
    let all = cache.join(STUBS);
    let folder = all.join(inputs.key());
    let unwritable = |source| CacheError::Unwritable {
        folder: all.clone(),
        source,
    };
    let core_bytes = fs::read(core).map_err(|source| ImportsError::Unreadable {
        path: core.to_owned(),
        source,
    })?;
    create_private(&all).map_err(unwritable)?;
    trust(cache)?;
    trust(&all)?;
    if let Some(found) = Libraries::open(&folder, inputs, &core_bytes)? {
        return Ok(found);
    }
    // One process writes them; processes that wait for the lock then find them written.
    let maker = File::open(&all).map_err(unwritable)?;
    let _alone = maker.lock();
    if let Some(found) = Libraries::open(&folder, inputs, &core_bytes)? {
        return Ok(found);
    }
    let mut imports = Imports::of(&objects, &[])?;
    if let Some(torch) = torch.filter(|_| imports.soname("libcudart").is_none()) {
        return Err(CacheError::StaticCuda(torch.to_owned()));
    }
    imports.add_release(cuda);
    imports.add_extensions(others);
    let exports = imports::exports(core)?;
    temporary::tidy(&all);
    forget_old(&all);
    let written = write(
        &all,
        &folder,
        inputs,
        (&file_name(core), &core_bytes),
        stub_files(&imports, &file_name(core), &exports),
    );
    // On a file system without locks, another process may have been faster; its folder is
    // equivalent.
    let missing = || io::ErrorKind::InvalidData.into();
    Libraries::open(&folder, inputs, &core_bytes)?
        .ok_or_else(|| unwritable(written.err().unwrap_or_else(missing)))
}

/// Creates a folder that only this user can access, with its missing parents.
fn create_private(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// Refuses a file or folder that another user owns or can change: its code would run with this
/// user's rights. Root's files are trusted.
fn trust(path: &Path) -> Result<(), CacheError> {
    let found = path
        .symlink_metadata()
        .map_err(|source| CacheError::Unwritable {
            folder: path.to_owned(),
            source,
        })?;
    let found = if found.is_symlink() && is_own(found.uid()) {
        path.metadata()
    } else {
        Ok(found)
    };
    let found = found.map_err(|source| CacheError::Unwritable {
        folder: path.to_owned(),
        source,
    })?;
    let path = path.display();
    if !is_own(found.uid()) {
        let text = format!(
            "`{path}` belongs to user {}; set HARNESS_CACHE to a folder of your own",
            found.uid()
        );
        return Err(CacheError::Untrusted(text));
    }
    if found.mode() & 0o022 != 0 {
        return Err(CacheError::Untrusted(format!(
            "other users can write to `{path}`; remove it, or run `chmod -R go-w` on it if you \
             trust its contents"
        )));
    }
    Ok(())
}

fn is_own(user: u32) -> bool {
    user == 0 || user == nix::unistd::geteuid().as_raw()
}

impl Libraries {
    /// Opens a cached folder if it is complete and was made from these inputs and this core
    /// library.
    fn open(folder: &Path, inputs: &Inputs, core: &[u8]) -> Result<Option<Self>, CacheError> {
        let manifest = folder.join(MANIFEST);
        let Ok(bytes) = fs::read(&manifest) else {
            return Ok(None);
        };
        let Ok(Manifest {
            format,
            cuda,
            inputs: files,
            core: core_name,
            stubs,
        }) = serde_json::from_slice(&bytes)
        else {
            return Ok(None);
        };
        if format != FORMAT || *inputs != (Inputs { cuda, files }) {
            return Ok(None);
        }
        trust(folder)?;
        for name in stubs
            .iter()
            .map(|stub| stub.name.as_str())
            .chain([core_name.as_str(), MANIFEST])
        {
            let path = folder.join(name);
            if Path::new(name).components().count() != 1 || !path.is_file() {
                return Ok(None);
            }
            trust(&path)?;
        }
        let is_whole = |stub: &CachedFile| {
            fs::read(folder.join(&stub.name))
                .is_ok_and(|bytes| CachedFile::new(&stub.name, &bytes) == *stub)
        };
        if !stubs.iter().all(is_whole)
            || !fs::read(folder.join(&core_name)).is_ok_and(|bytes| bytes == core)
        {
            return Ok(None);
        }
        // Records the time of last use. A read-only cache is never cleaned up.
        let _ = File::options()
            .append(true)
            .open(&manifest)
            .and_then(|file| file.set_modified(SystemTime::now()));
        let stubs = stubs.into_iter().map(|stub| stub.name).collect();
        Ok(Some(Self {
            folder: folder.to_owned(),
            core: core_name,
            stubs,
        }))
    }
}

impl Input {
    fn of(path: &Path) -> Result<Self, CacheError> {
        let unreadable = |source| ImportsError::Unreadable {
            path: path.to_owned(),
            source,
        };
        let metadata = path.metadata().map_err(unreadable)?;
        let changed = || {
            let changed = metadata
                .modified()
                .ok()?
                .duration_since(SystemTime::UNIX_EPOCH)
                .ok()?;
            Some(changed.as_nanos().to_string())
        };
        let build = imports::build_id(path)?
            .or_else(changed)
            .unwrap_or_default();
        Ok(Self {
            name: file_name(path),
            size: metadata.len(),
            build,
        })
    }
}

impl CachedFile {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let mut hasher = DefaultHasher::new();
        hasher.write(bytes);
        Self {
            name: name.to_owned(),
            size: bytes.len() as u64,
            hash: hasher.finish(),
        }
    }
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

impl Inputs {
    /// Returns the folder's name. The manifest lists the exact inputs.
    fn key(&self) -> String {
        let mut hasher = DefaultHasher::new();
        hasher.write_u32(FORMAT);
        hasher.write(self.cuda.name().as_bytes());
        for Input { name, size, build } in &self.files {
            hasher.write(format!("{name}\0{size}\0{build}\0").as_bytes());
        }
        format!("{:016x}", hasher.finish())
    }
}

/// Writes all files into a new folder and renames it. The caller holds the lock. The core library
/// is copied, so a running program keeps the version that it was started with.
fn write(
    all: &Path,
    folder: &Path,
    inputs: &Inputs,
    (core, core_bytes): (&str, &[u8]),
    stubs: BTreeMap<String, Vec<u8>>,
) -> io::Result<()> {
    let (new, _held) = temporary::folder_in(all)?;
    // The folder becomes private before it contains a file.
    fs::set_permissions(new.path(), fs::Permissions::from_mode(0o700))?;
    let write = |name: &str, bytes: &[u8]| {
        File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(new.path().join(name))?
            .write_all(bytes)?;
        Ok(CachedFile::new(name, bytes))
    };
    write(core, core_bytes)?;
    let stubs = stubs
        .iter()
        .map(|(soname, bytes)| write(soname, bytes))
        .collect::<io::Result<_>>()?;
    let manifest = Manifest {
        format: FORMAT,
        cuda: inputs.cuda,
        inputs: inputs.files.clone(),
        core: core.to_owned(),
        stubs,
    };
    write(MANIFEST, &serde_json::to_vec_pretty(&manifest)?)?;
    // Moves a damaged folder away.
    if folder.exists() {
        fs::rename(
            folder,
            all.join(format!(
                "{}damaged-{}",
                temporary::PREFIX,
                std::process::id()
            )),
        )?;
    }
    fs::rename(new.path(), folder)?;
    // The folder was renamed, so the guard must not delete it.
    let _ = new.keep();
    temporary::tidy(all);
    Ok(())
}

/// Removes folders that were not used for a long time. Ignores errors.
fn forget_old(all: &Path) {
    for entry in fs::read_dir(all).into_iter().flatten().flatten() {
        let used = entry
            .path()
            .join(MANIFEST)
            .metadata()
            .and_then(|manifest| manifest.modified());
        if used.is_ok_and(|used| used.elapsed().is_ok_and(|age| age > KEPT)) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests;
