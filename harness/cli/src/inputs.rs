use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use harness_scenario::{ParameterSettings, Scenario};

use super::error::{CliError, Failures};
use super::kind;

/// The catalogue's folder, relative to the root of the project.
pub(crate) const CATALOGUE: &str = "scenarios";
/// The folder of the project's benchmark suites, relative to the root of the project.
pub(crate) const SUITES: &str = "scenarios/bench";

/// Expands paths to YAML files in the given order, each once. A folder is replaced by its `*.yaml`
/// files, sorted by name.
pub(crate) fn files(paths: &[PathBuf], noun: &str) -> Result<Vec<PathBuf>, CliError> {
    let is_yaml =
        |path: &Path| path.extension().is_some_and(|ending| ending == "yaml") && !path.is_dir();
    expand(paths, (noun, "*.yaml"), is_yaml, |files| files.sort())
}

/// Expands paths to files in the given order, each once. A folder is replaced by its files of one
/// kind, which is described for errors.
pub(crate) fn expand(
    paths: &[PathBuf],
    (noun, endings): (&str, &str),
    is_one: impl Fn(&Path) -> bool,
    sort: impl Fn(&mut Vec<PathBuf>),
) -> Result<Vec<PathBuf>, CliError> {
    let of_folder = |folder: &Path| {
        let unreadable = |error: std::io::Error| {
            CliError::input(
                format!("{}: the folder cannot be read: {error}", folder.display()),
                "make the folder readable, or name files",
            )
        };
        let entries = std::fs::read_dir(folder).map_err(unreadable)?;
        let entries = entries
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<Result<Vec<_>, _>>()
            .map_err(unreadable)?;
        let mut files: Vec<PathBuf> = entries.into_iter().filter(|path| is_one(path)).collect();
        if files.is_empty() {
            let message = format!("{}: there is no {noun} in this folder", folder.display());
            let help = format!(
                "name a folder that contains {endings} files (subfolders are not searched), or \
                 name files"
            );
            return Err(CliError::input(message, help));
        }
        sort(&mut files);
        Ok(files)
    };
    let mut files = Vec::new();
    let mut seen = BTreeSet::new();
    for path in paths {
        let found = if path.is_dir() {
            of_folder(path)?
        } else {
            vec![path.clone()]
        };
        // A missing file keeps its given name, for the error message.
        files.extend(
            found
                .into_iter()
                .filter(|file| seen.insert(file.canonicalize().unwrap_or_else(|_| file.clone()))),
        );
    }
    Ok(files)
}

pub(crate) fn load(
    paths: &[PathBuf],
    settings: &ParameterSettings,
) -> Result<Vec<Scenario>, Failures> {
    load_by(paths, |path| points(path, settings))
}

pub(crate) fn load_by(
    paths: &[PathBuf],
    read: impl Fn(&Path) -> Result<Vec<Scenario>, CliError>,
) -> Result<Vec<Scenario>, Failures> {
    let points = Failures::all(files(paths, "scenario")?.iter().map(|path| read(path)))?;
    Ok(points.into_iter().flatten().collect())
}

pub(crate) fn points(path: &Path, settings: &ParameterSettings) -> Result<Vec<Scenario>, CliError> {
    Scenario::load_points(path, settings).map_err(|error| match kind::of(path) {
        Some(kind) => kind.instead_of("a scenario", path),
        None => CliError::from(error),
    })
}
