use harness_record::{RunRecord, Verdict};

use super::*;

fn go_on(_: &ReductionProgress) -> Flow {
    Flow::Continue(())
}

fn reduced(source: &str) -> Reduced {
    let given = Given {
        source,
        path: Path::new("given.yaml"),
        arm: None,
        goal: Goal::Any,
        any_figures: false,
        origin: None,
    };
    reduce(&given, &Simulated, &mut go_on).unwrap_or_else(|error| panic!("{error}\n{source}"))
}

fn run(text: &str) -> Vec<RunRecord> {
    let scenario = Scenario::parse(text, Path::new("reduced.yaml"))
        .unwrap_or_else(|error| panic!("{error}\n{text}"));
    Simulated
        .run(&scenario, &mut |_| Flow::Continue(()))
        .expect("the simulated device is there")
}

/// Reduces a scenario twice, runs the result, and returns its text.
fn checked(source: &str) -> Reduced {
    let first = reduced(source);
    assert_eq!(
        first,
        reduced(source),
        "the same scenario comes down to the same one"
    );
    assert!(
        !first.is_stopped && first.steps <= first.steps_before,
        "{}",
        first.text
    );
    ends_as_it_says(&first.text);
    first
}

fn ends_as_it_says(text: &str) {
    for record in run(text) {
        assert!(
            matches!(
                record.verdict,
                Verdict::Passed | Verdict::FailedAsExpected { .. }
            ),
            "{:?}\n{text}",
            record.verdict
        );
    }
}

const FRAGMENTED: &str = "\
about: Activations of growing batches leave blocks behind that pin their segments.
needs: { memory: 1GiB }
allocators: [direct, caching, expandable]
skip: { expandable: not of interest }
tags: [training]
steps:
  - alloc: { buffer: weights, size: 100MiB }   # stays
  - for: { i: 1..6 }
    steps:
      # the batch goes, its loss stays
      - alloc: { buffer: batch, size: 20MiB * i + 100MiB }
      - fill: batch
      - free: batch
      - alloc: { buffer: \"loss[i]\", size: 10MiB * i + 60MiB }   # pins the segment of the batch
  - alloc: { buffer: scratch, size: 3MiB }
  - free: scratch
  - expect: num_ooms == 0
";

#[test]
fn fragments_of_a_loop_reduce_to_one_pinned_segment() {
    let reduced = checked(FRAGMENTED);
    assert_eq!(reduced.arm, "caching");
    insta::assert_snapshot!(reduced.text);
}

const RACE: &str = "\
about: A copy on another stream is still under way when the buffer is used again.
needs: { memory: 256MiB }
allocators: [caching]
streams: [copy, side]
steps:
  - alloc: { buffer: weights, size: 30MiB }
  - fill: weights
  - repeat: 3
    steps:
      - alloc: { buffer: batch, size: 40MiB }
      - fill: batch
      - record: { event: filled }
      - wait: { event: filled, stream: copy }
      - busy: { stream: copy, duration: 5ms }
      - read_async: { buffer: batch, stream: copy }   # nobody waits for this
      - free: batch
      - busy: { stream: side, duration: 1ms }
  - verify: weights
";

#[test]
fn a_race_reduces_to_two_unordered_uses() {
    let reduced = checked(RACE);
    assert!(
        matches!(reduced.failure, Failure::Invariant(..)),
        "{:?}",
        reduced.failure
    );
    insta::assert_snapshot!(reduced.text);
}

const LEAK: &str = "\
about: Something stays in each iteration.
needs: { memory: 1GiB }
matrix: { batch: [1, 4, 8] }
steps:
  - alloc: { buffer: weights, size: 100MiB }
  - measure: before
  - for: { step: 1..5 }
    steps:
      - alloc: { buffer: activations, size: 4MiB * batch }
      - alloc: { buffer: \"history[step]\", size: 1MiB }
      - free: activations
  - alloc: { buffer: grads, size: 8MiB }
  - free: [grads]
  - expect:
      - reserved <= 1GiB
      - allocated - before.allocated < 3MiB    # at most two of them
  - free: weights
";

#[test]
fn steps_that_produce_an_expectations_figures_stay() {
    let reduced = checked(LEAK);
    assert_eq!(reduced.point, [("batch".to_owned(), "1".to_owned())]);
    let Failure::Formula { text, figures } = &reduced.failure else {
        panic!("{:?}", reduced.failure)
    };
    assert_eq!(text, "allocated - before.allocated < 3MiB");
    let [record] = &run(&reduced.text)[..] else {
        panic!("one arm is left")
    };
    let Verdict::FailedAsExpected { first, .. } = &record.verdict else {
        panic!("{:?}", record.verdict)
    };
    assert!(first.seen.starts_with(figures), "{}", first.seen);
    insta::assert_snapshot!(reduced.text);
}

#[test]
fn comparing_expectations_keep_both_allocators() {
    let reduced = checked(
        "\
about: Two allocators that should reserve the same.
needs: { memory: 1GiB }
allocators: [direct, caching, expandable]
steps:
  - alloc: { buffer: a, size: 3MiB }
  - alloc: { buffer: b, size: 1MiB }
  - free: a
  - expect: caching.reserved.peak <= direct.reserved.peak
",
    );
    insta::assert_snapshot!(reduced.text);
}

#[test]
fn a_violated_invariant_reduces_to_the_smallest_scenario() {
    let source = include_str!("../../../../../scenarios/oom_retry_no_progress.yaml");
    let reduced = checked(source);
    insta::assert_snapshot!(reduced.text);
}

#[test]
fn similar_requests_reduce_to_one_on_a_small_device() {
    let reduced = checked(
        "about: Small blocks fill a device.\nneeds: { memory: 64MiB }\nsteps:\n  - for: { i: 1..40 \
         }\n    steps:\n      - alloc: { buffer: \"kv[i]\", size: 3MiB }\n",
    );
    insta::assert_snapshot!(reduced.text);
}

#[test]
fn other_steps_are_removed_around_a_needed_loop() {
    let reduced = checked(
        "\
about: No block fits the batch that comes next.
needs: { memory: 300MiB }
allocators: [caching]
tags: [training]
steps:
  - for: { size: [200MiB, 204MiB, 208MiB] }
    steps:
      - alloc: { buffer: batch, size: size }
      - free: batch
  - expect: [num_ooms == 0, num_alloc_retries == 1, num_device_alloc == 3]
invariants: [num_ooms == 0]
",
    );
    insta::assert_snapshot!(reduced.text);
}

#[test]
fn a_storm_shrinks_if_figures_may_differ() {
    let source = "\
about: Requests of a storm are refused.
needs: { memory: 256MiB }
steps:
  - storm: { id: churn, operations: 500, sizes: { min: 512B, max: 64MiB }, live: 220MiB,
        lifetime: { min: 10, max: 200 } }
  - expect: churn.ooms == 0
";
    let given = Given {
        source,
        path: Path::new("given.yaml"),
        arm: None,
        goal: Goal::Any,
        any_figures: true,
        origin: None,
    };
    let reduced = reduce(&given, &Simulated, &mut go_on).expect("requests are refused");
    ends_as_it_says(&reduced.text);
    insta::assert_snapshot!(reduced.text);
}

#[test]
fn a_failing_training_declares_its_cause() {
    let reduced = checked(
        "\
about: The batch is too large.
needs: { memory: 1GiB }
allocators: [caching]
steps:
  - train: { id: t, parameters: 30MiB, layers: 2, activations_per_sample: 16MiB, batch: 64,
        iterations: 5, on_oom: { halve_batch: { floor: 60 } } }
  - expect: t.iterations == 5
",
    );
    insta::assert_snapshot!(reduced.text);
}

#[test]
fn the_configuration_and_failure_can_be_chosen() {
    let reduce_with = |arm, goal| {
        let given = Given {
            source: FRAGMENTED,
            path: Path::new("given.yaml"),
            arm,
            goal,
            any_figures: false,
            origin: None,
        };
        reduce(&given, &Simulated, &mut go_on)
            .map(|reduced| reduced.arm)
            .map_err(|error| error.to_string())
    };
    assert_eq!(
        reduce_with(Some("caching"), Goal::Oom),
        Ok("caching".to_owned())
    );
    insta::assert_snapshot!(
        [
            reduce_with(Some("direct"), Goal::Any),
            reduce_with(Some("bfc"), Goal::Any),
            reduce_with(None, Goal::Invariant),
        ]
        .map(Result::unwrap_err)
        .join("\n")
    );
}

#[test]
fn skipped_and_slow_scenarios_are_distinguished() {
    let error = |source: &str| {
        let given = Given {
            source,
            path: Path::new("given.yaml"),
            arm: None,
            goal: Goal::Any,
            any_figures: false,
            origin: None,
        };
        reduce(&given, &Simulated, &mut go_on)
            .expect_err("it cannot be reduced")
            .to_string()
    };
    let on_gpu = "about: A.\nneeds: { memory: 1GiB, device: gpu }\nsteps: [ alloc: { buffer: a, \
         size: 2GiB } ]\n";
    let skipped = "about: A.\nneeds: { memory: 1GiB }\nskip: not yet\nsteps: [ alloc: { buffer: a, \
         size: 2GiB } ]\n";
    let broken = "about: A.\nneeds: { memory: 1GiB }\nsteps: [ free: a ]\n";
    insta::assert_snapshot!([on_gpu, skipped, broken].map(error).join("\n"));
}

#[test]
fn a_stopped_reduction_ends_as_it_declares() {
    let mut runs = 0;
    let given = Given {
        source: FRAGMENTED,
        path: Path::new("given.yaml"),
        arm: None,
        goal: Goal::Any,
        any_figures: false,
        origin: None,
    };
    let mut watch = |_: &ReductionProgress| {
        runs += 1;
        if runs > 40 {
            Flow::Break(())
        } else {
            Flow::Continue(())
        }
    };
    let stopped = reduce(&given, &Simulated, &mut watch).expect("it fails");
    assert!(stopped.is_stopped);
    ends_as_it_says(&stopped.text);
}

/// Random steps over eight buffers. Each step allocates a dead buffer, or uses or frees a live one.
/// Some steps are in a loop that frees its own allocations.
fn program(choices: &[(u8, u8, u8)]) -> String {
    let mut text = String::from(
        "about: A program.\nneeds: { memory: 96MiB }\nstreams: [side]\nallocators: [caching, \
         direct]\nsteps:\n",
    );
    let mut live = std::collections::BTreeSet::new();
    for &(buffer, size, act) in choices {
        let buffer = buffer % 8;
        let size = 1 + u64::from(size) % 40;
        let stream = if act % 5 == 0 { ", stream: side" } else { "" };
        text += &match act % 4 {
            0 if live.contains(&buffer) => format!("  - fill: b{buffer}   # written\n"),
            3 => format!(
                "  - repeat: {size}\n    steps:\n      - alloc: {{ buffer: passing, size: \
                 {size}MiB }}\n      - free: passing\n"
            ),
            _ if live.remove(&buffer) => format!("  - free: b{buffer}\n"),
            _ => {
                live.insert(buffer);
                format!("  - alloc: {{ buffer: b{buffer}, size: {size}MiB{stream} }}\n")
            }
        };
    }
    text + "  - expect: [ num_alloc_retries == 0, reserved <= 64MiB ]\n"
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig { cases: 16, failure_persistence: None,
        ..Default::default() })]
    #[test]
    fn reduced_scenarios_are_valid_and_fail_the_same_way(
        choices in proptest::collection::vec(proptest::prelude::any::<(u8, u8, u8)>(), 1..24),
    ) {
        let source = program(&choices);
        let given = Given { source: &source, path: Path::new("given.yaml"), arm: None,
            goal: Goal::Any, any_figures: false, origin: None };
        let reduced = match reduce(&given, &Simulated, &mut go_on) {
            Err(ReduceError::Passes { .. }) => return Ok(()),
            other => other.unwrap_or_else(|error| panic!("{error}\n{source}")),
        };
        let scenario = Scenario::parse(&reduced.text, Path::new("reduced.yaml"))
            .unwrap_or_else(|error| panic!("{error}\n{}", reduced.text));
        let has_room = scenario.needs.memory <= harness_allocator::units::Bytes::mib(96);
        proptest::prop_assert!(
            reduced.steps <= reduced.steps_before && has_room, "{}", reduced.text
        );
        for record in run(&reduced.text) {
            match &record.verdict {
                Verdict::Passed => {}
                Verdict::FailedAsExpected { .. } => {
                    proptest::prop_assert_eq!(Failure::of(&record), Ok(reduced.failure.clone()))
                }
                other => panic!("{other:?}\n{}", reduced.text),
            }
        }
    }
}
