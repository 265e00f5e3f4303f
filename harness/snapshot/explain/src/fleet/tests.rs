use std::path::Path;

use harness_trace::snapshot::Snapshot;

use super::*;

#[test]
fn job_and_rank_are_those_of_the_name() {
    let of = |file| {
        let (job, rank) = job_of(file);
        (job, rank)
    };
    assert_eq!(
        of("runs/llama-7b-rank12-gpu4-20261126-044953-6721-1.pickle"),
        ("runs/llama-7b".to_owned(), Some(12))
    );
    assert_eq!(
        of("s3://bucket/job-17/rank_3.pickle.gz"),
        ("s3://bucket/job-17".to_owned(), Some(3))
    );
    assert_eq!(of("oom.pickle"), ("oom".to_owned(), None));
    assert_eq!(of("ranking/oom.pkl.gz"), ("ranking/oom".to_owned(), None));
}

#[test]
fn a_row_has_the_cause_the_line_and_the_changes_that_a_replay_confirms() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots/kept-features.pickle.gz");
    let analysis = Analysis::of(
        &Snapshot::read(&path).expect("the file is a snapshot"),
        None,
    );
    assert_eq!(
        (analysis.outcome, analysis.cause.as_deref()),
        (FleetOutcome::OutOfMemory, Some("inactive_split"))
    );
    assert_eq!(
        analysis.top_site.as_deref(),
        Some("extract_features.py:13 forward")
    );
    assert_eq!(
        (analysis.faithful, analysis.requested),
        (Some(true), 576 << 20)
    );
    assert!(
        analysis
            .cures
            .iter()
            .any(|cure| cure == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        "{:?}",
        analysis.cures
    );
    assert!(
        analysis
            .cures
            .iter()
            .any(|cure| cure == "allocating what extract_features.py:28 main keeps first"),
        "{:?}",
        analysis.cures
    );
    assert!(
        !analysis
            .cures
            .iter()
            .any(|cure| cure.contains("roundup_power2_divisions:4")),
        "{:?}",
        analysis.cures
    );
}

#[test]
fn a_snapshot_without_data_is_one_unreadable_row() {
    let analysis = Analysis::of(&Snapshot::default(), None);
    assert_eq!(
        (analysis.outcome, analysis.problem.as_deref()),
        (
            FleetOutcome::Unreadable,
            Some("the snapshot has neither segments nor events")
        )
    );
}
