//! `rows.jsonl`: one line per snapshot. While snapshots are analysed, the
//! [`Journal`](crate::journal::Journal) appends each row. At the end the file is replaced by the
//! rows of this run and a last line that proves that all are there ([`Table`]).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use harness_allocator::hash::{fnv1a, fnv1a_from};
use harness_allocator::units::Bytes;
use harness_base::shard::{self, Shard};
use harness_base::words::joined;
use harness_explain::fleet::Row;
use serde::{Deserialize, Serialize};

use super::cloud::{self, Cloud};
use crate::error::CliError;
use crate::journal::{bytes, line};

pub(super) const ROWS: &str = "rows.jsonl";

pub(super) fn path(folder: &Path) -> PathBuf {
    folder.join(ROWS)
}

/// All rows of a run.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Table {
    pub(super) shard: Option<Shard>,
    /// The searched paths.
    pub(super) paths: Vec<String>,
    pub(super) memory: Option<Bytes>,
    /// The version and the options that made the rows.
    pub(super) made_with: String,
    /// For a shard: the snapshots of all shards when this run began, by the index of the shard.
    pub(super) found: BTreeMap<u32, Found>,
    pub(super) rows: Vec<Row>,
}

/// The snapshots of a shard that a run found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Found {
    snapshots: usize,
    /// The sum of the hashes of their names.
    names: u64,
}

impl Found {
    pub(super) fn by_shard<'a>(
        names: impl Iterator<Item = &'a str>,
        shard: Option<Shard>,
    ) -> BTreeMap<u32, Self> {
        let mut found = BTreeMap::<u32, Self>::new();
        let Some(Shard { count, .. }) = shard else {
            return found;
        };
        for name in names {
            let of_shard = found.entry(Shard::with(name, count).index).or_default();
            of_shard.snapshots += 1;
            of_shard.names = of_shard.names.wrapping_add(fnv1a(name.as_bytes()));
        }
        found
    }
}

/// The last line of a file with all rows.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct End {
    complete: Complete,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Complete {
    shard: Option<Shard>,
    paths: Vec<String>,
    memory: Option<Bytes>,
    made_with: String,
    found: BTreeMap<u32, Found>,
    rows: usize,
    /// The hash of the lines of the rows, and of this line without its hash.
    hash: String,
}

impl End {
    fn proving(lines: &[u8], complete: Complete) -> Result<Self, CliError> {
        let unproved = Self {
            complete: Complete {
                hash: String::new(),
                ..complete
            },
        };
        let hash = format!(
            "{:016x}",
            fnv1a_from(fnv1a(lines), line(&unproved)?.as_bytes())
        );
        Ok(Self {
            complete: Complete {
                hash,
                ..unproved.complete
            },
        })
    }
}

impl Table {
    pub(super) fn document(&self) -> Result<String, CliError> {
        let Self {
            shard,
            memory,
            ref found,
            ref paths,
            ref made_with,
            ref rows,
        } = *self;
        let mut lines = rows.iter().map(line).collect::<Result<String, _>>()?;
        let (paths, made_with, found) = (paths.clone(), made_with.clone(), found.clone());
        let complete = Complete {
            shard,
            paths,
            memory,
            made_with,
            found,
            rows: rows.len(),
            hash: String::new(),
        };
        lines += &line(&End::proving(lines.as_bytes(), complete)?)?;
        Ok(lines)
    }

    /// Fails unless the folder has all rows of a run, unchanged.
    fn read(folder: &Path) -> Result<Self, CliError> {
        let text = match cloud::url(folder) {
            Some(url) => Cloud::open(url)?.read(ROWS)?,
            None => bytes(&path(folder))?,
        };
        if text.is_empty() {
            let message = format!("{}: there are no rows in this folder", folder.display());
            return Err(CliError::input(
                message,
                "name the folders that `harness fleet --shard I/N --out FOLDER` wrote",
            ));
        }
        Self::parse(&path(folder), &text)
    }

    fn parse(path: &Path, text: &[u8]) -> Result<Self, CliError> {
        let again = "run its `harness fleet` command again: it continues, and keeps whole rows";
        let wrong = |what: &str| CliError::input(format!("{}: {what}", path.display()), again);
        let before = text
            .strip_suffix(b"\n")
            .and_then(|text| text.iter().rposition(|&byte| byte == b'\n'))
            .map_or(0, |at| at + 1);
        let (lines, last) = text.split_at(before);
        let Ok(End { complete }) = serde_json::from_slice(last) else {
            return Err(wrong(
                "the rows are not complete: the last line does not say that all are there",
            ));
        };
        let mut rows = Vec::new();
        for (number, line) in (1..).zip(
            lines
                .split(|&byte| byte == b'\n')
                .filter(|line| !line.is_empty()),
        ) {
            let row = serde_json::from_slice::<Row>(line);
            rows.push(row.map_err(|_| wrong(&format!("line {number} is damaged")))?);
        }
        let (count, written) = (complete.rows, complete.hash.clone());
        let End {
            complete:
                Complete {
                    shard,
                    paths,
                    memory,
                    made_with,
                    found,
                    hash,
                    ..
                },
        } = End::proving(lines, complete)?;
        if (rows.len(), hash) != (count, written) {
            return Err(wrong(
                "rows are missing, or were changed after they were written",
            ));
        }
        Ok(Self {
            shard,
            paths,
            memory,
            made_with,
            found,
            rows,
        })
    }
}

/// Reads the rows of all shards of a run, or of several runs without shards. Fails unless all rows
/// are there.
pub(super) fn merged(folders: &[PathBuf], out: &Path) -> Result<Table, CliError> {
    // The components of a URL omit a slash at its end.
    let place = |path: &Path| match cloud::url(path) {
        Some(_) => Some(path.components().collect()),
        None => path.canonicalize().ok(),
    };
    let is_out = |folder: &&PathBuf| place(folder).is_some_and(|folder| place(out) == Some(folder));
    if let Some(folder) = folders.iter().find(is_out) {
        let message = format!(
            "{}: the result would replace the rows of this shard",
            folder.display()
        );
        return Err(CliError::input(
            message,
            "choose another folder with `--out`",
        ));
    }
    let tables = folders
        .iter()
        .map(|folder| Table::read(folder))
        .collect::<Result<Vec<_>, _>>()?;
    let Some((first, others)) = tables.split_first() else {
        return Err(CliError::input(
            "there are no shards",
            "name the folders that `harness fleet --shard I/N --out FOLDER` wrote",
        ));
    };
    check_shards(&tables, first, others)?;
    if let Some(other) = others
        .iter()
        .find(|other| other.made_with != first.made_with)
    {
        let [first, other] = [first, other].map(|table| table.made_with.trim());
        return Err(not_one_run(format!(
            "different versions or options made the rows: {first}; and {other}"
        )));
    }
    let mut paths: Vec<String> = tables
        .iter()
        .flat_map(|table| table.paths.iter().cloned())
        .collect();
    paths.sort();
    paths.dedup();
    let (memory, made_with) = (first.memory, first.made_with.clone());
    let mut rows: Vec<Row> = tables.into_iter().flat_map(|table| table.rows).collect();
    rows.sort_by(|a, b| a.file.cmp(&b.file));
    rows.dedup();
    if let Some([row, _]) = rows.array_windows().find(|[a, b]| a.file == b.file) {
        return Err(not_one_run(format!("two rows of {} differ", row.file)));
    }
    Ok(Table {
        shard: None,
        paths,
        memory,
        made_with,
        found: BTreeMap::new(),
        rows,
    })
}

fn not_one_run(message: String) -> CliError {
    CliError::input(
        message,
        "name each shard of one `harness fleet` once, made by the same version and options",
    )
}

/// Fails unless the tables are all shards of one run, or none is a shard.
fn check_shards(tables: &[Table], first: &Table, others: &[Table]) -> Result<(), CliError> {
    let wrong = not_one_run;
    let shards: Vec<Shard> = tables.iter().filter_map(|table| table.shard).collect();
    if !shards.is_empty() {
        if shards.len() < tables.len() {
            return Err(wrong(
                "some folders are shards, and others are whole".to_owned(),
            ));
        }
        let missing = shard::missing(&shards).map_err(wrong)?;
        if !missing.is_empty() {
            return Err(wrong(shard::named(&missing)));
        }
        if let Some(other) = others.iter().find(|other| other.paths != first.paths) {
            let [first, other] = [first, other].map(|table| joined(&table.paths, ", "));
            return Err(wrong(format!(
                "the shards searched different paths: {first}; and {other}"
            )));
        }
        if let Some(shard) = changed_shard(tables) {
            return Err(CliError::input(
                format!("the rows of shard {shard} are old: another shard found others there"),
                "run the `harness fleet` command of this shard again: it continues",
            ));
        }
    }
    Ok(())
}

/// Returns a shard for which another shard found other snapshots. If the shard itself found more,
/// they appeared before its own run, so it has their rows.
fn changed_shard(tables: &[Table]) -> Option<Shard> {
    let snapshots = |found: Option<&Found>| found.map_or(0, |found| found.snapshots);
    let is_changed = |table: &&Table, shard: Shard| {
        let own = table.found.get(&shard.index);
        let mut others = tables.iter().map(|other| other.found.get(&shard.index));
        others.any(|seen| seen != own && snapshots(seen) >= snapshots(own))
    };
    let mut shards = tables
        .iter()
        .filter_map(|table| Some((table, table.shard?)));
    shards
        .find(|(table, shard)| is_changed(table, *shard))
        .map(|(_, shard)| shard)
}

#[cfg(test)]
mod tests;
