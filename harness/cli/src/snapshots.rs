//! Memory snapshots that the user names, directly or by their folder. All cores read them, one file
//! per core.

use std::path::{Path, PathBuf};
use std::{convert::Infallible, io};

use harness_base::parallel::{in_parallel, uses_all_cores};
use harness_trace::snapshot::{Snapshot, SnapshotError};

use super::kind::{self, Kind};
use super::{error::CliError, inputs, terminal};

/// File name endings of the snapshots in a folder.
const ENDINGS: [&str; 4] = [".pickle", ".pkl", ".pickle.gz", ".pkl.gz"];

/// Expands paths to files in the given order, each once. The snapshots of a folder are sorted by
/// name, with `rank2` before `rank10`.
pub(crate) fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, CliError> {
    let sort = |files: &mut Vec<PathBuf>| {
        files.sort_by_cached_key(|path| by_numbers(&path.to_string_lossy()))
    };
    inputs::expand(paths, ("snapshot", &ENDINGS.join(", ")), is_named_so, sort)
}

/// A file's name without the ending of a snapshot.
pub(crate) fn stem(name: &str) -> &str {
    let stem = |ending: &&str| name.strip_suffix(*ending);
    ENDINGS.iter().find_map(stem).unwrap_or(name)
}

/// Returns whether a file's name is that of a snapshot.
pub(crate) fn is_named_so(path: &Path) -> bool {
    let name = path
        .file_name()
        .map(|name| name.to_string_lossy().to_lowercase())
        .unwrap_or_default();
    ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// A sort key that compares the numbers in names by value.
fn by_numbers(name: &str) -> Vec<(String, u64)> {
    let mut parts = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let text = rest
            .find(|c: char| c.is_ascii_digit())
            .unwrap_or(rest.len());
        let digits = rest[text..]
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len() - text);
        parts.push((
            rest[..text].to_owned(),
            rest[text..text + digits].parse().unwrap_or(u64::MAX),
        ));
        rest = &rest[text + digits..];
    }
    parts
}

pub(crate) fn read(path: &Path) -> Result<Snapshot, CliError> {
    Snapshot::read(path).map_err(|error| invalid(path, &error))
}

/// Fails if the file cannot be opened, or if its first bytes are those of another format.
pub(crate) fn check(path: &Path) -> Result<(), CliError> {
    Snapshot::check_format(path).map_err(|error| invalid(path, &error))
}

fn invalid(path: &Path, error: &SnapshotError) -> CliError {
    if let SnapshotError::NotPickle { .. } = error
        && let Some(kind) = kind::of(path).filter(|kind| *kind != Kind::Pickle)
    {
        return kind.instead_of("a memory snapshot", path);
    }
    let why = match error {
        SnapshotError::Io(error) if error.kind() == io::ErrorKind::NotFound => {
            "there is no such file".to_owned()
        }
        SnapshotError::Io(error) if error.kind() == io::ErrorKind::IsADirectory => {
            "this is a folder, not a snapshot".to_owned()
        }
        error => error.to_string(),
    };
    CliError::input(
        format!("{}: {why}", path.display()),
        "name a file that torch.cuda.memory._dump_snapshot() wrote, plain or compressed with gzip",
    )
}

/// Calls `make` for each file on all cores. Returns the results in the order of the files.
pub(crate) fn each<T: Send>(
    files: &[PathBuf],
    make: impl Fn(&Path) -> Result<T, CliError> + Sync,
) -> Vec<Result<T, CliError>> {
    let bar = terminal::progress(
        files.len() > 1 && uses_all_cores(),
        "{wide_bar} {pos}/{len}",
        Some(files.len() as u64),
    );
    let Ok(made) = in_parallel(files, |path| {
        let made = make(path);
        bar.inc(1);
        Ok::<_, Infallible>(made)
    });
    bar.finish_and_clear();
    made
}

/// Writes a snapshot and creates its folder.
pub(crate) fn write(file: &Path, snapshot: &Snapshot) -> Result<(), CliError> {
    let folder = file
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let made = folder.map_or(Ok(()), std::fs::create_dir_all);
    let written = made.and_then(|()| {
        harness_base::files::write_by(file, |out| snapshot.write(out).map(Ok::<_, Infallible>))
    });
    written.map(drop).map_err(CliError::unwritten(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_are_sorted_by_value() {
        let mut names = [
            "rank10.pickle",
            "rank2.pickle",
            "rank1.pickle.gz",
            "a",
            "rank2.pkl",
        ];
        names.sort_by_key(|name| by_numbers(name));
        assert_eq!(
            names,
            [
                "a",
                "rank1.pickle.gz",
                "rank2.pickle",
                "rank2.pkl",
                "rank10.pickle"
            ]
        );
    }
}
