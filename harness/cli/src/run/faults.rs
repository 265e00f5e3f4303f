//! Faults of `harness run`: `--fail`, and `--every-fault`, which lets every call fail in its turn.

use std::num::NonZeroUsize;
use std::sync::atomic::Ordering;

use clap::Args;
use harness_devices::DeviceSource;
use harness_record::FaultedRuns;
use harness_report::trials::{self, Trials};
use harness_run::session::Plan;
use harness_run::session::every_fault::{self, Chosen, Engine};
use harness_scenario::{AskedFault, Scenario};
use indicatif::ProgressBar;

use crate::Format;
use crate::error::{CliError, Failures};
use crate::exit::Exit;
use crate::interrupt::Interrupt;
use crate::terminal::{self, Terminal};

/// Options of faults.
#[derive(Args)]
pub(super) struct FaultOptions {
    /// Let calls of the device fail, as in `cudaMalloc:3`, `any:2:2` or `worker/cudaFree:1`; may be repeated. One that is not reached fails the run.
    #[arg(long, value_name = "[PROCESS/]CALL:FIRST[:COUNT][:MIN_SIZE]", long_help = FAIL_HELP)]
    fail: Vec<AskedFault>,
    /// Run each scenario once without failures, then once for each call that it makes to the device, with this call failing: `all` (without a value), `each`, `sample:N` or `largest:N`.
    #[arg(
        long,
        value_name = "WHICH",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "all",
        long_help = EVERY_FAULT_HELP,
        conflicts_with_all = ["fail", "snapshot", "explain", "try_settings", "least_memory", "repeat", "report", "fail_fast", "memory_summary"]
    )]
    every_fault: Option<Chosen>,
    /// With `--every-fault`: runs at one time; as many as there are cores without it.
    #[arg(long, value_name = "N", requires = "every_fault")]
    jobs: Option<NonZeroUsize>,
}

impl FaultOptions {
    /// Gives the scenarios the faults that the user asks for.
    pub(super) fn add_to(&self, scenarios: &mut [Scenario]) -> Result<(), CliError> {
        for scenario in scenarios {
            let processes = scenario.processes.iter().map(|process| &process.name);
            let asked = self.fail.iter().map(|fault| fault.of(&scenario.name, processes.clone())).collect::<Result<Vec<_>, _>>();
            scenario.faults.extend(asked.map_err(|none| CliError::input(none.to_string(), none.help))?);
        }
        Ok(())
    }

    /// Which calls are to fail in their turn, where that is asked for.
    pub(super) const fn every_fault(&self) -> Option<Chosen> {
        self.every_fault
    }

    /// Lets them fail, and shows what came of it.
    pub(super) fn run_every_fault(
        &self,
        chosen: Chosen,
        plan: &Plan,
        source: &DeviceSource,
        show: &Shown<'_>,
        interrupt: &Interrupt,
    ) -> Result<Exit, Failures> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let jobs = if source.simulated_because().is_some() { self.jobs.map_or(cores, NonZeroUsize::get) } else { 1 };
        let bar = show.bar;
        let begun = |runs: usize| bar.set_length(bar.position() + runs as u64);
        let engine = Engine { plan, source, chosen, jobs, stop: interrupt, begun: &begun, progress: &|| bar.inc(1) };
        let runs = every_fault::every_fault(&engine).map_err(CliError::from)?;
        bar.finish_and_clear();
        show.print(&runs)?;
        let exit = if runs.passed() { Exit::Passed } else { Exit::Failed };
        Ok(if interrupt.load(Ordering::Relaxed) { Exit::Interrupted } else { exit })
    }
}

/// How results are shown.
pub(super) struct Shown<'a> {
    pub(super) bar: &'a ProgressBar,
    pub(super) format: Format,
    pub(super) quiet: bool,
    pub(super) terminal: &'a Terminal,
}

impl Shown<'_> {
    fn print(&self, runs: &FaultedRuns) -> Result<(), CliError> {
        match self.format {
            Format::Json => terminal::print_json(runs),
            Format::Text if self.quiet && runs.passed() => Ok(()),
            Format::Text => terminal::print(&trials::text(Trials::Calls(runs), self.terminal.style(), terminal::width_of_output())),
        }
    }
}

const FAIL_HELP: &str = "\
Let calls of the device fail; may be repeated. One that is not reached fails the run.

CALL is a call by the name that CUDA has for it, as in cudaMalloc, cuMemCreate, cudaMallocAsync, cudaFree or cudaEventRecord, or `any` for all that get device memory, \
counted together. PROCESS is a process of the scenario whose calls are meant, as in worker/cudaMalloc:3; without it they are those of the main one. FIRST is the first call that fails, counted from 1, COUNT how many fail (1 without it), and calls for less than MIN_SIZE do not count. Calls that get \
memory are out of memory; others fail with CUDA_ERROR_UNKNOWN. Other errors, delays and wrong figures stand in the scenario: `faults:`.";

const EVERY_FAULT_HELP: &str = "\
Run each scenario once without failures, then once for each call that it and its processes make to the device, with this call failing.

`all`, as without a value, lets every call fail in its turn, but for those that repeat one that was tried: the same call in the same step, with the same held by the allocators, where the \
failure ended the run at once. `each` tries those too. `sample:N` tries so many of those that differ, evenly spread; `largest:N` those that ask for most memory. Calls that get memory are out of \
memory, and where the allocator gets it by asking again, the next one is in a run of its own; others fail with an error. However calls fail, the invariants have to hold, contents \
have to be intact, nothing may be left on the device, and the run has to recover, be out of memory, or end with an error that names the call: else it is a defect, told with \
the command that shows it, and the exit code is 1. What the scenario expects is not asked of these runs. No report is saved.";
