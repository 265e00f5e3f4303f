//! A scenario: its keys as the file writes them, and its checked form.

use std::path::{Path, PathBuf};

use harness_allocator::allocator::AllocatorSpec;
use harness_allocator::units::Bytes;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::checker::Checker;
use crate::metric::{DEFAULT_STREAM, Expectation, StreamName};
use crate::steps::{Step, StepWire, announced, check_steps};
use crate::text::InvariantText;
use harness_language::arms::{self, ArmWire};
use harness_language::error::{FileError, Problem, choices};
use harness_language::fields::{NeedsWire, about, memory};
use harness_language::located::{Located, Position};
use harness_language::text::{ExpressionText, NameText};
use harness_language::yaml::{self, Language};
use harness_record::{Invariant, ScenarioInfo, SourceLine};

/// The files of scenarios, in the words of their errors.
pub const SCENARIO: Language = Language {
    noun: "scenario",
    example: "scenarios/rounding.yaml",
    shape: "a scenario has the keys `about`, `needs` and `steps`, and may have `allocators` (or `allocator`), `streams`, `seed`, `invariants` and `violates`",
    required: &["about", "needs", "steps"],
    shorter: "`repeat` and `storm`",
    own: &["steps"],
    foreign: &["arms", "time"],
    other: ("a suite of benchmarks", "harness bench"),
};

/// Most streams besides `default`.
pub const MAX_STREAMS: usize = 255;

/// Most expectations under `invariants`.
pub const MAX_INVARIANTS: usize = 100;

/// A scenario, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// The file's name without ending.
    pub name: String,
    /// The file, as the user named it.
    pub path: PathBuf,
    /// What a reader learns from it.
    pub about: String,
    /// The memory that the device has for it.
    pub memory: Bytes,
    /// The allocators to run it with, in the order of the file: no two have one name, nor the same settings unless they are named.
    pub allocators: Vec<AllocatorSpec>,
    /// `default` first, then those that the file declares; [`StreamName::index`] is the place in this list.
    pub streams: Vec<StreamName>,
    /// Every random choice comes from this, unless the user gives another seed.
    pub seed: u64,
    /// What is done, in order; never empty.
    pub steps: Vec<Step>,
    /// What should hold after every step.
    pub invariants: Vec<Located<Expectation>>,
    /// The always-checked invariant that the run must violate, and no other.
    pub violates: Option<Located<Invariant>>,
}

impl Scenario {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`FileError`]: what is wrong with the file, or with what it says.
    pub fn load(path: &Path) -> Result<Self, FileError> {
        Self::parse(&yaml::read(path, &SCENARIO)?, path)
    }

    /// What it says of itself, for records.
    #[must_use]
    pub fn info(&self) -> ScenarioInfo {
        let path = self.path.display().to_string();
        ScenarioInfo { name: self.name.clone(), path, about: self.about.clone(), memory: self.memory }
    }

    /// A place in its file, for records.
    #[must_use]
    pub fn place(&self, position: Position) -> SourceLine {
        SourceLine { path: self.path.display().to_string(), line: position.line, column: position.column }
    }

    /// Checks a text. `path` is for messages, and its file name names the scenario.
    ///
    /// # Errors
    /// [`FileError::Text`].
    pub fn parse(source: &str, path: &Path) -> Result<Self, FileError> {
        let checked = yaml::parse(source, path, &SCENARIO).and_then(|wire| check_scenario(&wire, source, path));
        checked.map_err(|problem| FileError::text(problem, path, source))
    }
}

/// A scenario: what a device and an allocator are put through, and what should hold.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "scenario")]
pub(crate) struct ScenarioWire {
    /// What a reader learns from it.
    about: Located<String>,
    /// What it needs to run.
    needs: NeedsWire,
    /// The allocators to run it with: `[caching]` if not given.
    allocators: Option<Located<Vec<Located<ArmWire>>>>,
    /// The same for one.
    allocator: Option<Located<ArmWire>>,
    /// Names of streams to make; `default` always exists.
    streams: Option<Vec<NameText>>,
    /// Every random choice comes from this: 0 if not given.
    #[serde(default)]
    seed: u64,
    /// What is done, in order.
    #[schemars(length(min = 1))]
    steps: Located<Vec<Located<StepWire>>>,
    /// What should hold after every step; accounts and `start.…` can be in it.
    invariants: Option<Vec<ExpressionText>>,
    /// An always-checked invariant: the run passes if it violates this one and no other.
    violates: Option<InvariantText>,
}

fn check_scenario(wire: &ScenarioWire, source: &str, path: &Path) -> Result<Scenario, Problem> {
    let about = about(&wire.about, SCENARIO.noun)?;
    let memory = memory(&wire.needs.memory)?;
    let allocators = arms::check(wire.allocator.as_ref(), wire.allocators.as_ref(), source)?;
    let streams = streams(wire.streams.as_deref().unwrap_or_default())?;
    if wire.steps.value.is_empty() {
        return Err(Problem::new(wire.steps.position(), "a scenario has at least one step")
            .help("as in `steps: [alloc: { buffer: a, size: 1MiB }]`"));
    }
    let mut checker = Checker::new(source, &allocators, &streams, announced(&wire.steps.value));
    let given = wire.invariants.as_deref().unwrap_or_default();
    if let Some(first_too_many) = given.get(MAX_INVARIANTS) {
        return Err(Problem::new(first_too_many.position(), format!("more than {MAX_INVARIANTS} invariants"))
            .help("each is evaluated after every step; use `expect` for what holds at one place"));
    }
    let invariants = given.iter().map(|text| Ok(text.0.with(checker.invariant(text)?))).collect::<Result<_, Problem>>()?;
    let steps = check_steps(&wire.steps.value, &mut checker)?;
    let violates = wire.violates.as_ref().map(violates).transpose()?;
    let name = path.file_stem().map_or_else(|| "scenario".to_owned(), |stem| stem.to_string_lossy().into_owned());
    Ok(Scenario { name, path: path.to_owned(), about, memory, seed: wire.seed, steps, invariants, violates, allocators, streams })
}

fn streams(given: &[NameText]) -> Result<Vec<StreamName>, Problem> {
    let mut streams = vec![StreamName::new(0, DEFAULT_STREAM)];
    for name in given {
        let text = name.checked()?;
        if text == DEFAULT_STREAM {
            return Err(Problem::new(name.position(), "stream `default` always exists").help("leave it out of `streams`"));
        }
        if streams.iter().any(|stream| stream.name() == text) {
            return Err(Problem::new(name.position(), format!("stream `{text}` is named twice")).help("name it once"));
        }
        if streams.len() > MAX_STREAMS {
            return Err(Problem::new(name.position(), format!("more than {MAX_STREAMS} streams")).help("use fewer streams"));
        }
        streams.push(StreamName::new(streams.len(), text));
    }
    Ok(streams)
}

fn violates(given: &InvariantText) -> Result<Located<Invariant>, Problem> {
    match Invariant::from_name(given.text()) {
        Some(invariant) => Ok(given.0.with(invariant)),
        None => Err(Problem::new(given.position(), format!("there is no invariant `{}`", given.text())).help(choices(
            given.text(),
            "invariants",
            Invariant::ALL.iter().map(|invariant| invariant.name()),
        ))),
    }
}
