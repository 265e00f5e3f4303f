//! Which device the user chose: by option, by variable, or not at all; the device profile named for the simulated one; how much memory it has.

use std::path::Path;

use harness_allocator::units::Bytes;
use harness_devices::DeviceSource;
use harness_devices::{DeviceChoice, ParseDeviceError};
use harness_scenario::{MAX_MEMORY, MIN_MEMORY};

use super::error::CliError;

/// What chooses the device where the option `--device` does not.
const VARIABLE: &str = "HARNESS_DEVICE";

/// The device that the option names, else the variable `HARNESS_DEVICE`; `otherwise` where neither does. An empty variable names none.
pub(crate) fn choice(option: Option<DeviceChoice>, otherwise: DeviceChoice) -> Result<DeviceChoice, CliError> {
    if let Some(choice) = option {
        return Ok(choice);
    }
    match std::env::var_os(VARIABLE) {
        Some(value) if !value.is_empty() => value.to_string_lossy().parse().map_err(|error: ParseDeviceError| {
            let help = format!("correct the variable {VARIABLE} or unset it, or give `--device`, which goes before it");
            CliError::input(format!("{VARIABLE}: {error}"), help)
        }),
        _ => Ok(otherwise),
    }
}

/// The same source on a profile, if one is named; only the simulated device can run on one.
pub(crate) fn profiled(source: DeviceSource, profile: Option<&Path>) -> Result<DeviceSource, CliError> {
    match profile {
        None => Ok(source),
        Some(path) if source.simulated_because().is_some() => Ok(source.with_profile(path)?),
        Some(_) => {
            let message = format!("a device profile is for the simulated device, and this one is {source}, which costs what it costs");
            Err(CliError::input(message, "add `--device sim`, or leave `--device-profile` out"))
        }
    }
}

/// The value of an option `--memory`. Less than an allocator can use is a unit forgotten.
pub(crate) fn memory(text: &str) -> Result<Bytes, String> {
    let memory = Bytes::parse(text).map_err(|error| error.to_string())?;
    if (MIN_MEMORY..=MAX_MEMORY).contains(&memory) {
        return Ok(memory);
    }
    Err(format!("a device's memory is from {MIN_MEMORY}, one small segment, to {MAX_MEMORY}, and this is {memory}"))
}
