//! The identity of a command beyond its words, for [`merge`](super::merge): the [`inputs`] of its
//! first run, and the [`variables`] that change its run.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

use harness_allocator::allocator::caching::TorchVersion;
use harness_allocator::hash::{fnv1a, fnv1a_from};
use harness_base::files;

use crate::files::{hook_script, numbered};
use crate::torch;

/// What the shards of a run have in common, by name: the version of harness, the command, its
/// files, variables and options, the machine, torch, and the figures of the first run.
pub type Run = BTreeMap<String, String>;

const VARIABLE: &str = "the variable ";
const FILE: &str = "the file ";
const MODULE: &str = "the module ";
const ALLOCATOR: &str = "the settings of PyTorch's allocator";

/// The beginning of the names of files in which each Python process lists its own modules: names
/// and paths, each with a zero at its end.
const MODULES: &str = "modules-";
/// The endings of code and configurations.
const CODE: [&str; 5] = ["py", "sh", "yaml", "yml", "toml"];
/// Bytes of a file that are in memory at the same time.
const PART: u64 = 1 << 20;
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

/// Returns whether a name in a [`Run`] is of a file or a module. A shard without it ran before the
/// program wrote the file.
pub(super) fn is_of_file(name: &str) -> bool {
    name.starts_with(FILE) || name.starts_with(MODULE)
}

/// Returns hashes of the files that a run read, in whose folder the list of modules is: those that
/// the command names, and the modules of its Python processes that are neither installed nor of the
/// standard library. A file that changed after the run began is output, and no part of this.
pub fn inputs(command: &[OsString], run: &Path) -> io::Result<Run> {
    let hook = fs::metadata(hook_script(run))?;
    let began = (hook.mtime(), hook.mtime_nsec());
    // Programs can set the time of a modification, but not that of a change.
    let is_input = |path: &Path| {
        fs::metadata(path).is_ok_and(|file| (file.ctime(), file.ctime_nsec()) < began)
    };
    let named = hashes(named_files(command), &is_input);
    let mut modules: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (name, path) in modules_of(run)? {
        if is_input(&path) {
            // Each process has its own main module.
            modules.entry(name).or_default().insert(hash_of(&path));
        }
    }
    let modules = modules.into_iter().map(|(name, hashes)| {
        let hashes: Vec<String> = hashes.into_iter().collect();
        (
            format!("{MODULE}{name}"),
            format!("hash {}", hashes.join(" and ")),
        )
    });
    Ok(named.chain(modules).collect())
}

/// Returns hashes of the code and the configurations that a command names. Before a run, other
/// files may be output of an earlier run.
pub fn code(command: &[OsString]) -> Run {
    hashes(named_files(command), is_code).collect()
}

fn hashes(
    files: BTreeMap<String, PathBuf>,
    is_part: impl Fn(&Path) -> bool,
) -> impl Iterator<Item = (String, String)> {
    let parts = files.into_iter().filter(move |(_, path)| is_part(path));
    parts.map(|(name, path)| (format!("{FILE}{name}"), format!("hash {}", hash_of(&path))))
}

/// Returns whether a file is a program, or has the ending of code or a configuration.
fn is_code(path: &Path) -> bool {
    let ending = path.extension().and_then(OsStr::to_str);
    let is_program = || {
        let mut start = Vec::new();
        let file = files::open(path).map(|file| file.take(4));
        file.is_ok_and(|mut file| file.read_to_end(&mut start).is_ok())
            && (start.starts_with(b"#!") || start == *b"\x7fELF")
    };
    ending.is_some_and(|ending| CODE.contains(&ending)) || is_program()
}

/// Returns the modules that the processes of a run listed.
fn modules_of(run: &Path) -> io::Result<BTreeSet<(String, PathBuf)>> {
    let mut found = BTreeSet::new();
    for (_, path) in numbered(run, MODULES, "")? {
        let list = fs::read(path)?;
        let texts: Vec<&[u8]> = list.split(|byte| *byte == 0).collect();
        found.extend(texts.as_chunks().0.iter().map(|[name, path]| {
            let name = String::from_utf8_lossy(name).into_owned();
            (name, PathBuf::from(OsStr::from_bytes(path)))
        }));
    }
    Ok(found)
}

/// Returns the files that a command names: its script, other files, modules after `-m` in the
/// current folder and PYTHONPATH, and programs outside of the system's folders.
fn named_files(command: &[OsString]) -> BTreeMap<String, PathBuf> {
    let mut found: BTreeMap<String, PathBuf> = BTreeMap::new();
    let program = command
        .first()
        .and_then(|word| Some((word.to_string_lossy().into_owned(), torch::in_path(word)?)));
    found.extend(program.filter(|(_, path)| is_own(path)));
    for word in command {
        let is_named = |path: &Path| path.is_file() && is_own(path);
        if is_named(Path::new(word)) {
            found.insert(word.to_string_lossy().into_owned(), word.into());
            continue;
        }
        // A shell's command and an option with a value contain paths.
        let word = word.to_string_lossy();
        let paths = word
            .split(|c: char| c.is_whitespace() || "'\";=".contains(c))
            .filter(|path| is_named(Path::new(path)));
        found.extend(paths.map(|path| (path.to_owned(), path.into())));
    }
    found.extend(module(command));
    found
}

/// Returns the hash of a file's content, or why it cannot be read.
fn hash_of(path: &Path) -> String {
    let hash = || {
        let mut file = files::open(path)?;
        let mut content = Vec::new();
        let part = |file: &mut fs::File, content: &mut Vec<u8>| {
            content.clear();
            file.take(PART).read_to_end(content)
        };
        part(&mut file, &mut content)?;
        let mut hash = fnv1a(without_interpreter(&content));
        while part(&mut file, &mut content)? > 0 {
            hash = fnv1a_from(hash, &content);
        }
        io::Result::Ok(format!("{hash:016x}"))
    };
    hash().unwrap_or_else(|error| error.to_string())
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
