//! Runs random programs, records them like PyTorch, recovers them and replays them. The replay must
//! match the recording.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;

use harness_allocator::allocator::{AllocatorSpec, caching::Config};
use harness_allocator::device::sim::AddressOrder;
use harness_allocator::units::Bytes;
use harness_explain::fidelity::{self, Fidelity};
use harness_trace::execute::OperationOutcome;
use harness_trace::program::{DriverCall, Note, Placement, RecordedProgram, ReplaySetup};
use harness_trace::snapshot::{Action, Event, ExtraId, RecordedSettings, Snapshot, StackId};
use harness_trace::trace::{self, TraceEvent};
use proptest::{prelude::*, test_runner::RngSeed};

const MEMORY: Bytes = Bytes::mib(160);
const CONFS: [&str; 6] = [
    "",
    "max_split_size_mb:32",
    "roundup_power2_divisions:4",
    "expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:32",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.9",
];

/// Random lines of a trace; numbers choose the ids.
fn a_program() -> impl Strategy<Value = String> {
    let size = prop_oneof![3 => 1_u64..9000, 2 => 1_u64 << 19..3 << 20, 3 => 6_u64 << 20..40 << 20];
    let step = (0..20_u32, size, any::<prop::sample::Index>(), 0..3_u32);
    prop::collection::vec(step, 1..120).prop_map(|steps| {
        let (mut text, mut live, mut next) = ("a 0 512 0\n".to_owned(), vec![0], 1);
        for (kind, size, which, stream) in steps {
            match kind {
                0 => text += "e\n",
                1..8 if !live.is_empty() => {
                    let id: u32 = live.swap_remove(which.index(live.len()));
                    text += &format!("f {id}\n");
                }
                _ => {
                    text += &format!("a {next} {size} {}\n", if stream == 2 { 7 } else { 0 });
                    live.push(next);
                    next += 1;
                }
            }
        }
        text
    })
}

/// The snapshot that PyTorch would write. The program ignores OOMs.
fn recorded(program: &str, conf: &str) -> Snapshot {
    let config = Config::parse(conf).expect("a setting");
    let mut program =
        RecordedProgram::from_trace(&trace::parse(program).expect("a trace"), config.clone())
            .expect("a program");
    program
        .allocations
        .iter_mut()
        .for_each(|allocation| allocation.refused = true);
    let setup = ReplaySetup {
        allocator: AllocatorSpec::caching(config),
        memory: MEMORY,
        placement: Placement::InOrder(AddressOrder::Up),
    };
    let (mut events, mut addresses) = (Vec::new(), vec![None; program.allocations.len()]);
    let mut taken_for: BTreeMap<u64, u64> = BTreeMap::new();
    let mut add = |action, address, size, stream| {
        let (time_us, stack, extra) = (None, StackId::EMPTY, ExtraId::NONE);
        events.push(Event {
            action,
            address,
            size,
            stream,
            time_us,
            stack,
            extra,
        });
    };
    let prepared = program.prepare().expect("it can run");
    let mut segments = Vec::new();
    let watched = prepared.watch(&setup, |step| {
        segments = step
            .allocator
            .snapshot()
            .iter()
            .map(|segment| program.for_snapshot(segment, &HashMap::new()))
            .collect();
        let operation = program.operations[step.operation];
        for call in step.driver {
            let DriverCall { action, range } = *call;
            let mut stream = taken_for
                .range(..=range.start.0)
                .next_back()
                .map_or(0, |(_, &stream)| stream);
            if let (
                Action::SegmentAlloc | Action::SegmentMap,
                TraceEvent::Allocate { stream: of, .. },
            ) = (action, operation)
            {
                stream = program.streams[of.0 as usize];
                taken_for.insert(range.start.0, stream);
            }
            add(action, range.start.0, range.len, stream);
        }
        match operation {
            TraceEvent::Allocate { id, size, stream } if step.outcome == OperationOutcome::Done => {
                let address = step.address.expect("it was allocated").0;
                addresses[id as usize] = Some((address, size, program.streams[stream.0 as usize]));
                add(
                    Action::Alloc,
                    address,
                    size,
                    program.streams[stream.0 as usize],
                );
            }
            TraceEvent::Allocate { size, stream, .. } => {
                let reserved = step.allocator.stats().reserved_bytes.all.current;
                add(
                    Action::Oom,
                    MEMORY.0 - reserved,
                    size,
                    program.streams[stream.0 as usize],
                );
            }
            TraceEvent::Free { id } => {
                if let Some((address, size, stream)) = addresses[id as usize] {
                    add(Action::FreeRequested, address, size, stream);
                    add(Action::FreeCompleted, address, size, stream);
                }
            }
            _ => {}
        }
        ControlFlow::Continue(())
    });
    watched.expect("it can run");
    let settings = Some(RecordedSettings {
        conf: conf.to_owned(),
        all: Vec::new(),
    });
    Snapshot {
        segments,
        traces: vec![events],
        settings,
        ..Snapshot::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    #[test]
    fn recovered_programs_match_their_recordings(
        program in a_program(), conf in prop::sample::select(&CONFS[..])
    ) {
        let snapshot = recorded(&program, conf);
        let program = RecordedProgram::recover_with(&snapshot, 0, Some(MEMORY)).expect("a program");
        let prepared = program.prepare().expect("it can be replayed");
        let fidelity = fidelity::check(&prepared, &snapshot).expect("it can be replayed");
        prop_assert!(fidelity.faithful, "{fidelity:?} of {:?}", program.operations);
        let count = |action| {
            snapshot.traces[0].iter().filter(|event| event.action == action).count() as u64
        };
        prop_assert_eq!(
            (fidelity.allocations, fidelity.segments),
            (count(Action::Alloc), count(Action::SegmentAlloc) + count(Action::SegmentMap))
        );
    }
}

/// Starts the recording at a later event, but not between driver calls and their request.
fn begun_late(mut snapshot: Snapshot, at: prop::sample::Index) -> Snapshot {
    let events = &mut snapshot.traces[0];
    let of_driver = |event: &Event| {
        matches!(
            event.action,
            Action::SegmentAlloc | Action::SegmentFree | Action::SegmentMap | Action::SegmentUnmap
        )
    };
    let begins = |index: usize| index == 0 || !of_driver(&events[index - 1]);
    let skipped = (0..=at.index(events.len()))
        .rfind(|&index| begins(index))
        .unwrap_or_default();
    events.drain(..skipped);
    snapshot
}

/// A recording lacks the age of free blocks, so garbage collection after a late start is unknown.
const WITHOUT_COLLECTION: [&str; 5] = [CONFS[0], CONFS[1], CONFS[2], CONFS[3], CONFS[4]];

proptest! {
    // The owner of a remainder is sometimes ambiguous, so a few in ten thousand programs differ.
    // These are examples.
    #![proptest_config(ProptestConfig { cases: 1000, rng_seed: RngSeed::Fixed(2026),
        ..ProptestConfig::default() })]
    #[test]
    fn late_recordings_are_replayed_as_recorded(
        program in a_program(),
        conf in prop::sample::select(&WITHOUT_COLLECTION[..]),
        at in any::<prop::sample::Index>(),
        memory_is_known in any::<bool>(),
    ) {
        let snapshot = begun_late(recorded(&program, conf), at);
        let program =
            RecordedProgram::recover_with(&snapshot, 0, memory_is_known.then_some(MEMORY))
                .expect("a program");
        let fidelity = fidelity::check(&program.prepare().expect("it can be replayed"), &snapshot)
            .expect("it can be replayed");
        prop_assert!(fidelity.faithful, "{fidelity:?} of {:?}", program.operations);
    }
}

/// A late recording with expandable segments, after `before` unmapped the first pages, recovered
/// with its fidelity.
fn behind_an_unmapped_front(after: &str) -> (RecordedProgram, Fidelity) {
    let before = "a 0 41943040 0\na 1 41943040 0\nf 0\ne\n";
    let conf = "expandable_segments:True";
    let skipped = recorded(before, conf).traces[0].len();
    let mut snapshot = recorded(&format!("{before}{after}"), conf);
    snapshot.traces[0].drain(..skipped);
    let program = RecordedProgram::recover_with(&snapshot, 0, Some(MEMORY)).expect("a program");
    let fidelity = fidelity::check(&program.prepare().expect("it can be replayed"), &snapshot)
        .expect("it can be replayed");
    (program, fidelity)
}

#[test]
fn the_lowest_mapping_shows_the_start_of_a_reservation() {
    let (program, fidelity) = behind_an_unmapped_front("a 2 31457280 0\n");
    let first_mapped = program.start[0].address;
    assert_eq!(
        program.reserved_at_start[0].start.0,
        first_mapped - (40 << 20),
        "two pages of 20 MiB were unmapped"
    );
    assert!(
        fidelity.faithful
            && !program
                .notes
                .iter()
                .any(|note| matches!(note, Note::ReservationsUnknown { .. })),
        "{:?}",
        program.notes
    );
}

#[test]
fn unknown_starts_of_reservations_are_noted() {
    let (program, fidelity) = behind_an_unmapped_front("f 1\na 2 31457280 0\n");
    assert_eq!(
        program.reserved_at_start[0].start.0,
        program.start[0].address
    );
    assert!(
        fidelity.faithful
            && program
                .notes
                .contains(&Note::ReservationsUnknown { segments: 1 }),
        "{:?}",
        program.notes
    );
}
