//! `harness shrink`: a trace that runs out of memory, reduced to a small scenario that fails the same way.

use std::io::{self, IsTerminal};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use harness_allocator::allocator::caching::Config;
use harness_allocator::units::{Bytes, Nanos};
use harness_base::files;
use harness_explain::plain::{PendingFrees, plain};
use harness_explain::shrink::{self, Case, Goal, Progress, Shrunk};
use harness_explain::sites::Sites;
use harness_record::causes;
use harness_scenario::steps::replay::Trace;
use indicatif::{ProgressBar, ProgressStyle};

use super::error::{CliError, Failures};
use super::exit::Exit;
use super::jobs::{self, Recovered};
use super::kind::{self, Kind};
use super::{device, interrupt, simulated, terminal};

const EXAMPLES: &str = "Examples:
  harness shrink oom.pickle --out scenarios/our_oom.yaml
  harness shrink job.trace --memory 8GiB --conf max_split_size_mb:128 --out small.yaml
  harness shrink job.trace --memory 8GiB --while conf-differs --conf '' --conf expandable_segments:True
  harness shrink oom.pickle --out small.trace        a trace instead of a scenario

The result fails as the trace given did: for lack of memory, for fragments, for a memory fraction, or for what waits for events. Its memory and its
sizes are smaller. `harness run` and `cargo test --test scenarios` take it as it is: it expects to fail.";

/// Reduce a trace or a snapshot that runs out of memory to a small scenario that fails the same way.
#[derive(Args)]
#[command(after_help = EXAMPLES, arg_required_else_help = true)]
pub(super) struct Shrink {
    /// A memory snapshot of PyTorch or an allocation trace, packed by gzip or not.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// What stays as it is: `oom`, a request is refused; `conf-differs`, one of two settings makes the program run out of memory and the other does not.
    #[arg(long = "while", value_name = "WHAT", default_value = "oom")]
    goal: Keep,
    /// The device's memory; of a snapshot, where that does not tell it.
    #[arg(long, value_name = "SIZE", value_parser = device::memory)]
    memory: Option<Bytes>,
    /// The settings to run under, as PYTORCH_ALLOC_CONF would hold them: the default or the recorded ones, if not given. With `--while conf-differs`
    /// the settings to compare them with too.
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
        let configs = self.conf.iter().map(|conf| Config::parse(conf).map_err(|error| CliError::conf_of("--conf", &error, conf)));
        let configs = configs.collect::<Result<Vec<_>, _>>()?;
        let mut given = if kind::of(&self.file) == Some(Kind::Pickle) { self.of_snapshot()? } else { self.of_trace()? };
        let goal = match (self.goal, configs.as_slice()) {
            (Keep::Oom, []) => Goal::Oom,
            (Keep::Oom, [config]) => {
                given.case.config = config.clone();
                Goal::Oom
            }
            (Keep::ConfDiffers, [other]) => Goal::ConfDiffers(other.clone()),
            (Keep::ConfDiffers, [config, other]) => {
                given.case.config = config.clone();
                Goal::ConfDiffers(other.clone())
            }
            (Keep::Oom, _) => return Err(CliError::input("`--while oom` takes one `--conf`", "give one, or `--while conf-differs`").into()),
            (Keep::ConfDiffers, _) => {
                let help =
                    "give the settings to compare with, and in front of them those to run under, where they are not the recorded ones";
                return Err(CliError::input("`--while conf-differs` takes one or two `--conf`", help).into());
            }
        };
        let before = (given.case.events.len(), given.case.memory);
        let shrunk = self.shrink(given.case, &goal)?;
        let sites = |origin: usize| given.sites.get(origin).cloned().flatten();
        self.write(&shrunk, before, &sites)?;
        Ok(Exit::Passed)
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

    fn shrink(&self, case: Case, goal: &Goal) -> Result<Shrunk, CliError> {
        let bar = spinner();
        let (began, interrupt) = (Instant::now(), interrupt::watch(|| {})?);
        let mut watch = |progress: &Progress| {
            bar.set_message(format!("{} operations, {}, {} replays", progress.operations, progress.memory, progress.replays));
            bar.tick();
            let is_over = began.elapsed() > self.time_limit || interrupt.load(Ordering::Relaxed);
            if is_over { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let shrunk = shrink::shrink(case, goal, &mut watch);
        bar.finish_and_clear();
        shrunk.map_err(|error| {
            let help = "give less `--memory` or other `--conf`; `harness advise` tells which settings fail";
            CliError::input(format!("{}: {error}", self.file.display()), help)
        })
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
                let message = "the reduced trace has no scenario that fails in the same way: its private pools overlap, or it needs what waits for events";
                return Err(CliError::input(message, "write it as a trace: `--out small.trace`"));
            }
        };
        let stopped = if shrunk.is_stopped { "; stopped by the time limit or by Ctrl-C: more might go" } else { "" };
        terminal::tell(format_args!(
            "{operations} operations in {memory} came down to {} in {}, by {} replays{stopped}: {}",
            shrunk.case.events.len(),
            shrunk.case.memory,
            shrunk.replays,
            shrunk.failure
        ));
        match &self.out {
            None => terminal::print(&text),
            Some(out) => files::write(out, &text).map_err(|error| unwritten(out, error)),
        }
    }

    /// The scenario, which was run before: it ends as it says. `None` where it would not.
    fn scenario(&self, shrunk: &Shrunk, operations: usize, sites: &dyn Fn(usize) -> Option<String>) -> Result<Option<String>, CliError> {
        let about = format!(
            "The last request runs out of memory: {}.\n\nReduced by `harness shrink` from {operations} operations of {}.",
            shrunk.failure,
            self.file.file_name().unwrap_or_default().to_string_lossy()
        );
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

/// The reduced trace, with what `harness replay` needs to be told in its first lines.
fn trace(shrunk: &Shrunk, sites: &dyn Fn(usize) -> Option<String>) -> String {
    let conf = shrunk.case.config.to_string();
    let mut text = format!("# --memory {} --alloc-conf '{conf}'\n", shrink::size(shrunk.case.memory));
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
