//! `harness shrink`: reduces a failing scenario, or a trace that runs out of memory, to a small
//! scenario that fails in the same way.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{ops::ControlFlow, sync::atomic::Ordering};

use clap::{Args, ValueEnum};
use harness_allocator::allocator::caching::{Config, TorchVersion};
use harness_allocator::units::{Bytes, Nanos};
use harness_base::words::count;
use harness_explain::plain::{PendingFrees, plain};
use harness_explain::sites::Sites;
use harness_language::{text::exact_size, yaml};
use harness_record::causes;
use harness_reduce::ReductionProgress;
use harness_reduce::scenario::{self, ReduceError};
use harness_reduce::trace::{self as shrink, Shrunk, TraceCase, TraceGoal};
use harness_scenario::{SCENARIO, Scenario, choices};

use super::error::{CliError, Failures};
use super::jobs::{self, RecordingOptions, Recovered};
use super::kind::{self, Kind};
use super::{arguments, exit::Exit, interrupt, simulated, terminal};

const EXAMPLES: &str = "Examples:
  harness shrink scenarios/failing/adapters.yaml --out scenarios/small.yaml
  harness shrink my.yaml --arm 'caching(max_split_size_mb:512)' --preserve invariant
  harness shrink oom.pickle --out scenarios/our_oom.yaml
  harness shrink job.trace --memory 8GiB --alloc-conf max_split_size_mb:128 --out small.yaml
  harness shrink job.trace --memory 8GiB --preserve conf-differs --alloc-conf '' \\
    --alloc-conf expandable_segments:True
  harness shrink oom.pickle --out small.trace        a trace instead of a scenario

For a trace or a snapshot, the cause of the last refused request stays the same: too little memory,
fragmentation, a memory fraction, or blocks that wait for events. For a scenario, the first failure
of its first failing configuration on the simulated device stays the same: the cause of a refused
request, the violated invariant, or the unmet expectation with its figures. Memory, sizes and
numbers become smaller, and loops become shorter. Names and comments of the remaining steps are
kept.

The result contains its own expectation (`expect: { oom: CAUSE }`, `expect_violation:` or
`expected_to_fail:`), so it passes in `harness run` and
`cargo test --test scenarios`. It is run before it is written. The exit code is 2 for a scenario
that passes, because it cannot be reduced.";

/// Reduce a failing scenario, or a trace or snapshot that runs out of memory, to a small scenario
/// that fails in the same way.
#[derive(Args)]
#[command(after_help = EXAMPLES, arg_required_else_help = true)]
pub(super) struct Shrink {
    /// A scenario, a memory snapshot of PyTorch or an allocation trace. Snapshots and traces may be
    /// compressed with gzip.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The failure to preserve: `oom`, a refused request; `invariant`, a violated invariant;
    /// `conf-differs`, a trace runs out of memory with one of two settings only [default: `oom` for
    /// a trace or a snapshot, the first failure for a scenario].
    #[arg(long = "preserve", value_name = "WHAT")]
    goal: Option<Keep>,
    /// For a scenario: the name of the failing configuration [default: the first one that fails].
    #[arg(long, value_name = "ARM")]
    arm: Option<String>,
    /// For a scenario with an unmet expectation: allow other figures, as long as the expectation
    /// stays unmet. The result is smaller, but may show a different problem.
    #[arg(long)]
    any_figures: bool,
    /// The device's memory, for a trace or for a snapshot that does not contain it.
    #[arg(long, value_name = "SIZE", value_parser = arguments::memory)]
    memory: Option<Bytes>,
    #[command(flatten)]
    recording: RecordingOptions,
    /// The settings for a trace or a snapshot, in the format of PYTORCH_ALLOC_CONF [default: the
    /// recorded settings]. With `--preserve conf-differs`, also the settings to compare with.
    #[arg(long = "alloc-conf", value_name = "CONF")]
    conf: Vec<String>,
    /// Stop after this time with the smallest result so far, as in `30s` or `5min`.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    time_limit: Duration,
    /// Write the scenario to this file instead of standard output. If the name ends in `.trace`,
    /// write a trace.
    #[arg(long, value_name = "FILE", value_parser = arguments::output())]
    out: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Keep {
    Oom,
    Invariant,
    ConfDiffers,
}

fn time(text: &str) -> Result<Duration, String> {
    Nanos::parse(text)
        .map(|time| Duration::from_nanos(time.0))
        .map_err(|error| error.to_string())
}

/// The program to reduce, and the call site of each event.
struct Given {
    case: TraceCase,
    sites: Vec<Option<String>>,
}

impl Shrink {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        match kind::of(&self.file) {
            Some(Kind::Pickle) => self.shrink_program(self.of_snapshot()?),
            Some(Kind::Trace) => self.shrink_program(self.of_trace()?),
            Some(kind @ (Kind::Recording | Kind::RmmLog)) => Err(kind
                .instead_of("a scenario, a snapshot or a trace", &self.file)
                .into()),
            // A file named like a trace gets the error messages for traces.
            None if self.file.to_string_lossy().contains(".trace") => {
                self.shrink_program(self.of_trace()?)
            }
            None => self.shrink_scenario(),
        }
    }

    /// Reduces a trace or a snapshot.
    fn shrink_program(&self, mut given: Given) -> Result<Exit, Failures> {
        if self.arm.is_some() || self.any_figures {
            let help = "a trace has neither configurations nor expectations: select its settings \
                 with `--alloc-conf`";
            return Err(
                CliError::input("`--arm` and `--any-figures` are for scenarios", help).into(),
            );
        }
        let goal = self.goal_of_program(&mut given.case)?;
        let before = (given.case.events.len(), given.case.memory);
        let shrunk = self.watched("operation", |watch| match &goal {
            Some(goal) => shrink::shrink(given.case, goal, watch),
            None => shrink::shrink_violation(given.case, &scenario::Simulated, watch),
        })?;
        let shrunk = shrunk.map_err(|error| {
            let help = "give less `--memory` or another `--alloc-conf`; `harness advise` lists the \
                 settings that fail";
            CliError::input(format!("{}: {error}", self.file.display()), help)
        })?;
        let sites = |origin: usize| given.sites.get(origin).cloned().flatten();
        self.write(&shrunk, before, &sites)?;
        Ok(Exit::Passed)
    }

    /// The failure to preserve: a refused request, or if `None`, a violated invariant. Sets the
    /// settings of `case`.
    fn goal_of_program(&self, case: &mut TraceCase) -> Result<Option<TraceGoal>, CliError> {
        let configs = self.conf.iter().map(|conf| {
            Config::parse_for(case.config.torch, conf).map_err(|error| CliError::conf(&error, conf))
        });
        let configs = configs.collect::<Result<Vec<_>, _>>()?;
        if let [config] | [config, _] = configs.as_slice()
            && (configs.len() == 2 || self.goal != Some(Keep::ConfDiffers))
        {
            case.config = config.clone();
        }
        match (self.goal.unwrap_or(Keep::Oom), configs.as_slice()) {
            (Keep::Oom, [] | [_]) => Ok(Some(TraceGoal::Oom)),
            (Keep::Invariant, [] | [_]) => Ok(None),
            (Keep::ConfDiffers, [other] | [_, other]) => {
                Ok(Some(TraceGoal::ConfDiffers(Box::new(other.clone()))))
            }
            (Keep::ConfDiffers, _) => {
                let help = "give the settings to compare with; to replace the recorded settings \
                     too, give the replacement first";
                Err(CliError::input(
                    "`--preserve conf-differs` takes one or two `--alloc-conf`",
                    help,
                ))
            }
            (Keep::Oom | Keep::Invariant, _) => {
                let help = "give one `--alloc-conf`, or `--preserve conf-differs`";
                Err(CliError::input(
                    "several `--alloc-conf` are for `--preserve conf-differs`",
                    help,
                ))
            }
        }
    }

    fn of_snapshot(&self) -> Result<Given, CliError> {
        let Recovered {
            about_device,
            snapshot,
            job,
            ..
        } = jobs::read(&self.file, self.memory, &self.recording)?;
        about_device.iter().for_each(terminal::message);
        let memory = jobs::required(self.memory.or(job.memory), &self.file, "the recording")?;
        let (plain, names) = (
            plain(&job, PendingFrees::AsRecorded),
            Sites::new(&snapshot, job.device),
        );
        let sites = (0..plain.events.len())
            .map(|event| plain.site(event, &job, &names).map(str::to_owned))
            .collect();
        Ok(Given {
            case: TraceCase {
                events: plain.events,
                config: job.config,
                memory,
            },
            sites,
        })
    }

    fn of_trace(&self) -> Result<Given, CliError> {
        let (trace, memory) = jobs::trace(&self.file, self.memory)?;
        let sites = (0..trace.events.len())
            .map(|operation| trace.site(operation).map(str::to_owned))
            .collect();
        Ok(Given {
            case: TraceCase {
                events: trace.events,
                config: Config {
                    torch: self.recording.torch.unwrap_or_default(),
                    ..Config::default()
                },
                memory,
            },
            sites,
        })
    }

    /// Runs `act` with a progress display. Stops it after the time limit or at Ctrl-C.
    fn watched<T>(
        &self,
        noun: &str,
        act: impl FnOnce(&mut dyn FnMut(&ReductionProgress) -> ControlFlow<()>) -> T,
    ) -> Result<T, CliError> {
        let bar = terminal::progress(true, "{spinner} {elapsed} {wide_msg}", None);
        let (began, interrupt) = (Instant::now(), interrupt::watch(|| {})?);
        let mut watch = |progress: &ReductionProgress| {
            bar.set_message(format!(
                "{}, {}, {}",
                count(progress.operations, noun),
                progress.memory,
                count(progress.runs, "run")
            ));
            bar.tick();
            let is_over = began.elapsed() > self.time_limit || interrupt.load(Ordering::Relaxed);
            if is_over {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        };
        let done = act(&mut watch);
        bar.finish_and_clear();
        Ok(done)
    }

    fn goal_of_scenario(&self) -> Result<scenario::Goal, CliError> {
        match self.goal {
            None => Ok(scenario::Goal::Any),
            Some(Keep::Oom) => Ok(scenario::Goal::Oom),
            Some(Keep::Invariant) => Ok(scenario::Goal::Invariant),
            Some(Keep::ConfDiffers) => {
                let help = "a scenario compares settings with an expectation, as in \
                     `expandable.reserved.peak <= caching.reserved.peak`";
                Err(CliError::input(
                    "`--preserve conf-differs` is for traces and snapshots",
                    help,
                ))
            }
        }
    }

    fn shrink_scenario(&self) -> Result<Exit, Failures> {
        let goal = self.goal_of_scenario()?;
        if self.memory.is_some() || !self.conf.is_empty() {
            let help = "a scenario contains both under `needs:` and `allocators:`";
            return Err(CliError::input(
                "`--memory` and `--alloc-conf` are for traces and snapshots",
                help,
            )
            .into());
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
        let reduced = self
            .watched("step", |watch| {
                scenario::reduce(&given, &scenario::Simulated, watch)
            })?
            .map_err(of_scenario)?;
        if let Some(out) = &self.out {
            // The scenario may replay a trace in the same folder.
            Scenario::parse(&reduced.text, out).map_err(|error| {
                let folder = self
                    .file
                    .parent()
                    .filter(|folder| !folder.as_os_str().is_empty())
                    .unwrap_or(Path::new("."));
                CliError::input(
                    error.to_string(),
                    format!(
                        "the scenario names a file in its folder: write the result into `{}` too",
                        folder.display()
                    ),
                )
            })?;
        }
        let values: String = reduced
            .point
            .iter()
            .map(|(name, value)| format!(", {name} = {value}"))
            .collect();
        terminal::message(format_args!(
            "reduced {} to {}, in {} with {}{values}{}: {}",
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
            Some(out) => terminal::save(out, text),
        }
    }

    fn write(
        &self,
        shrunk: &Shrunk,
        (operations, memory): (usize, Bytes),
        sites: &dyn Fn(usize) -> Option<String>,
    ) -> Result<(), CliError> {
        let is_trace = self
            .out
            .as_ref()
            .is_some_and(|out| out.extension().is_some_and(|ending| ending == "trace"));
        let scenario = if is_trace {
            None
        } else {
            self.scenario(shrunk, operations, sites)?
        };
        let text = match scenario {
            Some(text) => text,
            None if is_trace => trace(shrunk, sites),
            None => {
                let message = "no scenario fails in the same way as the reduced trace: its private \
                     pools overlap, or the failure depends on pending events or on the replay \
                     itself";
                return Err(CliError::input(
                    message,
                    "write a trace instead: `--out small.trace`",
                ));
            }
        };
        terminal::message(format_args!(
            "reduced {} in {memory} to {} in {}, in {}{}: {}",
            count(operations, "operation"),
            shrunk.case.events.len(),
            shrunk.case.memory,
            count(shrunk.replays, "replay"),
            stopped(shrunk.is_stopped),
            shrunk.failure
        ));
        self.put(&text)
    }

    /// The scenario. A run has confirmed its expectation; `None` if the run ended differently.
    fn scenario(
        &self,
        shrunk: &Shrunk,
        operations: usize,
        sites: &dyn Fn(usize) -> Option<String>,
    ) -> Result<Option<String>, CliError> {
        let origin = format!(
            "{} of {}",
            count(operations, "operation"),
            self.file.file_name().unwrap_or_default().to_string_lossy()
        );
        if matches!(shrunk.failure, shrink::TraceFailure::Violates(_)) {
            let go_on = &mut |_: &ReductionProgress| ControlFlow::Continue(());
            return match shrink::scenario_of_violation(
                shrunk,
                &origin,
                sites,
                &scenario::Simulated,
                go_on,
            ) {
                Ok(reduced) => Ok(Some(reduced.text)),
                Err(ReduceError::Passes { .. } | ReduceError::NotConfirmed { .. }) => Ok(None),
                Err(error) => Err(of_scenario(error)),
            };
        }
        let about = format!(
            "The last request runs out of memory: {}.\n\nReduced by `harness shrink` from \
             {origin}.",
            shrunk.failure
        );
        let with = |oom: &str| {
            let expect = if shrunk.other.is_some() {
                format!("{{ fails: {oom}, serves: fits }}")
            } else {
                oom.to_owned()
            };
            shrink::scenario(shrunk, &about, &expect, sites).ok()
        };
        let Some(plain) = with("oom") else {
            return Ok(None);
        };
        let records = simulated::run(&plain, None)?;
        if !simulated::pass(&records) {
            return Ok(None);
        }
        let failed_request = records
            .iter()
            .flat_map(|record| &record.steps)
            .filter_map(|step| step.failed_request.as_ref())
            .next_back();
        let cause = failed_request
            .and_then(|failed_request| causes(failed_request).first().map(|cause| cause.kind()));
        let with_cause = cause.and_then(|cause| with(&format!("{{ oom: {cause} }}")));
        match with_cause {
            Some(text) if simulated::pass(&simulated::run(&text, None)?) => Ok(Some(text)),
            _ => Ok(Some(plain)),
        }
    }
}

const fn stopped(is_stopped: bool) -> &'static str {
    if is_stopped {
        "; stopped by the time limit or Ctrl-C, so a smaller result may exist"
    } else {
        ""
    }
}

fn of_scenario(error: ReduceError) -> CliError {
    let message = error.to_string();
    match error {
        ReduceError::Invalid(error) => error.into(),
        ReduceError::Device(error) => error.into(),
        ReduceError::NotConfirmed { .. } => CliError::internal(
            message,
            "this is a bug in the harness: report it with the scenario",
        ),
        ReduceError::Passes { .. } => {
            let help = "`harness run` shows the result of each configuration; a failure that needs \
                 a real GPU cannot be reduced";
            CliError::input(message, help)
        }
        ReduceError::NoSuchArm { arm, arms, .. } => CliError::input(
            message,
            choices(&arm, "configurations", arms.iter().map(String::as_str)),
        ),
        ReduceError::NotRun { .. } => CliError::input(
            message,
            "only scenarios for the simulated device can be reduced",
        ),
        ReduceError::TimeLimit { .. } => {
            CliError::input(message, "give the step a longer `timeout`")
        }
    }
}

/// The reduced trace. Its first line contains the options for `harness replay`.
fn trace(shrunk: &Shrunk, sites: &dyn Fn(usize) -> Option<String>) -> String {
    let conf = shrunk.case.config.to_string();
    let torch = shrunk.case.config.torch;
    let version = if torch == TorchVersion::default() {
        String::new()
    } else {
        format!(" --torch {torch}")
    };
    let mut text = format!(
        "# --memory {} --alloc-conf '{conf}'{version}\n",
        exact_size(shrunk.case.memory)
    );
    for (event, &origin) in shrunk.case.events.iter().zip(&shrunk.origins) {
        let site = sites(origin)
            .map(|site| format!(" # {site}"))
            .unwrap_or_default();
        text += &format!("{event}{site}\n");
    }
    text
}
