//! The behavior of the language at run time: loops with values, numbered buffers, leaks, causes,
//! programs, private pools, concurrent steps, comparisons between allocators, skipped scenarios and
//! expected failures.

use std::{path::Path, sync::Arc};

use harness_devices::DeviceSource;
use harness_record::{Outcome, Records, Rule, RunRecord, SkipKind, Verdict};
use harness_report::text::step_table;
use harness_run::session::{ArmRun, Plan, Selection};
use harness_scenario::{ParameterSettings, Scenario};

fn scenarios(text: &str) -> Vec<Scenario> {
    Scenario::parse_points(text, Path::new("test.yaml"), &ParameterSettings::new())
        .unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn plan(text: &str) -> Plan {
    Plan {
        scenarios: scenarios(text),
        selection: Selection::default(),
        seed: None,
        memory: None,
        repetitions: 1,
        audit: true,
        fail_fast: false,
        program: "harness".to_owned(),
    }
}

fn records(text: &str) -> Records {
    plan(text)
        .run(&DeviceSource::simulated(), &Arc::default())
        .unwrap()
}

/// Runs the default allocator in 64 MiB.
fn run(steps: &str) -> RunRecord {
    let text = format!(
        "about: A test.\nneeds: {{ memory: 64MiB }}\nstreams: [side]\nprograms: \
         [server]\nsteps:\n{steps}\n"
    );
    records(&text).runs.remove(0)
}

fn passes(steps: &str) -> RunRecord {
    let run = run(steps);
    assert_eq!(run.verdict, Verdict::Passed, "{}", step_table(&run));
    run
}

/// The rule, the expectation and the actual result of the first violation.
fn failure(run: &RunRecord) -> (Rule, String, String) {
    match &run.verdict {
        Verdict::Failed { first, .. } => (
            first.rule.clone(),
            first.expected.clone(),
            first.seen.clone(),
        ),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_loop_gives_its_values_to_sizes_numbers_and_expectations() {
    let run = passes(
        "  - for: { i: 1..3 }
    steps:
      - alloc: { buffer: \"kv[i]\", size: 4MiB * i }
      - expect: allocated == 2MiB * i * (i + 1)
  - free: kv[2]
  - expect: allocated == 16MiB
  - free: kv
  - expect: allocated == 0",
    );
    let told: Vec<_> = run
        .steps
        .iter()
        .filter(|step| step.kind == "alloc")
        .map(|step| (step.iteration.clone(), step.size))
        .collect();
    let expected: Vec<_> = (1..=3)
        .map(|i| {
            (
                Some(format!("i = {i}")),
                Some(harness_allocator::units::Bytes::mib(4 * i)),
            )
        })
        .collect();
    assert_eq!(told, expected);
}

#[test]
fn a_missing_numbered_buffer_fails_the_step_and_the_live_ones_are_reported() {
    let (_, expected, seen) = failure(&run(
        "  - alloc: { buffer: \"kv[1]\", size: 1MiB }\n  - alloc: { buffer: \"kv[2]\", size: 1MiB \
         }\n  - free: kv[3]",
    ));
    assert_eq!(
        (expected.as_str(), seen.as_str()),
        (
            "kv[3] to be live",
            "2 of that name are live, from kv[1] to kv[2]"
        )
    );
    let (_, expected, seen) = failure(&run(
        "  - alloc: { buffer: \"kv[1]\", size: 1MiB }\n  - alloc: { buffer: \"kv[1]\", size: 1MiB \
         }",
    ));
    assert_eq!(
        (expected.as_str(), seen.as_str()),
        (
            "no buffer kv[1]",
            "it is already live; add `leak: true` to leak it"
        )
    );
    let (_, _, seen) = failure(&run(
        "  - for: { i: [0.5] }\n    steps: [ alloc: { buffer: \"kv[i]\", size: 1MiB } ]",
    ));
    assert_eq!(seen, "the number of `kv[i]` evaluates to 1/2");
}

#[test]
fn a_loop_until_memory_is_out_ends_at_the_first_request_that_fails() {
    passes(
        "  - repeat: until oom
    id: growing
    steps:
      - alloc: { buffer: lost, size: 16MiB, leak: true }
  - expect: [ growing.iterations == 4, num_ooms == 1, allocated == 64MiB ]",
    );
    passes(
        "  - for: { i: 1..100 }
    until: oom
    id: outer
    steps:
      - for: { j: 1..2 }
        steps:
          - alloc: { buffer: \"kv[10 * i + j]\", size: 10MiB }
  - expect: [ outer.iterations == 3, num_ooms == 1 ]",
    );
    let (rule, expected, seen) = failure(&run(
        "  - repeat: 3\n    until: oom\n    steps: [ alloc: { buffer: lost, size: 1MiB, leak: true \
         } ]",
    ));
    assert_eq!(rule, Rule::Expectation);
    assert_eq!(
        (expected.as_str(), seen.as_str()),
        (
            "a request inside the loop to run out of memory",
            "3 iterations ended without that"
        )
    );
}

#[test]
fn growth_is_that_since_the_same_place_was_reached_the_last_time() {
    passes(
        "  - alloc: { buffer: base, size: 4MiB }
  - for: { i: 1..5 }
    steps:
      - alloc: { buffer: lost, size: 2MiB, leak: true }
      - expect: [ growth(allocated) == 2MiB, growth(num_ooms) == 0 ]",
    );
    let run = run(
        "  - for: { i: 1..5 }\n    steps:\n      - alloc: { buffer: lost, size: 1MiB * i, leak: \
         true }\n      - expect: growth(allocated) <= 3MiB",
    );
    let (_, _, seen) = failure(&run);
    assert_eq!(
        seen,
        "growth(allocated_bytes.all.current) = 4194304 B (4 MiB)"
    );
    assert_eq!(
        run.steps.last().unwrap().iteration.as_deref(),
        Some("i = 4")
    );
}

#[test]
fn a_request_that_fails_for_an_unexpected_cause_reports_the_cause() {
    passes("  - alloc: { buffer: a, size: 65MiB, expect: { oom: too_large } }");
    passes(
        "  - external_memory: 40MiB\n  - alloc: { buffer: a, size: 30MiB, expect: { oom: \
         others_hold } }",
    );
    let (_, expected, seen) = failure(&run(
        "  - alloc: { buffer: a, size: 65MiB, expect: { oom: fragmented } }",
    ));
    assert!(
        expected.starts_with("the cause `fragmented`: "),
        "{expected}"
    );
    assert!(seen.starts_with("`too_large` ("), "{seen}");
    let (_, expected, seen) = failure(&run(
        "  - alloc: { buffer: a, size: 1MiB, expect: { oom: fragmented } }",
    ));
    assert_eq!(
        expected,
        "the request for 1 MiB to run out of memory for the cause `fragmented`"
    );
    assert_eq!(seen, "it fits: 1 MiB handed out");
}

#[test]
fn another_program_has_an_allocator_of_its_own_and_holds_memory_from_the_first() {
    passes(
        "  - program: server
    steps:
      - alloc: { buffer: model, size: 40MiB }
      - expect: reserved == 40MiB
  - expect: [ reserved == 0, server.reserved == 40MiB, device.used == start.device.used + 40MiB ]
  - alloc: { buffer: batch, size: 30MiB, expect: { oom: others_hold } }
  - free: model
  - expect: [ server.allocated == 0, server.reserved == 40MiB ]
  - program: server
    steps: [ empty_cache ]
  - alloc: { buffer: batch, size: 30MiB }",
    );
}

#[test]
fn memory_of_a_private_pool_serves_only_that_pool_until_its_release() {
    passes(
        "  - private_pool: graph
    steps: [ alloc: { buffer: captured, size: 20MiB } ]
  - free: captured
  - alloc: { buffer: eager, size: 20MiB }
  - expect: reserved == 40MiB
  - release_pool: graph
  - expect: reserved == 20MiB",
    );
    let text = "about: x\nneeds: { memory: 64MiB }\nallocators: [direct]\nsteps:\n  - \
         private_pool: g\n    steps: [ reset_peak_stats ]\n";
    let skipped = records(text).runs.remove(0).verdict;
    let reason = "the scenario uses private pools, which `direct` does not support".to_owned();
    assert_eq!(
        skipped,
        Verdict::Skipped {
            reason,
            kind: SkipKind::NotApplicable
        }
    );
}

#[test]
fn steps_meanwhile_are_done_one_after_each_operation_and_the_rest_at_the_end() {
    let run = passes(
        "  - for: { i: 1..2 }
    steps:
      - alloc: { buffer: \"a[i]\", size: 1MiB }
      - reset_peak_stats
    meanwhile:
      - for: { j: 1..6 }
        steps: [ external_memory: 1MiB * j ]
  - expect: device.external_memory == 6MiB",
    );
    let order: Vec<String> = run
        .steps
        .iter()
        .map(|step| {
            format!(
                "{} {}",
                step.kind,
                step.iteration.clone().unwrap_or_default()
            )
        })
        .collect();
    assert_eq!(
        order,
        [
            "alloc i = 1",
            "external_memory j = 1",
            "reset_peak_stats i = 1",
            "external_memory j = 2",
            "alloc i = 2",
            "external_memory j = 3",
            "reset_peak_stats i = 2",
            "external_memory j = 4",
            "external_memory j = 5",
            "external_memory j = 6",
            "expect ",
        ]
    );
}

#[test]
fn external_memory_that_grows_while_a_training_runs_makes_its_batch_smaller() {
    let run = passes(
        "  - train: { id: t, parameters: 2MiB, activations_per_sample: 1MiB, batch: 32,
        iterations: 6, on_oom: { halve_batch: { retries: 3, empty_cache: true } } }
    meanwhile:
      - external_memory: 10MiB
      - external_memory: 30MiB
  - expect: [ t.first_batch == 32, t.final_batch < 32, t.iterations == 6 ]",
    );
    let numbers: Vec<u32> = run.steps.iter().map(|step| step.number).collect();
    assert_eq!(
        run.steps
            .iter()
            .filter(|step| step.kind == "external_memory")
            .count(),
        2
    );
    assert_eq!(numbers.iter().max(), Some(&4));
}

#[test]
fn the_invariants_of_the_scenario_hold_inside_a_storm() {
    let text = |most: &str| {
        format!(
            "about: x\nneeds: {{ memory: 64MiB }}\nsteps:\n  - storm: {{ id: s, operations: 200, \
             sizes: [4MiB], live: 40MiB, lifetime: {{ min: 5, max: 9 }} }}\n  - free: \
             s\ninvariants: [ allocated <= {most} ]\n"
        )
    };
    let (_, expected, _) = failure(&records(&text("8MiB")).runs[0]);
    assert_eq!(
        expected, "allocated <= 8MiB",
        "though all is freed at the end of the second step"
    );
    let inside = records(&text("8MiB")).runs[0].steps.clone();
    assert_eq!(inside.len(), 1, "the storm is cut short");
    assert_eq!(records(&text("40MiB")).runs[0].verdict, Verdict::Passed);
}

#[test]
fn eventually_holds_if_it_holds_after_any_later_step() {
    passes(
        "  - alloc: { buffer: a, size: 2MiB }
  - eventually: allocated == 0
  - free: a",
    );
    let (_, expected, seen) = failure(&run(
        "  - alloc: { buffer: a, size: 2MiB }\n  - eventually: allocated == 0\n  - \
         reset_peak_stats",
    ));
    assert_eq!(
        (expected.as_str(), seen.as_str()),
        (
            "eventually allocated == 0",
            "at the end allocated_bytes.all.current = 2097152 B (2 MiB)"
        )
    );
}

#[test]
fn a_read_that_was_queued_is_compared_when_its_stream_is_waited_for() {
    let run = passes(
        "  - alloc: { buffer: a, size: 2MiB, stream: side }
  - fill: { buffer: a, stream: side }
  - read_async: { buffer: a, stream: side }
  - synchronize: { stream: side }",
    );
    assert!(run.steps.iter().all(|step| step.outcome != Outcome::Failed));
}

const COMPARED: &str = "about: x
needs: { memory: 64MiB }
allocators: [caching, direct]
steps:
  - alloc: { buffer: a, size: 3MiB }
  - expect: caching.reserved <= LIMIT * direct.reserved
";

#[test]
fn an_expectation_between_allocators_fails_the_run_of_the_last_one_that_it_names() {
    let fits = records(&COMPARED.replace("LIMIT", "10"));
    assert!(fits.runs.iter().all(|run| run.verdict == Verdict::Passed));
    let records = records(&COMPARED.replace("LIMIT", "5"));
    assert_eq!(records.runs[0].verdict, Verdict::Passed);
    let (rule, expected, seen) = failure(&records.runs[1]);
    assert_eq!(
        (rule, expected.as_str()),
        (Rule::BetweenArms, "caching.reserved <= 5 * direct.reserved")
    );
    let figures = "caching.reserved_bytes.all.current = 20971520 B (20 MiB), \
         direct.reserved_bytes.all.current = 3145728 B (3 MiB)";
    assert_eq!(
        seen,
        format!("5 * direct.reserved = 15728640 B (15 MiB); {figures}")
    );
}

#[test]
fn one_arm_alone_runs_those_that_it_is_compared_with_first() {
    let plan = plan(&COMPARED.replace("LIMIT", "4"));
    let scenario = &plan.scenarios[0];
    let run = |index: usize| {
        let arm = ArmRun {
            scenario,
            allocator: &scenario.allocators[index],
            repetition: 0,
        };
        plan.run_arm(&arm, &DeviceSource::simulated(), &Arc::default())
            .unwrap()
    };
    assert_eq!(
        run(0).verdict,
        Verdict::Passed,
        "the first one is judged with the last"
    );
    assert_eq!(failure(&run(1)).0, Rule::BetweenArms);
    assert!(
        run(1)
            .reproduce
            .contains("--allocator caching --allocator direct"),
        "{}",
        run(1).reproduce
    );
}

#[test]
fn where_one_of_the_allocators_did_not_run_that_is_noted_and_nothing_is_judged() {
    let mut plan = plan(&COMPARED.replace("LIMIT", "4"));
    plan.selection = Selection::only(["direct"]);
    let records = plan
        .run(&DeviceSource::simulated(), &Arc::default())
        .unwrap();
    assert_eq!(records.runs[0].verdict, Verdict::Passed);
    let notes = &records.runs[0].steps.last().unwrap().notes;
    assert!(
        notes.iter().any(|note| note.starts_with("not compared: ")),
        "{notes:?}"
    );
}

#[test]
fn each_point_of_a_matrix_runs_under_its_own_name_with_its_values_in_the_command() {
    let text = "about: x\nmatrix: { size: [1MiB, 2MiB] }\nneeds: { memory: 64MiB }\nsteps:\n  - \
         alloc: { buffer: a, size: size }\n";
    let records = records(text);
    let names: Vec<&str> = records
        .runs
        .iter()
        .map(|run| run.scenario.name.as_str())
        .collect();
    assert_eq!(names, ["test[size=1MiB]", "test[size=2MiB]"]);
    assert!(
        records.runs[1].reproduce.contains("--set 'size=2MiB'"),
        "{}",
        records.runs[1].reproduce
    );
}

#[test]
fn a_scenario_known_to_fail_fails_as_expected_and_one_that_passes_instead_has_failed() {
    let text = |size: &str| {
        format!(
            "about: x\nneeds: {{ memory: 64MiB }}\nexpected_to_fail: too small\nsteps:\n  - alloc: \
             {{ buffer: a, size: {size} }}\n"
        )
    };
    match &records(&text("65MiB")).runs[0].verdict {
        Verdict::FailedAsExpected { reason, first, .. } => {
            assert_eq!(
                (reason.as_str(), first.expected.as_str()),
                ("too small", "65 MiB to fit")
            );
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(
        failure(&records(&text("1MiB")).runs[0]).0,
        Rule::ExpectedFailure
    );
}

#[test]
fn an_expectation_between_allocators_may_be_known_to_fail_too() {
    let text = |size: &str| {
        format!(
            "about: x\nneeds: {{ memory: 64MiB }}\nallocators: [direct, \
             caching]\nexpected_to_fail: {{ caching: it rounds to segments }}\n\
             steps:\n  - alloc: {{ buffer: a, size: {size} }}\n  - expect: caching.reserved <= \
             direct.reserved\n"
        )
    };
    let verdicts = records(&text("3MiB"))
        .runs
        .into_iter()
        .map(|run| run.verdict)
        .collect::<Vec<_>>();
    assert!(
        matches!(&verdicts[..], [Verdict::Passed, Verdict::FailedAsExpected { first, .. }]
            if first.rule == Rule::BetweenArms),
        "{verdicts:?}"
    );
    assert_eq!(
        failure(&records(&text("20MiB")).runs[1]).0,
        Rule::ExpectedFailure
    );
}

#[test]
fn what_the_machine_lacks_or_the_scenario_leaves_out_is_skipped_with_the_reason() {
    let reason = |head: &str| {
        let text =
            format!("about: x\n{head}\nallocators: [caching, direct]\nsteps: [reset_peak_stats]\n");
        match &records(&text).runs[1].verdict {
            Verdict::Skipped { reason, .. } => reason.clone(),
            other => panic!("{head}: {other:?}"),
        }
    };
    assert_eq!(
        reason("needs: { memory: 64MiB, device: gpu }"),
        "the scenario needs the device `gpu`, and this is `simulated`"
    );
    assert_eq!(
        reason("needs: { memory: 64MiB, devices: 2 }"),
        "the scenario needs 2 devices, and 1 is available"
    );
    assert_eq!(
        reason("needs: { memory: 64MiB }\nskip: { direct: too slow }"),
        "too slow"
    );
}
