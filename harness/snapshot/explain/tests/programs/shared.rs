//! Tests with snapshots that are not part of the project but next to it. Without them, the tests
//! count as ignored.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

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
    let arguments = Arguments::from_args();
    let is_missing = !folder().join("snapshots").is_dir();
    if is_missing && !arguments.list {
        eprintln!(
            "tests with data are ignored: {} does not exist",
            folder().display()
        );
    }
    let trial = |(name, test): Test| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    let with_data = with_data.map(|test| trial(test).with_ignored_flag(is_missing));
    libtest_mimic::run(
        &arguments,
        with_data.chain(others.iter().copied().map(trial)).collect(),
    )
    .exit_code()
}
