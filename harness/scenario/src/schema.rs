//! The JSON Schema of the language. Editors use it to complete and check scenarios.

use schemars::generate::SchemaSettings;
use serde_json::Value;

use super::scenario::ScenarioWire;

/// The schema in `scenarios/schema.json`. Editors find it by a first line `# yaml-language-server: $schema=schema.json`.
#[must_use]
pub fn schema() -> Value {
    SchemaSettings::draft2020_12().for_deserialize().into_generator().into_root_schema_for::<ScenarioWire>().to_value()
}
