pub(crate) mod examples;

use super::*;

#[test]
fn runs_are_grouped_by_scenario_device_and_allocator_in_order_of_appearance() {
    let records = examples::every_ending();
    let report = Report::new(&records);
    let arms: Vec<String> = report
        .places()
        .map(|place| {
            format!(
                "{} {} {} {}",
                place.scenario.info.name,
                place.device.label,
                place.arm.allocator,
                place.arm.runs.len()
            )
        })
        .collect();
    assert_eq!(
        arms,
        [
            "oom_retry simulated caching 2",
            "oom_retry simulated direct 2",
            "oom_retry simulated async_pool 1",
            "oom_retry Example GPU caching 3",
            "oom_retry Example GPU direct 3",
            "storm simulated caching 1",
            "cross_stream_reuse simulated caching 2",
            "cross_stream_reuse simulated expandable 1",
            "training simulated caching 1",
            "nvml_ledger Example GPU caching 1",
        ]
    );
    assert_eq!(
        report.counts,
        VerdictCounts {
            passed: 12,
            failed: 2,
            skipped: 1,
            insufficient: 1,
            contended: 1,
            interrupted: 1
        }
    );
    let clocks: Vec<Clock> = report
        .devices
        .iter()
        .map(|device| device.info.clock)
        .collect();
    assert_eq!(clocks, [Clock::Simulated, Clock::Measured]);
}

#[test]
fn a_limited_device_stays_one_device_whatever_the_limit() {
    let mut records = examples::every_ending();
    records.runs.truncate(2);
    records.runs[1].device.total = Bytes::gib(2);
    let report = Report::new(&records);
    assert_eq!(report.devices.len(), 1);
}

#[test]
fn another_driver_makes_another_device() {
    let mut records = examples::every_ending();
    let mut other = examples::measured("caching", 0);
    other.device.fingerprint.driver = Some("2.0".to_owned());
    records.runs.push(other);
    let labels: Vec<String> = Report::new(&records)
        .devices
        .into_iter()
        .map(|device| device.label)
        .collect();
    assert_eq!(labels, ["simulated", "Example GPU", "Example GPU 2"]);
}

#[test]
fn names_that_look_alike_get_numbers() {
    let mut taken = BTreeSet::new();
    assert_eq!(
        ["a", "a", "a-2"].map(|name| unique(name, "-", &mut taken)),
        ["a", "a-2", "a-2-2"]
    );
}
