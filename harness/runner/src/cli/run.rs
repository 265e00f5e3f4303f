//! `harness run`: runs scenarios on a device, prints what happened and saves a report.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use harness::files::Document;
use harness::record::{Records, RunRecord};
use harness::report::{Counts, Report, json, text};
use harness::scenario::{MAX_MEMORY, MIN_MEMORY, Scenario};
use harness::session::{Arm, DeviceSource, Plan};
use harness::store::{self, StoreError};
use harness_allocator::allocator::AllocatorKind;
use harness_allocator::device::open::{self, DeviceChoice};
use harness_allocator::units::Bytes;
use indicatif::{ProgressBar, ProgressStyle};

use super::error::{CliError, Failures};
use super::exit::{self, Exit};
use super::terminal::{self, Terminal};
use super::{Format, inputs, interrupt};

const EXAMPLES: &str = "Examples:
  harness run scenarios
  harness run scenarios/oom_retry.yaml --allocator caching,direct
  harness run scenarios --device sim --no-report
  harness run scenarios --device cuda:1 --repeat 10 --report reports/h200
  harness run my.yaml --format json | jq '.runs[].verdict'";

/// Run scenarios on a GPU, or on the simulated device where there is none.
///
/// All scenarios are checked before anything runs. Ctrl-C stops after the present operation and saves no report; a second one ends the
/// program at once.
#[derive(Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", exit::explained()))]
pub(super) struct Run {
    /// Scenario files, or folders of them (*.yaml, by name, not deeper).
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// `auto` (the first GPU, or the simulated device where there is none), `sim`, `cuda` or `cuda:N`.
    #[arg(long, env = "HARNESS_DEVICE", default_value = "auto", value_name = "DEVICE")]
    device: DeviceChoice,
    /// Give each scenario this memory instead of what it needs, as in `2GiB`.
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    memory: Option<Bytes>,
    /// Only these allocators, of those that a scenario lists; may be repeated, or be a list with commas.
    #[arg(long = "allocator", value_name = "NAME", value_delimiter = ',', value_parser = allocator())]
    allocators: Vec<AllocatorKind>,
    /// Draw all random choices from this seed instead of the scenarios' own.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
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
}

impl Run {
    pub(super) fn run(self, terminal: &Terminal) -> Result<Exit, Failures> {
        let scenarios = inputs::load(&self.paths)?;
        self.check_allocators(&scenarios)?;
        self.check_report_folder()?;
        let bar = self.progress();
        let interrupt = interrupt::watch({
            let bar = bar.clone();
            move || bar.suspend(|| eprintln!("interrupted: stopping after the present operation; press Ctrl-C again to end at once"))
        })?;
        let source = self.device_source()?;
        self.tell_beforehand(&scenarios, &source);
        let plan = self.plan(scenarios, &source);
        bar.set_length(plan.arms().count() as u64);
        let ran = plan.run(&source, &interrupt, |arm, record| advance(&bar, arm, record));
        bar.finish_and_clear();
        let interrupted = interrupt.load(Ordering::Relaxed);
        let records = match ran {
            Ok(records) => records,
            Err(_) if interrupted => return Ok(Exit::Interrupted),
            Err(error) => return Err(error.into()),
        };
        let report = Report::new(&records);
        let exit = if interrupted { Exit::Interrupted } else { exit_of(report.counts) };
        self.print(&report, exit, terminal)?;
        if !interrupted {
            self.save(&records)?;
        }
        Ok(exit)
    }

    /// Each allocator asked for must be listed by a scenario.
    fn check_allocators(&self, scenarios: &[Scenario]) -> Result<(), CliError> {
        let listed = |kind: &AllocatorKind| scenarios.iter().any(|scenario| scenario.allocators.contains(kind));
        let Some(stray) = self.allocators.iter().find(|kind| !listed(kind)) else { return Ok(()) };
        let lists = scenarios.iter().map(|scenario| format!("{} lists {}", scenario.path.display(), names(&scenario.allocators)));
        let message = format!("no scenario given lists the allocator `{}`", stray.name());
        Err(CliError::input(message, format!("{}; add it to `allocators:` of one, or leave it out", lists.collect::<Vec<_>>().join("; "))))
    }

    /// Tells before a long run what would be told after it: that something else than a folder is in the way.
    fn check_report_folder(&self) -> Result<(), CliError> {
        let folder = match &self.report {
            _ if self.no_report => return Ok(()),
            Some(folder) => folder,
            None => Path::new(store::DEFAULT_ROOT),
        };
        match folder.ancestors().find(|path| path.exists()) {
            Some(there) if !there.is_dir() => {
                Err(StoreError::writing(Document::Records, folder, io::ErrorKind::NotADirectory.into()).into())
            }
            _ => Ok(()),
        }
    }

    /// Looks for a GPU only where one may be used.
    fn device_source(&self) -> Result<DeviceSource, CliError> {
        match self.device {
            DeviceChoice::Simulated => Ok(DeviceSource::simulated()),
            DeviceChoice::Auto | DeviceChoice::Cuda(_) => Ok(DeviceSource::new(self.device, &open::probe(), self.allow_full_device)?),
        }
    }

    /// What the user would otherwise not expect.
    fn tell_beforehand(&self, scenarios: &[Scenario], source: &DeviceSource) {
        if self.quiet {
            return;
        }
        if let (DeviceChoice::Auto, Some(reason)) = (self.device, source.simulated_because()) {
            eprintln!("on the simulated device: {reason}");
        }
        for scenario in scenarios {
            if !self.allocators.is_empty() && !scenario.allocators.iter().any(|kind| self.allocators.contains(kind)) {
                eprintln!("not run: {} lists only {}", scenario.path.display(), names(&scenario.allocators));
            }
        }
    }

    fn plan(&self, scenarios: Vec<Scenario>, source: &DeviceSource) -> Plan {
        Plan {
            scenarios,
            allocators: (!self.allocators.is_empty()).then(|| self.allocators.clone()),
            seed: self.seed,
            memory: self.memory,
            repetitions: self.repeat.unwrap_or_else(|| source.default_repetitions()),
            audit: !self.no_audit,
            program: program(),
        }
    }

    fn progress(&self) -> ProgressBar {
        if self.quiet || !io::stderr().is_terminal() {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new(0);
        // A template that indicatif does not understand leaves its own, which is good enough.
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {wide_msg}") {
            bar.set_style(style);
        }
        bar
    }

    fn print(&self, report: &Report<'_>, exit: Exit, terminal: &Terminal) -> Result<(), CliError> {
        match self.format {
            Format::Json if self.memory_summary => terminal::print(&json::render_with_memory_stats(report)),
            Format::Json => terminal::print(&json::render(report)),
            Format::Text if self.quiet && exit == Exit::Passed => Ok(()),
            Format::Text => {
                terminal::print(&text::render(report, terminal.style()))?;
                if self.memory_summary { terminal::print(&format!("{}\n", text::memory_summaries(report))) } else { Ok(()) }
            }
        }
    }

    fn save(&self, records: &Records) -> Result<(), CliError> {
        let folder = match &self.report {
            _ if self.no_report => return Ok(()),
            Some(folder) => store::save_into(folder, records).map(|()| folder.clone())?,
            None => store::save_new(Path::new(store::DEFAULT_ROOT), records)?,
        };
        let place = format!("report: {}\n", folder.join(store::REPORT).display());
        match self.format {
            _ if self.quiet => Ok(()),
            Format::Text => terminal::print(&place),
            Format::Json => {
                eprint!("{place}");
                Ok(())
            }
        }
    }
}

fn advance(bar: &ProgressBar, arm: &Arm<'_>, record: Option<&RunRecord>) {
    match record {
        None => bar.set_message(format!("{} with {}", arm.scenario.name, arm.allocator.name())),
        Some(_) => bar.inc(1),
    }
}

const fn exit_of(counts: Counts) -> Exit {
    match counts {
        Counts { failed: 1.., .. } => Exit::Failed,
        Counts { interrupted: 1.., .. } => Exit::Interrupted,
        Counts { skipped: 1.., .. } => Exit::Device,
        Counts { .. } => Exit::Passed,
    }
}

/// How the user started this program.
fn program() -> String {
    // Cargo tells its children where it is.
    if std::env::var_os("CARGO").is_some() {
        return if cfg!(debug_assertions) { "cargo run --" } else { "cargo run --release --" }.to_owned();
    }
    std::env::args().next().unwrap_or_else(|| "harness".to_owned())
}

fn names(kinds: &[AllocatorKind]) -> String {
    kinds.iter().map(|kind| format!("`{}`", kind.name())).collect::<Vec<_>>().join(", ")
}

fn memory(text: &str) -> Result<Bytes, String> {
    let memory = Bytes::parse(text).map_err(|error| error.to_string())?;
    if (MIN_MEMORY..=MAX_MEMORY).contains(&memory) {
        return Ok(memory);
    }
    Err(format!("a scenario's memory is from {MIN_MEMORY}, one small segment, to {MAX_MEMORY}"))
}

fn allocator() -> impl TypedValueParser<Value = AllocatorKind> {
    let values = AllocatorKind::ALL.iter().map(|kind| PossibleValue::new(kind.name()).help(kind.about()));
    PossibleValuesParser::new(values).try_map(|name| AllocatorKind::from_name(&name).ok_or("there is no such allocator"))
}
