//! The steps: one file each or a small family, and one row here. A row that is missing somewhere is a compile error.
//!
//! Each file holds, for its step, what YAML says (`…Wire`, whose comments are the documentation of the language), the check, and the
//! checked form that a run executes.

pub mod alloc;
pub mod cache;
pub mod contents;
pub mod event;
pub mod expect;
mod fields;
pub mod free;
pub mod measure;
pub mod pins;
pub mod pressure;
pub mod record_stream;
pub mod repeat;
pub mod storm;
pub mod train;
pub mod work;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use harness_allocator::units::Nanos;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use fields::StepFields;

use super::checker::Checker;
use super::metric::{ReportKey, StepName};
use harness_language::error::{Problem, choices, quoted};
use harness_language::located::{Located, Position};
use harness_language::text::{DurationText, NameText, duration};

/// One step of a scenario, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Where it stands in the file.
    pub position: Position,
    /// The name under which it reports, if it has one.
    pub id: Option<StepName>,
    /// How long it may take on the host's clock, if it has a limit of its own.
    pub time_limit: Option<Nanos>,
    /// What is to be done.
    pub action: Action,
}

/// Registers the steps: `Variant = "yaml_name": Wire => Checked`.
macro_rules! steps {
    ($($variant:ident = $name:literal: $wire:ty => $checked:ty,)*) => {
        /// What a step does.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs, reason = "each variant's type is its documentation")]
        pub enum Action { $($variant($checked),)* }

        impl Action {
            /// Which step it is.
            #[must_use]
            pub const fn kind(&self) -> StepKind {
                match self { $(Self::$variant(_) => StepKind::$variant),* }
            }
        }

        impl fmt::Display for Action {
            /// The step in a few words, without its name: `activations, 600 MiB`.
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self { $(Self::$variant(step) => step.fmt(f)),* }
            }
        }

        /// The kinds of step, in the order of the reference.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[allow(missing_docs, reason = "each variant's type is its documentation")]
        pub enum StepKind { $($variant,)* }

        impl StepKind {
            /// Every one, in the order of the reference.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// Its key in YAML.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// What a step of this kind counts of itself, if it is given an `id`.
            #[must_use]
            pub const fn reports(self) -> &'static [ReportKey] {
                match self { $(Self::$variant => <$wire>::REPORTS),* }
            }

            /// Steps that show it, in YAML.
            #[must_use]
            pub const fn example(self) -> &'static str {
                match self { $(Self::$variant => <$wire>::EXAMPLE),* }
            }

            fn takes_no_fields(self) -> bool {
                match self { $(Self::$variant => <$wire>::bare().is_some()),* }
            }

            pub(super) fn schema(self, generator: &mut SchemaGenerator) -> Schema {
                match self { $(Self::$variant => generator.subschema_for::<$wire>()),* }
            }
        }

        /// A step as the file says it. What cannot be a step is kept, to be answered by the check with its place.
        #[derive(Clone, Debug)]
        pub(crate) enum StepWire {
            $($variant($wire),)*
            /// No step has this name.
            Unknown(Located<String>),
            /// A step that needs fields was given none.
            Bare(StepKind),
            /// One list item with several keys.
            SeveralKeys(StepKind, Located<String>),
            /// A step with a `timeout:` beside it.
            Timed(Box<StepWire>, DurationText),
        }

        impl StepWire {
            /// The step in its checked form.
            fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<(StepKind, Action), Problem> {
                match self {
                    $(Self::$variant(wire) => Ok((StepKind::$variant, Action::$variant(wire.check(at, checker)?))),)*
                    Self::Unknown(name) => Err(unknown(&name.value, if name.line == 0 { at } else { name.position() })),
                    Self::Bare(kind) => Err(bare(*kind, at)),
                    Self::SeveralKeys(kind, second) => Err(several_keys(*kind, second)),
                    Self::Timed(step, _) => step.check(at, checker),
                }
            }

            /// Its id, if it was given one.
            fn id(&self) -> Option<&NameText> {
                match self {
                    $(Self::$variant(wire) => wire.id(),)*
                    Self::Timed(step, _) => step.id(),
                    Self::Unknown(_) | Self::Bare(_) | Self::SeveralKeys(..) => None,
                }
            }

            fn from_name(name: &str) -> Self {
                match name {
                    $($name => <$wire>::bare().map_or(Self::Bare(StepKind::$variant), Self::$variant),)*
                    // The place of a bare name is that of the whole step, which the check knows.
                    _ => Self::Unknown(Located { value: name.to_owned(), line: 0, column: 0, length: 0 }),
                }
            }

            fn from_entry<'de, A: MapAccess<'de>>(key: Located<String>, map: &mut A) -> Result<(Self, Option<StepKind>), A::Error> {
                match key.value.as_str() {
                    $($name => Ok((Self::$variant(map.next_value()?), Some(StepKind::$variant))),)*
                    _ => {
                        map.next_value::<IgnoredAny>()?;
                        Ok((Self::Unknown(key), None))
                    }
                }
            }
        }
    };
}

steps! {
    Alloc = "alloc": alloc::AllocWire => alloc::Alloc,
    Free = "free": free::FreeWire => free::Free,
    RecordStream = "record_stream": record_stream::RecordStreamWire => record_stream::RecordStream,
    Fill = "fill": contents::FillWire => contents::Fill,
    Verify = "verify": contents::VerifyWire => contents::Verify,
    Work = "work": work::WorkWire => work::Work,
    Record = "record": event::RecordWire => event::Record,
    Wait = "wait": event::WaitWire => event::Wait,
    Synchronize = "synchronize": event::SynchronizeWire => event::Synchronize,
    EmptyCache = "empty_cache": cache::EmptyCacheWire => cache::EmptyCache,
    ResetPeaks = "reset_peaks": cache::ResetPeaksWire => cache::ResetPeaks,
    SetFraction = "set_fraction": cache::SetFractionWire => cache::SetFraction,
    Pressure = "pressure": pressure::PressureWire => pressure::Pressure,
    Repeat = "repeat": repeat::RepeatWire => repeat::Repeat,
    Storm = "storm": storm::StormWire => storm::Storm,
    Pins = "pins": pins::PinsWire => pins::Pins,
    Train = "train": train::TrainWire => train::Train,
    Measure = "measure": measure::MeasureWire => measure::Measure,
    Expect = "expect": expect::ExpectWire => expect::Expect,
}

impl fmt::Display for StepKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl StepWire {
    /// The name of a measure.
    fn measure(&self) -> Option<&NameText> {
        match self {
            Self::Measure(wire) => Some(wire.name()),
            Self::Timed(step, _) => step.measure(),
            _ => None,
        }
    }

    /// How long it may take, if it has a limit of its own.
    pub(crate) fn time_limit(&self) -> Result<Option<Nanos>, Problem> {
        match self {
            Self::Timed(step, text) if matches!(**step, Self::Repeat(_)) => {
                Err(Problem::new(text.position(), "`repeat` has no time limit of its own").help("give a `timeout` to the steps inside it"))
            }
            Self::Timed(_, text) => duration(text).map(Some),
            _ => Ok(None),
        }
    }

    /// Steps inside it.
    fn body(&self) -> &[Located<Self>] {
        match self {
            Self::Repeat(wire) => &wire.steps,
            Self::Timed(step, _) => step.body(),
            _ => &[],
        }
    }
}

/// The ids and measures of these steps and of those inside them, each with its first place: to tell a name that comes later from one that
/// does not exist.
pub(crate) fn announced(steps: &[Located<StepWire>]) -> BTreeMap<String, Position> {
    let mut names = BTreeMap::new();
    for step in steps {
        if let Some(name) = step.value.id().or(step.value.measure()) {
            names.entry(name.text().to_owned()).or_insert_with(|| name.position());
        }
        for (name, at) in announced(step.value.body()) {
            names.entry(name).or_insert(at);
        }
    }
    names
}

/// Checks steps in their order.
pub(crate) fn check_steps(steps: &[Located<StepWire>], checker: &mut Checker<'_>) -> Result<Vec<Step>, Problem> {
    steps.iter().map(|step| check_step(step, checker)).collect()
}

fn check_step(wire: &Located<StepWire>, checker: &mut Checker<'_>) -> Result<Step, Problem> {
    let position = wire.position();
    checker.count(position, 1)?;
    let (kind, action) = wire.value.check(position, checker)?;
    let id = wire.value.id().map(|id| checker.declare_id(id, kind.name(), kind.reports())).transpose()?;
    Ok(Step { position, id, time_limit: wire.value.time_limit()?, action })
}

const FORM: &str = "a step is a list item with one key, as in `- alloc: { buffer: a, size: 1MiB }`, or a bare name, as in `- empty_cache`";

/// The key of a step's time limit, beside the step's own.
const TIMEOUT: &str = "timeout";

const ABOUT_TIMEOUT: &str = "How long the step may take, on the clock of the machine that runs it: 5 min if not given. A step that takes longer \
                             fails the run.";

/// Names that steps had once, with those of today.
const RENAMED: &[(&str, &str)] = &[("use_on", "record_stream")];

fn unknown(name: &str, at: Position) -> Problem {
    if let Some((_, today)) = RENAMED.iter().find(|(before, _)| *before == name) {
        return Problem::new(at, format!("the step `{name}` is called `{today}` now")).help(format!("write `{today}` in its place"));
    }
    let steps = choices(name, "steps", StepKind::ALL.iter().map(|kind| kind.name()));
    Problem::new(at, format!("there is no step `{name}`")).help(steps)
}

fn bare(kind: StepKind, at: Position) -> Problem {
    let alone: Vec<&str> = StepKind::ALL.iter().filter(|kind| kind.takes_no_fields()).map(|kind| kind.name()).collect();
    Problem::new(at, format!("`{kind}` needs to be told more")).help(format!(
        "as in `{}`; only {} stand alone",
        kind.example().lines().last().unwrap_or_default(),
        quoted(&alone, " and ")
    ))
}

fn several_keys(kind: StepKind, second: &Located<String>) -> Problem {
    Problem::new(second.position(), format!("`{}` stands in the same list item as `{kind}`", second.value))
        .help(format!("put `- ` in front of a step of its own, or indent it if it is a field of `{kind}`"))
}

impl<'de> Deserialize<'de> for StepWire {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StepVisitor;
        impl<'de> Visitor<'de> for StepVisitor {
            type Value = StepWire;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(FORM)
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<Self::Value, E> {
                Ok(StepWire::from_name(name))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let (mut first, mut second, mut timeout) = (None, None, None);
                while let Some(key) = map.next_key::<Located<String>>()? {
                    match &first {
                        _ if key.value == TIMEOUT => timeout = Some((map.next_value::<DurationText>()?, key)),
                        None => first = Some(StepWire::from_entry(key, &mut map)?),
                        Some(_) => {
                            map.next_value::<IgnoredAny>()?;
                            second = second.or(Some(key));
                        }
                    }
                }
                Ok(match (first, second, timeout) {
                    (Some((_, Some(kind))), Some(second), _) => StepWire::SeveralKeys(kind, second),
                    (Some((step, _)), _, Some((limit, _))) => StepWire::Timed(Box::new(step), limit),
                    (Some((step, _)), _, None) => step,
                    (None, _, Some((_, key))) => StepWire::Unknown(key),
                    (None, _, None) => return Err(de::Error::invalid_length(0, &self)),
                })
            }
        }
        deserializer.deserialize_any(StepVisitor)
    }
}

impl JsonSchema for StepWire {
    fn schema_name() -> Cow<'static, str> {
        "step".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let bare: Vec<&str> = StepKind::ALL.iter().filter(|kind| kind.takes_no_fields()).map(|kind| kind.name()).collect();
        let mut forms = vec![json_schema!({ "enum": bare, "description": "A step without fields." })];
        for kind in StepKind::ALL {
            let fields = kind.schema(generator);
            let mut form = json_schema!({
                "type": "object", "properties": { kind.name(): fields }, "required": [kind.name()], "additionalProperties": false
            });
            if *kind != StepKind::Repeat {
                let mut limit = generator.subschema_for::<DurationText>();
                limit.insert("description".to_owned(), ABOUT_TIMEOUT.into());
                form.insert("properties".to_owned(), serde_json::json!({ kind.name(): fields, TIMEOUT: limit }));
            }
            forms.push(form);
        }
        json_schema!({ "description": FORM, "oneOf": forms })
    }
}
