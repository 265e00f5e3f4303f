//! `harness shrink`: a trace that runs out of memory, or a scenario that fails, reduced to a small scenario that fails the same way.

use std::io::{self, IsTerminal};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use harness_allocator::allocator::caching::Config;
use harness_allocator::units::{Bytes, Nanos};
use harness_base::files;
use harness_base::words::count;
use harness_explain::plain::{PendingFrees, plain};
use harness_explain::sites::Sites;
use harness_language::text::exact_size;
use harness_language::yaml;
use harness_record::causes;
use harness_reduce::Progress;
use harness_reduce::scenario::{self, ReduceError};
use harness_reduce::trace::{self as shrink, Case, Goal, Shrunk};
use harness_scenario::{SCENARIO, Scenario, Trace, choices};
use indicatif::{ProgressBar, ProgressStyle};

use super::error::{CliError, Failures};
use super::exit::Exit;
use super::jobs::{self, Recovered};
use super::kind::{self, Kind};
use super::{device, interrupt, simulated, terminal};

const EXAMPLES: &str = "Examples:
  harness shrink scenarios/failing/adapters.yaml --out scenarios/small.yaml
  harness shrink my.yaml --arm 'caching(max_split_size_mb:512)' --while invariant
  harness shrink oom.pickle --out scenarios/our_oom.yaml
  harness shrink job.trace --memory 8GiB --conf max_split_size_mb:128 --out small.yaml
  harness shrink job.trace --memory 8GiB --while conf-differs --conf '' --conf expandable_segments:True
  harness shrink oom.pickle --out small.trace        a trace instead of a scenario

A trace or a snapshot keeps the way in which its last refused request fails: for lack of memory, for fragments, for a memory fraction, or for what waits
for events. A scenario keeps the first failure of its first arm that fails on the simulated device: the cause for which a request is refused, the
invariant that is violated, or the expectation that is not met, with its figures. Memory, sizes and numbers become smaller, loops shorter; names and
comments of what is left stay.

The result says how it ends (`expect: { oom: CAUSE }`, `expect_violation:` or `expected_to_fail:`), so `harness run` and `cargo test --test scenarios` take it
as it is. It was run before it is written. A scenario that passes cannot be reduced: exit code 2.";

/// Reduce a scenario that fails, or a trace or a snapshot that runs out of memory, to a small scenario that fails the same way.
#[derive(Args)]
#[command(after_help = EXAMPLES, arg_required_else_help = true)]
pub(super) struct Shrink {
    /// A scenario, a memory snapshot of PyTorch or an allocation trace; the last two packed by gzip or not.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// What stays as it is: `oom`, a request is refused; `invariant`, an always-checked invariant is violated; `conf-differs`, one of two settings makes
    /// a trace run out of memory and the other does not. If not given, `oom` for a trace or a snapshot, and for a scenario whatever fails first.
    #[arg(long = "while", value_name = "WHAT")]
    goal: Option<Keep>,
    /// Of a scenario, the arm that fails, by its name: the first one that does, if not given.
    #[arg(long, value_name = "ARM")]
    arm: Option<String>,
    /// Of a scenario whose expectation is not met: let it come to other figures, as long as it is not met. Less is left then, and it may be something else
    /// than what was looked for.
    #[arg(long)]
    any_figures: bool,
    /// The device's memory: of a trace, and of a snapshot where that does not tell it.
    #[arg(long, value_name = "SIZE", value_parser = device::memory)]
    memory: Option<Bytes>,
    /// The settings to run a trace or a snapshot under, as PYTORCH_ALLOC_CONF would hold them: the default or the recorded ones, if not given. With
    /// `--while conf-differs` the settings to compare them with too.
    #[arg(long, value_name = "CONF")]
    conf: Vec<String>,
    /// Stop after this time with what was reached, as in `30s` or `5min`.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    time_limit: Duration,
    /// Where to write the scenario, or where the name ends in `.trace` the trace; standard output without it.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// What stays as it is.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Keep {
    Oom,
    Invariant,
    ConfDiffers,
}

fn time(text: &str) -> Result<Duration, String> {
    Nanos::parse(text).map(|time| Duration::from_nanos(time.0)).map_err(|error| error.to_string())
}

/// What is to be reduced, and where in its program each event was.
struct Given {
    case: Case,
    sites: Vec<Option<String>>,
}

impl Shrink {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        match kind::of(&self.file) {
            Some(Kind::Pickle) => self.shrink_program(self.of_snapshot()?),
            Some(Kind::Trace) => self.shrink_program(self.of_trace()?),
            Some(kind @ (Kind::Recording | Kind::RmmLog)) => Err(kind.instead_of("a scenario, a snapshot or a trace", &self.file).into()),
            // What is no trace and is called one is answered as a trace with a mistake.
            None if self.file.to_string_lossy().contains(".trace") => self.shrink_program(self.of_trace()?),
            None => self.shrink_scenario(),
        }
    }

    /// Of a trace or a snapshot.
    fn shrink_program(&self, mut given: Given) -> Result<Exit, Failures> {
        if self.arm.is_some() || self.any_figures {
            let help = "a trace has neither arms nor expectations: give the settings to run it under by `--conf`";
            return Err(CliError::input("`--arm` and `--any-figures` are for scenarios", help).into());
        }
        let goal = self.goal_of_program(&mut given.case)?;
        let before = (given.case.events.len(), given.case.memory);
        let shrunk = self.watched("operation", |watch| match &goal {
            Some(goal) => shrink::shrink(given.case, goal, watch),
            None => shrink::shrink_violation(given.case, &scenario::Simulated, watch),
        })?;
        let shrunk = shrunk.map_err(|error| {
            let help = "give less `--memory` or other `--conf`; `harness advise` tells which settings fail";
            CliError::input(format!("{}: {error}", self.file.display()), help)
        })?;
        let sites = |origin: usize| given.sites.get(origin).cloned().flatten();
        self.write(&shrunk, before, &sites)?;
        Ok(Exit::Passed)
    }

    /// What stays as it is: how a request is refused, or if `None` the invariant that is violated. The settings given are those of the case.
    fn goal_of_program(&self, case: &mut Case) -> Result<Option<Goal>, CliError> {
        let configs = self.conf.iter().map(|conf| Config::parse(conf).map_err(|error| CliError::conf_of("--conf", &error, conf)));
        let configs = configs.collect::<Result<Vec<_>, _>>()?;
        if let [config] | [config, _] = configs.as_slice()
            && (configs.len() == 2 || self.goal != Some(Keep::ConfDiffers))
        {
            case.config = config.clone();
        }
        match (self.goal.unwrap_or(Keep::Oom), configs.as_slice()) {
            (Keep::Oom, [] | [_]) => Ok(Some(Goal::Oom)),
            (Keep::Invariant, [] | [_]) => Ok(None),
            (Keep::ConfDiffers, [other] | [_, other]) => Ok(Some(Goal::ConfDiffers(other.clone()))),
            (Keep::ConfDiffers, _) => {
                let help =
                    "give the settings to compare with, and in front of them those to run under, where they are not the recorded ones";
                Err(CliError::input("`--while conf-differs` takes one or two `--conf`", help))
            }
            (Keep::Oom | Keep::Invariant, _) => {
                Err(CliError::input("several `--conf` are for `--while conf-differs`", "give one, or `--while conf-differs`"))
            }
        }
    }

    fn of_snapshot(&self) -> Result<Given, CliError> {
        let Recovered { snapshot, job, .. } = jobs::read(&self.file, self.memory)?;
        let Some(memory) = self.memory.or(job.memory) else {
            let message = format!("{}: how much memory the device had is not known", self.file.display());
            return Err(CliError::input(message, "give `--memory`, as in `--memory 24GiB`"));
        };
        let (plain, names) = (plain(&job, PendingFrees::AsRecorded), Sites::new(&snapshot, job.device));
        let sites = (0..plain.events.len()).map(|event| plain.site(event, &job, &names).map(str::to_owned)).collect();
        Ok(Given { case: Case { events: plain.events, config: job.config, memory }, sites })
    }

    fn of_trace(&self) -> Result<Given, CliError> {
        let invalid = |why: String, help: String| CliError::input(format!("{}: {why}", self.file.display()), help);
        let trace = Trace::read(&self.file).map_err(|(why, help)| invalid(why, help))?;
        let Some(memory) = self.memory else {
            return Err(invalid(
                "a trace does not tell the device's memory".to_owned(),
                "give `--memory`, as in `--memory 24GiB`".to_owned(),
            ));
        };
        let sites = (0..trace.events.len()).map(|operation| trace.site(operation).map(str::to_owned)).collect();
        Ok(Given { case: Case { events: trace.events, config: Config::default(), memory }, sites })
    }

    /// Does something that is told how far it is, shows that, and breaks it off when its time is over or the user interrupts.
    fn watched<T>(&self, noun: &str, act: impl FnOnce(&mut dyn FnMut(&Progress) -> ControlFlow<()>) -> T) -> Result<T, CliError> {
        let bar = spinner();
        let (began, interrupt) = (Instant::now(), interrupt::watch(|| {})?);
        let mut watch = |progress: &Progress| {
            bar.set_message(format!("{}, {}, {}", count(progress.operations, noun), progress.memory, count(progress.runs, "run")));
            bar.tick();
            let is_over = began.elapsed() > self.time_limit || interrupt.load(Ordering::Relaxed);
            if is_over { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let done = act(&mut watch);
        bar.finish_and_clear();
        Ok(done)
    }

    fn shrink_scenario(&self) -> Result<Exit, Failures> {
        let goal = match self.goal {
            None => scenario::Goal::Any,
            Some(Keep::Oom) => scenario::Goal::Oom,
            Some(Keep::Invariant) => scenario::Goal::Invariant,
            Some(Keep::ConfDiffers) => {
                let help = "a scenario compares settings by an expectation, as in `expandable.reserved.peak <= caching.reserved.peak`";
                return Err(CliError::input("`--while conf-differs` is for traces and snapshots", help).into());
            }
        };
        if self.memory.is_some() || !self.conf.is_empty() {
            let help = "a scenario says both itself, under `needs:` and `allocators:`";
            return Err(CliError::input("`--memory` and `--conf` are for traces and snapshots", help).into());
        }
        let source = yaml::read(&self.file, &SCENARIO)?;
        let given = scenario::Given {
            source: &source,
            path: &self.file,
            arm: self.arm.as_deref(),
            goal,
            any_figures: self.any_figures,
            origin: None,
        };
        let reduced = self.watched("step", |watch| scenario::reduce(&given, &scenario::Simulated, watch))?.map_err(of_scenario)?;
        if let Some(out) = &self.out {
            // A trace that it replays is looked for beside it.
            Scenario::parse(&reduced.text, out).map_err(|error| {
                let folder = self.file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
                CliError::input(error.to_string(), format!("the scenario names a file beside it: write it into `{}` too", folder.display()))
            })?;
        }
        let values: String = reduced.point.iter().map(|(name, value)| format!(", {name} = {value}")).collect();
        terminal::tell(format_args!(
            "{} came down to {}, by {} with {}{values}{}: {}",
            count(reduced.steps_before, "step"),
            reduced.steps,
            count(reduced.runs, "run"),
            reduced.arm,
            stopped(reduced.is_stopped),
            reduced.failure
        ));
        self.put(&reduced.text)?;
        Ok(Exit::Passed)
    }

    fn put(&self, text: &str) -> Result<(), CliError> {
        match &self.out {
            None => terminal::print_document(text),
            Some(out) => files::write(out, text).map_err(|error| unwritten(out, error)),
        }
    }

    fn write(
        &self,
        shrunk: &Shrunk,
        (operations, memory): (usize, Bytes),
        sites: &dyn Fn(usize) -> Option<String>,
    ) -> Result<(), CliError> {
        let is_trace = self.out.as_ref().is_some_and(|out| out.extension().is_some_and(|ending| ending == "trace"));
        let scenario = if is_trace { None } else { self.scenario(shrunk, operations, sites)? };
        let text = match scenario {
            Some(text) => text,
            None if is_trace => trace(shrunk, sites),
            None => {
                let message = "the reduced trace has no scenario that fails in the same way: its private pools overlap, or it needs what waits for events or what a replay does";
                return Err(CliError::input(message, "write it as a trace: `--out small.trace`"));
            }
        };
        terminal::tell(format_args!(
            "{} in {memory} came down to {} in {}, by {}{}: {}",
            count(operations, "operation"),
            shrunk.case.events.len(),
            shrunk.case.memory,
            count(shrunk.replays, "replay"),
            stopped(shrunk.is_stopped),
            shrunk.failure
        ));
        self.put(&text)
    }

    /// The scenario, which was run before: it ends as it says. `None` where it would not.
    fn scenario(&self, shrunk: &Shrunk, operations: usize, sites: &dyn Fn(usize) -> Option<String>) -> Result<Option<String>, CliError> {
        let origin = format!("{} of {}", count(operations, "operation"), self.file.file_name().unwrap_or_default().to_string_lossy());
        if matches!(shrunk.failure, shrink::Failure::Violates(_)) {
            let go_on = &mut |_: &Progress| ControlFlow::Continue(());
            return match shrink::scenario_of_violation(shrunk, &origin, sites, &scenario::Simulated, go_on) {
                Ok(reduced) => Ok(Some(reduced.text)),
                Err(ReduceError::Passes { .. } | ReduceError::NotConfirmed { .. }) => Ok(None),
                Err(error) => Err(of_scenario(error)),
            };
        }
        let about = format!("The last request runs out of memory: {}.\n\nReduced by `harness shrink` from {origin}.", shrunk.failure);
        let with = |oom: &str| {
            let expect = if shrunk.other.is_some() { format!("{{ fails: {oom}, serves: fits }}") } else { oom.to_owned() };
            shrink::scenario(shrunk, &about, &expect, sites).ok()
        };
        let Some(plain) = with("oom") else { return Ok(None) };
        let records = simulated::run(&plain, None)?;
        if !simulated::pass(&records) {
            return Ok(None);
        }
        let shortage = records.iter().flat_map(|record| &record.steps).filter_map(|step| step.shortage.as_ref()).next_back();
        let cause = shortage.and_then(|shortage| causes(shortage).first().map(|cause| cause.kind()));
        let with_cause = cause.and_then(|cause| with(&format!("{{ oom: {cause} }}")));
        match with_cause {
            Some(text) if simulated::pass(&simulated::run(&text, None)?) => Ok(Some(text)),
            _ => Ok(Some(plain)),
        }
    }
}

const fn stopped(is_stopped: bool) -> &'static str {
    if is_stopped { "; stopped by the time limit or by Ctrl-C: more might go" } else { "" }
}

/// Why a scenario cannot be reduced, and what to do about it.
fn of_scenario(error: ReduceError) -> CliError {
    let help = match &error {
        ReduceError::Invalid(_) | ReduceError::Device(_) | ReduceError::NotConfirmed { .. } => String::new(),
        ReduceError::Passes { .. } => "`harness run` tells how each arm ends; a failure that needs a real GPU cannot be reduced".to_owned(),
        ReduceError::NoSuchArm { arm, arms, .. } => choices(arm, "arms", arms.iter().map(String::as_str)),
        ReduceError::NotRun { .. } => "only what runs on the simulated device can be reduced".to_owned(),
        ReduceError::TimeLimit { .. } => "give the step a longer `timeout`".to_owned(),
    };
    match error {
        ReduceError::Invalid(error) => error.into(),
        ReduceError::Device(error) => error.into(),
        ReduceError::NotConfirmed { .. } => {
            CliError::Internal { message: error.to_string(), help: "this is a mistake in the harness: report it with the scenario" }
        }
        error => CliError::input(error.to_string(), help),
    }
}

/// The reduced trace, with what `harness replay` needs to be told in its first lines.
fn trace(shrunk: &Shrunk, sites: &dyn Fn(usize) -> Option<String>) -> String {
    let conf = shrunk.case.config.to_string();
    let mut text = format!("# --memory {} --alloc-conf '{conf}'\n", exact_size(shrunk.case.memory));
    for (event, &origin) in shrunk.case.events.iter().zip(&shrunk.origins) {
        let site = sites(origin).map(|site| format!(" # {site}")).unwrap_or_default();
        text += &format!("{event}{site}\n");
    }
    text
}

/// A file that cannot be written.
pub(crate) fn unwritten(path: &Path, error: io::Error) -> CliError {
    CliError::Output { target: Some(path.to_owned()), error, help: "choose another place with `--out`, or make room" }
}

fn spinner() -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner();
    // A template that indicatif does not understand leaves its own, which is good enough.
    if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {wide_msg}") {
        bar.set_style(style);
    }
    bar
}
