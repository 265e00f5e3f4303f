use super::*;
use crate::tests::examples;
use harness_record::PlannedRun;
use harness_scenario::{ReportKey, Unit};

#[test]
fn sizes_show_their_bytes_only_where_the_human_form_rounds() {
    assert_eq!(size(Bytes::mib(400)), "400 MiB");
    assert_eq!(size(Bytes(43_008_000)), "41.02 MiB (43008000)");
    assert_eq!(size(Bytes(1_610_612_736)), "1.50 GiB");
    assert_eq!(size(Bytes::ZERO), "0 B");
    assert_eq!(size(Bytes(u64::MAX)), "16 EiB (18446744073709551615)");
}

#[test]
fn the_first_line_counts_every_kind_of_end() {
    assert_eq!(verdict_line(VerdictCounts::default()), "Nothing was run.");
    assert_eq!(
        verdict_line(VerdictCounts {
            passed: 1,
            ..VerdictCounts::default()
        }),
        "The one run passed."
    );
    assert_eq!(
        verdict_line(VerdictCounts {
            passed: 3,
            ..VerdictCounts::default()
        }),
        "All 3 runs passed."
    );
    assert_eq!(
        verdict_line(VerdictCounts {
            passed: 1,
            skipped: 2,
            ..VerdictCounts::default()
        }),
        "No run failed: 1 passed, 0 failed, 2 skipped."
    );
    assert_eq!(
        verdict_line(VerdictCounts {
            passed: 4,
            failed: 1,
            skipped: 0,
            contended: 1,
            interrupted: 1,
            ..VerdictCounts::default()
        }),
        "1 of 7 runs failed: 4 passed, 1 failed, 0 skipped, 1 contended, 1 interrupted."
    );
}

#[test]
fn repetitions_are_counted_in_the_verdict() {
    assert_eq!(
        verdicts(VerdictCounts {
            passed: 1,
            ..VerdictCounts::default()
        }),
        "passed"
    );
    assert_eq!(
        verdicts(VerdictCounts {
            passed: 5,
            ..VerdictCounts::default()
        }),
        "passed ×5"
    );
    assert_eq!(
        verdicts(VerdictCounts {
            passed: 4,
            failed: 1,
            ..VerdictCounts::default()
        }),
        "FAILED 1 of 5, passed 4 of 5"
    );
}

#[test]
fn metrics_have_the_unit_of_their_name() {
    assert_eq!(metric("reserved_bytes.all.peak", 1 << 20), "1 MiB");
    assert_eq!(metric("given_back_bytes", 2048), "2 KiB");
    assert_eq!(metric("recovery_time", 1_500), "1.50 µs");
    assert_eq!(metric("num_ooms", 3), "3");
}

#[test]
fn everything_that_a_step_may_count_has_its_unit() {
    for key in ReportKey::ALL {
        let expected = match key.unit() {
            Unit::Bytes => "1 MiB".to_owned(),
            Unit::Count => (1 << 20).to_string(),
            Unit::Time => Nanos(1 << 20).to_string(),
        };
        assert_eq!(metric(key.name(), 1 << 20), expected, "{key}");
    }
}

#[test]
fn steps_that_are_not_recorded_are_told() {
    let run = |unrecorded_steps| {
        let mut run = examples::long_run(2, &[]);
        run.unrecorded_steps = unrecorded_steps;
        run.steps[1].number += unrecorded_steps as u32;
        run
    };
    assert_eq!(unrecorded(&run(0)), None);
    let one =
        "1 step more ran and is not recorded after step 1: a record has a limited number of steps.";
    assert_eq!(unrecorded(&run(1)).as_deref(), Some(one));
    assert!(
        unrecorded(&run(9))
            .is_some_and(|text| text.starts_with("9 steps more ran and are not recorded"))
    );
}

#[test]
fn what_did_not_start_is_told_with_its_first_names() {
    let mut records = examples::every_ending();
    assert_eq!(not_started(&records), None);
    let planned = |number| PlannedRun {
        scenario: format!("s{number}"),
        allocator: "caching".to_owned(),
        repetition: 0,
    };
    records.not_started = (1..=2).map(planned).collect();
    let two = "Incomplete: 2 of 19 runs did not start: `s1` with `caching`, `s2` with `caching`.";
    assert_eq!(not_started(&records).as_deref(), Some(two));
    records.not_started = (1..=9).map(planned).collect();
    assert!(not_started(&records).is_some_and(
        |text| text.starts_with("Incomplete: 9 of 26 runs") && text.ends_with(", 4 more.")
    ));
}

#[test]
fn a_cost_model_of_several_devices_is_named_once() {
    let mut records = examples::every_ending();
    records.runs.truncate(2);
    records.runs[1].device.name = "another".to_owned();
    let report = Report::new(&records);
    let warning = model_time_warning(&report).expect("both are simulated");
    assert_eq!(
        (report.devices.len(), warning.matches("example 1").count()),
        (2, 1),
        "{warning}"
    );
}
