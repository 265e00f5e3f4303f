//! Describes the GPUs without creating a context, so no GPU memory is taken.

use std::ffi::c_int;

use cudarc::driver::sys::{CUdevice, CUdevice_attribute, CUuuid};

use super::driver::{self, Driver, cuda};
use crate::library::{self, Refusal};
use crate::nvml::{NvmlDevice, ProcessUse, Uuid};
use harness_allocator::{device::DeviceError, units::Bytes};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFound {
    pub cuda: String,
    /// The devices by ordinal; may be empty.
    pub devices: Vec<DeviceFound>,
}

/// A CUDA device that has not been opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFound {
    /// Its number for this process, as in `cuda:0`.
    pub ordinal: u32,
    pub name: String,
    pub total: Bytes,
    pub uuid: Uuid,
    /// Compute capability, for example `(9, 0)`.
    pub compute_capability: (i32, i32),
}

/// NVML's figures of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmlFound {
    pub free: Bytes,
    /// Other processes on the device, and their memory.
    pub others: Vec<ProcessUse>,
}

impl DriverFound {
    /// Queries the driver. A machine without devices gives an empty list.
    pub fn new() -> Result<Self, DeviceError> {
        let driver = match Driver::get() {
            Ok(driver) => driver,
            // Without a device, `cuInit` fails; the driver's version can still be read.
            Err(DeviceError::Driver {
                call: "cuInit",
                code: driver::NO_DEVICE,
                ..
            }) => {
                return Ok(Self {
                    cuda: cuda_version(Driver::uninitialised()?)?,
                    devices: Vec::new(),
                });
            }
            Err(error) => return Err(error),
        };
        let devices = (0..device_count(driver)?)
            .map(|ordinal| Ok(describe(driver, ordinal)?.1))
            .collect::<Result<_, Refusal>>()?;
        Ok(Self {
            cuda: cuda_version(driver)?,
            devices,
        })
    }
}

impl DeviceFound {
    pub fn nvml(&self) -> Result<NvmlFound, String> {
        let device = NvmlDevice::find(self.uuid)?;
        Ok(NvmlFound {
            free: device.free()?,
            others: device.other_processes()?,
        })
    }
}

/// Returns the CUDA version as `major.minor`. According to cuda.h, the number is 1000 × major + 10
/// × minor.
pub(super) fn cuda_version(driver: &Driver) -> Result<String, Refusal> {
    let mut version = 0;
    cuda!(driver, cuDriverGetVersion(&mut version))?;
    Ok(format!("{}.{}", version / 1000, version % 1000 / 10))
}

pub(super) fn device_count(driver: &Driver) -> Result<u32, Refusal> {
    let mut count = 0;
    cuda!(driver, cuDeviceGetCount(&mut count))?;
    Ok(u32::try_from(count).unwrap_or(0))
}

pub(super) fn attribute(
    driver: &Driver,
    device: CUdevice,
    attribute: CUdevice_attribute,
) -> Result<c_int, Refusal> {
    let mut value = 0;
    cuda!(driver, cuDeviceGetAttribute(&mut value, attribute, device))?;
    Ok(value)
}

/// Returns handle and description of the device with an ordinal below [`device_count`].
pub(super) fn describe(driver: &Driver, ordinal: u32) -> Result<(CUdevice, DeviceFound), Refusal> {
    let (mut device, mut total, mut uuid) = (0, 0, CUuuid { bytes: [0; 16] });
    cuda!(driver, cuDeviceGet(&mut device, ordinal as c_int))?;
    let name = library::text(|buffer, length| {
        cuda!(driver, cuDeviceGetName(buffer, length as c_int, device))
    })?;
    cuda!(driver, cuDeviceTotalMem_v2(&mut total, device))?;
    let major = attribute(
        driver,
        device,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
    )?;
    let minor = attribute(
        driver,
        device,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    )?;
    cuda!(driver, cuDeviceGetUuid_v2(&mut uuid, device))?;
    let uuid = Uuid(uuid.bytes.map(|byte| byte as u8));
    Ok((
        device,
        DeviceFound {
            ordinal,
            name,
            total: Bytes(total as u64),
            uuid,
            compute_capability: (major, minor),
        },
    ))
}
