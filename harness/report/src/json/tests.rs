use harness_allocator::stats::PoolKind;
use serde_json::Value;

use super::*;
use crate::tests::examples;
use harness_record::Records;

#[test]
fn the_document_is_the_records_one_line_a_run() {
    let records = examples::every_ending();
    let text = super::render(&Report::new(&records), false);
    assert_eq!(
        serde_json::from_str::<Records>(&text).expect("it is JSON"),
        records
    );
    assert_eq!(text.lines().count(), records.runs.len() + 2);
    let empty = Records {
        runs: Vec::new(),
        ..records
    };
    assert_eq!(
        serde_json::from_str::<Records>(&super::render(&Report::new(&empty), false))
            .expect("it is JSON"),
        empty
    );
}

#[test]
fn a_failed_request_has_its_causes_by_name_and_in_words() {
    let records = Records {
        runs: vec![examples::fragmented()],
        ..examples::every_ending()
    };
    let document: Value =
        serde_json::from_str(&super::render(&Report::new(&records), false)).expect("it is JSON");
    let failed = &document["runs"][0]["out_of_memory"][0];
    assert_eq!(
        (&failed["step"], &failed["line"], &failed["stream"]),
        (&3.into(), &10.into(), &"default".into())
    );
    assert_eq!(failed["causes"], serde_json::json!(["fragmented"]));
    assert!(
        failed["why"]
            .as_str()
            .is_some_and(|why| why.starts_with("Enough memory is free in total")),
        "{failed}"
    );
}

#[test]
fn memory_stats_are_added_to_each_run_and_passed_over_by_readers() {
    let mut records = examples::every_ending();
    records.runs[1]
        .stats
        .inactive_split_bytes
        .increase(PoolKind::Large, 20 << 20);
    let text = render(&Report::new(&records), true);
    assert_eq!(
        serde_json::from_str::<Records>(&text).expect("it is JSON"),
        records
    );
    let document: Value = serde_json::from_str(&text).expect("it is JSON");
    assert_eq!(
        document["runs"][1]["memory_stats"]["inactive_split_bytes.large_pool.peak"],
        20 << 20
    );
    for (line, run) in text.lines().skip(1).zip(&records.runs) {
        let flat = to_json(&memory_stats(&run.stats));
        assert!(
            line.trim_end_matches(',')
                .ends_with(&format!(",\"memory_stats\":{flat}}}")),
            "{line}"
        );
    }
}

#[test]
fn memory_stats_have_the_keys_of_pytorch_in_its_order() {
    let stats = MemoryStats {
        num_ooms: 7,
        ..MemoryStats::default()
    };
    let flat = memory_stats(&stats);
    let keys: Vec<&str> = flat.keys().map(String::as_str).collect();
    assert_eq!(keys.len(), 9 * 3 * 4 + 5);
    // Keys are sorted as whole strings: `_` sorts after `.`.
    let ends = [
        "active.all.allocated",
        "active.all.current",
        "active.all.freed",
        "active.all.peak",
        "active.large_pool.allocated",
    ];
    assert_eq!(keys[..5], ends);
    let firsts: Vec<&str> = keys
        .iter()
        .map(|key| key.split('.').next().unwrap_or_default())
        .collect();
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
