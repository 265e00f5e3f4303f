//! Describes the GPUs of this machine without opening one.

use harness_allocator::device::{DeviceError, DeviceInfo};
use harness_allocator::units::Bytes;

use crate::device::probe::{CudaFound, CudaProbe};
use crate::nvml::{self, NvmlDevice, ProcessUse};

/// The GPUs of this machine. Creates no CUDA context, so it takes no GPU memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The CUDA driver, or why it is unavailable.
    pub driver: Result<DriverFound, DeviceError>,
    /// NVML's version of the kernel driver, or why NVML is unavailable.
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

/// A CUDA device that has not been opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFound {
    /// Its number for this process, as in `cuda:0`.
    pub ordinal: u32,
    pub name: String,
    /// Its total memory in bytes.
    pub total: Bytes,
    /// The hash of its UUID.
    pub uuid_hash: String,
    /// Compute capability, for example `(9, 0)`.
    pub compute_capability: (i32, i32),
    /// NVML's figures, or why there are none.
    pub nvml: Result<NvmlFound, String>,
}

/// NVML's figures of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmlFound {
    /// Free memory of the device.
    pub free: Bytes,
    /// Other processes on the device, and their memory.
    pub others: Vec<ProcessUse>,
}

/// Queries the driver, NVML and the devices.
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

/// Returns the NVML device of a CUDA device, found by the hash of its UUID. The CUDA device may be limited or already closed.
///
/// # Errors
/// Why there is none. A simulated device has none.
pub fn nvml_of(info: &DeviceInfo) -> Result<NvmlDevice, String> {
    let Some(hash) = &info.fingerprint.uuid_hash else { return Err("a simulated device has no sensors".to_owned()) };
    let driver = CudaProbe::new().map_err(|error| error.to_string())?;
    let found = driver.devices.into_iter().find(|device| device.uuid.hash() == *hash);
    NvmlDevice::find(found.ok_or("the CUDA driver no longer has this device")?.uuid)
}

/// Returns the NVML device of the CUDA device with this ordinal, which need not be open.
pub fn nvml_at(ordinal: u32) -> Result<NvmlDevice, String> {
    let driver = CudaProbe::new().map_err(|error| error.to_string())?;
    let found = driver.devices.into_iter().find(|device| device.ordinal == ordinal);
    NvmlDevice::find(found.ok_or_else(|| format!("the CUDA driver has no device {ordinal}"))?.uuid)
}

impl Probe {
    /// Fails if there is no driver, or no CUDA device with this ordinal.
    pub fn require(&self, ordinal: u32) -> Result<(), DeviceError> {
        let driver = self.driver.as_ref().map_err(Clone::clone)?;
        let count = u32::try_from(driver.devices.len()).unwrap_or(u32::MAX);
        if ordinal < count { Ok(()) } else { Err(no_such_device(ordinal, count)) }
    }
}

/// Returns the error for an ordinal that the driver does not have.
pub(crate) fn no_such_device(ordinal: u32, count: u32) -> DeviceError {
    let why = match count {
        0 => "the driver is installed but sees no GPU; see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES".to_owned(),
        1 => "the driver has one device, cuda:0".to_owned(),
        _ => format!("the driver has {count} devices, cuda:0 to cuda:{}", count - 1),
    };
    DeviceError::Unavailable { what: format!("CUDA device {ordinal}"), why }
}
