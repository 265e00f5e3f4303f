//! Timed runs: the device receives only the scenario's calls, so device work is neither hidden nor
//! delayed.

use std::{path::Path, sync::Arc};

use harness_allocator::allocator::AllocatorKind;
use harness_allocator::units::{Bytes, Nanos};
use harness_record::Verdict;
use harness_run::run::{Run, RunRequest, RunResult};
use harness_scenario::Scenario;

use crate::program::request;
use crate::staged::{Asked, Stage, Staged};

fn timed(
    memory: &str,
    steps: &str,
    allocator: AllocatorKind,
    nvml_takes: Nanos,
) -> (RunResult, Arc<Asked>) {
    let text = format!(
        "about: A test.\nneeds: {{ memory: {memory} }}\nstreams: [side]\nsteps:\n{steps}\n"
    );
    let scenario = Scenario::parse(&text, Path::new("test.yaml"))
        .unwrap_or_else(|error| panic!("{error}\n{text}"));
    let (device, asked) = Staged::new(
        scenario.needs.memory,
        Stage {
            nvml_takes,
            ..Stage::default()
        },
    );
    let (allocator, reproduce, interrupt) = (&allocator.into(), String::new(), Arc::default());
    let request = RunRequest {
        scenario: &scenario,
        allocator,
        seed: 0,
        repetition: 0,
        reproduce,
        audit: true,
        interrupt,
    };
    let run = Run::new(&request, Box::new(device)).timed().unwrap();
    assert_eq!(run.record.verdict, Verdict::Passed);
    (run, asked)
}

/// Queues 40 ms of work and makes 40 driver calls during it. A checked run would query NVML after
/// each of them.
#[test]
fn work_that_is_queued_is_in_the_time_however_long_nvml_takes() {
    let steps = "  - busy: { stream: side, duration: 40ms }
  - repeat: 20
    steps:
      - alloc: { buffer: a, size: 3MiB }
      - free: a
      - empty_cache
      - expect: device.used >= 0B
  - measure: m
  - synchronize: device";
    let mut times = Vec::new();
    for millis in [0, 1, 3] {
        let (run, _) = timed(
            "64MiB",
            steps,
            AllocatorKind::Caching,
            Nanos::millis(millis),
        );
        times.push(run.record.timings.scenario);
    }
    assert!(
        times[0] >= Nanos::millis(40) && times[0] < Nanos::millis(60),
        "{times:?}"
    );
    assert_eq!(times, [times[0]; 3]);
}

/// With 20 GiB each, the fills take milliseconds, and the free of `direct` waits for them.
#[test]
fn a_free_that_waits_for_fills_takes_as_long_as_they_do() {
    let steps = "  - alloc: { buffer: a, size: 20GiB }
  - alloc: { buffer: b, size: 20GiB }
  - fill: { buffer: a }
  - fill: { buffer: b }
  - free: a
  - free: b";
    let (run, asked) = timed("64GiB", steps, AllocatorKind::Direct, Nanos::millis(1));
    let filled = timed(
        "64GiB",
        &format!("{steps}\n  - synchronize: device").replace("  - free: a\n  - free: b\n", ""),
        AllocatorKind::Direct,
        Nanos::ZERO,
    );
    let fills = filled.0.record.timings.scenario;
    assert!(fills > Nanos::millis(10), "{fills}");
    let first_free = run.record.timings.free.kept[0];
    assert!(
        first_free > Nanos::millis(10) && run.record.timings.scenario > fills,
        "{first_free} of {}",
        run.record.timings.scenario
    );
    assert_eq!(
        asked.counts()[2],
        0,
        "nothing is read that the scenario does not read"
    );
}

/// Contains everything that a checked run checks: frees of filled buffers, failing requests,
/// recovery, expectations, measures and invariants.
#[test]
fn a_timed_run_asks_the_device_nothing_between_its_first_step_and_its_last() {
    let steps = "  - alloc: { buffer: a, size: 3MiB }
  - fill: { buffer: a }
  - measure: m
  - expect: [ device.used - m.device.used == 0B, num_ooms == 0, device.free > 0B ]
  - free: a
  - alloc: { buffer: w, size: 40MiB }
  - external_memory: 4MiB
  - alloc: { buffer: x, size: 60MiB, expect: oom, on_oom: { empty_cache: { retries: 2 } } }
  - storm: { id: s, operations: 200, sizes: { min: 1KiB, max: 2MiB }, live: 8MiB,
        lifetime: { min: 9, max: 99 }, fill: true }
  - train: { id: t, parameters: 4KiB, layers: 2, activations_per_sample: 30MiB, batch: 2,
        iterations: 1, expect: oom, on_oom: { halve_batch: {} } }
  - pins: { storm: s, id: p }
  - empty_cache
expect_violation: retry_makes_progress
invariants: [ device.used > 0B ]";
    let (run, asked) = timed("64MiB", steps, AllocatorKind::Caching, Nanos::ZERO);
    assert!(run.record.timings.allocate.count > 100 && run.record.timings.scenario > Nanos::ZERO);
    // The rig queries memory when it takes the device, when the scenario begins, and for the
    // measure `start`, all before the first step. A refused request also queries free memory, for
    // the allocator's own error.
    let [memory, free_memory, verified] = asked.counts();
    assert_eq!(memory, 3);
    assert!(
        free_memory <= run.record.stats.num_ooms,
        "{free_memory} questions for {} refusals",
        run.record.stats.num_ooms
    );
    assert!(
        verified <= 4,
        "{verified}: the training alone reads its parameters and its layers' output"
    );
}

#[test]
fn the_times_of_steps_go_to_the_record_of_the_checked_run() {
    let text = "about: A test.\nneeds: { memory: 64MiB }\nsteps:\n  - alloc: { buffer: a, size: \
         3MiB, id: x }\n  - busy: { duration: 5ms }\n  - synchronize: device\n  - expect: x.time > \
         0ns\n";
    let scenario =
        Scenario::parse(text, Path::new("test.yaml")).unwrap_or_else(|error| panic!("{error}"));
    let allocator = &AllocatorKind::Caching.into();
    let request = request(&scenario, allocator);
    let device = || Box::new(Staged::new(Bytes::mib(64), Stage::default()).0);
    let mut record = Run::new(&request, device()).checked().unwrap();
    assert!(
        record
            .steps
            .iter()
            .all(|step| step.duration.is_none() && !step.reports.contains_key("time")),
        "a checked run has no times"
    );
    assert_eq!(record.timings, harness_record::Timings::default());
    let timed = Run::new(&request, device()).timed().unwrap();
    let whole = timed.record.timings.scenario;
    timed.add_times_to(&mut record);
    let durations: Vec<Nanos> = record
        .steps
        .iter()
        .map(|step| step.duration.expect("each step was timed"))
        .collect();
    assert!(
        durations[1] + durations[2] >= Nanos::millis(5),
        "{durations:?}"
    );
    assert_eq!(record.steps[0].reports["time"], durations[0].0);
    assert_eq!(
        (
            record.timings.scenario,
            durations.iter().map(|time| time.0).sum::<u64>()
        ),
        (whole, whole.0)
    );
}
