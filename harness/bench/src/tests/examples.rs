//! Invented benchmark runs for tests; no figure was measured.

use harness_allocator::device::Clock;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::inference::median;
use crate::record::{
    Accepted, BenchRun, Build, Entry, EntryResult, EntrySummary, MachineInfo, Measured, Quantity,
    Stopped, SuiteRecord,
};

/// How an entry's figures are generated.
#[derive(Clone, Debug)]
pub struct Sampled {
    pub arm: String,
    pub quantity: Quantity,
    /// The accepted build's figure, in picoseconds or bytes.
    pub accepted: f64,
    /// This build's figure as a multiple of that.
    pub factor: f64,
    /// Standard deviation of the logarithm of a round's figure; 0 for constant figures.
    pub deviation: f64,
    pub rounds: usize,
}

impl Sampled {
    /// 20 rounds of host time with this noise.
    pub fn noisy(arm: &str, accepted: f64, deviation: f64) -> Self {
        Self {
            arm: arm.to_owned(),
            quantity: Quantity::HostTime,
            accepted,
            factor: 1.0,
            deviation,
            rounds: 20,
        }
    }

    /// The same figure in each round.
    pub fn exact(arm: &str, quantity: Quantity, figure: f64) -> Self {
        Self {
            quantity,
            ..Self::noisy(arm, figure, 0.0)
        }
    }

    /// Multiplies this build's figures.
    pub fn times(&self, factor: f64) -> Self {
        Self {
            factor,
            ..self.clone()
        }
    }
}

/// An approximately normal number: the sum of twelve uniform ones.
pub fn bell(rng: &mut ChaCha8Rng) -> f64 {
    (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0
}

/// A run of `2026-11-DD` on the simulated device, side by side with the accepted build, with one
/// suite of threshold 5 %. In some rounds the machine is up to a fifth slower for both builds, the
/// whole run is slower by up to a tenth, and one visit in twenty is up to 1.5 times slower.
pub fn run(day: u32, entries: &[Sampled]) -> BenchRun {
    let mut rng = ChaCha8Rng::seed_from_u64(u64::from(day));
    let machine_speed = 1.0 + rng.random::<f64>() / 10.0;
    let rounds = entries
        .iter()
        .map(|entry| entry.rounds)
        .max()
        .unwrap_or_default();
    let drifts: Vec<f64> = (0..rounds)
        .map(|_| machine_speed * (1.0 + rng.random::<f64>() / 5.0))
        .collect();
    let entries = entries.iter().map(|entry| Entry {
        group: "hit".to_owned(),
        point: None,
        arm: entry.arm.clone(),
        quantity: entry.quantity,
        hash: "1".to_owned(),
        outcome: EntryResult::Measured(measured(
            entry,
            entry.accepted * entry.factor,
            &drifts,
            &mut rng,
        )),
        accepted: Some(EntryResult::Measured(measured(
            entry,
            entry.accepted,
            &drifts,
            &mut rng,
        ))),
    });
    let suite = SuiteRecord {
        name: "host".to_owned(),
        about: "Made up.".to_owned(),
        threshold: 0.05,
        rounds: u32::try_from(rounds).unwrap_or(u32::MAX),
        stopped: Stopped::Precise,
        overhead_ps: 0,
        entries: entries.collect(),
    };
    BenchRun {
        took_ms: 60_000,
        reproduce: "harness bench --seed 1".to_owned(),
        build: Build {
            commit: Some(format!("{day:040}")),
            dirty: Some(false),
        },
        accepted: Accepted {
            commit: Some("a".repeat(40)),
            missing: None,
            is_required: true,
        },
        is_whole: true,
        suites: vec![suite],
        ..BenchRun::new(format!("2026-11-{day:02}T02:00:00Z"), machine())
    }
}

/// The same without the accepted build.
pub fn alone(day: u32, entries: &[Sampled]) -> BenchRun {
    let mut run = run(day, entries);
    run.suites
        .iter_mut()
        .flat_map(|suite| &mut suite.entries)
        .for_each(|entry| entry.accepted = None);
    run.accepted.missing = Some("it could not be built".to_owned());
    run
}

fn machine() -> MachineInfo {
    MachineInfo {
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
        compiler: "rustc 1.95.0, dist".to_owned(),
    }
}

fn measured(entry: &Sampled, typical: f64, drifts: &[f64], rng: &mut ChaCha8Rng) -> Measured {
    let round = |drift: &f64| {
        if entry.deviation == 0.0 {
            return typical.round() as u64;
        }
        let far = if rng.random_bool(0.05) {
            1.0 + rng.random::<f64>() / 2.0
        } else {
            1.0
        };
        (typical * drift * far * (entry.deviation * bell(rng)).exp()) as u64
    };
    let rounds: Vec<u64> = drifts[..entry.rounds].iter().map(round).collect();
    let middle = median(&mut rounds.iter().map(|&round| round as f64).collect::<Vec<_>>())
        .unwrap_or_default() as u64;
    let (min, max) = (
        rounds.iter().min().copied().unwrap_or_default(),
        rounds.iter().max().copied().unwrap_or_default(),
    );
    let summary = EntrySummary {
        count: rounds.len() as u64,
        median: middle,
        mad: 0,
        p99: None,
        min,
        max,
        low: min,
        high: max,
    };
    Measured {
        batch: 1,
        rounds: rounds.into_iter().map(Some).collect(),
        summary,
    }
}
