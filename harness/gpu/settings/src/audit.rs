//! The start of an audit library, through which the dynamic linker reports libraries
//! (<https://man7.org/linux/man-pages/man7/rtld-audit.7.html>).

use std::ffi::{CStr, CString, c_char, c_uint};
use std::path::{Path, PathBuf};
use std::{env, fs, os::unix::ffi::OsStrExt as _};

use crate::settings::{HOOK, RUN, SPARE, UNLOADED};

/// The newest supported version of the interface.
const NEWEST: c_uint = 2;

/// The start of `struct link_map`.
#[repr(C)]
#[derive(Debug)]
pub struct LinkMap {
    pub base: usize,
    /// Null or empty for the program.
    pub name: *const c_char,
}

impl LinkMap {
    /// The path of the library; empty for the program itself.
    ///
    /// # Safety
    /// The name is null or a string that lives as long as the result.
    pub unsafe fn path<'a>(&self) -> &'a [u8] {
        if self.name.is_null() {
            b""
        } else {
            // SAFETY: as the caller promises.
            unsafe { CStr::from_ptr(self.name) }.to_bytes()
        }
    }
}

/// Prepares a process for our libraries. Returns the version of the interface, given the linker's.
///
/// # Safety
/// The process has one thread.
pub unsafe fn begin(version: c_uint) -> c_uint {
    mark_loaded();
    // SAFETY: as the caller promises.
    unsafe { keep_hook() };
    version.min(NEWEST)
}

/// Shows harness that the dynamic linker has loaded a library of this project into the program.
fn mark_loaded() {
    if let Some(run) = env::var_os(RUN) {
        // Only the first process finds the file.
        let _ = fs::remove_file(Path::new(&run).join(UNLOADED));
    }
}

/// Puts the hook into PYTHONPATH if the command has removed it, as `env PYTHONPATH=. python
/// train.py` does.
///
/// # Safety
/// The process has one thread.
unsafe fn keep_hook() {
    unsafe extern "C" {
        static environ: *mut *mut c_char;
    }
    const PATH: &str = "PYTHONPATH";
    let Some(run) = env::var_os(RUN) else { return };
    let (hook, path) = (Path::new(&run).join(HOOK), env::var_os(PATH));
    let mut paths: Vec<PathBuf> = path
        .iter()
        .flat_map(env::split_paths)
        .filter(|path| !path.as_os_str().is_empty())
        .collect();
    if paths.contains(&hook) {
        return;
    }
    paths.insert(0, hook);
    let Ok(wanted) = env::join_paths(paths) else {
        return;
    };
    let Ok(entry) = CString::new([PATH.as_bytes(), b"=", wanted.as_bytes()].concat()) else {
        return;
    };
    let replaced = if path.is_some() { PATH } else { SPARE };
    // SAFETY: a null pointer ends the array, its entries are strings, and nothing else uses it
    // meanwhile.
    unsafe {
        let mut at = environ;
        while !at.is_null() && !(*at).is_null() {
            if CStr::from_ptr(*at)
                .to_bytes()
                .strip_prefix(replaced.as_bytes())
                .is_some_and(|rest| rest.starts_with(b"="))
            {
                *at = entry.into_raw();
                return;
            }
            at = at.add(1);
        }
    }
}
