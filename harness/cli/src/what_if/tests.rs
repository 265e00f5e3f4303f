use std::path::Path;

use super::*;

const SCENARIO: &str = "about: A test.
needs: { memory: 64MiB }
allocators: [caching, bfc]
steps:
  - alloc: { buffer: a, size: 30MiB }
";

fn plan(scenario: &str, memory: Option<Bytes>, seed: Option<u64>) -> Plan {
    Plan {
        scenarios: vec![
            Scenario::parse(scenario, Path::new("test.yaml")).expect("a valid scenario"),
        ],
        seed,
        memory,
        repetitions: 1,
        audit: true,
        ..Plan::default()
    }
}

fn least(plan: &Plan, source: &DeviceSource) -> String {
    WhatIf::new(plan, source)
        .least(&ProgressBar::hidden())
        .expect("the simulated device opens")
}

#[test]
fn the_bars_are_full_after_all_trials() {
    let plan = plan(SCENARIO, None, None);
    let what_if = WhatIf::new(&plan, &DeviceSource::simulated());
    let bar = ProgressBar::hidden();
    let tried = what_if
        .try_settings(&bar)
        .expect("the simulated device opens");
    assert_eq!(bar.position(), what_if.settings_to_try(), "{tried}");
    let bar = ProgressBar::hidden();
    let least = what_if.least(&bar).expect("the simulated device opens");
    assert_eq!(bar.position(), 2, "{least}");
    assert_eq!(bar.message(), "test with bfc: in 38 MiB?", "{least}");
}

#[test]
fn the_device_profile_limits_the_search() {
    let large = SCENARIO.replace("30MiB", "30GiB").replace("64MiB", "16GiB");
    let source = DeviceSource::simulated()
        .with_profile(Path::new("l4-24"))
        .expect("the profile is part of the program");
    let found = least(&plan(&large, None, None), &source);
    assert!(
        found.contains(
            "caching: it does not pass in 16 GiB, and not in 16 GiB, the most that \
         the device has room for"
        ),
        "{found}"
    );
    let found = least(&plan(&large, None, None), &DeviceSource::simulated());
    assert!(found.contains("caching: 30 GiB would be enough"), "{found}");
}

#[test]
fn a_skipped_scenario_is_not_a_failed_one() {
    let source = DeviceSource::simulated()
        .with_profile(Path::new("l4-24"))
        .expect("the profile is part of the program");
    let plan = plan(SCENARIO, Some(Bytes::gib(40)), None);
    let found = least(&plan, &source);
    assert!(
        found.contains("test with caching: not tried: ") && found.contains("40 GiB"),
        "{found}"
    );
    let tried = WhatIf::new(&plan, &source)
        .try_settings(&ProgressBar::hidden())
        .expect("the simulated device opens");
    assert!(tried.contains("test: not tried: "), "{tried}");
}

#[test]
fn the_seed_of_the_plan_decides() {
    let random = "about: A test.
needs: { memory: 256MiB }
allocators: [direct]
steps:
  - storm: { id: storm, operations: 60, sizes: { min: 1MiB, max: 16MiB }, live: 128MiB,
        lifetime: { min: 5, max: 30 } }
  - expect: num_ooms == 0
";
    let found: std::collections::BTreeSet<String> = (0..4)
        .map(|seed| least(&plan(random, None, Some(seed)), &DeviceSource::simulated()))
        .collect();
    assert!(found.len() > 1, "{found:?}");
}
