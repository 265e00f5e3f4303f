//! Helpers for the reports that the project keeps: a report for readers, and the figures of every
//! run, which do not depend on wording.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::{fmt::Write as _, fs, path::Path};

use harness_record::{Outcome, Records, Rule, RunRecord, Verdict, causes};

/// Returns whether the kept files are to be replaced.
pub(crate) fn updates() -> bool {
    std::env::var_os("UPDATE").is_some()
}

/// The Markdown and SVG files of a folder, by name.
pub(crate) fn files(folder: &Path) -> BTreeMap<String, String> {
    let paths = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let shown = paths.filter(|path| {
        path.extension()
            .is_some_and(|ending| ending == "md" || ending == "svg")
    });
    shown
        .map(|path| {
            (
                path.file_name().unwrap().to_string_lossy().into_owned(),
                fs::read_to_string(&path).unwrap(),
            )
        })
        .collect()
}

/// Replaces the Markdown and SVG files of `kept` with those of `made`.
pub(crate) fn replace(made: &Path, kept: &Path) {
    drop(fs::remove_dir_all(kept));
    fs::create_dir_all(kept).unwrap();
    files(made)
        .iter()
        .for_each(|(name, content)| fs::write(kept.join(name), content).unwrap());
}

/// Compares the figures of runs with the kept ones in `kept`, or replaces them if `UPDATE` is set.
/// A sample is compared only.
pub(crate) fn compare_figures(records: &Records, kept: &Path, is_sample: bool) {
    let text: String = records.runs.iter().map(figures).collect();
    if updates() && !is_sample {
        fs::write(kept, &text).unwrap();
    }
    let run = |line: &str| line.split(": ").next().map(str::to_owned);
    let runs: BTreeSet<Option<String>> = text.lines().map(run).collect();
    let mut earlier = fs::read_to_string(kept).unwrap();
    if is_sample {
        let of_runs = earlier.lines().filter(|line| runs.contains(&run(line)));
        earlier = of_runs.collect::<Vec<_>>().join("\n");
    }
    let differences: Vec<String> = diff(&earlier, &text);
    assert!(
        differences.is_empty(),
        "{} differs; if this is intended, run with UPDATE=1:\n{}",
        kept.display(),
        differences.join("\n")
    );
}

fn diff(earlier: &str, now: &str) -> Vec<String> {
    let missing = |mark: char, these: &str, others: &str| {
        let others: Vec<&str> = others.lines().collect();
        these
            .lines()
            .filter(|line| !others.contains(line))
            .map(|line| format!("{mark} {line}"))
            .collect::<Vec<_>>()
    };
    [missing('-', earlier, now), missing('+', now, earlier)].concat()
}

/// One line for the run, then one line for each out-of-memory error and each figure of its claim.
fn figures(run: &RunRecord) -> String {
    let name = format!("{} {}", run.scenario.path, run.allocator);
    let steps = run.steps.len() as u64 + run.unrecorded_steps;
    let mut text = format!("{name}: {}, {steps} steps", verdict(&run.verdict));
    if let Some(last) = run.steps.last().map(|step| step.accounts) {
        let (allocated, reserved) = (last.peak_allocated.get(), last.peak_reserved.get());
        write!(
            text,
            ", peak {allocated} allocated, {reserved} reserved, {} retries, {} OOMs",
            last.retries, last.ooms
        )
        .unwrap();
    }
    writeln!(text, ", {} ns", run.timings.scenario.get()).unwrap();
    for step in run
        .steps
        .iter()
        .filter(|step| step.outcome == Outcome::OutOfMemory)
    {
        let causes: Vec<&str> = step
            .failed_request
            .iter()
            .flat_map(causes)
            .map(|cause| cause.kind().name())
            .collect();
        writeln!(
            text,
            "{name}: line {} runs out of memory: {}",
            step.line,
            causes.join(", ")
        )
        .unwrap();
    }
    for (number, figure) in run.figures.iter().enumerate() {
        let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "none".to_owned());
        let (pytorch, harness) = (value(&figure.pytorch), value(&figure.harness));
        writeln!(
            text,
            "{name}: figure {}: {pytorch} by PyTorch, {harness} by the harness",
            number + 1
        )
        .unwrap();
    }
    text
}

fn verdict(verdict: &Verdict) -> String {
    let rules = |first: &Rule, count: usize| format!("{first} and {count} more");
    match verdict {
        Verdict::Passed => "passed".to_owned(),
        Verdict::Failed { first, rest } => format!("failed by {}", rules(&first.rule, rest.len())),
        Verdict::FailedAsExpected { first, rest, .. } => {
            format!("failed as expected by {}", rules(&first.rule, rest.len()))
        }
        Verdict::Skipped { .. } => "skipped".to_owned(),
        Verdict::Contended { .. } => "contended".to_owned(),
        Verdict::Interrupted => "interrupted".to_owned(),
    }
}
