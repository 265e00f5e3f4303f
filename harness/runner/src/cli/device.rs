//! Which device the user chose: by option, by variable, or not at all; and the device profile named for the simulated one.

use std::path::Path;

use harness::session::DeviceSource;
use harness_allocator::device::open::{DeviceChoice, ParseDeviceError};

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
