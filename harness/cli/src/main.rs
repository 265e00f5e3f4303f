//! The program `harness`: its command line is in [`cli`], everything else in the library.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
