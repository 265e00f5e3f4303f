//! Devices with other users: a correct run passes whoever comes or goes. If NVML cannot attribute
//! memory, no allocator is blamed.

use std::path::Path;
use std::sync::{Arc, atomic::Ordering};

use harness_allocator::{allocator::AllocatorKind, units::Bytes};
use harness_record::{RunRecord, Verdict};
use harness_report::text::step_table;
use harness_run::run::{Run, RunRequest};
use harness_scenario::Scenario;

use crate::staged::{Stage, Staged};

const STEPS: &str = "  - alloc: { buffer: a, size: 30MiB }
  - fill: { buffer: a }
  - external_memory: 8MiB
  - free: a
  - empty_cache
  - external_memory: 0MiB";

fn run_on(steps: &str, stage: Stage) -> RunRecord {
    let text = format!(
        "about: A test.\nneeds: {{ memory: 64MiB }}\nstreams: [one, two]\nsteps:\n{steps}\n"
    );
    let scenario = Scenario::parse(&text, Path::new("test.yaml"))
        .unwrap_or_else(|error| panic!("{error}\n{text}"));
    let (device, _) = Staged::new(scenario.needs.memory, stage);
    let (allocator, reproduce, interrupt) = (
        &AllocatorKind::Caching.into(),
        String::new(),
        Arc::default(),
    );
    Run::new(
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
    .unwrap()
}

/// Other processes whose memory changes after a number of queries.
fn others(before: Bytes, now: Bytes) -> impl Fn(bool) -> Stage {
    move |tells_process| Stage {
        others: Some(Box::new(move |nth| if nth < 6 { before } else { now })),
        tells_process,
        ..Stage::default()
    }
}

#[test]
fn other_processes_fail_no_correct_run() {
    for (before, now) in [
        (Bytes::mib(512), Bytes::ZERO),
        (Bytes::ZERO, Bytes::mib(512)),
        (Bytes::mib(100), Bytes::mib(100)),
    ] {
        let stage = others(before, now);
        for tells_process in [true, false] {
            let run = run_on(STEPS, stage(tells_process));
            assert_eq!(
                run.verdict,
                Verdict::Passed,
                "{before} then {now}, {tells_process}: {}",
                step_table(&run)
            );
        }
    }
}

#[test]
fn an_expectation_that_another_process_breaks_makes_the_run_contended() {
    let steps = format!("{STEPS}\n  - expect: device.used == start.device.used");
    for tells_process in [true, false] {
        let run = run_on(
            &steps,
            others(Bytes::mib(512), Bytes::mib(100))(tells_process),
        );
        let Verdict::Contended { reason } = &run.verdict else {
            panic!("{tells_process}: {:?}", run.verdict)
        };
        assert!(!reason.is_empty());
    }
    let told = run_on(&steps, others(Bytes::mib(512), Bytes::mib(100))(true)).verdict;
    let reason = "other processes held 512 MiB of the device when the run began, and 100 MiB later"
        .to_owned();
    assert_eq!(told, Verdict::Contended { reason });
}

/// Contention explains differences in the device's figures, but not errors in the allocator's
/// memory.
#[test]
fn contention_hides_no_other_violation() {
    let steps = "  - alloc: { buffer: a, size: 30MiB }
  - fill: { buffer: a }
  - fill: { buffer: a, stream: one }";
    let run = run_on(steps, others(Bytes::mib(512), Bytes::ZERO)(true));
    assert!(
        matches!(run.verdict, Verdict::Failed { .. }),
        "{:?}",
        run.verdict
    );
}

/// NVML reports the effect of a call with a delay, so only the second look sees it.
#[test]
fn figures_that_come_late_are_looked_at_twice() {
    let late = Stage {
        others: Some(Box::new(|nth| {
            if nth == 5 {
                Bytes::mib(64)
            } else {
                Bytes::ZERO
            }
        })),
        tells_process: false,
        ..Stage::default()
    };
    assert_eq!(run_on(STEPS, late).verdict, Verdict::Passed);
}

/// The same for other processes: one deviating reading does not count as contention.
#[test]
fn one_odd_reading_of_other_processes_hides_no_failure() {
    let steps = format!("{STEPS}\n  - expect: num_ooms == 1");
    for tells_process in [true, false] {
        let odd_at = |odd: u64| Stage {
            others: Some(Box::new(move |nth| {
                if nth == odd {
                    Bytes::mib(64)
                } else {
                    Bytes::ZERO
                }
            })),
            tells_process,
            ..Stage::default()
        };
        let run = run_on(&steps, odd_at(5));
        assert!(
            matches!(run.verdict, Verdict::Failed { .. }),
            "{tells_process}: {:?}",
            run.verdict
        );
    }
}

#[test]
fn what_streams_take_belongs_to_the_context_overhead() {
    let steps =
        "  - expect: [ device.used == device.context_overhead, device.used == start.device.used ]
  - alloc: { buffer: a, size: 30MiB }
  - expect: device.used - device.context_overhead == reserved_bytes.all.current";
    let run = run_on(
        steps,
        Stage {
            stream_cost: Bytes::mib(10),
            ..Stage::default()
        },
    );
    assert_eq!(run.verdict, Verdict::Passed, "{}", step_table(&run));
    assert_eq!(
        run.steps[0].accounts.device.context_overhead,
        run.steps[0].accounts.device.used
    );
}

/// One expectation with three device figures needs one query.
#[test]
fn all_metrics_of_an_expectation_are_read_at_one_moment() {
    let text = "about: A test.\nneeds: { memory: 64MiB }\nsteps:\n  - expect: device.used - \
         device.context_overhead - device.external_memory == 0B\n";
    let scenario =
        Scenario::parse(text, Path::new("test.yaml")).unwrap_or_else(|error| panic!("{error}"));
    // The memory of others changes with each query, but not within one.
    let asked_before = |expectations: usize| {
        let mut scenario = scenario.clone();
        let first = scenario.steps[0].clone();
        scenario.steps = vec![first; expectations];
        let stage = Stage {
            others: Some(Box::new(|_| Bytes::ZERO)),
            ..Stage::default()
        };
        let (device, asked) = Staged::new(scenario.needs.memory, stage);
        let (allocator, interrupt) = (&AllocatorKind::Caching.into(), Arc::default());
        let request = RunRequest {
            scenario: &scenario,
            allocator,
            seed: 0,
            repetition: 0,
            reproduce: String::new(),
            audit: false,
            interrupt,
        };
        assert_eq!(
            Run::new(&request, Box::new(device))
                .checked()
                .unwrap()
                .verdict,
            Verdict::Passed
        );
        asked.memory.load(Ordering::Relaxed)
    };
    // One look for the expectation, one for the accounts after the step.
    assert_eq!(asked_before(2) - asked_before(1), 2);
}
