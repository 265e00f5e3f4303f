//! A simulated device with properties of a real one: other processes use memory, streams cost
//! memory, and memory queries take time during which queued work continues. It counts its queries.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{
    Clock, Device, DeviceCalls, DeviceError, DeviceInfo, DeviceMemory, Leaks, MemoryRange,
    StreamId, Tag, TestDevice, wrapper,
};
use harness_allocator::units::{Bytes, Nanos};

/// The memory of other processes at the n-th query, counted from 0.
type Others = Box<dyn Fn(u64) -> Bytes + Send>;

/// The differences from the simulated device.
pub(crate) struct Stage {
    /// The memory of other processes; `None` if there can be none, as on a simulated device.
    pub(crate) others: Option<Others>,
    /// True if it reports the memory of this process.
    pub(crate) tells_process: bool,
    /// The memory that each stream takes.
    pub(crate) stream_cost: Bytes,
    /// The duration of an NVML query.
    pub(crate) nvml_takes: Nanos,
}

impl Default for Stage {
    fn default() -> Self {
        Self {
            others: None,
            tells_process: true,
            stream_cost: Bytes::ZERO,
            nvml_takes: Nanos::ZERO,
        }
    }
}

/// Other calls to the device, besides memory and work.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    /// Queries of the device's memory through NVML.
    pub(crate) memory: AtomicU64,
    /// Queries of free memory through the driver.
    pub(crate) free_memory: AtomicU64,
    /// Readings of memory.
    pub(crate) verify: AtomicU64,
}

impl Asked {
    pub(crate) fn counts(&self) -> [u64; 3] {
        [&self.memory, &self.free_memory, &self.verify].map(|count| count.load(Ordering::Relaxed))
    }
}

pub(crate) struct Staged {
    device: SimDevice,
    info: DeviceInfo,
    stage: Stage,
    /// Time passes during an NVML query, so work of other streams continues.
    aside: StreamId,
    streams: u64,
    waits: u64,
    asked: Arc<Asked>,
}

impl Staged {
    pub(crate) fn new(memory: Bytes, stage: Stage) -> (Self, Arc<Asked>) {
        let mut config = SimConfig::default();
        config.total = config.context_overhead + memory;
        let mut device = SimDevice::new(config);
        let aside = device
            .create_stream()
            .expect("a simulated device makes streams");
        let mut info = device.info().clone();
        if stage.others.is_some() {
            info.clock = Clock::Measured;
        }
        let asked = Arc::<Asked>::default();
        (
            Self {
                device,
                info,
                stage,
                aside,
                streams: 0,
                waits: 0,
                asked: Arc::clone(&asked),
            },
            asked,
        )
    }
}

impl wrapper::DeviceWrapper for Staged {
    type Inner = SimDevice;

    fn inner(&self) -> &SimDevice {
        &self.device
    }

    fn inner_mut(&mut self) -> &mut SimDevice {
        &mut self.device
    }

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_memory(&mut self) -> Result<Bytes, DeviceError> {
        self.asked.free_memory.fetch_add(1, Ordering::Relaxed);
        self.device.free_memory()
    }

    fn create_stream(&mut self) -> Result<StreamId, DeviceError> {
        self.streams += 1;
        self.device.create_stream()
    }

    fn destroy_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        self.streams -= 1;
        self.device.destroy_stream(stream)
    }
}

impl wrapper::TestDeviceWrapper for Staged {
    fn calls(&self) -> DeviceCalls {
        let calls = self.device.calls();
        DeviceCalls {
            synchronize: calls.synchronize - self.waits,
            ..calls
        }
    }

    fn leaks(&self) -> Leaks {
        let leaks = self.device.leaks();
        Leaks {
            streams: leaks.streams - 1,
            ..leaks
        }
    }

    fn memory(&mut self) -> Result<DeviceMemory, DeviceError> {
        let nth = self.asked.memory.fetch_add(1, Ordering::Relaxed);
        if self.stage.nvml_takes > Nanos::ZERO {
            self.device.busy(self.aside, self.stage.nvml_takes)?;
            self.device.synchronize_stream(self.aside)?;
            self.waits += 1;
        }
        let memory = self.device.memory()?;
        let streams = Bytes(self.streams * self.stage.stream_cost.0);
        let others = self
            .stage
            .others
            .as_ref()
            .map_or(Bytes::ZERO, |others| others(nth));
        // On a real device, this process itself allocates the external memory.
        let external_memory = if self.stage.others.is_some() {
            memory.external_memory
        } else {
            Bytes::ZERO
        };
        let process = memory
            .process
            .filter(|_| self.stage.tells_process)
            .map(|process| process + streams + external_memory);
        Ok(DeviceMemory {
            used: memory.used + streams + others,
            process,
            ..memory
        })
    }

    fn verify(
        &mut self,
        stream: StreamId,
        range: MemoryRange,
        tag: Tag,
    ) -> Result<(), DeviceError> {
        self.asked.verify.fetch_add(1, Ordering::Relaxed);
        self.device.verify(stream, range, tag)
    }
}
