//! Compares a run with the accepted build and with earlier runs. Pure functions of records.
//!
//! **Side by side.** If the accepted build was measured in the same rounds, the ratio of the two
//! builds in each round is judged, because both met the same machine state. An entry is worse if
//! the ratio is above one by more than the suite's threshold and the whole 99 % interval by more
//! than half of it. Better is the mirror image.
//!
//! **Earlier runs.** Ratios to the same accepted build can be compared between runs. An entry is
//! also worse if it is above the best earlier run by more than the threshold, so an improvement
//! cannot hide a later loss. It is worse, too, if [`change_points`] find a lasting step of half the
//! threshold, which one run is too noisy to show.
//!
//! **Exact figures**, model times and memory, have no threshold: any difference comes from the
//! code.
//!
//! **A contended machine** decides nothing: a measured time that changed while other programs
//! disturbed the machine is unsure.
//!
//! **Without the accepted build** the medians of the rounds are compared with those of an earlier
//! run, if possible one of the accepted commit. A machine varies more between runs than within one,
//! so the threshold is at least `BETWEEN_RUNS`, and only runs on the same processor model are
//! compared. The comparison states this, and no run fails by it ([`BenchRun::fails`]).

use std::collections::BTreeMap;

use crate::history::change_points;
use crate::inference::{Estimate, centre};
use crate::record::{
    Basis, BenchComparison, BenchRun, Change, ChangeFigures, Entry, EntryName, EntryResult,
    MachineInfo, Measured, NOT_IN_TURN, Quantity, SuiteRecord, Verdict,
};

/// Minimum threshold for measured times of different runs. Runs of one build on two cores of a
/// virtual machine differed by up to 12 % (20 November 2026, 20 runs of the suite `traces`).
const BETWEEN_RUNS: f64 = 0.15;

/// Compares a run with the accepted build and with earlier runs, given in any order.
pub fn compare(
    run: &BenchRun,
    earlier: &[&BenchRun],
    base: Option<&BenchRun>,
) -> Option<BenchComparison> {
    let mut before: Vec<&BenchRun> = earlier
        .iter()
        .copied()
        .filter(|other| other.started < run.started && other.shard == run.shard)
        .collect();
    before.sort_by(|a, b| a.started.cmp(&b.started));
    let base = base.or_else(|| base_among(run, &before));
    let basis = basis(run, base)?;
    let base_entries: BTreeMap<EntryName, (&BenchRun, &Entry)> = base
        .into_iter()
        .flat_map(|base| {
            base.entries()
                .map(move |(suite, entry)| (EntryName::of(suite, entry), (base, entry)))
        })
        .collect();
    let history: Vec<&BenchRun> = before
        .iter()
        .copied()
        .filter(|other| is_comparable(other, run))
        .collect();
    let (mut changes, mut new, mut redefined) = (Vec::new(), Vec::new(), Vec::new());
    for (suite, entry) in run.entries() {
        let name = EntryName::of(suite, entry);
        let earlier = Earlier {
            run,
            name: &name,
            entry,
            history: &history,
        };
        match (&entry.accepted, base_entries.get(&name)) {
            (Some(accepted), _) => changes.push(earlier.judged(suite, accepted, None)),
            (None, Some((_, old))) if old.hash != entry.hash => redefined.push(name),
            (None, Some((base, old))) => {
                changes.push(earlier.judged(suite, &old.outcome, Some(base)))
            }
            (None, None) => new.push(name),
        }
    }
    let measured: Vec<&str> = run.suites.iter().map(|suite| suite.name.as_str()).collect();
    let is_gone = |name: &&EntryName| {
        (measured.contains(&name.suite.as_str()) || run.is_whole)
            && !run.entries().any(|(suite, entry)| {
                EntryName::of(suite, entry) == **name || is_part_of_skipped(name, suite, entry)
            })
    };
    let last = base.or(before.last().copied());
    let same_host = before
        .iter()
        .rev()
        .copied()
        .filter(|other| other.machine.is_same_host(&run.machine));
    Some(BenchComparison {
        machine: last.map_or_else(Vec::new, |last| last.machine.differences(&run.machine)),
        contended_runs: std::iter::once(run)
            .chain(same_host)
            .take_while(|run| !run.conditions.contended.is_empty())
            .count(),
        missing: base_entries.keys().filter(is_gone).cloned().collect(),
        basis,
        changes,
        new,
        redefined,
    })
}

/// What the run is compared with. `None` if there is nothing.
fn basis(run: &BenchRun, base: Option<&BenchRun>) -> Option<Basis> {
    let accepted = &run.accepted;
    if accepted.missing.is_none() && run.entries().any(|(_, entry)| entry.accepted.is_some()) {
        return Some(Basis::SideBySide {
            commit: accepted.commit.clone(),
        });
    }
    let base = base?;
    let why = accepted.missing.as_deref();
    Some(Basis::Records {
        started: base.started.clone(),
        build: base.build.clone(),
        why: why.unwrap_or("it was not requested").to_owned(),
    })
}

/// The run that replaces the accepted build: the last run of its commit, or else the last run on
/// this device.
fn base_among<'a>(run: &BenchRun, before: &[&'a BenchRun]) -> Option<&'a BenchRun> {
    // A run that lost entries must not hide the loss from the next run.
    let usable = || {
        before
            .iter()
            .rev()
            .copied()
            .filter(|other| other.machine.is_same_device(&run.machine) && !other.has_losses())
    };
    let accepted = run.accepted.commit.as_deref();
    let of_accepted =
        usable().find(|other| accepted.is_some() && other.build.commit.as_deref() == accepted);
    of_accepted
        .or_else(|| usable().find(|other| other.is_whole || !run.is_whole))
        .or_else(|| usable().next())
}

/// Returns whether the entry is a part of a case that the run had no time for.
fn is_part_of_skipped(name: &EntryName, suite: &SuiteRecord, entry: &Entry) -> bool {
    let is_same_case = name.suite == suite.name
        && name.arm == entry.arm
        && name.case.starts_with(&format!("{}: ", entry.group));
    is_same_case && entry.outcome.reason() == Some(NOT_IN_TURN)
}

/// Returns whether a run measured on the same device against the same accepted build.
pub fn is_comparable(other: &BenchRun, run: &BenchRun) -> bool {
    other.machine.is_same_device(&run.machine) && other.accepted.commit == run.accepted.commit
}

struct Earlier<'a, 'r> {
    run: &'a BenchRun,
    name: &'a EntryName,
    entry: &'a Entry,
    history: &'a [&'r BenchRun],
}

impl<'r> Earlier<'_, 'r> {
    /// `base` is the run that `other` belongs to, if it is not this run.
    fn judged(&self, suite: &SuiteRecord, other: &EntryResult, base: Option<&BenchRun>) -> Change {
        let (verdict, reason) = match (other, &self.entry.outcome) {
            (EntryResult::Measured(old), EntryResult::Measured(new)) => {
                return self.measured(suite, old, new, base);
            }
            (EntryResult::Skipped { reason }, _) | (_, EntryResult::Skipped { reason }) => {
                (Verdict::NotCompared, Some(reason))
            }
            (
                EntryResult::Measured(_),
                EntryResult::Failed { reason } | EntryResult::OutOfMemory { reason },
            ) => (Verdict::Broken, Some(reason)),
            (EntryResult::OutOfMemory { .. }, EntryResult::Failed { reason }) => {
                (Verdict::Broken, Some(reason))
            }
            (_, EntryResult::Measured(_)) => (Verdict::Fixed, None),
            (_, EntryResult::Failed { reason } | EntryResult::OutOfMemory { reason }) => {
                (Verdict::StillBroken, Some(reason))
            }
        };
        Change {
            reason: reason.cloned(),
            ..self.change(verdict, None)
        }
    }

    fn change(&self, verdict: Verdict, figures: Option<ChangeFigures>) -> Change {
        Change {
            entry: self.name.clone(),
            verdict,
            figures,
            worse_than_run: None,
            since: None,
            reason: None,
        }
    }

    fn measured(
        &self,
        suite: &SuiteRecord,
        old: &Measured,
        new: &Measured,
        base: Option<&BenchRun>,
    ) -> Change {
        let quantity = self.name.quantity;
        let is_other_host = base.is_some_and(|base| !base.machine.is_same_host(&self.run.machine));
        if !quantity.is_exact() && is_other_host {
            let reason =
                "measured times of different processors are not comparable between runs".to_owned();
            return Change {
                reason: Some(reason),
                ..self.change(Verdict::NotCompared, None)
            };
        }
        let is_ratio = base.is_none() && !quantity.is_exact();
        let threshold = match (quantity.is_exact(), base) {
            (true, _) => 0.0,
            (false, None) => suite.threshold,
            (false, Some(_)) => suite.threshold.max(BETWEEN_RUNS),
        };
        let reference = if is_ratio {
            Some(UNCHANGED)
        } else {
            level(quantity, old, None)
        };
        let (Some(now), Some(reference)) =
            (level(quantity, new, is_ratio.then_some(old)), reference)
        else {
            return self.change(Verdict::Unsure, None);
        };
        let figures = ChangeFigures {
            base: old.summary.median,
            new: new.summary.median,
            ratio: ratio(now.middle, reference.middle),
            low: ratio(now.low, reference.high),
            high: ratio(now.high, reference.low),
        };
        let levels = self.levels(is_ratio);
        let found = self.change(verdict(now, reference, threshold), Some(figures));
        let found = if found.verdict == Verdict::Worse {
            found
        } else {
            self.against_runs(found, now, &levels, threshold)
        };
        let changed = matches!(found.verdict, Verdict::Worse | Verdict::Better);
        let is_disturbed = || {
            [Some(self.run), base]
                .into_iter()
                .flatten()
                .any(|run| !run.conditions.contended.is_empty())
        };
        if changed && !quantity.is_exact() && is_disturbed() {
            return Change {
                reason: Some("the machine was contended".to_owned()),
                ..self.change(Verdict::Unsure, Some(figures))
            };
        }
        let since = || self.since(found.verdict, reference, &levels, threshold);
        Change {
            since: changed.then(|| found.since.clone().unwrap_or_else(since)),
            ..found
        }
    }

    /// The entry's levels in earlier runs, oldest first: ratios to the accepted build, or figures.
    fn levels(&self, is_ratio: bool) -> Vec<(&'r str, Estimate)> {
        let quantity = self.name.quantity;
        let of_run = |run: &&'_ BenchRun| {
            let (_, entry) = run
                .entries()
                .filter(|(_, entry)| {
                    entry.hash == self.entry.hash
                        && entry.arm == self.entry.arm
                        && entry.quantity == quantity
                })
                .find(|(suite, entry)| EntryName::of(suite, entry) == *self.name)?;
            if !is_ratio && !quantity.is_exact() && !run.machine.is_same_host(&self.run.machine) {
                return None;
            }
            let accepted = if is_ratio {
                Some(entry.accepted.as_ref()?.measured()?)
            } else {
                None
            };
            level(quantity, entry.outcome.measured()?, accepted)
        };
        self.history
            .iter()
            .filter_map(|run| Some((run.started.as_str(), of_run(run)?)))
            .collect()
    }

    /// Worse than the best earlier run, or by a lasting step of half the threshold.
    fn against_runs(
        &self,
        change: Change,
        now: Estimate,
        levels: &[(&str, Estimate)],
        threshold: f64,
    ) -> Change {
        let best = levels.iter().min_by(|a, b| a.1.high.total_cmp(&b.1.high));
        if let Some((started, best)) =
            best.filter(|(_, best)| verdict(now, *best, threshold) == Verdict::Worse)
        {
            let since = self.since(Verdict::Worse, *best, levels, threshold);
            return Change {
                verdict: Verdict::Worse,
                worse_than_run: Some((*started).to_owned()),
                since: Some(since),
                ..change
            };
        }
        if self.name.quantity.is_exact() || change.verdict == Verdict::Better {
            return change;
        }
        // A run with an interval wider than the threshold cannot show a step of half of it.
        let is_precise =
            |level: &Estimate| level.high - level.low <= 2.0 * threshold * level.middle;
        if !is_precise(&now) {
            return change;
        }
        let levels: Vec<(&str, Estimate)> = levels
            .iter()
            .copied()
            .filter(|(_, level)| is_precise(level))
            .collect();
        let series: Vec<f64> = levels
            .iter()
            .map(|(_, level)| level.middle)
            .chain([now.middle])
            .collect();
        let points = change_points(&series, threshold / 2.0);
        // The first of the last upward points: the start of the creep.
        let up = points
            .iter()
            .rev()
            .take_while(|point| point.after > point.before)
            .last();
        match up {
            Some(first) if first.at < levels.len() && now.low > first.before => {
                let (worse_than_run, since) = (
                    levels[first.at - 1].0.to_owned(),
                    levels[first.at].0.to_owned(),
                );
                Change {
                    verdict: Verdict::Worse,
                    worse_than_run: Some(worse_than_run),
                    since: Some(since),
                    ..change
                }
            }
            _ => change,
        }
    }

    /// The first run of the latest stretch on the same side of the reference by half the threshold.
    fn since(
        &self,
        verdict: Verdict,
        reference: Estimate,
        levels: &[(&str, Estimate)],
        threshold: f64,
    ) -> String {
        let is_alike = |level: &Estimate| match verdict {
            Verdict::Worse => level.middle > reference.middle * (1.0 + threshold / 2.0),
            _ => level.middle < reference.middle * (1.0 - threshold / 2.0),
        };
        let stretch = levels.iter().rev().take_while(|(_, level)| is_alike(level));
        stretch
            .last()
            .map_or(self.run.started.as_str(), |(started, _)| *started)
            .to_owned()
    }
}

/// An entry in this run and in comparable earlier runs, oldest first, each with the run's start:
/// its ratio to the accepted build, or the figure itself if it is exact.
pub fn over_runs<'r>(
    run: &'r BenchRun,
    earlier: &[&'r BenchRun],
    name: &EntryName,
) -> Vec<(&'r str, Estimate)> {
    let Some((_, entry)) = run
        .entries()
        .find(|(suite, entry)| EntryName::of(suite, entry) == *name)
    else {
        return Vec::new();
    };
    let mut history: Vec<&BenchRun> = earlier
        .iter()
        .copied()
        .filter(|other| is_comparable(other, run))
        .chain([run])
        .collect();
    history.sort_by(|a, b| a.started.cmp(&b.started));
    Earlier {
        run,
        name,
        entry,
        history: &history,
    }
    .levels(!name.quantity.is_exact() && entry.accepted.is_some())
}

/// The ratio of two figures; zero counts as one unit.
fn ratio(new: f64, old: f64) -> f64 {
    let least = |value: f64| if value == 0.0 { 1.0 } else { value };
    least(new) / least(old)
}

/// Returns whether the estimate is beyond the reference by more than the threshold, and the whole
/// interval by more than half of it.
fn verdict(now: Estimate, reference: Estimate, threshold: f64) -> Verdict {
    let (most, certain) = (threshold, threshold / 2.0);
    match (now, reference) {
        _ if now.middle > reference.middle * (1.0 + most)
            && now.low > reference.high * (1.0 + certain) =>
        {
            Verdict::Worse
        }
        _ if now.middle < reference.middle * (1.0 - most)
            && now.high < reference.low * (1.0 - certain) =>
        {
            Verdict::Better
        }
        _ if threshold > 0.0 && now.high > reference.high * (1.0 + 2.0 * threshold) => {
            Verdict::Unsure
        }
        _ => Verdict::Same,
    }
}

/// The ratio of two equal builds.
const UNCHANGED: Estimate = Estimate {
    low: 1.0,
    middle: 1.0,
    high: 1.0,
};

/// An entry's level in a unit that is comparable between runs: exact figures as they are, measured
/// times divided by the accepted build's, round by round, if given. `None` if there are too few
/// rounds.
fn level(quantity: Quantity, measured: &Measured, accepted: Option<&Measured>) -> Option<Estimate> {
    if quantity.is_exact() {
        let [low, middle, high] = [
            measured.summary.min,
            measured.summary.median,
            measured.summary.max,
        ]
        .map(|value| value as f64);
        return Some(Estimate { low, middle, high });
    }
    let log = |figure: u64| (figure.max(1) as f64).ln();
    let logs: Vec<f64> = match accepted {
        Some(accepted) => {
            let pairs = measured.rounds.iter().zip(&accepted.rounds);
            pairs
                .filter_map(|(new, old)| Some(log((*new)?) - log((*old)?)))
                .collect()
        }
        None => measured
            .rounds
            .iter()
            .flatten()
            .map(|&round| log(round))
            .collect(),
    };
    centre(&logs).map(|logs| logs.map(f64::exp))
}

impl MachineInfo {
    pub fn is_same_device(&self, other: &Self) -> bool {
        (&self.device, self.clock, &self.cost_model)
            == (&other.device, other.clock, &other.cost_model)
    }

    pub fn is_same_host(&self, other: &Self) -> bool {
        self.is_same_device(other) && (&self.cpu, self.cores) == (&other.cpu, other.cores)
    }
}

/// Important changes first: broken, worse, better, fixed; then by the end of the interval nearer to
/// no change.
pub fn by_importance(comparison: &BenchComparison) -> Vec<&Change> {
    const ORDER: [Verdict; 4] = [
        Verdict::Broken,
        Verdict::Worse,
        Verdict::Better,
        Verdict::Fixed,
    ];
    let rank = |change: &Change| ORDER.iter().position(|verdict| *verdict == change.verdict);
    let size = |change: &Change| match (change.verdict, change.figures) {
        (Verdict::Worse, Some(figures)) => figures.low,
        (Verdict::Better, Some(figures)) => 1.0 / figures.high.max(f64::MIN_POSITIVE),
        _ => f64::INFINITY,
    };
    let mut ranked: Vec<(usize, f64, &Change)> = comparison
        .changes
        .iter()
        .filter_map(|change| Some((rank(change)?, size(change), change)))
        .collect();
    ranked.sort_by(|a, b| a.0.cmp(&b.0).then(b.1.total_cmp(&a.1)));
    ranked.into_iter().map(|(.., change)| change).collect()
}

#[cfg(test)]
mod tests;
