//! What the driver and NVML of a simulated machine do wrong, and what its kernels and sensors do.

use std::fmt;
use std::str::FromStr;

use crate::text::{SettingsError, expected, number, numbers, words};

/// What kernels do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernels {
    /// Nothing, in no time, whatever kernel it is.
    Skipped,
    /// What they say, on memory of the host, in the order and time of their streams: the kernels of the CUDA device of this project, and no
    /// others. Such a machine is strict: a wrong access, and one that nothing orders behind another, breaks the context.
    Done,
}

words!(Kernels, "what kernels do", Kernels::Skipped = "skipped", Kernels::Done = "done");

/// A call of the driver or of NVML that is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The exported name, for example `cuMemAlloc_v2`.
    pub function: String,
    /// Which call, counted from 1; 0 means every call.
    pub nth: u64,
    /// The answer, which may be one that no header knows. `None`: the call never returns.
    pub code: Option<u32>,
}

/// The code of a refusal that never returns, as text.
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

/// The n-th fill kernel that writes anything flips a bit of one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongWrite {
    /// Which one, counted from 1.
    pub nth: u64,
    /// Which byte of what that kernel writes.
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

/// What the sensors of each device tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sensors {
    /// Power drawn, in milliwatts.
    pub power_mw: u32,
    /// In degrees Celsius.
    pub celsius: u32,
    /// What holds the clocks down, as NVML's bits: 4 is the power cap.
    pub reasons: u64,
}

impl Sensors {
    /// Devices without power and heat, whose clocks nothing holds down.
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
        let small = |figure: u64| u32::try_from(figure).map_err(|_| SettingsError(format!("`{figure}` is not a number that fits")));
        Ok(Self { power_mw: small(power_mw)?, celsius: small(celsius)?, reasons })
    }
}
