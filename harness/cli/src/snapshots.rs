//! Memory snapshots that the user names, directly or by their folder. All cores read them, one file per core.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use harness_trace::snapshot::{Snapshot, SnapshotError};
use indicatif::ProgressBar;

use super::error::CliError;
use super::kind::{self, Kind};

/// File name endings of the snapshots in a folder.
const ENDINGS: [&str; 4] = [".pickle", ".pkl", ".pickle.gz", ".pkl.gz"];

/// Expands paths to files in the given order, each once. The snapshots of a folder are sorted by name, with `rank2` before `rank10`.
pub(crate) fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, CliError> {
    let mut files = Vec::new();
    let mut seen = BTreeSet::new();
    for path in paths {
        let found = if path.is_dir() { files_of_folder(path)? } else { vec![path.clone()] };
        // A missing file keeps its given name, for the error message.
        files.extend(found.into_iter().filter(|file| seen.insert(file.canonicalize().unwrap_or_else(|_| file.clone()))));
    }
    Ok(files)
}

fn files_of_folder(folder: &Path) -> Result<Vec<PathBuf>, CliError> {
    let unreadable = |error: io::Error| {
        CliError::input(format!("{}: the folder cannot be read: {error}", folder.display()), "make the folder readable, or name files")
    };
    let entries = std::fs::read_dir(folder).map_err(unreadable)?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>().map_err(unreadable)?;
    let is_snapshot = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
        ENDINGS.iter().any(|ending| name.ends_with(ending))
    };
    let mut files: Vec<PathBuf> = paths.into_iter().filter(is_snapshot).collect();
    if files.is_empty() {
        let message = format!("{}: there is no snapshot in this folder", folder.display());
        let help = format!("name a folder that contains {} files (subfolders are not searched), or name files", ENDINGS.join(", "));
        return Err(CliError::input(message, help));
    }
    files.sort_by_cached_key(|path| by_numbers(&path.to_string_lossy()));
    Ok(files)
}

/// A sort key that compares the numbers in names by value.
fn by_numbers(name: &str) -> Vec<(String, u64)> {
    let mut parts = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let text = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let digits = rest[text..].find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len() - text);
        parts.push((rest[..text].to_owned(), rest[text..text + digits].parse().unwrap_or(u64::MAX)));
        rest = &rest[text + digits..];
    }
    parts
}

pub(crate) fn read(path: &Path) -> Result<Snapshot, CliError> {
    Snapshot::read(path).map_err(|error| {
        if let SnapshotError::NotPickle { .. } = error
            && let Some(kind) = kind::of(path).filter(|kind| *kind != Kind::Pickle)
        {
            return kind.instead_of("a memory snapshot", path);
        }
        let why = match &error {
            SnapshotError::Io(error) if error.kind() == io::ErrorKind::NotFound => "there is no such file".to_owned(),
            SnapshotError::Io(error) if error.kind() == io::ErrorKind::IsADirectory => "this is a folder, not a snapshot".to_owned(),
            error => error.to_string(),
        };
        CliError::input(
            format!("{}: {why}", path.display()),
            "name a file that torch.cuda.memory._dump_snapshot() wrote, plain or compressed with gzip",
        )
    })
}

/// Calls `read` and `make` for each file on all cores. Returns the results in the order of the files.
pub(crate) fn each<T: Send>(
    files: &[PathBuf],
    read: impl Fn(&Path) -> Result<Snapshot, CliError> + Sync,
    make: impl Fn(&Path, &Snapshot) -> Result<T, CliError> + Sync,
) -> Vec<Result<T, CliError>> {
    let done: Vec<Mutex<Option<Result<T, CliError>>>> = files.iter().map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    let workers = thread::available_parallelism().map_or(1, usize::from).min(files.len());
    let is_watched = files.len() > 1 && io::stderr().is_terminal();
    let bar = if is_watched { ProgressBar::new(files.len() as u64) } else { ProgressBar::hidden() };
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let index = next.fetch_add(1, Ordering::Relaxed)
                    && let Some(path) = files.get(index)
                {
                    let made = read(path).and_then(|snapshot| make(path, &snapshot));
                    *done[index].lock().unwrap_or_else(PoisonError::into_inner) = Some(made);
                    bar.inc(1);
                }
            });
        }
    });
    bar.finish_and_clear();
    done.into_iter().filter_map(|made| made.into_inner().unwrap_or_else(PoisonError::into_inner)).collect()
}

/// Writes a snapshot and creates its folder. `help` is shown if that fails.
pub(crate) fn write(file: &Path, snapshot: &Snapshot, help: &'static str) -> Result<(), CliError> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    let made = folder.map_or(Ok(()), std::fs::create_dir_all);
    let written = made.and_then(|()| harness_base::files::write_by(file, |out| snapshot.write(out).map(Ok::<_, Infallible>)));
    written.map(drop).map_err(|error| CliError::Output { target: Some(file.to_owned()), error, help })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_are_sorted_by_value() {
        let mut names = ["rank10.pickle", "rank2.pickle", "rank1.pickle.gz", "a", "rank2.pkl"];
        names.sort_by_key(|name| by_numbers(name));
        assert_eq!(names, ["a", "rank1.pickle.gz", "rank2.pickle", "rank2.pkl", "rank10.pickle"]);
    }
}
