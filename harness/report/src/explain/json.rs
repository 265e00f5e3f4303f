//! Explanations for programs. The bytes of `causes` add up to `device_total`.

use harness_explain::causes::Explanation;
use harness_explain::ranks::Overview;
use serde::Serialize;

use crate::why;

/// One snapshot, or one device of it: the explanation, with the causes of the refused request in words.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Document<'a> {
    pub snapshot: &'a str,
    #[serde(flatten)]
    pub explanation: &'a Explanation,
    /// Why free memory did not help, or why there was too little.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why_in_words: Option<String>,
}

impl<'a> Document<'a> {
    /// The explanation of that file.
    #[must_use]
    pub fn new(snapshot: &'a str, explanation: &'a Explanation) -> Self {
        Self { snapshot, explanation, why_in_words: explanation.shortage.as_ref().map(why::explain) }
    }
}

/// Several snapshots.
#[derive(Clone, Debug, Serialize)]
pub struct Documents<'a> {
    /// Which failed, and where they differ.
    #[serde(flatten)]
    pub overview: &'a Overview,
    /// Each of them.
    pub snapshots: Vec<Document<'a>>,
}
