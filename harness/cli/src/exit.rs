//! The exit codes: [`Exit`].

use std::process::ExitCode;

/// What the program's end says to the program that called it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Everything asked for was done, and everything expected was seen.
    Passed = 0,
    /// An expectation or an invariant does not hold, a recording differs from its replay, what a benchmark times does not work, or a benchmark is
    /// worse than the one that it is compared with.
    Failed = 1,
    /// A scenario, a suite, a recording, a trace, a benchmark run or an argument is not valid. Nothing was done, or not with that one.
    Invalid = 2,
    /// The device is missing, too small or unusable, other processes disturbed it, or every run was skipped.
    Device = 3,
    /// The harness itself failed, for example because the report could not be written.
    Internal = 4,
    /// A benchmark comparison supports no conclusion: the accepted build was not measured, or too many entries are unsure.
    Inconclusive = 5,
    /// The user interrupted.
    Interrupted = 130,
}

impl Exit {
    const ALL: [Self; 7] = [Self::Passed, Self::Failed, Self::Invalid, Self::Device, Self::Internal, Self::Inconclusive, Self::Interrupted];

    /// For people, in the help.
    const fn about(self) -> &'static str {
        match self {
            Self::Passed => "everything expected was seen",
            Self::Failed => {
                "an expectation or invariant fails, a step exceeds its time limit, a recording differs, or a benchmark fails or is worse"
            }
            Self::Invalid => "a scenario, a suite, a recording, a trace, a benchmark run or an argument is not valid",
            Self::Device => "the device is missing or too small, other processes disturbed it, or every run was skipped",
            Self::Internal => "the harness itself failed, or could not write output or report",
            Self::Inconclusive => "a benchmark comparison is inconclusive: no accepted build, or too many unsure entries",
            Self::Interrupted => "interrupted (Ctrl-C); the report of `run` holds what was done",
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// The table of exit codes, for the help.
pub(crate) fn explained() -> String {
    let lines = Exit::ALL.map(|exit| format!("  {:<4} {}", exit as u8, exit.about()));
    format!("Exit codes:\n{}", lines.join("\n"))
}
