mod faults;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use harness_allocator::allocator::{AllocatorKind, AllocatorSpec, SpecError, caching::Config};
use harness_allocator::units::Bytes;
use harness_base::files::{self, Document};
use harness_base::{printable::printable, shard::Shard, shell::quoted};
use harness_devices::{DeviceChoice, DeviceSource};
use harness_language::arms;
use harness_record::{Collector, Event, Records};
use harness_report::store::{self, Journal};
use harness_report::text::{self, Detail};
use harness_report::{Counts, Report, github, json, junit};
use harness_run::session::{End, Plan, Selection, Sinks, has_pytorchs, listed_as, supervise};
use harness_scenario::{Scenario, Settings, choices};
use indicatif::ProgressBar;

use self::faults::{FaultOptions, Shown};
use super::device::{self, DeviceOptions};
use super::error::{CliError, Failures};
use super::exit::{self, Exit};
use super::recorded::{Explained, Recordings};
use super::{
    Format, arguments, ci::Ci, import, interrupt, last_failed::LastFailed, program, terminal,
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
  harness run my.yaml --allocator caching --snapshot oom.pickle     # then: harness explain oom.pickle --format html --out oom.html
  harness run scenarios --last-failed               # only the runs that failed last time
  harness run my.yaml --allocator caching --fail cudaMalloc:3     # the third call of cudaMalloc fails
  harness run scenarios --every-fault               # one run per device call, in which that call fails
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
    #[arg(long, value_name = "RUNS", num_args = 0..=1, require_equals = true, default_missing_value = "failed")]
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
    fn settings(&self) -> Result<Settings, CliError> {
        let mut settings = Settings::new();
        for (name, value) in &self.settings {
            if settings.insert(name.clone(), value.clone()).is_some() {
                return Err(CliError::input(
                    format!("`{name}` is set twice"),
                    "give each parameter one value",
                ));
            }
        }
        Ok(settings)
    }

    /// Rejects settings that match no scenario: they are typing errors.
    fn check_settings(&self, scenarios: &[Scenario]) -> Result<(), CliError> {
        let known: BTreeSet<&str> = scenarios
            .iter()
            .flat_map(|scenario| &scenario.parameters)
            .map(|(name, _)| name.as_str())
            .collect();
        match self
            .settings
            .iter()
            .find(|(name, _)| !known.contains(name.as_str()))
        {
            None => Ok(()),
            Some((name, _)) => Err(CliError::input(
                format!("no scenario has a parameter `{name}`"),
                choices(name, "parameters", known),
            )),
        }
    }

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
        let (mut recordings, snapshots) =
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
        let mut log = Log::new(self.journal());
        let prints_runs = !self.quiet && self.format == Format::Text && io::stderr().is_terminal();
        let progress = Progress {
            bar: bar.clone(),
            prints_runs,
            began: Instant::now(),
        };
        let end = supervise(plan, source, Arc::clone(&interrupt), sinks, |event| {
            progress.advance(&event);
            if let (Event::RunEnded(run), Some(recordings)) = (&event, &mut recordings) {
                recordings.run_ended(run);
            }
            log.add(event);
        });
        bar.finish_and_clear();
        let is_stuck = match end {
            End::Done => false,
            End::Device(error) => {
                log.journal
                    .map_or(Ok(()), Journal::discard)
                    .map_err(CliError::from)?;
                return if interrupt.load(Ordering::Relaxed) {
                    Ok(Exit::Interrupted)
                } else {
                    Err(CliError::from(error).into())
                };
            }
            End::Stuck(overrun) => {
                terminal::message(format_args!(
                    "gave up: {}: {}; no further scenario is run",
                    overrun.phase,
                    overrun.seen_stuck()
                ));
                true
            }
        };
        let exit = self.conclude(log, recordings, &what_if, is_stuck, &interrupt)?;
        timelines.map_or(Ok(()), Timelines::finish)?;
        // The user may have interrupted during the writing.
        Ok(if interrupt.load(Ordering::Relaxed) {
            Exit::Interrupted
        } else {
            exit
        })
    }

    fn chosen(&self) -> Result<(Vec<Scenario>, Selection), Failures> {
        self.paths
            .iter()
            .try_for_each(|path| refuse_records(path))?;
        let mut scenarios =
            import::load_with_programs(&self.paths, &self.settings()?, self.memory)?;
        self.check_settings(&scenarios)?;
        scenarios.retain(|scenario| {
            self.tags.is_empty() || scenario.tags.iter().any(|tag| self.tags.contains(tag))
        });
        if scenarios.is_empty() && !self.tags.is_empty() {
            let message = format!("no scenario has the tag {}", self.tags.join(" or "));
            return Err(CliError::input(
                message,
                "`harness list --format json` shows the tags of each scenario",
            )
            .into());
        }
        scenarios.retain(|scenario| {
            !scenario
                .tags
                .iter()
                .any(|tag| self.without_tags.contains(tag))
        });
        if scenarios.is_empty() {
            let message = format!(
                "every scenario has one of the tags {}",
                self.without_tags.join(", ")
            );
            return Err(CliError::input(message, "leave out one of `--without-tag`").into());
        }
        // This comes before the shard, because an allocator may be listed only by scenarios of
        // another shard.
        let mut selection = self.selection(&scenarios)?;
        if let Some(shard) = self.shard {
            scenarios.retain(|scenario| shard.has(&scenario.name));
        }
        selection.pairs = self.pairs(&scenarios, &selection)?;
        if selection.pairs.is_some() {
            scenarios.retain(|scenario| !selection.of(scenario).is_empty());
        }
        self.faults.add_to(&mut scenarios)?;
        Ok((scenarios, selection))
    }

    fn conclude(
        &self,
        log: Log,
        recordings: Option<Recordings>,
        what_if: &str,
        is_stuck: bool,
        interrupt: &AtomicBool,
    ) -> Result<Exit, Failures> {
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

    /// The configurations that the options select. Each allocator must be listed by a scenario, be
    /// `caching` with settings, or be a library.
    fn selection(&self, scenarios: &[Scenario]) -> Result<Selection, CliError> {
        let names: Vec<&str> = self
            .allocators
            .iter()
            .flat_map(|list| split_names(list))
            .collect();
        let mut selection = Selection::default();
        for name in &names {
            if scenarios.iter().any(|scenario| {
                scenario
                    .allocators
                    .iter()
                    .any(|arm| arm.to_string() == *name)
            }) {
                selection
                    .only
                    .get_or_insert_default()
                    .push((*name).to_owned());
            } else if name.contains('(') {
                selection.only.get_or_insert_default();
                let arm: AllocatorSpec = name.parse().map_err(|error| spec_error(name, error))?;
                check_library(&arm)?;
                selection.added.push(arm);
            } else {
                return Err(not_listed(name, scenarios));
            }
        }
        for conf in &self.alloc_conf {
            let config = Config::parse(conf).map_err(|error| CliError::conf(&error, conf))?;
            selection.added.push(AllocatorSpec::caching(config));
        }
        if selection.added.iter().any(AllocatorSpec::is_pytorch)
            && !scenarios.iter().any(has_pytorchs)
        {
            let help = format!(
                "{}; add `caching` to the `allocators:` of a scenario, or leave out the settings",
                lists(scenarios)
            );
            return Err(CliError::input(
                "the settings are for PyTorch's allocator, but no given scenario lists it",
                help,
            ));
        }
        Ok(selection)
    }

    /// The pairs of scenario and allocator that match the filters and `--last-failed`; `None` for
    /// all pairs.
    fn pairs(
        &self,
        scenarios: &[Scenario],
        selection: &Selection,
    ) -> Result<Option<BTreeSet<(String, String)>>, CliError> {
        let failed = if self.last_failed {
            Some(LastFailed::read()?)
        } else {
            None
        };
        if failed.as_ref().is_some_and(LastFailed::is_empty) && !self.quiet {
            terminal::message("no run failed last time, so all runs are started");
        }
        let failed = failed.filter(|failed| !failed.is_empty());
        if failed.is_none() && self.filter.is_empty() {
            return Ok(None);
        }
        let all = scenarios.iter().flat_map(|scenario| {
            selection
                .of(scenario)
                .into_iter()
                .map(|arm| (scenario.id(), arm.to_string()))
        });
        let all: BTreeSet<(String, String)> = all.collect();
        let pairs: BTreeSet<(String, String)> = all
            .iter()
            .filter(|pair| self.has_words(pair))
            .cloned()
            .collect();
        if pairs.is_empty() && !all.is_empty() {
            let help = "the name of a run is SCENARIO::ALLOCATOR, as in `oom_retry::caching`; \
                 `harness list` lists the scenarios";
            return Err(CliError::input(
                format!("no run matches `{}`", self.filter.join("` or `")),
                help,
            ));
        }
        let Some(failed) = failed else {
            return Ok(Some(pairs));
        };
        let pairs: BTreeSet<(String, String)> =
            pairs.into_iter().filter(|pair| failed.has(pair)).collect();
        if pairs.is_empty() && !self.quiet {
            terminal::message("none of these runs failed last time");
        }
        Ok(Some(pairs))
    }

    /// Returns whether a run's name contains all words of one of the filters.
    fn has_words(&self, (scenario, allocator): &(String, String)) -> bool {
        let name = format!("{scenario}::{allocator}");
        self.filter.is_empty()
            || self
                .filter
                .iter()
                .any(|words| words.split_whitespace().all(|word| name.contains(word)))
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
                Document::RECORDS,
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

    /// Prints decisions that the user may not expect.
    fn explain_choices(
        &self,
        scenarios: &[Scenario],
        selection: &Selection,
        choice: DeviceChoice,
        source: &DeviceSource,
    ) {
        if self.quiet {
            return;
        }
        device::explain_choice(choice, source);
        if let (Some(shard), []) = (self.shard, scenarios) {
            terminal::message(format_args!(
                "part {shard} contains none of these scenarios"
            ));
        }
        self.explain_added(scenarios, &selection.added);
        // Each setting without effect is named once.
        let arms = scenarios
            .iter()
            .flat_map(|scenario| selection.of(scenario))
            .chain(&selection.added);
        let idle: BTreeSet<&str> = arms
            .filter_map(AllocatorSpec::effective)
            .flat_map(|config| config.idle_settings())
            .collect();
        idle.iter().for_each(terminal::message);
        for scenario in scenarios {
            if selection.of(scenario).is_empty() {
                terminal::message(format_args!(
                    "skipping {}: it lists only {}",
                    scenario.path.display(),
                    names(&scenario.allocators)
                ));
            }
        }
    }

    /// Names settings of `--alloc-conf` that equal another configuration.
    fn explain_added(&self, scenarios: &[Scenario], added: &[AllocatorSpec]) {
        // The configurations of `--alloc-conf` come last.
        let (others, of_conf) = added.split_at(added.len().saturating_sub(self.alloc_conf.len()));
        for (index, (conf, arm)) in self.alloc_conf.iter().zip(of_conf).enumerate() {
            let earlier = others
                .iter()
                .chain(&of_conf[..index])
                .find(|earlier| earlier.is_equivalent_to(arm));
            if let Some(same) = identical_to(arm, scenarios, earlier) {
                let conf = if conf.is_empty() { "''" } else { conf };
                terminal::message(format_args!(
                    "skipping --alloc-conf {conf}: identical to {same}"
                ));
            }
        }
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

/// The configurations that are identical to this one: an earlier option, or configurations of
/// scenarios.
fn identical_to(
    arm: &AllocatorSpec,
    scenarios: &[Scenario],
    earlier: Option<&AllocatorSpec>,
) -> Option<String> {
    if let Some(earlier) = earlier {
        return Some(format!("the earlier option `{earlier}`"));
    }
    let mut listed: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for scenario in scenarios {
        if let Some(same) = listed_as(scenario, arm) {
            listed
                .entry(same.to_string())
                .or_default()
                .push(&scenario.name);
        }
    }
    let places: Vec<String> = listed
        .iter()
        .map(|(name, scenarios)| match scenarios.as_slice() {
            [only] => format!("`{name}` of {only}"),
            several => format!("`{name}` of {} scenarios", several.len()),
        })
        .collect();
    (!places.is_empty()).then(|| places.join(", "))
}

/// Shows a progress bar, and a line for each finished run with the time since the start.
struct Progress {
    bar: ProgressBar,
    prints_runs: bool,
    began: Instant,
}

impl Progress {
    fn advance(&self, event: &Event) {
        match event {
            Event::RunStarted(run) => self.bar.set_message(
                printable(&format!("{} with {}", run.scenario.name, run.allocator)).into_owned(),
            ),
            Event::RunEnded(run) => {
                self.bar.inc(1);
                if self.prints_runs {
                    let elapsed = format!("{:>7} ", elapsed(self.began.elapsed()));
                    let room = terminal::width_of_messages()
                        .map(|width| width.saturating_sub(elapsed.len()));
                    let line = text::run_line(run, terminal::style_of_messages(), room);
                    self.bar
                        .suspend(|| terminal::message(format_args!("{elapsed}{line}")));
                }
            }
            Event::Started { .. } | Event::StepEnded(_) => {}
        }
    }
}

fn elapsed(time: Duration) -> String {
    match time.as_secs() {
        0..10 => format!("{:.2}s", time.as_secs_f64()),
        10..600 => format!("{}s", time.as_secs()),
        seconds => format!("{}m{:02}s", seconds / 60, seconds % 60),
    }
}

/// Collects the events, and writes them to the journal.
struct Log {
    collector: Collector,
    journal: Option<Journal>,
    /// The error if another process writes into the same folder. Nothing is saved then.
    in_use: Option<store::StoreError>,
}

impl Log {
    fn new(journal: Option<Journal>) -> Self {
        Self {
            collector: Collector::default(),
            journal,
            in_use: None,
        }
    }

    fn add(&mut self, event: Event) {
        if let Some(Err(error)) = self.journal.as_mut().map(|journal| journal.add(&event)) {
            terminal::message(format_args!(
                "the events are not saved during the runs: {error}"
            ));
            self.journal = None;
            self.in_use = matches!(error, store::StoreError::Busy { .. }).then_some(error);
        }
        self.collector.add(event);
    }
}

/// Rejects the records of a run, and names the command for them. [`super::inputs::load`] rejects
/// other kinds of files.
fn refuse_records(path: &Path) -> Result<(), CliError> {
    if !store::is_of_run(path) {
        return Ok(());
    }
    let help = format!(
        "render its report with `harness report render {}`",
        quoted(&path.to_string_lossy())
    );
    Err(CliError::input(
        format!(
            "{} contains the records of a run, not a scenario",
            path.display()
        ),
        help,
    ))
}

const fn exit_of(counts: Counts) -> Exit {
    match counts {
        Counts { failed: 1.., .. } => Exit::Failed,
        Counts {
            interrupted: 1.., ..
        } => Exit::Interrupted,
        Counts { contended: 1.., .. }
        | Counts {
            passed: 0,
            insufficient: 1..,
            ..
        } => Exit::Device,
        Counts { .. } => Exit::Passed,
    }
}

fn names(arms: &[AllocatorSpec]) -> String {
    arms.iter()
        .map(|arm| format!("`{arm}`"))
        .collect::<Vec<_>>()
        .join(", ")
}

fn lists(scenarios: &[Scenario]) -> String {
    let lists = scenarios.iter().map(|scenario| {
        format!(
            "{} lists {}",
            scenario.path.display(),
            names(&scenario.allocators)
        )
    });
    lists.collect::<Vec<_>>().join("; ")
}

fn not_listed(name: &str, scenarios: &[Scenario]) -> CliError {
    if AllocatorKind::from_name(name).is_some() {
        let help = format!(
            "{}; add it to the `allocators:` of a scenario, or leave it out",
            lists(scenarios)
        );
        return CliError::input(
            format!("no given scenario lists the allocator `{name}`"),
            help,
        );
    }
    let arms: BTreeSet<String> = scenarios
        .iter()
        .flat_map(|scenario| scenario.allocators.iter().map(ToString::to_string))
        .collect();
    let help = choices(
        name,
        "listed by the given scenarios",
        arms.iter().map(String::as_str),
    );
    CliError::input(format!("no given scenario has an allocator `{name}`"), help)
}

fn spec_error(name: &str, error: SpecError) -> CliError {
    match error {
        SpecError::Conf(error) => {
            let conf = name
                .split_once('(')
                .map_or("", |(_, conf)| conf)
                .trim_end_matches(')');
            CliError::conf_of("--allocator", &error, conf)
        }
        SpecError::Library(error) => CliError::input(
            error.to_string(),
            "as in `--allocator 'library(path:./my_alloc.so,alloc:my_malloc,free:my_free)'`",
        ),
        error @ (SpecError::Unknown { .. }
        | SpecError::Unclosed
        | SpecError::NoSettings(_)
        | SpecError::Torch(_)) => CliError::input(
            error.to_string(),
            "as in `--allocator 'caching(max_split_size_mb:512)'`",
        ),
    }
}

fn check_library(arm: &AllocatorSpec) -> Result<(), CliError> {
    let checked = arm.as_library().map_or(Ok(()), arms::check_library);
    checked.map_err(|arms::Unusable { message, help, .. }| CliError::input(message, help))
}

/// Splits a list at its commas, except for commas within brackets, which separate settings.
fn split_names(list: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_u32;
    list.split(move |c| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    })
}

const LAST_FAILED_HELP: &str = "\
Run only the runs that failed last time, or all runs if none failed.

The file reports/runs/last-failed.json in the current folder lists the failed runs by scenario and allocator. A run that passes is removed from \
the list; other runs stay in it. With --no-report the list is read but not changed.";

const TRACE_HELP: &str = "\
Write a timeline of the runs: nested steps, driver calls with size and error, the work of each stream, and the allocated and reserved memory. The file has \
Chrome's trace format, with one process per run. https://ui.perfetto.dev and chrome://tracing show it.

The timeline comes from an additional run after the others, because recording takes time and would change the times in the report. The additional run happens \
even if the others failed. On the simulated device the times come from a cost model. A timeline contains at most the first 250,000 entries of a run.

A profiler with NVTX support shows the steps as ranges without this option, as in `nsys profile harness run my.yaml --device cuda`.";

const SNAPSHOT_HELP: &str = "\
Write a PyTorch memory snapshot of each run: a file for one run, a folder with one file per run for several.

`harness explain`, `advise`, `shrink`, `import` and `compare` read the snapshot, and so do PyTorch's own viewers (python -m torch.cuda._memory_viz, \
https://docs.pytorch.org/memory_viz). The call stack of each event contains the line of its step and the enclosing steps. The user_metadata is the name of \
the buffer. A refused request is an `oom` event. The snapshot shows the state before the final frees, even if the run failed or was \
interrupted. In a folder, the file names are SCENARIO-ALLOCATOR.pickle, and SCENARIO-ALLOCATOR-2.pickle for the second repetition, in lower case. `-` \
replaces characters that are unusual in file names.

The snapshot comes from the checked run, so it does not affect the times in the report, which come from another run. For a scenario with several programs, it \
covers the main program; the memory of the others counts as in use by other processes. Runs with the driver's own pool (async_pool) are not recorded, because the \
driver does not report which memory of the pool is free.";

const ALLOC_CONF_HELP: &str = "\
Also run PyTorch's allocator with these settings, in every scenario that lists it; may be repeated.

CONF has the format of PYTORCH_ALLOC_CONF. It adds a configuration named caching(CONF) to those that the scenario lists or --allocator selects, and the \
report compares them side by side. If the scenario already lists an identical configuration, only that one runs, and a message says so. To run one \
configuration alone, use --allocator 'caching(CONF)'. Expectations that name a configuration do not apply to added ones.

The variable PYTORCH_ALLOC_CONF is not read, so runs do not depend on the shell. Pass it with --alloc-conf \"$PYTORCH_ALLOC_CONF\".";

fn allocator_help() -> String {
    let kinds = AllocatorKind::ALL
        .iter()
        .map(|kind| format!("\n- {}: {}", kind.name(), arms::about(*kind)));
    format!(
        "Run only these allocators of those that a scenario lists; may be repeated or contain commas.

NAME is the `name:` that the scenario gives, or the allocator with its settings, as in caching(max_split_size_mb:512). This form runs in every \
scenario that lists PyTorch's allocator, even without these settings.
Your own library runs in every scenario with library(path:FILE,alloc:FUNCTION,free:FUNCTION), and optionally record_stream:FUNCTION and \
empty_cache:FUNCTION.
{}",
        kinds.collect::<String>()
    )
}
