//! Recorded runs: the snapshot has the line of each step, the buffer, pool and stream of each
//! event, and the state before the final frees. Recording does not change the run.

use std::path::Path;
use std::sync::{Arc, atomic::AtomicBool};

use harness_allocator::allocator::{AllocatorKind, AllocatorSpec};
use harness_allocator::{stats::BlockState, units::Bytes};
use harness_record::{RunRecord, Verdict};
use harness_run::control::Control;
use harness_run::run::{Run, RunObserver, RunRequest};
use harness_scenario::Scenario;
use harness_trace::snapshot::{Action, Event, Snapshot};

use crate::{program::request, watched::Watched};

/// Runs a scenario with one allocator, recorded or not. `at` is the device allocation that
/// interrupts it, if any.
fn ran(
    text: &str,
    kind: AllocatorKind,
    is_recorded: bool,
    at: u64,
) -> (RunRecord, Option<Snapshot>) {
    let scenario = Scenario::parse(text, Path::new("dir/test.yaml"))
        .unwrap_or_else(|error| panic!("{error}\n{text}"));
    let allocator = AllocatorSpec::from(kind);
    let interrupt = Arc::new(AtomicBool::new(false));
    let request = RunRequest {
        seed: 1,
        interrupt: Arc::clone(&interrupt),
        ..request(&scenario, &allocator)
    };
    let (device, _) = Watched::new(scenario.needs.memory, Arc::clone(&interrupt), at);
    let mut snapshot = None;
    let mut keep = |recorded| snapshot = Some(recorded);
    let observer = RunObserver {
        control: Arc::new(Control::new(interrupt)),
        only_observed: false,
        emit: None,
        record: is_recorded.then_some(&mut keep),
    };
    let record = Run::new(&request, Box::new(device))
        .observed(observer)
        .checked()
        .unwrap();
    (record, snapshot)
}

fn recorded(text: &str, kind: AllocatorKind) -> (RunRecord, Snapshot) {
    let (record, snapshot) = ran(text, kind, true, 0);
    (record, snapshot.unwrap())
}

/// The events of one action, each as its label, its size in MiB and its frames: `kv[0] 8
/// test.yaml:6 alloc kv[i] < test.yaml:5 for`.
fn told(snapshot: &Snapshot, action: Action) -> Vec<String> {
    let label = |event: &Event| match snapshot.extras.value(event.extra, "user_metadata") {
        Some(label) => label.as_text().unwrap().to_owned(),
        None => "-".to_owned(),
    };
    let frames = |event: &Event| {
        let frames = snapshot.stacks.frames(event.stack);
        let frames = frames.map(|frame| {
            format!(
                "{}:{} {}",
                frame.file.trim_start_matches("dir/"),
                frame.line,
                frame.name
            )
        });
        frames.collect::<Vec<_>>().join(" < ")
    };
    let events = snapshot.traces[0]
        .iter()
        .filter(|event| event.action == action);
    events
        .map(|event| format!("{} {} {}", label(event), event.size.0 >> 20, frames(event)))
        .collect()
}

const NESTED: &str = "about: A test.
needs: { memory: 256MiB }
streams: [side]
steps:
  - for: { i: 0..1 }
    steps:
      - alloc: { buffer: 'kv[i]', size: 24MiB, stream: side }
      - repeat: 2
        steps:
          - alloc: { buffer: step, size: 30MiB }
          - free: step
  - private_pool: graph
    steps:
      - alloc: { buffer: static, size: 40MiB }
  - alloc: { buffer: large, size: 200MiB, expect: oom }
  - storm: { id: noise, operations: 3, sizes: { min: 1MiB, max: 2MiB }, live: 8MiB, \
        lifetime: { min: 9, max: 9 } }
";

#[test]
fn each_event_has_the_lines_of_its_step_and_of_the_blocks_around_it_and_its_buffer() {
    let (record, snapshot) = recorded(NESTED, AllocatorKind::Caching);
    assert_eq!(record.verdict, Verdict::Passed);
    let kv = "test.yaml:7 alloc kv[i] < test.yaml:5 for";
    let step = "test.yaml:10 alloc step < test.yaml:8 repeat < test.yaml:5 for";
    let storm = "test.yaml:16 storm noise";
    assert_eq!(
        told(&snapshot, Action::Alloc),
        [
            format!("kv[0] 24 {kv}"),
            format!("step 30 {step}"),
            format!("step 30 {step}"),
            format!("kv[1] 24 {kv}"),
            format!("step 30 {step}"),
            format!("step 30 {step}"),
            "static 40 test.yaml:14 alloc static < test.yaml:12 private_pool graph".to_owned(),
            format!("noise 1 {storm}"),
            format!("noise 1 {storm}"),
            format!("noise 1 {storm}"),
        ]
    );
    assert_eq!(
        told(&snapshot, Action::FreeRequested)[0],
        "step 30 test.yaml:11 free < test.yaml:8 repeat < test.yaml:5 for"
    );
    assert_eq!(
        told(&snapshot, Action::Oom),
        ["large 200 test.yaml:15 alloc large"]
    );
}

#[test]
fn each_event_has_a_stream_a_private_pool_and_an_increasing_time() {
    let (_, snapshot) = &recorded(NESTED, AllocatorKind::Caching);
    let of = |line| {
        snapshot.traces[0]
            .iter()
            .filter(move |event| snapshot.stacks.frames(event.stack).next().unwrap().line == line)
    };
    assert!(of(7).all(|event| event.stream == 1) && of(10).all(|event| event.stream == 0));
    let pools = |line| {
        of(line)
            .map(|event| snapshot.pool_of(event).unwrap())
            .map(|pool| (pool.0, pool.1))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (pools(14), pools(15)),
        (vec![(0, 2), (0, 2)], vec![(0, 0), (0, 0)]),
        "the memory and the block; first the release, then the refusal"
    );
    let private = snapshot
        .segments
        .iter()
        .find(|segment| (segment.private_pool.0, segment.private_pool.1) == (0, 2))
        .unwrap();
    assert_eq!(private.size, Bytes::mib(40));
    let times: Vec<u64> = snapshot.traces[0]
        .iter()
        .map(|event| event.time_us.unwrap())
        .collect();
    assert!(
        times.is_sorted() && times.last() > times.first(),
        "{times:?}"
    );
    let run = snapshot.run().unwrap();
    assert_eq!(
        (
            run.scenario.as_str(),
            run.allocator.as_str(),
            run.is_pytorchs
        ),
        ("test", "caching", true)
    );
}

#[test]
fn a_recorded_run_is_the_same_run() {
    for kind in AllocatorKind::ALL
        .iter()
        .copied()
        .filter(|kind| kind.not_recorded().is_none() && kind.is_pytorch())
    {
        let ((plain, nothing), (recorded, snapshot)) =
            (ran(NESTED, kind, false, 0), ran(NESTED, kind, true, 0));
        assert_eq!(plain, recorded, "{kind:?}");
        assert!(nothing.is_none() && snapshot.is_some(), "{kind:?}");
    }
}

/// A live block, cached memory, and a request that fails for good.
const FAILING: &str = "about: A test.
needs: { memory: 64MiB }
allocators: [caching, expandable, bfc, rmm_pool, direct]
steps:
  - alloc: { buffer: kept, size: 20MiB }
  - alloc: { buffer: large, size: 60MiB }
  - alloc: { buffer: never, size: 1MiB }
";

#[test]
fn a_run_that_fails_is_recorded_up_to_the_refused_request_with_every_allocator_that_has_segments() {
    for kind in AllocatorKind::ALL
        .iter()
        .copied()
        .filter(|kind| kind.not_recorded().is_none())
    {
        let (record, snapshot) = recorded(FAILING, kind);
        assert!(matches!(record.verdict, Verdict::Failed { .. }), "{kind:?}");
        let last = snapshot.traces[0].last().unwrap();
        assert_eq!(
            (last.action, last.size),
            (Action::Oom, Bytes::mib(60)),
            "{kind:?}"
        );
        let blocks = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
        let live: Bytes = blocks
            .filter(|block| block.state == BlockState::Allocated)
            .map(|block| block.requested)
            .sum();
        assert_eq!(live, Bytes::mib(20), "{kind:?}");
        let reserved: Bytes = snapshot.segments.iter().map(|segment| segment.size).sum();
        assert_eq!(
            reserved.0, record.stats.reserved_bytes.all.current,
            "{kind:?}"
        );
    }
}

#[test]
fn a_run_that_is_interrupted_is_recorded_up_to_there() {
    let interrupt_at = 2;
    let (record, snapshot) = ran(NESTED, AllocatorKind::Caching, true, interrupt_at);
    assert_eq!(record.verdict, Verdict::Interrupted);
    let snapshot = snapshot.unwrap();
    assert!(!snapshot.traces[0].is_empty() && told(&snapshot, Action::Oom).is_empty());
    assert_eq!(
        told(&snapshot, Action::SegmentAlloc).len() as u64,
        interrupt_at
    );
}

/// During a storm, another task allocates. A second program allocates too, but is not recorded.
const MEANWHILE: &str = "about: A test.
needs: { memory: 256MiB }
programs: [other]
steps:
  - program: other
    steps:
      - alloc: { buffer: theirs, size: 30MiB }
  - storm: { id: noise, operations: 2, sizes: { min: 1MiB, max: 2MiB }, live: 8MiB, \
        lifetime: { min: 9, max: 9 } }
    meanwhile:
      - alloc: { buffer: beside, size: 12MiB }
";

#[test]
fn a_recording_contains_meanwhile_steps_but_not_other_programs() {
    let (record, snapshot) = recorded(MEANWHILE, AllocatorKind::Caching);
    assert_eq!(record.verdict, Verdict::Passed);
    assert_eq!(
        told(&snapshot, Action::Alloc),
        [
            "noise 1 test.yaml:8 storm noise",
            "beside 12 test.yaml:10 alloc beside",
            "noise 1 test.yaml:8 storm noise"
        ]
    );
}
