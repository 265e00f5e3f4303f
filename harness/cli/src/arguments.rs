//! Values of options that several commands have.

use std::path::{Path, PathBuf};

use clap::builder::{PathBufValueParser, TypedValueParser};
use harness_allocator::units::{Bytes, Nanos};
use harness_base::files;
use harness_scenario::{MAX_MEMORY, MIN_MEMORY};

/// Parses a time above zero. `noun` names it in errors.
pub(crate) fn time(noun: &str, text: &str) -> Result<Nanos, String> {
    match Nanos::parse(text) {
        Ok(Nanos::ZERO) => Err(format!("the {noun} must be longer than 0, as in `60s`")),
        Ok(time) => Ok(time),
        Err(error) => Err(error.to_string()),
    }
}

/// Parses the value of `--memory`. An amount below the minimum suggests a missing unit.
pub(crate) fn memory(text: &str) -> Result<Bytes, String> {
    let memory = Bytes::parse(text).map_err(|error| error.to_string())?;
    if (MIN_MEMORY..=MAX_MEMORY).contains(&memory) {
        return Ok(memory);
    }
    Err(format!(
        "a device has from {MIN_MEMORY}, one small segment, to {MAX_MEMORY} of memory, not {memory}"
    ))
}

/// Takes the path of a file to write. Refuses, before the command does anything, what cannot be
/// written like a file.
pub(crate) fn output() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| files::check_output(&path).map(|()| path))
}

/// Like [`output`], for a report that may be in a folder. Returns the path of the file.
pub(crate) fn report() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| {
        let file = in_folder(&path);
        files::check_output(&file).map(|()| file)
    })
}

/// The report file: `path` itself, or `report.md` if `path` is a folder.
fn in_folder(path: &Path) -> PathBuf {
    let is_folder = path.is_dir() || path.as_os_str().as_encoded_bytes().ends_with(b"/");
    if is_folder {
        path.join("report.md")
    } else {
        path.to_owned()
    }
}
