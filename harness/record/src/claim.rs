//! Claims about GPU memory, and the result of testing them.

use std::fmt;

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    pub says: String,
    /// A link to the source, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// The result of the scenario's expectations.
    pub verdict: ClaimVerdict,
    /// The explanation and its conditions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub because: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClaimVerdict {
    Holds,
    HoldsWithConditions,
    DoesNotHold,
    CannotBeTested,
}

impl ClaimVerdict {
    pub const ALL: [Self; 4] = [Self::Holds, Self::HoldsWithConditions, Self::DoesNotHold, Self::CannotBeTested];

    /// The name in YAML.
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

/// A figure measured for a claim, as text with its unit. `None` if this run did not measure it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimFigure {
    pub name: String,
    /// Measured by a PyTorch program on the simulated GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pytorch: Option<String>,
    /// Measured by the scenario's own steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub harness: Option<String>,
}
