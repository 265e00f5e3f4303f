//! The measuring loop: when it stops, its counts, and its detection of slower allocators.

use std::time::{Duration, Instant};
use std::{collections::BTreeSet, hint::black_box, sync::atomic::Ordering};

use harness_allocator::allocator::{
    Allocation, Allocator, AllocatorError, AllocatorKind, AllocatorSpec, MemoryFraction, Request,
};
use harness_allocator::device::sim::{CostModel, SimConfig, SimDevice, Sourced};
use harness_allocator::device::{Clock, Device, DeviceError, DevicePtr, StreamId};
use harness_allocator::stats::{MemoryStats, SegmentInfo};
use harness_allocator::units::{Bytes, Nanos};
use harness_bench::execute::{Terms, cases_of};
use harness_bench::record::{
    BenchRun, EntryResult, Quantity, Shard, Stopped, SuiteRecord, Verdict,
};
use harness_bench::{compare::compare, machine::machine, suite::Suite};
use harness_gpu_settings::settings::Settings;
use harness_staging::strict;

use super::provider::{TestProvider, catalogue, measured, medians, suite, terms, within};
use super::world::World;

const ARMS: &str = "caching, expandable, bfc, rmm_pool, async_pool, direct";

/// All measures with model times.
const OF_THE_MODEL: &str = "latency: { sizes: [512B, 2MiB, 64MiB] }
  - recovery: { sizes: [16MiB] }
  - pipeline: { sizes: [32MiB] }
  - empty_cache: { segments: [1, 10] }
  - record_stream: { streams: [0, 2] }
  - scenario: { file: ../oom_retry.yaml }";

#[test]
fn on_a_virtual_clock_two_equal_rounds_are_enough_and_seeds_change_nothing() {
    let suite = suite(ARMS, OF_THE_MODEL);
    let first = TestProvider::new().run(&suite);
    assert_eq!((first.stopped, first.rounds), (Stopped::Deterministic, 2));
    for entry in &first.entries {
        let measured = measured(entry);
        assert_eq!(
            measured.rounds[0],
            measured.rounds[1],
            "{}, {}",
            entry.case(),
            entry.arm
        );
        assert_eq!(
            (measured.summary.low, measured.summary.high),
            (measured.summary.median, measured.summary.median)
        );
        assert!(matches!(
            entry.quantity,
            Quantity::ModelTime | Quantity::Memory
        ));
    }
    let second = TestProvider::new().run_with(&suite, &terms(17), |_| {});
    assert_eq!(first.entries, second.entries);
}

#[test]
fn arms_of_a_case_stand_next_to_each_other() {
    let suite = suite(ARMS, OF_THE_MODEL);
    let record = TestProvider::new().run(&suite);
    let mut cases: Vec<(String, Quantity)> = record
        .entries
        .iter()
        .map(|entry| (entry.case(), entry.quantity))
        .collect();
    cases.dedup();
    let distinct: BTreeSet<_> = cases.iter().cloned().collect();
    assert_eq!(cases.len(), distinct.len());
    assert_eq!(record.entries.len(), 6 * cases.len());
}

fn a_tenth_slower() -> CostModel {
    let slower = |figure: Sourced<Nanos>| Sourced {
        value: Nanos(figure.value.0 * 11 / 10),
        ..figure
    };
    let model = CostModel::PUBLISHED;
    CostModel {
        malloc: slower(model.malloc),
        malloc_per_mib: slower(model.malloc_per_mib),
        free: slower(model.free),
        free_per_mib: slower(model.free_per_mib),
        map_page: slower(model.map_page),
        unmap_page: slower(model.unmap_page),
        pool_call: slower(model.pool_call),
        submit: slower(model.submit),
        event_create: slower(model.event_create),
        event_record: slower(model.event_record),
        event_query: slower(model.event_query),
        synchronize: slower(model.synchronize),
        ..model
    }
}

#[test]
fn a_driver_that_is_a_tenth_slower_makes_every_model_time_a_tenth_longer() {
    let suite = suite(
        ARMS,
        "latency: { sizes: [2MiB, 64MiB] }\n  - empty_cache: { segments: [10] }\n  - \
         record_stream: { streams: [1] }",
    );
    let before = TestProvider::new().run(&suite);
    let after = TestProvider {
        cost: a_tenth_slower(),
        ..TestProvider::new()
    }
    .run(&suite);
    let mut compared = 0;
    for (old, new) in before.entries.iter().zip(&after.entries) {
        let (old_time, new_time) = (measured(old).summary.median, measured(new).summary.median);
        let ratio = new_time as f64 / old_time as f64;
        // A cache hit calls no driver function, so it takes no model time.
        assert!(
            (old_time, new_time) == (0, 0) || (1.09..=1.11).contains(&ratio),
            "{}, {}: {old_time} {new_time}",
            old.case(),
            old.arm
        );
        compared += usize::from(old_time > 0);
    }
    assert!(compared > 30, "only {compared} entries take a time");
}

/// An allocator that does additional work before each allocation.
struct Before(Box<dyn Allocator>, Box<Meddling>);

type Meddling = dyn Fn(&mut dyn Device) -> Result<(), DeviceError> + Send;

impl Allocator for Before {
    fn name(&self) -> &'static str {
        self.0.name()
    }
    fn allocate(
        &mut self,
        device: &mut dyn Device,
        request: Request,
    ) -> Result<Allocation, AllocatorError> {
        (self.1)(device)?;
        self.0.allocate(device, request)
    }
    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        self.0.free(device, allocation)
    }
    fn record_stream(
        &mut self,
        allocation: &Allocation,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        self.0.record_stream(allocation, stream)
    }
    fn release_stream(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        self.0.release_stream(device, stream)
    }
    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.0.empty_cache(device)
    }
    fn set_memory_fraction(&mut self, device: &dyn Device, fraction: MemoryFraction) {
        self.0.set_memory_fraction(device, fraction);
    }
    fn reset_peaks(&mut self) {
        self.0.reset_peaks();
    }
    fn stats(&self) -> MemoryStats {
        self.0.stats()
    }
    fn snapshot(&self) -> Vec<SegmentInfo> {
        self.0.snapshot()
    }
    fn segment_at(&self, address: DevicePtr) -> Option<SegmentInfo> {
        self.0.segment_at(address)
    }
    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.0.close(device)
    }
}

/// An allocator whose allocations take at least 110 µs.
fn busy(_: &AllocatorSpec) -> Box<dyn Allocator> {
    let busy = |_: &mut dyn Device| {
        let start = Instant::now();
        while start.elapsed() < Duration::from_micros(110) {
            black_box(());
        }
        Ok(())
    };
    Box::new(Before(AllocatorKind::Caching.build(), Box::new(busy)))
}

/// A busy machine only makes a time longer.
#[test]
fn host_times_cover_the_work_of_the_allocator() {
    let mut provider = TestProvider {
        clock: Clock::Measured,
        build: busy,
        ..TestProvider::new()
    };
    let suite = suite("caching, expandable", "latency: { sizes: [2MiB] }");
    let record = provider.run_with(&suite, &within(Nanos(1)), |_| {});
    assert!(!record.entries.is_empty());
    for entry in &record.entries {
        let summary = &measured(entry).summary;
        assert_eq!(entry.quantity, Quantity::HostTime);
        assert!(summary.min >= 110_000_000, "{} ps", summary.min);
    }
    assert_eq!(
        (record.stopped, record.rounds),
        (Stopped::Budget, 1),
        "one round is always done"
    );
}

/// PyTorch's allocator with additional waits for an idle device before each allocation. Each wait
/// takes 466 ns of model time.
fn slowed(arm: &AllocatorSpec, waits: u32) -> Box<dyn Allocator> {
    let wait = move |device: &mut dyn Device| (0..waits).try_for_each(|_| device.synchronize());
    if arm.kind() == Some(AllocatorKind::Caching) {
        Box::new(Before(arm.build(), Box::new(wait)))
    } else {
        arm.build()
    }
}

#[test]
fn of_exact_figures_any_difference_of_one_allocator_is_flagged() {
    let suite = suite(
        "caching, bfc, direct",
        "latency: { sizes: [2MiB, 64MiB], cases: [miss, after_empty_cache] }",
    );
    let run = |started: &str, build| {
        let machine = machine(&SimDevice::new(SimConfig::default()), "rustc");
        BenchRun {
            suites: vec![
                TestProvider {
                    build,
                    ..TestProvider::new()
                }
                .run(&suite),
            ],
            ..BenchRun::new(started.to_owned(), machine)
        }
    };
    let base = run("2026-11-19T02:17:00Z", AllocatorSpec::build);
    let flagged = |build: fn(&AllocatorSpec) -> Box<dyn Allocator>| -> Vec<(String, Verdict)> {
        let changes = compare(&run("2026-11-20T02:17:00Z", build), &[&base], None)
            .unwrap()
            .changes;
        let flagged = changes
            .into_iter()
            .filter(|change| change.verdict != Verdict::Same);
        flagged
            .map(|change| {
                (
                    format!("{} {}", change.entry.case, change.entry.arm),
                    change.verdict,
                )
            })
            .collect()
    };
    let worse = [
        "miss, 2 MiB",
        "miss, 64 MiB",
        "after_empty_cache, 2 MiB",
        "after_empty_cache, 64 MiB",
    ];
    assert_eq!(
        flagged(|arm| slowed(arm, 1)),
        worse.map(|case| (format!("{case} caching"), Verdict::Worse))
    );
    assert_eq!(flagged(|arm| slowed(arm, 0)), []);
}

/// The unit tests of `Visit::batch` have the number of operations.
#[test]
fn operations_that_are_shorter_than_reading_a_clock_are_timed_together() {
    let mut provider = TestProvider {
        clock: Clock::Measured,
        ..TestProvider::new()
    };
    let time = "latency: { sizes: [512B, 2MiB], cases: [hit] }\n  - record_stream: { streams: [0] \
         }\n  - trace: { file: traces/small_loop.txt.gz }";
    let record = provider.run_with(
        &suite("caching, bfc", time),
        &within(Nanos::millis(1000)),
        |_| {},
    );
    assert!(record.overhead_ps > 0, "reading a clock takes time");
    for entry in record
        .entries
        .iter()
        .filter(|entry| entry.quantity == Quantity::HostTime)
    {
        assert!(
            measured(entry).batch > 1,
            "{}, {}: a hit is far shorter than reading a clock fifty times",
            entry.case(),
            entry.arm
        );
    }
}

#[test]
fn an_interruption_ends_the_loop_at_once() {
    let interrupted = terms(0);
    let suite = suite(ARMS, OF_THE_MODEL);
    let mut visits = 0;
    let record = TestProvider::new().run_with(&suite, &interrupted, |_| {
        visits += 1;
        if visits == 5 {
            interrupted.interrupt.store(true, Ordering::Relaxed);
        }
    });
    assert_eq!((record.stopped, visits), (Stopped::Interrupted, 5));
}

#[test]
fn parts_cover_all_cases_once_and_keep_arms_together() {
    let suite = suite(
        "caching, direct",
        "latency: { sizes: [512B, 1KiB, 2KiB, 4KiB, 8KiB, 16KiB, 32KiB, 64KiB, 128KiB] }",
    );
    let part = |index| Some(Shard { index, count: 3 });
    let mut all: Vec<String> = (1..=3)
        .flat_map(|index| cases_of(&suite, part(index)).map(|case| case.name()))
        .collect();
    assert!(
        (1..=3).all(|index| cases_of(&suite, part(index)).next().is_some()),
        "of 27 cases each of 3 parts has some"
    );
    let mut expected: Vec<String> = suite.cases.iter().map(|case| case.name()).collect();
    all.sort();
    expected.sort();
    assert_eq!(all, expected);
    let record = TestProvider::new().run_with(
        &suite,
        &Terms {
            shard: part(2),
            ..terms(0)
        },
        |_| {},
    );
    assert_eq!(
        record.entries.len(),
        2 * cases_of(&suite, part(2)).count(),
        "both arms of each case"
    );
    assert!(
        record
            .entries
            .iter()
            .all(|entry| suite.cases.iter().any(|case| case.hash == entry.hash)),
        "of the same cases"
    );
}

#[test]
fn broken_cases_fail_and_unsupported_cases_are_skipped() {
    fn leaky(arm: &AllocatorSpec) -> Box<dyn Allocator> {
        let leak = |device: &mut dyn Device| device.malloc(Bytes::mib(2)).map(drop);
        if arm.kind() == Some(AllocatorKind::Direct) {
            Box::new(Before(arm.build(), Box::new(leak)))
        } else {
            arm.build()
        }
    }
    let time = "latency: { sizes: [2MiB], cases: [miss] }\n  - scenario: { file: \
         ../fragmentation_storm.yaml }";
    let record = TestProvider {
        build: leaky,
        ..TestProvider::new()
    }
    .run(&suite("caching, direct", time));
    let outcome = |group: &str, arm: &str| {
        let entry = record
            .entries
            .iter()
            .find(|entry| entry.group == group && entry.arm == arm);
        entry
            .map(|entry| entry.outcome.clone())
            .unwrap_or_else(|| panic!("{group}, {arm} is not there"))
    };
    assert!(
        matches!(outcome("miss", "caching"), EntryResult::Measured(_)),
        "the others go on"
    );
    let EntryResult::Failed { reason } = outcome("miss", "direct") else {
        panic!("what leaks is broken")
    };
    assert!(
        reason.starts_with("leaked on the device: 2 MiB in 1 allocation"),
        "{reason}"
    );
    let EntryResult::Skipped { reason } = outcome("fragmentation_storm", "direct") else {
        panic!("it is not listed")
    };
    assert!(
        reason.ends_with("fragmentation_storm.yaml` does not list `direct`"),
        "{reason}"
    );
}

/// One entry, measured with the host's clock in ten rounds after two warm-up rounds. Each visit
/// requests one device.
fn ten_rounds(refuse: fn(u64) -> Option<DeviceError>) -> (SuiteRecord, u64) {
    let text = "about: x\nneeds: { memory: 64MiB }
rounds: { least: 10, most: 10 }\nbudget: 60s\narms: [caching]
time: [latency: { sizes: [1MiB], cases: [hit] }]\n";
    let suite = Suite::parse(text, &catalogue().join("test.yaml")).unwrap();
    let mut provider = TestProvider {
        clock: Clock::Measured,
        refuse,
        ..TestProvider::new()
    };
    (provider.run(&suite), provider.asked)
}

fn taken() -> DeviceError {
    DeviceError::Unavailable {
        what: "64 MiB of device memory".to_owned(),
        why: "others have it".to_owned(),
    }
}

#[test]
fn a_visit_that_is_skipped_loses_its_own_round_and_no_other() {
    let (record, visits) = ten_rounds(|visit| [1, 3, 7].contains(&visit).then(taken));
    let measured = measured(&record.entries[0]);
    assert_eq!((visits, record.rounds), (12, 10));
    // The first and the fifth of visits 3 to 12. Each round keeps its index.
    let empty: Vec<usize> = (0..10)
        .filter(|&round| measured.rounds[round].is_none())
        .collect();
    assert_eq!((measured.rounds.len(), empty), (10, vec![0, 4]));
    assert!(measured.summary.count >= 8);
}

#[test]
fn what_is_skipped_in_more_rounds_than_it_is_measured_in_has_no_figures() {
    let (record, _) = ten_rounds(|visit| (8..=12).contains(&visit).then(taken));
    assert_eq!(
        measured(&record.entries[0]).rounds.len(),
        5,
        "half of the rounds are enough"
    );
    let (record, visits) = ten_rounds(|visit| (7..=12).contains(&visit).then(taken));
    let EntryResult::Skipped { reason } = &record.entries[0].outcome else {
        panic!("{record:#?}")
    };
    assert!(
        reason.starts_with("skipped in 6 of 10 rounds; ") && reason.ends_with("others have it"),
        "{reason}"
    );
    assert_eq!(visits, 12, "a case that succeeded once is repeated");
}

#[test]
fn impossible_cases_are_dropped_and_cases_that_break_later_fail() {
    let (record, visits) = ten_rounds(|_| Some(taken()));
    assert_eq!(
        (visits, &record.entries[0].outcome),
        (
            3,
            &EntryResult::Skipped {
                reason: taken().to_string()
            }
        )
    );
    let (record, visits) = ten_rounds(|visit| (visit == 9).then_some(DeviceError::NotReady(1)));
    let EntryResult::Failed { reason } = &record.entries[0].outcome else {
        panic!("{record:#?}")
    };
    assert_eq!((visits, reason), (9, &DeviceError::NotReady(1).to_string()));
}

#[test]
fn a_configuration_with_settings_runs_all_cases_of_pytorchs_allocator() {
    let time =
        "scenario: { file: ../oom_retry.yaml }\n  - latency: { sizes: [1MiB], cases: [miss] }";
    let record = TestProvider::new().run(&suite(
        "caching: { name: pages, conf: \"expandable_segments:True\" }, expandable",
        time,
    ));
    let (named, built_in) = (medians(&record, "pages"), medians(&record, "expandable"));
    assert!(named.len() >= 2);
    assert_eq!(named, built_in, "they are the same but for the name");
}

#[test]
fn a_scenario_that_fails_is_a_failure_with_the_command_that_shows_it() {
    let folder = tempfile::tempdir().unwrap();
    let scenario = "about: Wrong.\nneeds: { memory: 64MiB }\nsteps:\n  - alloc: { buffer: a, size: \
         1MiB }\n  - expect: reserved_bytes.all.current == 1B\n";
    std::fs::write(folder.path().join("wrong.yaml"), scenario).unwrap();
    let text = "about: x\nneeds: { memory: 64MiB }\narms: [caching]\ntime: [scenario: { file: \
         wrong.yaml }]\n";
    let suite = Suite::parse(text, &folder.path().join("suite.yaml")).unwrap();
    let record = TestProvider::new().run(&suite);
    let EntryResult::Failed { reason } = &record.entries[0].outcome else {
        panic!("{record:#?}")
    };
    assert!(reason.contains("wrong.yaml:5:"), "{reason}");
    assert!(
        reason.contains("see `harness run ")
            && reason.ends_with("--device sim --allocator caching --skip-checks`"),
        "{reason}"
    );
}

/// A missing feature of the driver does not count as out of memory.
#[test]
fn an_arm_that_the_driver_cannot_do_is_skipped_in_traces_too() {
    let suite = "about: x\nneeds: { memory: 64MiB }\narms: [caching, expandable, \
         async_pool]\nrounds: { least: 2, most: 2 }\n\
                 time:\n  - trace: { file: trace.txt }\n";
    let config = Settings {
        memory: Bytes::gib(1),
        mapping: false,
        pools: false,
        ..strict()
    };
    let world = World::with_driver(&config)
        .with("suite.yaml", suite)
        .with("trace.txt", "a 0 2097152 0\nf 0\n");
    let ran = world.bench(&["suite.yaml", "--device", "cuda:0", "--report", "run"]);
    assert_eq!(ran.code, Some(0), "{}", ran.told());
    let arms = |is: fn(&EntryResult) -> bool| {
        let entries = world.run("run").suites.remove(0).entries;
        entries
            .into_iter()
            .filter(|entry| is(&entry.outcome))
            .map(|entry| entry.arm)
            .collect::<BTreeSet<String>>()
    };
    assert_eq!(
        arms(|outcome| matches!(outcome, EntryResult::Skipped { .. })),
        ["async_pool", "expandable"].map(str::to_owned).into()
    );
    assert_eq!(
        arms(|outcome| matches!(outcome, EntryResult::Measured(_))),
        ["caching".to_owned()].into()
    );
}
