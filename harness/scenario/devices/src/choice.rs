//! [`DeviceChoice`] is the device that a user requests; probing the machine resolves it.

use std::{fmt, str::FromStr};

use harness_allocator::device::DeviceError;
use harness_cuda::machine::Probe;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// CUDA device 0 if there is one, otherwise the simulated device.
    #[default]
    Auto,
    Simulated,
    Cuda(u32),
}

/// A device of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolved {
    /// The simulated device, and the reason as a sentence.
    Simulated { reason: String },
    /// The CUDA device with this ordinal.
    Cuda(u32),
}

impl DeviceChoice {
    /// Resolves the choice on the probed machine.
    /// Fails if the requested CUDA device does not exist.
    pub fn resolve(self, probe: &Probe) -> Result<Resolved, DeviceError> {
        match self {
            Self::Simulated => Ok(Resolved::Simulated {
                reason: "the simulated device was requested".to_owned(),
            }),
            Self::Cuda(ordinal) => probe.require(ordinal).map(|()| Resolved::Cuda(ordinal)),
            Self::Auto => Ok(match probe.require(0) {
                Ok(()) => Resolved::Cuda(0),
                Err(error) => Resolved::Simulated {
                    reason: format!("no CUDA device can be opened: {error}"),
                },
            }),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = ParseDeviceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "sim" => Ok(Self::Simulated),
            "cuda" => Ok(Self::Cuda(0)),
            _ => match text.strip_prefix("cuda:").map(str::parse) {
                Some(Ok(ordinal)) => Ok(Self::Cuda(ordinal)),
                _ => Err(ParseDeviceError(text.to_owned())),
            },
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Simulated => f.write_str("sim"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a device: write `auto`, `sim`, `cuda` (the first CUDA device) or `cuda:N`, as in \
     `cuda:1`"
)]
pub struct ParseDeviceError(String);

#[cfg(test)]
mod tests;
