//! Shards of invented reports.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::trials::least::OrderLeast;

fn doubt(reads: u64) -> Doubt {
    Doubt::UncomputedReads {
        reads,
        at: vec!["train.py:12".to_owned()],
        has_torch: true,
    }
}

fn report(index: u32, plenty: u64, orders: &[&str]) -> Report {
    let part = Part {
        shard: Shard { index, count: 2 },
        names: ["wsl", "linux"].map(str::to_owned).to_vec(),
    };
    let order = |name: &&str| OrderLeast {
        addresses: (*name).to_owned(),
        enough: 4,
        too_little: 2,
        is_monotonic: true,
        runs: 2,
        difference: None,
        doubts: Vec::new(),
    };
    Report::Least(LeastReport {
        plenty,
        peak_reserved: 4,
        orders: orders.iter().map(order).collect(),
        doubts: vec![doubt(u64::from(index))],
        part: Some(part),
    })
}

fn run() -> Run {
    [
        ("the version of harness", "0.1.0 (1a2b3c)"),
        ("the command", "python train.py"),
        ("the machine", "h100-80"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .into()
}

fn shard(index: u32, plenty: u64, orders: &[&str]) -> Document {
    Document::read(
        &document(&report(index, plenty, orders), 1, &run())
            .unwrap()
            .to_string(),
    )
    .unwrap()
}

#[test]
fn merged_shards_have_the_order_of_the_whole() {
    let (merged, missing) = merge(vec![shard(2, 8, &["linux"]), shard(1, 8, &["wsl"])]).unwrap();
    let Report::Least(report) = merged else {
        panic!("another kind of report: {merged:?}")
    };
    assert_eq!(
        report
            .orders
            .iter()
            .map(|order| order.addresses.as_str())
            .collect::<Vec<_>>(),
        ["wsl", "linux"]
    );
    assert_eq!((report.part, missing), (None, Vec::new()));
    assert_eq!(report.doubts, [doubt(2)]);
}

#[test]
fn shards_of_different_runs_are_not_merged() {
    let error = |shards: Vec<Document>| merge(shards).unwrap_err();
    assert_eq!(
        error(vec![shard(1, 8, &[]), shard(2, 9, &[])]),
        "shards 1/2 and 2/2 differ in the program or its options"
    );
    assert_eq!(
        error(vec![shard(1, 8, &[]), shard(1, 8, &[])]),
        "shard 1/2 appears twice"
    );
    let Report::Least(whole) = report(1, 8, &[]) else {
        panic!("another kind of report")
    };
    let whole = serde_json::to_string(&LeastReport {
        part: None,
        ..whole
    })
    .unwrap();
    assert_eq!(
        error(vec![Document::read(&whole).unwrap()]),
        "a report is not of a shard"
    );
    for (name, value) in run() {
        let other = Run::from_iter(
            run()
                .into_iter()
                .chain([(name.clone(), "another".to_owned())]),
        );
        let other = document(&report(2, 8, &[]), 1, &other).unwrap().to_string();
        let message = format!("shards 1/2 and 2/2 differ in {name}: `{value}` and `another`");
        assert_eq!(
            error(vec![shard(1, 8, &[]), Document::read(&other).unwrap()]),
            message
        );
        let mut older = run();
        older.remove(&name);
        let older = document(&report(2, 8, &[]), 1, &older).unwrap().to_string();
        assert_eq!(
            error(vec![shard(1, 8, &[]), Document::read(&older).unwrap()]),
            format!("shards 1/2 and 2/2 differ in {name}: `{value}` and `unknown`")
        );
    }
    assert_eq!(
        merge(vec![shard(2, 8, &["linux"])]).unwrap().1,
        [Shard { index: 1, count: 2 }]
    );
}

#[test]
fn a_variable_that_only_one_shard_had_is_unset_in_the_other() {
    let with = Run::from_iter(run().into_iter().chain([(
        "the variable CUDA_VISIBLE_DEVICES".to_owned(),
        "1".to_owned(),
    )]));
    let with = document(&report(2, 8, &[]), 1, &with).unwrap().to_string();
    assert_eq!(
        merge(vec![shard(1, 8, &[]), Document::read(&with).unwrap()]).unwrap_err(),
        "shards 1/2 and 2/2 differ in the variable CUDA_VISIBLE_DEVICES: `unset` and `1`"
    );
}

#[test]
fn a_module_that_both_shards_have_must_be_the_same() {
    let with = |index: u32, modules: &[(&str, &str)]| {
        let modules = modules
            .iter()
            .map(|(name, hash)| (format!("the module {name}"), (*hash).to_owned()));
        let run = Run::from_iter(run().into_iter().chain(modules));
        Document::read(
            &document(&report(index, 8, &[]), 1, &run)
                .unwrap()
                .to_string(),
        )
        .unwrap()
    };
    let model = |hash| [("model", hash)];
    assert_eq!(
        merge(vec![with(1, &model("hash 1")), with(2, &model("hash 2"))]).unwrap_err(),
        "shards 1/2 and 2/2 differ in the module model: `hash 1` and `hash 2`"
    );
    assert!(merge(vec![with(1, &model("hash 1")), with(2, &model("hash 1"))]).is_ok());
    // A module may be imported only after another shard's run wrote it.
    assert!(merge(vec![with(1, &model("hash 1")), with(2, &[])]).is_ok());
}

#[test]
fn a_shard_whose_version_was_removed_is_refused() {
    let mut document = document(&report(1, 8, &["wsl"]), 1, &run()).unwrap();
    document.as_object_mut().unwrap().shift_remove(VERSION);
    let document = Document::read(&document.to_string()).unwrap();
    assert_eq!(
        merge(vec![document, shard(2, 8, &["linux"])]).unwrap_err(),
        "shard 1/2 is not as `harness exec` wrote it: run it again"
    );
}

#[test]
fn each_kind_of_report_is_read_from_its_json() {
    let report = report(1, 8, &["linux"]);
    assert_eq!(
        serde_json::from_str::<Report>(&serde_json::to_string(&report).unwrap()).unwrap(),
        report
    );
    let settings = Report::Settings(SettingsReport {
        memory: 8,
        ..SettingsReport::default()
    });
    assert_eq!(
        serde_json::from_str::<Report>(&serde_json::to_string(&settings).unwrap()).unwrap(),
        settings
    );
}

/// The places of all values in a document.
fn places(value: &serde_json::Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    let of = |key: String, value, found: &mut _| places(value, &format!("{at}/{key}"), found);
    value
        .as_object()
        .into_iter()
        .flatten()
        .for_each(|(key, value)| of(key.clone(), value, found));
    value
        .as_array()
        .into_iter()
        .flatten()
        .enumerate()
        .for_each(|(index, value)| of(index.to_string(), value, found));
}

#[test]
fn a_changed_value_anywhere_in_a_shard_is_refused() {
    let whole = document(&report(1, 8, &["wsl"]), 1, &run()).unwrap();
    let mut found = Vec::new();
    places(&whole, "", &mut found);
    assert!(found.len() > 15, "{found:?}");
    for place in found {
        for other in [
            serde_json::json!(7),
            serde_json::json!("other"),
            serde_json::Value::Null,
        ] {
            let mut changed = whole.clone();
            *changed.pointer_mut(&place).unwrap() = other;
            let merged = Document::read(&changed.to_string())
                .map(|changed| merge(vec![changed, shard(2, 8, &["linux"])]));
            assert!(
                changed == whole || !matches!(merged, Ok(Ok(_))),
                "{place}: {changed}"
            );
        }
    }
}
