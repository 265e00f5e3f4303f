use std::sync::{Mutex, atomic::Ordering};
use std::{num::NonZeroUsize, time::Duration, time::Instant};

use clap::Args;
use harness_base::words::count;
use harness_devices::DeviceSource;
use harness_record::FaultedRuns;
use harness_report::trials::{self, Trials};
use harness_run::session::Plan;
use harness_run::session::every_fault::{self, Chosen, EveryFault};
use harness_scenario::{AskedFault, Scenario};
use indicatif::{HumanDuration, ProgressBar};

use super::progress::elapsed;
use crate::error::{CliError, Failures};
use crate::{Format, exit::Exit, interrupt::Interrupt, terminal};

#[derive(Args)]
pub(super) struct FaultOptions {
    /// Fail device calls, as in `cudaMalloc:3`, `any:2:2` or `worker/cudaFree:1`; may be repeated.
    /// The run fails if such a call never happens.
    #[arg(long, value_name = "[PROCESS/]CALL:FIRST[:COUNT][:MIN_SIZE]", long_help = FAIL_HELP)]
    fail: Vec<AskedFault>,
    /// Run each scenario once without failures, then once per device call, in which that call
    /// fails: `all` (the default), `each`, `sample:N` or `largest:N`.
    #[arg(
        long,
        value_name = "WHICH",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "all",
        long_help = EVERY_FAULT_HELP,
        conflicts_with_all = [
            "fail", "snapshot", "explain", "try_settings", "least_memory", "repeat", "report",
            "fail_fast", "memory_summary",
        ],
    )]
    every_fault: Option<Chosen>,
    /// With `--every-fault`: the number of parallel runs [default: the number of cores].
    #[arg(long, value_name = "N", requires = "every_fault")]
    jobs: Option<NonZeroUsize>,
}

impl FaultOptions {
    pub(super) fn add_to(&self, scenarios: &mut [Scenario]) -> Result<(), CliError> {
        for scenario in scenarios {
            let processes = scenario.processes.iter().map(|process| &process.name);
            let asked = self
                .fail
                .iter()
                .map(|fault| fault.of(&scenario.name, processes.clone()))
                .collect::<Result<Vec<_>, _>>();
            scenario
                .faults
                .extend(asked.map_err(|none| CliError::input(none.to_string(), none.help))?);
        }
        Ok(())
    }

    pub(super) const fn every_fault(&self) -> Option<Chosen> {
        self.every_fault
    }

    pub(super) fn run_every_fault(
        &self,
        chosen: Chosen,
        plan: &Plan,
        source: &DeviceSource,
        show: &Shown<'_>,
        interrupt: &Interrupt,
    ) -> Result<Exit, Failures> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let jobs = if source.simulated_because().is_some() {
            self.jobs.map_or(cores, NonZeroUsize::get)
        } else {
            1
        };
        let began = Instant::now();
        let last = Mutex::new(began);
        let begun = |runs: usize| show.begun(runs as u64);
        let progress = || show.advance(began, &last);
        let engine = EveryFault {
            plan,
            source,
            chosen,
            jobs,
            stop: interrupt,
            begun: &begun,
            progress: &progress,
        };
        let runs = every_fault::every_fault(&engine).map_err(CliError::from)?;
        show.bar.finish_and_clear();
        show.say(&format!(
            "{} in {}",
            count(show.bar.position(), "run"),
            elapsed(began.elapsed())
        ));
        show.print(&runs)?;
        let exit = if runs.passed() {
            Exit::Passed
        } else {
            Exit::Failed
        };
        Ok(if interrupt.load(Ordering::Relaxed) {
            Exit::Interrupted
        } else {
            exit
        })
    }
}

pub(super) struct Shown<'a> {
    pub(super) bar: &'a ProgressBar,
    pub(super) format: Format,
    pub(super) quiet: bool,
}

/// The interval between two lines about the progress, if standard error is not a terminal.
const LINES: Duration = Duration::from_secs(10);
/// The interval between two messages beside the bar.
const MESSAGES: Duration = Duration::from_secs(1);

impl Shown<'_> {
    fn say(&self, text: &str) {
        if !self.quiet {
            self.bar.suspend(|| terminal::message(text));
        }
    }

    /// Announces more runs.
    fn begun(&self, runs: u64) {
        let done = self.bar.position();
        self.bar.set_length(done + runs);
        // Runs with failures are shorter than those without.
        self.bar.reset_eta();
        match (done, runs) {
            (_, 0) => {}
            (0, _) => self.say(&format!(
                "{} without injected failures, to count the device calls",
                count(runs, "run")
            )),
            _ => self.say(&format!("{} with an injected failure", count(runs, "run"))),
        }
    }

    /// Counts a run, and prints a line now and then.
    fn advance(&self, began: Instant, last: &Mutex<Instant>) {
        self.bar.inc(1);
        let Ok(mut last) = last.try_lock() else {
            return;
        };
        let period = if self.bar.is_hidden() {
            LINES
        } else {
            MESSAGES
        };
        if last.elapsed() < period {
            return;
        }
        *last = Instant::now();
        let left = format!("about {} more", HumanDuration(self.bar.eta()));
        if self.bar.is_hidden() {
            let (done, all) = (self.bar.position(), self.bar.length().unwrap_or_default());
            self.say(&format!(
                "{done} of {} after {}; {left}",
                count(all, "run"),
                elapsed(began.elapsed())
            ));
        } else {
            self.bar.set_message(left);
        }
    }

    fn print(&self, runs: &FaultedRuns) -> Result<(), CliError> {
        match self.format {
            Format::Json => terminal::print_json(runs),
            Format::Text if self.quiet && runs.passed() => Ok(()),
            Format::Text => terminal::print(&trials::text(
                Trials::Calls(runs),
                terminal::style(),
                terminal::width_of_output(),
            )),
        }
    }
}

const FAIL_HELP: &str = "\
Fail device calls; may be repeated. The run fails if such a call never happens.

CALL is the CUDA name of the call, as in cudaMalloc, cuMemCreate, cudaMallocAsync, cudaFree or \
cudaEventRecord. `any` counts all calls that allocate device memory together. PROCESS selects a \
process of the scenario, as in worker/cudaMalloc:3; the default is the main process. FIRST is the \
number of the first failing call, from 1. COUNT is the number of failing calls (default: 1). Calls \
for less than MIN_SIZE do not count. Calls that allocate memory fail with out of memory, others \
with CUDA_ERROR_UNKNOWN. A scenario can inject other errors, delays and wrong figures with \
`faults:`.";

const EVERY_FAULT_HELP: &str = "\
Run each scenario once without failures, then once per device call of the scenario and its \
processes, in which that call fails.

`all` (the default) fails every call in turn, except repetitions: the same call in the same step \
with the same allocator state, if its failure ended the run immediately. `each` includes \
repetitions. `sample:N` tries N different calls, evenly spread. `largest:N` tries the N largest \
requests. Calls that allocate memory fail with out of memory; if the allocator succeeds by \
retrying, another run fails the retry too. Other calls fail with an error.

After every failure, the invariants must hold, buffer contents must be intact, and the device must \
be empty at the end. The run must recover, run out of memory, or end with an error that names the \
call. Anything else is a defect: it is printed with a command that reproduces it, and the exit \
code is 1. The scenario's expectations are not checked in these runs. No report is saved.";
