//! The process that runs an allocator library. It makes stub libraries for the CUDA libraries that the library needs. Then it
//! calls the core library `harness-library-host`, which forwards CUDA calls to the harness.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use harness_allocator::allocator::library::LibrarySpec;
use harness_allocator::allocator::library::wire::{self, Order, Reply};

use crate::imports::{self, Imports, ImportsError};
use crate::launch::beside_program;
use crate::stubs::stub_files;

/// File name of the core library.
pub const CORE: &str = "libharness_library_host.so";
/// Path of the core library, if it is not next to the program.
pub const CORE_VARIABLE: &str = "HARNESS_LIBRARY_HOST_LIBRARY";

/// Libraries that are always loaded, even if the allocator library does not list them: its users have CUDA.
const LOADED: [&str; 2] = ["libcudart.so.13", "libcuda.so.1"];

/// Why the library cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error(
        "the core library {CORE} is missing: it is not next to this program, in `deps` there, or in `../lib/harness`. `ci/install` installs it, and \
         `cargo build --release` builds it in target/release/deps. Set {CORE_VARIABLE} if it is elsewhere"
    )]
    NoCore,
    #[error(transparent)]
    Imports(#[from] ImportsError),
    #[error("cannot write the stub libraries: {0}; free space in the temporary folder or set TMPDIR")]
    Folder(#[from] io::Error),
    #[error("{0}")]
    Loader(String),
}

type Run = unsafe extern "C" fn(*const c_char, *const c_char, *const c_char, *const c_char, *const c_char) -> c_int;

/// Serves the library on standard input until this process ends. Reports an error to the harness.
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
    let (linked, stubs) = write(folder.path(), &path, &core)?;
    let core = open(&linked)?;
    stubs.iter().try_for_each(|stub| open(stub).map(drop))?;
    // Loaded libraries no longer need their files.
    drop(folder);
    let texts = [Some(path.as_os_str().as_bytes()), Some(spec.alloc.as_bytes()), Some(spec.free.as_bytes())];
    let optional = [&spec.record_stream, &spec.empty_cache].map(|name| name.as_ref().map(|name| name.as_bytes()));
    let texts: Vec<Option<CString>> = texts.into_iter().chain(optional).map(|text| text.and_then(|text| CString::new(text).ok())).collect();
    let [path, alloc, free, record_stream, empty_cache] =
        [0, 1, 2, 3, 4].map(|index| texts[index].as_ref().map_or(std::ptr::null(), |text| text.as_ptr()));
    // SAFETY: the core library is loaded, and the name is a C string.
    let function = unsafe { libc::dlsym(core, c"harness_library_host".as_ptr()) };
    if function.is_null() {
        return Err(HostError::Loader(format!("{CORE} belongs to another version of the harness: build or install both together")));
    }
    // SAFETY: the core library has this function with these arguments, which are C strings or null. Standard input is the socket
    // to the harness.
    Ok(unsafe { std::mem::transmute::<*mut c_void, Run>(function)(path, alloc, free, record_stream, empty_cache) })
}

/// Writes the core library and the stub libraries into a folder and returns their paths.
fn write(folder: &Path, library: &Path, core: &Path) -> Result<(PathBuf, Vec<PathBuf>), HostError> {
    let linked = folder.join(CORE);
    symlink(fs::canonicalize(core)?, &linked)?;
    let imports = Imports::of(&[library.to_owned()], &LOADED)?;
    let exports: BTreeSet<String> = imports::exports(core)?;
    let mut paths = Vec::new();
    for (soname, bytes) in stub_files(&imports, CORE, &exports) {
        let path = folder.join(soname);
        fs::write(&path, bytes)?;
        paths.push(path);
    }
    Ok((linked, paths))
}

/// Loads a library globally, so later libraries find its symbols.
fn open(path: &Path) -> Result<*mut c_void, HostError> {
    let name = CString::new(path.as_os_str().as_bytes()).map_err(io::Error::from)?;
    // SAFETY: these are our libraries, without initializers.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if !library.is_null() {
        return Ok(library);
    }
    // SAFETY: the function has no precondition.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return Err(HostError::Loader(format!("cannot load {}: the dynamic linker gives no reason", path.display())));
    }
    // SAFETY: the text is a C string that lives until this thread's next call of the linker.
    Err(HostError::Loader(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()))
}

/// Answers the first order with the error.
fn refuse(error: &HostError) {
    use std::os::fd::AsFd as _;
    let Ok(socket) = io::stdin().as_fd().try_clone_to_owned() else { return };
    let mut socket = fs::File::from(socket);
    let Ok(reader) = socket.try_clone() else { return };
    // A harness that has ended cannot read the answer, so a failed send is ignored.
    if let Ok(Some(_)) = wire::receive::<Order>(&mut io::BufReader::new(reader)) {
        let _ = wire::send(&mut socket, &Reply::Refused(error.to_string()));
    }
}
