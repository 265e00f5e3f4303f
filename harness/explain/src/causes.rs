//! Where a device's memory is at one moment of a recording, by cause, so that the bytes add up to the device's memory; and why a request failed.
//!
//! [`explain`] makes an [`Explanation`]. Every byte is counted once, for the first of these that holds:
//!
//! 1. in a block that is allocated: as `allocated` what was requested, as `rounding` the rest of the block;
//! 2. in a block that was freed and waits for other streams: `pending_free`;
//! 3. free, but in a private pool that the request is not served from: `private_pool`;
//! 4. free, but in the pool of the other size (small or large): `other_pool`;
//! 5. free, but for another stream: `other_stream`;
//! 6. free in a segment (of expandable memory: in pages) where nothing else is: `whole_segments`, which can go back to the driver;
//! 7. free in a segment, or page, that something else pins: `inactive_split`;
//! 8. not held by the allocator: `free` on the device, or `others_hold`.
//!
//! 4 and 5 hold only where a request was refused: without one, no stream and no size is the other one.

mod view;

use std::collections::BTreeMap;

use harness_allocator::allocator::caching::Config;
use harness_allocator::stats::PoolKind;
use harness_allocator::units::Bytes;
use harness_record::{CauseKind, Shortage};
use harness_trace::job::JobError;
use harness_trace::snapshot::{Action, Snapshot};
use serde::Serialize;

pub(crate) use self::view::{DeviceSize, View, other_lane};

use crate::fidelity::{self, Fidelity};
use crate::growth::{self, Growth};
use crate::pins::{self, PinnedSegment};
use crate::sites::{Site, SiteId, Sites};
use crate::state::{At, History, Moment, MomentError, MomentKind};
use crate::waits::{self, Wait};
use crate::ways::{self, Way};

/// What to explain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The device's memory, where the user tells it.
    pub memory: Option<Bytes>,
    /// The moment.
    pub at: At,
}

/// Where a device's memory is at one moment, and why a request failed then.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// The sentence that matters first.
    pub headline: String,
    /// The sum of [`Self::causes`].
    pub device_total: Bytes,
    /// How the total is known.
    pub device_total_is: TotalKnown,
    /// The device's index in the snapshot.
    pub device: u32,
    /// The moment explained.
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
    pub ways: Vec<Way>,
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
    /// was recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fidelity: Option<Fidelity>,
    /// Every site that is named above, by [`SiteBytes::id`] and its like.
    pub sites: BTreeMap<SiteId, Site>,
    /// The settings under which the program ran, as `PYTORCH_ALLOC_CONF` has them; `None` where the file does not tell.
    pub conf: Option<String>,
    /// What was known when the request failed, for the sentences of the causes.
    #[serde(skip)]
    pub shortage: Option<Shortage>,
}

/// How the device's memory is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TotalKnown {
    /// The user told it.
    Given,
    /// What was reserved and what was free when a request was refused: less than the device by what others and the CUDA context held.
    AtOom,
    /// Nothing tells it: the total is what was reserved.
    ReservedOnly,
}

/// A request that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refused {
    /// What the program asked for.
    pub requested: Bytes,
    /// The block that it needs.
    pub rounded: Bytes,
    /// What that takes from the driver: PyTorch's message says that it tried to allocate this.
    pub asked: Bytes,
    /// The stream's handle.
    pub stream: u64,
    /// Small or large blocks.
    pub pool: PoolKind,
    /// The private pool that the request was for; `None` for the default pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub private_pool: Option<(u64, u64)>,
    /// Who asked.
    pub site: String,
    /// The same, in [`Explanation::sites`].
    pub id: SiteId,
}

/// Sums over the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// What the owners of blocks asked for.
    pub requested: Bytes,
    /// What they got.
    pub allocated: Bytes,
    /// The same, with what was freed and waits for other streams.
    pub active: Bytes,
    /// What is held from the driver.
    pub reserved: Bytes,
    /// What the driver had free, where an `oom` event tells it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_free: Option<Bytes>,
}

/// A use of memory, or what keeps it from being used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "each variant is described by `ByteCause::about`")]
pub enum ByteCause {
    Allocated,
    Rounding,
    PendingFree,
    OtherStream,
    OtherPool,
    PrivatePool,
    InactiveSplit,
    WholeSegments,
    OthersHold,
    Free,
    FreeOrOthersHold,
}

impl ByteCause {
    /// Every cause, in the order in which they are shown.
    pub const ALL: [Self; 11] = [
        Self::Allocated,
        Self::Rounding,
        Self::PendingFree,
        Self::OtherStream,
        Self::OtherPool,
        Self::PrivatePool,
        Self::InactiveSplit,
        Self::WholeSegments,
        Self::OthersHold,
        Self::Free,
        Self::FreeOrOthersHold,
    ];

    /// The name in JSON. Where a request can fail for the same reason, it is the name of that [`CauseKind`].
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allocated => "allocated",
            Self::Rounding => CauseKind::Rounding.name(),
            Self::PendingFree => CauseKind::PendingFree.name(),
            Self::OtherStream => CauseKind::OtherStream.name(),
            Self::OtherPool => CauseKind::OtherPool.name(),
            Self::PrivatePool => CauseKind::PrivatePool.name(),
            Self::InactiveSplit => "inactive_split",
            Self::WholeSegments => "whole_segments",
            Self::OthersHold => CauseKind::OthersHold.name(),
            Self::Free => "free",
            Self::FreeOrOthersHold => "free_or_others_hold",
        }
    }

    /// What it is, in a few words.
    #[must_use]
    pub const fn about(self) -> &'static str {
        match self {
            Self::Allocated => "allocated, as requested",
            Self::Rounding => "rounding of allocated blocks",
            Self::PendingFree => "freed, but other streams still use it",
            Self::OtherStream => "cached for another stream",
            Self::OtherPool => "cached for blocks of the other size",
            Self::PrivatePool => "cached in a private pool",
            Self::InactiveSplit => "free, but pinned in its segment",
            Self::WholeSegments => "free whole segments",
            Self::OthersHold => "other programs and the CUDA context",
            Self::Free => "free on the device",
            Self::FreeOrOthersHold => "not reserved: free, or held by others",
        }
    }
}

/// The bytes of one cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CauseBytes {
    /// Which one.
    pub cause: ByteCause,
    /// How many.
    pub bytes: Bytes,
    /// In how many blocks.
    pub blocks: u64,
    /// Of live blocks, who allocated them; of free ones, who allocated the block that pins them. Most bytes first. Together they have all bytes of the
    /// cause, except for free memory that nothing pins.
    pub sites: Vec<SiteBytes>,
}

/// What one site has of a cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SiteBytes {
    /// The name of the site.
    pub site: String,
    /// The same, in [`Explanation::sites`].
    pub id: SiteId,
    /// How many bytes.
    pub bytes: Bytes,
    /// Of live blocks, how many; of free ones, in how many pieces.
    pub blocks: u64,
}

/// Why a moment cannot be explained.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum ExplainError {
    /// There is no such moment.
    #[error(transparent)]
    Moment(#[from] MomentError),
    /// The device would be smaller than what was in use.
    #[error(
        "the device's memory cannot be {given}: the snapshot shows {least} ({} bytes) on device {device}, {what}; give at least that much, or \
         leave the option out", least.get()
    )]
    MemoryTooSmall { given: Bytes, least: Bytes, device: u32, what: &'static str },
}

/// The devices that a snapshot has segments or events of.
#[must_use]
pub fn devices(snapshot: &Snapshot) -> Vec<u32> {
    let of_segments = snapshot.segments.iter().map(|segment| segment.device);
    let of_events = (0_u32..).zip(&snapshot.traces).filter(|(_, events)| !events.is_empty()).map(|(device, _)| device);
    let mut devices: Vec<u32> = of_segments.chain(of_events).collect();
    devices.sort_unstable();
    devices.dedup();
    devices
}

/// The settings under which a snapshot was recorded; PyTorch's own where the file does not tell, or tells what this version cannot read.
#[must_use]
pub fn config(snapshot: &Snapshot) -> Config {
    let conf = snapshot.settings.as_ref().map_or("", |settings| settings.conf.as_str());
    Config::parse(conf).unwrap_or_default()
}

/// Explains where the memory of one device is. Takes `n log n` time for `n` events and blocks.
///
/// # Errors
/// [`ExplainError`] where there is no such moment, or the memory given is too small.
pub fn explain(snapshot: &Snapshot, device: u32, options: Options) -> Result<Explanation, ExplainError> {
    let conf = snapshot.settings.as_ref().map(|settings| settings.conf.clone());
    let is_unknown = conf.as_deref().is_some_and(|conf| Config::parse(conf).is_err());
    let unknown = is_unknown.then(|| "the settings cannot be read: PyTorch's own are assumed".to_owned());
    let config = config(snapshot);
    let history = History::new(snapshot, device, config.clone());
    let moment = history.moment(options.at)?;
    let state = history.state(moment.event);
    let sites = Sites::new(snapshot, device);
    let view = View { snapshot, device, config: &config, history: &history, state: &state, sites: &sites, moment: &moment };
    let request = view.request();
    let size = view.size_of_device(options.memory)?;
    let (accounts, held) = view.account(request.as_ref());
    let pinned = pins::list(&view);
    let shortage = request.as_ref().map(|request| view.shortage(request, accounts, &size));
    let why: Vec<&str> = shortage.iter().flat_map(|shortage| kinds(shortage)).collect();
    let ways = request.iter().flat_map(|request| ways::of(&view, request, accounts, &size)).collect();
    let mut causes = held.into_causes(&sites);
    causes.extend(size.outside);
    let mut notes: Vec<String> = snapshot.notes.iter().cloned().chain(unknown).collect();
    notes.extend(view.notes(size.known));
    let recovered =
        (!history.events().is_empty()).then(|| fidelity::recover(snapshot, device, options.memory).map(|(_, fidelity)| fidelity));
    notes.extend(recovered.as_ref().map(replayed));
    let oom_events = history.events().iter().filter(|event| event.action == Action::Oom).count();
    let mut explanation = Explanation {
        headline: String::new(),
        device_total: size.total,
        device_total_is: size.known,
        device,
        request,
        accounts,
        causes,
        why,
        ways,
        pinned,
        stalled_frees: waits::list(&view),
        growing: growth::list(&view),
        survived_ooms: oom_events.saturating_sub(usize::from(moment.at == MomentKind::Oom)),
        notes,
        fidelity: recovered.and_then(Result::ok),
        sites: BTreeMap::new(),
        conf,
        shortage,
        moment: moment.clone(),
    };
    explanation.sites = explanation.named_sites().map(|id| (id, sites.get(id).clone())).collect();
    explanation.headline = crate::headline::of(&explanation);
    Ok(explanation)
}

/// What a replay of the recording shows.
fn replayed(fidelity: &Result<Fidelity, JobError>) -> String {
    match fidelity {
        Ok(fidelity) => match &fidelity.first_divergence {
            None => format!("replayed under its own settings the recording comes out the same: {fidelity}"),
            Some(divergence) => format!(
                "replayed under its own settings the recording comes out differently ({fidelity}), so a replay under others shows nothing; it differs {divergence}"
            ),
        },
        Err(error) => format!("the recording cannot be replayed: {error}"),
    }
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

    fn named_sites(&self) -> impl Iterator<Item = SiteId> {
        let of_causes = self.causes.iter().flat_map(|cause| cause.sites.iter().map(|site| site.id));
        let others = self.pinned.iter().map(|segment| segment.by.id).chain(self.stalled_frees.iter().map(|wait| wait.id));
        of_causes.chain(others).chain(self.growing.iter().map(|growth| growth.id)).chain(self.request.iter().map(|request| request.id))
    }
}

/// Names of the causes of a failed request, each once.
fn kinds(shortage: &Shortage) -> Vec<&'static str> {
    let mut kinds: Vec<&str> = harness_record::causes(shortage).iter().map(|cause| cause.kind().name()).collect();
    kinds.dedup();
    kinds
}

#[cfg(test)]
mod tests;
