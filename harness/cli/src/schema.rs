//! `harness schema`: the JSON Schema of scenarios, or of suites.

use clap::Args;
use harness_bench::suite;

use super::error::Failures;
use super::exit::Exit;
use super::terminal;

/// Print the JSON Schema of scenarios, or of suites of benchmarks, for editors that complete and check.
#[derive(Args)]
#[command(
    after_help = "Example:\n  harness schema > schema.json\n  and as a scenario's first line: # yaml-language-server: $schema=schema.json"
)]
pub(super) struct Schema {
    /// Of suites of benchmarks.
    #[arg(long)]
    suites: bool,
}

impl Schema {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        terminal::print_json(&if self.suites { suite::schema() } else { harness_scenario::schema() })?;
        Ok(Exit::Passed)
    }
}
