//! The interface of an audit library (<https://man7.org/linux/man-pages/man7/rtld-audit.7.html>).
//! It makes the dynamic linker load stub libraries in place of NVIDIA's, and replaces the CUDA
//! runtime that is linked into a program.
//!
//! The dynamic linker loads this library a second time for it, into a separate namespace, before
//! the program starts. So nothing here uses the state of the simulated machine.

mod linked_runtime;

use std::ffi::{CStr, CString, OsStr, c_char, c_long, c_uint};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::{env, fs, path::Path, sync::OnceLock};

use harness_gpu_settings::audit::{self, LinkMap};
use harness_gpu_settings::settings::LIBRARIES;

#[unsafe(no_mangle)]
extern "C" fn la_version(version: c_uint) -> c_uint {
    // SAFETY: the dynamic linker calls this before it starts the program.
    unsafe { audit::begin(version) }
}

/// Returns the path at which the dynamic linker looks for a library.
///
/// # Safety
/// The name is a string, as the interface promises.
#[unsafe(no_mangle)]
unsafe extern "C" fn la_objsearch(
    name: *const c_char,
    _cookie: *mut usize,
    _flag: c_uint,
) -> *const c_char {
    // SAFETY: as the caller promises.
    let asked = unsafe { CStr::from_ptr(name) };
    stubs().instead_of(asked).map_or(name, CStr::as_ptr)
}

/// Replaces the runtime in an object of the program before its code runs. Asks for no reports of
/// its symbols.
///
/// # Safety
/// The object is loaded, as the interface promises.
#[unsafe(no_mangle)]
unsafe extern "C" fn la_objopen(
    object: *const LinkMap,
    namespace: c_long,
    _cookie: *mut usize,
) -> c_uint {
    // SAFETY: as the caller promises.
    let (base, path) = unsafe {
        let object = &*object;
        (object.base, OsStr::from_bytes(object.path()))
    };
    if namespace == libc::LM_ID_BASE {
        // SAFETY: the dynamic linker has mapped the object, and runs it later.
        unsafe { linked_runtime::replace(path, base, |release| stubs().runtime(release)) };
    }
    0
}

fn stubs() -> &'static Stubs {
    static STUBS: OnceLock<Stubs> = OnceLock::new();
    STUBS.get_or_init(|| Stubs::in_folder(env::var_os(LIBRARIES).as_deref()))
}

struct Stubs(Vec<CString>);

impl Stubs {
    /// The shared libraries in a folder; none if it cannot be read.
    fn in_folder(folder: Option<&OsStr>) -> Self {
        let entries = folder.and_then(|folder| fs::read_dir(Path::new(folder)).ok());
        let paths = entries
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path());
        let libraries = paths.filter(|path| {
            path.file_name()
                .is_some_and(|name| contains(name.as_bytes(), b".so"))
        });
        let names =
            libraries.filter_map(|path| CString::new(path.into_os_string().into_vec()).ok());
        let mut found: Vec<CString> = names.collect();
        // A name without a version gets the newest one.
        found.sort_by(|one, other| other.cmp(one));
        Self(found)
    }

    /// The stub library with exactly this file name, or for a name without a version the one with
    /// a version. A copy such as `libcudart.8774224f.so.13` has a stub of its own if the
    /// environment contains it.
    fn instead_of(&self, asked: &CStr) -> Option<&CStr> {
        let asked = file_name(asked.to_bytes());
        let is_without_version = asked.ends_with(b".so");
        self.0.iter().map(CString::as_c_str).find(|stub| {
            let stub = file_name(stub.to_bytes());
            let rest = stub.strip_prefix(asked);
            rest.is_some_and(|rest| match is_without_version {
                true => rest.starts_with(b"."),
                false => rest.is_empty(),
            })
        })
    }

    /// The library of the CUDA runtime of a release.
    fn runtime(&self, release: &str) -> Option<&Path> {
        let name = CString::new(format!("libcudart.so.{release}")).ok()?;
        let stub = self.instead_of(&name)?;
        Some(Path::new(OsStr::from_bytes(stub.to_bytes())))
    }
}

fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests;
