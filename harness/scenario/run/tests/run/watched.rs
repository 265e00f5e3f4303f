//! A simulated device that reports leaks when it is closed, can interrupt the run, and can fail
//! memory queries.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{
    CallSite, Device, DeviceError, DeviceMemory, DevicePtr, Leaks, TestDevice, wrapper,
};
use harness_allocator::units::Bytes;

pub(crate) struct Watched {
    device: SimDevice,
    interrupt: Arc<AtomicBool>,
    /// Interrupts the run at this device allocation.
    at: u64,
    left: Arc<Mutex<Option<Leaks>>>,
    mallocs: Arc<Mutex<Vec<Bytes>>>,
    /// The memory query that fails, counted from 1 in this step.
    fails_at: Option<(CallSite, u64)>,
    place: CallSite,
    asked: u64,
}

/// The error of a failing memory query.
pub(crate) fn launch_failed() -> DeviceError {
    DeviceError::Driver {
        call: "cuMemGetInfo_v2",
        code: 719,
        name: "CUDA_ERROR_LAUNCH_FAILED".into(),
        advice: "start again",
    }
}

impl Watched {
    pub(crate) fn new(
        memory: Bytes,
        interrupt: Arc<AtomicBool>,
        at: u64,
    ) -> (Self, Arc<Mutex<Option<Leaks>>>) {
        let mut config = SimConfig::default();
        config.total = config.context_overhead + memory;
        let left = Arc::default();
        let watched = Self {
            device: SimDevice::new(config),
            interrupt,
            at,
            left: Arc::clone(&left),
            mallocs: Arc::default(),
            fails_at: None,
            place: CallSite::default(),
            asked: 0,
        };
        (watched, left)
    }

    /// Fails the n-th memory query in this step.
    pub(crate) fn failing(memory: Bytes, step: u32, nth: u64) -> Self {
        let (mut watched, _) = Self::new(memory, Arc::default(), 0);
        watched.fails_at = Some((CallSite(step), nth));
        watched
    }

    /// The calls in order.
    pub(crate) fn mallocs(&self) -> Arc<Mutex<Vec<Bytes>>> {
        Arc::clone(&self.mallocs)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        *self.left.lock().unwrap() = Some(self.device.leaks());
    }
}

impl wrapper::DeviceWrapper for Watched {
    type Inner = SimDevice;

    fn inner(&self) -> &SimDevice {
        &self.device
    }

    fn inner_mut(&mut self) -> &mut SimDevice {
        &mut self.device
    }

    fn malloc(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        self.mallocs.lock().unwrap().push(size);
        if self.device.calls().malloc + 1 == self.at {
            self.interrupt.store(true, Ordering::Relaxed);
        }
        self.device.malloc(size)
    }
}

impl wrapper::TestDeviceWrapper for Watched {
    fn memory(&mut self) -> Result<DeviceMemory, DeviceError> {
        self.asked += 1;
        if self.fails_at == Some((self.place, self.asked)) {
            Err(launch_failed())
        } else {
            self.device.memory()
        }
    }

    fn set_call_site(&mut self, place: CallSite) {
        (self.place, self.asked) = (place, 0);
        self.device.set_call_site(place);
    }
}
