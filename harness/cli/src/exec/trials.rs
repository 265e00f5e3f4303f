use std::path::PathBuf;
use std::{
    ffi::OsString,
    num::NonZeroUsize,
    process::ExitCode,
    sync::Once,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use harness_allocator::units::Nanos;
use harness_base::{shard::Shard, words::count};
use harness_exec::trials::copies::Copies;
use harness_exec::trials::faults::{self, FaultPlan, RecoveryExpectation};
use harness_exec::trials::identity::{self, Run};
use harness_exec::trials::least::{self, Search};
use harness_exec::trials::merge;
use harness_exec::trials::observed::{Observed, TrialEnd};
use harness_exec::trials::part::Part;
use harness_exec::trials::runner::{FirstRun, Runner, RunnerError};
use harness_exec::trials::settings::{self, SettingsReport};
use harness_exec::trials::{Trial, TrialProgram, replay::Replays, which::Which};
use harness_exec::{launch::Launch, machine::Machine, process};
use harness_gpu_settings::settings::AddressOrder;
use harness_report::trials::{self, Trials};
use indicatif::ProgressBar;
use serde::Serialize;

use super::baseline;
use super::failed_cases::FailedCases;
use crate::error::{CliError, Failures};
use crate::{Format, arguments, built, exit::Exit, interrupt, program::shown, terminal};

/// The time limit of a run, as a multiple of the first run's time.
const TIMES_THE_FIRST: u32 = 10;
const SHORTEST_LIMIT: Duration = Duration::from_secs(30);
/// The limit of the first run without `--time-limit`.
const NO_LIMIT: Duration = Duration::from_secs(u64::MAX / 4);

#[derive(Args)]
pub(super) struct Options {
    /// Run the program twice without failures, then once per allocation of device memory. In each
    /// run, that allocation and PyTorch's retry fail, which causes an out-of-memory error. With
    /// another library, allocations fail until the program gets the library's error. Calls
    /// that create handles, plans and modules of libraries, such as cublasCreate, then fail once
    /// each. WHICH is `all`, `sample:N` or `largest:N`, which fail allocations only [default: all
    /// up to 64 allocations; of more, a sample of 64 and the 16 largest].
    #[arg(
        long,
        value_name = "WHICH",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "some",
        conflicts_with_all = ["fail", "least_memory"],
        help_heading = MANY,
    )]
    every_fault: Option<Which>,
    /// With `--every-fault`: also fail each allocation alone. PyTorch's retry should then succeed.
    /// Without this option, three allocations are tested alone.
    #[arg(long, help_heading = MANY)]
    alone: bool,
    /// With `--every-fault`: fail only what did not meet the expectation in earlier runs of this
    /// command, in this folder and with these settings, or as without this option if all did. If
    /// the program now makes other attempts, all cases run. The cache folder has the list.
    #[arg(long, conflicts_with = "shard", help_heading = MANY)]
    last_failed: bool,
    /// With `--every-fault`: exit with code 1 if a run does not meet this. `recovers`: the run ends
    /// like the first run, with at most 1 % or 2 MiB more memory in use. `ends-cleanly`: the run
    /// recovers, or ends with a nonzero exit code after an OutOfMemoryError, and no other exception
    /// or signal ends it. Both accept the error of a library whose call failed.
    #[arg(
        long,
        value_name = "WHAT",
        help_heading = MANY,
        value_parser = expectations(),
    )]
    expect: Option<RecoveryExpectation>,
    /// Search for the least memory in which the program ends as with `--memory`, without
    /// out-of-memory errors. The result is exact to 1 %.
    #[arg(long, conflicts_with = "fail", group = "searches", help_heading = MANY)]
    least_memory: bool,
    /// With `--least-memory`: search until the result is exact to 2 MiB.
    #[arg(long, help_heading = MANY)]
    exact: bool,
    /// With `--least-memory` or `--largest`: allow out-of-memory errors that the program survives.
    #[arg(long, help_heading = MANY)]
    pub(super) allow_ooms: bool,
    /// Start the program anew for each run, and predict no run by a replay. By default, further
    /// runs are copies of one process, made when torch first uses the GPU, or after the import of
    /// another library. If a copy could differ from a new start, for example because the program
    /// has written a file or started a thread, each run is a new start, and the output says why.
    #[arg(long, help_heading = MANY)]
    fresh: bool,
    /// Run only part I of N of the cases, as in `1/2`: attempts to fail, address orders of
    /// `--least-memory`, settings, or rows of `--matrix`. `harness report merge` combines the
    /// parts, which `--format json` prints, and those of the rows.
    #[arg(long, value_name = "I/N", help_heading = MANY)]
    pub(super) shard: Option<Shard>,
    /// The number of parallel runs [default: the number of cores, or fewer if they exceed the
    /// host's memory; 1 with `--device`, because all runs share that GPU].
    #[arg(long, value_name = "N", help_heading = MANY)]
    jobs: Option<NonZeroUsize>,
    /// The time limit of a run, as in `90s` [default: 10 times the time of the first run, and at
    /// least 30 s; none with `--largest` and `--matrix`].
    #[arg(long, value_name = "TIME", value_parser = Nanos::parse, help_heading = MANY)]
    pub(super) time_limit: Option<Nanos>,
    /// Keep the output of all runs except the first in this folder; with `--matrix`, of all runs,
    /// each in its own folder.
    #[arg(long, value_name = "DIR", help_heading = MANY)]
    pub(super) logs: Option<PathBuf>,
    /// Write a markdown report. For one run, a picture next to it shows reserved and allocated
    /// memory and failed calls; with `--leave-free`, device memory in use. In a folder, the file is
    /// `report.md`.
    #[arg(long, value_name = "FILE", value_parser = arguments::report())]
    pub(super) report: Option<PathBuf>,
    /// The output format. With `json`, the first run's standard output goes to standard error.
    #[arg(long, value_enum, default_value_t = Format::Text, help_heading = MANY)]
    pub(super) format: Format,
}

pub(super) const MANY: &str = "Many runs";

fn expectations() -> impl TypedValueParser<Value = RecoveryExpectation> {
    let names = PossibleValuesParser::new(["recovers", "ends-cleanly"]);
    names.map(|name| {
        if name == "recovers" {
            RecoveryExpectation::Recovers
        } else {
            RecoveryExpectation::EndsCleanly
        }
    })
}

/// The runs after the first one.
struct FurtherRuns<'a> {
    program: TrialProgram<'a, RunnerError>,
    runner: &'a Runner<'a>,
    bar: &'a ProgressBar,
    identity: &'a Run,
}

impl FurtherRuns<'_> {
    fn end(&self) {
        self.bar.finish_and_clear();
        let runner = self.runner;
        let refusal = runner.copies.refusal();
        if let Some(reason) = refusal.filter(|_| !runner.stop.load(Ordering::Relaxed)) {
            terminal::message(format_args!(
                "Each run started the program anew, because it {reason}."
            ));
        }
    }
}

/// The number of runs of a search is unknown.
fn bar(runs: Option<u64>) -> ProgressBar {
    let template = match runs {
        Some(_) => "{bar:30} {pos}/{len} runs, {eta} left",
        None => "{spinner} {pos} runs, {elapsed}",
    };
    terminal::progress(true, template, runs)
}

fn most_jobs(launch: &Launch<'_>) -> usize {
    // Launchers with a fixed endpoint meet those of other runs.
    let is_fixed = |word: &OsString| {
        word.to_string_lossy()
            .replace('_', "-")
            .starts_with("--rdzv-endpoint")
    };
    if launch.command.iter().any(is_fixed) {
        1
    } else {
        launch.machine.usual_jobs()
    }
}

fn one_after_another(port: u16) {
    terminal::message(format_args!(
        "the ranks meet at port {port} in each run, so the runs are made one after another"
    ));
}

impl Options {
    pub(super) fn check_needed(&self, has_largest: bool) -> Result<(), CliError> {
        let of_faults = [
            ("--alone", self.alone),
            ("--last-failed", self.last_failed),
            ("--expect", self.expect.is_some()),
        ];
        super::require("`--every-fault`", self.every_fault.is_some(), &of_faults)?;
        let of_search = [("--exact", self.exact)];
        super::require("`--least-memory`", self.least_memory, &of_search)?;
        super::require(
            "`--least-memory` or `--largest`",
            self.least_memory || has_largest,
            &[("--allow-ooms", self.allow_ooms)],
        )
    }

    pub(super) fn are_asked_for(
        &self,
        alloc_confs: &[String],
        orders: &[AddressOrder],
        is_search: bool,
    ) -> Result<bool, CliError> {
        let several = alloc_confs.len() > 1;
        if orders.len() > 1
            && (self.every_fault.is_some()
                || self.least_memory
                || self.shard.is_some()
                || is_search)
        {
            let help = "give one; `--least-memory` always tries the orders of Linux and WSL";
            return Err(CliError::input(
                "`--every-fault`, `--least-memory`, `--largest` and `--shard` take one \
                 `--addresses`",
                help,
            ));
        }
        if several && self.every_fault.is_some() {
            return Err(CliError::input(
                "`--every-fault` takes one `--alloc-conf`",
                "run it once for each of the settings",
            ));
        }
        let asked = several
            || orders.len() > 1
            || self.every_fault.is_some()
            || self.least_memory
            || is_search;
        let idle = [
            ("--fresh", self.fresh),
            ("--shard", self.shard.is_some()),
            ("--jobs", self.jobs.is_some()),
            ("--time-limit", self.time_limit.is_some()),
            ("--logs", self.logs.is_some()),
            ("--format json", self.format == Format::Json),
        ];
        match idle.into_iter().find(|(_, given)| *given && !asked) {
            Some((option, _)) => {
                let help = "add `--every-fault`, `--least-memory`, `--largest`, or a second \
                     `--alloc-conf` or `--addresses`, or leave it out; `--record FILE` records a \
                     single run";
                Err(CliError::input(
                    format!("`{option}` is for many runs, but this command is for one run"),
                    help,
                ))
            }
            None => Ok(asked),
        }
    }

    pub(super) fn run(
        &self,
        launch: Launch<'_>,
        alloc_confs: &[String],
        orders: &[AddressOrder],
    ) -> Result<ExitCode, Failures> {
        if let Some(logs) = &self.logs {
            std::fs::create_dir_all(logs).map_err(CliError::unwritten(logs))?;
        }
        self.interruptible(|stop| {
            let runner = Runner {
                launch,
                logs: self.logs.as_deref(),
                limit: self.limit_or_none(),
                copies: Copies::none(),
                stop,
            };
            self.run_trials(runner, alloc_confs, orders)
        })
    }

    /// Makes runs that end with an interrupt, and with this process.
    pub(super) fn interruptible(
        &self,
        runs: impl FnOnce(&AtomicBool) -> Result<Exit, CliError>,
    ) -> Result<ExitCode, Failures> {
        let interrupt = interrupt::watch(|| terminal::message("interrupted: stopping all runs"))?;
        process::adopt();
        let exit = runs(&interrupt);
        process::end_all_children();
        let exit = exit?;
        Ok(if interrupt.load(Ordering::Relaxed) {
            Exit::Interrupted
        } else {
            exit
        }
        .into())
    }

    pub(super) fn limit_or_none(&self) -> Duration {
        self.limit().unwrap_or(NO_LIMIT)
    }

    /// Whether replays may predict runs.
    pub(super) const fn predicts(&self) -> bool {
        !self.fresh && !self.allow_ooms
    }

    pub(super) fn jobs(&self, most: usize) -> usize {
        self.jobs.map_or(most, NonZeroUsize::get)
    }

    fn limit(&self) -> Option<Duration> {
        self.time_limit.map(|limit| Duration::from_nanos(limit.0))
    }

    /// Makes the first run, and further runs unless they would show nothing.
    fn run_trials(
        &self,
        mut runner: Runner<'_>,
        alloc_confs: &[String],
        orders: &[AddressOrder],
    ) -> Result<Exit, CliError> {
        let machine = runner.launch.machine;
        let own_confs = if alloc_confs.len() > 1 {
            settings::of_shard(alloc_confs, self.shard)
        } else {
            alloc_confs.to_vec()
        };
        let trial = machine.trial(own_confs.first().map(String::as_str));
        let mut identity = self.identity(&runner.launch, alloc_confs);
        if let (Some(shard), [], [_, ..]) = (self.shard, own_confs.as_slice(), alloc_confs) {
            let report = SettingsReport {
                memory: trial.memory.0,
                part: Some(Part {
                    shard,
                    names: alloc_confs.to_vec(),
                }),
                ..SettingsReport::default()
            };
            self.show(&report, Trials::Settings(&report), true, &identity)?;
            return Ok(Exit::Passed);
        }
        let is_recorded = (self.least_memory || own_confs.len() > 1)
            && !self.fresh
            && !self.allow_ooms
            && trial.faults.is_empty();
        let first_run = runner.first(&trial, self.format == Format::Json, is_recorded)?;
        let Some((first_run, ended)) = first_run else {
            return Ok(Exit::Interrupted);
        };
        if self.shard.is_some() {
            let inputs = identity::inputs(runner.launch.command, ended.folder());
            identity.extend(inputs.map_err(RunnerError::Lost)?);
        }
        drop(ended);
        let first = &first_run.observed;
        if let Some(latency) = first.latency_not_reached(machine.injected().1) {
            terminal::message(format_args!(
                "`--latency {latency}` had no effect in the first run: the program did not make \
                 such a call"
            ));
        }
        if let Some(problem) = self.problem(first) {
            first.doubts.iter().for_each(terminal::message);
            terminal::message(problem);
            return Ok(Exit::Failed);
        }
        // Shards that compare settings begin with different ones.
        if alloc_confs.len() < 2 {
            identity.insert(merge::FIRST_RUN.to_owned(), figures(first));
        }
        if !self.fresh {
            runner.copies = Copies::wanted(&runner.launch, first);
        }
        runner.limit = self
            .limit()
            .unwrap_or_else(|| (first_run.took * TIMES_THE_FIRST).max(SHORTEST_LIMIT));
        self.run_further(
            &runner,
            &first_run,
            (trial, &identity),
            (alloc_confs, orders),
        )
    }

    /// Makes the runs after the first one.
    fn run_further(
        &self,
        runner: &Runner<'_>,
        first_run: &FirstRun,
        (trial, identity): (Trial, &Run),
        (alloc_confs, orders): (&[String], &[AddressOrder]),
    ) -> Result<Exit, CliError> {
        let first = &first_run.observed;
        let replays = first_run.recorded.as_ref().map(|program| {
            Replays::new(
                program.as_ref().map_err(|reason| *reason)?,
                &trial,
                first,
                runner.launch.machine.context_overhead(),
            )
        });
        let failed = self
            .every_fault
            .map(|which| (which, self.failed_cases(&runner.launch, &trial, first)));
        let faults = failed
            .as_ref()
            .map(|(which, failed)| (failed, self.plan(*which, failed)));
        let jobs = self.jobs(most_jobs(&runner.launch));
        let bar = bar(faults.map(|(_, plan)| self.runs(first, plan)));
        let is_told = Once::new();
        let run = |trial: &Trial| -> Result<_, RunnerError> {
            let run = runner.run(trial)?;
            let port = run.as_ref().and_then(|run| run.port);
            if let Some(port) = port.filter(|port| jobs > 1 && first.port == Some(*port)) {
                is_told.call_once(|| one_after_another(port));
            }
            Ok(run)
        };
        let further = FurtherRuns {
            program: TrialProgram {
                run: &run,
                trial,
                first,
                predict: &|trial| replays.as_ref()?.as_ref().ok()?.predict(trial),
                unpredicted: replays
                    .as_ref()
                    .and_then(|replays| replays.as_ref().err().copied()),
                shard: self.shard,
                jobs,
                progress: &|| {
                    bar.inc(1);
                    // Some searches find out that they need more runs.
                    if bar.length().is_some_and(|length| length < bar.position()) {
                        bar.inc_length(1);
                    }
                },
            },
            runner,
            bar: &bar,
            identity,
        };
        if let Some((failed, plan)) = faults {
            self.fail_each(&further, failed, plan)
        } else if alloc_confs.len() > 1 || orders.len() > 1 {
            self.compare_settings(&further, alloc_confs, orders)
        } else {
            self.search_least(&further)
        }
    }

    fn search(&self, machine: &Machine) -> Search {
        Search {
            exact: self.exact,
            allow_ooms: self.allow_ooms,
            confirmed: usize::MAX,
            context_overhead: machine.context_overhead(),
        }
    }

    /// The cases of `--every-fault` that the program did not survive in earlier runs.
    fn failed_cases(&self, launch: &Launch<'_>, trial: &Trial, first: &Observed) -> FailedCases {
        FailedCases::read(
            &shown(launch.command),
            &baseline::settings(
                launch.setup.torch_version(),
                &launch.machine.to_string(),
                trial.alloc_conf.as_deref(),
            ),
            self.expect,
            first,
        )
    }

    fn plan<'a>(&self, which: Which, failed: &'a FailedCases) -> FaultPlan<'a> {
        let plan = FaultPlan {
            which,
            alone: self.alone,
            only: None,
        };
        if self.last_failed {
            failed.plan(plan)
        } else {
            plan
        }
    }

    /// The number of runs of a plan.
    fn runs(&self, first: &Observed, plan: FaultPlan<'_>) -> u64 {
        faults::runs(first, plan, self.shard) as u64
    }

    fn fail_each(
        &self,
        further: &FurtherRuns<'_>,
        failed: &FailedCases,
        plan: FaultPlan<'_>,
    ) -> Result<Exit, CliError> {
        let program = &further.program;
        let mut report = faults::every_fault(program, plan)?;
        if let Some(plan) = failed.plan_if_moved(plan, &report) {
            further.bar.inc_length(self.runs(program.first, plan));
            report = faults::every_fault(program, plan)?;
        }
        further.end();
        failed.update(&report);
        let trials = Trials::Faults(&report, self.expect);
        self.show(&report, trials, report.cases.is_empty(), further.identity)?;
        let is_fine = |case: &faults::FaultCase| {
            self.expect
                .is_none_or(|expectation| case.meets(expectation))
        };
        Ok(if !report.is_untested() && report.injected().all(is_fine) {
            Exit::Passed
        } else {
            Exit::Failed
        })
    }

    fn compare_settings(
        &self,
        further: &FurtherRuns<'_>,
        alloc_confs: &[String],
        orders: &[AddressOrder],
    ) -> Result<Exit, CliError> {
        let of_environment = [String::new()];
        let settings = if alloc_confs.is_empty() {
            &of_environment
        } else {
            alloc_confs
        };
        let orders = if orders.len() > 1 { orders } else { &[] };
        let search = self
            .least_memory
            .then(|| self.search(further.runner.launch.machine));
        let report = settings::compare(&further.program, settings, search, orders)?;
        further.end();
        let (trials, is_empty) = (Trials::Settings(&report), report.rows.is_empty());
        self.show(&report, trials, is_empty, further.identity)?;
        Ok(if report.best.is_some() {
            Exit::Passed
        } else {
            Exit::Failed
        })
    }

    fn search_least(&self, further: &FurtherRuns<'_>) -> Result<Exit, CliError> {
        let search = self.search(further.runner.launch.machine);
        let report = least::least(&further.program, search)?;
        further.end();
        match report {
            Some(report) => {
                let (trials, is_empty) = (Trials::Least(&report), report.orders.is_empty());
                self.show(&report, trials, is_empty, further.identity)?;
            }
            None => further
                .program
                .first
                .doubts
                .iter()
                .for_each(terminal::message),
        }
        Ok(Exit::Passed)
    }

    fn problem(&self, first: &Observed) -> Option<String> {
        if self.every_fault.is_none() && !self.least_memory {
            return None;
        }
        let ending = match first.ending {
            TrialEnd::By(end) if end.exit_code() == 0 => None,
            TrialEnd::By(end) => Some(format!("ends with exit code {}", end.exit_code())),
            TrialEnd::Hang => Some("exceeds its time limit".to_owned()),
        };
        match ending {
            Some(ending) if self.every_fault.is_some() => Some(format!(
                "The program {ending} without injected failures. Correct that first."
            )),
            Some(ending) => Some(format!(
                "The program {ending} with all of its memory. Give more `--memory`, or correct the \
                 program."
            )),
            None if first.attempts.is_empty()
                && (self.least_memory || first.calls_of_libraries.is_empty()) =>
            {
                Some(
                    "The program allocated no device memory, so there is nothing to test."
                        .to_owned(),
                )
            }
            None if self.least_memory && !self.allow_ooms && first.unreported.is_some() => first
                .unreported
                .as_ref()
                .map(|unreported| format!("The least memory is unknown: {unreported}.")),
            None if !self.least_memory || self.allow_ooms => None,
            None => match first.ooms {
                Some(0) => None,
                Some(ooms) => Some(format!(
                    "The program had {} with all of its memory. Give more `--memory`, or \
                     `--allow-ooms`.",
                    count(ooms, "out-of-memory error")
                )),
                None => Some(
                    "The least memory is unknown: a library of the program does not report \
                     out-of-memory errors that the program survives. With `--allow-ooms`, the exit \
                     code decides."
                        .to_owned(),
                ),
            },
        }
    }

    /// What all shards of this command have in common before its first run.
    fn identity(&self, launch: &Launch<'_>, alloc_confs: &[String]) -> Run {
        if self.shard.is_none() {
            return Run::new();
        }
        let of_value = (alloc_confs
            .iter()
            .map(|conf| format!("--alloc-conf={conf}")))
        .chain((self.every_fault).map(|which| format!("--every-fault={which}")));
        let flags = [
            (self.alone, "--alone"),
            (self.least_memory, "--least-memory"),
            (self.exact, "--exact"),
            (self.allow_ooms, "--allow-ooms"),
        ];
        let given = flags.iter().filter(|(is_given, _)| *is_given);
        let options: Vec<String> = of_value
            .chain(given.map(|(_, name)| (*name).to_owned()))
            .collect();
        let torch = launch.setup.torch_version();
        let mut run = Run::from([
            ("the version of harness".to_owned(), built::identity()),
            ("the command".to_owned(), shown(launch.command)),
            ("the options".to_owned(), options.join(" ")),
            ("the machine".to_owned(), launch.machine.to_string()),
            ("torch".to_owned(), torch.to_owned()),
        ]);
        run.extend(identity::variables(
            torch,
            !alloc_confs.is_empty(),
            std::env::vars_os(),
        ));
        run
    }

    fn show(
        &self,
        report: &impl Serialize,
        trials: Trials<'_>,
        is_empty: bool,
        run: &Run,
    ) -> Result<(), CliError> {
        if let Some(shard) = self.shard.filter(|_| is_empty) {
            terminal::message(format_args!("shard {shard} contains none of the cases"));
            return if self.format == Format::Json {
                terminal::print_json(&sealed(report, run)?)
            } else {
                Ok(())
            };
        }
        if self.shard.is_some() && self.format == Format::Json {
            let printed = terminal::print_json(&sealed(report, run)?);
            return printed.and(self.save(trials));
        }
        self.print(report, trials)
    }

    /// Prints a report, and writes the file that was asked for.
    pub(super) fn print(
        &self,
        report: &impl Serialize,
        trials: Trials<'_>,
    ) -> Result<(), CliError> {
        let printed = self.format.print(report, || {
            trials::text(trials, terminal::style(), terminal::width_of_output())
        });
        printed.and(self.save(trials))
    }

    fn save(&self, trials: Trials<'_>) -> Result<(), CliError> {
        let Some(path) = &self.report else {
            return Ok(());
        };
        let svg = trials::picture(trials);
        let picture = svg.map_or(Ok(None), |svg| terminal::save_picture(path, &svg))?;
        terminal::save(path, trials::markdown(trials, picture.as_deref()))
    }
}

/// The figures of a run that all shards repeat.
fn figures(first: &Observed) -> String {
    let attempts = first.attempts.iter();
    let sizes: Vec<u64> = attempts.map(|attempt| attempt.size.0).collect();
    let allocated = first
        .peak_allocated
        .map_or_else(|| "unknown".to_owned(), |peak| peak.to_string());
    format!(
        "reserved {}, allocated {allocated}, attempts {sizes:?}",
        first.peak_reserved
    )
}

/// The document of a shard.
fn sealed(report: &impl Serialize, run: &Run) -> Result<serde_json::Value, CliError> {
    merge::document(report, terminal::JSON_VERSION, run)
        .map_err(|error| CliError::internal(error.to_string(), "report this with the command"))
}
