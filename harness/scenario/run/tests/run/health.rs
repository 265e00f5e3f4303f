//! Health checks: a run without an audit detects an error at the next check and reports its step.

use std::path::Path;

use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::{allocator::AllocatorKind, units::Bytes};
use harness_record::{Invariant, Rule, RunRecord, Verdict};
use harness_run::run::{Run, RunRequest};
use harness_scenario::Scenario;

use crate::lying::{Lie, Lying, TOLD};
use crate::program::request;

/// The lie happens in step 3.
fn steps(health_check: &str) -> String {
    format!(
        "about: A test.
needs: {{ memory: 64MiB }}
{health_check}
steps:
  - alloc: {{ buffer: a, size: 512B }}
  - fill: a
  - alloc: {{ buffer: told, size: {told}B }}
  - repeat: 10
    steps: [ reset_peak_stats ]
  - storm: {{ id: s, operations: 20, sizes: 512B, live: 4KiB, lifetime: {{ min: 1, max: 5 }} }}
  - free: s
",
        told = TOLD.0
    )
}

fn run(lie: Lie, health_check: &str, audit: bool) -> RunRecord {
    let text = steps(health_check);
    let scenario = Scenario::parse(&text, Path::new("test.yaml"))
        .unwrap_or_else(|error| panic!("{error}\n{text}"));
    let allocator = &AllocatorKind::Caching.into();
    let request = RunRequest {
        audit,
        ..request(&scenario, allocator)
    };
    let config = SimConfig::default();
    let config = SimConfig {
        total: config.context_overhead + Bytes::mib(64),
        ..config
    };
    Run::new(&request, Box::new(SimDevice::new(config)))
        .with_allocator(Box::new(Lying::new(lie).0))
        .checked()
        .unwrap()
}

/// The step at which the run failed, and the violated invariant.
fn failed_at(record: &RunRecord) -> Option<(u32, Invariant)> {
    match &record.verdict {
        Verdict::Passed => None,
        Verdict::Failed { first, .. } => match first.rule {
            Rule::Invariant(invariant) => Some((first.step, invariant)),
            _ => panic!("{first}"),
        },
        verdict => panic!("{verdict:?}"),
    }
}

#[test]
fn a_broken_structure_is_found_at_the_next_check() {
    assert_eq!(failed_at(&run(Lie::Gap, "", false)), None, "nobody looks");
    assert_eq!(
        failed_at(&run(Lie::Gap, "", true)),
        Some((3, Invariant::BlocksTileSegments)),
        "the audit"
    );
    assert_eq!(
        failed_at(&run(Lie::Gap, "health_check: { every: 5 }", false)),
        Some((5, Invariant::BlocksTileSegments))
    );
    assert_eq!(
        failed_at(&run(Lie::Gap, "health_check: { every: 8 }", false)),
        Some((8, Invariant::BlocksTileSegments))
    );
    assert_eq!(
        failed_at(&run(Lie::Gap, "health_check: { every: 30 }", false)),
        Some((14, Invariant::BlocksTileSegments)),
        "in the storm"
    );
}

#[test]
fn contents_that_are_lost_are_found_before_the_buffer_is_freed() {
    let at_the_end = failed_at(&run(Lie::LosesContents, "", false));
    assert!(at_the_end.is_some_and(|(step, invariant)| step > 14
        && invariant == Invariant::ContentsAreIntact), "{at_the_end:?}");
    assert_eq!(
        failed_at(&run(
            Lie::LosesContents,
            "health_check: { every: 5 }",
            false
        )),
        Some((5, Invariant::ContentsAreIntact))
    );
    assert_eq!(
        failed_at(&run(Lie::LosesContents, "health_check: { every: 4 }", true)),
        Some((4, Invariant::ContentsAreIntact))
    );
}

#[test]
fn a_right_allocator_is_never_accused_by_them() {
    assert_eq!(
        failed_at(&run(Lie::Nothing, "health_check: { every: 1 }", false)),
        None
    );
    assert_eq!(
        failed_at(&run(Lie::Nothing, "health_check: { every: 7 }", true)),
        None
    );
}
