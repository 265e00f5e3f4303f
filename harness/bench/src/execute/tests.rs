use std::path::Path;

use super::*;

const SUITE: &str = "about: Small.\nneeds: { memory: 64MiB }\narms: [caching]\ntime:\n  - latency: \
     { sizes: [1MiB], cases: [hit] }\n";

fn suite() -> Suite {
    Suite::parse(SUITE, Path::new("small.yaml")).expect("the suite is valid")
}

/// A task whose rounds took these times here and in the accepted build.
fn decided(this: &[u64], accepted: &[u64], threshold: f64) -> bool {
    let suite = suite();
    let mut task = Task::new(
        &suite.cases[0],
        Arm::Ours(&suite.arms[0]),
        Clock::Measured,
        true,
    );
    for (round, (new, old)) in this.iter().zip(accepted).enumerate() {
        for (side, figure) in [(Side::This, *new), (Side::Accepted, *old)] {
            let samples = Ok(vec![figure]);
            let reading = Reading {
                part: None,
                quantity: Quantity::HostTime,
                batch: 1,
                samples,
            };
            task.note(side, Ok(vec![reading]), false, round);
        }
    }
    task.decide(threshold, 8);
    task.is_done()
}

#[test]
fn a_task_is_decided_when_the_interval_of_the_ratio_is_narrower_than_the_threshold() {
    let level = |count: usize, figure: u64| vec![figure; count];
    assert!(
        decided(&level(8, 1000), &level(8, 1000), 0.05),
        "equal builds"
    );
    assert!(
        decided(&level(8, 1200), &level(8, 1000), 0.05),
        "a difference is as certain as no difference"
    );
    assert!(
        !decided(&level(7, 1000), &level(7, 1000), 0.05),
        "too few rounds"
    );
    let noisy: Vec<u64> = (0..8).map(|round| 1000 + 100 * (round % 4)).collect();
    assert!(!decided(&noisy, &level(8, 1000), 0.05));
    assert!(
        decided(&noisy, &noisy, 0.05),
        "noise that both builds have in a round cancels out"
    );
    assert!(
        decided(&noisy, &level(8, 1000), 0.5),
        "a wider threshold needs less"
    );
}

#[test]
fn the_last_measurement_of_a_case_is_found_by_its_name_or_by_its_parts() {
    let suite = suite();
    let case = &suite.cases[0];
    let at = |name: String, started: &str| ((suite.name.clone(), name), started.to_owned());
    let turns = |entries: Vec<((String, String), String)>| Turns(entries.into_iter().collect());
    assert_eq!(turns(Vec::new()).last(&suite.name, case), "");
    assert_eq!(
        turns(vec![at(case.name(), "2026-11-20")]).last(&suite.name, case),
        "2026-11-20"
    );
    let part = format!("{}: reserved", case.group);
    assert_eq!(
        turns(vec![at(part, "2026-11-20")]).last(&suite.name, case),
        "2026-11-20"
    );
    assert_eq!(
        turns(vec![at("other".to_owned(), "2026-11-20")]).last(&suite.name, case),
        ""
    );
}
