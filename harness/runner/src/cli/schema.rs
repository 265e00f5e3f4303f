//! `harness schema`: the JSON Schema of the scenario language.

use clap::Args;
use harness::scenario;

use super::error::Failures;
use super::exit::Exit;
use super::terminal;

/// Print the JSON Schema of the scenario language, for editors that complete and check.
#[derive(Args)]
#[command(
    after_help = "Example:\n  harness schema > schema.json\n  and as a scenario's first line: # yaml-language-server: $schema=schema.json"
)]
pub(super) struct Schema {}

impl Schema {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        terminal::print_json(&scenario::schema())?;
        Ok(Exit::Passed)
    }
}
