//! Test only: [`Staging`] runs a child process with the simulated GPU as NVIDIA's driver and NVML.
//! So the CUDA device's own code runs without a GPU.
//!
//! There, the kernels of the CUDA device execute on host memory ([`strict`]): an invalid or
//! unordered access breaks the context. A context that ends reports its remaining objects
//! ([`Staging::left`]). No figure of it describes a real GPU.

pub mod trials;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{env, ffi::OsString, fs, io, os::unix::fs::symlink, process::Command, thread};

use harness_allocator::units::Bytes;
use harness_gpu_settings::driver::{Kernels, Sensors};
use harness_gpu_settings::ledger::{LEDGER, Ledger};
use harness_gpu_settings::settings::{AddressOrder, CALLS, Cuda, LEFT, RUN, SETTINGS, Settings};
use harness_gpu_settings::{gpus::GPUS, text::to_variable};
use tempfile::TempDir;

/// Returns a machine with one GPU of 2 GiB and NVML, without faults. A context takes 300 MiB, the
/// kernels of the CUDA device execute, and addresses are reused, as by a driver.
#[must_use]
pub fn strict() -> Settings {
    let gpu = GPUS
        .iter()
        .find(|gpu| gpu.name == "h100-80")
        .unwrap_or(&GPUS[0]);
    Settings {
        kernels: Kernels::Execute,
        context_overhead: Bytes::mib(300),
        addresses: AddressOrder::Reuse,
        cuda: Cuda::V12,
        sensors: Sensors {
            power_mw: 250_000,
            celsius: 40,
            reasons: 4,
        },
        ..Settings::new(gpu, Bytes::gib(2))
    }
}

/// The end of a line of [`Staging::left`] for an empty context.
pub const NOTHING_LEFT: &str = "left: 0 allocations, 0 reservations, 0 pages, 0 pools, 0 streams, \
     0 events, 0 modules, 0 pieces of work";

/// A temporary folder with the simulated GPU under the libraries' names, and the environment for a
/// child process.
#[derive(Debug)]
pub struct Staging {
    folder: TempDir,
    /// `None` for a machine without a driver.
    settings: Option<Settings>,
}

const DRIVER_NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];
/// The file through which the machine's processes share device memory.
const LEDGER_FILE: &str = "ledger";
const NVML_NAME: &str = "libnvidia-ml.so.1";

impl Staging {
    /// Sets up a machine. Fails if the shared library was not built.
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
        Ok(Self {
            folder,
            settings: Some(settings.clone()),
        })
    }

    /// Sets up a machine without driver and NVML. If real ones are installed, files that cannot be
    /// loaded hide them, so the errors differ: see [`hides_a_driver`].
    pub fn without_driver() -> io::Result<Self> {
        if hides_a_driver() {
            Self::with_broken_libraries()
        } else {
            Ok(Self {
                folder: folder()?,
                settings: None,
            })
        }
    }

    /// Sets up a machine whose driver and NVML cannot be loaded.
    pub fn with_broken_libraries() -> io::Result<Self> {
        let folder = folder()?;
        for name in DRIVER_NAMES.into_iter().chain([NVML_NAME]) {
            unloadable(&folder.path().join(name))?;
        }
        Ok(Self {
            folder,
            settings: None,
        })
    }

    /// Makes the command's process use this machine.
    pub fn apply(&self, command: &mut Command) {
        command
            .env("LD_LIBRARY_PATH", self.search_path())
            .env(RUN, self.folder.path())
            .env_remove("CUDA_VISIBLE_DEVICES");
        command.envs(
            self.settings
                .iter()
                .map(|settings| (SETTINGS, to_variable(settings))),
        );
        if self
            .settings
            .as_ref()
            .is_some_and(|settings| settings.processes)
        {
            command.env(LEDGER, self.folder.path().join(LEDGER_FILE));
        }
    }

    /// Returns one line for each destroyed context with its remaining objects. Fails if no context
    /// was destroyed.
    pub fn left(&self) -> io::Result<String> {
        fs::read_to_string(self.folder.path().join(LEFT))
    }

    /// Returns the library path with this machine's folder first.
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

/// Returns the path of a file in the run's folder, in a process on a staged machine.
fn file_of_run(name: &str) -> io::Result<PathBuf> {
    let folder = env::var_os(RUN).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::NotFound,
            "this process does not run on a staged machine",
        )
    })?;
    Ok(Path::new(&folder).join(name))
}

/// Returns the driver and NVML functions called so far, in order, including failed calls. For
/// processes on a staged machine with [`Settings::list_calls`].
pub fn calls() -> io::Result<Vec<String>> {
    Ok(fs::read_to_string(file_of_run(CALLS)?)?
        .lines()
        .map(str::to_owned)
        .collect())
}

/// Makes another live process hold memory of the first device until that process ends. For
/// processes on a staged machine with [`Settings::processes`].
pub fn hold_for(pid: u32, held: Bytes) -> io::Result<()> {
    Ledger::open(&file_of_run(LEDGER_FILE)?)?.enter(pid, 0, held)
}

/// Returns whether this machine has a real driver or NVML, which [`Staging::without_driver`] can
/// only hide.
#[must_use]
pub fn hides_a_driver() -> bool {
    [c"libcuda.so.1", c"libnvidia-ml.so.1"]
        .into_iter()
        .any(|name| {
            // SAFETY: the name is NUL-terminated, and the initializers of NVIDIA's libraries have
            // no precondition. The library stays loaded.
            !unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY) }.is_null()
        })
}

/// The longest wait of a test for another process. Only a hang takes that long, however busy the
/// machine is.
const LONGEST_WAIT: Duration = Duration::from_secs(600);

/// Waits until `find` returns a value. Panics with `what` it waited for if that does not happen.
pub fn wait_for<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = find() {
            return found;
        }
        assert!(
            began.elapsed() < LONGEST_WAIT,
            "waited {LONGEST_WAIT:?} for {what}"
        );
        thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until a process has ended. Its parent may not have reaped it.
pub fn wait_for_end(pid: &str) {
    let stat = format!("/proc/{}/stat", pid.trim());
    let has_ended = || {
        let stat = fs::read_to_string(&stat).unwrap_or_default();
        (stat.is_empty() || stat.contains(") Z ")).then_some(())
    };
    wait_for(&format!("the end of process {pid}"), has_ended);
}

/// Writes a file that hides an installed library: the loader finds it first and fails.
fn unloadable(path: &Path) -> io::Result<()> {
    fs::write(path, "not a library")
}

/// Returns the shared library that cargo built: next to this test, or one folder up.
fn shared_library() -> io::Result<PathBuf> {
    const NAME: &str = "libharness_simulated_gpu.so";
    let test = env::current_exe()?;
    let found = test
        .ancestors()
        .skip(1)
        .take(2)
        .flat_map(|folder| [folder.join(NAME), folder.join("deps").join(NAME)])
        .find(|path| path.exists());
    found.ok_or_else(|| {
        let why = format!(
            "{NAME} is not next to {}: build it with `cargo build -p \
                 harness-simulated-gpu` in the same profile",
            test.display()
        );
        io::Error::new(io::ErrorKind::NotFound, why)
    })
}
