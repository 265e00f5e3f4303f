use std::sync::Arc;

use harness_allocator::allocator::{Allocation, Allocator, AllocatorError, Request, wrapper};
use harness_allocator::device::{Device, DeviceError};
use harness_allocator::stats::{MemoryStats, PoolKind};
use harness_devices::DeviceSource;
use harness_record::{CauseKind, Invariant, RunRecord};
use harness_run::run::{Run, RunRequest};
use harness_scenario::Scenario;

use std::ops::ControlFlow;

use super::*;
use crate::ReductionProgress;

const FRAGMENTED: TraceFailure = TraceFailure::Refused {
    cause: Some(CauseKind::Fragmented),
    is_mostly_cached: true,
    exceeds_device: false,
};
const TOO_LARGE: TraceFailure = too_large(false);

const fn too_large(exceeds_device: bool) -> TraceFailure {
    TraceFailure::Refused {
        cause: Some(CauseKind::TooLarge),
        is_mostly_cached: false,
        exceeds_device,
    }
}

fn case(text: &str, memory: Bytes) -> TraceCase {
    TraceCase {
        events: harness_trace::trace::parse(text).expect("a trace"),
        config: Config::default(),
        memory,
    }
}

fn go_on(_: &ReductionProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn text(shrunk: &Shrunk) -> Vec<String> {
    shrunk.case.events.iter().map(ToString::to_string).collect()
}

/// Blocks of about 3 MiB pin sixteen segments of 60 MiB when 90 MiB are requested. Much else is
/// irrelevant.
fn fragmented() -> TraceCase {
    const MIB: u64 = 1 << 20;
    let mut text = String::from("p\nm 1\n");
    for number in 0..16_u64 {
        let [large, small, rest, other] = [0, 1, 2, 3].map(|place| number * 4 + place);
        text += &format!(
            "a {large} {} 0\nf {large}\na {small} {} 0\na {rest} {} 0\n",
            60 * MIB,
            3 * MIB - 5000,
            57 * MIB
        );
        text += &format!("a {other} 4000 0\ns 0\nf {other}\n");
    }
    text.extend((0..16).map(|number| format!("f {}\n", number * 4 + 2)));
    case(
        &(text + &format!("a 1000 {} 0\nd\n", 90 * MIB)),
        Bytes::mib(1000),
    )
}

#[test]
fn a_fragmented_trace_reduces_to_one_pinned_segment() {
    let given = fragmented();
    let shrunk = shrink(given.clone(), &TraceGoal::Oom, &mut go_on).expect("it runs out of memory");
    assert_eq!((shrunk.failure, shrunk.is_stopped), (FRAGMENTED, false));
    assert!(shrunk.case.events.len() <= 4, "{:?}", text(&shrunk));
    assert!(shrunk.case.memory < given.memory);
    let again = shrink(shrunk.case.clone(), &TraceGoal::Oom, &mut go_on).expect("it still does");
    assert_eq!(again.failure, FRAGMENTED);
    assert_eq!(
        shrunk,
        shrink(given, &TraceGoal::Oom, &mut go_on).expect("the same"),
        "the same trace comes down to the same one"
    );
}

#[test]
fn events_keep_their_original_index() {
    let given = fragmented();
    let shrunk = shrink(given.clone(), &TraceGoal::Oom, &mut go_on).expect("it runs out of memory");
    for (event, &origin) in shrunk.case.events.iter().zip(&shrunk.origins) {
        assert_eq!(
            std::mem::discriminant(event),
            std::mem::discriminant(&given.events[origin])
        );
    }
    assert_eq!(shrunk.origins.last(), Some(&(given.events.len() - 2)));
}

#[test]
fn a_too_large_program_stays_too_large() {
    let given = case(
        "a 1 60000000 0\na 2 60000000 0\na 3 60000000 7\n",
        Bytes::mib(128),
    );
    let shrunk = shrink(given, &TraceGoal::Oom, &mut go_on).expect("too large");
    assert_eq!(shrunk.failure, TOO_LARGE);
    assert_eq!(
        text(&shrunk).len(),
        2,
        "one block in the way of a request: {:?}",
        text(&shrunk)
    );
    let shrunk = shrink(
        case("a 1 60000000 0\na 2 600000000 0\n", Bytes::mib(128)),
        &TraceGoal::Oom,
        &mut go_on,
    )
    .expect("much too large");
    assert_eq!(
        (shrunk.failure, shrunk.case.events.len()),
        (too_large(true), 1)
    );
}

#[test]
fn a_passing_input_cannot_be_reduced() {
    let error = shrink(
        case("a 1 1000 0\n", Bytes::mib(64)),
        &TraceGoal::Oom,
        &mut go_on,
    )
    .expect_err("it fits");
    assert_eq!(
        error,
        ShrinkError::Fits {
            memory: Bytes::mib(64)
        }
    );
    let same = TraceGoal::ConfDiffers(Box::default());
    let error = shrink(fragmented(), &same, &mut go_on).expect_err("the same settings twice");
    assert_eq!(error, ShrinkError::EndsAlike { both_fail: true });
}

#[test]
fn the_same_setting_keeps_failing() {
    let expandable = Config {
        expandable_segments: true,
        ..Config::default()
    };
    let shrunk = shrink(
        fragmented(),
        &TraceGoal::ConfDiffers(Box::new(expandable.clone())),
        &mut go_on,
    )
    .expect("they differ");
    assert!(
        shrunk.fails_under_its_own && shrunk.case.events.len() <= 4,
        "{:?}",
        text(&shrunk)
    );
    assert_eq!(shrunk.other, Some(expandable.clone()));
    let other_way = TraceCase {
        config: expandable,
        ..fragmented()
    };
    let shrunk = shrink(
        other_way,
        &TraceGoal::ConfDiffers(Box::default()),
        &mut go_on,
    )
    .expect("they differ");
    assert!(!shrunk.fails_under_its_own);
}

#[test]
fn irrelevant_settings_and_streams_are_removed() {
    let config = Config {
        garbage_collection_threshold: Some(0.8),
        max_split_size: Some(Bytes::mib(512)),
        ..Config::default()
    };
    let mut given = TraceCase {
        config,
        ..fragmented()
    };
    for event in &mut given.events {
        if let TraceEvent::Allocate { stream, .. } = event {
            *stream = harness_allocator::device::StreamId(9);
        }
    }
    let shrunk = shrink(given, &TraceGoal::Oom, &mut go_on).expect("it runs out of memory");
    assert_eq!(shrunk.case.config, Config::default());
    assert!(
        text(&shrunk).iter().all(|event| !event.ends_with(" 9")),
        "{:?}",
        text(&shrunk)
    );
}

#[test]
fn a_stopped_reduction_returns_its_progress() {
    let mut replays = 0;
    let mut watch = |_: &ReductionProgress| {
        replays += 1;
        if replays > 5 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    };
    let shrunk = shrink(fragmented(), &TraceGoal::Oom, &mut watch).expect("it runs out of memory");
    assert!(shrunk.is_stopped && shrunk.case.events.len() > 4);
}

#[test]
fn a_trace_converts_to_one_step_per_operation() {
    let mut shrunk =
        shrink(fragmented(), &TraceGoal::Oom, &mut go_on).expect("it runs out of memory");
    shrunk.case.config.max_split_size = Some(Bytes::mib(512));
    let text = scenario(
        &shrunk,
        "Reduced.\nTwice.",
        "{ oom: fragmented }",
        |event| (event > 90).then(|| format!("event {event}")),
    );
    insta::assert_snapshot!(text.expect("no pools"));
}

#[test]
fn pools_streams_and_external_memory_have_their_steps() {
    let text = "g+ 3\na 1 512 7\ng- 3\nr 1 0\nf 1\ns 7\nd\ne\nm 0.5\nx 4194304\nx -2097152\ngr \
         3\na 2 3221225472 0\n";
    let case = case(text, Bytes::mib(512));
    let origins = (0..case.events.len()).collect();
    let (other, may_fail) = (
        Some(Config {
            expandable_segments: true,
            ..Config::default()
        }),
        BTreeSet::from([1]),
    );
    let shrunk = Shrunk {
        case,
        other,
        failure: TOO_LARGE,
        fails_under_its_own: true,
        may_fail,
        origins,
        replays: 0,
        is_stopped: false,
    };
    insta::assert_snapshot!(
        scenario(
            &shrunk,
            "All steps.",
            "{ fails: oom, serves: fits }",
            |_| None
        )
        .expect("one pool")
    );
    let crossing = Shrunk {
        case: self::case("g+ 1\ng+ 2\ng- 1\ng- 2\na 1 5 0\n", Bytes::mib(2)),
        origins: (0..5).collect(),
        ..shrunk
    };
    assert_eq!(
        scenario(&crossing, "", "oom", |_| None),
        Err(NotAScenario::PoolsOverlap)
    );
}

/// Runs with an allocator whose counter is wrong after a request for 1,000 bytes while more than 3
/// MiB are allocated.
struct WithWrongCounter;

impl Engine for WithWrongCounter {
    fn run(
        &self,
        scenario: &Scenario,
        _: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Vec<RunRecord>, DeviceError> {
        let source = DeviceSource::simulated();
        let device = source.limit(source.open()?, scenario.needs.memory)?;
        let allocator = &scenario.allocators[0];
        let (reproduce, interrupt) = (String::new(), Arc::default());
        let request = RunRequest {
            scenario,
            allocator,
            seed: scenario.seed,
            repetition: 0,
            reproduce,
            audit: true,
            interrupt,
        };
        Ok(vec![
            Run::new(&request, device)
                .with_allocator(Box::new(WrongCounter {
                    inner: allocator.build(),
                    is_wrong: false,
                }))
                .checked()?,
        ])
    }
}

struct WrongCounter {
    inner: Box<dyn Allocator>,
    is_wrong: bool,
}

impl wrapper::AllocatorWrapper for WrongCounter {
    type Inner = dyn Allocator;

    fn inner(&self) -> &Self::Inner {
        &*self.inner
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.inner
    }

    fn allocate(
        &mut self,
        device: &mut dyn Device,
        request: Request,
    ) -> Result<Allocation, AllocatorError> {
        self.is_wrong |= request.size == Bytes(1000)
            && Allocator::stats(&*self.inner).allocated_bytes.all.current > Bytes::mib(3).0;
        Allocator::allocate(&mut *self.inner, device, request)
    }

    fn stats(&self) -> MemoryStats {
        let mut stats = Allocator::stats(&*self.inner);
        if self.is_wrong {
            stats.inactive_split.increase(PoolKind::Small, 1);
        }
        stats
    }
}

fn violating() -> TraceCase {
    let mut text = String::new();
    for number in 0..20_u64 {
        let [kept, passing] = [number * 2, number * 2 + 1];
        text += &format!(
            "a {kept} {} 0\na {passing} 70000 0\nf {passing}\n",
            500_000 + number
        );
    }
    case(&(text + "a 1000 1000 0\nf 0\ne\n"), Bytes::mib(256))
}

#[test]
fn a_violating_trace_reduces_to_the_violation() {
    let shrunk =
        shrink_violation(violating(), &WithWrongCounter, &mut go_on).expect("it violates one");
    assert_eq!(
        shrunk.failure,
        TraceFailure::Violates(Invariant::CountersEqualStructure)
    );
    assert!(shrunk.case.events.len() < 10, "{:?}", text(&shrunk));
    assert_eq!(
        shrunk,
        shrink_violation(violating(), &WithWrongCounter, &mut go_on).expect("the same")
    );
    let comment = |event: usize| (event == 60).then(|| "model.py:7".to_owned());
    let scenario = scenario_of_violation(
        &shrunk,
        "63 operations of job.trace",
        comment,
        &WithWrongCounter,
        &mut go_on,
    );
    insta::assert_snapshot!(scenario.expect("the steps violate it too").text);
}

#[test]
fn a_trace_without_violations_cannot_be_reduced() {
    let error = shrink_violation(violating(), &crate::scenario::Simulated, &mut go_on)
        .expect_err("our allocator is right");
    assert_eq!(
        error,
        ShrinkError::Holds {
            memory: Bytes::mib(256)
        }
    );
    assert_eq!(
        error.to_string(),
        "no invariant is violated while the trace is replayed in 256 MiB"
    );
}
