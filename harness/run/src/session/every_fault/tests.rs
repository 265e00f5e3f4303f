#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::AtomicUsize;

use super::*;
use crate::session::Selection;

const SCENARIO: &str = "about: A test.
needs: { memory: 64MiB }
allocators: [caching, direct]
steps:
  - alloc: { buffer: a, size: 20MiB }
  - fill: a
  - free: a
  - alloc: { buffer: b, size: 50MiB, on_oom: { empty_cache: {} } }
";

fn plan(text: &str) -> Plan {
    let scenario = Scenario::parse(text, Path::new("test.yaml")).unwrap();
    Plan {
        scenarios: vec![scenario],
        selection: Selection::default(),
        seed: None,
        memory: None,
        repetitions: 1,
        audit: true,
        fail_fast: false,
        program: "harness".to_owned(),
    }
}

/// What comes of it, and how many runs were announced and made.
fn run(plan: &Plan, which: Which, stop: bool) -> (FaultedRuns, usize, usize) {
    let (announced, made) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let begun = |runs: usize| {
        announced.fetch_add(runs, Ordering::Relaxed);
    };
    let progress = || {
        made.fetch_add(1, Ordering::Relaxed);
    };
    let source = DeviceSource::simulated();
    let stop = AtomicBool::new(stop);
    let engine = Engine { plan, source: &source, which, jobs: 2, stop: &stop, begun: &begun, progress: &progress };
    let runs = every_fault(&engine).unwrap();
    (runs, announced.into_inner(), made.into_inner())
}

#[test]
fn each_call_fails_once_and_each_end_is_one_that_it_may_have() {
    let plan = plan(SCENARIO);
    let (runs, announced, made) = run(&plan, Which::All, false);
    assert!(runs.passed(), "{runs:#?}");
    assert_eq!((announced, runs.left_out), (made, 0));
    for arm in &runs.arms {
        let tried: BTreeSet<(&str, u64)> = arm.cases.iter().map(|case| (case.call.as_str(), case.number)).collect();
        assert_eq!(tried.len(), arm.calls, "{arm:#?}");
        for case in &arm.cases {
            assert!(case.reproduce.contains(&format!("--allocator {} ", arm.allocator)), "{}", case.reproduce);
            assert!(case.reproduce.contains(&format!("--fail {}:{}", case.call, case.number)), "{}", case.reproduce);
        }
    }
    let ends = |arm: usize, call: &str| -> Vec<(u64, &FaultedEnd)> {
        runs.arms[arm].cases.iter().filter(|case| case.call == call).map(|case| (case.count, &case.end)).collect()
    };
    // PyTorch asks again once, the policy once more; without a cache there is only the policy.
    assert_eq!(ends(0, "cudaMalloc")[..2], [(1, &FaultedEnd::Healed), (2, &FaultedEnd::OutOfMemory)]);
    assert_eq!(ends(1, "cudaMalloc"), [(1, &FaultedEnd::OutOfMemory), (1, &FaultedEnd::Recovered)]);
    assert!(ends(1, "cudaFree").iter().all(|(_, end)| matches!(end, FaultedEnd::Told { error } if error.starts_with("cudaFree failed"))));
}

#[test]
fn a_sample_says_so_and_an_interrupt_leaves_the_rest_out() {
    let plan = plan(SCENARIO);
    let (all, ..) = run(&plan, Which::All, false);
    let (sampled, ..) = run(&plan, Which::Sample(2), false);
    for (arm, whole) in sampled.arms.iter().zip(&all.arms) {
        assert_eq!(arm.chosen, format!("2 evenly spread of {}", whole.calls));
        assert!((2..=4).contains(&arm.cases.len()), "{arm:#?}");
    }
    let (stopped, ..) = run(&plan, Which::All, true);
    assert_eq!((stopped.cases().count(), stopped.left_out), (0, all.arms.iter().map(|arm| arm.calls).sum()));
}

#[test]
fn nothing_is_tried_where_the_run_without_failures_does_not_pass() {
    let fails = SCENARIO.replace("50MiB", "70MiB");
    let (runs, ..) = run(&plan(&fails), Which::All, false);
    let why = &runs.arms[0].not_tried.as_ref().unwrap();
    assert!(why.failed && why.why.contains("test.yaml:8:5: expectation"), "{why:?}");
    assert!(!runs.passed());
    let own = SCENARIO.replace("steps:", "faults: [{ call: cudaMalloc }]\nsteps:");
    let (runs, ..) = run(&plan(&own), Which::All, false);
    assert_eq!(runs.arms[0].not_tried, Some(NotTried { why: "it has faults of its own".to_owned(), failed: false }));
    assert!(runs.passed());
    let storm = "steps:\n  - storm: { id: s, threads: 2, operations: 9, sizes: 1MiB, live: 4MiB, lifetime: { min: 1, max: 3 } }";
    let (runs, ..) = run(&plan(&SCENARIO.replace("steps:", storm)), Which::All, false);
    let why = "how the threads of its storm meet differs from run to run, and with it the calls of the device".to_owned();
    assert_eq!(runs.arms[0].not_tried, Some(NotTried { why, failed: false }));
    assert!(runs.passed());
}

#[test]
fn what_may_not_happen_however_calls_fail_is_a_defect() {
    let plan = plan(SCENARIO);
    let arm = plan.arms().next().unwrap();
    let without = plan.run_arm(&arm, &DeviceSource::simulated(), &Arc::default()).unwrap();
    let judged = |seen: &Seen| judge(DeviceCall::Free, arm.scenario, &without, seen);
    let violated = |rule: Rule, seen: &str| {
        let first = Violation { step: 1, at: None, rule, expected: "this".to_owned(), seen: seen.to_owned() };
        let verdict = Verdict::Failed { first, rest: Vec::new() };
        judged(&Seen::Recorded(Box::new(RunRecord { verdict, ..without.clone() })))
    };
    let is_defect = |end: &FaultedEnd| matches!(end, FaultedEnd::Defect { .. });
    for invariant in [Invariant::NothingLeaks, Invariant::ContentsAreIntact, Invariant::CountersEqualStructure] {
        assert!(is_defect(&violated(Rule::Invariant(invariant), "that")), "{invariant}");
    }
    assert!(is_defect(&violated(Rule::TimeLimit, "no end")));
    assert!(is_defect(&violated(Rule::DeviceFailure, "something failed")));
    assert!(is_defect(&judged(&Seen::Panicked("index out of bounds".to_owned()))));
    assert_eq!(violated(Rule::DeviceFailure, "cudaFree failed"), FaultedEnd::Told { error: "cudaFree failed".to_owned() });
    assert_eq!(violated(Rule::Expectation, "that"), FaultedEnd::Healed);
    assert_eq!(violated(Rule::Invariant(Invariant::RetryMakesProgress), "that"), FaultedEnd::Healed);
}
