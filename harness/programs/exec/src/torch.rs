//! [`Torch`] is the PyTorch that a command will import. The command's `Interpreter` reports where
//! it would look, without importing it.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use harness_allocator::allocator::caching::TorchVersion;
use harness_base::files;
use harness_gpu_settings::settings::Cuda;
use serde::Deserialize;

use crate::imports::{self, Executable};

const PROBE: &str = include_str!("probe.py");
/// The oldest supported PyTorch.
const OLDEST: (u32, u32) = (2, 4);

const CUDA_BUILD: &str = "install a CUDA build, as `pip install torch` does on Linux; it needs no \
     GPU, and with `--no-deps` none of NVIDIA's packages";

/// A PyTorch built for CUDA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Torch {
    pub folder: PathBuf,
    pub version: String,
    /// The CUDA release that it was built for.
    pub cuda: Cuda,
    /// The cuDNN version that it requires, in the form of `cudnnGetVersion`, if known.
    pub cudnn: Option<u32>,
}

#[derive(Debug, thiserror::Error, miette::Diagnostic)]
pub enum TorchError {
    #[error("cannot find the program `{command}`: {reason}")]
    #[diagnostic(help(
        "give the program and its arguments after `--`, as in `-- python train.py`"
    ))]
    NoCommand { command: String, reason: String },
    #[error("cannot start `{command}`: {reason}")]
    #[diagnostic(help(
        "give the file of a program; `python FOLDER` runs the file `__main__.py` of a folder"
    ))]
    NotAFile { command: String, reason: String },
    #[error("`{command}` is a file of the current folder, but nothing in PATH has that name")]
    #[diagnostic(help(
        "write `./{command}`, or start it with Python, as in `-- python {command}`"
    ))]
    NotInPath { command: String },
    #[error("the script `{script}` needs `{interpreter}`, which is not an executable file")]
    #[diagnostic(help(
        "correct its `#!` line, or start it with an interpreter, as in `-- python {script}`"
    ))]
    NoInterpreter { script: String, interpreter: String },
    #[error(
        "the `#!` line of `{script}` ends with a carriage return, which the system takes for a \
         part of the interpreter's name"
    )]
    #[diagnostic(help("remove the carriage returns: `sed -i 's/\\r$//' {script}`"))]
    CarriageReturn { script: String },
    #[error("the script `{script}` has no `#!` line, so a shell would run it, not Python")]
    #[diagnostic(help("start it with Python, as in `-- python {script}`"))]
    NoFirstLine { script: String },
    #[error("the file `{command}` is not executable")]
    #[diagnostic(help(
        "start it with Python, as in `-- python {command}`, or make it executable with `chmod +x \
         {command}`"
    ))]
    NotExecutable { command: String },
    #[error("the program's Python, `{}`, does not work: {reason}", python.display())]
    #[diagnostic(help(
        "run the program without `harness exec` first, or name its Python with `--python PATH`"
    ))]
    Broken { python: PathBuf, reason: String },
    #[error(
        "torch {version} in `{}` is too old: install {}.{} or later",
        folder.display(),
        OLDEST.0,
        OLDEST.1,
    )]
    #[diagnostic(help("install a newer torch"))]
    TooOld { version: String, folder: PathBuf },
    #[error(
        "torch {version} in `{}` is built for {target}: install a PyTorch built for CUDA",
        folder.display(),
    )]
    #[diagnostic(help("{CUDA_BUILD}"))]
    NotCuda {
        version: String,
        folder: PathBuf,
        target: &'static str,
    },
    #[error("torch {version} is built for CUDA {cuda}: the simulated GPU supports CUDA 12 and 13")]
    #[diagnostic(help("{CUDA_BUILD}"))]
    OtherCuda { version: String, cuda: String },
    #[error("the program's Python, `{}`, is built for {machine}: the simulated GPU requires x86-64 \
         Linux with the GNU C library", python.display())]
    #[diagnostic(help("use a Python for x86-64 that is linked to the GNU C library"))]
    OtherMachine { python: PathBuf, machine: String },
    #[error("the program `{}` is built for {machine}: the simulated GPU requires x86-64 Linux",
        program.display())]
    #[diagnostic(help("build it for x86-64"))]
    ProgramOfOtherMachine { program: PathBuf, machine: String },
    #[error("the program `{}` starts with the dynamic linker `{linker}`: the simulated GPU \
         requires that of the GNU C library", program.display())]
    #[diagnostic(help("build it with the GNU C library, not with musl"))]
    OtherLinker { program: PathBuf, linker: String },
    #[error("the program's Python, `{}`, is set-user-ID or set-group-ID: the system ignores \
         LD_AUDIT and LD_PRELOAD for such programs; use another interpreter", python.display())]
    #[diagnostic(help(
        "use a Python without special rights, for example in a virtual environment"
    ))]
    SpecialRights { python: PathBuf },
}

/// What an interpreter reports.
#[derive(Deserialize)]
pub(crate) struct Found {
    pub(crate) python: PathBuf,
    is_64_bit: bool,
    machine: String,
    has_special_rights: bool,
    libc: Option<String>,
    pub(crate) packages: Vec<PathBuf>,
    pub(crate) torch: Option<FoundTorch>,
}

#[derive(Deserialize)]
pub(crate) struct FoundTorch {
    folder: PathBuf,
    version: Option<String>,
    cuda: Option<String>,
    hip: Option<String>,
    requires: Vec<String>,
}

impl Found {
    /// Returns the version of the C library, for example 2 and 36. Fails for a Python that the
    /// simulated GPU cannot run.
    pub(crate) fn libc(&self) -> Result<(u32, u32), TorchError> {
        let python = || self.python.clone();
        if self.has_special_rights {
            return Err(TorchError::SpecialRights { python: python() });
        }
        if !self.is_64_bit || self.machine != "x86_64" {
            let bits = if self.is_64_bit { "" } else { " with 32 bits" };
            return Err(TorchError::OtherMachine {
                python: python(),
                machine: self.machine.clone() + bits,
            });
        }
        self.libc
            .as_deref()
            .and_then(|libc| two_numbers(libc.strip_prefix("glibc ")?))
            .ok_or_else(|| TorchError::OtherMachine {
                python: python(),
                machine: "a system without the GNU C library".to_owned(),
            })
    }
}

impl FoundTorch {
    pub(crate) fn check(self) -> Result<Torch, TorchError> {
        let Self {
            folder,
            version,
            cuda,
            hip,
            requires,
        } = self;
        let version = version.unwrap_or_else(|| "without a version".to_owned());
        if two_numbers(&version).is_none_or(|version| version < OLDEST) {
            return Err(TorchError::TooOld { version, folder });
        }
        let has_cuda = folder.join("lib/libtorch_cuda.so").exists();
        let Some(cuda) = cuda.filter(|_| has_cuda) else {
            let target = if hip.is_some() { "ROCm" } else { "CPUs" };
            return Err(TorchError::NotCuda {
                version,
                folder,
                target,
            });
        };
        let release = two_numbers(&cuda).and_then(|(major, _)| major.to_string().parse().ok());
        let Some(release) = release else {
            return Err(TorchError::OtherCuda { version, cuda });
        };
        Ok(Torch {
            folder,
            version,
            cuda: release,
            cudnn: requires.iter().find_map(|line| cudnn_version(line)),
        })
    }
}

/// Returns the variable from which this PyTorch takes its allocator's settings, and the settings.
/// `variable` returns the value of a variable.
pub fn settings_of_allocator(
    torch: &str,
    variable: impl Fn(&str) -> Option<String>,
) -> Option<(&'static str, String)> {
    let version: TorchVersion = torch.parse().unwrap_or_default();
    version
        .settings_variables()
        .iter()
        .find_map(|name| Some((*name, variable(name)?)))
}

/// Returns a warning for each variable with allocator settings that is set without effect.
pub fn settings_without_effect(
    torch: &str,
    variable: impl Fn(&str) -> Option<String>,
) -> Vec<String> {
    let effective = settings_of_allocator(torch, &variable);
    let is_ignored = |conf: &String| {
        effective
            .as_ref()
            .is_none_or(|(_, effective)| effective != conf)
    };
    let version: TorchVersion = torch.parse().unwrap_or_default();
    let read = match &effective {
        Some((name, conf)) => format!("{name} first, which is `{conf}`"),
        None => format!("only {}", version.settings_variables().join(", ")),
    };
    let all = TorchVersion::default().settings_variables().iter();
    let ignored = all.filter_map(|name| Some((name, variable(name).filter(is_ignored)?)));
    ignored
        .map(|(name, conf)| {
            format!("warning: {name}=`{conf}` has no effect: PyTorch {version} reads {read}")
        })
        .collect()
}

pub(crate) fn two_numbers(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Parses the version in `nvidia-cudnn-cu13==9.19.0.56; platform_system == "Linux"` into the form
/// of `cudnnGetVersion`.
fn cudnn_version(requirement: &str) -> Option<u32> {
    let (_, version) = requirement.split_once("==")?;
    cudnn_number(version.split(';').next()?.trim())
}

/// Parses `9.19.0.56` into the form of `cudnnGetVersion`.
pub(crate) fn cudnn_number(version: &str) -> Option<u32> {
    let mut numbers = version.split('.').map(str::parse::<u32>);
    let (major, minor, patch) = (
        numbers.next()?.ok()?,
        numbers.next()?.ok()?,
        numbers.next()?.ok()?,
    );
    Some(major * 10_000 + minor * 100 + patch)
}

/// A Python, with the options that affect its imports.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Interpreter {
    program: PathBuf,
    options: Vec<OsString>,
    /// The folder of the script, if the command runs one.
    script_folder: Option<PathBuf>,
}

impl Interpreter {
    pub(crate) const fn plain(program: PathBuf) -> Self {
        Self {
            program,
            options: Vec::new(),
            script_folder: None,
        }
    }

    /// Finds the Python that a command starts. First the command itself or its `#!` line, then the
    /// first argument that is a Python or a Python script, as in `timeout 1h python train.py`, then
    /// the Python in PATH, which a shell script would start. `None` if there is no Python at all.
    pub(crate) fn of_command(command: &[OsString]) -> Result<Option<Self>, TorchError> {
        let first = match command.first() {
            Some(name) => in_path(name).ok_or_else(|| not_startable(name))?,
            None => return Ok(None),
        };
        if let Some(interpreter) = Self::of_program(&first, &command[1..]) {
            return Ok(Some(interpreter));
        }
        let started = (1..command.len())
            .find_map(|index| Self::of_program(&in_path(&command[index])?, &command[index + 1..]));
        let in_path = || {
            ["python3", "python"]
                .iter()
                .find_map(|name| in_path(OsStr::new(name)))
                .map(Self::plain)
        };
        Ok(started.or_else(in_path))
    }

    /// Returns `None` if the program is neither a Python nor a Python script.
    fn of_program(program: &Path, arguments: &[OsString]) -> Option<Self> {
        if is_python(program.file_name()?) {
            return Some(Self::with_arguments(program.to_owned(), arguments));
        }
        let script = first_line(program).ok()??;
        let words: Vec<&str> = script.split_whitespace().collect();
        let index = words
            .iter()
            .position(|word| is_python(Path::new(word).file_name().unwrap_or_default()))?;
        let options: Vec<OsString> = words[index + 1..].iter().map(OsString::from).collect();
        Some(Self::with_arguments(
            in_path(OsStr::new(words[index]))?,
            &options,
        ))
    }

    /// Keeps only the options that change where modules are found.
    fn with_arguments(program: PathBuf, arguments: &[OsString]) -> Self {
        let mut interpreter = Self::plain(program);
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            let Some(option) = argument.to_str().and_then(|text| text.strip_prefix('-')) else {
                // Python resolves links before it takes the folder.
                let script = Path::new(argument).canonicalize().ok();
                interpreter.script_folder =
                    script.and_then(|script| Some(script.parent()?.to_owned()));
                break;
            };
            if option.starts_with(['c', 'm']) || option.is_empty() {
                break;
            }
            if ["W", "X", "-check-hash-based-pycs"].contains(&option) {
                arguments.next();
                continue;
            }
            let letters = if option.starts_with(['-', 'W', 'X']) {
                ""
            } else {
                option
            };
            interpreter.options.extend(
                letters
                    .chars()
                    .filter(|letter| "IEsSP".contains(*letter))
                    .map(|letter| format!("-{letter}").into()),
            );
            if letters.contains(['c', 'm']) {
                break;
            }
        }
        interpreter
    }

    pub(crate) fn probe(self) -> Result<Found, TorchError> {
        let mut command = Command::new(&self.program);
        command
            .args(&self.options)
            .arg("-c")
            .arg(PROBE)
            .args(&self.script_folder)
            .stdin(Stdio::null());
        let broken = |reason: String| TorchError::Broken {
            python: self.program.clone(),
            reason,
        };
        let output = command
            .output()
            .map_err(|error| broken(error.to_string()))?;
        let last_line = |bytes: &[u8]| {
            String::from_utf8_lossy(bytes)
                .trim_end()
                .lines()
                .next_back()
                .unwrap_or_default()
                .to_owned()
        };
        if !output.status.success() {
            return Err(broken(format!(
                "{}: {}",
                output.status,
                last_line(&output.stderr)
            )));
        }
        serde_json::from_str(&last_line(&output.stdout))
            .map_err(|error| broken(format!("unexpected output: {error}")))
    }
}

/// Matches `python`, `python3`, `python3.13t`, `pypy3`.
pub(crate) fn is_python(name: &OsStr) -> bool {
    let version = name.to_str().and_then(|name| {
        name.strip_prefix("python")
            .or_else(|| name.strip_prefix("pypy"))
    });
    version.is_some_and(|version| {
        version
            .trim_end_matches('t')
            .chars()
            .all(|c| c.is_ascii_digit() || c == '.')
    })
}

/// Returns whether a command begins with a Python or a Python script, not with a shell that
/// starts one.
pub fn begins_with_python(command: &[OsString]) -> bool {
    let first = command.first().and_then(|name| in_path(name));
    first.is_some_and(|program| Interpreter::of_program(&program, &[]).is_some())
}

/// Finds a program like `execvp`.
pub fn in_path(name: &OsStr) -> Option<PathBuf> {
    if name.as_encoded_bytes().contains(&b'/') {
        return Some(PathBuf::from(name)).filter(|path| is_program(path));
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|path| is_program(path))
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    path.metadata()
        .is_ok_and(|there| there.is_file() && there.permissions().mode() & 0o111 != 0)
}

/// Returns why [`in_path`] finds no program with this name.
fn not_startable(name: &OsStr) -> TorchError {
    let command = name.to_string_lossy().into_owned();
    let path = Path::new(name);
    let has_folder = name.as_encoded_bytes().contains(&b'/');
    if !has_folder {
        return if path.is_file() {
            TorchError::NotInPath { command }
        } else {
            let reason = "nothing in PATH has that name".to_owned();
            TorchError::NoCommand { command, reason }
        };
    }
    let reason = match path.metadata() {
        Ok(there) if there.is_file() => return TorchError::NotExecutable { command },
        Ok(there) if there.is_dir() => {
            let reason = "this is a folder".to_owned();
            return TorchError::NotAFile { command, reason };
        }
        Ok(_) => {
            let reason = files::open(path).err().map(|error| error.to_string());
            let reason = reason.unwrap_or_default();
            return TorchError::NotAFile { command, reason };
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => path.read_link().map_or_else(
            |_| "there is no such file".to_owned(),
            |target| {
                format!(
                    "it is a link to `{}`, which does not exist",
                    target.display()
                )
            },
        ),
        Err(error) => error.to_string(),
    };
    TorchError::NoCommand { command, reason }
}

/// Fails if the system cannot start the program of a command, for example because the interpreter
/// of a script is missing. A shell runs a script without a `#!` line, which cannot be right for a
/// Python script.
pub(crate) fn check_start(command: &[OsString]) -> Result<(), TorchError> {
    let Some(name) = command.first() else {
        return Ok(());
    };
    let program = in_path(name).ok_or_else(|| not_startable(name))?;
    let script = name.to_string_lossy().into_owned();
    // A program that cannot be read may still be executable.
    let Ok(start) = start_of(&program) else {
        return Ok(());
    };
    let Some(first) = start
        .strip_prefix("#!")
        .and_then(|rest| rest.split('\n').next())
    else {
        return if program.extension() == Some(OsStr::new("py")) && !start.contains('\0') {
            Err(TorchError::NoFirstLine { script })
        } else {
            Ok(())
        };
    };
    if first.ends_with('\r') {
        return Err(TorchError::CarriageReturn { script });
    }
    let interpreter = match second_line(&start) {
        Some(second) => quoted_path(second),
        None => first.split_whitespace().next(),
    };
    match interpreter {
        Some(interpreter) if !is_program(Path::new(interpreter)) => {
            let interpreter = interpreter.to_owned();
            Err(TorchError::NoInterpreter {
                script,
                interpreter,
            })
        }
        _ => Ok(()),
    }
}

/// Says that a shell runs the program of a command, because it is a script without a `#!` line.
pub(crate) fn run_by_shell(command: &[OsString]) -> Option<String> {
    let program = in_path(command.first()?)?;
    let start = start_of(&program).ok()?;
    let is_script = command_of_script(&start).is_none() && !start.contains('\0');
    is_script.then(|| {
        format!(
            "`{}` has no `#!` line, so /bin/sh runs it",
            program.display()
        )
    })
}

/// Returns the executable file that the system starts for a program with this name: the
/// interpreter of a script.
fn started_file(program: &OsStr) -> Option<PathBuf> {
    let program = in_path(program)?;
    let interpreter = first_line(&program)
        .ok()
        .flatten()
        .and_then(|line| in_path(OsStr::new(line.split_whitespace().next()?)));
    Some(interpreter.unwrap_or(program))
}

/// Returns whether the dynamic linker starts a program with this name, or the interpreter of a
/// script.
pub(crate) fn is_linked_dynamically(program: &OsStr) -> bool {
    started_file(program).is_some_and(|program| imports::is_linked_dynamically(&program))
}

/// Fails if the system cannot start this program with our libraries. Returns it if it is linked
/// statically: only programs that it starts can have them.
pub(crate) fn check_program(program: &OsStr) -> Result<Option<PathBuf>, TorchError> {
    let Some(program) = started_file(program) else {
        return Ok(None);
    };
    match Executable::of(&program) {
        Executable::Dynamic | Executable::Unknown => Ok(None),
        Executable::Static => Ok(Some(program)),
        Executable::OtherMachine(machine) => {
            Err(TorchError::ProgramOfOtherMachine { program, machine })
        }
        Executable::OtherLinker(linker) => Err(TorchError::OtherLinker { program, linker }),
    }
}

/// Returns the command that starts a script: the words after `#!`. For a path too long for the
/// system, pip and uv write `/bin/sh` there and the interpreter into the second line, `'''exec'
/// '/path/to/python' "$0" "$@"`. Returns `None` for other files.
fn first_line(program: &Path) -> io::Result<Option<String>> {
    start_of(program).map(|start| command_of_script(&start))
}

fn start_of(program: &Path) -> io::Result<String> {
    let mut start = Vec::new();
    files::open(program)?.take(4096).read_to_end(&mut start)?;
    Ok(String::from_utf8_lossy(&start).into_owned())
}

fn command_of_script(start: &str) -> Option<String> {
    let first = start.lines().next()?.strip_prefix("#!")?;
    Some(match second_line(start) {
        Some(second) => second
            .split(" \"$0\"")
            .next()
            .unwrap_or_default()
            .replace(['\'', '"'], ""),
        None => first.to_owned(),
    })
}

/// Returns the rest of a second line that names the interpreter.
pub(crate) fn second_line(start: &str) -> Option<&str> {
    let mut lines = start.lines();
    let first = lines.next()?.strip_prefix("#!")?;
    let second = lines.next()?.strip_prefix("'''exec'")?;
    (first.trim() == "/bin/sh").then_some(second)
}

/// Returns the path of the interpreter in a second line. Returns `None` if a shell computes it, as
/// in environments that can be moved.
fn quoted_path(second: &str) -> Option<&str> {
    let text = second.trim_start();
    let path = match text.chars().next()? {
        quote @ ('\'' | '"') => text[1..].split(quote).next()?,
        _ => text.split_whitespace().next()?,
    };
    let rest = text.split_once(path)?.1.trim_start_matches(['\'', '"']);
    (!path.contains(['$', '`', '\\']) && rest.starts_with(' ')).then_some(path)
}

#[cfg(test)]
mod tests;
