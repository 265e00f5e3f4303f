//! The process that runs an allocator library. It makes stub libraries for the CUDA libraries that
//! the library needs. Then it calls the core library `harness-library-host`, which forwards CUDA
//! calls to the harness.

use std::mem::{self, ManuallyDrop};
use std::path::{Path, PathBuf};
use std::{collections::BTreeSet, ffi::c_int, fs, io, os::unix::fs::symlink};

use harness_allocator::allocator::library::wire::{self, Order, Reply};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::imports::{self, Imports, ImportsError};
use crate::own_libraries::beside_program;
use crate::stubs::{LINKED_DRIVER, stub_files};

/// File name of the core library.
pub const CORE: &str = "libharness_library_host.so";
/// Path of the core library, if it is not next to the program.
pub const CORE_VARIABLE: &str = "HARNESS_LIBRARY_HOST_LIBRARY";

/// Libraries that are always loaded, even if the allocator library does not list them: its users
/// have CUDA.
const LOADED: [&str; 2] = ["libcudart.so.13", "libcuda.so.1"];

#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error(
        "the core library {CORE} is missing: it is not next to this program, in `deps` there, or \
         in `../lib/harness`. `ci/install` installs it, and \
         `cargo build --release` builds it in target/release/deps. Set {CORE_VARIABLE} if it is \
         elsewhere"
    )]
    NoCore,
    #[error(transparent)]
    Imports(#[from] ImportsError),
    #[error(
        "cannot write the stub libraries: {0}; free space in the temporary folder or set TMPDIR"
    )]
    Folder(#[from] io::Error),
    #[error("{0}")]
    Loader(String),
}

type Run = unsafe extern "C" fn() -> c_int;

/// Serves a library on standard input until this process ends. Reports an error to the harness.
pub fn serve(library: &Path) -> c_int {
    run(library).unwrap_or_else(|error| {
        refuse(&error);
        1
    })
}

fn run(library: &Path) -> Result<c_int, HostError> {
    let core = beside_program(CORE, CORE_VARIABLE).ok_or(HostError::NoCore)?;
    let folder = tempfile::Builder::new()
        .prefix("harness-library-")
        .tempdir()?;
    let (linked, stubs) = write(folder.path(), &std::path::absolute(library)?, &core)?;
    // The libraries stay loaded and no longer need their files.
    let core = ManuallyDrop::new(open(&linked)?);
    for stub in stubs {
        mem::forget(open(&stub)?);
    }
    drop(folder);
    // SAFETY: the core library has this function, without arguments. Standard input is the socket
    // to the harness.
    unsafe {
        let function = core.get::<Run>("harness_library_host");
        let function = function.map_err(|_| {
            HostError::Loader(format!(
                "{CORE} belongs to another version of the harness: build or install both together"
            ))
        })?;
        Ok(function())
    }
}

/// Writes the core library and the stub libraries into a folder and returns their paths.
fn write(folder: &Path, library: &Path, core: &Path) -> Result<(PathBuf, Vec<PathBuf>), HostError> {
    let linked = folder.join(CORE);
    symlink(fs::canonicalize(core)?, &linked)?;
    let imports = Imports::of(&[library.to_owned()], &LOADED)?;
    let exports: BTreeSet<String> = imports::exports(core)?;
    let mut paths = Vec::new();
    // The file for linkers has the SONAME of the driver, so it would replace the driver.
    let stubs = stub_files(&imports, CORE, &exports).into_iter();
    for (soname, bytes) in stubs.filter(|(name, _)| name != LINKED_DRIVER) {
        let path = folder.join(soname);
        fs::write(&path, bytes)?;
        paths.push(path);
    }
    Ok((linked, paths))
}

/// Loads a library globally, so later libraries find its symbols.
fn open(path: &Path) -> Result<Library, HostError> {
    // SAFETY: these are our libraries, without initializers.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }
        .map_err(|error| HostError::Loader(error.to_string()))
}

fn refuse(error: &HostError) {
    use std::os::fd::AsFd as _;
    let Ok(socket) = io::stdin().as_fd().try_clone_to_owned() else {
        return;
    };
    let mut socket = fs::File::from(socket);
    let Ok(reader) = socket.try_clone() else {
        return;
    };
    // A harness that has ended cannot read the answer, so a failed send is ignored.
    if let Ok(Some(_)) = wire::receive::<Order>(&mut io::BufReader::new(reader)) {
        let _ = wire::send(&mut socket, &Reply::Refused(error.to_string()));
    }
}
