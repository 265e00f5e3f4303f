use super::*;
use crate::examples::{self, Sampled};

fn shard(index: u32, arm: &str) -> BenchRun {
    BenchRun {
        shard: Some(shard::Shard { index, count: 2 }),
        ..examples::run(1, &[Sampled::noisy(arm, 20_000.0, 0.01)])
    }
}

#[test]
fn shards_become_one_run_in_any_order() {
    let whole = merge(&[shard(2, "b"), shard(1, "a")], false).expect("they belong together");
    let arms: Vec<&str> = whole
        .entries()
        .map(|(_, entry)| entry.arm.as_str())
        .collect();
    assert_eq!(
        (whole.shard, whole.suites.len(), arms),
        (None, 1, vec!["a", "b"])
    );
}

#[test]
fn what_does_not_belong_together_is_refused_with_the_reason() {
    let told = |shards: &[BenchRun]| merge(shards, false).expect_err("it is refused");
    assert_eq!(told(&[]), "no shards are given");
    assert_eq!(told(&[shard(1, "a")]), "missing: shard 2/2");
    assert_eq!(
        told(&[shard(1, "a"), shard(1, "a")]),
        "shard 1/2 appears twice"
    );
    assert_eq!(
        told(&[BenchRun {
            shard: None,
            ..shard(1, "a")
        }]),
        "the run of 2026-11-01T02:00:00Z is not a shard"
    );
    assert_eq!(
        told(&[
            shard(1, "a"),
            BenchRun {
                seed: 2,
                ..shard(2, "b")
            }
        ]),
        "shards 1/2 and 2/2 differ in the seed"
    );
}

#[test]
fn a_missing_shard_makes_the_run_contended() {
    let whole = merge(&[shard(1, "a")], true).expect("it is allowed");
    assert_eq!(whole.conditions.contended, ["shard 2/2 is missing"]);
}
