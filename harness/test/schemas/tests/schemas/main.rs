//! The committed JSON Schemas are those of the types, and what the checks accept matches them.
//! `UPDATE=1 cargo test -p harness-schemas --features check` rewrites them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../../../../scenario/scenario/tests/scenario/blocks.rs"]
mod blocks;
mod generated;
mod kubernetes;
mod scenarios;
mod suites;

use std::path::{Path, PathBuf};

use jsonschema::Validator;
use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

/// Compares a committed file with the generated text, or rewrites the file.
fn assert_fresh(path: &Path, expected: &str) {
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(path, expected).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        committed == expected,
        "{} is stale: run `UPDATE=1 cargo test -p harness-schemas --features check`",
        path.display()
    );
}

/// Compares the committed schema of a folder with the one of the types.
fn assert_schema_is_fresh(folder: &Path, schema: &Value) {
    let text = serde_json::to_string_pretty(schema).unwrap();
    assert_fresh(&folder.join("schema.json"), &format!("{text}\n"));
}

fn value(yaml: &str) -> Value {
    serde_saphyr::from_str(yaml).unwrap()
}

/// What the schema says against a document.
fn errors(validator: &Validator, document: &Value) -> Vec<String> {
    validator
        .iter_errors(document)
        .map(|error| format!("{}: {error}", error.instance_path))
        .collect()
}

fn assert_valid(validator: &Validator, yaml: &str, what: &str) {
    let errors = errors(validator, &value(yaml));
    assert!(
        errors.is_empty(),
        "{what} does not match the schema: {errors:#?}"
    );
}

fn yaml_files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.retain(|path| path.extension().is_some_and(|ending| ending == "yaml"));
    files.sort();
    assert!(!files.is_empty(), "{} has no files", folder.display());
    files
}
