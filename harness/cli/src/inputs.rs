//! Scenario and suite files that the user names, directly or by their folder.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use harness_allocator::units::Bytes;
use harness_base::printable::printable;
use harness_scenario::{Scenario, Settings};

use super::error::{CliError, Failures};
use super::{import, kind, terminal};

/// The catalogue's folder, relative to the root of the project.
pub(crate) const CATALOGUE: &str = "scenarios";

/// Expands paths to files in the given order, each once. A folder is replaced by its `*.yaml` files, sorted by name.
pub(crate) fn files(paths: &[PathBuf], noun: &str) -> Result<Vec<PathBuf>, CliError> {
    let mut files = Vec::new();
    let mut seen = BTreeSet::new();
    for path in paths {
        let found = if path.is_dir() { files_of_folder(path, noun)? } else { vec![path.clone()] };
        // A missing file keeps its given name, for the error message.
        files.extend(found.into_iter().filter(|file| seen.insert(file.canonicalize().unwrap_or_else(|_| file.clone()))));
    }
    Ok(files)
}

/// Reads and checks all files, or returns the first error of each invalid one.
pub(crate) fn load(paths: &[PathBuf], settings: &Settings) -> Result<Vec<Scenario>, Failures> {
    load_by(paths, |path| points(path, settings))
}

fn load_by(paths: &[PathBuf], read: impl Fn(&Path) -> Result<Vec<Scenario>, CliError>) -> Result<Vec<Scenario>, Failures> {
    let (mut scenarios, mut failures) = (Vec::new(), Vec::new());
    for path in files(paths, "scenario")? {
        match read(&path) {
            Ok(points) => scenarios.extend(points),
            Err(error) => failures.push(error),
        }
    }
    if failures.is_empty() { Ok(scenarios) } else { Err(Failures(failures)) }
}

/// Like [`load`], and turns a memory snapshot or a trace into a scenario that replays it on a device with that memory.
pub(crate) fn load_with_programs(paths: &[PathBuf], settings: &Settings, memory: Option<Bytes>) -> Result<Vec<Scenario>, Failures> {
    load_by(paths, |path| import::as_scenario(path, memory).map_or_else(|| points(path, settings), |scenario| Ok(vec![scenario?])))
}

/// Reads and checks one file. A scenario with a matrix yields one scenario per point.
pub(crate) fn points(path: &Path, settings: &Settings) -> Result<Vec<Scenario>, CliError> {
    let scenarios = Scenario::load_points(path, settings).map_err(|error| match kind::of(path) {
        Some(kind) => kind.instead_of("a scenario", path),
        None => CliError::from(error),
    })?;
    for hint in scenarios.iter().flat_map(|scenario| &scenario.renamed).collect::<BTreeSet<_>>() {
        terminal::message(printable(&format!("{}:{}:{}: {hint}", path.display(), hint.at.line, hint.at.column)));
    }
    Ok(scenarios)
}

fn files_of_folder(folder: &Path, noun: &str) -> Result<Vec<PathBuf>, CliError> {
    let unreadable = |error: std::io::Error| {
        CliError::input(format!("{}: the folder cannot be read: {error}", folder.display()), "make the folder readable, or name files")
    };
    let entries = std::fs::read_dir(folder).map_err(unreadable)?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>().map_err(unreadable)?;
    let mut files: Vec<PathBuf> = paths.into_iter().filter(|path| is_yaml(path)).collect();
    if files.is_empty() {
        let message = format!("{}: there is no {noun} in this folder", folder.display());
        return Err(CliError::input(message, "name a folder that contains *.yaml files (subfolders are not searched), or name files"));
    }
    files.sort();
    Ok(files)
}

fn is_yaml(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "yaml") && !path.is_dir()
}
