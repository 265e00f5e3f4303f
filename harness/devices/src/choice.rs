//! [`DeviceChoice`] is the device that a user requests; probing the machine resolves it.

use std::fmt;
use std::str::FromStr;

use harness_allocator::device::DeviceError;
use harness_cuda::machine::Probe;

/// The device that a user requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// CUDA device 0 if there is one, otherwise the simulated device.
    #[default]
    Auto,
    Simulated,
    /// The CUDA device with this ordinal.
    Cuda(u32),
}

/// A device of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolved {
    /// The simulated device, and the reason.
    Simulated {
        /// A sentence for the report.
        reason: String,
    },
    /// The CUDA device with this ordinal.
    Cuda(u32),
}

impl DeviceChoice {
    /// Resolves the choice on the probed machine.
    /// Fails if the requested CUDA device does not exist.
    pub fn resolve(self, probe: &Probe) -> Result<Resolved, DeviceError> {
        match self {
            Self::Simulated => Ok(Resolved::Simulated { reason: "the simulated device was requested".to_owned() }),
            Self::Cuda(ordinal) => probe.require(ordinal).map(|()| Resolved::Cuda(ordinal)),
            Self::Auto => Ok(match probe.require(0) {
                Ok(()) => Resolved::Cuda(0),
                Err(error) => Resolved::Simulated { reason: format!("no CUDA device can be opened: {error}") },
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

/// The error for a text that names no device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a device: write `auto`, `sim`, `cuda` (the first CUDA device) or `cuda:N`, as in `cuda:1`")]
pub struct ParseDeviceError(String);

#[cfg(test)]
mod tests {
    use harness_allocator::units::Bytes;
    use harness_cuda::machine::{DeviceFound, DriverFound};

    use super::*;

    fn machine_with(devices: u32) -> Probe {
        let device = |ordinal| DeviceFound {
            ordinal,
            name: "test".to_owned(),
            total: Bytes::gib(1),
            uuid_hash: String::new(),
            compute_capability: (9, 0),
            nvml: Err("none".to_owned()),
        };
        let driver = DriverFound { cuda: "13.0".to_owned(), devices: (0..devices).map(device).collect() };
        Probe { driver: Ok(driver), nvml: Err("none".to_owned()) }
    }

    #[test]
    fn every_choice_round_trips() {
        for choice in [DeviceChoice::Auto, DeviceChoice::Simulated, DeviceChoice::Cuda(0), DeviceChoice::Cuda(17)] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
    }

    #[test]
    fn an_invalid_choice_lists_the_accepted_forms() {
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", "cuda:99999999999"] {
            let error = text.parse::<DeviceChoice>().expect_err("not a device").to_string();
            assert_eq!(
                error,
                format!("`{text}` is not a device: write `auto`, `sim`, `cuda` (the first CUDA device) or `cuda:N`, as in `cuda:1`")
            );
        }
    }

    #[test]
    fn auto_chooses_the_first_gpu() {
        assert_eq!(DeviceChoice::Auto.resolve(&machine_with(2)), Ok(Resolved::Cuda(0)));
    }

    #[test]
    fn auto_falls_back_to_the_simulated_device_with_a_reason() {
        let resolved = DeviceChoice::Auto.resolve(&machine_with(0)).expect("auto always resolves");
        let reason = "no CUDA device can be opened: CUDA device 0: the driver is installed but sees no GPU; see `nvidia-smi -L` and \
                      CUDA_VISIBLE_DEVICES";
        assert_eq!(resolved, Resolved::Simulated { reason: reason.to_owned() });
    }

    #[test]
    fn a_requested_cuda_device_must_exist() {
        let error = DeviceChoice::Cuda(2).resolve(&machine_with(2)).expect_err("there are two").to_string();
        assert_eq!(error, "CUDA device 2: the driver has 2 devices, cuda:0 to cuda:1");
        assert_eq!(DeviceChoice::Cuda(1).resolve(&machine_with(2)), Ok(Resolved::Cuda(1)));
    }
}
