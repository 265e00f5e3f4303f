//! Explanations of recordings of real PyTorch programs.

use std::path::Path;

use harness_allocator::units::Bytes;
use harness_explain::causes::{self, Explanation, Options};
use harness_explain::compare::{self, Side, Whole};
use harness_explain::ranks::{self, ExplainedRank};
use harness_explain::state::{At, History};
use harness_trace::snapshot::Snapshot;

use super::{json, markdown, text};
use crate::terminal::Style;

fn recorded(name: &str) -> Snapshot {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../snapshot/explain/tests/snapshots");
    Snapshot::read(&folder.join(format!("{name}.pickle.gz")))
        .expect("the project contains the recording")
}

fn explained(name: &str, at: At) -> Explanation {
    causes::explain(&recorded(name), 0, Options { memory: None, at })
        .expect("the recording has that moment")
}

#[test]
fn an_error_is_explained_on_one_screen() {
    let shown = ["features", "collect-stats"].map(|name| {
        text::render(
            name,
            &explained(name, At::Automatic),
            Style::Plain,
            Some(110),
        )
    });
    assert!(
        shown.iter().all(|text| text.lines().count() <= 50),
        "one screen"
    );
    insta::assert_snapshot!(shown.join("\n----\n"));
}

#[test]
fn a_state_that_is_no_error_is_explained_too() {
    insta::assert_snapshot!(text::render(
        "streams",
        &explained("streams", At::Peak),
        Style::Plain,
        Some(110)
    ));
}

#[test]
fn a_terminal_gets_no_line_that_is_too_wide() {
    for (name, at) in [
        ("features", At::Automatic),
        ("collect-stats", At::Automatic),
        ("streams", At::End),
    ] {
        for width in [60, 80, 200] {
            let text = text::render(name, &explained(name, at), Style::Plain, Some(width));
            let widest = text.lines().map(|line| line.chars().count()).max();
            assert!(widest <= Some(width), "{widest:?} of {width}:\n{text}");
        }
    }
}

#[test]
fn a_pull_request_gets_markdown_and_a_picture() {
    let explanation = explained("features", At::Automatic);
    insta::assert_snapshot!(markdown::render(
        None,
        ("features", &explanation),
        Some("features.svg")
    ));
    let picture = markdown::draw(&explanation);
    assert!(
        picture.starts_with("<svg")
            && picture.contains("free, but pinned by live blocks")
            && picture.contains("594.50 MiB"),
        "{picture}"
    );
}

#[test]
fn the_bytes_of_the_json_document_add_up() {
    for name in ["features", "collect-stats", "streams"] {
        let explanation = explained(name, At::Automatic);
        let document = serde_json::to_value(json::ExplainDocument::new(name, &explanation))
            .expect("plain data");
        let sum: u64 = document["causes"]
            .as_array()
            .expect("a list")
            .iter()
            .filter_map(|cause| cause["bytes"].as_u64())
            .sum();
        assert_eq!(Some(sum), document["device_total"].as_u64());
        let first = &document["causes"][0];
        assert_eq!(first["cause"], "allocated");
        let id = first["sites"][0]["id"].to_string();
        assert_eq!(document["sites"][&id]["name"], first["sites"][0]["site"]);
    }
}

#[test]
fn several_ranks_are_told_together_with_the_one_that_failed() {
    let (first, second, failed) = (
        explained("streams", At::End),
        explained("streams", At::End),
        explained("features", At::Automatic),
    );
    let ranks = [("rank0", &first), ("rank1", &second), ("rank2", &failed)]
        .map(|(name, explanation)| ExplainedRank { name, explanation });
    let overview = ranks::overview(&ranks);
    assert_eq!(overview.failed, ["rank2"]);
    assert!(
        overview
            .differences
            .iter()
            .all(|difference| difference.rank == "rank2"),
        "{:?}",
        overview.differences
    );
    let all = text::render_ranks(&overview, ("rank2", &failed), Style::Plain, Some(110));
    insta::assert_snapshot!(all.split("\n\n").take(3).collect::<Vec<_>>().join("\n\n"));
}

#[test]
fn two_snapshots_are_compared_by_cause_and_by_site() {
    let snapshots = ["features", "collect-stats"].map(recorded);
    let sides = snapshots.each_ref().map(|snapshot| {
        let options = Options {
            memory: None,
            at: At::Peak,
        };
        let at_peak = causes::explain(snapshot, 0, options).expect("there are events");
        let whole = Whole::of(&History::new(snapshot, 0, causes::config(snapshot)));
        (at_peak, whole)
    });
    let side = |index: usize| Side {
        explanation: &sides[index].0,
        whole: sides[index].1,
    };
    let comparison = compare::compare(side(0), side(1));
    insta::assert_snapshot!(text::render_comparison(
        ["features", "collect-stats"],
        &comparison,
        Style::Plain,
        Some(110)
    ));
    let without_events = Side {
        whole: None,
        ..side(0)
    };
    let comparison = compare::compare(without_events, side(1));
    let shown = text::render_comparison(["a", "b"], &comparison, Style::Plain, None);
    let is_unknown = comparison
        .headline
        .starts_with("Peaks are unknown without events");
    assert!(is_unknown && !shown.contains("over the whole"), "{shown}");
    let same = compare::compare(side(0), side(0));
    assert!(
        same.sites.is_empty()
            && same
                .causes
                .iter()
                .all(|change| change.before == change.after)
    );
    assert!(
        same.headline
            .starts_with("Peak reserved 1.79 GiB as before"),
        "{}",
        same.headline
    );
    let reserved = sides[0].1.map(|whole| whole.peak_reserved);
    assert_eq!(reserved, Some(Bytes(1_927_282_688)));
}
