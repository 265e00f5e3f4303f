use super::*;
use crate::{Report, markdown, tests::examples, text};
use harness_allocator::units::Bytes;

#[test]
fn trainings_under_several_policies_are_ranked_and_their_attempts_told() {
    let records = examples::recoveries();
    let report = Report::new(&records);
    let page = markdown::render(&report).text;
    let section = page
        .split("**Recovery**")
        .nth(1)
        .and_then(|rest| rest.split("<a id=").next())
        .expect("the report has the section");
    let terminal = text::render(
        &report,
        text::Detail::Full,
        crate::terminal::Style::Plain,
        Some(120),
    );
    let table = terminal
        .split("Recovery in")
        .nth(1)
        .expect("the report has the table")
        .split("\n\n")
        .next()
        .unwrap_or_default();
    insta::assert_snapshot!(format!("{}\n\nRecovery in{table}", section.trim()));
}

#[test]
fn only_finished_trainings_of_one_workload_are_ranked() {
    let ranked = |records: &harness_record::Records| {
        let report = Report::new(records);
        let rows = report
            .scenarios
            .iter()
            .flat_map(|scenario| &scenario.by_device)
            .flat_map(rows);
        rows.filter(|row| row.rank.is_some()).count()
    };
    let all = examples::recoveries();
    let first = all.runs[0]
        .steps
        .iter()
        .position(is_finished_training)
        .expect("a training finishes");
    let (mut other_model, mut failed) = (all.clone(), all.clone());
    other_model.runs[0].steps[first]
        .recovery
        .as_mut()
        .expect("it has policies")
        .workload = Some("another".to_owned());
    failed.runs[0].steps[first].outcome = Outcome::OutOfMemory;
    assert!(ranked(&all) > 1);
    assert!(ranked(&other_model) < ranked(&all) && ranked(&failed) < ranked(&all));
}

#[test]
fn what_was_kept_on_the_host_has_a_column_where_something_was() {
    let mut records = examples::recoveries();
    let page = |records: &harness_record::Records| markdown::render(&Report::new(records)).text;
    assert!(!page(&records).contains("host memory"));
    let step = records.runs[0].steps.last_mut().expect("there are steps");
    let host = HostUse {
        peak: Bytes::mib(768),
        copied: Bytes::gib(9),
    };
    step.recovery.as_mut().expect("each has policies").host = host;
    assert_eq!(
        page(&records)
            .matches("768 MiB at the peak, 9 GiB copied")
            .count(),
        1
    );
}

#[test]
fn where_nothing_failed_there_is_no_table() {
    let mut records = examples::recoveries();
    for step in &mut records.runs[0].steps {
        step.recovery
            .as_mut()
            .expect("each has policies")
            .listed
            .clear();
    }
    assert!(
        !markdown::render(&Report::new(&records))
            .text
            .contains("**Recovery**")
    );
}
