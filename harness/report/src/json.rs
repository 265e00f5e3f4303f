//! The JSON format: the records, with one line per run for line-by-line comparison.

use std::collections::BTreeMap;

use harness_allocator::stats::{MemoryStats, StatKey};
use serde::Serialize;

use super::Report;
use super::why::{self, OutOfMemory};
use harness_record::RunRecord;

/// Renders the document that [`crate::store::read`] reads.
pub fn render(report: &Report<'_>) -> String {
    document(report, |run| to_json(&Explained::new(run, None)))
}

/// Renders the document with [`memory_stats`] in each run. They repeat `stats` in about 4 KiB, so saved reports omit them.
/// Readers ignore them.
pub fn render_with_memory_stats(report: &Report<'_>) -> String {
    document(report, |run| to_json(&Explained::new(run, Some(memory_stats(&run.stats)))))
}

/// A run with derived explanations. Readers ignore the derived fields.
#[derive(Serialize)]
struct Explained<'a> {
    #[serde(flatten)]
    run: &'a RunRecord,
    /// All failed requests with their causes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    out_of_memory: Vec<OutOfMemory>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_stats: Option<BTreeMap<String, u64>>,
}

impl<'a> Explained<'a> {
    fn new(run: &'a RunRecord, memory_stats: Option<BTreeMap<String, u64>>) -> Self {
        Self { run, out_of_memory: why::of_run(run).collect(), memory_stats }
    }
}

/// Returns the flat result of `torch.cuda.memory_stats()`, sorted by key. Keys for oversize allocations and settings are missing.
pub fn memory_stats(stats: &MemoryStats) -> BTreeMap<String, u64> {
    StatKey::all().map(|key| (key.to_string(), stats.get(key))).collect()
}

fn document(report: &Report<'_>, run_to_json: impl Fn(&RunRecord) -> String) -> String {
    let records = report.records;
    let runs: Vec<String> = records.runs.iter().map(run_to_json).collect();
    let harness = to_json(&records.harness);
    let separator = if runs.is_empty() { "" } else { "\n" };
    let not_started =
        if records.not_started.is_empty() { String::new() } else { format!(",\"not_started\":{}", to_json(&records.not_started)) };
    format!(
        "{{\"version\":{},\"harness\":{harness},\"runs\":[{separator}{}{separator}]{not_started}}}\n",
        records.version,
        runs.join(",\n")
    )
}

fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("records are plain data with text keys, which always have a JSON form")
}

#[cfg(test)]
mod tests {
    use harness_allocator::stats::PoolKind;
    use serde_json::Value;

    use super::*;
    use crate::examples;
    use harness_record::Records;

    #[test]
    fn the_document_is_the_records_one_line_a_run() {
        let records = examples::every_ending();
        let text = super::render(&Report::new(&records));
        assert_eq!(serde_json::from_str::<Records>(&text).expect("it is JSON"), records);
        assert_eq!(text.lines().count(), records.runs.len() + 2);
        let empty = Records { runs: Vec::new(), ..records };
        assert_eq!(serde_json::from_str::<Records>(&super::render(&Report::new(&empty))).expect("it is JSON"), empty);
    }

    #[test]
    fn a_failed_request_has_its_causes_by_name_and_in_words() {
        let records = Records { runs: vec![examples::fragmented()], ..examples::every_ending() };
        let document: Value = serde_json::from_str(&super::render(&Report::new(&records))).expect("it is JSON");
        let failed = &document["runs"][0]["out_of_memory"][0];
        assert_eq!((&failed["step"], &failed["line"], &failed["stream"]), (&3.into(), &10.into(), &"default".into()));
        assert_eq!(failed["causes"], serde_json::json!(["fragmented"]));
        assert!(failed["why"].as_str().is_some_and(|why| why.starts_with("Enough memory is free in total")), "{failed}");
    }

    #[test]
    fn memory_stats_are_added_to_each_run_and_passed_over_by_readers() {
        let mut records = examples::every_ending();
        records.runs[1].stats.inactive_split_bytes.increase(PoolKind::Large, 20 << 20);
        let text = render_with_memory_stats(&Report::new(&records));
        assert_eq!(serde_json::from_str::<Records>(&text).expect("it is JSON"), records);
        let document: Value = serde_json::from_str(&text).expect("it is JSON");
        assert_eq!(document["runs"][1]["memory_stats"]["inactive_split_bytes.large_pool.peak"], 20 << 20);
        for (line, run) in text.lines().skip(1).zip(&records.runs) {
            let flat = to_json(&memory_stats(&run.stats));
            assert!(line.trim_end_matches(',').ends_with(&format!(",\"memory_stats\":{flat}}}")), "{line}");
        }
    }

    #[test]
    fn memory_stats_have_the_keys_of_pytorch_in_its_order() {
        let stats = MemoryStats { num_ooms: 7, ..MemoryStats::default() };
        let flat = memory_stats(&stats);
        let keys: Vec<&str> = flat.keys().map(String::as_str).collect();
        assert_eq!(keys.len(), 9 * 3 * 4 + 5);
        // Keys are sorted as whole strings: `_` sorts after `.`.
        let ends = ["active.all.allocated", "active.all.current", "active.all.freed", "active.all.peak", "active.large_pool.allocated"];
        assert_eq!(keys[..5], ends);
        let firsts: Vec<&str> = keys.iter().map(|key| key.split('.').next().unwrap_or_default()).collect();
        let mut families = firsts;
        families.dedup();
        assert_eq!(
            families,
            [
                "active",
                "active_bytes",
                "allocated_bytes",
                "allocation",
                "inactive_split",
                "inactive_split_bytes",
                "num_alloc_retries",
                "num_device_alloc",
                "num_device_free",
                "num_ooms",
                "num_sync_all_streams",
                "requested_bytes",
                "reserved_bytes",
                "segment",
            ]
        );
        assert_eq!(flat["num_ooms"], 7);
    }
}
