#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{path::Path, sync::Arc};

use harness_allocator::allocator::AllocatorKind;
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::wrapper::{self, TestDeviceWrapper};
use harness_allocator::device::{Device, DeviceError, MemoryRange, StreamId};
use harness_devices::DeviceSource;
use harness_record::{Records, RunRecord, Verdict};
use harness_scenario::{Scenario, steps::Action};

use super::*;
use crate::rig::RigOptions;
use crate::session::{Plan, Selection};
use crate::workload::storm;
use crate::workload::tests::{context_on, scenario_in, simulated};

/// Sizes are at most the smallest segment, so a device that lies about segments lies about blocks.
fn storm_of(memory: &str, fields: &str) -> Scenario {
    let step = format!(
        "storm: {{ id: s, operations: 600, sizes: {{ min: 512B, max: 1MiB }}, live: 8MiB, \
         lifetime: {{ min: 1, max: 60 }}, {fields} }}"
    );
    scenario_in(memory, &step)
}

fn run_on(
    device: Box<dyn TestDevice>,
    scenario: &Scenario,
    options: &RigOptions,
) -> (RunContext, Result<StepResult, Stop>) {
    let mut ctx = context_on(device, scenario, options);
    let Action::Storm(storm) = &scenario.steps[0].action else {
        panic!("{}", scenario.steps[0].action)
    };
    let result = storm::run(&mut ctx, &scenario.steps[0], storm, None);
    (ctx, result)
}

/// Runs the storm and checks that the device is left unchanged. Returns the reports and the notes.
fn passes(scenario: &Scenario) -> (BTreeMap<ReportKey, u64>, Vec<String>) {
    let (mut ctx, result) = run_on(
        Box::new(simulated(scenario)),
        scenario,
        &RigOptions::default(),
    );
    let StepResult {
        reports,
        notes,
        unmet,
        outcome,
        ..
    } = result.unwrap();
    assert_eq!(
        outcome == Outcome::OutOfMemory,
        reports[&ReportKey::Ooms] > 0
    );
    assert_eq!(
        (unmet.len(), ctx.rig.memory().unwrap().free),
        (0, scenario.needs.memory)
    );
    ctx.rig.end_step(false).unwrap();
    ctx.rig.finish().unwrap();
    ctx.close().unwrap();
    (reports, notes)
}

/// The invariants violated by a storm on a faulty device.
fn found(device: impl TestDevice + 'static, fields: &str) -> Vec<Invariant> {
    match run_on(
        Box::new(device),
        &storm_of("1GiB", fields),
        &RigOptions::default(),
    )
    .1
    {
        Err(Stop::Violated(findings)) => findings
            .into_iter()
            .map(|finding| finding.invariant)
            .collect(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn threads_report_the_same_in_every_run_if_memory_suffices() {
    for fields in [
        "threads: 4",
        "threads: 4, fill: false",
        "threads: 64, fill: false",
    ] {
        let scenario = storm_of("2GiB", fields);
        let (once, again) = (passes(&scenario), passes(&scenario));
        assert_eq!(once, again, "{fields}");
        let reports = once.0;
        assert!(
            reports[&ReportKey::Ooms] == 0
                && reports[&ReportKey::Frees] < reports[&ReportKey::Allocations],
            "{fields}: {reports:?}"
        );
    }
}

#[test]
fn a_failed_request_of_a_thread_is_counted_and_later_requests_stay_the_same() {
    let asked = |memory: &str| {
        let reports = passes(&storm_of(memory, "threads: 4")).0;
        (
            reports[&ReportKey::Ooms],
            reports[&ReportKey::Allocations] + reports[&ReportKey::Ooms],
        )
    };
    let (ample, short) = (asked("1GiB"), asked("4MiB"));
    assert!(ample.0 == 0 && short.0 > 0, "{ample:?} {short:?}");
    assert_eq!(
        ample.1, short.1,
        "each thread makes the same number of requests"
    );
}

/// Returns the first segment's address for every request.
struct GivesTwice {
    inner: SimDevice,
    first: Option<DevicePtr>,
}

impl wrapper::DeviceWrapper for GivesTwice {
    type Inner = SimDevice;

    fn inner(&self) -> &SimDevice {
        &self.inner
    }

    fn inner_mut(&mut self) -> &mut SimDevice {
        &mut self.inner
    }

    fn malloc(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        match self.first {
            Some(first) => Ok(first),
            None => Ok(*self.first.insert(self.inner.malloc(size)?)),
        }
    }
}

impl TestDeviceWrapper for GivesTwice {}

/// Loses every hundredth write.
struct Forgets {
    inner: SimDevice,
    fills: u64,
}

impl wrapper::DeviceWrapper for Forgets {
    type Inner = SimDevice;

    fn inner(&self) -> &SimDevice {
        &self.inner
    }

    fn inner_mut(&mut self) -> &mut SimDevice {
        &mut self.inner
    }
}

impl TestDeviceWrapper for Forgets {
    fn fill(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError> {
        self.fills += 1;
        if self.fills.is_multiple_of(100) {
            Ok(())
        } else {
            self.inner.fill(stream, range, tag)
        }
    }
}

#[test]
fn addresses_handed_out_twice_are_found() {
    let device = GivesTwice {
        inner: SimDevice::new(SimConfig::default()),
        first: None,
    };
    assert_eq!(
        found(device, "threads: 4, fill: false"),
        [Invariant::AllocationsAreDisjoint]
    );
}

#[test]
fn lost_contents_are_found() {
    let device = Forgets {
        inner: SimDevice::new(SimConfig::default()),
        fills: 0,
    };
    assert_eq!(found(device, "threads: 4"), [Invariant::ContentsAreIntact]);
}

#[test]
fn overlapping_blocks_are_found() {
    let mut devices = [(); 2].map(|()| SimDevice::new(SimConfig::default()));
    let mut allocators = [(); 2].map(|()| AllocatorKind::Caching.build());
    let mut ask = |which: usize, size: u64| {
        allocators[which]
            .allocate(&mut devices[which], Request::new(Bytes(size)))
            .unwrap()
    };
    let mut handed_out = BTreeMap::new();
    for apart in [ask(0, 512), ask(0, 4096)] {
        assert_eq!(note_handed_out(&mut handed_out, &apart), Ok(()));
    }
    // Two new devices have the same addresses.
    for again in [ask(1, 512), ask(1, 1024)] {
        let Err(Stop::Violated(findings)) = note_handed_out(&mut handed_out, &again) else {
            panic!("{again:?}")
        };
        assert_eq!(
            findings[0].invariant,
            Invariant::AllocationsAreDisjoint,
            "{findings:?}"
        );
    }
}

#[test]
fn a_lost_counter_update_and_memory_that_stays_reserved_are_found() {
    let mut device = SimDevice::new(SimConfig::default());
    let mut allocator = AllocatorKind::Caching.build();
    let held = allocator
        .allocate(&mut device, Request::new(Bytes::kib(1)))
        .unwrap();
    let (right, stats) = (
        Counts {
            allocations: 1,
            ..Counts::default()
        },
        allocator.stats(),
    );
    let check = |counts, live| check_counters(&counts, live, &stats).len();
    assert_eq!(check(right, held.size()), 0);
    assert_eq!(check(right, Bytes::ZERO), 1);
    assert_eq!(
        check(
            Counts {
                allocations: 2,
                ..right
            },
            held.size()
        ),
        1
    );
    assert_eq!(
        check(
            Counts {
                frees: 1,
                ooms: 1,
                ..right
            },
            held.size()
        ),
        2
    );
    assert_eq!(
        check(
            Counts {
                too_large: 1,
                ..right
            },
            held.size()
        ),
        0,
        "the allocator does not count these"
    );
    assert_eq!(check_everything_released(&stats).len(), 1);
    assert_eq!(check_everything_released(&MemoryStats::default()).len(), 0);
}

#[test]
fn threads_stop_with_the_run_and_other_allocators_are_refused() {
    let scenario = storm_of("1GiB", "threads: 4");
    let control = Control::new(Arc::new(AtomicBool::new(true)));
    let options = RigOptions {
        control: Arc::new(control),
        ..RigOptions::default()
    };
    let (ctx, stopped) = run_on(Box::new(simulated(&scenario)), &scenario, &options);
    assert_eq!(stopped.map(drop), Err(Stop::Interrupted));
    ctx.close().unwrap();
    let mut ctx = context_on(
        Box::new(simulated(&scenario)),
        &scenario,
        &RigOptions::default(),
    );
    ctx.setup.alloc_conf = None;
    let Action::Storm(storm) = &scenario.steps[0].action else {
        panic!("{}", scenario.steps[0].action)
    };
    let refused = storm::run(&mut ctx, &scenario.steps[0], storm, None).unwrap();
    assert!(
        refused.reports.is_empty() && refused.unmet.len() == 1,
        "{refused:?}"
    );
}

fn plan(scenario: Scenario, selection: Selection) -> Plan {
    let (program, scenarios) = ("harness".to_owned(), vec![scenario]);
    Plan {
        scenarios,
        selection,
        seed: None,
        memory: None,
        repetitions: 1,
        audit: true,
        fail_fast: false,
        program,
    }
}

fn records(plan: &Plan) -> Records {
    plan.run(&DeviceSource::simulated(), &Arc::default())
        .unwrap()
}

#[test]
fn the_records_of_two_runs_are_byte_identical_and_have_no_times() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../scenarios/storm_threads.yaml");
    let plan = plan(Scenario::load(&path).unwrap(), Selection::default());
    let (once, again) = (records(&plan), records(&plan));
    assert_eq!(once.runs.len(), 2);
    for run in &once.runs {
        assert!(
            run.verdict == Verdict::Passed && !run.timed,
            "{}: {:?}",
            run.allocator,
            run.verdict
        );
    }
    assert_eq!(
        serde_json::to_string(&once).unwrap(),
        serde_json::to_string(&again).unwrap()
    );
}

#[test]
fn an_allocator_without_thread_support_is_skipped_with_the_reason() {
    let text = "about: A test.\nneeds: { memory: 64MiB }\nallocators: [caching, bfc, direct, \
         rmm_pool, async_pool]\nsteps:\n  - storm: { id: s, threads: 2, operations: 50, sizes: \
         1MiB, live: 8MiB, lifetime: { min: 1, max: 9 } }\n";
    let scenario = Scenario::parse(text, Path::new("test.yaml")).unwrap();
    let runs = records(&plan(scenario, Selection::default())).runs;
    let skipped = |run: &RunRecord| match &run.verdict {
        Verdict::Skipped { reason, .. } => reason.clone(),
        verdict => format!("{verdict:?}"),
    };
    let told: Vec<String> = runs.iter().map(skipped).collect();
    let reason =
        |arm| format!("a storm of the scenario needs threads, which `{arm}` does not support");
    assert_eq!(
        told,
        [
            "Passed".to_owned(),
            reason("bfc"),
            reason("direct"),
            reason("rmm_pool"),
            reason("async_pool")
        ]
    );
}
