//! The libraries of this project that are loaded into programs: where they are, and whether the
//! dynamic linker can load them.

use std::io;
use std::path::{Path, PathBuf};

use harness_gpu_settings::interface::{INTERFACE, SECTION};

use crate::imports;

pub(crate) const CORE: &str = "libharness_simulated_gpu.so";
/// Path of the core library, if it is not next to the program.
pub(crate) const CORE_VARIABLE: &str = "HARNESS_SIMULATED_GPU_LIBRARY";
pub(crate) const LIMITER: &str = "libharness_limits.so";
/// Path of that library, if it is not next to the program.
pub(crate) const LIMITER_VARIABLE: &str = "HARNESS_LIMITS_LIBRARY";
/// The first GNU C library with a usable auditing interface. In earlier versions audited calls are
/// slow and some programs crash.
pub(crate) const AUDITING_LIBC: (u32, u32) = (2, 35);
/// The longest path that the dynamic linker accepts in LD_AUDIT: `SECURE_NAME_LIMIT` of the GNU C
/// library, without the final NUL. It silently ignores longer ones.
const LONGEST_PATH: usize = 254;

#[derive(Debug, thiserror::Error, miette::Diagnostic)]
pub enum LaunchError {
    #[error(
        "the library {file} is missing: it is not next to this program, in `deps` there, or in \
         `../lib/harness`. `ci/install` and the wheel of \
         `ci/wheel` install it, and `cargo build --release` builds it in target/release/deps. Set \
         {variable} if it is elsewhere"
    )]
    #[diagnostic(help(
        "run `ci/install` or `pip install \"$(ci/wheel)\"` in a clone of the project: `cargo \
         install` installs only the program"
    ))]
    Missing {
        file: &'static str,
        variable: &'static str,
    },
    #[error(
        "the library `{}` is of another build than this program: its version is {}, and that of \
         this program is {INTERFACE}",
        library.display(), found.as_deref().unwrap_or("older or unknown")
    )]
    #[diagnostic(help(
        "install both together with `ci/install` or `pip install \"$(ci/wheel)\"`, or build both \
         with `cargo build`; {variable} names another library"
    ))]
    OtherBuild {
        library: PathBuf,
        found: Option<String>,
        variable: &'static str,
    },
    #[error("the library that limits programs cannot be loaded from `{}`: the dynamic linker \
         accepts no path with a colon, a space or `$`, and none longer than {LONGEST_PATH} bytes; \
         move or copy the library", .0.display())]
    #[diagnostic(help("copy it to another folder and set {LIMITER_VARIABLE} to the copy"))]
    UnloadablePath(PathBuf),
    #[error(
        "the program's GNU C library has version {}.{}; limiting programs on a real GPU requires \
         {}.{} or later",
        .0.0, .0.1, AUDITING_LIBC.0, AUDITING_LIBC.1
    )]
    #[diagnostic(help("use a newer system, or leave out `--device` to simulate a GPU"))]
    OldLibc((u32, u32)),
    #[error(
        "the dynamic linker did not load the simulated GPU's library, or the one that limits \
         programs, into the program or a process that it started"
    )]
    #[diagnostic(help(
        "keep the run's variables, of which LD_AUDIT names the library: `env -i`, `env -u`, `sudo` \
         and `env=` of Python's `subprocess` remove them. If LD_AUDIT is set, the dynamic linker's \
         messages above or with `LD_DEBUG=files` have the reason, and a folder with a short and \
         simple path in HARNESS_CACHE may help"
    ))]
    NotLoaded,
    #[error("the program was ended: {0}")]
    #[diagnostic(help("build it with `nvcc --cudart shared`"))]
    LinkedRuntime(String),
    #[error("cannot create the run's temporary folder: {0}; free space there or set TMPDIR")]
    #[diagnostic(help("free disk space, or set TMPDIR to another folder"))]
    Folder(io::Error),
    #[error("cannot start `{program}`: {source}")]
    #[diagnostic(help("give an executable program"))]
    Start { program: String, source: io::Error },
}

impl LaunchError {
    /// Returns whether the user's command or system is the cause, not the installation of the
    /// harness or a full disk.
    pub const fn is_of_input(&self) -> bool {
        !matches!(
            self,
            Self::Missing { .. } | Self::OtherBuild { .. } | Self::Folder(_)
        )
    }
}

/// Returns the core library: from the variable, or next to this program.
pub(crate) fn core_library() -> Result<PathBuf, LaunchError> {
    of_this_build(CORE, CORE_VARIABLE)
}

/// Returns the library that limits programs on a real GPU: from the variable, or next to this
/// program. Fails if this version of the GNU C library cannot load it.
pub(crate) fn limiter(libc: (u32, u32)) -> Result<PathBuf, LaunchError> {
    if libc < AUDITING_LIBC {
        return Err(LaunchError::OldLibc(libc));
    }
    let library = of_this_build(LIMITER, LIMITER_VARIABLE)?;
    if is_loadable(&library) {
        Ok(library)
    } else {
        Err(LaunchError::UnloadablePath(library))
    }
}

/// Finds a library that was built from the same sources as this program, so that both agree on the
/// variables and the files of a run.
fn of_this_build(file: &'static str, variable: &'static str) -> Result<PathBuf, LaunchError> {
    let library = beside_program(file, variable).ok_or(LaunchError::Missing { file, variable })?;
    let found = imports::section(&library, SECTION);
    if found.as_deref() == Some(INTERFACE) {
        Ok(library)
    } else {
        Err(LaunchError::OtherBuild {
            library,
            found,
            variable,
        })
    }
}

/// Returns whether the dynamic linker loads a library with this path. It splits lists at colons and
/// spaces, expands `$`, and ignores long paths.
pub(crate) fn is_loadable(path: &Path) -> bool {
    let path = path.as_os_str().as_encoded_bytes();
    path.len() <= LONGEST_PATH
        && !path
            .iter()
            .any(|byte| byte.is_ascii_whitespace() || b":$".contains(byte))
}

pub(crate) fn beside_program(file: &str, variable: &str) -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(variable).filter(|named| !named.is_empty()) {
        return Some(PathBuf::from(named)).filter(|named| named.is_file());
    }
    let program = std::env::current_exe().ok()?;
    let folder = program.parent()?;
    // First cargo's `deps`, because building only the program renews only that; then next to the
    // program; then installed.
    let places = ["deps", "", "../lib/harness"];
    places
        .iter()
        .map(|place| folder.join(place).join(file))
        .find(|path| path.is_file())
}
