//! Compares the caching allocator with [`plain::Model`], an executable form of its rules. Both run
//! the same random operations with the same random settings. After each one, answer, counters (with
//! peaks and sums), structure and driver calls must be equal.

mod plain;
mod safety;

use harness_allocator::allocator::caching::{CachingAllocator, Config, Quirks, TorchVersion};
use harness_allocator::allocator::{
    Allocation, Allocator, AllocatorError, MemoryFraction, PrivatePoolId, PrivatePools, Request,
};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{Device, DeviceError, StreamId, Tag, TestDevice};
use harness_allocator::units::Bytes;
use proptest::prelude::*;

use self::plain::{Model, interesting_sizes};

const STREAMS: u32 = 3;
const POOLS: u32 = 2;

/// An operation. Indices choose a live object, so every random list makes sense and shrinks well.
#[derive(Clone, Debug)]
enum Op {
    Allocate { size: u64, stream: u32 },
    Free(prop::sample::Index),
    RecordStream(prop::sample::Index, u32),
    SynchronizeStream(u32),
    Synchronize,
    EmptyCache,
    SetFraction(f64),
    ResetPeaks,
    Begin(u32),
    End(u32),
    Release(u32),
}

fn operations() -> impl Strategy<Value = Vec<Op>> {
    let sizes = prop_oneof![
        3 => prop::sample::select(interesting_sizes()),
        1 => (10_u64..120).prop_map(|mib| mib << 20),
    ];
    // Most on one stream, because only blocks of one stream merge.
    let streams = prop_oneof![3 => Just(0), 1 => 0..STREAMS];
    let any = any::<prop::sample::Index>;
    let operation = prop_oneof![
        40 => (sizes, streams).prop_map(|(size, stream)| Op::Allocate { size, stream }),
        28 => any().prop_map(Op::Free),
        10 => (any(), 0..STREAMS).prop_map(|(block, stream)| Op::RecordStream(block, stream)),
        4 => (0..STREAMS).prop_map(Op::SynchronizeStream),
        1 => Just(Op::Synchronize),
        2 => Just(Op::EmptyCache),
        2 => fractions().prop_map(Op::SetFraction),
        1 => Just(Op::ResetPeaks),
        3 => (0..POOLS).prop_map(Op::Begin),
        5 => (0..POOLS).prop_map(Op::End),
        1 => (0..POOLS).prop_map(Op::Release),
    ];
    prop::collection::vec(operation, 1..150)
}

/// A sixteenth of these devices is a whole number of segment units, so limits are also reached
/// exactly.
fn fractions() -> impl Strategy<Value = f64> {
    prop_oneof![
        Just(1.0),
        (1_u32..16).prop_map(|sixteenths| f64::from(sixteenths) / 16.0),
        0.05_f64..1.0
    ]
}

prop_compose! {
    fn configs()(
        large in prop_oneof![Just(20), 11_u64..80],
        split in proptest::option::of(prop_oneof![Just(0), 0_u64..60]),
        rounding in prop_oneof![Just(0), 0_u64..40],
        divisions in prop_oneof![
            prop::sample::select(vec![0_u64, 1, 4, 16]).prop_map(|value| [value; 16]),
            prop::array::uniform16(prop::sample::select(vec![0_u64, 2, 8])),
        ],
        threshold in proptest::option::of(0.05_f64..0.95),
        fraction in fractions(),
        quirks in prop::sample::select(vec![Quirks::Safe, Quirks::AsTorch]),
        // One version for each set of rules that the model knows.
        torch in prop::sample::select(vec![
            TorchVersion::V2_9, TorchVersion::V2_11, TorchVersion::V2_12, TorchVersion::V2_15,
        ]),
        throw_on_malloc_oom in prop::bool::weighted(0.2),
    ) -> Config {
        Config {
            max_split_size: split.map(|more| Bytes::mib(large + more)),
            max_non_split_rounding: Bytes::mib(large + rounding),
            large_segment_size: Bytes::mib(large),
            roundup_power2_divisions: divisions,
            garbage_collection_threshold: threshold,
            expandable_segments: false,
            expandable_segments_reserve: None,
            throw_on_malloc_oom,
            torch,
            memory_fraction: MemoryFraction::new(fraction).expect("in range"),
            quirks,
        }
    }
}

/// The allocator with its device, the model, and the live allocations of both.
struct Pair {
    device: SimDevice,
    allocator: CachingAllocator,
    model: Model,
    live: Vec<Allocation>,
    open: Vec<u32>,
    released: Vec<u32>,
}

impl Pair {
    fn new(config: &Config, capacity: Bytes) -> Result<Self, DeviceError> {
        let mut device = SimDevice::new(SimConfig::replay(capacity));
        for _ in 1..STREAMS {
            device.create_stream()?;
        }
        let (allocator, model) = (
            CachingAllocator::new(config.clone()),
            Model::new(config.clone(), capacity),
        );
        Ok(Self {
            device,
            allocator,
            model,
            live: Vec::new(),
            open: Vec::new(),
            released: Vec::new(),
        })
    }

    /// Applies the operation to both. Ignores an impossible one, such as closing a context that is
    /// not open.
    fn apply(&mut self, op: &Op) -> Result<(), TestCaseError> {
        let failed = |error: &dyn std::fmt::Display| TestCaseError::fail(error.to_string());
        let Self {
            device,
            allocator,
            model,
            live,
            open,
            released,
        } = self;
        match op {
            &Op::Allocate { size, stream } => {
                let expected = model.allocate(size, stream);
                match allocator.allocate(device, Request::new(Bytes(size)).on(StreamId(stream))) {
                    Ok(allocation) => {
                        prop_assert_eq!(Some((allocation.ptr().0, allocation.size().0)), expected);
                        live.push(allocation);
                    }
                    Err(AllocatorError::OutOfMemory(_)) => prop_assert_eq!(None, expected),
                    Err(error) => return Err(failed(&error)),
                }
            }
            Op::Free(index) if !live.is_empty() => {
                let allocation = live.swap_remove(index.index(live.len()));
                model.free(allocation.ptr().0);
                allocator
                    .free(device, allocation)
                    .map_err(|error| failed(&error))?;
            }
            Op::RecordStream(index, stream) if !live.is_empty() => {
                let allocation = index.get(live);
                model.record_stream(allocation.ptr().0, *stream);
                allocator
                    .record_stream(allocation, StreamId(*stream))
                    .expect("it is live");
            }
            Op::SynchronizeStream(stream) => {
                model.synchronize(*stream);
                device
                    .synchronize_stream(StreamId(*stream))
                    .map_err(|error| failed(&error))?;
            }
            Op::Synchronize => {
                model.synchronize_all();
                device.synchronize().map_err(|error| failed(&error))?;
            }
            Op::EmptyCache => {
                model.empty_cache();
                allocator
                    .empty_cache(device)
                    .map_err(|error| failed(&error))?;
            }
            Op::SetFraction(fraction) => {
                let fraction = MemoryFraction::new(*fraction).expect("in range");
                model.set_fraction(fraction);
                allocator.set_memory_fraction(device, fraction);
            }
            Op::ResetPeaks => {
                model.reset_peaks();
                allocator.reset_peaks();
            }
            Op::Begin(pool) if !open.contains(pool) && !released.contains(pool) => {
                open.push(*pool);
                model.begin(*pool);
                allocator
                    .begin(PrivatePoolId(*pool))
                    .map_err(|error| failed(&error))?;
            }
            Op::End(pool) if open.contains(pool) => {
                open.retain(|open| open != pool);
                model.end(*pool);
                allocator
                    .end(PrivatePoolId(*pool))
                    .map_err(|error| failed(&error))?;
            }
            Op::Release(pool)
                if (open.is_empty() || !model.captures())
                    && !open.contains(pool)
                    && !released.contains(pool) =>
            {
                // A pool that was never opened does not exist yet.
                allocator
                    .begin(PrivatePoolId(*pool))
                    .map_err(|error| failed(&error))?;
                allocator
                    .end(PrivatePoolId(*pool))
                    .map_err(|error| failed(&error))?;
                released.push(*pool);
                model.release(*pool);
                allocator
                    .release(device, PrivatePoolId(*pool))
                    .map_err(|error| failed(&error))?;
            }
            Op::Free(_) | Op::RecordStream(..) | Op::Begin(_) | Op::End(_) | Op::Release(_) => {}
        }
        Ok(())
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        prop_assert_eq!(self.allocator.snapshot(), self.model.snapshot());
        prop_assert_eq!(self.allocator.stats(), self.model.stats());
        let calls = self.device.calls();
        prop_assert_eq!(
            [calls.malloc, calls.malloc_failures, calls.free],
            self.model.calls
        );
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None,
        ..ProptestConfig::default() })]

    #[test]
    fn the_allocator_equals_the_plain_model(
        config in configs(), capacity in 2_u64..13, operations in operations()
    ) {
        let mut pair = Pair::new(&config, Bytes::mib(32 * capacity)).expect("streams can be made");
        for op in &operations {
            pair.apply(op)?;
            pair.compare()?;
        }
    }
}

/// Frees a block in a pool context while another stream works on it, and allocates the same size
/// from the pool again.
fn reuse_behind_a_forgotten_stream(quirks: Quirks) -> (bool, Result<(), DeviceError>) {
    let mut device = SimDevice::new(SimConfig::replay(Bytes::mib(64)));
    let mut allocator = CachingAllocator::new(Config {
        quirks,
        torch: TorchVersion::V2_11,
        ..Config::default()
    });
    let side = device.create_stream().expect("a stream");
    let (pool, request) = (PrivatePoolId(7), Request::new(Bytes::mib(4)));
    allocator.begin(pool).expect("a new pool");
    let used = allocator.allocate(&mut device, request).expect("memory");
    device
        .fill(side, used.range(), Tag(1))
        .expect("the block is live");
    allocator.record_stream(&used, side).expect("it is live");
    let address = used.ptr();
    allocator.free(&mut device, used).expect("it is live");
    allocator.end(pool).expect("it is open");
    // Outside the context the postponed free is processed: is there an event to wait for?
    let outside = allocator.allocate(&mut device, request).expect("memory");
    allocator.begin(pool).expect("it exists");
    let next = allocator.allocate(&mut device, request).expect("memory");
    let reused = next.ptr() == address;
    let touched = device.fill(StreamId::DEFAULT, next.range(), Tag(2));
    allocator.end(pool).expect("it is open");
    drop((outside, next));
    (reused, touched)
}

#[test]
fn with_torch_quirks_a_block_is_reused_while_a_forgotten_stream_uses_it() {
    let (reused, touched) = reuse_behind_a_forgotten_stream(Quirks::AsTorch);
    assert!(reused, "the stream is forgotten, so the block is free");
    assert!(
        matches!(touched, Err(DeviceError::Race { .. })),
        "{touched:?}"
    );
}

#[test]
fn the_safe_allocator_waits_for_the_stream_before_it_reuses_the_block() {
    let (reused, touched) = reuse_behind_a_forgotten_stream(Quirks::Safe);
    assert!(!reused, "the event is not complete");
    assert_eq!(touched, Ok(()));
}
