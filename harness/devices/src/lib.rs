//! Which device a program runs on.
//!
//! * [`DeviceChoice`]: what the user asks for, and what follows from the machine;
//! * [`DeviceSource`]: opens the device for each run, where [`admit`] lets the run take the memory;
//! * [`shipped`]: the memory of common GPUs; [`profile`]: what a device costs, as a file; [`calibrate`]: how that is measured.

pub mod admit;
pub mod calibrate;
pub mod choice;
pub mod profile;
pub mod shipped;
pub mod source;

pub use choice::{DeviceChoice, ParseDeviceError, Resolved};
pub use source::DeviceSource;
