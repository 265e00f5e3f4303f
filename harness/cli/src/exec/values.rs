//! The default of `--values` for a shell, or for a repository.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

use harness_gpu_settings::settings::Values;
use serde::Deserialize;

use crate::error::CliError;

const VARIABLE: &str = "HARNESS_VALUES";
const FILE: &str = ".harness.yml";
/// The root of a repository contains this folder or file.
const ROOT: &str = ".git";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    values: Values,
}

/// Returns the values that the variable or the file names. An empty variable counts as unset.
pub(super) fn settled() -> Result<Option<Values>, CliError> {
    match env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        Some(value) => value.to_string_lossy().parse().map(Some).map_err(|error| {
            let help = format!(
                "correct the variable {VARIABLE} or unset it, or give `--values`, \
                 which takes precedence"
            );
            CliError::input(format!("{VARIABLE}: {error}"), help)
        }),
        None => env::current_dir()
            .ok()
            .and_then(|folder| file_for(&folder))
            .map(|file| read(&file))
            .transpose(),
    }
}

/// The file in a folder, or in the nearest folder above it in the same repository.
fn file_for(folder: &Path) -> Option<PathBuf> {
    let is_in_repository = folder.ancestors().any(|folder| folder.join(ROOT).exists());
    for folder in folder.ancestors() {
        let file = folder.join(FILE);
        if fs::symlink_metadata(&file).is_ok() {
            return Some(file);
        }
        if !is_in_repository || folder.join(ROOT).exists() {
            return None;
        }
    }
    None
}

fn read(path: &Path) -> Result<Values, CliError> {
    let refusal = |at: &str, why: &dyn std::fmt::Display| {
        let help = "the file has one line, as in `values: cpu`; HARNESS_VALUES and `--values` take \
             precedence";
        CliError::input(format!("{}{at}: {why}", path.display()), help)
    };
    let text = harness_base::files::read_to_string(path)
        .map_err(|error: io::Error| refusal("", &error))?;
    serde_saphyr::from_str::<File>(&text)
        .map(|file| file.values)
        .map_err(|error| {
            let error = error.without_snippet();
            let at = error
                .location()
                .map_or_else(String::new, |at| format!(":{}:{}", at.line(), at.column()));
            let text = error.to_string();
            // The message repeats the place.
            let why = text
                .split_once(" at line ")
                .map_or(text.as_str(), |(why, _)| why);
            refusal(&at, &why)
        })
}
