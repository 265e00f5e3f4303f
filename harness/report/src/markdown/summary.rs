//! The summary for a CI job's page: verdict, failures and causes.

use crate::escape::{code, prose};
use crate::words::{self, Grid};
use crate::{Report, page::Page};

pub(crate) fn summary(report: &Report<'_>) -> String {
    let mut page = Page::default();
    page.block("# Out-of-memory report");
    page.block(format!("**{}**", words::verdict_line(report.counts)));
    words::not_started(report.records)
        .iter()
        .for_each(|text| page.block(prose(text)));
    let rows = report.failures().map(|(place, failure)| {
        vec![
            place.markdown(),
            words::or_nothing(failure.first.at.as_ref().map(|at| at.line)),
            prose(&failure.first.expected),
            prose(&failure.first.seen),
            code(&failure.run.reproduce),
        ]
    });
    let failures = Grid::new(
        "lrl",
        ["failed", "line", "expected", "seen", "reproduce"],
        rows,
    );
    if !failures.rows.is_empty() {
        page.table(&failures);
    }
    // The causes of failed requests at the end of failed runs.
    let reasons = report.failures().filter_map(|(place, failure)| {
        let (title, why) = failure.why()?;
        Some(format!(
            "{}: **{title}:** {}",
            place.markdown(),
            prose(&why)
        ))
    });
    page.bounded_list(reasons.collect(), "reason");
    page.unjudged(report);
    page.ended().text
}
