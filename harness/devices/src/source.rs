//! [`DeviceSource`]: where the devices of a program come from.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use harness_allocator::device::limited::{Limited, admit};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{DeviceError, TestDevice};
use harness_allocator::units::Bytes;
use harness_base::shell::quoted;
use harness_cuda::CudaDevice;
use harness_cuda::machine::Probe;

use crate::choice::{DeviceChoice, Resolved};
use crate::profile::{Profile, ProfileError};

/// Where devices come from: each run opens one for itself, so that nothing of one run is left for the next.
#[derive(Clone, Debug)]
pub struct DeviceSource {
    resolved: Resolved,
    /// What the simulated device runs on, and the file that the user named for it.
    profile: Option<(Profile, PathBuf)>,
    /// Whether a run may take the last of a GPU that others use.
    whole_device: bool,
}

impl DeviceSource {
    /// The device that the user's choice comes down to.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] where a CUDA device was asked for by name and is not there.
    pub fn new(choice: DeviceChoice, probe: &Probe, whole_device: bool) -> Result<Self, DeviceError> {
        Ok(Self { resolved: choice.resolve(probe)?, profile: None, whole_device })
    }

    /// The simulated device.
    #[must_use]
    pub fn simulated() -> Self {
        let resolved = Resolved::Simulated { reason: "the simulated device was asked for".to_owned() };
        Self { resolved, profile: None, whole_device: false }
    }

    /// The same, but a simulated device runs on the profile in this file.
    ///
    /// # Errors
    /// [`ProfileError`] where there is none.
    pub fn with_profile(self, path: &Path) -> Result<Self, ProfileError> {
        Ok(Self { profile: Some((Profile::load(path)?, path.to_owned())), ..self })
    }

    /// Why it is the simulated device, if it is.
    #[must_use]
    pub fn simulated_because(&self) -> Option<&str> {
        match &self.resolved {
            Resolved::Simulated { reason } => Some(reason),
            Resolved::Cuda(_) => None,
        }
    }

    /// The arguments of this program that choose it.
    #[must_use]
    pub fn arguments(&self) -> Vec<OsString> {
        match (&self.resolved, &self.profile) {
            (Resolved::Simulated { .. }, None) => vec!["--device".into(), "sim".into()],
            (Resolved::Simulated { .. }, Some((_, path))) => vec!["--device".into(), "sim".into(), "--device-profile".into(), path.into()],
            (Resolved::Cuda(ordinal), _) => vec!["--device".into(), format!("cuda:{ordinal}").into()],
        }
    }

    /// The number of the CUDA device, if it is one.
    #[must_use]
    pub const fn cuda_ordinal(&self) -> Option<u32> {
        match self.resolved {
            Resolved::Simulated { .. } => None,
            Resolved::Cuda(ordinal) => Some(ordinal),
        }
    }

    /// How often each arm runs where the user does not say: a simulated device gives the same figures every time.
    #[must_use]
    pub const fn default_repetitions(&self) -> u32 {
        match self.resolved {
            Resolved::Simulated { .. } => 1,
            Resolved::Cuda(_) => 5,
        }
    }

    /// Opens the device whole.
    ///
    /// # Errors
    /// [`DeviceError`] where it cannot be opened.
    pub fn open(&self) -> Result<Box<dyn TestDevice>, DeviceError> {
        Ok(match self.resolved {
            Resolved::Simulated { .. } => {
                let config = self.profile.as_ref().map_or_else(SimConfig::default, |(profile, _)| profile.sim_config());
                Box::new(SimDevice::new(config))
            }
            Resolved::Cuda(ordinal) => Box::new(CudaDevice::open(ordinal)?),
        })
    }

    /// Whether that much may be taken of a device.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] with what is free, who has the rest, and what would be let in.
    pub fn admit(&self, device: &mut dyn TestDevice, need: Bytes) -> Result<(), DeviceError> {
        let memory = device.memory()?;
        admit(&memory, device.info().fingerprint.other_processes, need, self.whole_device)
    }

    /// Limits a device to what a scenario needs, if that may be taken.
    ///
    /// # Errors
    /// As [`Self::admit`], and [`DeviceError`] where the limit cannot be set.
    pub fn limit(&self, mut device: Box<dyn TestDevice>, need: Bytes) -> Result<Box<dyn TestDevice>, DeviceError> {
        self.admit(&mut *device, need)?;
        Ok(Box::new(Limited::new(device, need)?))
    }
}

impl fmt::Display for DeviceSource {
    /// As `--device` takes it in a shell, with the option for the profile behind it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.resolved, &self.profile) {
            (Resolved::Simulated { .. }, None) => f.write_str("sim"),
            (Resolved::Simulated { .. }, Some((_, path))) => write!(f, "sim --device-profile {}", quoted(&path.to_string_lossy())),
            (Resolved::Cuda(ordinal), _) => write!(f, "cuda:{ordinal}"),
        }
    }
}
