//! `harness run`: runs scenarios on a device, prints what happened and saves a report.

mod faults;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use harness_allocator::allocator::caching::Config;
use harness_allocator::allocator::{AllocatorKind, AllocatorSpec, SpecError};
use harness_allocator::units::Bytes;
use harness_base::files::{self, Document};
use harness_base::shard::Shard;
use harness_base::shell::quoted;
use harness_cuda::machine::{self};
use harness_devices::DeviceChoice;
use harness_devices::DeviceSource;
use harness_language::arms;
use harness_record::{Collector, Event, Records};
use harness_report::store::{self, Journal};
use harness_report::{Counts, Report, github, json, junit, text};
use harness_run::session::{End, Plan, Selection, Sinks, has_pytorchs, listed_as, supervise};
use harness_scenario::{Scenario, Settings, choices};
use indicatif::ProgressBar;

use self::faults::{FaultOptions, Shown};
use super::ci::Ci;
use super::error::{CliError, Failures};
use super::exit::{self, Exit};
use super::last_failed::LastFailed;
use super::recorded::{Explained, Recordings};
use super::terminal::{self, Terminal};
use super::timelines::Timelines;
use super::{Format, device, inputs, interrupt, program, what_if};

const EXAMPLES: &str = "Examples:
  harness run scenarios
  harness run scenarios/oom_retry.yaml --allocator caching,direct
  harness run scenarios --device sim --no-report
  harness run my.yaml --alloc-conf max_split_size_mb:512 --alloc-conf expandable_segments:True
  harness run my.yaml --allocator 'caching(max_split_size_mb:512)'
  harness run scenarios --device cuda:1 --repeat 10 --report reports/h200
  harness run scenarios --shard 1/2                 # the first of two machines
  harness run scenarios --filter 'retry caching' --fail-fast
  harness run memory_snapshot.pickle --alloc-conf expandable_segments:True
  harness run my.yaml --try-settings --least-memory
  harness run my.yaml --allocator caching --explain
  harness run my.yaml --allocator caching --snapshot oom.pickle     # then: harness explain oom.pickle --format html --out oom.html
  harness run scenarios --last-failed               # until nothing fails any more
  harness run my.yaml --allocator caching --fail cudaMalloc:3     # its third call fails
  harness run scenarios --every-fault               # every call fails in its turn
  harness run my.yaml --trace timeline.json          # for https://ui.perfetto.dev
  harness run my.yaml --format json | jq '.runs[].verdict'";

/// How progress is shown.
const PROGRESS: &str = "{bar:30} {pos}/{len} {wide_msg}";

/// Run scenarios on a GPU, or on the simulated device where there is none.
///
/// All scenarios are checked before anything runs. Ctrl-C stops after the present operation, and the report holds what was done; a second
/// one ends the program at once. Of a run that was killed, `harness report render FOLDER` makes a report of what was done.
#[derive(Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", exit::explained()))]
pub(super) struct Run {
    /// Scenario files, or folders of them (*.yaml, by name, not deeper); a memory snapshot of PyTorch or an allocation trace is a scenario of one step.
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// `auto` (the first GPU, or the simulated device where there is none), `sim`, `cuda` or `cuda:N` [default: the variable
    /// HARNESS_DEVICE, else `auto`].
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceChoice>,
    /// Let the simulated device be like this GPU: a file that `harness calibrate` wrote, or one of t4-16, l4-24, rtx4090-24, a100-40, a100-80,
    /// h100-80 and h200-141, which have the memory of that GPU and published costs.
    #[arg(long, value_name = "PROFILE")]
    device_profile: Option<PathBuf>,
    /// Give each scenario this memory instead of what it needs, as in `2GiB`.
    #[arg(long, value_name = "SIZE", value_parser = device::memory)]
    memory: Option<Bytes>,
    /// Give a parameter of the scenarios' matrix this value instead of those listed, as in `batch=96`; may be repeated.
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = setting)]
    settings: Vec<(String, String)>,
    /// Only scenarios with one of these tags; may be repeated, or be a list with commas.
    #[arg(long = "tag", value_name = "TAG", value_delimiter = ',')]
    tags: Vec<String>,
    /// Only scenarios without any of these tags; may be repeated, or be a list with commas.
    #[arg(long = "without-tag", value_name = "TAG", value_delimiter = ',')]
    without_tags: Vec<String>,
    /// Only these allocators, of those that a scenario lists, by the names of their arms; may be repeated, or be a list with commas.
    #[arg(long = "allocator", value_name = "NAME", long_help = allocator_help())]
    allocators: Vec<String>,
    /// Run PyTorch's allocator under these settings too, in every scenario that lists it; may be repeated to compare settings side by side.
    #[arg(long, value_name = "CONF", long_help = ALLOC_CONF_HELP)]
    alloc_conf: Vec<String>,
    /// Try settings of PyTorch's allocator on the simulated device, and tell above the results which of them make each scenario pass.
    #[arg(long)]
    try_settings: bool,
    /// Look on the simulated device for the least memory in which each scenario passes, and tell it above the results. That more memory never hurts is
    /// taken for granted; some amounts above it are tried too.
    #[arg(long)]
    least_memory: bool,
    /// Only runs whose SCENARIO::ALLOCATOR contains all of these words; may be repeated: then those that any of the filters has.
    #[arg(long, value_name = "WORDS")]
    filter: Vec<String>,
    /// Start nothing more after a run that failed.
    #[arg(long)]
    fail_fast: bool,
    /// Only runs that failed when they were last run and a report was saved; all, where there are none.
    #[arg(long, long_help = LAST_FAILED_HELP)]
    last_failed: bool,
    /// Draw all random choices from this seed instead of the scenarios' own.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Run only part I of N of the scenarios, as in `1/2`; which belong to it depends on their names alone.
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
    /// Write what each run's allocator did as a memory snapshot of PyTorch: a file where there is one run, else a folder with a file for each.
    #[arg(long, value_name = "OUT", long_help = SNAPSHOT_HELP)]
    snapshot: Option<PathBuf>,
    /// Tell of each run that failed at a refused request where every byte of the device was then, as `harness explain` does; with `=all` of each run
    /// at its end.
    #[arg(long, value_name = "RUNS", num_args = 0..=1, require_equals = true, default_missing_value = "failed")]
    explain: Option<Explained>,
    /// Write what each run did and when as a timeline for https://ui.perfetto.dev: steps, driver calls, work of streams, and memory.
    #[arg(long, value_name = "OUT.json", long_help = TRACE_HELP)]
    trace: Option<PathBuf>,
    /// Run everything this often [default: 5 on a GPU, 1 on the simulated device, whose figures never differ].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    repeat: Option<u32>,
    /// Write the report into this folder [default: a new numbered folder in reports/runs].
    #[arg(long, value_name = "DIR", conflicts_with = "no_report")]
    report: Option<PathBuf>,
    /// Save no report.
    #[arg(long)]
    no_report: bool,
    /// What to print: `json` is the document that reports are made of, and nothing else.
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
    /// Print each run's counters at its end too, in the layout of `torch.cuda.memory_summary()`; with `--format json` as `memory_stats`,
    /// one flat object a run with the keys of `torch.cuda.memory_stats()`.
    #[arg(long)]
    memory_summary: bool,
    /// Take what a scenario needs even if that leaves less than usual of a GPU that others use.
    #[arg(long)]
    allow_full_device: bool,
    /// Do not audit every operation: for measuring the allocators' own speed, not for trusting them.
    #[arg(long)]
    no_audit: bool,
    /// Print no text where everything passes, and show no progress.
    #[arg(long, short)]
    quiet: bool,
    #[command(flatten)]
    faults: FaultOptions,
    #[command(flatten)]
    ci: Ci,
}

/// `NAME=VALUE`.
fn setting(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !value.is_empty() => Ok((name.trim().to_owned(), value.trim().to_owned())),
        _ => Err("write a parameter and its value, as in `batch=96`".to_owned()),
    }
}

impl Run {
    fn settings(&self) -> Result<Settings, CliError> {
        let mut settings = Settings::new();
        for (name, value) in &self.settings {
            if settings.insert(name.clone(), value.clone()).is_some() {
                return Err(CliError::input(format!("`{name}` is set twice"), "give each parameter one value"));
            }
        }
        Ok(settings)
    }

    /// A setting that no scenario takes is a typing mistake.
    fn check_settings(&self, scenarios: &[Scenario]) -> Result<(), CliError> {
        let known: BTreeSet<&str> = scenarios.iter().flat_map(|scenario| &scenario.parameters).map(|(name, _)| name.as_str()).collect();
        match self.settings.iter().find(|(name, _)| !known.contains(name.as_str())) {
            None => Ok(()),
            Some((name, _)) => Err(CliError::input(format!("no scenario has a parameter `{name}`"), choices(name, "parameters", known))),
        }
    }

    pub(super) fn run(self, terminal: &Terminal) -> Result<Exit, Failures> {
        let choice = device::choice(self.device, DeviceChoice::Auto)?;
        let (scenarios, selection) = self.chosen()?;
        self.check_report_folder()?;
        let bar = self.progress();
        let interrupt = interrupt::watch({
            let bar = bar.clone();
            move || bar.suspend(|| terminal::tell("interrupted: stopping after the present operation; press Ctrl-C again to end at once"))
        })?;
        let source = self.device_source(choice)?;
        self.explain_choices(&scenarios, &selection, choice, &source);
        let plan = self.plan(scenarios, selection, &source);
        if let Some(chosen) = self.faults.every_fault() {
            let show = Shown { bar: &bar, format: self.format, quiet: self.quiet, terminal };
            return self.faults.run_every_fault(chosen, &plan, &source, &show, &interrupt);
        }
        let (mut recordings, snapshots) = Recordings::new(&plan, self.snapshot.as_deref(), self.explain)?.unzip();
        let (timelines, sender) = self.trace.as_deref().map(Timelines::new).transpose()?.unzip();
        let sinks = Sinks { snapshots, timelines: sender };
        let what_if = self.what_if(&plan.scenarios, &plan.selection)?;
        bar.set_length(plan.arms().count() as u64);
        let mut log = Log::new(self.journal());
        let tells_runs = !self.quiet && self.format == Format::Text && io::stderr().is_terminal();
        let progress = Progress { bar: bar.clone(), tells_runs, terminal: *terminal, began: Instant::now() };
        let end = supervise(plan, source, Arc::clone(&interrupt), sinks, |event| {
            progress.advance(&event);
            if let (Event::RunEnded(run), Some(recordings)) = (&event, &mut recordings) {
                recordings.run_ended(run, terminal);
            }
            log.add(event);
        });
        bar.finish_and_clear();
        let is_stuck = match end {
            End::Done => false,
            // No run had a device.
            End::Device(error) => {
                log.journal.map_or(Ok(()), Journal::discard).map_err(CliError::from)?;
                return if interrupt.load(Ordering::Relaxed) { Ok(Exit::Interrupted) } else { Err(CliError::from(error).into()) };
            }
            End::Stuck(overrun) => {
                terminal::tell(format_args!("gave up: {}: {}; nothing more is run", overrun.phase, overrun.seen_stuck()));
                true
            }
        };
        let exit = self.conclude(log, recordings, &what_if, is_stuck, &interrupt, terminal)?;
        timelines.map_or(Ok(()), Timelines::finish)?;
        // The user may have interrupted while all this was written.
        Ok(if interrupt.load(Ordering::Relaxed) { Exit::Interrupted } else { exit })
    }

    /// The scenarios that are run, and which of their arms.
    fn chosen(&self) -> Result<(Vec<Scenario>, Selection), Failures> {
        self.paths.iter().try_for_each(|path| refuse_records(path))?;
        let mut scenarios = inputs::load_with_programs(&self.paths, &self.settings()?, self.memory)?;
        self.check_settings(&scenarios)?;
        if !self.tags.is_empty() {
            scenarios.retain(|scenario| scenario.tags.iter().any(|tag| self.tags.contains(tag)));
            if scenarios.is_empty() {
                return Err(CliError::input(
                    format!("no scenario has the tag {}", self.tags.join(" or ")),
                    "tags stand in `tags:`; `harness list --format json` shows them",
                )
                .into());
            }
        }
        scenarios.retain(|scenario| !scenario.tags.iter().any(|tag| self.without_tags.contains(tag)));
        if scenarios.is_empty() {
            let message = format!("all scenarios have a tag of {}", self.without_tags.join(", "));
            return Err(CliError::input(message, "leave one of `--without-tag` out").into());
        }
        // Before the shard is taken: an allocator that only scenarios of another shard list is not a mistake.
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

    /// Prints and writes what came of the runs.
    fn conclude(
        &self,
        log: Log,
        recordings: Option<Recordings>,
        what_if: &str,
        is_stuck: bool,
        interrupt: &AtomicBool,
        terminal: &Terminal,
    ) -> Result<Exit, Failures> {
        let Log { collector, journal, in_use } = log;
        let records = collector.into_records();
        let report = Report::new(&records);
        let exit = if is_stuck { Exit::Failed } else { exit_of(report.counts) };
        let exit = if interrupt.load(Ordering::Relaxed) { Exit::Interrupted } else { exit };
        self.print_beside(what_if)?;
        self.print(&report, exit, terminal)?;
        let explained = recordings.map_or(Ok(String::new()), Recordings::finish);
        self.print_beside(explained.as_deref().unwrap_or_default())?;
        self.ci.write(|limit| github::summary(&report, limit), || junit::of_runs(&report))?;
        if let Some(error) = in_use {
            return Err(CliError::from(error).into());
        }
        self.save(journal, &records)?;
        self.remember_failures(&records)?;
        explained?;
        Ok(exit)
    }

    /// Prints what is no part of the report: beside a document, to standard error.
    fn print_beside(&self, text: &str) -> Result<(), CliError> {
        match self.format {
            _ if text.is_empty() => {}
            Format::Json => terminal::tell(text.trim_end()),
            Format::Text => terminal::print(&format!("{text}\n"))?,
        }
        Ok(())
    }

    /// Which setting would have saved the scenarios, and how much memory would have been enough, where that is asked for.
    fn what_if(&self, scenarios: &[Scenario], selection: &Selection) -> Result<String, CliError> {
        let mut text = String::new();
        if self.try_settings {
            let bar = terminal::progress(!self.quiet, PROGRESS, what_if::settings_to_try(scenarios));
            text += &what_if::try_settings(scenarios, self.memory, &bar)?;
            bar.finish_and_clear();
        }
        if self.least_memory {
            let arms = scenarios.iter().map(|scenario| selection.of(scenario).len() as u64).sum();
            let bar = terminal::progress(!self.quiet, PROGRESS, arms);
            text += &what_if::least(scenarios, selection, self.memory, &bar)?;
            bar.finish_and_clear();
        }
        Ok(text)
    }

    /// Where the events are written while they come.
    fn journal(&self) -> Option<Journal> {
        match &self.report {
            _ if self.no_report => None,
            Some(folder) => Some(Journal::in_folder(folder.clone())),
            None => Some(Journal::in_new_folder(PathBuf::from(store::DEFAULT_ROOT))),
        }
    }

    /// What the options choose. Each allocator asked for must be listed by a scenario, or be `caching` with settings or a library.
    fn selection(&self, scenarios: &[Scenario]) -> Result<Selection, CliError> {
        let names: Vec<&str> = self.allocators.iter().flat_map(|list| split_names(list)).collect();
        let mut selection = Selection::default();
        for name in &names {
            if scenarios.iter().any(|scenario| scenario.allocators.iter().any(|arm| arm.to_string() == *name)) {
                selection.only.get_or_insert_default().push((*name).to_owned());
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
        if selection.added.iter().any(AllocatorSpec::is_pytorch) && !scenarios.iter().any(has_pytorchs) {
            let help = format!("{}; add `caching` to `allocators:` of one, or leave the settings out", lists(scenarios));
            return Err(CliError::input("no scenario given lists PyTorch's allocator, whose settings these are", help));
        }
        Ok(selection)
    }

    /// The pairs of scenario and allocator that filters and earlier failures leave; `None`: all of them.
    fn pairs(&self, scenarios: &[Scenario], selection: &Selection) -> Result<Option<BTreeSet<(String, String)>>, CliError> {
        let failed = if self.last_failed { Some(LastFailed::read()?) } else { None };
        if failed.as_ref().is_some_and(LastFailed::is_empty) && !self.quiet {
            terminal::tell("no run failed when it was last run, so all are run");
        }
        let failed = failed.filter(|failed| !failed.is_empty());
        if failed.is_none() && self.filter.is_empty() {
            return Ok(None);
        }
        let all =
            scenarios.iter().flat_map(|scenario| selection.of(scenario).into_iter().map(|arm| (scenario.id(), arm.to_string())));
        let all: BTreeSet<(String, String)> = all.collect();
        let pairs: BTreeSet<(String, String)> = all.iter().filter(|pair| self.has_words(pair)).cloned().collect();
        if pairs.is_empty() && !all.is_empty() {
            let help = "a run is called by its scenario and allocator, as in `oom_retry::caching`; `harness list` names the scenarios";
            return Err(CliError::input(format!("no run has the words `{}`", self.filter.join("`, or `")), help));
        }
        let Some(failed) = failed else { return Ok(Some(pairs)) };
        let pairs: BTreeSet<(String, String)> = pairs.into_iter().filter(|pair| failed.has(pair)).collect();
        if pairs.is_empty() && !self.quiet {
            terminal::tell("none of these runs failed when it was last run");
        }
        Ok(Some(pairs))
    }

    /// Whether a run has all words of one of the filters.
    fn has_words(&self, (scenario, allocator): &(String, String)) -> bool {
        let name = format!("{scenario}::{allocator}");
        self.filter.is_empty() || self.filter.iter().any(|words| words.split_whitespace().all(|word| name.contains(word)))
    }

    /// Keeps what failed for `--last-failed`, where reports are saved.
    fn remember_failures(&self, records: &Records) -> Result<(), CliError> {
        if self.no_report {
            return Ok(());
        }
        let mut failed = LastFailed::read().unwrap_or_default();
        failed.update(&records.runs);
        failed.write()
    }

    /// Fails before a long run where its report could not be written after it.
    fn check_report_folder(&self) -> Result<(), CliError> {
        match &self.report {
            _ if self.no_report => Ok(()),
            Some(folder) => Ok(store::check_folder(folder)?),
            None => Ok(files::check_writable(Path::new(store::DEFAULT_ROOT), Document::Records)?),
        }
    }

    /// Looks for a GPU only where one may be used.
    fn device_source(&self, choice: DeviceChoice) -> Result<DeviceSource, CliError> {
        let source = match choice {
            DeviceChoice::Simulated => DeviceSource::simulated(),
            DeviceChoice::Auto | DeviceChoice::Cuda(_) => DeviceSource::new(choice, &machine::probe(), self.allow_full_device)?,
        };
        device::profiled(source, self.device_profile.as_deref())
    }

    /// Says what will run otherwise than the user may expect, and why.
    fn explain_choices(&self, scenarios: &[Scenario], selection: &Selection, choice: DeviceChoice, source: &DeviceSource) {
        if self.quiet {
            return;
        }
        if let (DeviceChoice::Auto, Some(reason)) = (choice, source.simulated_because()) {
            terminal::tell(format_args!("on the simulated device: {reason}"));
        }
        if let (Some(shard), []) = (self.shard, scenarios) {
            terminal::tell(format_args!("none of these scenarios belongs to part {shard}"));
        }
        self.explain_added(scenarios, &selection.added);
        explain_idle(scenarios, selection);
        for scenario in scenarios {
            if selection.of(scenario).is_empty() {
                terminal::tell(format_args!("not run: {} lists only {}", scenario.path.display(), names(&scenario.allocators)));
            }
        }
    }

    /// Settings that come down to an arm that is there already.
    fn explain_added(&self, scenarios: &[Scenario], added: &[AllocatorSpec]) {
        // Those of `--alloc-conf` come last.
        let (others, of_conf) = added.split_at(added.len().saturating_sub(self.alloc_conf.len()));
        for (index, (conf, arm)) in self.alloc_conf.iter().zip(of_conf).enumerate() {
            let earlier = others.iter().chain(&of_conf[..index]).find(|earlier| earlier.is_equivalent_to(arm));
            if let Some(there) = doing_the_same(arm, scenarios, earlier) {
                let conf = if conf.is_empty() { "''" } else { conf };
                terminal::tell(format_args!("no arm of its own for --alloc-conf {conf}: {there} the same already"));
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
            audit: !self.no_audit,
            fail_fast: self.fail_fast,
            program: program(),
        }
    }

    fn progress(&self) -> ProgressBar {
        terminal::progress(!self.quiet, PROGRESS, 0)
    }

    fn print(&self, report: &Report<'_>, exit: Exit, terminal: &Terminal) -> Result<(), CliError> {
        match self.format {
            Format::Json if self.memory_summary => terminal::print(&json::render_with_memory_stats(report)),
            Format::Json => terminal::print(&json::render(report)),
            Format::Text if self.quiet && exit == Exit::Passed => Ok(()),
            Format::Text => {
                terminal::print(&text::render(report, terminal.style(), terminal::width_of_output()))?;
                if self.memory_summary { terminal::print(&format!("{}\n", text::memory_summaries(report))) } else { Ok(()) }
            }
        }
    }

    fn save(&self, journal: Option<Journal>, records: &Records) -> Result<(), CliError> {
        let folder = match (journal, &self.report) {
            (Some(journal), _) => journal.finish(records)?,
            _ if self.no_report => return Ok(()),
            // The events could not be written, which a message said: the report is tried all the same.
            (None, Some(folder)) => store::save_into(folder, records).map(|()| folder.clone())?,
            (None, None) => store::save_new(Path::new(store::DEFAULT_ROOT), records)?,
        };
        let place = format!("report: {}", folder.join(store::REPORT).display());
        match self.format {
            _ if self.quiet => Ok(()),
            Format::Text => terminal::print(&format!("{place}\n")),
            Format::Json => {
                terminal::tell(place);
                Ok(())
            }
        }
    }
}

/// Settings that come to nothing, of the arms of all scenarios and of those added to them; each is named once.
fn explain_idle(scenarios: &[Scenario], selection: &Selection) {
    let arms = scenarios.iter().flat_map(|scenario| selection.of(scenario)).chain(&selection.added);
    let idle: BTreeSet<&str> = arms.filter_map(AllocatorSpec::effective).flat_map(|config| config.idle_settings()).collect();
    idle.iter().for_each(terminal::tell);
}

/// Which arms do the same as this one, with the verb: those of scenarios, by name, or one that was given before it.
fn doing_the_same(arm: &AllocatorSpec, scenarios: &[Scenario], earlier: Option<&AllocatorSpec>) -> Option<String> {
    if let Some(earlier) = earlier {
        return Some(format!("`{earlier}`, given before it, does"));
    }
    let mut listed: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for scenario in scenarios {
        if let Some(there) = listed_as(scenario, arm) {
            listed.entry(there.to_string()).or_default().push(&scenario.name);
        }
    }
    let places: Vec<String> = listed
        .iter()
        .map(|(name, scenarios)| match scenarios.as_slice() {
            [only] => format!("`{name}` of {only}"),
            several => format!("`{name}` of {} scenarios", several.len()),
        })
        .collect();
    match places.as_slice() {
        [] => None,
        [only] => Some(format!("{only} does")),
        several => Some(format!("{} do", several.join(", "))),
    }
}

/// What is shown while runs go on: a bar, and a line about each run that has ended, with the time since the first one began.
struct Progress {
    bar: ProgressBar,
    tells_runs: bool,
    terminal: Terminal,
    began: Instant,
}

impl Progress {
    fn advance(&self, event: &Event) {
        match event {
            Event::RunStarted(run) => self.bar.set_message(format!("{} with {}", run.scenario.name, run.allocator)),
            Event::RunEnded(run) => {
                self.bar.inc(1);
                if self.tells_runs {
                    let elapsed = format!("{:>7} ", elapsed(self.began.elapsed()));
                    let room = terminal::width_of_messages().map(|width| width.saturating_sub(elapsed.len()));
                    let line = text::run_line(run, self.terminal.style_of_messages(), room);
                    self.bar.suspend(|| terminal::tell(format_args!("{elapsed}{line}")));
                }
            }
            Event::Started { .. } | Event::StepEnded(_) => {}
        }
    }
}

/// As in `0.42s`, `61s`, `12m05s`.
fn elapsed(time: Duration) -> String {
    match time.as_secs() {
        0..10 => format!("{:.2}s", time.as_secs_f64()),
        10..600 => format!("{}s", time.as_secs()),
        seconds => format!("{}m{:02}s", seconds / 60, seconds % 60),
    }
}

/// Events, collected and written down.
struct Log {
    collector: Collector,
    journal: Option<Journal>,
    /// Another process writes into the folder: nothing is saved there.
    in_use: Option<store::StoreError>,
}

impl Log {
    fn new(journal: Option<Journal>) -> Self {
        Self { collector: Collector::default(), journal, in_use: None }
    }

    fn add(&mut self, event: Event) {
        if let Some(Err(error)) = self.journal.as_mut().map(|journal| journal.add(&event)) {
            terminal::tell(format_args!("events are not saved while the runs go on: {error}"));
            self.journal = None;
            self.in_use = matches!(error, store::StoreError::Busy { .. }).then_some(error);
        }
        self.collector.add(event);
    }
}

/// Refuses what a run left behind, and names the command that takes it. Other kinds of files are refused by [`inputs::load`].
fn refuse_records(path: &Path) -> Result<(), CliError> {
    if !store::is_of_run(path) {
        return Ok(());
    }
    let help = format!("render its report with `harness report render {}`", quoted(&path.to_string_lossy()));
    Err(CliError::input(format!("{} is what a run left behind, not a scenario", path.display()), help))
}

const fn exit_of(counts: Counts) -> Exit {
    match counts {
        Counts { failed: 1.., .. } => Exit::Failed,
        Counts { interrupted: 1.., .. } => Exit::Interrupted,
        Counts { contended: 1.., .. } | Counts { passed: 0, skipped: 1.., .. } => Exit::Device,
        Counts { .. } => Exit::Passed,
    }
}

fn names(arms: &[AllocatorSpec]) -> String {
    arms.iter().map(|arm| format!("`{arm}`")).collect::<Vec<_>>().join(", ")
}

/// What each scenario lists.
fn lists(scenarios: &[Scenario]) -> String {
    let lists = scenarios.iter().map(|scenario| format!("{} lists {}", scenario.path.display(), names(&scenario.allocators)));
    lists.collect::<Vec<_>>().join("; ")
}

fn not_listed(name: &str, scenarios: &[Scenario]) -> CliError {
    if AllocatorKind::from_name(name).is_some() {
        let help = format!("{}; add it to `allocators:` of one, or leave it out", lists(scenarios));
        return CliError::input(format!("no scenario given lists the allocator `{name}`"), help);
    }
    let arms: BTreeSet<String> = scenarios.iter().flat_map(|scenario| scenario.allocators.iter().map(ToString::to_string)).collect();
    let help = choices(name, "listed by the scenarios given", arms.iter().map(String::as_str));
    CliError::input(format!("no scenario given has an allocator `{name}`"), help)
}

fn spec_error(name: &str, error: SpecError) -> CliError {
    match error {
        SpecError::Conf(error) => {
            let conf = name.split_once('(').map_or("", |(_, conf)| conf).trim_end_matches(')');
            CliError::conf_of("--allocator", &error, conf)
        }
        SpecError::Library(error) => {
            CliError::input(error.to_string(), "as in `--allocator 'library(path:./my_alloc.so,alloc:my_malloc,free:my_free)'`")
        }
        error @ (SpecError::Unknown { .. } | SpecError::Unclosed | SpecError::NoSettings(_)) => {
            CliError::input(error.to_string(), "as in `--allocator 'caching(max_split_size_mb:512)'`")
        }
    }
}

/// Refuses a library that is not there, or lacks what is named of it.
fn check_library(arm: &AllocatorSpec) -> Result<(), CliError> {
    let checked = arm.as_library().map_or(Ok(()), arms::check_library);
    checked.map_err(|arms::Unusable { message, help, .. }| CliError::input(message, help))
}

/// The names of a list with commas; those inside brackets belong to settings.
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
Only runs that failed when they were last run and a report was saved; all, where there are none.

What failed is kept in reports/runs/last-failed.json, below the present folder, by scenario and allocator. A run that passes goes from the \
list, and one that is not run stays in it. A run with --no-report reads the list and leaves it as it is.";

const TRACE_HELP: &str = "\
Write what each run did and when as a timeline: steps one inside another, each driver call with its size and why it failed, the work of each stream, and the \
memory that the allocator has handed out and holds. One file in Chrome's trace format, each run a process in it; https://ui.perfetto.dev and chrome://tracing \
show it.

Traced is a run of its own behind the others, so that the times of the report stay what they are: recording takes time. It is traced too where the others \
failed. On the simulated device the times are a model's. A timeline keeps the first 250,000 entries of a run.

Under a profiler that follows NVTX, as in `nsys profile harness run my.yaml --device cuda`, steps are shown there as ranges, without this option.";

const SNAPSHOT_HELP: &str = "\
Write what each run's allocator did as a memory snapshot of PyTorch: a file where there is one run, else a folder with a file for each.

`harness explain`, `advise`, `shrink`, `import` and `compare` take it, and so do PyTorch's own viewers (python -m torch.cuda._memory_viz, \
https://docs.pytorch.org/memory_viz). Each event has the line of its step as call stack, with the blocks around it, and the name of its buffer as \
user_metadata; a request that was refused is an `oom` event. The snapshot shows the state before anything is freed at the end of the run, also \
where the run failed or was interrupted. Of several runs each is called SCENARIO-ALLOCATOR.pickle, from the second repetition on \
SCENARIO-ALLOCATOR-2.pickle, in small letters with `-` for what does not fit in a file name.

Recorded is the checked run, so that the times of the report, which are taken in a run of their own, stay what they are. Of a scenario with several programs \
it is the main one: to it, what the others hold is memory held by others. The driver's own pool (async_pool) does not tell which of its memory is free, \
so runs with it are not recorded.";

const ALLOC_CONF_HELP: &str = "\
Run PyTorch's allocator under these settings too, in every scenario that lists it; may be repeated.

CONF is what PYTORCH_ALLOC_CONF would hold, read by PyTorch's rules. It makes one more arm, called caching(CONF), beside those that the \
scenario lists, or beside those that --allocator leaves of them: the report compares the settings side by side. Where the scenario lists an arm \
that does the same, that one is run, once and under its own name, and a line says so. One arm alone is --allocator 'caching(CONF)'. What a scenario expects of an arm by its name is not asked of an added one.

The variable PYTORCH_ALLOC_CONF itself is not read, so that a run does not depend on what the shell happens to hold: give it as \
--alloc-conf \"$PYTORCH_ALLOC_CONF\".";

/// The names that arms have unless a scenario names them itself.
fn allocator_help() -> String {
    let kinds = AllocatorKind::ALL.iter().map(|kind| format!("\n- {}: {}", kind.name(), arms::about(*kind)));
    format!(
        "Only these allocators, of those that a scenario lists, by the names of their arms; may be repeated, or be a list with commas.

An arm is called by the `name:` that the scenario gives it, or by its allocator, with the settings behind it where it has any, as in \
caching(max_split_size_mb:512); that last form runs in every scenario that lists PyTorch's allocator, listed under these settings or not.
A library of your own runs in every scenario by library(path:FILE,alloc:FUNCTION,free:FUNCTION), with record_stream:FUNCTION and empty_cache:FUNCTION \
where it has them.
{}",
        kinds.collect::<String>()
    )
}
