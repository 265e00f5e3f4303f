//! A scenario: its keys as the file writes them, and its checked form.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use harness_allocator::allocator::{AllocatorKind, AllocatorSpec};
use harness_allocator::units::{Bytes, Nanos};
use schemars::JsonSchema;
use serde::Deserialize;

use crate::cases::Reasons;
use crate::checker::{Checker, Declared, is_reserved, size};
use crate::claim::{ClaimWire, Figure};
use crate::faults::{self, FaultWire, PlannedFault};
use crate::health::HealthCheckWire;
use crate::matrix::{self, Point, Settings};
use crate::metric::{DEFAULT_STREAM, Expectation, ProcessName, ProgramName, StreamName};
use crate::needs::{Needs, NeedsWire};
use crate::steps::exec::Exec;
use crate::steps::{Action, Step, StepWire, announced, check_steps};
use crate::text::InvariantText;
use harness_language::arms::{self, ArmWire};
use harness_language::error::{FileError, Problem, choices};
use harness_language::fields::{about, check_memory};
use harness_language::located::{Located, Position, Tree};
use harness_language::text::{AmountText, DurationText, ExpressionText, NameText, duration};
use harness_language::yaml::{self, Language};
use harness_record::{Claim, Invariant, ScenarioInfo, SourceLine};

/// The files of scenarios, in the words of their errors.
pub const SCENARIO: Language = Language {
    noun: "scenario",
    example: "scenarios/rounding.yaml",
    shape: "a scenario has the keys `about`, `needs` and `steps`, and may have `allocators` (or `allocator`), `matrix`, `streams`, `programs`, `processes`, `seed`, `tags`, `timeout`, `faults`, `health_check`, `skip`, `expected_to_fail`, `invariants`, `expect_violation` and `claim`",
    required: &["about", "needs", "steps"],
    shorter: "`repeat` and `storm`",
    own: &["steps"],
    foreign: &["arms", "time"],
    renamed: &["violates", "heads", "less", "agree"],
    other: ("a suite of benchmarks", "harness bench"),
};

/// Most streams besides `default`.
pub const MAX_STREAMS: usize = 255;

/// Most programs besides the main one.
pub const MAX_PROGRAMS: usize = 8;

/// Most processes besides the main one.
pub const MAX_PROCESSES: usize = 8;

/// Most expectations under `invariants`.
pub const MAX_INVARIANTS: usize = 100;

/// A process besides the main one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// What steps call it.
    pub name: ProcessName,
    /// The most that it may hold of the device's memory, where that is less than all.
    pub memory: Option<Bytes>,
}

/// A scenario, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// The file's name without ending, and in brackets the values of its parameters: `kv_cache[batch=8]`.
    pub name: String,
    /// The file, as the user named it.
    pub path: PathBuf,
    /// What a reader learns from it.
    pub about: String,
    /// The values of its parameters, as the file or the user writes them, in the order of the file.
    pub parameters: Vec<(String, String)>,
    /// What it needs to run.
    pub needs: Needs,
    /// The allocators to run it with, in the order of the file: no two have one name, nor the same settings unless they are named.
    pub allocators: Vec<AllocatorSpec>,
    /// `default` first, then those that the file declares; [`StreamName::index`] is the place in this list.
    pub streams: Vec<StreamName>,
    /// Programs besides the main one, each with an allocator of its own.
    pub programs: Vec<ProgramName>,
    /// Processes besides the main one, each with a context and an allocator of its own on the same device.
    pub processes: Vec<Process>,
    /// The text that it was read from, where it has processes: they read it too.
    pub source: Option<String>,
    /// Words to choose scenarios by.
    pub tags: Vec<String>,
    /// Why it is not run.
    pub skip: Reasons,
    /// Why it fails, where that is known: a run that fails is then as expected, and one that passes has failed.
    pub expected_to_fail: Reasons,
    /// Every random choice comes from this, unless the user gives another seed.
    pub seed: u64,
    /// What is done, in order; never empty.
    pub steps: Vec<Step>,
    /// What goes wrong on the device.
    pub faults: Vec<PlannedFault>,
    /// After how many steps and operations a checked run is looked at as a whole; `None`: not at all.
    pub health_check: Option<u64>,
    /// What should hold after every step.
    pub invariants: Vec<Located<Expectation>>,
    /// The always-checked invariant that the run must violate, and no other.
    pub expect_violation: Option<Located<Invariant>>,
    /// What it puts to the test.
    pub claim: Option<Claim>,
    /// The figures that show it.
    pub figures: Vec<Figure>,
    /// Expectations between allocators, in the order of the file: to be looked at when all have run.
    pub comparisons: Vec<Located<Expectation>>,
    /// Keys of the file that have a new name, in the order of the file.
    pub renamed: Vec<Renamed>,
}

/// A key that the file writes by its earlier name. It still works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Renamed {
    /// Where the file writes it.
    pub at: Position,
    /// The name that the file writes.
    pub old: &'static str,
    /// The name today.
    pub new: &'static str,
}

impl fmt::Display for Renamed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is now `{}`", self.old, self.new)
    }
}

impl Scenario {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`FileError`]: what is wrong with the file, or with what it says.
    pub fn load(path: &Path) -> Result<Self, FileError> {
        Self::parse(&yaml::read(path, &SCENARIO)?, path)
    }

    /// Reads and checks a file: one scenario for each point of its matrix, in which parameters that the user sets have that value alone.
    /// Settings for parameters that the file does not have are left alone.
    ///
    /// # Errors
    /// As [`Scenario::load`].
    pub fn load_points(path: &Path, settings: &Settings) -> Result<Vec<Self>, FileError> {
        Self::parse_points(&yaml::read(path, &SCENARIO)?, path, settings)
    }

    /// The number of a step, counted from 0 in the order of the file: the same in each process that reads it. `None` for a step of another scenario.
    #[must_use]
    pub fn step_number(&self, step: &Step) -> Option<usize> {
        self.all_steps().iter().position(|known| std::ptr::eq(*known, step))
    }

    /// The step with a number.
    #[must_use]
    pub fn step_with_number(&self, number: usize) -> Option<&Step> {
        self.all_steps().get(number).copied()
    }

    /// Whether some step serves requests from a private pool.
    #[must_use]
    pub fn uses_private_pools(&self) -> bool {
        self.all_steps().iter().any(|step| matches!(step.action, Action::PrivatePool(_)))
    }

    /// Whether several threads do a storm of it at once.
    #[must_use]
    pub fn has_threads(&self) -> bool {
        self.all_steps().iter().any(|step| matches!(&step.action, Action::Storm(storm) if storm.threads.is_some()))
    }

    /// The PyTorch programs that it runs, in the order of the file.
    #[must_use]
    pub fn execs(&self) -> Vec<&Exec> {
        let all = self.all_steps().into_iter();
        all.filter_map(|step| if let Action::Exec(exec) = &step.action { Some(exec) } else { None }).collect()
    }

    /// All steps, those inside others and those that are done meanwhile too.
    #[must_use]
    pub fn all_steps(&self) -> Vec<&Step> {
        fn add<'s>(steps: &'s [Step], all: &mut Vec<&'s Step>) {
            for step in steps {
                all.push(step);
                add(step.action.steps(), all);
                add(&step.meanwhile, all);
            }
        }
        let mut all = Vec::new();
        add(&self.steps, &mut all);
        all
    }

    /// What it says of itself, for records.
    #[must_use]
    pub fn info(&self) -> ScenarioInfo {
        let path = self.path.display().to_string();
        ScenarioInfo { name: self.name.clone(), path, about: self.about.clone(), memory: self.needs.memory, claim: self.claim.clone() }
    }

    /// Its identity: see [`harness_record::scenario_id`].
    #[must_use]
    pub fn id(&self) -> String {
        harness_record::scenario_id(&self.path, &self.name)
    }

    /// A place in its file, for records.
    #[must_use]
    pub fn place(&self, position: Position) -> SourceLine {
        SourceLine { path: self.path.display().to_string(), line: position.line, column: position.column }
    }

    /// Checks a text. `path` is for messages, and its file name names the scenario.
    ///
    /// # Errors
    /// [`FileError::Text`]; also where a matrix makes several scenarios of it.
    pub fn parse(source: &str, path: &Path) -> Result<Self, FileError> {
        let mut points = Self::parse_points(source, path, &Settings::new())?;
        match (points.pop(), points.is_empty()) {
            (Some(only), true) => Ok(only),
            _ => {
                let at = yaml::parse::<ScenarioWire>(source, path, &SCENARIO).map(|wire| matrix::place(wire.matrix.as_ref()));
                let problem = Problem::new(at.unwrap_or_default(), "one scenario is wanted here, and this matrix makes several of it")
                    .help("give each parameter one value");
                Err(FileError::text(problem, path, source))
            }
        }
    }

    /// Checks a text, as [`Scenario::load_points`] does a file.
    ///
    /// # Errors
    /// [`FileError::Text`].
    pub fn parse_points(source: &str, path: &Path, settings: &Settings) -> Result<Vec<Self>, FileError> {
        let checked = yaml::parse(source, path, &SCENARIO).and_then(|wire: ScenarioWire| {
            let points = matrix::points(wire.matrix.as_ref(), settings, source)?;
            points.into_iter().map(|point| check_scenario(&wire, point, source, path)).collect()
        });
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
    /// Parameters with their values, as in `{ batch: [64, 128], memory: [1GiB, 2GiB] }`: the scenario is run once for each combination. Sizes,
    /// numbers and expectations can name them; `--set batch=96` gives one another value.
    #[schemars(with = "Option<BTreeMap<String, Vec<serde_json::Value>>>")]
    matrix: Option<Located<Tree>>,
    /// The allocators to run it with: `[caching]` if not given.
    allocators: Option<Located<Vec<Located<ArmWire>>>>,
    /// The same for one.
    allocator: Option<Located<ArmWire>>,
    /// Names of streams to make; `default` always exists.
    streams: Option<Vec<NameText>>,
    /// Names of programs besides the main one, each with an allocator of its own on the same device.
    programs: Option<Vec<NameText>>,
    /// Processes of their own besides the main one, on the same device: names, or `{ name: worker, memory: 1GiB }` for one that may hold no more than that.
    #[schemars(with = "Option<Vec<serde_json::Value>>")]
    processes: Option<Vec<Located<Tree>>>,
    /// Words to choose scenarios by, as in `harness run scenarios --tag slow`.
    #[serde(default)]
    tags: Vec<NameText>,
    /// How long each step may take that has no `timeout` of its own: 5 min if not given.
    timeout: Option<DurationText>,
    /// Why it is not run: a reason, or a map from allocators, `simulated` or `gpu` to reasons.
    #[schemars(with = "Option<serde_json::Value>")]
    skip: Option<Located<Tree>>,
    /// Why it fails: a run that fails is then as expected, and one that passes has failed. A reason, or a map as for `skip`.
    #[schemars(with = "Option<serde_json::Value>")]
    expected_to_fail: Option<Located<Tree>>,
    /// Every random choice comes from this: 0 if not given.
    #[serde(default)]
    seed: u64,
    /// What goes wrong on the device.
    faults: Option<Located<Vec<Located<FaultWire>>>>,
    /// Looks at everything from time to time, as in `{ every: 100 }`: for long runs without the audit (`--no-audit`).
    health_check: Option<HealthCheckWire>,
    /// What is done, in order.
    #[schemars(length(min = 1))]
    steps: Located<Vec<Located<StepWire>>>,
    /// What should hold after every step; accounts and `start.…` can be in it.
    invariants: Option<Vec<ExpressionText>>,
    /// An always-checked invariant: the run passes if it violates this one and no other.
    expect_violation: Option<InvariantText>,
    /// The earlier name of `expect_violation`.
    #[schemars(skip)]
    violates: Option<InvariantText>,
    /// A claim that the scenario puts to the test; the report has them all in one table.
    claim: Option<ClaimWire>,
}

fn check_scenario(wire: &ScenarioWire, point: Point, source: &str, path: &Path) -> Result<Scenario, Problem> {
    let about = about(&wire.about, SCENARIO.noun)?;
    let needs = wire.needs.check(&point.values, source)?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let allocators = arms::check(wire.allocator.as_ref(), wire.allocators.as_ref(), source, folder)?;
    let streams = streams(wire.streams.as_deref().unwrap_or_default())?;
    let programs = programs(wire.programs.as_deref().unwrap_or_default())?;
    let processes = processes(wire.processes.as_deref().unwrap_or_default(), &programs, &point, source)?;
    if wire.steps.value.is_empty() {
        return Err(Problem::new(wire.steps.position(), "a scenario has at least one step")
            .help("as in `steps: [alloc: { buffer: a, size: 1MiB }]`"));
    }
    let declared = Declared {
        folder,
        parameters: &point.values,
        allocators: &allocators,
        streams: &streams,
        programs: &programs,
        processes: &processes,
        memory: needs.memory,
    };
    let mut checker = Checker::new(source, declared, announced(&wire.steps.value));
    let invariants = check_invariants(wire.invariants.as_deref().unwrap_or_default(), &mut checker)?;
    let faults = wire.faults.as_ref().map_or_else(|| Ok(Vec::new()), |given| faults::check(given, &checker))?;
    let health_check = wire.health_check.as_ref().map(|health| health.check(&checker)).transpose()?;
    let mut steps = check_steps(&wire.steps.value, &mut checker)?;
    if let Some(limit) = wire.timeout.as_ref().map(duration).transpose()? {
        limit_time(&mut steps, limit);
    }
    let reasons = |given: &Option<Located<Tree>>, what: &str| {
        given.as_ref().map_or_else(|| Ok(Reasons::default()), |given| Reasons::check(given, what, |arm| checker.arm(arm)))
    };
    let (skip, expected_to_fail) = (reasons(&wire.skip, "skip")?, reasons(&wire.expected_to_fail, "expected_to_fail")?);
    let tags = wire.tags.iter().map(|tag| tag.checked().map(str::to_owned)).collect::<Result<_, _>>()?;
    if let Some(old) = &wire.violates {
        checker.renamed(old.position(), "violates", "expect_violation");
    }
    let expect_violation = wire.expect_violation.as_ref().or(wire.violates.as_ref()).map(expect_violation).transpose()?;
    let (claim, figures) = wire.claim.as_ref().map(|claim| claim.check(&checker)).transpose()?.unzip();
    let (comparisons, streams_of_traces, renamed) = checker.finish();
    Ok(Scenario {
        name: name(path, &point),
        path: path.to_owned(),
        about,
        parameters: point.texts.clone(),
        needs,
        seed: wire.seed,
        steps,
        faults,
        health_check,
        invariants,
        expect_violation,
        renamed,
        claim,
        figures: figures.unwrap_or_default(),
        comparisons,
        allocators,
        streams: streams.iter().cloned().chain(streams_of_traces).collect(),
        programs,
        source: (!processes.is_empty()).then(|| source.to_owned()),
        processes,
        tags,
        skip,
        expected_to_fail,
    })
}

fn check_invariants(given: &[ExpressionText], checker: &mut Checker<'_>) -> Result<Vec<Located<Expectation>>, Problem> {
    if let Some(first_too_many) = given.get(MAX_INVARIANTS) {
        return Err(Problem::new(first_too_many.position(), format!("more than {MAX_INVARIANTS} invariants"))
            .help("each is evaluated after every step; use `expect` for what holds at one place"));
    }
    given.iter().map(|text| Ok(text.0.with(checker.invariant(text)?))).collect()
}

/// The file's name without ending, and the values of parameters.
fn name(path: &Path, point: &Point) -> String {
    let stem = path.file_stem().map_or_else(|| "scenario".to_owned(), |stem| stem.to_string_lossy().into_owned());
    if point.texts.is_empty() {
        return stem;
    }
    let values: Vec<String> = point.texts.iter().map(|(name, value)| format!("{name}={value}")).collect();
    format!("{stem}[{}]", values.join(","))
}

/// Gives a time limit to all steps that have none of their own.
fn limit_time(steps: &mut [Step], limit: Nanos) {
    for step in steps {
        step.time_limit.get_or_insert(limit);
        limit_time(&mut step.meanwhile, limit);
        limit_time(step.action.steps_mut(), limit);
    }
}

fn programs(given: &[NameText]) -> Result<Vec<ProgramName>, Problem> {
    let mut programs: Vec<ProgramName> = Vec::new();
    for name in given {
        let text = name.checked()?;
        let help = "take another name";
        if is_reserved(text) || AllocatorKind::from_name(text).is_some() {
            return Err(Problem::new(name.position(), format!("`{text}` has another meaning in expressions")).help(help));
        }
        if programs.iter().any(|program| program.name() == text) {
            return Err(Problem::new(name.position(), format!("program `{text}` is named twice")).help("name it once"));
        }
        if programs.len() == MAX_PROGRAMS {
            return Err(Problem::new(name.position(), format!("more than {MAX_PROGRAMS} programs")).help("use fewer programs"));
        }
        programs.push(ProgramName::new(programs.len(), text));
    }
    Ok(programs)
}

/// Names, or maps with a name and a limit.
fn processes(given: &[Located<Tree>], programs: &[ProgramName], point: &Point, source: &str) -> Result<Vec<Process>, Problem> {
    let mut processes: Vec<Process> = Vec::new();
    for tree in given {
        let (name, memory) = process(tree)?;
        let text = name.checked()?;
        let help = "take another name";
        if is_reserved(text) || AllocatorKind::from_name(text).is_some() {
            return Err(Problem::new(name.position(), format!("`{text}` has another meaning in expressions")).help(help));
        }
        if programs.iter().any(|program| program.name() == text) {
            return Err(Problem::new(name.position(), format!("`{text}` is a program of this scenario")).help(help));
        }
        if processes.iter().any(|process| process.name.name() == text) {
            return Err(Problem::new(name.position(), format!("process `{text}` is named twice")).help("name it once"));
        }
        if processes.len() == MAX_PROCESSES {
            return Err(Problem::new(name.position(), format!("more than {MAX_PROCESSES} processes")).help("use fewer processes"));
        }
        let memory = memory.map(|text| check_memory(size(&text, &point.values, source)?, text.position())).transpose()?;
        processes.push(Process { name: ProcessName::new(processes.len(), text), memory });
    }
    Ok(processes)
}

/// One process as the file declares it.
fn process(tree: &Located<Tree>) -> Result<(NameText, Option<AmountText>), Problem> {
    let form = "a process is a name, or a map as in `{ name: worker, memory: 1GiB }`";
    let wrong = |at: Position, message: String| Problem::new(at, message).help(form);
    if let Some(name) = tree.text() {
        return Ok((NameText(name), None));
    }
    let Tree::Map(fields) = &tree.value else { return Err(wrong(tree.position(), "this is no process".to_owned())) };
    let (mut name, mut memory) = (None, None);
    for (key, value) in fields {
        let field = match key.value.as_str() {
            "name" => &mut name,
            "memory" => &mut memory,
            other => return Err(wrong(key.position(), format!("a process has no field `{other}`"))),
        };
        *field = Some(value.text().ok_or_else(|| wrong(value.position(), format!("`{}` is one value", key.value)))?);
    }
    let name = name.ok_or_else(|| wrong(tree.position(), "this process has no name".to_owned()))?;
    Ok((NameText(name), memory.map(AmountText)))
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

fn expect_violation(given: &InvariantText) -> Result<Located<Invariant>, Problem> {
    match Invariant::from_name(given.text()) {
        Some(invariant) => Ok(given.0.with(invariant)),
        None => Err(Problem::new(given.position(), format!("there is no invariant `{}`", given.text())).help(choices(
            given.text(),
            "invariants",
            Invariant::ALL.iter().map(|invariant| invariant.name()),
        ))),
    }
}
