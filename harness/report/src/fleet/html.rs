//! One page with the tables and all rows, without scripts.

use std::{cmp::Reverse, fmt::Write as _};

use harness_allocator::units::Bytes;
use harness_explain::fleet::{Outcome, Row};

use super::{Summary, text};
use crate::escape::between_tags;
use crate::words::{Align, Grid};

const STYLE: &str = "body{font:15px/1.4 system-ui,sans-serif;margin:2rem auto;max-width:90rem;padding:0 1rem}\
h1,h2{overflow-wrap:anywhere}table{border-collapse:collapse;margin:.5rem 0 2rem;display:block;overflow-x:auto}td:first-child{min-width:12rem;overflow-wrap:anywhere}\
td,th{padding:.2rem .7rem;text-align:left;vertical-align:top;border-bottom:1px solid #8884}td.number{min-width:0;white-space:nowrap}.number{text-align:right;font-variant-numeric:tabular-nums}";

/// Rows that the page lists; the Parquet file has all of them.
const ROWS: usize = 2000;

pub fn page(rows: &[Row], summary: &Summary) -> String {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <meta name=\"color-scheme\" content=\"light dark\">\
         <title>Fleet</title><style>{STYLE}</style></head><body>\n<h1>{}</h1>\n",
        between_tags(&text::headline(summary))
    );
    for (title, grid) in text::tables(summary) {
        table(&mut page, &title, &grid);
    }
    let mut failed: Vec<&Row> = rows.iter().filter(|row| row.analysis.outcome == Outcome::OutOfMemory).collect();
    // Equal problems are neighbours, those with most bytes first.
    failed.sort_by_key(|row| (&row.analysis.cause, &row.analysis.top_site, Reverse(row.analysis.cause_bytes)));
    let cells = |row: &Row| {
        let of = &row.analysis;
        let or_nothing = |text: &Option<String>| text.clone().unwrap_or_default();
        let figures = [of.requested, of.allocated, of.reserved, of.device_total].map(|bytes| Bytes(bytes).to_string());
        let rest = [
            text::about(of.cause.as_deref().unwrap_or_default()).to_owned(),
            or_nothing(&of.site),
            or_nothing(&of.top_site),
            of.cures.len().to_string(),
        ];
        [row.file.clone(), row.job.clone()].into_iter().chain(figures).chain(rest).collect()
    };
    let heads = [
        "snapshot",
        "job",
        "requested",
        "allocated",
        "reserved",
        "memory",
        "cause",
        "line of the request",
        "line that holds most",
        "changes that prevent it",
    ];
    let title =
        if summary.out_of_memory > ROWS { format!("The first {ROWS} out-of-memory errors") } else { "All out-of-memory errors".to_owned() };
    let grid = Grid::new("llrrrrlllr", heads, failed.into_iter().take(ROWS).map(cells));
    table(&mut page, &title, &grid.with_columns(|head| head != "job" || summary.jobs < summary.snapshots));
    page.push_str("</body></html>\n");
    page
}

fn table(page: &mut String, title: &str, Grid { columns, rows }: &Grid) {
    let class = |align: &Align| if *align == Align::Right { " class=\"number\"" } else { "" };
    let heads: String = columns.iter().map(|(head, align)| format!("<th{}>{}</th>", class(align), between_tags(head))).collect();
    let _ = writeln!(page, "<h2>{}</h2>\n<table><thead><tr>{heads}</tr></thead><tbody>", between_tags(title));
    for row in rows {
        let cells = row.iter().zip(columns).map(|(cell, (_, align))| format!("<td{}>{}</td>", class(align), between_tags(cell)));
        let _ = writeln!(page, "<tr>{}</tr>", cells.collect::<String>());
    }
    page.push_str("</tbody></table>\n");
}
