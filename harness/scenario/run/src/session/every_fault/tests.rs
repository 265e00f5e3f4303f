#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{collections::BTreeSet, path::Path, sync::atomic::AtomicUsize};

use proptest::prelude::*;

use harness_allocator::device::faulty::CallRecord;
use harness_record::RunRecord;

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

/// Returns the results, and the numbers of announced and completed runs.
fn run(plan: &Plan, chosen: Chosen, stop: bool) -> (FaultedRuns, usize, usize) {
    let (announced, made) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let begun = |runs: usize| {
        announced.fetch_add(runs, Ordering::Relaxed);
    };
    let progress = || {
        made.fetch_add(1, Ordering::Relaxed);
    };
    let source = DeviceSource::simulated();
    let stop = AtomicBool::new(stop);
    let engine = EveryFault {
        plan,
        source: &source,
        chosen,
        jobs: 2,
        stop: &stop,
        begun: &begun,
        progress: &progress,
    };
    let runs = every_fault(&engine).unwrap();
    (runs, announced.into_inner(), made.into_inner())
}

#[test]
fn each_call_fails_once_and_each_end_is_allowed() {
    let plan = plan(SCENARIO);
    let (runs, announced, made) = run(&plan, Chosen::Different(Which::All), false);
    assert!(runs.passed(), "{runs:#?}");
    assert_eq!((announced, runs.left_out), (made, 0));
    for arm in &runs.arms {
        let tried: BTreeSet<(&str, u64)> = arm
            .cases
            .iter()
            .map(|case| (case.call.as_str(), case.number))
            .collect();
        assert_eq!(tried.len() + arm.repeats, arm.calls, "{arm:#?}");
        for case in &arm.cases {
            assert!(
                case.reproduce
                    .contains(&format!("--allocator {} ", arm.allocator)),
                "{}",
                case.reproduce
            );
            assert!(
                case.reproduce
                    .contains(&format!("--fail {}:{}", case.call, case.number)),
                "{}",
                case.reproduce
            );
        }
    }
    let ends = |arm: usize, call: &str| -> Vec<(u64, &FaultOutcome)> {
        runs.arms[arm]
            .cases
            .iter()
            .filter(|case| case.call == call)
            .map(|case| (case.count, &case.end))
            .collect()
    };
    // PyTorch retries once and the policy once more; an allocator without a cache has only the
    // policy.
    assert_eq!(
        ends(0, "cudaMalloc")[..2],
        [(1, &FaultOutcome::Healed), (2, &FaultOutcome::OutOfMemory)]
    );
    assert_eq!(
        ends(1, "cudaMalloc"),
        [
            (1, &FaultOutcome::OutOfMemory),
            (1, &FaultOutcome::Recovered)
        ]
    );
    assert!(
        ends(1, "cudaFree")
            .iter()
            .all(|(_, end)| matches!(end, FaultOutcome::NamedError { error }
                if error.starts_with("cudaFree failed")))
    );
}

#[test]
fn a_sample_is_labeled_and_an_interrupt_skips_the_rest() {
    let plan = plan(SCENARIO);
    let (all, ..) = run(&plan, Chosen::Different(Which::All), false);
    let (sampled, ..) = run(&plan, Chosen::Different(Which::Sample(2)), false);
    for (arm, whole) in sampled.arms.iter().zip(&all.arms) {
        assert_eq!(
            arm.chosen,
            format!("2 evenly spread of {}", whole.calls - whole.repeats)
        );
        assert!((2..=4).contains(&arm.cases.len()), "{arm:#?}");
    }
    let (stopped, ..) = run(&plan, Chosen::Different(Which::All), true);
    assert_eq!(
        (stopped.cases().count(), stopped.left_out),
        (0, all.arms.iter().map(|arm| arm.calls).sum())
    );
}

#[test]
fn no_call_fails_if_the_run_without_failures_does_not_pass() {
    let fails = SCENARIO.replace("50MiB", "70MiB");
    let (runs, ..) = run(&plan(&fails), Chosen::Different(Which::All), false);
    let why = &runs.arms[0].not_tried.as_ref().unwrap();
    assert!(
        why.failed && why.why.contains("test.yaml:8:5: expectation"),
        "{why:?}"
    );
    assert!(!runs.passed());
    let own = SCENARIO.replace("steps:", "faults: [{ call: cudaMalloc }]\nsteps:");
    let (runs, ..) = run(&plan(&own), Chosen::Different(Which::All), false);
    assert_eq!(
        runs.arms[0].not_tried,
        Some(NotTried {
            why: "it declares faults of its own".to_owned(),
            failed: false
        })
    );
    assert!(runs.passed());
    let storm = "steps:\n  - storm: { id: s, threads: 2, operations: 9, sizes: 1MiB, live: 4MiB, \
         lifetime: { min: 1, max: 3 } }";
    let (runs, ..) = run(
        &plan(&SCENARIO.replace("steps:", storm)),
        Chosen::Different(Which::All),
        false,
    );
    let why =
        "its storm has threads, so the sequence of device calls differs from run to run".to_owned();
    assert_eq!(
        runs.arms[0].not_tried,
        Some(NotTried { why, failed: false })
    );
    assert!(runs.passed());
}

#[test]
fn forbidden_results_are_defects() {
    let plan = plan(SCENARIO);
    let arm = plan.arms().next().unwrap();
    let record = plan
        .run_arm(&arm, &DeviceSource::simulated(), &Arc::default())
        .unwrap();
    let without = RunResult {
        ooms: record.stats.num_ooms,
        record,
        times: BTreeMap::new(),
        unused_at_peak: Bytes::ZERO,
        figures: BTreeMap::new(),
    };
    let judged = |seen: &RunEnd| judge((None, DeviceCall::Free), arm.scenario, without.ooms, seen);
    let violated = |rule: Rule, seen: &str| {
        let first = Violation {
            step: 1,
            at: None,
            rule,
            expected: "this".to_owned(),
            seen: seen.to_owned(),
        };
        let verdict = Verdict::Failed {
            first,
            rest: Vec::new(),
        };
        let record = RunRecord {
            verdict,
            ..without.record.clone()
        };
        judged(&RunEnd::Run(Box::new(RunResult {
            record,
            ..without.clone()
        })))
    };
    let is_defect = |end: &FaultOutcome| matches!(end, FaultOutcome::Defect { .. });
    for invariant in [
        Invariant::NothingLeaks,
        Invariant::ContentsAreIntact,
        Invariant::CountersEqualStructure,
    ] {
        assert!(
            is_defect(&violated(Rule::Invariant(invariant), "that")),
            "{invariant}"
        );
    }
    assert!(is_defect(&violated(Rule::TimeLimit, "no end")));
    assert!(is_defect(&violated(
        Rule::DeviceFailure,
        "something failed"
    )));
    assert!(is_defect(&judged(&RunEnd::Panicked(
        "index out of bounds".to_owned()
    ))));
    assert_eq!(
        violated(Rule::DeviceFailure, "cudaFree failed"),
        FaultOutcome::NamedError {
            error: "cudaFree failed".to_owned()
        }
    );
    assert_eq!(violated(Rule::Expectation, "that"), FaultOutcome::Healed);
    assert_eq!(
        violated(Rule::Invariant(Invariant::RetryMakesProgress), "that"),
        FaultOutcome::Healed
    );
}

#[test]
fn the_error_of_a_process_names_it_and_its_ooms_count() {
    let text = SCENARIO.replace(
        "steps:",
        "processes: [worker]\nsteps:\n  - process: worker\n    steps: [ reset_peak_stats ]",
    );
    let scenario = Scenario::parse(&text, Path::new("test.yaml")).unwrap();
    let plan = plan(SCENARIO);
    let record = plan
        .run_arm(
            &plan.arms().next().unwrap(),
            &DeviceSource::simulated(),
            &Arc::default(),
        )
        .unwrap();
    let without = RunResult {
        ooms: record.stats.num_ooms,
        record,
        times: BTreeMap::new(),
        unused_at_peak: Bytes::ZERO,
        figures: BTreeMap::new(),
    };
    let call = (Some(&scenario.processes[0].name), DeviceCall::Free);
    let failed = |expected: &str| {
        let (expected, seen) = (expected.to_owned(), "cudaFree failed".to_owned());
        let first = Violation {
            step: 1,
            at: None,
            rule: Rule::DeviceFailure,
            expected,
            seen,
        };
        let record = RunRecord {
            verdict: Verdict::Failed {
                first,
                rest: Vec::new(),
            },
            ..without.record.clone()
        };
        judge(
            call,
            &scenario,
            without.ooms,
            &RunEnd::Run(Box::new(RunResult {
                record,
                ..without.clone()
            })),
        )
    };
    let error = "in the process `worker`: cudaFree failed".to_owned();
    assert_eq!(
        failed("in the process `worker`: the driver call to succeed"),
        FaultOutcome::NamedError { error }
    );
    assert!(matches!(
        failed("the driver call to succeed"),
        FaultOutcome::Defect { .. }
    ));
    let more = RunResult {
        ooms: without.ooms + 1,
        ..without.clone()
    };
    assert_eq!(
        judge(call, &scenario, without.ooms, &RunEnd::Run(Box::new(more))),
        FaultOutcome::Recovered
    );
    assert_eq!(
        judge(
            call,
            &scenario,
            without.ooms,
            &RunEnd::Run(Box::new(without.clone()))
        ),
        FaultOutcome::Healed
    );
}

#[test]
fn copies_and_separate_runs_give_equal_results_and_missing_reports_are_replaced_by_separate_runs() {
    let plan = plan(LOOPS);
    let source = DeviceSource::simulated();
    let stop = AtomicBool::new(false);
    let tried = AtomicUsize::new(0);
    let progress = || {
        tried.fetch_add(1, Ordering::Relaxed);
    };
    let all = Chosen::Different(Which::All);
    let engine = EveryFault {
        plan: &plan,
        source: &source,
        chosen: all,
        jobs: 2,
        stop: &stop,
        begun: &|_| {},
        progress: &progress,
    };
    let arms: Vec<ArmRun<'_>> = plan.arms().collect();
    let in_copies = try_all(&engine, &arms, &Servers::start(&engine, &arms)).unwrap();
    let alone = try_all(&engine, &arms, &Servers::none()).unwrap();
    assert_eq!(in_copies, alone);
    assert!(
        in_copies.cases().any(|case| case.count == 2),
        "some call fails once and the allocator recovers"
    );
    let told_before = tried.load(Ordering::Relaxed) / 2;
    let broken = try_all(&engine, &arms, &Servers::breaking_off(3)).unwrap();
    assert_eq!(broken, alone);
    assert_eq!(
        tried.load(Ordering::Relaxed),
        3 * told_before,
        "each call is reported once"
    );
}

#[test]
fn choices_are_parsed_and_others_are_refused() {
    let sample = Chosen::Different(Which::Sample(3));
    for (text, chosen) in [
        ("each", Chosen::Each),
        ("all", Chosen::Different(Which::All)),
        ("sample:3", sample),
    ] {
        assert_eq!(text.parse(), Ok(chosen));
    }
    assert_eq!(
        "every".parse::<Chosen>().unwrap_err().to_string(),
        "`every` does not select calls: write `all`, `each`, `sample:N` or `largest:N`, with N \
         from 1, as in `sample:20`"
    );
}

/// A training that repeats the same operations, and one that gets less memory each time.
const LOOPS: &str = "about: A test.
needs: { memory: 64MiB }
allocators: [caching, expandable, direct, rmm_pool, async_pool]
steps:
  - train: { id: same, parameters: 4MiB, layers: 2, activations_per_sample: 1MiB, batch: 2,
        iterations: 4 }
  - alloc: { buffer: a, size: 4MiB }
  - fill: a
  - train: { id: less, parameters: 4MiB, layers: 3, activations_per_sample: 2MiB, batch: 16,
        iterations: 3, on_oom: { halve_batch: { empty_cache: true } } }
";

/// Checks that skipped calls end like the calls that they repeat, by running every call separately
/// with all checks.
fn assert_nothing_is_lost(text: &str) -> Result<usize, TestCaseError> {
    let plan = plan(text);
    let source = DeviceSource::simulated();
    let stop = AtomicBool::new(false);
    let engine = |chosen| EveryFault {
        plan: &plan,
        source: &source,
        chosen,
        jobs: 2,
        stop: &stop,
        begun: &|_| {},
        progress: &|| {},
    };
    let all = Chosen::Different(Which::All);
    let short = every_fault(&engine(all)).unwrap();
    let mut repeats = 0;
    for (arm, told) in plan.arms().zip(&short.arms) {
        let baseline = engine(all).baseline(arm).unwrap();
        let Ok(ran) = &baseline.ran else { continue };
        let tried_alone = || told.cases.iter().filter(|case| case.count == 1);
        prop_assert_eq!(tried_alone().count() + told.repeats, ran.calls.len());
        repeats += told.repeats;
        let engine = engine(Chosen::Each);
        for (place, point) in ran.calls.iter().enumerate() {
            let alone = engine
                .attempt(
                    baseline.attempt(ran, *point),
                    CheckedFrom::Start,
                    StartedBy::Exec,
                )
                .unwrap()
                .case;
            let of = |made: CallRecord| {
                tried_alone()
                    .find(move |case| case.call == made.call.name() && case.number == made.number)
            };
            let same = of(point.made).or_else(|| of(ran.calls[ran.firsts[place]].made));
            prop_assert_eq!(
                same.map(|case| (&case.end, case.step)),
                Some((&alone.end, alone.step)),
                "{} of {}: {}",
                point.made,
                told.allocator,
                text
            );
        }
    }
    Ok(repeats)
}

#[test]
fn a_repeated_call_ends_like_the_first_one() {
    assert!(assert_nothing_is_lost(LOOPS).unwrap() > 250);
}

fn steps() -> impl Strategy<Value = Vec<String>> {
    let storm = (1_u64..30, 1_u64..12).prop_map(|(operations, longest)| {
        format!(
            "storm: {{ id: ID, operations: {operations}, sizes: {{ min: 64KiB, max: 4MiB }}, \
             live: 8MiB, lifetime: {{ min: 1, max: {longest} }}, fill: true }}\n  - free: ID"
        )
    });
    let policies = prop::sample::select(vec![
        "give_up",
        "halve_batch",
        "split_and_accumulate",
        "checkpoint_more",
        "spill_to_host",
    ]);
    let train = (2_u64..5, 4_u64..20, 1_u64..4, policies).prop_map(
        |(layers, batch, iterations, policy)| {
            format!(
                "train: {{ id: ID, parameters: 4MiB, layers: {layers}, activations_per_sample: \
             1MiB, batch: {batch}, iterations: {iterations}, expect: any, on_oom: {policy} }}"
            )
        },
    );
    let infer = (1_u64..4, 1_u64..6).prop_map(|(requests, output)| {
        format!(
            "infer: {{ id: ID, layers: 2, kv_heads: 4, head_dim: 64, requests: {requests}, \
             prompt: {{ min: 5, max: 50 }}, output: {{ min: 1, max: {output} }} }}"
        )
    });
    let kept =
        (1_u64..12).prop_map(|mib| format!("alloc: {{ buffer: ID, size: {mib}MiB, expect: any }}"));
    let looped = (1_u64..4, 1_u64..9).prop_map(|(times, mib)| {
        format!(
            "repeat: {times}\n    steps:\n      - alloc: {{ buffer: ID, size: {mib}MiB \
             }}\n      - fill: {{ buffer: ID, stream: side }}\n      - synchronize: {{ stream: \
             side }}\n      - free: ID"
        )
    });
    let step = prop_oneof![2 => storm, 3 => train, 1 => infer, 2 => kept, 2 => looped,
        1 => Just("empty_cache".to_owned())];
    prop::collection::vec(step, 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None,
        ..ProptestConfig::default() })]

    #[test]
    fn in_any_scenario_a_repeated_call_ends_like_the_first_one(steps in steps()) {
        let steps: String = steps
            .iter()
            .enumerate()
            .map(|(number, step)| format!("  - {}\n", step.replace("ID", &format!("s{number}"))))
            .collect();
        let text = format!(
            "about: A test.\nneeds: {{ memory: 64MiB }}\nallocators: [caching, \
             expandable, bfc]\nstreams: [side]\nsteps:\n{steps}"
        );
        // Policies that could never do anything are rejected.
        prop_assume!(Scenario::parse(&text, Path::new("test.yaml")).is_ok());
        assert_nothing_is_lost(&text)?;
    }
}
