//! The report in reports/example is what this build makes of the catalogue on the simulated device, byte for byte.
//!
//! So is the excerpt of it in the README. `UPDATE=1 cargo test --test example_report` writes both anew. Look at the difference before you
//! commit it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use harness_devices::DeviceSource;
use harness_report::store;
use harness_run::session::{Plan, Selection};
use harness_scenario::Scenario;

const EXAMPLE: &str = "reports/example";

/// Where the excerpt stands in the README.
const MARKERS: (&str, &str) = ("<!-- excerpt -->\n", "<!-- end -->");

#[test]
fn the_example_report_and_its_excerpt_are_what_the_catalogue_gives() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    // Paths in the report are as a user at the root of the project would write them.
    std::env::set_current_dir(&root).expect("the project's root is there");
    let mut paths: Vec<PathBuf> =
        fs::read_dir("scenarios").expect("the catalogue is there").filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "yaml"));
    paths.sort();
    let plan = Plan {
        scenarios: paths.iter().map(|path| Scenario::load(path).expect("the catalogue is valid")).collect(),
        selection: Selection::default(),
        seed: None,
        memory: None,
        repetitions: 1,
        audit: true,
        program: "cargo run --release --".to_owned(),
    };
    let records = plan.run(&DeviceSource::simulated(), &Arc::default()).expect("the simulated device opens");
    if std::env::var_os("UPDATE").is_some() {
        store::save_into(Path::new(EXAMPLE), &records).expect("the example can be written");
    }
    let made = tempfile::tempdir().expect("a temporary folder can be made");
    store::save_into(made.path(), &records).expect("a temporary folder can be written");
    let (made, kept) = (files(made.path()), files(Path::new(EXAMPLE)));
    assert_eq!(made.keys().collect::<Vec<_>>(), kept.keys().collect::<Vec<_>>(), "other files: run with UPDATE=1");
    for (name, content) in &made {
        assert!(
            kept.get(name) == Some(content),
            "{EXAMPLE}/{name} is not what this build makes: run with UPDATE=1 and look at the difference"
        );
    }
    check_readme(&String::from_utf8_lossy(&kept["report.md"]));
}

/// The timing table of `oom_retry` and what its first step has to say, word for word.
fn excerpt(report: &str) -> String {
    let section = report.split("<a id=\"scenario-oom_retry\"></a>").nth(1).expect("the scenario is in the catalogue");
    let table = section.lines().skip_while(|line| !line.starts_with("**Model times")).take_while(|line| !line.starts_with("<a id"));
    let note = section.lines().find(|line| line.starts_with("- Step 1:")).expect("retries are noted");
    let table: Vec<&str> = table.collect();
    format!("{}\n\n{note}\n", table.join("\n").trim())
}

fn check_readme(report: &str) {
    let readme = fs::read_to_string("README.md").expect("the README is there");
    let (before, rest) = readme.split_once(MARKERS.0).expect("the README has the excerpt's beginning");
    let (_, after) = rest.split_once(MARKERS.1).expect("the README has the excerpt's end");
    let wanted = format!("{before}{}{}{}{after}", MARKERS.0, excerpt(report), MARKERS.1);
    if std::env::var_os("UPDATE").is_some() {
        fs::write("README.md", wanted).expect("the README can be written");
    } else {
        assert!(readme == wanted, "the README's excerpt is not what the example report says: run with UPDATE=1");
    }
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    entries
        .map(|entry| {
            let entry = entry.expect("the folder can be read");
            let content = fs::read(entry.path()).expect("the file can be read");
            (entry.file_name().to_string_lossy().into_owned(), content)
        })
        .collect()
}
