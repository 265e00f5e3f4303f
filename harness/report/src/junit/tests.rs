use super::*;
use crate::{bench::tests as runs, tests::examples};
use harness_record::Records;

#[test]
fn runs_are_cases_with_verdicts_reasons_and_commands() {
    let records = examples::every_ending();
    insta::assert_snapshot!(of_runs(&Report::new(&records)));
}

#[test]
fn a_failed_request_has_its_cause_by_name_and_in_words() {
    let records = Records {
        runs: vec![examples::fragmented()],
        ..examples::every_ending()
    };
    let text = of_runs(&Report::new(&records));
    assert!(
        text.contains(
            "<property name=\"out of memory at line 10\" value=\"fragmented: Enough \
         memory is free in total"
        ),
        "{text}"
    );
    assert!(
        text.contains("Why free memory did not help: Enough memory is free in total"),
        "{text}"
    );
}

#[test]
fn an_untimed_run_has_no_time() {
    let mut run = examples::measured("caching", 0);
    run.timings = harness_record::Timings::default();
    let records = Records {
        runs: vec![run],
        ..examples::every_ending()
    };
    let text = of_runs(&Report::new(&records));
    assert!(
        !text
            .lines()
            .any(|line| line.contains("<testcase") && line.contains(" time=")),
        "{text}"
    );
}

#[test]
fn model_times_are_not_times_of_cases() {
    let document =
        Document::deserialize_from_str(&of_runs(&Report::new(&examples::every_ending())))
            .expect("the document is well formed");
    // The run of `nvml_ledger` did not pass, so it has no time.
    for case in document
        .test_suites
        .iter()
        .filter(|suite| suite.name.as_str() != "nvml_ledger")
        .flat_map(|suite| &suite.test_cases)
    {
        assert_eq!(
            case.time.is_some(),
            case.name.as_str().contains("on Example GPU"),
            "{}",
            case.name.as_str()
        );
    }
    let run = of_bench(&runs::model());
    assert!(
        !run.lines()
            .any(|line| line.contains("<testcase") && line.contains(" time=\"")),
        "{run}"
    );
}

#[test]
fn a_run_fails_where_it_is_broken_or_worse_and_nowhere_else() {
    let document = Document::deserialize_from_str(&of_bench(&runs::eventful()))
        .expect("the document is well formed");
    assert_eq!(
        (
            document.tests,
            document.failures,
            document.skipped,
            document.errors
        ),
        (7, 4, 1, 0)
    );
}

#[test]
fn names_cannot_break_the_document() {
    let mut run = runs::eventful();
    run.suites[0].name = "a<b>&\"'\u{0}]]>\u{fffe}\u{ffff}".to_owned();
    let text = of_bench(&run);
    assert!(
        text.contains(r"\u{fffe}\u{ffff}") && !text.contains(['\u{fffe}', '\u{ffff}']),
        "{text}"
    );
    let document = Document::deserialize_from_str(&text).expect("the document is well formed");
    assert!(
        document.test_suites[0]
            .name
            .as_str()
            .starts_with("a<b>&\"'"),
        "{:?}",
        document.test_suites[0].name
    );
}
