//! Nights for tests, made up: no figure here was measured on anything.

use std::collections::BTreeMap;

use harness_allocator::device::Clock;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::inference::median;
use super::record::{
    BENCH_RECORD_VERSION, Build, Conditions, Entry, EntryOutcome, EntrySummary, Machine, Measured, NightRecord, Quantity, Stopped,
    SuiteRecord,
};

/// What a round's yardstick takes on an undisturbed machine.
const YARDSTICK_PS: f64 = 600e6;

/// How an entry's samples come about.
#[derive(Clone, Debug)]
pub struct Sampled {
    /// Whose it is.
    pub arm: String,
    /// What was measured.
    pub quantity: Quantity,
    /// In picoseconds or bytes.
    pub typical: u64,
    /// Of the logarithm of a round's figure, beyond what the machine does to all.
    pub deviation: f64,
    /// How many rounds.
    pub rounds: usize,
}

impl Sampled {
    /// The same figure in each of 30 rounds.
    pub fn steady(arm: &str, typical: u64) -> Self {
        Self { arm: arm.to_owned(), quantity: Quantity::HostTime, typical, deviation: 0.0, rounds: 30 }
    }

    /// Figures of 30 rounds that differ.
    pub fn noisy(arm: &str, typical: u64, deviation: f64) -> Self {
        Self { deviation, ..Self::steady(arm, typical) }
    }

    /// The same figures as another quantity.
    #[must_use]
    pub fn of(self, quantity: Quantity) -> Self {
        Self { quantity, ..self }
    }
}

/// A number of the standard normal distribution, nearly: the sum of twelve even ones.
pub fn bell(rng: &mut ChaCha8Rng) -> f64 {
    (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0
}

/// A night of `2026-11-DD` on the simulated device, with one suite of threshold 5 %. The machine's clock drifts by up to 10 % over the rounds,
/// up and down, alike for the yardstick and all host times; one round in twenty is up to 1.5 times slower for one entry only.
pub fn night(day: u32, entries: &[Sampled]) -> NightRecord {
    sampled(day, u64::from(day), entries)
}

/// The same with numbers drawn from another seed.
pub fn sampled(day: u32, seed: u64, entries: &[Sampled]) -> NightRecord {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let rounds = entries.iter().map(|entry| entry.rounds).max().unwrap_or_default();
    let is_steady = entries.iter().all(|entry| entry.deviation == 0.0);
    let phase: f64 = rng.random();
    let drift = |round: usize| if is_steady { 1.0 } else { 1.05 + 0.05 * (round as f64 / 7.0 + 6.0 * phase).sin() };
    let drifts: Vec<f64> = (0..rounds).map(drift).collect();
    let entries = entries.iter().map(|entry| Entry {
        group: "hit".to_owned(),
        point: None,
        arm: entry.arm.clone(),
        quantity: entry.quantity,
        outcome: EntryOutcome::Measured(measured(entry, &drifts, &mut rng)),
    });
    let entries = entries.collect();
    let suite = SuiteRecord {
        name: "host".to_owned(),
        about: "Made up.".to_owned(),
        hash: "1".to_owned(),
        threshold: 0.05,
        rounds: rounds as u32,
        stopped: Stopped::Precise,
        overhead_ps: 0,
        yardstick_ps: drifts.iter().map(|drift| (YARDSTICK_PS * drift) as u64).collect(),
        allocators: BTreeMap::new(),
        entries,
    };
    NightRecord {
        version: BENCH_RECORD_VERSION,
        harness: "0.1.0".to_owned(),
        started: format!("2026-11-{day:02}T02:00:00Z"),
        took_ms: 60_000,
        seed: 1,
        reproduce: "harness bench --seed 1".to_owned(),
        shard: None,
        build: Build { commit: Some(format!("{day:040}")), dirty: Some(false) },
        machine: machine(),
        conditions: Conditions::default(),
        suites: vec![suite],
        comparison: None,
    }
}

fn machine() -> Machine {
    Machine {
        device: "simulated".to_owned(),
        clock: Clock::Simulated,
        memory: None,
        uuid_hash: None,
        driver: None,
        cuda: None,
        mig: None,
        ecc: None,
        cost_model: Some("example 1".to_owned()),
        cpu: Some("Example CPU".to_owned()),
        cores: 2,
        kernel: Some("Linux 6.1".to_owned()),
        compiler: "rustc 1.95.0, release".to_owned(),
    }
}

fn measured(entry: &Sampled, drifts: &[f64], rng: &mut ChaCha8Rng) -> Measured {
    let mut rounds = Vec::new();
    for drift in &drifts[..entry.rounds] {
        let machine = if entry.quantity == Quantity::HostTime { *drift } else { 1.0 };
        let far = if entry.deviation > 0.0 && rng.random_bool(0.05) { 1.0 + rng.random::<f64>() / 2.0 } else { 1.0 };
        let round = entry.typical as f64 * machine * far * (entry.deviation * bell(rng)).exp();
        // Samples of one round share all that.
        rounds.push((0..3).map(|_| (round * (entry.deviation / 10.0 * bell(rng)).exp()) as u64).collect::<Vec<u64>>());
    }
    let summary = summary(&rounds);
    Measured { batch: 1, rounds, yardstick_ps: Vec::new(), summary }
}

/// With the least and greatest median of a round for its interval.
fn summary(rounds: &[Vec<u64>]) -> EntrySummary {
    let of = |samples: &[u64]| median(&mut samples.iter().map(|&sample| sample as f64).collect::<Vec<_>>()).map(|median| median as u64);
    let all: Vec<u64> = rounds.concat();
    let medians: Vec<u64> = rounds.iter().filter_map(|round| of(round)).collect();
    EntrySummary {
        count: all.len() as u64,
        median: of(&all).unwrap_or_default(),
        mad: 0,
        p99: None,
        min: all.iter().copied().min().unwrap_or_default(),
        max: all.iter().copied().max().unwrap_or_default(),
        low: medians.iter().copied().min().unwrap_or_default(),
        high: medians.iter().copied().max().unwrap_or_default(),
    }
}
