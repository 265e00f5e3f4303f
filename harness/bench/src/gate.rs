//! The gate: the suites of the accepted build decide what a run measures and how it is judged. A change therefore cannot raise its own
//! threshold, shorten its own measurement, or drop or redefine a case without being reported.

use std::collections::BTreeMap;

use harness_allocator::units::Nanos;
use serde::{Deserialize, Serialize};

use crate::execute::{Arm, cases_of};
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

/// A case on an arm, with the hash of its work.
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

/// The definitions of these suites, to be stored when a build is accepted.
pub fn definitions(suites: &[Suite]) -> Vec<AcceptedSuite> {
    let definition = |suite: &Suite| AcceptedSuite {
        name: suite.name.clone(),
        threshold: suite.threshold,
        precision: suite.precision,
        budget: suite.budget,
        rounds: (suite.rounds.least, suite.rounds.most),
        entries: entries(suite, None),
    };
    suites.iter().map(definition).collect()
}

fn entries(suite: &Suite, shard: Option<Shard>) -> Vec<AcceptedEntry> {
    let of_case = |case| suite.arms.iter().map(move |arm| (case, arm));
    let entry = |(case, arm): (&crate::suite::Case, _)| AcceptedEntry {
        case: case.name(),
        arm: Arm::Ours(arm).to_string(),
        hash: Arm::Ours(arm).hash(case),
    };
    cases_of(suite, shard).flat_map(of_case).map(entry).collect()
}

/// Applies the accepted terms to the suites, and returns what the suites lost, redefined or tried to override.
pub fn apply(suites: &mut [Suite], accepted: &[AcceptedSuite], scope: Scope) -> Gate {
    let mut gate = Gate::default();
    for accepted in accepted {
        let Some(suite) = suites.iter_mut().find(|suite| suite.name == accepted.name) else {
            if scope.is_whole {
                gate.lost.push(format!("suite {}", accepted.name));
            }
            continue;
        };
        apply_terms(suite, accepted, &mut gate.overridden);
        let now: BTreeMap<(String, String), String> =
            entries(suite, None).into_iter().map(|entry| ((entry.case, entry.arm), entry.hash)).collect();
        for entry in &accepted.entries {
            let in_shard = scope.shard.is_none_or(|shard| shard.has(&format!("{}\n{}", accepted.name, entry.case)));
            let name = format!("{}: {} on {}", accepted.name, entry.case, entry.arm);
            match now.get(&(entry.case.clone(), entry.arm.clone())) {
                _ if !in_shard => {}
                None => gate.lost.push(name),
                Some(hash) if *hash != entry.hash => gate.redefined.push(name),
                Some(_) => {}
            }
        }
    }
    gate
}

fn apply_terms(suite: &mut Suite, accepted: &AcceptedSuite, overridden: &mut Vec<String>) {
    let rounds = Rounds { least: accepted.rounds.0, most: accepted.rounds.1 };
    let differs = [
        (suite.threshold != accepted.threshold, "threshold"),
        (suite.precision != accepted.precision, "precision"),
        (suite.budget != accepted.budget, "budget"),
        (suite.rounds != rounds, "rounds"),
    ];
    overridden.extend(differs.into_iter().filter(|(differs, _)| *differs).map(|(_, term)| format!("{}: {term}", suite.name)));
    (suite.threshold, suite.precision, suite.budget, suite.rounds) = (accepted.threshold, accepted.precision, accepted.budget, rounds);
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const SUITE: &str = "about: Small.\nneeds: { memory: 64MiB }\narms: [caching, direct]\nthreshold: 5%\ntime:\n  - latency: { sizes: [1MiB, 2MiB], cases: [hit] }\n";
    const WHOLE: Scope = Scope { is_whole: true, shard: None };

    fn suite(text: &str) -> Suite {
        Suite::parse(text, Path::new("small.yaml")).expect("the suite is valid")
    }

    fn gate(text: &str, scope: Scope) -> (Suite, Gate) {
        let mut suites = [suite(text)];
        let gate = apply(&mut suites, &definitions(&[suite(SUITE)]), scope);
        let [suite] = suites;
        (suite, gate)
    }

    #[test]
    fn an_unchanged_suite_loses_nothing() {
        assert_eq!(gate(SUITE, WHOLE).1, Gate::default());
    }

    #[test]
    fn a_case_or_arm_that_is_removed_or_renamed_is_lost() {
        let smaller = gate(&SUITE.replace("[1MiB, 2MiB]", "[1MiB]"), WHOLE).1;
        assert_eq!(smaller.lost, ["small: hit, 2 MiB on caching", "small: hit, 2 MiB on direct"]);
        let renamed = gate(&SUITE.replace("direct]", "{ caching: { name: other, max_split_size_mb: 32 } }]"), WHOLE).1;
        assert_eq!(renamed.lost, ["small: hit, 1 MiB on direct", "small: hit, 2 MiB on direct"]);
        let gone = apply(&mut [], &definitions(&[suite(SUITE)]), WHOLE);
        assert_eq!(gone.lost, ["suite small"]);
        let not_requested = apply(&mut [], &definitions(&[suite(SUITE)]), Scope { is_whole: false, ..WHOLE });
        assert_eq!(not_requested, Gate::default());
    }

    #[test]
    fn a_case_that_does_other_work_is_redefined() {
        let named = SUITE.replace("direct]", "{ caching: { name: mine, max_split_size_mb: 32 } }]");
        let other = named.replace("size_mb: 32", "size_mb: 64");
        let mut suites = [suite(&other)];
        let gate = apply(&mut suites, &definitions(&[suite(&named)]), WHOLE);
        assert_eq!(gate.redefined, ["small: hit, 1 MiB on mine", "small: hit, 2 MiB on mine"]);
    }

    #[test]
    fn the_accepted_terms_replace_those_of_the_change() {
        let changed = format!("{SUITE}rounds: {{ least: 2, most: 3 }}\nbudget: 2s\n").replace("threshold: 5%", "threshold: 60%");
        let (suite, gate) = gate(&changed, WHOLE);
        assert_eq!(gate.overridden, ["small: threshold", "small: budget", "small: rounds"]);
        assert_eq!(suite, Suite { about: suite.about.clone(), ..super::tests::suite(SUITE) });
    }

    #[test]
    fn a_shard_loses_only_its_own_cases() {
        let without = SUITE.replace("[1MiB, 2MiB]", "[1MiB]");
        let lost = |index| gate(&without, Scope { is_whole: true, shard: Some(Shard { index, count: 2 }) }).1.lost.len();
        assert_eq!(lost(1) + lost(2), 2);
    }
}
