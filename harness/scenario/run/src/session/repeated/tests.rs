#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{path::Path, sync::Arc};

use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::{allocator::AllocatorKind, units::Bytes};
use harness_record::Verdict;
use harness_scenario::Scenario;

use super::*;
use crate::run::{Run, RunRequest};

/// Runs a training that recovers with a smaller batch twice.
fn twice() -> [RunRecord; 2] {
    let text = "about: A test.\nneeds: { memory: 64MiB }\nsteps:\n  - train: { id: t, parameters: \
         1MiB, activations_per_sample: 2MiB, \
                    batch: 32, iterations: 2, on_oom: shrink_batch }\n";
    let scenario = Scenario::parse(text, Path::new("test.yaml")).unwrap();
    [(); 2].map(|()| {
        let config = SimConfig::default();
        let config = SimConfig {
            total: config.context_overhead + Bytes::mib(64),
            ..config
        };
        let (allocator, reproduce, interrupt) = (
            &AllocatorKind::Caching.into(),
            String::new(),
            Arc::default(),
        );
        let request = RunRequest {
            scenario: &scenario,
            allocator,
            seed: 3,
            repetition: 0,
            reproduce,
            audit: true,
            interrupt,
        };
        Run::new(&request, Box::new(SimDevice::new(config)))
            .checked()
            .unwrap()
    })
}

#[test]
fn a_run_that_recovers_by_the_same_attempts_passes() {
    let [mut first, second] = twice();
    assert!(has_recovered(&first));
    judge(&mut first, &second);
    assert_eq!(first.verdict, Verdict::Passed);
}

#[test]
fn a_run_that_recovers_by_other_attempts_fails_and_reports_both() {
    let [mut first, mut second] = twice();
    second.steps[0].recovery.as_mut().unwrap().listed[1].asked = "a batch of 30".to_owned();
    judge(&mut first, &second);
    let Verdict::Failed {
        first: violation, ..
    } = &first.verdict
    else {
        panic!("{:?}", first.verdict)
    };
    assert_eq!(
        (violation.step, &violation.rule),
        (1, &Rule::Invariant(Invariant::RecoveryIsRepeatable))
    );
    assert!(
        violation.expected.contains("from seed 3") && violation.expected.contains("a batch of 28"),
        "{violation}"
    );
    assert!(violation.seen.contains("a batch of 30"), "{violation}");
}
