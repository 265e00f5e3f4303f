//! [`Shared`]: a device that several processes of a run share. A ledger records each one's memory.
//! Together they may use the memory that the scenario needs.

use std::io;

use harness_allocator::device::{
    Clock, Device, DeviceError, DeviceMemory, DevicePtr, EventId, MappedDevice, MemoryRange,
    PoolId, PoolMemory, PooledDevice, StreamId, TestDevice, limited::Limited, wrapper,
};
use harness_allocator::units::Bytes;
use harness_gpu_settings::ledger::{Ledger, LedgerAccount};

/// The ledger entry for memory that the scenario needs, which the processes share.
const MEMORY: u32 = 0;
/// The ledger entry for the memory of contexts, which comes on top.
const CONTEXTS: u32 = 1;

pub(crate) struct Shared {
    inner: Limited<Box<dyn TestDevice>>,
    account: LedgerAccount,
}

pub(crate) fn unavailable(why: &io::Error) -> DeviceError {
    DeviceError::Unavailable {
        what: "memory that processes share".to_owned(),
        why: why.to_string(),
    }
}

impl Shared {
    /// Limits all processes of the ledger to `memory` in total.
    pub(crate) fn new(
        device: Box<dyn TestDevice>,
        memory: Bytes,
        ledger: Ledger,
    ) -> Result<Self, DeviceError> {
        // Contexts are not counted if the device cannot report them separately.
        let context = device.own_context().unwrap_or_default();
        let mut account = LedgerAccount::new(Some(ledger));
        account.change(CONTEXTS, |_| (Ok::<(), DeviceError>(()), context))?;
        Ok(Self {
            inner: Limited::shared(device, memory)?,
            account,
        })
    }

    /// Runs a call that may allocate, limited by the memory of the other processes.
    fn take<T>(
        &mut self,
        mut act: impl FnMut(&mut Limited<Box<dyn TestDevice>>) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let Self { inner, account } = self;
        account.change(MEMORY, |others| {
            inner.set_held_elsewhere(others);
            let done = act(inner);
            match inner.held() {
                Ok(held) => (done, held),
                Err(error) => (Err(error), Bytes::ZERO),
            }
        })
    }

    /// Runs a call that may release memory.
    fn give<T>(
        &mut self,
        act: impl FnOnce(&mut Limited<Box<dyn TestDevice>>) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let done = act(&mut self.inner)?;
        self.account.released(MEMORY, self.inner.held()?);
        Ok(done)
    }

    /// The memory of other processes without their contexts, and their contexts.
    fn elsewhere(&mut self) -> (Bytes, Bytes) {
        let [memory, contexts] =
            [MEMORY, CONTEXTS].map(|number| self.account.entered_by_others(number));
        self.inner.set_held_elsewhere(memory);
        (memory, contexts)
    }
}

impl wrapper::DeviceWrapper for Shared {
    type Inner = Limited<Box<dyn TestDevice>>;

    fn inner(&self) -> &Self::Inner {
        &self.inner
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut self.inner
    }

    fn free_memory(&mut self) -> Result<Bytes, DeviceError> {
        self.elsewhere();
        Device::free_memory(&mut self.inner)
    }

    fn malloc(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        self.take(|device| Device::malloc(device, size))
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), DeviceError> {
        self.give(|device| Device::free(device, ptr))
    }

    // A driver pool may release memory during a wait.

    fn synchronize_event(&mut self, event: EventId) -> Result<(), DeviceError> {
        self.give(|device| Device::synchronize_event(device, event))
    }

    fn synchronize_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        self.give(|device| Device::synchronize_stream(device, stream))
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.give(Device::synchronize)
    }

    fn mapped(&mut self) -> Option<&mut dyn MappedDevice> {
        Device::mapped(&mut self.inner)
            .is_some()
            .then_some(self as _)
    }

    fn pooled(&mut self) -> Option<&mut dyn PooledDevice> {
        Device::pooled(&mut self.inner)
            .is_some()
            .then_some(self as _)
    }
}

impl wrapper::TestDeviceWrapper for Shared {
    fn memory(&mut self) -> Result<DeviceMemory, DeviceError> {
        let (held, process_contexts) = self.elsewhere();
        let processes = held + process_contexts;
        let memory = TestDevice::memory(&mut self.inner)?;
        // A real device already includes the others.
        let is_simulated = Device::info(&self.inner).clock == Clock::Simulated;
        let used = if is_simulated {
            memory.used + processes
        } else {
            memory.used
        };
        Ok(DeviceMemory {
            used,
            processes,
            process_contexts,
            ..memory
        })
    }

    fn set_external_memory(&mut self, held: Bytes) -> Result<Bytes, DeviceError> {
        self.take(|device| TestDevice::set_external_memory(device, held))
    }
}

impl MappedDevice for Shared {
    fn reserve(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        MappedDevice::reserve(&mut self.inner, size)
    }

    fn unreserve(&mut self, start: DevicePtr) -> Result<(), DeviceError> {
        MappedDevice::unreserve(&mut self.inner, start)
    }

    fn map(&mut self, range: MemoryRange, page: Bytes) -> Result<(), DeviceError> {
        self.take(|device| MappedDevice::map(device, range, page))
    }

    fn unmap(&mut self, range: MemoryRange) -> Result<(), DeviceError> {
        self.give(|device| MappedDevice::unmap(device, range))
    }
}

impl PooledDevice for Shared {
    fn create_pool(&mut self, release_threshold: Bytes) -> Result<PoolId, DeviceError> {
        PooledDevice::create_pool(&mut self.inner, release_threshold)
    }

    fn destroy_pool(&mut self, pool: PoolId) -> Result<(), DeviceError> {
        self.give(|device| PooledDevice::destroy_pool(device, pool))
    }

    fn malloc_async(
        &mut self,
        pool: PoolId,
        size: Bytes,
        stream: StreamId,
    ) -> Result<DevicePtr, DeviceError> {
        self.take(|device| PooledDevice::malloc_async(device, pool, size, stream))
    }

    fn free_async(&mut self, ptr: DevicePtr, stream: StreamId) -> Result<(), DeviceError> {
        self.give(|device| PooledDevice::free_async(device, ptr, stream))
    }

    fn trim_pool(&mut self, pool: PoolId, keep: Bytes) -> Result<(), DeviceError> {
        self.give(|device| PooledDevice::trim_pool(device, pool, keep))
    }

    fn pool_reserved(&mut self, pool: PoolId) -> Result<Bytes, DeviceError> {
        PooledDevice::pool_reserved(&mut self.inner, pool)
    }

    fn pool_memory(&mut self, pool: PoolId) -> Result<PoolMemory, DeviceError> {
        PooledDevice::pool_memory(&mut self.inner, pool)
    }
}
