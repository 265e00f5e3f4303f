//! The gate: the suites of the accepted build decide what a run measures and how it is judged. A
//! change therefore cannot raise its own threshold, shorten its own measurement, or drop or
//! redefine a case without being reported.

use harness_allocator::units::Nanos;
use serde::{Deserialize, Serialize};

use crate::execute::Arm;
use crate::record::{Gate, Shard};
use crate::suite::{Rounds, Suite};

/// A suite as it was when its build was accepted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AcceptedSuite {
    pub name: String,
    pub threshold: f64,
    pub precision: f64,
    pub budget: Nanos,
    /// Minimum and maximum of counted rounds.
    pub rounds: (u32, u32),
    pub entries: Vec<AcceptedEntry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptedEntry {
    pub case: String,
    pub arm: String,
    pub hash: String,
}

/// The part of the suites that a run was asked to measure.
#[derive(Clone, Copy, Debug)]
pub struct Scope {
    /// `true` if no suite was named, so all of them are measured.
    pub is_whole: bool,
    pub shard: Option<Shard>,
}

pub fn definitions(suites: &[Suite]) -> Vec<AcceptedSuite> {
    let definition = |suite: &Suite| AcceptedSuite {
        name: suite.name.clone(),
        threshold: suite.threshold,
        precision: suite.precision,
        budget: suite.budget,
        rounds: (suite.rounds.least, suite.rounds.most),
        entries: entries(suite),
    };
    suites.iter().map(definition).collect()
}

fn entries(suite: &Suite) -> Vec<AcceptedEntry> {
    let of_case = |case| suite.arms.iter().map(move |arm| (case, arm));
    let entry = |(case, arm): (&crate::suite::Case, _)| AcceptedEntry {
        case: case.name(),
        arm: Arm::Ours(arm).to_string(),
        hash: Arm::Ours(arm).hash(case),
    };
    suite.cases.iter().flat_map(of_case).map(entry).collect()
}

/// Applies the accepted terms to the suites, and returns what the suites lost, redefined or tried
/// to override.
pub fn apply(suites: &mut [Suite], accepted: &[AcceptedSuite], scope: Scope) -> Gate {
    let mut gate = Gate::default();
    for accepted in accepted {
        let Some(suite) = suites.iter_mut().find(|suite| suite.name == accepted.name) else {
            if scope.is_whole {
                gate.lost.push(format!("suite {}", accepted.name));
            }
            continue;
        };
        let rounds = Rounds {
            least: accepted.rounds.0,
            most: accepted.rounds.1,
        };
        let differs = [
            (suite.threshold != accepted.threshold, "threshold"),
            (suite.precision != accepted.precision, "precision"),
            (suite.budget != accepted.budget, "budget"),
            (suite.rounds != rounds, "rounds"),
        ];
        gate.overridden.extend(
            differs
                .into_iter()
                .filter(|(differs, _)| *differs)
                .map(|(_, term)| format!("{}: {term}", suite.name)),
        );
        (suite.threshold, suite.precision, suite.budget, suite.rounds) = (
            accepted.threshold,
            accepted.precision,
            accepted.budget,
            rounds,
        );
        let now = entries(suite);
        let in_shard = |entry: &&AcceptedEntry| {
            scope
                .shard
                .is_none_or(|shard| shard.has(&format!("{}\n{}", accepted.name, entry.case)))
        };
        for entry in accepted.entries.iter().filter(in_shard) {
            let name = format!("{}: {} on {}", accepted.name, entry.case, entry.arm);
            match now
                .iter()
                .find(|other| (&other.case, &other.arm) == (&entry.case, &entry.arm))
            {
                None => gate.lost.push(name),
                Some(now) if now.hash != entry.hash => gate.redefined.push(name),
                Some(_) => {}
            }
        }
    }
    gate
}

#[cfg(test)]
mod tests;
