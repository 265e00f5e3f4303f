use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    pub says: String,
    /// A link to the source, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    pub verdict: ClaimVerdict,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub because: Option<String>,
}

described! {
    /// The result of testing a claim, with its words in reports.
    ClaimVerdict, words:
    Holds = "holds": "holds",
    HoldsWithConditions = "holds_with_conditions": "holds with conditions",
    DoesNotHold = "does_not_hold": "does not hold",
    CannotBeTested = "cannot_be_tested": "cannot be tested here",
}

/// A figure measured for a claim, as text with its unit. `None` if this run did not measure it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimFigure {
    pub name: String,
    /// Measured by a PyTorch program on the simulated GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pytorch: Option<String>,
    /// Measured by the scenario's own steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub harness: Option<String>,
}
