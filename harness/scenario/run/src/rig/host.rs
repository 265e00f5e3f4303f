//! Host memory and copies. A copy carries the contents of its source.

use harness_allocator::device::{DeviceError, HostId, HostMemory, StreamId, Tag};
use harness_allocator::units::Bytes;

use super::{Buffer, Rig, Stop};
use crate::control::BlockingCall;

#[derive(Debug)]
#[must_use = "free host memory with `Rig::host_free`"]
pub struct HostBuffer {
    /// `None` for zero bytes.
    id: Option<HostId>,
    size: Bytes,
    memory: HostMemory,
    /// The contents that were copied last.
    content: Option<Tag>,
}

impl HostBuffer {
    pub const fn size(&self) -> Bytes {
        self.size
    }

    pub const fn memory(&self) -> &HostMemory {
        &self.memory
    }
}

impl Rig {
    /// Allocates host memory. The inner error means that too little is available.
    pub fn host_allocate(
        &mut self,
        size: Bytes,
        memory: &HostMemory,
    ) -> Result<Result<HostBuffer, DeviceError>, Stop> {
        if self.is_interrupted() {
            return Err(Stop::Interrupted);
        }
        self.control.calls(BlockingCall::Host);
        let id = match size {
            Bytes::ZERO => None,
            _ => match self.device.host_alloc(size, memory) {
                Ok(id) => Some(id),
                Err(error @ DeviceError::HostMemory { .. }) => return Ok(Err(error)),
                Err(error) => return Err(error.into()),
            },
        };
        self.host.extend(id);
        Ok(Ok(HostBuffer {
            id,
            size,
            memory: memory.clone(),
            content: None,
        }))
    }

    pub fn host_free(&mut self, buffer: HostBuffer) -> Result<(), Stop> {
        let Some(id) = buffer.id else { return Ok(()) };
        self.control.calls(BlockingCall::Host);
        self.device.host_free(id)?;
        self.host.remove(&id);
        Ok(())
    }

    /// Queues a copy of a buffer to host memory of its size.
    pub fn copy_to_host(
        &mut self,
        from: &Buffer,
        to: &mut HostBuffer,
        stream: StreamId,
    ) -> Result<(), Stop> {
        if let (Some(id), false) = (to.id, from.allocation.is_null()) {
            self.control.calls(BlockingCall::Copy);
            self.device.copy_to_host(stream, from.range(), id)?;
        }
        to.content = from.content.map(|(tag, _)| tag);
        Ok(())
    }

    /// Queues a copy of host memory to a buffer of its size.
    pub fn copy_to_device(
        &mut self,
        from: &HostBuffer,
        to: &mut Buffer,
        stream: StreamId,
    ) -> Result<(), Stop> {
        if let (Some(id), false) = (from.id, to.allocation.is_null()) {
            // After a failed copy, the contents are unknown.
            to.content = None;
            self.control.calls(BlockingCall::Copy);
            self.device.copy_to_device(stream, id, to.range())?;
        }
        to.content = from.content.map(|tag| (tag, stream));
        Ok(())
    }
}
