//! [`DeviceProvider`] supplies benchmarks with devices and allocators. Opening a GPU is slow, so a
//! real device stays open between measurements. Simulated devices and all allocators are made anew
//! each time.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use harness_allocator::allocator::{Allocator, AllocatorSpec};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{
    Clock, Device, DeviceError, DeviceInfo, DeviceMemory, TestDevice, limited::Limited, wrapper,
};
use harness_allocator::sync::lock;
use harness_allocator::units::Bytes;

use harness_devices::DeviceSource;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLimit {
    /// The device reports this size but does not count, which takes time. For measures that never
    /// reach the limit.
    Reported,
    /// The device refuses requests beyond the limit, to the byte.
    Enforced,
    /// As [`MemoryLimit::Reported`]. A simulated device runs without its cost model and uses as
    /// little host time as possible. For the host path of allocators.
    HostPath,
}

pub trait DeviceProvider {
    fn clock(&self) -> Clock;

    fn device_name(&self) -> String;

    fn device_arguments(&self) -> Vec<OsString> {
        vec!["--device".into(), self.device_name().into()]
    }

    /// Returns a device with this much memory and no allocations.
    fn device(
        &mut self,
        memory: Bytes,
        limit: MemoryLimit,
    ) -> Result<Box<dyn TestDevice>, DeviceError>;

    /// Closes open devices and opens one as a new process would.
    fn open(&mut self) -> Result<Box<dyn TestDevice>, DeviceError>;

    fn allocator(&self, arm: &AllocatorSpec) -> Box<dyn Allocator> {
        arm.build()
    }

    /// The path of this program, if it can be restarted.
    fn program(&self) -> Option<&Path> {
        None
    }
}

pub struct SharedDevice {
    source: DeviceSource,
    clock: Clock,
    idle: IdleDevice,
    program: Option<PathBuf>,
    /// The largest admitted size, and the free memory at that time.
    admitted: Option<(Bytes, Bytes)>,
}

type IdleDevice = Arc<Mutex<Option<Box<dyn TestDevice>>>>;

impl SharedDevice {
    /// Takes an open device of this source. `program` is this program, if it can be restarted.
    pub fn new(
        source: DeviceSource,
        device: Box<dyn TestDevice>,
        program: Option<PathBuf>,
    ) -> Self {
        let clock = device.info().clock;
        Self {
            source,
            clock,
            idle: Arc::new(Mutex::new(Some(device))),
            program,
            admitted: None,
        }
    }

    /// Checks that this much memory may be taken. NVML may take milliseconds, so it is called again
    /// only if more is requested or less is free than at the last admission.
    fn admit(&mut self, device: &mut dyn TestDevice, memory: Bytes) -> Result<(), DeviceError> {
        let free = device.free_memory()?;
        if self
            .admitted
            .is_some_and(|(most, free_then)| memory <= most && free >= free_then)
        {
            return Ok(());
        }
        self.source.admit(device, memory)?;
        self.admitted = Some((memory, free));
        Ok(())
    }

    fn idle_or_new(&self) -> Result<Box<dyn TestDevice>, DeviceError> {
        if self.clock == Clock::Simulated {
            return self.source.open();
        }
        let held = lock(&self.idle).take();
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

    fn device(
        &mut self,
        memory: Bytes,
        limit: MemoryLimit,
    ) -> Result<Box<dyn TestDevice>, DeviceError> {
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
        *lock(&self.idle) = None;
        self.source.open()
    }

    fn program(&self) -> Option<&Path> {
        self.program.as_deref()
    }
}

/// A device that becomes idle when dropped, or closes if it has leaks. It reports the given total.
struct Reused {
    /// `Some` until dropped.
    device: Option<Box<dyn TestDevice>>,
    idle: IdleDevice,
    info: DeviceInfo,
    /// Free memory at the start of its use.
    free: Bytes,
}

impl Reused {
    fn new(mut device: Box<dyn TestDevice>, idle: IdleDevice) -> Result<Self, DeviceError> {
        let free = device.free_memory()?;
        let info = device.info().clone();
        Ok(Self {
            device: Some(device),
            idle,
            info,
            free,
        })
    }

    /// The part of the device's free memory that is within the reported total.
    fn within_total(&self, free: Bytes) -> Bytes {
        free.min(
            self.info
                .total
                .saturating_sub(self.free.saturating_sub(free)),
        )
    }
}

impl Drop for Reused {
    fn drop(&mut self) {
        let device = self
            .device
            .take()
            .filter(|device| device.info().clock == Clock::Measured && device.leaks().is_empty());
        *lock(&self.idle) = device;
    }
}

impl wrapper::DeviceWrapper for Reused {
    type Inner = dyn TestDevice;

    fn inner(&self) -> &Self::Inner {
        self.device
            .as_deref()
            .expect("the device is present until drop")
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        self.device
            .as_deref_mut()
            .expect("the device is present until drop")
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
        Ok(DeviceMemory {
            total: self.info.total,
            free: self.within_total(memory.free),
            ..memory
        })
    }
}
