//! The functions by which the dynamic linker asks an auditing library where to look for a library
//! (<https://man7.org/linux/man-pages/man7/rtld-audit.7.html>): those of NVIDIA that have a double are found in the folder of doubles.
//!
//! The dynamic linker loads this library a second time for it, into a namespace of its own, before the program begins. So nothing here touches the
//! state of the simulated machine.

use std::env;
use std::ffi::{CStr, CString, OsStr, c_char, c_uint};
use std::fs;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::Path;
use std::sync::OnceLock;

use harness_gpu_settings::settings::LIBRARIES;

/// The newest version of the interface that these functions were written for.
const NEWEST: c_uint = 2;

/// Tells the dynamic linker which version of the interface is spoken: its own where that is older.
#[unsafe(no_mangle)]
extern "C" fn la_version(version: c_uint) -> c_uint {
    version.min(NEWEST)
}

/// Tells the dynamic linker where it shall look for a library that it was asked for by this name or path.
///
/// # Safety
/// The name is a string, as the interface promises.
#[unsafe(no_mangle)]
unsafe extern "C" fn la_objsearch(name: *const c_char, _cookie: *mut usize, _flag: c_uint) -> *const c_char {
    static DOUBLES: OnceLock<Doubles> = OnceLock::new();
    // SAFETY: as the caller promises.
    let asked = unsafe { CStr::from_ptr(name) };
    let doubles = DOUBLES.get_or_init(|| Doubles::in_folder(env::var_os(LIBRARIES).as_deref()));
    doubles.instead_of(asked).map_or(name, CStr::as_ptr)
}

/// The paths of the doubles.
struct Doubles(Vec<CString>);

impl Doubles {
    /// The shared libraries in a folder; none where it cannot be read.
    fn in_folder(folder: Option<&OsStr>) -> Self {
        let entries = folder.and_then(|folder| fs::read_dir(Path::new(folder)).ok());
        let paths = entries.into_iter().flatten().flatten().map(|entry| entry.path());
        let libraries = paths.filter(|path| path.file_name().is_some_and(|name| contains(name.as_bytes(), b".so")));
        Self(libraries.filter_map(|path| CString::new(path.into_os_string().into_vec()).ok()).collect())
    }

    /// The double of exactly this file name. Copies under other names, as `libcudart.8774224f.so.13`, are somebody else's.
    fn instead_of(&self, asked: &CStr) -> Option<&CStr> {
        let asked = file_name(asked.to_bytes());
        self.0.iter().map(CString::as_c_str).find(|double| file_name(double.to_bytes()) == asked)
    }
}

fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_looked_for_among_the_doubles_by_its_exact_file_name() {
        let folder = tempfile::tempdir().expect("a folder can be made");
        for name in ["libcuda.so.1", "libcudart.so.13", "manifest.json"] {
            fs::write(folder.path().join(name), "").expect("a file can be written");
        }
        let doubles = Doubles::in_folder(Some(folder.path().as_os_str()));
        let instead_of = |asked: &CStr| doubles.instead_of(asked).map(|double| double.to_string_lossy().into_owned());
        let double = |name: &str| Some(folder.path().join(name).to_string_lossy().into_owned());
        assert_eq!(instead_of(c"libcuda.so.1"), double("libcuda.so.1"));
        assert_eq!(instead_of(c"/usr/lib/x86_64-linux-gnu/libcudart.so.13"), double("libcudart.so.13"));
        for other in [c"libcudart.8774224f.so.13", c"libcudart.so.12", c"manifest.json", c"libcuda.so.1/libc.so.6", c""] {
            assert_eq!(instead_of(other), None, "{other:?}");
        }
        assert_eq!(Doubles::in_folder(None).instead_of(c"libcuda.so.1"), None);
    }

    #[test]
    fn an_older_dynamic_linker_is_spoken_to_in_its_own_version() {
        assert_eq!([1, 2, 3].map(|version| la_version(version)), [1, 2, 2]);
    }
}
