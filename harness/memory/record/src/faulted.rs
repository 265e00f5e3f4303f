use harness_allocator::units::Bytes;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FaultedRuns {
    /// One entry per scenario and allocator.
    pub arms: Vec<FaultedArm>,
    /// Runs that did not start because the session was interrupted.
    pub left_out: usize,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FaultedArm {
    pub scenario: String,
    pub allocator: String,
    /// Calls that can fail, over all processes of the run without failures.
    pub calls: usize,
    /// Calls that were not tried because an equal call in the same state was tried and ended the
    /// run.
    #[serde(default)]
    pub repeats: usize,
    /// A description of the calls that were made to fail.
    pub chosen: String,
    /// One run per call. If the allocator recovered from the failure and its next attempt can fail
    /// too, one more run fails both.
    pub cases: Vec<FaultedCase>,
    /// Why no call was failed. The run without failures must pass first.
    pub not_tried: Option<NotTried>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotTried {
    pub why: String,
    /// `true` if the run without failures failed. The result is then unknown.
    pub failed: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FaultedCase {
    /// The scenario's process that made the call. `None` for the main process.
    pub process: Option<String>,
    /// The call's name in the driver API.
    pub call: String,
    /// Position among the calls of this name in its process, counted from 1.
    pub number: u64,
    pub count: u64,
    pub size: Option<Bytes>,
    /// The step that made the call; 0 before the first step.
    pub step: u32,
    #[serde(flatten)]
    pub end: FaultOutcome,
    pub reproduce: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum FaultOutcome {
    /// The allocator continued: it tried again or managed without the memory.
    Healed,
    /// The allocator reported an out-of-memory error; the scenario handled it and passed.
    Recovered,
    /// The allocator reported an out-of-memory error and the run ended.
    OutOfMemory,
    /// The run ended with an error that names the call.
    NamedError { error: String },
    /// A rule was broken that holds whichever calls fail.
    Defect { why: String },
}

impl FaultedRuns {
    pub fn cases(&self) -> impl Iterator<Item = &FaultedCase> {
        self.arms.iter().flat_map(|arm| &arm.cases)
    }

    /// Returns whether no run has a defect and no run without failures failed.
    pub fn passed(&self) -> bool {
        let is_fine = |arm: &FaultedArm| arm.not_tried.as_ref().is_none_or(|not| !not.failed);
        self.arms.iter().all(is_fine) && !self.cases().any(FaultedCase::is_defect)
    }
}

impl FaultedCase {
    pub const fn is_defect(&self) -> bool {
        matches!(self.end, FaultOutcome::Defect { .. })
    }
}
