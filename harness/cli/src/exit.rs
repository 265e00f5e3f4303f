use std::process::ExitCode;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Passed = 0,
    Failed = 1,
    Invalid = 2,
    Device = 3,
    Internal = 4,
    /// A benchmark comparison supports no conclusion: the accepted build was not measured, too many
    /// entries are unsure, or the machine was contended.
    Inconclusive = 5,
    Interrupted = 130,
}

impl Exit {
    const ALL: [Self; 7] = [
        Self::Passed,
        Self::Failed,
        Self::Invalid,
        Self::Device,
        Self::Internal,
        Self::Inconclusive,
        Self::Interrupted,
    ];

    const fn about(self) -> &'static str {
        match self {
            Self::Passed => "success: every expectation is met",
            Self::Failed => {
                "an expectation or invariant fails, a step exceeds its time limit, a recording \
                 differs, or a benchmark fails or is worse"
            }
            Self::Invalid => {
                "a scenario, suite, recording, trace, benchmark run or argument is not valid"
            }
            Self::Device => {
                "the device is missing or too small for every run, or other processes disturbed it"
            }
            Self::Internal => "the harness itself failed, or could not write its output or report",
            Self::Inconclusive => {
                "a benchmark comparison is inconclusive: no accepted build, too many unsure \
                 entries, or a contended machine"
            }
            Self::Interrupted => {
                "interrupted (Ctrl-C); the report of `run` contains the finished steps"
            }
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

pub(crate) fn explained() -> String {
    let lines = Exit::ALL.map(|exit| format!("  {:<4} {}", exit as u8, exit.about()));
    format!("Exit codes:\n{}", lines.join("\n"))
}
