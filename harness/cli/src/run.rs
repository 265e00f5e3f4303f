mod choose;
mod faults;
mod help;
mod progress;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use harness_allocator::device::DeviceError;
use harness_allocator::units::Bytes;
use harness_base::files::{self, DocumentKind};
use harness_base::shard::Shard;
use harness_devices::{DeviceChoice, DeviceSource};
use harness_record::Records;
use harness_report::store::{self, Journal};
use harness_report::text::{self, Detail};
use harness_report::{Report, VerdictCounts, github, json, junit};
use harness_run::session::{Plan, Selection, Sinks, SupervisedEnd, supervise};
use harness_scenario::Scenario;

use self::faults::{FaultOptions, Shown};
use self::help::{ALLOC_CONF_HELP, LAST_FAILED_HELP, SNAPSHOT_HELP, TRACE_HELP, allocator_help};
use self::progress::{Log, Observer, Progress};
use super::device::DeviceOptions;
use super::error::{CliError, Failures};
use super::exit::{self, Exit};
use super::recorded::{Explained, Recordings};
use super::{
    Format, arguments, ci::Ci, interrupt, last_failed::LastFailed, program, terminal,
    timelines::Timelines, what_if::WhatIf,
};

const EXAMPLES: &str = "Examples:
  harness run scenarios
  harness run scenarios/oom_retry.yaml --allocator caching,direct
  harness run scenarios --device sim --no-report
  harness run my.yaml --alloc-conf max_split_size_mb:512 --alloc-conf expandable_segments:True
  harness run my.yaml --allocator 'caching(max_split_size_mb:512)'
  harness run scenarios --device cuda:1 --repeat 10 --report reports/h200
  harness run scenarios --shard 1/2                 # on the first of two machines
  harness run scenarios --filter 'retry caching' --fail-fast
  harness run memory_snapshot.pickle --alloc-conf expandable_segments:True
  harness run my.yaml --try-settings --least-memory
  harness run my.yaml --allocator caching --explain
  harness run my.yaml --allocator caching --snapshot oom.pickle
  harness run scenarios --last-failed               # only the runs that failed last time
  harness run my.yaml --allocator caching --fail cudaMalloc:3  # the third call fails
  harness run scenarios --every-fault               # one run per device call, which fails
  harness run my.yaml --trace timeline.json          # for https://ui.perfetto.dev
  harness run my.yaml --format json | jq '.runs[].verdict'";

const PROGRESS: &str = "{bar:30} {pos}/{len} {wide_msg}";

/// Run scenarios on a GPU, or on the simulated device if there is no GPU.
///
/// All scenarios are checked before the first one runs. Ctrl-C stops after the current operation,
/// and the report contains the finished steps. A second Ctrl-C ends the program immediately. If the
/// program is killed, `harness report render FOLDER` makes a report of the finished steps.
///
/// A driver that does not answer within 60 s ends the command with exit code 3. The variable
/// HARNESS_DRIVER_LIMIT sets another limit, as in `90s`.
#[derive(Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", exit::explained()))]
pub(super) struct Run {
    /// Scenario files or folders. Of a folder, the `*.yaml` files run, without subfolders. A memory
    /// snapshot of PyTorch or an allocation trace runs as a scenario with one step.
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    #[command(flatten)]
    device: DeviceOptions,
    /// Give each scenario this much memory instead of the amount in its `needs:`, as in `2GiB`.
    /// Without `--device-profile`, the simulated device grows to this size if necessary.
    #[arg(long, value_name = "SIZE", value_parser = arguments::memory)]
    memory: Option<Bytes>,
    /// Set a parameter of the scenarios' matrix to this value instead of the listed ones, as in
    /// `batch=96`; may be repeated.
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = setting)]
    settings: Vec<(String, String)>,
    /// Run only scenarios with one of these tags; may be repeated or contain commas.
    #[arg(long = "tag", value_name = "TAG", value_delimiter = ',')]
    tags: Vec<String>,
    /// Run only scenarios without these tags; may be repeated or contain commas.
    #[arg(long = "without-tag", value_name = "TAG", value_delimiter = ',')]
    without_tags: Vec<String>,
    /// Run only these allocators of those that a scenario lists; may be repeated or contain commas.
    #[arg(long = "allocator", value_name = "NAME", long_help = allocator_help())]
    allocators: Vec<String>,
    /// Also run PyTorch's allocator with these settings, in every scenario that lists it; may be
    /// repeated to compare settings side by side.
    #[arg(long, value_name = "CONF", long_help = ALLOC_CONF_HELP)]
    alloc_conf: Vec<String>,
    /// Try settings of PyTorch's allocator on the simulated device, and list those that make each
    /// scenario pass, above the results.
    #[arg(long)]
    try_settings: bool,
    /// Search on the simulated device for the least memory in which each scenario passes, and print
    /// it above the results. The search assumes that more memory never hurts, and tries some larger
    /// amounts to check this.
    #[arg(long)]
    least_memory: bool,
    /// Run only SCENARIO::ALLOCATOR pairs that contain all of these words; of several filters, one
    /// must match.
    #[arg(long, value_name = "WORDS")]
    filter: Vec<String>,
    /// Stop after the first failed run.
    #[arg(long)]
    fail_fast: bool,
    /// Run only the runs that failed last time, or all runs if none failed.
    #[arg(long, long_help = LAST_FAILED_HELP)]
    last_failed: bool,
    /// The seed of all random choices, instead of the scenarios' own seeds.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Run only part I of N of the scenarios, as in `1/2`. The names of the scenarios determine the
    /// parts.
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
    /// Write a PyTorch memory snapshot of each run: a file for one run, a folder with one file per
    /// run for several.
    #[arg(long, value_name = "OUT", long_help = SNAPSHOT_HELP)]
    snapshot: Option<PathBuf>,
    /// For each run that failed at a refused request, print where every byte of the device was, as
    /// `harness explain` does. With `=all`, print this for the end of every run.
    #[arg(
        long,
        value_name = "RUNS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "failed",
    )]
    explain: Option<Explained>,
    /// Write a timeline of the runs for https://ui.perfetto.dev: steps, driver calls, stream work,
    /// and memory.
    #[arg(long, value_name = "OUT.json", long_help = TRACE_HELP)]
    trace: Option<PathBuf>,
    /// The number of repetitions [default: 5 on a GPU; 1 on the simulated device, which always
    /// gives the same figures].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    repeat: Option<u32>,
    /// Write the report into this folder [default: a new numbered folder in reports/runs].
    #[arg(long, value_name = "DIR", conflicts_with = "no_report")]
    report: Option<PathBuf>,
    /// Save no report.
    #[arg(long)]
    no_report: bool,
    /// The output format. `json` prints the records of the runs, and nothing else.
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
    /// Also print the counters at the end of each run, in the layout of
    /// `torch.cuda.memory_summary()`. With `--format json`, each run gets `memory_stats`, a flat
    /// object with the keys of `torch.cuda.memory_stats()`.
    #[arg(long)]
    memory_summary: bool,
    /// Allow a scenario to use more of a shared GPU than usual.
    #[arg(long)]
    allow_full_device: bool,
    /// Do not check every operation. Use this to measure speed, not to test an allocator.
    #[arg(long)]
    skip_checks: bool,
    /// Print text only if a run fails, and show no progress.
    #[arg(long, short)]
    quiet: bool,
    /// Also print times, recoveries and requests that failed as expected. The report has them
    /// without this option.
    #[arg(long, short, conflicts_with = "quiet")]
    verbose: bool,
    #[command(flatten)]
    faults: FaultOptions,
    #[command(flatten)]
    ci: Ci,
}

/// Parses `NAME=VALUE`.
fn setting(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !value.is_empty() => {
            Ok((name.trim().to_owned(), value.trim().to_owned()))
        }
        _ => Err("expected a parameter and its value, as in `batch=96`".to_owned()),
    }
}

impl Run {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        let choice = self.device.choice()?;
        let (scenarios, selection) = self.chosen()?;
        self.check_report_folder()?;
        let bar = terminal::progress(!self.quiet, PROGRESS, Some(0));
        let interrupt = interrupt::watch_with(&bar, "operation")?;
        let source = self.device_source(choice)?;
        self.explain_choices(&scenarios, &selection, choice, &source);
        let plan = self.plan(scenarios, selection, &source);
        if let Some(chosen) = self.faults.every_fault() {
            let show = Shown {
                bar: &bar,
                format: self.format,
                quiet: self.quiet,
            };
            return self
                .faults
                .run_every_fault(chosen, &plan, &source, &show, &interrupt);
        }
        let (recordings, snapshots) =
            Recordings::new(&plan, self.snapshot.as_deref(), self.explain)?.unzip();
        let (timelines, sender) = self
            .trace
            .as_deref()
            .map(Timelines::new)
            .transpose()?
            .unzip();
        let sinks = Sinks {
            snapshots,
            timelines: sender,
        };
        let what_if = self.what_if(&plan, &source)?;
        bar.set_length(plan.arms().count() as u64);
        let mut observer = Observer {
            progress: Progress::new(&bar, !self.quiet && self.format == Format::Text),
            recordings,
            log: Log::new(self.journal()),
        };
        let end = supervise(plan, source, Arc::clone(&interrupt), sinks, |event| {
            observer.add(event);
        });
        bar.finish_and_clear();
        let is_stuck = match end {
            SupervisedEnd::Done => false,
            SupervisedEnd::Device(error) => return device_failed(error, observer.log, &interrupt),
            SupervisedEnd::Stuck(overrun) => {
                terminal::message(format_args!(
                    "gave up: {}: {}; no further scenario is run",
                    overrun.phase,
                    overrun.seen_stuck()
                ));
                true
            }
        };
        let exit = self.conclude(observer, &what_if, is_stuck, &interrupt)?;
        timelines.map_or(Ok(()), Timelines::finish)?;
        // The user may have interrupted during the writing.
        Ok(if interrupt.load(Ordering::Relaxed) {
            Exit::Interrupted
        } else {
            exit
        })
    }

    fn conclude(
        &self,
        observer: Observer,
        what_if: &str,
        is_stuck: bool,
        interrupt: &AtomicBool,
    ) -> Result<Exit, Failures> {
        let Observer {
            recordings, log, ..
        } = observer;
        let Log {
            collector,
            journal,
            in_use,
        } = log;
        let records = collector.into_records();
        let report = Report::new(&records);
        let exit = if is_stuck {
            Exit::Failed
        } else {
            exit_of(report.counts)
        };
        let exit = if interrupt.load(Ordering::Relaxed) {
            Exit::Interrupted
        } else {
            exit
        };
        self.print_extra(what_if)?;
        self.print(&report, exit)?;
        let explained = recordings.map_or(Ok(String::new()), Recordings::finish);
        self.print_extra(explained.as_deref().unwrap_or_default())?;
        self.ci.write(
            |limit| github::summary(&report, limit),
            || junit::of_runs(&report),
        )?;
        if let Some(error) = in_use {
            return Err(CliError::from(error).into());
        }
        self.save(journal, &records)?;
        self.remember_failures(&records)?;
        explained?;
        Ok(exit)
    }

    /// Prints a text that is not part of the report. With JSON on standard output, it goes to
    /// standard error.
    fn print_extra(&self, text: &str) -> Result<(), CliError> {
        match self.format {
            _ if text.is_empty() => {}
            Format::Json => terminal::message(text.trim_end()),
            Format::Text => terminal::print(&format!("{text}\n"))?,
        }
        Ok(())
    }

    fn what_if(&self, plan: &Plan, source: &DeviceSource) -> Result<String, CliError> {
        let what_if = WhatIf::new(plan, source);
        let show = |runs| terminal::progress(!self.quiet, PROGRESS, Some(runs));
        let mut text = String::new();
        if self.try_settings {
            let bar = show(what_if.settings_to_try());
            text += &what_if.try_settings(&bar)?;
            bar.finish_and_clear();
        }
        if self.least_memory {
            let bar = show(
                plan.scenarios
                    .iter()
                    .map(|scenario| plan.selection.of(scenario).len() as u64)
                    .sum(),
            );
            text += &what_if.least(&bar)?;
            bar.finish_and_clear();
        }
        Ok(text)
    }

    fn journal(&self) -> Option<Journal> {
        match &self.report {
            _ if self.no_report => None,
            Some(folder) => Some(Journal::in_folder(folder.clone())),
            None => Some(Journal::in_new_folder(PathBuf::from(store::DEFAULT_ROOT))),
        }
    }

    /// Saves the failed runs for `--last-failed`, unless `--no-report` is given.
    fn remember_failures(&self, records: &Records) -> Result<(), CliError> {
        if self.no_report {
            return Ok(());
        }
        let mut failed = LastFailed::read().unwrap_or_default();
        failed.update(&records.runs);
        failed.write()
    }

    fn check_report_folder(&self) -> Result<(), CliError> {
        match &self.report {
            _ if self.no_report => Ok(()),
            Some(folder) => Ok(store::check_folder(folder)?),
            None => Ok(files::check_writable(
                Path::new(store::DEFAULT_ROOT),
                DocumentKind::RECORDS,
            )?),
        }
    }

    fn device_source(&self, choice: DeviceChoice) -> Result<DeviceSource, CliError> {
        let source = self.device.source(choice, self.allow_full_device)?;
        Ok(match self.memory {
            Some(memory) if !self.device.has_profile() => source.with_room_for(memory),
            _ => source,
        })
    }

    fn plan(&self, scenarios: Vec<Scenario>, selection: Selection, source: &DeviceSource) -> Plan {
        Plan {
            scenarios,
            selection,
            seed: self.seed,
            memory: self.memory,
            repetitions: self.repeat.unwrap_or_else(|| source.default_repetitions()),
            audit: !self.skip_checks,
            fail_fast: self.fail_fast,
            program: program::name(),
        }
    }

    fn print(&self, report: &Report<'_>, exit: Exit) -> Result<(), CliError> {
        match self.format {
            Format::Json => terminal::print_document(&json::render(report, self.memory_summary)),
            Format::Text if self.quiet && exit == Exit::Passed => Ok(()),
            Format::Text => {
                let detail = if self.verbose {
                    Detail::Full
                } else {
                    Detail::Brief
                };
                terminal::print(&text::render(
                    report,
                    detail,
                    terminal::style(),
                    terminal::width_of_output(),
                ))?;
                if self.memory_summary {
                    terminal::print(&format!("{}\n", text::memory_summaries(report)))
                } else {
                    Ok(())
                }
            }
        }
    }

    fn save(&self, journal: Option<Journal>, records: &Records) -> Result<(), CliError> {
        let folder = match (journal, &self.report) {
            (Some(journal), _) => journal.finish(records)?,
            _ if self.no_report => return Ok(()),
            // Writing the events failed, and a message said so. Writing the report may succeed.
            (None, Some(folder)) => store::save_into(folder, records).map(|()| folder.clone())?,
            (None, None) => store::save_new(Path::new(store::DEFAULT_ROOT), records)?,
        };
        if self.quiet {
            Ok(())
        } else {
            self.print_extra(&format!("report: {}", folder.join(store::REPORT).display()))
        }
    }
}

/// Discards the records. A device that fails during an interrupt is no error.
fn device_failed(error: DeviceError, log: Log, interrupt: &AtomicBool) -> Result<Exit, Failures> {
    log.journal
        .map_or(Ok(()), Journal::discard)
        .map_err(CliError::from)?;
    if interrupt.load(Ordering::Relaxed) {
        Ok(Exit::Interrupted)
    } else {
        Err(CliError::from(error).into())
    }
}

const fn exit_of(counts: VerdictCounts) -> Exit {
    match counts {
        VerdictCounts { failed: 1.., .. } => Exit::Failed,
        VerdictCounts {
            interrupted: 1.., ..
        } => Exit::Interrupted,
        VerdictCounts { contended: 1.., .. }
        | VerdictCounts {
            passed: 0,
            insufficient: 1..,
            ..
        } => Exit::Device,
        VerdictCounts { .. } => Exit::Passed,
    }
}
