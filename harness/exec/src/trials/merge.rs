//! Merges the reports of shards: [`merge`].

use harness_base::shard::{self, Shard};
use serde::{Deserialize, Serialize};

use super::faults::FaultReport;
use super::least::LeastReport;
use super::settings::{self, SettingsReport};

/// The shard of a report, and the names of all cases in order, also those of other shards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    pub shard: Shard,
    pub names: Vec<String>,
}

/// A report in JSON, of any kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Report {
    Faults(FaultReport),
    Least(LeastReport),
    Settings(SettingsReport),
}

impl Report {
    fn part(&mut self) -> Option<Part> {
        match self {
            Self::Faults(report) => report.part.take(),
            Self::Least(report) => report.part.take(),
            Self::Settings(report) => report.part.take(),
        }
    }

    /// Appends the cases of another shard. Fails if it is of another program.
    fn append(&mut self, other: Self) -> Result<(), &'static str> {
        match (self, other) {
            (Self::Faults(all), Self::Faults(more)) if (all.first.attempts, &all.chosen) == (more.first.attempts, &more.chosen) => {
                all.cases.extend(more.cases);
                all.left_out += more.left_out;
            }
            (Self::Least(all), Self::Least(more)) if all.plenty == more.plenty => all.orders.extend(more.orders),
            (Self::Settings(all), Self::Settings(more)) if all.memory == more.memory => {
                all.rows.extend(more.rows);
                all.is_interrupted |= more.is_interrupted;
                all.unpredicted = all.unpredicted.take().or(more.unpredicted);
            }
            _ => return Err("the program or its options"),
        }
        Ok(())
    }

    fn sort(&mut self, names: &[String]) {
        let position = |name: &str| names.iter().position(|other| other == name);
        match self {
            Self::Faults(report) => report.cases.sort_by_key(|case| (case.rank, case.attempt)),
            Self::Least(report) => report.orders.sort_by_key(|order| position(&order.addresses)),
            Self::Settings(report) => {
                report.rows.sort_by_key(|row| position(&row.alloc_conf));
                report.best = settings::best(&report.rows);
            }
        }
    }
}

/// Merges shards in any order. Also returns the missing shards.
pub fn merge(reports: Vec<Report>) -> Result<(Report, Vec<Shard>), String> {
    let parts = reports.into_iter().map(|mut report| Ok((report.part().ok_or("a report is not of a shard")?, report)));
    let parts = parts.collect::<Result<Vec<_>, String>>()?;
    let missing = shard::missing(&parts.iter().map(|(part, _)| part.shard).collect::<Vec<_>>())?;
    let mut parts = parts.into_iter();
    let (first, mut merged) = parts.next().ok_or("no shards are given")?;
    for (part, report) in parts {
        let differ = |what| format!("shards {} and {} differ in {what}", first.shard, part.shard);
        if part.names != first.names {
            return Err(differ("their cases"));
        }
        merged.append(report).map_err(differ)?;
    }
    merged.sort(&first.names);
    Ok((merged, missing))
}

#[cfg(test)]
mod tests;
