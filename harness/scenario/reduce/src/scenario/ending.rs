//! Declares how a reduced scenario ends, so it passes as a test while the failure persists:
//! [`stated`].

use std::path::Path;

use harness_record::{RunRecord, Verdict};

use super::document::{Document, Node, set};
use super::failure::{Failure, Wanted};
use super::{engine::Engine, writer::Written};
use crate::delta::Flow;

/// Adds the expected end: a cause of the OOM, a violated invariant or a reason. The result was run.
/// `None` if none passes.
pub(super) fn stated(
    document: &Document,
    wanted: &Wanted,
    arm: &str,
    path: &Path,
    engine: &dyn Engine,
    origin: &str,
) -> Option<(Document, Failure)> {
    let records = run(document, path, engine)?;
    let (failed, failure) = records
        .iter()
        .find_map(|record| Some((record, wanted.in_run(record)?)))?;
    let passes = |candidate: &Document| {
        run(candidate, path, engine).is_some_and(|records| {
            records
                .iter()
                .all(|record| record.verdict == Verdict::Passed)
        })
    };
    let fails_alike = |record: &RunRecord| match record.verdict {
        Verdict::Passed => true,
        Verdict::FailedAsExpected { .. } => wanted.in_run(record).is_some(),
        _ => false,
    };
    let exact = exact(document, &failure, failed).into_iter().find(passes);
    let stated = exact.or_else(|| {
        let as_expected = expected_to_fail(document, &failure, arm, records.len());
        run(&as_expected, path, engine)
            .is_some_and(|records| records.iter().all(fails_alike))
            .then_some(as_expected)
    });
    let mut stated = stated?;
    // The description cannot change the result, but it must still parse.
    stated.set("about", Node::Scalar(about(&failure, origin)));
    run(&stated, path, engine).map(|_| (stated, failure))
}

fn about(failure: &Failure, origin: &str) -> String {
    let what = failure.to_string();
    let mut letters = what.chars();
    let what: String = letters
        .next()
        .into_iter()
        .flat_map(char::to_uppercase)
        .chain(letters)
        .collect();
    format!("{what}.\n\nReduced by `harness shrink` from {origin}.")
}

fn run(document: &Document, path: &Path, engine: &dyn Engine) -> Option<Vec<RunRecord>> {
    engine
        .run(&document.checked(path).1.ok()?, &mut |_| Flow::Continue(()))
        .ok()
}

/// The documents that express the failure in the scenario language, most specific first.
fn exact(document: &Document, failure: &Failure, failed: &RunRecord) -> Vec<Document> {
    match failure {
        Failure::Oom { cause, .. } => {
            let oom = || Node::Scalar("oom".to_owned());
            let with_cause = cause
                .map(|cause| Node::Map(vec![("oom".to_owned(), Node::Scalar(cause.to_string()))]));
            with_cause
                .into_iter()
                .chain([oom()])
                .filter_map(|expect| with_expect(document, failed, expect))
                .collect()
        }
        Failure::Invariant(invariant, _) => {
            let mut document = document.clone();
            document.set(
                "expect_violation",
                Node::Scalar(invariant.name().to_owned()),
            );
            vec![document]
        }
        Failure::Formula { .. } | Failure::Step { .. } | Failure::Device(_) => Vec::new(),
    }
}

/// The document in which the failed step expects its failure.
fn with_expect(document: &Document, failed: &RunRecord, expect: Node) -> Option<Document> {
    let line = failed.steps.last()?.line;
    let number = Written::of(document)
        .lines
        .iter()
        .position(|&begins| begins == line)?;
    document.with_step(number, |keys| match keys.first_mut()? {
        (_, Node::Map(fields)) => {
            set(fields, "expect", expect.clone());
            Some(())
        }
        _ => None,
    })
}

/// The document that declares its failure, for all configurations or for one of several.
fn expected_to_fail(document: &Document, failure: &Failure, arm: &str, arms: usize) -> Document {
    let reason = Node::Scalar(failure.to_string());
    let reasons = if arms == 1 {
        reason
    } else {
        Node::Map(vec![(arm.to_owned(), reason)])
    };
    let mut document = document.clone();
    document.set("expected_to_fail", reasons);
    document
}
