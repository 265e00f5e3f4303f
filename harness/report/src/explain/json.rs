//! Explanations as JSON. The bytes of `causes` add up to `device_total`.

use harness_explain::{causes::Explanation, ranks::Overview};
use serde::Serialize;

use crate::why;

/// One snapshot, or one device of it, with the causes of the failed request as sentences.
#[derive(Clone, Debug, Serialize)]
pub struct ExplainDocument<'a> {
    pub snapshot: &'a str,
    #[serde(flatten)]
    pub explanation: &'a Explanation,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why_in_words: Option<String>,
}

impl<'a> ExplainDocument<'a> {
    pub fn new(snapshot: &'a str, explanation: &'a Explanation) -> Self {
        Self {
            snapshot,
            explanation,
            why_in_words: explanation.failed_request.as_ref().map(why::explain),
        }
    }
}

#[derive(Clone, Debug, Serialize)]
pub struct Documents<'a> {
    /// The failed ranks, and differences between ranks.
    #[serde(flatten)]
    pub overview: &'a Overview,
    pub snapshots: Vec<ExplainDocument<'a>>,
}
