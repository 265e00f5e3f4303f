//! The JSON Schema of the language, from the wire types: editors complete and check scenarios with it.

use schemars::generate::SchemaSettings;
use serde_json::Value;

use super::scenario::ScenarioWire;

/// The schema, as committed in `scenarios/schema.json`. Editors find it by a first line such as
/// `# yaml-language-server: $schema=schema.json`.
#[must_use]
pub fn schema() -> Value {
    SchemaSettings::draft2020_12().for_deserialize().into_generator().into_root_schema_for::<ScenarioWire>().to_value()
}
