//! Scenarios made from the grammar match the schema. The tests of harness-run run them.

#[path = "../../../../scenario/run/tests/run/generated/steps.rs"]
mod steps;
#[path = "../../../../scenario/run/tests/run/generated/writer.rs"]
#[allow(
    dead_code,
    reason = "only the run needs the expectations that always hold"
)]
mod writer;

use harness_scenario::schema;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use self::writer::{genes, head, write};
use crate::{errors, value};

const CASES: usize = 600;

#[test]
fn what_the_grammar_says_matches_the_schema() {
    let validator = jsonschema::validator_for(&schema()).unwrap();
    let (strategy, mut runner) = ((head(), genes()), TestRunner::deterministic());
    for _ in 0..CASES {
        let (head, genes) = strategy.new_tree(&mut runner).unwrap().current();
        let text = write(&head, &genes).text;
        let errors = errors(&validator, &value(&text));
        assert!(errors.is_empty(), "{errors:#?} in\n{text}");
    }
}
