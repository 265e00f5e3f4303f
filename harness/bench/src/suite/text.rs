//! The scalars that suites have beside those of scenarios.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use harness_language::error::Problem;
use harness_language::located::Located;

/// A share above 0 and at most 100 %, for example `5%` or `2.5%`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub(super) struct PercentText(Located<String>);

impl JsonSchema for PercentText {
    fn schema_name() -> Cow<'static, str> {
        "percent".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "A share above 0 and at most 100 %, for example `5%` or `2.5%`.",
            "type": "string",
            "pattern": "^[0-9][0-9.]* ?%$",
        })
    }
}

/// The share; 0.05 is 5 %.
pub(super) fn percent(given: &PercentText) -> Result<f64, Problem> {
    let text = &given.0;
    let number = text.value.strip_suffix('%').map(str::trim_end).filter(|digits| digits.chars().all(|c| c.is_ascii_digit() || c == '.'));
    match number.and_then(|digits| digits.parse::<f64>().ok()) {
        Some(share) if share > 0.0 && share <= 100.0 => Ok(share / 100.0),
        _ => Err(Problem::new(text.position(), format!("`{}` is not a share", text.value))
            .label("a share")
            .help("write a number above 0 and at most 100, and a percent sign, as in `5%` or `2.5%`")),
    }
}

/// The name of a file, for example `traces/mixed.txt.gz`; it is looked for in the folder of the suite.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub(super) struct FileText(pub(super) Located<String>);

impl JsonSchema for FileText {
    fn schema_name() -> Cow<'static, str> {
        "file".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "The name of a file, for example `traces/mixed.txt.gz`; it is looked for in the folder of the suite.",
            "type": "string",
            "minLength": 1,
        })
    }
}
