//! The explanation of one moment as plain data: [`Explanation`].

use std::collections::BTreeMap;

use harness_allocator::{device::Clock, units::Bytes};
use harness_record::FailedRequest;
use harness_trace::snapshot::{RecordedHostMemory, RunInfo};
use serde::Serialize;

use crate::byte_cause::{ByteCause, CauseBytes, SiteBytes};
use crate::categories::CategoryBytes;
use crate::sites::{AllocationSite, SiteId};
use crate::view::{RefusedRequest, TotalKnown, Totals};
use crate::{
    attempts::FailedAttempt, fidelity::Fidelity, growth::Growth, idle::IdleStream,
    pins::SegmentPin, state::Moment, waits::FreeWait,
};

/// The use of a device's memory at one moment, and why a request failed.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    pub headline: String,
    /// The sum of [`Self::causes`].
    pub device_total: Bytes,
    pub device_total_is: TotalKnown,
    pub device: u32,
    pub moment: Moment,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<RefusedRequest>,
    /// The figures of PyTorch's own error message.
    pub accounts: Totals,
    /// Uses of memory, and reasons why free memory is not usable. The bytes add up to
    /// [`Self::device_total`].
    pub causes: Vec<CauseBytes>,
    pub why: Vec<&'static str>,
    /// Each attempt to serve the request and why it failed, in the allocator's order.
    pub ways: Vec<FailedAttempt>,
    /// Partly free segments that cannot be released, most free bytes first.
    pub pinned: Vec<SegmentPin>,
    /// Frees that waited long for other streams. Those that still wait come first.
    pub stalled_frees: Vec<FreeWait>,
    /// Streams that no longer allocate, with cached memory, although others reserved more. Empty if
    /// a request failed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub idle_streams: Vec<IdleStream>,
    /// Sites whose live bytes grow with each iteration, fastest first.
    pub growing: Vec<Growth>,
    /// Allocated memory by purpose. Empty if the recording has no Python frames.
    pub categories: Vec<CategoryBytes>,
    /// Earlier requests that failed while the program continued.
    pub survived_ooms: usize,
    /// Pinned host memory at the time of the snapshot. `None` for snapshots of PyTorch, which do
    /// not contain it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_memory: Option<RecordedHostMemory>,
    pub notes: Vec<String>,
    /// True if a replay with the recorded settings matches the recording, so replays with other
    /// settings are reliable. `None` without events, or for another allocator than PyTorch's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fidelity: Option<Fidelity>,
    /// Every site that appears above, by id.
    pub sites: BTreeMap<SiteId, AllocationSite>,
    /// The program's settings in the form of `PYTORCH_ALLOC_CONF`. `None` if the file has none.
    pub conf: Option<String>,
    /// The harness run that wrote the snapshot. `None` for snapshots of PyTorch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<RunInfo>,
    /// The data from which the cause sentences are made.
    #[serde(skip)]
    pub failed_request: Option<FailedRequest>,
}

impl Explanation {
    pub fn bytes(&self, cause: ByteCause) -> Bytes {
        self.causes
            .iter()
            .find(|of| of.cause == cause)
            .map_or(Bytes::ZERO, |of| of.bytes)
    }

    pub(crate) fn largest_site(&self, cause: ByteCause) -> Option<&SiteBytes> {
        self.causes
            .iter()
            .find(|of| of.cause == cause)?
            .sites
            .first()
    }

    /// Returns true if the recorded times come from a simulated device.
    pub fn has_simulated_times(&self) -> bool {
        self.run
            .as_ref()
            .is_some_and(|run| run.clock == Clock::Simulated)
    }

    pub(crate) fn named_sites(&self) -> impl Iterator<Item = SiteId> {
        let of_causes = self
            .causes
            .iter()
            .flat_map(|cause| cause.sites.iter().map(|site| site.id));
        let of_categories = self
            .categories
            .iter()
            .flat_map(|category| category.sites.iter().map(|site| site.id));
        let others = self
            .pinned
            .iter()
            .map(|segment| segment.by.id)
            .chain(self.stalled_frees.iter().map(|wait| wait.id));
        let others = others.chain(self.idle_streams.iter().map(|idle| idle.id));
        of_causes
            .chain(of_categories)
            .chain(others)
            .chain(self.growing.iter().map(|growth| growth.id))
            .chain(self.request.iter().map(|request| request.id))
    }
}
