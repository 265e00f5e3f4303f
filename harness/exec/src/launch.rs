//! Starts a program with the doubles in front of NVIDIA's libraries, and keeps what its processes write while it runs.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use harness_gpu_settings::ledger::{LEDGER, Ledger};
use harness_gpu_settings::settings::{LIBRARIES, RUN, SETTINGS, Settings, Values};
use tempfile::TempDir;

use crate::cache::Libraries;
use crate::process::{self, End};

/// The file name of the core library.
pub const CORE: &str = "libharness_simulated_gpu.so";
/// Names the core library where it is not beside the program.
pub const CORE_VARIABLE: &str = "HARNESS_SIMULATED_GPU_LIBRARY";
/// Has the hook write the place of each out of memory error.
pub(crate) const PLACES: &str = "HARNESS_GPU_OOMS";
/// Has the hook sample how much torch has allocated.
const SAMPLES: &str = "HARNESS_GPU_SAMPLES";
/// The file name of the library that limits programs on a real GPU.
pub const LIMITER: &str = "libharness_limits.so";
/// Names it where it is not beside the program.
pub const LIMITER_VARIABLE: &str = "HARNESS_LIMITS_LIBRARY";
/// Has the hook write memory snapshots.
const SNAPSHOT: &str = "HARNESS_GPU_SNAPSHOT";
const HOOK: &str = include_str!("hook.py");
/// Imported by the hook where the settings ask for it.
const SMALL_VALUES: &str = include_str!("small_values.py");
/// The first GNU C library whose auditing interface works for this: before it, calls through it are slow and some programs crash.
const AUDITING_LIBC: (u32, u32) = (2, 35);
/// The variables with the settings of PyTorch's allocator, of versions from 2.9 on and before.
const ALLOCATOR_SETTINGS: [&str; 2] = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"];
/// Caches of compiled kernels. What is compiled on a simulated GPU must never be loaded on a real one.
const KERNEL_CACHES: [&str; 4] = ["PYTORCH_KERNEL_CACHE_PATH", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"];
/// Folders below `nvidia` in which PyTorch looks for libraries that it opens by path.
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

/// How the dynamic linker is told of the doubles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The core library answers where a library is (LD_AUDIT).
    Audit,
    /// All doubles are loaded into each process (LD_PRELOAD).
    Preload,
}

impl Way {
    /// The one that works with this version of the GNU C library.
    #[must_use]
    pub fn of_libc(version: (u32, u32)) -> Self {
        if version >= AUDITING_LIBC { Self::Audit } else { Self::Preload }
    }
}

/// A program and the machine that it is to see.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Launch<'a> {
    /// The program and its arguments.
    pub command: &'a [OsString],
    pub settings: &'a Settings,
    pub libraries: &'a Libraries,
    /// How they get in front.
    pub way: Way,
    /// Settings of PyTorch's allocator.
    pub alloc_conf: Option<&'a str>,
    /// Whether memory snapshots are wanted.
    pub snapshot: bool,
    /// The ledger of the devices that the program shares with others; a run has one of its own without it.
    pub ledger: Option<&'a Path>,
}

/// Why the program was not run.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum LaunchError {
    /// Install the program with its libraries, build them, or name this one.
    #[error(
        "the library of the simulated GPU is missing: {CORE} lies neither beside this program, nor in `deps` there, nor in `../lib/harness`. \
         `ci/install` installs it with the program, and the wheel that `ci/wheel` makes has it; `cargo build --release` makes it, in target/release/deps; \
         {CORE_VARIABLE} names it where it lies elsewhere"
    )]
    NoCore,
    /// Install the program with its libraries, build them, or name this one.
    #[error(
        "the library that limits programs is missing: {LIMITER} lies neither beside this program, nor in `deps` there, nor in `../lib/harness`. \
         `ci/install` installs it with the program, and the wheel that `ci/wheel` makes has it; `cargo build --release` makes it, in target/release/deps; \
         {LIMITER_VARIABLE} names it where it lies elsewhere"
    )]
    NoLimiter,
    /// Move the library, or name a copy of it.
    #[error("the library that limits programs cannot be used from `{}`: the dynamic linker takes no path with a colon", .0.display())]
    Colon(PathBuf),
    /// Use a newer system.
    #[error(
        "the program's GNU C library is version {}.{}: programs on a real GPU can be limited from {}.{} on",
        .0.0, .0.1, AUDITING_LIBC.0, AUDITING_LIBC.1
    )]
    OldLibc((u32, u32)),
    /// Make room in the folder for temporary files, or name another one by TMPDIR.
    #[error("the folder of the run cannot be made: {0}")]
    Folder(io::Error),
    /// Correct the command.
    #[error("`{program}` cannot be started: {source}")]
    Start {
        program: String,
        /// What the system says.
        source: io::Error,
    },
}

/// The core library: named by the variable, or beside this program.
///
/// # Errors
/// That it is not there.
pub fn core_library() -> Result<PathBuf, LaunchError> {
    beside_program(CORE, CORE_VARIABLE).ok_or(LaunchError::NoCore)
}

/// The library that limits programs on a real GPU: named by the variable, or beside this program.
///
/// # Errors
/// That it is not there, or cannot be used from there.
pub fn limiter() -> Result<PathBuf, LaunchError> {
    let library = beside_program(LIMITER, LIMITER_VARIABLE).ok_or(LaunchError::NoLimiter)?;
    if library.as_os_str().as_encoded_bytes().contains(&b':') { Err(LaunchError::Colon(library)) } else { Ok(library) }
}

/// A library of ours: named by its variable, or beside this program.
pub(crate) fn beside_program(file: &str, variable: &str) -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(variable).filter(|named| !named.is_empty()) {
        return Some(PathBuf::from(named)).filter(|named| named.is_file());
    }
    let program = std::env::current_exe().ok()?;
    let folder = program.parent()?;
    // Where cargo puts it, the newest first, since a build of the program alone renews only that; beside the program; installed.
    let places = ["deps", "", "../lib/harness"];
    places.iter().map(|place| folder.join(place).join(file)).find(|path| path.is_file())
}

/// What a program left behind: files of its processes, in a folder that goes with this.
#[derive(Debug)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Ended {
    pub end: End,
    folder: TempDir,
}

impl Ended {
    /// The folder of the run.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// A program that is ready to be started.
#[derive(Debug)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Prepared {
    pub command: Command,
    folder: TempDir,
}

impl Prepared {
    /// Makes the folder of a run, fills it, and makes the command with these variables.
    pub(crate) fn new(
        command: &[OsString],
        fill: impl FnOnce(&Path) -> io::Result<()>,
        environment: impl FnOnce(&Path) -> Vec<(&'static str, OsString)>,
    ) -> Result<Self, LaunchError> {
        let folder = tempfile::Builder::new().prefix("harness-gpu-").tempdir().map_err(LaunchError::Folder)?;
        fill(folder.path()).map_err(LaunchError::Folder)?;
        let nothing = || LaunchError::Start { program: String::new(), source: io::ErrorKind::NotFound.into() };
        let (program, arguments) = command.split_first().ok_or_else(nothing)?;
        let mut command = Command::new(program);
        command.args(arguments).envs(environment(folder.path()));
        Ok(Self { command, folder })
    }

    /// Runs the program to its end. Its standard streams are ours. Where it is to be reported, its processes note what a timeline needs.
    pub(crate) fn run(mut self, is_reported: bool) -> Result<Ended, LaunchError> {
        if is_reported {
            self.command.envs([(PLACES, "1"), (SAMPLES, "1")]);
        }
        let end = process::run(&mut self.command).map_err(|source| self.start_error(source))?;
        Ok(self.ended(end))
    }

    /// The folder of the run.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The program was run, and ended like this.
    #[must_use]
    pub fn ended(self, end: End) -> Ended {
        Ended { end, folder: self.folder }
    }

    /// What to say where it cannot be started.
    #[must_use]
    pub fn start_error(&self, source: io::Error) -> LaunchError {
        LaunchError::Start { program: self.command.get_program().to_string_lossy().into_owned(), source }
    }
}

impl Launch<'_> {
    /// Runs the program to its end. Its standard streams are ours. Where it is to be reported, its processes note what a timeline needs.
    ///
    /// # Errors
    /// That it cannot be started.
    pub fn run(&self, is_reported: bool) -> Result<Ended, LaunchError> {
        self.prepare()?.run(is_reported)
    }

    /// Makes the folder of a run, and the command that runs the program in it.
    ///
    /// # Errors
    /// That the folder cannot be made.
    pub fn prepare(&self) -> Result<Prepared, LaunchError> {
        Prepared::new(self.command, |run| self.fill(run), |run| self.environment(run, |name| std::env::var_os(name)))
    }

    /// Writes what the program needs in the folder of the run.
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
        if self.way == Way::Preload {
            let release = format!("cu{}", self.settings.cuda);
            for package in PACKAGES.into_iter().chain([release.as_str()]) {
                let package = hook.join("nvidia").join(package);
                fs::create_dir_all(&package)?;
                symlink(&self.libraries.folder, package.join("lib"))?;
            }
        }
        Ok(())
    }

    /// The variables that are set for the program, given those that it would have.
    fn environment(&self, run: &Path, inherited: impl Fn(&str) -> Option<OsString>) -> Vec<(&'static str, OsString)> {
        let libraries = &self.libraries.folder;
        let mut set: Vec<(&'static str, OsString)> = vec![
            (SETTINGS, self.settings.to_string().into()),
            (LIBRARIES, libraries.into()),
            (LEDGER, self.ledger.map_or_else(|| own_ledger(run), Path::to_owned).into()),
            ("TRITON_LIBCUDA_PATH", libraries.into()),
        ];
        set.push(match self.way {
            Way::Audit => loaded("LD_AUDIT", self.libraries.core().into(), &inherited),
            Way::Preload => {
                let doubles = self.libraries.doubles.iter().map(|double| libraries.join(double).into_os_string());
                loaded("LD_PRELOAD", joined(doubles), &inherited)
            }
        });
        set.extend(KERNEL_CACHES.map(|cache| (cache, kernel_cache(run, cache).into())));
        set.extend(of_torch(run, self.alloc_conf, self.snapshot, &inherited));
        set
    }
}

/// A folder for what processes leave, which goes with the value.
///
/// # Errors
/// That it cannot be made.
pub fn folder_of_run() -> io::Result<TempDir> {
    tempfile::Builder::new().prefix("harness-gpu-").tempdir()
}

/// Writes the hook of Python into the folder of a run. Returns its own folder.
pub(crate) fn write_hook(run: &Path) -> io::Result<PathBuf> {
    let hook = hook_folder(run);
    fs::create_dir(&hook)?;
    fs::write(hook.join("sitecustomize.py"), HOOK)?;
    Ok(hook)
}

/// A library that is loaded into the program, behind what the user has loaded.
fn loaded(name: &'static str, added: OsString, inherited: &impl Fn(&str) -> Option<OsString>) -> (&'static str, OsString) {
    (name, joined([inherited(name).unwrap_or_default(), added]))
}

/// The variables by which torch and the hook know what is wanted.
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

/// The ledger of a run that shares its devices with no other.
pub(crate) fn own_ledger(run: &Path) -> PathBuf {
    run.join("ledger")
}

fn kernel_cache(run: &Path, variable: &str) -> PathBuf {
    run.join("caches").join(variable.to_ascii_lowercase())
}

/// Paths with colons between them; empty ones are left out, since they would name the current folder.
pub(crate) fn joined(paths: impl IntoIterator<Item = OsString>) -> OsString {
    let paths: Vec<OsString> = paths.into_iter().filter(|path| !path.is_empty()).collect();
    paths.join(OsStr::new(":"))
}

#[cfg(test)]
mod tests;
