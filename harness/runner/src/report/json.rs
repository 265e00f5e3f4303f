//! The machine format: the records themselves, one line a run, so that two files can be compared line by line.

use serde::Serialize;

use super::Report;

/// The document that [`crate::store::read`] reads back.
#[must_use]
pub fn render(report: &Report<'_>) -> String {
    let records = report.records;
    let runs: Vec<String> = records.runs.iter().map(to_json).collect();
    let harness = to_json(&records.harness);
    let separator = if runs.is_empty() { "" } else { "\n" };
    format!("{{\"version\":{},\"harness\":{harness},\"runs\":[{separator}{}{separator}]}}\n", records.version, runs.join(",\n"))
}

fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("records are plain data with text keys, which always have a JSON form")
}

#[cfg(test)]
mod tests {
    use crate::record::Records;
    use crate::report::{Report, examples};

    #[test]
    fn the_document_is_the_records_one_line_a_run() {
        let records = examples::night();
        let text = super::render(&Report::new(&records));
        assert_eq!(serde_json::from_str::<Records>(&text).expect("it is JSON"), records);
        assert_eq!(text.lines().count(), records.runs.len() + 2);
        let empty = Records { runs: Vec::new(), ..records };
        assert_eq!(serde_json::from_str::<Records>(&super::render(&Report::new(&empty))).expect("it is JSON"), empty);
    }
}
