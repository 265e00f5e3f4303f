//! The summary for a CI job's page: verdict, failures and causes.

use super::where_it_ran;
use crate::escape::{code, prose};
use crate::words::{self, Grid};
use crate::{Report, page::Page, why};

pub(crate) fn summary(report: &Report<'_>) -> String {
    let mut page = Page::default();
    page.block("# Out-of-memory report");
    page.block(format!("**{}**", words::verdict_line(report.counts)));
    words::not_started(report.records)
        .iter()
        .for_each(|text| page.block(prose(text)));
    let rows = report.arms().filter_map(|(scenario, device, arm)| {
        let first = arm.shown().verdict.violation()?;
        Some(vec![
            where_it_ran(report, scenario, device, arm),
            words::or_nothing(first.at.as_ref().map(|at| at.line)),
            prose(&first.expected),
            prose(&first.seen),
            code(&arm.shown().reproduce),
        ])
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
    let failed = report.arms().filter(|(_, _, arm)| arm.counts.failed > 0);
    let reasons = failed.filter_map(|(scenario, device, arm)| {
        let failed_request = arm.shown().steps.last()?.failed_request.as_ref()?;
        let place = where_it_ran(report, scenario, device, arm);
        Some(format!(
            "{place}: **{}:** {}",
            why::title(failed_request),
            prose(&why::explain(failed_request))
        ))
    });
    page.bounded_list(reasons.collect(), "reason");
    page.skipped(report);
    page.ended().text
}
