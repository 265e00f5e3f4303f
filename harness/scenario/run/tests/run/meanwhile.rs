//! `meanwhile` steps share the loops and programs of the step that they accompany.

use std::{path::Path, sync::Arc};

use harness_allocator::allocator::AllocatorKind;
use harness_devices::DeviceSource;
use harness_record::{RunRecord, Verdict};
use harness_run::run::{Run, RunRequest};
use harness_scenario::Scenario;

const STORM: &str =
    "storm: { id: s, operations: 6, sizes: [3KiB], live: 1MiB, lifetime: { min: 1, max: 3 } }";

fn ran(steps: &str) -> RunRecord {
    let text = format!(
        "about: A test.\nneeds: {{ memory: 64MiB }}\nprograms: [server]\nsteps:\n{steps}\n"
    );
    let scenario = Scenario::parse(&text, Path::new("test.yaml"))
        .unwrap_or_else(|error| panic!("{error}\n{text}"));
    let (allocator, reproduce, interrupt) = (
        &AllocatorKind::Caching.into(),
        String::new(),
        Arc::default(),
    );
    let request = RunRequest {
        scenario: &scenario,
        allocator,
        seed: 0,
        repetition: 0,
        reproduce,
        audit: true,
        interrupt,
    };
    let source = DeviceSource::simulated();
    let device = source
        .open()
        .and_then(|device| source.limit(device, scenario.needs.memory))
        .unwrap();
    Run::new(&request, device).checked().unwrap()
}

#[test]
fn meanwhile_steps_know_the_variables_of_enclosing_loops() {
    let record = ran(&format!(
        "  - for: {{ i: 1..2 }}
    steps:
      - {STORM}
        meanwhile:
          - for: {{ j: 5..6 }}
            steps:
              - alloc: {{ buffer: a, size: 1KiB * i + 1B * j }}
              - free: a
      - free: s"
    ));
    assert_eq!(record.verdict, Verdict::Passed);
    let inner = record.steps.iter().filter(|step| step.kind == "alloc");
    let seen: Vec<(Option<&str>, u64)> = inner
        .map(|step| (step.iteration.as_deref(), step.size.unwrap().0))
        .collect();
    let expected = [
        ("i = 1, j = 5", 1029),
        ("i = 1, j = 6", 1030),
        ("i = 2, j = 5", 2053),
        ("i = 2, j = 6", 2054),
    ];
    assert_eq!(
        seen,
        expected.map(|(iteration, size)| (Some(iteration), size))
    );
}

#[test]
fn meanwhile_steps_inside_a_program_are_part_of_it() {
    let record = ran(&format!(
        "  - program: server
    steps:
      - {STORM}
        meanwhile:
          - alloc: {{ buffer: held, size: 20MiB }}
          - expect: [ server.reserved == reserved, allocated >= 20MiB ]
  - expect: [ server.allocated >= 20MiB, allocated == 0B ]"
    ));
    assert_eq!(record.verdict, Verdict::Passed);
}

#[test]
fn meanwhile_steps_next_to_a_program_are_not_part_of_it() {
    let record = ran("  - program: server
    steps:
      - alloc: { buffer: model, size: 30MiB }
      - reset_peak_stats
      - expect: allocated == 30MiB
    meanwhile:
      - alloc: { buffer: batch, size: 20MiB }
      - expect: [ allocated == 20MiB, server.allocated == 30MiB ]");
    assert_eq!(record.verdict, Verdict::Passed);
}
