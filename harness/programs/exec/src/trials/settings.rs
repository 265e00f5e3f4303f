//! [`compare`] runs a program with several settings of PyTorch's allocator.
//!
//! PyTorch prefers low addresses, and drivers choose addresses in different orders. So the search
//! for the least memory tries the order of each driver. A run close to its limit is repeated with
//! each order too.

use harness_allocator::named_enum;
use harness_base::shard::Shard;
use harness_gpu_settings::settings::AddressOrder;
use serde::{Deserialize, Serialize};

use super::least::{self, OrderLeast, Search};
use super::observed::{Observed, TrialEnd};
use super::part::Part;
use super::{Trial, TrialProgram};
use crate::doubts::Doubt;
use crate::process::End;

/// A run that held more than this percentage of the memory was close to its limit.
const CLOSE: u64 = 90;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettingsReport {
    pub memory: u64,
    /// One row for each setting, in the given order. Settings skipped after an interrupt are
    /// missing.
    pub rows: Vec<SettingsRow>,
    /// Index of the best row. Among the rows with exit code 0, it prefers no out of memory errors,
    /// then the least memory or peak, then the fewest driver calls.
    pub best: Option<usize>,
    pub is_interrupted: bool,
    /// Why no row is predicted, if rows should be. The text follows the words "the program".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unpredicted: Option<String>,
    /// Why the figures of the first run may differ from those on a GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub doubts: Vec<Doubt>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
}

impl SettingsReport {
    /// Returns the doubts about all runs.
    pub fn all_doubts(&self) -> Vec<Doubt> {
        let rows = self.rows.iter().flat_map(|row| {
            [row]
                .into_iter()
                .chain(row.other_orders.iter().map(|other| &other.row))
        });
        let of_rows = rows.flat_map(|row| {
            let of_orders = row.least_by_order.iter().map(|order| &order.doubts);
            [&row.doubts].into_iter().chain(of_orders)
        });
        Doubt::of_all([&self.doubts].into_iter().chain(of_rows))
    }
}

named_enum! {
    /// Whether runs or replays of the first run gave the figures of a row. The runs of the best row
    /// confirm its replays.
    #[derive(Default, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    Basis {
        #[default]
        Confirmed = "confirmed",
        Predicted = "predicted",
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettingsRow {
    /// As in PYTORCH_ALLOC_CONF.
    pub alloc_conf: String,
    /// The origin of the figures.
    #[serde(default)]
    pub basis: Basis,
    /// `None` if a signal or the time limit ended it.
    pub exit_code: Option<u8>,
    pub signal: Option<u8>,
    pub is_hang: bool,
    pub ended_out_of_memory: bool,
    pub peak_reserved: u64,
    /// `None` if a library other than torch does not publish them.
    pub num_alloc_retries: Option<u64>,
    pub num_ooms: Option<u64>,
    pub driver_calls: u64,
    /// The least memory with the same outcome; `None` if not searched for, or if this run failed.
    pub least_memory: Option<u64>,
    /// The least memory for each address order, beginning with this run's. Empty if not searched
    /// for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub least_by_order: Vec<OrderLeast>,
    /// The same setting with the other address orders, if the run came close to its limit: a
    /// request failed, or it held more than 90 % of the memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_orders: Vec<OtherOrder>,
    /// Why the figures of its run, or of the run that a replay repeats, may differ from those on a
    /// GPU. The least memory of each order has its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub doubts: Vec<Doubt>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherOrder {
    pub addresses: String,
    #[serde(flatten)]
    pub row: SettingsRow,
}

impl SettingsRow {
    fn new(alloc_conf: &str, run: &Observed) -> Self {
        let (exit_code, signal) = match run.ending {
            TrialEnd::By(End::Code(code)) => (Some(code), None),
            TrialEnd::By(End::Signal(signal)) => (None, Some(signal)),
            TrialEnd::Hang => (None, None),
        };
        Self {
            alloc_conf: alloc_conf.to_owned(),
            exit_code,
            signal,
            is_hang: run.ending == TrialEnd::Hang,
            ended_out_of_memory: run.ended_out_of_memory,
            peak_reserved: run.peak_reserved.0,
            num_alloc_retries: run.retries,
            num_ooms: run.ooms,
            driver_calls: run.driver_calls,
            doubts: run.doubts.clone(),
            ..Self::default()
        }
    }

    /// Returns whether a request failed or the run held nearly all memory.
    fn is_close_to(&self, memory: u64) -> bool {
        let refused =
            self.ended_out_of_memory || self.has_ooms() || self.num_alloc_retries > Some(0);
        refused || self.peak_reserved.saturating_mul(100) > memory.saturating_mul(CLOSE)
    }

    fn has_figures_of(&self, other: &Self) -> bool {
        *self
            == Self {
                basis: self.basis,
                least_by_order: self.least_by_order.clone(),
                doubts: self.doubts.clone(),
                ..other.clone()
            }
    }

    /// Returns whether the run had out of memory errors, as far as it is known.
    pub fn has_ooms(&self) -> bool {
        self.num_ooms > Some(0)
    }

    pub fn ends_well(&self) -> bool {
        self.exit_code == Some(0)
    }

    /// Sort key of a row: the smallest is the best.
    fn rank(&self) -> (bool, u64, u64) {
        (
            self.has_ooms(),
            self.least_memory.unwrap_or(self.peak_reserved),
            self.driver_calls,
        )
    }
}

/// Returns the index of the best row.
pub(super) fn best(rows: &[SettingsRow]) -> Option<usize> {
    rows.iter()
        .enumerate()
        .filter(|(_, row)| row.ends_well())
        .min_by_key(|(_, row)| row.rank())
        .map(|(index, _)| index)
}

/// Returns the settings of a shard.
pub fn of_shard(settings: &[String], shard: Option<Shard>) -> Vec<String> {
    settings
        .iter()
        .filter(|conf| shard.is_none_or(|shard| shard.has(conf)))
        .cloned()
        .collect()
}

/// Compares these settings. The first run used the first of them that belongs to the shard. With
/// `search`, also searches for the least memory of each. Otherwise, each runs with these address
/// orders too; without any, only settings that came close to their limit run with those of all
/// drivers.
///
/// Replays of the first run predict rows. Runs replace rows that replays cannot predict, and
/// confirm the best row. If they do not confirm it, runs replace all rows.
pub fn compare<E: Send>(
    program: &TrialProgram<'_, E>,
    settings: &[String],
    search: Option<Search>,
    orders: &[AddressOrder],
) -> Result<SettingsReport, E> {
    let part = program.shard.map(|shard| Part {
        shard,
        names: settings.to_vec(),
    });
    let settings = &of_shard(settings, program.shard);
    let unpredicted = program.unpredicted.or(program
        .first
        .reads_free_memory
        .then_some("reads the amount of free memory"));
    let report = |unpredicted: Option<&str>| {
        let unpredicted = unpredicted
            .filter(|_| settings.len() > 1)
            .map(str::to_owned);
        SettingsReport {
            memory: program.trial.memory.0,
            unpredicted,
            doubts: program.first.doubts.clone(),
            part: part.clone(),
            ..SettingsReport::default()
        }
    };
    let predicts = settings.len() > 1 && unpredicted.is_none();
    let comparison = Comparison {
        program,
        settings,
        search,
        orders,
        predicts,
    };
    if let Some(report) = comparison.fill(report(unpredicted))? {
        return Ok(report);
    }
    let reason = Some("reacts to its settings");
    Ok(Comparison {
        predicts: false,
        ..comparison
    }
    .fill(report(reason))?
    .unwrap_or_else(|| report(reason)))
}

struct Comparison<'a, E> {
    program: &'a TrialProgram<'a, E>,
    settings: &'a [String],
    search: Option<Search>,
    orders: &'a [AddressOrder],
    predicts: bool,
}

impl<E: Send> Comparison<'_, E> {
    fn trial(&self, conf: &str) -> Trial {
        Trial {
            alloc_conf: Some(conf.to_owned()),
            ..self.program.trial.clone()
        }
    }

    /// Predicts a run; `None` if it is unknown or depends on the program's reaction to an out of
    /// memory error.
    fn predict(&self, trial: &Trial) -> Option<Observed> {
        if self.predicts {
            (self.program.predict)(trial).filter(|run| run.ooms == Some(0))
        } else {
            None
        }
    }

    /// Predicts these trials and runs those that cannot be predicted. Returns `None` for runs
    /// skipped after an interrupt.
    fn observe(&self, trials: &[Trial]) -> Result<Vec<Option<(Basis, Observed)>>, E> {
        let predicted: Vec<Option<Observed>> =
            trials.iter().map(|trial| self.predict(trial)).collect();
        let unknown = trials
            .iter()
            .zip(&predicted)
            .filter(|(_, run)| run.is_none());
        let mut runs = self
            .program
            .run(&unknown.map(|(trial, _)| trial.clone()).collect::<Vec<_>>())?
            .into_iter();
        let observed = |run: Option<Observed>| match run {
            Some(run) => Some((Basis::Predicted, run)),
            None => Some((Basis::Confirmed, runs.next()??)),
        };
        Ok(predicted.into_iter().map(observed).collect())
    }

    /// Fills a report. Returns `None` if the best row is not confirmed.
    fn fill(&self, mut report: SettingsReport) -> Result<Option<SettingsReport>, E> {
        let others: Vec<Trial> = self
            .settings
            .iter()
            .skip(1)
            .map(|conf| self.trial(conf))
            .collect();
        let runs = [Some((Basis::Confirmed, self.program.first.clone()))]
            .into_iter()
            .chain(self.observe(&others)?);
        for (conf, run) in self.settings.iter().zip(runs) {
            let Some((basis, run)) = run else {
                report.is_interrupted = true;
                continue;
            };
            let mut row = SettingsRow {
                basis,
                ..SettingsRow::new(conf, &run)
            };
            let confirmed = if self.predicts { 0 } else { usize::MAX };
            report.is_interrupted =
                report.is_interrupted || !self.search(&mut row, &run, confirmed)?;
            report.rows.push(row);
        }
        report.best = best(&report.rows);
        let best = report
            .best
            .and_then(|best| report.rows.get_mut(best))
            .filter(|row| row.basis == Basis::Predicted);
        if let (Some(best), false) = (best, report.is_interrupted) {
            match self.confirm(best)? {
                Some(row) if best.has_figures_of(&row) => *best = row,
                Some(_) => return Ok(None),
                None => report.is_interrupted = true,
            }
        }
        if self.search.is_none() && !report.is_interrupted {
            report.is_interrupted = self.try_other_orders(&mut report.rows)?;
        }
        Ok(Some(report))
    }

    /// Makes the runs of a predicted row. Returns `None` if the user interrupted.
    fn confirm(&self, row: &SettingsRow) -> Result<Option<SettingsRow>, E> {
        let is_first = self.settings.first() == Some(&row.alloc_conf);
        let run = if is_first {
            Some(self.program.first.clone())
        } else {
            self.program
                .run(&[self.trial(&row.alloc_conf)])?
                .pop()
                .flatten()
        };
        let Some(run) = run else { return Ok(None) };
        let mut row = SettingsRow::new(&row.alloc_conf, &run);
        Ok(self.search(&mut row, &run, 1)?.then_some(row))
    }

    /// Adds the least memory to the row of a run. Runs confirm it for this many address orders.
    /// Returns `false` if the user interrupted.
    fn search(&self, row: &mut SettingsRow, run: &Observed, confirmed: usize) -> Result<bool, E> {
        let wanted = self
            .search
            .filter(|search| row.ends_well() && (search.allow_ooms || row.num_ooms == Some(0)));
        let Some(search) = wanted else {
            return Ok(true);
        };
        let of_setting = TrialProgram {
            first: run,
            trial: self.trial(&row.alloc_conf),
            shard: None,
            ..*self.program
        };
        let Some(found) = least::least(
            &of_setting,
            Search {
                confirmed,
                ..search
            },
        )?
        else {
            return Ok(false);
        };
        row.least_by_order = found.orders;
        row.least_memory = row.least_by_order.first().map(|order| order.enough);
        if row
            .least_by_order
            .first()
            .is_some_and(|order| order.runs == 0)
        {
            row.basis = Basis::Predicted;
        }
        Ok(true)
    }

    /// Runs the settings with these address orders, or those close to their limit with the orders
    /// of all drivers. Returns whether the user interrupted.
    fn try_other_orders(&self, rows: &mut [SettingsRow]) -> Result<bool, E> {
        let Self {
            program, orders, ..
        } = *self;
        let Some(own) = program.trial.addresses else {
            return Ok(false);
        };
        let memory = program.trial.memory.0;
        let tried = rows
            .iter()
            .enumerate()
            .filter(|(_, row)| !orders.is_empty() || row.is_close_to(memory))
            .map(|(index, _)| index);
        let orders = if orders.is_empty() {
            &AddressOrder::OF_DRIVERS
        } else {
            orders
        };
        let cases: Vec<_> = tried
            .flat_map(|index| {
                orders
                    .iter()
                    .filter(|order| **order != own)
                    .map(move |order| (index, *order))
            })
            .collect();
        let is_one = rows.len() == 1;
        let trial = |&(index, order): &(usize, _)| {
            let of_row = rows
                .get(index)
                .map(|row: &SettingsRow| row.alloc_conf.clone());
            let alloc_conf = if is_one {
                program.trial.alloc_conf.clone()
            } else {
                of_row
            };
            Trial {
                alloc_conf,
                addresses: Some(order),
                ..program.trial.clone()
            }
        };
        let trials: Vec<Trial> = cases.iter().map(trial).collect();
        let runs = self.observe(&trials)?;
        let is_interrupted = runs.iter().any(Option::is_none);
        for ((index, order), run) in cases.into_iter().zip(runs) {
            if let (Some(row), Some((basis, run))) = (rows.get_mut(index), run) {
                let other = SettingsRow {
                    basis,
                    ..SettingsRow::new(&row.alloc_conf, &run)
                };
                row.other_orders.push(OtherOrder {
                    addresses: order.to_string(),
                    row: other,
                });
            }
        }
        Ok(is_interrupted)
    }
}

#[cfg(test)]
mod tests;
