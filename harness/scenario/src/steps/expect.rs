//! `expect`: what should hold now.

use std::borrow::Cow;
use std::fmt;

use harness_allocator::allocator::AllocatorKind;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use super::fields::StepFields;
use crate::checker::Checker;
use crate::metric::Expectation;
use harness_language::error::Problem;
use harness_language::located::{Entries, ListOr, Located, NoMap, Position};
use harness_language::text::ExpressionText;

/// What should hold now, checked. Each expectation stands at its own place in the file.
#[derive(Clone, Debug, PartialEq)]
pub enum Expect {
    /// With every allocator.
    Always(Vec<Located<Expectation>>),
    /// With these allocators, by the names of their arms and in the order of the file; nothing with the others.
    PerAllocator(Vec<(String, Vec<Located<Expectation>>)>),
}

impl Expect {
    /// What should hold with this allocator, by the name of its arm.
    #[must_use]
    pub fn of(&self, arm: &str) -> &[Located<Expectation>] {
        match self {
            Self::Always(all) => all,
            Self::PerAllocator(each) => each.iter().find(|(name, _)| name == arm).map_or(&[], |(_, all)| all.as_slice()),
        }
    }
}

impl fmt::Display for Expect {
    /// The first expectation, and how many more there are: a step in a table, not the file again.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<_> = match self {
            Self::Always(all) => all.iter().collect(),
            Self::PerAllocator(each) => each.iter().flat_map(|(_, all)| all).collect(),
        };
        if let Some(first) = all.first() {
            write!(f, "{}", first.value)?;
        }
        if all.len() > 1 { write!(f, " and {} more", all.len() - 1) } else { Ok(()) }
    }
}

type Texts = Located<ListOr<NoMap>>;

/// Compares what is with what should be: an expression, a list of them, or a map from allocators to either.
#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
pub(crate) struct ExpectWire(Located<ListOr<Entries<Texts>>>);

impl JsonSchema for ExpectWire {
    fn schema_name() -> Cow<'static, str> {
        "expect".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let one = generator.subschema_for::<ExpressionText>();
        let many = json_schema!({ "anyOf": [one, { "type": "array", "items": one, "minItems": 1 }] });
        let each: serde_json::Map<_, _> = AllocatorKind::ALL.iter().map(|kind| (kind.name().to_owned(), many.clone().to_value())).collect();
        json_schema!({
            "description": "Compares what is with what should be: an expression, a list of them, or a map from allocators to either.",
            "anyOf": [one, { "type": "array", "items": one, "minItems": 1 }, { "type": "object", "properties": each, "additionalProperties": many, "minProperties": 1 }]
        })
    }
}

impl StepFields for ExpectWire {
    type Checked = Expect;

    const EXAMPLE: &'static str = "\
- alloc: { buffer: a, size: 3MiB }
- expect: allocated_bytes.all.current == 3MiB
- expect: [num_ooms == 0, device.used - start.device.used >= 3MiB]
- expect: { caching: reserved_bytes.all.current == 20MiB }";

    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Expect, Problem> {
        match self.0.texts() {
            Ok(texts) => Ok(Expect::Always(expectations(&texts, at, checker)?)),
            Err(Entries(entries)) => {
                if entries.is_empty() {
                    return Err(nothing(at));
                }
                let each = entries.iter().map(|(name, texts)| {
                    let arm = checker.arm(name)?;
                    match texts.texts() {
                        Ok(texts) => Ok((arm, expectations(&texts, name.position(), checker)?)),
                        Err(no_map) => match *no_map {},
                    }
                });
                Ok(Expect::PerAllocator(each.collect::<Result<_, _>>()?))
            }
        }
    }
}

fn expectations(texts: &[Located<String>], at: Position, checker: &mut Checker<'_>) -> Result<Vec<Located<Expectation>>, Problem> {
    if texts.is_empty() {
        return Err(nothing(at));
    }
    checker.count(at, texts.len() as u64 - 1)?;
    texts.iter().map(|text| Ok(text.with(checker.expectation(text)?))).collect()
}

fn nothing(at: Position) -> Problem {
    Problem::new(at, "`expect` expects nothing").help("as in `- expect: num_ooms == 0`")
}
