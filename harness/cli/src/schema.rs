use clap::Args;
use harness_bench::suite;

use super::{error::Failures, exit::Exit, terminal};

/// Print the JSON Schema of scenarios or benchmark suites. Editors use it for completion and
/// checks.
#[derive(Args)]
#[command(
    after_help = "Example:\n  harness schema > schema.json\n\nThe first line of a scenario names \
         the schema: # yaml-language-server: $schema=schema.json"
)]
pub(super) struct Schema {
    /// Print the schema of benchmark suites.
    #[arg(long)]
    suites: bool,
}

impl Schema {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        let schema = if self.suites {
            suite::schema()
        } else {
            harness_scenario::schema()
        };
        terminal::print_document(&format!("{schema:#}\n"))?;
        Ok(Exit::Passed)
    }
}
