//! Describes the GPUs of this machine without opening one.

use harness_allocator::device::{DeviceError, DeviceInfo};

pub use crate::device::probe::{DeviceFound, DriverFound, NvmlFound};
use crate::nvml::{self, NvmlDevice};

/// The GPUs of this machine. Creates no CUDA context, so it takes no GPU memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The CUDA driver, or why it is unavailable.
    pub driver: Result<DriverFound, DeviceError>,
    /// NVML's version of the kernel driver, or why NVML is unavailable.
    pub nvml: Result<String, String>,
}

pub fn probe() -> Probe {
    Probe {
        driver: DriverFound::new(),
        nvml: nvml::driver_version(),
    }
}

/// Returns the NVML device of a CUDA device, found by the hash of its UUID. The CUDA device may be
/// limited or already closed. Fails with the reason if there is none, as for a simulated device.
pub fn nvml_of(info: &DeviceInfo) -> Result<NvmlDevice, String> {
    let Some(hash) = &info.fingerprint.uuid_hash else {
        return Err("a simulated device has no sensors".to_owned());
    };
    nvml_where(
        |device| device.uuid.hash() == *hash,
        "the CUDA driver no longer has this device",
    )
}

/// Returns the NVML device of the CUDA device with this ordinal, which need not be open.
pub fn nvml_at(ordinal: u32) -> Result<NvmlDevice, String> {
    nvml_where(
        |device| device.ordinal == ordinal,
        &format!("the CUDA driver has no device {ordinal}"),
    )
}

fn nvml_where(is_it: impl Fn(&DeviceFound) -> bool, missing: &str) -> Result<NvmlDevice, String> {
    let driver = DriverFound::new().map_err(|error| error.to_string())?;
    NvmlDevice::find(driver.devices.into_iter().find(is_it).ok_or(missing)?.uuid)
}

impl Probe {
    /// Fails if there is no driver, or no CUDA device with this ordinal.
    pub fn require(&self, ordinal: u32) -> Result<(), DeviceError> {
        let driver = self.driver.as_ref().map_err(Clone::clone)?;
        let count = u32::try_from(driver.devices.len()).unwrap_or(u32::MAX);
        if ordinal < count {
            Ok(())
        } else {
            Err(no_such_device(ordinal, count))
        }
    }
}

pub(crate) fn no_such_device(ordinal: u32, count: u32) -> DeviceError {
    let why = match count {
        0 => {
            "the driver is installed but sees no GPU; see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES"
                .to_owned()
        }
        1 => "the driver has one device, cuda:0".to_owned(),
        _ => format!(
            "the driver has {count} devices, cuda:0 to cuda:{}",
            count - 1
        ),
    };
    DeviceError::Unavailable {
        what: format!("CUDA device {ordinal}"),
        why,
    }
}
