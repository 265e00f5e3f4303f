//! The report in reports/example is what this build makes of the catalogue on the simulated device, byte for byte.
//!
//! `UPDATE=1 cargo test --test example_report` writes it anew. Look at the difference before you commit it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use harness::scenario::Scenario;
use harness::session::{DeviceSource, Plan};
use harness::store;

const EXAMPLE: &str = "reports/example";

#[test]
fn the_example_report_is_what_the_catalogue_gives() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    // Paths in the report are as a user at the root of the project would write them.
    std::env::set_current_dir(&root).expect("the project's root is there");
    let mut paths: Vec<PathBuf> =
        fs::read_dir("scenarios").expect("the catalogue is there").filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "yaml"));
    paths.sort();
    let plan = Plan {
        scenarios: paths.iter().map(|path| Scenario::load(path).expect("the catalogue is valid")).collect(),
        allocators: None,
        seed: None,
        memory: None,
        repetitions: 1,
        audit: true,
        program: "cargo run --release --".to_owned(),
    };
    let records = plan.run(&DeviceSource::simulated(), &Arc::default(), |_, _| {}).expect("the simulated device opens");
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
