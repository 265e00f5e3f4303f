#![allow(clippy::unwrap_used)]

use std::{path::Path, sync::Arc};

use harness_allocator::allocator::AllocatorKind;

use crate::session::{ArmRun, Plan, Selection};
use harness_devices::DeviceSource;
use harness_record::Verdict;
use harness_scenario::Scenario;

fn passes(steps: &str, allocator: AllocatorKind) {
    let text = format!("about: A test.\nneeds: {{ memory: 512MiB }}\nseed: 3\nsteps:\n{steps}");
    let scenario = Scenario::parse(&text, Path::new("pins.yaml"))
        .unwrap_or_else(|error| panic!("{error}\n{text}"));
    let (scenarios, selection, program) = (
        vec![scenario.clone()],
        Selection::default(),
        "harness".to_owned(),
    );
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
        allocator: &allocator.into(),
        repetition: 0,
    };
    let run = plan
        .run_arm(&arm, &DeviceSource::simulated(), &Arc::default())
        .unwrap();
    assert_eq!(
        run.verdict,
        Verdict::Passed,
        "{} notes {:?}",
        allocator.name(),
        run.steps
    );
}

#[test]
fn free_memory_in_pinned_segments_stays_after_empty_cache() {
    let steps = "  - storm: { id: s, operations: 2000, sizes: { min: 256KiB, max: 64MiB },
        live: 400MiB, lifetime: { min: 10, max: 200 } }
  - pins: { storm: s, id: p }
  - empty_cache
  - expect: p.free_in_pinned_segments == reserved_bytes.all.current - allocated_bytes.all.current
";
    passes(steps, AllocatorKind::Caching);
    passes(steps, AllocatorKind::Expandable);
}

#[test]
fn freeing_for_a_request_frees_only_the_pages_it_needs() {
    let steps = "  - storm: { id: s, operations: 400, sizes: { min: 1MiB, max: 20MiB },
        live: 480MiB, lifetime: { min: 10, max: 300 } }
  - free: { pinning: s, for: 60MiB, id: f }
  - expect: f.freed_bytes <= 120MiB
  - alloc: { buffer: x, size: 60MiB }
";
    passes(steps, AllocatorKind::Expandable);
}
