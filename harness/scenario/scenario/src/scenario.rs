use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use harness_allocator::{allocator::AllocatorSpec, units::Bytes};
use harness_language::schema::JsonSchema;
#[cfg(feature = "schema")]
use schemars::generate::SchemaSettings;
use serde::Deserialize;

use crate::checker::{Checker, Declared, MAX_OPERATIONS, has_no_meaning, size};
use crate::claim::{ClaimWire, Figure};
use crate::faults::{self, FaultWire, PlannedFault};
use crate::matrix::{self, ParameterSettings, Point};
use crate::metric::{DEFAULT_STREAM, Expectation, ProcessName, ProgramName, StreamName};
use crate::needs::{Needs, NeedsWire};
use crate::steps::{Action, Step, StepWire, announced, check_steps, exec::Exec};
use crate::{cases::Reasons, text::InvariantText, trace::Trace};
use harness_language::arms::{self, ArmWire};
use harness_language::error::{FileError, Problem, named};
use harness_language::fields::{about, check_memory, version};
use harness_language::located::{ListOr, Located, Position, Tree};
use harness_language::text::{
    AmountText, CountText, DurationText, ExpressionText, NameText, duration,
};
use harness_language::yaml::{self, Language, ONE_DOCUMENT};
use harness_record::{Claim, Invariant, ScenarioInfo, SourceLine};

pub const SCENARIO: Language = Language {
    noun: "scenario",
    example: "scenarios/rounding.yaml",
    shape: "a scenario has the keys `about`, `needs` and `steps`, and may have `version`, \
         `allocators` (or `allocator`), `matrix`, `streams`, `programs`, `processes`, `seed`, \
         `tags`, `timeout`, `faults`, `health_check`, `skip`, `expected_to_fail`, \
         `invariants`, `expect_violation` and `claim`",
    required: &["about", "needs", "steps"],
    required_by,
    shorter: "`repeat` and `storm`",
    own: &["steps"],
    foreign: &["arms", "time"],
    other: ("a suite of benchmarks", "harness bench"),
    advice: ONE_DOCUMENT,
};

pub const MAX_STREAMS: usize = 255;

pub const MAX_PROGRAMS: usize = 8;

pub const MAX_PROCESSES: usize = 8;

pub const MAX_INVARIANTS: usize = 100;

/// A process besides the main one.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "process_with_limit")]
pub struct Process<N = ProcessName, B = Bytes> {
    /// Its name.
    pub name: N,
    /// Limit of its memory.
    pub memory: Option<B>,
}

type ProcessFields = Process<NameText, AmountText>;

#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// The file name without extension, with the values of the matrix in brackets:
    /// `kv_cache[batch=8]`.
    pub name: String,
    pub path: PathBuf,
    pub about: String,
    /// The values of the matrix parameters as the file or the user writes them.
    pub parameters: Vec<(String, String)>,
    pub needs: Needs,
    /// In the order of the file. Names are unique, and settings are unique among allocators without
    /// a `name:`.
    pub allocators: Vec<AllocatorSpec>,
    /// `default`, then the declared streams. [`StreamName::index`] is the index in this list.
    pub streams: Vec<StreamName>,
    pub programs: Vec<ProgramName>,
    pub processes: Vec<Process>,
    /// The text of the file, if the scenario has processes, because they read it too.
    pub source: Option<String>,
    pub tags: Vec<String>,
    pub skip: Reasons,
    /// Reasons for known failures. A run that fails for such a reason counts as expected, and a run
    /// that passes counts as failed.
    pub expected_to_fail: Reasons,
    pub seed: u64,
    pub steps: Vec<Step>,
    pub faults: Vec<PlannedFault>,
    /// Steps and operations from one health check to the next.
    pub health_check: Option<u64>,
    pub invariants: Vec<Located<Expectation>>,
    /// The always-checked invariant that the run must violate.
    pub expect_violation: Option<Located<Invariant>>,
    pub claim: Option<Claim>,
    pub figures: Vec<Figure>,
    /// Comparisons of allocators, in the order of the file. They are evaluated after all allocators
    /// have run.
    pub comparisons: Vec<Located<Expectation>>,
}

impl Scenario {
    pub fn load(path: &Path) -> Result<Self, FileError> {
        Self::parse(&yaml::read(path, &SCENARIO)?, path)
    }

    /// Reads and checks a file. Returns one scenario per point of its matrix. A parameter in
    /// `settings` has only that value; settings for other parameters are ignored.
    pub fn load_points(path: &Path, settings: &ParameterSettings) -> Result<Vec<Self>, FileError> {
        Self::parse_points(&yaml::read(path, &SCENARIO)?, path, settings)
    }

    /// The index of a step in the order of the file, which is the same in every process. `None` for
    /// a step of another scenario.
    pub fn step_number(&self, step: &Step) -> Option<usize> {
        self.all_steps()
            .iter()
            .position(|known| std::ptr::eq(*known, step))
    }

    pub fn step_with_number(&self, number: usize) -> Option<&Step> {
        self.all_steps().get(number).copied()
    }

    pub fn uses_private_pools(&self) -> bool {
        self.all_steps()
            .iter()
            .any(|step| matches!(step.action, Action::PrivatePool(_)))
    }

    /// Returns whether it contains a storm with threads.
    pub fn has_threads(&self) -> bool {
        self.all_steps()
            .iter()
            .any(|step| matches!(&step.action, Action::Storm(storm) if storm.threads.is_some()))
    }

    pub fn execs(&self) -> Vec<&Exec> {
        let all = self.all_steps().into_iter();
        all.filter_map(|step| {
            if let Action::Exec(exec) = &step.action {
                Some(exec)
            } else {
                None
            }
        })
        .collect()
    }

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

    pub fn info(&self) -> ScenarioInfo {
        let path = self.path.display().to_string();
        ScenarioInfo {
            name: self.name.clone(),
            path,
            about: self.about.clone(),
            memory: self.needs.memory,
            claim: self.claim.clone(),
        }
    }

    pub fn id(&self) -> String {
        harness_record::scenario_id(&self.path, &self.name)
    }

    pub fn place(&self, position: Position) -> SourceLine {
        SourceLine {
            path: self.path.display().to_string(),
            line: position.line,
            column: position.column,
        }
    }

    /// Checks a text that contains one scenario. `path` names the scenario and appears in messages.
    pub fn parse(source: &str, path: &Path) -> Result<Self, FileError> {
        Self::parse_with_trace(source, path, None)
    }

    /// Checks a text as [`Scenario::parse`] does. `replay` steps get this trace in place of their
    /// files, which need not exist.
    pub fn parse_with_trace(
        source: &str,
        path: &Path,
        trace: Option<&Arc<Trace>>,
    ) -> Result<Self, FileError> {
        let mut points = points(source, path, &ParameterSettings::new(), trace)?;
        match (points.pop(), points.is_empty()) {
            (Some(only), true) => Ok(only),
            _ => {
                let at = yaml::parse::<ScenarioWire>(source, path, &SCENARIO)
                    .ok()
                    .and_then(|wire| Some(wire.matrix?.at));
                let problem = Problem::new(
                    at.unwrap_or_default(),
                    "expected one scenario, but this matrix has several points",
                )
                .help("give each parameter one value");
                Err(FileError::text(problem, path, source))
            }
        }
    }

    /// Checks a text in the same way as [`Scenario::load_points`] checks a file.
    pub fn parse_points(
        source: &str,
        path: &Path,
        settings: &ParameterSettings,
    ) -> Result<Vec<Self>, FileError> {
        points(source, path, settings, None)
    }
}

fn points(
    source: &str,
    path: &Path,
    settings: &ParameterSettings,
    trace: Option<&Arc<Trace>>,
) -> Result<Vec<Scenario>, FileError> {
    let checked = yaml::parse(source, path, &SCENARIO).and_then(|wire: ScenarioWire| {
        let points = matrix::points(wire.matrix.as_ref(), settings, source)?;
        points
            .into_iter()
            .map(|point| check_scenario(&wire, point, (source, path), trace))
            .collect()
    });
    checked.map_err(|problem| FileError::text(problem, path, source))
}

/// A scenario: steps on a device with allocators, and expectations.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "scenario")]
pub(crate) struct ScenarioWire {
    /// The version of the language: 1, which is the default.
    #[schemars(range(min = 1, max = 1))]
    version: Option<Located<u64>>,
    /// What the scenario does and shows.
    about: Located<String>,
    /// Requirements on the machine.
    needs: NeedsWire,
    /// Parameters with their values, as in `{ batch: [64, 128], memory: [1GiB, 2GiB] }`. The
    /// scenario runs once per combination. Sizes, numbers and expectations can use the parameters.
    /// `--set batch=96` sets one on the command line.
    #[schemars(with = "Option<std::collections::BTreeMap<String, Vec<Tree>>>")]
    matrix: Option<Located<Tree>>,
    /// The allocators that the scenario runs with. Default: `[caching]`.
    allocators: Option<Located<Vec<Located<ArmWire>>>>,
    /// A single allocator instead of `allocators`.
    allocator: Option<Located<ArmWire>>,
    /// Names of additional streams. `default` always exists.
    streams: Option<Vec<NameText>>,
    /// Names of additional programs on the same device, each with its own allocator.
    programs: Option<Vec<NameText>>,
    /// Additional processes on the same device: names, or maps such as `{ name: worker, memory:
    /// 1GiB }` with a memory limit.
    processes: Option<Vec<ProcessWire>>,
    /// Tags for selecting scenarios, as in `harness run scenarios --tag slow`.
    #[serde(default)]
    tags: Vec<NameText>,
    /// Time limit of every step without its own `timeout`. Default: 5 min.
    timeout: Option<DurationText>,
    /// Why the scenario is skipped: a reason, or a map from allocators, `simulated` or `gpu` to
    /// reasons.
    skip: Option<Located<Tree>>,
    /// Why the scenario is known to fail, in the form of `skip`. A run that fails counts as
    /// expected, and a run that passes counts as failed.
    expected_to_fail: Option<Located<Tree>>,
    /// Seed of all random choices. Default: 0.
    #[serde(default)]
    seed: u64,
    /// Failures to inject into calls of the driver.
    faults: Option<Located<Vec<Located<FaultWire>>>>,
    /// Runs a full check every N steps, as in `{ every: 100 }`, for long runs without the audit
    /// (`--skip-checks`).
    health_check: Option<HealthCheckWire>,
    /// The steps, in order.
    #[schemars(length(min = 1))]
    steps: Located<Vec<Located<StepWire>>>,
    /// Expectations that are checked after every step. They can use counters and `start.…`.
    invariants: Option<Vec<ExpressionText>>,
    /// The scenario passes if it violates this always-checked invariant and no other.
    expect_violation: Option<InvariantText>,
    /// A claim that the scenario tests. The report lists all claims in one table.
    claim: Option<ClaimWire>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline)]
struct ProcessWire(
    #[schemars(schema_with = "harness_language::located::one_or_map::<NameText, ProcessFields>")]
    Located<ListOr<NameText, ProcessFields>>,
);

/// Runs a full check every N steps. It checks all always-checked invariants against the whole
/// structure of each allocator and the device's counters, and verifies every live buffer and the
/// live blocks of storms. A violation names the step. It is for runs without the audit
/// (`--skip-checks`), which otherwise find errors only when a buffer is freed or at the end. With
/// the audit it adds the contents. Timed runs skip it.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "health_check")]
struct HealthCheckWire {
    /// Steps from one check to the next, from 1 to 10000000. Steps in loops and operations of
    /// `storm`, `replay`, `train` and `infer` count.
    every: CountText,
}

/// The schema in `scenarios/schema.json`. Editors find it by a first line `# yaml-language-server:
/// $schema=schema.json`.
#[cfg(feature = "schema")]
pub fn schema() -> serde_json::Value {
    SchemaSettings::draft2020_12()
        .for_deserialize()
        .into_generator()
        .into_root_schema_for::<ScenarioWire>()
        .to_value()
}

#[cfg(not(feature = "schema"))]
pub fn schema() -> serde_json::Value {
    serde_json::from_str(include_str!("../../../../scenarios/schema.json"))
        .expect("tests compare the file with the types")
}

/// The keys that the map under this key must have: of a step, or of a field with its own keys.
fn required_by(key: &str) -> Vec<String> {
    // A reduction asks for thousands of scenarios.
    static SCHEMA: LazyLock<serde_json::Value> = LazyLock::new(schema);
    let root = &*SCHEMA;
    let definitions = || root["$defs"].as_object().into_iter().flatten();
    let of_step = definitions()
        .find(|(name, _)| *name == key)
        .map(|(_, schema)| schema);
    let field = || definitions().find_map(|(_, schema)| schema["properties"].get(key));
    let resolved = |schema: &'_ serde_json::Value| {
        schema["$ref"]
            .as_str()
            .and_then(|path| root.pointer(path.strip_prefix('#')?))
    };
    let schema = of_step.or_else(|| resolved(field()?));
    let required = schema
        .and_then(|schema| schema["required"].as_array())
        .into_iter()
        .flatten();
    required
        .filter_map(|name| Some(name.as_str()?.to_owned()))
        .collect()
}

/// What the steps of a scenario may name.
struct Declarations {
    needs: Needs,
    allocators: Vec<AllocatorSpec>,
    streams: Vec<StreamName>,
    programs: Vec<ProgramName>,
    processes: Vec<Process>,
}

impl Declarations {
    fn check(
        wire: &ScenarioWire,
        point: &Point,
        source: &str,
        folder: &Path,
    ) -> Result<Self, Problem> {
        let needs = wire.needs.check(&point.values, source)?;
        let (one, several) = (wire.allocator.as_ref(), wire.allocators.as_ref());
        let allocators = arms::check(one, several, source, folder)?;
        let streams = streams(wire.streams.as_deref().unwrap_or_default())?;
        let programs = programs(wire.programs.as_deref().unwrap_or_default())?;
        let given = wire.processes.as_deref().unwrap_or_default();
        Ok(Self {
            needs,
            allocators,
            streams,
            processes: processes(given, &programs, point, source)?,
            programs,
        })
    }
}

fn check_scenario(
    wire: &ScenarioWire,
    point: Point,
    (source, path): (&str, &Path),
    trace: Option<&Arc<Trace>>,
) -> Result<Scenario, Problem> {
    version(wire.version.as_ref())?;
    let about = about(&wire.about, SCENARIO.noun)?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let declarations = Declarations::check(wire, &point, source, folder)?;
    if wire.steps.value.is_empty() {
        return Err(Problem::new(wire.steps.at, "`steps` is empty")
            .help("as in `steps: [alloc: { buffer: a, size: 1MiB }]`"));
    }
    let declared = Declared {
        folder,
        trace,
        parameters: &point.values,
        allocators: &declarations.allocators,
        streams: &declarations.streams,
        programs: &declarations.programs,
        processes: &declarations.processes,
        memory: declarations.needs.memory,
    };
    let mut checker = Checker::new(source, declared, announced(&wire.steps.value));
    let invariants = check_invariants(wire, &mut checker)?;
    let faults = wire.faults.as_ref();
    let faults = faults.map_or_else(|| Ok(Vec::new()), |given| faults::check(given, &checker))?;
    let whole =
        |health: &HealthCheckWire| checker.whole(&health.every, "every", 1..=MAX_OPERATIONS);
    let health_check = wire.health_check.as_ref().map(whole).transpose()?;
    checker.time_limit = wire.timeout.as_ref().map(duration).transpose()?;
    let steps = check_steps(&wire.steps.value, &mut checker)?;
    let [skip, expected_to_fail] = reasons(wire, &checker)?;
    let tags = wire.tags.iter().map(|tag| tag.checked().map(str::to_owned));
    let tags = tags.collect::<Result<_, _>>()?;
    let expect_violation = wire.expect_violation.as_ref().map(invariant).transpose()?;
    let claim = wire.claim.as_ref().map(|claim| claim.check(&checker));
    let (claim, figures) = claim.transpose()?.unzip();
    let (of_traces, comparisons) = (checker.streams_of_traces, checker.comparisons);
    let streams = declarations.streams.into_iter();
    Ok(Scenario {
        name: name(path, &point),
        path: path.to_owned(),
        about,
        parameters: point.texts,
        needs: declarations.needs,
        seed: wire.seed,
        steps,
        faults,
        health_check,
        invariants,
        expect_violation,
        claim,
        figures: figures.unwrap_or_default(),
        comparisons,
        allocators: declarations.allocators,
        streams: streams.chain(of_traces).collect(),
        programs: declarations.programs,
        source: (!declarations.processes.is_empty()).then(|| source.to_owned()),
        processes: declarations.processes,
        tags,
        skip,
        expected_to_fail,
    })
}

/// The reasons to skip the scenario, and those to expect a failure.
fn reasons(wire: &ScenarioWire, checker: &Checker<'_>) -> Result<[Reasons; 2], Problem> {
    let check = |given: &Option<Located<Tree>>, what: &str| {
        given.as_ref().map_or_else(
            || Ok(Reasons::default()),
            |given| Reasons::check(given, what, |arm| checker.arm(arm)),
        )
    };
    Ok([
        check(&wire.skip, "skip")?,
        check(&wire.expected_to_fail, "expected_to_fail")?,
    ])
}

fn invariant(given: &InvariantText) -> Result<Located<Invariant>, Problem> {
    let names = Invariant::ALL.iter().map(|invariant| invariant.name());
    let kind = ["invariant", "invariants"];
    named(given, kind, Invariant::from_name, names).map(|found| given.0.with(found))
}

fn check_invariants(
    wire: &ScenarioWire,
    checker: &mut Checker<'_>,
) -> Result<Vec<Located<Expectation>>, Problem> {
    let given = wire.invariants.as_deref().unwrap_or_default();
    if let Some(first_too_many) = given.get(MAX_INVARIANTS) {
        return Err(Problem::new(
            first_too_many.at,
            format!("more than {MAX_INVARIANTS} invariants"),
        )
        .help("they are evaluated after every step; use `expect` for a check at one step"));
    }
    given
        .iter()
        .map(|text| Ok(text.0.with(checker.invariant(text)?)))
        .collect()
}

fn name(path: &Path, point: &Point) -> String {
    let stem = path.file_stem().map_or_else(
        || "scenario".to_owned(),
        |stem| stem.to_string_lossy().into_owned(),
    );
    if point.texts.is_empty() {
        return stem;
    }
    let values: Vec<String> = point
        .texts
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    format!("{stem}[{}]", values.join(","))
}

/// Checks that a declared name is new, and that there are at most `most` of its kind.
fn is_new<'n>(
    name: &NameText,
    [kind, kinds]: [&str; 2],
    known: impl ExactSizeIterator<Item = &'n str>,
    most: usize,
) -> Result<(), Problem> {
    let (number, text) = (known.len(), name.text());
    if known.into_iter().any(|known| known == text) {
        return Err(
            Problem::new(name.at, format!("{kind} `{text}` is named twice")).help("name it once"),
        );
    }
    if number == most {
        return Err(Problem::new(name.at, format!("more than {most} {kinds}"))
            .help(format!("use fewer {kinds}")));
    }
    Ok(())
}

fn programs(given: &[NameText]) -> Result<Vec<ProgramName>, Problem> {
    let mut programs: Vec<ProgramName> = Vec::new();
    for name in given {
        let text = has_no_meaning(name, "take another name")?;
        is_new(
            name,
            ["program", "programs"],
            programs.iter().map(ProgramName::name),
            MAX_PROGRAMS,
        )?;
        programs.push(ProgramName::new(programs.len(), text));
    }
    Ok(programs)
}

fn processes(
    given: &[ProcessWire],
    programs: &[ProgramName],
    point: &Point,
    source: &str,
) -> Result<Vec<Process>, Problem> {
    let mut processes: Vec<Process> = Vec::new();
    for ProcessWire(given) in given {
        let (name, memory) = match &given.value {
            ListOr::One(name) => (&NameText(given.with(name.clone())), None),
            ListOr::Map(ProcessFields { name, memory }) => (name, memory.as_ref()),
            ListOr::Many(_) => {
                return Err(Problem::new(given.at, "expected a process")
                    .help("a process is a name, or a map as in `{ name: worker, memory: 1GiB }`"));
            }
        };
        let text = has_no_meaning(name, "take another name")?;
        if programs.iter().any(|program| program.name() == text) {
            return Err(
                Problem::new(name.at, format!("`{text}` is a program of this scenario"))
                    .help("take another name"),
            );
        }
        is_new(
            name,
            ["process", "processes"],
            processes.iter().map(|process| process.name.name()),
            MAX_PROCESSES,
        )?;
        let memory = memory
            .map(|text| check_memory(size(text, &point.values, source)?, text.at))
            .transpose()?;
        processes.push(Process {
            name: ProcessName::new(processes.len(), text),
            memory,
        });
    }
    Ok(processes)
}

fn streams(given: &[NameText]) -> Result<Vec<StreamName>, Problem> {
    let mut streams = vec![StreamName::new(0, DEFAULT_STREAM)];
    for name in given {
        let text = name.checked()?;
        if text == DEFAULT_STREAM {
            return Err(Problem::new(name.at, "the stream `default` always exists")
                .help("remove it from `streams`"));
        }
        is_new(
            name,
            ["stream", "streams"],
            streams.iter().skip(1).map(StreamName::name),
            MAX_STREAMS,
        )?;
        streams.push(StreamName::new(streams.len(), text));
    }
    Ok(streams)
}
