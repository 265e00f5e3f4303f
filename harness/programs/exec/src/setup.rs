//! [`Setup`] holds what a command needs to run on a simulated GPU: the torch that it imports, and
//! the stub libraries.

use std::path::{Path, PathBuf};
use std::{ffi::OsString, iter};

use harness_allocator::units::Bytes;
use harness_gpu_settings::gpus::Gpu;
use harness_gpu_settings::settings::{Cuda, CudnnWorkspace, Settings, Values};

use crate::cache::{self, CacheError, Libraries};
use crate::environment::extensions;
use crate::host_memory;
use crate::own_libraries::{self, LaunchError};
use crate::torch::{self, Torch, TorchError};

/// The interpreter to use if a command begins with `python`.
const PYTHON: &str = "HARNESS_PYTHON";

/// The torch of a command, and the libraries that are loaded into its processes: the stub libraries
/// and their core, or on a real GPU the library of `harness-limits` alone.
#[derive(Clone, Debug)]
pub struct Setup {
    pub torch: Torch,
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
    #[error("the program's Python, `{}`, has no {module}", python.display())]
    #[diagnostic(help("install {module}, or activate the environment that has it"))]
    NoModule { python: PathBuf, module: String },
}

impl Setup {
    /// Finds the torch that a command imports, or the torch of `python` if given, and writes
    /// missing libraries.
    pub fn of(command: &[OsString], python: Option<&Path>) -> Result<Self, SetupError> {
        let torch = Torch::find(command, python)?;
        let core = own_libraries::core_library()?;
        let cache = cache::folder(|name| std::env::var_os(name))?;
        let libraries = cache::libraries(
            &cache,
            &torch.folder,
            &extensions(&cache, &torch.packages),
            &core,
        )?;
        Ok(Self { torch, libraries })
    }

    /// Finds the torch that a command imports, and the library that limits programs on a real GPU.
    pub fn for_real_gpu(command: &[OsString], python: Option<&Path>) -> Result<Self, SetupError> {
        let torch = Torch::find(command, python)?;
        let library = own_libraries::limiter(torch.libc)?;
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
        Ok(Self { torch, libraries })
    }

    /// Fails if this torch's Python lacks one of these modules.
    pub fn with_modules(self, modules: &[String]) -> Result<Self, SetupError> {
        match modules.iter().find(|module| !self.torch.has_module(module)) {
            Some(module) => Err(SetupError::NoModule {
                python: self.torch.python,
                module: module.clone(),
            }),
            None => Ok(self),
        }
    }

    /// Returns the settings of a machine with one GPU of this kind, with the CUDA version of this
    /// torch.
    pub fn settings(&self, gpu: &'static Gpu, memory: Bytes) -> Settings {
        let default = Settings::new(gpu, memory);
        let cuda = if self.torch.cuda.0 == 12 {
            Cuda::V12
        } else {
            Cuda::V13
        };
        let cudnn_workspace = self
            .torch
            .cudnn_library()
            .map_or(default.cudnn_workspace.clone(), CudnnWorkspace::Library);
        Settings {
            cuda,
            cudnn_workspace,
            cudnn: self.torch.cudnn.unwrap_or(default.cudnn),
            values: Values::Copies,
            host_memory: Bytes(host_memory::available().0 / 2),
            ..default
        }
    }
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
