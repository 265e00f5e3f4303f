//! Starts a program with stub libraries in place of NVIDIA's, and keeps the files that its
//! processes write.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::{fs, io, os::unix::fs::symlink, process::Command, sync::Mutex};

use harness_allocator::sync::lock;
use harness_gpu_settings::ledger::{LEDGER, Ledger};
use harness_gpu_settings::limits::{LIMITS, LIMITS_LEDGER, LIMITS_RUN};
use harness_gpu_settings::settings::{LIBRARIES, LINKED_RUNTIME, RUN, SETTINGS, SPARE, Settings};
use harness_gpu_settings::settings::{UNLOADED, VERSIONS, Values};
use harness_gpu_settings::text::to_variable;
use libc::pid_t;

use crate::files::{hook_folder, hook_script, own_ledger, read_of_kernel};
pub use crate::guardian::RunFolder;
use crate::hang::{self, Hang, detector::Detector};
use crate::own_libraries::AUDITING_LIBC;
pub use crate::own_libraries::LaunchError;
use crate::process::{self, End, HeldSignals};
use crate::stubs::{DRIVER, LINKED_DRIVER};
use crate::{ahead, cache::Libraries, imports, machine::Machine, outlived, setup::Setup, torch};

/// Makes the hook record the call stack of each OutOfMemoryError.
pub(crate) const PLACES: &str = "HARNESS_GPU_OOMS";
/// Makes the hook sample the bytes that torch has allocated.
const SAMPLES: &str = "HARNESS_GPU_SAMPLES";
/// Makes the hook write memory snapshots. With the value `events`, they lack call stacks.
pub(crate) const SNAPSHOT: &str = "HARNESS_GPU_SNAPSHOT";
/// Makes the hook record the memory of a program with several streams, for [`crate::ahead`].
pub(crate) const HISTORY: &str = "HARNESS_GPU_HISTORY";
const SITE: &str = include_str!("hook.py");
/// Imported by the hook if a run may be repeated, or if small values are known.
const FILES: [(&str, &str); 2] = [
    ("effects.py", include_str!("effects.py")),
    ("saved.py", include_str!("saved.py")),
];
/// Imported by the hook if the program imports the package of this name.
const ENGINES: [(&str, &str); 4] = [
    ("cutlass.py", include_str!("engines/cutlass.py")),
    ("flashinfer.py", include_str!("engines/flashinfer.py")),
    ("sglang.py", include_str!("engines/sglang.py")),
    ("vllm.py", include_str!("engines/vllm.py")),
];
/// What the hook always imports: the counters of a process, the guard of its functions, and what it
/// knows of libraries other than torch.
const MODULES: [(&str, &str); 3] = [
    ("counters.py", include_str!("counters.py")),
    ("guard.py", include_str!("guard.py")),
    ("libraries.py", include_str!("libraries.py")),
];
/// Imported by the hook if values are computed.
const VALUES: [(&str, &str); 4] = [
    ("cpu_values.py", include_str!("cpu_values.py")),
    ("random_numbers.py", include_str!("random_numbers.py")),
    ("small_values.py", include_str!("small_values.py")),
    ("torch_kernel.py", include_str!("torch_kernel.py")),
];
/// Names the library that the hook must find loaded in each Python process.
const EXPECTED: &str = "HARNESS_GPU_EXPECTED";
/// Auditing libraries use the space that libraries such as a preloaded jemalloc, which Ray's
/// processes have, need for their thread-local variables.
const STATIC_TLS: &str = "glibc.rtld.optional_static_tls=16384";
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// The file that exists if a process uses CUDA without that library.
const NOT_LOADED: &str = "not-loaded";
/// Variables with the allocator's settings: the one that the program may read, and the one that
/// PyTorch reads first.
const ALLOCATOR_SETTINGS: [&str; 2] = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"];
/// Caches of compiled kernels. Code compiled on a simulated GPU must never be loaded on a real one.
const KERNEL_CACHES: [&str; 6] = [
    "PYTORCH_KERNEL_CACHE_PATH",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
    // Compiled code, and the memory that vLLM found at its last start.
    "VLLM_CACHE_ROOT",
    "FLASHINFER_WORKSPACE_BASE",
];
/// The name under which a program starts this program.
pub const NVIDIA_SMI: &str = "nvidia-smi";
/// A program and the machine that it will see.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// The program and its arguments.
    pub command: &'a [OsString],
    pub machine: &'a Machine,
    pub setup: &'a Setup,
    pub alloc_conf: Option<&'a str>,
    /// `true` if the program's processes write memory snapshots.
    pub snapshot: bool,
    /// The ledger of devices or of a limit shared with other programs. Without it, a run on
    /// simulated GPUs gets its own, and on a real GPU each process has its own limit.
    pub ledger: Option<&'a Path>,
}

#[derive(Debug)]
pub struct EndedProgram {
    pub end: End,
    folder: RunFolder,
}

impl EndedProgram {
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

#[derive(Debug)]
pub struct Prepared {
    pub command: Command,
    pub(crate) watch: Watch,
}

/// Finds processes that use NVIDIA's libraries without ours, and ranks that hang. The hook finds
/// such processes only in Python, and only if the program's options let it run.
#[derive(Debug)]
pub(crate) struct Watch {
    folder: RunFolder,
    libraries: Libraries,
    detector: Mutex<Detector>,
}

impl Watch {
    /// Kills the program if one of its processes lacks our library or has a CUDA runtime that
    /// cannot be replaced, which makes its end an error, or if its ranks hang.
    pub(crate) fn look(&self, program: pid_t) {
        let mut processes = process::descendants(program);
        processes.push(program);
        if processes.iter().any(|pid| self.lacks_ours(*pid)) {
            let _ = fs::write(self.folder.path().join(NOT_LOADED), "");
            process::kill_all(&processes);
        } else if self.folder.path().join(LINKED_RUNTIME).exists()
            || lock(&self.detector).look(self.folder.path(), &processes[..processes.len() - 1])
        {
            process::kill_all(&processes);
        }
    }

    /// Returns the processes that outlive the program, and notes them for its record.
    pub(crate) fn remaining(&self, program: pid_t) -> Vec<pid_t> {
        outlived::find(self.folder.path(), program)
    }

    fn lacks_ours(&self, pid: pid_t) -> bool {
        self.lacks_ours_in(|| read_of_kernel(pid, "maps"))
    }

    /// The kernel cuts off the list of files if the process ends, or executes another program,
    /// during a read. The second read then finds no files, or those of the other program.
    fn lacks_ours_in(&self, maps: impl Fn() -> String) -> bool {
        (0..2).all(|_| {
            let maps = maps();
            let files = || {
                maps.lines()
                    .filter_map(|line| Some(Path::new(&line[line.find('/')?..])))
            };
            files().any(|file| {
                imports::is_nvidia_library(file) && !file.starts_with(&self.libraries.folder)
            }) && !files().any(|file| file.file_name() == Some(OsStr::new(&self.libraries.core)))
        })
    }
}

impl Prepared {
    /// Runs the program with the standard streams of `command`. If `is_reported`, its processes
    /// record data for a timeline.
    pub fn run(mut self, is_reported: bool) -> Result<EndedProgram, LaunchError> {
        if is_reported {
            self.command.envs([(PLACES, "1"), (SAMPLES, "1")]);
        }
        let end = HeldSignals::hold().and_then(|signals| {
            let watch = &self.watch;
            let remaining = |program| watch.remaining(program);
            signals.run(&mut self.command, |program| watch.look(program), remaining)
        });
        let end = end.map_err(|source| self.start_error(source))?;
        self.ended(end)
    }

    pub fn folder(&self) -> &Path {
        self.watch.folder.path()
    }

    /// Kills the started program if one of its processes lacks our library, so that [`Self::ended`]
    /// fails, or if its ranks hang.
    pub fn look(&self, program: pid_t) {
        self.watch.look(program);
    }

    /// Returns the processes that outlive the program, and notes them for its record.
    pub fn remaining(&self, program: pid_t) -> Vec<pid_t> {
        self.watch.remaining(program)
    }

    /// Records the end of the program. Fails if a process ran without our library.
    pub fn ended(self, end: End) -> Result<EndedProgram, LaunchError> {
        let end = if Hang::is_in(self.folder()) {
            End::Code(hang::EXIT_CODE)
        } else {
            end
        };
        let ended = EndedProgram {
            end,
            folder: self.watch.folder,
        };
        if let Ok(reason) = fs::read_to_string(ended.folder().join(LINKED_RUNTIME)) {
            return Err(LaunchError::LinkedRuntime(reason));
        }
        let is_not_loaded = [NOT_LOADED, UNLOADED]
            .iter()
            .any(|mark| ended.folder().join(mark).exists());
        if is_not_loaded {
            Err(LaunchError::NotLoaded)
        } else {
            Ok(ended)
        }
    }

    pub fn start_error(&self, source: io::Error) -> LaunchError {
        LaunchError::Start {
            program: self.command.get_program().to_string_lossy().into_owned(),
            source,
        }
    }
}

impl Launch<'_> {
    /// Creates the folder of a run and the command that runs the program in it.
    pub fn prepare(&self) -> Result<Prepared, LaunchError> {
        let folder = RunFolder::new().map_err(LaunchError::Folder)?;
        self.fill(folder.path()).map_err(LaunchError::Folder)?;
        let nothing = || LaunchError::Start {
            program: String::new(),
            source: io::ErrorKind::NotFound.into(),
        };
        let (program, arguments) = self.command.split_first().ok_or_else(nothing)?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .envs(self.environment(folder.path(), |name| std::env::var_os(name)));
        Ok(Prepared {
            command,
            watch: Watch {
                folder,
                libraries: self.setup.libraries.clone(),
                detector: Mutex::default(),
            },
        })
    }

    /// Returns whether the dynamic linker loads our library as an auditor (LD_AUDIT). With an older
    /// GNU C library, all stub libraries are loaded into each process (LD_PRELOAD).
    pub(crate) fn is_audited(&self) -> bool {
        self.setup.program.libc >= AUDITING_LIBC
    }

    fn fill(&self, run: &Path) -> io::Result<()> {
        let hook = hook_folder(run);
        fs::create_dir(&hook)?;
        fs::write(hook_script(run), SITE)?;
        for (name, module) in MODULES {
            fs::write(hook.join(name), module)?;
        }
        if self.is_audited()
            && self
                .command
                .first()
                .is_some_and(|program| torch::is_linked_dynamically(program))
        {
            fs::write(run.join(UNLOADED), "")?;
        }
        let Machine::Simulated(settings) = self.machine else {
            return fs::create_dir(self.machine.counters(run));
        };
        for cache in KERNEL_CACHES {
            fs::create_dir_all(kernel_cache(run, cache))?;
        }
        if self.ledger.is_none() {
            Ledger::create(&own_ledger(run))?;
        }
        let of_values = VALUES.iter().filter(|_| settings.values != Values::Zeros);
        for (name, module) in of_values.chain(&FILES) {
            fs::write(hook.join(name), module)?;
        }
        let engines = hook.join("engines");
        fs::create_dir(&engines)?;
        for (name, module) in ENGINES {
            fs::write(engines.join(name), module)?;
        }
        // In unit tests of this crate, the current program is not `harness`.
        let programs = programs(run);
        fs::create_dir(&programs)?;
        symlink(std::env::current_exe()?, programs.join(NVIDIA_SMI))?;
        if self.is_audited() {
            let linked = linked(run);
            fs::create_dir(&linked)?;
            for name in [LINKED_DRIVER, DRIVER] {
                symlink(
                    self.setup.libraries.folder.join(LINKED_DRIVER),
                    linked.join(name),
                )?;
            }
        } else {
            for package in imports::packages()
                .map(str::to_owned)
                .chain([format!("cu{}", settings.cuda)])
            {
                let package = hook.join("nvidia").join(package);
                fs::create_dir_all(&package)?;
                symlink(&self.setup.libraries.folder, package.join("lib"))?;
            }
        }
        Ok(())
    }

    /// Returns the variables to set for the program. `inherited` returns the value it would
    /// otherwise inherit.
    fn environment(
        &self,
        run: &Path,
        inherited: impl Fn(&str) -> Option<OsString>,
    ) -> Vec<(&'static str, OsString)> {
        let list = |name: &str| inherited(name).unwrap_or_default();
        let libraries = &self.setup.libraries;
        let hook = joined([hook_folder(run).into(), list("PYTHONPATH")]);
        let tunables = joined([STATIC_TLS.into(), list("GLIBC_TUNABLES")]);
        let mut set: Vec<(&'static str, OsString)> = vec![
            ("GLIBC_TUNABLES", tunables),
            (RUN, run.into()),
            ("PYTHONPATH", hook),
            (SPARE, "".into()),
            (EXPECTED, libraries.core.clone().into()),
        ];
        set.extend(
            self.alloc_conf
                .into_iter()
                .flat_map(|conf| ALLOCATOR_SETTINGS.map(|name| (name, conf.into()))),
        );
        set.extend(self.snapshot.then(|| (SNAPSHOT, "1".into())));
        set.extend(ahead::settings(self.machine).map(|_| (HISTORY, "1".into())));
        // A hang shows where ranks ran out of memory.
        set.extend(
            self.machine
                .has_several_devices()
                .then(|| (PLACES, "1".into())),
        );
        match self.machine {
            Machine::Simulated(settings) => set.extend(self.of_simulated(settings, run, list)),
            Machine::Real(ordinal, limits) => {
                set.extend([
                    (LIMITS, to_variable(limits).into()),
                    (LIMITS_RUN, self.machine.counters(run).into()),
                    (VISIBLE, visible(*ordinal, inherited(VISIBLE))),
                    // First in the list: for `dlsym`, the GNU C library skips auditors listed after
                    // one that ignores bindings.
                    (
                        "LD_AUDIT",
                        joined([libraries.core().into(), list("LD_AUDIT")]),
                    ),
                ]);
                set.extend(self.ledger.map(|ledger| (LIMITS_LEDGER, ledger.into())));
            }
        }
        set
    }

    /// The variables of the simulated GPU. `list` returns a list that the program would inherit.
    fn of_simulated(
        &self,
        settings: &Settings,
        run: &Path,
        list: impl Fn(&str) -> OsString,
    ) -> impl Iterator<Item = (&'static str, OsString)> {
        let libraries = &self.setup.libraries;
        let program = &self.setup.program;
        let ledger = self.ledger.map_or_else(|| own_ledger(run), Path::to_owned);
        // Code that a program compiles at run time is linked to the driver. The auditor finds
        // another file for it when it is loaded.
        let folder = if self.is_audited() {
            linked(run)
        } else {
            libraries.folder.clone()
        };
        let folders = joined([folder.clone().into(), list("LIBRARY_PATH")]);
        // The user's own libraries come first.
        let loaded = if self.is_audited() {
            let auditors = joined([list("LD_AUDIT"), libraries.core().into()]);
            ("LD_AUDIT", auditors)
        } else {
            let stubs = libraries.stubs.iter();
            let stubs = stubs
                .filter(|stub| *stub != LINKED_DRIVER)
                .map(|stub| libraries.folder.join(stub).into_os_string());
            ("LD_PRELOAD", joined([list("LD_PRELOAD"), joined(stubs)]))
        };
        let caches = KERNEL_CACHES.map(|cache| (cache, kernel_cache(run, cache).into()));
        let versions = program.versions_of_libraries(self.setup.cuda);
        let variables: [(&'static str, OsString); 8] = [
            (SETTINGS, to_variable(settings).into()),
            (VERSIONS, versions.into()),
            (LIBRARIES, libraries.folder.clone().into()),
            (LEDGER, ledger.into()),
            ("PATH", joined([programs(run).into(), list("PATH")])),
            ("TRITON_LIBCUDA_PATH", folder.into()),
            ("LIBRARY_PATH", folders),
            loaded,
        ];
        variables.into_iter().chain(caches)
    }
}

/// Returns the value of CUDA_VISIBLE_DEVICES that selects the GPU with this number among the
/// visible ones.
fn visible(ordinal: u32, inherited: Option<OsString>) -> OsString {
    let named = |list: &str| {
        list.split(',')
            .nth(ordinal as usize)
            .map(|name| name.trim().to_owned())
    };
    inherited
        .as_deref()
        .and_then(|list| named(list.to_str()?))
        .unwrap_or_else(|| ordinal.to_string())
        .into()
}

/// The folder with `nvidia-smi`.
fn programs(run: &Path) -> PathBuf {
    run.join("bin")
}

/// The folder in which linkers find the driver.
fn linked(run: &Path) -> PathBuf {
    run.join("link")
}

fn kernel_cache(run: &Path, variable: &str) -> PathBuf {
    run.join("caches").join(variable.to_ascii_lowercase())
}

/// Joins paths with colons. Skips empty ones, which would name the current folder.
fn joined(paths: impl IntoIterator<Item = OsString>) -> OsString {
    let paths: Vec<OsString> = paths.into_iter().filter(|path| !path.is_empty()).collect();
    paths.join(OsStr::new(":"))
}

#[cfg(test)]
mod tests;
