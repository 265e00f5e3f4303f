//! Comparison with the accepted build, and `harness report` on existing runs.

use std::{collections::BTreeSet, fs, process::Command};

use harness_bench::record::{Basis, BenchRun, Counts, EntryResult, NOT_IN_TURN, Verdict};
use serde_json::Value;

use super::world::{SMALL, World};

const PROGRAM: &str = env!("CARGO_BIN_EXE_harness");

/// A world with two runs. The first one was faster than the second.
fn world_with_runs() -> (World, [String; 2]) {
    let world = World::without_gpu().with("small.yaml", SMALL);
    let run = ["small.yaml", "--device", "sim", "--reports", "reports"];
    world.bench(&run);
    world.rewrite_first_run(|base| {
        for entry in base.suites[0]
            .entries
            .iter_mut()
            .filter(|entry| entry.arm == "direct")
        {
            let EntryResult::Measured(measured) = &mut entry.outcome else {
                panic!("{entry:?}")
            };
            let summary = &mut measured.summary;
            [&mut summary.median, &mut summary.min, &mut summary.max]
                .into_iter()
                .for_each(|figure| *figure -= 1);
        }
    });
    world.bench(&run);
    let folders = fs::read_dir(world.path("reports/nightly")).unwrap();
    let mut runs: Vec<String> = folders
        .map(|folder| {
            format!(
                "reports/nightly/{}",
                folder.unwrap().file_name().to_string_lossy()
            )
        })
        .collect();
    runs.sort_by_key(|folder| world.run(folder).started);
    (world, runs.try_into().unwrap())
}

#[test]
fn the_same_build_side_by_side_changes_nothing() {
    let world = World::without_gpu().with("small.yaml", SMALL);
    let ran = world.bench(&[
        "small.yaml",
        "--device",
        "sim",
        "--report",
        "run",
        "--accepted",
        PROGRAM,
    ]);
    assert_eq!(ran.code, Some(0), "{}", ran.told());
    let run = world.run("run");
    assert!(
        run.entries()
            .all(|(_, entry)| entry.accepted.as_ref() == Some(&entry.outcome)),
        "a virtual clock gives the same figures"
    );
    let comparison = run.comparison.unwrap();
    assert!(matches!(comparison.basis, Basis::SideBySide { .. }));
    assert_eq!(Counts::of(&comparison.changes).with(Verdict::Same), 12);
    assert!(
        ran.out.contains("Nothing changed, of 12 entries compared"),
        "{}",
        ran.out
    );
}

#[test]
fn an_accepted_build_that_is_a_picosecond_faster_gives_exit_code_1() {
    // Every operation took one picosecond with it.
    let faster =
        format!("#!/bin/sh\n{PROGRAM} \"$@\" | sed -u 's/\"Ok\":\\[[0-9]*\\]/\"Ok\":[1]/'\n");
    let world = World::without_gpu()
        .with("small.yaml", SMALL)
        .with_program("faster", &faster);
    let ran = world.bench(&[
        "small.yaml",
        "--device",
        "sim",
        "--report",
        "run",
        "--accepted",
        "./faster",
    ]);
    assert_eq!(ran.code, Some(1), "{}", ran.told());
    let changes = world.run("run").comparison.unwrap().changes;
    assert!(
        changes
            .iter()
            .any(|change| change.verdict == Verdict::Worse),
        "{}",
        ran.told()
    );
}

#[test]
fn measured_times_are_put_side_by_side_round_by_round() {
    let text = "about: x\nneeds: { memory: 64MiB }\narms: [caching]\nrounds: { least: 12, most: 12 \
         }\nbudget: 60s\ntime: [trace: { file: t.txt }]\n";
    let trace: String = (0..200)
        .map(|id| format!("a {id} 4096 0\nf {id}\n"))
        .collect();
    let world = World::without_gpu()
        .with("suite.yaml", text)
        .with("t.txt", &trace);
    let ran = world.bench(&[
        "suite.yaml",
        "--device",
        "sim",
        "--report",
        "run",
        "--accepted",
        PROGRAM,
    ]);
    let run = world.run("run");
    let (_, entry) = run.entries().next().unwrap();
    let (ours, theirs) = (
        entry.outcome.measured().unwrap(),
        entry.accepted.as_ref().unwrap().measured().unwrap(),
    );
    assert_eq!(
        (ours.rounds.len(), theirs.rounds.len(), ours.batch),
        (12, 12, theirs.batch),
        "{}",
        ran.told()
    );
    assert!(
        ours.rounds
            .iter()
            .chain(&theirs.rounds)
            .all(Option::is_some)
    );
    assert!(run.comparison.unwrap().changes[0].figures.is_some());
}

#[test]
fn a_case_that_the_time_does_not_reach_waits_for_the_next_run_which_begins_with_it() {
    // 18 entries are more than one block, and one nanosecond is used up by the first of them.
    let suite = "about: A test.\nneeds: { memory: 64MiB }\narms: [caching, expandable, bfc, \
         rmm_pool, async_pool, direct]\n\
                 time: [trace: { file: a.txt }, trace: { file: b.txt }, trace: { file: c.txt }]\n";
    let trace = "a 1 1024 0\nf 1\n";
    let world = World::without_gpu()
        .with("suite.yaml", suite)
        .with("a.txt", trace)
        .with("b.txt", trace)
        .with("c.txt", trace);
    let run = [
        "suite.yaml",
        "--device",
        "sim",
        "--budget",
        "1ns",
        "--accepted",
        PROGRAM,
        "--format",
        "json",
    ];
    let waiting = || {
        let ran = world.bench(&run);
        let run: BenchRun = serde_json::from_str(&ran.out)
            .unwrap_or_else(|error| panic!("{error}: {}", ran.told()));
        let waits = run
            .entries()
            .filter(|(_, entry)| entry.outcome.reason() == Some(NOT_IN_TURN));
        (
            run.not_in_turn(),
            waits
                .map(|(_, entry)| entry.case())
                .collect::<BTreeSet<_>>(),
        )
    };
    let names = |names: &[&str]| {
        names
            .iter()
            .map(|name| (*name).to_owned())
            .collect::<BTreeSet<_>>()
    };
    assert_eq!(waiting(), (6, names(&["c"])));
    assert_eq!(
        waiting(),
        (6, names(&["b"])),
        "the third case comes first, and then the first one"
    );
}

#[test]
fn without_a_working_accepted_build_the_records_are_compared_and_nothing_is_judged() {
    let old = "#!/bin/sh\necho \"error: unexpected argument '--serve' found\" >&2\nexit 2\n";
    let (world, _) = world_with_runs();
    let world = world.with_program("old", old);
    let ran = world.bench(&[
        "small.yaml",
        "--device",
        "sim",
        "--accepted",
        "./old",
        "--report",
        "run",
    ]);
    assert!(
        ran.err.contains(
            "the accepted build is not measured: ./old: the build ended without an \
             answer: error: unexpected argument"
        ),
        "{}",
        ran.told()
    );
    let ran = world.bench(&[
        "small.yaml",
        "--device",
        "sim",
        "--accepted",
        "./old",
        "--reports",
        "reports",
    ]);
    assert!(
        ran.code == Some(5) && ran.out.contains("6 worse"),
        "the first record has better figures: {}",
        ran.told()
    );
    assert!(
        ran.out
            .contains("because the accepted build was not measured: ./old: "),
        "{}",
        ran.out
    );
}

/// The profile of a test's program, unless the tests are built with another one.
const PROFILE: &str = "debug";

#[test]
#[cfg_attr(
    not(debug_assertions),
    ignore = "the program is built with another profile"
)]
fn a_run_of_an_unoptimized_build_says_so_first_and_is_not_accepted() {
    let (world, _) = world_with_runs();
    let ran = world.bench(&["small.yaml", "--device", "sim", "--report", "run"]);
    assert!(
        ran.out
            .starts_with(&format!("BUILT WITH THE PROFILE {PROFILE}, NOT dist, ")),
        "{}",
        ran.told()
    );
    let refused = world.report(&["accept"]);
    assert!(
        refused.code == Some(2) && refused.err.contains("a build with the profile `debug`"),
        "{}",
        refused.told()
    );
}

#[test]
fn a_build_is_accepted_by_its_commit_and_another_one_is_refused() {
    let (world, runs) = world_with_runs();
    for run in &runs {
        let record = world.path(run).join("benchmark.json");
        let text = fs::read_to_string(&record).unwrap();
        fs::write(&record, text.replace(&format!(", {PROFILE}\""), ", dist\"")).unwrap();
    }
    assert_eq!(world.report(&["accept", "nothing"]).code, Some(2));
    let dirty = world.report(&["accept"]);
    assert!(
        dirty.code == Some(2)
            && dirty
                .err
                .contains("uncommitted changes or an unknown commit"),
        "{}",
        dirty.told()
    );
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        let user = ["-c", "user.name=check", "-c", "user.email=check@localhost"];
        let output = command
            .args(user)
            .args(arguments)
            .current_dir(world.folder.path())
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    git(&["init", "--quiet"]);
    git(&["commit", "--quiet", "--allow-empty", "--message", "One"]);
    let commit = git(&["rev-parse", "HEAD"]);
    let accepted = world.report(&["accept", "HEAD", "--reason", "release"]);
    assert_eq!(
        accepted.told(),
        format!(
            "exit: 0\n--- stdout ---\naccepted: {commit} in reports/accepted.json\n--- stderr ---\n"
        )
    );
    let file: Value =
        serde_json::from_str(&fs::read_to_string(world.path("reports/accepted.json")).unwrap())
            .unwrap();
    assert_eq!(
        (file["commit"].as_str(), file["reason"].as_str()),
        (Some(commit.as_str()), Some("release"))
    );
    let other = "#!/bin/sh\necho '{\"protocol\": 1, \"commit\": \"0123456789\"}'\nread q\n";
    let world = world.with_program("other", other);
    let refused = world.bench(&["small.yaml", "--device", "sim", "--accepted", "./other"]);
    assert!(
        refused.code == Some(2)
            && refused
                .err
                .contains("was built from 0123456789, but the accepted build is"),
        "{}",
        refused.told()
    );
}

#[test]
fn a_change_cannot_drop_a_case_cut_a_trace_or_raise_its_own_threshold() {
    const SUITE: &str = "about: Small.
needs: { memory: 64MiB }
arms: [caching, direct]
threshold: 5%
time:
  - latency: { sizes: [1MiB], cases: [hit] }
  - trace: { file: t.trace }
";
    let trace = "a 1 1024 0\nf 1\na 2 2048 0\nf 2\n";
    let world = World::without_gpu()
        .with("scenarios/bench/small.yaml", SUITE)
        .with("scenarios/bench/t.trace", trace);
    for arguments in [
        &["init", "--quiet"][..],
        &["add", "."],
        &[
            "-c",
            "user.name=c",
            "-c",
            "user.email=c@c",
            "commit",
            "--quiet",
            "--message",
            "One",
        ],
    ] {
        assert!(
            Command::new("git")
                .args(arguments)
                .current_dir(world.folder.path())
                .status()
                .unwrap()
                .success(),
            "{arguments:?}"
        );
    }
    fs::create_dir(world.path("reports")).unwrap();
    let accepted = world.report(&["accept", "HEAD"]);
    assert!(accepted.code == Some(0), "{}", accepted.told());
    let bench = || world.bench(&["--device", "sim"]);
    let blind = bench();
    assert!(
        blind.code == Some(5),
        "an accepted build is configured, and was not measured: {}",
        blind.told()
    );
    // Without the accepted build no measured time is judged, so no verdict here depends on this
    // machine.
    for (changed, expected) in [
        (
            SUITE.replace("caching, direct", "caching"),
            "Lost since the accepted build; `harness report accept` accepts this: small: hit, 1 \
             MiB on direct",
        ),
        (
            SUITE.replace("[1MiB]", "[2MiB]"),
            "small: hit, 1 MiB on caching",
        ),
        (
            SUITE.replace("5%", "60%"),
            "Replaced by the accepted build's terms: small: threshold.",
        ),
    ] {
        fs::write(world.path("scenarios/bench/small.yaml"), changed).unwrap();
        let ran = bench();
        let code = if expected.contains("threshold") { 5 } else { 1 };
        assert!(
            ran.code == Some(code) && ran.out.contains(expected),
            "{expected}: {}",
            ran.told()
        );
    }
    fs::write(world.path("scenarios/bench/small.yaml"), SUITE).unwrap();
    fs::write(
        world.path("scenarios/bench/t.trace"),
        trace.split_at(trace.len() / 2).0,
    )
    .unwrap();
    let cut = bench();
    assert!(
        cut.code == Some(1)
            && cut
                .out
                .contains("Measures other work than the accepted build"),
        "{}",
        cut.told()
    );
    fs::remove_file(world.path("scenarios/bench/small.yaml")).unwrap();
    fs::write(world.path("scenarios/bench/other.yaml"), SUITE).unwrap();
    let renamed = bench();
    assert!(
        renamed.code == Some(1) && renamed.out.contains("suite small"),
        "{}",
        renamed.told()
    );
}

#[test]
fn without_an_accepted_build_a_lost_entry_is_reported_until_it_is_back() {
    let world = World::without_gpu().with("small.yaml", SMALL);
    let run = || {
        let ran = world.bench(&["small.yaml", "--device", "sim", "--reports", "reports"]);
        assert_eq!(ran.code, Some(5), "{}", ran.told());
        ran.out.contains("ENTRIES WERE LOST OR REDEFINED")
    };
    assert!(!run());
    world.rewrite_first_run(|_| {});
    fs::write(
        world.path("small.yaml"),
        SMALL.replace("caching, direct", "caching"),
    )
    .unwrap();
    assert!(run() && run(), "the loss is not forgotten by the next run");
    fs::write(world.path("small.yaml"), SMALL).unwrap();
    assert!(!run());
}

#[test]
fn a_run_without_an_accepted_build_leaves_the_committed_reports_as_they_are() {
    let (world, _) = world_with_runs();
    let index = || fs::read_to_string(world.path("reports/README.md")).unwrap();
    let before = index();
    // The record of an unknown build, which was faster, is no basis.
    let ran = world.bench(&["small.yaml", "--device", "sim"]);
    assert!(
        ran.code == Some(5) && !ran.out.contains("worse"),
        "{}",
        ran.told()
    );
    assert!(
        ran.out.contains(
            "INCONCLUSIVE: the accepted build was not measured: `--accepted` names no program"
        ),
        "{}",
        ran.told()
    );
    assert!(
        ran.out.contains("report: reports/runs/bench/nightly/20"),
        "{}",
        ran.told()
    );
    assert_eq!(
        (
            index(),
            fs::read_dir(world.path("reports/nightly")).unwrap().count()
        ),
        (before, 2)
    );
}

#[test]
fn two_runs_are_compared_and_the_exit_code_says_whether_something_is_worse() {
    let (world, [first, second]) = world_with_runs();
    let worse = world.report(&["compare", &first, &format!("{second}/benchmark.json")]);
    assert_eq!(worse.code, Some(1), "{}", worse.told());
    assert!(
        worse.out.starts_with("6 worse, of 12 entries compared"),
        "{}",
        worse.out
    );
    assert_eq!(
        world.report(&["compare", &second, &first]).code,
        Some(0),
        "less is not worse"
    );
    let document = world.report(&["compare", &first, &second, "--format", "json"]);
    let document: Value = serde_json::from_str(&document.out).unwrap();
    assert_eq!(
        (
            document["counts"]["worse"].as_u64(),
            document["most_important"].as_array().map(Vec::len)
        ),
        (Some(6), Some(3))
    );
}

#[test]
fn broken_runs_are_reported_and_the_others_stay_in_the_index() {
    let (world, [first, second]) = world_with_runs();
    fs::write(
        world.path(&first).join("benchmark.json"),
        "{\"version\": 1, \"har",
    )
    .unwrap();
    let told = world.report(&["compare", &first, "nowhere"]);
    assert_eq!(told.code, Some(2));
    assert!(
        told.err.contains("cut off at line 1") && told.err.contains("cannot read `nowhere`"),
        "{}",
        told.err
    );
    let index = world.report(&["index"]);
    assert!(
        index.code == Some(2) && index.err.contains("benchmark.json` is cut off"),
        "{}",
        index.told()
    );
    let text = fs::read_to_string(world.path("reports/README.md")).unwrap();
    let name = |folder: &str| format!("{}/report.md", folder.trim_start_matches("reports/"));
    assert!(
        text.contains(&name(&second)) && !text.contains(&name(&first)),
        "{text}"
    );
}

#[test]
fn runs_are_rendered_again_by_their_folder_or_record_to_the_same_bytes() {
    let (world, [first, second]) = world_with_runs();
    let report = || fs::read(world.path(&second).join("report.md")).unwrap();
    let before = report();
    let ran = world.report(&["render", &first, &format!("{second}/benchmark.json")]);
    assert_eq!(
        ran.told(),
        format!(
            "exit: 0\n--- stdout ---\nreport: {first}/report.md\nreport: {second}/report.md\n--- \
             stderr ---\n"
        )
    );
    assert_eq!(report(), before);
}

#[test]
fn shards_are_merged_into_a_run_that_takes_the_place_of_none_of_them() {
    let world = World::without_gpu().with("small.yaml", SMALL);
    for shard in ["1/2", "2/2"] {
        let folder = format!("shards/{}", &shard[..1]);
        assert_eq!(
            world
                .bench(&[
                    "small.yaml",
                    "--device",
                    "sim",
                    "--shard",
                    shard,
                    "--report",
                    &folder
                ])
                .code,
            Some(0)
        );
    }
    let merge = |shards: &[&str], output: &str| {
        world.report(&[&["merge"], shards, &["-o", output]].concat())
    };
    let missing = merge(&["shards/1"], "run.json");
    assert!(
        missing.code == Some(2) && missing.err.contains("missing: shard 2/2"),
        "{}",
        missing.told()
    );
    let own = merge(&["shards/1", "shards/2"], "shards/1/benchmark.json");
    assert!(
        own.code == Some(2) && own.err.contains("the output would replace the shard"),
        "{}",
        own.told()
    );
    let merged = merge(&["shards/2/benchmark.json", "shards/1"], "run.json");
    assert_eq!(
        (merged.code, merged.out.as_str()),
        (Some(0), "run: run.json\n")
    );
    let run: Value =
        serde_json::from_str(&fs::read_to_string(world.path("run.json")).unwrap()).unwrap();
    assert_eq!(
        (
            &run["shard"],
            run["suites"][0]["entries"].as_array().unwrap().len()
        ),
        (&Value::Null, 12)
    );
}

#[test]
fn a_folder_of_reports_that_is_named_too_deep_is_answered_with_the_one_above() {
    let (world, [first, _]) = world_with_runs();
    for folder in ["reports/nightly", &first] {
        let ran = world.report(&["index", folder]);
        assert!(
            ran.code == Some(2) && ran.err.contains("name the reports folder: reports"),
            "{}",
            ran.told()
        );
        assert!(!world.path(folder).join("README.md").exists(), "{folder}");
    }
    assert_eq!(world.report(&["index", "reports"]).code, Some(0));
}
