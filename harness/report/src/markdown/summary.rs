//! The summary for a CI job's page: verdict, failures and causes.

use super::where_it_ran;
use crate::escape::{code, prose};
use crate::page::Page;
use crate::words::{self, Align};
use crate::{Report, why};
use harness_record::Verdict;

/// Renders the summary as GitHub-flavored Markdown.
#[must_use]
pub fn summary(report: &Report<'_>) -> String {
    let mut page = Page::default();
    page.block("# Out-of-memory report");
    page.block(format!("**{}**", words::verdict_line(report.counts)));
    words::not_started(report.records).iter().for_each(|text| page.block(prose(text)));
    page.table_of_failures(report);
    page.reasons(report);
    page.skipped(report);
    page.end();
    page.text
}

impl Page {
    fn table_of_failures(&mut self, report: &Report<'_>) {
        let rows = report.arms().filter_map(|(scenario, device, arm)| match &arm.shown().verdict {
            Verdict::Failed { first, .. } => Some(vec![
                where_it_ran(report, scenario, device, arm),
                first.at.as_ref().map_or_else(|| words::NOTHING.to_owned(), |at| at.line.to_string()),
                prose(&first.expected),
                prose(&first.seen),
                code(&arm.shown().reproduce),
            ]),
            Verdict::Passed
            | Verdict::FailedAsExpected { .. }
            | Verdict::Skipped { .. }
            | Verdict::Contended { .. }
            | Verdict::Interrupted => None,
        });
        let rows: Vec<Vec<String>> = rows.collect();
        if !rows.is_empty() {
            let columns = [("failed", Align::Left), ("line", Align::Right), ("expected", Align::Left), ("seen", Align::Left)];
            let columns = columns.into_iter().chain([("reproduce", Align::Left)]).map(|(head, align)| (head.to_owned(), align));
            self.table(&columns.collect::<Vec<_>>(), rows);
        }
    }

    /// Adds the causes of failed requests at the end of failed runs.
    fn reasons(&mut self, report: &Report<'_>) {
        let failed = report.arms().filter(|(_, _, arm)| arm.counts.failed > 0);
        let lines = failed.filter_map(|(scenario, device, arm)| {
            let shortage = arm.shown().steps.last()?.failed_request.as_ref()?;
            let place = where_it_ran(report, scenario, device, arm);
            Some(format!("{place}: **{}:** {}", why::title(shortage), prose(&why::explain(shortage))))
        });
        self.bounded_list(lines.collect(), "reason");
    }
}
