use super::*;
use crate::{Report, tests::examples};
use harness_record::{Records, Verdict};

#[test]
fn model_and_measured_times_of_one_scenario_are_summarised_apart() {
    let records = examples::every_ending();
    let report = Report::new(&records);
    let scenario = report
        .scenarios
        .iter()
        .find(|scenario| scenario.info.name == "oom_retry")
        .expect("the example contains the scenario");
    let timings: Vec<(Clock, usize)> = scenario
        .by_device
        .iter()
        .filter_map(|on_device| Timing::new(on_device, &report.devices[on_device.device]))
        .map(|timing| (timing.clock, timing.rows.len()))
        .collect();
    assert_eq!(timings, [(Clock::Simulated, 2), (Clock::Measured, 2)]);
    for run in &records.runs {
        let own: Vec<u64> = run
            .timings
            .allocate
            .kept
            .iter()
            .map(|time| time.get())
            .collect();
        assert_eq!(
            own.len() as u64,
            run.timings.allocate.count,
            "the examples keep every sample"
        );
    }
}

#[test]
fn runs_that_did_not_pass_are_left_out_and_counted() {
    let mut records = examples::every_ending();
    records
        .runs
        .retain(|run| run.scenario.name == "cross_stream_reuse");
    let failed = records
        .runs
        .iter_mut()
        .find(|run| matches!(run.verdict, Verdict::Failed { .. }))
        .expect("two runs failed");
    failed.verdict = Verdict::Contended {
        reason: "another process took 2 GiB of the device".to_owned(),
    };
    let report = Report::new(&records);
    let timing =
        Timing::new(&report.scenarios[0].by_device[0], &report.devices[0]).expect("one run passed");
    assert_eq!(timing.rows.len(), 1);
    let excluded = [
        "Times exclude 1 run that failed or stopped early.",
        "Times exclude 1 run during which other processes used the device.",
    ];
    assert!(
        timing.footnotes.ends_with(&excluded.map(str::to_owned)),
        "{:?}",
        timing.footnotes
    );
}

#[test]
fn nothing_is_compared_with_a_baseline_that_took_no_time() {
    let mut records = Records {
        runs: vec![
            examples::oom_retry("caching", 0),
            examples::oom_retry("direct", 0),
        ],
        ..examples::every_ending()
    };
    let direct = &mut records.runs[1].timings;
    direct
        .allocate
        .kept
        .iter_mut()
        .for_each(|time| *time = Nanos::ZERO);
    direct.scenario = Nanos::ZERO;
    let report = Report::new(&records);
    let timing = Timing::new(&report.scenarios[0].by_device[0], &report.devices[0])
        .expect("both runs passed");
    assert!(
        timing.footnotes.is_empty(),
        "the baseline passed: {:?}",
        timing.footnotes
    );
    assert!(
        timing
            .rows
            .iter()
            .all(|row| row.allocate_ratio.is_none() && row.scenario_ratio.is_none())
    );
    assert!(
        timing
            .grid()
            .columns
            .iter()
            .all(|(head, _)| !head.contains('÷'))
    );
}

#[test]
fn runs_with_other_processes_have_no_number_of_device_calls() {
    let mut records = Records {
        runs: vec![examples::oom_retry("caching", 0)],
        ..examples::every_ending()
    };
    let timing = |records: &Records| {
        let report = Report::new(records);
        Timing::new(&report.scenarios[0].by_device[0], &report.devices[0])
            .map(|timing| timing.rows[0].calls())
    };
    let alone = timing(&records).expect("the run passed");
    assert_ne!(alone, NOTHING);
    records.runs[0].processes = Some(harness_record::RunProcesses {
        each: Vec::new(),
        together: harness_record::MemoryFigures::default(),
    });
    assert_eq!(timing(&records).as_deref(), Some(NOTHING));
    (records.runs[0].timed, records.runs[0].timings.scenario) = (false, Nanos::ZERO);
    assert_eq!(timing(&records), None, "nothing is known");
}

#[test]
fn a_baseline_that_did_not_run_differs_from_one_that_failed() {
    let baseline = |runs: Vec<RunRecord>| {
        let records = Records {
            runs,
            ..examples::every_ending()
        };
        let report = Report::new(&records);
        Timing::new(&report.scenarios[0].by_device[0], &report.devices[0])
            .map(|timing| timing.footnotes.join(" "))
    };
    let alone = baseline(vec![examples::oom_retry("caching", 0)]);
    assert_eq!(alone, Some(String::new()));
    let direct = RunRecord {
        verdict: Verdict::Interrupted,
        ..examples::oom_retry("direct", 0)
    };
    let notes = baseline(vec![examples::oom_retry("caching", 0), direct]).expect("one run passed");
    assert!(notes.starts_with("No run of `direct` passed"), "{notes}");
}

#[test]
fn a_column_that_tells_nothing_is_left_out() {
    let mut records = Records {
        runs: vec![examples::oom_retry("caching", 0)],
        ..examples::every_ending()
    };
    records.runs[0].timings.lost_to_retry = Nanos::ZERO;
    let report = Report::new(&records);
    let timing =
        Timing::new(&report.scenarios[0].by_device[0], &report.devices[0]).expect("the run passed");
    let overview = Timing::overview(&[("oom_retry", timing)]);
    let heads: Vec<&str> = overview
        .columns
        .iter()
        .map(|(head, _)| head.as_str())
        .collect();
    assert_eq!(
        heads,
        [
            "scenario",
            "allocator",
            "allocate",
            "whole scenario",
            "device calls"
        ],
        "frees take no model time"
    );
    assert_eq!(overview.rows.len(), 1);
    assert_eq!(overview.rows[0].len(), heads.len());
}

#[test]
fn a_run_that_was_not_timed_has_no_times_and_not_zeros() {
    let mut records = Records {
        runs: vec![examples::oom_retry("caching", 0)],
        ..examples::every_ending()
    };
    records.runs[0].timed = false;
    records.runs[0].timings = harness_record::Timings::default();
    let report = Report::new(&records);
    let timing =
        Timing::new(&report.scenarios[0].by_device[0], &report.devices[0]).expect("the run passed");
    let overview = Timing::overview(&[("oom_retry", timing)]);
    let place = overview
        .columns
        .iter()
        .position(|(head, _)| head == "whole scenario")
        .expect("it is always shown");
    assert_eq!(overview.rows[0][place], NOTHING);
}
