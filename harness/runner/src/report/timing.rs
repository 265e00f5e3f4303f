//! Timing comparisons: one table for each scenario on each device, so that measured and model times never meet.

use harness_allocator::device::Clock;
use harness_allocator::units::Nanos;

use super::statistics::{self, Summary};
use super::words::{self, Align, Grid, NOTHING};
use super::{Arm, Bench, DeviceGroup};
use crate::record::{RunRecord, Samples};

/// The allocator that the others are compared with: it asks the driver every time.
pub const BASELINE: &str = "direct";

/// The times of one bench.
#[derive(Clone, Debug)]
pub struct Timing<'a> {
    /// Whose clock all of them come from.
    pub clock: Clock,
    /// Whether [`BASELINE`] has runs that passed.
    pub has_baseline: bool,
    /// By allocator, in the order of the arms; only those with runs that passed.
    pub rows: Vec<Row<'a>>,
    /// How many runs did not pass and are left out, for their times end early.
    pub left_out: usize,
}

/// The times of one arm.
#[derive(Clone, Debug)]
pub struct Row<'a> {
    /// The allocator.
    pub allocator: &'a str,
    /// How many runs are summarised.
    pub runs: usize,
    /// Successful `allocate` calls of all runs together.
    pub allocate: Summary,
    /// `free` calls of all runs together.
    pub free: Summary,
    /// `empty_cache` calls of all runs together.
    pub empty_cache: Summary,
    /// Whole runs.
    pub scenario: Summary,
    /// Time lost to retry, a run.
    pub lost_to_retry: Summary,
    /// The least and the most calls of the driver's malloc and free in a run.
    pub device_calls: (u64, u64),
    /// Median allocate as a multiple of the baseline's.
    pub allocate_ratio: Option<f64>,
    /// Median of whole runs as a multiple of the baseline's.
    pub scenario_ratio: Option<f64>,
}

impl<'a> Timing<'a> {
    /// Summarises the runs of a bench that passed; `None` where none did.
    #[must_use]
    pub fn new(bench: &Bench<'a>, device: &DeviceGroup<'a>) -> Option<Self> {
        let mut rows: Vec<Row<'a>> = bench.arms.iter().filter_map(Row::new).collect();
        let baseline = rows.iter().find(|row| row.allocator == BASELINE).map(|row| (row.allocate.median, row.scenario.median));
        if let Some((allocate, scenario)) = baseline {
            for row in &mut rows {
                row.allocate_ratio = ratio(row.allocate.median, allocate);
                row.scenario_ratio = ratio(row.scenario.median, scenario);
            }
        }
        let left_out = bench.arms.iter().map(|arm| arm.counts.failed + arm.counts.interrupted).sum();
        (!rows.is_empty()).then_some(Self { clock: device.info.clock, has_baseline: baseline.is_some(), rows, left_out })
    }

    /// What stands above the table.
    #[must_use]
    pub const fn title(&self) -> &'static str {
        match self.clock {
            Clock::Measured => "Measured times",
            Clock::Simulated => "Model times (simulated clock, not measured)",
        }
    }

    /// The table. Cells read `median / p99 / MAD (n)`.
    pub(super) fn grid(&self) -> Grid {
        let operations = ["allocate", "free", "empty_cache"].map(|operation| format!("{operation}: median / p99 / MAD (n)"));
        let rest =
            ["whole scenario: median / MAD", "device calls (malloc + free)", "lost to retry", "allocate ÷ direct", "scenario ÷ direct"];
        let figures = operations.into_iter().chain(rest.map(str::to_owned)).map(|head| (head, Align::Right));
        let mut grid = Grid::new([("allocator".to_owned(), Align::Left), ("runs".to_owned(), Align::Right)].into_iter().chain(figures));
        grid.rows = self.rows.iter().map(Row::cells).collect();
        grid
    }

    /// The table for a terminal: medians, and the tail of `allocate`.
    pub(super) fn brief(&self) -> Grid {
        let heads =
            ["runs", "allocate", "p99", "free", "scenario", "device calls", "lost to retry", "allocate ÷ direct", "scenario ÷ direct"];
        let figures = heads.into_iter().map(|head| (head, Align::Right));
        let mut grid = Grid::new(std::iter::once(("allocator", Align::Left)).chain(figures));
        grid.rows = self.rows.iter().map(Row::brief).collect();
        grid
    }

    /// Sentences that the table needs to be read rightly.
    #[must_use]
    pub fn footnotes(&self) -> Vec<String> {
        let operations = || self.rows.iter().flat_map(|row| [&row.allocate, &row.free, &row.empty_cache]);
        let mut notes = Vec::new();
        if operations().any(|summary| summary.max.is_some() && summary.p99.is_none()) {
            notes.push(format!(
                "Where an operation has fewer than {} samples, no 99th percentile is told; `max` is the largest sample instead.",
                statistics::LEAST_FOR_P99
            ));
        }
        if self.clock == Clock::Simulated && operations().any(|summary| summary.median == Some(Nanos::ZERO)) {
            notes.push(
                "A model time of 0 ns is an operation without a device call, for example an allocation served from the cache: the model charges device calls only, not the allocator's work on the host."
                    .to_owned(),
            );
        }
        if operations().any(|summary| summary.count > summary.kept as u64) {
            notes.push("Where n reads `a of b`, the figures come from a random sample of a among b operations.".to_owned());
        }
        if !self.has_baseline {
            notes.push(format!("No run of `{BASELINE}` passed here, so there is nothing to compare with."));
        }
        match self.left_out {
            0 => {}
            1 => notes.push("One run that did not end well is left out, for its times end early.".to_owned()),
            more => notes.push(format!("{more} runs that did not end well are left out, for their times end early.")),
        }
        notes
    }
}

impl<'a> Row<'a> {
    fn new(arm: &Arm<'a>) -> Option<Self> {
        let runs: Vec<&RunRecord> = arm.passed().collect();
        let calls = || runs.iter().map(|run| run.calls.memory_calls());
        let device_calls = (calls().min()?, calls().max()?);
        Some(Self {
            allocator: arm.allocator,
            runs: runs.len(),
            allocate: operation(&runs, |run| &run.timings.allocate),
            free: operation(&runs, |run| &run.timings.free),
            empty_cache: operation(&runs, |run| &run.timings.empty_cache),
            scenario: whole(&runs, |run| run.timings.scenario),
            lost_to_retry: whole(&runs, |run| run.timings.lost_to_retry),
            device_calls,
            allocate_ratio: None,
            scenario_ratio: None,
        })
    }

    fn cells(&self) -> Vec<String> {
        let scenario = match (self.scenario.median, self.scenario.mad) {
            (Some(median), Some(mad)) => format!("{median} / {mad}"),
            (median, _) => words::or_nothing(median),
        };
        vec![
            self.allocator.to_owned(),
            self.runs.to_string(),
            summary(&self.allocate),
            summary(&self.free),
            summary(&self.empty_cache),
            scenario,
            self.calls(),
            words::or_nothing(self.lost_to_retry.median),
            words::multiple(self.allocate_ratio),
            words::multiple(self.scenario_ratio),
        ]
    }

    fn brief(&self) -> Vec<String> {
        vec![
            self.allocator.to_owned(),
            self.runs.to_string(),
            words::or_nothing(self.allocate.median),
            tail(&self.allocate),
            words::or_nothing(self.free.median),
            words::or_nothing(self.scenario.median),
            self.calls(),
            words::or_nothing(self.lost_to_retry.median),
            words::multiple(self.allocate_ratio),
            words::multiple(self.scenario_ratio),
        ]
    }

    fn calls(&self) -> String {
        let (least, most) = self.device_calls;
        if least == most { least.to_string() } else { format!("{least} to {most}") }
    }
}

fn operation(runs: &[&RunRecord], samples: impl Fn(&RunRecord) -> &Samples) -> Summary {
    let count = runs.iter().map(|run| samples(run).count).sum();
    Summary::new(count, runs.iter().flat_map(|run| &samples(run).kept).map(|time| time.get()).collect())
}

fn whole(runs: &[&RunRecord], time: impl Fn(&RunRecord) -> Nanos) -> Summary {
    Summary::new(runs.len() as u64, runs.iter().map(|run| time(run).get()).collect())
}

fn ratio(value: Option<Nanos>, base: Option<Nanos>) -> Option<f64> {
    statistics::ratio(value?, base?)
}

fn summary(summary: &Summary) -> String {
    let Some(median) = summary.median else { return NOTHING.to_owned() };
    let sampled = if summary.count > summary.kept as u64 { format!(" of {}", summary.count) } else { String::new() };
    format!("{median} / {} / {} ({}{sampled})", tail(summary), words::or_nothing(summary.mad), summary.kept)
}

/// The 99th percentile, or the largest sample where there are too few.
fn tail(summary: &Summary) -> String {
    match (summary.p99, summary.max) {
        (Some(p99), _) => p99.to_string(),
        (None, Some(max)) => format!("max {max}"),
        (None, None) => NOTHING.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Records;
    use crate::report::{Report, examples};

    #[test]
    fn model_and_measured_times_of_one_scenario_are_summarised_apart() {
        let records = examples::night();
        let report = Report::new(&records);
        let scenario = report.scenarios.iter().find(|scenario| scenario.info.name == "oom_retry").expect("it is in the example");
        let timings: Vec<(Clock, usize)> = scenario
            .benches
            .iter()
            .filter_map(|bench| Timing::new(bench, &report.devices[bench.device]))
            .map(|timing| (timing.clock, timing.rows.len()))
            .collect();
        assert_eq!(timings, [(Clock::Simulated, 2), (Clock::Measured, 2)]);
        for run in &records.runs {
            let own: Vec<u64> = run.timings.allocate.kept.iter().map(|time| time.get()).collect();
            assert_eq!(own.len() as u64, run.timings.allocate.count, "the examples keep every sample");
        }
    }

    #[test]
    fn runs_that_did_not_pass_are_left_out_and_counted() {
        let mut records = examples::night();
        records.runs.retain(|run| run.scenario.name == "cross_stream_reuse");
        let report = Report::new(&records);
        let timing = Timing::new(&report.scenarios[0].benches[0], &report.devices[0]).expect("one run passed");
        assert_eq!((timing.rows.len(), timing.left_out), (1, 2));
    }

    #[test]
    fn nothing_is_compared_with_a_baseline_that_took_no_time() {
        let mut records = Records { runs: vec![examples::oom_retry("caching", 0), examples::oom_retry("direct", 0)], ..examples::night() };
        let direct = &mut records.runs[1].timings;
        direct.allocate.kept.iter_mut().for_each(|time| *time = Nanos::ZERO);
        direct.scenario = Nanos::ZERO;
        let report = Report::new(&records);
        let timing = Timing::new(&report.scenarios[0].benches[0], &report.devices[0]).expect("both runs passed");
        assert!(timing.has_baseline);
        for row in timing.grid().rows {
            assert_eq!(row[8..], [NOTHING, NOTHING]);
        }
    }
}
