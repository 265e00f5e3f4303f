//! Puts the double where the loader of a child process finds it as the driver: links, variables, a report to read.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::Config;

/// A temporary folder of library names that lead to the double, and the environment that makes a child process use it.
#[derive(Debug)]
pub struct Staging {
    folder: TempDir,
    variables: Vec<(&'static str, String)>,
}

/// The variable that names the file for the report.
pub(crate) const REPORT: &str = "DOUBLE_REPORT";
/// The variable that names the file for the names of calls.
pub(crate) const CALLS: &str = "DOUBLE_CALLS";
/// The variable that names the folder of other programs.
pub(crate) const PROCESSES: &str = "DOUBLE_PROCESSES";
const DRIVER_NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];
const NVML_NAME: &str = "libnvidia-ml.so.1";

impl Staging {
    /// A machine as `config` describes it.
    ///
    /// # Errors
    /// Where the shared library was not built, or the folder cannot be made.
    pub fn new(config: &Config) -> io::Result<Self> {
        let library = shared_library()?;
        let folder = TempDir::with_prefix("driver-double-")?;
        for name in DRIVER_NAMES {
            symlink(&library, folder.path().join(name))?;
        }
        match config.nvml {
            true => symlink(&library, folder.path().join(NVML_NAME))?,
            false => unloadable(&folder.path().join(NVML_NAME))?,
        }
        let mut variables = config.to_env();
        if config.list_calls {
            variables.push((CALLS, folder.path().join("calls").to_string_lossy().into_owned()));
        }
        if config.processes {
            let processes = folder.path().join("processes");
            fs::create_dir(&processes)?;
            variables.push((PROCESSES, processes.to_string_lossy().into_owned()));
        }
        Ok(Self { folder, variables })
    }

    /// A machine without driver and NVML. Where the real ones are installed they are hidden behind files that cannot be loaded, so that
    /// messages differ: see [`hides_a_driver`].
    ///
    /// # Errors
    /// Where the folder cannot be made.
    pub fn without_driver() -> io::Result<Self> {
        if hides_a_driver() {
            return Self::with_broken_libraries();
        }
        Ok(Self { folder: TempDir::with_prefix("driver-double-")?, variables: Vec::new() })
    }

    /// A machine whose driver and NVML are there but cannot be loaded.
    ///
    /// # Errors
    /// Where the folder cannot be made.
    pub fn with_broken_libraries() -> io::Result<Self> {
        let folder = TempDir::with_prefix("driver-double-")?;
        for name in DRIVER_NAMES.into_iter().chain([NVML_NAME]) {
            unloadable(&folder.path().join(name))?;
        }
        Ok(Self { folder, variables: Vec::new() })
    }

    /// Makes the command's process see this machine.
    pub fn apply(&self, command: &mut Command) {
        command.env("LD_LIBRARY_PATH", self.search_path()).env(REPORT, self.report_path()).env_remove("CUDA_VISIBLE_DEVICES");
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
    }

    /// What the double wrote so far: a line each time the last reference to a context was given back, with what was left in it.
    ///
    /// # Errors
    /// Where no context was ever released, or the file cannot be read.
    pub fn report(&self) -> io::Result<String> {
        fs::read_to_string(self.report_path())
    }

    fn report_path(&self) -> PathBuf {
        self.folder.path().join("report")
    }

    /// The folder in front of what the loader searches anyway.
    fn search_path(&self) -> OsString {
        let mut path = self.folder.path().as_os_str().to_owned();
        if let Some(rest) = env::var_os("LD_LIBRARY_PATH").filter(|rest| !rest.is_empty()) {
            path.push(":");
            path.push(rest);
        }
        path
    }
}

/// In a process on a staged machine with [`Config::list_calls`]: the names of the driver's and NVML's functions that were called so far, in
/// their order, those included that failed.
///
/// # Errors
/// Where calls are not listed, or none was made.
pub fn calls() -> io::Result<Vec<String>> {
    let path = env::var_os(CALLS).ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no calls are listed here"))?;
    Ok(fs::read_to_string(path)?.lines().map(str::to_owned).collect())
}

/// Whether this machine has a driver or NVML of its own, which [`Staging::without_driver`] can only hide.
#[must_use]
pub fn hides_a_driver() -> bool {
    [c"libcuda.so.1", c"libnvidia-ml.so.1"].into_iter().any(|name| {
        // SAFETY: the name is NUL-terminated, and the initialisers of NVIDIA's libraries have no precondition. It stays loaded.
        !unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY) }.is_null()
    })
}

/// A file that hides an installed library of its name: the loader finds it first and refuses it.
fn unloadable(path: &Path) -> io::Result<()> {
    fs::write(path, "not a library")
}

/// The double as cargo built it: beside this test, or one folder up beside a binary's examples and benches.
fn shared_library() -> io::Result<PathBuf> {
    const NAME: &str = "libdriver_double.so";
    let test = env::current_exe()?;
    let found =
        test.ancestors().skip(1).take(2).flat_map(|folder| [folder.join(NAME), folder.join("deps").join(NAME)]).find(|path| path.exists());
    found.ok_or_else(|| {
        let why = format!("{NAME} is not beside {}: build it with `cargo build -p driver-double` in the same profile", test.display());
        io::Error::new(io::ErrorKind::NotFound, why)
    })
}
