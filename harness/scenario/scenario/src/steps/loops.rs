use std::fmt;

use harness_allocator::units::Bytes;
use harness_base::words::count;
use harness_language::expression::{Number, Operator, Unit, Value};
use harness_language::schema::JsonSchema;
#[cfg(feature = "schema")]
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use super::fields::{ID, Keys, LEAK_CHECK, STEPS, StepFields, UNTIL, steps_inside};
use super::leaks::{self, LeakCheck};
use super::{Step, StepWire, check_steps};
use crate::checker::{Checker, unit_of};
use crate::metric::{ReportKey, VariableName};
use harness_language::error::Problem;
use harness_language::located::{Entries, Located, Position, Tree};
use harness_language::text::{CountText, NameText};

pub const MAX_TIMES: u64 = 1_000_000;
pub const MAX_VALUES: usize = 10_000;
/// Most iterations of a `repeat: until oom`.
const UNTIL_OOM_TIMES: u64 = 10_000;

#[derive(Clone, Debug, PartialEq)]
pub struct Loop {
    pub rounds: LoopRounds,
    pub until_oom: bool,
    pub leak_check: Option<LeakCheck>,
    pub steps: Vec<Step>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum LoopRounds {
    /// A number of equal iterations.
    Times(u64),
    /// One iteration for each value of a variable.
    Over {
        variable: VariableName,
        unit: Unit,
        values: Values,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    Range {
        first: Number,
        by: Number,
        count: u64,
    },
    List(Vec<Number>),
}

impl Values {
    const fn count(&self) -> u64 {
        match self {
            Self::Range { count, .. } => *count,
            Self::List(values) => values.len() as u64,
        }
    }
}

impl LoopRounds {
    pub const fn count(&self) -> u64 {
        match self {
            Self::Times(times) => *times,
            Self::Over { values, .. } => values.count(),
        }
    }

    /// The variable and its value in an iteration, counted from 0.
    pub fn value(&self, iteration: u64) -> Option<(&VariableName, Number)> {
        match self {
            Self::Times(_) => None,
            Self::Over {
                variable,
                values: Values::Range { first, by, .. },
                ..
            } => Some((
                variable,
                first + by * Number::from_integer(i128::from(iteration)),
            )),
            Self::Over {
                variable,
                values: Values::List(values),
                ..
            } => values
                .get(iteration as usize)
                .map(|value| (variable, *value)),
        }
    }

    /// Writes a value of the variable for a reader: `3`, `4 MiB`, `5.00 ms`.
    pub fn in_words(&self, value: Number) -> String {
        match self {
            Self::Over {
                unit: Unit::Bytes, ..
            } => Bytes(u64::try_from(value.to_integer()).unwrap_or_default()).to_string(),
            Self::Over { unit, .. } => Value {
                number: value,
                dimension: (*unit).into(),
            }
            .to_string(),
            Self::Times(_) => value.to_string(),
        }
    }
}

impl fmt::Display for Loop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, {}",
            count(self.steps.len(), "step"),
            count(self.rounds.count(), "time")
        )?;
        if self.until_oom {
            f.write_str(" at most, until out of memory")
        } else {
            Ok(())
        }
    }
}

/// Runs steps once for each value of a variable. Sizes, buffer numbers and expectations inside can
/// use the variable. Values are a range with both ends included, `for: { i: 1..8 }`, `1..600 by 2`
/// or `8..1 by -1`, or a list, `for: { size: [1MiB, 4MiB] }`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent, rename = "for")]
pub(crate) struct ForWire(#[schemars(schema_with = "values_of_a_variable")] Entries<Located<Tree>>);

#[cfg(feature = "schema")]
fn values_of_a_variable(_: &mut SchemaGenerator) -> Schema {
    let scalar = serde_json::json!({ "type": ["string", "number"] });
    json_schema!({
        "type": "object", "minProperties": 1, "maxProperties": 1,
        "additionalProperties": { "anyOf": [scalar,
        { "type": "array", "items": scalar, "minItems": 1, "maxItems": MAX_VALUES }] }
    })
}

/// Runs steps several times. The state after one iteration must suit the next. `repeat: until oom`
/// repeats until a request runs out of memory, and fails if no request does in 10000 iterations.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent, rename = "repeat")]
pub(crate) struct RepeatWire(#[schemars(schema_with = "until_oom_or_count")] Located<Tree>);

#[cfg(feature = "schema")]
fn until_oom_or_count(generator: &mut SchemaGenerator) -> Schema {
    let count = generator.subschema_for::<CountText>();
    json_schema!({ "anyOf": [{ "const": "until oom" }, count] })
}

const REPORTS: &[ReportKey] = &[ReportKey::Iterations];
const BESIDE: &[&str] = &[STEPS, UNTIL, ID, LEAK_CHECK];

impl StepFields<Loop> for ForWire {
    const EXAMPLE: &'static str = "\
- for: { i: 1..8 }
  steps:
    - alloc: { buffer: \"kv[i]\", size: 4MiB * i }
- for: { i: 8..1 by -1 }
  steps:
    - free: kv[i]
- for: { size: [100MiB, 2GiB, 8GiB] }
  until: oom
  id: growing
  steps:
    - alloc: { buffer: cache, size: size }
    - free: cache
- expect: growing.iterations == 2";

    const REPORTS: &'static [ReportKey] = REPORTS;
    const BESIDE: &'static [&'static str] = BESIDE;

    fn check(&self, step: &Located<StepWire>, checker: &mut Checker<'_>) -> Result<Loop, Problem> {
        let (at, keys, steps) = (step.at, &step.value.keys, steps_inside(step, "for")?);
        let [(name, given)] = self.0.0.as_slice() else {
            let message = format!("`for` takes one variable, not {}", self.0.0.len());
            return Err(Problem::new(at, message)
                .help(format!("{FORMS}; nest two `for` steps for two variables")));
        };
        let (values, unit) = values(given, checker)?;
        let until_oom = until(keys)?;
        let count = values.count();
        checker.with_variable(&NameText(name.clone()), unit, |checker, variable| {
            let steps =
                checker.repeated(at, count, until_oom, |checker| check_steps(steps, checker))?;
            let leak_check = leaks::check(keys.leak_check.as_deref(), count, checker)?;
            Ok(Loop {
                rounds: LoopRounds::Over {
                    variable,
                    unit,
                    values,
                },
                until_oom,
                leak_check,
                steps,
            })
        })
    }
}

impl StepFields<Loop> for RepeatWire {
    const EXAMPLE: &'static str = "\
- repeat: 10
  steps:
    - alloc: { buffer: batch, size: 4MiB }
    - free: batch
- repeat: until oom
  id: leak
  steps:
    - alloc: { buffer: lost, size: 512MiB, leak: true }
- expect: leak.iterations == 8";

    const REPORTS: &'static [ReportKey] = REPORTS;
    const BESIDE: &'static [&'static str] = BESIDE;

    fn check(&self, step: &Located<StepWire>, checker: &mut Checker<'_>) -> Result<Loop, Problem> {
        let (at, keys) = (step.at, &step.value.keys);
        let times = self.0.text().map(CountText).ok_or_else(|| {
            Problem::new(self.0.at, "expected the number of iterations")
                .help("as in `repeat: 3`, with `steps` next to it, or `repeat: until oom`")
        })?;
        let says_until = times.text().split_whitespace().eq(["until", "oom"]);
        if !says_until && times.text().starts_with("until") {
            return Err(Problem::new(
                times.at,
                format!("unknown number of iterations `{}`", times.text()),
            )
            .help("write `repeat: until oom`"));
        }
        let until_oom = until(keys)? || says_until;
        let times = if says_until {
            UNTIL_OOM_TIMES
        } else {
            checker.whole(&times, "repeat", 1..=MAX_TIMES)?
        };
        let inside = steps_inside(step, "repeat")?;
        let steps =
            checker.repeated(at, times, until_oom, |checker| check_steps(inside, checker))?;
        let leak_check = leaks::check(keys.leak_check.as_deref(), times, checker)?;
        Ok(Loop {
            rounds: LoopRounds::Times(times),
            until_oom,
            leak_check,
            steps,
        })
    }
}

fn until(keys: &Keys) -> Result<bool, Problem> {
    match &keys.until {
        None => Ok(false),
        Some(text) if text.value == "oom" => Ok(true),
        Some(text) => Err(
            Problem::new(text.at, format!("unknown end of a loop `{}`", text.value))
                .help("write `until: oom`"),
        ),
    }
}

const FORMS: &str = "as in `for: { i: 1..8 }`, both ends included, `{ i: 1..600 by 2 }`, `{ i: \
     8..1 by -1 }`, or a list, `{ size: [1MiB, 4MiB] }`";

fn values(given: &Located<Tree>, checker: &Checker<'_>) -> Result<(Values, Unit), Problem> {
    if let Some(text) = given.text() {
        return range(&text, checker);
    }
    let texts = given
        .texts()
        .filter(|texts| (1..=MAX_VALUES).contains(&texts.len()));
    let Some(texts) = texts else {
        return Err(Problem::new(
            given.at,
            format!("expected a range, or a list of 1 to {MAX_VALUES} values"),
        )
        .help(FORMS));
    };
    let mut values = Vec::new();
    let mut unit = None;
    for text in &texts {
        let value = checker.constant(text)?;
        unit = Some(same_unit(unit, &value, text.at)?);
        values.push(value.number);
    }
    Ok((Values::List(values), unit.unwrap_or(Unit::Count)))
}

/// Checks that a value has the unit of the values before it.
fn same_unit(before: Option<Unit>, value: &Value, at: Position) -> Result<Unit, Problem> {
    let unit = unit_of(value).ok_or_else(|| {
        Problem::new(at, format!("a variable cannot be {}", value.dimension)).help(FORMS)
    })?;
    match before {
        Some(before) if before != unit => {
            Err(Problem::new(at, "the values of a variable must have the same unit").help(FORMS))
        }
        _ => Ok(unit),
    }
}

/// Parses `FIRST..LAST` or `FIRST..LAST by STEP`.
fn range(text: &Located<String>, checker: &Checker<'_>) -> Result<(Values, Unit), Problem> {
    let refuse = |message: String| Problem::new(text.at, message).help(FORMS);
    let Some((first, rest)) = text.value.split_once("..") else {
        return Err(refuse(format!("`{}` is not a range", text.value)));
    };
    let (last, by) = rest
        .split_once(" by ")
        .map_or((rest, None), |(last, by)| (last, Some(by)));
    let value = |piece: &str| checker.constant(&text.with(piece.trim().to_owned()));
    let (first, last) = (value(first)?, value(last)?);
    let unit = same_unit(None, &first, text.at)?;
    same_unit(Some(unit), &last, text.at)?;
    let by = match by.map(str::trim) {
        None if unit == Unit::Count => Number::from_integer(1),
        None => {
            return Err(refuse("a range of sizes or times needs a step".to_owned())
                .help("as in `64MiB..512MiB by 64MiB`"));
        }
        Some(by) => {
            let (piece, sign) = by.strip_prefix('-').map_or((by, 1), |piece| (piece, -1));
            let by = value(piece)?;
            same_unit(Some(unit), &by, text.at)?;
            by.number * Number::from_integer(sign)
        }
    };
    let zero = Number::from_integer(0);
    if by == zero {
        return Err(refuse("the step of a range cannot be 0".to_owned()));
    }
    let distance = Operator::Subtract.apply(&last.number, &first.number);
    let rounds = distance
        .and_then(|distance| Operator::Divide.apply(&distance, &by))
        .map(|rounds| rounds.floor().to_integer() + 1);
    match rounds {
        Some(count) if count < 1 => Err(refuse(format!("the range `{}` is empty", text.value))
            .help(if by > zero {
                "to count down, add `by -1`, as in `8..1 by -1`"
            } else {
                FORMS
            })),
        Some(count) if count <= i128::from(MAX_TIMES) => Ok((
            Values::Range {
                first: first.number,
                by,
                count: count as u64,
            },
            unit,
        )),
        _ => Err(refuse(format!(
            "the range `{}` has more than {MAX_TIMES} values",
            text.value
        ))),
    }
}
