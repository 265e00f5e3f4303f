//! The program `harness`: its command line, with one file per subcommand.
//!
//! A command returns an [`Exit`] code, or [`Failures`] that go to standard error. Results go to
//! standard output. All output passes through [`terminal`], because the print macros of the
//! standard library panic after the reader has closed the pipe.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod advise;
mod arguments;
mod bench;
mod browser;
mod built;
mod calibrate;
mod categories;
mod check;
mod ci;
mod compare;
mod demo;
mod device;
mod doctor;
mod error;
mod exec;
mod exit;
mod explain;
mod fleet;
mod help;
mod import;
mod inputs;
mod interrupt;
mod jobs;
mod journal;
mod kind;
mod last_failed;
mod library_host;
mod list;
mod mcp;
mod nvidia_smi;
mod probe;
mod program;
mod recorded;
mod replay;
mod report;
mod run;
mod scenario_process;
mod schema;
mod shell;
mod shrink;
mod simulated;
mod snapshots;
mod terminal;
#[cfg(test)]
mod tests;
mod timelines;
mod what_if;

use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use harness_exec::process;
use serde::Serialize;

use error::{CliError, Failures};
use terminal::ColorChoice;

fn main() -> ExitCode {
    process::survive_file_size_limit();
    if let Err(problem) = process::check_stack() {
        terminal::message(format_args!("error: {problem}"));
        return exit::Exit::Internal.into();
    }
    run()
}

/// Separate from `main`, so that the frame of `main` fits into a small stack.
#[inline(never)]
fn run() -> ExitCode {
    if nvidia_smi::is_asked() {
        return nvidia_smi::run();
    }
    let cli = Cli::parse();
    let failed = |failures: Failures| terminal::fail(failures).into();
    terminal::choose_colour(cli.color);
    let done = match cli.command {
        // These return the exit code of the program that they run.
        Command::Exec(command) => return command.run().unwrap_or_else(failed),
        Command::Squeeze(command) => return command.squeeze().unwrap_or_else(failed),
        Command::LibraryHost(command) => return command.run(),
        Command::ScenarioProcess(command) => return command.run(),
        Command::Demo(command) => command.run(),
        Command::Run(command) => command.run(),
        Command::Explain(command) => command.run(),
        Command::Fleet(command) => command.run(),
        Command::Mcp(command) => command.run(),
        Command::Completions(command) => command.run(),
        Command::Man(command) => command.run(),
        Command::Help(command) => command.run(),
        Command::Compare(command) => command.run(),
        Command::List(command) => command.run(),
        Command::Check(command) => command.run(),
        Command::Schema(command) => command.run(),
        Command::Doctor(command) => command.run(),
        Command::Replay(command) => command.run(),
        Command::Bench(command) => command.run(),
        Command::Report(command) => command.run(),
        Command::Calibrate(command) => command.run(),
        Command::Advise(command) => command.run(),
        Command::Shrink(command) => command.run(),
        Command::Import(command) => command.run(),
    };
    let exit = done.unwrap_or_else(terminal::fail);
    exit.into()
}

/// Test how programs and GPU memory allocators behave when GPU memory runs out, with or without a
/// GPU.
#[derive(Parser)]
#[command(
    name = "harness",
    version = built::version(),
    after_help = exit::explained(),
    arg_required_else_help = true,
    disable_help_subcommand = true,
)]
struct Cli {
    /// When to use colour; `auto`: on a terminal, unless NO_COLOR is set or TERM is `dumb`.
    #[arg(
        long,
        global = true,
        value_name = "WHEN",
        default_value = "auto",
        display_order = 100
    )]
    color: ColorChoice,
    #[command(subcommand)]
    command: Command,
}

/// The format of results on standard output.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people.
    Text,
    /// For programs: one document.
    Json,
}

impl Format {
    /// Prints a result on standard output.
    fn print(
        self,
        document: &impl Serialize,
        text: impl FnOnce() -> String,
    ) -> Result<(), CliError> {
        match self {
            Self::Text => terminal::print(&text()),
            Self::Json => terminal::print_json(document),
        }
    }
}

#[derive(Subcommand)]
enum Command {
    Demo(demo::Demo),
    Run(run::Run),
    Exec(Box<exec::Exec>),
    /// Alias of `harness exec --leave-free`.
    #[command(hide = true)]
    Squeeze(Box<exec::Exec>),
    Explain(explain::Explain),
    Fleet(fleet::Fleet),
    Compare(compare::Compare),
    List(list::List),
    Check(check::Check),
    Schema(schema::Schema),
    Doctor(doctor::Doctor),
    Replay(replay::Replay),
    Bench(bench::Bench),
    Report(report::Report),
    Calibrate(calibrate::Calibrate),
    Advise(advise::Advise),
    Shrink(shrink::Shrink),
    Import(import::Import),
    Mcp(mcp::Mcp),
    Completions(shell::Completions),
    Man(shell::Man),
    Help(help::Help),
    #[command(hide = true)]
    LibraryHost(library_host::LibraryHost),
    #[command(hide = true)]
    ScenarioProcess(scenario_process::ScenarioProcess),
}
