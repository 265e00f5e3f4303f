//! Shards of invented reports.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::trials::least::OrderLeast;

fn shard(index: u32, plenty: u64, orders: &[&str]) -> Report {
    let part = Part { shard: Shard { index, count: 2 }, names: ["wsl", "linux"].map(str::to_owned).to_vec() };
    let order = |name: &&str| OrderLeast { addresses: (*name).to_owned(), enough: 4, too_little: 2, is_monotonic: true, runs: 2 };
    Report::Least(LeastReport { plenty, peak_reserved: 4, orders: orders.iter().map(order).collect(), part: Some(part) })
}

#[test]
fn merged_shards_have_the_order_of_the_whole() {
    let (merged, missing) = merge(vec![shard(2, 8, &["linux"]), shard(1, 8, &["wsl"])]).unwrap();
    let Report::Least(report) = merged else { panic!("another kind of report: {merged:?}") };
    assert_eq!(report.orders.iter().map(|order| order.addresses.as_str()).collect::<Vec<_>>(), ["wsl", "linux"]);
    assert_eq!((report.part, missing), (None, Vec::new()));
}

#[test]
fn shards_of_different_runs_are_not_merged() {
    let error = |shards: Vec<Report>| merge(shards).unwrap_err();
    assert_eq!(error(vec![shard(1, 8, &[]), shard(2, 9, &[])]), "shards 1/2 and 2/2 differ in the program or its options");
    assert_eq!(error(vec![shard(1, 8, &[]), shard(1, 8, &[])]), "shard 1/2 appears twice");
    let Report::Least(whole) = shard(1, 8, &[]) else { panic!("another kind of report") };
    assert_eq!(error(vec![Report::Least(LeastReport { part: None, ..whole })]), "a report is not of a shard");
    assert_eq!(merge(vec![shard(2, 8, &["linux"])]).unwrap().1, [Shard { index: 1, count: 2 }]);
}

#[test]
fn each_kind_of_report_is_read_from_its_json() {
    let report = shard(1, 8, &["linux"]);
    assert_eq!(serde_json::from_str::<Report>(&serde_json::to_string(&report).unwrap()).unwrap(), report);
    let settings = Report::Settings(SettingsReport { memory: 8, ..SettingsReport::default() });
    assert_eq!(serde_json::from_str::<Report>(&serde_json::to_string(&settings).unwrap()).unwrap(), settings);
}
