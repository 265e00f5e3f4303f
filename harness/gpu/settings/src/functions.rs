//! The names of functions that programs can find, and the first CUDA version that has them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

const TABLE: &str = include_str!("functions.tsv");

/// All functions of the CUDA driver and runtime, and those of other libraries that programs find by
/// name. A row has the name and, for a function of the driver, the first version of CUDA.
fn rows() -> impl Iterator<Item = (&'static str, Option<&'static str>)> {
    TABLE
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            line.split_once('\t')
                .map_or((line, None), |(name, version)| (name, Some(version)))
        })
}

pub fn names() -> impl Iterator<Item = &'static str> {
    rows().map(|(name, _)| name)
}

/// The functions of the CUDA runtime.
pub fn of_runtime() -> BTreeSet<&'static str> {
    names()
        .filter(|name| name.starts_with("cuda") || name.starts_with("__cuda"))
        .collect()
}

/// Why `cuGetProcAddress` has no function, with the numbers of `CUdriverProcAddressQueryResult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Unavailable {
    Unknown = 1,
    /// Versions of CUDA after the one that was asked for have it.
    TooNew = 2,
}

/// The function of the driver that a program gets for a name and a version of CUDA, as in `13020`:
/// the newest of that version, as in `cuMemAlloc_v2` for `cuMemAlloc`.
pub fn in_version(name: &str, version: i32) -> Result<&'static str, Unavailable> {
    static FIRST: OnceLock<BTreeMap<&str, i32>> = OnceLock::new();
    let first = FIRST.get_or_init(|| {
        rows()
            .map(|(name, version)| {
                (
                    name,
                    version.and_then(|text| text.parse().ok()).unwrap_or(0),
                )
            })
            .collect()
    });
    let known: Vec<(&&str, &i32)> = ["_v5", "_v4", "_v3", "_v2", ""]
        .iter()
        .filter_map(|suffix| first.get_key_value(format!("{name}{suffix}").as_str()))
        .collect();
    if known.is_empty() {
        return Err(Unavailable::Unknown);
    }
    let newest = known.iter().find(|(_, first)| **first <= version);
    newest.map(|(name, _)| **name).ok_or(Unavailable::TooNew)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_gets_the_newest_function_of_the_version_that_it_asks_for() {
        for (name, version, expected) in [
            ("cuMemAlloc", 13_020, Ok("cuMemAlloc_v2")),
            ("cuMemAlloc", 2_000, Ok("cuMemAlloc")),
            ("cuGetProcAddress", 11_080, Ok("cuGetProcAddress")),
            ("cuGetProcAddress", 12_000, Ok("cuGetProcAddress_v2")),
            (
                "cuStreamGetCaptureInfo",
                12_020,
                Ok("cuStreamGetCaptureInfo_v2"),
            ),
            (
                "cuStreamGetCaptureInfo",
                12_030,
                Ok("cuStreamGetCaptureInfo_v3"),
            ),
            (
                "cuMemcpyWithAttributesAsync",
                12_080,
                Err(Unavailable::TooNew),
            ),
            ("cuNoSuchFunction", 13_020, Err(Unavailable::Unknown)),
        ] {
            assert_eq!(in_version(name, version), expected, "{name} {version}");
        }
    }
}
