//! `expect:` of a request or a training: how it ends, with a cause, or per allocator.

use std::fmt;

use derive_more::Display;
use harness_language::schema::JsonSchema;
use harness_record::cause::CauseKind;
#[cfg(feature = "schema")]
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use crate::cases::{Cases, DeviceKind};
use crate::checker::{Checker, Served};
use harness_language::error::{Problem, named, quoted};
use harness_language::located::{Located, Tree};

/// The expected end of a request, after recovery.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Display)]
pub enum Expected {
    #[default]
    #[display("to fit")]
    Fits,
    /// It fails. If a cause is given, it is one of the causes of the failure.
    #[display("to run out of memory{}", _0.map_or_else(String::new, |cause| format!(" for the \
         cause `{cause}`")))]
    Oom(Option<CauseKind>),
    #[display("to fit or to run out of memory")]
    Any,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    cases: Cases<Expected>,
    /// `true` if an OOM ends the loop around it.
    pub ends_loop: bool,
}

impl Ending {
    pub const fn always(expected: Expected) -> Self {
        Self {
            cases: Cases::Always(expected),
            ends_loop: false,
        }
    }

    pub fn of(&self, arm: &str, device: DeviceKind) -> Expected {
        self.cases.of(arm, device).copied().unwrap_or(Expected::Any)
    }

    /// Returns whether the request succeeds, as far as the scenario says.
    pub(crate) fn served(&self) -> Served {
        let all: Vec<Expected> = self
            .cases
            .values()
            .into_iter()
            .map(|(_, expected)| *expected)
            .collect();
        if all.iter().all(|expected| *expected == Expected::Fits) {
            Served::Always
        } else if all
            .iter()
            .all(|expected| matches!(expected, Expected::Oom(_)))
        {
            Served::Never
        } else {
            Served::Perhaps
        }
    }
}

impl fmt::Display for Ending {
    /// Adds `, expected to fail` to a step, or nothing if it is expected to fit.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let failing = |expected: &Expected| matches!(expected, Expected::Oom(_));
        match &self.cases {
            Cases::Always(Expected::Fits | Expected::Any) => Ok(()),
            Cases::Always(Expected::Oom(None)) => f.write_str(", expected to fail"),
            Cases::Always(Expected::Oom(Some(cause))) => write!(f, ", expected to fail: {cause}"),
            cases => {
                let mut arms: Vec<&str> = cases
                    .values()
                    .into_iter()
                    .filter(|(_, expected)| failing(expected))
                    .filter_map(|(arm, _)| arm)
                    .collect();
                arms.dedup();
                if arms.is_empty() {
                    Ok(())
                } else {
                    write!(f, ", expected to fail with {}", arms.join(", "))
                }
            }
        }
    }
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline)]
pub(crate) struct EndingWire(#[schemars(schema_with = "endings")] Located<Tree>);

impl EndingWire {
    /// Checks the value. The default is `fits`, or `any` in a loop with `until: oom`.
    pub(crate) fn check(
        given: Option<&Self>,
        checker: &mut Checker<'_>,
    ) -> Result<Ending, Problem> {
        let Some(Self(given)) = given else {
            let ends_loop = checker.loops_until_oom > 0;
            let expected = if ends_loop {
                Expected::Any
            } else {
                Expected::Fits
            };
            return Ok(Ending {
                cases: Cases::Always(expected),
                ends_loop,
            });
        };
        let cases = Cases::check(given, checker, is_cause, &mut |tree, _| expected(tree))?;
        Ok(Ending {
            cases,
            ends_loop: false,
        })
    }
}

const FORMS: &str = "write `fits`, `oom`, `any`, a cause as in `{ oom: fragmented }`, or a map \
     from allocators to one of them, as in `{ caching: oom, others: fits }`";

/// Returns whether a map contains a cause instead of allocators.
fn is_cause(tree: &Tree) -> bool {
    matches!(tree, Tree::Map(entries) if entries.iter().any(|(key, _)| key.value == "oom"))
}

fn expected(tree: &Located<Tree>) -> Result<Expected, Problem> {
    let wrong = |message: String| Problem::new(tree.at, message).help(FORMS);
    match &tree.value {
        Tree::One(word) => match (word.as_str(), CauseKind::from_name(word)) {
            ("fits", _) => Ok(Expected::Fits),
            ("oom", _) => Ok(Expected::Oom(None)),
            ("any", _) => Ok(Expected::Any),
            (_, None) => Err(wrong(format!("unknown end `{word}`"))),
            (_, Some(cause)) => Err(wrong(format!("unknown end `{word}`")).help(format!(
                "write a cause after `oom`, as in `expect: {{ oom: {cause} }}`"
            ))),
        },
        Tree::Map(entries) if entries.len() == 1 && is_cause(&tree.value) => {
            cause_of(&entries[0].1)
        }
        _ => Err(wrong("expected an end".to_owned())),
    }
}

fn cause_of(given: &Located<Tree>) -> Result<Expected, Problem> {
    let names: Vec<&str> = CauseKind::ALL.iter().map(|kind| kind.name()).collect();
    let one = given.text().ok_or_else(|| {
        Problem::new(given.at, "expected one cause")
            .help(format!("causes: {}", quoted(&names, ", ")))
    })?;
    named(&one, ["cause", "causes"], CauseKind::from_name, names)
        .map(|kind| Expected::Oom(Some(kind)))
}

#[cfg(feature = "schema")]
fn endings(_: &mut SchemaGenerator) -> Schema {
    let causes: Vec<&str> = CauseKind::ALL.iter().map(|kind| kind.name()).collect();
    let cause = serde_json::json!({ "type": "object", "properties": { "oom": { "enum": causes } },
        "required": ["oom"], "additionalProperties": false });
    by_case(
        &serde_json::json!({ "anyOf": [{ "enum": ["fits", "oom", "any"] }, cause] }),
        &["oom"],
    )
}

/// The JSON Schema of a value, or of a map from allocators or kinds of device to values. The
/// `reserved` keys are not allocators.
#[cfg(feature = "schema")]
pub(crate) fn by_case(value: &serde_json::Value, reserved: &[&str]) -> Schema {
    use crate::cases::{GPU, OTHERS, SIMULATED};
    use harness_allocator::allocator::AllocatorKind;
    use serde_json::{Map, Value};

    let arms: Map<String, Value> = AllocatorKind::ALL
        .iter()
        .map(|kind| kind.name())
        .chain([OTHERS])
        .map(|name| (name.to_owned(), value.clone()))
        .collect();
    let not_reserved: Vec<Value> = reserved
        .iter()
        .chain(&[SIMULATED, GPU])
        .map(|key| serde_json::json!({ "required": [key] }))
        .collect();
    let map = serde_json::json!({
        "type": "object", "properties": arms, "additionalProperties": value, "minProperties": 1,
        "not": { "anyOf": not_reserved }
    });
    let either = serde_json::json!({ "anyOf": [value, map] });
    let devices = serde_json::json!({
        "type": "object", "properties": { SIMULATED: either, GPU: either },
        "required": [SIMULATED, GPU], "additionalProperties": false
    });
    json_schema!({ "anyOf": [value, map, devices] })
}
