//! The report of a benchmark run and the index of all runs. Both depend on records only.
//!
//! The top of the report names the changes and the next action. Then each suite and quantity has a
//! table of cases by arms. Different quantities never share a table, and headings mark model times.

mod ci;
mod index;
mod picture;
mod terminal;
mod verdict;
mod words;

pub use self::ci::{annotations, smaller_is_better, summary};
pub use self::verdict::{comparison, verdict};
pub use self::{index::index, terminal::terminal};

pub(super) use self::verdict::in_figures;
pub(super) use self::words::{amount, short};

use std::collections::BTreeMap;

use harness_base::files::slug;
use harness_bench::record::{
    BenchRun, Change, Entry, EntryName, GpuState, Quantity, SuiteRecord, Verdict,
};
use harness_bench::store::REPORT;

use super::escape::{code, prose, prose_block};
use super::page::Page;
use super::words::{Grid, count, distinct, or_nothing, size, unless_empty};

/// Renders a run: [`REPORT`], after the pictures that it links to.
pub fn render(run: &BenchRun, earlier: &[&BenchRun]) -> Vec<(String, String)> {
    let mut page = page(run, true);
    trend(&mut page, run, earlier);
    page.ended().files(REPORT)
}

fn page(run: &BenchRun, with_pictures: bool) -> Page {
    let mut page = Page::default();
    page.block(format!(
        "# Benchmarks of {} on {}",
        words::moment(&run.started),
        prose(&words::device(&run.machine))
    ));
    verdict::write(&mut page, run);
    for suite in &run.suites {
        write_suite(&mut page, run, suite, with_pictures);
    }
    machine(&mut page, run);
    page
}

fn trend(page: &mut Page, run: &BenchRun, earlier: &[&BenchRun]) {
    let changes = run
        .comparison
        .iter()
        .flat_map(harness_bench::compare::by_importance);
    if let Some(svg) = changes
        .filter_map(|change| picture::trend::draw(run, earlier, change))
        .next()
    {
        page.block("## Trend of the largest change");
        let file = page.picture("trend", svg);
        page.block(format!(
            "![The entry with the largest change, over the runs with this accepted build]({file})"
        ));
    }
}

fn write_suite(page: &mut Page, run: &BenchRun, suite: &SuiteRecord, with_pictures: bool) {
    let changes: BTreeMap<&EntryName, &Change> = run
        .comparison
        .iter()
        .flat_map(|comparison| &comparison.changes)
        .map(|change| (&change.entry, change))
        .collect();
    page.block(format!("## {}", code(&suite.name)));
    page.block(prose_block(&suite.about));
    let rounds = count(suite.rounds as usize, "round");
    let precision = precision(suite, &changes).map_or_else(String::new, |half| {
        format!(
            "; ratios to the baseline have an uncertainty of ± {}",
            words::percent(half)
        )
    });
    page.block(format!(
        "{rounds}: {}{precision}.",
        words::stopped(suite.stopped)
    ));
    for (quantity, entries) in entries_of(suite) {
        page.block(format!(
            "### {}",
            prose(&words::heading(quantity, &run.machine))
        ));
        table(page, suite, &entries, &changes);
        let curve = picture::curve::draw(suite, quantity).filter(|_| with_pictures);
        if let Some(svg) = curve {
            let file = page.picture(
                &format!("{}-{}", slug(&suite.name), words::slug(quantity)),
                svg,
            );
            page.block(format!(
                "![{}: {}, one line per arm]({file})",
                prose(&suite.name),
                words::short(quantity)
            ));
        }
    }
    let line = |(reason, entries): (&str, Vec<&Entry>)| {
        let first = format!("{} by {}", prose(&entries[0].case()), code(&entries[0].arm));
        let more = if entries.len() > 1 {
            format!(" and {} more", entries.len() - 1)
        } else {
            String::new()
        };
        format!("{first}{more}: {}", prose(reason))
    };
    page.list(reasons(suite).into_iter().map(line));
}

fn entries_of(suite: &SuiteRecord) -> Vec<(Quantity, Vec<&Entry>)> {
    let of = |quantity| {
        (
            quantity,
            suite
                .entries
                .iter()
                .filter(|entry| entry.quantity == quantity)
                .collect::<Vec<_>>(),
        )
    };
    Quantity::ALL
        .into_iter()
        .map(of)
        .filter(|(_, entries)| !entries.is_empty())
        .collect()
}

fn arms_of<'a>(entries: &[&'a Entry]) -> Vec<&'a str> {
    distinct(entries.iter().map(|entry| entry.arm.as_str()))
}

fn cases_of(entries: &[&Entry]) -> Vec<String> {
    let mut cases: Vec<String> = entries.iter().map(|entry| entry.case()).collect();
    cases.dedup();
    cases
}

fn reasons(suite: &SuiteRecord) -> BTreeMap<&str, Vec<&Entry>> {
    let mut reasons: BTreeMap<&str, Vec<&Entry>> = BTreeMap::new();
    for entry in &suite.entries {
        if let Some(reason) = entry.outcome.reason() {
            reasons.entry(reason).or_default().push(entry);
        }
    }
    reasons
}

/// Half the width of a typical confidence interval of a measured time.
fn precision(suite: &SuiteRecord, changes: &BTreeMap<&EntryName, &Change>) -> Option<f64> {
    let measured = suite
        .entries
        .iter()
        .filter(|entry| !entry.quantity.is_exact());
    let figures = measured.filter_map(|entry| changes.get(&EntryName::of(suite, entry))?.figures);
    let mut halves: Vec<f64> = figures
        .map(|figures| (figures.high - figures.low) / 2.0)
        .collect();
    halves.sort_by(f64::total_cmp);
    halves.get(halves.len() / 2).copied()
}

fn table(
    page: &mut Page,
    suite: &SuiteRecord,
    entries: &[&Entry],
    changes: &BTreeMap<&EntryName, &Change>,
) {
    let (arms, cases) = (arms_of(entries), cases_of(entries));
    let is_zero = |case: &String| {
        let mut of_case = entries.iter().filter(|entry| entry.case() == *case);
        of_case.all(|entry| {
            let is_flagged = changes
                .get(&EntryName::of(suite, entry))
                .is_some_and(|change| !matches!(change.verdict, Verdict::Same));
            !is_flagged
                && entry
                    .outcome
                    .measured()
                    .is_some_and(|measured| measured.summary.max == 0)
        })
    };
    let (zero, shown): (Vec<String>, Vec<String>) = cases.into_iter().partition(is_zero);
    let heads = std::iter::once("case".to_owned()).chain(arms.iter().map(|arm| code(arm)));
    let cell = |entry: &Entry| cell(entry, changes.get(&EntryName::of(suite, entry)).copied());
    if !shown.is_empty() {
        page.table(&Grid::new(
            "lr",
            heads,
            shown
                .iter()
                .map(|case| row(prose(case), case, &arms, entries, cell)),
        ));
    }
    if !zero.is_empty() {
        page.block(format!("Zero for every arm: {}.", prose(&zero.join(", "))));
    }
}

fn row(
    head: String,
    case: &str,
    arms: &[&str],
    entries: &[&Entry],
    cell: impl Fn(&Entry) -> String,
) -> Vec<String> {
    let entry = |arm: &&str| {
        entries
            .iter()
            .find(|entry| entry.arm == **arm && entry.case() == case)
    };
    std::iter::once(head)
        .chain(
            arms.iter()
                .map(|arm| entry(arm).map(|entry| cell(entry)).unwrap_or_default()),
        )
        .collect()
}

/// The median, with its ratio if it changed.
fn cell(entry: &Entry, change: Option<&Change>) -> String {
    let figure = words::figure(entry);
    let Some(change) = change else { return figure };
    let word = verdict::word(change.verdict);
    match change.verdict {
        Verdict::Worse | Verdict::Better => {
            format!("**{figure}, {word}: {}**", words::change(change))
        }
        Verdict::Broken | Verdict::Fixed => format!("**{figure}: {word}**"),
        Verdict::Unsure => format!("{figure} ({word})"),
        _ => figure,
    }
}

fn machine(page: &mut Page, run: &BenchRun) {
    page.block("## Reproduce");
    page.command(&run.reproduce);
    page.fold("Machine and definitions", |page| {
        let free = (
            "free memory at the start",
            run.conditions.free_at_start.map(size),
        );
        let facts = run
            .machine
            .facts()
            .into_iter()
            .chain([free])
            .map(|(what, value)| vec![what.to_owned(), or_nothing(value)]);
        page.grid(&Grid::new("l", ["machine", ""], facts));
        gpu(page, &run.conditions.gpu);
        if !run.conditions.cost_figures.is_empty() {
            page.block(format!(
                "Cost model {}:",
                prose(
                    run.machine
                        .cost_model
                        .as_deref()
                        .unwrap_or("without a name")
                )
            ));
            page.cost_figures(run.conditions.cost_figures.iter());
        }
        page.list([
            "A *round* measures every entry once, in a new order. Figures are medians of all \
             samples.".to_owned(),
            "*Worse*: one of three conditions. The ratio to the accepted build exceeds 1 by more \
             than the suite's threshold, and its whole 99 % \
             interval by more than half of it. Or the entry exceeds the best earlier run with this \
             accepted build by that much. Or it moved to a \
             level that is higher by half the threshold and stayed there. Model times and memory \
             are exact, so any difference counts."
                .to_owned(),
            "*Unsure*: the interval is too wide to exclude a change of twice the threshold, or the \
             time changed on a contended machine.".to_owned(),
            "*Host time* is measured by this machine's clock, *device time* between two events of \
             a real device. *Model time* is a simulated \
             device's virtual clock: not measured, and never compared with measured times."
                .to_owned(),
        ]);
    });
}

fn gpu(page: &mut Page, states: &[GpuState]) {
    if states.is_empty() {
        return;
    }
    let heads = [
        "GPU after",
        "SM clock",
        "memory clock",
        "power",
        "temperature",
        "clocks reduced by",
        "other processes",
    ];
    let megahertz = |clock: Option<u32>| or_nothing(clock.map(|clock| format!("{clock} MHz")));
    let cells = |state: &GpuState| {
        vec![
            words::took(state.at_ms),
            megahertz(state.sm_mhz),
            megahertz(state.memory_mhz),
            or_nothing(
                state
                    .power_mw
                    .map(|power| format!("{:.1} W", f64::from(power) / 1e3)),
            ),
            or_nothing(state.temperature.map(|celsius| format!("{celsius} °C"))),
            unless_empty(state.throttle_reasons.join(", ")),
            or_nothing(state.other_processes),
        ]
    };
    page.grid(&Grid::new("rrrrrlr", heads, states.iter().map(cells)));
}

#[cfg(test)]
pub(crate) mod tests;
