//! Each way a regression could hide, and each false alarm. The runs are invented: two builds on a
//! machine that is up to a fifth slower in some rounds and differs from run to run.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use super::*;
use crate::examples::{Sampled, alone, run};

const CASES: usize = 36;

/// Entries of different lengths with 1 % of noise per round.
fn times(factor: f64) -> Vec<Sampled> {
    (0..CASES)
        .map(|index| {
            Sampled::noisy(
                &format!("arm {index:02}"),
                20_000.0 + 977.0 * index as f64,
                0.01,
            )
            .times(factor)
        })
        .collect()
}

fn exact(quantity: Quantity, factor: f64) -> Vec<Sampled> {
    vec![Sampled::exact("caching", quantity, 1_000_000.0).times(factor)]
}

/// Runs on successive days with these entries, each compared with the earlier ones.
fn history(days: &[Vec<Sampled>], make: fn(u32, &[Sampled]) -> BenchRun) -> Vec<BenchRun> {
    let mut runs: Vec<BenchRun> = Vec::new();
    for (day, entries) in (1..).zip(days) {
        let mut run = make(day, entries);
        run.comparison = compare(&run, &runs.iter().collect::<Vec<_>>(), None);
        runs.push(run);
    }
    runs
}

fn verdicts(run: &BenchRun) -> Vec<Verdict> {
    run.comparison
        .iter()
        .flat_map(|comparison| &comparison.changes)
        .map(|change| change.verdict)
        .collect()
}

fn worse(run: &BenchRun) -> usize {
    verdicts(run)
        .iter()
        .filter(|verdict| **verdict == Verdict::Worse)
        .count()
}

fn worse_of_each(runs: &[BenchRun]) -> Vec<usize> {
    runs.iter().map(worse).collect()
}

fn days(factors: &[f64]) -> Vec<Vec<Sampled>> {
    factors.iter().map(|&factor| times(factor)).collect()
}

#[test]
fn what_changed_on_a_contended_machine_fails_no_run_unless_it_is_exact() {
    let entries = [times(1.3), times(0.7), exact(Quantity::Memory, 1.1)];
    let contended = |mut run: BenchRun| {
        run.conditions.contended =
            vec!["other programs used the processor for 30 % of the time".to_owned()];
        run
    };
    let judged = |mut run: BenchRun, base: Option<&BenchRun>| {
        run.comparison = compare(&run, &[], base);
        run
    };
    for (entries, quiet) in entries
        .iter()
        .zip([Verdict::Worse, Verdict::Better, Verdict::Worse])
    {
        let is_exact = entries[0].quantity.is_exact();
        let expected = if is_exact { quiet } else { Verdict::Unsure };
        let side_by_side = judged(run(1, entries), None);
        assert!(
            verdicts(&side_by_side)
                .iter()
                .all(|&verdict| verdict == quiet)
                && side_by_side.inconclusive().is_none()
        );
        assert_eq!(side_by_side.fails(), quiet == Verdict::Worse);
        let disturbed = judged(contended(run(1, entries)), None);
        assert!(
            verdicts(&disturbed)
                .iter()
                .all(|&verdict| verdict == expected),
            "{:?}",
            verdicts(&disturbed)
        );
        assert_eq!(
            (disturbed.fails(), disturbed.inconclusive().is_some()),
            (is_exact, !is_exact)
        );
        // The base of a comparison of two records may be the contended one.
        let (base, new) = (
            alone(
                1,
                &entries
                    .iter()
                    .map(|entry| entry.times(1.0))
                    .collect::<Vec<_>>(),
            ),
            alone(2, entries),
        );
        let of_records = judged(new, Some(&contended(base)));
        assert!(
            verdicts(&of_records)
                .iter()
                .all(|&verdict| verdict == expected),
            "{:?}",
            verdicts(&of_records)
        );
        assert!(!of_records.fails(), "a record is no basis for a verdict");
    }
}

#[test]
fn all_allocators_a_third_slower_are_flagged_all() {
    assert_eq!(
        worse_of_each(&history(&days(&[1.0, 1.3, 1.3]), run)),
        [0, CASES, CASES]
    );
}

#[test]
fn a_quarter_slower_put_right_and_a_quarter_slower_again_is_flagged_both_times() {
    assert_eq!(
        worse_of_each(&history(&days(&[1.0, 1.25, 1.0, 1.25]), run)),
        [0, CASES, 0, CASES]
    );
}

#[test]
fn two_improvements_do_not_hide_what_is_lost_of_them_and_the_run_of_the_best_is_named() {
    let runs = history(&days(&[1.0, 0.75, 0.5625, 0.5625 * 1.3]), run);
    assert_eq!(worse_of_each(&runs), [0, 0, 0, CASES]);
    let change = &runs[3].comparison.as_ref().unwrap().changes[0];
    assert_eq!(
        change.worse_than_run.as_deref(),
        Some("2026-11-03T02:00:00Z")
    );
    assert_eq!(change.since.as_deref(), Some("2026-11-04T02:00:00Z"));
}

#[test]
fn a_creep_of_three_per_cent_a_run_is_flagged_with_the_run_it_began_in() {
    let factors: Vec<f64> = (0..=12).map(|run| 1.03_f64.powi(run)).collect();
    let runs = history(&days(&factors), run);
    let flagged = worse_of_each(&runs);
    assert_eq!(flagged[..2], [0, 0], "one step is within the threshold");
    assert!(
        flagged[3..].iter().all(|&worse| worse > CASES * 8 / 10)
            && flagged[6..].iter().all(|&worse| worse == CASES),
        "{flagged:?}"
    );
    let changes = &runs[12].comparison.as_ref().unwrap().changes;
    let began = changes
        .iter()
        .filter(|change| {
            matches!(
                change.since.as_deref(),
                Some("2026-11-02T02:00:00Z" | "2026-11-03T02:00:00Z")
            )
        })
        .count();
    assert!(
        began > CASES * 9 / 10,
        "{began} of {CASES} name the first or the second slower run"
    );
}

#[test]
fn a_step_below_the_threshold_that_lasts_is_flagged_by_the_history() {
    let factors: Vec<f64> = (0..14)
        .map(|run| if run < 6 { 1.0 } else { 1.04 })
        .collect();
    let runs = history(&days(&factors), run);
    assert!(
        worse_of_each(&runs)[..6].iter().all(|&worse| worse == 0),
        "{:?}",
        worse_of_each(&runs)
    );
    assert!(
        worse(&runs[13]) > CASES * 6 / 10,
        "{:?}",
        worse_of_each(&runs)
    );
}

#[test]
fn exact_figures_have_no_threshold() {
    for quantity in [Quantity::ModelTime, Quantity::Memory] {
        let factors = [1.0, 1.000_002, 1.049, 1.049 * 1.049, 1.0, 0.999_998];
        let runs = history(&factors.map(|factor| exact(quantity, factor)), run);
        let expected = [
            Verdict::Same,
            Verdict::Worse,
            Verdict::Worse,
            Verdict::Worse,
            Verdict::Same,
            Verdict::Better,
        ];
        assert_eq!(runs.iter().flat_map(verdicts).collect::<Vec<_>>(), expected);
    }
    let from_nothing = [Sampled::exact("caching", Quantity::ModelTime, 0.0)];
    assert_eq!(
        verdicts(&history(&[from_nothing.to_vec()], run)[0]),
        [Verdict::Same]
    );
}

#[test]
fn the_first_retry_ever_is_a_regression() {
    let mut first = run(1, &exact(Quantity::ModelTime, 1.0));
    let Some(EntryResult::Measured(accepted)) = &mut first.suites[0].entries[0].accepted else {
        panic!()
    };
    (
        accepted.summary.min,
        accepted.summary.median,
        accepted.summary.max,
    ) = (0, 0, 0);
    assert_eq!(
        compare(&first, &[], None).unwrap().changes[0].verdict,
        Verdict::Worse
    );
}

#[test]
fn another_compiler_driver_or_kernel_is_shown_and_compared_across() {
    let (base, mut new) = (
        alone(1, &exact(Quantity::Memory, 1.0)),
        alone(2, &exact(Quantity::Memory, 1.1)),
    );
    new.machine.compiler = "rustc 1.96.0, dist".to_owned();
    new.machine.kernel = Some("Linux 6.9".to_owned());
    new.machine.driver = Some("580.65.06".to_owned());
    new.machine.cpu = Some("Another CPU".to_owned());
    let comparison = compare(&new, &[&base], None).unwrap();
    assert_eq!(comparison.changes[0].verdict, Verdict::Worse);
    assert_eq!(comparison.machine.len(), 4, "{:?}", comparison.machine);
}

#[test]
fn what_fitted_and_runs_out_of_memory_now_is_broken() {
    let ended = |reason: &str| EntryResult::OutOfMemory {
        reason: reason.to_owned(),
    };
    let skipped = || EntryResult::Skipped {
        reason: "no device".to_owned(),
    };
    let mut run = run(1, &times(1.0)[..5]);
    let entries = &mut run.suites[0].entries;
    entries[0].outcome = ended("3 requests do not fit");
    entries[1].accepted = Some(ended("before"));
    (entries[2].outcome, entries[2].accepted) = (ended("now"), Some(ended("before")));
    entries[3].outcome = skipped();
    entries[4].outcome = EntryResult::Failed {
        reason: "left on the device".to_owned(),
    };
    run.comparison = compare(&run, &[], None);
    let expected = [
        Verdict::Broken,
        Verdict::Fixed,
        Verdict::StillBroken,
        Verdict::NotCompared,
        Verdict::Broken,
    ];
    assert_eq!(verdicts(&run), expected);
    let comparison = run.comparison.unwrap();
    assert!(crate::record::Counts::of(&comparison.changes).is_regression());
    assert_eq!(
        comparison.changes[0].reason.as_deref(),
        Some("3 requests do not fit")
    );
}

#[test]
fn one_case_more_or_changed_leaves_the_others_compared() {
    let mut base = alone(1, &exact(Quantity::Memory, 1.0));
    let mut new = alone(2, &exact(Quantity::Memory, 1.1));
    let entry = |group: &str, hash: &str| Entry {
        group: group.to_owned(),
        hash: hash.to_owned(),
        ..new.suites[0].entries[0].clone()
    };
    let (more, changed_old, changed_new) = (
        entry("one more size", "9"),
        entry("changed", "2"),
        entry("changed", "3"),
    );
    base.suites[0].entries.push(changed_old);
    new.suites[0].entries.extend([changed_new, more]);
    let comparison = compare(&new, &[&base], None).unwrap();
    let cases = |names: &[EntryName]| {
        names
            .iter()
            .map(|name| name.case.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        comparison
            .changes
            .iter()
            .map(|change| change.verdict)
            .collect::<Vec<_>>(),
        [Verdict::Worse]
    );
    assert_eq!(
        (
            cases(&comparison.new),
            cases(&comparison.redefined),
            cases(&comparison.missing)
        ),
        (
            vec!["one more size".to_owned()],
            vec!["changed".to_owned()],
            vec![]
        )
    );
}

#[test]
fn a_tenth_is_found_and_a_hundredth_is_not() {
    let found = worse(&history(&days(&[1.1]), run)[0]);
    assert!(found >= CASES * 9 / 10, "{found} of {CASES}");
    assert_eq!(worse(&history(&days(&[1.01]), run)[0]), 0);
}

#[test]
fn of_thirty_runs_of_one_build_none_is_flagged() {
    let runs = history(&days(&[1.0; 30]), run);
    assert_eq!(worse_of_each(&runs), [0; 30]);
}

#[test]
fn without_the_accepted_build_records_are_compared_and_the_comparison_says_so() {
    let runs = history(&days(&[1.0, 1.05, 1.5]), alone);
    assert_eq!(runs[0].comparison, None);
    let comparison = runs[2].comparison.as_ref().unwrap();
    let Basis::Records { started, why, .. } = &comparison.basis else {
        panic!("{:?}", comparison.basis)
    };
    assert_eq!(
        (started.as_str(), why.as_str()),
        ("2026-11-02T02:00:00Z", "it could not be built")
    );
    assert_eq!(worse_of_each(&runs), [0, 0, CASES]);
    let mut of_accepted = alone(9, &times(1.0));
    of_accepted.accepted.commit = runs[0].build.commit.clone();
    let comparison = compare(&of_accepted, &runs.iter().collect::<Vec<_>>(), None).unwrap();
    assert!(
        matches!(&comparison.basis, Basis::Records { started, .. }
            if started == "2026-11-01T02:00:00Z"),
        "{:?}",
        comparison.basis
    );
}

#[test]
fn measured_times_of_another_processor_are_not_compared_across_runs() {
    let (base, mut new) = (alone(1, &times(1.0)), alone(2, &times(3.0)));
    new.machine.cpu = Some("Another CPU".to_owned());
    let comparison = compare(&new, &[&base], None).unwrap();
    assert!(
        comparison
            .changes
            .iter()
            .all(|change| change.verdict == Verdict::NotCompared && change.reason.is_some())
    );
    let mut beside = run(3, &times(1.3));
    beside.machine.cpu = Some("Another CPU".to_owned());
    beside.comparison = compare(&beside, &[&run(2, &times(1.0))], None);
    assert_eq!(
        worse(&beside),
        CASES,
        "side by side both ran on the same processor"
    );
}

#[test]
fn a_machine_that_is_always_contended_is_counted() {
    let mut runs = history(&days(&[1.0, 1.0, 1.0]), run);
    runs.iter_mut()
        .for_each(|run| run.conditions.contended = vec!["a busy processor".to_owned()]);
    let comparison = compare(&runs[2], &[&runs[0], &runs[1]], None).unwrap();
    assert_eq!(comparison.contended_runs, 3);
    runs[1].conditions.contended.clear();
    assert_eq!(
        compare(&runs[2], &[&runs[0], &runs[1]], None)
            .unwrap()
            .contended_runs,
        1
    );
}

#[test]
fn too_few_rounds_or_too_much_noise_is_unsure_and_not_the_same() {
    let few = Sampled {
        rounds: 4,
        ..Sampled::noisy("few", 20_000.0, 0.01)
    };
    let wild = Sampled::noisy("wild", 20_000.0, 0.6);
    assert_eq!(
        verdicts(&history(&[vec![few, wild]], run)[0]),
        [Verdict::Unsure; 2]
    );
}
