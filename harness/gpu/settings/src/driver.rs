//! Errors, kernels and sensors of a simulated machine.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kernels {
    /// Kernels are no-ops and take no time.
    NoOp,
    /// Kernels execute on host memory, in the order and time of their streams. Only the kernels of
    /// this project's CUDA device exist. Such a machine is strict: a wrong access, or a race
    /// between streams, breaks the context.
    Execute,
}

/// A call of the driver or of NVML that fails.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The exported name, for example `cuMemAlloc_v2`.
    pub function: String,
    /// The number of the call, from 1; 0 means every call.
    pub nth: u64,
    /// The error code, also one that no header defines. `None`: the call never returns.
    pub code: Option<u32>,
}

/// An error of the n-th fill kernel that writes anything: it flips a bit of one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrongWrite {
    /// From 1.
    pub nth: u64,
    /// Offset of the byte in the range that the kernel fills.
    pub offset: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sensors {
    pub power_mw: u32,
    pub celsius: u32,
    /// NVML's bits for the reasons of reduced clocks; 4 is the power cap.
    pub reasons: u64,
}

impl Sensors {
    /// No power, no heat, full clocks.
    pub const NOTHING: Self = Self {
        power_mw: 0,
        celsius: 0,
        reasons: 0,
    };
}
