//! A simulated device that says what is left on it when it is closed, can interrupt the run, and can fail to tell its memory.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{
    Device, DeviceCalls, DeviceError, DeviceInfo, DeviceMemory, DevicePtr, EventId, Leaks, MemoryRange, Place, StreamId, Tag, TestDevice,
};
use harness_allocator::units::{Bytes, Nanos};

pub(crate) struct Watched {
    device: SimDevice,
    interrupt: Arc<AtomicBool>,
    /// Interrupts at this device allocation.
    at: u64,
    left: Arc<Mutex<Option<Leaks>>>,
    mallocs: Arc<Mutex<Vec<Bytes>>>,
    /// Which question for the memory fails, counted from 1 in this step.
    fails_at: Option<(Place, u64)>,
    place: Place,
    asked: u64,
}

/// What a question for the memory fails with.
pub(crate) fn launch_failed() -> DeviceError {
    DeviceError::Driver { call: "cuMemGetInfo_v2", code: 719, name: "CUDA_ERROR_LAUNCH_FAILED".into(), advice: "start again" }
}

impl Watched {
    pub(crate) fn new(memory: Bytes, interrupt: Arc<AtomicBool>, at: u64) -> (Self, Arc<Mutex<Option<Leaks>>>) {
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
            place: Place::default(),
            asked: 0,
        };
        (watched, left)
    }

    /// One whose memory cannot be told once: at the n-th question in this step.
    pub(crate) fn failing(memory: Bytes, step: u32, nth: u64) -> Self {
        let (mut watched, _) = Self::new(memory, Arc::default(), 0);
        watched.fails_at = Some((Place(step), nth));
        watched
    }

    /// What was asked for, in order.
    pub(crate) fn mallocs(&self) -> Arc<Mutex<Vec<Bytes>>> {
        Arc::clone(&self.mallocs)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        *self.left.lock().unwrap() = Some(self.device.leaks());
    }
}

macro_rules! passed_on {
    ($(fn $name:ident(&mut self $(, $argument:ident: $type:ty)*) $(-> $result:ty)?;)*) => {
        $(fn $name(&mut self $(, $argument: $type)*) $(-> $result)? { self.device.$name($($argument),*) })*
    };
}

impl Device for Watched {
    fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    fn malloc(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        self.mallocs.lock().unwrap().push(size);
        if self.calls().malloc + 1 == self.at {
            self.interrupt.store(true, Ordering::Relaxed);
        }
        self.device.malloc(size)
    }

    passed_on! {
        fn free_memory(&mut self) -> Result<Bytes, DeviceError>;
        fn free(&mut self, ptr: DevicePtr) -> Result<(), DeviceError>;
        fn create_stream(&mut self) -> Result<StreamId, DeviceError>;
        fn destroy_stream(&mut self, stream: StreamId) -> Result<(), DeviceError>;
        fn release_stream(&mut self, stream: StreamId) -> Result<(), DeviceError>;
        fn create_event(&mut self) -> Result<EventId, DeviceError>;
        fn destroy_event(&mut self, event: EventId) -> Result<(), DeviceError>;
        fn record_event(&mut self, event: EventId, stream: StreamId) -> Result<(), DeviceError>;
        fn event_done(&mut self, event: EventId) -> Result<bool, DeviceError>;
        fn wait_event(&mut self, stream: StreamId, event: EventId) -> Result<(), DeviceError>;
        fn synchronize_event(&mut self, event: EventId) -> Result<(), DeviceError>;
        fn synchronize_stream(&mut self, stream: StreamId) -> Result<(), DeviceError>;
        fn synchronize(&mut self) -> Result<(), DeviceError>;
    }
}

impl TestDevice for Watched {
    fn memory(&mut self) -> Result<DeviceMemory, DeviceError> {
        self.asked += 1;
        if self.fails_at == Some((self.place, self.asked)) { Err(launch_failed()) } else { self.device.memory() }
    }

    fn own_context(&self) -> Result<Bytes, DeviceError> {
        self.device.own_context()
    }

    fn now(&mut self) -> Nanos {
        self.device.now()
    }

    fn calls(&self) -> DeviceCalls {
        self.device.calls()
    }

    fn set_place(&mut self, place: Place) {
        (self.place, self.asked) = (place, 0);
        self.device.set_place(place);
    }

    fn leaks(&self) -> Leaks {
        self.device.leaks()
    }

    passed_on! {
        fn create_timed_event(&mut self) -> Result<EventId, DeviceError>;
        fn elapsed(&mut self, start: EventId, end: EventId) -> Result<Nanos, DeviceError>;
        fn fill(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError>;
        fn verify_later(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError>;
        fn finish_verifications(&mut self, stream: StreamId) -> Result<(), DeviceError>;
        fn verify(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError>;
        fn busy(&mut self, stream: StreamId, duration: Nanos) -> Result<(), DeviceError>;
        fn set_pressure(&mut self, held: Bytes) -> Result<Bytes, DeviceError>;
    }
}
