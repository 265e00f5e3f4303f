use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::device::Clock;
use harness_allocator::units::{Bytes, Nanos};
use harness_base::statistics::median;
use harness_record::{Records, RunRecord, Verdict};
use serde::Serialize;

use super::terminal::{Style, table};
use super::words::{self, Grid, NOTHING};
use super::{ArmGroup, Report};

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunsComparison {
    pub text: String,
    /// `true` if an arm fails that passed before.
    pub is_worse: bool,
}

/// Identifies an arm in both sessions: scenario, device and allocator.
type Key = (String, String, String);

/// Compares arm by arm. Simulated figures are exact, so every difference counts. Measured times are
/// medians, and their differences are not tested for significance.
pub fn compare(base: &Records, new: &Records) -> RunsComparison {
    let (base, new) = (Report::new(base), Report::new(new));
    let (before, after) = (arms(&base), arms(&new));
    let mut grid = Grid::new(
        "lllr",
        ["scenario", "allocator", "figure", "before", "now"],
        [],
    );
    let mut is_worse = false;
    for key in before.keys().chain(after.keys()).collect::<BTreeSet<_>>() {
        let figures = |arm: Option<&&ArmGroup<'_>>| {
            arm.map_or_else(|| FIGURES.map(|_| NOTHING.to_owned()), |arm| figures(arm))
        };
        let (was, is) = (before.get(key), after.get(key));
        is_worse |= was.is_some_and(|arm| arm.counts.failed == 0)
            && is.is_some_and(|arm| arm.counts.failed > 0);
        for (figure, (was, is)) in FIGURES
            .into_iter()
            .zip(figures(was).into_iter().zip(figures(is)))
        {
            if was != is {
                grid.rows.push(vec![
                    key.0.clone(),
                    key.2.clone(),
                    figure.to_owned(),
                    was,
                    is,
                ]);
            }
        }
    }
    let arms = before.keys().filter(|key| after.contains_key(*key)).count();
    let text = if grid.rows.is_empty() {
        format!("No difference in {}.\n", words::count(arms, "arm"))
    } else {
        format!(
            "{}\n{} compared; equal figures are omitted.\n",
            table(&grid, None, Style::Plain),
            words::count(arms, "arm")
        )
    };
    RunsComparison { text, is_worse }
}

fn arms<'r>(report: &'r Report<'_>) -> BTreeMap<Key, &'r ArmGroup<'r>> {
    report
        .places()
        .map(|place| {
            let key = (
                place.scenario.info.name.clone(),
                place.device.info.name.clone(),
                place.arm.allocator.to_owned(),
            );
            (key, place.arm)
        })
        .collect()
}

const FIGURES: [&str; 6] = [
    "verdict",
    "peak reserved",
    "OOMs",
    "allocator retries",
    "whole scenario",
    "lost to retry",
];

fn figures(arm: &ArmGroup<'_>) -> [String; 6] {
    let run = arm.shown();
    let clock = if run.device.clock == Clock::Simulated {
        " (model)"
    } else {
        ""
    };
    let time = |time: fn(&RunRecord) -> Nanos| {
        let median = median(&mut arm.passed().map(|run| time(run).get()).collect::<Vec<_>>());
        words::or_nothing(median.map(|median| format!("{}{clock}", Nanos(median))))
    };
    let peak = run.stats.reserved_bytes.all.peak;
    let is_done = !matches!(run.verdict, Verdict::Skipped { .. });
    let if_done = |figure: String| if is_done { figure } else { NOTHING.to_owned() };
    [
        words::arm_verdicts(arm),
        if_done(words::size(Bytes(peak))),
        if_done(run.stats.num_ooms.to_string()),
        if_done(run.stats.num_alloc_retries.to_string()),
        time(|run| run.timings.scenario),
        time(|run| run.timings.lost_to_retry),
    ]
}

#[cfg(test)]
mod tests;
