//! Values of options that several commands have.

use harness_allocator::units::{Bytes, Nanos};
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
