//! The verdict of a comparison: changes, evidence and the next action.

use harness_bench::compare::by_importance;
use harness_bench::record::{
    Basis, BenchComparison, BenchRun, Build, Change, ChangeFigures, Counts, EntryName, Verdict,
};

use super::super::escape::{code, prose};
use super::super::page::Page;
use super::super::words::{Grid, count, or_nothing};
use super::words;

const SHOWN: usize = 20;

/// Number of consecutive contended runs after which the report asks for a dedicated machine.
const ALWAYS: usize = 3;

pub(super) fn write(page: &mut Page, run: &BenchRun) {
    page.block(format!("**{}**", prose(&verdict(run))));
    let mut lines = vec![format!(
        "Measured: {}, in {}.",
        words::commit(&run.build),
        words::took(run.took_ms)
    )];
    lines.extend(circumstances(run).iter().map(|line| prose(line)));
    page.list(lines);
    let changes: Vec<&Change> = run.comparison.iter().flat_map(by_importance).collect();
    if changes.is_empty() {
        return;
    }
    let heads = [
        "",
        "suite",
        "case",
        "arm",
        "before",
        "now",
        "ratio (99 % interval)",
        "since, or why",
    ];
    page.table(&Grid::new(
        "llllrrrl",
        heads,
        changes.iter().take(SHOWN).map(|change| row(change)),
    ));
    if changes.len() > SHOWN {
        page.block(format!(
            "And {} more: they are marked in the tables below.",
            changes.len() - SHOWN
        ));
    }
}

fn row(change: &Change) -> Vec<String> {
    let EntryName {
        suite,
        case,
        arm,
        quantity,
    } = &change.entry;
    let figure = |of: fn(&ChangeFigures) -> u64| {
        or_nothing(
            change
                .figures
                .as_ref()
                .map(|figures| words::amount(*quantity, of(figures))),
        )
    };
    vec![
        word(change.verdict).to_owned(),
        code(suite),
        prose(case),
        code(arm),
        figure(|figures| figures.base),
        figure(|figures| figures.new),
        words::change(change),
        prose(&since(change)),
    ]
}

/// When the change began, or its reason.
fn since(change: &Change) -> String {
    let since = change
        .since
        .as_deref()
        .map(|since| format!("since {}", words::moment(since)));
    let run = change
        .worse_than_run
        .as_deref()
        .map(|run| format!("worse than the run of {}", words::moment(run)));
    [since, run, change.reason.clone()]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join("; ")
}

pub(super) const fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Worse => "worse",
        Verdict::Better => "better",
        Verdict::Same => "same",
        Verdict::Unsure => "unsure",
        Verdict::Broken => "broken",
        Verdict::Fixed => "fixed",
        Verdict::StillBroken => "still broken",
        Verdict::NotCompared => "not compared",
    }
}

/// The first line of a run that measured a build that does not optimize everything.
pub(super) fn other_profile(run: &BenchRun) -> Option<String> {
    let profile = harness_base::printable::printable(run.machine.other_profile()?);
    Some(format!(
        "BUILT WITH THE PROFILE {profile}, NOT dist, which optimizes everything"
    ))
}

pub fn verdict(run: &BenchRun) -> String {
    other_profile(run)
        .into_iter()
        .chain([judgement(run)])
        .collect::<Vec<_>>()
        .join(". ")
}

fn judgement(run: &BenchRun) -> String {
    let losses = if run.has_losses() {
        ". ENTRIES WERE LOST OR REDEFINED"
    } else {
        ""
    };
    let inconclusive = run
        .inconclusive()
        .map(|why| format!(". INCONCLUSIVE: {why}"))
        .unwrap_or_default();
    let failed = run.failed();
    let Some(comparison) = &run.comparison else {
        let failed = if failed == 0 {
            "nothing failed".to_owned()
        } else {
            format!("{failed} FAILED")
        };
        let entries = count(run.entries().count(), "entry");
        return format!(
            "{entries} measured, {failed}. No earlier run to compare with{losses}{inconclusive}."
        );
    };
    let counts = Counts::of(&comparison.changes);
    let kinds = [
        Verdict::Broken,
        Verdict::Worse,
        Verdict::Better,
        Verdict::Fixed,
        Verdict::StillBroken,
    ];
    let kinds = kinds.into_iter().filter(|&kind| counts.with(kind) > 0);
    let changed: Vec<String> = kinds
        .map(|kind| format!("{} {}", counts.with(kind), word(kind)))
        .collect();
    let changed = if changed.is_empty() {
        "Nothing changed".to_owned()
    } else {
        changed.join(", ")
    };
    let unsure = counts.with(Verdict::Unsure);
    let unsure = if unsure > 0 {
        format!("; {unsure} unsure")
    } else {
        String::new()
    };
    let waiting = run.not_in_turn();
    let waiting = if waiting > 0 {
        format!("; {waiting} wait for a later run")
    } else {
        String::new()
    };
    let contended = if run.conditions.contended.is_empty() {
        String::new()
    } else if comparison.contended_runs >= ALWAYS {
        format!(
            ". The machine was contended in each of the last {} runs: run nothing else during \
             benchmarks",
            comparison.contended_runs
        )
    } else {
        ". The machine was contended".to_owned()
    };
    format!(
        "{changed}, of {} compared{unsure}{waiting}{losses}{inconclusive}{contended}.",
        count(counts.compared(), "entry")
    )
}

fn circumstances(run: &BenchRun) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(comparison) = &run.comparison {
        lines.push(basis(&comparison.basis));
        if !comparison.machine.is_empty() {
            lines.push(format!(
                "The machine differs from that of the run before: {}.",
                comparison.machine.join("; ")
            ));
        }
        lines.extend(uncompared(comparison));
    }
    // What the suites changed against the accepted build.
    let of = |names: &[String], what: &str| {
        (!names.is_empty()).then(|| format!("{what}: {}.", names.join("; ")))
    };
    lines.extend(of(
        &run.gate.lost,
        "Lost since the accepted build; `harness report accept` accepts this",
    ));
    lines.extend(of(
        &run.gate.redefined,
        "Measures other work than the accepted build; `harness report accept` accepts this",
    ));
    lines.extend(of(
        &run.gate.overridden,
        "Replaced by the accepted build's terms",
    ));
    lines.extend(contended(run));
    lines
}

fn basis(basis: &Basis) -> String {
    match basis {
        Basis::SideBySide { commit } => {
            let commit = words::commit(&Build {
                commit: commit.clone(),
                dirty: None,
            });
            format!(
                "Compared side by side, in the same rounds, with the accepted build of {commit}."
            )
        }
        Basis::Records {
            started,
            build,
            why,
        } => format!(
            "Compared with the record of the run of {} ({}), because the accepted build was not \
             measured: {why}. Measured times of different \
             runs must differ by 15 % to be flagged.",
            words::moment(started),
            words::commit(build)
        ),
    }
}

fn uncompared(comparison: &BenchComparison) -> Vec<String> {
    let of = |names: &[EntryName], what: &str| {
        let first = names
            .first()
            .map(|name| format!("{}: {} by {}", name.suite, name.case, name.arm))?;
        let more = if names.len() > 1 {
            format!(" and {} more", names.len() - 1)
        } else {
            String::new()
        };
        Some(format!("{what}: {first}{more}."))
    };
    let lists = [
        of(&comparison.new, "New, not compared"),
        of(&comparison.missing, "No longer measured"),
        of(
            &comparison.redefined,
            "Measures other work now, not compared",
        ),
    ];
    let skipped: Vec<&Change> = comparison
        .changes
        .iter()
        .filter(|change| change.verdict == Verdict::NotCompared && change.reason.is_some())
        .collect();
    let first = skipped.first().and_then(|change| change.reason.as_deref());
    let skipped = first.map(|reason| {
        format!(
            "Not compared, because one side has no figures: {} ({reason}).",
            count(skipped.len(), "entry")
        )
    });
    lists.into_iter().flatten().chain(skipped).collect()
}

fn contended(run: &BenchRun) -> Option<String> {
    let why = &run.conditions.contended;
    if why.is_empty() {
        return None;
    }
    let runs = run
        .comparison
        .as_ref()
        .map_or(1, |comparison| comparison.contended_runs);
    let often = if runs > 1 {
        format!(", {runs} runs in a row")
    } else {
        String::new()
    };
    let to_do = if runs >= ALWAYS {
        " What to do: run when nothing else does, or give the benchmarks cores of their own \
         (`taskset`, a cpuset), end other processes on the \
         GPU, and raise the budget; until then, measured times that change are unsure."
    } else if run
        .comparison
        .as_ref()
        .is_some_and(|comparison| matches!(comparison.basis, Basis::SideBySide { .. }))
    {
        " Both builds were affected, so intervals are wider, and measured times that changed are \
         unsure."
    } else {
        ""
    };
    Some(format!("Contended{often}: {}.{to_do}", why.join("; ")))
}

pub(crate) fn in_figures(change: &Change) -> String {
    let Some(figures) = &change.figures else {
        return change
            .reason
            .clone()
            .unwrap_or_else(|| "see the report".to_owned());
    };
    let quantity = change.entry.quantity;
    let (base, new) = (
        words::amount(quantity, figures.base),
        words::amount(quantity, figures.new),
    );
    let since = since(change);
    let since = if since.is_empty() {
        String::new()
    } else {
        format!(", {since}")
    };
    format!(
        "{base} → {new}, {} ({}){since}",
        words::change(change),
        words::short(quantity)
    )
}

pub fn comparison(run: &BenchRun) -> String {
    let mut lines = vec![judgement(run)];
    lines.extend(circumstances(run));
    for change in run.comparison.iter().flat_map(by_importance) {
        let EntryName {
            suite, case, arm, ..
        } = &change.entry;
        lines.push(format!(
            "  {}: {suite}: {case} by {arm}: {}",
            word(change.verdict),
            in_figures(change)
        ));
    }
    lines.join("\n") + "\n"
}
