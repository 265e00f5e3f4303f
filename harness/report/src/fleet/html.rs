//! One page with the tables and all rows, without scripts, in the style of an explanation.

use std::collections::BTreeMap;
use std::{cmp::Reverse, fmt::Write as _};

use harness_allocator::units::Bytes;
use harness_explain::categories;
use harness_explain::fleet::{FleetOutcome, Row};

use super::{FleetSummary, text};
use crate::escape::between_tags;
use crate::explain::html::STYLE;
use crate::words::{Align, Grid, NOTHING, shortened};

/// A narrow screen shows each row as a list of its cells.
const OWN_STYLE: &str = "body{padding-bottom:2rem}td{overflow-wrap:anywhere;min-width:4rem}\
td.number{min-width:0}th.number{white-space:normal}\
@media (max-width:700px){table,tbody,tr,td{display:block}thead{display:none}tr{padding:.5rem \
0;border-bottom:1px solid var(--line)}\
td,th.number,td.number{border:0;padding:.05rem \
0;text-align:left;white-space:normal;min-width:0}\
td::before{content:attr(data-head) \": \";color:var(--muted)}}";

/// Characters of a cell; the pointer over a longer one shows it whole. A path can have thousands.
const LONGEST_CELL: usize = 160;
/// Rows of a table; the Parquet file has all snapshots.
const ROWS: usize = 2000;

/// `links`: the page of a job, if there is one.
pub fn page(rows: &[Row], summary: &FleetSummary, links: &BTreeMap<String, String>) -> String {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width\">\
         <meta name=\"color-scheme\" content=\"light dark\">\
         <title>Fleet</title><style>{STYLE}{OWN_STYLE}</style></head><body>\n<h1>{}</h1>\n",
        between_tags(&text::headline(summary))
    );
    if links.is_empty() {
        page.push_str(
            "<p class=\"hint\">The same command with <code>--pages</code> writes the explanation \
             of each job and links it here.</p>\n",
        );
    }
    for (title, grid) in text::tables(summary) {
        table(&mut page, &title, &grid, |_| None);
    }
    let link = |job: &str| links.get(job).map(String::as_str);
    let jobs = jobs(rows);
    let heads = [
        "job",
        "snapshots",
        "out of memory",
        "peak allocated",
        "peak reserved",
        "memory",
        "largest use at the end or error",
    ];
    let grid = Grid::new("lrrrrrl", heads, jobs.iter().take(ROWS).map(Job::cells));
    table(
        &mut page,
        &titled("Peaks of all jobs since their recordings began", jobs.len()),
        &grid,
        |row| link(jobs[row].name),
    );
    add_errors(&mut page, rows, link);
    page.push_str("</body></html>\n");
    page
}

/// Adds a table of the snapshots that ended with an out-of-memory error.
fn add_errors<'l>(page: &mut String, rows: &[Row], link: impl Fn(&str) -> Option<&'l str>) {
    let mut failed: Vec<&Row> = rows
        .iter()
        .filter(|row| row.analysis.outcome == FleetOutcome::OutOfMemory)
        .collect();
    // Equal problems are neighbours, those with most bytes first.
    failed.sort_by_key(|row| {
        (
            &row.analysis.cause,
            &row.analysis.top_site,
            Reverse(row.analysis.cause_bytes),
        )
    });
    let cells = |row: &Row| {
        let of = &row.analysis;
        let or_nothing = |text: &Option<String>| text.clone().unwrap_or_default();
        let figures = [of.requested, of.allocated, of.reserved, of.device_total]
            .map(|bytes| Bytes(bytes).to_string());
        let rest = [
            text::about(of.cause.as_deref().unwrap_or_default()).to_owned(),
            or_nothing(&of.site),
            or_nothing(&of.top_site),
            of.cures.len().to_string(),
        ];
        [row.file.clone()]
            .into_iter()
            .chain(figures)
            .chain(rest)
            .collect()
    };
    let heads = [
        "snapshot",
        "requested",
        "allocated",
        "reserved",
        "memory",
        "cause",
        "line of the request",
        "line that holds most",
        "changes that prevent it",
    ];
    let grid = Grid::new(
        "lrrrrlllr",
        heads,
        failed.iter().copied().take(ROWS).map(cells),
    );
    if !failed.is_empty() {
        let title = titled("Out-of-memory errors", failed.len());
        table(page, &title, &grid, |row| link(&failed[row].job));
    }
}

fn titled(title: &str, rows: usize) -> String {
    if rows > ROWS {
        format!("{title}: the first {ROWS} of {rows}")
    } else {
        title.to_owned()
    }
}

struct Job<'a> {
    name: &'a str,
    rows: Vec<&'a Row>,
}

/// All jobs with a readable snapshot, those with most reserved memory first.
fn jobs(rows: &[Row]) -> Vec<Job<'_>> {
    let mut jobs: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
    let readable = rows
        .iter()
        .filter(|row| row.analysis.outcome != FleetOutcome::Unreadable);
    readable.for_each(|row| jobs.entry(&row.job).or_default().push(row));
    let mut jobs: Vec<Job<'_>> = jobs
        .into_iter()
        .map(|(name, rows)| Job { name, rows })
        .collect();
    jobs.sort_by_key(|job| {
        Reverse((
            job.most(|row| row.analysis.peak_reserved),
            job.most(|row| row.analysis.peak_allocated),
        ))
    });
    jobs
}

impl Job<'_> {
    fn most(&self, of: impl Fn(&Row) -> u64) -> u64 {
        self.rows
            .iter()
            .map(|row| of(row))
            .max()
            .unwrap_or_default()
    }

    fn cells(&self) -> Vec<String> {
        let failed = self
            .rows
            .iter()
            .filter(|row| row.analysis.outcome == FleetOutcome::OutOfMemory)
            .count();
        let lacks_events = self.rows.iter().any(|row| row.analysis.events == 0);
        let peak = |of: fn(&Row) -> u64| {
            let at_least = if lacks_events { "at least " } else { "" };
            format!("{at_least}{}", Bytes(self.most(of)))
        };
        let peaks = [
            peak(|row| row.analysis.peak_allocated),
            peak(|row| row.analysis.peak_reserved),
            Bytes(self.most(|row| row.analysis.device_total)).to_string(),
        ];
        let largest = self
            .rows
            .iter()
            .max_by_key(|row| row.analysis.category_bytes)
            .and_then(|row| {
                let category = row.analysis.category.as_ref()?;
                Some(format!(
                    "{}, {}",
                    categories::about(category),
                    Bytes(row.analysis.category_bytes)
                ))
            });
        let failed = if failed == 0 {
            NOTHING.to_owned()
        } else {
            failed.to_string()
        };
        let counts = [self.name.to_owned(), self.rows.len().to_string(), failed];
        counts
            .into_iter()
            .chain(peaks)
            .chain([largest.unwrap_or_else(|| NOTHING.to_owned())])
            .collect()
    }
}

fn shown(cell: &str) -> String {
    let short = between_tags(&shortened(cell, LONGEST_CELL));
    if cell.chars().count() > LONGEST_CELL {
        let whole = between_tags(cell).replace('"', "&quot;");
        format!("<span title=\"{whole}\">{short}</span>")
    } else {
        short
    }
}

/// `link` returns the link of a row, which is that of its first cell.
fn table<'a>(
    page: &mut String,
    title: &str,
    Grid { columns, rows }: &Grid,
    link: impl Fn(usize) -> Option<&'a str>,
) {
    let class = |align: &Align| {
        if *align == Align::Right {
            " class=\"number\""
        } else {
            ""
        }
    };
    let heads: String = columns
        .iter()
        .map(|(head, align)| format!("<th{}>{}</th>", class(align), between_tags(head)))
        .collect();
    let _ = writeln!(
        page,
        "<h2>{}</h2>\n<div class=\"scroll\"><table><thead><tr>{heads}</tr></thead><tbody>",
        between_tags(title)
    );
    for (index, row) in rows.iter().enumerate() {
        page.push_str("<tr>");
        for (column, (cell, (head, align))) in row.iter().zip(columns).enumerate() {
            let text = shown(cell);
            let text = match link(index).filter(|_| column == 0) {
                Some(link) => format!("<a href=\"{link}\">{text}</a>"),
                None => text,
            };
            let _ = write!(page, "<td{} data-head=\"{head}\">{text}</td>", class(align));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody></table></div>\n");
}
