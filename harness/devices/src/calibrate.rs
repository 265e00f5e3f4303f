//! Calibration: what the calls and the work of a device cost, measured on that device, as the figures of a cost model.
//!
//! [`calibrate`] does rounds; each measures everything once, so that what drifts on the machine hits all figures alike. The times are those
//! of [`TestDevice::now`] and of the device's events, nothing else, and so they hold what this harness adds to each call. Calibrating a
//! simulated device gives its own cost model back.

mod fit;
mod probes;

use std::ops::ControlFlow;

use harness_allocator::device::{DeviceError, TestDevice};
use harness_allocator::units::Bytes;

use self::probes::Probes;
use crate::profile::Figures;

/// Rounds where the user does not say. Their median has the ten least and the ten greatest on its sides, so ten disturbed rounds of one kind
/// do not move it far.
pub const ROUNDS: u32 = 21;

/// Rounds in front whose figures are dropped: first calls load code and make what the driver keeps.
const WARM_UP: u32 = 2;

/// The least free memory that can be calibrated on: allocations are measured up to a quarter of it, in at least four sizes.
pub const MIN_FREE: Bytes = Bytes::mib(128);

/// Why a device could not be calibrated. The device holds what was allocated then: drop it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum CalibrateError {
    /// The device refused something, or broke: see what it says.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// There is too little to measure allocations of several sizes: stop what holds it, or choose another device.
    #[error("the device has {free} free, calibration wants at least {MIN_FREE}")]
    TooSmall { free: Bytes },
    /// The user stopped it.
    #[error("interrupted: nothing was written")]
    Interrupted,
}

/// Measures all figures in so many rounds, at least one. `progress` hears of each round that is done, with the number of all, and may stop.
///
/// The device must be idle and hold nothing of this process. It does not take more than a quarter of what is free at a time.
///
/// # Errors
/// [`CalibrateError`].
pub fn calibrate(
    device: &mut dyn TestDevice,
    rounds: u32,
    mut progress: impl FnMut(u32, u32) -> ControlFlow<()>,
) -> Result<Figures, CalibrateError> {
    let memory = device.memory()?;
    if memory.free < MIN_FREE {
        return Err(CalibrateError::TooSmall { free: memory.free });
    }
    // Where nothing tells whose it is: the device is idle, so nobody else holds much.
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
