//! The catalogue, the tutorial and the reference match the code. `UPDATE=1 cargo test -p
//! harness-scenario --test scenario catalogue::` rewrites the reference. The tests of
//! harness-schemas compare them with the schema.

use std::path::{Path, PathBuf};

use harness_scenario::{ParameterSettings, Scenario, StepKind, example, schema};

use crate::blocks::{as_scenario, yaml_blocks};
use crate::reference::reference;

fn scenarios() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../scenarios")
}

fn book(page: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../book/src")
        .join(page)
}

fn catalogue() -> Vec<PathBuf> {
    let folders =
        ["", "programs", "libraries", "faults", "claims"].map(|folder| scenarios().join(folder));
    let mut files: Vec<PathBuf> = folders
        .iter()
        .flat_map(|folder| std::fs::read_dir(folder).unwrap())
        .map(|entry| entry.unwrap().path())
        .collect();
    files.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "yaml")
    });
    files.sort();
    assert!(!files.is_empty(), "the catalogue is empty");
    files
}

/// Compares a committed file with the generated text, or rewrites the file.
fn fresh(path: &Path, expected: &str) {
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(path, expected).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        committed == expected,
        "{} is stale: run `UPDATE=1 cargo test -p harness-scenario --test scenario catalogue::`",
        path.display()
    );
}

#[test]
fn every_scenario_of_the_catalogue_checks() {
    for path in catalogue() {
        if let Err(error) = Scenario::load_points(&path, &ParameterSettings::new()) {
            panic!("{:?}", miette::Report::new(error));
        }
    }
}

#[test]
fn every_yaml_block_of_the_book_checks() {
    for (page, least) in [
        ("scenario-reference.md", StepKind::ALL.len()),
        ("scenarios.md", 10),
    ] {
        let text = std::fs::read_to_string(book(page)).unwrap();
        let blocks = yaml_blocks(&text);
        assert!(
            blocks.len() >= least,
            "{page}: only {} blocks were found",
            blocks.len()
        );
        for block in blocks {
            let source = as_scenario(block);
            if let Err(error) = Scenario::parse_points(
                &source,
                &scenarios().join("example.yaml"),
                &ParameterSettings::new(),
            ) {
                panic!("{page}: {:?}", miette::Report::new(error));
            }
        }
    }
}

#[test]
fn the_catalogue_lists_every_scenario_and_its_links_exist() {
    let page = std::fs::read_to_string(scenarios().join("README.md")).unwrap();
    let links: Vec<&str> = page
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(link, _)| link)
        .collect();
    for link in links.iter().filter(|link| !link.starts_with("http")) {
        assert!(
            scenarios().join(link.split('#').next().unwrap()).exists(),
            "{link} does not exist"
        );
    }
    for entry in std::fs::read_dir(scenarios()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(
            !name.ends_with(".yaml") || links.contains(&name.as_str()),
            "{name} is not listed in scenarios/README.md"
        );
    }
}

#[test]
fn the_example_of_every_step_shows_the_step_and_all_of_its_fields_are_documented() {
    let schema = schema();
    for kind in StepKind::ALL {
        let source = example(*kind);
        let scenario = Scenario::parse(&source, &scenarios().join("example.yaml"))
            .unwrap_or_else(|error| panic!("{kind}: {error}"));
        assert!(
            scenario
                .steps
                .iter()
                .any(|step| step.action.kind() == *kind),
            "{kind}"
        );
        let definition = schema
            .pointer(&format!("/$defs/{kind}"))
            .unwrap_or_else(|| panic!("{kind} is not in the schema"));
        assert!(
            definition["description"]
                .as_str()
                .is_some_and(|text| text.len() > 20),
            "{kind} is not documented"
        );
        for (name, field) in definition["properties"].as_object().into_iter().flatten() {
            assert!(
                field["description"].is_string(),
                "{kind}.{name} is not documented"
            );
        }
    }
}

#[test]
fn the_committed_reference_is_fresh() {
    fresh(&book("scenario-reference.md"), &reference());
}
