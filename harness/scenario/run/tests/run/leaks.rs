//! Leaks by site: the detected ones, the text of a finding, and growth that is not a leak.

use std::{path::Path, sync::Arc};

use harness_allocator::allocator::AllocatorKind;
use harness_devices::DeviceSource;
use harness_record::{RunRecord, Verdict, Violation};
use harness_report::text::step_table;
use harness_run::session::{ArmRun, Plan, Selection};
use harness_scenario::Scenario;

/// The steps begin at line 4.
fn run(steps: &str) -> RunRecord {
    let text = format!("about: A test.\nneeds: {{ memory: 256MiB }}\nsteps:\n{steps}\n");
    let scenario = Scenario::parse(&text, Path::new("test.yaml"))
        .unwrap_or_else(|error| panic!("{error}\n{text}"));
    let (selection, program) = (Selection::default(), "harness".to_owned());
    let scenarios = vec![scenario.clone()];
    let plan = Plan {
        scenarios,
        selection,
        seed: None,
        memory: None,
        repetitions: 1,
        audit: true,
        fail_fast: false,
        program,
    };
    let arm = ArmRun {
        scenario: &scenario,
        allocator: &AllocatorKind::Caching.into(),
        repetition: 0,
    };
    plan.run_arm(&arm, &DeviceSource::simulated(), &Arc::default())
        .unwrap()
}

fn passes(steps: &str) -> RunRecord {
    let run = run(steps);
    assert_eq!(run.verdict, Verdict::Passed, "{}", step_table(&run));
    run
}

/// The violation that fails the run.
fn violations(steps: &str) -> Vec<Violation> {
    match run(steps).verdict {
        Verdict::Failed { first, rest } => std::iter::once(first).chain(rest).collect(),
        verdict => panic!("{verdict:?}"),
    }
}

fn found(steps: &str) -> String {
    violations(steps)
        .iter()
        .map(|violation| format!("{violation}\n"))
        .collect()
}

#[test]
fn a_retained_graph_is_found_by_the_purpose_of_its_tensors() {
    insta::assert_snapshot!(found(
        "  - train: { id: kept, parameters: 2MiB, layers: 4, activations_per_sample: 1MiB, batch: \
         8, iterations: 10, retain_graph: true, leak_check: {} }"
    ));
}

#[test]
fn a_list_of_losses_is_found_in_the_loop_that_keeps_them() {
    insta::assert_snapshot!(found(
        "  - repeat: 20
    leak_check: {}
    steps:
      - alloc: { buffer: batch, size: 64MiB }
      - alloc: { buffer: losses, size: 512B, leak: true }
      - alloc: { buffer: metrics, size: 2MiB, leak: true }
      - free: batch"
    ));
}

#[test]
fn a_cache_that_is_never_evicted_is_found_though_the_run_breaks_off_before_the_loop_ends() {
    let all = violations(
        "  - for: { i: 1..100 }
    leak_check: { warmup: 4 }
    steps:
      - alloc: { buffer: \"kv[i]\", size: 20MiB }",
    );
    let [oom, leak] = all.as_slice() else {
        panic!("{all:#?}")
    };
    assert!(oom.expected.contains("to fit"), "{oom}");
    insta::assert_snapshot!(leak.to_string());
}

#[test]
fn a_loop_that_ends_with_oom_reports_the_leak() {
    insta::assert_snapshot!(found(
        "  - repeat: until oom
    leak_check: { total: 8MiB }
    steps:
      - alloc: { buffer: lost, size: 20MiB, leak: true }"
    ));
}

#[test]
fn a_cache_filled_during_the_warm_up_is_no_leak() {
    let run = passes(
        "  - alloc: { buffer: \"kv[0]\", size: 30MiB }
  - for: { i: 1..30 }
    leak_check: { warmup: 8 }
    steps:
      - alloc: { buffer: \"kv[i]\", size: 30MiB, on_oom: { evict: { buffers: [kv] } } }
  - free: kv
  - for: { i: 1..30 }
    leak_check: {}
    steps:
      - alloc: { buffer: batch, size: 2MiB * i }
      - free: batch
  - train: { id: release_gradient, parameters: 2MiB, layers: 4, activations_per_sample: 1MiB,
        batch: [8, 3, 5], iterations: 13, leak_check: {} }",
    );
    let notes: Vec<&String> = run
        .steps
        .iter()
        .flat_map(|step| &step.notes)
        .filter(|note| note.contains("no site grows"))
        .collect();
    assert_eq!(notes.len(), 3, "{}", step_table(&run));
}

#[test]
fn growth_within_its_limits_passes_and_is_reported() {
    let run = passes(
        "  - repeat: 11
    leak_check: { per_iteration: 1MiB, total: 8MiB, every: 2 }
    steps:
      - alloc: { buffer: losses, size: 1MiB, leak: true }",
    );
    let tables = &run.steps.last().unwrap().tables;
    assert_eq!(
        tables[0].rows,
        [["losses (line 7)", "3 MiB", "11 MiB", "1 MiB"].map(str::to_owned)],
        "{tables:?}"
    );
    let too_much = found(
        "  - repeat: 11
    leak_check: { per_iteration: 1MiB, total: 7MiB }
    steps:
      - alloc: { buffer: losses, size: 1MiB, leak: true }",
    );
    assert!(
        too_much.contains("1 MiB per iteration or 7 MiB in total"),
        "{too_much}"
    );
}

#[test]
fn a_comparison_lists_what_has_grown_since_a_measure() {
    let run = passes(
        "  - alloc: { buffer: weights, size: 8MiB }
  - measure: warm
  - compare: { since: warm, id: nothing }
  - for: { i: 1..3 }
    steps: [ alloc: { buffer: \"kv[i]\", size: 4MiB } ]
  - alloc: { buffer: losses, size: 1MiB }
  - free: weights
  - compare: { since: warm, id: since_warm }
  - compare: { since: start, id: in_all }
  - expect: [ nothing.grown_sites == 0, since_warm.grown_sites == 2,
        since_warm.grown_bytes == 13MiB, in_all.grown_bytes == allocated ]",
    );
    let table = &run
        .steps
        .iter()
        .find(|step| step.text == "since warm" && !step.tables.is_empty())
        .unwrap()
        .tables[0];
    let rows = [
        ["kv (line 8)", "0 B", "12 MiB", "12 MiB"],
        ["losses (line 9)", "0 B", "1 MiB", "1 MiB"],
    ];
    assert_eq!(table.rows, rows.map(|row| row.map(str::to_owned).to_vec()));
}
