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

use std::collections::BTreeMap;

use harness_allocator::allocator::caching::Config;
use harness_allocator::device::DeviceMemory;
use harness_allocator::stats::{BlockState, PoolKind};
use harness_allocator::units::Bytes;
use harness_record::{Accounts, CauseKind, Lane, Pieces, Shortage, UnlistedSegments};
use harness_trace::snapshot::{Action, Block, Event, PoolId, Segment, Snapshot};
use serde::Serialize;

use crate::growth::{self, Growth};
use crate::pins::{self, PinnedSegment, Pinner};
use crate::sites::{Site, SiteId, Sites};
use crate::state::{At, History, Moment, MomentError, MomentKind, State};
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
        sites: BTreeMap::new(),
        conf,
        shortage,
        moment: moment.clone(),
    };
    explanation.sites = explanation.named_sites().map(|id| (id, sites.get(id).clone())).collect();
    explanation.headline = crate::headline::of(&explanation);
    Ok(explanation)
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

/// All that is known at the moment.
pub(crate) struct View<'a> {
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) device: u32,
    pub(crate) config: &'a Config,
    pub(crate) history: &'a History<'a>,
    pub(crate) state: &'a State,
    pub(crate) sites: &'a Sites,
    pub(crate) moment: &'a Moment,
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

    fn request(&self) -> Option<Refused> {
        let (index, event) = self.oom()?;
        let rounded = self.config.round(event.size.get()).map_or(event.size, Bytes);
        let pool = PoolKind::of_block(rounded);
        let private = self.snapshot.pool_of(event).unwrap_or_else(|| self.likely_pool(event.stream));
        let id = self.sites.of_event(index);
        Some(Refused {
            requested: event.size,
            rounded,
            asked: self.config.segment_size(rounded.get()).map_or(rounded, Bytes),
            stream: event.stream,
            pool,
            private_pool: (private != PoolId::DEFAULT).then_some((private.0, private.1)),
            site: self.sites.get(id).name.clone(),
            id,
        })
    }

    /// PyTorch 2.11 and older do not write for which pool a request was. A stream all of whose segments are in one private pool, as that of the
    /// capture of a CUDA graph, has its requests there too.
    fn likely_pool(&self, stream: u64) -> PoolId {
        let mut pools = self.state.segments.iter().filter(|segment| segment.stream == stream).map(|segment| segment.private_pool);
        let Some(first) = pools.next() else { return PoolId::DEFAULT };
        if pools.all(|pool| pool == first) { first } else { PoolId::DEFAULT }
    }

    fn account(&self, request: Option<&Refused>) -> (Totals, Held) {
        let mut totals = Totals { device_free: self.oom().map(|(_, event)| Bytes(event.address)), ..Totals::default() };
        let mut held = Held::default();
        for segment in &self.state.segments {
            totals.reserved += segment.size;
            for block in &segment.blocks {
                match block.state {
                    BlockState::Allocated => {
                        let (site, requested) = (self.site_of(block), block.requested.min(block.size));
                        totals.requested += requested;
                        totals.allocated += block.size;
                        totals.active += block.size;
                        held.add(ByteCause::Allocated, Some(site), requested);
                        if requested < block.size {
                            held.add(ByteCause::Rounding, Some(site), block.size - requested);
                        }
                    }
                    BlockState::PendingFree => {
                        totals.requested += block.requested.min(block.size);
                        totals.active += block.size;
                        held.add(ByteCause::PendingFree, Some(self.site_of(block)), block.size);
                    }
                    BlockState::Inactive => {}
                }
            }
            let closed_to_request = request.and_then(|request| other_lane(segment, request));
            let private = (request.is_none() && segment.private_pool != PoolId::DEFAULT).then_some(ByteCause::PrivatePool);
            let elsewhere = closed_to_request.or(private);
            let pinner = Pinner::new(self, segment);
            for piece in pins::pieces(segment, self.config) {
                if piece.whole > Bytes::ZERO {
                    held.add(elsewhere.unwrap_or(ByteCause::WholeSegments), None, piece.whole);
                }
                if piece.pinned > Bytes::ZERO {
                    let site = pinner.of(&piece).map(|block| self.site_of(block));
                    held.add(elsewhere.unwrap_or(ByteCause::InactiveSplit), site, piece.pinned);
                }
            }
        }
        (totals, held)
    }

    /// The device's memory, and what the allocator does not hold of it.
    fn size_of_device(&self, given: Option<Bytes>) -> Result<DeviceSize, ExplainError> {
        let reserved = self.state.reserved();
        let held = self.history.reserved();
        let seen = |index: usize| held[index] + Bytes(self.history.events()[index].address);
        let of_ooms = self.history.events().iter().enumerate().filter(|(_, event)| event.action == Action::Oom);
        let at_ooms = of_ooms.map(|(index, _)| seen(index)).max();
        let free_now = self.oom().map(|(_, event)| Bytes(event.address));
        let known = free_now.map(|free| reserved + free).or(at_ooms).filter(|&known| known >= reserved);
        if let Some(given) = given {
            let most_held = held.iter().copied().max().unwrap_or_default().max(reserved);
            let (least, what) = match known.max(at_ooms) {
                Some(known) if known > most_held => (known, "reserved and free when a request was refused"),
                _ => (most_held, "reserved at one time"),
            };
            if given < least {
                return Err(ExplainError::MemoryTooSmall { given, least, device: self.device, what });
            }
        }
        let total = given.or(known).unwrap_or(reserved);
        let unreserved = total - reserved;
        let mut outside = Vec::new();
        let mut add = |cause, bytes| {
            if bytes > Bytes::ZERO {
                outside.push(CauseBytes { cause, bytes, blocks: 0, sites: Vec::new() });
            }
        };
        match free_now {
            Some(free) => {
                add(ByteCause::OthersHold, unreserved - free);
                add(ByteCause::Free, free);
            }
            None if given.is_none() => add(ByteCause::Free, unreserved),
            None => add(ByteCause::FreeOrOthersHold, unreserved),
        }
        let known = match (given, known) {
            (Some(_), _) => TotalKnown::Given,
            (None, Some(_)) => TotalKnown::AtOom,
            (None, None) => TotalKnown::ReservedOnly,
        };
        Ok(DeviceSize { total, known, outside })
    }

    /// What was known when the request failed, as a run of a scenario has it.
    fn shortage(&self, request: &Refused, totals: Totals, size: &DeviceSize) -> Shortage {
        let free = totals.device_free.unwrap_or_default();
        let own_pool = request.private_pool.map_or(PoolId::DEFAULT, |(first, second)| PoolId(first, second));
        let is_own = |segment: &&Segment| segment.private_pool == own_pool;
        let streams = Streams::new(&self.state.segments, request.stream);
        let closed = self.state.segments.iter().filter(|segment| !is_own(segment));
        let mut other_private_pools = Pieces::default();
        closed.flat_map(|segment| &segment.blocks).filter(|block| block.state == BlockState::Inactive).for_each(|block| {
            other_private_pools.add(block.size);
        });
        let missing = ways::missing(self, request);
        let inactive_split =
            self.state.segments.iter().flat_map(|segment| pins::pieces(segment, self.config)).map(|piece| piece.pinned).sum();
        let total = size.total;
        let device = DeviceMemory {
            total,
            free,
            used: total.saturating_sub(free),
            process: None,
            context_overhead: Bytes::ZERO,
            pressure: Bytes::ZERO,
        };
        Shortage {
            requested: request.requested,
            stream: streams.number(request.stream),
            lacking: missing.bytes,
            asked: missing.from_driver,
            limit: ways::limit(self, totals, size, missing.from_driver),
            program_limit: None,
            accounts: Accounts {
                requested: totals.requested,
                allocated: totals.allocated,
                active: totals.active,
                reserved: totals.reserved,
                peak_allocated: totals.allocated,
                peak_reserved: totals.reserved,
                retries: 0,
                ooms: 1,
                device,
            },
            inactive_split,
            lanes: Some(lanes(self.state.segments.iter().filter(is_own), &streams)),
            other_private_pools,
            streams: streams.names(),
            pinned: Vec::new(),
            pinned_unlisted: UnlistedSegments::default(),
        }
    }

    fn notes(&self, known: TotalKnown) -> Vec<String> {
        let mut notes = Vec::new();
        match known {
            TotalKnown::ReservedOnly => notes.push(
                "no request was refused in the recording, so the snapshot does not tell the device's memory: the total is what was reserved; \
                 give it by `--memory`"
                    .to_owned(),
            ),
            TotalKnown::AtOom => notes.push(
                "the total is what was reserved and what was free when a request was refused; what other programs and the CUDA context held is \
                 not in it: give the device's memory by `--memory`"
                    .to_owned(),
            ),
            TotalKnown::Given => {}
        }
        if self.history.events().is_empty() {
            notes.push("nothing was recorded: only the final segments are known, neither sites nor ages".to_owned());
        }
        notes
    }
}

pub(crate) struct DeviceSize {
    pub(crate) total: Bytes,
    known: TotalKnown,
    /// What the allocator does not hold.
    outside: Vec<CauseBytes>,
}

/// Why a request cannot have what is free in a segment, if it cannot.
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

/// Bytes and blocks by cause and site.
#[derive(Default)]
struct Held(BTreeMap<ByteCause, BTreeMap<Option<SiteId>, (Bytes, u64)>>);

impl Held {
    fn add(&mut self, cause: ByteCause, site: Option<SiteId>, bytes: Bytes) {
        let (sum, count) = self.0.entry(cause).or_default().entry(site).or_default();
        *sum += bytes;
        *count += 1;
    }

    fn into_causes(self, sites: &Sites) -> Vec<CauseBytes> {
        let cause = |(cause, of): (ByteCause, BTreeMap<Option<SiteId>, (Bytes, u64)>)| {
            let bytes = of.values().map(|&(bytes, _)| bytes).sum();
            let blocks = of.values().map(|&(_, blocks)| blocks).sum();
            let named = of
                .into_iter()
                .filter_map(|(id, (bytes, blocks))| id.map(|id| SiteBytes { site: sites.get(id).name.clone(), id, bytes, blocks }));
            let mut sites: Vec<SiteBytes> = named.collect();
            sites.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.site.cmp(&b.site)));
            CauseBytes { cause, bytes, blocks, sites }
        };
        self.0.into_iter().map(cause).collect()
    }
}

/// Short numbers for the handles of streams: the default stream is 0.
struct Streams(Vec<u64>);

impl Streams {
    fn new(segments: &[Segment], wanted: u64) -> Self {
        let mut handles: Vec<u64> = segments.iter().map(|segment| segment.stream).chain([0, wanted]).collect();
        handles.sort_unstable();
        handles.dedup();
        Self(handles)
    }

    fn number(&self, handle: u64) -> u32 {
        self.0.binary_search(&handle).ok().and_then(|index| u32::try_from(index).ok()).unwrap_or(u32::MAX)
    }

    fn names(&self) -> BTreeMap<u32, String> {
        let name = |handle: u64| if handle == 0 { "default".to_owned() } else { format!("{handle:#x}") };
        (0_u32..).zip(&self.0).map(|(number, &handle)| (number, name(handle))).collect()
    }
}

/// What is free in some segments, or waits to be, by pool and stream.
fn lanes<'a>(segments: impl Iterator<Item = &'a Segment>, streams: &Streams) -> Vec<Lane> {
    let mut lanes: BTreeMap<(PoolKind, u32), Lane> = BTreeMap::new();
    for segment in segments {
        let stream = streams.number(segment.stream);
        let lane = lanes.entry((segment.pool, stream)).or_insert_with(|| Lane {
            pool: Some(segment.pool),
            stream,
            free: Pieces::default(),
            waiting: Pieces::default(),
        });
        for block in &segment.blocks {
            match block.state {
                BlockState::Inactive => lane.free.add(block.size),
                BlockState::PendingFree => lane.waiting.add(block.size),
                BlockState::Allocated => {}
            }
        }
    }
    lanes.into_values().collect()
}
