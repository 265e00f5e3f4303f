//! The steps: one file each or a small family, and one row here. A row that is missing somewhere is a compile error.
//!
//! Each file holds, for its step, what YAML says (`…Wire`, whose comments are the documentation of the language), the check, and the
//! checked form that a run executes.

pub mod alloc;
pub mod cache;
pub mod contents;
pub mod event;
pub mod expect;
pub mod free;
pub mod measure;
pub mod pins;
pub mod pressure;
pub mod repeat;
pub mod storm;
pub mod train;
pub mod use_on;
pub mod work;

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::check::Checker;
use super::metric::{ReportKey, StepName};
use harness_language::error::{Problem, choices, quoted};
use harness_language::located::{Located, Position};
use harness_language::text::NameText;

/// One step of a scenario, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Where it stands in the file.
    pub position: Position,
    /// The name under which it reports, if it has one.
    pub id: Option<StepName>,
    /// What is to be done.
    pub action: Action,
}

/// What the file says of a step, and how it is checked.
pub(crate) trait StepFields: for<'de> Deserialize<'de> + JsonSchema {
    /// What comes out of the check.
    type Checked;

    /// Steps that show it, in YAML; they may use the streams `side` and `copy`.
    const EXAMPLE: &'static str;

    /// What a step of this kind counts of itself, for those that take an `id`.
    const REPORTS: &'static [ReportKey] = &[];

    /// What the name alone means, without any field.
    fn bare() -> Option<Self> {
        None
    }

    /// Its id, if it was given one.
    fn id(&self) -> Option<&NameText> {
        None
    }

    /// Steps inside it.
    fn body(&self) -> &[Located<StepWire>] {
        &[]
    }

    /// Checks it against what is known at this point. `at` is the place of the whole step.
    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Self::Checked, Problem>;
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
            Crowded(StepKind, Located<String>),
        }

        impl StepWire {
            /// The step in its checked form.
            pub(crate) fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<(StepKind, Action), Problem> {
                match self {
                    $(Self::$variant(wire) => Ok((StepKind::$variant, Action::$variant(wire.check(at, checker)?))),)*
                    Self::Unknown(name) => Err(unknown(&name.value, if name.line == 0 { at } else { name.position() })),
                    Self::Bare(kind) => Err(bare(*kind, at)),
                    Self::Crowded(kind, second) => Err(crowded(*kind, second)),
                }
            }

            /// Its id, if it was given one.
            pub(crate) fn id(&self) -> Option<&NameText> {
                match self {
                    $(Self::$variant(wire) => wire.id(),)*
                    Self::Unknown(_) | Self::Bare(_) | Self::Crowded(..) => None,
                }
            }

            /// Steps inside it.
            pub(crate) fn body(&self) -> &[Located<StepWire>] {
                match self {
                    $(Self::$variant(wire) => wire.body(),)*
                    Self::Unknown(_) | Self::Bare(_) | Self::Crowded(..) => &[],
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
    UseOn = "use_on": use_on::UseOnWire => use_on::UseOn,
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
    pub(crate) fn measure(&self) -> Option<&NameText> {
        match self {
            Self::Measure(wire) => Some(wire.name()),
            _ => None,
        }
    }
}

const FORM: &str = "a step is a list item with one key, as in `- alloc: { buffer: a, size: 1MiB }`, or a bare name, as in `- empty_cache`";

fn unknown(name: &str, at: Position) -> Problem {
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

fn crowded(kind: StepKind, second: &Located<String>) -> Problem {
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
                let Some(key) = map.next_key::<Located<String>>()? else {
                    return Err(de::Error::invalid_length(0, &self));
                };
                let (step, kind) = StepWire::from_entry(key, &mut map)?;
                let mut second = None;
                while let Some(key) = map.next_key::<Located<String>>()? {
                    map.next_value::<IgnoredAny>()?;
                    second = second.or(Some(key));
                }
                Ok(match (kind, second) {
                    (Some(kind), Some(second)) => StepWire::Crowded(kind, second),
                    _ => step,
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
            forms.push(json_schema!({
                "type": "object", "properties": { kind.name(): fields }, "required": [kind.name()], "additionalProperties": false
            }));
        }
        json_schema!({ "description": FORM, "oneOf": forms })
    }
}
