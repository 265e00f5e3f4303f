//! Tests with snapshots that are not part of the project but next to it. Without them, the tests
//! are skipped.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use harness_staging::trials::{self, Skip};
use libtest_mimic::Arguments;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../../shared")
}

/// Returns the snapshots in a folder of the data.
pub(crate) fn snapshots(name: &str) -> Vec<PathBuf> {
    let folder = folder().join(name);
    let entries =
        std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.expect("the folder is readable").path())
        .collect();
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "gz"));
    paths.sort();
    assert!(!paths.is_empty(), "{} has snapshots", folder.display());
    paths
}

/// A test and its name.
pub(crate) type Test = (&'static str, fn());

/// Runs tests that need the data, and tests that do not.
pub(crate) fn run(with_data: impl Iterator<Item = Test>, others: &[Test]) -> ExitCode {
    let is_missing = !folder().join("snapshots").is_dir();
    let skip = is_missing.then(|| {
        let why = format!("{} does not exist", folder().display());
        Skip::new(why, "put the recorded snapshots there")
    });
    let trial = |(name, test): Test, skip: Option<Skip>| {
        trials::trial(name, skip, move || {
            test();
            Ok(())
        })
    };
    let with_data = with_data.map(|test| trial(test, skip.clone()));
    let others = others.iter().map(|test| trial(*test, None));
    trials::run(&Arguments::from_args(), with_data.chain(others).collect())
}
