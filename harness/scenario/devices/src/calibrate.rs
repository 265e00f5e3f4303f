//! Measures the cost of a device's calls and work, as the figures of a cost model.
//!
//! [`calibrate`] runs rounds that each measure everything once, so a drift of the machine affects
//! all figures alike. Times come from [`TestDevice::now`] and the device's events, so they include
//! the harness's own overhead per call. Calibrating a simulated device returns its own cost model.

mod fit;
mod probes;

use std::ops::ControlFlow;

use harness_allocator::device::{DeviceError, TestDevice};
use harness_allocator::units::Bytes;

use self::probes::Probes;
use crate::profile::Figures;

/// Default number of rounds. The median has ten samples on each side, so ten disturbed rounds of
/// one kind change it little.
pub const ROUNDS: u32 = 21;

/// Warm-up rounds, which are dropped: first calls load code and create objects that the driver
/// keeps.
const WARM_UP: u32 = 2;

/// Minimum free memory for a calibration: allocations are measured up to a quarter of it, in at
/// least four sizes.
pub const MIN_FREE: Bytes = Bytes::mib(128);

/// Why a calibration failed. The device may still hold memory: drop it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CalibrateError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Too little free memory to measure several sizes.
    #[error(
        "the device has {free} free, calibration needs at least {MIN_FREE}: stop its other users \
         or choose another device"
    )]
    TooSmall { free: Bytes },
    #[error("interrupted: nothing was written")]
    Interrupted,
}

/// Measures all figures in `rounds` rounds, at least one. Calls `progress` after each round with
/// its number and the total; `progress` may stop the calibration.
///
/// The device must be idle and hold nothing of this process. At most a quarter of the free memory
/// is used at a time.
pub fn calibrate(
    device: &mut dyn TestDevice,
    rounds: u32,
    mut progress: impl FnMut(u32, u32) -> ControlFlow<()>,
) -> Result<Figures, CalibrateError> {
    let memory = device.memory()?;
    if memory.free < MIN_FREE {
        return Err(CalibrateError::TooSmall { free: memory.free });
    }
    // Without a figure for this process, all use counts as its own: the device is idle.
    let context = device.own_context().unwrap_or(memory.context_overhead);
    let mut probes = Probes::new(device, memory.free)?;
    let all = WARM_UP + rounds.max(1);
    for done in 0..all {
        if done == WARM_UP {
            probes.forget();
        }
        probes.round(device, done)?;
        if progress(done + 1, all).is_break() {
            return Err(CalibrateError::Interrupted);
        }
    }
    probes.finish(device)?;
    Ok(probes.figures(context))
}
