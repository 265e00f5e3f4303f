use harness_allocator::units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};

/// Maximum number of attempts in a record. The first attempts around failures are kept.
pub const MAX_LISTED_ATTEMPTS: usize = 64;

/// The result of a step with recovery policies, whether or not an attempt failed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recovery {
    /// The policies, in the order in which they apply.
    pub policies: String,
    pub attempts: u64,
    /// Attempts that follow a failed one.
    pub retries: u64,
    /// Retries that failed because no memory had changed since the previous attempt.
    pub without_progress: u64,
    /// Each series of failed attempts and the attempt after it: at most [`MAX_LISTED_ATTEMPTS`].
    pub listed: Vec<Attempt>,
    /// Number of such attempts that are not listed.
    #[serde(default)]
    pub unlisted: u64,
    /// Time spent in failed attempts and the actions after them. `None` if the run was not timed.
    pub lost: Option<Nanos>,
    /// Cached bytes that policies released to the driver.
    pub given_back: Bytes,
    /// The largest number of bytes that a failed attempt left allocated. 0 means no leak.
    pub retained: Bytes,
    /// Identifies the trained model, batches and settings without the policies: only equal
    /// trainings are alternatives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workload: Option<String>,
    /// The training's result. `None` if the step made a single request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trained: Option<Trained>,
    /// Host memory that the step used.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub host: HostUse,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostUse {
    pub peak: Bytes,
    /// Bytes copied in both directions, including failed attempts.
    pub copied: Bytes,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trained {
    /// Samples in memory during the last completed iteration. 0 if none completed.
    pub final_batch: u64,
    /// Samples whose gradients form one update in that iteration.
    pub effective_batch: u64,
    /// Samples of all completed iterations.
    pub samples: u64,
    /// A description of the last completed iteration.
    pub plan: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    pub asked: String,
    /// Why it failed. `None` if it succeeded.
    pub failed: Option<String>,
    /// The action after it. `None` if there was none.
    pub then: Option<String>,
    /// Duration of the attempt and the action. `None` if the run was not timed.
    pub time: Option<Nanos>,
}

impl Recovery {
    /// Adds an attempt, or counts it if the list is full.
    pub fn list(&mut self, attempt: Attempt) {
        if self.listed.len() < MAX_LISTED_ATTEMPTS {
            self.listed.push(attempt)
        } else {
            self.unlisted += 1
        }
    }

    /// Returns a copy without times, to compare decisions.
    pub fn decisions(&self) -> Self {
        let listed = self
            .listed
            .iter()
            .map(|attempt| Attempt {
                time: None,
                ..attempt.clone()
            })
            .collect();
        Self {
            lost: None,
            listed,
            ..self.clone()
        }
    }

    /// Copies times from another run of the same step. Attempts get times only if both runs made
    /// the same ones.
    pub fn add_times(&mut self, timed: &Self) {
        self.lost = timed.lost;
        let asked = |recovery: &Self| {
            recovery
                .listed
                .iter()
                .map(|attempt| attempt.asked.clone())
                .collect::<Vec<_>>()
        };
        if asked(self) == asked(timed) {
            self.listed
                .iter_mut()
                .zip(&timed.listed)
                .for_each(|(attempt, timed)| attempt.time = timed.time);
        }
    }
}
