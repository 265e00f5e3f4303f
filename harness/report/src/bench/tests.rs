//! Reports of invented benchmark runs.

use harness_bench::compare::compare;
use harness_bench::examples::{Sampled, run};
use harness_bench::record::{Entry, Point};

use super::*;
use harness_bench::record::EntryResult;

fn with_comparison(mut run: BenchRun, earlier: &[&BenchRun]) -> BenchRun {
    run.comparison = compare(&run, earlier, None);
    run
}

/// A first run with exact figures only.
pub(crate) fn model() -> BenchRun {
    let mut run = run(
        1,
        &[
            Sampled::exact("caching", Quantity::ModelTime, 225e6),
            Sampled::exact("direct", Quantity::ModelTime, 0.0),
        ],
    );
    let entries = &mut run.suites[0].entries;
    entries.iter_mut().for_each(|entry| entry.accepted = None);
    for size in [512, 4096, 1 << 20] {
        let point = Some(Point {
            axis: "size".to_owned(),
            value: size,
            bytes: true,
        });
        let at = |entry: &Entry| Entry {
            group: "miss".to_owned(),
            point: point.clone(),
            ..entry.clone()
        };
        let more = [at(&entries[0]), at(&entries[1])];
        entries.extend(more);
    }
    run.accepted.missing = Some("it was not selected".to_owned());
    run
}

/// A run with every kind of result.
pub(crate) fn eventful() -> BenchRun {
    let earlier = history();
    with_comparison(last(), &earlier.iter().collect::<Vec<_>>())
}

fn history() -> Vec<BenchRun> {
    let contended = |day| {
        let mut run = run(day, &entries(0.8));
        run.conditions.contended = vec!["a busy processor".to_owned()];
        run
    };
    vec![contended(1), contended(2)]
}

/// `slow` is slower, `regressed` loses most of an improvement, `fast` is faster.
fn entries(regressed: f64) -> Vec<Sampled> {
    let noisy = |arm: &str, factor| Sampled::noisy(arm, 23_400.0, 0.01).times(factor);
    let memory = Sampled::exact("exact", Quantity::Memory, 1_048_576.0).times(1.000_01);
    vec![
        noisy("slow", 1.3),
        noisy("regressed", regressed),
        noisy("fast", 0.5),
        noisy("same", 1.0),
        noisy("oom", 1.0),
        noisy("off", 1.0),
        memory,
    ]
}

fn last() -> BenchRun {
    let mut run = run(3, &entries(0.95));
    run.machine.compiler = "rustc 1.96.0, dist".to_owned();
    let entries = &mut run.suites[0].entries;
    entries[4].outcome = EntryResult::OutOfMemory {
        reason: "3 of the trace's 9 requests do not fit in 64 MiB | <see>".to_owned(),
    };
    entries[5].outcome = EntryResult::Skipped {
        reason: "no device".to_owned(),
    };
    run
}

fn report(run: &BenchRun, earlier: &[&BenchRun]) -> Vec<(String, String)> {
    render(run, earlier)
}

#[test]
fn a_run_with_everything_that_can_happen_reads_well() {
    let files = report(&eventful(), &history().iter().collect::<Vec<_>>());
    let (name, text) = files.last().expect("the report is the last file");
    assert_eq!(
        (name.as_str(), files[0].0.as_str(), files.len()),
        (REPORT, "trend.svg", 2)
    );
    insta::assert_snapshot!(text);
    // The part of the report before the tables.
    let first_screen = text
        .lines()
        .take_while(|line| !line.starts_with("## "))
        .count();
    assert!(first_screen < 30, "{first_screen} lines");
}

#[test]
fn a_first_run_on_the_simulated_device_reads_well() {
    let files = report(&model(), &[]);
    assert_eq!(
        files
            .iter()
            .map(|(name, _)| name.as_str())
            .collect::<Vec<_>>(),
        ["host-model.svg", REPORT]
    );
    insta::assert_snapshot!(files[1].1);
}

#[test]
fn equal_curves_lie_on_each_other_and_flat_trends_are_not_drawn() {
    let mut run = model();
    for entry in &mut run.suites[0].entries {
        entry.outcome =
            EntryResult::Measured(entry.outcome.measured().cloned().expect("it was measured"));
    }
    let figures = run.suites[0].entries[2].outcome.clone();
    run.suites[0]
        .entries
        .iter_mut()
        .for_each(|entry| entry.outcome = figures.clone());
    let svg = picture::curve::draw(&run.suites[0], Quantity::ModelTime)
        .expect("three points make a curve");
    let lines: Vec<&str> = svg
        .lines()
        .filter(|line| line.contains("<polyline") && line.contains("stroke-width=\"2\""))
        .collect();
    let places: Vec<&str> = lines
        .iter()
        .filter_map(|line| line.split("points=\"").nth(1))
        .collect();
    assert!(
        places.len() >= 2 && places.windows(2).all(|pair| pair[0] == pair[1]),
        "{places:?}"
    );
    let flat = eventful();
    let change = &flat.comparison.as_ref().expect("it was compared").changes[6];
    assert_eq!(
        picture::trend::draw(&flat, &history().iter().collect::<Vec<_>>(), change),
        None,
        "an exact figure that does not change"
    );
}

#[test]
fn the_comparison_and_the_index_read_well() {
    insta::assert_snapshot!(comparison(&eventful()));
    let runs: Vec<(String, BenchRun)> = history()
        .into_iter()
        .chain([eventful()])
        .map(|run| (format!("nightly/{}", &run.started[..10]), run))
        .collect();
    let files = index(&runs);
    assert_eq!(files.len(), 1);
    insta::assert_snapshot!(files[0].1);
}

#[test]
fn on_a_contended_machine_no_measured_time_is_worse_and_the_report_says_why() {
    let mut run = last();
    run.conditions.contended =
        vec!["the processor was busy with other work: load 5.2 on 2 cores".to_owned()];
    let run = with_comparison(run, &history().iter().collect::<Vec<_>>());
    insta::assert_snapshot!(comparison(&run));
}

#[test]
fn annotations_begin_with_the_worst() {
    insta::assert_snapshot!(annotations(&eventful()).join("\n"));
}

#[test]
fn a_summary_has_no_pictures_and_fits_its_limit() {
    let run = eventful();
    let whole = summary(&run, usize::MAX);
    assert!(!whole.contains("!["));
    for limit in [500, 2000] {
        assert!(summary(&run, limit).len() <= limit);
    }
}

#[test]
fn figures_for_github_action_benchmark_have_names_units_and_ranges() {
    let figures: Vec<serde_json::Value> =
        serde_json::from_str(&smaller_is_better(&model())).expect("it was just written");
    assert_eq!(figures[0]["name"], "host / hit / caching (model)");
    assert_eq!(
        (figures[0]["value"].as_f64(), figures[0]["unit"].as_str()),
        (
            Some(225_000.0),
            Some("ns of model time (simulated clock), not measured")
        )
    );
}

#[test]
fn a_run_of_an_unoptimized_build_says_so_first() {
    let mut run = eventful();
    run.machine.compiler = "rustc 1.95.0, release".to_owned();
    let said = "BUILT WITH THE PROFILE release, NOT dist, which optimizes everything";
    assert!(verdict(&run).starts_with(said) && terminal(&run).starts_with(said));
    run.machine.compiler = "rustc 1.95.0, dist".to_owned();
    assert!(!verdict(&run).contains("PROFILE") && !terminal(&run).contains("PROFILE"));
}
