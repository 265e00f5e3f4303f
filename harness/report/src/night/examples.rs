//! Nights for tests: made up by hand and by a small generator. No figure here was measured on anything.

use std::collections::BTreeMap;

use harness_allocator::device::{Clock, CostFigure};
use harness_allocator::units::Bytes;

use harness_bench::record::{
    BENCH_RECORD_VERSION, Build, Change, ChangeFigures, ChangeVerdict, CommonDrift, Comparison, Conditions, EarlierBase, Entry, EntryName,
    EntryOutcome, EntrySummary, GpuState, Machine, Measured, NightRecord, Point, Quantity, Stopped, SuiteRecord,
};

/// Numbers that look random and are the same on every machine: Knuth's MMIX generator.
struct Noise(u64);

impl Noise {
    /// From 0 to 1, most of it near 0.
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let even = (self.0 >> 11) as f64 / (1_u64 << 53) as f64;
        even.powi(4)
    }
}

/// A night of `2026-11-DD` counted from the first, on a simulated device: deterministic figures, nothing to compare with.
pub(crate) fn model() -> NightRecord {
    let mut entries = Vec::new();
    for (value, base) in [(512, 0), (1 << 20, 0), (2 << 20, 225_000_000), (64 << 20, 240_000_000), (1 << 30, 390_000_000)] {
        for (arm, factor) in [("caching", 1), ("direct", 2)] {
            let picoseconds = if arm == "direct" { 112_500_000 + base } else { base * factor };
            entries.push(entry("allocate", Some(size(value)), arm, Quantity::ModelTime, exactly(picoseconds)));
        }
    }
    entries.push(entry("reserved", None, "caching", Quantity::Memory, exactly(736_100_352)));
    entries.push(entry("reserved", None, "direct", Quantity::Memory, exactly(734_527_488)));
    let reason = "the device has no stream-ordered driver pool".to_owned();
    entries.push(entry("allocate", Some(size(512)), "async_pool", Quantity::ModelTime, EntryOutcome::Skipped { reason }));
    let suite = SuiteRecord {
        name: "driver_calls".to_owned(),
        about: "What a request costs that the cache serves, and one that it does not.".to_owned(),
        stopped: Stopped::Deterministic,
        rounds: 2,
        yardstick_ps: vec![1_230_000, 1_230_000],
        ..suite(entries)
    };
    NightRecord {
        machine: Machine {
            device: "simulated".to_owned(),
            clock: Clock::Simulated,
            cost_model: Some("example 1".to_owned()),
            memory: Some(Bytes::gib(80)),
            uuid_hash: None,
            driver: None,
            cuda: None,
            mig: None,
            ecc: None,
            ..machine()
        },
        conditions: Conditions {
            cost_figures: vec![CostFigure {
                name: "device allocation".to_owned(),
                value: "225 µs".to_owned(),
                source: "made up for tests".to_owned(),
            }],
            ..Conditions::default()
        },
        suites: vec![suite],
        ..night(20)
    }
}

/// A measured night without a comparison; `level` multiplies the times of `caching`.
pub(crate) fn quiet(day: u32, level: f64) -> NightRecord {
    let mut noise = Noise(u64::from(day) + 1);
    let mut entries = Vec::new();
    for power in [9, 12, 15, 18, 21, 24, 27, 30] {
        for (arm, base, slope) in [("caching", 9_000.0 * level, 0.0), ("expandable", 14_000.0, 0.02), ("direct", 90_000_000.0, 0.35)] {
            let growth = f64::from(power - 9) * slope + 1.0;
            entries.push(entry("hit", Some(size(1 << power)), arm, Quantity::HostTime, spread(base * growth, 0.2, &mut noise)));
        }
    }
    for (arm, base) in [("caching", 7_000.0), ("expandable", 7_400.0), ("direct", 60_000_000.0)] {
        entries.push(entry("free", None, arm, Quantity::HostTime, spread(base, 0.3, &mut noise)));
    }
    for segments in [1_u64, 10, 100, 1_000] {
        let point = Point { axis: "segments".to_owned(), value: segments, bytes: false };
        for (arm, base) in [("caching", 30e6), ("expandable", 12e6)] {
            let picoseconds = base * segments as f64;
            entries.push(entry("empty_cache", Some(point.clone()), arm, Quantity::DeviceTime, spread(picoseconds, 0.1, &mut noise)));
        }
    }
    let yardstick = (0..12).map(|_| 1_200_000 + (noise.next() * 90_000.0) as u64).collect();
    let suite = SuiteRecord { yardstick_ps: yardstick, ..suite(entries) };
    NightRecord { suites: vec![suite], ..night(day) }
}

/// Nights before [`eventful`]: `caching` became slower a few nights ago; one night was contended.
pub(crate) fn before() -> Vec<NightRecord> {
    let mut nights: Vec<NightRecord> = (1..20).map(|day| quiet(day, if day < 14 { 1.0 } else { 1.12 })).collect();
    nights[8].conditions.contended = vec!["1 other process on the GPU".to_owned()];
    nights
}

/// A measured night with everything that can happen.
pub(crate) fn eventful() -> NightRecord {
    let mut night = quiet(20, 1.47);
    let base = quiet(19, 1.12);
    let suite = &mut night.suites[0];
    let suite_name = suite.name.clone();
    let reason = "the second allocation returned the address of the first, which is live | <see> step 3".to_owned();
    let broken = suite.entries.iter_mut().find(|entry| entry.group == "free" && entry.arm == "expandable").expect("it is there");
    broken.outcome = EntryOutcome::Failed { reason };
    for (group, arm) in [("hit_graph", "caching"), ("hit_graph", "expandable"), ("ipc", "caching")] {
        let reason = if group == "ipc" { "this process may not open memory of another one" } else { "the device cannot capture graphs" };
        suite.entries.push(entry(group, None, arm, Quantity::HostTime, EntryOutcome::Skipped { reason: reason.to_owned() }));
    }
    let changes = suite.entries.iter().map(|entry| change(entry, &base)).collect();
    night.conditions.contended = vec!["2 other processes on the GPU".to_owned(), "clocks held down by sw_power_cap".to_owned()];
    night.comparison = Some(Comparison {
        base_started: base.started,
        base_build: base.build,
        across: Vec::new(),
        changes,
        new: vec![name("hit_graph", "caching")],
        missing: vec![name("old case", "caching"), name("old case", "direct")],
        redefined: vec!["storm".to_owned()],
        earlier: vec![EarlierBase { suite: suite_name, started: "2026-11-17T02:17:00Z".to_owned() }],
        drifts: vec![CommonDrift { suite: "host_path".to_owned(), quantity: Quantity::HostTime, ratio: 1.072, allocators: 4, untold: 2 }],
    });
    night
}

/// As many nights of as many entries as somebody may keep, each with medians only.
pub(crate) fn years(nights: u32, entries: usize) -> Vec<NightRecord> {
    let night_of = |day: u32| {
        let mut noise = Noise(u64::from(day));
        let one = |index: usize, noise: &mut Noise| {
            let point = Some(size(1 << (9 + index % 20)));
            let mut entry = entry(
                &format!("case {}", index / 80),
                point,
                ["caching", "bfc", "rmm_pool", "direct"][index / 20 % 4],
                Quantity::HostTime,
                spread(10_000.0 * (index + 1) as f64, 0.05, noise),
            );
            if let EntryOutcome::Measured(measured) = &mut entry.outcome {
                measured.rounds.clear();
            }
            entry
        };
        let of = |from: usize, noise: &mut Noise| (from..from + entries / 4).map(|index| one(index, noise)).collect::<Vec<_>>();
        let suites = (0..4).map(|index| SuiteRecord { name: format!("suite {index}"), ..suite(of(index * entries / 4, &mut noise)) });
        let mut night = NightRecord { suites: suites.collect(), ..night(1) };
        night.started = format!("{:04}-{:02}-{:02}T02:17:00Z", 2026 + day / 336, day / 28 % 12 + 1, day % 28 + 1);
        night
    };
    (0..nights).map(night_of).collect()
}

fn night(day: u32) -> NightRecord {
    NightRecord {
        version: BENCH_RECORD_VERSION,
        harness: "0.1.0".to_owned(),
        started: format!("2026-11-{day:02}T02:17:00Z"),
        took_ms: 754_321,
        seed: 7,
        reproduce: "harness bench suites --seed 7".to_owned(),
        shard: None,
        build: Build { commit: Some(format!("{day:02}c0ffee{day:02}c0ffee{day:02}c0ffee{day:02}c0ffee")), dirty: Some(false) },
        machine: machine(),
        conditions: Conditions {
            free_at_start: Some(Bytes::gib(79)),
            gpu: [0, 372_000, 754_000].map(|at_ms| state(at_ms, day)).to_vec(),
            contended: Vec::new(),
            cost_figures: Vec::new(),
        },
        suites: Vec::new(),
        comparison: None,
    }
}

fn machine() -> Machine {
    Machine {
        device: "Example GPU".to_owned(),
        clock: Clock::Measured,
        memory: Some(Bytes::gib(80)),
        uuid_hash: Some("5f2c".to_owned()),
        driver: Some("1.0".to_owned()),
        cuda: Some("13.0".to_owned()),
        mig: Some(false),
        ecc: Some(true),
        cost_model: None,
        cpu: Some("Example CPU".to_owned()),
        cores: 8,
        kernel: Some("Linux 6.1".to_owned()),
        compiler: "rustc 1.95.0, release".to_owned(),
    }
}

fn state(at_ms: u64, day: u32) -> GpuState {
    GpuState {
        at_ms,
        sm_mhz: Some(1_980 - day),
        memory_mhz: Some(3_201),
        power_mw: Some(121_500),
        temperature: Some(41),
        throttle_reasons: if at_ms > 700_000 && day == 20 { vec!["sw_power_cap".to_owned()] } else { Vec::new() },
        other_processes: Some(0),
    }
}

fn suite(entries: Vec<Entry>) -> SuiteRecord {
    SuiteRecord {
        name: "host_path".to_owned(),
        about: "What the allocators' own work costs, from a `hit` in the cache to giving everything back.".to_owned(),
        hash: "8a1f".to_owned(),
        threshold: 0.05,
        rounds: 12,
        stopped: Stopped::Precise,
        overhead_ps: 21_400,
        yardstick_ps: Vec::new(),
        allocators: BTreeMap::new(),
        entries,
    }
}

fn size(value: u64) -> Point {
    Point { axis: "size".to_owned(), value, bytes: true }
}

fn entry(group: &str, point: Option<Point>, arm: &str, quantity: Quantity, outcome: EntryOutcome) -> Entry {
    Entry { group: group.to_owned(), point, arm: arm.to_owned(), quantity, outcome }
}

/// The same figure each time.
fn exactly(value: u64) -> EntryOutcome {
    let summary = EntrySummary { count: 2, median: value, mad: 0, p99: None, min: value, max: value, low: value, high: value };
    EntryOutcome::Measured(Measured { batch: 1, rounds: vec![vec![value], vec![value]], yardstick_ps: Vec::new(), summary })
}

/// Twelve rounds of twelve samples, with a tail to the right.
fn spread(base: f64, width: f64, noise: &mut Noise) -> EntryOutcome {
    let rounds: Vec<Vec<u64>> = (0..12).map(|_| (0..12).map(|_| (base * (1.0 + width * noise.next())) as u64).collect()).collect();
    let mut samples: Vec<u64> = rounds.iter().flatten().copied().collect();
    samples.sort_unstable();
    let median = samples[samples.len() / 2];
    let summary = EntrySummary {
        count: samples.len() as u64,
        median,
        mad: samples[samples.len() / 2] - samples[samples.len() / 4],
        p99: Some(samples[samples.len() * 99 / 100]),
        min: samples[0],
        max: samples[samples.len() - 1],
        low: samples[samples.len() * 42 / 100],
        high: samples[samples.len() * 58 / 100],
    };
    EntryOutcome::Measured(Measured { batch: 64, rounds, yardstick_ps: Vec::new(), summary })
}

fn name(case: &str, arm: &str) -> EntryName {
    EntryName { suite: "host_path".to_owned(), case: case.to_owned(), arm: arm.to_owned(), quantity: Quantity::HostTime }
}

/// Compared by the medians alone, which is enough for an example.
fn change(entry: &Entry, base: &NightRecord) -> Change {
    let same = |other: &&Entry| (other.case(), &other.arm, other.quantity) == (entry.case(), &entry.arm, entry.quantity);
    let before = base.suites[0].entries.iter().find(same);
    let named = EntryName { suite: "host_path".to_owned(), case: entry.case(), arm: entry.arm.clone(), quantity: entry.quantity };
    let (EntryOutcome::Measured(new), Some(EntryOutcome::Measured(old))) = (&entry.outcome, before.map(|entry| &entry.outcome)) else {
        let verdict = if matches!(entry.outcome, EntryOutcome::Failed { .. }) { ChangeVerdict::Broken } else { ChangeVerdict::NotCompared };
        return Change { entry: named, verdict, figures: None };
    };
    // One entry is made to look better, so that there is one.
    let correction = if entry.group == "free" && entry.arm == "caching" { 0.8 } else { 1.0 };
    let (base, new) = (old.summary.median, (new.summary.median as f64 * correction) as u64);
    let ratio = new as f64 / base as f64;
    let (low, high) = (ratio * 0.97, ratio * 1.03);
    let verdict = if low > 1.05 {
        ChangeVerdict::Worse
    } else if high < 0.95 {
        ChangeVerdict::Better
    } else {
        ChangeVerdict::Same
    };
    let p = if verdict == ChangeVerdict::Same { 0.8 } else { 0.000_2 };
    Change { entry: named, verdict, figures: Some(ChangeFigures { base, new, ratio, low, high, p }) }
}
