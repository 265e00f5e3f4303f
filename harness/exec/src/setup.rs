//! [`Setup`]: what a command needs to run on a simulated GPU: the torch that it imports, and the libraries that stand in for NVIDIA's.

use std::ffi::OsString;
use std::path::Path;

use harness_allocator::units::Bytes;
use harness_gpu_settings::gpus::Gpu;
use harness_gpu_settings::settings::{Cuda, Settings};

use crate::cache::{self, CacheError, Libraries};
use crate::environment::extensions;
use crate::launch::{self, LaunchError, Way};
use crate::torch::{self, Torch, TorchError};

/// Names the Python that `python` stands for at the beginning of a command.
const PYTHON: &str = "HARNESS_PYTHON";

/// The torch of a command, and the libraries for it.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Setup {
    pub torch: Torch,
    pub libraries: Libraries,
}

/// Why a command cannot be run on a simulated GPU.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// See what is wrong with its torch.
    #[error(transparent)]
    Torch(#[from] TorchError),
    /// See where the libraries are kept.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// See where the core library should be.
    #[error(transparent)]
    Launch(#[from] LaunchError),
}

impl Setup {
    /// Finds the torch of a command, or that of `python` where one is named, and makes what is missing.
    ///
    /// # Errors
    /// That it cannot be run.
    pub fn of(command: &[OsString], python: Option<&Path>) -> Result<Self, SetupError> {
        let torch = Torch::find(command, python)?;
        let core = launch::core_library()?;
        let cache = cache::folder(|name| std::env::var_os(name))?;
        let libraries = cache::libraries(&cache, &torch.folder, &extensions(&cache, &torch.packages), &core)?;
        Ok(Self { torch, libraries })
    }

    /// A machine with one such GPU, as this torch has to see it.
    #[must_use]
    pub fn settings(&self, gpu: &'static Gpu, memory: Bytes) -> Settings {
        let default = Settings::new(gpu, memory);
        let cuda = if self.torch.cuda.0 == 12 { Cuda::V12 } else { Cuda::V13 };
        Settings { cuda, cudnn: self.torch.cudnn.unwrap_or(default.cudnn), ..default }
    }

    /// How its libraries get in front of NVIDIA's.
    #[must_use]
    pub fn way(&self) -> Way {
        Way::of_libc(self.torch.libc)
    }
}

/// A command as it is started: `python` in front is the one that HARNESS_PYTHON names, without it the one in PATH, which may be called `python3` only.
#[must_use]
pub fn with_python(command: &[String]) -> Vec<OsString> {
    let mut words: Vec<OsString> = command.iter().map(OsString::from).collect();
    if let Some(first) = words.first_mut().filter(|first| *first == "python") {
        let named = std::env::var_os(PYTHON).filter(|named| !named.is_empty());
        let in_path = || ["python", "python3"].map(OsString::from).into_iter().find(|name| torch::in_path(name).is_some());
        if let Some(python) = named.or_else(in_path) {
            *first = python;
        }
    }
    words
}
