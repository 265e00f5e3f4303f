//! [`DeviceSource`] opens the devices of a program.

use std::path::{Path, PathBuf};
use std::{ffi::OsString, fmt};

use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{DeviceError, DeviceMemory, TestDevice, limited::Limited};
use harness_allocator::units::Bytes;
use harness_base::shell::quoted;
use harness_cuda::CudaDevice;
use harness_cuda::machine::{self, Probe};
use harness_gpu_settings::gpus::Gpu;
use harness_language::error::FileError;

use crate::choice::{DeviceChoice, Resolved};
use crate::profile::{self, Profile};
use crate::{admit::admit, shipped};

/// Opens a new device for each run, so no state passes from one run to the next.
#[derive(Clone, Debug)]
pub struct DeviceSource {
    resolved: Resolved,
    /// The simulated device's configuration, and the profile that the user named.
    profile: Option<(SimConfig, PathBuf)>,
    /// The free memory that a simulated device without a profile has at least.
    room: Bytes,
    /// `true` if a run may take the last memory of a shared GPU.
    whole_device: bool,
    /// Number of devices of this kind on the machine.
    devices: u64,
}

impl DeviceSource {
    /// Returns the source for the user's choice.
    /// Fails if the requested CUDA device does not exist.
    pub fn new(
        choice: DeviceChoice,
        probe: &Probe,
        whole_device: bool,
    ) -> Result<Self, DeviceError> {
        let resolved = choice.resolve(probe)?;
        let devices = match &resolved {
            Resolved::Simulated { .. } => 1,
            Resolved::Cuda(_) => probe
                .driver
                .as_ref()
                .map_or(0, |driver| driver.devices.len() as u64),
        };
        Ok(Self {
            resolved,
            profile: None,
            room: Bytes::ZERO,
            whole_device,
            devices,
        })
    }

    pub fn simulated() -> Self {
        let resolved = Resolved::Simulated {
            reason: "the simulated device was requested".to_owned(),
        };
        Self {
            resolved,
            profile: None,
            room: Bytes::ZERO,
            whole_device: false,
            devices: 1,
        }
    }

    /// Like [`DeviceSource::new`], but a simulated device uses the profile or GPU in this file, or
    /// the GPU of this name.
    pub fn with_profile(self, path: &Path) -> Result<Self, FileError> {
        let shipped = path
            .to_str()
            .and_then(Gpu::named)
            .filter(|_| !path.exists());
        let config =
            shipped.map_or_else(|| load_sim_config(path), |gpu| Ok(shipped::sim_config(gpu)))?;
        Ok(Self {
            profile: Some((config, path.to_owned())),
            ..self
        })
    }

    /// Enlarges a simulated device without a profile until this much memory is free.
    pub fn with_room_for(self, memory: Bytes) -> Self {
        Self {
            room: memory,
            ..self
        }
    }

    pub const fn devices(&self) -> u64 {
        self.devices
    }

    pub fn simulated_because(&self) -> Option<&str> {
        match &self.resolved {
            Resolved::Simulated { reason } => Some(reason),
            Resolved::Cuda(_) => None,
        }
    }

    /// Returns this program's arguments that select the source.
    pub fn arguments(&self) -> Vec<OsString> {
        match (&self.resolved, &self.profile) {
            (Resolved::Simulated { .. }, None) if self.room == Bytes::ZERO => {
                vec!["--device".into(), "sim".into()]
            }
            (Resolved::Simulated { .. }, None) => {
                vec![
                    "--device".into(),
                    "sim".into(),
                    "--room".into(),
                    self.room.0.to_string().into(),
                ]
            }
            (Resolved::Simulated { .. }, Some((_, path))) => vec![
                "--device".into(),
                "sim".into(),
                "--device-profile".into(),
                path.into(),
            ],
            (Resolved::Cuda(ordinal), _) => {
                vec!["--device".into(), format!("cuda:{ordinal}").into()]
            }
        }
    }

    /// Returns the source that these arguments of [`Self::arguments`] select, in another process of
    /// an admitted run.
    pub fn of_arguments(arguments: &[OsString]) -> Result<Self, DeviceError> {
        let value = |option: &str| {
            arguments
                .iter()
                .position(|argument| argument == option)
                .and_then(|at| arguments.get(at + 1))
        };
        let unavailable = |why: &dyn fmt::Display| DeviceError::Unavailable {
            what: "the device".to_owned(),
            why: why.to_string(),
        };
        let choice = value("--device")
            .and_then(|text| text.to_str())
            .unwrap_or_default();
        let choice: DeviceChoice = choice.parse().map_err(|error| unavailable(&error))?;
        let source = match choice {
            DeviceChoice::Simulated => Self::simulated(),
            DeviceChoice::Auto | DeviceChoice::Cuda(_) => {
                Self::new(choice, &machine::probe(), true)?
            }
        };
        let room = value("--room").and_then(|room| room.to_str()?.parse().ok());
        let source = source.with_room_for(Bytes(room.unwrap_or_default()));
        match value("--device-profile") {
            Some(path) => source
                .with_profile(Path::new(path))
                .map_err(|error| unavailable(&error)),
            None => Ok(source),
        }
    }

    pub const fn cuda_ordinal(&self) -> Option<u32> {
        match self.resolved {
            Resolved::Simulated { .. } => None,
            Resolved::Cuda(ordinal) => Some(ordinal),
        }
    }

    /// Returns the default number of runs per configuration. A simulated device gives identical
    /// figures, so one run is enough.
    pub const fn default_repetitions(&self) -> u32 {
        match self.resolved {
            Resolved::Simulated { .. } => 1,
            Resolved::Cuda(_) => 5,
        }
    }

    /// Opens the whole device. On a GPU, first checks that corruption is found:
    /// [`CudaDevice::check_verification`].
    pub fn open(&self) -> Result<Box<dyn TestDevice>, DeviceError> {
        Ok(match self.resolved {
            Resolved::Simulated { .. } => {
                let config = self
                    .profile
                    .as_ref()
                    .map_or_else(|| sim_config(self.room), |(config, _)| config.clone());
                Box::new(SimDevice::new(config))
            }
            Resolved::Cuda(ordinal) => {
                let mut device = CudaDevice::open(ordinal)?;
                device.check_verification()?;
                Box::new(device)
            }
        })
    }

    /// Checks that this much memory may be taken from a device.
    pub fn admit(&self, device: &mut dyn TestDevice, need: Bytes) -> Result<(), DeviceError> {
        let memory = device.memory()?;
        if self.simulated_because().is_some() && need > memory.free {
            return Err(too_small(need, &memory));
        }
        admit(
            &memory,
            device.info().fingerprint.other_processes,
            need,
            self.whole_device,
        )
    }

    /// Limits an admitted device to the memory that a scenario needs.
    pub fn limit(
        &self,
        mut device: Box<dyn TestDevice>,
        need: Bytes,
    ) -> Result<Box<dyn TestDevice>, DeviceError> {
        self.admit(&mut *device, need)?;
        Ok(Box::new(Limited::new(device, need)?))
    }
}

/// The usual simulated device, enlarged to whole GiB if `room` needs more.
fn sim_config(room: Bytes) -> SimConfig {
    let usual = SimConfig::default();
    let needed = Bytes((room + usual.context_overhead).0.next_multiple_of(1 << 30));
    SimConfig {
        total: usual.total.max(needed),
        ..usual
    }
}

/// Reads the simulated device of a measured profile or of a user's own GPU.
fn load_sim_config(path: &Path) -> Result<SimConfig, FileError> {
    let text = profile::read(path)?;
    match shipped::is_one(&text) {
        true => shipped::of_text(&text, path).map(|gpu| shipped::sim_config(&gpu)),
        false => profile::parse(&text, path).map(|measured: Profile| measured.sim_config()),
    }
}

/// Returns the error that recommends a simulated device with enough memory.
fn too_small(need: Bytes, memory: &DeviceMemory) -> DeviceError {
    let larger = match shipped::with_room_for(need) {
        Some(Gpu { name, memory, .. }) => {
            format!(
                "`--device-profile {name}` simulates a device of {memory}, and `--memory` \
                 reduces the scenario's requirement"
            )
        }
        None => {
            "no GPU that harness knows has this much memory; `--memory` reduces the scenario's \
             requirement"
                .to_owned()
        }
    };
    let why = format!(
        "the simulated device has {} of {} free; {larger}",
        memory.free, memory.total
    );
    DeviceError::Unavailable {
        what: format!("{need} of device memory"),
        why,
    }
}

impl fmt::Display for DeviceSource {
    /// As `--device` takes it in a shell, followed by the option for the profile.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.resolved, &self.profile) {
            (Resolved::Simulated { .. }, None) => f.write_str("sim"),
            (Resolved::Simulated { .. }, Some((_, path))) => write!(
                f,
                "sim --device-profile {}",
                quoted(&path.to_string_lossy())
            ),
            (Resolved::Cuda(ordinal), _) => write!(f, "cuda:{ordinal}"),
        }
    }
}

#[cfg(test)]
mod tests;
