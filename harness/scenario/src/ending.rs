//! How a request or a training should end: in a word, with a cause, or differently for each allocator.

use std::borrow::Cow;
use std::fmt;

use harness_allocator::allocator::AllocatorKind;
use harness_record::cause::CauseKind;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::cases::{Cases, DeviceKind, GPU, OTHERS, SIMULATED};
use crate::checker::{Checker, Served};
use harness_language::error::{Problem, choices};
use harness_language::located::{Located, Position, Tree};

/// How a request should end, recovery included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Expected {
    /// It is served.
    #[default]
    Fits,
    /// It fails for good, for this cause among others if one is named.
    Oom(Option<CauseKind>),
    /// Either way.
    Any,
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fits => f.write_str("to fit"),
            Self::Oom(None) => f.write_str("to run out of memory"),
            Self::Oom(Some(cause)) => write!(f, "to run out of memory for the cause `{cause}`"),
            Self::Any => f.write_str("to end either way"),
        }
    }
}

/// How it should end with each allocator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    cases: Cases<Expected>,
    /// Whether running out of memory ends the loop around it.
    pub ends_loop: bool,
}

impl Ending {
    /// The same with every allocator.
    #[must_use]
    pub const fn always(expected: Expected) -> Self {
        Self { cases: Cases::Always(expected), ends_loop: false }
    }

    /// How it should end with this allocator, by the name of its arm.
    #[must_use]
    pub fn of(&self, arm: &str, device: DeviceKind) -> Expected {
        self.cases.of(arm, device).copied().unwrap_or(Expected::Any)
    }

    /// What is known of it beforehand.
    pub(crate) fn served(&self) -> Served {
        let all: Vec<Expected> = self.cases.values().into_iter().map(|(_, expected)| *expected).collect();
        if all.iter().all(|expected| *expected == Expected::Fits) {
            Served::Always
        } else if all.iter().all(|expected| matches!(expected, Expected::Oom(_))) {
            Served::Never
        } else {
            Served::Perhaps
        }
    }
}

impl fmt::Display for Ending {
    /// Behind a step: `, expected to fail`; nothing where it is served as a matter of course.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let failing = |expected: &Expected| matches!(expected, Expected::Oom(_));
        match &self.cases {
            Cases::Always(Expected::Fits | Expected::Any) => Ok(()),
            Cases::Always(Expected::Oom(None)) => f.write_str(", expected to fail"),
            Cases::Always(Expected::Oom(Some(cause))) => write!(f, ", expected to fail: {cause}"),
            cases => {
                let mut arms: Vec<&str> =
                    cases.values().into_iter().filter(|(_, expected)| failing(expected)).filter_map(|(arm, _)| arm).collect();
                arms.dedup();
                if arms.is_empty() { Ok(()) } else { write!(f, ", expected to fail with {}", arms.join(", ")) }
            }
        }
    }
}

/// `fits`, `oom`, `{ oom: CAUSE }` or `any`, or a map from allocators to one of them.
#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
pub(crate) struct EndingWire(Located<Tree>);

impl EndingWire {
    /// What was written. Where nothing was: `fits`, and in a loop that runs until memory is out either way.
    pub(crate) fn check(given: Option<&Self>, checker: &mut Checker<'_>) -> Result<Ending, Problem> {
        let Some(Self(given)) = given else {
            let ends_loop = checker.is_in_loop_until_oom();
            let expected = if ends_loop { Expected::Any } else { Expected::Fits };
            return Ok(Ending { cases: Cases::Always(expected), ends_loop });
        };
        let cases = Cases::check(given, checker, is_cause, &mut |tree, _| expected(tree))?;
        Ok(Ending { cases, ends_loop: false })
    }
}

const FORMS: &str = "`fits`, `oom`, `any`, a cause as in `{ oom: fragmented }`, or a map from allocators to one of them, as in `{ caching: oom, others: fits }`";

/// Whether a map names a cause, and not allocators.
fn is_cause(tree: &Tree) -> bool {
    matches!(tree, Tree::Map(entries) if entries.iter().any(|(key, _)| key.value == "oom"))
}

fn expected(tree: &Located<Tree>) -> Result<Expected, Problem> {
    match &tree.value {
        Tree::One(word) => match word.as_str() {
            "fits" => Ok(Expected::Fits),
            "oom" => Ok(Expected::Oom(None)),
            "any" => Ok(Expected::Any),
            other => Err(unknown(tree.position(), other)),
        },
        Tree::Map(entries) => match entries.as_slice() {
            [(key, cause)] if key.value == "oom" => cause_of(cause),
            _ => Err(no_ending(tree.position())),
        },
        Tree::Nothing | Tree::Many(_) => Err(no_ending(tree.position())),
    }
}

fn no_ending(at: Position) -> Problem {
    Problem::new(at, "this does not say how it ends").help(FORMS)
}

fn unknown(at: Position, word: &str) -> Problem {
    let problem = Problem::new(at, format!("`{word}` is not known here"));
    match CauseKind::from_name(word) {
        Some(cause) => problem.help(format!("a cause stands behind `oom`, as in `expect: {{ oom: {cause} }}`")),
        None => problem.help(FORMS),
    }
}

fn cause_of(given: &Located<Tree>) -> Result<Expected, Problem> {
    let names = || CauseKind::ALL.iter().map(|kind| kind.name());
    let Some(text) = given.text() else {
        let help = format!("causes: {}", names().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", "));
        return Err(Problem::new(given.position(), "one cause is wanted here").help(help));
    };
    match CauseKind::from_name(&text.value) {
        Some(kind) => Ok(Expected::Oom(Some(kind))),
        None => {
            Err(Problem::new(text.position(), format!("there is no cause `{}`", text.value)).help(choices(&text.value, "causes", names())))
        }
    }
}

impl JsonSchema for EndingWire {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "ending".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let causes: Vec<&str> = CauseKind::ALL.iter().map(|kind| kind.name()).collect();
        let cause = serde_json::json!({ "type": "object", "properties": { "oom": { "enum": causes } }, "required": ["oom"], "additionalProperties": false });
        let word = serde_json::json!({ "enum": ["fits", "oom", "any"] });
        by_case(&serde_json::json!({ "anyOf": [word, cause] }), &["oom"])
    }
}

/// The schema of a value, or of a map of them from allocators or kinds of device. Keys that are `reserved` are no allocators.
pub(crate) fn by_case(value: &Value, reserved: &[&str]) -> Schema {
    let arms: Map<String, Value> =
        AllocatorKind::ALL.iter().map(|kind| kind.name()).chain([OTHERS]).map(|name| (name.to_owned(), value.clone())).collect();
    let not_reserved: Vec<Value> = reserved.iter().chain(&[SIMULATED, GPU]).map(|key| serde_json::json!({ "required": [key] })).collect();
    let map = serde_json::json!({
        "type": "object", "properties": arms, "additionalProperties": value, "minProperties": 1, "not": { "anyOf": not_reserved }
    });
    let either = serde_json::json!({ "anyOf": [value, map] });
    let devices = serde_json::json!({
        "type": "object", "properties": { SIMULATED: either, GPU: either }, "required": [SIMULATED, GPU], "additionalProperties": false
    });
    json_schema!({ "anyOf": [value, map, devices] })
}
