//! [`FaultedRuns`]: what came of runs in which one call of the device failed, each call in its turn.

use harness_allocator::units::Bytes;
use serde::{Deserialize, Serialize};

/// Many runs of scenarios, in each of which another call failed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FaultedRuns {
    /// By scenario and allocator.
    pub arms: Vec<FaultedArm>,
    /// Runs that an interrupt left out.
    pub left_out: usize,
}

/// A scenario with one allocator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct FaultedArm {
    pub scenario: String,
    pub allocator: String,
    /// Calls that can fail, in the run without failures, by all processes.
    pub calls: usize,
    /// Of them, those that were not tried because they repeat one that was: the same call in the same state, whose failure ended the run at once.
    #[serde(default)]
    pub repeats: usize,
    /// Which were made to fail, in words.
    pub chosen: String,
    /// A run for each, and one more where the allocator healed the failure and its next attempt can fail too.
    pub cases: Vec<FaultedCase>,
    /// Why nothing was tried: nothing can be said where the run without failures does not pass.
    pub not_tried: Option<NotTried>,
}

/// Why nothing was tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotTried {
    /// In words.
    pub why: String,
    /// Whether the run without failures failed, so that this is no answer.
    pub failed: bool,
}

/// A run in which a call failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FaultedCase {
    /// The process of the scenario that made the call; `None`: the main one.
    #[serde(default)]
    pub process: Option<String>,
    /// The call, by the driver's name.
    pub call: String,
    /// Which of its kind in its process, counted from 1.
    pub number: u64,
    /// How many failed from there on.
    pub count: u64,
    /// What it asked for, where it asks for memory.
    pub size: Option<Bytes>,
    /// The step in which it was made; 0 before the first.
    pub step: u32,
    /// What came of it.
    #[serde(flatten)]
    pub end: FaultedEnd,
    /// A command that does the same again.
    pub reproduce: String,
}

/// What came of a call that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum FaultedEnd {
    /// The allocator went on: it asked again, or did without.
    Healed,
    /// The allocator was out of memory, and the scenario went on and passed.
    Recovered,
    /// The allocator was out of memory, and said so.
    OutOfMemory,
    /// The run ended with an error that names the call.
    Told { error: String },
    /// Something that should hold however calls fail did not.
    Defect {
        /// What.
        why: String,
    },
}

impl FaultedRuns {
    /// All runs.
    pub fn cases(&self) -> impl Iterator<Item = &FaultedCase> {
        self.arms.iter().flat_map(|arm| &arm.cases)
    }

    /// Whether every run ended as it should, and every arm could be tried.
    #[must_use]
    pub fn passed(&self) -> bool {
        let is_fine = |arm: &FaultedArm| arm.not_tried.as_ref().is_none_or(|not| !not.failed);
        self.arms.iter().all(is_fine) && !self.cases().any(FaultedCase::is_defect)
    }
}

impl FaultedCase {
    /// Whether something is wrong.
    #[must_use]
    pub const fn is_defect(&self) -> bool {
        matches!(self.end, FaultedEnd::Defect { .. })
    }
}
