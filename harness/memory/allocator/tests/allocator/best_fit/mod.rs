//! The allocators `bfc`, `rmm_pool`, `rmm_arena`, `rmm_binning`, `ort_arena`, `xla_bfc` and
//! `cupy_pool`: the figures that their libraries document, alone and in random programs. No stream
//! gets memory that another one still uses.

mod bfc;
mod cupy_pool;
mod ort_arena;
mod rmm_arena;
mod rmm_binning;
mod rmm_pool;
mod streams;
mod xla_bfc;

use harness_allocator::allocator::{Allocation, Allocator, AllocatorError, OutOfMemory, Request};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{Device, DevicePtr, StreamId, TestDevice, limited::Limited};
use harness_allocator::stats::{BlockInfo, BlockState};
use harness_allocator::units::Bytes;

/// An allocator and a device of a known size.
struct Fixture<A> {
    allocator: A,
    device: Box<dyn TestDevice>,
    /// Allocations that live until the allocator is closed.
    held: Vec<Allocation>,
}

impl<A: Allocator> Fixture<A> {
    fn new(allocator: A, memory: Bytes) -> Self {
        let device = Limited::new(Box::new(SimDevice::new(SimConfig::default())), memory).unwrap();
        Self {
            allocator,
            device: Box::new(device),
            held: Vec::new(),
        }
    }

    fn stream(&mut self) -> StreamId {
        self.device.create_stream().unwrap()
    }

    fn try_alloc(&mut self, size: Bytes, stream: StreamId) -> Result<Allocation, AllocatorError> {
        self.allocator
            .allocate(&mut *self.device, Request { size, stream })
    }

    fn alloc_on(&mut self, size: Bytes, stream: StreamId) -> Allocation {
        self.try_alloc(size, stream).unwrap()
    }

    fn alloc(&mut self, size: Bytes) -> Allocation {
        self.alloc_on(size, StreamId::DEFAULT)
    }

    /// Makes an allocation that is never freed.
    fn hold(&mut self, size: Bytes, stream: StreamId) {
        let allocation = self.alloc_on(size, stream);
        self.held.push(allocation);
    }

    /// Makes an allocation that must fail, and returns the reason.
    fn oom(&mut self, size: Bytes) -> OutOfMemory {
        match self.try_alloc(size, StreamId::DEFAULT) {
            Err(AllocatorError::OutOfMemory(oom)) => *oom,
            other => panic!("{other:?}"),
        }
    }

    fn free(&mut self, allocation: Allocation) {
        self.allocator.free(&mut *self.device, allocation).unwrap();
    }

    /// Leaves this much free memory on the device.
    fn leave(&mut self, left: Bytes) {
        let memory = self.device.memory().unwrap();
        self.device
            .set_external_memory(memory.free + memory.external_memory - left)
            .unwrap();
    }

    /// The sizes of all regions, in order of allocation.
    fn regions(&self) -> Vec<Bytes> {
        self.allocator
            .snapshot()
            .iter()
            .map(|segment| segment.size)
            .collect()
    }

    fn blocks(&self) -> Vec<BlockInfo> {
        self.allocator
            .snapshot()
            .into_iter()
            .flat_map(|segment| segment.blocks)
            .collect()
    }

    /// The free chunks of a stream: address and size.
    fn free_for(&self, stream: StreamId) -> Vec<(DevicePtr, Bytes)> {
        let free = self
            .blocks()
            .into_iter()
            .filter(|block| block.state == BlockState::Inactive && block.stream == stream);
        free.map(|block| (block.address, block.size)).collect()
    }

    /// Closes the allocator and checks that the device has all memory back.
    fn close(mut self) {
        self.allocator.close(&mut *self.device).unwrap();
        let leaks = self.device.leaks();
        assert_eq!((leaks.allocations, leaks.events), (0, 0));
    }
}
