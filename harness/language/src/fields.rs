//! Fields that scenarios and suites both have: what the file is about, and the memory that it needs.

use harness_allocator::units::Bytes;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::error::Problem;
use crate::located::{Located, Position};
use crate::text::{SizeText, size};

/// The least memory that a file may ask for: one small segment.
pub const MIN_MEMORY: Bytes = Bytes::mib(2);
/// The most memory that a file may ask for, far beyond any GPU: a larger size is a typing mistake.
pub const MAX_MEMORY: Bytes = Bytes::gib(1 << 20);

/// What the file needs to run.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "needs")]
pub struct NeedsWire {
    /// The memory that the device has for it, from 2MiB to 1PiB. A larger device is limited to this.
    pub memory: SizeText,
}

/// What a file says of itself: any text.
///
/// # Errors
/// [`Problem`] where it is empty.
pub fn about(given: &Located<String>, noun: &str) -> Result<String, Problem> {
    match given.value.trim() {
        "" => Err(Problem::new(given.position(), "`about` says nothing").help(format!("write what a reader learns from the {noun}"))),
        text => Ok(text.to_owned()),
    }
}

/// The memory that a file asks for.
///
/// # Errors
/// [`Problem`] outside of [`MIN_MEMORY`] to [`MAX_MEMORY`].
pub fn memory(given: &SizeText) -> Result<Bytes, Problem> {
    check_memory(size(given)?, given.position())
}

/// The same of an amount that stands at this place.
///
/// # Errors
/// [`Problem`] outside of [`MIN_MEMORY`] to [`MAX_MEMORY`].
pub fn check_memory(memory: Bytes, at: Position) -> Result<Bytes, Problem> {
    if (MIN_MEMORY..=MAX_MEMORY).contains(&memory) {
        return Ok(memory);
    }
    Err(Problem::new(at, format!("`memory` cannot be {memory}")).help("`memory` is from 2MiB, one small segment, to 1PiB"))
}
