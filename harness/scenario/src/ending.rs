//! How a request or a training should end: a word, or one for each allocator.

use std::borrow::Cow;
use std::fmt;

use harness_allocator::allocator::AllocatorKind;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::checker::Checker;
use harness_language::error::Problem;
use harness_language::located::{Entries, ListOr, Located};

/// How a request should end, recovery included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Expected {
    /// It is served.
    #[default]
    Fits,
    /// It fails for good.
    Oom,
}

/// How it should end with each allocator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// With every one alike.
    Always(Expected),
    /// With these, by the names of their arms and in the order of the file; with the others it may end either way.
    PerAllocator(Vec<(String, Expected)>),
}

impl Ending {
    /// How it should end with this allocator, by the name of its arm; `None`: either way.
    #[must_use]
    pub fn of(&self, arm: &str) -> Option<Expected> {
        match self {
            Self::Always(expected) => Some(*expected),
            Self::PerAllocator(each) => each.iter().find(|(name, _)| name == arm).map(|(_, expected)| *expected),
        }
    }
}

impl fmt::Display for Ending {
    /// Behind a step: `, expected to fail`; nothing where it is served as a matter of course.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let failing: Vec<&str> = match self {
            Self::Always(Expected::Fits) => return Ok(()),
            Self::Always(Expected::Oom) => return f.write_str(", expected to fail"),
            Self::PerAllocator(each) => {
                each.iter().filter(|(_, expected)| *expected == Expected::Oom).map(|(name, _)| name.as_str()).collect()
            }
        };
        if failing.is_empty() { Ok(()) } else { write!(f, ", expected to fail with {}", failing.join(", ")) }
    }
}

/// `fits` or `oom`, or a map from allocators to one of them.
#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
pub(crate) struct EndingWire(Located<ListOr<Entries<Located<String>>>>);

impl EndingWire {
    /// What was written, or `fits` where nothing was.
    pub(crate) fn check(given: Option<&Self>, checker: &Checker<'_>) -> Result<Ending, Problem> {
        let Some(Self(given)) = given else { return Ok(Ending::Always(Expected::Fits)) };
        match &given.value {
            ListOr::One(word) => Ok(Ending::Always(expected(&given.with(word.clone()))?)),
            ListOr::Map(Entries(each)) if !each.is_empty() => {
                let each = each.iter().map(|(arm, word)| Ok((checker.arm(arm)?, expected(word)?)));
                Ok(Ending::PerAllocator(each.collect::<Result<_, Problem>>()?))
            }
            ListOr::Map(_) | ListOr::Many(_) => Err(Problem::new(given.position(), "this does not say how it ends").help(FORMS)),
        }
    }
}

const FORMS: &str = "`fits`, `oom`, or a map from allocators to one of them, as in `{ caching: oom, expandable: fits }`";

fn expected(word: &Located<String>) -> Result<Expected, Problem> {
    match word.value.as_str() {
        "fits" => Ok(Expected::Fits),
        "oom" => Ok(Expected::Oom),
        other => Err(Problem::new(word.position(), format!("`{other}` is not known here")).help(FORMS)),
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
        let word = serde_json::json!({ "enum": ["fits", "oom"] });
        let each: Map<String, Value> = AllocatorKind::ALL.iter().map(|kind| (kind.name().to_owned(), word.clone())).collect();
        json_schema!({ "anyOf": [word, { "type": "object", "properties": each, "additionalProperties": word, "minProperties": 1 }] })
    }
}
