//! Devices of runs: choice, admission, profiles and calibration.

pub mod admit;
pub mod calibrate;
pub mod choice;
pub mod profile;
pub mod shipped;
pub mod source;

pub use choice::{DeviceChoice, ParseDeviceError, Resolved};
pub use source::DeviceSource;
