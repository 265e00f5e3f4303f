//! A benchmark run: suites one after another, in the order of their names, and what is known of machine and build beside them.

use std::sync::atomic::Ordering;

use harness_allocator::units::Nanos;

use super::clock::Stopwatch;
use super::execute::{Progress, Terms, cases_of, run_suite};
use super::provider::DeviceProvider;
use super::record::{Accepted, BENCH_VERSION, BenchRun, Build, Conditions, Machine, SuiteRecord};
use super::suite::Suite;

/// What is to be done.
#[derive(Clone, Debug)]
pub struct Plan {
    /// All suites; those without a case in the shard are left out.
    pub suites: Vec<Suite>,
    /// How they are run. The budget is of all together.
    pub terms: Terms,
}

/// What a run's record says beside what was measured.
#[derive(Clone, Debug)]
pub struct Circumstances {
    /// When it began, in UTC, as in `2026-11-20T02:17:00Z`.
    pub started: String,
    /// A command that does the same again.
    pub reproduce: String,
    /// What is measured.
    pub build: Build,
    /// What it is compared with.
    pub accepted: Accepted,
    /// Where.
    pub machine: Machine,
}

impl Plan {
    /// The suites that have something to do.
    #[must_use]
    pub fn suites(&self) -> Vec<&Suite> {
        let mut suites: Vec<&Suite> = self.suites.iter().filter(|suite| cases_of(suite, self.terms.shard).next().is_some()).collect();
        suites.sort_by(|a, b| a.name.cmp(&b.name));
        suites
    }

    /// Runs everything; stops early when the user interrupts. `between` is called before each suite. Returns how long it took, too.
    pub fn run(
        &self,
        provider: &mut dyn DeviceProvider,
        mut between: impl FnMut(),
        mut watch: impl FnMut(Progress<'_>),
    ) -> (Vec<SuiteRecord>, Nanos) {
        let began = Stopwatch::start();
        let mut records = Vec::new();
        let suites = self.suites();
        for (index, suite) in suites.iter().enumerate() {
            if self.terms.interrupt.load(Ordering::Relaxed) {
                break;
            }
            between();
            let budget = self.terms.budget.map(|whole| share(whole.saturating_sub(Nanos(began.elapsed_ns())), &suites[index..]));
            let terms = Terms { budget: Some(budget.unwrap_or(suite.budget)), ..self.terms.clone() };
            records.push(run_suite(suite, provider, &terms, &mut watch));
        }
        (records, Nanos(began.elapsed_ns()))
    }

    /// The record of a run.
    #[must_use]
    pub fn record(&self, (suites, took): (Vec<SuiteRecord>, Nanos), circumstances: Circumstances, conditions: Conditions) -> BenchRun {
        let Circumstances { started, reproduce, build, accepted, machine } = circumstances;
        BenchRun {
            version: BENCH_VERSION,
            harness: env!("CARGO_PKG_VERSION").to_owned(),
            started,
            took_ms: took.0 / 1_000_000,
            seed: self.terms.seed,
            reproduce,
            shard: self.terms.shard,
            build,
            accepted,
            machine,
            conditions,
            suites,
            comparison: None,
        }
    }
}

/// The first suite's share of the time that is left, in proportion to the suites' own budgets: what one does not need goes to those behind it.
fn share(left: Nanos, suites: &[&Suite]) -> Nanos {
    let all: u128 = suites.iter().map(|suite| u128::from(suite.budget.0)).sum();
    let own = suites.first().map_or(0, |suite| u128::from(suite.budget.0));
    // No more than what is left, which has 64 bits.
    Nanos((u128::from(left.0) * own / all.max(1)) as u64)
}
