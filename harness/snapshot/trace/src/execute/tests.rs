use harness_allocator::allocator::caching::{CachingAllocator, Config};
use harness_allocator::allocator::shared::SharedAllocator;
use harness_allocator::device::DevicePtr;
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::stats::MemoryStats;

use super::*;
use crate::trace;

/// Records its calls.
#[derive(Default)]
struct Seen {
    begun: usize,
    ended: Vec<(usize, Kind, OperationOutcome)>,
    misused: Vec<usize>,
}

impl<T: Target> OperationObserver<T> for Seen {
    type Error = String;

    fn before(&mut self, _: Kind) {
        self.begun += 1;
    }

    fn after(
        &mut self,
        index: usize,
        kind: Kind,
        outcome: OperationOutcome,
        _: &mut T,
    ) -> Result<(), String> {
        self.ended.push((index, kind, outcome));
        Ok(())
    }

    fn pool_misused(&mut self, index: usize, _: PrivatePoolError) -> Result<(), String> {
        self.misused.push(index);
        Ok(())
    }
}

const CAPACITY: Bytes = Bytes::mib(64);

fn events(text: &str) -> Vec<TraceEvent> {
    trace::parse(text).expect("the test's own trace")
}

/// Runs two passes on a plain allocator and returns the observations of the second one.
fn second_pass(text: &str) -> (OperationCounts, Seen, MemoryStats) {
    let mut device = SimDevice::new(SimConfig::replay(CAPACITY));
    let mut executor =
        Executor::new(&events(text), &mut device).expect("the trace can be prepared");
    let mut allocator = CachingAllocator::new(Config::default());
    let mut target = ByHandle {
        device: &mut device,
        allocator: &mut allocator,
    };
    let counts = executor
        .pass(&mut target, &mut Unobserved)
        .expect("the simulated device does not fail");
    let mut seen = Seen::default();
    let again = executor
        .pass(&mut target, &mut seen)
        .expect("the simulated device does not fail");
    assert_eq!(counts, again, "both passes do the same");
    (again, seen, target.stats())
}

#[test]
fn a_pass_counts_operations_and_frees_live_blocks() {
    // The second request exceeds the device, so its free and use are ignored. The trace never frees
    // 3.
    let (counts, seen, stats) =
        second_pass("a 1 512 0\na 2 999999999 0\nr 2 1\nf 2\nr 1 1\nf 1\nf 1\nd\na 3 2048 1\n");
    assert_eq!(
        counts,
        OperationCounts {
            allocations: 3,
            refused: 1,
            frees: 2
        }
    );
    assert_eq!(counts.operations(), 5);
    assert_eq!(
        (stats.allocation.all.current, stats.allocation.all.allocated),
        (0, 4),
        "two passes of two allocations"
    );
    let outcomes: Vec<OperationOutcome> =
        seen.ended.iter().map(|&(_, _, outcome)| outcome).collect();
    use OperationOutcome::{Done, Ignored, OutOfMemory};
    assert_eq!(
        outcomes,
        [
            Done,
            OutOfMemory,
            Ignored,
            Ignored,
            Done,
            Done,
            Ignored,
            Done,
            Done
        ]
    );
    assert!(
        seen.ended.iter().map(|&(index, ..)| index).eq(0..9),
        "each operation is seen once, in order"
    );
    assert_eq!(
        seen.begun, 6,
        "ignored operations do not reach the allocator"
    );
}

#[test]
fn freed_ids_share_slots() {
    let text = "a 10 512 0\na 11 1024 0\nf 10\na 12 2048 0\nf 11\nf 12\n";
    let mut device = SimDevice::new(SimConfig::replay(CAPACITY));
    let mut executor =
        Executor::<harness_allocator::allocator::Allocation>::new(&events(text), &mut device)
            .expect("it can be prepared");
    assert_eq!(executor.live.len(), 2, "two are live at a time");
    let mut allocator = CachingAllocator::new(Config::default());
    let mut live_bytes = Vec::new();
    struct Watch<'a>(&'a mut Vec<u64>);
    impl<T: Target> OperationObserver<T> for Watch<'_> {
        type Error = Infallible;
        fn after(
            &mut self,
            _: usize,
            _: Kind,
            _: OperationOutcome,
            target: &mut T,
        ) -> Result<(), Infallible> {
            self.0.push(target.stats().requested_bytes.all.current);
            Ok(())
        }
    }
    let mut target = ByHandle {
        device: &mut device,
        allocator: &mut allocator,
    };
    executor
        .run(&mut target, &mut Watch(&mut live_bytes))
        .expect("the simulated device does not fail");
    assert_eq!(live_bytes, [512, 1536, 1024, 3072, 2048, 0]);
}

#[test]
fn live_ids_cannot_be_allocated() {
    let mut device = SimDevice::new(SimConfig::replay(CAPACITY));
    let mut prepare =
        |text: &str| Executor::<DevicePtr>::new(&events(text), &mut device).map(|_| ());
    assert_eq!(
        prepare("a 7 512 0\nd\na 7 512 0\n"),
        Err(PrepareError::IdReused {
            operation: 3,
            id: 7
        })
    );
    assert_eq!(prepare("a 7 512 0\nf 7\na 7 512 0\n"), Ok(()));
}

#[test]
fn too_many_streams_are_an_error_at_the_first_extra_one() {
    let mut device = SimDevice::new(SimConfig::replay(CAPACITY));
    let mut prepare = |streams: usize| {
        let text: String = (0..=streams)
            .map(|stream| format!("a {stream} 512 {stream}\nf {stream}\n"))
            .collect();
        Executor::<DevicePtr>::new(&events(&text), &mut device)
            .map(|executor| executor.streams().made().count())
    };
    assert_eq!(prepare(MAX_STREAMS), Ok(MAX_STREAMS));
    let refused = prepare(20_000).expect_err("that many are not let in");
    assert_eq!(
        refused,
        PrepareError::TooManyStreams {
            operation: 2 * MAX_STREAMS + 3
        }
    );
    assert_eq!(
        refused.to_string(),
        "operation 2051: a trace may use at most 1024 streams besides the default stream, and this \
         is one more"
    );
}

#[test]
fn misused_private_pools_are_reported_to_the_observer() {
    let (counts, seen, stats) = second_pass("g- 5\ng+ 1\na 1 512 0\ng- 1\ngr 9\nf 1\ngr 1\n");
    assert_eq!(
        counts,
        OperationCounts {
            allocations: 1,
            refused: 0,
            frees: 1
        }
    );
    assert_eq!(seen.misused, [0], "it is not open");
    assert_eq!(
        (seen.ended[0].2, seen.ended[4].2),
        (OperationOutcome::Ignored, OperationOutcome::Ignored),
        "there is no pool 9"
    );
    assert_eq!(
        stats.segment.all.current, 0,
        "releasing the pool freed its memory"
    );
}

#[test]
fn both_interfaces_give_the_same_results() {
    let text = "a 1 512 0\na 2 3000000 1\nr 1 1\nf 1\nx 1048576\nm 0.9\ns 1\nd\ne\np\na 3 512 0\n";
    let (counts, handle, stats) = second_pass(text);
    let mut device = SimDevice::new(SimConfig::replay(CAPACITY));
    let mut executor =
        Executor::new(&events(text), &mut device).expect("the trace can be prepared");
    let allocator = SharedAllocator::new(CachingAllocator::new(Config::default()), device);
    let mut target = ByPointer(&allocator);
    executor
        .pass(&mut target, &mut Unobserved)
        .expect("the simulated device does not fail");
    let mut shared = Seen::default();
    assert_eq!(
        executor
            .pass(&mut target, &mut shared)
            .expect("the simulated device does not fail"),
        counts
    );
    assert_eq!((shared.ended, target.stats()), (handle.ended, stats));
}

#[test]
fn observers_stop_runs_and_failures_name_their_operation() {
    struct Stop;
    impl<T: Target> OperationObserver<T> for Stop {
        type Error = &'static str;
        fn after(
            &mut self,
            index: usize,
            _: Kind,
            _: OperationOutcome,
            _: &mut T,
        ) -> Result<(), &'static str> {
            if index == 1 { Err("enough") } else { Ok(()) }
        }
    }
    let mut device = SimDevice::new(SimConfig::replay(CAPACITY));
    let mut executor = Executor::new(&events("a 1 512 0\nd\nf 1\n"), &mut device)
        .expect("the trace can be prepared");
    let mut allocator = CachingAllocator::new(Config::default());
    let stopped = executor.run(
        &mut ByHandle {
            device: &mut device,
            allocator: &mut allocator,
        },
        &mut Stop,
    );
    assert_eq!(stopped, Err(PassStopped::Observer("enough")));
    // A stream that does not exist.
    executor.operations = vec![
        Operation::Rare(Rare::Ignored),
        Operation::Rare(Rare::Other(TraceEvent::SynchronizeStream(StreamId(99)))),
    ]
    .into();
    let failed = executor.run(
        &mut ByHandle {
            device: &mut device,
            allocator: &mut allocator,
        },
        &mut Unobserved,
    );
    assert!(
        matches!(failed, Err(PassStopped::Device { operation: 2, .. })),
        "{failed:?}"
    );
}
