//! Where benchmarks get devices and allocators from: [`DeviceProvider`]. Opening a GPU takes long beside what is timed on it, so a real device
//! stays open and is used again by the next measurement; a simulated one is made new each time, and so is every allocator.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use harness_allocator::allocator::{Allocator, AllocatorSpec};
use harness_allocator::device::limited::Limited;
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{Clock, Device, DeviceError, DeviceInfo, DeviceMemory, TestDevice, wrapper};
use harness_allocator::units::Bytes;

use harness_devices::DeviceSource;

/// How a device keeps to the memory that it was asked with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLimit {
    /// The device reports so much memory, and does not count: for measures that never reach the limit, since counting takes time.
    Reported,
    /// The device refuses what is beyond the limit, to the byte.
    Enforced,
    /// As [`MemoryLimit::Reported`]. A simulated device does without its cost model and takes as little host time as possible: for
    /// measuring the host path of allocators.
    HostPath,
}

/// Where devices and allocators come from.
pub trait DeviceProvider {
    /// Whose clock its devices run on.
    fn clock(&self) -> Clock;

    /// As `--device` takes it.
    fn device_name(&self) -> String;

    /// The arguments that have this program use the same device.
    fn device_arguments(&self) -> Vec<OsString> {
        vec!["--device".into(), self.device_name().into()]
    }

    /// A device with nothing allocated on it and that much memory, until it is dropped.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] where that much may not be taken; what opening a device answers.
    fn device(&mut self, memory: Bytes, limit: MemoryLimit) -> Result<Box<dyn TestDevice>, DeviceError>;

    /// Opens a device as a new process would, and closes those that were open before.
    ///
    /// # Errors
    /// What opening a device answers.
    fn open(&mut self) -> Result<Box<dyn TestDevice>, DeviceError>;

    /// A fresh allocator.
    fn allocator(&self, arm: &AllocatorSpec) -> Box<dyn Allocator> {
        arm.build()
    }

    /// This program, where it can be started again.
    fn program(&self) -> Option<&Path> {
        None
    }
}

/// The provider of `harness bench`.
pub struct SharedDevice {
    source: DeviceSource,
    clock: Clock,
    idle: IdleDevice,
    program: Option<PathBuf>,
    /// The most that was let in, and what was free then.
    admitted: Option<(Bytes, Bytes)>,
}

/// A real device between two measurements.
type IdleDevice = Arc<Mutex<Option<Box<dyn TestDevice>>>>;

impl SharedDevice {
    /// A provider with a device of that source, which is open already. `program` is this program, where it can be started again.
    #[must_use]
    pub fn new(source: DeviceSource, device: Box<dyn TestDevice>, program: Option<PathBuf>) -> Self {
        let clock = device.info().clock;
        Self { source, clock, idle: Arc::new(Mutex::new(Some(device))), program, admitted: None }
    }

    /// Whether that much may be taken. The answer needs NVML, which may take milliseconds between samples that take microseconds: it is asked
    /// again only where more is wanted or less is free than when that was let in, since otherwise nobody can have taken anything.
    fn admit(&mut self, device: &mut dyn TestDevice, memory: Bytes) -> Result<(), DeviceError> {
        let free = device.free_memory()?;
        if self.admitted.is_some_and(|(most, free_then)| memory <= most && free >= free_then) {
            return Ok(());
        }
        self.source.admit(device, memory)?;
        self.admitted = Some((memory, free));
        Ok(())
    }

    /// The device that is open already, or a new one.
    fn idle_or_new(&self) -> Result<Box<dyn TestDevice>, DeviceError> {
        if self.clock == Clock::Simulated {
            return self.source.open();
        }
        let held = self.idle.lock().unwrap_or_else(PoisonError::into_inner).take();
        held.map_or_else(|| self.source.open(), Ok)
    }
}

impl DeviceProvider for SharedDevice {
    fn clock(&self) -> Clock {
        self.clock
    }

    fn device_name(&self) -> String {
        self.source.to_string()
    }

    fn device_arguments(&self) -> Vec<OsString> {
        self.source.arguments()
    }

    fn device(&mut self, memory: Bytes, limit: MemoryLimit) -> Result<Box<dyn TestDevice>, DeviceError> {
        if (self.clock, limit) == (Clock::Simulated, MemoryLimit::HostPath) {
            return Ok(Box::new(SimDevice::new(SimConfig::replay(memory))));
        }
        let mut device = Reused::new(self.idle_or_new()?, Arc::clone(&self.idle))?;
        self.admit(&mut device, memory)?;
        match limit {
            MemoryLimit::Enforced => Ok(Box::new(Limited::new(Box::new(device), memory)?)),
            MemoryLimit::Reported | MemoryLimit::HostPath => {
                device.info.total = memory;
                Ok(Box::new(device))
            }
        }
    }

    fn open(&mut self) -> Result<Box<dyn TestDevice>, DeviceError> {
        *self.idle.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.source.open()
    }

    fn program(&self) -> Option<&Path> {
        self.program.as_deref()
    }
}

/// A device that becomes idle when it is dropped, unless something was left on it: then it is closed. It reports the total that it was given.
struct Reused {
    /// There until it is dropped.
    device: Option<Box<dyn TestDevice>>,
    idle: IdleDevice,
    info: DeviceInfo,
    /// Free when its use began.
    free: Bytes,
}

impl Reused {
    fn new(mut device: Box<dyn TestDevice>, idle: IdleDevice) -> Result<Self, DeviceError> {
        let free = device.free_memory()?;
        let info = device.info().clone();
        Ok(Self { device: Some(device), idle, info, free })
    }

    /// What is free of the total that is reported, where the device itself has that much free.
    fn within_total(&self, free: Bytes) -> Bytes {
        free.min(self.info.total.saturating_sub(self.free.saturating_sub(free)))
    }
}

impl Drop for Reused {
    fn drop(&mut self) {
        let device = self.device.take().filter(|device| device.info().clock == Clock::Measured && device.leaks().is_empty());
        *self.idle.lock().unwrap_or_else(PoisonError::into_inner) = device;
    }
}

impl wrapper::DeviceWrapper for Reused {
    type Inner = dyn TestDevice;

    fn inner(&self) -> &Self::Inner {
        self.device.as_deref().expect("the device is there until this is dropped")
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        self.device.as_deref_mut().expect("the device is there until this is dropped")
    }

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_memory(&mut self) -> Result<Bytes, DeviceError> {
        let free = self.inner_mut().free_memory()?;
        Ok(self.within_total(free))
    }
}

impl wrapper::TestDeviceWrapper for Reused {
    fn memory(&mut self) -> Result<DeviceMemory, DeviceError> {
        let memory = wrapper::DeviceWrapper::inner_mut(self).memory()?;
        Ok(DeviceMemory { total: self.info.total, free: self.within_total(memory.free), ..memory })
    }
}
