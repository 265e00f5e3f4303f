//! Functions of the driver by name, as `cuGetProcAddress` finds them.

use std::ffi::{CStr, CString, OsStr, c_int, c_ulonglong, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::{env, mem::MaybeUninit, path::Path, ptr};

use harness_gpu_settings::ffi::{Out, Text, write};
use harness_gpu_settings::functions::{Unavailable, in_version};
use harness_gpu_settings::settings::{LIBRARIES, end_for_linked_runtime};

use crate::code::{Code, answer, put};
use crate::world::machine;

/// Writes the address of the function that a version of CUDA has, and whether it is missing.
/// Returns `false` if it is missing. A function without a model exists, as in a driver.
pub(crate) fn find(
    name: Text<'_>,
    version: c_int,
    flags: c_ulonglong,
    place: Out<'_, *mut c_void>,
    status: Out<'_, c_int>,
) -> Result<bool, Code> {
    let name = name.get().ok_or(Code::InvalidValue)?;
    let version = version.min(machine().settings.cuda.driver_version());
    let found = function(name, version, flags & PER_THREAD != 0);
    write(status, found.map_or_else(|why| why as c_int, |_| 0));
    put(place, found.unwrap_or(ptr::null_mut()))?;
    Ok(found.is_ok())
}

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD: c_ulonglong = 2;

fn function(name: &CStr, version: c_int, is_per_thread: bool) -> Result<*mut c_void, Unavailable> {
    let name = name.to_str().map_err(|_| Unavailable::Unknown)?;
    let name = in_version(name, version)?;
    let endings: &[&str] = if is_per_thread {
        &["_ptsz", "_ptds", ""]
    } else {
        &[""]
    };
    endings
        .iter()
        .filter_map(|ending| CString::new(format!("{name}{ending}")).ok())
        .flat_map(|name| [exported(&name), stub(&name)])
        .find(|address| !address.is_null())
        .ok_or(Unavailable::Unknown)
}

/// The address of an exported function of this library, or null.
pub(crate) fn exported(name: &CStr) -> *mut c_void {
    // SAFETY: the file is that of this library, which stays loaded.
    file_of(exported as *const () as usize)
        .map_or(ptr::null_mut(), |file| unsafe { symbol(&file, name) })
}

/// The address of a function without a model, or null.
fn stub(name: &CStr) -> *mut c_void {
    let driver = env::var_os(LIBRARIES)
        .map(|folder| Path::new(&folder).join("libcuda.so.1"))
        .and_then(|path| CString::new(path.as_os_str().as_bytes()).ok());
    // SAFETY: the stub library has no code that runs when it is loaded.
    driver.map_or(ptr::null_mut(), |driver| unsafe { symbol(&driver, name) })
}

/// # Safety
/// Loading the library is allowed here.
unsafe fn symbol(library: &CStr, name: &CStr) -> *mut c_void {
    // SAFETY: both are strings; the library stays loaded.
    unsafe {
        let library = libc::dlopen(library.as_ptr(), libc::RTLD_NOW);
        if library.is_null() {
            ptr::null_mut()
        } else {
            libc::dlsym(library, name.as_ptr())
        }
    }
}

/// The file with the code at an address.
fn file_of(address: usize) -> Option<CString> {
    let mut object = MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: the call initializes the result if it returns another number than 0, and the name is
    // a string.
    unsafe {
        (libc::dladdr(ptr::with_exposed_provenance(address), object.as_mut_ptr()) != 0)
            .then(|| CStr::from_ptr(object.assume_init().dli_fname).to_owned())
    }
}

/// Returns internal tables of NVIDIA's driver, which CUDA's runtime needs. The simulated driver has
/// none, so a runtime that is linked into an object and has not been replaced cannot run. That of
/// cuDNN gets an error: cuDNN asks for kernels that it can leave out while it plans without a
/// device. So does that of nvJitLink, which only links code. Objects without the function's name
/// get an error too: they only pass on calls, as libffi does for Python.
#[unsafe(no_mangle)]
#[unsafe(naked)]
extern "C" fn cuGetExportTable() {
    std::arch::naked_asm!(
        "mov rdi, [rsp]", // The address of the caller.
        "sub rsp, 8",
        "call {answer}",
        "add rsp, 8",
        "ret",
        answer = sym answer_for_tables,
    );
}

const TABLES: &[u8] = b"cuGetExportTable";

/// Returns whether a file contains these bytes, or cannot be read.
fn contains(file: &CStr, bytes: &[u8]) -> bool {
    let content = std::fs::read(OsStr::from_bytes(file.to_bytes()));
    content.map_or(true, |content| {
        content.windows(bytes.len()).any(|window| window == bytes)
    })
}

/// The starts of the names of libraries that do without the tables: cuDNN's, which ask for kernels,
/// and the linker of CUDA code, which also works without a driver.
const WITHOUT_TABLES: [&[u8]; 2] = [b"libcudnn", b"libnvJitLink"];

extern "C" fn answer_for_tables(caller: usize) -> c_int {
    let file = file_of(caller);
    let name = file
        .as_ref()
        .and_then(|file| file.to_bytes().rsplit(|byte| *byte == b'/').next());
    let is_passed_on = file.as_ref().is_some_and(|file| !contains(file, TABLES));
    if is_passed_on {
        machine().counters.note_unmodelled(TABLES);
    }
    let does_without = |name: &[u8]| WITHOUT_TABLES.iter().any(|start| name.starts_with(start));
    if is_passed_on || name.is_some_and(does_without) {
        return answer(Err(Code::NotSupported));
    }
    let object = file.map_or_else(
        || "the program".to_owned(),
        |file| format!("`{}`", file.to_string_lossy()),
    );
    end_for_linked_runtime(&format!(
        "{object} asks for internal tables of NVIDIA's driver, which are not simulated. A CUDA \
         runtime that is linked in needs them, unless the simulated one replaces it, which \
         requires the symbols of the runtime in the file and a GNU C library from 2.35"
    ));
}
