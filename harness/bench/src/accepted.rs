//! The accepted build: which commit it is, in the file [`FILE`] among the reports. It moves only when somebody accepts another.

use std::fmt::Display;
use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// The file among the reports.
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
    /// Why it was accepted, in a sentence.
    pub reason: String,
}

/// The accepted build of these reports, if there is one.
///
/// # Errors
/// A sentence: the file is there and cannot be read. Mend it, or accept a build anew with `harness report accept`.
pub fn read(root: &Path) -> Result<Option<AcceptedBuild>, String> {
    let path = root.join(FILE);
    let failed = |why: &dyn Display| format!("cannot read the accepted build from `{}`: {why}", path.display());
    match File::open(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(&error)),
        Ok(file) => serde_json::from_reader(file.take(MOST)).map(Some).map_err(|error| failed(&error)),
    }
}

/// The text of the file.
#[must_use]
pub fn document(build: &AcceptedBuild) -> String {
    let mut text = serde_json::to_string_pretty(build).expect("texts always serialize");
    text.push('\n');
    text
}
