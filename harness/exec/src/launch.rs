//! Starts a program with stub libraries in place of NVIDIA's, and keeps the files that its processes write.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::Libraries;
pub use crate::guardian::RunFolder;
use crate::process::{self, End};
use harness_gpu_settings::ledger::{LEDGER, Ledger};
use harness_gpu_settings::settings::{LIBRARIES, RUN, SETTINGS, Settings, Values};

/// File name of the core library.
pub const CORE: &str = "libharness_simulated_gpu.so";
/// Path of the core library, if it is not next to the program.
pub const CORE_VARIABLE: &str = "HARNESS_SIMULATED_GPU_LIBRARY";
/// Makes the hook record the call stack of each OutOfMemoryError.
pub(crate) const PLACES: &str = "HARNESS_GPU_OOMS";
/// Makes the hook sample the bytes that torch has allocated.
const SAMPLES: &str = "HARNESS_GPU_SAMPLES";
/// File name of the library that limits programs on a real GPU.
pub const LIMITER: &str = "libharness_limits.so";
/// Path of that library, if it is not next to the program.
pub const LIMITER_VARIABLE: &str = "HARNESS_LIMITS_LIBRARY";
/// Makes the hook write memory snapshots.
const SNAPSHOT: &str = "HARNESS_GPU_SNAPSHOT";
const HOOK: &str = include_str!("hook.py");
/// Imported by the hook for `--values small`.
const SMALL_VALUES: &str = include_str!("small_values.py");
/// The first GNU C library with a usable auditing interface. In earlier versions audited calls are slow and some programs crash.
const AUDITING_LIBC: (u32, u32) = (2, 35);
/// The longest path that the dynamic linker accepts in LD_AUDIT: `SECURE_NAME_LIMIT` of the GNU C library, without the final NUL. It silently ignores
/// longer ones.
const LONGEST_PATH: usize = 254;
/// Names the library that the hook must find loaded in each Python process.
pub(crate) const EXPECTED: &str = "HARNESS_GPU_EXPECTED";
/// The file that the hook writes if it does not find that library.
const NOT_LOADED: &str = "not-loaded";
/// Variables with the allocator's settings: from PyTorch 2.9 on, and before.
const ALLOCATOR_SETTINGS: [&str; 2] = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"];
/// Caches of compiled kernels. Code compiled on a simulated GPU must never be loaded on a real one.
const KERNEL_CACHES: [&str; 4] = ["PYTORCH_KERNEL_CACHE_PATH", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"];
/// Subfolders of `nvidia` in which PyTorch opens libraries by path.
const PACKAGES: [&str; 14] = [
    "cublas",
    "cuda_cupti",
    "cuda_nvrtc",
    "cuda_runtime",
    "cudnn",
    "cufft",
    "cufile",
    "curand",
    "cusolver",
    "cusparse",
    "cusparselt",
    "nccl",
    "nvjitlink",
    "nvshmem",
];

/// How the stub libraries replace NVIDIA's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interposition {
    /// The core library redirects the search for libraries (LD_AUDIT).
    Audit,
    /// All stub libraries are loaded into each process (LD_PRELOAD).
    Preload,
}

impl Interposition {
    /// Returns the method that works with this version of the GNU C library.
    #[must_use]
    pub fn of_libc(version: (u32, u32)) -> Self {
        if version >= AUDITING_LIBC { Self::Audit } else { Self::Preload }
    }
}

/// A program and the machine that it will see.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// The program and its arguments.
    pub command: &'a [OsString],
    pub settings: &'a Settings,
    pub libraries: &'a Libraries,
    pub interposition: Interposition,
    /// Settings of PyTorch's allocator.
    pub alloc_conf: Option<&'a str>,
    /// `true` if the program's processes write memory snapshots.
    pub snapshot: bool,
    /// The ledger of devices shared with other programs. Without it, the run gets its own.
    pub ledger: Option<&'a Path>,
}

/// Why the program was not run.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error(
        "the simulated GPU's library {CORE} is missing: it is not next to this program, in `deps` there, or in `../lib/harness`. `ci/install` and the \
         wheel of `ci/wheel` install it, and `cargo build --release` builds it in target/release/deps. Set {CORE_VARIABLE} if it is elsewhere"
    )]
    NoCore,
    #[error(
        "the library {LIMITER}, which limits programs, is missing: it is not next to this program, in `deps` there, or in `../lib/harness`. \
         `ci/install` and the wheel of `ci/wheel` install it, and `cargo build --release` builds it in target/release/deps. Set {LIMITER_VARIABLE} \
         if it is elsewhere"
    )]
    NoLimiter,
    #[error("the library that limits programs cannot be loaded from `{}`: the dynamic linker accepts no path with a colon, a space or `$`, and none longer than {LONGEST_PATH} bytes; move or copy the library", .0.display())]
    UnloadablePath(PathBuf),
    #[error(
        "the program's GNU C library has version {}.{}; limiting programs on a real GPU requires {}.{} or later",
        .0.0, .0.1, AUDITING_LIBC.0, AUDITING_LIBC.1
    )]
    OldLibc((u32, u32)),
    #[error(
        "the dynamic linker did not load the simulated GPU's library, or the one that limits programs, into the program, which was stopped; \
         see its messages above, and set HARNESS_CACHE to a folder with a short and simple path"
    )]
    NotLoaded,
    #[error("cannot create the run's temporary folder: {0}; free space there or set TMPDIR")]
    Folder(io::Error),
    #[error("cannot start `{program}`: {source}")]
    Start { program: String, source: io::Error },
}

/// Returns the core library: from the variable, or next to this program.
pub fn core_library() -> Result<PathBuf, LaunchError> {
    beside_program(CORE, CORE_VARIABLE).ok_or(LaunchError::NoCore)
}

/// Returns the library that limits programs on a real GPU: from the variable, or next to this program.
pub fn limiter() -> Result<PathBuf, LaunchError> {
    let library = beside_program(LIMITER, LIMITER_VARIABLE).ok_or(LaunchError::NoLimiter)?;
    if is_loadable(&library) { Ok(library) } else { Err(LaunchError::UnloadablePath(library)) }
}

/// Returns whether the dynamic linker loads a library with this path. It splits lists at colons and spaces, expands `$`, and ignores long paths.
pub(crate) fn is_loadable(path: &Path) -> bool {
    let path = path.as_os_str().as_encoded_bytes();
    path.len() <= LONGEST_PATH && !path.iter().any(|byte| byte.is_ascii_whitespace() || b":$".contains(byte))
}

/// Finds one of our libraries: from its variable, or next to this program.
pub(crate) fn beside_program(file: &str, variable: &str) -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(variable).filter(|named| !named.is_empty()) {
        return Some(PathBuf::from(named)).filter(|named| named.is_file());
    }
    let program = std::env::current_exe().ok()?;
    let folder = program.parent()?;
    // First cargo's `deps`, because building only the program renews only that; then next to the program; then installed.
    let places = ["deps", "", "../lib/harness"];
    places.iter().map(|place| folder.join(place).join(file)).find(|path| path.is_file())
}

/// A program that has ended, and the folder with its processes' files. Dropping it deletes the folder.
#[derive(Debug)]
pub struct Ended {
    pub end: End,
    folder: RunFolder,
}

impl Ended {
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// A program ready to start.
#[derive(Debug)]
pub struct Prepared {
    pub command: Command,
    folder: RunFolder,
}

impl Prepared {
    /// Creates and fills the folder of a run, and makes the command with these variables.
    pub(crate) fn new(
        command: &[OsString],
        fill: impl FnOnce(&Path) -> io::Result<()>,
        environment: impl FnOnce(&Path) -> Vec<(&'static str, OsString)>,
    ) -> Result<Self, LaunchError> {
        let folder = RunFolder::new().map_err(LaunchError::Folder)?;
        fill(folder.path()).map_err(LaunchError::Folder)?;
        let nothing = || LaunchError::Start { program: String::new(), source: io::ErrorKind::NotFound.into() };
        let (program, arguments) = command.split_first().ok_or_else(nothing)?;
        let mut command = Command::new(program);
        command.args(arguments).envs(environment(folder.path()));
        Ok(Self { command, folder })
    }

    /// Runs the program with this process's standard streams. If `is_reported`, its processes record data for a timeline.
    pub(crate) fn run(mut self, is_reported: bool) -> Result<Ended, LaunchError> {
        if is_reported {
            self.command.envs([(PLACES, "1"), (SAMPLES, "1")]);
        }
        let end = process::run(&mut self.command).map_err(|source| self.start_error(source))?;
        self.ended(end)
    }

    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Records the end of the program. Fails if the hook found that a Python process ran without our library.
    pub fn ended(self, end: End) -> Result<Ended, LaunchError> {
        let ended = Ended { end, folder: self.folder };
        if ended.folder().join(NOT_LOADED).exists() { Err(LaunchError::NotLoaded) } else { Ok(ended) }
    }

    /// Returns the error for a program that cannot be started.
    #[must_use]
    pub fn start_error(&self, source: io::Error) -> LaunchError {
        LaunchError::Start { program: self.command.get_program().to_string_lossy().into_owned(), source }
    }
}

impl Launch<'_> {
    /// Runs the program with this process's standard streams. If `is_reported`, its processes record data for a timeline.
    pub fn run(&self, is_reported: bool) -> Result<Ended, LaunchError> {
        self.prepare()?.run(is_reported)
    }

    /// Creates the folder of a run and the command that runs the program in it.
    pub fn prepare(&self) -> Result<Prepared, LaunchError> {
        Prepared::new(self.command, |run| self.fill(run), |run| self.environment(run, |name| std::env::var_os(name)))
    }

    /// Writes the files that the program needs into the folder of the run.
    fn fill(&self, run: &Path) -> io::Result<()> {
        for cache in KERNEL_CACHES {
            fs::create_dir_all(kernel_cache(run, cache))?;
        }
        if self.ledger.is_none() {
            Ledger::create(&own_ledger(run))?;
        }
        let hook = write_hook(run)?;
        if self.settings.values == Values::Small {
            fs::write(hook.join("small_values.py"), SMALL_VALUES)?;
        }
        if self.interposition == Interposition::Preload {
            let release = format!("cu{}", self.settings.cuda);
            for package in PACKAGES.into_iter().chain([release.as_str()]) {
                let package = hook.join("nvidia").join(package);
                fs::create_dir_all(&package)?;
                symlink(&self.libraries.folder, package.join("lib"))?;
            }
        }
        Ok(())
    }

    /// Returns the variables to set for the program. `inherited` returns the value it would otherwise inherit.
    fn environment(&self, run: &Path, inherited: impl Fn(&str) -> Option<OsString>) -> Vec<(&'static str, OsString)> {
        let libraries = &self.libraries.folder;
        let mut set: Vec<(&'static str, OsString)> = vec![
            (SETTINGS, self.settings.to_string().into()),
            (LIBRARIES, libraries.into()),
            (LEDGER, self.ledger.map_or_else(|| own_ledger(run), Path::to_owned).into()),
            ("TRITON_LIBCUDA_PATH", libraries.into()),
            (EXPECTED, self.libraries.core.clone().into()),
        ];
        set.push(match self.interposition {
            Interposition::Audit => loaded("LD_AUDIT", self.libraries.core().into(), &inherited),
            Interposition::Preload => {
                let stubs = self.libraries.stubs.iter().map(|stub| libraries.join(stub).into_os_string());
                loaded("LD_PRELOAD", joined(stubs), &inherited)
            }
        });
        set.extend(KERNEL_CACHES.map(|cache| (cache, kernel_cache(run, cache).into())));
        set.extend(of_torch(run, self.alloc_conf, self.snapshot, &inherited));
        set
    }
}

/// Writes the Python hook into the folder of a run and returns the hook's folder.
pub(crate) fn write_hook(run: &Path) -> io::Result<PathBuf> {
    let hook = hook_folder(run);
    fs::create_dir(&hook)?;
    fs::write(hook.join("sitecustomize.py"), HOOK)?;
    Ok(hook)
}

/// Appends a library to those that the user's environment loads.
fn loaded(name: &'static str, added: OsString, inherited: &impl Fn(&str) -> Option<OsString>) -> (&'static str, OsString) {
    (name, joined([inherited(name).unwrap_or_default(), added]))
}

/// Returns the variables for torch and the hook.
pub(crate) fn of_torch(
    run: &Path,
    alloc_conf: Option<&str>,
    snapshot: bool,
    inherited: &impl Fn(&str) -> Option<OsString>,
) -> Vec<(&'static str, OsString)> {
    let hook = joined([hook_folder(run).into(), inherited("PYTHONPATH").unwrap_or_default()]);
    let mut set: Vec<(&'static str, OsString)> = vec![(RUN, run.into()), ("PYTHONPATH", hook)];
    set.extend(alloc_conf.into_iter().flat_map(|conf| ALLOCATOR_SETTINGS.map(|name| (name, conf.into()))));
    set.extend(snapshot.then(|| (SNAPSHOT, "1".into())));
    set
}

fn hook_folder(run: &Path) -> PathBuf {
    run.join("python")
}

/// Returns the ledger of a run that shares its devices with no other.
pub(crate) fn own_ledger(run: &Path) -> PathBuf {
    run.join("ledger")
}

fn kernel_cache(run: &Path, variable: &str) -> PathBuf {
    run.join("caches").join(variable.to_ascii_lowercase())
}

/// Joins paths with colons. Skips empty ones, which would name the current folder.
pub(crate) fn joined(paths: impl IntoIterator<Item = OsString>) -> OsString {
    let paths: Vec<OsString> = paths.into_iter().filter(|path| !path.is_empty()).collect();
    paths.join(OsStr::new(":"))
}

#[cfg(test)]
mod tests;
