//! The process that a library runs in which allocates: makes the thin libraries that stand in for the CUDA libraries it needs, and hands over to the
//! core library `harness-library-host`, which passes its calls on to the harness.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use harness_allocator::allocator::library::LibrarySpec;
use harness_allocator::allocator::library::wire::{self, Order, Reply};

use crate::doubles::doubles;
use crate::imports::{self, Imports, ImportsError};
use crate::launch::beside_program;

/// The file name of the core library.
pub const CORE: &str = "libharness_library_host.so";
/// Names the core library where it is not beside the program.
pub const CORE_VARIABLE: &str = "HARNESS_LIBRARY_HOST_LIBRARY";

/// What a library finds loaded although it does not say that it needs it: whoever is to load it has CUDA.
const LOADED: [&str; 2] = ["libcudart.so.13", "libcuda.so.1"];

/// Why the library cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// Build or install the library, or name it.
    #[error(
        "the core library {CORE} is missing: it lies neither beside this program, nor in `deps` there, nor in `../lib/harness`. `ci/install` \
         installs it with the program, `cargo build --release` makes it, in target/release/deps; {CORE_VARIABLE} names it where it lies elsewhere"
    )]
    NoCore,
    /// Give a shared library for this machine.
    #[error(transparent)]
    Imports(#[from] ImportsError),
    /// Make room in the folder for temporary files, or name another one by TMPDIR.
    #[error("the libraries that stand in for CUDA's cannot be written: {0}")]
    Folder(#[from] io::Error),
    /// Build the program anew.
    #[error("{0}")]
    Loader(String),
}

type Run = unsafe extern "C" fn(*const c_char, *const c_char, *const c_char, *const c_char, *const c_char) -> c_int;

/// Serves the library on standard input to the end of this process. Where it cannot be, the harness is told.
pub fn serve(spec: &LibrarySpec) -> c_int {
    match run(spec) {
        Ok(code) => code,
        Err(error) => {
            refuse(&error);
            1
        }
    }
}

fn run(spec: &LibrarySpec) -> Result<c_int, HostError> {
    let core = beside_program(CORE, CORE_VARIABLE).ok_or(HostError::NoCore)?;
    let path = std::path::absolute(&spec.path)?;
    let folder = tempfile::Builder::new().prefix("harness-library-").tempdir()?;
    let (linked, doubles) = write(folder.path(), &path, &core)?;
    let core = open(&linked)?;
    doubles.iter().try_for_each(|double| open(double).map(drop))?;
    // What is loaded needs its file no more.
    drop(folder);
    let texts = [Some(path.as_os_str().as_bytes()), Some(spec.alloc.as_bytes()), Some(spec.free.as_bytes())];
    let optional = [&spec.record_stream, &spec.empty_cache].map(|name| name.as_ref().map(|name| name.as_bytes()));
    let texts: Vec<Option<CString>> = texts.into_iter().chain(optional).map(|text| text.and_then(|text| CString::new(text).ok())).collect();
    let [path, alloc, free, record_stream, empty_cache] =
        [0, 1, 2, 3, 4].map(|index| texts[index].as_ref().map_or(std::ptr::null(), |text| text.as_ptr()));
    // SAFETY: the core library is loaded, and the name is a C string.
    let function = unsafe { libc::dlsym(core, c"harness_library_host".as_ptr()) };
    if function.is_null() {
        return Err(HostError::Loader(format!("{CORE} is not of this version of the harness")));
    }
    // SAFETY: the core library has this function with these arguments, which are C strings or null; standard input is the socket to the harness.
    Ok(unsafe { std::mem::transmute::<*mut c_void, Run>(function)(path, alloc, free, record_stream, empty_cache) })
}

/// The core library and the doubles of what the library needs, in a folder: their paths.
fn write(folder: &Path, library: &Path, core: &Path) -> Result<(PathBuf, Vec<PathBuf>), HostError> {
    let linked = folder.join(CORE);
    symlink(fs::canonicalize(core)?, &linked)?;
    let imports = Imports::with(&[library.to_owned()], &LOADED)?;
    let exports: BTreeSet<String> = imports::exports(core)?;
    let mut paths = Vec::new();
    for double in doubles(&imports, CORE, &exports) {
        let path = folder.join(&double.soname);
        fs::write(&path, &double.bytes)?;
        paths.push(path);
    }
    Ok((linked, paths))
}

/// Loads a library for the whole process, so that names that another one leaves open are found in it.
fn open(path: &Path) -> Result<*mut c_void, HostError> {
    let name = CString::new(path.as_os_str().as_bytes()).map_err(io::Error::from)?;
    // SAFETY: the libraries are ours, and have no initialisers.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if !library.is_null() {
        return Ok(library);
    }
    // SAFETY: the linker's function has no precondition.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return Err(HostError::Loader(format!("{} cannot be loaded", path.display())));
    }
    // SAFETY: the text is a C string, which lives until the linker's next call in this thread.
    Err(HostError::Loader(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()))
}

/// Answers the first order with the reason.
fn refuse(error: &HostError) {
    use std::os::fd::AsFd as _;
    let Ok(socket) = io::stdin().as_fd().try_clone_to_owned() else { return };
    let mut socket = fs::File::from(socket);
    let Ok(reader) = socket.try_clone() else { return };
    // Where the harness has gone there is nobody to tell.
    if let Ok(Some(_)) = wire::receive::<Order>(&mut io::BufReader::new(reader)) {
        let _ = wire::send(&mut socket, &Reply::Refused(error.to_string()));
    }
}
