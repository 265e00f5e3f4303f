//! The device profile that a user names for the simulated device.

use std::path::Path;

use harness::session::DeviceSource;

use super::error::CliError;

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
