//! The steps. Each step, or small family of steps, has a file and a row in the table below.
//!
//! A step's file contains the YAML form (`…Wire`, whose comments become the reference), the
//! check, and the checked form that a run executes.

mod fields;

pub mod alloc;
pub mod blocks;
pub mod contents;
pub mod exec;
pub mod expect;
pub mod free;
pub mod infer;
pub mod leaks;
pub mod loops;
pub mod measure;
pub mod memory;
pub mod ranks;
pub mod replay;
pub mod storm;
pub mod streams;
pub mod train;

use std::{collections::BTreeMap, fmt};

use harness_allocator::units::Nanos;
#[cfg(feature = "schema")]
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

pub(crate) use fields::Keys;
use fields::{ID, LEAK_CHECK, MEANWHILE, STEPS, StepFields, TIMEOUT, UNTIL};

use super::metric::{Amount, MeasureName, PoolName, ProcessName, ProgramName, ReportKey, StepName};
use super::{checker::Checker, policy::Chain};
use harness_language::error::{Problem, choices, quoted};
use harness_language::located::{Located, Position};
use harness_language::text::{NameText, duration};

/// The keys that a step may have next to its own, each with its documentation.
pub const STEP_KEYS: [(&str, &str); 6] = Keys::ALL;

/// The lines before the example of a step.
pub const EXAMPLE_HEAD: &str = "about: An example.
needs: { memory: 4GiB }
streams: [side, copy]
programs: [server]
processes: [helper]
steps:
";

/// The example of a step as a file in `scenarios/`.
pub fn example(kind: StepKind) -> String {
    kind.example()
        .lines()
        .fold(EXAMPLE_HEAD.to_owned(), |file, line| {
            file + "  " + line + "\n"
        })
}

#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub position: Position,
    pub id: Option<StepName>,
    pub time_limit: Option<Nanos>,
    pub action: Action,
    /// Steps that run in between: one after each operation of this step.
    pub meanwhile: Vec<Step>,
}

/// Registers the steps: `Variant = "yaml_name": Wire => Checked`.
macro_rules! steps {
    ($($variant:ident = $name:literal: $wire:ty => $checked:ty,)*) => {
        #[derive(Clone, Debug, PartialEq)]
        pub enum Action { $($variant($checked),)* }

        impl Action {
            pub const fn kind(&self) -> StepKind {
                match self { $(Self::$variant(_) => StepKind::$variant),* }
            }
        }

        impl fmt::Display for Action {
            /// Describes the step without its name: `activations, 600 MiB`.
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self { $(Self::$variant(step) => step.fmt(f)),* }
            }
        }

        harness_allocator::named_enum! {
            /// The kinds of step, by their keys in YAML, in the order of the reference.
            StepKind { $($variant = $name,)* }
        }

        impl StepKind {
            /// Figures that a step of this kind reports under its `id`.
            pub const fn reports(self) -> &'static [ReportKey] {
                match self { $(Self::$variant => <$wire as StepFields<$checked>>::REPORTS),* }
            }

            /// An example in YAML.
            pub const fn example(self) -> &'static str {
                match self { $(Self::$variant => <$wire as StepFields<$checked>>::EXAMPLE),* }
            }

            /// Why a process cannot run such a step, if so.
            const fn not_in_processes(self) -> Option<&'static str> {
                match self {
                    $(Self::$variant => <$wire as StepFields<$checked>>::NOT_IN_PROCESSES),*
                }
            }

            /// Keys that are allowed next to the step's own key.
            fn beside(self) -> &'static [&'static str] {
                match self { $(Self::$variant => <$wire as StepFields<$checked>>::BESIDE),* }
            }

            fn takes_no_fields(self) -> bool {
                match self {
                    $(Self::$variant => <$wire as StepFields<$checked>>::bare().is_some()),*
                }
            }

            #[cfg(feature = "schema")]
            pub(super) fn schema(self, generator: &mut SchemaGenerator) -> Schema {
                match self { $(Self::$variant => generator.subschema_for::<$wire>()),* }
            }
        }

        /// The fields of a step as the file writes them.
        #[derive(Clone, Debug)]
        enum Fields { $($variant($wire),)* }

        impl Fields {
            const fn kind(&self) -> StepKind {
                match self { $(Self::$variant(_) => StepKind::$variant),* }
            }

            fn check(
                &self,
                step: &Located<StepWire>,
                checker: &mut Checker<'_>,
            ) -> Result<Action, Problem> {
                match self {
                    $(Self::$variant(wire) => wire.check(step, checker).map(Action::$variant),)*
                }
            }

            fn id(&self) -> Option<&NameText> {
                match self {
                    $(Self::$variant(wire) => <$wire as StepFields<$checked>>::ID(wire),)*
                }
            }

            /// Reads a step that is written as a bare name.
            fn from_name(name: &str) -> Result<Self, Problem> {
                match name {
                    $($name => <$wire as StepFields<$checked>>::bare()
                        .map(Self::$variant)
                        .ok_or_else(|| StepKind::$variant.needs_fields()),)*
                    _ => Err(unknown(name, Position::default())),
                }
            }

            fn from_entry<'de, A: MapAccess<'de>>(
                name: &str,
                at: Position,
                map: &mut A,
            ) -> Result<Result<Self, Problem>, A::Error> {
                match name {
                    $($name => map.next_value().map(|wire| Ok(Self::$variant(wire))),)*
                    _ => map.next_value::<IgnoredAny>().map(|_| Err(unknown(name, at))),
                }
            }
        }
    };
}

steps! {
    Alloc = "alloc": alloc::AllocWire => alloc::Alloc,
    Free = "free": free::FreeWire => free::FreeStep,
    RecordStream = "record_stream": streams::RecordStreamWire => streams::RecordStream,
    Fill = "fill": contents::FillWire => contents::Use,
    Verify = "verify": contents::VerifyWire => contents::Use,
    ReadAsync = "read_async": contents::ReadAsyncWire => contents::Use,
    Busy = "busy": streams::BusyWire => streams::Busy,
    Record = "record": streams::RecordWire => streams::RecordEvent,
    Wait = "wait": streams::WaitWire => streams::WaitEvent,
    Synchronize = "synchronize": streams::SynchronizeWire => streams::Synchronize,
    EmptyCache = "empty_cache": memory::EmptyCacheWire => memory::NoOperand,
    ResetPeakStats = "reset_peak_stats": memory::ResetPeakStatsWire => memory::NoOperand,
    SetMemoryFraction =
        "set_memory_fraction": memory::SetMemoryFractionWire => memory::SetMemoryFraction,
    ExternalMemory = "external_memory": memory::ExternalMemoryWire => Amount,
    For = "for": loops::ForWire => loops::Loop,
    Repeat = "repeat": loops::RepeatWire => loops::Loop,
    Program = "program": blocks::ProgramWire => blocks::StepBlock<ProgramName>,
    Process = "process": blocks::ProcessWire => blocks::StepBlock<ProcessName>,
    Kill = "kill": blocks::KillWire => ProcessName,
    PrivatePool = "private_pool": blocks::PrivatePoolWire => blocks::StepBlock<PoolName>,
    ReleasePool = "release_pool": blocks::ReleasePoolWire => PoolName,
    Storm = "storm": storm::StormWire => storm::Storm,
    Pins = "pins": storm::PinsWire => StepName,
    Train = "train": train::TrainWire => train::Train,
    Infer = "infer": infer::InferWire => infer::Infer,
    Replay = "replay": replay::ReplayWire => replay::Replay,
    Exec = "exec": exec::ExecWire => exec::Exec,
    Measure = "measure": measure::MeasureWire => MeasureName,
    Compare = "compare": measure::CompareWire => measure::Compare,
    Expect = "expect": expect::ExpectWire => expect::Expect,
    Eventually = "eventually": expect::EventuallyWire => expect::Eventually,
}

impl StepKind {
    fn without_fields() -> Vec<&'static str> {
        Self::ALL
            .iter()
            .filter(|kind| kind.takes_no_fields())
            .map(|kind| kind.name())
            .collect()
    }

    fn needs_fields(self) -> Problem {
        Problem::new(Position::default(), format!("`{self}` needs fields")).help(format!(
            "write it as in `{}`. These steps work without fields: {}",
            self.example().lines().last().unwrap_or_default(),
            quoted(&Self::without_fields(), " and ")
        ))
    }
}

/// A step as the file writes it. Invalid steps are kept, because the check can report their
/// position.
#[derive(Clone, Debug)]
pub(crate) struct StepWire {
    /// A problem with the whole step has no position.
    fields: Result<Fields, Problem>,
    keys: Keys,
}

impl Action {
    pub const fn is_block(&self) -> bool {
        !self.steps().is_empty()
    }

    pub const fn steps(&self) -> &[Step] {
        match self {
            Self::For(steps) | Self::Repeat(steps) => steps.steps.as_slice(),
            Self::Program(program) => program.steps.as_slice(),
            Self::Process(process) => process.steps.as_slice(),
            Self::PrivatePool(pool) => pool.steps.as_slice(),
            _ => &[],
        }
    }

    pub const fn on_oom(&self) -> Option<&Chain> {
        match self {
            Self::Alloc(alloc) => alloc.on_oom.as_ref(),
            Self::Train(train) => train.on_oom.as_ref(),
            Self::Infer(infer) => infer.on_oom.as_ref(),
            _ => None,
        }
    }

    pub const fn leak_check(&self) -> Option<&leaks::LeakCheck> {
        match self {
            Self::For(steps) | Self::Repeat(steps) => steps.leak_check.as_ref(),
            Self::Train(train) => train.leak_check.as_ref(),
            _ => None,
        }
    }

    /// Returns whether it has several operations, so that other steps can run in between.
    fn takes_its_time(&self) -> bool {
        let is_workload = match self {
            // The threads of a storm never pause together.
            Self::Storm(storm) => storm.threads.is_none(),
            _ => matches!(
                self,
                Self::Train(_) | Self::Infer(_) | Self::Replay(_) | Self::Exec(_)
            ),
        };
        is_workload || self.is_block() || self.on_oom().is_some_and(Chain::waits)
    }
}

impl StepWire {
    fn id(&self) -> Option<&NameText> {
        self.fields.as_ref().ok()?.id().or(self.keys.id.as_ref())
    }

    /// The id of a step, or the name of a `measure`.
    fn name(&self) -> Option<&NameText> {
        match &self.fields {
            Ok(Fields::Measure(wire)) => Some(wire.name()),
            _ => self.id(),
        }
    }

    /// The steps inside it that share its names. A process has its own names.
    fn steps_with_shared_names(&self) -> &[Located<Self>] {
        if matches!(self.fields, Ok(Fields::Process(_))) {
            &[]
        } else {
            self.keys.steps()
        }
    }
}

/// The ids and measures of these steps and of the steps inside them, each with its first position.
pub(crate) fn announced(steps: &[Located<StepWire>]) -> BTreeMap<String, Position> {
    let mut names = BTreeMap::new();
    for step in steps {
        if let Some(name) = step.value.name() {
            names
                .entry(name.text().to_owned())
                .or_insert_with(|| name.at);
        }
        let meanwhile = step
            .value
            .keys
            .meanwhile
            .as_ref()
            .map_or(&[][..], |steps| steps.value.as_slice());
        for (name, at) in announced(step.value.steps_with_shared_names())
            .into_iter()
            .chain(announced(meanwhile))
        {
            names.entry(name).or_insert(at);
        }
    }
    names
}

pub(crate) fn check_steps(
    steps: &[Located<StepWire>],
    checker: &mut Checker<'_>,
) -> Result<Vec<Step>, Problem> {
    steps.iter().map(|step| check_step(step, checker)).collect()
}

fn check_step(step: &Located<StepWire>, checker: &mut Checker<'_>) -> Result<Step, Problem> {
    let (position, wire) = (step.at, &step.value);
    checker.count(position, 1)?;
    let fields = wire
        .fields
        .as_ref()
        .map_err(|problem| problem.clone().or_at(position))?;
    let check = |checker: &mut Checker<'_>| fields.check(step, checker);
    let (action, meanwhile) = match &wire.keys.meanwhile {
        None => (check(checker)?, Vec::new()),
        Some(steps) => checker.at_the_same_time(check, wire.id(), steps.at, |checker| {
            check_steps(&steps.value, checker)
        })?,
    };
    let kind = action.kind();
    let meanwhile_at = wire.keys.meanwhile.as_ref().map(|given| given.at);
    if let Some(at) = meanwhile_at.filter(|_| !action.takes_its_time()) {
        return Err(Problem::new(
            at,
            format!(
                "`{kind}` is one operation, so nothing can run in \
             between"
            ),
        )
        .help(
            "these steps take `meanwhile`: `train`, `infer`, `storm` without `threads`, `replay`, \
             `exec`, `for`, `repeat`, `program`, `process`, `private_pool`, and `alloc` with the \
             policy `wait`",
        ));
    }
    if let Some(other) = meanwhile
        .iter()
        .find(|step| matches!(action, Action::Exec(_)) && !matches!(step.action, Action::Exec(_)))
    {
        return Err(Problem::new(
            other.position,
            format!("`{}` cannot run while a program runs", other.action.kind()),
        )
        .help(
            "`meanwhile` of an `exec` accepts `exec` steps only, because programs run at \
                 their own speed",
        ));
    }
    blocks::check_inside(&action, position, wire.id(), meanwhile_at, checker)?;
    let id = wire
        .id()
        .map(|id| checker.declare_id(id, kind.name(), kind.reports()))
        .transpose()?;
    let time_limit = match &wire.keys.timeout {
        Some(text) if action.is_block() => {
            return Err(
                Problem::new(text.at, format!("`{kind}` cannot have a time limit"))
                    .help("give a `timeout` to the steps inside it, or to the whole scenario"),
            );
        }
        Some(text) => Some(duration(text)?),
        None => checker.time_limit,
    };
    Ok(Step {
        position,
        id,
        time_limit,
        action,
        meanwhile,
    })
}

const FORM: &str = "a step is a list item with one key, as in `- alloc: { buffer: a, size: 1MiB \
     }`, or a bare name, as in `- empty_cache`";

fn unknown(name: &str, at: Position) -> Problem {
    Problem::new(at, format!("unknown step `{name}`")).help(choices(
        name,
        "steps",
        StepKind::ALL.iter().map(|kind| kind.name()),
    ))
}

impl<'de> Deserialize<'de> for StepWire {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StepVisitor;
        impl<'de> Visitor<'de> for StepVisitor {
            type Value = StepWire;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a step, as in `alloc: { buffer: a, size: 1MiB }` or `empty_cache`")
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<Self::Value, E> {
                Ok(StepWire {
                    fields: Fields::from_name(name),
                    keys: Keys::default(),
                })
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let (mut first, mut others, mut keys) = (None, Vec::new(), Keys::default());
                while let Some(key) = map.next_key::<Located<String>>()? {
                    match key.value.as_str() {
                        TIMEOUT => keys.timeout = Some(map.next_value()?),
                        MEANWHILE => keys.meanwhile = Some(map.next_value()?),
                        STEPS => keys.steps = Some(map.next_value()?),
                        UNTIL => keys.until = Some(map.next_value()?),
                        ID => keys.id = Some(map.next_value()?),
                        LEAK_CHECK => keys.leak_check = Some(map.next_value()?),
                        name if first.is_none() => {
                            first = Some(Fields::from_entry(name, key.at, &mut map)?);
                            continue;
                        }
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                    others.push(key);
                }
                Ok(assembled(first, &others, keys))
            }
        }
        deserializer.deserialize_any(StepVisitor)
    }
}

/// Makes a step from the keys of a list item.
fn assembled(
    first: Option<Result<Fields, Problem>>,
    others: &[Located<String>],
    keys: Keys,
) -> StepWire {
    let fields = match (first, others) {
        (Some(first), _) => first,
        (None, [key, ..]) => Err(unknown(&key.value, key.at)),
        (None, []) => Err(Problem::new(Position::default(), "this list item is empty").help(FORM)),
    };
    let fields = fields.and_then(|fields| {
        let kind = fields.kind();
        let is_surplus = |key: &&Located<String>| {
            ![TIMEOUT, MEANWHILE]
                .iter()
                .chain(kind.beside())
                .any(|accepted| *accepted == key.value)
        };
        match others.iter().find(is_surplus) {
            None => Ok(fields),
            Some(surplus) => Err(Problem::new(
                surplus.at,
                format!("`{}` is in the same list item as `{kind}`", surplus.value),
            )
            .help(format!(
                "put `- ` before it if it is a step, or indent it if it is a field of `{kind}`"
            ))),
        }
    });
    // The check reports nothing else about an invalid step.
    if fields.is_err() {
        StepWire {
            fields,
            keys: Keys::default(),
        }
    } else {
        StepWire { fields, keys }
    }
}

#[cfg(feature = "schema")]
impl JsonSchema for StepWire {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "step".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut forms = vec![
            json_schema!({ "enum": StepKind::without_fields(), "description": "A step without \
                 fields." }),
        ];
        let steps = generator.subschema_for::<Vec<Self>>();
        for kind in StepKind::ALL {
            let mut properties = serde_json::Map::from_iter([(
                kind.name().to_owned(),
                kind.schema(generator).to_value(),
            )]);
            let is_block = !kind.beside().is_empty();
            let may_take_time = matches!(
                kind,
                StepKind::Alloc
                    | StepKind::Train
                    | StepKind::Infer
                    | StepKind::Storm
                    | StepKind::Replay
                    | StepKind::Exec
            );
            for (key, about) in Keys::ALL {
                let mut schema = match key {
                    TIMEOUT if !is_block => {
                        generator.subschema_for::<harness_language::text::DurationText>()
                    }
                    MEANWHILE if is_block || may_take_time => steps.clone(),
                    _ if !kind.beside().contains(&key) => continue,
                    STEPS => steps.clone(),
                    UNTIL => json_schema!({ "const": "oom" }),
                    ID => generator.subschema_for::<NameText>(),
                    _ => generator.subschema_for::<leaks::LeakCheckWire>(),
                };
                schema.insert("description".to_owned(), about.into());
                properties.insert(key.to_owned(), schema.to_value());
            }
            forms.push(json_schema!({
                "type": "object", "properties": properties, "required": [kind.name()],
                "additionalProperties": false
            }));
        }
        json_schema!({ "description": FORM, "oneOf": forms })
    }
}
