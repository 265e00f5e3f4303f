use std::{ffi::OsString, io};

use clap::Args;
use harness_allocator::units::Bytes;
use harness_base::words::count;
use harness_exec::trials::{observed::TrialEnd, runner::RunnerError};
use harness_exec::{launch::Launch, machine::Machine, setup::Setup};
use harness_explain::grid::GridRowRecord;
use serde::Serialize;

use crate::{device, error::CliError, exec::DEFAULT_GPU, exit::Exit, terminal};

#[derive(Args)]
pub(super) struct Options {
    /// Run the recorded program with the recommended settings, as `harness exec` does, and report
    /// whether they hold. The program's output goes to standard error.
    #[arg(long, requires = "command", conflicts_with = "only")]
    pub(super) verify: bool,
    /// With `--verify`: the simulated GPU, as in `harness exec`.
    #[arg(
        long,
        value_name = "GPU",
        requires = "verify",
        default_value = DEFAULT_GPU,
        value_parser = device::gpu_or_file,
    )]
    gpu: String,
    /// With `--verify`: the program and its arguments.
    #[arg(last = true, requires = "verify", value_name = "COMMAND")]
    command: Vec<OsString>,
}

#[derive(Serialize)]
pub(super) struct Verified {
    pub(super) conf: String,
    memory: u64,
    /// `true` if the program ended with exit code 0 and without an out-of-memory error.
    pub(super) held: bool,
    exit_code: u8,
    /// `None` if torch could not report it.
    num_ooms: Option<u64>,
    peak_reserved_predicted: u64,
    peak_reserved_seen: u64,
}

impl Options {
    pub(super) fn run(
        &self,
        predicted: GridRowRecord,
        memory: Bytes,
    ) -> Result<Verified, CliError> {
        let setup = Setup::of(&self.command, None, None)?;
        let machine = Machine::Simulated(setup.settings(device::gpu(&self.gpu)?, memory));
        let (command, alloc_conf) = (&*self.command, Some(&*predicted.conf));
        let launch = Launch {
            command,
            machine: &machine,
            setup: &setup,
            alloc_conf,
            snapshot: false,
            ledger: None,
        };
        terminal::message(format_args!(
            "running the program with {} on a simulated GPU with {memory}",
            named(&predicted.conf)
        ));
        let mut prepared = launch.prepare()?;
        prepared.command.stdout(io::stderr());
        let ended = prepared.run(false)?;
        let ending = (ended.end, TrialEnd::By(ended.end));
        let (record, observed) = machine
            .read(ended.folder(), ending, None)
            .map_err(RunnerError::Lost)?;
        Ok(Verified {
            held: record.exit_code == 0 && observed.ooms == Some(0),
            exit_code: record.exit_code,
            num_ooms: observed.ooms,
            memory: memory.0,
            peak_reserved_predicted: predicted.peak_reserved,
            peak_reserved_seen: observed.peak_reserved.0,
            conf: predicted.conf,
        })
    }
}

impl Verified {
    pub(super) const fn exit(&self) -> Exit {
        if self.held {
            Exit::Passed
        } else {
            Exit::Failed
        }
    }

    pub(super) fn sentences(&self) -> String {
        let verdict = if self.held { "holds" } else { "does not hold" };
        let (predicted, seen) = (self.peak_reserved_predicted, self.peak_reserved_seen);
        let percent = (seen as f64 - predicted as f64) * 100.0 / (predicted as f64).max(1.0);
        format!(
            "Verified: {} {verdict} in {}. The program ended with exit code {} and {}. It reserved \
             at most {}; the replay predicted {} ({percent:+.1} %).\n",
            named(&self.conf),
            Bytes(self.memory),
            self.exit_code,
            self.num_ooms.map_or_else(
                || "an unknown number of out-of-memory errors".to_owned(),
                |ooms| count(ooms, "out-of-memory error")
            ),
            Bytes(seen),
            Bytes(predicted),
        )
    }
}

fn named(conf: &str) -> String {
    if conf.is_empty() {
        "(no settings)".to_owned()
    } else {
        conf.to_owned()
    }
}
