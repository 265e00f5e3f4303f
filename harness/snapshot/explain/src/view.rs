//! The data about one moment of a recording: [`View`], with the failed request and sums over the
//! device.

use harness_allocator::{allocator::caching::Config, stats::PoolKind, units::Bytes};
use harness_trace::snapshot::{Block, Event, MempoolId, Segment, Snapshot};
use serde::Serialize;

use crate::byte_cause::{ByteCause, CauseBytes};
use crate::sites::{SiteId, Sites};
use crate::state::{History, Moment, MomentKind, State};

pub(crate) struct View<'a> {
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) device: u32,
    pub(crate) config: &'a Config,
    pub(crate) history: &'a History<'a>,
    pub(crate) state: &'a State,
    pub(crate) sites: &'a Sites,
    pub(crate) moment: &'a Moment,
    /// True if another allocator than PyTorch's was recorded, to which PyTorch's rules do not
    /// apply.
    pub(crate) is_foreign: bool,
}

impl View<'_> {
    /// The event of the failed request, if the moment is an OOM.
    pub(crate) fn oom(&self) -> Option<(usize, &Event)> {
        let index = self
            .moment
            .event
            .filter(|_| self.moment.at == MomentKind::Oom)?;
        Some((index, &self.history.events()[index]))
    }

    pub(crate) fn site_of(&self, block: &Block) -> SiteId {
        self.sites
            .of_block(self.state.origin(block.address).allocated, block.stack)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RefusedRequest {
    pub requested: Bytes,
    pub rounded: Bytes,
    /// The memory to reserve for it, as in PyTorch's message "Tried to allocate".
    pub asked: Bytes,
    pub stream: u64,
    pub pool: PoolKind,
    #[serde(skip_serializing_if = "MempoolId::is_default")]
    pub private_pool: MempoolId,
    /// True if the recording does not contain the pool, so it is only probable. PyTorch before 2.12
    /// does not record it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_pool_inferred: bool,
    pub site: String,
    pub id: SiteId,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    pub requested: Bytes,
    pub allocated: Bytes,
    /// Requested bytes including pending frees.
    pub active: Bytes,
    pub reserved: Bytes,
    /// The driver's free memory, if an `oom` event contains it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_free: Option<Bytes>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TotalKnown {
    Given,
    /// The snapshot of a harness run contains it.
    Recorded,
    /// Reserved plus free memory at an OOM. Excludes other processes and the CUDA context.
    AtOom,
    /// Unknown. The total is the reserved memory.
    ReservedOnly,
}

pub(crate) struct DeviceSize {
    pub(crate) total: Bytes,
    pub(crate) known: TotalKnown,
    pub(crate) outside: Vec<CauseBytes>,
}

/// Why a request cannot use free memory of a segment under PyTorch's rules, if it cannot.
pub(crate) fn pool_mismatch(segment: &Segment, request: &RefusedRequest) -> Option<ByteCause> {
    match segment {
        _ if segment.private_pool != request.private_pool => Some(ByteCause::PrivatePool),
        _ if segment.pool != request.pool => Some(ByteCause::OtherPool),
        _ => (segment.stream != request.stream).then_some(ByteCause::OtherStream),
    }
}
