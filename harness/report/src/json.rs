use std::collections::BTreeMap;

use harness_allocator::stats::{MemoryStats, StatKey};
use serde::Serialize;

use super::Report;
use super::why::{self, OutOfMemory};
use harness_record::RunRecord;

/// A run with derived explanations. Readers ignore the derived fields.
#[derive(Serialize)]
struct Explained<'a> {
    #[serde(flatten)]
    run: &'a RunRecord,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    out_of_memory: Vec<OutOfMemory>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_stats: Option<BTreeMap<String, u64>>,
}

/// Returns the flat result of `torch.cuda.memory_stats()`, sorted by key. Keys for oversize
/// allocations and settings are missing.
pub fn memory_stats(stats: &MemoryStats) -> BTreeMap<String, u64> {
    StatKey::all()
        .map(|key| (key.to_string(), stats.get(key)))
        .collect()
}

/// Renders the document that [`crate::store::read`] reads. [`memory_stats`] repeat `stats` of each
/// run in about 4 KiB, so saved reports omit them. Readers ignore them.
pub fn render(report: &Report<'_>, has_memory_stats: bool) -> String {
    let records = report.records;
    let explained = |run: &RunRecord| {
        let memory_stats = has_memory_stats.then(|| memory_stats(&run.stats));
        to_json(&Explained {
            run,
            out_of_memory: why::of_run(run).collect(),
            memory_stats,
        })
    };
    let runs: Vec<String> = records.runs.iter().map(explained).collect();
    let harness = to_json(&records.harness);
    let separator = if runs.is_empty() { "" } else { "\n" };
    let not_started = if records.not_started.is_empty() {
        String::new()
    } else {
        format!(",\"not_started\":{}", to_json(&records.not_started))
    };
    format!(
        "{{\"version\":{},\"harness\":{harness},\"runs\":[{separator}{}{separator}]{not_started}}}\
         \n",
        records.version,
        runs.join(",\n")
    )
}

fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value)
        .expect("records are plain data with text keys, which always have a JSON form")
}

#[cfg(test)]
mod tests;
