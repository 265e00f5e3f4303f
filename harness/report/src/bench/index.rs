//! The index of all benchmark runs: the latest verdict and a table of runs per device.

use harness_bench::record::{BenchRun, Counts, Verdict};
use harness_bench::store::{INDEX, REPORT};

use super::super::escape::{code, prose};
use super::super::page::Page;
use super::super::words::{Grid, NOTHING, count, or_nothing};
use super::{verdict, words};

const LISTED: usize = 10;

type Place<'a> = (&'a str, &'a BenchRun);

/// Renders [`INDEX`]. Runs may have any order and any machine.
pub fn index(runs: &[(String, BenchRun)]) -> Vec<(String, String)> {
    let mut page = Page::default();
    page.block("# Benchmark runs");
    page.block(
        "Each run is a folder in `nightly`, with a report to read and the record that it is made \
         from. Where `accepted.json` names an accepted \
         build, runs are measured side by side with it; `harness report accept` writes that file, \
         which is to be committed. This page is made by \
         `harness bench` and `harness report index`: do not edit it.",
    );
    if runs.is_empty() {
        page.block("No run yet: `harness bench` adds one.");
    }
    let mut ordered: Vec<Place<'_>> = runs
        .iter()
        .map(|(folder, run)| (folder.as_str(), run))
        .collect();
    // Real devices first, each with its latest run first.
    let key = |run: &BenchRun| (run.machine.cost_model.clone(), run.machine.device.clone());
    ordered.sort_by(|(folder_a, a), (folder_b, b)| {
        key(a)
            .cmp(&key(b))
            .then_with(|| (&b.started, folder_b).cmp(&(&a.started, folder_a)))
    });
    ordered
        .chunk_by(|a, b| key(a.1) == key(b.1))
        .for_each(|of_device| section(&mut page, of_device));
    vec![(INDEX.to_owned(), page.ended().text)]
}

fn section(page: &mut Page, runs: &[Place<'_>]) {
    let (folder, latest) = runs[0];
    page.block(format!("## {}", prose(&words::device(&latest.machine))));
    page.block(format!(
        "**{}** [The run of {}]({}).",
        prose(&verdict(latest)),
        words::moment(&latest.started),
        link(folder)
    ));
    list(page, &runs[..runs.len().min(LISTED)]);
    if runs.len() > LISTED {
        page.fold(
            &format!("{} before", count(runs.len() - LISTED, "run")),
            |page| list(page, &runs[LISTED..]),
        );
    }
}

fn list(page: &mut Page, runs: &[Place<'_>]) {
    let heads = [
        "run",
        "commit",
        "accepted",
        "broken",
        "worse",
        "better",
        "unsure",
        "failed",
        "entries",
        "contended",
    ];
    page.table(&Grid::new(
        "lllrrrrrrl",
        heads,
        runs.iter().map(|(folder, run)| cells(folder, run)),
    ));
}

fn cells(folder: &str, run: &BenchRun) -> Vec<String> {
    let counts = run
        .comparison
        .as_ref()
        .map(|comparison| Counts::of(&comparison.changes));
    let number = |verdict| or_nothing(counts.as_ref().map(|counts| counts.with(verdict)));
    let commit =
        |commit: Option<&String>| or_nothing(commit.map(|commit| code(&words::shortened(commit))));
    vec![
        format!("[{}]({})", words::moment(&run.started), link(folder)),
        commit(run.build.commit.as_ref()),
        if run.accepted.missing.is_some() {
            NOTHING.to_owned()
        } else {
            commit(run.accepted.commit.as_ref())
        },
        number(Verdict::Broken),
        number(Verdict::Worse),
        number(Verdict::Better),
        number(Verdict::Unsure),
        run.failed().to_string(),
        run.entries().count().to_string(),
        if run.conditions.contended.is_empty() {
            "no".to_owned()
        } else {
            prose(&run.conditions.contended.join("; "))
        },
    ]
}

fn link(folder: &str) -> String {
    let folder = folder.trim_end_matches('/');
    let path = if folder.is_empty() {
        REPORT.to_owned()
    } else {
        format!("{folder}/{REPORT}")
    };
    path.chars()
        .map(|c| {
            if c.is_whitespace() || "()<>".contains(c) {
                format!("%{:02X}", u32::from(c))
            } else {
                c.to_string()
            }
        })
        .collect()
}
