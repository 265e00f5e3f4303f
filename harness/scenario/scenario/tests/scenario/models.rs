//! The models of the catalogue have the published numbers of parameters. Errors have a position.

use std::path::{Path, PathBuf};

use harness_scenario::model::Model;
use harness_scenario::{Precision, Scenario};

fn scenarios() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../scenarios")
}

fn load(name: &str) -> Model {
    Model::load(&scenarios().join("models").join(name))
        .unwrap_or_else(|error| panic!("{:?}", miette::Report::new(error)))
}

#[test]
fn the_models_have_the_published_numbers_of_parameters() {
    for (name, published) in [
        ("linear.yaml", 10_250),
        ("resnet152.yaml", 60_192_808),
        ("bert_base.yaml", 109_482_240),
        ("gpt2.yaml", 124_439_808),
    ] {
        assert_eq!(load(name).parameter_count(), published, "{name}");
    }
}

#[test]
fn activations_grow_linearly_with_samples_and_tokens() {
    let bytes = |model: &Model, samples, length| -> u64 {
        model
            .program(samples, length, Precision::Fp32)
            .tensors
            .iter()
            .map(|size| size.0)
            .sum()
    };
    let resnet = load("resnet152.yaml");
    let per_sample = bytes(&resnet, 3, 1) - bytes(&resnet, 2, 1);
    assert_eq!(bytes(&resnet, 8, 1) - bytes(&resnet, 4, 1), 4 * per_sample);
    let gpt2 = load("gpt2.yaml");
    let per_32_tokens = bytes(&gpt2, 1, 96) - bytes(&gpt2, 1, 64);
    assert_eq!(
        bytes(&gpt2, 1, 256) - bytes(&gpt2, 1, 128),
        4 * per_32_tokens
    );
}

#[test]
fn every_operation_reads_only_existing_tensors() {
    for name in [
        "linear.yaml",
        "resnet152.yaml",
        "bert_base.yaml",
        "gpt2.yaml",
    ] {
        for precision in [Precision::Fp32, Precision::Mixed] {
            let program = load(name).program(2, 16, precision);
            let makers = program.makers();
            for (index, operation) in program.operations.iter().enumerate() {
                for &read in operation.reads.iter().chain(&operation.saves) {
                    let is_made = makers[read]
                        .map_or_else(|| program.inputs.contains(&read), |maker| maker <= index);
                    assert!(is_made, "{name}: operation {index} reads tensor {read}");
                }
            }
            let covered: usize = program.units.iter().map(|unit| unit.operations.len()).sum();
            assert_eq!(covered, program.operations.len(), "{name}");
        }
    }
}

#[test]
fn errors_in_models() {
    let input = "about: x\ninput: { features: 8 }\n";
    let image = "about: x\ninput: { image: [3, 8, 8] }\n";
    let tokens = "about: x\ninput: { tokens: 8 }\n";
    let cases = [
        (
            "unknown layer",
            format!("{input}layers:\n  - linaer: {{ out: 10 }}\n"),
        ),
        (
            "unknown bare layer",
            format!("{input}layers:\n  - linear: {{ out: 10 }}\n  - softplus\n"),
        ),
        (
            "without its fields",
            format!("{input}layers:\n  - linear\n"),
        ),
        (
            "unknown field",
            format!("{input}layers:\n  - linear: {{ out: 10, in: 3 }}\n"),
        ),
        (
            "several layers in one item",
            format!("{input}layers:\n  - gelu: {{}}\n    tanh: {{}}\n"),
        ),
        ("no layers", format!("{input}layers: []\n")),
        (
            "a shape that does not fit",
            format!("{input}layers:\n  - conv2d: {{ out: 8, kernel: 3 }}\n"),
        ),
        (
            "a window that does not fit",
            format!("{image}layers:\n  - conv2d: {{ out: 8, kernel: 9 }}\n"),
        ),
        (
            "an image of two numbers",
            "about: x\ninput: { image: [3, 8] }\nlayers: [average_pool]\n".to_owned(),
        ),
        (
            "a sum of different shapes",
            format!("{input}layers:\n  - residual: {{ layers: [{{ linear: {{ out: 4 }} }}] }}\n"),
        ),
        (
            "heads",
            format!(
                "{tokens}layers:\n  - embedding: {{ vocabulary: 9, width: 8 }}\n  - \
                 self_attention: {{ heads: 3 }}\n"
            ),
        ),
        (
            "another number of parameters",
            format!("{input}parameters: 100\nlayers:\n  - linear: {{ out: 10 }}\n"),
        ),
        (
            "a width of 0",
            format!("{input}layers:\n  - linear: {{ out: 0 }}\n"),
        ),
        (
            "too many layers",
            format!("{input}layers:\n  - block: {{ times: 1000000, layers: [gelu] }}\n"),
        ),
    ];
    let mut text = String::new();
    for (what, source) in cases {
        let error = Model::parse(&source, Path::new("model.yaml")).expect_err(what);
        text.push_str(&format!(
            "== {what}\n{error}\n   help: {}\n",
            error.advice().unwrap_or("none")
        ));
    }
    insta::assert_snapshot!(text);
}

#[test]
fn errors_in_the_model_of_a_training() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(
        folder.path().join("bad.yaml"),
        "about: x\ninput: { features: 8 }\nlayers: [linaer]\n",
    )
    .unwrap();
    let mut text = String::new();
    for fields in [
        "batch: 8",
        "model: bad.yaml, batch: 8",
        "model: none.yaml, batch: 8",
        "model: bad.yaml, parameters: 1MiB, batch: 8",
        "parameters: 1MiB, activations_per_sample: 1MiB, batch: 8, length: 3",
        "parameters: 1MiB, activations_per_sample: 1MiB, batch: [8, 4], accumulate: 5",
        "parameters: 1MiB, activations_per_sample: 1MiB, batch: []",
        "parameters: 1MiB, activations_per_sample: 1MiB, batch: 8, precision: half",
    ] {
        let source = format!(
            "about: x\nneeds: {{ memory: 1GiB }}\nsteps:\n  - train: {{ id: t, iterations: 1, \
             {fields} }}\n"
        );
        let error = Scenario::parse(&source, &folder.path().join("s.yaml")).expect_err(fields);
        text.push_str(&format!(
            "== {fields}\n{error}\n   help: {}\n",
            error.advice().unwrap_or("none")
        ));
    }
    let text = text.replace(&format!("{}/", folder.path().display()), "");
    insta::assert_snapshot!(text);
}

/// Each row of the comparison names a scenario that expects the recorded figure.
#[test]
fn scenarios_expect_the_recorded_figures_of_pytorch() {
    let document = std::fs::read_to_string(scenarios().join("models/README.md")).unwrap();
    let rows: Vec<Vec<&str>> = document
        .lines()
        .filter(|line| line.starts_with("| ["))
        .map(|line| line.split('|').map(str::trim).collect())
        .collect();
    assert!(rows.len() >= 6, "only {} rows were found", rows.len());
    for row in rows {
        let file = row[1].split_once("](../").unwrap().1.trim_end_matches(')');
        let scenario = std::fs::read_to_string(scenarios().join(file)).unwrap();
        let figure = row[3].replace([',', ' '], "");
        let is_expected = scenario
            .lines()
            .any(|line| line.contains(&format!("allocated.peak == {figure} +- ")));
        assert!(is_expected, "{file} does not expect {figure}");
    }
}
