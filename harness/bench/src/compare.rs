//! One night against another: which entries changed surely and by more than their suite's threshold. Pure: records in, a record out.
//!
//! What is compared are figures of rounds, the medians of their samples: samples of one round share what the machine was like in it and
//! are not independent, rounds nearly are. Host times are divided by the yardstick of their round, which follows the processor's clock as
//! they do. Figures of a virtual clock and of memory that are equal in all rounds are exact: any difference is certain.
//!
//! Others are judged against what two nights of one build differ by. Between nights, addresses, pages and the state of the machine
//! change, and an entry's median moves by more than rounds within a night tell (T. Kalibera and R. Jones, "Rigorous Benchmarking in
//! Reasonable Time", 2013, <https://doi.org/10.1145/2464157.2464160>; T. Mytkowicz and others, "Producing Wrong Data Without Doing Anything
//! Obviously Wrong!", 2009, <https://doi.org/10.1145/1508244.1508275>). So the hypothesis to refute is not that nothing changed, which is
//! never quite true, but that the change is within that allowance (J. L. Hodges and E. L. Lehmann, "Testing the Approximate Validity of
//! Statistical Hypotheses", 1954, <https://doi.org/10.1111/j.2517-6161.1954.tb00169.x>): the baseline is moved by the allowance towards
//! the new night before the rank test. The allowance follows from a floor, or from what earlier nights of the machine show where that is
//! more (`spread.rs`).
//!
//! An entry is flagged where all of this holds: the probability, corrected for the number of entries, is below [`SIGNIFICANT`]; the ratio of
//! the medians differs from one by more than the suite's threshold; its interval, widened by the spread between nights, does not contain
//! one. All three must also hold against what all allocators of the suite changed by together (`drift.rs`) instead of against one: what
//! is flagged without that and not with it may be the machine or the allocator, and is told as unknown. Where either night was contended, or
//! has so few rounds of an entry that no difference could be significant, nothing is concluded from measured times, and that is told.

use std::collections::{BTreeMap, BTreeSet};

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::drift::{Drift, Drifts, Step};
use super::evidence::{Basis, Expected, Finding, Sample, Two};
use super::history::{entry_name, is_measured_time};
use super::inference::{correct_for_many, worth_testing};
use super::nights;
use super::record::{
    Change, ChangeFigures, ChangeVerdict, CommonDrift, Comparison, Entry, EntryName, EntryOutcome, NightRecord, Quantity, SuiteRecord,
};
use super::spread::Spreads;

/// A corrected probability below this is significant.
pub const SIGNIFICANT: f64 = 0.01;

/// What is to be compared how.
#[derive(Clone, Copy, Debug, Default)]
pub struct Terms<'a> {
    /// Compare nights of different machines too; the comparison then says what differs.
    pub across: bool,
    /// Nights whose differences tell what nights of this machine differ by, in any order: those of other machines, contended ones and those
    /// that did not begin before the new night are passed over.
    pub earlier: &'a [&'a NightRecord],
    /// Every random choice comes from this.
    pub seed: u64,
}

/// Why two nights are not compared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompareError {
    /// They are of different machines. Choose another baseline, or ask for the comparison across machines.
    #[error("the nights are of different machines: {}", differences.join("; "))]
    DifferentMachines {
        /// What differs, in words.
        differences: Vec<String>,
    },
}

/// Compares a night with an earlier one. Linear in rounds, for each of 1000 resamples of each entry that both nights measured.
///
/// # Errors
/// [`CompareError::DifferentMachines`], unless the terms ask for it.
pub fn compare(base: &NightRecord, new: &NightRecord, terms: Terms<'_>) -> Result<Comparison, CompareError> {
    let across = base.machine.differences(&new.machine);
    if !across.is_empty() && !terms.across {
        return Err(CompareError::DifferentMachines { differences: across });
    }
    let redefined = redefined(base, new);
    let (old, entries) = (located(base, &redefined), located(new, &redefined));
    let known: BTreeMap<&EntryName, Located<'_>> = old.iter().map(|(name, located)| (name, *located)).collect();
    let spreads = Spreads::of(new, terms.earlier);
    let both: Vec<Both<'_>> = entries.iter().filter_map(|(name, new)| Some(Both::of(name, *known.get(name)?, *new))).collect();
    let drifts = Drifts::of(both.iter().filter_map(Both::step));
    let judge = |(index, both): (u64, &Both<'_>)| {
        let mut rng = ChaCha8Rng::seed_from_u64(terms.seed);
        rng.set_stream(index);
        both.judged(spreads.of_entry(both.name), &drifts, &mut rng)
    };
    let mut judged: Vec<Judged> = (0..).zip(&both).map(judge).collect();
    correct(&mut judged);
    let unsure = [base, new].iter().any(|night| !night.conditions.contended.is_empty());
    let only = |ours: &[(EntryName, Located<'_>)], theirs: &[(EntryName, Located<'_>)]| {
        let known: BTreeSet<&EntryName> = theirs.iter().map(|(name, _)| name).collect();
        ours.iter().map(|(name, _)| name).filter(|name| !known.contains(name)).cloned().collect()
    };
    Ok(Comparison {
        base_started: base.started.clone(),
        base_build: base.build.clone(),
        across,
        new: only(&entries, &old),
        missing: only(&old, &entries),
        drifts: if unsure { Vec::new() } else { told(&drifts, &judged) },
        changes: judged.into_iter().map(|entry| entry.conclude(unsure)).collect(),
        redefined: redefined.into_iter().map(str::to_owned).collect(),
        earlier: Vec::new(),
    })
}

/// The comparison with the last night before it that may serve as a baseline, if there is one among `nights`, of whatever machines. A suite
/// that was not measured in that night is compared with the last one in which it was.
#[must_use]
pub fn compare_with_baseline(nights: &[&NightRecord], new: &NightRecord) -> Option<Comparison> {
    let (base, earlier) = nights::baseline(nights, new)?;
    // A baseline is of the same machine, which is all that could be wrong.
    let comparison = compare(&base, new, Terms { across: false, earlier: nights, seed: new.seed }).ok()?;
    Some(Comparison { earlier, ..comparison })
}

/// An entry and the suite that holds its yardstick and its threshold.
#[derive(Clone, Copy)]
struct Located<'a> {
    suite: &'a SuiteRecord,
    entry: &'a Entry,
}

/// Names of suites that both nights have, and not alike.
fn redefined<'a>(base: &'a NightRecord, new: &'a NightRecord) -> BTreeSet<&'a str> {
    let hashes = |night: &'a NightRecord| night.suites.iter().map(|suite| (suite.name.as_str(), suite.hash.as_str()));
    let old: BTreeMap<&str, &str> = hashes(base).collect();
    hashes(new).filter(|(name, hash)| old.get(name).is_some_and(|old| old != hash)).map(|(name, _)| name).collect()
}

/// All entries of a night with their names, but for those of some suites.
fn located<'a>(night: &'a NightRecord, without: &BTreeSet<&str>) -> Vec<(EntryName, Located<'a>)> {
    let suites = night.suites.iter().filter(|suite| !without.contains(suite.name.as_str()));
    suites.flat_map(|suite| suite.entries.iter().map(move |entry| (entry_name(suite, entry), Located { suite, entry }))).collect()
}

/// An entry in both nights.
struct Both<'a> {
    name: &'a EntryName,
    threshold: f64,
    /// Whose code it is, if that is known.
    allocator: Option<&'a str>,
    /// The figures of both, or what follows where one of them has none.
    figures: Result<Two, ChangeVerdict>,
}

impl<'a> Both<'a> {
    fn of(name: &'a EntryName, base: Located<'a>, new: Located<'a>) -> Self {
        let figures = match (&base.entry.outcome, &new.entry.outcome) {
            (EntryOutcome::Measured(old), EntryOutcome::Measured(measured)) => {
                Ok(Two::of(Sample::of(base.suite, old, name.quantity), Sample::of(new.suite, measured, name.quantity)))
            }
            (EntryOutcome::Failed { .. }, EntryOutcome::Failed { .. }) => Err(ChangeVerdict::StillBroken),
            (_, EntryOutcome::Failed { .. }) => Err(ChangeVerdict::Broken),
            (EntryOutcome::Failed { .. }, EntryOutcome::Measured(_)) => Err(ChangeVerdict::Mended),
            (EntryOutcome::Skipped { .. }, _) | (_, EntryOutcome::Skipped { .. }) => Err(ChangeVerdict::NotCompared),
        };
        Self { name, threshold: new.suite.threshold, allocator: new.suite.allocators.get(&name.arm).map(String::as_str), figures }
    }

    /// What the entry says of what all changed by, if it is of a measured time.
    fn step(&self) -> Option<Step<'a>> {
        let two = self.figures.as_ref().ok().filter(|_| is_measured_time(self.name.quantity))?;
        Some(Step { suite: &self.name.suite, quantity: self.name.quantity, allocator: self.allocator?, log: two.ratio().ln() })
    }

    /// `deviation`: of the logarithm of the ratio of two nights' medians, where the build is the same.
    fn judged(&self, deviation: f64, drifts: &Drifts<'_>, rng: &mut ChaCha8Rng) -> Judged {
        let drift = drifts.get(&self.name.suite, self.name.quantity).log;
        let finding = self.figures.as_ref().map(|two| two.judged(Expected { drift, deviation }, rng)).map_err(|verdict| *verdict);
        Judged { entry: self.name.clone(), threshold: self.threshold, drift, finding }
    }
}

/// What is known of an entry in two nights before it is known how many there are.
struct Judged {
    entry: EntryName,
    threshold: f64,
    /// The logarithm of what all allocators of the suite changed by together.
    drift: f64,
    /// Or what follows where one of the nights has no figures.
    finding: Result<Finding, ChangeVerdict>,
}

impl Judged {
    fn conclude(self, unsure: bool) -> Change {
        let untested = unsure && is_measured_time(self.entry.quantity);
        let verdict = match &self.finding {
            Err(verdict) => *verdict,
            Ok(Finding { basis: Basis::Nothing, .. }) => ChangeVerdict::Untested,
            Ok(_) if untested || self.is_untold() => ChangeVerdict::Untested,
            Ok(Finding { figures, .. }) => verdict(figures, figures.p, self.threshold, self.drift),
        };
        Change { entry: self.entry, verdict, figures: self.finding.ok().map(|finding| finding.figures) }
    }

    /// Whether it would be flagged if all allocators together had not changed, and so is not.
    fn is_untold(&self) -> bool {
        let Ok(Finding { figures, p_without_drift, basis: Basis::Exact | Basis::Test { .. } }) = &self.finding else { return false };
        let without_drift = verdict(figures, *p_without_drift, self.threshold, 0.0);
        without_drift != ChangeVerdict::Same && verdict(figures, figures.p, self.threshold, self.drift) == ChangeVerdict::Same
    }
}

/// `drift`: the logarithm of what all allocators changed by together. A change must lie beyond it and beyond none at all.
fn verdict(figures: &ChangeFigures, p: f64, threshold: f64, drift: f64) -> ChangeVerdict {
    let (least, most) = (drift.min(0.0).exp(), drift.max(0.0).exp());
    match figures {
        _ if p >= SIGNIFICANT => ChangeVerdict::Same,
        ChangeFigures { ratio, low, .. } if *ratio > (1.0 + threshold) * most && *low > most => ChangeVerdict::Worse,
        ChangeFigures { ratio, high, .. } if *ratio < (1.0 - threshold) * least && *high < least => ChangeVerdict::Better,
        _ => ChangeVerdict::Same,
    }
}

/// The common changes that a reader must know of: those larger than the suite's threshold, and those for which changes are not told.
fn told(drifts: &Drifts<'_>, judged: &[Judged]) -> Vec<CommonDrift> {
    let told = |(suite, quantity, Drift { log, allocators }): (&str, Quantity, Drift)| {
        let of_suite = || judged.iter().filter(|judged| judged.entry.suite == suite && judged.entry.quantity == quantity);
        let untold = of_suite().filter(|judged| judged.is_untold()).count();
        let is_large = of_suite().any(|judged| log.exp() > 1.0 + judged.threshold || log.exp() < 1.0 - judged.threshold);
        (untold > 0 || is_large).then(|| CommonDrift { suite: suite.to_owned(), quantity, ratio: log.exp(), allocators, untold })
    };
    drifts.iter().filter_map(told).collect()
}

/// Corrects the probabilities of all tests together. A test that could not be significant among so many is none.
fn correct(judged: &mut [Judged]) {
    let mut tests: Vec<(f64, &mut Finding)> = judged
        .iter_mut()
        .filter_map(|entry| entry.finding.as_mut().ok())
        .filter_map(|finding| if let Basis::Test { least } = finding.basis { Some((least, finding)) } else { None })
        .collect();
    let least: Vec<f64> = tests.iter().map(|(least, _)| *least).collect();
    for ((_, finding), _) in tests.iter_mut().zip(worth_testing(&least, SIGNIFICANT)).filter(|(_, worth)| !worth) {
        (finding.basis, finding.figures.p) = (Basis::Nothing, 1.0);
    }
    tests.retain(|(_, finding)| finding.basis != Basis::Nothing);
    for p in [(|finding| &mut finding.figures.p) as fn(&mut Finding) -> &mut f64, |finding| &mut finding.p_without_drift] {
        let mut probabilities: Vec<f64> = tests.iter_mut().map(|(_, finding)| *p(finding)).collect();
        correct_for_many(&mut probabilities);
        for ((_, finding), corrected) in tests.iter_mut().zip(probabilities) {
            *p(finding) = corrected;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::examples::{self, Sampled, bell};
    use crate::record::{EarlierBase, Measured};
    use crate::spread::BETWEEN_NIGHTS;

    fn judged(base: &NightRecord, new: &NightRecord) -> Comparison {
        compare(base, new, Terms::default()).expect("the machines are equal")
    }

    fn verdicts(comparison: &Comparison) -> Vec<ChangeVerdict> {
        comparison.changes.iter().map(|change| change.verdict).collect()
    }

    fn flagged(comparison: &Comparison) -> usize {
        let is_flagged = |change: &&Change| matches!(change.verdict, ChangeVerdict::Worse | ChangeVerdict::Better);
        comparison.changes.iter().filter(is_flagged).count()
    }

    /// Entries of different lengths, each with this noise.
    fn entries(count: usize, deviation: f64) -> Vec<Sampled> {
        (0..count).map(|index| Sampled::noisy(&format!("arm {index:03}"), 20_000 + 977 * index as u64, deviation)).collect()
    }

    /// All of them slower by a share, and each by what nights differ by.
    fn slower(entries: &[Sampled], share: f64, rng: &mut ChaCha8Rng) -> Vec<Sampled> {
        let one = std::f64::consts::FRAC_1_SQRT_2 * BETWEEN_NIGHTS;
        let of = |entry: &Sampled, rng: &mut ChaCha8Rng| (entry.typical as f64 * (1.0 + share) * (one * bell(rng)).exp()) as u64;
        entries.iter().map(|entry| Sampled { typical: of(entry, rng), ..entry.clone() }).collect()
    }

    /// How many of 1000 entries in five pairs of nights are flagged where the second is slower by a share.
    fn flagged_of_1000(share: f64, deviation: f64) -> usize {
        let mut rng = ChaCha8Rng::seed_from_u64(11);
        let all = entries(200, deviation);
        let pairs = (0..5).map(|pair| {
            let (base, new) = (slower(&all, 0.0, &mut rng), slower(&all, share, &mut rng));
            flagged(&judged(&examples::sampled(1, 2 * pair, &base), &examples::sampled(2, 2 * pair + 1, &new)))
        });
        pairs.sum()
    }

    #[test]
    fn two_nights_of_one_build_are_the_same() {
        for deviation in [0.003, 0.03, 0.1] {
            assert_eq!(flagged_of_1000(0.0, deviation), 0, "noise {deviation}");
        }
    }

    #[test]
    fn a_hundredth_more_is_never_flagged() {
        for deviation in [0.003, 0.03] {
            assert_eq!(flagged_of_1000(0.01, deviation), 0, "noise {deviation}");
        }
    }

    #[test]
    fn a_tenth_more_is_found_in_19_of_20_entries() {
        for deviation in [0.003, 0.03] {
            let found = flagged_of_1000(0.1, deviation);
            assert!(found > 950, "noise {deviation}: {found} of 1000");
        }
    }

    #[test]
    fn a_tenth_more_or_less_of_one_allocator_is_told_from_the_others() {
        let base = entries(20, 0.02);
        let mut changed = base.clone();
        changed[3].typical = changed[3].typical * 111 / 100;
        changed[5].typical = changed[5].typical * 100 / 111;
        let comparison = judged(&examples::night(1, &base), &examples::night(2, &changed));
        let mut expected = [ChangeVerdict::Same; 20];
        (expected[3], expected[5]) = (ChangeVerdict::Worse, ChangeVerdict::Better);
        assert_eq!(verdicts(&comparison), expected);
        let figures = comparison.changes[3].figures.expect("both have figures");
        assert!((1.08..1.14).contains(&figures.ratio) && figures.low > 1.05 && figures.high < 1.2 && figures.p < 1e-4, "{figures:?}");
    }

    #[test]
    fn a_comparison_is_the_same_each_time_and_no_change_of_a_night_with_itself() {
        let (base, new) = (examples::night(1, &entries(5, 0.05)), examples::night(2, &entries(5, 0.05)));
        assert_eq!(judged(&base, &new), judged(&base, &new));
        let itself = judged(&base, &base);
        assert!(itself.changes.iter().all(|change| change.figures.is_some_and(|figures| figures.ratio == 1.0 && figures.p == 1.0)));
    }

    #[test]
    fn what_slows_the_whole_machine_down_is_no_change() {
        let base = examples::night(1, &entries(10, 0.01));
        let mut new = examples::night(2, &entries(10, 0.01));
        new.suites[0].yardstick_ps.iter_mut().for_each(|value| *value = *value * 3 / 2);
        for entry in &mut new.suites[0].entries {
            if let EntryOutcome::Measured(Measured { rounds, .. }) = &mut entry.outcome {
                rounds.iter_mut().flatten().for_each(|sample| *sample = *sample * 3 / 2);
            }
        }
        assert_eq!(flagged(&judged(&base, &new)), 0);
        // Without a yardstick nothing tells that it was the machine.
        new.suites[0].yardstick_ps.clear();
        assert_eq!(flagged(&judged(&base, &new)), 10);
    }

    /// Two nights, the second slower by these shares.
    fn allocators(shares: &[(&str, f64)]) -> (NightRecord, NightRecord) {
        let unchanged: Vec<(&str, f64)> = shares.iter().map(|&(allocator, _)| (allocator, 0.0)).collect();
        (night_of_allocators(1, &unchanged), night_of_allocators(2, shares))
    }

    /// A night of ten cases of each of these allocators, slower than usual by these shares. `caching` has three arms.
    fn night_of_allocators(day: u32, shares: &[(&str, f64)]) -> NightRecord {
        let all = shares.iter().flat_map(|&(allocator, share)| {
            let entries = if allocator == "caching" { 0..30 } else { 0..10 };
            entries.map(move |index| {
                let typical = 20_000.0 * f64::from(index + 1) * (1.0 + share);
                (allocator, Sampled::noisy(&format!("{allocator} {index}"), typical as u64, 0.01))
            })
        });
        let (names, all): (Vec<&str>, Vec<Sampled>) = all.unzip();
        let mut night = examples::night(day, &all);
        night.suites[0].allocators = all.into_iter().map(|entry| entry.arm).zip(names.into_iter().map(str::to_owned)).collect();
        night
    }

    fn judged_allocators(shares: &[(&str, f64)]) -> Comparison {
        let (base, new) = allocators(shares);
        judged(&base, &new)
    }

    #[test]
    fn what_all_allocators_changed_by_together_is_told_and_flagged_of_none() {
        let all = |share| judged_allocators(&[("caching", share), ("bfc", share), ("rmm_pool", share), ("direct", share)]);
        for share in [0.08, -0.08] {
            let comparison = all(share);
            let [CommonDrift { suite, quantity: Quantity::HostTime, ratio, allocators: 4, untold: 60 }] = &comparison.drifts[..] else {
                panic!("{:?}", comparison.drifts)
            };
            assert!(suite == "host" && (ratio - 1.0 - share).abs() < 0.01, "{suite} {ratio}");
            assert_eq!(verdicts(&comparison), [ChangeVerdict::Untested; 60]);
        }
        for less_than_the_threshold in [0.0, 0.04] {
            let comparison = all(less_than_the_threshold);
            assert_eq!((verdicts(&comparison), comparison.drifts), (vec![ChangeVerdict::Same; 60], Vec::new()));
        }
    }

    #[test]
    fn an_allocator_that_changed_alone_is_flagged_with_all_its_arms() {
        for (caching, bfc) in [(0.11, 0.0), (0.0, 0.11), (0.11, -0.01)] {
            let comparison = judged_allocators(&[("caching", caching), ("bfc", bfc), ("rmm_pool", 0.0)]);
            let flagged: BTreeSet<&str> = comparison
                .changes
                .iter()
                .filter(|change| change.verdict == ChangeVerdict::Worse)
                .filter_map(|change| change.entry.arm.split(' ').next())
                .collect();
            assert_eq!(flagged, BTreeSet::from([if caching > 0.1 { "caching" } else { "bfc" }]));
            assert_eq!(comparison.drifts, []);
        }
    }

    #[test]
    fn what_changed_in_code_that_some_share_is_flagged() {
        let comparison = judged_allocators(&[("caching", 0.0), ("bfc", 1.0), ("rmm_pool", 1.0)]);
        assert_eq!(verdicts(&comparison), [vec![ChangeVerdict::Same; 30], vec![ChangeVerdict::Worse; 20]].concat());
        assert_eq!(comparison.drifts, []);
    }

    #[test]
    fn nights_that_were_slow_for_all_do_not_make_a_change_of_one_harder_to_see() {
        let night = |day, all: f64, caching: f64| night_of_allocators(day, &[("caching", caching), ("bfc", all), ("rmm_pool", all)]);
        let slow = |day: u32| if day.is_multiple_of(2) { 0.1 } else { 0.0 };
        let earlier: Vec<NightRecord> = (1..=8).map(|day| night(day, slow(day), slow(day))).collect();
        let earlier: Vec<&NightRecord> = earlier.iter().collect();
        let comparison = compare_with_baseline(&earlier, &night(9, 0.1, 0.25)).expect("there is a baseline");
        assert_eq!(verdicts(&comparison), [vec![ChangeVerdict::Worse; 30], vec![ChangeVerdict::Same; 20]].concat());
    }

    #[test]
    fn what_changed_by_more_than_all_did_together_is_flagged() {
        let comparison = judged_allocators(&[("caching", 0.25), ("bfc", 0.08), ("rmm_pool", 0.08)]);
        assert_eq!(verdicts(&comparison), [vec![ChangeVerdict::Worse; 30], vec![ChangeVerdict::Untested; 20]].concat());
        assert_eq!(comparison.drifts[0].untold, 20);
    }

    #[test]
    fn of_a_contended_night_no_common_change_is_told() {
        let (mut base, new) = allocators(&[("caching", 0.08), ("bfc", 0.08), ("rmm_pool", 0.08)]);
        assert_eq!(judged(&base, &new).drifts.len(), 1);
        base.conditions.contended.push("a busy processor".to_owned());
        assert_eq!(judged(&base, &new).drifts, []);
    }

    #[test]
    fn an_entry_is_corrected_by_the_yardstick_beside_its_own_visits() {
        let with_yardsticks = |day, slower: u64| {
            let mut night = examples::night(day, &entries(10, 0.01));
            let EntryOutcome::Measured(measured) = &mut night.suites[0].entries[3].outcome else { unreachable!("it was measured") };
            measured.yardstick_ps = (0..measured.rounds.len() as u64).map(|round| 600_000_000 * slower + round).collect();
            measured.rounds.iter_mut().flatten().for_each(|sample| *sample *= slower);
            night
        };
        // The processor was slow in these visits alone.
        assert_eq!(flagged(&judged(&with_yardsticks(1, 1), &with_yardsticks(2, 2))), 0);
        let mut without = with_yardsticks(2, 2);
        if let EntryOutcome::Measured(measured) = &mut without.suites[0].entries[3].outcome {
            measured.yardstick_ps.clear();
        }
        assert_eq!(flagged(&judged(&with_yardsticks(1, 1), &without)), 1);
    }

    #[test]
    fn exact_figures_need_one_round_and_no_allowance() {
        let exact = |typical, quantity| Sampled { rounds: 1, ..Sampled::steady("caching", typical) }.of(quantity);
        let of = |old: u64, new: u64, quantity| {
            judged(&examples::night(1, &[exact(old, quantity)]), &examples::night(2, &[exact(new, quantity)])).changes.remove(0)
        };
        for quantity in [Quantity::ModelTime, Quantity::Memory] {
            assert_eq!(of(100_000, 105_001, quantity).verdict, ChangeVerdict::Worse);
            assert_eq!(of(100_000, 94_000, quantity).verdict, ChangeVerdict::Better);
            let within = of(100_000, 104_000, quantity);
            assert_eq!((within.verdict, within.figures.map(|figures| figures.p)), (ChangeVerdict::Same, Some(0.0)));
            let from_nothing = of(0, 4096, quantity);
            assert_eq!((from_nothing.verdict, from_nothing.figures.map(|figures| figures.ratio)), (ChangeVerdict::Worse, Some(4096.0)));
            assert_eq!(of(0, 0, quantity).verdict, ChangeVerdict::Same);
        }
        let measured = of(100_000, 200_000, Quantity::HostTime);
        assert_eq!((measured.verdict, measured.figures.map(|figures| figures.p)), (ChangeVerdict::Untested, Some(1.0)));
    }

    #[test]
    fn few_rounds_prove_nothing() {
        let night = |day, typical, rounds| examples::night(day, &[Sampled { rounds, ..Sampled::noisy("caching", typical, 0.01) }]);
        assert_eq!(verdicts(&judged(&night(1, 1_000_000, 5), &night(2, 3_000_000, 30))), [ChangeVerdict::Untested]);
        assert_eq!(verdicts(&judged(&night(1, 1_000_000, 30), &night(2, 3_000_000, 30))), [ChangeVerdict::Worse]);
    }

    #[test]
    fn what_could_not_be_significant_among_so_many_is_said_to_be_unknown_and_does_not_hide_the_rest() {
        let entries = |factor: u64, few: u64| {
            let few = (0..few).map(|index| Sampled { rounds: 7, ..Sampled::noisy(&format!("few {index}"), 10_000 * factor, 0.01) });
            few.chain([Sampled::noisy("many", 10_000 * factor, 0.01)]).collect::<Vec<_>>()
        };
        // Of 7 and 7 rounds nothing less than 2 / 3432 can come out: enough among a few, not among twenty.
        let of = |few| verdicts(&judged(&examples::night(1, &entries(1, few)), &examples::night(2, &entries(3, few))));
        assert_eq!(of(5), [ChangeVerdict::Worse; 6]);
        assert_eq!(of(20), [vec![ChangeVerdict::Untested; 20], vec![ChangeVerdict::Worse]].concat());
    }

    #[test]
    fn a_contended_night_flags_no_measured_time_and_everything_else() {
        let all = |factor: u64| {
            let quantities = [Quantity::HostTime, Quantity::DeviceTime, Quantity::ModelTime, Quantity::Memory];
            quantities.map(|quantity| Sampled::steady("caching", 10_000 * factor).of(quantity))
        };
        let (mut base, mut new) = (examples::night(1, &all(1)), examples::night(2, &all(2)));
        assert_eq!(verdicts(&judged(&base, &new)), [ChangeVerdict::Worse; 4]);
        let expected = [ChangeVerdict::Untested, ChangeVerdict::Untested, ChangeVerdict::Worse, ChangeVerdict::Worse];
        new.conditions.contended.push("1 other process on the GPU".to_owned());
        assert_eq!(verdicts(&judged(&base, &new)), expected);
        base.conditions.contended.append(&mut new.conditions.contended);
        assert_eq!(verdicts(&judged(&base, &new)), expected);
    }

    #[test]
    fn an_entry_that_differs_from_night_to_night_needs_a_larger_change() {
        // `jumpy` takes a quarter more in every fourth night, by itself; `calm` never does.
        let entries = |jumpy: f64, calm: f64| {
            let typical = |factor: f64| (50_000.0 * factor) as u64;
            let all: Vec<Sampled> = (0..8).map(|index| Sampled::noisy(&format!("other {index}"), 70_000, 0.01)).collect();
            [vec![Sampled::noisy("jumpy", typical(jumpy), 0.01), Sampled::noisy("calm", typical(calm), 0.01)], all].concat()
        };
        let earlier: Vec<NightRecord> =
            (1..=8).map(|day| examples::night(day, &entries(if day % 4 == 2 { 1.25 } else { 1.0 }, 1.0))).collect();
        let earlier: Vec<&NightRecord> = earlier.iter().collect();
        let new = examples::night(9, &entries(1.25, 1.25));
        let alone = compare(earlier[7], &new, Terms::default()).expect("the machines are equal");
        assert_eq!(verdicts(&alone)[..2], [ChangeVerdict::Worse; 2]);
        let known = compare(earlier[7], &new, Terms { earlier: &earlier, ..Terms::default() }).expect("the machines are equal");
        assert_eq!(verdicts(&known)[..2], [ChangeVerdict::Same, ChangeVerdict::Worse]);
        assert_eq!(compare_with_baseline(&earlier, &new).map(|comparison| verdicts(&comparison)), Some(verdicts(&known)));
    }

    #[test]
    fn what_failed_or_was_skipped_is_told_from_what_changed() {
        let failed = || EntryOutcome::Failed { reason: "a double free".to_owned() };
        let skipped = || EntryOutcome::Skipped { reason: "no GPU".to_owned() };
        let measured = || examples::night(1, &[Sampled::steady("caching", 9)]).suites[0].entries[0].outcome.clone();
        let cases = [
            (measured(), failed(), ChangeVerdict::Broken),
            (skipped(), failed(), ChangeVerdict::Broken),
            (failed(), measured(), ChangeVerdict::Mended),
            (failed(), failed(), ChangeVerdict::StillBroken),
            (failed(), skipped(), ChangeVerdict::NotCompared),
            (skipped(), measured(), ChangeVerdict::NotCompared),
            (measured(), skipped(), ChangeVerdict::NotCompared),
            (skipped(), skipped(), ChangeVerdict::NotCompared),
            (measured(), measured(), ChangeVerdict::Same),
        ];
        let night = |outcome: &EntryOutcome| {
            let mut night = examples::night(1, &[Sampled::steady("caching", 9)]);
            night.suites[0].entries[0].outcome = outcome.clone();
            night
        };
        for (old, new, expected) in cases {
            assert_eq!(verdicts(&judged(&night(&old), &night(&new))), [expected], "{old:?} then {new:?}");
        }
    }

    #[test]
    fn entries_and_suites_that_only_one_night_has_are_listed() {
        let named = |arms: &[&str]| arms.iter().map(|arm| Sampled::steady(arm, 1000)).collect::<Vec<_>>();
        let (mut base, mut new) = (examples::night(1, &named(&["a", "b"])), examples::night(2, &named(&["b", "c"])));
        // A quantity that is another one is another entry.
        new.suites[0].entries[0].quantity = Quantity::DeviceTime;
        let comparison = judged(&base, &new);
        let arms = |names: &[EntryName]| names.iter().map(|name| name.arm.clone()).collect::<Vec<_>>();
        assert_eq!((arms(&comparison.new), arms(&comparison.missing)), (vec!["b".into(), "c".into()], vec!["a".into(), "b".into()]));
        assert!(comparison.changes.is_empty() && comparison.redefined.is_empty());
        base.suites[0].hash = "another".to_owned();
        let comparison = judged(&base, &new);
        assert_eq!(comparison.redefined, ["host"]);
        assert!(comparison.changes.is_empty() && comparison.new.is_empty() && comparison.missing.is_empty());
    }

    #[test]
    fn nights_of_different_machines_are_compared_only_when_asked_for() {
        let entries = [Sampled::steady("caching", 1000)];
        let (base, mut new) = (examples::night(1, &entries), examples::night(2, &entries));
        new.machine.driver = Some("580.65.06".to_owned());
        let error = compare(&base, &new, Terms::default()).expect_err("the drivers differ");
        insta::assert_snapshot!(error, @"the nights are of different machines: driver: unknown against 580.65.06");
        let comparison = compare(&base, &new, Terms { across: true, ..Terms::default() }).expect("it is asked for");
        assert_eq!(comparison.across, ["driver: unknown against 580.65.06"]);
        assert_eq!(comparison.changes.len(), 1);
        assert_eq!(compare_with_baseline(&[&base], &new), None);
    }

    #[test]
    fn a_suite_that_was_left_out_in_between_is_compared_with_the_last_night_that_has_it() {
        let of = |day: u32, suites: &[(&str, u64)]| {
            let mut night = examples::night(day, &[]);
            let suite = |&(name, typical): &(&str, u64)| {
                let mut suite = examples::night(day, &[Sampled::noisy("caching", typical, 0.01)]).suites.remove(0);
                name.clone_into(&mut suite.name);
                suite
            };
            night.suites = suites.iter().map(suite).collect();
            night
        };
        // Somebody ran one suite alone in the second night; in the third the other one takes three times as long.
        let (first, second) = (of(1, &[("a", 10_000), ("b", 10_000)]), of(2, &[("a", 10_000)]));
        let third = of(3, &[("a", 10_000), ("b", 30_000)]);
        let comparison = compare_with_baseline(&[&second, &first], &third).expect("there is a baseline");
        assert_eq!(
            (comparison.base_started.as_str(), verdicts(&comparison)),
            (&*second.started, vec![ChangeVerdict::Same, ChangeVerdict::Worse])
        );
        assert_eq!(comparison.earlier, [EarlierBase { suite: "b".to_owned(), started: first.started.clone() }]);
        assert_eq!((comparison.new, comparison.redefined), (Vec::new(), Vec::new()));
        // A suite that was defined anew is compared with none.
        let mut anew = third.clone();
        anew.suites[1].hash = "another".to_owned();
        let comparison = compare_with_baseline(&[&second, &first], &anew).expect("there is a baseline");
        assert_eq!((comparison.earlier, comparison.new.len()), (Vec::new(), 1));
    }

    #[test]
    fn a_night_of_medians_only_is_compared_as_far_as_that_goes() {
        let all = |factor: u64| {
            let of = |quantity| Sampled::noisy("caching", 10_000 * factor, 0.01).of(quantity);
            [of(Quantity::HostTime), Sampled::steady("caching", 10_000 * factor).of(Quantity::Memory)]
        };
        let (mut base, new) = (examples::night(1, &all(1)), examples::night(2, &all(2)));
        for entry in &mut base.suites[0].entries {
            if let EntryOutcome::Measured(measured) = &mut entry.outcome {
                measured.rounds.clear();
            }
        }
        let comparison = judged(&base, &new);
        assert_eq!(verdicts(&comparison), [ChangeVerdict::Untested, ChangeVerdict::Worse]);
        let figures = comparison.changes[0].figures.expect("there are medians");
        assert!((1.9..2.1).contains(&figures.ratio) && figures.low < figures.ratio && figures.p == 1.0, "{figures:?}");
    }

    proptest! {
        #[test]
        fn whatever_the_figures_a_comparison_has_sound_figures(
            old in prop::collection::vec(prop::collection::vec(0..u64::MAX, 0..3), 0..9),
            new in prop::collection::vec(prop::collection::vec(0..100_u64, 0..3), 0..9),
            yardsticks in prop::collection::vec(0..3_u64, 0..12), thinned in any::<bool>(),
        ) {
            let night = |rounds: &[Vec<u64>]| {
                let mut night = examples::night(1, &[Sampled::steady("caching", 1000)]);
                night.suites[0].yardstick_ps.clone_from(&yardsticks);
                if let EntryOutcome::Measured(measured) = &mut night.suites[0].entries[0].outcome {
                    measured.rounds = rounds.to_vec();
                }
                night
            };
            let old = night(if thinned { &[] } else { &old });
            for (base, new) in [(&old, &night(&new)), (&night(&new), &old)] {
                let figures = judged(base, new).changes[0].figures.expect("both have figures");
                prop_assert!((0.0..=1.0).contains(&figures.p) && figures.ratio.is_finite() && figures.ratio > 0.0, "{:?}", figures);
                prop_assert!(figures.low <= figures.ratio && figures.ratio <= figures.high && figures.high.is_finite(), "{:?}", figures);
            }
        }
    }
}
