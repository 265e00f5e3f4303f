//! Describes the GPUs without creating a context, so no GPU memory is taken.

use std::ffi::c_int;

use super::driver::{self, Driver};
use super::types::{CUdevice, CUuuid};
use crate::library::Refusal;
use crate::nvml::Uuid;
use harness_allocator::device::DeviceError;
use harness_allocator::units::Bytes;

/// The CUDA driver and the visible devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaProbe {
    /// CUDA version that the driver supports, for example `13.0`.
    pub cuda: String,
    /// The devices by ordinal; may be empty.
    pub devices: Vec<CudaFound>,
}

/// A device, as the CUDA driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaFound {
    /// Its number for this process.
    pub ordinal: u32,
    pub name: String,
    /// Its total memory in bytes.
    pub total: Bytes,
    pub uuid: Uuid,
    /// Compute capability, for example `(9, 0)`.
    pub compute_capability: (i32, i32),
}

impl CudaProbe {
    /// Queries the driver. A machine without devices gives an empty list.
    pub fn new() -> Result<Self, DeviceError> {
        let driver = match Driver::get() {
            Ok(driver) => driver,
            // Without a device, `cuInit` fails; the driver's version can still be read.
            Err(DeviceError::Driver { call: "cuInit", code: driver::NO_DEVICE, .. }) => {
                return Ok(Self { cuda: cuda_version(Driver::uninitialised()?)?, devices: Vec::new() });
            }
            Err(error) => return Err(error),
        };
        let devices = (0..device_count(driver)?).map(|ordinal| Ok(describe(driver, ordinal)?.1)).collect::<Result<_, Refusal>>()?;
        Ok(Self { cuda: cuda_version(driver)?, devices })
    }
}

/// Returns the CUDA version as `major.minor`. According to cuda.h, the number is 1000 × major + 10 × minor.
pub(super) fn cuda_version(driver: &Driver) -> Result<String, Refusal> {
    let mut version = 0;
    // SAFETY: `version` is a valid output.
    unsafe { driver.driver_version(&raw mut version) }?;
    Ok(format!("{}.{}", version / 1000, version % 1000 / 10))
}

/// Returns the number of visible devices.
pub(super) fn device_count(driver: &Driver) -> Result<u32, Refusal> {
    let mut count = 0;
    // SAFETY: `count` is a valid output.
    unsafe { driver.device_count(&raw mut count) }?;
    Ok(u32::try_from(count).unwrap_or(0))
}

/// Returns handle and description of the device with an ordinal below [`device_count`].
pub(super) fn describe(driver: &Driver, ordinal: u32) -> Result<(CUdevice, CudaFound), Refusal> {
    let (mut device, mut total, mut major, mut minor) = (0, 0, 0, 0);
    let mut uuid = CUuuid { bytes: [0; 16] };
    let mut name = [0_u8; 256];
    // SAFETY: each pointer is a valid output; the name's length leaves a byte for a final NUL.
    unsafe {
        driver.device(&raw mut device, ordinal as c_int)?;
        driver.device_name(name.as_mut_ptr().cast(), name.len() as c_int - 1, device)?;
        driver.device_total(&raw mut total, device)?;
        driver.device_attribute(&raw mut major, driver::CAPABILITY_MAJOR, device)?;
        driver.device_attribute(&raw mut minor, driver::CAPABILITY_MINOR, device)?;
        driver.device_uuid(&raw mut uuid, device)?;
    }
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    let found = CudaFound {
        ordinal,
        name: String::from_utf8_lossy(name).into_owned(),
        total: Bytes(total as u64),
        uuid: Uuid(uuid.bytes.map(|byte| byte as u8)),
        compute_capability: (major, minor),
    };
    Ok((device, found))
}
