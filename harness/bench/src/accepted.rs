//! The accepted build: which commit it is, in the file [`FILE`] among the reports. It moves only when somebody accepts another.

use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The file's name.
pub const FILE: &str = "accepted.json";

/// Bytes that such a file has at most.
const MOST: u64 = 64 << 10;

/// What the file holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptedBuild {
    /// The whole hash of the commit.
    pub commit: String,
    /// The day on which it was accepted, as in `2026-11-20`.
    pub date: String,
    /// Why.
    pub reason: String,
}

/// The file cannot be used: mend it, or accept a build anew with `harness report accept`.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the accepted build from `{}`: {why}", path.display())]
pub struct AcceptedError {
    path: PathBuf,
    why: String,
}

/// The accepted build of these reports, if there is one.
///
/// # Errors
/// [`AcceptedError`]: the file is there and cannot be read.
pub fn read(root: &Path) -> Result<Option<AcceptedBuild>, AcceptedError> {
    let path = root.join(FILE);
    let mut text = String::new();
    let read = std::fs::File::open(&path).and_then(|file| file.take(MOST).read_to_string(&mut text));
    let failed = |why: String| AcceptedError { path: path.clone(), why };
    match read {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(error.to_string())),
        Ok(_) => serde_json::from_str(&text).map(Some).map_err(|error| failed(error.to_string())),
    }
}

/// The text of the file.
#[must_use]
pub fn document(build: &AcceptedBuild) -> String {
    let mut text = serde_json::to_string_pretty(build).expect("texts always serialize");
    text.push('\n');
    text
}
