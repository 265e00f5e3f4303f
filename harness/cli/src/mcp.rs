//! `harness mcp`, with the feature `mcp`.

use clap::Args;

use super::{error::Failures, exit::Exit};

#[cfg(feature = "mcp")]
mod server;

const EXAMPLES: &str = "Examples:
  claude mcp add harness -- harness mcp
  { \"mcpServers\": { \"harness\": {
      \"command\": \"harness\", \"args\": [\"mcp\", \"--allow-exec\"] } } }";

/// Serve explain, advise, compare and exec as tools for coding agents: a server of the Model
/// Context Protocol on standard input and output.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Mcp {
    /// Also offer the tool `exec`, which runs programs on the simulated GPU. Without it, all tools
    /// only read files.
    #[arg(long)]
    allow_exec: bool,
}

impl Mcp {
    #[cfg(feature = "mcp")]
    pub(super) fn run(self) -> Result<Exit, Failures> {
        server::run(self.allow_exec)
    }

    #[cfg(not(feature = "mcp"))]
    pub(super) fn run(self) -> Result<Exit, Failures> {
        let Self { allow_exec: _ } = self;
        let message = "this harness is built without the Model Context Protocol";
        Err(super::error::CliError::input(message, super::error::with_feature("mcp")).into())
    }
}
