//! The schema of benchmark suites.

use harness_bench::suite::schema;

use crate::blocks::yaml_blocks;
use crate::{assert_schema_is_fresh, assert_valid, root, yaml_files};

#[test]
fn the_committed_schema_is_fresh() {
    assert_schema_is_fresh(&root().join("scenarios/bench"), &schema());
}

#[test]
fn every_suite_and_every_yaml_block_of_their_page_matches_the_schema() {
    let (validator, folder) = (
        jsonschema::validator_for(&schema()).unwrap(),
        root().join("scenarios/bench"),
    );
    for path in yaml_files(&folder) {
        let text = std::fs::read_to_string(&path).unwrap();
        assert_valid(&validator, &text, &path.display().to_string());
    }
    let page = std::fs::read_to_string(folder.join("README.md")).unwrap();
    for block in yaml_blocks(&page) {
        assert_valid(&validator, block, block);
    }
}
