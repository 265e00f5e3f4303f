//! Devices of runs: choice, admission, profiles and calibration.
//!
//! * [`DeviceChoice`]: the user's choice, resolved on the machine
//! * [`DeviceSource`]: opens the device of each run; [`admit`] checks that the run may take the memory
//! * [`shipped`]: GPUs with unmeasured costs; [`profile`]: measured costs in a file; [`calibrate`]: measures them

pub mod admit;
pub mod calibrate;
pub mod choice;
pub mod profile;
pub mod shipped;
pub mod source;

pub use choice::{DeviceChoice, ParseDeviceError, Resolved};
pub use source::DeviceSource;
