//! The schemas of scenarios and of models, and the list of layers.

use std::path::Path;

use harness_scenario::{Scenario, model, schema};

use crate::blocks::{as_scenario, yaml_blocks};
use crate::{assert_fresh, assert_schema_is_fresh, assert_valid, root, value, yaml_files};

#[test]
fn the_committed_schemas_are_fresh() {
    let scenarios = root().join("scenarios");
    assert_schema_is_fresh(&scenarios, &schema());
    assert_schema_is_fresh(&scenarios.join("models"), &model::schema());
}

#[test]
fn the_reference_of_models_is_fresh() {
    let path = root().join("scenarios/models/README.md");
    let document = std::fs::read_to_string(&path).unwrap();
    let (begin, end) = ("<!-- generated: layers -->\n", "<!-- end -->");
    let (before, rest) = document.split_once(begin).unwrap();
    let (_, after) = rest.split_once(end).unwrap();
    assert_fresh(
        &path,
        &format!("{before}{begin}{}{end}{after}", model::reference()),
    );
}

#[test]
fn every_scenario_of_the_catalogue_matches_the_schema() {
    let validator = jsonschema::validator_for(&schema()).unwrap();
    for folder in ["", "programs", "libraries", "faults", "claims"] {
        for path in yaml_files(&root().join("scenarios").join(folder)) {
            let text = std::fs::read_to_string(&path).unwrap();
            assert_valid(&validator, &text, &path.display().to_string());
        }
    }
}

#[test]
fn every_yaml_block_of_the_book_matches_the_schema() {
    let validator = jsonschema::validator_for(&schema()).unwrap();
    for page in ["scenario-reference.md", "scenarios.md"] {
        let page = std::fs::read_to_string(root().join("harness/book/src").join(page)).unwrap();
        for block in yaml_blocks(&page) {
            assert_valid(&validator, &as_scenario(block), block);
        }
    }
}

#[test]
fn the_schema_rejects_wrong_shapes_as_the_check_does() {
    let validator = jsonschema::validator_for(&schema()).unwrap();
    let scenario = |steps: &str| {
        value(&format!(
            "about: x\nneeds: {{ memory: 1GiB }}\nsteps: [{steps}]\n"
        ))
    };
    assert!(validator.is_valid(&scenario("reset_peak_stats")));
    for duration in ["1min", "1.5ms", "2 us", "1m", "3."] {
        let step = format!("busy: {{ duration: {duration} }}");
        let text = format!("about: x\nneeds: {{ memory: 1GiB }}\nsteps: [{step}]\n");
        assert_eq!(
            (
                Scenario::parse(&text, Path::new("a.yaml")).is_ok(),
                validator.is_valid(&scenario(&step))
            ),
            (duration != "3.", duration != "3."),
            "{duration}"
        );
    }
    for wrong in [
        "alocate: { buffer: a }",
        "alloc: { buffer: a }",
        "alloc: { buffer: a, size: 1, colour: red }",
        "alloc",
        "free: []",
        "reset_peak_stats: { id: x }",
        "",
    ] {
        assert!(!validator.is_valid(&scenario(wrong)), "{wrong}");
    }
}
