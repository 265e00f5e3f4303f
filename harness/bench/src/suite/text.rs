//! Scalars of suites in addition to those of scenarios.

use schemars::JsonSchema;
use serde::Deserialize;

use harness_language::error::Problem;
use harness_language::located::Located;

/// A share above 0 and at most 100 %, for example `5%` or `2.5%`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(rename = "percent")]
pub(super) struct PercentText(#[schemars(regex(pattern = "^[0-9][0-9.]* ?%$"))] Located<String>);

/// 0.05 is 5 %.
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

/// A file name relative to the suite's folder, for example `traces/mixed.txt.gz`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(rename = "file")]
pub(super) struct FileText(#[schemars(length(min = 1))] pub(super) Located<String>);
