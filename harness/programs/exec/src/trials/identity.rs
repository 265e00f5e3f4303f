//! The identity of a command beyond its words, for [`merge`](super::merge): the contents of the
//! [`files_of`] that it names, and the [`variables`] that change its run.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

use harness_allocator::allocator::caching::TorchVersion;
use harness_allocator::hash::fnv1a;
use harness_base::files;

use crate::torch;

/// What the shards of a run have in common, by name: the version of harness, the command, its
/// files, variables and options, the machine, torch, and the figures of the first run.
pub type Run = BTreeMap<String, String>;

const VARIABLE: &str = "the variable ";
const FILE: &str = "the file ";
const ALLOCATOR: &str = "the settings of PyTorch's allocator";

/// Code and configurations. Other files may be output, which each run changes.
const READ: [&str; 5] = ["py", "sh", "yaml", "yml", "toml"];
/// The system's programs, whose builds differ between machines.
const OF_SYSTEM: [&str; 4] = ["/bin", "/sbin", "/usr/bin", "/usr/sbin"];
/// What the names of variables begin with that PyTorch, other libraries of CUDA and our allocators
/// read.
const READ_VARIABLES: [&str; 17] = [
    "PYTORCH_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "CUDA_",
    "CUBLAS",
    "CUDNN_",
    "NCCL_",
    "NVIDIA_TF32_OVERRIDE",
    "XLA_",
    "JAX_",
    "TF_CUDNN_",
    "TF_FORCE_GPU_",
    "TF_GPU_",
    "TF_XLA_",
    "CUPY_",
    "RMM_",
    "HARNESS_",
];
/// Variables of these libraries with places, which differ between machines.
const PLACES: [&str; 8] = [
    "PATH", "DIR", "HOME", "ROOT", "FILE", "FILENAME", "CACHE", "LIBRARY",
];
const OF_HARNESS: &str = "HARNESS_";
/// The end of the names of our allocators' settings. The machine has the effect of our other
/// variables.
const CONF: &str = "_CONF";

/// Returns whether a name in a [`Run`] is of a variable. A shard without it ran without the
/// variable.
pub(super) fn is_of_environment(name: &str) -> bool {
    name.starts_with(VARIABLE) || name == ALLOCATOR
}

/// Returns whether a name in a [`Run`] is of a file. A shard without it ran before the program
/// wrote the file.
pub(super) fn is_of_file(name: &str) -> bool {
    name.starts_with(FILE)
}

/// Returns hashes of the files with the code and the configuration of a command: scripts, modules
/// after `-m` in the current folder and PYTHONPATH, and programs outside of the system's folders.
pub fn files_of(command: &[OsString]) -> Run {
    let mut found: BTreeMap<String, PathBuf> = BTreeMap::new();
    let program = command
        .first()
        .and_then(|word| Some((word.to_string_lossy().into_owned(), torch::in_path(word)?)));
    found.extend(program.filter(|(_, path)| is_own(path)));
    for word in command {
        let word = word.to_string_lossy();
        // A shell's command and an option with a value contain paths.
        let paths = word
            .split(|c: char| c.is_whitespace() || "'\";=".contains(c))
            .filter(|path| is_read(Path::new(path)));
        found.extend(paths.map(|path| (path.to_owned(), path.into())));
    }
    found.extend(script(command).map(|path| (path.display().to_string(), path)));
    found.extend(module(command));
    let hash = |(name, path): (String, PathBuf)| {
        let content = fs::read(path).map_or_else(
            |error| error.to_string(),
            |content| format!("{:016x}", fnv1a(without_interpreter(&content))),
        );
        (format!("{FILE}{name}"), format!("hash {content}"))
    };
    found.into_iter().map(hash).collect()
}

/// The path of the interpreter in a script's first or second line differs between machines.
fn without_interpreter(content: &[u8]) -> &[u8] {
    if !content.starts_with(b"#!") {
        return content;
    }
    let start = String::from_utf8_lossy(&content[..content.len().min(4096)]);
    let lines = 1 + usize::from(torch::second_line(&start).is_some());
    let mut parts = content.splitn(lines + 1, |byte| *byte == b'\n');
    parts.nth(lines).unwrap_or_default()
}

fn is_own(program: &Path) -> bool {
    let is_of_system = program
        .parent()
        .and_then(|folder| folder.canonicalize().ok())
        .is_some_and(|folder| OF_SYSTEM.iter().any(|system| folder == Path::new(system)));
    !is_of_system && !program.file_name().is_some_and(torch::is_python)
}

fn is_read(path: &Path) -> bool {
    let is_program = || {
        let mut start = Vec::new();
        let file = files::open(path).map(|file| file.take(4));
        file.is_ok_and(|mut file| file.read_to_end(&mut start).is_ok())
            && (start.starts_with(b"#!") || start == *b"\x7fELF")
    };
    let ending = path.extension().and_then(OsStr::to_str);
    path.is_file()
        && is_own(path)
        && (ending.is_some_and(|ending| READ.contains(&ending)) || is_program())
}

/// Returns the script that a Python of the command runs.
fn script(command: &[OsString]) -> Option<PathBuf> {
    let is_python = |word: &OsString| Path::new(word).file_name().is_some_and(torch::is_python);
    let mut words = command.iter().skip_while(|word| !is_python(word)).skip(1);
    let script = words.find(|word| !word.as_encoded_bytes().starts_with(b"-"))?;
    Some(PathBuf::from(script)).filter(|script| script.is_file())
}

/// Returns the file of the module after `-m`, with its name relative to the folder that has it.
fn module(command: &[OsString]) -> Option<(String, PathBuf)> {
    let mut words = command.iter().skip_while(|word| *word != "-m").skip(1);
    let name = words.next()?.to_str()?.replace('.', "/");
    let path = env::var_os("PYTHONPATH").unwrap_or_default();
    let folders = [PathBuf::from(".")]
        .into_iter()
        .chain(env::split_paths(&path));
    let in_folder = |folder: PathBuf| {
        [format!("{name}.py"), format!("{name}/__main__.py")]
            .into_iter()
            .map(|name| (name.clone(), folder.join(name)))
            .find(|(_, path)| path.is_file())
    };
    folders.into_iter().find_map(in_folder)
}

/// Returns the variables with an effect on a run, and the settings that PyTorch's allocator takes
/// from the environment unless `has_alloc_conf`, because options then replace them.
pub fn variables(
    torch: &str,
    has_alloc_conf: bool,
    environment: impl IntoIterator<Item = (OsString, OsString)>,
) -> Run {
    let all: BTreeMap<String, String> = environment
        .into_iter()
        .filter_map(|(name, value)| {
            Some((
                name.into_string().ok()?,
                value.to_string_lossy().into_owned(),
            ))
        })
        .collect();
    let settings = torch::settings_of_allocator(torch, |name| all.get(name).cloned())
        .filter(|_| !has_alloc_conf)
        .map(|(_, conf)| conf);
    let settings = settings.map(|conf| (ALLOCATOR.to_owned(), conf));
    let of_allocator = TorchVersion::default().settings_variables();
    let has_effect = |name: &str| {
        let ending = name.rsplit('_').next().unwrap_or_default();
        READ_VARIABLES.iter().any(|begin| name.starts_with(begin))
            && !PLACES.contains(&ending)
            && !of_allocator.contains(&name)
            && (!name.starts_with(OF_HARNESS) || name.ends_with(CONF))
    };
    all.iter()
        .filter(|(name, _)| has_effect(name))
        .map(|(name, value)| (format!("{VARIABLE}{name}"), value.clone()))
        .chain(settings)
        .collect()
}

#[cfg(test)]
mod tests;
