//! What a caching allocator asks of others of its kind that hold memory of the same device, each for streams of its own.
//!
//! The limit is on what all hold together, and a request that finds no memory takes back what any of them keeps. Everything else concerns
//! one stream, and so one allocator only.

use crate::device::{Device, DeviceError};
use crate::stats::{MemoryStats, PoolKind};

/// The other allocators on the same device.
pub(in crate::allocator) trait Others {
    /// What they hold from the driver, in bytes.
    fn reserved(&self) -> u64;

    /// What they have handed out, in bytes.
    fn allocated(&self) -> u64;

    /// Memory is about to go back: the last moment to see what is held by all, given the asking allocator's own counters.
    fn before_release(&mut self, own: &MemoryStats);

    /// Waits for the events of their pending frees and finishes those frees.
    fn finish_pending(&mut self, device: &mut dyn Device) -> Result<(), DeviceError>;

    /// Gives back the whole free segments of their default pools of that kind.
    fn release_default_pool(&mut self, device: &mut dyn Device, kind: PoolKind, side: Side) -> Result<(), DeviceError>;
}

/// Which of the others: memory goes back in the order of streams, as one allocator for all streams would give it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::allocator) enum Side {
    /// Those whose stream stands before the asking allocator's.
    Before,
    /// Those behind it.
    After,
}

/// There are no others.
#[derive(Debug)]
pub(super) struct Alone;

impl Others for Alone {
    fn reserved(&self) -> u64 {
        0
    }

    fn allocated(&self) -> u64 {
        0
    }

    fn before_release(&mut self, _own: &MemoryStats) {}

    fn finish_pending(&mut self, _device: &mut dyn Device) -> Result<(), DeviceError> {
        Ok(())
    }

    fn release_default_pool(&mut self, _device: &mut dyn Device, _kind: PoolKind, _side: Side) -> Result<(), DeviceError> {
        Ok(())
    }
}
