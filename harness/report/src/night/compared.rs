//! A comparison of two nights for the terminal.

use std::fmt::Write;

use super::important::{self, Counts};
use super::words;
use harness_bench::record::{Change, ChangeVerdict, Comparison, EntryName, NightRecord};

/// Renders a comparison: what it is of, how many entries changed, each of these, and what could not be compared and why.
#[must_use]
pub fn comparison(comparison: &Comparison, base: &NightRecord, new: &NightRecord) -> String {
    let mut text = format!(
        "the night of {} ({}) against that of {} ({}), on {}\n",
        words::moment(&new.started),
        words::commit(&new.build),
        words::moment(&base.started),
        words::commit(&base.build),
        new.machine.device
    );
    if base.started > new.started {
        let _ = writeln!(text, "THE BASELINE IS THE LATER NIGHT: what is called worse was worse before. Name the earlier night first.");
    }
    for difference in &comparison.across {
        let _ = writeln!(text, "DIFFERENT MACHINES: {difference}");
    }
    for (which, night) in [("baseline", base), ("new night", new)] {
        for reason in &night.conditions.contended {
            let _ = writeln!(text, "the {which} was contended, so no measured time is flagged: {reason}");
        }
    }
    let counts = Counts::of(&comparison.changes);
    let Counts { worse, better, same, broken, mended, still_broken, untested, not_compared } = counts;
    let _ = writeln!(text, "{worse} worse, {better} better, {same} same, {broken} broken, {mended} mended, {still_broken} still broken");
    if untested > 0 {
        let _ = writeln!(
            text,
            "{untested} cannot be told: a contended night, too few rounds of a measured time, or no more than all allocators changed together"
        );
    }
    for drift in &comparison.drifts {
        let _ = writeln!(text, "{}", words::drift(&drift.suite, drift));
    }
    for change in important::by_importance(comparison) {
        let _ = writeln!(text, "  {}", line(change));
    }
    let skipped: Vec<&EntryName> = with_verdict(comparison, ChangeVerdict::NotCompared);
    let still: Vec<&EntryName> = with_verdict(comparison, ChangeVerdict::StillBroken);
    list(&mut text, "still broken", &still);
    list(&mut text, "not compared, for one of the nights skipped them", &skipped);
    list(&mut text, "new", &comparison.new.iter().collect::<Vec<_>>());
    list(&mut text, "missing", &comparison.missing.iter().collect::<Vec<_>>());
    debug_assert_eq!(skipped.len(), not_compared);
    if !comparison.redefined.is_empty() {
        let _ = writeln!(text, "not compared, for they are defined otherwise: suites {}", comparison.redefined.join(", "));
    }
    text
}

fn with_verdict(comparison: &Comparison, verdict: ChangeVerdict) -> Vec<&EntryName> {
    comparison.changes.iter().filter(|change| change.verdict == verdict).map(|change| &change.entry).collect()
}

fn line(change: &Change) -> String {
    let verdict = match change.verdict {
        ChangeVerdict::Worse => "worse ",
        ChangeVerdict::Better => "better",
        ChangeVerdict::Same => "same  ",
        ChangeVerdict::Broken => "BROKEN",
        ChangeVerdict::Mended => "mended",
        ChangeVerdict::StillBroken => "broken",
        ChangeVerdict::Untested => "?     ",
        ChangeVerdict::NotCompared => "–     ",
    };
    let name = name(&change.entry);
    match &change.figures {
        Some(figures) => {
            let amount = |value| words::amount(change.entry.quantity, value);
            let p = words::probability(figures.p);
            format!("{verdict} {name}: {} → {}, {}, p {p}", amount(figures.base), amount(figures.new), words::change(figures))
        }
        None => format!("{verdict} {name}"),
    }
}

fn name(entry: &EntryName) -> String {
    format!("{}, {} by {} ({})", entry.suite, entry.case, entry.arm, words::short(entry.quantity))
}

fn list(text: &mut String, what: &str, entries: &[&EntryName]) {
    if !entries.is_empty() {
        let _ = writeln!(text, "{what}: {}", entries.len());
    }
    for entry in entries {
        let _ = writeln!(text, "  {}", name(entry));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harness_bench::compare::{Terms, compare};
    use harness_bench::examples::{self, Sampled};
    use harness_bench::record::{EntryOutcome, Quantity};

    #[test]
    fn everything_that_a_comparison_knows_is_told() {
        let entries = |factor: u64, last: &str| {
            let of = |arm: &str, typical: u64, quantity| Sampled::steady(arm, typical).of(quantity);
            let names = ["worse", "better", "same", "broken", "skipped"];
            let mut all: Vec<Sampled> = names.iter().map(|arm| of(arm, 20_000, Quantity::ModelTime)).collect();
            all[0].typical *= factor;
            all[1].typical /= factor;
            [all, vec![of("contended", 20_000 * factor, Quantity::HostTime), of(last, 4096, Quantity::Memory)]].concat()
        };
        let (base, mut new) = (examples::night(19, &entries(1, "gone")), examples::night(20, &entries(2, "come")));
        new.suites[0].entries[3].outcome = EntryOutcome::Failed { reason: "a double free".to_owned() };
        new.suites[0].entries[4].outcome = EntryOutcome::Skipped { reason: "no GPU".to_owned() };
        new.conditions.contended.push("a busy processor".to_owned());
        new.machine.driver = Some("580.65.06".to_owned());
        let compared = compare(&base, &new, Terms { across: true, ..Terms::default() }).expect("it is asked for");
        insta::assert_snapshot!(comparison(&compared, &base, &new));
    }

    #[test]
    fn what_all_allocators_did_together_is_told_beside_what_one_did() {
        let entries = |factor: f64, rmm_pool: f64| {
            let of = |arm: &str, factor: f64| Sampled::noisy(arm, (20_000.0 * factor) as u64, 0.01);
            let mut night = examples::night(20, &[of("caching", factor), of("bfc", factor), of("rmm_pool", rmm_pool)]);
            night.suites[0].allocators = ["caching", "bfc", "rmm_pool"].map(|arm| (arm.to_owned(), arm.to_owned())).into();
            night
        };
        let (base, new) = (entries(1.0, 1.0), entries(1.1, 1.3));
        let compared = compare(&base, &new, Terms::default()).expect("the machines are equal");
        insta::assert_snapshot!(comparison(&compared, &base, &new));
    }
}
