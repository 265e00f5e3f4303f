//! Which device to use: what the user asked for, what is there, and the one that follows.
//!
//! [`DeviceChoice`] is the user's word, [`Probe`] what a look at the machine finds, [`DeviceChoice::resolve`] joins the two.

use std::fmt;
use std::str::FromStr;

use super::cuda::probe::{CudaFound, CudaProbe};
use super::nvml::{self, NvmlDevice, ProcessUse};
use super::{DeviceError, DeviceInfo};
use crate::units::Bytes;

/// The device that a user asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// CUDA device 0 where there is one, otherwise the simulated device.
    #[default]
    Auto,
    /// The simulated device.
    Simulated,
    /// The CUDA device with this ordinal.
    Cuda(u32),
}

/// The device that a choice comes down to on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolved {
    /// The simulated device, and why.
    Simulated {
        /// A sentence for the report.
        reason: String,
    },
    /// The CUDA device with this ordinal.
    Cuda(u32),
}

impl DeviceChoice {
    /// The device to open on the machine that was probed.
    ///
    /// # Errors
    /// [`DeviceError`] where a CUDA device was asked for by name and is not there.
    pub fn resolve(self, probe: &Probe) -> Result<Resolved, DeviceError> {
        match self {
            Self::Simulated => Ok(Resolved::Simulated { reason: "the simulated device was asked for".to_owned() }),
            Self::Cuda(ordinal) => probe.require(ordinal).map(|()| Resolved::Cuda(ordinal)),
            Self::Auto => Ok(match probe.require(0) {
                Ok(()) => Resolved::Cuda(0),
                Err(error) => Resolved::Simulated { reason: format!("no CUDA device can be opened: {error}") },
            }),
        }
    }
}

/// What a look at this machine finds. Makes no CUDA context, so it takes nothing from any GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The CUDA driver, or why there is none and what follows.
    pub driver: Result<DriverFound, DeviceError>,
    /// Version of the kernel driver as NVML tells it, or why there is no NVML.
    pub nvml: Result<String, String>,
}

/// The CUDA driver and its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFound {
    /// CUDA version that it supports, for example `13.0`.
    pub cuda: String,
    /// Its devices, by ordinal; may be empty.
    pub devices: Vec<DeviceFound>,
}

/// One CUDA device, not opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFound {
    /// Its number for this process, as in `cuda:0`.
    pub ordinal: u32,
    /// As a user would recognise it.
    pub name: String,
    /// All of its memory as an allocator may use it.
    pub total: Bytes,
    /// The hash of its UUID.
    pub uuid_hash: String,
    /// Compute capability, for example `(9, 0)`.
    pub compute_capability: (i32, i32),
    /// What NVML adds, or why it adds nothing.
    pub nvml: Result<NvmlFound, String>,
}

/// What NVML tells of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmlFound {
    /// Memory that nobody has taken.
    pub free: Bytes,
    /// Other processes on the device, and what they hold.
    pub others: Vec<ProcessUse>,
}

/// Looks at the machine: driver, NVML, devices.
#[must_use]
pub fn probe() -> Probe {
    let driver = CudaProbe::new().map(|found| DriverFound { cuda: found.cuda, devices: found.devices.into_iter().map(look_at).collect() });
    Probe { driver, nvml: nvml::driver_version() }
}

fn look_at(found: CudaFound) -> DeviceFound {
    let nvml = NvmlDevice::find(found.uuid).and_then(|device| Ok(NvmlFound { free: device.free()?, others: device.other_processes()? }));
    DeviceFound {
        ordinal: found.ordinal,
        name: found.name,
        total: found.total,
        uuid_hash: found.uuid.hash(),
        compute_capability: found.compute_capability,
        nvml,
    }
}

/// The management library's view of an open device, found by the hash of its UUID: also of one that is limited or closed since.
///
/// # Errors
/// A sentence: why there is none. A simulated device has none.
pub fn nvml_of(info: &DeviceInfo) -> Result<NvmlDevice, String> {
    let Some(hash) = &info.fingerprint.uuid_hash else { return Err("a simulated device has no sensors".to_owned()) };
    let driver = CudaProbe::new().map_err(|error| error.to_string())?;
    let found = driver.devices.into_iter().find(|device| device.uuid.hash() == *hash);
    NvmlDevice::find(found.ok_or("the CUDA driver does not have this device any more")?.uuid)
}

/// The same of a CUDA device that need not be open, by its ordinal.
///
/// # Errors
/// A sentence: why there is none.
pub fn nvml_at(ordinal: u32) -> Result<NvmlDevice, String> {
    let driver = CudaProbe::new().map_err(|error| error.to_string())?;
    let found = driver.devices.into_iter().find(|device| device.ordinal == ordinal);
    NvmlDevice::find(found.ok_or_else(|| format!("the CUDA driver has no device {ordinal}"))?.uuid)
}

impl Probe {
    /// Whether the CUDA device with this ordinal is there.
    fn require(&self, ordinal: u32) -> Result<(), DeviceError> {
        let driver = self.driver.as_ref().map_err(Clone::clone)?;
        let count = u32::try_from(driver.devices.len()).unwrap_or(u32::MAX);
        if ordinal < count { Ok(()) } else { Err(no_such_device(ordinal, count)) }
    }
}

/// The error for an ordinal that the driver does not have.
pub(super) fn no_such_device(ordinal: u32, count: u32) -> DeviceError {
    let why = match count {
        0 => "the driver is installed but sees no GPU; see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES".to_owned(),
        1 => "the driver has one device, cuda:0".to_owned(),
        _ => format!("the driver has {count} devices, cuda:0 to cuda:{}", count - 1),
    };
    DeviceError::Unavailable { what: format!("CUDA device {ordinal}"), why }
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

/// A text that names no device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a device: write `auto`, `sim`, `cuda` (the first CUDA device) or `cuda:N`, as in `cuda:1`")]
pub struct ParseDeviceError(String);

#[cfg(test)]
mod tests {
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
    fn every_choice_is_read_as_it_is_written() {
        for choice in [DeviceChoice::Auto, DeviceChoice::Simulated, DeviceChoice::Cuda(0), DeviceChoice::Cuda(17)] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
    }

    #[test]
    fn another_text_is_answered_with_the_accepted_forms() {
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", "cuda:99999999999"] {
            let error = text.parse::<DeviceChoice>().expect_err("not a device").to_string();
            assert_eq!(
                error,
                format!("`{text}` is not a device: write `auto`, `sim`, `cuda` (the first CUDA device) or `cuda:N`, as in `cuda:1`")
            );
        }
    }

    #[test]
    fn auto_takes_the_first_gpu_where_there_is_one() {
        assert_eq!(DeviceChoice::Auto.resolve(&machine_with(2)), Ok(Resolved::Cuda(0)));
    }

    #[test]
    fn auto_takes_the_simulated_device_otherwise_and_says_why() {
        let resolved = DeviceChoice::Auto.resolve(&machine_with(0)).expect("auto always resolves");
        let reason = "no CUDA device can be opened: CUDA device 0: the driver is installed but sees no GPU; see `nvidia-smi -L` and \
                      CUDA_VISIBLE_DEVICES";
        assert_eq!(resolved, Resolved::Simulated { reason: reason.to_owned() });
    }

    #[test]
    fn a_device_asked_for_by_number_must_be_there() {
        let error = DeviceChoice::Cuda(2).resolve(&machine_with(2)).expect_err("there are two").to_string();
        assert_eq!(error, "CUDA device 2: the driver has 2 devices, cuda:0 to cuda:1");
        assert_eq!(DeviceChoice::Cuda(1).resolve(&machine_with(2)), Ok(Resolved::Cuda(1)));
    }
}
