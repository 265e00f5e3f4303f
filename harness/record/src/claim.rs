//! Claims: what is said of memory on GPUs, and what a scenario found of it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A claim that a scenario puts to the test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The claim, in a sentence.
    pub says: String,
    /// Where it is made, if it is made at one place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// What the scenario's expectations show.
    pub verdict: ClaimVerdict,
    /// Why, and under which conditions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub because: Option<String>,
}

/// Whether a claim is true.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum ClaimVerdict {
    Holds,
    HoldsWithConditions,
    DoesNotHold,
    CannotBeTested,
}

impl ClaimVerdict {
    /// Every one.
    pub const ALL: [Self; 4] = [Self::Holds, Self::HoldsWithConditions, Self::DoesNotHold, Self::CannotBeTested];

    /// As YAML has it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Holds => "holds",
            Self::HoldsWithConditions => "holds_with_conditions",
            Self::DoesNotHold => "does_not_hold",
            Self::CannotBeTested => "cannot_be_tested",
        }
    }
}

impl fmt::Display for ClaimVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Holds => "holds",
            Self::HoldsWithConditions => "holds with conditions",
            Self::DoesNotHold => "does not hold",
            Self::CannotBeTested => "cannot be tested here",
        })
    }
}

/// A figure that was measured for a claim, as text with its unit. `None`: not in this run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimFigure {
    /// Of what.
    pub name: String,
    /// By a PyTorch program on the simulated GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pytorch: Option<String>,
    /// By the scenario's own steps with the allocator of the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub harness: Option<String>,
}
