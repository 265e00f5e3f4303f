//! The rows as a Parquet file.

use harness_explain::fleet::Row;
use parquet::errors::Result;

use crate::parquet::{Column, Table};

/// A column that is removed or renamed, or that gets another meaning or unit, raises it. A new
/// column does not.
const VERSION: u32 = 1;

const COLUMNS: [(&str, Column<Row>); 23] = [
    ("file", Column::Text(|row| Some(&row.file))),
    ("job", Column::Text(|row| Some(&row.job))),
    ("rank", Column::Number(|row| row.rank.map(u64::from))),
    ("hash", Column::Text(|row| Some(&row.hash))),
    (
        "outcome",
        Column::Text(|row| Some(row.analysis.outcome.name())),
    ),
    (
        "problem",
        Column::Text(|row| row.analysis.problem.as_deref()),
    ),
    (
        "device",
        Column::Number(|row| Some(row.analysis.device.into())),
    ),
    ("events", Column::Number(|row| Some(row.analysis.events))),
    ("cause", Column::Text(|row| row.analysis.cause.as_deref())),
    (
        "cause_bytes",
        Column::Number(|row| Some(row.analysis.cause_bytes)),
    ),
    (
        "requested",
        Column::Number(|row| Some(row.analysis.requested)),
    ),
    (
        "allocated",
        Column::Number(|row| Some(row.analysis.allocated)),
    ),
    (
        "reserved",
        Column::Number(|row| Some(row.analysis.reserved)),
    ),
    (
        "peak_allocated",
        Column::Number(|row| (row.analysis.events > 0).then_some(row.analysis.peak_allocated)),
    ),
    (
        "peak_reserved",
        Column::Number(|row| (row.analysis.events > 0).then_some(row.analysis.peak_reserved)),
    ),
    (
        "device_total",
        Column::Number(|row| Some(row.analysis.device_total)),
    ),
    ("site", Column::Text(|row| row.analysis.site.as_deref())),
    (
        "top_site",
        Column::Text(|row| row.analysis.top_site.as_deref()),
    ),
    (
        "top_site_bytes",
        Column::Number(|row| Some(row.analysis.top_site_bytes)),
    ),
    (
        "category",
        Column::Text(|row| row.analysis.category.as_deref()),
    ),
    (
        "category_bytes",
        Column::Number(|row| Some(row.analysis.category_bytes)),
    ),
    ("faithful", Column::Flag(|row| row.analysis.faithful)),
    (
        "cures",
        Column::Texts(|row| row.analysis.cures.iter().map(String::as_str).collect()),
    ),
];

pub fn file(rows: &[Row]) -> Result<Vec<u8>> {
    let table = Table {
        name: "fleet",
        version: VERSION,
        columns: &COLUMNS,
    };
    table.file(rows)
}
