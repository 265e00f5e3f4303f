//! What a reduced scenario says of how it ends, so that it passes as a test for as long as it fails: [`stated`].

use std::path::Path;

use harness_record::{RunRecord, Verdict};
use harness_scenario::Scenario;

use super::document::{Document, Node, set};
use super::engine::Engine;
use super::failure::{Failure, Wanted};
use super::writer::Written;
use crate::delta::Flow;

/// The document with what it says of its end: the cause for which a request is refused, the invariant that is violated, or why it fails; and how it
/// fails. It was run, and ends so. `None` where it would not.
pub(super) fn stated(
    document: &Document,
    wanted: &Wanted,
    arm: &str,
    path: &Path,
    engine: &dyn Engine,
    origin: &str,
) -> Option<(Document, Failure)> {
    let records = run(document, path, engine)?;
    let (failed, failure) = records.iter().find_map(|record| Some((record, wanted.in_run(record)?)))?;
    let passes = |candidate: &Document| {
        run(candidate, path, engine).is_some_and(|records| records.iter().all(|record| record.verdict == Verdict::Passed))
    };
    let fails_alike = |record: &RunRecord| match record.verdict {
        Verdict::Passed => true,
        Verdict::FailedAsExpected { .. } => wanted.in_run(record).is_some(),
        _ => false,
    };
    let exact = exact(document, &failure, failed).into_iter().find(passes);
    let stated = exact.or_else(|| {
        let as_expected = expected_to_fail(document, &failure, arm, records.len());
        run(&as_expected, path, engine).is_some_and(|records| records.iter().all(fails_alike)).then_some(as_expected)
    });
    let mut stated = stated?;
    // Of what it says of itself nothing depends, and it is read once more all the same.
    stated.set("about", Node::Scalar(about(&failure, origin)));
    run(&stated, path, engine).map(|_| (stated, failure))
}

fn about(failure: &Failure, origin: &str) -> String {
    let what = failure.to_string();
    let mut letters = what.chars();
    let what: String = letters.next().into_iter().flat_map(char::to_uppercase).chain(letters).collect();
    format!("{what}.\n\nReduced by `harness shrink` from {origin}.")
}

fn run(document: &Document, path: &Path, engine: &dyn Engine) -> Option<Vec<RunRecord>> {
    let scenario = Scenario::parse(&Written::of(document).text, path).ok()?;
    engine.run(&scenario, &mut |_| Flow::Continue(())).ok()
}

/// Where the language has a word for the failure: the document with it, the most exact one first.
fn exact(document: &Document, failure: &Failure, failed: &RunRecord) -> Vec<Document> {
    match failure {
        Failure::Oom { cause, .. } => {
            let oom = || Node::Scalar("oom".to_owned());
            let with_cause = cause.map(|cause| Node::Map(vec![("oom".to_owned(), Node::Scalar(cause.to_string()))]));
            with_cause.into_iter().chain([oom()]).filter_map(|expect| with_expect(document, failed, expect)).collect()
        }
        Failure::Invariant(invariant, _) => {
            let mut document = document.clone();
            document.set("expect_violation", Node::Scalar(invariant.name().to_owned()));
            vec![document]
        }
        Failure::Formula { .. } | Failure::Step { .. } | Failure::Device(_) => Vec::new(),
    }
}

/// The document in which the step that failed expects to end so.
fn with_expect(document: &Document, failed: &RunRecord, expect: Node) -> Option<Document> {
    let line = failed.steps.last()?.line;
    let number = Written::of(document).lines.iter().position(|&begins| begins == line)?;
    let mut document = document.clone();
    match document.step_mut(number)?.keys.first_mut()? {
        (_, Node::Map(fields)) => set(fields, "expect", expect),
        _ => return None,
    }
    Some(document)
}

/// The document that says why it fails: all of it, or of several arms the one that fails.
fn expected_to_fail(document: &Document, failure: &Failure, arm: &str, arms: usize) -> Document {
    let reason = Node::Scalar(failure.to_string());
    let reasons = if arms == 1 { reason } else { Node::Map(vec![(arm.to_owned(), reason)]) };
    let mut document = document.clone();
    document.set("expected_to_fail", reasons);
    document
}
