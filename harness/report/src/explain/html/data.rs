//! What the page shows, as it stands in the page: [`PageData`].

use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::stats::PoolKind;
use harness_allocator::units::Bytes;
use harness_trace::snapshot::{Action, Event, PoolId, Snapshot, StackId};
use serde::Serialize;

use super::columns::encode;
use super::lifetimes::{BlockLife, Lifetimes, SegmentLife};

/// The layout of [`PageData`] that the page's script reads.
const VERSION: u32 = 1;

/// What was found about one device of one snapshot, beside what the page makes of the events itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Findings {
    /// The one sentence that matters.
    pub headline: String,
    /// Further sentences: why each way of serving the request failed, what is not known.
    pub details: Vec<String>,
    /// The device's memory: the sum of the causes.
    pub device_total: Bytes,
    /// In the order in which they are shown.
    pub causes: Vec<CauseRow>,
    /// Sites whose live bytes grow.
    pub suspects: Vec<Suspect>,
    /// What is explained: the state after so many events of this device.
    pub moment: usize,
    /// Whether a request was refused at that moment.
    pub is_oom: bool,
    /// Whether the times of the events are those of a simulated device.
    pub simulated_times: bool,
}

/// Bytes that are taken for one reason.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct CauseRow {
    /// A short name, for a table.
    pub cause: String,
    pub bytes: Bytes,
    /// Who took them, where that is known; the most bytes first.
    pub sites: Vec<SiteBytes>,
}

/// Bytes of one call site.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct SiteBytes {
    pub site: String,
    pub bytes: Bytes,
    pub blocks: u64,
}

/// A site that may be leaking.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Suspect {
    pub site: String,
    /// What makes it one, in a sentence.
    pub why: String,
    pub bytes: Bytes,
}

/// One device of one snapshot, with what was found about it.
#[derive(Clone, Copy)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct RankInput<'a> {
    /// The snapshot's file, or the rank.
    pub name: &'a str,
    pub snapshot: &'a Snapshot,
    pub device: u32,
    pub findings: &'a Findings,
    /// The call site of a block, by the event that allocated it, where that was recorded, and its stack.
    pub site_of: &'a dyn Fn(Option<u32>, StackId) -> u32,
    /// The names of all call sites, by their number.
    pub site_names: &'a [String],
}

/// The data of a page.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PageData {
    version: u32,
    /// What is explained, for the page's title.
    pub title: String,
    /// What differs between the ranks, where there are several.
    pub overview: Vec<String>,
    ranks: Vec<Rank>,
}

/// One rank. Columns ([`encode`]) are texts; moments are those of [`Lifetimes`].
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Rank {
    name: String,
    device: u32,
    headline: String,
    details: Vec<String>,
    device_total: Bytes,
    causes: Vec<CauseRow>,
    suspects: Vec<Suspect>,
    moment: usize,
    is_oom: bool,
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
    pools: Vec<String>,
    /// By bytes at the peak of what was allocated, the most first.
    sites: Vec<String>,
    frames: Vec<(String, String, u32)>,
    stacks: Vec<Stack>,
    blocks: Blocks,
    segments: Segments,
    ooms: Vec<Oom>,
    phases: Vec<Phase>,
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
    /// Gathers what the page shows. Takes `n log n` time for `n` events.
    #[must_use]
    pub fn new(title: impl Into<String>, overview: Vec<String>, ranks: &[RankInput<'_>]) -> Self {
        Self { version: VERSION, title: title.into(), overview, ranks: ranks.iter().map(Rank::new).collect() }
    }
}

impl Rank {
    fn new(input: &RankInput<'_>) -> Self {
        let lifetimes = Lifetimes::of(input.snapshot, input.device);
        let events = input.snapshot.traces.get(input.device as usize).map_or(&[][..], Vec::as_slice);
        let times = times_of(events);
        let moment = input.findings.moment.min(lifetimes.events);
        let (peak_moment, peak_allocated) = lifetimes.peak_allocated();
        let figures = lifetimes.at(moment);
        let streams: Names<u64> = lifetimes
            .blocks
            .iter()
            .map(|life| life.stream)
            .chain(lifetimes.segments.iter().map(|life| life.stream))
            .chain(refused(events).map(|(_, event)| event.stream))
            .collect();
        let stacks = StackTable::new(input, &lifetimes, events, times.as_deref(), (peak_moment, moment));
        let first_time = events.first().and_then(|event| event.time_us).unwrap_or_default();
        let pools: Names<Option<(PoolKind, PoolId)>> = lifetimes.segments.iter().map(|life| life.pool).collect();
        let base = lifetimes.blocks.iter().map(|life| life.address).chain(lifetimes.segments.iter().map(|life| life.address)).min();
        Self {
            name: input.name.to_owned(),
            device: input.device,
            headline: input.findings.headline.clone(),
            details: input.findings.details.clone(),
            device_total: input.findings.device_total,
            causes: input.findings.causes.clone(),
            suspects: input.findings.suspects.clone(),
            moment,
            is_oom: input.findings.is_oom,
            simulated_times: input.findings.simulated_times,
            settings: input.snapshot.settings.as_ref().map(|settings| settings.conf.clone()),
            notes: notes_of(&lifetimes),
            events: lifetimes.events,
            times: times.map(encode),
            peak_moment,
            peak_allocated,
            peak_reserved: lifetimes.peak_reserved().1,
            allocated: figures.allocated,
            pending: figures.pending,
            reserved: figures.reserved,
            base_address: base.unwrap_or_default().to_string(),
            blocks: Blocks::new(&lifetimes.blocks, base.unwrap_or_default(), &streams, &stacks),
            segments: Segments::new(&lifetimes.segments, base.unwrap_or_default(), &streams, &pools),
            ooms: ooms_of(input, events, &streams, &stacks),
            phases: phases_of(input, first_time),
            streams: streams.0.iter().map(u64::to_string).collect(),
            pools: pools.0.iter().map(|pool| pool_name(*pool)).collect(),
            sites: stacks.sites,
            frames: stacks.frames,
            stacks: stacks.stacks,
        }
    }
}

impl Blocks {
    fn new(lives: &[BlockLife], base: u64, streams: &Names<u64>, stacks: &StackTable) -> Self {
        let column = |of: &dyn Fn(&BlockLife) -> u64| encode(lives.iter().map(of));
        Self {
            address: column(&|life| life.address - base),
            size: column(&|life| life.size.0),
            requested: column(&|life| life.requested.0),
            start: column(&|life| life.start as u64),
            // Lifetimes repeat where ends do not.
            freed: column(&|life| (life.freed - life.start) as u64),
            end: column(&|life| (life.end - life.freed) as u64),
            stack: encode(stacks.of_blocks.iter().map(|&stack| stack as u64)),
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
type Key = (StackId, u32);

/// The stacks of blocks and refused requests, with the sites and frames that they name.
struct StackTable {
    keys: Names<Key>,
    /// For each block its place among the stacks.
    of_blocks: Vec<usize>,
    stacks: Vec<Stack>,
    sites: Vec<String>,
    frames: Vec<(String, String, u32)>,
}

impl StackTable {
    fn new(input: &RankInput<'_>, lifetimes: &Lifetimes, events: &[Event], times: Option<&[u64]>, at: (usize, usize)) -> Self {
        let refused = refused(events).map(|(index, event)| key_of(input, Some(index), event.stack));
        let of_blocks: Vec<Key> = lifetimes.blocks.iter().map(|life| key_of(input, life.start.checked_sub(1), life.stack)).collect();
        let keys: Names<Key> = of_blocks.iter().copied().chain(refused).collect();
        let mut frames: Vec<(String, String, u32)> = Vec::new();
        let mut frame_places = BTreeMap::new();
        let labels: Vec<&str> = keys.0.iter().map(|&(_, site)| input.site_names.get(site as usize).map_or("", String::as_str)).collect();
        let mut stacks: Vec<Stack> = Vec::with_capacity(keys.0.len());
        for &(id, _) in &keys.0 {
            let outermost_first = input.snapshot.stacks.ids(id).iter().rev().map(|&id| {
                *frame_places.entry(id).or_insert_with(|| {
                    let frame = input.snapshot.stacks.frame(id);
                    frames.push((frame.name.clone(), frame.file.clone(), frame.line));
                    frames.len() - 1
                })
            });
            stacks.push(Stack {
                site: 0,
                frames: outermost_first.collect(),
                at_peak: Bytes::ZERO,
                at_moment: Bytes::ZERO,
                byte_events: 0.0,
                byte_seconds: times.map(|_| 0.0),
            });
        }
        let of_blocks: Vec<usize> = of_blocks.iter().map(|key| keys.index(key)).collect();
        for (life, &stack) in lifetimes.blocks.iter().zip(&of_blocks) {
            weigh(&mut stacks[stack], life, times, lifetimes.events, at);
        }
        let sites = rank_sites(&mut stacks, &labels);
        Self { keys, of_blocks, stacks, sites, frames }
    }
}

fn key_of(input: &RankInput<'_>, event: Option<usize>, stack: StackId) -> Key {
    let event = event.and_then(|event| u32::try_from(event).ok());
    (stack, (input.site_of)(event, stack))
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

/// Numbers the sites, those with the most bytes at the peak first, and gives each stack its site's number.
fn rank_sites(stacks: &mut [Stack], labels: &[&str]) -> Vec<String> {
    let mut sums: BTreeMap<&str, (Bytes, f64)> = BTreeMap::new();
    for (stack, label) in stacks.iter().zip(labels) {
        let sum = sums.entry(label).or_default();
        sum.0 += stack.at_peak;
        sum.1 += stack.byte_events;
    }
    let mut ranked: Vec<(&str, (Bytes, f64))> = sums.into_iter().collect();
    ranked.sort_by(|(_, a), (_, b)| b.0.cmp(&a.0).then(b.1.total_cmp(&a.1)));
    let places: BTreeMap<&str, usize> = ranked.iter().enumerate().map(|(place, (label, _))| (*label, place)).collect();
    for (stack, label) in stacks.iter_mut().zip(labels) {
        stack.site = places[label];
    }
    ranked.into_iter().map(|(label, _)| label.to_owned()).collect()
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

fn ooms_of(input: &RankInput<'_>, events: &[Event], streams: &Names<u64>, stacks: &StackTable) -> Vec<Oom> {
    refused(events)
        .map(|(index, event)| Oom {
            moment: index + 1,
            size: event.size,
            device_free: Bytes(event.address),
            stream: streams.index(&event.stream),
            stack: stacks.keys.index(&key_of(input, Some(index), event.stack)),
        })
        .collect()
}

/// Pairs the beginnings and ends of phases. What began before the recording, or did not end, is left out.
fn phases_of(input: &RankInput<'_>, first_time: u64) -> Vec<Phase> {
    let mut open: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    let mut phases = Vec::new();
    for mark in input.snapshot.annotations.iter().filter(|mark| mark.device == input.device) {
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

fn pool_name(pool: Option<(PoolKind, PoolId)>) -> String {
    let Some((kind, id)) = pool else { return "given back later".to_owned() };
    let kind = if kind == PoolKind::Small { "small" } else { "large" };
    if id == PoolId::DEFAULT { format!("{kind} pool") } else { format!("private pool ({}, {}), {kind}", id.0, id.1) }
}

/// What a reader has to know of the recording.
fn notes_of(lifetimes: &Lifetimes) -> Vec<String> {
    let mut notes = Vec::new();
    let before = lifetimes.blocks.iter().filter(|life| life.start == 0).count();
    if lifetimes.events == 0 {
        notes.push("No events were recorded: only the final state is shown.".to_owned());
    } else if before > 0 {
        notes.push(format!("{before} blocks were there before the recording began; what allocated them is not known for all of them."));
    }
    let contradictions = lifetimes.contradictions;
    if contradictions.missing_frees > 0 {
        notes.push(format!(
            "{} frees were not recorded: an address was allocated again while its block was still live.",
            contradictions.missing_frees
        ));
    }
    if contradictions.missing_blocks > 0 {
        notes.push(format!(
            "{} blocks live by the events are not in the final state; they end with the recording.",
            contradictions.missing_blocks
        ));
    }
    if contradictions.missing_segment_bytes > 0 {
        notes.push(format!(
            "{} of segments were made, and are not in the final state: the events are not complete.",
            Bytes(contradictions.missing_segment_bytes)
        ));
    }
    notes
}
