//! The steps. Each step, or small family of steps, has a file and a row in the table below.
//!
//! A step's file contains the YAML form (`…Wire`, whose comments become the reference), the check, and the checked form that a run executes.

#[macro_use]
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

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use harness_allocator::units::Nanos;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use fields::{Beside, Body, StepFields};

use super::checker::Checker;
use super::metric::{Amount, MeasureName, PoolName, ProcessName, ProgramName, ReportKey, StepName};
use super::policy::Chain;
use harness_language::error::{Problem, choices, quoted};
use harness_language::located::{Located, Position};
use harness_language::text::{DurationText, NameText, duration};

/// A checked step.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub position: Position,
    /// The `id` of the step.
    pub id: Option<StepName>,
    /// Limit on the host's clock.
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

        /// The kinds of step, in the order of the reference.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum StepKind { $($variant,)* }

        impl StepKind {
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// Its key in YAML.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// Figures that a step of this kind reports under its `id`.
            pub const fn reports(self) -> &'static [ReportKey] {
                match self { $(Self::$variant => <$wire>::REPORTS),* }
            }

            /// An example in YAML.
            pub const fn example(self) -> &'static str {
                match self { $(Self::$variant => <$wire>::EXAMPLE),* }
            }

            /// Why a process cannot run such a step, if so.
            const fn not_in_processes(self) -> Option<&'static str> {
                match self { $(Self::$variant => <$wire>::NOT_IN_PROCESSES),* }
            }

            /// Keys that are allowed next to the step's own key.
            fn beside(self) -> &'static [Beside] {
                match self { $(Self::$variant => <$wire>::BESIDE),* }
            }

            fn takes_no_fields(self) -> bool {
                match self { $(Self::$variant => <$wire>::bare().is_some()),* }
            }

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

            fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Action, Problem> {
                match self { $(Self::$variant(wire) => wire.check(at, checker).map(Action::$variant),)* }
            }

            fn id(&self) -> Option<&NameText> {
                match self { $(Self::$variant(wire) => wire.id(),)* }
            }

            /// The steps inside it and the keys next to its own.
            fn body(&self) -> Option<&Body> {
                match self { $(Self::$variant(wire) => wire.body(),)* }
            }

            fn take(&mut self, body: Body) {
                match self { $(Self::$variant(wire) => wire.take(body),)* }
            }

            fn from_name(name: &str) -> Result<Self, Mistake> {
                match name {
                    $($name => <$wire>::bare().map(Self::$variant).ok_or(Mistake::Bare(StepKind::$variant)),)*
                    _ => Err(Mistake::Unknown(name.to_owned(), None)),
                }
            }

            fn from_entry<'de, A: MapAccess<'de>>(name: &str, at: Position, map: &mut A) -> Result<Result<Self, Mistake>, A::Error> {
                match name {
                    $($name => map.next_value().map(|wire| Ok(Self::$variant(wire))),)*
                    _ => map.next_value::<IgnoredAny>().map(|_| Err(Mistake::Unknown(name.to_owned(), Some(at)))),
                }
            }
        }
    };
}

steps! {
    Alloc = "alloc": alloc::AllocWire => alloc::Alloc,
    Free = "free": free::FreeWire => free::Free,
    RecordStream = "record_stream": streams::RecordStreamWire => streams::RecordStream,
    Fill = "fill": contents::FillWire => contents::Use,
    Verify = "verify": contents::VerifyWire => contents::Use,
    ReadAsync = "read_async": contents::ReadAsyncWire => contents::Use,
    Busy = "busy": streams::BusyWire => streams::Busy,
    Record = "record": streams::RecordWire => streams::Record,
    Wait = "wait": streams::WaitWire => streams::Wait,
    Synchronize = "synchronize": streams::SynchronizeWire => streams::Synchronize,
    EmptyCache = "empty_cache": memory::EmptyCacheWire => memory::NoOperand,
    ResetPeakStats = "reset_peak_stats": memory::ResetPeakStatsWire => memory::NoOperand,
    SetMemoryFraction = "set_memory_fraction": memory::SetMemoryFractionWire => memory::SetMemoryFraction,
    ExternalMemory = "external_memory": memory::ExternalMemoryWire => Amount,
    For = "for": loops::ForWire => loops::Loop,
    Repeat = "repeat": loops::RepeatWire => loops::Loop,
    Program = "program": blocks::ProgramWire => blocks::Block<ProgramName>,
    Process = "process": blocks::ProcessWire => blocks::Block<ProcessName>,
    Kill = "kill": blocks::KillWire => ProcessName,
    PrivatePool = "private_pool": blocks::PrivatePoolWire => blocks::Block<PoolName>,
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
    /// Keys next to a step's own key, with their documentation.
    pub(crate) fn common_keys() -> impl Iterator<Item = (&'static str, &'static str)> {
        let of_blocks = Beside::ALL.into_iter().map(|beside| (beside.name(), beside.about()));
        [(TIMEOUT, ABOUT_TIMEOUT), (MEANWHILE, ABOUT_MEANWHILE)].into_iter().chain(of_blocks)
    }
}

impl fmt::Display for StepKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A step as the file writes it. Invalid steps are kept, because the check can report their position.
#[derive(Clone, Debug)]
pub(crate) struct StepWire {
    fields: Result<Fields, Mistake>,
    extras: Extras,
}

/// Why a list item is not a step.
#[derive(Clone, Debug)]
enum Mistake {
    /// A bare name has the position of the whole step, which the check knows.
    Unknown(String, Option<Position>),
    /// The step needs fields and has none.
    Bare(StepKind),
    Empty,
    SeveralKeys(StepKind, Located<String>),
}

/// Keys that every step may have next to its own.
#[derive(Clone, Debug, Default)]
struct Extras {
    timeout: Option<DurationText>,
    meanwhile: Option<Located<Vec<Located<StepWire>>>>,
    /// The earlier name that the file uses, and the name today.
    renamed: Option<(&'static str, &'static str)>,
}

impl Action {
    pub const fn is_block(&self) -> bool {
        !self.steps().is_empty()
    }

    /// The steps inside it.
    pub const fn steps(&self) -> &[Step] {
        match self {
            Self::For(steps) | Self::Repeat(steps) => steps.steps.as_slice(),
            Self::Program(program) => program.steps.as_slice(),
            Self::Process(process) => process.steps.as_slice(),
            Self::PrivatePool(pool) => pool.steps.as_slice(),
            _ => &[],
        }
    }

    pub(crate) fn steps_mut(&mut self) -> &mut [Step] {
        match self {
            Self::For(steps) | Self::Repeat(steps) => &mut steps.steps,
            Self::Program(program) => &mut program.steps,
            Self::Process(process) => &mut process.steps,
            Self::PrivatePool(pool) => &mut pool.steps,
            _ => &mut [],
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
            _ => matches!(self, Self::Train(_) | Self::Infer(_) | Self::Replay(_) | Self::Exec(_)),
        };
        is_workload || self.is_block() || self.on_oom().is_some_and(Chain::waits)
    }
}

impl StepWire {
    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Action, Problem> {
        match &self.fields {
            Ok(fields) => fields.check(at, checker),
            Err(mistake) => Err(mistake.problem(at)),
        }
    }

    fn id(&self) -> Option<&NameText> {
        self.fields.as_ref().ok()?.id()
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
        match &self.fields {
            Ok(Fields::Process(_)) | Err(_) => &[],
            Ok(fields) => fields.body().map_or(&[], Body::steps),
        }
    }
}

impl Mistake {
    /// `at` is the position of the whole step.
    fn problem(&self, at: Position) -> Problem {
        match self {
            Self::Unknown(name, key_at) => unknown(name, key_at.unwrap_or(at)),
            Self::Bare(kind) => bare(*kind, at),
            Self::Empty => Problem::new(at, "this list item is empty").help(FORM),
            Self::SeveralKeys(kind, second) => several_keys(*kind, second),
        }
    }
}

/// The step's own time limit.
fn time_limit(wire: &StepWire, action: &Action) -> Result<Option<Nanos>, Problem> {
    match &wire.extras.timeout {
        Some(text) if action.is_block() => {
            let message = format!("`{}` cannot have a time limit", action.kind());
            Err(Problem::new(text.position(), message).help("give a `timeout` to the steps inside it, or to the whole scenario"))
        }
        Some(text) => duration(text).map(Some),
        None => Ok(None),
    }
}

/// The ids and measures of these steps and of the steps inside them, each with its first position. They distinguish a name that is defined
/// later from an unknown name.
pub(crate) fn announced(steps: &[Located<StepWire>]) -> BTreeMap<String, Position> {
    let mut names = BTreeMap::new();
    for step in steps {
        if let Some(name) = step.value.name() {
            names.entry(name.text().to_owned()).or_insert_with(|| name.position());
        }
        let meanwhile = step.value.extras.meanwhile.as_ref().map_or(&[][..], |steps| steps.value.as_slice());
        for (name, at) in announced(step.value.steps_with_shared_names()).into_iter().chain(announced(meanwhile)) {
            names.entry(name).or_insert(at);
        }
    }
    names
}

pub(crate) fn check_steps(steps: &[Located<StepWire>], checker: &mut Checker<'_>) -> Result<Vec<Step>, Problem> {
    steps.iter().map(|step| check_step(step, checker)).collect()
}

fn check_step(step: &Located<StepWire>, checker: &mut Checker<'_>) -> Result<Step, Problem> {
    let (position, wire) = (step.position(), &step.value);
    checker.count(position, 1)?;
    if let Some((old, new)) = wire.extras.renamed {
        checker.renamed(position, old, new);
    }
    let (action, meanwhile) = match &wire.extras.meanwhile {
        None => (wire.check(position, checker)?, Vec::new()),
        Some(steps) => checker.at_the_same_time(
            |checker| wire.check(position, checker),
            wire.id(),
            steps.position(),
            |checker| check_steps(&steps.value, checker),
        )?,
    };
    let kind = action.kind();
    let meanwhile_at = wire.extras.meanwhile.as_ref().map(Located::position);
    if let Some(at) = meanwhile_at.filter(|_| !action.takes_its_time()) {
        return Err(Problem::new(at, format!("`{kind}` is one operation, so nothing can run in between")).help(
            "these steps take `meanwhile`: `train`, `infer`, `storm` without `threads`, `replay`, `exec`, `for`, `repeat`, `program`, `process`, `private_pool`, and `alloc` with the policy `wait`",
        ));
    }
    if let Some(other) = meanwhile.iter().find(|step| matches!(action, Action::Exec(_)) && !matches!(step.action, Action::Exec(_))) {
        return Err(Problem::new(other.position, format!("`{}` cannot run while a program runs", other.action.kind()))
            .help("`meanwhile` of an `exec` accepts `exec` steps only, because programs run at their own speed"));
    }
    blocks::check_inside(&action, position, wire.id(), meanwhile_at, checker)?;
    let id = wire.id().map(|id| checker.declare_id(id, kind.name(), kind.reports())).transpose()?;
    Ok(Step { position, id, time_limit: time_limit(wire, &action)?, action, meanwhile })
}

const FORM: &str = "a step is a list item with one key, as in `- alloc: { buffer: a, size: 1MiB }`, or a bare name, as in `- empty_cache`";

const TIMEOUT: &str = "timeout";

const ABOUT_TIMEOUT: &str =
    "Time limit of the step, on the clock of the machine that runs it. A step that takes longer fails the run. Default: 5 min.";

const MEANWHILE: &str = "meanwhile";

const ABOUT_MEANWHILE: &str = "Steps that run while this step runs: one after each of its operations, and the rest after its end. An operation is a request or \
                               free of a `storm`, an iteration of a `train`, an operation of the trace of a `replay`, a wait of the policy `wait` of an `alloc`, or a step \
                               inside a block. An `exec` starts all of them after its own start. They must not name the same buffers as this step.";

/// Earlier names of steps, which still work, and their names today.
const RENAMED: &[(&str, &str)] = &[
    ("use_on", "record_stream"),
    ("read", "read_async"),
    ("work", "busy"),
    ("reset_peaks", "reset_peak_stats"),
    ("set_fraction", "set_memory_fraction"),
    ("pressure", "external_memory"),
];

fn renamed(name: &str) -> Option<(&'static str, &'static str)> {
    RENAMED.iter().copied().find(|(old, _)| *old == name)
}

fn unknown(name: &str, at: Position) -> Problem {
    let steps = choices(name, "steps", StepKind::ALL.iter().map(|kind| kind.name()));
    Problem::new(at, format!("unknown step `{name}`")).help(steps)
}

fn bare(kind: StepKind, at: Position) -> Problem {
    let alone: Vec<&str> = StepKind::ALL.iter().filter(|kind| kind.takes_no_fields()).map(|kind| kind.name()).collect();
    Problem::new(at, format!("`{kind}` needs fields")).help(format!(
        "write it as in `{}`. These steps work without fields: {}",
        kind.example().lines().last().unwrap_or_default(),
        quoted(&alone, " and ")
    ))
}

fn several_keys(kind: StepKind, second: &Located<String>) -> Problem {
    Problem::new(second.position(), format!("`{}` is in the same list item as `{kind}`", second.value))
        .help(format!("put `- ` before it if it is a step, or indent it if it is a field of `{kind}`"))
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
                let extras = Extras { renamed: renamed(name), ..Extras::default() };
                let name = extras.renamed.map_or(name, |(_, new)| new);
                Ok(StepWire { fields: Fields::from_name(name), extras })
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let (mut first, mut second) = (None, None);
                let (mut extras, mut body, mut beside) = (Extras::default(), Body::default(), None);
                while let Some(key) = map.next_key::<Located<String>>()? {
                    match key.value.as_str() {
                        TIMEOUT => extras.timeout = Some(map.next_value()?),
                        MEANWHILE => extras.meanwhile = Some(map.next_value()?),
                        name if name == Beside::Steps.name() => body.steps = Some(map.next_value()?),
                        name if name == Beside::Until.name() => body.until = Some(map.next_value()?),
                        name if name == Beside::Id.name() => body.id = Some(map.next_value()?),
                        name if name == Beside::LeakCheck.name() => body.leak_check = Some(map.next_value()?),
                        _ if first.is_none() => {
                            extras.renamed = renamed(&key.value);
                            let name = extras.renamed.map_or(key.value.as_str(), |(_, new)| new);
                            first = Some(Fields::from_entry(name, key.position(), &mut map)?);
                            continue;
                        }
                        _ => {
                            map.next_value::<IgnoredAny>()?;
                            second = second.or(Some(key));
                            continue;
                        }
                    }
                    beside = beside.or(Some(key));
                }
                // A mistake has no extras, because the check reports nothing else about it.
                Ok(match assembled(first, second, beside, body) {
                    Ok(fields) => StepWire { fields: Ok(fields), extras },
                    Err(mistake) => StepWire { fields: Err(mistake), extras: Extras::default() },
                })
            }
        }
        deserializer.deserialize_any(StepVisitor)
    }
}

/// Makes the fields of a step from the keys of a list item.
fn assembled(
    first: Option<Result<Fields, Mistake>>,
    second: Option<Located<String>>,
    beside: Option<Located<String>>,
    body: Body,
) -> Result<Fields, Mistake> {
    let mut fields = match (first, beside) {
        (Some(first), _) => first?,
        (None, Some(key)) => return Err(Mistake::Unknown(key.value.clone(), Some(key.position()))),
        (None, None) => return Err(Mistake::Empty),
    };
    let kind = fields.kind();
    // If a step's steps are inside it, all its fields are inside it.
    let is_inside = fields.body().is_some_and(|body| body.steps.is_some());
    let accepted = if is_inside { &[] } else { kind.beside() };
    if let Some(second) = second.or_else(|| body.unexpected(accepted)) {
        return Err(Mistake::SeveralKeys(kind, second));
    }
    if !accepted.is_empty() {
        fields.take(body);
    }
    Ok(fields)
}

impl JsonSchema for StepWire {
    fn schema_name() -> Cow<'static, str> {
        "step".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let bare: Vec<&str> = StepKind::ALL.iter().filter(|kind| kind.takes_no_fields()).map(|kind| kind.name()).collect();
        let mut forms = vec![json_schema!({ "enum": bare, "description": "A step without fields." })];
        let steps = generator.subschema_for::<Vec<Self>>();
        for kind in StepKind::ALL {
            let mut properties = serde_json::Map::from_iter([(kind.name().to_owned(), kind.schema(generator).to_value())]);
            let mut add = |name: &str, about: &str, mut schema: Schema| {
                schema.insert("description".to_owned(), about.into());
                properties.insert(name.to_owned(), schema.to_value());
            };
            for beside in kind.beside() {
                let schema = match beside {
                    Beside::Steps => steps.clone(),
                    Beside::Until => json_schema!({ "const": "oom" }),
                    Beside::Id => generator.subschema_for::<NameText>(),
                    Beside::LeakCheck => generator.subschema_for::<leaks::LeakCheckWire>(),
                };
                add(beside.name(), beside.about(), schema);
            }
            let is_block = !kind.beside().is_empty();
            if !is_block {
                add(TIMEOUT, ABOUT_TIMEOUT, generator.subschema_for::<DurationText>());
            }
            if is_block
                || matches!(kind, StepKind::Alloc | StepKind::Train | StepKind::Infer | StepKind::Storm | StepKind::Replay | StepKind::Exec)
            {
                add(MEANWHILE, ABOUT_MEANWHILE, steps.clone());
            }
            forms.push(json_schema!({
                "type": "object", "properties": properties, "required": [kind.name()], "additionalProperties": false
            }));
        }
        json_schema!({ "description": FORM, "oneOf": forms })
    }
}
