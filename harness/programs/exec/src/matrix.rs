//! A matrix of runs as a table: a [`MatrixRow`] is one run with its figures.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fmt;

use harness_base::shard::Shard;
use serde::{Deserialize, Serialize};

use crate::doubts::Doubt;
use crate::hang;
use crate::process::End;
use crate::record::Record;
use crate::trials::observed::{Observed, TrialEnd};

/// The version of a row in JSON. A field that is removed or renamed, or that gets another meaning
/// or unit, raises it. A new field does not.
pub const ROW_VERSION: u32 = 1;

/// The program of a row, and its value of each axis. No two rows of a matrix have the same.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MatrixCell {
    pub program: String,
    pub values: BTreeMap<String, String>,
}

impl fmt::Display for MatrixCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.program)?;
        self.values
            .iter()
            .try_for_each(|(name, value)| write!(f, " {name}={value}"))
    }
}

/// A run with its figures, as a line of the file of rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MatrixRow {
    pub version: u32,
    #[serde(flatten)]
    pub cell: MatrixCell,
    /// A hash of all that decides the run: its command, options, files and variables, torch, and
    /// the version of harness.
    pub run: String,
    #[serde(flatten)]
    pub figures: RunFigures,
}

/// The figures of a run. `None` is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunFigures {
    /// 128 + n if signal n ended the program. `None` if it did not start or exceeded its time
    /// limit.
    pub exit_code: Option<u8>,
    /// Why the exit code is not 0, if that is known.
    pub failure: Option<String>,
    pub peak_allocated: Option<u64>,
    pub peak_reserved: Option<u64>,
    pub num_ooms: Option<u64>,
    pub num_alloc_retries: Option<u64>,
    /// The time of the run, or of both if it ran again. `None` if the program did not start.
    pub took_ms: Option<u64>,
    /// The version of torch, empty without it.
    pub torch: String,
    /// Whether the program ran with `--values cpu` because it had ended after it read values that
    /// nothing computed.
    pub with_cpu_values: bool,
    /// Why the figures may differ from those on a GPU.
    pub doubts: Vec<Doubt>,
}

impl RunFigures {
    pub fn of(record: &Record, observed: &Observed) -> Self {
        let (exit_code, failure) = match observed.ending {
            TrialEnd::Hang => (None, Some("it exceeded its time limit".to_owned())),
            TrialEnd::By(end) => (Some(end.exit_code()), failure(end, observed)),
        };
        // The process that did not report may have had larger ones.
        let reported = |figure: Option<u64>| figure.filter(|_| observed.unreported.is_none());
        let peak_allocated = observed.peak_allocated.map(|peak| peak.0);
        Self {
            exit_code,
            failure,
            peak_allocated: reported(peak_allocated),
            peak_reserved: Some(observed.peak_reserved.0).filter(|_| record.outlived.is_empty()),
            num_ooms: reported(observed.ooms),
            num_alloc_retries: reported(observed.retries),
            doubts: observed.doubts.clone(),
            ..Self::default()
        }
    }

    /// A run that has no figures, for example because its program cannot start.
    pub fn without_run(why: String) -> Self {
        Self {
            failure: Some(why),
            ..Self::default()
        }
    }

    pub fn is_success(&self) -> bool {
        self.exit_code == Some(0)
    }
}

fn failure(end: End, observed: &Observed) -> Option<String> {
    match end {
        End::Code(0) => None,
        End::Signal(signal) => Some(format!("signal {signal}")),
        End::Code(hang::EXIT_CODE) if observed.hang.is_some() => {
            Some("its ranks wait for each other".to_owned())
        }
        End::Code(_) if observed.ended_out_of_memory => Some("OutOfMemoryError".to_owned()),
        End::Code(_) => observed
            .error
            .clone()
            .or_else(|| observed.last_lines.last().cloned()),
    }
}

/// The rows of a matrix, as `--format json` prints them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MatrixReport {
    /// In the order of the matrix.
    pub rows: Vec<MatrixRow>,
    /// The rows whose peak is larger than in the earlier table, those that grew most first.
    pub grown: Vec<GrownPeak>,
    /// The number of rows that the earlier table lacks, or that have no peaks or another exit code
    /// in it. `None` without an earlier table.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_compared: Option<usize>,
}

/// A peak that is larger than in an earlier table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GrownPeak {
    #[serde(flatten)]
    pub cell: MatrixCell,
    pub peak: PeakKind,
    pub before: u64,
    pub after: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PeakKind {
    Allocated,
    Reserved,
}

impl PeakKind {
    const ALL: [Self; 2] = [Self::Allocated, Self::Reserved];

    pub const fn of(self, figures: &RunFigures) -> Option<u64> {
        match self {
            Self::Allocated => figures.peak_allocated,
            Self::Reserved => figures.peak_reserved,
        }
    }
}

impl MatrixReport {
    pub fn new(rows: Vec<MatrixRow>, earlier: Option<&[MatrixRow]>) -> Self {
        let Some(earlier) = earlier else {
            return Self {
                rows,
                ..Self::default()
            };
        };
        let earlier = by_cell(earlier);
        let mut grown = Vec::new();
        let mut not_compared = 0;
        for row in &rows {
            let peaks: Vec<(PeakKind, u64, u64)> = PeakKind::ALL
                .into_iter()
                .filter_map(|peak| {
                    let before = &earlier.get(&row.cell)?.figures;
                    // A run that fails early has a smaller peak.
                    let is_like = before.exit_code == row.figures.exit_code;
                    let before = peak.of(before).filter(|_| is_like)?;
                    Some((peak, before, peak.of(&row.figures)?))
                })
                .collect();
            not_compared += usize::from(peaks.is_empty());
            let larger = peaks
                .into_iter()
                .filter(|(_, before, after)| after > before);
            grown.extend(larger.map(|(peak, before, after)| GrownPeak {
                cell: row.cell.clone(),
                peak,
                before,
                after,
            }));
        }
        grown.sort_by_key(|grown| Reverse(grown.after - grown.before));
        Self {
            rows,
            grown,
            not_compared: Some(not_compared),
        }
    }

    /// Names the rows, each without the values that all rows share, unless there is one row.
    pub fn names(&self) -> impl Fn(&MatrixCell) -> String {
        let mut shared = match self.rows.as_slice() {
            [first, _, ..] => first.cell.values.clone(),
            [] | [_] => BTreeMap::new(),
        };
        for row in &self.rows {
            shared.retain(|name, value| row.cell.values.get(name) == Some(value));
        }
        move |cell| {
            let mut short = cell.clone();
            short
                .values
                .retain(|name, value| shared.get(name) != Some(value));
            short.to_string()
        }
    }

    pub fn is_success(&self) -> bool {
        self.grown.is_empty() && self.rows.iter().all(|row| row.figures.is_success())
    }
}

/// The last row of each cell.
pub fn by_cell(rows: &[MatrixRow]) -> HashMap<&MatrixCell, &MatrixRow> {
    rows.iter().map(|row| (&row.cell, row)).collect()
}

/// Returns whether each run belongs to this shard, given their known times. Shards take about
/// equally long: each run, longest first, belongs to the shard with the least time so far. A run
/// without a known time counts as an average one.
pub fn of_shard(times: &[Option<u64>], shard: Shard) -> Vec<bool> {
    let known: Vec<u64> = times.iter().flatten().copied().collect();
    let average = known.iter().sum::<u64>() / (known.len() as u64).max(1);
    // Equal times are distributed by their number.
    let cost = |run: usize| times[run].unwrap_or(average).max(1);
    let mut runs: Vec<usize> = (0..times.len()).collect();
    runs.sort_by_key(|run| Reverse(cost(*run)));
    let mut loads: std::collections::BinaryHeap<Reverse<(u64, u32)>> =
        (1..=shard.count).map(|index| Reverse((0, index))).collect();
    let mut is_of_shard = vec![false; times.len()];
    for run in runs {
        let Some(Reverse((load, index))) = loads.pop() else {
            break;
        };
        is_of_shard[run] = index == shard.index;
        loads.push(Reverse((load + cost(run), index)));
    }
    is_of_shard
}

#[cfg(test)]
mod tests;
