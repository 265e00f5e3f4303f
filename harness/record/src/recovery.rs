//! What the recovery policies of a step did.

use harness_allocator::units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};

/// Attempts of one step that a record keeps: the first ones around failures.
pub const MAX_LISTED_ATTEMPTS: usize = 64;

/// How a step with recovery policies came to its end, whether or not something failed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recovery {
    /// The policies, in the order in which they are tried.
    pub policies: String,
    /// All tries, those that succeeded at once included.
    pub attempts: u64,
    /// Tries after a failed one.
    pub retries: u64,
    /// Retries that failed because nothing had changed since the try before.
    pub without_progress: u64,
    /// The failed tries, and the one behind each row of them: at most [`MAX_LISTED_ATTEMPTS`].
    pub listed: Vec<Attempt>,
    /// Attempts of that kind that are not listed.
    #[serde(default)]
    pub unlisted: u64,
    /// Time of the failed tries and of what the policies did after them; `None` where nobody timed it.
    pub lost: Option<Nanos>,
    /// Cached bytes that policies gave back to the driver.
    pub given_back: Bytes,
    /// The most allocated bytes that a failed try left behind: 0 where nothing leaks.
    pub retained: Bytes,
    /// Identifies the trained model, batches and settings without the policies: only equal trainings are alternatives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload: Option<String>,
    /// What was trained; `None` of one request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trained: Option<Trained>,
    /// What was kept in host memory meanwhile.
    #[serde(default, skip_serializing_if = "HostUse::is_nothing")]
    pub host: HostUse,
}

/// What a step kept in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostUse {
    /// The most that was held at once.
    pub peak: Bytes,
    /// What was copied there and back, failed tries included.
    pub copied: Bytes,
}

impl HostUse {
    /// Whether there was none.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// What a training with recovery policies achieved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trained {
    /// Samples that were in memory at once in the last iteration that completed; 0 where none did.
    pub final_batch: u64,
    /// Samples whose gradients were added up for one update in that iteration.
    pub effective_batch: u64,
    /// Samples of all iterations that completed.
    pub samples: u64,
    /// How that iteration was done, in words.
    pub plan: String,
}

/// One try.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// What it asked for, in words.
    pub asked: String,
    /// Why it failed; `None`: it did not.
    pub failed: Option<String>,
    /// What was done after it; `None`: nothing more.
    pub then: Option<String>,
    /// How long the try and what was done after it took; `None` where nobody timed it.
    pub time: Option<Nanos>,
}

impl Recovery {
    /// Keeps a try, if there is room.
    pub fn list(&mut self, attempt: Attempt) {
        match self.listed.len() < MAX_LISTED_ATTEMPTS {
            true => self.listed.push(attempt),
            false => self.unlisted += 1,
        }
    }

    /// The same without times: what was decided.
    #[must_use]
    pub fn decisions(&self) -> Self {
        let listed = self.listed.iter().map(|attempt| Attempt { time: None, ..attempt.clone() }).collect();
        Self { lost: None, listed, ..self.clone() }
    }

    /// Takes the times of another run of the same step. Those of its tries only where it did the same.
    pub fn add_times(&mut self, timed: &Self) {
        self.lost = timed.lost;
        let asked = |recovery: &Self| recovery.listed.iter().map(|attempt| attempt.asked.clone()).collect::<Vec<_>>();
        if asked(self) == asked(timed) {
            for (attempt, timed) in self.listed.iter_mut().zip(&timed.listed) {
                attempt.time = timed.time;
            }
        }
    }
}
