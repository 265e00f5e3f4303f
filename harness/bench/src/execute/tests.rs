use std::path::Path;

use super::*;

const SUITE: &str = "about: Small.\nneeds: { memory: 64MiB }\narms: [caching]\ntime:\n  - latency: \
     { sizes: [1MiB], cases: [hit] }\n";

fn suite() -> Suite {
    Suite::parse(SUITE, Path::new("small.yaml")).expect("the suite is valid")
}

fn task(suite: &Suite, with_accepted: bool) -> Task<'_> {
    let arm = Arm::Ours(&suite.arms[0]);
    Task::new(&suite.cases[0], arm, Clock::Measured, with_accepted)
}

fn note(task: &mut Task<'_>, side: Side, round: usize, figure: u64) {
    let reading = Reading {
        part: None,
        quantity: Quantity::HostTime,
        batch: 1,
        samples: Ok(vec![figure]),
    };
    task.note(side, Ok(vec![reading]), false, round);
}

/// Returns whether a task is decided whose rounds took these times here and in the accepted build.
fn decided(this: &[u64], accepted: &[u64], threshold: f64) -> bool {
    let suite = suite();
    let mut task = task(&suite, true);
    for (round, (new, old)) in this.iter().zip(accepted).enumerate() {
        note(&mut task, Side::This, round, *new);
        note(&mut task, Side::Accepted, round, *old);
    }
    task.decide(threshold, 8);
    task.is_done()
}

/// The round after which the loop stops, and why, if a round takes these times in turn.
fn stops(figures: &[u64], precision: &str, rounds: [u32; 2]) -> (u32, Stopped) {
    let [least, most] = rounds;
    let text =
        format!("{SUITE}precision: {precision}\nrounds: {{ least: {least}, most: {most} }}\n");
    let suite = Suite::parse(&text, Path::new("small.yaml")).expect("the suite is valid");
    let mut tasks = [task(&suite, false)];
    for (round, figure) in figures.iter().cycle().enumerate() {
        note(&mut tasks[0], Side::This, round, *figure);
        let counted = round as u32 + 1;
        if let Some(stopped) = stopped(&tasks, &suite, counted, false) {
            assert_eq!(
                super::stopped(&tasks, &suite, counted, true),
                Some(stopped),
                "the time does not change what is known"
            );
            return (counted, stopped);
        }
        assert_eq!(
            super::stopped(&tasks, &suite, counted, true),
            Some(Stopped::Budget)
        );
    }
    unreachable!("the number of rounds is limited")
}

#[test]
fn the_loop_goes_on_until_it_is_precise_or_its_rounds_or_time_are_up() {
    assert_eq!(stops(&[1000], "50%", [7, 500]), (7, Stopped::Precise));
    assert_eq!(
        stops(&[1000, 1100], "0.000001%", [7, 9]),
        (9, Stopped::Budget)
    );
    let (rounds, why) = stops(&[1000, 1100], "5%", [2, 500]);
    assert!(why == Stopped::Precise && rounds > 2, "{rounds} {why:?}");
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
