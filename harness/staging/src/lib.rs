//! Test only: [`Staging`] puts the simulated GPU where the loader of a child process finds NVIDIA's driver and NVML, so that the CUDA device's own
//! code runs where there is no GPU.
//!
//! The kernels of the CUDA device are really done there, on memory of the host ([`strict`]): a wrong access, or one that nothing orders behind
//! another, breaks the context, and what is left in a context that ends is told ([`Staging::left`]). No figure of it is a GPU's.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use harness_allocator::units::Bytes;
use harness_gpu_settings::driver::{Kernels, Sensors};
use harness_gpu_settings::gpus::GPUS;
use harness_gpu_settings::ledger::{LEDGER, Ledger};
use harness_gpu_settings::settings::{AddressOrder, CALLS, Cuda, LEFT, RUN, SETTINGS, Settings};
use tempfile::TempDir;

/// A machine with one GPU of 2 GiB, of which a context takes 300 MiB, with NVML and nothing wrong, that really does the kernels of the CUDA device.
/// Addresses are used again, as a driver may do.
#[must_use]
pub fn strict() -> Settings {
    let gpu = GPUS.iter().find(|gpu| gpu.name == "h100-80").unwrap_or(&GPUS[0]);
    Settings {
        kernels: Kernels::Execute,
        context_overhead: Bytes::mib(300),
        addresses: AddressOrder::Reuse,
        cuda: Cuda::V12,
        sensors: Sensors { power_mw: 250_000, celsius: 40, reasons: 4 },
        ..Settings::new(gpu, Bytes::gib(2))
    }
}

/// How the line of [`Staging::left`] ends for a context that was left empty.
pub const NOTHING_LEFT: &str = "left: 0 allocations, 0 reservations, 0 pages, 0 pools, 0 streams, 0 events, 0 modules, 0 pieces of work";

/// A temporary folder of library names that lead to the simulated GPU, and the environment that makes a child process use it.
#[derive(Debug)]
pub struct Staging {
    folder: TempDir,
    /// `None`: there is no driver.
    settings: Option<Settings>,
}

const DRIVER_NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];
/// The file by which processes of the machine share its devices' memory.
const LEDGER_FILE: &str = "ledger";
const NVML_NAME: &str = "libnvidia-ml.so.1";

impl Staging {
    /// A machine like this.
    ///
    /// # Errors
    /// Where the shared library was not built, or the folder cannot be made.
    pub fn new(settings: &Settings) -> io::Result<Self> {
        let library = shared_library()?;
        let folder = folder()?;
        for name in DRIVER_NAMES {
            symlink(&library, folder.path().join(name))?;
        }
        match settings.nvml {
            true => symlink(&library, folder.path().join(NVML_NAME))?,
            false => unloadable(&folder.path().join(NVML_NAME))?,
        }
        Ledger::create(&folder.path().join(LEDGER_FILE))?;
        Ok(Self { folder, settings: Some(settings.clone()) })
    }

    /// A machine without driver and NVML. Where the real ones are installed they are hidden behind files that cannot be loaded, so that
    /// messages differ: see [`hides_a_driver`].
    ///
    /// # Errors
    /// Where the folder cannot be made.
    pub fn without_driver() -> io::Result<Self> {
        if hides_a_driver() { Self::with_broken_libraries() } else { Ok(Self { folder: folder()?, settings: None }) }
    }

    /// A machine whose driver and NVML are there but cannot be loaded.
    ///
    /// # Errors
    /// Where the folder cannot be made.
    pub fn with_broken_libraries() -> io::Result<Self> {
        let folder = folder()?;
        for name in DRIVER_NAMES.into_iter().chain([NVML_NAME]) {
            unloadable(&folder.path().join(name))?;
        }
        Ok(Self { folder, settings: None })
    }

    /// Makes the command's process see this machine.
    pub fn apply(&self, command: &mut Command) {
        command.env("LD_LIBRARY_PATH", self.search_path()).env(RUN, self.folder.path()).env_remove("CUDA_VISIBLE_DEVICES");
        command.envs(self.settings.iter().map(|settings| (SETTINGS, settings.to_string())));
        if self.settings.as_ref().is_some_and(|settings| settings.processes) {
            command.env(LEDGER, self.folder.path().join(LEDGER_FILE));
        }
    }

    /// What was left in contexts: a line each time the last reference to one was given back.
    ///
    /// # Errors
    /// Where no context was ever given back, or the file cannot be read.
    pub fn left(&self) -> io::Result<String> {
        fs::read_to_string(self.folder.path().join(LEFT))
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

fn folder() -> io::Result<TempDir> {
    TempDir::with_prefix("staged-gpu-")
}

/// A file of the run's folder, in a process on a staged machine.
fn file_of_run(name: &str) -> io::Result<PathBuf> {
    let folder = env::var_os(RUN).ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "this process is on no staged machine"))?;
    Ok(Path::new(&folder).join(name))
}

/// In a process on a staged machine with [`Settings::list_calls`]: the names of the driver's and NVML's functions that were called so far, in
/// their order, those included that failed.
///
/// # Errors
/// Where calls are not listed, or none was made.
pub fn calls() -> io::Result<Vec<String>> {
    Ok(fs::read_to_string(file_of_run(CALLS)?)?.lines().map(str::to_owned).collect())
}

/// In a process on a staged machine with [`Settings::processes`]: has another living process hold so much of the first device, until that ends.
///
/// # Errors
/// Where this process is on no such machine, or there is no such process.
pub fn hold_for(pid: u32, held: Bytes) -> io::Result<()> {
    Ledger::open(&file_of_run(LEDGER_FILE)?)?.enter(pid, 0, held)
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

/// The shared library as cargo built it: beside this test, or one folder up beside a binary's examples and benches.
fn shared_library() -> io::Result<PathBuf> {
    const NAME: &str = "libharness_simulated_gpu.so";
    let test = env::current_exe()?;
    let found =
        test.ancestors().skip(1).take(2).flat_map(|folder| [folder.join(NAME), folder.join("deps").join(NAME)]).find(|path| path.exists());
    found.ok_or_else(|| {
        let why =
            format!("{NAME} is not beside {}: build it with `cargo build -p harness-simulated-gpu` in the same profile", test.display());
        io::Error::new(io::ErrorKind::NotFound, why)
    })
}
