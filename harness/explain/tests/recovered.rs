//! Programs made up at random, recorded as PyTorch records them, recovered from the recording and replayed: whatever a program did, the replay must
//! do what the recording has.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use harness_allocator::allocator::AllocatorSpec;
use harness_allocator::allocator::caching::Config;
use harness_allocator::units::Bytes;
use harness_explain::fidelity;
use harness_trace::execute::Outcome;
use harness_trace::job::{DriverCall, Job, Placement, Setup};
use harness_trace::snapshot::{Action, Event, ExtraId, Settings, Snapshot, StackId};
use harness_trace::trace::{self, TraceEvent};
use proptest::prelude::*;

const MEMORY: Bytes = Bytes::mib(160);
const CONFS: [&str; 6] = [
    "",
    "max_split_size_mb:32",
    "roundup_power2_divisions:4",
    "expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:32",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.9",
];

/// Some lines of a trace, with numbers to choose ids by.
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

/// What PyTorch would have recorded of a program that does without whatever it is refused.
fn recorded(program: &str, conf: &str) -> Snapshot {
    let config = Config::parse(conf).expect("a setting");
    let mut job = Job::from_trace(&trace::parse(program).expect("a trace"), config.clone()).expect("a job");
    job.allocations.iter_mut().for_each(|allocation| allocation.refused = true);
    let setup = Setup { allocator: AllocatorSpec::caching(config), memory: MEMORY, placement: Placement::Rising };
    let (mut events, mut addresses) = (Vec::new(), vec![None; job.allocations.len()]);
    let mut taken_for: BTreeMap<u64, u64> = BTreeMap::new();
    let mut add = |action, address, size, stream| {
        let (time_us, stack, extra) = (None, StackId::EMPTY, ExtraId::NONE);
        events.push(Event { action, address, size, stream, time_us, stack, extra });
    };
    let prepared = job.prepare().expect("it can run");
    let (_, segments) = prepared.segments_after(&setup, usize::MAX).expect("it can run");
    let watched = prepared.watch(&setup, |step| {
        let operation = job.operations[step.operation];
        for call in step.driver {
            let (action, range) = match *call {
                DriverCall::Malloc(range) => (Action::SegmentAlloc, range),
                DriverCall::Free(range) => (Action::SegmentFree, range),
                DriverCall::Map(range) => (Action::SegmentMap, range),
                DriverCall::Unmap(range) => (Action::SegmentUnmap, range),
            };
            let mut stream = taken_for.range(..=range.start.0).next_back().map_or(0, |(_, &stream)| stream);
            if let (Action::SegmentAlloc | Action::SegmentMap, TraceEvent::Allocate { stream: of, .. }) = (action, operation) {
                stream = job.streams[of.0 as usize];
                taken_for.insert(range.start.0, stream);
            }
            add(action, range.start.0, range.len, stream);
        }
        match operation {
            TraceEvent::Allocate { id, size, stream } if step.outcome == Outcome::Done => {
                let address = step.address.expect("it was allocated").0;
                addresses[id as usize] = Some((address, size, job.streams[stream.0 as usize]));
                add(Action::Alloc, address, size, job.streams[stream.0 as usize]);
            }
            TraceEvent::Allocate { size, stream, .. } => {
                let reserved = step.allocator.stats().reserved_bytes.all.current;
                add(Action::Oom, MEMORY.0 - reserved, size, job.streams[stream.0 as usize]);
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
    let settings = Some(Settings { conf: conf.to_owned(), all: Vec::new() });
    Snapshot { segments, traces: vec![events], settings, ..Snapshot::default() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    #[test]
    fn whatever_a_program_did_its_recovered_job_does_what_was_recorded(program in a_program(), conf in prop::sample::select(&CONFS[..])) {
        let snapshot = recorded(&program, conf);
        let job = Job::recover_with(&snapshot, 0, Some(MEMORY)).expect("a job");
        let prepared = job.prepare().expect("it can be replayed");
        let fidelity = fidelity::check(&prepared, &snapshot).expect("it can be replayed");
        prop_assert!(fidelity.faithful, "{fidelity:?} of {:?}", job.operations);
        let count = |action| snapshot.traces[0].iter().filter(|event| event.action == action).count() as u64;
        prop_assert_eq!((fidelity.allocations, fidelity.segments), (count(Action::Alloc), count(Action::SegmentAlloc) + count(Action::SegmentMap)));
    }
}
