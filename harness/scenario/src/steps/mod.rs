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

        /// A step as the file writes it. Invalid steps are kept, because the check can report their position.
        #[derive(Clone, Debug)]
        pub(crate) enum StepWire {
            $($variant($wire),)*
            Unknown(Located<String>),
            /// The step needs fields and has none.
            Bare(StepKind),
            Empty,
            SeveralKeys(StepKind, Located<String>),
            /// A step with `timeout:`, `meanwhile:` or an earlier name.
            With(Box<StepWire>, Extras),
        }

        impl StepWire {
            fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<(StepKind, Action), Problem> {
                match self {
                    $(Self::$variant(wire) => Ok((StepKind::$variant, Action::$variant(wire.check(at, checker)?))),)*
                    Self::Unknown(name) => Err(unknown(&name.value, if name.line == 0 { at } else { name.position() })),
                    Self::Bare(kind) => Err(bare(*kind, at)),
                    Self::Empty => Err(Problem::new(at, "this list item is empty").help(FORM)),
                    Self::SeveralKeys(kind, second) => Err(several_keys(*kind, second)),
                    Self::With(step, _) => step.check(at, checker),
                }
            }

            fn id(&self) -> Option<&NameText> {
                match self {
                    $(Self::$variant(wire) => wire.id(),)*
                    Self::With(step, _) => step.id(),
                    Self::Unknown(_) | Self::Bare(_) | Self::Empty | Self::SeveralKeys(..) => None,
                }
            }

            /// The steps inside it and the keys next to its own.
            fn body(&self) -> Option<&Body> {
                match self {
                    $(Self::$variant(wire) => wire.body(),)*
                    Self::With(step, _) => step.body(),
                    Self::Unknown(_) | Self::Bare(_) | Self::Empty | Self::SeveralKeys(..) => None,
                }
            }

            fn take(&mut self, body: Body) {
                match self {
                    $(Self::$variant(wire) => wire.take(body),)*
                    Self::With(step, _) => step.take(body),
                    Self::Unknown(_) | Self::Bare(_) | Self::Empty | Self::SeveralKeys(..) => {}
                }
            }

            fn from_name(name: &str) -> Self {
                match name {
                    $($name => <$wire>::bare().map_or(Self::Bare(StepKind::$variant), Self::$variant),)*
                    // A bare name has the position of the whole step, which the check knows.
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

/// Keys that every step may have next to its own.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extras {
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
    /// The name of a `measure`.
    fn measure(&self) -> Option<&NameText> {
        match self {
            Self::Measure(wire) => Some(wire.name()),
            Self::With(step, _) => step.measure(),
            _ => None,
        }
    }

    fn is_process(&self) -> bool {
        match self {
            Self::Process(_) => true,
            Self::With(step, _) => step.is_process(),
            _ => false,
        }
    }

    const fn extras(&self) -> Option<&Extras> {
        match self {
            Self::With(_, extras) => Some(extras),
            _ => None,
        }
    }

    fn meanwhile(&self) -> Option<&Located<Vec<Located<Self>>>> {
        self.extras().and_then(|extras| extras.meanwhile.as_ref())
    }
}

/// The step's own time limit.
fn time_limit(wire: &StepWire, action: &Action) -> Result<Option<Nanos>, Problem> {
    match wire.extras().and_then(|extras| extras.timeout.as_ref()) {
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
        if let Some(name) = step.value.id().or(step.value.measure()) {
            names.entry(name.text().to_owned()).or_insert_with(|| name.position());
        }
        let meanwhile = step.value.meanwhile().map_or(&[][..], |steps| steps.value.as_slice());
        // A process has its own names.
        let inside = step.value.body().filter(|_| !step.value.is_process()).map_or(&[][..], Body::steps);
        for (name, at) in announced(inside).into_iter().chain(announced(meanwhile)) {
            names.entry(name).or_insert(at);
        }
    }
    names
}

pub(crate) fn check_steps(steps: &[Located<StepWire>], checker: &mut Checker<'_>) -> Result<Vec<Step>, Problem> {
    steps.iter().map(|step| check_step(step, checker)).collect()
}

fn check_step(wire: &Located<StepWire>, checker: &mut Checker<'_>) -> Result<Step, Problem> {
    let position = wire.position();
    checker.count(position, 1)?;
    if let Some((old, new)) = wire.value.extras().and_then(|extras| extras.renamed) {
        checker.renamed(position, old, new);
    }
    let ((kind, action), meanwhile) = match wire.value.meanwhile() {
        None => (wire.value.check(position, checker)?, Vec::new()),
        Some(steps) => checker.at_the_same_time(
            |checker| wire.value.check(position, checker),
            wire.value.id(),
            steps.position(),
            |checker| check_steps(&steps.value, checker),
        )?,
    };
    if let Some(steps) = wire.value.meanwhile().filter(|_| !action.takes_its_time()) {
        return Err(Problem::new(steps.position(), format!("`{kind}` is one operation, so nothing can run in between")).help(
            "these steps take `meanwhile`: `train`, `infer`, `storm` without `threads`, `replay`, `exec`, `for`, `repeat`, `program`, `process`, `private_pool`, and `alloc` with the policy `wait`",
        ));
    }
    if let Some(other) = meanwhile.iter().find(|step| matches!(action, Action::Exec(_)) && !matches!(step.action, Action::Exec(_))) {
        return Err(Problem::new(other.position, format!("`{}` cannot run while a program runs", other.action.kind()))
            .help("`meanwhile` of an `exec` accepts `exec` steps only, because programs run at their own speed"));
    }
    blocks::check_inside(&action, position, wire.value.id(), wire.value.meanwhile().map(Located::position), checker)?;
    let id = wire.value.id().map(|id| checker.declare_id(id, kind.name(), kind.reports())).transpose()?;
    Ok(Step { position, id, time_limit: time_limit(&wire.value, &action)?, action, meanwhile })
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
        "as in `{}`; only {} work without fields",
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
                Ok(match renamed(name) {
                    None => StepWire::from_name(name),
                    Some((_, new)) => {
                        let extras = Extras { renamed: renamed(name), ..Extras::default() };
                        StepWire::With(Box::new(StepWire::from_name(new)), extras)
                    }
                })
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
                            let name = extras.renamed.map_or_else(|| key.value.clone(), |(_, new)| new.to_owned());
                            first = Some(StepWire::from_entry(key.with(name), &mut map)?);
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
                Ok(assembled(first, second, beside, extras, body))
            }
        }
        deserializer.deserialize_any(StepVisitor)
    }
}

/// Makes a step of the keys of a list item.
fn assembled(
    first: Option<(StepWire, Option<StepKind>)>,
    second: Option<Located<String>>,
    beside: Option<Located<String>>,
    extras: Extras,
    body: Body,
) -> StepWire {
    let (mut step, kind) = match (first, beside) {
        (Some(first), _) => first,
        (None, Some(key)) => return StepWire::Unknown(key),
        (None, None) => return StepWire::Empty,
    };
    let Some(kind) = kind else { return step };
    // If a step's steps are inside it, all its fields are inside it.
    let is_inside = step.body().is_some_and(|body| body.steps.is_some());
    let accepted = if is_inside { &[] } else { kind.beside() };
    if let Some(second) = second.or_else(|| body.unexpected(accepted)) {
        return StepWire::SeveralKeys(kind, second);
    }
    if !accepted.is_empty() {
        step.take(body);
    }
    if extras.timeout.is_none() && extras.meanwhile.is_none() && extras.renamed.is_none() {
        step
    } else {
        StepWire::With(Box::new(step), extras)
    }
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
