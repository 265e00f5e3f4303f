//! The GPUs of this machine, without opening one: [`probe`] looks, [`Probe`] is what it finds.

use harness_allocator::device::{DeviceError, DeviceInfo};
use harness_allocator::units::Bytes;

use crate::device::probe::{CudaFound, CudaProbe};
use crate::nvml::{self, NvmlDevice, ProcessUse};

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
    ///
    /// # Errors
    /// [`DeviceError`] where it is not, or the driver is not.
    pub fn require(&self, ordinal: u32) -> Result<(), DeviceError> {
        let driver = self.driver.as_ref().map_err(Clone::clone)?;
        let count = u32::try_from(driver.devices.len()).unwrap_or(u32::MAX);
        if ordinal < count { Ok(()) } else { Err(no_such_device(ordinal, count)) }
    }
}

/// The error for an ordinal that the driver does not have.
pub(crate) fn no_such_device(ordinal: u32, count: u32) -> DeviceError {
    let why = match count {
        0 => "the driver is installed but sees no GPU; see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES".to_owned(),
        1 => "the driver has one device, cuda:0".to_owned(),
        _ => format!("the driver has {count} devices, cuda:0 to cuda:{}", count - 1),
    };
    DeviceError::Unavailable { what: format!("CUDA device {ordinal}"), why }
}
