//! The accepted build: the commit in [`FILE`] among the reports. Only `harness report accept`
//! changes it.

use std::{fmt::Display, io::ErrorKind, path::Path};

use harness_base::files;
use serde::{Deserialize, Serialize};

use crate::gate::AcceptedSuite;

/// Its name among the reports.
pub const FILE: &str = "accepted.json";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AcceptedBuild {
    /// Full commit hash.
    pub commit: String,
    /// Date of acceptance, as in `2026-11-20`.
    pub date: String,
    pub reason: String,
    /// Its suites; empty if the build was accepted without them.
    #[serde(default)]
    pub suites: Vec<AcceptedSuite>,
}

pub fn read(root: &Path) -> Result<Option<AcceptedBuild>, String> {
    let path = root.join(FILE);
    let failed = |why: &dyn Display| {
        format!(
            "cannot read the accepted build from `{}`: {why}",
            path.display()
        )
    };
    match files::read_to_string(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(&error)),
        Ok(text) => serde_json::from_str(&text)
            .map(Some)
            .map_err(|error| failed(&error)),
    }
}

pub fn document(build: &AcceptedBuild) -> String {
    let mut text = serde_json::to_string_pretty(build).expect("texts always serialize");
    text.push('\n');
    text
}
