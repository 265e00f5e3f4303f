//! [`compare`] runs a program with several settings of PyTorch's allocator.
//!
//! PyTorch prefers low addresses, and drivers choose addresses in different orders. So the search for the least memory tries the order of each
//! driver. A run close to its limit is repeated with each order too.

use harness_base::shard::Shard;
use harness_gpu_settings::settings::AddressOrder;
use serde::{Deserialize, Serialize};

use super::least::{self, OrderLeast, Search};
use super::merge::Part;
use super::observed::{Ending, Observed};
use super::{Program, Trial};
use crate::process::End;

/// A run that held more than this percentage of the memory was close to its limit.
const CLOSE: u64 = 90;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettingsReport {
    pub memory: u64,
    /// One row for each setting, in the given order. Settings skipped after an interrupt are missing.
    pub rows: Vec<Row>,
    /// Index of the best row. Among the rows with exit code 0, it prefers no out of memory errors, then the least memory or peak,
    /// then the fewest driver calls.
    pub best: Option<usize>,
    pub is_interrupted: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// As in PYTORCH_ALLOC_CONF.
    pub alloc_conf: String,
    /// `None` if a signal or the time limit ended it.
    pub exit_code: Option<u8>,
    pub signal: Option<u8>,
    pub is_hang: bool,
    pub ended_out_of_memory: bool,
    pub peak_reserved: u64,
    pub num_alloc_retries: u64,
    pub num_ooms: u64,
    pub driver_calls: u64,
    /// The least memory with the same outcome; `None` if not searched for, or if this run failed.
    pub least_memory: Option<u64>,
    /// The least memory for each address order, beginning with this run's. Empty if not searched for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub least_by_order: Vec<OrderLeast>,
    /// The same setting with the other address orders, if the run came close to its limit: a request failed, or it held more than
    /// 90 % of the memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_orders: Vec<OtherOrder>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherOrder {
    pub addresses: String,
    #[serde(flatten)]
    pub row: Row,
}

impl Row {
    fn new(alloc_conf: &str, run: &Observed) -> Self {
        let (exit_code, signal) = match run.ending {
            Ending::By(End::Code(code)) => (Some(code), None),
            Ending::By(End::Signal(signal)) => (None, Some(signal)),
            Ending::Hang => (None, None),
        };
        Self {
            alloc_conf: alloc_conf.to_owned(),
            exit_code,
            signal,
            is_hang: run.ending == Ending::Hang,
            ended_out_of_memory: run.ended_out_of_memory,
            peak_reserved: run.peak_reserved.0,
            num_alloc_retries: run.retries,
            num_ooms: run.ooms,
            driver_calls: run.driver_calls,
            ..Self::default()
        }
    }

    /// Returns whether a request failed or the run held nearly all memory.
    fn is_close_to(&self, memory: u64) -> bool {
        let refused = self.ended_out_of_memory || self.num_ooms > 0 || self.num_alloc_retries > 0;
        refused || self.peak_reserved.saturating_mul(100) > memory.saturating_mul(CLOSE)
    }

    pub fn ends_well(&self) -> bool {
        self.exit_code == Some(0)
    }

    /// Sort key of a row: the smallest is the best.
    fn rank(&self) -> (bool, u64, u64) {
        (self.num_ooms > 0, self.least_memory.unwrap_or(self.peak_reserved), self.driver_calls)
    }
}

/// Returns the index of the best row.
pub(super) fn best(rows: &[Row]) -> Option<usize> {
    rows.iter().enumerate().filter(|(_, row)| row.ends_well()).min_by_key(|(_, row)| row.rank()).map(|(index, _)| index)
}

/// Returns the settings of a shard.
pub fn of_shard(settings: &[String], shard: Option<Shard>) -> Vec<String> {
    settings.iter().filter(|conf| shard.is_none_or(|shard| shard.has(conf))).cloned().collect()
}

/// Compares these settings. The first run used the first of them that belongs to the shard. With `search`, also searches for the least memory of each.
/// Otherwise, each runs with these address orders too; without any, only settings that came close to their limit run with those of all drivers.
pub fn compare<E: Send>(
    program: &Program<'_, E>,
    settings: &[String],
    search: Option<Search>,
    orders: &[AddressOrder],
) -> Result<SettingsReport, E> {
    let part = program.shard.map(|shard| Part { shard, names: settings.to_vec() });
    let settings = of_shard(settings, program.shard);
    let with = |conf: &String| Trial { alloc_conf: Some(conf.clone()), ..program.trial.clone() };
    let others: Vec<Trial> = settings.iter().skip(1).map(with).collect();
    let runs = [Some(program.first.clone())].into_iter().chain(program.run(&others)?);
    let mut rows: Vec<Row> = Vec::new();
    let mut is_interrupted = false;
    for (conf, run) in settings.iter().zip(runs) {
        let Some(run) = run else {
            is_interrupted = true;
            continue;
        };
        let mut row = Row::new(conf, &run);
        if let Some(search) = search.filter(|search| !is_interrupted && row.ends_well() && (search.allow_ooms || row.num_ooms == 0)) {
            let of_setting = Program { first: &run, trial: with(conf), shard: None, ..*program };
            let found = least::least(&of_setting, search)?;
            is_interrupted |= found.is_none();
            row.least_by_order = found.map(|found| found.orders).unwrap_or_default();
            row.least_memory = row.least_by_order.first().map(|order| order.enough);
        }
        rows.push(row);
    }
    if search.is_none() && !is_interrupted {
        is_interrupted = try_other_orders(program, &mut rows, orders)?;
    }
    let best = best(&rows);
    Ok(SettingsReport { memory: program.trial.memory.0, rows, best, is_interrupted, part })
}

/// Runs the settings with these address orders, or those close to their limit with the orders of all drivers. Returns whether the user interrupted.
fn try_other_orders<E: Send>(program: &Program<'_, E>, rows: &mut [Row], orders: &[AddressOrder]) -> Result<bool, E> {
    let Some(own) = program.trial.addresses else { return Ok(false) };
    let memory = program.trial.memory.0;
    let tried = rows.iter().enumerate().filter(|(_, row)| !orders.is_empty() || row.is_close_to(memory)).map(|(index, _)| index);
    let orders = if orders.is_empty() { &AddressOrder::OF_DRIVERS } else { orders };
    let cases: Vec<_> = tried.flat_map(|index| orders.iter().filter(|order| **order != own).map(move |order| (index, *order))).collect();
    let is_one = rows.len() == 1;
    let trial = |&(index, order): &(usize, _)| {
        let of_row = rows.get(index).map(|row: &Row| row.alloc_conf.clone());
        let alloc_conf = if is_one { program.trial.alloc_conf.clone() } else { of_row };
        Trial { alloc_conf, addresses: Some(order), ..program.trial.clone() }
    };
    let trials: Vec<Trial> = cases.iter().map(trial).collect();
    let runs = program.run(&trials)?;
    let is_interrupted = runs.iter().any(Option::is_none);
    for ((index, order), run) in cases.into_iter().zip(runs) {
        if let (Some(row), Some(run)) = (rows.get_mut(index), run) {
            let other = Row::new(&row.alloc_conf, &run);
            row.other_orders.push(OtherOrder { addresses: order.to_string(), row: other });
        }
    }
    Ok(is_interrupted)
}

#[cfg(test)]
mod tests;
