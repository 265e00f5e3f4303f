//! Merges the reports of shards: [`merge`].

use harness_allocator::hash::fnv1a;
use harness_base::shard::{self, Shard};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::faults::FaultReport;
use super::identity::{self, Run};
use super::least::LeastReport;
use super::part::Part;
use super::settings::{self, SettingsReport};
use crate::doubts::Doubt;

/// The name of the figures of the first run. A shard without cases has none.
pub const FIRST_RUN: &str = "their first run";

/// The keys of the version that the document of a shard begins with, of the run, and of the hash of
/// all else.
const VERSION: &str = "version";
const RUN: &str = "run";
const HASH: &str = "hash";

/// Returns the document of a shard's report, in this version of the printed documents. A hash shows
/// later changes.
pub fn document(report: &impl Serialize, version: u32, run: &Run) -> serde_json::Result<Value> {
    let mut document = json!({ VERSION: version });
    if let (Value::Object(all), Value::Object(fields)) =
        (&mut document, serde_json::to_value(report)?)
    {
        all.extend(fields);
    }
    document[RUN] = serde_json::to_value(run)?;
    document[HASH] = hash(&document).into();
    Ok(document)
}

fn hash(document: &Value) -> String {
    format!("{:016x}", fnv1a(document.to_string().as_bytes()))
}

/// A report that was read from a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    report: Report,
    run: Option<Run>,
    /// `true` if nothing changed the document of a shard.
    is_unchanged: bool,
}

impl Document {
    pub fn read(text: &str) -> serde_json::Result<Self> {
        let report = serde_json::from_str(text)?;
        let mut document: Value = serde_json::from_str(text)?;
        let written = document
            .as_object_mut()
            .and_then(|object| object.shift_remove(HASH));
        let run = document.get(RUN).and_then(|run| Run::deserialize(run).ok());
        Ok(Self {
            report,
            run,
            is_unchanged: written == Some(hash(&document).into()),
        })
    }
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
            (Self::Faults(all), Self::Faults(more))
                if (all.first, &all.chosen) == (more.first, &more.chosen) =>
            {
                all.cases.extend(more.cases);
                all.left_out += more.left_out;
                all.second = all.second.take().or(more.second);
                let chance = all.chance.take().or(more.chance);
                all.explain_by(chance);
                Doubt::add(&mut all.doubts, &more.doubts);
            }
            (Self::Least(all), Self::Least(more))
                if (all.plenty, all.peak_reserved) == (more.plenty, more.peak_reserved) =>
            {
                all.orders.extend(more.orders);
                Doubt::add(&mut all.doubts, &more.doubts);
            }
            (Self::Settings(all), Self::Settings(more)) if all.memory == more.memory => {
                all.rows.extend(more.rows);
                all.is_interrupted |= more.is_interrupted;
                all.unpredicted = all.unpredicted.take().or(more.unpredicted);
                Doubt::add(&mut all.doubts, &more.doubts);
            }
            _ => return Err("the program or its options"),
        }
        Ok(())
    }

    fn sort(&mut self, names: &[String]) {
        let position = |name: &str| names.iter().position(|other| other == name);
        match self {
            Self::Faults(report) => report.cases.sort_by_key(|case| position(&case.name())),
            Self::Least(report) => report
                .orders
                .sort_by_key(|order| position(&order.addresses)),
            Self::Settings(report) => {
                report.rows.sort_by_key(|row| position(&row.alloc_conf));
                report.best = settings::best(&report.rows);
            }
        }
    }
}

/// The first difference, with both values. Reports of older versions lack some.
pub fn difference<'a>(run: &'a Run, other: &'a Run) -> Option<(&'a str, [&'a str; 2])> {
    let of = |run: &'a Run, name: &str| {
        let missing = if identity::is_of_environment(name) {
            "unset"
        } else {
            "unknown"
        };
        run.get(name).map_or(missing, String::as_str)
    };
    run.keys()
        .chain(other.keys())
        .filter(|name| {
            !(*name == FIRST_RUN || identity::is_of_file(name))
                || (run.contains_key(*name) && other.contains_key(*name))
        })
        .map(|name| (name.as_str(), [of(run, name), of(other, name)]))
        .find(|(_, [one, other])| one != other)
}

/// Merges shards in any order. Also returns the missing shards.
pub fn merge(documents: Vec<Document>) -> Result<(Report, Vec<Shard>), String> {
    let part = |Document {
                    mut report,
                    run,
                    is_unchanged,
                }: Document| {
        let part = report.part().ok_or("a report is not of a shard")?;
        match run.filter(|_| is_unchanged) {
            Some(run) => Ok((part, run, report)),
            None => Err(format!(
                "shard {} is not as `harness exec` wrote it: run it again",
                part.shard
            )),
        }
    };
    let parts = documents
        .into_iter()
        .map(part)
        .collect::<Result<Vec<_>, String>>()?;
    let missing = shard::missing(
        &parts
            .iter()
            .map(|(part, ..)| part.shard)
            .collect::<Vec<_>>(),
    )?;
    let mut parts = parts.into_iter();
    let (first, mut run, mut merged) = parts.next().ok_or("no shards are given")?;
    for (part, of_part, report) in parts {
        let differ =
            |what: &str| format!("shards {} and {} differ in {what}", first.shard, part.shard);
        if let Some((name, [one, other])) = difference(&run, &of_part) {
            return Err(format!("{}: `{one}` and `{other}`", differ(name)));
        }
        run.extend(of_part);
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
