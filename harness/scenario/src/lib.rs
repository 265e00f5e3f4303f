//! The scenario language: YAML → wire types → a checked [`Scenario`].
//!
//! [`Scenario::load`] reads a file, [`Scenario::parse`] a text. What they return cannot be wrong in itself: names are resolved, sizes and
//! expectations parsed, and the order of the steps makes sense. What is wrong is answered with one [`FileError`] that names the place.
//! [`schema()`] and the generated parts of the language reference ([`Reference`]) come from the same types.

pub mod arms;
pub(crate) mod check;
mod ending;
mod expression;
mod metric;
mod policy;
mod reference;
mod schema;
pub mod steps;
mod text;

use std::path::{Path, PathBuf};

use harness_allocator::allocator::AllocatorSpec;
use harness_allocator::units::Bytes;
use schemars::JsonSchema;
use serde::Deserialize;

use arms::ArmWire;
use check::Checker;
use harness_language::error::Problem;
use harness_language::text::{ExpressionText, NameText, SizeText, size};
use harness_language::yaml::{self, Language};
use harness_record::Invariant;
use harness_record::{ScenarioInfo, SourceLine};
use steps::StepWire;
use text::InvariantText;

pub use arms::advice as advice_on_conf;
pub use check::{MAX_EXECUTED_STEPS, MAX_REPEAT_DEPTH};
pub use ending::{Ending, Expected};
pub use expression::{Amount, AmountError, Comparison, Evaluation, Expectation, MAX_TERMS, Sign, Sum, Term};
pub use harness_language::error::{FileError, TextError, choices};
pub use harness_language::located::{Located, Position};
pub use harness_language::yaml::{MAX_FILE, MAX_NODES};
pub use metric::{Account, BufferName, DeviceMetric, EventName, MeasureName, Metric, Readings, ReportKey, StepName, StreamName, Unit};
pub use policy::{MAX_RETRIES, Policy};
pub use reference::{Reference, update_reference};
pub use schema::schema;
pub use steps::{Action, Step, StepKind};

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

/// The least memory that a scenario may ask for: one small segment.
pub const MIN_MEMORY: Bytes = Bytes::mib(2);
/// The most memory that a scenario may ask for; beyond it a size is a slip of the pen.
pub const MAX_MEMORY: Bytes = Bytes::gib(1 << 20);
/// Most streams besides `default`.
pub const MAX_STREAMS: usize = 255;

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

/// What a scenario needs to run.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "needs")]
pub struct NeedsWire {
    /// The memory that the device has for it, from 2MiB to 1PiB. A larger device is limited to this.
    pub memory: SizeText,
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
    let mut checker = Checker::new(source, &allocators, &streams, &wire.steps.value);
    let given = wire.invariants.as_deref().unwrap_or_default();
    let invariants = given.iter().map(|text| Ok(text.0.with(checker.invariant(text)?))).collect::<Result<_, Problem>>()?;
    let steps = checker.steps(&wire.steps.value)?;
    let violates = wire.violates.as_ref().map(violates).transpose()?;
    let name = path.file_stem().map_or_else(|| "scenario".to_owned(), |stem| stem.to_string_lossy().into_owned());
    Ok(Scenario { name, path: path.to_owned(), about, memory, seed: wire.seed, steps, invariants, violates, allocators, streams })
}

/// What a file says of itself: any text.
///
/// # Errors
/// [`Problem`] where it is empty.
pub fn about(given: &Located<String>, noun: &str) -> Result<String, Problem> {
    match given.value.trim() {
        "" => Err(Problem::new(given.position(), "`about` says nothing").help(format!("write what a reader learns from the {noun}"))),
        text => Ok(text.to_owned()),
    }
}

/// The memory that a file asks for.
///
/// # Errors
/// [`Problem`] outside of [`MIN_MEMORY`] to [`MAX_MEMORY`].
pub fn memory(given: &SizeText) -> Result<Bytes, Problem> {
    let memory = size(given)?;
    if (MIN_MEMORY..=MAX_MEMORY).contains(&memory) {
        return Ok(memory);
    }
    Err(Problem::new(given.position(), format!("`memory` cannot be {memory}")).help("`memory` is from 2MiB, one small segment, to 1PiB"))
}

fn streams(given: &[NameText]) -> Result<Vec<StreamName>, Problem> {
    let mut streams = vec![StreamName::new(0, check::DEFAULT_STREAM)];
    for name in given {
        let text = check::checked_name(name)?;
        if text == check::DEFAULT_STREAM {
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
