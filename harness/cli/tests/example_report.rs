//! The report in reports/example is what this build makes of the catalogue, and of the scenarios that fail on purpose, on the simulated device,
//! byte for byte.
//!
//! So are the excerpts of it in the README. `UPDATE=1 cargo test --test example_report` writes all of it anew. Look at the difference before you
//! commit it.

mod kept_report;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use harness_devices::DeviceSource;
use harness_record::Verdict;
use harness_report::store;
use harness_run::session::{Plan, Selection};
use harness_scenario::{Scenario, Settings};

const EXAMPLE: &str = "reports/example";

/// Makes an excerpt of a report.
type Excerpt = fn(&str) -> String;

/// What the README quotes: the line above each excerpt, and what makes it of the report.
const EXCERPTS: [(&str, Excerpt); 2] = [("<!-- excerpt: a failure -->\n", failure), ("<!-- excerpt: times -->\n", times)];
/// The line below each excerpt.
const END: &str = "<!-- end -->";

#[test]
fn the_example_report_and_its_excerpt_are_what_the_catalogue_gives() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    // Paths in the report are as a user at the root of the project would write them.
    std::env::set_current_dir(&root).expect("the project's root is there");
    // Processes of scenarios are the program, which this test is not.
    harness_allocator::allocator::library::name_program(env!("CARGO_BIN_EXE_harness").into());
    let paths = [scenarios_in("scenarios"), scenarios_in("scenarios/failing")].concat();
    let plan = Plan {
        scenarios: paths.iter().flat_map(|path| Scenario::load_points(path, &Settings::new()).expect("the catalogue is valid")).collect(),
        selection: Selection::default(),
        seed: None,
        memory: None,
        repetitions: 1,
        audit: true,
        fail_fast: false,
        program: "cargo run --release --".to_owned(),
    };
    let records = plan.run(&DeviceSource::simulated(), &Arc::default()).expect("the simulated device opens");
    let failed = records.runs.iter().filter(|run| !matches!(run.verdict, Verdict::Passed | Verdict::FailedAsExpected { .. }));
    let failed: Vec<(&str, &str)> = failed.map(|run| (run.scenario.path.as_str(), run.allocator.as_str())).collect();
    assert_eq!(failed, [("scenarios/failing/adapters.yaml", "caching")], "what fails on purpose fails, and nothing else does");
    let made = tempfile::tempdir().expect("a temporary folder can be made");
    store::save_into(made.path(), &records).expect("a temporary folder can be written");
    kept_report::compare(made.path(), Path::new(EXAMPLE));
    check_readme(&fs::read_to_string(made.path().join("report.md")).expect("it was written"));
}

/// Scenarios of hundreds of steps or of models, of which a report would be too long to read.
const LONG: [&str; 22] = [
    "bert_checkpointed",
    "ddp_memory",
    "ddp_one_rank_runs_out",
    "every_second_block",
    "gpt2",
    "gpt2_accumulation",
    "gpt2_checkpointed",
    "gpt2_mixed_precision",
    "gpt2_varying_lengths",
    "infer_evicts",
    "infer_growing_caches",
    "kv_cache_growth",
    "leak_check",
    "leak_in_a_loop",
    "recovery_policies",
    "resnet152_batch_32",
    "resnet152_batch_56",
    "retained_graph",
    "storm_lifetimes",
    "storm_sizes",
    "training_plans",
    "zero_grad",
];

/// The scenarios of a folder, by name, without the long ones.
fn scenarios_in(folder: &str) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder).expect("the folder is there").filter_map(|entry| Some(entry.ok()?.path())).collect();
    let is_long = |path: &PathBuf| path.file_stem().is_some_and(|stem| LONG.iter().any(|long| stem == *long));
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "yaml") && !is_long(path));
    paths.sort();
    paths
}

/// What the scenario that fails expects and sees, and why.
fn failure(report: &str) -> String {
    let section = report.split("<a id=\"failure-adapters-caching\"></a>").nth(1).expect("it fails");
    let (section, _) = section.split_once("\nReproduce it:").expect("a failure has its command");
    let (_, told) = section.trim_start().split_once('\n').expect("a failure has a heading");
    format!("{}\n", told.trim())
}

/// The timing table of `oom_retry` and what its first step has to say, word for word.
fn times(report: &str) -> String {
    let section = report.split("<a id=\"scenario-oom_retry\"></a>").nth(1).expect("the scenario is in the catalogue");
    let table = section.lines().skip_while(|line| !line.starts_with("**Model times")).take_while(|line| !line.starts_with("<a id"));
    let note = section.lines().find(|line| line.starts_with("- Step 1:")).expect("retries are noted");
    let table: Vec<&str> = table.collect();
    format!("{}\n\n{note}\n", table.join("\n").trim())
}

fn check_readme(report: &str) {
    let readme = fs::read_to_string("README.md").expect("the README is there");
    let mut wanted = readme.clone();
    for (begin, excerpt) in EXCERPTS {
        let (before, rest) = wanted.split_once(begin).expect("the README has the excerpt's beginning");
        let (_, after) = rest.split_once(END).expect("the README has the excerpt's end");
        wanted = format!("{before}{begin}{}{END}{after}", excerpt(report));
    }
    if std::env::var_os("UPDATE").is_some() {
        fs::write("README.md", wanted).expect("the README can be written");
    } else {
        assert!(readme == wanted, "an excerpt in the README is not what the example report says: run with UPDATE=1");
    }
}
