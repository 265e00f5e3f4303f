//! The first screen of a night: the verdict, the most important changes, what was skipped and why.

use super::super::escape::{code, prose};
use super::super::page::Page;
use super::super::words::{Align, NOTHING, count};
use super::important;
use super::words;
use harness_bench::record::{Change, ChangeVerdict, Comparison, EntryOutcome, NightRecord};

/// Changes told on the first screen.
const MOST_IMPORTANT: usize = 3;
/// Lines that the first screen spends on each kind of trouble.
const LINES: usize = 3;
/// Characters of a reason on the first screen; all of it stands below.
const REASON: usize = 160;

pub(super) fn write(page: &mut Page, night: &NightRecord) {
    page.block(format!("# Benchmarks of {} on {}", words::date(&night.started), prose(&words::device(&night.machine))));
    page.block(format!("**{}**", prose(&important::verdict(night))));
    page.block(what_and_where(night));
    let conditions = &night.conditions;
    if !conditions.contended.is_empty() {
        let reasons: Vec<String> = conditions.contended.iter().take(LINES).map(|reason| prose(reason)).collect();
        let more = conditions.contended.len().saturating_sub(LINES);
        let more = if more > 0 { format!("; and {}", count(more, "further reason")) } else { String::new() };
        page.block(format!(
            "> **Contended:** {}{more}. The figures are told, but this night is no baseline for later ones.",
            reasons.join("; ")
        ));
    }
    if let Some(comparison) = &night.comparison {
        drifts(page, comparison);
        changes(page, night, comparison);
        not_compared(page, comparison);
    } else {
        failures(page, night);
    }
    skipped(page, night);
}

fn what_and_where(night: &NightRecord) -> String {
    let entries: usize = night.suites.iter().map(|suite| suite.entries.len()).sum();
    let names: Vec<String> =
        night.suites.iter().map(|suite| format!("[{}](#suite-{})", code(&suite.name), harness_base::files::slug(&suite.name))).collect();
    let shard = night.shard.map_or_else(String::new, |shard| format!(" This is part {shard} of the suites."));
    format!(
        "This is {}. The night began {} and took {}. {} in {}: {}.{shard} Clock of the device: {}. [Machine and conditions](#machine).",
        words::commit(&night.build),
        words::moment(&night.started),
        words::took(night.took_ms),
        words::entries(entries),
        count(night.suites.len(), "suite"),
        names.join(", "),
        prose(&words::clock(&night.machine)),
    )
}

/// What the reader must know before changes of single allocators.
fn drifts(page: &mut Page, comparison: &Comparison) {
    for drift in &comparison.drifts {
        page.block(format!("> **Drift:** {}.", words::drift(&code(&drift.suite), drift)));
    }
}

/// A table for each quantity, so that model times never stand beside measured ones.
fn changes(page: &mut Page, night: &NightRecord, comparison: &Comparison) {
    let kinds = important::kinds(night, comparison);
    let shown = &kinds[..kinds.len().min(MOST_IMPORTANT)];
    let heads = [("suite", Align::Left), ("case", Align::Left), ("arm", Align::Left), ("before → after", Align::Right)];
    let heads = heads.into_iter().chain([("ratio (95 % interval)", Align::Right), ("p", Align::Right)]);
    let columns: Vec<(String, Align)> = heads.map(|(head, align)| (head.to_owned(), align)).collect();
    for quantity in important::quantities(shown.iter().map(|(change, _)| change.entry.quantity)) {
        let of = shown.iter().filter(|(change, _)| change.entry.quantity == quantity);
        page.block(format!("Most important changes, **{}**:", prose(&words::heading(quantity, &night.machine))));
        page.table(&columns, of.map(|(change, alike)| cells(night, change, *alike)));
    }
    let more: usize = kinds[shown.len()..].iter().map(|(_, alike)| 1 + alike).sum();
    if more > 0 {
        page.block(format!("With the suites below: {}.", count(more, "further change")));
    }
}

fn cells(night: &NightRecord, change: &Change, alike: usize) -> Vec<String> {
    let entry = &change.entry;
    let alike = if alike > 0 { format!(" (and {} alike)", count(alike, "other point")) } else { String::new() };
    let mut cells = vec![code(&entry.suite), format!("{}{alike}", prose(&entry.case)), code(&entry.arm)];
    let figures = change.figures.as_ref();
    let before_after =
        figures.map(|figures| format!("{} → {}", words::amount(entry.quantity, figures.base), words::amount(entry.quantity, figures.new)));
    cells.extend(match change.verdict {
        ChangeVerdict::Broken => {
            let reason = reason(night, change).unwrap_or("it failed");
            [format!("worked → **BROKEN**: {}", prose(&shortened(reason))), NOTHING.to_owned(), NOTHING.to_owned()]
        }
        ChangeVerdict::Mended => ["failed → works".to_owned(), NOTHING.to_owned(), NOTHING.to_owned()],
        ChangeVerdict::Worse
        | ChangeVerdict::Better
        | ChangeVerdict::Same
        | ChangeVerdict::StillBroken
        | ChangeVerdict::Untested
        | ChangeVerdict::NotCompared => [
            before_after.unwrap_or_else(|| NOTHING.to_owned()),
            figures.map_or_else(|| NOTHING.to_owned(), |figures| format!("**{}**", words::change(figures))),
            figures.map_or_else(|| NOTHING.to_owned(), |figures| prose(&words::probability(figures.p))),
        ],
    });
    cells
}

/// What was seen where an entry failed.
pub(super) fn reason<'a>(night: &'a NightRecord, change: &Change) -> Option<&'a str> {
    let suite = night.suites.iter().find(|suite| suite.name == change.entry.suite)?;
    suite.entries.iter().find_map(|entry| match &entry.outcome {
        EntryOutcome::Failed { reason } if entry.arm == change.entry.arm && entry.case() == change.entry.case => Some(reason.as_str()),
        _ => None,
    })
}

fn failures(page: &mut Page, night: &NightRecord) {
    let failed: Vec<_> = important::failed(night).collect();
    let mut lines: Vec<String> = failed
        .iter()
        .take(LINES)
        .map(|(suite, case, arm, reason)| {
            format!("FAILED: {} / {} / {}: {}", code(suite), prose(case), code(arm), prose(&shortened(reason)))
        })
        .collect();
    if failed.len() > LINES {
        lines.push(format!("… and {} below", count(failed.len() - LINES, "further failure")));
    }
    page.list(&lines);
}

/// What the comparison leaves out.
fn not_compared(page: &mut Page, comparison: &Comparison) {
    if !comparison.across.is_empty() {
        page.block(format!("**Across machines**, as asked: {}.", prose(&shortened(&comparison.across.join("; ")))));
    }
    let mut parts = Vec::new();
    let named = |entries: usize, what: &str| (entries > 0).then(|| format!("{entries} {what}"));
    parts.extend(named(comparison.new.len(), "new since then"));
    parts.extend(named(comparison.missing.len(), "missing since then"));
    if !comparison.redefined.is_empty() {
        let names: Vec<String> = comparison.redefined.iter().map(|name| code(name)).collect();
        parts.push(format!("defined anew, and so not compared: {}", names.join(", ")));
    }
    if !parts.is_empty() {
        page.block(format!("Not in the comparison: {}.", parts.join("; ")));
    }
}

fn skipped(page: &mut Page, night: &NightRecord) {
    let reasons = important::skipped(night);
    let mut lines: Vec<String> =
        reasons.iter().take(LINES).map(|(reason, entries)| format!("Skipped {}: {}", entries.len(), prose(&shortened(reason)))).collect();
    if reasons.len() > LINES {
        let entries: usize = reasons[LINES..].iter().map(|(_, entries)| entries.len()).sum();
        lines.push(format!("Skipped {entries} for {} further reasons", reasons.len() - LINES));
    }
    if lines.is_empty() {
        page.block("Nothing was skipped.");
    } else {
        page.list(&lines);
        page.fold("Which entries were skipped", |page| {
            let lines: Vec<String> =
                reasons.iter().map(|(reason, entries)| format!("{}: {}", prose(reason), prose(&entries.join("; ")))).collect();
            page.list(&lines);
        });
    }
}

/// The start of a long reason.
fn shortened(reason: &str) -> String {
    if reason.chars().count() <= REASON {
        return reason.to_owned();
    }
    reason.chars().take(REASON).chain(" …".chars()).collect()
}
