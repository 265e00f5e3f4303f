//! Faults of scenarios: failed calls are noted, faults that fail no call fail the run, and a run
//! that a fault ended releases everything.

use std::{path::Path, sync::Arc};

use harness_allocator::allocator::{Allocation, Allocator, AllocatorKind, wrapper};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{Device, DeviceError, faulty::Injector};
use harness_devices::DeviceSource;
use harness_record::{Invariant, Rule, RunRecord, Verdict, Violation};
use harness_run::session::{Plan, Selection};
use harness_run::{faults::Faults, rig::CheckedFrom, run::Run};
use harness_scenario::Scenario;

use crate::program::request;

fn records(faults: &str, steps: &str) -> Vec<RunRecord> {
    let text = format!(
        "about: A test.\nneeds: {{ memory: 64MiB }}\nallocators: [caching, \
         direct]\nfaults:\n{faults}\nsteps:\n{steps}\n"
    );
    let scenario = Scenario::parse(&text, Path::new("test.yaml"))
        .unwrap_or_else(|error| panic!("{error}\n{text}"));
    let plan = Plan {
        scenarios: vec![scenario],
        selection: Selection::default(),
        seed: None,
        memory: None,
        repetitions: 1,
        audit: true,
        fail_fast: false,
        program: "harness".to_owned(),
    };
    plan.run(&DeviceSource::simulated(), &Arc::default())
        .unwrap()
        .runs
}

fn failure(run: &RunRecord) -> (&Violation, &[Violation]) {
    match &run.verdict {
        Verdict::Failed { first, rest } => (first, rest),
        other => panic!("{}: {other:?}", run.allocator),
    }
}

#[test]
fn a_fault_that_strikes_no_call_fails_the_run_at_its_own_line() {
    let faults = "  - { call: cudaMalloc }\n  - { call: cudaMalloc, skip: 9 }\n  - { call: \
         cudaMallocAsync }";
    let runs = records(faults, "  - alloc: { buffer: a, size: 8MiB, expect: any }");
    for (run, made) in runs.iter().zip(["2 matching calls", "1 matching call"]) {
        let (first, rest) = failure(run);
        let told: Vec<String> = std::iter::once(first)
            .chain(rest)
            .map(ToString::to_string)
            .collect();
        assert_eq!(
            told,
            [
                format!(
                    "test.yaml:6:5: fault: expected the fault in line 6 to strike a call of \
                     cudaMalloc, seen it was not reached: the run made {made}, and the fault skips \
                     the first 9"
                ),
                "test.yaml:7:5: fault: expected the fault in line 7 to strike a call of \
                 cudaMallocAsync, seen it was not reached: the run made no matching call"
                    .to_owned(),
            ]
        );
    }
}

#[test]
fn failed_calls_are_noted_at_their_step() {
    let runs = records(
        "  - { call: cudaMalloc, skip: 1 }",
        "  - alloc: { buffer: a, size: 8MiB }\n  - alloc: { buffer: b, size: 30MiB, expect: any }",
    );
    for run in &runs {
        assert_eq!(run.verdict, Verdict::Passed);
        let notes: Vec<&String> = run.steps[1]
            .notes
            .iter()
            .filter(|note| note.contains("the fault"))
            .collect();
        assert_eq!(
            notes,
            ["the fault in line 5: cudaMalloc 2 (30 MiB) fails with out_of_memory"],
            "{}",
            run.allocator
        );
    }
}

#[test]
fn a_sticky_error_is_reported_at_its_first_step_and_stays_visible() {
    let runs = records(
        "  - { call: cudaMalloc, error: device_lost }",
        "  - reset_peak_stats\n  - alloc: { buffer: a, size: 8MiB }\n  - free: a",
    );
    for run in &runs {
        let (first, rest) = failure(run);
        assert_eq!(
            (first.step, &first.rule, rest.len()),
            (2, &Rule::DeviceFailure, 0),
            "{}",
            run.allocator
        );
        let seen = "cudaMalloc failed: CUDA_ERROR_DEVICE_UNAVAILABLE (46). The failure was \
             injected: neither driver nor GPU is at fault";
        assert_eq!(first.seen, seen);
    }
}

#[test]
fn a_run_that_is_to_end_with_an_error_and_does_not_has_failed() {
    let faults = "  - { call: cudaEventQuery, error: unknown, sticky: false, probability: 1, \
         expect: error }";
    for run in &records(faults, "  - alloc: { buffer: a, size: 8MiB }") {
        assert_eq!(failure(run).0.rule, Rule::Fault, "{}", run.allocator);
    }
    let faults = "  - { call: cudaFree, error: ecc, expect: error }";
    for run in &records(
        faults,
        "  - alloc: { buffer: a, size: 8MiB }\n  - free: a\n  - empty_cache",
    ) {
        assert_eq!(run.verdict, Verdict::Passed, "{}", run.allocator);
    }
}

#[test]
fn a_wait_that_never_returns_is_reported_immediately() {
    let faults = "  - { call: cudaEventRecord, never_completes: true }";
    for run in &records(
        faults,
        "  - record: { event: done }\n  - synchronize: { event: done }",
    ) {
        let (first, _) = failure(run);
        assert_eq!(
            (first.step, &first.rule),
            (2, &Rule::TimeLimit),
            "{}",
            run.allocator
        );
        assert_eq!(
            first.seen,
            "cudaEventSynchronize never returns: it waits for work that does not end"
        );
    }
}

#[test]
fn a_device_that_lets_nothing_begin_is_a_run_that_failed() {
    let text = "about: A test.\nneeds: { memory: 64MiB }\nstreams: [side]\nfaults: [{ call: \
         cudaStreamCreate }]\nsteps: [empty_cache]\n";
    let scenario = Scenario::parse(text, Path::new("test.yaml")).unwrap();
    let plan = Plan {
        scenarios: vec![scenario],
        selection: Selection::default(),
        seed: None,
        memory: None,
        repetitions: 2,
        audit: true,
        fail_fast: false,
        program: "harness".to_owned(),
    };
    let runs = plan
        .run(&DeviceSource::simulated(), &Arc::default())
        .unwrap()
        .runs;
    assert_eq!(runs.len(), 2);
    for run in &runs {
        let (first, _) = failure(run);
        assert!(
            first
                .seen
                .starts_with("cudaStreamCreate failed: CUDA_ERROR_UNKNOWN"),
            "{first}"
        );
    }
}

/// Forgets its memory after a failed free.
struct Forgetful {
    inner: Box<dyn Allocator>,
    has_failed: bool,
}

impl wrapper::AllocatorWrapper for Forgetful {
    type Inner = dyn Allocator;

    fn inner(&self) -> &Self::Inner {
        &*self.inner
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.inner
    }

    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        let answer = self.inner_mut().free(device, allocation);
        self.has_failed |= answer.is_err();
        answer
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        if self.has_failed {
            Ok(())
        } else {
            self.inner_mut().close(device)
        }
    }
}

#[test]
fn an_allocator_that_forgets_memory_after_a_failed_free_leaks_it() {
    let text = "about: A test.\nneeds: { memory: 64MiB }\nsteps:\n  - alloc: { buffer: a, size: \
         8MiB }\n  - free: a\n";
    let scenario = Scenario::parse(text, Path::new("test.yaml")).unwrap();
    let run = |allocator: Box<dyn Allocator>, fail: &str| {
        let spec = AllocatorKind::Direct.into();
        let request = request(&scenario, &spec);
        let device = Box::new(SimDevice::new(SimConfig::default()));
        let faults = Faults::each_by(&scenario, |_| Injector::new(&[fail.parse().unwrap()], 0));
        Run::new(&request, device)
            .with_allocator(allocator)
            .faulted(faults, CheckedFrom::Start)
            .unwrap()
            .record
    };
    let forgetful = || {
        Box::new(Forgetful {
            inner: AllocatorKind::Direct.build(),
            has_failed: false,
        })
    };
    let leaking = run(forgetful(), "cudaFree:1");
    let (first, rest) = failure(&leaking);
    assert_eq!(first.rule, Rule::DeviceFailure);
    assert_eq!(
        rest.iter()
            .map(|violation| &violation.rule)
            .collect::<Vec<_>>(),
        [&Rule::Invariant(Invariant::NothingLeaks)]
    );
    let right = run(AllocatorKind::Direct.build(), "cudaFree:1");
    assert!(
        failure(&right).1.is_empty(),
        "the right one gives it back: {:?}",
        right.verdict
    );
}
