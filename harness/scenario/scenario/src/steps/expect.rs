use std::fmt;

use harness_language::schema::JsonSchema;
#[cfg(feature = "schema")]
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use super::{StepWire, fields::StepFields};
use crate::cases::{Cases, DeviceKind};
use crate::checker::Checker;
use crate::metric::{Expectation, Metric};
use harness_language::error::Problem;
use harness_language::located::{Located, Position, Tree};

#[derive(Clone, Debug, PartialEq)]
pub struct ExpectedValue {
    pub expectation: Located<Expectation>,
    /// For a comparison of allocators, its index in
    /// [`Scenario::comparisons`](crate::Scenario::comparisons).
    pub comparison: Option<usize>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Expect(Cases<Vec<ExpectedValue>>);

#[derive(Clone, Debug, PartialEq)]
pub struct Eventually(pub Vec<Located<Expectation>>);

impl Expect {
    pub fn of(&self, arm: &str, device: DeviceKind) -> &[ExpectedValue] {
        self.0.of(arm, device).map_or(&[], Vec::as_slice)
    }
}

/// Writes the first expectation and the number of the others, because a table has no room for all.
fn shortened<'e>(
    f: &mut fmt::Formatter<'_>,
    mut all: impl Iterator<Item = &'e Located<Expectation>>,
) -> fmt::Result {
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
        shortened(
            f,
            self.0
                .values()
                .into_iter()
                .flat_map(|(_, all)| all)
                .map(|expected| &expected.expectation),
        )
    }
}

impl fmt::Display for Eventually {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        shortened(f, self.0.iter())
    }
}

/// Checks that an expression, or each of a list, holds now. A map gives expectations per allocator;
/// `others` stands for the allocators that it does not name, and `any` expects nothing. An
/// expression with values of named allocators, as in `expandable.reserved.peak <=
/// caching.reserved.peak`, is evaluated after all allocators have run, with their values at this
/// step.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent, rename = "expect")]
pub(crate) struct ExpectWire(#[schemars(schema_with = "cases")] Located<Tree>);

/// Checks that an expression, or each of a list, holds after this step or after a later step of the
/// run.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent, rename = "eventually")]
pub(crate) struct EventuallyWire(#[schemars(schema_with = "texts")] Located<Tree>);

#[cfg(feature = "schema")]
fn texts(generator: &mut SchemaGenerator) -> Schema {
    let one = generator.subschema_for::<harness_language::text::ExpressionText>();
    json_schema!({ "anyOf": [one, { "type": "array", "items": one, "minItems": 1 }] })
}

#[cfg(feature = "schema")]
fn cases(generator: &mut SchemaGenerator) -> Schema {
    crate::ending::by_case(
        &serde_json::json!({ "anyOf": [texts(generator), { "const": "any" }] }),
        &[],
    )
}

impl StepFields<Expect> for ExpectWire {
    const EXAMPLE: &'static str = "\
- alloc: { buffer: a, size: 3MiB }
- expect: allocated == 3MiB
- expect: [num_ooms == 0, (reserved - allocated) / reserved <= 90%,
      device.used == start.device.used + reserved +- 2MiB]
- expect: { caching: reserved == 20MiB }
- expect: { simulated: device.used - start.device.used >= 3MiB, gpu: any }";

    fn check(
        &self,
        step: &Located<StepWire>,
        checker: &mut Checker<'_>,
    ) -> Result<Expect, Problem> {
        let cases = Cases::check(&self.0, checker, |_| false, &mut |tree, checker| {
            if tree.text().is_some_and(|text| text.value == "any") {
                return Ok(Vec::new());
            }
            let place = |expectation, checker: &mut Checker<'_>| {
                let comparison = compares_allocators(&expectation)
                    .then(|| checker.put_aside(expectation.clone()));
                ExpectedValue {
                    expectation,
                    comparison,
                }
            };
            Ok(expectations(tree, step.at, checker)?
                .into_iter()
                .map(|expectation| place(expectation, checker))
                .collect())
        })?;
        Ok(Expect(cases))
    }
}

impl StepFields<Eventually> for EventuallyWire {
    const NOT_IN_PROCESSES: Option<&'static str> =
        Some("move it out of the process, as in `eventually: worker.active == 0`");

    const EXAMPLE: &'static str = "\
- alloc: { buffer: a, size: 3MiB }
- record_stream: { buffer: a, stream: side }
- busy: { stream: side, duration: 5ms }
- free: a
- eventually: active == 0
- synchronize: device
- alloc: { buffer: b, size: 512B }
- free: b";

    fn check(
        &self,
        step: &Located<StepWire>,
        checker: &mut Checker<'_>,
    ) -> Result<Eventually, Problem> {
        let all = expectations(&self.0, step.at, checker)?;
        match all
            .iter()
            .find(|expectation| compares_allocators(expectation))
        {
            None => Ok(Eventually(all)),
            Some(between) => {
                let help = "use `expect`: values of other allocators are known after all have run";
                Err(Problem::new(between.at, "`eventually` cannot compare allocators").help(help))
            }
        }
    }
}

fn compares_allocators(expectation: &Located<Expectation>) -> bool {
    expectation
        .value
        .quantities()
        .any(|metric| matches!(metric, Metric::Arm(..)))
}

fn expectations(
    tree: &Located<Tree>,
    at: Position,
    checker: &mut Checker<'_>,
) -> Result<Vec<Located<Expectation>>, Problem> {
    let help = "as in `- expect: num_ooms == 0`";
    let texts = match tree.texts() {
        Some(texts) if !texts.is_empty() => texts,
        Some(_) => return Err(Problem::new(at, "this list of expectations is empty").help(help)),
        None => {
            return Err(
                Problem::new(tree.at, "expected an expression, or a list of expressions")
                    .help(help),
            );
        }
    };
    checker.count(at, texts.len() as u64 - 1)?;
    texts
        .iter()
        .map(|text| Ok(text.with(checker.expectation(text)?)))
        .collect()
}
