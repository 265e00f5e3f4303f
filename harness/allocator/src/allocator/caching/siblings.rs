//! What a caching allocator asks of its siblings: others of its kind that hold memory of the same device, each for streams of its own.
//!
//! The limit is on what all hold together, and a request that finds no memory takes back what any of them keeps. Everything else concerns
//! one stream, and so one allocator only.

use crate::device::{Device, DeviceError};
use crate::stats::{MemoryStats, PoolKind};

/// The siblings of a caching allocator.
pub(in crate::allocator) trait Siblings {
    /// Bytes that they hold from the driver.
    fn reserved(&self) -> u64;

    /// Bytes that they have handed out.
    fn allocated(&self) -> u64;

    /// Called before memory is given back, with the counters of the asking allocator: the last moment at which the peak of all can be seen.
    fn before_release(&mut self, own: &MemoryStats);

    /// Waits for the events of their pending frees and finishes those frees.
    fn finish_pending(&mut self, device: &mut dyn Device) -> Result<(), DeviceError>;

    /// Gives back the whole free segments of their default pools of one kind: of the siblings on one side of the asking allocator.
    fn release_default_pool(&mut self, device: &mut dyn Device, kind: PoolKind, order: StreamOrder) -> Result<(), DeviceError>;
}

/// Memory goes back in the order of streams, as one allocator for all streams would give it back. So a sibling's turn is before the asking
/// allocator's, or behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::allocator) enum StreamOrder {
    /// Siblings with a lower stream number.
    Lower,
    /// Siblings with a higher stream number.
    Higher,
}

/// An allocator that has the device for itself.
#[derive(Debug)]
pub(super) struct NoSiblings;

impl Siblings for NoSiblings {
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

    fn release_default_pool(&mut self, _device: &mut dyn Device, _kind: PoolKind, _order: StreamOrder) -> Result<(), DeviceError> {
        Ok(())
    }
}
