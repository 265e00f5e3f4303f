//! `expect` and `eventually`: what should hold now, and what should hold sometime.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use super::fields::StepFields;
use crate::cases::{Cases, DeviceKind};
use crate::checker::Checker;
use crate::ending::by_case;
use crate::metric::{Expectation, Metric};
use harness_language::error::Problem;
use harness_language::located::{Located, Position, Tree};
use harness_language::text::ExpressionText;

/// An expectation, checked. Each stands at its own place in the file.
#[derive(Clone, Debug, PartialEq)]
pub enum Expected {
    /// One that is looked at where it stands.
    Here(Located<Expectation>),
    /// One between arms: its figures are kept here, and it is looked at when all arms have run.
    BetweenArms {
        /// Its place in [`Scenario::comparisons`](crate::Scenario::comparisons).
        number: usize,
        /// The comparison itself.
        expectation: Located<Expectation>,
    },
}

impl Expected {
    /// What is expected.
    #[must_use]
    pub const fn expectation(&self) -> &Located<Expectation> {
        match self {
            Self::Here(expectation) | Self::BetweenArms { expectation, .. } => expectation,
        }
    }
}

/// What should hold now, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Expect(Cases<Vec<Expected>>);

/// What should hold after this step or after a later one, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Eventually(pub Vec<Located<Expectation>>);

impl Expect {
    /// What should hold with this allocator, by the name of its arm.
    #[must_use]
    pub fn of(&self, arm: &str, device: DeviceKind) -> &[Expected] {
        self.0.of(arm, device).map_or(&[], Vec::as_slice)
    }
}

/// The first expectation, and how many more there are: a step in a table, not the file again.
fn shortened<'e>(f: &mut fmt::Formatter<'_>, mut all: impl Iterator<Item = &'e Located<Expectation>>) -> fmt::Result {
    if let Some(first) = all.next() {
        write!(f, "{}", first.value)?;
    }
    match all.count() {
        0 => Ok(()),
        more => write!(f, " and {more} more"),
    }
}

impl fmt::Display for Expect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        shortened(f, self.0.values().into_iter().flat_map(|(_, all)| all).map(Expected::expectation))
    }
}

impl fmt::Display for Eventually {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        shortened(f, self.0.iter())
    }
}

/// Compares what is with what should be: an expression, a list of them, or a map from allocators to either.
#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
pub(crate) struct ExpectWire(Located<Tree>);

/// Something that should hold after this step or after a later one: an expression, or a list of them.
#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
pub(crate) struct EventuallyWire(Located<Tree>);

fn texts(generator: &mut SchemaGenerator) -> serde_json::Value {
    let one = generator.subschema_for::<ExpressionText>();
    serde_json::json!({ "anyOf": [one, { "type": "array", "items": one, "minItems": 1 }] })
}

impl JsonSchema for ExpectWire {
    fn schema_name() -> Cow<'static, str> {
        "expect".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let texts = texts(generator);
        let mut schema = by_case(&serde_json::json!({ "anyOf": [texts, { "const": "any" }] }), &[]);
        let about = "Compares what is with what should be: an expression, a list of them, or a map from allocators to either; `others` stands \
                     for those not named, and `any` expects nothing. An expression whose figures are of named allocators, as in \
                     `expandable.reserved.peak <= caching.reserved.peak`, is looked at when all have run, with the figures of this step.";
        schema.insert("description".to_owned(), about.into());
        schema
    }
}

impl JsonSchema for EventuallyWire {
    fn schema_name() -> Cow<'static, str> {
        "eventually".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut schema = json_schema!({ "description": "What should hold after this step or after a later one, before the run ends: an expression, or a list of them." });
        schema.insert("anyOf".to_owned(), texts(generator)["anyOf"].take());
        schema
    }
}

impl StepFields for ExpectWire {
    type Checked = Expect;

    const EXAMPLE: &'static str = "\
- alloc: { buffer: a, size: 3MiB }
- expect: allocated == 3MiB
- expect: [num_ooms == 0, (reserved - allocated) / reserved <= 90%, device.used == start.device.used + reserved +- 2MiB]
- expect: { caching: reserved == 20MiB }
- expect: { simulated: device.used - start.device.used >= 3MiB, gpu: any }";

    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Expect, Problem> {
        let cases = Cases::check(&self.0, checker, |_| false, &mut |tree, checker| {
            if tree.text().is_some_and(|text| text.value == "any") {
                return Ok(Vec::new());
            }
            let place = |expectation: Located<Expectation>, checker: &mut Checker<'_>| {
                if !expectation.value.quantities().any(|metric| matches!(metric, Metric::Arm(..))) {
                    return Expected::Here(expectation);
                }
                Expected::BetweenArms { number: checker.put_aside(expectation.clone()), expectation }
            };
            Ok(expectations(tree, at, checker)?.into_iter().map(|expectation| place(expectation, checker)).collect())
        })?;
        Ok(Expect(cases))
    }
}

impl StepFields for EventuallyWire {
    type Checked = Eventually;

    const EXAMPLE: &'static str = "\
- alloc: { buffer: a, size: 3MiB }
- record_stream: { buffer: a, stream: side }
- busy: { stream: side, duration: 5ms }
- free: a
- eventually: active == 0
- synchronize: device
- alloc: { buffer: b, size: 512B }";

    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Eventually, Problem> {
        let all = expectations(&self.0, at, checker)?;
        let of_arm = |expectation: &&Located<Expectation>| expectation.value.quantities().any(|metric| matches!(metric, Metric::Arm(..)));
        match all.iter().find(of_arm) {
            None => Ok(Eventually(all)),
            Some(between) => {
                let help = "write it as `expect`: figures of other allocators are looked at when all have run";
                Err(Problem::new(between.position(), "`eventually` compares no allocators").help(help))
            }
        }
    }
}

fn expectations(tree: &Located<Tree>, at: Position, checker: &mut Checker<'_>) -> Result<Vec<Located<Expectation>>, Problem> {
    let help = "as in `- expect: num_ooms == 0`";
    let texts = match tree.texts() {
        Some(texts) if !texts.is_empty() => texts,
        Some(_) => return Err(Problem::new(at, "nothing is expected here").help(help)),
        None => return Err(Problem::new(tree.position(), "an expression, or a list of them, is wanted here").help(help)),
    };
    checker.count(at, texts.len() as u64 - 1)?;
    texts.iter().map(|text| Ok(text.with(checker.expectation(text)?))).collect()
}
