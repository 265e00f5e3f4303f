use std::process::ExitCode;

use clap::Args;

/// Run the steps of a scenario that arrive on standard input.
#[derive(Args)]
pub(super) struct ScenarioProcess {}

impl ScenarioProcess {
    pub(super) fn run(self) -> ExitCode {
        let Self {} = self;
        harness_run::session::serve_process()
    }
}
