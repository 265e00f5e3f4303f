//! What is known at one moment of a recording: [`View`]; the request that was refused then, and the sums over the device.

use harness_allocator::allocator::caching::Config;
use harness_allocator::stats::PoolKind;
use harness_allocator::units::Bytes;
use harness_trace::snapshot::{Block, Event, Segment, Snapshot};
use serde::Serialize;

use crate::bytes::{ByteCause, CauseBytes};
use crate::sites::{SiteId, Sites};
use crate::state::{History, Moment, MomentKind, State};

/// All that is known at the moment.
pub(crate) struct View<'a> {
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) device: u32,
    pub(crate) config: &'a Config,
    pub(crate) history: &'a History<'a>,
    pub(crate) state: &'a State,
    pub(crate) sites: &'a Sites,
    pub(crate) moment: &'a Moment,
    /// Whether it was recorded from another allocator than PyTorch's, whose rules say nothing of it then.
    pub(crate) is_foreign: bool,
}

impl View<'_> {
    /// The event at which a request was refused, if the moment is one.
    pub(crate) fn oom(&self) -> Option<(usize, &Event)> {
        let index = self.moment.event.filter(|_| self.moment.at == MomentKind::Oom)?;
        Some((index, &self.history.events()[index]))
    }

    pub(crate) fn site_of(&self, block: &Block) -> SiteId {
        self.sites.of_block(self.state.origin(block.address).allocated, block.stack)
    }
}

/// A request that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Refused {
    /// What the program asked for.
    pub requested: Bytes,
    /// The block that it needs.
    pub rounded: Bytes,
    /// What that takes from the driver: PyTorch's message says that it tried to allocate this.
    pub asked: Bytes,
    pub stream: u64,
    /// Small or large blocks.
    pub pool: PoolKind,
    /// The private pool that the request was for; `None` for the default pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub private_pool: Option<(u64, u64)>,
    pub site: String,
    /// The same, in [`crate::causes::Explanation::sites`].
    pub id: SiteId,
}

/// Sums over the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Totals {
    /// What the owners of blocks asked for.
    pub requested: Bytes,
    pub allocated: Bytes,
    /// The same, with what was freed and waits for other streams.
    pub active: Bytes,
    /// What is held from the driver.
    pub reserved: Bytes,
    /// What the driver had free, where an `oom` event tells it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_free: Option<Bytes>,
}

/// How the device's memory is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TotalKnown {
    /// The user told it.
    Given,
    /// The snapshot tells it: it is of a run of ours.
    Recorded,
    /// What was reserved and what was free when a request was refused: less than the device by what others and the CUDA context held.
    AtOom,
    /// Nothing tells it: the total is what was reserved.
    ReservedOnly,
}

/// The device's memory, as far as it is known.
pub(crate) struct DeviceSize {
    pub(crate) total: Bytes,
    pub(crate) known: TotalKnown,
    /// What the allocator does not hold.
    pub(crate) outside: Vec<CauseBytes>,
}

impl View<'_> {
    /// Why a request cannot have what is free in a segment, if it cannot by the rules of PyTorch's allocator.
    pub(crate) fn closed_to(&self, request: &Refused, segment: &Segment) -> Option<ByteCause> {
        if self.is_foreign { None } else { other_lane(segment, request) }
    }
}

/// The same where it is PyTorch's allocator.
pub(crate) fn other_lane(segment: &Segment, request: &Refused) -> Option<ByteCause> {
    let own_pool = request.private_pool.unwrap_or_default();
    if (segment.private_pool.0, segment.private_pool.1) != own_pool {
        return Some(ByteCause::PrivatePool);
    }
    if segment.pool != request.pool {
        return Some(ByteCause::OtherPool);
    }
    (segment.stream != request.stream).then_some(ByteCause::OtherStream)
}
