//! Scenarios that must fail, with their messages, and similar scenarios that must pass, so the
//! message is about the mistake.

use std::path::Path;
use std::sync::{Arc, atomic::AtomicBool};

use harness_allocator::allocator::AllocatorKind;
use harness_allocator::device::Leaks;
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::units::{Bytes, Nanos};
use harness_devices::DeviceSource;
use harness_record::{
    Invariant, Outcome, Rule, RunRecord, SourceLine, StepRecord, Verdict, Violation,
};
use harness_report::text::step_table;
use harness_run::run::{Run, RunRequest};
use harness_run::session::{ArmRun, Plan, Selection};
use harness_scenario::Scenario;

use crate::program::request;
use crate::watched::{Watched, launch_failed};

/// The steps begin at line 5.
fn scenario(steps: &str) -> Scenario {
    let text =
        format!("about: A test.\nneeds: {{ memory: 64MiB }}\nstreams: [side]\nsteps:\n{steps}\n");
    Scenario::parse(&text, Path::new("test.yaml")).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn run_with(
    scenario: &Scenario,
    allocator: AllocatorKind,
    interrupt: bool,
    seed: Option<u64>,
) -> RunRecord {
    let (selection, program) = (Selection::default(), "harness".to_owned());
    let plan = Plan {
        scenarios: vec![scenario.clone()],
        selection,
        seed,
        memory: None,
        repetitions: 1,
        audit: true,
        fail_fast: false,
        program,
    };
    let arm = ArmRun {
        scenario,
        allocator: &allocator.into(),
        repetition: 0,
    };
    plan.run_arm(
        &arm,
        &DeviceSource::simulated(),
        &Arc::new(AtomicBool::new(interrupt)),
    )
    .unwrap()
}

fn run(steps: &str) -> RunRecord {
    run_with(&scenario(steps), AllocatorKind::Caching, false, None)
}

fn violations(run: &RunRecord) -> Vec<&Violation> {
    match &run.verdict {
        Verdict::Failed { first, rest } => std::iter::once(first).chain(rest).collect(),
        Verdict::Passed
        | Verdict::FailedAsExpected { .. }
        | Verdict::Skipped { .. }
        | Verdict::Contended { .. }
        | Verdict::Interrupted => Vec::new(),
    }
}

/// One line per violation.
fn told(run: &RunRecord) -> Vec<String> {
    violations(run).iter().map(ToString::to_string).collect()
}

fn passes(steps: &str) -> RunRecord {
    let run = run(steps);
    assert_eq!(run.verdict, Verdict::Passed, "{}", step_table(&run));
    run
}

fn last(run: &RunRecord) -> &StepRecord {
    run.steps.last().unwrap()
}

#[test]
fn a_failed_expectation_names_its_place_and_every_figure() {
    let run = run("  - alloc: { buffer: a, size: 3MiB }
  - measure: m
  - expect:
      - num_ooms == 0
      - reserved_bytes.all.current - m.allocated_bytes.all.current == 16MiB + 8B");
    insta::assert_snapshot!(step_table(&run));
}

#[test]
fn an_expectation_of_counts_and_times_shows_their_units() {
    let steps = |expect| {
        format!("  - alloc: {{ buffer: a, size: 3MiB, id: request }}\n  - expect: {expect}")
    };
    let run_of = |expect| run(&steps(expect));
    let run = run_of("[ num_device_alloc == 2, request.time > 1s, device.external_memory > 0B ]");
    let at = |column| {
        Some(SourceLine {
            path: "test.yaml".to_owned(),
            line: 6,
            column,
        })
    };
    let seen: Vec<_> = violations(&run)
        .into_iter()
        .map(|found| {
            (
                found.step,
                found.at.clone(),
                found.rule.clone(),
                found.expected.clone(),
            )
        })
        .collect();
    assert_eq!(
        seen,
        [
            (
                2,
                at(15),
                Rule::Expectation,
                "num_device_alloc == 2".to_owned()
            ),
            (
                2,
                at(57),
                Rule::Expectation,
                "device.external_memory > 0B".to_owned()
            ),
        ]
    );
    assert_eq!(violations(&run)[0].seen, "num_device_alloc = 1");
    assert_eq!(violations(&run)[1].seen, "device.external_memory = 0 B");
    // The timed run judges times. It follows a passed checked run.
    let timed = run_of("[ num_device_alloc == 1, request.time > 1s ]");
    let told = violations(&timed);
    let [found] = told.as_slice() else {
        panic!("{:?}", timed.verdict)
    };
    assert_eq!(
        (found.step, found.at.clone(), found.expected.as_str()),
        (2, at(38), "request.time > 1s")
    );
    assert!(
        found.seen.starts_with("request.time = ") && found.seen.ends_with("µs, in the timed run"),
        "{}",
        found.seen
    );
}

#[test]
fn an_invariant_of_the_scenario_fails_at_the_first_step_that_breaks_it() {
    let run = run("  - alloc: { buffer: a, size: 1MiB }
  - alloc: { buffer: b, size: 3MiB }
  - free: b
invariants: [ reserved_bytes.all.current < 20MiB ]");
    assert_eq!(
        told(&run),
        [
            "test.yaml:8:15: expectation: expected reserved_bytes.all.current < 20MiB, seen \
             reserved_bytes.all.current = 23068672 B (22 MiB)"
        ]
    );
    assert_eq!(
        (violations(&run)[0].step, run.steps.len()),
        (2, 2),
        "the run stops there"
    );
}

#[test]
fn a_request_that_should_not_fit_and_does_fails_the_run() {
    let run = run("  - alloc: { buffer: a, size: 1000B, expect: oom }");
    assert_eq!(
        told(&run),
        [
            "test.yaml:5:5: expectation: expected the request for 1000 B to run out of memory, \
             seen it fits: 1 KiB handed out"
        ]
    );
    assert_eq!(last(&run).outcome, Outcome::Fits { retries: 0 });
}

#[test]
fn a_request_that_should_fit_and_does_not_fails_the_run_with_the_figures() {
    let run = run("  - alloc: { buffer: a, size: 40MiB }
  - alloc: { buffer: b, size: 30MiB }");
    insta::assert_snapshot!(step_table(&run));
    assert_eq!(last(&run).outcome, Outcome::OutOfMemory);
}

#[test]
fn an_invariant_that_should_be_violated_and_holds_fails_the_run() {
    let run = run("  - alloc: { buffer: a, size: 1MiB }
expect_violation: retry_makes_progress");
    assert_eq!(
        told(&run),
        [
            "test.yaml:6:19: expected violation: expected the run to violate \
             `retry_makes_progress`: a retry succeeds, requests less, or \
          starts from another memory state than the attempt before must not hold, seen it was \
          never violated"
        ]
    );
}

/// Two unordered streams write the same memory.
const RACE: &str = "  - alloc: { buffer: a, size: 1MiB }
  - fill: { buffer: a }
  - fill: { buffer: a, stream: side }";

#[test]
fn a_race_of_the_scenario_is_a_violation_that_names_both_steps() {
    let run = run(RACE);
    let told = violations(&run);
    let [found] = told.as_slice() else {
        panic!("{:?}", run.verdict)
    };
    assert_eq!(
        (found.step, &found.rule),
        (3, &Rule::Invariant(Invariant::ContentsAreIntact))
    );
    assert_eq!(
        found.at.as_ref().map(ToString::to_string).as_deref(),
        Some("test.yaml:7:5")
    );
    assert!(
        found.seen.contains(
            "written on stream 1 at step 3 while it may still be written on stream 0 at step 2"
        ),
        "{}",
        found.seen
    );
    assert_eq!(last(&run).outcome, Outcome::Failed);
}

#[test]
fn an_event_between_the_two_streams_makes_the_race_go_away() {
    passes(
        "  - alloc: { buffer: a, size: 1MiB }
  - fill: { buffer: a }
  - record: { event: e }
  - wait: { event: e, stream: side }
  - fill: { buffer: a, stream: side }
  - synchronize: { stream: side }
  - free: a",
    );
}

#[test]
fn freeing_memory_in_use_by_another_stream_is_a_race_without_record_stream() {
    let steps = |told: &str| {
        format!(
            "  - alloc: {{ buffer: a, size: 1MiB }}
{told}  - fill: {{ buffer: a, stream: side }}
  - free: a"
        )
    };
    let run = run(&steps(""));
    let told = violations(&run);
    let [found] = told.as_slice() else {
        panic!("{:?}", run.verdict)
    };
    assert_eq!(
        (found.step, &found.rule),
        (3, &Rule::Invariant(Invariant::ContentsAreIntact))
    );
    passes(&steps("  - record_stream: { buffer: a, stream: side }\n"));
}

#[test]
fn a_violation_that_is_expected_hides_no_other_one() {
    assert_eq!(
        run(&format!(
            "{RACE}
expect_violation: contents_are_intact"
        ))
        .verdict,
        Verdict::Passed
    );
    let run = run(&format!(
        "{RACE}
expect_violation: retry_makes_progress"
    ));
    assert_eq!(
        violations(&run)
            .iter()
            .map(|found| &found.rule)
            .collect::<Vec<_>>(),
        [&Rule::Invariant(Invariant::ContentsAreIntact)]
    );
}

/// A retry without progress is noted and the run continues, so the later race is found too.
#[test]
fn the_end_is_checked_although_a_violation_was_expected_before() {
    let steps = "  - alloc: { buffer: w, size: 80MiB, expect: oom, on_oom: { empty_cache: {} } }
  - alloc: { buffer: a, size: 1MiB }
  - fill: { buffer: a, stream: side }
expect_violation: retry_makes_progress";
    let run = run(steps);
    let rules: Vec<_> = violations(&run)
        .iter()
        .map(|found| (found.step, found.rule.clone()))
        .collect();
    assert_eq!(
        rules,
        [
            (1, Rule::Invariant(Invariant::RetryMakesProgress)),
            (3, Rule::Invariant(Invariant::ContentsAreIntact))
        ]
    );
}

#[test]
fn external_memory_beyond_free_memory_fails_and_reports_the_amount() {
    let run = run("  - alloc: { buffer: a, size: 40MiB }
  - external_memory: 30MiB");
    assert_eq!(
        told(&run),
        [
            "test.yaml:6:5: expectation: expected others to hold 30 MiB, seen only 24 MiB could be \
             allocated"
        ]
    );
    assert_eq!(last(&run).accounts.device.external_memory, Bytes::mib(24));
}

#[test]
fn a_run_notes_once_that_rmm_could_not_make_its_bins() {
    let steps =
        scenario("  - alloc: { buffer: a, size: 1KiB }\n  - alloc: { buffer: b, size: 1KiB }");
    let run = run_with(&steps, AllocatorKind::RmmBinning, false, None);
    let told = run.steps.iter().flat_map(|step| &step.notes);
    let told = told.filter(|note| note.starts_with("the bins need 992 MiB at the start"));
    assert_eq!(told.count(), 1);
}

#[test]
fn a_fraction_limits_the_allocator_and_is_lifted_again() {
    let run = passes(
        "  - set_memory_fraction: 0.5
  - alloc: { buffer: a, size: 40MiB, expect: oom }
  - expect: [ device.malloc_calls == 0, num_ooms == 1 ]
  - set_memory_fraction: 1
  - alloc: { buffer: a, size: 40MiB }",
    );
    assert!(
        run.steps[1].notes[0].contains("the memory fraction allows 32 MiB"),
        "{:?}",
        run.steps[1].notes
    );
}

#[test]
fn a_storm_that_never_fragments_fails_if_it_should_and_says_what_to_raise() {
    let seen = |live: &str, max: u64| {
        let run = run(&format!(
            "  - storm: {{ id: s, operations: 50, sizes: 1MiB, live: {live}, lifetime: {{ min: 1, \
             max: {max} }}, until: fragmented }}"
        ));
        let expected = "test.yaml:5:5: expectation: expected a request that fails although \
             reserved − allocated is at least its size, seen 50 \
                        operations with 0 failed requests, none because of fragmentation; ";
        told(&run)[0].strip_prefix(expected).unwrap().to_owned()
    };
    let sizes = "at most 8 MiB were allocated: raise `live` towards the memory of `needs`, or mix \
         small and large `sizes`";
    assert_eq!(seen("8MiB", 40), sizes);
    let lifetime = "at most 2 MiB of the 32 MiB of `live` were allocated, since blocks live for at \
         most 2 operations: raise `lifetime`";
    assert_eq!(seen("32MiB", 2), lifetime);
}

#[test]
fn an_expected_failure_of_a_storm_without_one_says_what_to_raise() {
    let storm = "  - storm: { id: s, operations: 50, sizes: 1MiB, live: 8MiB, \
                 lifetime: { min: 1, max: 40 } }";
    let run = run(&format!("{storm}\n  - expect: s.ooms > 0"));
    assert_eq!(
        told(&run),
        [
            "test.yaml:6:13: expectation: expected s.ooms > 0, seen s.ooms = 0; at most 8 MiB were \
             allocated: raise `live` towards the memory of `needs`, or mix small and large `sizes`"
        ]
    );
    passes(&format!("{storm}\n  - expect: s.ooms == 0"));
}

/// Repeats the same request. `w` has most of the memory, and the cached block belongs to another
/// stream.
fn recovery(policy: &str, expect: &str, figures: &str, violates: &str) -> String {
    format!(
        "  - alloc: {{ buffer: w, size: 40MiB }}
  - alloc: {{ buffer: x, size: 30MiB, expect: {expect}, id: x, on_oom: {policy} }}
  - expect: [ {figures} ]
{violates}"
    )
}

#[test]
fn a_policy_that_changes_nothing_makes_no_progress() {
    let figures = "x.retries == 2, x.retries_without_progress == 2, x.attempts == 3, num_ooms == 3";
    let steps = |violates| recovery("{ empty_cache: { retries: 2 } }", "oom", figures, violates);
    passes(&steps("expect_violation: retry_makes_progress"));
    let run = run(&steps(""));
    assert_eq!(
        told(&run),
        [
            "test.yaml:6:5: invariant retry_makes_progress: expected the retry to succeed, to ask \
             for less, or to find memory changed since the failed \
          attempt, seen it asked for 30 MiB again and failed again: the allocator's blocks and the \
          24 MiB free on the device were the same"
        ]
    );
}

/// Releasing the cache joins its fragments: total free memory is the same, but the retry fits.
#[test]
fn a_retry_that_fits_because_emptying_the_cache_made_pieces_whole_makes_progress() {
    let pieces: String = (0..10)
        .map(|n| format!("  - alloc: {{ buffer: p{n}, size: 3MiB, stream: side }}\n"))
        .collect();
    let freed: String = (0..10).map(|n| format!("  - free: p{n}\n")).collect();
    let run = passes(&format!(
        "{pieces}{freed}  - train: {{ id: t, parameters: 2MiB, layers: 1,
        activations_per_sample: 11MiB, batch: 1, iterations: 1 }}
  - train:
      id: u
      parameters: 4KiB
      layers: 4
      activations_per_sample: 48MiB
      batch: 1
      iterations: 1
      on_oom: {{ empty_cache: {{}} }}
  - expect: [ u.retries_without_progress == 0 ]"
    ));
    assert!(run.steps.iter().any(|step| step.kind == "train"));
}

/// A failed iteration frees its memory and nothing else changes, so another attempt must fail in
/// the same way.
#[test]
fn an_iteration_that_meets_the_same_memory_again_makes_no_progress() {
    passes(
        "  - train:
      id: t
      parameters: 4KiB
      layers: 2
      activations_per_sample: 80MiB
      batch: 1
      iterations: 1
      expect: oom
      on_oom: { empty_cache: { retries: 2 } }
  - expect: [ t.retries == 2, t.retries_without_progress >= 1 ]
expect_violation: retry_makes_progress",
    );
}

#[test]
fn a_request_that_is_refused_without_a_policy_is_not_lost_to_a_retry() {
    let run = passes(
        "  - alloc: { buffer: w, size: 40MiB }\n  - alloc: { buffer: x, size: 30MiB, expect: oom }",
    );
    assert_eq!(run.timings.lost_to_retry, Nanos::ZERO);
    assert!(run.timings.scenario > Nanos::ZERO);
}

/// The driver's pool refuses the racing free, so the buffer stays. At the end, that is no second
/// violation.
#[test]
fn consequences_of_an_expected_violation_do_not_fail_the_run() {
    let steps = "  - alloc: { buffer: a, size: 1MiB }
  - fill: { buffer: a, stream: side }
  - free: a
  - empty_cache
expect_violation: contents_are_intact";
    for allocator in [
        AllocatorKind::AsyncPool,
        AllocatorKind::Caching,
        AllocatorKind::Direct,
    ] {
        let run = run_with(
            &scenario(&format!("{steps}\nallocators: [{}]", allocator.name())),
            allocator,
            false,
            None,
        );
        assert_eq!(
            run.verdict,
            Verdict::Passed,
            "{}: {}",
            allocator.name(),
            step_table(&run)
        );
        let failed = steps.replace("expect_violation: contents_are_intact", "");
        let run = run_with(
            &scenario(&format!("{failed}allocators: [{}]", allocator.name())),
            allocator,
            false,
            None,
        );
        assert_eq!(
            told(&run).len(),
            1,
            "{}: {:?}",
            allocator.name(),
            told(&run)
        );
    }
}

#[test]
fn all_of_any_small_memory_is_had_again_at_the_end() {
    for memory in [
        "2MiB", "4MiB", "6MiB", "8MiB", "10MiB", "22MiB", "100MiB", "200MiB", "1000MiB",
    ] {
        for &allocator in AllocatorKind::ALL {
            let text = format!(
                "about: A test.\nneeds: {{ memory: {memory} }}\nsteps:\n  - \
                 empty_cache\nallocators: [{}]\n",
                allocator.name()
            );
            let scenario = Scenario::parse(&text, Path::new("test.yaml"))
                .unwrap_or_else(|error| panic!("{error}\n{text}"));
            let run = run_with(&scenario, allocator, false, None);
            assert_eq!(
                run.verdict,
                Verdict::Passed,
                "{} in {memory}",
                allocator.name()
            );
        }
    }
}

/// The driver's pool releases memory in a call that no counter shows.
#[test]
fn the_picture_of_a_drivers_pool_follows_an_emptied_cache() {
    let steps = "  - alloc: { buffer: a, size: 30MiB }\n  - free: a\n  - empty_cache\nallocators: \
         [async_pool]";
    let run = run_with(&scenario(steps), AllocatorKind::AsyncPool, false, None);
    assert_eq!(run.verdict, Verdict::Passed);
    let point = run.curve.last().unwrap();
    assert_eq!(
        (point.step, point.reserved, point.used),
        (3, Bytes::ZERO, Bytes::ZERO)
    );
    assert!(run.curve.iter().any(|point| point.used >= Bytes::mib(30)));
}

/// A leak of 512 B per iteration, over 24,000 steps.
#[test]
fn of_a_long_run_the_first_and_the_last_steps_are_recorded_and_the_picture_shows_all_of_it() {
    let run = passes(
        "  - storm: { id: s, operations: 1, sizes: 1KiB, live: 1KiB, lifetime: { min: 9, max: 9 } }
  - repeat: 12000
    steps:
      - alloc: { buffer: a, size: 3MiB }
      - free: a",
    );
    let numbers: Vec<u32> = run.steps.iter().map(|step| step.number).collect();
    assert_eq!((numbers.len(), run.unrecorded_steps), (10_000, 14_001));
    assert_eq!(
        (numbers[0], numbers[4_999], numbers[5_000], numbers[9_999]),
        (1, 5_000, 19_002, 24_001)
    );
    let steps: Vec<u32> = run.curve.iter().map(|point| point.step).collect();
    assert_eq!((steps.first(), steps.last()), (Some(&1), Some(&24_001)));
    let widest = steps.windows(2).map(|pair| pair[1] - pair[0]).max();
    assert!(
        widest < Some(100),
        "{widest:?} steps in a row are not in the picture"
    );
}

#[test]
fn a_policy_that_frees_makes_progress() {
    let figures = "x.retries == 1, x.retries_without_progress == 0, x.attempts == 2, num_ooms == \
         1, allocated_bytes.all.current == 30MiB";
    let run = passes(&recovery("{ free: { buffers: [w] } }", "fits", figures, ""));
    assert_eq!(run.steps[1].outcome, Outcome::Fits { retries: 1 });
    assert_eq!(run.steps[1].reports["retries"], 1);
}

#[test]
fn a_policy_that_waits_for_deferred_frees_makes_progress() {
    // The pending block is next to a live one, so its segment stays. The failed request waits for
    // the events, and the next one uses the block.
    passes(
        "  - alloc: { buffer: w, size: 16MiB }
  - alloc: { buffer: p, size: 30MiB }
  - record_stream: { buffer: p, stream: side }
  - busy: { stream: side, duration: 5ms }
  - free: p
  - alloc: { buffer: x, size: 30MiB, id: x, on_oom: { synchronize: {} } }
  - expect: [ x.retries_without_progress == 0, num_ooms == x.retries ]",
    );
}

#[test]
fn expectations_of_an_allocator_are_held_against_it_only() {
    let scenario = scenario(
        "  - alloc: { buffer: a, size: 3MiB }
  - expect: { caching: [ reserved_bytes.all.current == 20MiB ], \
        direct: [ reserved_bytes.all.current == 4MiB ] }
allocators: [caching, direct]",
    );
    assert_eq!(
        run_with(&scenario, AllocatorKind::Caching, false, None).verdict,
        Verdict::Passed
    );
    let direct = run_with(&scenario, AllocatorKind::Direct, false, None);
    assert_eq!(
        told(&direct),
        [
            "test.yaml:6:75: expectation: expected reserved_bytes.all.current == 4MiB, seen \
             reserved_bytes.all.current = 3145728 B (3 MiB)"
        ]
    );
}

#[test]
fn measures_keep_the_values_of_their_moment() {
    passes(
        "  - alloc: { buffer: a, size: 3MiB }
  - measure: m
  - free: a
  - empty_cache: { id: gone }
  - expect:
      - m.reserved_bytes.all.current == 20MiB
      - reserved_bytes.all.current == 0B
      - gone.freed_bytes == m.device.used - start.device.used
      - device.used == start.device.used",
    );
}

#[test]
fn repeated_steps_are_recorded_once_an_iteration() {
    let run = passes(
        "  - repeat: 3
    steps:
      - alloc: { buffer: a, size: 3MiB }
      - free: a",
    );
    let steps: Vec<_> = run
        .steps
        .iter()
        .map(|step| (step.number, step.line, step.kind.as_str()))
        .collect();
    assert_eq!(
        steps,
        [
            (1, 7, "alloc"),
            (2, 8, "free"),
            (3, 7, "alloc"),
            (4, 8, "free"),
            (5, 7, "alloc"),
            (6, 8, "free")
        ]
    );
    assert_eq!(run.unrecorded_steps, 0);
}

/// The record is bounded, but always contains the step that ended the run.
#[test]
fn a_very_long_repeat_is_counted_and_the_step_that_fails_is_recorded() {
    let run = run("  - repeat: 6000
    steps:
      - alloc: { buffer: a, size: 3MiB }
      - free: a
  - expect: num_ooms == 1");
    assert_eq!((run.steps.len(), run.unrecorded_steps), (10_000, 2_001));
    assert_eq!(
        (
            last(&run).number,
            last(&run).kind.as_str(),
            last(&run).outcome.clone()
        ),
        (12_001, "expect", Outcome::Failed)
    );
}

#[test]
fn a_run_that_is_interrupted_before_it_begins_does_nothing() {
    for steps in [
        "  - alloc: { buffer: a, size: 3MiB }",
        "  - busy: { duration: 5ms }
  - synchronize: device",
    ] {
        let run = run_with(&scenario(steps), AllocatorKind::Caching, true, None);
        assert_eq!((run.verdict, run.steps), (Verdict::Interrupted, vec![]));
    }
}

#[test]
fn a_storm_that_is_interrupted_leaves_nothing_on_the_device() {
    let scenario = scenario(
        "  - alloc: { buffer: a, size: 3MiB }
  - fill: { buffer: a }
  - storm: { id: s, operations: 1000000, sizes: 3MiB, live: 32MiB, lifetime: { min: 1, max: 9 } }",
    );
    let interrupt = Arc::<AtomicBool>::default();
    let (device, left) = Watched::new(scenario.needs.memory, Arc::clone(&interrupt), 2);
    let (allocator, reproduce) = (&AllocatorKind::Caching.into(), String::new());
    let run = Run::new(
        &RunRequest {
            scenario: &scenario,
            allocator,
            seed: 0,
            repetition: 0,
            reproduce,
            audit: true,
            interrupt,
        },
        Box::new(device),
    )
    .checked()
    .unwrap();
    assert_eq!(run.verdict, Verdict::Interrupted);
    assert_eq!(
        run.steps
            .iter()
            .map(|step| step.kind.as_str())
            .collect::<Vec<_>>(),
        ["alloc", "fill"],
        "the storm is neither done nor failed"
    );
    assert!(run.stats.allocation.all.current > 1, "the storm had begun");
    assert_eq!(*left.lock().unwrap(), Some(Leaks::default()));
}

#[test]
fn a_scenario_without_leaks_leaves_nothing_and_one_that_fails_neither() {
    for steps in [
        "  - alloc: { buffer: a, size: 3MiB }
  - record: { event: e }",
        RACE,
        "  - alloc: { buffer: a, size: 80MiB }",
    ] {
        let scenario = scenario(steps);
        let interrupt = Arc::<AtomicBool>::default();
        let (device, left) = Watched::new(scenario.needs.memory, Arc::clone(&interrupt), u64::MAX);
        let spec = AllocatorKind::Caching.into();
        let request = RunRequest {
            interrupt,
            ..request(&scenario, &spec)
        };
        Run::new(&request, Box::new(device)).checked().unwrap();
        assert_eq!(*left.lock().unwrap(), Some(Leaks::default()), "{steps}");
    }
}

/// One device call for the segment and one for the whole limit at the end, each with a free. The
/// scenario's calls count none of them.
#[test]
fn the_end_gives_the_cache_back_and_takes_the_whole_limit_once() {
    let scenario = scenario(
        "  - alloc: { buffer: a, size: 3MiB }
  - external_memory: 8MiB
  - set_memory_fraction: 0.5",
    );
    let interrupt = Arc::<AtomicBool>::default();
    let (device, _) = Watched::new(scenario.needs.memory, Arc::clone(&interrupt), u64::MAX);
    let mallocs = device.mallocs();
    let spec = AllocatorKind::Caching.into();
    let request = RunRequest {
        interrupt,
        ..request(&scenario, &spec)
    };
    let run = Run::new(&request, Box::new(device)).checked().unwrap();
    assert_eq!(run.verdict, Verdict::Passed);
    assert_eq!(*mallocs.lock().unwrap(), [Bytes::mib(20), Bytes::mib(64)]);
    assert_eq!((run.calls.malloc, run.calls.free), (1, 0));
}

/// Expandable segments reserve an eighth more addresses than the device has memory, for each pool
/// and stream, and anew after `empty_cache`. Their pages are large here, so that there are few.
#[test]
fn the_whole_limit_of_a_huge_device_fits_with_every_allocator() {
    let text = r#"about: A test.
needs: { memory: 60TiB }
allocators:
  - caching
  - caching: { name: large_pages, conf: "expandable_segments:True,large_segment_size_mb:8192" }
  - bfc
  - rmm_pool
  - rmm_arena
  - rmm_binning
  - ort_arena
  - xla_bfc
  - cupy_pool
  - async_pool
  - direct
streams: [side]
steps:
  - repeat: 20
    steps:
      - alloc: { buffer: a, size: 1TiB }
      - alloc: { buffer: b, size: 1KiB }
      - alloc: { buffer: c, size: 1TiB, stream: side }
      - alloc: { buffer: d, size: 1KiB, stream: side }
      - free: [a, b, c, d]
      - synchronize: device
      - empty_cache
"#;
    let scenario =
        Scenario::parse(text, Path::new("test.yaml")).unwrap_or_else(|error| panic!("{error}"));
    let device = SimConfig {
        total: scenario.needs.memory,
        context_overhead: Bytes::ZERO,
        ..SimConfig::default()
    };
    for allocator in &scenario.allocators {
        let (reproduce, interrupt) = (String::new(), Arc::default());
        let request = RunRequest {
            scenario: &scenario,
            allocator,
            seed: 0,
            repetition: 0,
            reproduce,
            audit: true,
            interrupt,
        };
        let run = Run::new(&request, Box::new(SimDevice::new(device.clone())))
            .checked()
            .unwrap();
        assert_eq!(run.verdict, Verdict::Passed, "{allocator}");
    }
}

#[test]
fn the_same_seed_gives_the_same_record_and_another_one_another() {
    let scenario = scenario(
        "  - storm: { id: s, operations: 500, sizes: { min: 1KiB, max: 8MiB }, live: 48MiB, \
         lifetime: { min: 1, max: 50 }, streams: [default, side], fill: true }",
    );
    let record = |seed| {
        serde_json::to_string(&run_with(
            &scenario,
            AllocatorKind::Caching,
            false,
            Some(seed),
        ))
        .unwrap()
    };
    let first = record(7);
    assert_eq!(first, record(7));
    assert_ne!(
        first.replace("\"seed\":7", "").replace("--seed 7", ""),
        record(8).replace("\"seed\":8", "").replace("--seed 8", "")
    );
}

#[test]
fn a_scenario_that_needs_more_than_the_device_has_is_skipped_with_the_figures() {
    let mut scenario = scenario("  - alloc: { buffer: a, size: 3MiB }");
    scenario.needs.memory = Bytes::gib(100);
    let run = run_with(&scenario, AllocatorKind::Caching, false, None);
    let Verdict::Skipped { reason, .. } = &run.verdict else {
        panic!("{:?}", run.verdict)
    };
    assert!(
        reason.starts_with("100 GiB of device memory: the simulated device has ")
            && reason.contains("`--device-profile h200-141`"),
        "{reason}"
    );
    assert!(run.steps.is_empty());
}

#[test]
fn a_training_that_cannot_even_begin_counts_its_failed_request() {
    passes(
        "  - train: { id: t, parameters: 32MiB, layers: 2, activations_per_sample: 1MiB, batch: 1,
        iterations: 1, expect: oom }
  - expect: [ t.ooms == 1, t.iterations == 0, allocated_bytes.all.current == 0B ]",
    );
}

/// Runs a scenario on the test's own device.
fn run_on_device(scenario: &Scenario, device: Watched) -> RunRecord {
    let (allocator, reproduce, interrupt) = (
        &AllocatorKind::Caching.into(),
        String::new(),
        Arc::default(),
    );
    let request = RunRequest {
        scenario,
        allocator,
        seed: 0,
        repetition: 0,
        reproduce,
        audit: true,
        interrupt,
    };
    Run::new(&request, Box::new(device)).checked().unwrap()
}

/// The first query of the step is for its expectation, the last for the scenario's invariant.
#[test]
fn a_device_failure_during_an_expectation_is_reported_with_its_code() {
    let scenario = scenario(
        "  - alloc: { buffer: a, size: 3MiB }
  - expect: [ num_ooms == 0, device.used > 0B ]
invariants: [ device.free > 0B ]",
    );
    let failing = |nth| run_on_device(&scenario, Watched::failing(scenario.needs.memory, 2, nth));
    let last = (1..)
        .take_while(|&nth| failing(nth).verdict != Verdict::Passed)
        .count() as u64;
    assert!(
        last > 2,
        "the accounts after the step are asked for between the two"
    );
    for nth in [1, last] {
        let run = failing(nth);
        let told = violations(&run);
        let [found] = told.as_slice() else {
            panic!("{:?}", run.verdict)
        };
        assert_eq!(
            (&found.rule, &found.seen),
            (&Rule::DeviceFailure, &launch_failed().to_string()),
            "question {nth}"
        );
        let at = found.at.as_ref().map(ToString::to_string);
        assert_eq!(
            (found.step, at.as_deref()),
            (2, Some("test.yaml:6:5")),
            "question {nth}"
        );
    }
}

/// 40 MiB are cached for another stream. The allocator releases them for the first layer, and the
/// second layer does not fit.
#[test]
fn a_request_tried_again_inside_a_try_that_fails_is_lost_once() {
    let run = passes(
        "  - alloc: { buffer: a, size: 40MiB, stream: side }
  - free: a
  - train:
      id: t
      parameters: 4KiB
      layers: 2
      activations_per_sample: 30MiB
      batch: 2
      iterations: 1
      on_oom: { halve_batch: { floor: 1, retries: 1, empty_cache: true } }
  - expect: [ num_alloc_retries == 2, t.ooms == 1, t.retries == 1 ]",
    );
    assert_eq!(
        run.timings.lost_to_retry,
        Nanos(run.steps[2].reports["retry_time"]),
        "the failed try holds all that was tried again"
    );
    assert!(
        run.timings.lost_to_retry < run.timings.scenario,
        "{:?}",
        run.timings
    );
}

/// Stream `side` works for 50 ms, and the default stream waits for it. The free of a filled buffer
/// checks its contents, and must not wait.
#[test]
fn filling_a_buffer_changes_no_metric() {
    let steps = |fill: &str| {
        format!(
            "  - alloc: {{ buffer: b, size: 3MiB }}
{fill}  - alloc: {{ buffer: c, size: 1MiB }}
  - record_stream: {{ buffer: c, stream: side }}
  - busy: {{ stream: side, duration: 50ms }}
  - free: c
  - record: {{ event: e, stream: side }}
  - wait: {{ event: e }}
  - free: b
  - alloc: {{ buffer: d, size: 1MiB }}"
        )
    };
    let (plain, filled) = (
        passes(&steps("")),
        passes(&steps("  - fill: { buffer: b }\n")),
    );
    assert_eq!(
        (filled.stats, filled.calls.memory_calls()),
        (plain.stats, plain.calls.memory_calls())
    );
    assert_eq!(
        plain.stats.active.all.current, 2,
        "`c` waits for the other stream"
    );
}

#[test]
fn a_storm_whose_sizes_overflow_64_bits_frees_the_block_due_next() {
    let all = u64::MAX;
    let run = passes(&format!(
        "  - storm: {{ id: s, operations: 60, sizes: [1MiB, {all}B], live: {all}B,
        lifetime: {{ min: 50, max: 60 }} }}
  - expect: [ s.allocations > 5, s.frees > 5, s.allocations + s.frees + s.ooms == s.operations,
        s.live_bytes < 64MiB ]"
    ));
    assert_eq!(run.unrecorded_steps, 0);
}

/// The storm's segment has 3 MiB of another buffer. A segment with only other buffers is neither
/// free nor pinned by the storm.
#[test]
fn pins_tell_free_memory_from_memory_of_others() {
    let figures = "p.pinned_segments == 1, p.pinning_blocks == 4, p.pinning_bytes == 12MiB, \
         p.free_in_pinned_segments == 5MiB, p.free_segments == 0";
    let run = passes(&format!(
        "  - alloc: {{ buffer: apart, size: 12MiB }}
  - alloc: {{ buffer: beside, size: 3MiB }}
  - storm: {{ id: s, operations: 4, sizes: 3MiB, live: 12MiB, lifetime: {{ min: 9, max: 9 }} }}
  - pins: {{ storm: s, id: p }}
  - expect: [ {figures} ]
  - free: {{ pinning: s, for: 60MiB, id: f }}
  - expect: f.freed_blocks == 0"
    ));
    assert_eq!(
        run.steps[5].notes,
        [
            "0 blocks (0 B) in 0 segments freed: room for 32 MiB in whole segments, not enough for \
             60 MiB: other live blocks pin the rest"
        ]
    );
}
