use std::path::Path;

use super::*;

const SUITE: &str = "about: Small.\nneeds: { memory: 64MiB }\narms: [caching, direct]\nthreshold: \
     5%\ntime:\n  - latency: { sizes: [1MiB, 2MiB], cases: [hit] }\n";
const WHOLE: Scope = Scope {
    is_whole: true,
    shard: None,
};

fn suite(text: &str) -> Suite {
    Suite::parse(text, Path::new("small.yaml")).expect("the suite is valid")
}

fn gate(text: &str, scope: Scope) -> (Suite, Gate) {
    let mut suites = [suite(text)];
    let gate = apply(&mut suites, &definitions(&[suite(SUITE)]), scope);
    let [suite] = suites;
    (suite, gate)
}

#[test]
fn an_unchanged_suite_loses_nothing() {
    assert_eq!(gate(SUITE, WHOLE).1, Gate::default());
}

#[test]
fn a_case_or_arm_that_is_removed_or_renamed_is_lost() {
    let smaller = gate(&SUITE.replace("[1MiB, 2MiB]", "[1MiB]"), WHOLE).1;
    assert_eq!(
        smaller.lost,
        [
            "small: hit, 2 MiB on caching",
            "small: hit, 2 MiB on direct"
        ]
    );
    let renamed = gate(
        &SUITE.replace(
            "direct]",
            "{ caching: { name: other, max_split_size_mb: 32 } }]",
        ),
        WHOLE,
    )
    .1;
    assert_eq!(
        renamed.lost,
        ["small: hit, 1 MiB on direct", "small: hit, 2 MiB on direct"]
    );
    let gone = apply(&mut [], &definitions(&[suite(SUITE)]), WHOLE);
    assert_eq!(gone.lost, ["suite small"]);
    let not_requested = apply(
        &mut [],
        &definitions(&[suite(SUITE)]),
        Scope {
            is_whole: false,
            ..WHOLE
        },
    );
    assert_eq!(not_requested, Gate::default());
}

#[test]
fn a_case_that_does_other_work_is_redefined() {
    let named = SUITE.replace(
        "direct]",
        "{ caching: { name: mine, max_split_size_mb: 32 } }]",
    );
    let other = named.replace("size_mb: 32", "size_mb: 64");
    let mut suites = [suite(&other)];
    let gate = apply(&mut suites, &definitions(&[suite(&named)]), WHOLE);
    assert_eq!(
        gate.redefined,
        ["small: hit, 1 MiB on mine", "small: hit, 2 MiB on mine"]
    );
}

#[test]
fn the_accepted_terms_replace_those_of_the_change() {
    let changed = format!("{SUITE}rounds: {{ least: 2, most: 3 }}\nbudget: 2s\n")
        .replace("threshold: 5%", "threshold: 60%");
    let (suite, gate) = gate(&changed, WHOLE);
    assert_eq!(
        gate.overridden,
        ["small: threshold", "small: budget", "small: rounds"]
    );
    assert_eq!(
        suite,
        Suite {
            about: suite.about.clone(),
            ..super::tests::suite(SUITE)
        }
    );
}

#[test]
fn a_shard_loses_only_its_own_cases() {
    let without = SUITE.replace("[1MiB, 2MiB]", "[1MiB]");
    let lost = |index| {
        gate(
            &without,
            Scope {
                is_whole: true,
                shard: Some(Shard { index, count: 2 }),
            },
        )
        .1
        .lost
        .len()
    };
    assert_eq!(lost(1) + lost(2), 2);
}
