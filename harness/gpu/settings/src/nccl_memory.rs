//! [`NcclMemory`]: the device memory of NCCL's buffers, which depends on the links between the GPUs
//! and on NCCL's version, from a measured table.

use std::{fmt, io, path::Path};

use harness_allocator::units::Bytes;
use serde::{Deserialize, Serialize};

use crate::text::SettingsError;

const COLUMNS: [&str; 3] = ["ranks", "collective", "point_to_point"];

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NcclMemory {
    file: String,
    rows: Vec<Row>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Row {
    ranks: u64,
    /// For the first collective, and for the first send or receive.
    bytes: [Bytes; 2],
}

impl NcclMemory {
    /// Parses the name of a table. `read` reads it.
    pub fn parse(
        file: &str,
        read: impl FnOnce(&Path) -> io::Result<String>,
    ) -> Result<Self, SettingsError> {
        let text = read(Path::new(file)).map_err(|error| {
            SettingsError(format!("{file}: {error}: name a table of NCCL's memory"))
        })?;
        let rows = rows(&text).map_err(|error| SettingsError(format!("{file}:{error}")))?;
        Ok(Self {
            file: file.to_owned(),
            rows,
        })
    }

    /// Returns the bytes that a communicator allocates at its first collective, or at its first
    /// send or receive. They come from the row with the most ranks up to `ranks`.
    pub fn of(&self, ranks: usize, is_point_to_point: bool) -> Bytes {
        let row = self
            .rows
            .iter()
            .filter(|row| row.ranks <= ranks as u64)
            .max_by_key(|row| row.ranks);
        row.map_or(Bytes::ZERO, |row| row.bytes[usize::from(is_point_to_point)])
    }
}

impl fmt::Display for NcclMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)
    }
}

/// Errors begin with the line and the column.
fn rows(text: &str) -> Result<Vec<Row>, String> {
    let mut lines = (1..)
        .zip(text.lines())
        .filter(|(_, line)| !line.starts_with('#') && !line.trim().is_empty());
    let (first, header) = lines.next().unwrap_or((1, ""));
    if !header.split('\t').eq(COLUMNS) {
        return Err(format!(
            "{first}:1: the first line must be `{}`, separated by tabs",
            COLUMNS.join(" ")
        ));
    }
    let parse = |(number, line): (usize, &str)| {
        let wrong = |column: usize, expected: &str| {
            let at: usize = line
                .split('\t')
                .take(column)
                .map(|field| field.len() + 1)
                .sum();
            let field = line.split('\t').nth(column).unwrap_or_default();
            format!(
                "{number}:{}: `{field}` is not {expected} (column {})",
                at + 1,
                COLUMNS[column]
            )
        };
        let field = |column| line.split('\t').nth(column).unwrap_or_default();
        let size =
            |column| Bytes::parse(field(column)).map_err(|_| wrong(column, "a size, as in 544MiB"));
        let ranks = field(0)
            .parse()
            .map_err(|_| wrong(0, "a number of ranks"))?;
        Ok(Row {
            ranks,
            bytes: [size(1)?, size(2)?],
        })
    };
    lines.map(parse).collect()
}

#[cfg(test)]
mod tests;
