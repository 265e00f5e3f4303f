//! `harness scenario-process`: a process of a scenario beside the main one. The harness starts it; people do not.

use std::process::ExitCode;

use clap::Args;

/// Do steps of a scenario, as standard input tells them.
#[derive(Args)]
pub(super) struct ScenarioProcess {}

impl ScenarioProcess {
    pub(super) fn run(self) -> ExitCode {
        let Self {} = self;
        harness_run::session::serve_process()
    }
}
