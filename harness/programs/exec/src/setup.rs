//! [`Setup`] holds what a command needs to run on a simulated GPU: its program, the CUDA release,
//! and the stub libraries.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{ffi::OsString, iter};

use harness_allocator::units::Bytes;
use harness_gpu_settings::gpus::Gpu;
use harness_gpu_settings::settings::{Cuda, CudnnWorkspace, Settings, Values};

use crate::cache::{self, CacheError, Libraries, Objects};
use crate::environment::extensions;
use crate::own_libraries::{self, LaunchError};
use crate::torch::{self, TorchError};
use crate::{host_memory, imports, program::Program};

/// The oldest compute capability that CUDA 13 supports.
const OLDEST_OF_CUDA_13: (u32, u32) = (7, 5);
/// The interpreter to use if a command begins with `python`.
const PYTHON: &str = "HARNESS_PYTHON";

/// The program of a command, and the libraries that are loaded into its processes: the stub
/// libraries and their core, or on a real GPU the library of `harness-limits` alone.
#[derive(Clone, Debug)]
pub struct Setup {
    pub program: Program,
    /// Whether its files, its torch or another package use CUDA.
    pub uses_cuda: bool,
    pub cuda: Cuda,
    /// What about the program or its CUDA release may be a mistake.
    pub warnings: Vec<String>,
    pub libraries: Libraries,
}

#[derive(Debug, thiserror::Error, miette::Diagnostic)]
pub enum SetupError {
    #[error(transparent)]
    #[diagnostic(transparent)]
    Torch(#[from] TorchError),
    #[error(transparent)]
    #[diagnostic(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    #[diagnostic(transparent)]
    Launch(#[from] LaunchError),
    #[error("the program has no {module}: its Python is {}", shown(python.as_deref()))]
    #[diagnostic(help("install {module}, or activate the environment that has it"))]
    NoModule {
        python: Option<PathBuf>,
        module: String,
    },
    #[error("{}", without_cuda(python.as_deref()))]
    #[diagnostic(help(
        "install a library that uses CUDA, or activate the environment that has it"
    ))]
    NoCuda { python: Option<PathBuf> },
}

impl SetupError {
    /// Returns whether the user's command or system is the cause, not the installation of the
    /// harness or a full disk.
    pub const fn is_of_input(&self) -> bool {
        match self {
            Self::Launch(error) => error.is_of_input(),
            Self::Cache(error) => !matches!(error, CacheError::Unwritable { .. }),
            Self::Torch(_) | Self::NoModule { .. } | Self::NoCuda { .. } => true,
        }
    }
}

/// Says that a program has nothing that uses CUDA.
pub fn without_cuda(python: Option<&Path>) -> String {
    let packages = "no torch and no other package that uses CUDA";
    match python {
        Some(python) => format!(
            "the program's Python, `{}`, has {packages}",
            python.display()
        ),
        None => {
            "the program is linked to no library that uses CUDA, and starts no Python".to_owned()
        }
    }
}

fn shown(python: Option<&Path>) -> String {
    python.map_or_else(
        || "not found".to_owned(),
        |python| format!("`{}`", python.display()),
    )
}

impl Setup {
    /// Finds what a command runs, or what `python` runs if given, and writes missing libraries for
    /// its CUDA release, or for `cuda` if given.
    pub fn of(
        command: &[OsString],
        python: Option<&Path>,
        cuda: Option<Cuda>,
    ) -> Result<Self, SetupError> {
        let is_static = command.first().map(|name| torch::check_program(name));
        let is_static = is_static.transpose()?.flatten();
        let (program, unusable) = Program::find(command, python)?;
        let core = own_libraries::core_library()?;
        let cache = cache::folder(|name| std::env::var_os(name))?;
        let extensions = extensions(&cache, &program.packages);
        // A PyTorch without CUDA may be beside a library that has it.
        if let Some(unusable) = unusable.filter(|_| extensions.is_empty()) {
            return Err(unusable.into());
        }
        let uses_cuda = program.torch.is_some()
            || !extensions.is_empty()
            || program
                .objects
                .iter()
                .any(|object| imports::uses_nvidia(object));
        let (cuda, doubt) = match cuda {
            Some(cuda) => (cuda, unprovided(&program, &extensions, cuda)),
            None => release(&program, &extensions),
        };
        let is_static = is_static.map(|program| {
            format!(
                "`{}` is linked statically: it cannot load the simulated GPU, only programs that \
                 it starts can",
                program.display()
            )
        });
        let torch = program.torch.as_ref().filter(|torch| torch.cuda == cuda);
        let objects = Objects {
            torch: torch.map(|torch| torch.folder.as_path()),
            others: &[program.objects.clone(), extensions].concat(),
            cuda,
        };
        let libraries = cache::libraries(&cache, objects, &core)?;
        Ok(Self {
            program,
            uses_cuda,
            cuda,
            warnings: doubt
                .into_iter()
                .chain(is_static)
                .chain(torch::run_by_shell(command))
                .collect(),
            libraries,
        })
    }

    /// Finds what a command runs, and the library that limits programs on a real GPU.
    pub fn for_real_gpu(command: &[OsString], python: Option<&Path>) -> Result<Self, SetupError> {
        let (program, _) = Program::find(command, python)?;
        let library = own_libraries::limiter(program.libc)?;
        let core = library
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let libraries = Libraries {
            folder: library.with_file_name(""),
            core,
            stubs: Vec::new(),
        };
        Ok(Self {
            program,
            uses_cuda: true,
            cuda: Cuda::V13,
            warnings: Vec::new(),
            libraries,
        })
    }

    /// Says that the libraries of the program's CUDA release have no code for this GPU.
    pub fn without_code_for(&self, gpu: &Gpu) -> Option<String> {
        let (major, minor) = gpu.capability;
        let is_too_old = self.cuda == Cuda::V13 && gpu.capability < OLDEST_OF_CUDA_13;
        is_too_old.then(|| {
            let (oldest, part) = OLDEST_OF_CUDA_13;
            format!(
                "{} has compute capability {major}.{minor}: libraries built for CUDA 13 have code \
                 for {oldest}.{part} and later only",
                gpu.device
            )
        })
    }

    /// Fails if nothing of the program uses CUDA.
    pub fn with_cuda(self) -> Result<Self, SetupError> {
        if self.uses_cuda {
            Ok(self)
        } else {
            let python = self.program.python;
            Err(SetupError::NoCuda { python })
        }
    }

    /// The version of the program's torch. Empty without torch.
    pub fn torch_version(&self) -> &str {
        self.program
            .torch
            .as_ref()
            .map_or("", |torch| torch.version.as_str())
    }

    /// Fails if the program's Python lacks one of these modules.
    pub fn with_modules(self, modules: &[String]) -> Result<Self, SetupError> {
        match modules
            .iter()
            .find(|module| !self.program.has_module(module))
        {
            Some(module) => Err(SetupError::NoModule {
                python: self.program.python,
                module: module.clone(),
            }),
            None => Ok(self),
        }
    }

    /// Returns the settings of a machine with one GPU of this kind, with the program's CUDA
    /// release.
    pub fn settings(&self, gpu: &'static Gpu, memory: Bytes) -> Settings {
        let default = Settings::new(gpu, memory);
        let cuda = self.cuda;
        let cudnn_workspace = self
            .program
            .cudnn_library(cuda)
            .map_or(default.cudnn_workspace.clone(), CudnnWorkspace::Library);
        Settings {
            cuda,
            cudnn_workspace,
            cudnn: self.program.cudnn(cuda).unwrap_or(default.cudnn),
            values: Values::Copies,
            host_memory: Bytes(host_memory::available().0 / 2),
            ..default
        }
    }
}

/// Returns the CUDA release that a program is built for, and why it could be another one. Its own
/// files decide first, then torch, the other packages and their names.
fn release(program: &Program, extensions: &[PathBuf]) -> (Cuda, Option<String>) {
    let of_files = |files: &[PathBuf]| -> BTreeMap<Cuda, String> {
        let found = imports::releases(files);
        found
            .into_iter()
            .map(|(release, file)| (release, file.display().to_string()))
            .collect()
    };
    let of_torch = || {
        program
            .torch
            .iter()
            .map(|torch| (torch.cuda, format!("torch {}", torch.version)))
            .collect()
    };
    let by: [&dyn Fn() -> BTreeMap<Cuda, String>; 4] = [
        &|| of_files(&program.objects),
        &of_torch,
        &|| of_files(extensions),
        &|| program.releases_of_packages(),
    ];
    let found = by.iter().map(|find| find()).find(|found| !found.is_empty());
    let Some(found) = found else {
        return (Cuda::V13, None);
    };
    let newest = found.keys().next_back().copied().unwrap_or(Cuda::V13);
    let others: Vec<String> = found
        .iter()
        .filter(|(release, _)| **release != newest)
        .map(|(release, by)| {
            format!(
                "`{by}` is built for CUDA {release}, and `{}` for CUDA {newest}, which the program \
                 gets: `--cuda {release}` changes this",
                found[&newest]
            )
        })
        .collect();
    (newest, others.into_iter().next())
}

/// Says that nothing of a program is built for this CUDA release, or that its torch is not.
fn unprovided(program: &Program, extensions: &[PathBuf], cuda: Cuda) -> Option<String> {
    if let Some(torch) = program.torch.as_ref().filter(|torch| torch.cuda != cuda) {
        return Some(format!(
            "torch {} is built for CUDA {}: it finds none of its libraries with `--cuda {cuda}`",
            torch.version, torch.cuda
        ));
    }
    let files = [program.objects.as_slice(), extensions].concat();
    let mut found: BTreeMap<Cuda, String> = program.releases_of_packages();
    let of_files = imports::releases(&files).into_iter();
    found.extend(of_files.map(|(release, file)| (release, file.display().to_string())));
    let (other, by) = found.iter().next().filter(|_| !found.contains_key(&cuda))?;
    Some(format!(
        "nothing of the program is built for CUDA {cuda}: `{by}` is built for CUDA {other}"
    ))
}

/// Returns the command that runs a program with this Python: a leading Python of the command is
/// replaced.
pub fn run_by(python: &Path, command: &[OsString]) -> Vec<OsString> {
    let is_python = |word: &OsString| Path::new(word).file_name().is_some_and(torch::is_python);
    let program = if command.first().is_some_and(is_python) {
        &command[1..]
    } else {
        command
    };
    iter::once(python.as_os_str().to_owned())
        .chain(program.iter().cloned())
        .collect()
}

/// Replaces a leading `python` with HARNESS_PYTHON, or else with `python` or `python3` from PATH.
pub fn with_python(command: &[String]) -> Vec<OsString> {
    let mut words: Vec<OsString> = command.iter().map(OsString::from).collect();
    if let Some(first) = words.first_mut().filter(|first| *first == "python") {
        let named = std::env::var_os(PYTHON).filter(|named| !named.is_empty());
        let in_path = || {
            ["python", "python3"]
                .map(OsString::from)
                .into_iter()
                .find(|name| torch::in_path(name).is_some())
        };
        if let Some(python) = named.or_else(in_path) {
            *first = python;
        }
    }
    words
}
