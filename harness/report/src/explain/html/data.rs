//! What the page shows, as it stands in the page: [`PageData`].

use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::allocator::caching::Config;
use harness_allocator::stats::PoolKind;
use harness_allocator::units::Bytes;
use harness_base::words::count;
use harness_explain::causes::{self, CauseBytes, Explanation, TotalKnown};
use harness_explain::growth::Growth;
use harness_explain::sites::{SiteId, Sites};
use harness_explain::state::MomentKind;
use harness_explain::waits;
use harness_trace::snapshot::{Action, Event, PoolId, Snapshot, StackId};
use serde::Serialize;

use super::columns::encode;
use super::lifetimes::{BlockLife, Contradictions, Lifetimes, SegmentLife};

/// The layout of [`PageData`] that the page's script reads.
const VERSION: u32 = 1;

/// The bytes of one cause.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Cause {
    /// As in the JSON form of an explanation.
    cause: &'static str,
    about: &'static str,
    bytes: Bytes,
    blocks: u64,
    sites: Vec<SiteBytes>,
}

/// What one site has of a cause.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct SiteBytes {
    site: String,
    bytes: Bytes,
    blocks: u64,
}

/// A site that holds more and more.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Suspect {
    site: String,
    grown: Bytes,
    /// At the lowest point of each stretch.
    held: Vec<Bytes>,
}

/// A free that waited for other streams and no longer does.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Wait {
    site: String,
    size: Bytes,
    freed: usize,
    end: usize,
}

/// The data of a page.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PageData {
    version: u32,
    /// What is explained, for the page's title.
    pub title: String,
    /// What differs between the ranks, in sentences, where there are several.
    pub overview: Vec<String>,
    ranks: Vec<RankData>,
}

/// One device of one snapshot, with what was found about it. Columns (`columns.rs`) are texts; moments are those of [`Lifetimes`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankData {
    name: String,
    device: u32,
    headline: String,
    details: Vec<String>,
    device_total: Bytes,
    device_total_is: TotalKnown,
    causes: Vec<Cause>,
    suspects: Vec<Suspect>,
    waits: Vec<Wait>,
    moment: usize,
    is_oom: bool,
    /// The times of the events are those of a simulated device, and not measured.
    simulated_times: bool,
    settings: Option<String>,
    notes: Vec<String>,
    events: usize,
    /// Microseconds from the first event, for each event; never falling.
    times: Option<String>,
    peak_moment: usize,
    peak_allocated: Bytes,
    peak_reserved: Bytes,
    allocated: Bytes,
    pending: Bytes,
    reserved: Bytes,
    /// Added to every address of the columns; a text, because it may need 64 bits.
    base_address: String,
    streams: Vec<String>,
    pools: Vec<Pool>,
    /// By bytes at the peak of what was allocated, the most first.
    sites: Vec<String>,
    frames: Vec<(String, String, u32)>,
    stacks: Vec<Stack>,
    blocks: Blocks,
    segments: Segments,
    ooms: Vec<Oom>,
    phases: Vec<Phase>,
}

/// A pool that segments belong to.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Pool {
    name: String,
    /// Of its expandable segments, what goes back to the driver at once.
    page: u64,
}

/// A call stack that blocks name.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Stack {
    site: usize,
    /// Indices of frames, the outermost first.
    frames: Vec<usize>,
    /// Bytes allocated when the most was.
    at_peak: Bytes,
    /// Bytes allocated at the moment that is explained.
    at_moment: Bytes,
    /// Bytes × events for which they were allocated.
    byte_events: f64,
    /// Bytes × seconds, where the events have times.
    byte_seconds: Option<f64>,
}

/// [`BlockLife`]s as columns, in their order.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Blocks {
    address: String,
    size: String,
    requested: String,
    start: String,
    freed: String,
    end: String,
    stack: String,
    stream: String,
}

/// [`SegmentLife`]s as columns, in their order.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Segments {
    address: String,
    size: String,
    start: String,
    end: String,
    stream: String,
    pool: String,
    expandable: String,
}

/// A request that was refused.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Oom {
    moment: usize,
    size: Bytes,
    device_free: Bytes,
    stream: usize,
    stack: usize,
}

/// A phase of the program, in microseconds from the first event.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Phase {
    name: String,
    begin: u64,
    end: u64,
}

impl PageData {
    /// A page about some ranks, which are shown in this order.
    #[must_use]
    pub fn new(title: impl Into<String>, overview: Vec<String>, ranks: Vec<RankData>) -> Self {
        Self { version: VERSION, title: title.into(), overview, ranks }
    }
}

impl RankData {
    /// Gathers what the page shows: timeline, segments and flame graph from the recording, and which device and moment are shown, sentences and causes
    /// from the explanation. Takes `n log n` time for `n` events.
    #[must_use]
    pub fn new(name: impl Into<String>, snapshot: &Snapshot, explanation: &Explanation) -> Self {
        let device = explanation.device;
        let lives = Lifetimes::of(snapshot, device);
        let events = snapshot.traces.get(device as usize).map_or(&[][..], Vec::as_slice);
        let times = times_of(events);
        let moment = explanation.moment.event.map_or(0, |event| event + 1).min(lives.events);
        let (peak_moment, peak_allocated) = lives.peak_allocated();
        let figures = lives.at(moment);
        let of_blocks = lives.blocks.iter().map(|life| life.stream);
        let streams: Names<u64> =
            of_blocks.chain(lives.segments.iter().map(|life| life.stream)).chain(refused(events).map(|(_, oom)| oom.stream)).collect();
        let stacks = StackTable::new(snapshot, device, &lives, times.as_deref(), (peak_moment, moment));
        let pools: Names<Option<(PoolKind, PoolId)>> = lives.segments.iter().map(|life| life.pool).collect();
        let base =
            lives.blocks.iter().map(|life| life.address).chain(lives.segments.iter().map(|life| life.address)).min().unwrap_or_default();
        let config = explanation.conf.as_deref().and_then(|conf| Config::parse(conf).ok()).unwrap_or_default();
        Self {
            name: name.into(),
            device,
            headline: explanation.headline.clone(),
            details: explanation.ways.iter().map(|way| way.why.clone()).collect(),
            device_total: explanation.device_total,
            device_total_is: explanation.device_total_is,
            causes: explanation.causes.iter().map(Cause::new).collect(),
            suspects: explanation.growing.iter().map(Suspect::new).collect(),
            waits: explanation.stalled_frees.iter().filter_map(Wait::new).collect(),
            moment,
            is_oom: explanation.moment.at == MomentKind::Oom,
            simulated_times: explanation.has_simulated_times(),
            settings: explanation.conf.clone(),
            notes: explanation.notes.iter().cloned().chain(contradictions(&lives)).collect(),
            events: lives.events,
            peak_moment,
            peak_allocated,
            peak_reserved: lives.peak_reserved().1,
            allocated: figures.allocated,
            pending: figures.pending,
            reserved: figures.reserved,
            base_address: base.to_string(),
            blocks: Blocks::new(&lives.blocks, base, &streams, &stacks.of_blocks),
            segments: Segments::new(&lives.segments, base, &streams, &pools),
            ooms: ooms_of(events, &streams, &stacks),
            phases: phases_of(snapshot, device, events.first().and_then(|event| event.time_us).unwrap_or_default()),
            times: times.map(encode),
            streams: streams.0.iter().map(u64::to_string).collect(),
            pools: pools.0.iter().map(|&pool| Pool::new(pool, &config)).collect(),
            sites: stacks.sites,
            frames: stacks.frames,
            stacks: stacks.stacks,
        }
    }
}

impl Cause {
    fn new(found: &CauseBytes) -> Self {
        let site = |of: &causes::SiteBytes| SiteBytes { site: of.site.clone(), bytes: of.bytes, blocks: of.blocks };
        Self {
            cause: found.cause.name(),
            about: found.cause.about(),
            bytes: found.bytes,
            blocks: found.blocks,
            sites: found.sites.iter().map(site).collect(),
        }
    }
}

impl Suspect {
    fn new(growth: &Growth) -> Self {
        Self { site: growth.site.clone(), grown: growth.grown, held: growth.held.clone() }
    }
}

impl Wait {
    /// `None` while it lasts: those the page finds itself, at any moment.
    fn new(wait: &waits::Wait) -> Option<Self> {
        let freed = wait.freed_at.map_or(0, |event| event as usize + 1);
        Some(Self { site: wait.site.clone(), size: wait.size, freed, end: wait.completed_at? as usize + 1 })
    }
}

impl Pool {
    fn new(pool: Option<(PoolKind, PoolId)>, config: &Config) -> Self {
        let name = match pool {
            None => "segments given back later".to_owned(),
            Some((kind, PoolId::DEFAULT)) => format!("{} pool", kind_name(kind)),
            Some((kind, PoolId(first, second))) => format!("private pool ({first}, {second}), {} blocks", kind_name(kind)),
        };
        Self { name, page: config.page(pool.map_or(PoolKind::Large, |(kind, _)| kind)) }
    }
}

const fn kind_name(kind: PoolKind) -> &'static str {
    match kind {
        PoolKind::Small => "small",
        PoolKind::Large => "large",
    }
}

impl Blocks {
    fn new(lives: &[BlockLife], base: u64, streams: &Names<u64>, stacks: &[usize]) -> Self {
        let column = |of: &dyn Fn(&BlockLife) -> u64| encode(lives.iter().map(of));
        Self {
            address: column(&|life| life.address - base),
            size: column(&|life| life.size.0),
            requested: column(&|life| life.requested.0),
            start: column(&|life| life.start as u64),
            // Lifetimes repeat where ends do not.
            freed: column(&|life| (life.freed - life.start) as u64),
            end: column(&|life| (life.end - life.freed) as u64),
            stack: encode(stacks.iter().map(|&stack| stack as u64)),
            stream: column(&|life| streams.index(&life.stream) as u64),
        }
    }
}

impl Segments {
    fn new(lives: &[SegmentLife], base: u64, streams: &Names<u64>, pools: &Names<Option<(PoolKind, PoolId)>>) -> Self {
        let column = |of: &dyn Fn(&SegmentLife) -> u64| encode(lives.iter().map(of));
        Self {
            address: column(&|life| life.address - base),
            size: column(&|life| life.size.0),
            start: column(&|life| life.start as u64),
            end: column(&|life| (life.end - life.start) as u64),
            stream: column(&|life| streams.index(&life.stream) as u64),
            pool: column(&|life| pools.index(&life.pool) as u64),
            expandable: column(&|life| u64::from(life.expandable)),
        }
    }
}

/// Values that occur, each once and in order.
struct Names<T>(Vec<T>);

impl<T: Ord> FromIterator<T> for Names<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        Self(BTreeSet::from_iter(values).into_iter().collect())
    }
}

impl<T: Ord> Names<T> {
    /// The place of a value that occurs.
    fn index(&self, value: &T) -> usize {
        self.0.binary_search(value).unwrap_or_default()
    }
}

/// A stack together with its site: what has no frames may belong to different sites.
type Key = (StackId, SiteId);

/// The stacks of blocks and refused requests, with the sites and frames that they name.
struct StackTable {
    keys: Names<Key>,
    /// For each block its place among the stacks.
    of_blocks: Vec<usize>,
    /// For each refused request.
    of_refused: Vec<usize>,
    stacks: Vec<Stack>,
    sites: Vec<String>,
    frames: Vec<(String, String, u32)>,
}

impl StackTable {
    fn new(snapshot: &Snapshot, device: u32, lives: &Lifetimes, times: Option<&[u64]>, at: (usize, usize)) -> Self {
        let sites = Sites::new(snapshot, device);
        let events = snapshot.traces.get(device as usize).map_or(&[][..], Vec::as_slice);
        let key = |event: Option<usize>, stack| (stack, sites.of_block(event.and_then(|event| u32::try_from(event).ok()), stack));
        let of_blocks: Vec<Key> = lives.blocks.iter().map(|life| key(life.start.checked_sub(1), life.stack)).collect();
        let of_refused: Vec<Key> = refused(events).map(|(index, event)| key(Some(index), event.stack)).collect();
        let keys: Names<Key> = of_blocks.iter().chain(&of_refused).copied().collect();
        let mut table = Self {
            of_blocks: of_blocks.iter().map(|key| keys.index(key)).collect(),
            of_refused: of_refused.iter().map(|key| keys.index(key)).collect(),
            keys,
            stacks: Vec::new(),
            sites: Vec::new(),
            frames: Vec::new(),
        };
        table.add_stacks(snapshot, times.is_some());
        for (life, &stack) in lives.blocks.iter().zip(&table.of_blocks) {
            weigh(&mut table.stacks[stack], life, times, lives.events, at);
        }
        table.rank_sites(&sites);
        table
    }

    /// The stacks without their figures.
    fn add_stacks(&mut self, snapshot: &Snapshot, has_times: bool) {
        let mut places = BTreeMap::new();
        for &(stack, _) in &self.keys.0 {
            let outermost_first = snapshot.stacks.ids(stack).iter().rev().map(|&id| {
                *places.entry(id).or_insert_with(|| {
                    let frame = snapshot.stacks.frame(id);
                    self.frames.push((frame.name.clone(), frame.file.clone(), frame.line));
                    self.frames.len() - 1
                })
            });
            let frames = outermost_first.collect();
            let byte_seconds = has_times.then_some(0.0);
            self.stacks.push(Stack { site: 0, frames, at_peak: Bytes::ZERO, at_moment: Bytes::ZERO, byte_events: 0.0, byte_seconds });
        }
    }

    /// Numbers the sites, those with the most bytes at the peak first, and gives each stack its site's number.
    fn rank_sites(&mut self, sites: &Sites) {
        let mut sums: BTreeMap<SiteId, (Bytes, f64)> = BTreeMap::new();
        for (stack, &(_, site)) in self.stacks.iter().zip(&self.keys.0) {
            let sum = sums.entry(site).or_default();
            sum.0 += stack.at_peak;
            sum.1 += stack.byte_events;
        }
        let mut ranked: Vec<(SiteId, (Bytes, f64))> = sums.into_iter().collect();
        ranked.sort_by(|(_, a), (_, b)| b.0.cmp(&a.0).then(b.1.total_cmp(&a.1)));
        let places: BTreeMap<SiteId, usize> = ranked.iter().enumerate().map(|(place, &(site, _))| (site, place)).collect();
        for (stack, (_, site)) in self.stacks.iter_mut().zip(&self.keys.0) {
            stack.site = places[site];
        }
        self.sites = ranked.into_iter().map(|(site, _)| sites.get(site).name.clone()).collect();
    }
}

/// The requests that were refused, with the indices of their events.
fn refused(events: &[Event]) -> impl Iterator<Item = (usize, &Event)> {
    events.iter().enumerate().filter(|(_, event)| event.action == Action::Oom)
}

/// Adds one block to the figures of its stack.
fn weigh(stack: &mut Stack, life: &BlockLife, times: Option<&[u64]>, events: usize, (peak, moment): (usize, usize)) {
    if life.is_allocated(peak) {
        stack.at_peak += life.size;
    }
    if life.is_allocated(moment) {
        stack.at_moment += life.size;
    }
    let until = life.freed.min(events);
    stack.byte_events += life.size.0 as f64 * (until - life.start.min(until)) as f64;
    if let (Some(sum), Some(times)) = (&mut stack.byte_seconds, times) {
        // The state after event k, which is moment k + 1, begins at the event's time; what was there before begins with the first one.
        let time = |moment: usize| times.get(moment.saturating_sub(1)).copied().unwrap_or_default();
        *sum += life.size.0 as f64 * time(until).saturating_sub(time(life.start)) as f64 / 1e6;
    }
}

/// Microseconds from the first event, or `None` where events have no time. Where threads recorded out of order, the later time counts.
fn times_of(events: &[Event]) -> Option<Vec<u64>> {
    let first = events.first()?.time_us?;
    let mut latest = 0;
    events
        .iter()
        .map(|event| {
            latest = latest.max(event.time_us?.saturating_sub(first));
            Some(latest)
        })
        .collect()
}

fn ooms_of(events: &[Event], streams: &Names<u64>, stacks: &StackTable) -> Vec<Oom> {
    let oom = |((index, event), &stack): ((usize, &Event), &usize)| Oom {
        moment: index + 1,
        size: event.size,
        device_free: Bytes(event.address),
        stream: streams.index(&event.stream),
        stack,
    };
    refused(events).zip(&stacks.of_refused).map(oom).collect()
}

/// Pairs the beginnings and ends of phases. What began before the recording, or did not end, is left out.
fn phases_of(snapshot: &Snapshot, device: u32, first_time: u64) -> Vec<Phase> {
    let mut open: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    let mut phases = Vec::new();
    for mark in snapshot.annotations.iter().filter(|mark| mark.device == device) {
        let time = mark.time_us.saturating_sub(first_time);
        if mark.begins {
            open.entry(&mark.name).or_default().push(time);
        } else if let Some(begin) = open.get_mut(mark.name.as_str()).and_then(Vec::pop) {
            phases.push(Phase { name: mark.name.clone(), begin, end: time });
        }
    }
    phases.sort_by_key(|phase| (phase.begin, phase.end));
    phases
}

/// What a reader has to know of events that do not fit the final state.
fn contradictions(lives: &Lifetimes) -> Vec<String> {
    let Contradictions { missing_frees, missing_blocks, missing_segment_bytes } = lives.contradictions;
    let mut notes = Vec::new();
    if missing_frees > 0 {
        notes.push(format!(
            "Not recorded: {}. An address was allocated again while its block was still live.",
            count(missing_frees, "free")
        ));
    }
    if missing_blocks > 0 {
        let blocks = count(missing_blocks, "block");
        notes.push(format!("Live by the events and not in the final state: {blocks}, shown here as ending with the recording."));
    }
    if missing_segment_bytes > 0 {
        notes.push(format!(
            "{} of segments were made and are not in the final state: the events are not complete.",
            Bytes(missing_segment_bytes)
        ));
    }
    notes
}
