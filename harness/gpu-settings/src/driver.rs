//! Errors, kernels and sensors of a simulated machine.

use std::fmt;
use std::str::FromStr;

use crate::text::{SettingsError, expected, number, numbers, words};

/// The work of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernels {
    /// Kernels are no-ops and take no time.
    NoOp,
    /// Kernels execute on host memory, in the order and time of their streams. Only the kernels of this project's CUDA device exist. Such a machine
    /// is strict: a wrong access, or a race between streams, breaks the context.
    Execute,
}

words!(Kernels, "a mode of kernels", Kernels::NoOp = "skipped", Kernels::Execute = "done");

/// A call of the driver or of NVML that fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The exported name, for example `cuMemAlloc_v2`.
    pub function: String,
    /// The number of the call, from 1; 0 means every call.
    pub nth: u64,
    /// The error code, also one that no header defines. `None`: the call never returns.
    pub code: Option<u32>,
}

/// The text in place of a code for a call that never returns.
const HANGS: &str = "hangs";

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = self.code.map_or_else(|| HANGS.to_owned(), |code| code.to_string());
        write!(f, "{}:{}:{code}", self.function, self.nth)
    }
}

impl FromStr for Refusal {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        let [function, nth, code] = text.split(':').collect::<Vec<_>>()[..] else {
            return Err(SettingsError(format!("`{text}` is not FUNCTION:NTH:CODE, as in `cuInit:1:999`, or FUNCTION:NTH:{HANGS}")));
        };
        let code = if code == HANGS { None } else { Some(number(code)?) };
        Ok(Self { function: function.to_owned(), nth: number(nth)?, code })
    }
}

/// An error of the n-th fill kernel that writes anything: it flips a bit of one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongWrite {
    /// From 1.
    pub nth: u64,
    /// Offset of the byte in the range that the kernel fills.
    pub offset: u64,
}

impl fmt::Display for WrongWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.nth, self.offset)
    }
}

impl FromStr for WrongWrite {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        let [nth, offset] = numbers(text, "NTH:OFFSET")?;
        Ok(Self { nth, offset })
    }
}

/// The readings of each device's sensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sensors {
    pub power_mw: u32,
    pub celsius: u32,
    /// NVML's bits for the reasons of reduced clocks; 4 is the power cap.
    pub reasons: u64,
}

impl Sensors {
    /// No power, no heat, full clocks.
    pub const NOTHING: Self = Self { power_mw: 0, celsius: 0, reasons: 0 };
}

impl fmt::Display for Sensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.power_mw, self.celsius, self.reasons)
    }
}

impl FromStr for Sensors {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        let [power_mw, celsius, reasons] = numbers(text, "MILLIWATTS:CELSIUS:REASONS")?;
        let small = |figure: u64| u32::try_from(figure).map_err(|_| SettingsError(format!("`{figure}` is not a number in range")));
        Ok(Self { power_mw: small(power_mw)?, celsius: small(celsius)?, reasons })
    }
}
