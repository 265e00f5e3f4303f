//! Records our own allocators. The events must match the counters and the final state.

use std::ops::ControlFlow;

use harness_allocator::allocator::caching::{CachingAllocator, Config};
use harness_allocator::allocator::{Allocator, AllocatorKind, AllocatorSpec};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::{stats::BlockState, units::Bytes};
use harness_trace::execute::{ByHandle, Executor, Unobserved};
use harness_trace::program::{Placement, RecordedProgram, ReplaySetup};
use harness_trace::snapshot::{
    Action, ExtraId, Frame, RecordedSettings, Recorder, Recording, Snapshot, Value,
};
use harness_trace::trace::{self, TraceEvent};

/// Covers splits, both pools, a pending free on two streams, an OOM that empties the cache,
/// `empty_cache`, and a private pool.
const PROGRAM: &str = "a 1 1000 0\na 2 3000000 0\na 3 5000000 0\nf 2\na 4 700000 0\na 5 30000000 \
     1\nr 5 0\nf 5\na 6 2000000 1\nd\na 7 12000000 1\n\
                       f 3\na 8 90000000 0\na 9 0 0\ng+ 1\na 10 4000000 0\ng- 1\nf 6\ne\na 11 600 \
                       1\nf 11\na 12 20000000 0\nr 12 1\nf 12\n";

const MEMORY: Bytes = Bytes::mib(100);

/// Runs the program on a recorded allocator. Returns the snapshot and the final statistics.
fn recorded(
    allocator: Box<dyn Allocator>,
    conf: &str,
) -> (Snapshot, harness_allocator::stats::MemoryStats) {
    let settings = RecordedSettings::new(vec![(
        "PYTORCH_CUDA_ALLOC_CONF".to_owned(),
        Value::Text(conf.to_owned()),
    )]);
    let recorder = Recorder::new(Some(settings));
    recorder.set_place([Frame {
        name: "step 1".to_owned(),
        file: "program.yaml".to_owned(),
        line: 7,
        extra: ExtraId::NONE,
    }]);
    recorder.set_time(5);
    let mut device = SimDevice::new(SimConfig::replay(MEMORY));
    let events = trace::parse(PROGRAM).unwrap();
    let mut executor = Executor::new(&events, &mut device).unwrap();
    let mut allocator = recorder.around(allocator);
    // `run` keeps blocks that the program does not free.
    executor
        .run(
            &mut ByHandle {
                device: &mut device,
                allocator: &mut allocator,
            },
            &mut Unobserved,
        )
        .unwrap();
    (recorder.snapshot(&allocator), allocator.stats())
}

fn count(snapshot: &Snapshot, action: Action) -> u64 {
    snapshot.traces[0]
        .iter()
        .filter(|event| event.action == action)
        .count() as u64
}

#[test]
fn events_match_the_allocators_counters() {
    for conf in ["", "max_split_size_mb:20", "expandable_segments:True"] {
        let (snapshot, stats) = recorded(
            Box::new(CachingAllocator::new(Config::parse(conf).unwrap())),
            conf,
        );
        let live: u64 = snapshot
            .segments
            .iter()
            .flat_map(|segment| &segment.blocks)
            .filter(|block| block.state == BlockState::Allocated)
            .count() as u64;
        assert_eq!(
            count(&snapshot, Action::Alloc),
            stats.allocation.all.allocated,
            "{conf}"
        );
        assert_eq!(
            count(&snapshot, Action::FreeRequested),
            stats.allocation.all.freed,
            "{conf}"
        );
        assert_eq!(
            count(&snapshot, Action::FreeCompleted),
            stats.active.all.freed,
            "{conf}"
        );
        assert_eq!(count(&snapshot, Action::Oom), stats.num_ooms, "{conf}");
        assert_eq!(
            (count(&snapshot, Action::Oom), live),
            (1, stats.allocation.all.current),
            "{conf}"
        );
        if conf != "expandable_segments:True" {
            assert_eq!(
                count(&snapshot, Action::SegmentAlloc),
                stats.num_device_alloc,
                "{conf}"
            );
            assert_eq!(
                count(&snapshot, Action::SegmentFree),
                stats.num_device_free,
                "{conf}"
            );
        }
        let mapped = |action| {
            snapshot.traces[0]
                .iter()
                .filter(|event| event.action == action)
                .map(|event| event.size.0)
                .sum::<u64>()
        };
        let taken = mapped(Action::SegmentAlloc) + mapped(Action::SegmentMap)
            - mapped(Action::SegmentFree)
            - mapped(Action::SegmentUnmap);
        assert_eq!(taken, stats.reserved_bytes.all.current, "{conf}");
        assert_eq!(
            snapshot.recording(0),
            Some(Recording {
                from_start: true,
                events_lost: false,
                missing: Vec::new()
            }),
            "{conf}"
        );
        assert!(
            snapshot.traces[0].iter().all(|event| snapshot
                .stacks
                .frames(event.stack)
                .next()
                .is_some_and(|frame| frame.line == 7)),
            "{conf}"
        );
    }
}

#[test]
fn a_recorded_run_survives_writing_and_reading() {
    let (snapshot, _) = recorded(AllocatorKind::Caching.build(), "");
    let mut written = Vec::new();
    snapshot.write(&mut written).unwrap();
    let read = Snapshot::parse(&written).unwrap();
    assert_eq!(
        (&read.segments, &read.traces, &read.settings),
        (&snapshot.segments, &snapshot.traces, &snapshot.settings)
    );
    assert_eq!(read.stacks, snapshot.stacks);
}

#[test]
fn recovered_programs_allocate_at_the_recorded_addresses() {
    for conf in ["", "max_split_size_mb:20", "expandable_segments:True"] {
        let config = Config::parse(conf).unwrap();
        let (snapshot, _) = recorded(Box::new(CachingAllocator::new(config.clone())), conf);
        let program = RecordedProgram::recover_with(&snapshot, 0, Some(MEMORY)).unwrap();
        let setup = ReplaySetup {
            allocator: AllocatorSpec::caching(config),
            memory: MEMORY,
            placement: Placement::Recorded,
        };
        let mut addresses = Vec::new();
        let prepared = program.prepare().unwrap();
        prepared
            .watch(&setup, |step| {
                addresses.extend(
                    step.address
                        .filter(|_| {
                            matches!(
                                program.operations[step.operation],
                                TraceEvent::Allocate { .. }
                            )
                        })
                        .map(|address| address.0),
                );
                ControlFlow::Continue(())
            })
            .unwrap();
        let allocations = snapshot.traces[0]
            .iter()
            .filter(|event| event.action == Action::Alloc);
        assert_eq!(
            addresses,
            allocations.map(|event| event.address).collect::<Vec<_>>(),
            "{conf}"
        );
    }
}

#[test]
fn every_allocator_can_be_recorded() {
    for kind in [
        AllocatorKind::Caching,
        AllocatorKind::Direct,
        AllocatorKind::Bfc,
        AllocatorKind::RmmPool,
        AllocatorKind::RmmArena,
        AllocatorKind::RmmBinning,
        AllocatorKind::OrtArena,
        AllocatorKind::XlaBfc,
        AllocatorKind::CupyPool,
    ] {
        let (snapshot, stats) = recorded(kind.build(), "");
        assert_eq!(
            count(&snapshot, Action::Alloc),
            stats.allocation.all.allocated,
            "{kind:?}"
        );
        assert_eq!(
            count(&snapshot, Action::FreeRequested),
            stats.allocation.all.freed,
            "{kind:?}"
        );
    }
}
