//! Time comparisons. Each table covers one scenario on one device, so measured and simulated times
//! are never mixed.

use harness_allocator::{device::Clock, units::Nanos};

use super::words::{self, Align, Grid, NOTHING};
use super::{ArmGroup, DeviceGroup, ScenarioOnDevice, VerdictCounts};
use harness_base::statistics::{self, Summary};
use harness_record::{RunRecord, Samples};

pub(super) const BASELINE: &str = "direct";

#[derive(Clone, Debug)]
pub(super) struct Timing<'a> {
    pub(super) clock: Clock,
    /// Rows by allocator, in the order of the arms. Arms without passed runs are omitted.
    pub(super) rows: Vec<Row<'a>>,
    /// Notes on this table. The report's legend explains the columns.
    pub(super) footnotes: Vec<String>,
}

#[derive(Clone, Debug)]
pub(super) struct Row<'a> {
    pub(super) allocator: &'a str,
    pub(super) runs: usize,
    pub(super) allocate: Summary,
    pub(super) free: Summary,
    pub(super) empty_cache: Summary,
    /// From the start of a run's first step to the end of its last.
    pub(super) scenario: Summary,
    pub(super) lost_to_retry: Summary,
    /// Fewest and most driver calls for malloc and free in a run. `None` if other processes made
    /// some, which are not counted.
    pub(super) device_calls: Option<(u64, u64)>,
    pub(super) allocate_ratio: Option<f64>,
    pub(super) scenario_ratio: Option<f64>,
}

impl<'a> Timing<'a> {
    /// Summarizes the passed runs. `None` if none of them has times or device calls.
    pub(super) fn new(on_device: &ScenarioOnDevice<'a>, device: &DeviceGroup<'a>) -> Option<Self> {
        let mut rows: Vec<Row<'a>> = on_device.arms.iter().filter_map(Row::new).collect();
        let base = rows
            .iter()
            .find(|row| row.allocator == BASELINE)
            .map(|row| (row.allocate.median, row.scenario.median));
        if let Some((allocate, scenario)) = base {
            for row in &mut rows {
                row.allocate_ratio = ratio(row.allocate.median, allocate);
                row.scenario_ratio = ratio(row.scenario.median, scenario);
            }
        }
        let has_failed_baseline =
            base.is_none() && on_device.arms.iter().any(|arm| arm.allocator == BASELINE);
        let no_baseline = has_failed_baseline
            .then(|| format!("No run of `{BASELINE}` passed, so there is no baseline."));
        let excluded = |number: fn(VerdictCounts) -> usize, why: &str| {
            let runs: usize = on_device.arms.iter().map(|arm| number(arm.counts)).sum();
            (runs > 0).then(|| format!("Times exclude {} {why}.", words::count(runs, "run")))
        };
        let unfinished = excluded(
            |counts| counts.failed + counts.interrupted,
            "that failed or stopped early",
        );
        let contended = excluded(
            |counts| counts.contended,
            "during which other processes used the device",
        );
        let footnotes = [no_baseline, unfinished, contended]
            .into_iter()
            .flatten()
            .collect();
        let is_known = |row: &Row<'_>| row.scenario.count > 0 || row.device_calls.is_some();
        rows.iter().any(is_known).then_some(Self {
            clock: device.info.clock,
            rows,
            footnotes,
        })
    }

    pub(super) fn grid(&self) -> Grid {
        let rows: Vec<&Row<'_>> = self.rows.iter().collect();
        columns(
            Grid::new(
                "l",
                ["allocator"],
                rows.iter().map(|row| vec![row.allocator.to_owned()]),
            ),
            &rows,
            FULL,
        )
    }

    pub(super) fn overview(by_device: &[(&str, Self)]) -> Grid {
        let rows: Vec<(&str, &Row<'_>)> = by_device
            .iter()
            .flat_map(|(name, timing)| timing.rows.iter().map(|row| (*name, row)))
            .collect();
        let names = rows
            .iter()
            .map(|(name, row)| vec![(*name).to_owned(), row.allocator.to_owned()]);
        let grid = Grid::new("l", ["scenario", "allocator"], names);
        columns(
            grid,
            &rows.iter().map(|(_, row)| *row).collect::<Vec<_>>(),
            BRIEF,
        )
    }
}

pub(super) const fn title(clock: Clock) -> &'static str {
    match clock {
        Clock::Measured => "Measured times",
        Clock::Simulated => "Model times (simulated clock, not measured)",
    }
}

/// The head of a column with the medians of [`whole_scenario`].
pub(super) const fn head(clock: Clock) -> &'static str {
    match clock {
        Clock::Measured => "time",
        Clock::Simulated => "model time",
    }
}

/// The median time of the passed runs, from the start of the first step to the end of the last.
pub(super) fn whole_scenario(arm: &ArmGroup<'_>) -> Option<Nanos> {
    Row::new(arm)?.scenario.median
}

/// A column of figures. It is omitted if no row needs it.
struct Column {
    head: &'static str,
    cell: fn(&Row<'_>) -> String,
    is_shown: fn(&Row<'_>) -> bool,
}

const RUNS: Column = Column {
    head: "runs",
    cell: |row| row.runs.to_string(),
    is_shown: |_| true,
};
const CALLS: Column = Column {
    head: "device calls",
    cell: |row| row.calls(),
    is_shown: |row| row.device_calls.is_some(),
};
const LOST: Column = Column {
    head: "lost to retry",
    cell: |row| words::or_nothing(row.lost_to_retry.median),
    is_shown: |row| row.lost_to_retry.max > Some(Nanos::ZERO),
};
const ALLOCATE_RATIO: Column = Column {
    head: "allocate ÷ direct",
    cell: |row| words::multiple(row.allocate_ratio),
    is_shown: |row| row.allocate_ratio.is_some(),
};
const SCENARIO_RATIO: Column = Column {
    head: "scenario ÷ direct",
    cell: |row| words::multiple(row.scenario_ratio),
    is_shown: |row| row.scenario_ratio.is_some(),
};

/// Columns of a report page. Cells of operations contain `median / p99 / MAD (n)`.
const FULL: &[Column] = &[
    RUNS,
    Column {
        head: "allocate: median / p99 / MAD (n)",
        cell: |row| summary(&row.allocate),
        is_shown: |row| row.allocate.count > 0,
    },
    Column {
        head: "free: median / p99 / MAD (n)",
        cell: |row| summary(&row.free),
        is_shown: |row| row.free.count > 0,
    },
    Column {
        head: "empty_cache: median / p99 / MAD (n)",
        cell: |row| summary(&row.empty_cache),
        is_shown: |row| row.empty_cache.count > 0,
    },
    Column {
        head: "whole scenario: median / MAD",
        cell: |row| row.whole_scenario(),
        is_shown: |_| true,
    },
    Column {
        head: "device calls (malloc + free)",
        ..CALLS
    },
    LOST,
    ALLOCATE_RATIO,
    SCENARIO_RATIO,
];

const BRIEF: &[Column] = &[
    Column {
        is_shown: |row| row.runs > 1,
        ..RUNS
    },
    Column {
        head: "allocate",
        cell: |row| words::or_nothing(row.allocate.median),
        is_shown: |row| row.allocate.median > Some(Nanos::ZERO),
    },
    Column {
        head: "free",
        cell: |row| words::or_nothing(row.free.median),
        is_shown: |row| row.free.median > Some(Nanos::ZERO),
    },
    Column {
        head: "whole scenario",
        cell: |row| words::or_nothing(row.scenario.median),
        is_shown: |_| true,
    },
    CALLS,
    LOST,
    ALLOCATE_RATIO,
    SCENARIO_RATIO,
];

/// Adds the columns that at least one row needs to a table with the row names.
fn columns(mut grid: Grid, rows: &[&Row<'_>], columns: &[Column]) -> Grid {
    for column in columns
        .iter()
        .filter(|column| rows.iter().any(|row| (column.is_shown)(row)))
    {
        grid.columns.push((column.head.to_owned(), Align::Right));
        for (cells, row) in grid.rows.iter_mut().zip(rows) {
            cells.push((column.cell)(row));
        }
    }
    grid
}

impl<'a> Row<'a> {
    fn new(arm: &ArmGroup<'a>) -> Option<Self> {
        let runs: Vec<&RunRecord> = arm.passed().collect();
        let calls = || {
            let of_run =
                |run: &&RunRecord| run.processes.is_none().then(|| run.calls.memory_calls());
            runs.iter().map(of_run)
        };
        // `None` is the least, so one unknown number makes both unknown.
        let device_calls = calls().min()?.zip(calls().max()?);
        // Runs with programs or processes are not timed; their zeros are not durations.
        let timed: Vec<&RunRecord> = runs
            .iter()
            .copied()
            .filter(|run| run.timed || run.timings.scenario > Nanos::ZERO)
            .collect();
        Some(Self {
            allocator: arm.allocator,
            runs: runs.len(),
            allocate: operation(&runs, |run| &run.timings.allocate),
            free: operation(&runs, |run| &run.timings.free),
            empty_cache: operation(&runs, |run| &run.timings.empty_cache),
            scenario: whole(&timed, |run| run.timings.scenario),
            lost_to_retry: whole(&timed, |run| run.timings.lost_to_retry),
            device_calls,
            allocate_ratio: None,
            scenario_ratio: None,
        })
    }

    fn whole_scenario(&self) -> String {
        let mad = self
            .scenario
            .mad
            .map_or_else(String::new, |mad| format!(" / {mad}"));
        words::or_nothing(self.scenario.median) + &mad
    }

    fn calls(&self) -> String {
        let Some((least, most)) = self.device_calls else {
            return NOTHING.to_owned();
        };
        if least == most {
            least.to_string()
        } else {
            format!("{least} to {most}")
        }
    }
}

fn operation(runs: &[&RunRecord], samples: impl Fn(&RunRecord) -> &Samples) -> Summary {
    let count = runs.iter().map(|run| samples(run).count).sum();
    Summary::new(
        count,
        runs.iter()
            .flat_map(|run| &samples(run).kept)
            .map(|time| time.get())
            .collect(),
    )
}

fn whole(runs: &[&RunRecord], time: impl Fn(&RunRecord) -> Nanos) -> Summary {
    Summary::new(
        runs.len() as u64,
        runs.iter().map(|run| time(run).get()).collect(),
    )
}

fn ratio(value: Option<Nanos>, base: Option<Nanos>) -> Option<f64> {
    statistics::ratio(value?, base?)
}

fn summary(summary: &Summary) -> String {
    let Some(median) = summary.median else {
        return NOTHING.to_owned();
    };
    let sampled = if summary.count > summary.kept as u64 {
        format!(" of {}", summary.count)
    } else {
        String::new()
    };
    // With too few samples, the maximum replaces the 99th percentile.
    let max = || summary.max.map(|max| format!("max {max}"));
    let tail = words::or_nothing(summary.p99.map(|p99| p99.to_string()).or_else(max));
    format!(
        "{median} / {tail} / {} ({}{sampled})",
        words::or_nothing(summary.mad),
        summary.kept
    )
}

#[cfg(test)]
mod tests;
