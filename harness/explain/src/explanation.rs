//! What is found about one moment of a recording, as plain data: [`Explanation`].

use std::collections::BTreeMap;

use harness_allocator::device::Clock;
use harness_allocator::units::Bytes;
use harness_record::Shortage;
use harness_trace::snapshot::RunInfo;
use serde::Serialize;

use crate::attempts::FailedAttempt;
use crate::bytes::{ByteCause, CauseBytes};
use crate::fidelity::Fidelity;
use crate::growth::Growth;
use crate::pins::PinnedSegment;
use crate::sites::{Site, SiteId};
use crate::state::Moment;
use crate::view::{Refused, TotalKnown, Totals};
use crate::waits::Wait;

/// Where a device's memory is at one moment, and why a request failed then.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Explanation {
    /// The sentence that matters first.
    pub headline: String,
    /// The sum of [`Self::causes`].
    pub device_total: Bytes,
    /// How the total is known.
    pub device_total_is: TotalKnown,
    /// The device's index in the snapshot.
    pub device: u32,
    pub moment: Moment,
    /// The request that was refused then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<Refused>,
    /// The figures that PyTorch's own message has too.
    pub accounts: Totals,
    /// What the memory is used for, or why it is not of use. The bytes add up to [`Self::device_total`].
    pub causes: Vec<CauseBytes>,
    /// Why the request failed, by the names that scenarios have.
    pub why: Vec<&'static str>,
    /// Each way of serving the request, and why it failed; in the order in which the allocator tries them.
    pub ways: Vec<FailedAttempt>,
    /// Segments that cannot go back to the driver though part of them is free, those with the most free bytes first.
    pub pinned: Vec<PinnedSegment>,
    /// Frees that waited long for other streams; those that still do first.
    pub stalled_frees: Vec<Wait>,
    /// Sites whose live bytes grow from iteration to iteration, the fastest first.
    pub growing: Vec<Growth>,
    /// Requests that were refused before and survived.
    pub survived_ooms: usize,
    /// What else the reader of the figures should know.
    pub notes: Vec<String>,
    /// Whether a replay under the recorded settings does what was recorded, so that what it does under others can be trusted. `None` where nothing
    /// was recorded, or another allocator than PyTorch's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fidelity: Option<Fidelity>,
    /// Every site that is named above, by [`crate::bytes::SiteBytes::id`] and its like.
    pub sites: BTreeMap<SiteId, Site>,
    /// The settings under which the program ran, as `PYTORCH_ALLOC_CONF` has them; `None` where the file does not tell.
    pub conf: Option<String>,
    /// The run of ours that the snapshot is of; `None` for snapshots of PyTorch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<RunInfo>,
    /// What was known when the request failed, for the sentences of the causes.
    #[serde(skip)]
    pub shortage: Option<Shortage>,
}

impl Explanation {
    /// The bytes of a cause; zero where there are none.
    #[must_use]
    pub fn bytes(&self, cause: ByteCause) -> Bytes {
        self.causes.iter().find(|of| of.cause == cause).map_or(Bytes::ZERO, |of| of.bytes)
    }

    /// What is reserved and not allocated, as PyTorch's message has it.
    #[must_use]
    pub const fn reserved_but_unallocated(&self) -> Bytes {
        self.accounts.reserved.saturating_sub(self.accounts.allocated)
    }

    /// Whether the times of the recording are those of a simulated device.
    #[must_use]
    pub fn has_simulated_times(&self) -> bool {
        self.run.as_ref().is_some_and(|run| run.clock == Clock::Simulated)
    }

    pub(crate) fn named_sites(&self) -> impl Iterator<Item = SiteId> {
        let of_causes = self.causes.iter().flat_map(|cause| cause.sites.iter().map(|site| site.id));
        let others = self.pinned.iter().map(|segment| segment.by.id).chain(self.stalled_frees.iter().map(|wait| wait.id));
        of_causes.chain(others).chain(self.growing.iter().map(|growth| growth.id)).chain(self.request.iter().map(|request| request.id))
    }
}
