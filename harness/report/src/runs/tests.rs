use super::*;
use crate::tests::examples;

#[test]
fn equal_runs_have_no_difference() {
    let compared = compare(&examples::every_ending(), &examples::every_ending());
    assert_eq!(
        (compared.text.as_str(), compared.is_worse),
        ("No difference in 10 arms.\n", false)
    );
}

#[test]
fn what_ended_otherwise_is_listed_with_its_figures() {
    let base = Records {
        runs: vec![
            examples::oom_retry("caching", 0),
            examples::oom_retry("direct", 0),
        ],
        ..examples::every_ending()
    };
    let mut new = base.clone();
    new.runs.pop();
    new.runs[0].stats.reserved_bytes.all.peak += 1 << 20;
    new.runs[0].timings.scenario = Nanos(1);
    let Verdict::Failed { first, rest } = examples::failed("caching", 0).verdict else {
        unreachable!("the example fails")
    };
    new.runs[0].verdict = Verdict::Failed { first, rest };
    let compared = compare(&base, &new);
    assert!(compared.is_worse);
    insta::assert_snapshot!(compared.text);
    assert!(!compare(&new, &base).is_worse);
}
