//! The host memory of a training: saved tensors that wait for their backward pass, and the
//! optimizer's state.

use std::collections::BTreeMap;

use harness_allocator::device::{HostMemory, StreamId};
use harness_allocator::{allocator::AllocatorError, units::Bytes};

use crate::context::RunContext;
use crate::rig::{Buffer, HostBuffer, Stop};
use crate::workload::memory::{Failed, take};
use harness_record::HostUse;

/// The host memory of a training.
#[derive(Debug, Default)]
pub(super) struct HostStore {
    spare: BTreeMap<(HostMemory, Bytes), Vec<HostBuffer>>,
    /// Memory of retained graphs.
    pub(super) retained: Vec<HostBuffer>,
    /// The total size of live and cached memory.
    held: Bytes,
    /// The peak of live and cached memory, and the copied bytes.
    pub(super) usage: HostUse,
}

impl HostStore {
    pub(super) fn take(
        &mut self,
        ctx: &mut RunContext,
        size: Bytes,
        memory: &HostMemory,
    ) -> Result<HostBuffer, Failed> {
        if let Some(spare) = self
            .spare
            .get_mut(&(memory.clone(), size))
            .and_then(Vec::pop)
        {
            return Ok(spare);
        }
        match ctx.rig.host_allocate(size, memory)? {
            Ok(buffer) => {
                self.held += size;
                self.usage.peak = self.usage.peak.max(self.held);
                Ok(buffer)
            }
            Err(error) => Err(Failed::OutOfMemory(AllocatorError::Device(error), None)),
        }
    }

    pub(super) fn put_back(&mut self, buffer: HostBuffer) {
        self.spare
            .entry((buffer.memory().clone(), buffer.size()))
            .or_default()
            .push(buffer);
    }

    /// Queues a copy to host memory, which it appends to `into`.
    pub(super) fn save(
        &mut self,
        ctx: &mut RunContext,
        from: &Buffer,
        memory: &HostMemory,
        stream: StreamId,
        into: &mut Vec<HostBuffer>,
    ) -> Result<(), Failed> {
        let mut host = self.take(ctx, from.range().len, memory)?;
        self.usage.copied += from.range().len;
        let copied = ctx.rig.copy_to_host(from, &mut host, stream);
        into.push(host);
        Ok(copied?)
    }

    /// Queues a copy to the device.
    pub(super) fn copy_up(
        &mut self,
        ctx: &mut RunContext,
        from: &HostBuffer,
        to: &mut Buffer,
        stream: StreamId,
    ) -> Result<(), Stop> {
        self.usage.copied += to.range().len;
        ctx.rig.copy_to_device(from, to, stream)
    }

    pub(super) fn give_back_spare(&mut self, ctx: &mut RunContext) -> Result<(), Stop> {
        for buffer in std::mem::take(&mut self.spare).into_values().flatten() {
            self.held -= buffer.size();
            ctx.rig.host_free(buffer)?;
        }
        Ok(())
    }

    /// Frees everything except memory that was taken and not put back.
    pub(super) fn free(mut self, ctx: &mut RunContext) -> Result<(), Stop> {
        self.give_up_retained(0);
        self.give_back_spare(ctx)
    }

    /// Drops retained buffers until `kept` are left.
    pub(super) fn give_up_retained(&mut self, kept: usize) {
        let dropped: Vec<HostBuffer> = self.retained.drain(kept..).collect();
        dropped.into_iter().for_each(|buffer| self.put_back(buffer));
    }
}

/// The saved tensors of a pass on the host, as with PyTorch's `save_on_cpu`: each is copied when an
/// operation saves it, and the host waits for the copy.
#[derive(Debug)]
pub(super) struct SavedOnHost {
    memory: HostMemory,
    /// By the operation that saved them, or for the inputs of a checkpointed segment, by its first
    /// operation.
    saved: BTreeMap<usize, Vec<HostBuffer>>,
}

impl SavedOnHost {
    pub(super) const fn new(memory: HostMemory) -> Self {
        Self {
            memory,
            saved: BTreeMap::new(),
        }
    }

    /// Copies the saved tensors and parameters of an operation; there may be none.
    pub(super) fn save<'b>(
        &mut self,
        ctx: &mut RunContext,
        store: &mut HostStore,
        operation: usize,
        buffers: impl IntoIterator<Item = &'b Buffer>,
        stream: StreamId,
    ) -> Result<(), Failed> {
        let saved = self.saved.entry(operation).or_default();
        for buffer in buffers {
            store.save(ctx, buffer, &self.memory, stream, saved)?;
            ctx.rig.synchronize_stream(stream)?;
        }
        Ok(())
    }

    /// Copies the saved buffers of an operation back to the device, and appends them to `into`.
    pub(super) fn fetch(
        &mut self,
        ctx: &mut RunContext,
        store: &mut HostStore,
        operation: usize,
        into: &mut Vec<Buffer>,
        keep: bool,
        stream: StreamId,
    ) -> Result<bool, Failed> {
        let Some(saved) = self.saved.get(&operation) else {
            return Ok(false);
        };
        for host in saved {
            let mut buffer = take(ctx, host.size(), stream)?;
            let copied = store.copy_up(ctx, host, &mut buffer, stream);
            into.push(buffer);
            copied?;
        }
        if !keep {
            self.saved
                .remove(&operation)
                .into_iter()
                .flatten()
                .for_each(|host| store.put_back(host));
        }
        Ok(true)
    }

    pub(super) fn end(self, store: &mut HostStore, retain: bool) {
        let left = self.saved.into_values().flatten();
        if retain {
            store.retained.extend(left);
        } else {
            left.for_each(|host| store.put_back(host));
        }
    }
}
