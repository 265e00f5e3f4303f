//! Versions of NVIDIA's libraries. Programs compare them with those that they were built for, and
//! JAX uses no GPU if one is older.
//!
//! [`VERSIONS`] has those of the packages that the program's Python has, from `harness exec`. The
//! rest are those of CUDA 12.9 Update 1 and CUDA 13.0.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, write};
use harness_gpu_settings::settings::{Cuda, VERSIONS};

use crate::world::machine;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Library {
    Cublas,
    Cufft,
    Curand,
    Cusolver,
    Cusparse,
}

/// Major, minor and patch level.
type Version = [c_int; 3];

/// The names of the packages without `nvidia_`, and the versions of CUDA 12 and 13.
const LIBRARIES: [(&str, [Version; 2]); 5] = [
    ("cublas", [[12, 9, 1], [13, 1, 0]]),
    ("cufft", [[11, 4, 1], [12, 0, 0]]),
    ("curand", [[10, 3, 10], [10, 4, 0]]),
    ("cusolver", [[11, 7, 5], [12, 0, 3]]),
    ("cusparse", [[12, 5, 10], [12, 6, 2]]),
];
/// The versions of CUPTI's interface in CUDA 12.0 and 13.0. It has no other number in CUDA 12.
const CUPTI: [u32; 2] = [18, 130_000];

pub(crate) fn version(library: Library) -> Version {
    static INSTALLED: OnceLock<[Option<Version>; 5]> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        let given = std::env::var(VERSIONS).unwrap_or_default();
        LIBRARIES.map(|(name, _)| installed(&given, name))
    });
    let index = library as usize;
    installed[index].unwrap_or(LIBRARIES[index].1[machine().settings.cuda as usize])
}

/// Finds a library in a list such as `cublas=13.1.0.3,cufft=12.0.0`.
fn installed(given: &str, name: &str) -> Option<Version> {
    let (_, version) = given
        .split(',')
        .filter_map(|item| item.split_once('='))
        .find(|(library, _)| *library == name)?;
    // Larger levels have no place in the numbers that libraries return.
    let level = |text: &str| text.parse().ok().filter(|level| (0..1000).contains(level));
    let mut levels = version.split('.').map(level);
    Some([levels.next()??, levels.next()??, levels.next()??])
}

/// The version as one number, in which a minor version counts 100.
pub(crate) fn number(library: Library, of_major: c_int) -> c_int {
    let [major, minor, patch] = version(library);
    major * of_major + minor * 100 + patch
}

/// Writes the major version, the minor version or the patch level. Returns `refusal` for another
/// kind or a null pointer.
fn property(library: Library, kind: c_int, value: Out<'_, c_int>, refusal: c_int) -> c_int {
    let level = usize::try_from(kind)
        .ok()
        .and_then(|kind| version(library).get(kind).copied());
    match level {
        Some(level) if write(value, level) => 0,
        _ => refusal,
    }
}

/// Writes a version. Returns `refusal` for a null pointer.
fn written(library: Library, value: Out<'_, c_int>, refusal: c_int) -> c_int {
    if write(value, number(library, 1_000)) {
        0
    } else {
        refusal
    }
}

// The refusals are the libraries' statuses for an invalid value.
export! {
    cublasGetProperty, cublasLtGetProperty(kind: c_int, value: Out<'_, c_int>) =
        property(Library::Cublas, kind, value, 7);
    cufftGetProperty(kind: c_int, value: Out<'_, c_int>) = property(Library::Cufft, kind, value, 4);
    cufftGetVersion(version: Out<'_, c_int>) = written(Library::Cufft, version, 4);
    curandGetProperty(kind: c_int, value: Out<'_, c_int>) =
        property(Library::Curand, kind, value, 103);
    curandGetVersion(version: Out<'_, c_int>) = written(Library::Curand, version, 103);
    cusolverGetProperty(kind: c_int, value: Out<'_, c_int>) =
        property(Library::Cusolver, kind, value, 3);
    cusolverGetVersion(version: Out<'_, c_int>) = written(Library::Cusolver, version, 3);
    cusparseGetProperty(kind: c_int, value: Out<'_, c_int>) =
        property(Library::Cusparse, kind, value, 3);
    cusparseGetVersion(_: *mut c_void, version: Out<'_, c_int>) =
        written(Library::Cusparse, version, 3);
    cuptiGetVersion(version: Out<'_, u32>) = {
        let cuda: Cuda = machine().settings.cuda;
        if write(version, CUPTI[cuda as usize]) { 0 } else { 1 }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn installed_packages_have_their_versions() {
        let given = "cublas=13.10.0.20,cufft=12.5.0.14,curand=wrong";
        assert_eq!(installed(given, "cublas"), Some([13, 10, 0]));
        assert_eq!(installed(given, "cufft"), Some([12, 5, 0]));
        assert_eq!(installed(given, "curand"), None);
        assert_eq!(installed(given, "cusparse"), None);
    }
}
