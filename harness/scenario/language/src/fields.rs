//! The fields `version`, `about` and `needs`, which scenarios and suites share.

use crate::schema::JsonSchema;
use harness_allocator::units::Bytes;
use serde::Deserialize;

use crate::error::Problem;
use crate::located::{Located, Position};
use crate::text::{SizeText, size};

/// Smallest `memory`: one small segment.
pub const MIN_MEMORY: Bytes = Bytes::mib(2);
/// Largest `memory`, far beyond any GPU: a larger size is a typing mistake.
pub const MAX_MEMORY: Bytes = Bytes::gib(1 << 20);

/// What the file needs to run.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "needs")]
pub struct NeedsWire {
    /// Memory of the device, from 2MiB to 1PiB. A larger device is limited to this.
    pub memory: SizeText,
}

/// The version of the language that this build reads.
pub const LANGUAGE_VERSION: u64 = 1;

/// Checks the version that a file states, if any.
pub fn version(given: Option<&Located<u64>>) -> Result<(), Problem> {
    match given {
        Some(given) if given.value != LANGUAGE_VERSION => {
            let message = format!(
                "this harness reads version {LANGUAGE_VERSION}, not {}",
                given.value
            );
            Err(Problem::new(given.at, message).help("use a newer harness"))
        }
        _ => Ok(()),
    }
}

pub fn about(given: &Located<String>, noun: &str) -> Result<String, Problem> {
    match given.value.trim() {
        "" => {
            Err(Problem::new(given.at, "`about` is empty")
                .help(format!("write what the {noun} shows")))
        }
        text => Ok(text.to_owned()),
    }
}

pub fn memory(given: &SizeText) -> Result<Bytes, Problem> {
    check_memory(size(given)?, given.at)
}

pub fn check_memory(memory: Bytes, at: Position) -> Result<Bytes, Problem> {
    if (MIN_MEMORY..=MAX_MEMORY).contains(&memory) {
        return Ok(memory);
    }
    Err(Problem::new(at, format!("`memory` cannot be {memory}"))
        .help("`memory` is from 2MiB, one small segment, to 1PiB"))
}
