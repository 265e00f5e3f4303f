//! An allocator that lies about the driver's pool: the driver's own figures reveal it.

use harness_allocator::allocator::{
    Allocation, Allocator, AllocatorError, MemoryFraction, Request, async_pool::AsyncPoolAllocator,
};
use harness_allocator::device::{Device, DeviceError, DevicePtr, PoolId, StreamId};
use harness_allocator::stats::{MemoryStats, SegmentInfo};
use harness_allocator::units::Bytes;
use harness_record::Invariant;

use crate::program::{Machine, Op};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lie {
    Nothing,
    /// The counter of reserved bytes is one too high.
    Reserved,
    /// Hides the pool from the audit.
    HidesThePool,
    /// Ignores `record_stream`.
    ForgetsStreams,
}

struct Lying(Lie, AsyncPoolAllocator);

impl Allocator for Lying {
    fn name(&self) -> &'static str {
        self.1.name()
    }

    fn allocate(
        &mut self,
        device: &mut dyn Device,
        request: Request,
    ) -> Result<Allocation, AllocatorError> {
        self.1.allocate(device, request)
    }

    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        self.1.free(device, allocation)
    }

    fn record_stream(
        &mut self,
        allocation: &Allocation,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        if self.0 == Lie::ForgetsStreams {
            return Ok(());
        }
        self.1.record_stream(allocation, stream)
    }

    fn release_stream(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        self.1.release_stream(device, stream)
    }

    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.1.empty_cache(device)
    }

    fn set_memory_fraction(&mut self, device: &dyn Device, fraction: MemoryFraction) {
        self.1.set_memory_fraction(device, fraction);
    }

    fn reset_peaks(&mut self) {
        self.1.reset_peaks();
    }

    fn stats(&self) -> MemoryStats {
        let mut stats = self.1.stats();
        if self.0 == Lie::Reserved && stats.reserved_bytes.all.current > 0 {
            stats.reserved_bytes.all.increase(1);
        }
        stats
    }

    fn snapshot(&self) -> Vec<SegmentInfo> {
        self.1.snapshot()
    }

    fn segment_at(&self, address: DevicePtr) -> Option<SegmentInfo> {
        self.1.segment_at(address)
    }

    fn driver_pool(&self) -> Option<PoolId> {
        if self.0 == Lie::HidesThePool {
            None
        } else {
            self.1.driver_pool()
        }
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.1.close(device)
    }
}

/// The invariants in the first stop.
fn found(lie: Lie, program: &[Op]) -> Vec<Invariant> {
    let stopped = Machine::new(Box::new(Lying(lie, AsyncPoolAllocator::default()))).run(program);
    let mut told: Vec<_> = stopped
        .err()
        .iter()
        .flat_map(|stopped| stopped.findings())
        .map(|finding| finding.invariant)
        .collect();
    told.dedup();
    told
}

#[test]
fn lies_about_a_pool_of_the_driver_are_found() {
    let program = [
        Op::Alloc(0, Bytes::mib(3), 0),
        Op::EndStep,
        Op::Free(0),
        Op::EndStep,
    ];
    assert_eq!(found(Lie::Nothing, &program), []);
    // One byte too many for the driver is also one too many for the device.
    assert_eq!(
        found(Lie::Reserved, &program),
        [
            Invariant::CountersEqualStructure,
            Invariant::AccountsAreOrdered
        ]
    );
    assert_eq!(
        found(Lie::HidesThePool, &program),
        [Invariant::CountersEqualStructure]
    );
}

/// A free that is not ordered after every use of the memory: the free itself is the race.
#[test]
fn a_free_to_the_pool_in_front_of_another_streams_work_is_found() {
    let program = [
        Op::Alloc(0, Bytes::mib(3), 0),
        Op::Fill(0),
        Op::HandOver(0, 1),
        Op::Free(0),
        Op::EndStep,
    ];
    assert_eq!(found(Lie::Nothing, &program), []);
    assert_eq!(
        found(Lie::ForgetsStreams, &program),
        [Invariant::ContentsAreIntact]
    );
}
