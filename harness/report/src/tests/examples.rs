//! Records for tests, written by hand. No figure was measured.

use std::collections::BTreeMap;

use harness_allocator::device::{Clock, DeviceCalls, DeviceInfo, DeviceMemory, Fingerprint};
use harness_allocator::stats::{MemoryStats, PoolKind, PooledStat};
use harness_allocator::units::{Bytes, Nanos};

use harness_record::{
    Accounts, Attempt, CostFigure, CurvePoint, FailedRequest, Invariant, Outcome, Pieces,
    RECORD_VERSION, Records, Recovery, Rule, RunRecord, Samples, ScenarioInfo, SkipKind,
    SourceLine, StepRecord, StreamPool, Table, Timings, Trained, UnlistedSegments, Verdict,
    Violation,
};

const LIMIT: Bytes = Bytes::gib(1);
const OVERHEAD: Bytes = Bytes::mib(304);

/// A report with every verdict, both clocks and repetitions.
pub(crate) fn every_ending() -> Records {
    let mut runs = Vec::new();
    for repetition in 0..2 {
        runs.extend(["caching", "direct"].map(|allocator| oom_retry(allocator, repetition)));
    }
    for repetition in 0..3 {
        runs.extend(["caching", "direct"].map(|allocator| measured(allocator, repetition)));
    }
    runs.push(skipped());
    runs.push(storm());
    runs.extend([
        failed("caching", 0),
        failed("caching", 1),
        passed_beside_the_failures(),
        interrupted(),
    ]);
    runs.push(contended());
    Records {
        version: RECORD_VERSION,
        harness: "0.1.0".to_owned(),
        runs,
        not_started: Vec::new(),
    }
}

/// The allocator releases its cache to serve a larger request. `direct` has no cache and no retry.
pub(crate) fn oom_retry(allocator: &str, repetition: u32) -> RunRecord {
    let is_caching = allocator == "caching";
    let scenario = scenario(
        "oom_retry",
        "A failed device allocation gives `cached blocks` back to the driver,\nand succeeds on the \
         retry.",
    );
    let mut run = Builder::new(scenario, simulated(), allocator, repetition);
    let malloc = Nanos::micros(240);
    run.step(
        5,
        "alloc",
        "activations, 600 MiB",
        Outcome::Fits { retries: 0 },
        malloc,
        |accounts| {
            accounts.requested = Bytes::mib(600);
            accounts.allocated = Bytes::mib(600);
            accounts.reserved = Bytes::mib(600);
        },
    );
    run.step(
        6,
        "free",
        "activations",
        Outcome::Done,
        if is_caching {
            Nanos::ZERO
        } else {
            Nanos::micros(180)
        },
        |accounts| {
            accounts.requested = Bytes::ZERO;
            accounts.allocated = Bytes::ZERO;
            accounts.reserved = if is_caching {
                Bytes::mib(600)
            } else {
                Bytes::ZERO
            };
        },
    );
    let weights = if is_caching {
        Nanos::micros(665)
    } else {
        malloc
    };
    run.step(
        7,
        "alloc",
        "weights, 700.5 MiB",
        Outcome::Fits { retries: 0 },
        weights,
        |accounts| {
            accounts.requested = Bytes(734_527_488);
            accounts.allocated = Bytes(734_527_488);
            accounts.reserved = Bytes::mib(702);
            accounts.retries = u64::from(is_caching);
        },
    );
    if is_caching {
        run.note(
            "The driver refused 702 MiB with 424 MiB free; the allocator gave 600 MiB of \
             cache back and asked again.",
        );
    }
    run.step(
        8,
        "expect",
        "num_alloc_retries == 1",
        Outcome::Done,
        Nanos::ZERO,
        |_| {},
    );
    let mut record = run.finish(Verdict::Passed);

    record.timings = Timings {
        allocate: samples([240_000, weights.get()]),
        free: samples([if is_caching { 0 } else { 180_000 }]),
        empty_cache: Samples::default(),
        scenario: if is_caching {
            Nanos::micros(905)
        } else {
            Nanos::micros(660)
        },
        lost_to_retry: if is_caching {
            Nanos::micros(425)
        } else {
            Nanos::ZERO
        },
    };
    let failures = u64::from(is_caching);
    record.calls = DeviceCalls {
        malloc: 2 + failures,
        malloc_failures: failures,
        free: 1,
        ..DeviceCalls::default()
    };
    record
}

/// The same run on a real device.
pub(crate) fn measured(allocator: &str, repetition: u32) -> RunRecord {
    let mut record = oom_retry(allocator, repetition);
    record.device = DeviceInfo {
        name: "Example GPU".to_owned(),
        clock: Clock::Measured,
        fingerprint: Fingerprint {
            memory: Some(Bytes::gib(80)),
            uuid_hash: Some("5f2c".to_owned()),
            driver: Some("1.0".to_owned()),
            cuda: Some("13.0".to_owned()),
            mig: Some(false),
            ecc: Some(true),
            clocks_mhz: Some((1_980 - repetition, 3_201)),
            throttle_reasons: if repetition == 1 {
                vec!["sw_power_cap".to_owned()]
            } else {
                Vec::new()
            },
            other_processes: Some(1),
            cost_model: None,
        },
        ..record.device
    };
    record.cost_figures.clear();
    let base = if allocator == "direct" { 90_000 } else { 300 };
    record.timings.allocate =
        samples((0..150).map(|index| base + index * u64::from(repetition + 1)));
    record.timings.free = Samples {
        count: 5_000,
        ..samples((0..120).map(|index| base / 2 + index))
    };
    record.timings.empty_cache = samples([41_000, 43_000]);
    record.timings.scenario = Nanos(base * 300 + u64::from(repetition) * 1_000);
    record
}

/// An allocator that this device does not support.
pub(crate) fn skipped() -> RunRecord {
    let about = "A failed device allocation gives `cached blocks` back to the driver,\nand \
         succeeds on the retry.";
    let run = Builder::new(scenario("oom_retry", about), simulated(), "async_pool", 0);
    run.finish(Verdict::Skipped {
        reason: "the device has no stream-ordered driver pool".to_owned(),
        kind: SkipKind::Insufficient,
    })
}

/// A long step with 600 curve points between two short ones. Other processes use memory.
pub(crate) fn storm() -> RunRecord {
    let scenario = scenario(
        "storm",
        "Allocations of random sizes and lifetimes, close to the limit.",
    );
    let mut run = Builder::new(scenario, simulated(), "caching", 0);
    run.step(
        4,
        "external_memory",
        "128 MiB",
        Outcome::Done,
        Nanos::ZERO,
        |accounts| accounts.device.external_memory = Bytes::mib(128),
    );
    run.step(
        5,
        "storm",
        "2000 operations, up to 64 MiB each",
        Outcome::Fits { retries: 3 },
        Nanos::millis(12),
        |accounts| {
            accounts.requested = Bytes(350_123_456);
            accounts.allocated = Bytes(351_272_960);
            accounts.active = Bytes(368_050_176);
            accounts.reserved = Bytes::mib(880);
            (accounts.retries, accounts.ooms) = (5, 3);
        },
    );
    run.report("num_ooms", 3);
    run.report("given_back_bytes", 614_465_536);
    run.table(Table {
        title: "What pins each segment".to_owned(),
        columns: ["segment", "size", "held by"].map(str::to_owned).to_vec(),
        rows: (0..14)
            .map(|n| {
                vec![
                    format!("{:#x}", 0x7000_0000_0000_u64 + (n << 26)),
                    "64 MiB".to_owned(),
                    format!("buffer {n} | step 2"),
                ]
            })
            .collect(),
    });
    run.thin_curve(600);
    run.step(
        6,
        "free",
        "everything",
        Outcome::Done,
        Nanos::ZERO,
        |accounts| {
            (accounts.requested, accounts.allocated, accounts.active) =
                (Bytes::ZERO, Bytes::ZERO, Bytes::ZERO);
        },
    );
    let mut record = run.finish(Verdict::Passed);
    record.timings.allocate = samples((0..1_000).map(|n| if n % 10 == 0 { 240_000 } else { 0 }));
    record.timings.free = samples([0; 1_000]);
    record.timings.scenario = Nanos::millis(12);
    record
}

/// Memory is reused on another stream too early.
pub(crate) fn failed(allocator: &str, repetition: u32) -> RunRecord {
    let scenario = scenario(
        "cross_stream_reuse",
        "A block freed while another stream still reads it waits for that stream.",
    );
    let mut run = Builder::new(scenario, simulated(), allocator, repetition);
    run.step(
        6,
        "alloc",
        "shared, 41.02 MiB on stream 0",
        Outcome::Fits { retries: 0 },
        Nanos::micros(240),
        |accounts| {
            (accounts.requested, accounts.allocated, accounts.reserved) =
                (Bytes(43_007_600), Bytes(43_008_000), Bytes::mib(42));
        },
    );
    run.step(
        8,
        "use",
        "shared on stream 1, 5 ms",
        Outcome::Done,
        Nanos::ZERO,
        |_| {},
    );
    run.step(
        9,
        "alloc",
        "next, 41.02 MiB on stream 0",
        Outcome::Failed,
        Nanos::ZERO,
        |accounts| accounts.allocated = Bytes(86_016_000),
    );
    let first = Violation {
        step: 3,
        at: Some(SourceLine {
            path: "scenarios/cross_stream_reuse.yaml".to_owned(),
            line: 9,
            column: 5,
        }),
        rule: Rule::Invariant(Invariant::ContentsAreIntact),
        expected: "0x7000_0000..0x7290_4000 holds tag 0x1".to_owned(),
        seen: "tag 0x2, written on stream 0 at step 3".to_owned(),
    };
    let rest = vec![Violation {
        at: None,
        rule: Rule::Invariant(Invariant::AccountsAreOrdered),
        expected: "allocated ≤ reserved".to_owned(),
        seen: "allocated 86016000 > reserved 44040192".to_owned(),
        ..first.clone()
    }];
    run.finish(Verdict::Failed { first, rest })
}

/// A request fails although enough memory is free, because it is fragmented.
pub(crate) fn fragmented() -> RunRecord {
    let mut run = Builder::new(
        scenario(
            "fits_in_pieces",
            "A request that fits the free memory is served.",
        ),
        simulated(),
        "caching",
        0,
    );
    run.step(
        5,
        "storm",
        "storm, 2000 operations",
        Outcome::Done,
        Nanos::millis(1),
        |accounts| {
            (accounts.requested, accounts.allocated, accounts.reserved) =
                (Bytes::mib(800), Bytes::mib(800), Bytes::gib(1));
        },
    );
    run.report("failed_request", 64 << 20);
    run.step(9, "pins", "storm", Outcome::Done, Nanos::ZERO, |_| {});
    run.note(
        "2 of 2 segments are pinned: 800 MiB of live blocks keep 224 MiB of free memory from \
         going back to the driver",
    );
    run.table(Table {
        title: "What pins each segment, the emptiest first".to_owned(),
        columns: ["segment", "size", "free"].map(str::to_owned).to_vec(),
        rows: (0..14)
            .map(|n| {
                vec![
                    format!("{:#x}", 0x7000_0000_0000_u64 + (n << 26)),
                    "64 MiB".to_owned(),
                    "16 MiB".to_owned(),
                ]
            })
            .collect(),
    });
    let seen = "out of memory: 64 MiB requested, 0 B free on the device; 224 MiB reserved but \
         unallocated, in pieces of at most 16 MiB";
    run.step(
        10,
        "alloc",
        "wanted, 64 MiB",
        Outcome::OutOfMemory,
        Nanos::ZERO,
        |accounts| (accounts.retries, accounts.ooms) = (1, 1),
    );
    run.note(seen);
    let at = Some(SourceLine {
        path: "scenarios/fits_in_pieces.yaml".to_owned(),
        line: 10,
        column: 5,
    });
    let first = Violation {
        step: 3,
        at,
        rule: Rule::Expectation,
        expected: "64 MiB to fit".to_owned(),
        seen: seen.to_owned(),
    };
    let mut record = run.finish(Verdict::Failed {
        first,
        rest: Vec::new(),
    });
    record
        .stats
        .inactive_split_bytes
        .increase(PoolKind::Large, 224 << 20);
    if let Some(last) = record.steps.last_mut() {
        last.failed_request = Some(FailedRequest {
            accounts: last.accounts,
            ..failed_request()
        });
    }
    record
}

/// A request of 64 MiB with 224 MiB free in 14 blocks.
pub(crate) fn failed_request() -> FailedRequest {
    let free = Pieces {
        count: 14,
        bytes: Bytes::mib(224),
        largest: Bytes::mib(16),
    };
    let lane = StreamPool {
        pool: Some(PoolKind::Large),
        stream: 0,
        free,
        waiting: Pieces::default(),
    };
    let size = Bytes::mib(64);
    FailedRequest {
        requested: size,
        stream: 0,
        lacking: size,
        asked: size,
        limit: None,
        allocator_limit: None,
        program_limit: None,
        injected: None,
        accounts: Accounts {
            allocated: Bytes::mib(800),
            active: Bytes::mib(800),
            reserved: LIMIT,
            device: DeviceMemory {
                free: Bytes::ZERO,
                used: OVERHEAD + LIMIT,
                ..nothing_held().device
            },
            ..nothing_held()
        },
        inactive_split: free.bytes,
        lanes: Some(vec![lane]),
        other_private_pools: Pieces::default(),
        is_pool_inferred: false,
        streams: BTreeMap::from([(0, "default".to_owned())]),
        pinned: Vec::new(),
        pinned_unlisted: UnlistedSegments::default(),
        keeps_free_segments: false,
    }
}

fn passed_beside_the_failures() -> RunRecord {
    let mut record = failed("expandable", 0);
    record.verdict = Verdict::Passed;
    record.steps.truncate(2);
    record.curve.truncate(2);
    record.stats = stats_after(&record.steps);
    record.timings.allocate = samples([240_000]);
    record.timings.scenario = Nanos::micros(240);
    record
}

/// A run on a GPU that another process starts to use during the second step.
pub(crate) fn contended() -> RunRecord {
    let mut record = measured("caching", 0);
    record.scenario = scenario("nvml_ledger", "Device used follows reserved.");
    record.steps.truncate(1);
    record.curve.truncate(1);
    record.verdict = Verdict::Contended {
        reason: "another process took 2 GiB of the device during step 2".to_owned(),
    };
    record
}

fn interrupted() -> RunRecord {
    let mut record = long_run(15, &[]);
    record.scenario = scenario("training", "");
    record.verdict = Verdict::Interrupted;
    record
}

/// A run of equal steps. The given steps run out of memory.
pub(crate) fn long_run(steps: u32, ooms: &[u32]) -> RunRecord {
    let mut run = Builder::new(scenario("long", "Many steps."), simulated(), "caching", 0);
    let ooms: std::collections::BTreeSet<u32> = ooms.iter().copied().collect();
    for number in 1..=steps {
        let is_oom = ooms.contains(&number);
        let outcome = if is_oom {
            Outcome::OutOfMemory
        } else {
            Outcome::Done
        };
        run.step(
            4,
            "touch",
            &format!("batch {number}"),
            outcome,
            Nanos::micros(3),
            |accounts| {
                accounts.reserved = Bytes::mib(512);
                accounts.ooms += u64::from(is_oom);
            },
        );
    }
    run.finish(Verdict::Passed)
}

/// The same training with three policies.
pub(crate) fn recoveries() -> Records {
    let mut run = Builder::new(
        scenario("policies", "Three policies."),
        simulated(),
        "caching",
        0,
    );
    let attempt = |asked: &str, failed: bool, then: Option<&str>| Attempt {
        asked: asked.to_owned(),
        failed: failed
            .then(|| "out of memory: 64 MiB requested, 20 MiB free on the device".to_owned()),
        then: then.map(str::to_owned),
        time: Some(Nanos::micros(250)),
    };
    let first = "a batch of 64";
    let cases = [
        (
            "give_up",
            vec![attempt(first, true, None)],
            None,
            Outcome::OutOfMemory,
        ),
        (
            "halve_batch down to 1, at most 1 retry",
            vec![
                attempt(first, true, Some("halve_batch")),
                attempt("a batch of 32", false, None),
            ],
            Some((32, 32)),
            Outcome::Fits { retries: 1 },
        ),
        (
            "split_and_accumulate down to 1",
            vec![
                attempt(first, true, Some("split_and_accumulate")),
                attempt("a batch of 64 in 2 parts", false, None),
            ],
            Some((32, 64)),
            Outcome::Fits { retries: 1 },
        ),
    ];
    for (number, (policies, listed, batches, outcome)) in cases.into_iter().enumerate() {
        let (name, line) = (
            policies.split(' ').next().unwrap_or_default(),
            number as u32 + 5,
        );
        run.step(
            line,
            "train",
            &format!("{name}, 4 iterations"),
            outcome,
            Nanos::millis(10),
            |_| {},
        );
        let trained = batches.map(|(final_batch, effective_batch)| Trained {
            final_batch,
            effective_batch,
            samples: 4 * effective_batch,
            plan: "as asked".to_owned(),
        });
        let retries = listed.len() as u64 - 1;
        run.last().recovery = Some(Recovery {
            policies: policies.to_owned(),
            attempts: 4 + retries,
            retries,
            listed,
            lost: Some(Nanos::micros(250)),
            given_back: Bytes::mib(64),
            trained,
            ..Recovery::default()
        });
    }
    Records {
        runs: vec![run.finish(Verdict::Passed)],
        ..every_ending()
    }
}

fn scenario(name: &str, about: &str) -> ScenarioInfo {
    ScenarioInfo {
        name: name.to_owned(),
        path: format!("scenarios/{name}.yaml"),
        about: about.to_owned(),
        memory: LIMIT,
        claim: None,
    }
}

fn simulated() -> DeviceInfo {
    let fingerprint = Fingerprint {
        memory: Some(Bytes::gib(80)),
        cost_model: Some("example 1".to_owned()),
        ..Fingerprint::default()
    };
    DeviceInfo {
        name: "simulated".to_owned(),
        clock: Clock::Simulated,
        total: LIMIT,
        granularity: Bytes::mib(2),
        used_tolerance: Bytes::ZERO,
        fingerprint,
    }
}

fn samples(times: impl IntoIterator<Item = u64>) -> Samples {
    let kept: Vec<Nanos> = times.into_iter().map(Nanos).collect();
    Samples {
        count: kept.len() as u64,
        kept,
    }
}

/// The counters after these steps, if one large block is live.
fn stats_after(steps: &[StepRecord]) -> MemoryStats {
    let mut stats = MemoryStats::default();
    let follow = |stat: &mut PooledStat, now: u64| {
        let before = stat.all.current;
        stat.increase(PoolKind::Large, now.saturating_sub(before));
        stat.decrease(PoolKind::Large, before.saturating_sub(now));
    };
    for StepRecord { accounts, .. } in steps {
        follow(&mut stats.requested_bytes, accounts.requested.get());
        for (bytes, count, Bytes(now)) in [
            (
                &mut stats.allocated_bytes,
                &mut stats.allocation,
                accounts.allocated,
            ),
            (&mut stats.active_bytes, &mut stats.active, accounts.active),
            (
                &mut stats.reserved_bytes,
                &mut stats.segment,
                accounts.reserved,
            ),
        ] {
            follow(bytes, now);
            follow(count, u64::from(now > 0));
        }
        (stats.num_alloc_retries, stats.num_ooms) = (accounts.retries, accounts.ooms);
    }
    stats
}

/// Builds a run step by step. Peaks, active and device memory follow from the given values.
struct Builder {
    record: RunRecord,
    now: Accounts,
}

/// Memory before the first step.
const fn nothing_held() -> Accounts {
    Accounts {
        requested: Bytes::ZERO,
        allocated: Bytes::ZERO,
        active: Bytes::ZERO,
        reserved: Bytes::ZERO,
        peak_allocated: Bytes::ZERO,
        peak_reserved: Bytes::ZERO,
        retries: 0,
        ooms: 0,
        device: DeviceMemory {
            total: LIMIT,
            free: LIMIT,
            used: OVERHEAD,
            process: None,
            context_overhead: OVERHEAD,
            external_memory: Bytes::ZERO,
            processes: Bytes::ZERO,
            process_contexts: Bytes::ZERO,
        },
    }
}

impl Builder {
    fn new(scenario: ScenarioInfo, device: DeviceInfo, allocator: &str, repetition: u32) -> Self {
        let seed = 7 + u64::from(repetition);
        let now = nothing_held();
        let figure = |name: &str, value: &str| CostFigure {
            name: name.to_owned(),
            value: value.to_owned(),
            source: "made up for tests | not measured".to_owned(),
        };
        let record = RunRecord {
            reproduce: format!(
                "harness run {} --allocator {allocator} --seed {seed}",
                scenario.path
            ),
            scenario,
            device,
            allocator: allocator.to_owned(),
            settings: None,
            only_observed: false,
            seed,
            repetition,
            audited: Some(true),
            timed: false,
            verdict: Verdict::Passed,
            steps: Vec::new(),
            unrecorded_steps: 0,
            figures: Vec::new(),
            curve: Vec::new(),
            timings: Timings::default(),
            calls: DeviceCalls::default(),
            stats: MemoryStats::default(),
            processes: None,
            cost_figures: vec![figure("malloc", "240 µs"), figure("free", "180 µs")],
        };
        Self { record, now }
    }

    fn step(
        &mut self,
        line: u32,
        kind: &str,
        text: &str,
        outcome: Outcome,
        duration: Nanos,
        change: impl FnOnce(&mut Accounts),
    ) {
        let now = &mut self.now;
        let before = now.allocated;
        change(now);
        if now.active == before {
            now.active = now.allocated;
        }
        now.peak_allocated = now.peak_allocated.max(now.allocated);
        now.peak_reserved = now.peak_reserved.max(now.reserved);
        now.device.used = OVERHEAD + now.reserved + now.device.external_memory;
        now.device.free = now
            .device
            .total
            .saturating_sub(now.device.used.saturating_sub(OVERHEAD));
        let number = self.record.steps.len() as u32 + 1;
        self.record.steps.push(StepRecord {
            number,
            line,
            kind: kind.to_owned(),
            text: text.to_owned(),
            iteration: None,
            size: None,
            outcome,
            process: None,
            accounts: *now,
            program: None,
            duration: Some(duration),
            reports: BTreeMap::new(),
            notes: Vec::new(),
            tables: Vec::new(),
            failed_request: None,
            recovery: None,
        });
        self.record.curve.push(self.point(number));
    }

    fn point(&self, step: u32) -> CurvePoint {
        let used = self.now.device.used.saturating_sub(OVERHEAD);
        CurvePoint {
            at: self.record.curve.len() as u64,
            step,
            allocated: self.now.allocated,
            active: self.now.active,
            reserved: self.now.reserved,
            used,
            ooms: self.now.ooms,
            retries: self.now.retries,
        }
    }

    /// Replaces the last step's point by a sawtooth that ends there.
    fn thin_curve(&mut self, points: u64) {
        let Some(last) = self.record.curve.pop() else {
            return;
        };
        for index in 1..points {
            let reserved = Bytes::mib(300 + index.min(290) * 2);
            let allocated = Bytes::mib((index * 37) % 211 + index.min(290));
            let used = reserved + Bytes::mib(128);
            let at = self.record.curve.len() as u64;
            self.record.curve.push(CurvePoint {
                at,
                allocated,
                active: allocated + last.active.saturating_sub(last.allocated),
                reserved,
                used,
                ..last
            });
        }
        self.record.curve.push(CurvePoint {
            at: self.record.curve.len() as u64,
            ..last
        });
    }

    fn last(&mut self) -> &mut StepRecord {
        self.record
            .steps
            .last_mut()
            .expect("a step was added before")
    }

    fn note(&mut self, note: &str) {
        self.last().notes.push(note.to_owned());
    }

    fn report(&mut self, name: &str, value: u64) {
        self.last().reports.insert(name.to_owned(), value);
    }

    fn table(&mut self, table: Table) {
        self.last().tables.push(table);
    }

    fn finish(mut self, verdict: Verdict) -> RunRecord {
        self.record.timed = verdict == Verdict::Passed;
        self.record.verdict = verdict;
        self.record.stats = stats_after(&self.record.steps);
        self.record
    }
}
