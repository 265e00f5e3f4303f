//! [`Program`] is what a command runs: its Python with the packages that it could import, or an
//! executable file. Both show for which CUDA release the program was built.

use std::collections::BTreeMap;
use std::ffi::{CStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use harness_gpu_settings::settings::Cuda;

use crate::imports;
use crate::torch::{self, Interpreter, Torch, TorchError, two_numbers};

/// Parts of the names of packages that are built for a CUDA release, as in `nvidia-nccl-cu13`,
/// `jax-cuda13-plugin` and `cupy-cuda13x`. NVIDIA's runtime has its release as its version.
const MARKS: [&str; 2] = ["cu", "cuda"];
const RUNTIME_PACKAGE: &str = "nvidia_cuda_runtime";

/// A command's program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// The Python that the command is, or may start later.
    pub python: Option<PathBuf>,
    /// The version of the C library, for example 2 and 36.
    pub libc: (u32, u32),
    /// The folders of the packages.
    pub packages: Vec<PathBuf>,
    pub torch: Option<Torch>,
    /// The executable files of the command, with the libraries that they are linked to.
    pub objects: Vec<PathBuf>,
}

impl Program {
    /// Finds what this command runs, with the given `python` if it starts one. Also returns why its
    /// torch cannot be used, if it has one: the program may use another library.
    pub fn find(
        command: &[OsString],
        python: Option<&Path>,
    ) -> Result<(Self, Option<TorchError>), TorchError> {
        let interpreter = match python {
            Some(python) => Some(Interpreter::plain(python.to_owned())),
            None => {
                torch::check_start(command)?;
                Interpreter::of_command(command)?
            }
        };
        let objects = objects(command);
        let bare = Self {
            libc: own_libc(),
            objects,
            ..Self::default()
        };
        // An executable file need not start the Python in PATH.
        let is_guess = python.is_none() && !bare.objects.is_empty() && !starts_python(command);
        let Some(interpreter) = interpreter else {
            return Ok((bare, None));
        };
        let found = interpreter.probe().and_then(|found| {
            let libc = found.libc()?;
            Ok((found, libc))
        });
        let (found, libc) = match found {
            Ok(found) => found,
            Err(_) if is_guess => return Ok((bare, None)),
            Err(error) => return Err(error),
        };
        torch::check_start(command)?;
        let (torch, unusable) = match found.torch.map(torch::FoundTorch::check) {
            None => (None, None),
            Some(Ok(torch)) => (Some(torch), None),
            Some(Err(error)) => (None, (!is_guess).then_some(error)),
        };
        let program = Self {
            python: Some(found.python),
            libc,
            packages: found.packages,
            torch,
            ..bare
        };
        Ok((program, unusable))
    }

    /// Whether a package or file of this name is installed for this Python.
    pub fn has_module(&self, name: &str) -> bool {
        self.places()
            .any(|place| place.join(name).is_dir() || place.join(format!("{name}.py")).is_file())
    }

    /// The folders of the packages, that of torch first.
    fn places(&self) -> impl Iterator<Item = &Path> {
        self.torch
            .iter()
            .filter_map(|torch| torch.folder.parent())
            .chain(self.packages.iter().map(PathBuf::as_path))
    }

    /// Returns the part of cuDNN that plans without a device, if the environment has it. cuDNN can
    /// since version 9.8.
    pub fn cudnn_library(&self, cuda: Cuda) -> Option<String> {
        self.cudnn(cuda).filter(|version| *version >= 90_800)?;
        let library = self
            .places()
            .map(|place| place.join("nvidia/cudnn/lib/libcudnn_graph.so.9"))
            .find(|library| library.is_file());
        library?.into_os_string().into_string().ok()
    }

    /// Returns the version of cuDNN in the form of `cudnnGetVersion`: the one that torch requires,
    /// else the one that is installed for this CUDA release.
    pub fn cudnn(&self, cuda: Cuda) -> Option<u32> {
        match &self.torch {
            Some(torch) => torch.cudnn,
            None => torch::cudnn_number(self.libraries(cuda).get("cudnn")?),
        }
    }

    /// Returns the versions of NVIDIA's installed libraries for a CUDA release. A package names its
    /// release, as in `nvidia_cublas_cu12`; from CUDA 13 on, most do not.
    fn libraries(&self, cuda: Cuda) -> BTreeMap<String, String> {
        let of_library = |(name, version): (String, String)| {
            let name = name.strip_prefix("nvidia_")?;
            match name.rsplit_once('_') {
                Some((library, word)) if release_of_word(word).is_some() => {
                    (release_of_word(word) == Some(cuda)).then(|| (library.to_owned(), version))
                }
                _ => (cuda != Cuda::V12).then(|| (name.to_owned(), version)),
            }
        };
        self.versions().into_iter().filter_map(of_library).collect()
    }

    /// Returns the installed packages with their versions. Python imports a package from the first
    /// folder that has it.
    fn versions(&self) -> BTreeMap<String, String> {
        let entries = self
            .packages
            .iter()
            .filter_map(|folder| fs::read_dir(folder).ok());
        let names = entries
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok());
        let versions = names.filter_map(|name| {
            let (name, version) = name.strip_suffix(".dist-info")?.rsplit_once('-')?;
            Some((name.to_lowercase().replace('-', "_"), version.to_owned()))
        });
        let mut found = BTreeMap::new();
        versions.for_each(|(name, version)| {
            found.entry(name).or_insert(version);
        });
        found
    }

    /// Returns the versions of NVIDIA's installed libraries for a CUDA release, as in
    /// `cublas=13.1.0.3,cufft=12.0.0.61`.
    pub(crate) fn versions_of_libraries(&self, cuda: Cuda) -> String {
        let libraries = self.libraries(cuda);
        let found = libraries
            .iter()
            .map(|(name, version)| format!("{name}={version}"));
        found.collect::<Vec<_>>().join(",")
    }

    /// Returns the CUDA releases that the installed packages are built for, each with a package
    /// that shows it.
    pub fn releases_of_packages(&self) -> BTreeMap<Cuda, String> {
        let mut found = BTreeMap::new();
        for (name, version) in self.versions() {
            let of_name = || name.split('_').find_map(release_of_word);
            let release = if name == RUNTIME_PACKAGE {
                two_numbers(&version).and_then(|(major, _)| release(&major.to_string()))
            } else {
                of_name()
            };
            if let Some(release) = release {
                found
                    .entry(release)
                    .or_insert_with(|| format!("{name} {version}"));
            }
        }
        found
    }
}

/// Returns the release in a word such as `cu12`, `cuda13` or `cuda12x`.
fn release_of_word(word: &str) -> Option<Cuda> {
    let number = MARKS.iter().find_map(|mark| {
        let rest = word.strip_prefix(mark)?;
        rest.starts_with(|c: char| c.is_ascii_digit())
            .then_some(rest)
    })?;
    release(number.trim_end_matches('x'))
}

fn release(major: &str) -> Option<Cuda> {
    major.parse().ok()
}

/// Returns the executable files among the words of a command, with the libraries beside them or in
/// LD_LIBRARY_PATH that they are linked to.
fn objects(command: &[OsString]) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = command
        .iter()
        .filter_map(|word| torch::in_path(word))
        .filter(|file| imports::is_linked_dynamically(file))
        .collect();
    let given = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let given: Vec<PathBuf> = std::env::split_paths(&given).collect();
    let mut next = 0;
    while let Some(file) = found.get(next).cloned() {
        for library in imports::linked_libraries(&file, &given) {
            if !found.contains(&library) {
                found.push(library);
            }
        }
        next += 1;
    }
    found
}

fn starts_python(command: &[OsString]) -> bool {
    command
        .iter()
        .any(|word| Path::new(word).file_name().is_some_and(torch::is_python))
        || torch::begins_with_python(command)
}

/// The version of the C library of this process, which is that of the system's other programs.
fn own_libc() -> (u32, u32) {
    // SAFETY: the function returns a constant string.
    let version = unsafe { CStr::from_ptr(libc::gnu_get_libc_version()) };
    two_numbers(&version.to_string_lossy()).unwrap_or_default()
}

#[cfg(test)]
mod tests;
