use std::sync::atomic::Ordering;

use harness_allocator::units::Nanos;

use super::execute::{Processes, Progress, Terms, cases_of, run_suite};
use super::{clock::Stopwatch, provider::DeviceProvider, record::SuiteRecord, suite::Suite};

#[derive(Clone, Debug)]
pub struct BenchPlan {
    /// All suites, headline suites first; those without a case in the shard are skipped.
    pub suites: Vec<Suite>,
    /// The budget is for all suites together.
    pub terms: Terms,
}

impl BenchPlan {
    pub fn suites(&self) -> Vec<&Suite> {
        let mut suites: Vec<&Suite> = self
            .suites
            .iter()
            .filter(|suite| cases_of(suite, self.terms.shard).next().is_some())
            .collect();
        suites.sort_by(|a, b| (!a.headline, &a.name).cmp(&(!b.headline, &b.name)));
        suites
    }

    /// Runs everything until the user interrupts. Calls `between` before each suite. Also returns
    /// the duration.
    pub fn run(
        &self,
        provider: &mut dyn DeviceProvider,
        processes: &mut Processes,
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
            let budget = self.terms.budget.map(|whole| {
                share(
                    whole.saturating_sub(Nanos(began.elapsed_ns())),
                    &suites[index..],
                )
            });
            let terms = Terms {
                budget,
                ..self.terms.clone()
            };
            records.push(run_suite(suite, provider, processes, &terms, &mut watch));
        }
        (records, Nanos(began.elapsed_ns()))
    }
}

/// The first suite's share of the remaining time, in proportion to the suites' budgets, of which
/// that of a headline suite counts three times. Unused time goes to later suites.
fn share(left: Nanos, suites: &[&Suite]) -> Nanos {
    let weight = |suite: &&Suite| u128::from(suite.budget.0) * if suite.headline { 3 } else { 1 };
    let all: u128 = suites.iter().map(weight).sum();
    let own = suites.first().map_or(0, weight);
    // The result is at most `left`, which has 64 bits.
    Nanos((u128::from(left.0) * own / all.max(1)) as u64)
}
