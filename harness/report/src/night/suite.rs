//! The section of a suite: what it is, its pictures, its figures in folds.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::super::escape::{code, prose, prose_block};
use super::super::page::Page;
use super::super::picture::Picture;
use super::super::unique;
use super::super::words::{Align, NOTHING, count};
use super::important::{self, Counts};
use super::picture::{curve, distribution, rounds, trend};
use super::series::{Key, Series, Trend};
use super::words;
use harness_base::files::slug;
use harness_base::statistics;
use harness_bench::history;
use harness_bench::record::{Change, ChangeVerdict, Entry, EntryOutcome, EntrySummary, Measured, NightRecord, Quantity, SuiteRecord};

/// Series in one trend picture.
const TREND_PANELS: usize = 5;
/// Series shown where nothing changed.
const QUIET_PANELS: usize = 2;

/// The whole section; `nights` ends with this one.
pub(super) fn write(page: &mut Page, night: &NightRecord, suite: &SuiteRecord, nights: &[&NightRecord]) {
    let changes = Changes::of(night, suite);
    head(page, night, suite, &changes);
    for quantity in quantities_of(suite) {
        page.block(format!("### {}", prose(&words::heading(quantity, &night.machine))));
        pictures(page, suite, quantity);
        table(page, suite, quantity, &changes);
    }
    drift(page, suite);
    trends(page, suite, &Trend::new(&suite.name, nights), &changes);
}

/// The section where no picture can be shown.
pub(super) fn write_without_pictures(page: &mut Page, night: &NightRecord, suite: &SuiteRecord) {
    let changes = Changes::of(night, suite);
    head(page, night, suite, &changes);
    for quantity in quantities_of(suite) {
        page.block(format!("### {}", prose(&words::heading(quantity, &night.machine))));
        table(page, suite, quantity, &changes);
    }
}

fn quantities_of(suite: &SuiteRecord) -> Vec<Quantity> {
    important::quantities(suite.entries.iter().map(|entry| entry.quantity))
}

fn head(page: &mut Page, night: &NightRecord, suite: &SuiteRecord, changes: &Changes<'_>) {
    let anchor = unique(&format!("suite-{}", slug(&suite.name)), "-", &mut page.names);
    page.anchor(&anchor);
    page.block(format!("## {}", code(&suite.name)));
    page.block(prose_block(&suite.about));
    page.block(conditions(suite));
    if night.comparison.is_some() {
        page.block(in_short(changes));
    }
}

/// How much was done, why not more, and what may have blurred the figures.
fn conditions(suite: &SuiteRecord) -> String {
    let threshold = words::percent(suite.threshold);
    let rounds = format!("{}: {}", count(suite.rounds as usize, "round"), words::stopped(suite.stopped));
    let overhead = match suite.overhead_ps {
        0 => "not measured".to_owned(),
        overhead => words::time(overhead),
    };
    format!(
        "A change below {threshold} is never flagged. {rounds}. The harness's own overhead in one timed region: {overhead}. {}",
        yardstick(suite)
    )
}

fn yardstick(suite: &SuiteRecord) -> String {
    let mut samples = suite.yardstick_ps.clone();
    let (Some(median), Some(&least), Some(&greatest)) =
        (statistics::median(&mut samples), suite.yardstick_ps.iter().min(), suite.yardstick_ps.iter().max())
    else {
        return "No yardstick was timed.".to_owned();
    };
    let spread = if median == 0 { NOTHING.to_owned() } else { words::percent((greatest - least) as f64 / median as f64) };
    format!(
        "Yardstick over the rounds: median {}, from {} to {}, a spread of {spread}.",
        words::time(median),
        words::time(least),
        words::time(greatest)
    )
}

/// What the comparison says of this suite's entries.
struct Changes<'a> {
    by_entry: BTreeMap<Key<'a>, &'a Change>,
    /// When the night began that the suite is compared with, where it is another one than for other suites.
    earlier: Option<&'a str>,
}

impl<'a> Changes<'a> {
    fn of(night: &'a NightRecord, suite: &SuiteRecord) -> Self {
        let changes = night.comparison.iter().flat_map(|comparison| &comparison.changes);
        let of_suite = changes.filter(|change| change.entry.suite == suite.name);
        Self {
            by_entry: of_suite
                .map(|change| ((change.entry.case.clone(), change.entry.arm.as_str(), change.entry.quantity), change))
                .collect(),
            earlier: night
                .comparison
                .iter()
                .flat_map(|comparison| &comparison.earlier)
                .find_map(|base| (base.suite == suite.name).then_some(base.started.as_str())),
        }
    }

    fn get(&self, entry: &'a Entry) -> Option<&'a Change> {
        self.by_entry.get(&(entry.case(), entry.arm.as_str(), entry.quantity)).copied()
    }
}

fn in_short(changes: &Changes<'_>) -> String {
    let counts = Counts::of(changes.by_entry.values().copied());
    let kinds = [
        (counts.broken, "broken"),
        (counts.worse, "worse"),
        (counts.better, "better"),
        (counts.mended, "mended"),
        (counts.still_broken, "still broken"),
        (counts.same, "the same"),
        (counts.untested, "of which nothing can be told"),
        (counts.not_compared, "not compared"),
    ];
    let told: Vec<String> = kinds.into_iter().filter(|&(number, _)| number > 0).map(|(number, word)| format!("{number} {word}")).collect();
    if told.is_empty() {
        "Against the baseline: nothing to compare.".to_owned()
    } else {
        let earlier = changes.earlier.map(|started| format!(" (the night of {}, the last that has this suite)", words::moment(started)));
        format!("Against the baseline{}: {}.", earlier.unwrap_or_default(), told.join(", "))
    }
}

fn pictures(page: &mut Page, suite: &SuiteRecord, quantity: Quantity) {
    if let Some(svg) = curve::draw(suite, quantity) {
        let alt = format!("{}: {}, along the axis of each group, one line an arm", suite.name, words::short(quantity));
        show(page, suite, &format!("{}-curve", words::slug(quantity)), &alt, svg);
    }
    if let Some(distribution) = distribution::draw(suite, quantity) {
        let alt = format!("{}: how samples are spread, {}", suite.name, words::short(quantity));
        show(page, suite, &format!("{}-spread", words::slug(quantity)), &alt, distribution.svg);
        page.block(distribution.left_out.unwrap_or_default());
    }
}

fn show(page: &mut Page, suite: &SuiteRecord, what: &str, alt: &str, svg: String) {
    let name = unique(&format!("{}-{what}", slug(&suite.name)), "-", &mut page.names);
    let file_name = format!("{name}.svg");
    page.block(format!("![{}]({file_name})", prose(alt)));
    page.pictures.push(Picture { file_name, svg });
}

/// What clocks and other programs did within the night.
fn drift(page: &mut Page, suite: &SuiteRecord) {
    if let Some(svg) = rounds::draw(suite) {
        page.fold("How figures drifted over the rounds", |page| {
            show(page, suite, "rounds", &format!("{}: the yardstick and each arm over the rounds", suite.name), svg);
        });
    }
}

/// All figures of one quantity, folded.
fn table(page: &mut Page, suite: &SuiteRecord, quantity: Quantity, changes: &Changes<'_>) {
    let entries: Vec<&Entry> = suite.entries.iter().filter(|entry| entry.quantity == quantity).collect();
    let base = base_arm(&entries);
    let to_base = base.map_or_else(|| NOTHING.to_owned(), |arm| format!("÷ {}", code(arm)));
    let heads = [("case", Align::Left), ("arm", Align::Left), ("median", Align::Right), ("95 % interval", Align::Right)];
    let more = ["MAD", "p99", "n", to_base.as_str(), "to the baseline"].map(|head| (head, Align::Right));
    let columns: Vec<(String, Align)> = heads.into_iter().chain(more).map(|(head, align)| (head.to_owned(), align)).collect();
    let title = format!("All {} of {} ({})", count(entries.len(), "figure"), code_in_html(&suite.name), words::short(quantity));
    page.fold(&title, |page| {
        let bases = bases(&entries, base);
        page.table(&columns, entries.iter().map(|entry| cells(entry, &bases, changes.get(entry))));
    });
}

/// The markup of a fold's summary is HTML, where backticks mean nothing.
fn code_in_html(name: &str) -> String {
    name.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The arm that others are told as multiples of: `direct`, which asks the driver every time, or else the first that has figures.
fn base_arm<'a>(entries: &[&'a Entry]) -> Option<&'a str> {
    let measured = || entries.iter().filter(|entry| matches!(entry.outcome, EntryOutcome::Measured(_))).map(|entry| entry.arm.as_str());
    measured().find(|arm| *arm == "direct").or_else(|| measured().next())
}

/// For each case the median of that arm.
fn bases(entries: &[&Entry], arm: Option<&str>) -> BTreeMap<String, u64> {
    let of_arm = entries.iter().filter(|entry| Some(entry.arm.as_str()) == arm);
    of_arm
        .filter_map(|entry| match &entry.outcome {
            EntryOutcome::Measured(measured) => Some((entry.case(), measured.summary.median)),
            EntryOutcome::Failed { .. } | EntryOutcome::Skipped { .. } => None,
        })
        .collect()
}

fn cells(entry: &Entry, bases: &BTreeMap<String, u64>, change: Option<&Change>) -> Vec<String> {
    let mut cells = vec![prose(&entry.case()), code(&entry.arm)];
    match &entry.outcome {
        EntryOutcome::Measured(Measured { summary, .. }) => {
            let amount = |value: u64| words::amount(entry.quantity, value);
            let base = bases.get(&entry.case()).copied().filter(|&base| base > 0);
            let interval = if summary.low == summary.high {
                NOTHING.to_owned()
            } else {
                format!("{} to {}", amount(summary.low), amount(summary.high))
            };
            cells.extend([
                amount(summary.median),
                interval,
                amount(summary.mad),
                summary.p99.map_or_else(|| format!("max {}", amount(summary.max)), amount),
                summary.count.to_string(),
                base.map_or_else(|| NOTHING.to_owned(), |base| words::ratio(summary.median as f64 / base as f64)),
            ]);
        }
        EntryOutcome::Failed { reason } => cells.extend(without_figures(format!("**FAILED**: {}", prose(reason)))),
        EntryOutcome::Skipped { reason } => cells.extend(without_figures(format!("skipped: {}", prose(reason)))),
    }
    cells.push(change.map_or_else(|| NOTHING.to_owned(), to_the_baseline));
    cells
}

fn without_figures(word: String) -> [String; 6] {
    [word, NOTHING.to_owned(), NOTHING.to_owned(), NOTHING.to_owned(), NOTHING.to_owned(), NOTHING.to_owned()]
}

fn to_the_baseline(change: &Change) -> String {
    let word = match change.verdict {
        ChangeVerdict::Worse => "**worse**",
        ChangeVerdict::Better => "**better**",
        ChangeVerdict::Same => "same",
        ChangeVerdict::Broken => "**broken**",
        ChangeVerdict::Mended => "mended",
        ChangeVerdict::StillBroken => "still broken",
        ChangeVerdict::Untested => "cannot be told",
        ChangeVerdict::NotCompared => "not compared",
    };
    match &change.figures {
        Some(figures) if change.verdict == ChangeVerdict::Untested => format!("{word}, {}", words::change(figures)),
        Some(figures) => format!("{word}, {}, p {}", words::change(figures), prose(&words::probability(figures.p))),
        None => word.to_owned(),
    }
}

/// The picture of the nights before this one.
fn trends(page: &mut Page, suite: &SuiteRecord, trend: &Trend<'_>, changes: &Changes<'_>) {
    if trend.nights.len() < 2 {
        return;
    }
    let panels = panels(trend, suite.threshold, changes);
    if let Some(svg) = trend::draw(&suite.name, &trend.nights, &panels) {
        page.block("### Over the nights");
        page.block(format!(
            "{} of {} series, what changed before what did not, over the nights since the suite was last defined anew.",
            panels.len(),
            trend.series.len()
        ));
        show(page, suite, "trend", &format!("{}: medians over the nights, with change points", suite.name), svg);
    }
}

/// A series that may be shown.
struct Candidate<'a, 'b> {
    key: &'a Key<'b>,
    series: &'a Series<'b>,
    change_points: Vec<usize>,
    /// 0 where it became worse this night, 1 where it became better, 2 where it stayed.
    rank: u8,
}

/// What changed this night, then what changed last before it, then a few others so that something is always seen. Of the points of one
/// curve that go the same way the first is shown.
fn panels<'a>(trend: &'a Trend<'_>, threshold: f64, changes: &Changes<'_>) -> Vec<trend::Panel<'a>> {
    let candidates = trend.series.iter().map(|(key, series)| {
        let rank = match changes.by_entry.get(key).map(|change| change.verdict) {
            Some(ChangeVerdict::Broken | ChangeVerdict::Worse) => 0,
            Some(ChangeVerdict::Better | ChangeVerdict::Mended) => 1,
            Some(ChangeVerdict::Same | ChangeVerdict::StillBroken | ChangeVerdict::Untested | ChangeVerdict::NotCompared) | None => 2,
        };
        Candidate { key, series, change_points: change_points(trend, key.2, &series.figures, threshold), rank }
    });
    let mut candidates: Vec<Candidate<'_, '_>> = candidates.collect();
    let last = |candidate: &Candidate<'_, '_>| candidate.change_points.last().copied().unwrap_or_default();
    candidates.sort_by_key(|candidate| (candidate.rank, Reverse(last(candidate))));
    let mut seen = BTreeSet::new();
    candidates.retain(|candidate| seen.insert((candidate.series.group, candidate.key.1, candidate.key.2)));
    let moved = candidates.iter().filter(|candidate| candidate.rank < 2 || !candidate.change_points.is_empty()).count();
    candidates.truncate(moved.clamp(QUIET_PANELS, TREND_PANELS));
    let panel = |Candidate { key: (case, arm, quantity), series, change_points, .. }: Candidate<'a, '_>| trend::Panel {
        title: format!("{case} by {arm}"),
        quantity: *quantity,
        figures: &series.figures,
        failed: &series.failed,
        change_points,
    };
    candidates.into_iter().map(panel).collect()
}

/// Nights from which on a series stands on another level, by more than the suite's threshold. Measured times of contended nights do not count.
fn change_points(trend: &Trend<'_>, quantity: Quantity, figures: &[Option<EntrySummary>], threshold: f64) -> Vec<usize> {
    let is_exact = matches!(quantity, Quantity::ModelTime | Quantity::Memory);
    let nights = trend.nights.iter().zip(figures).enumerate().filter(|(_, (night, _))| is_exact || !night.is_contended);
    let known: Vec<(usize, f64)> = nights.filter_map(|(night, (_, figure))| Some((night, figure.as_ref()?.median as f64))).collect();
    let medians: Vec<f64> = known.iter().map(|(_, median)| *median).collect();
    history::change_points(&medians, is_exact, threshold).into_iter().map(|point| known[point.at].0).collect()
}
