use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::{allocator::caching::Config, stats::PoolKind, units::Bytes};
use harness_base::words::count;
use harness_explain::causes::{CauseBytes, Explanation};
use harness_explain::sites::{SiteId, Sites};
use harness_explain::{state::MomentKind, waits::FreeWait};
use harness_trace::snapshot::{Action, Event, Frame, MempoolId, Snapshot, StackId};
use indexmap::{IndexMap, IndexSet};
use serde::Serialize;
use serde_json::{Value, json};

use super::columns::encode;
use super::lifetimes::{BlockLife, Contradictions, Lifetimes, SegmentLife};

/// The version of [`PageData`] that the page's script reads.
const VERSION: u32 = 1;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PageData {
    version: u32,
    pub title: String,
    /// Differences between ranks, as sentences.
    pub overview: Vec<String>,
    ranks: Vec<RankData>,
}

/// One device of one snapshot, with its explanation. Columns (`columns.rs`) are texts. Moments are
/// those of [`Lifetimes`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankData(Value);

impl PageData {
    /// Creates a page that shows the ranks in this order.
    pub fn new(title: impl Into<String>, overview: Vec<String>, ranks: Vec<RankData>) -> Self {
        Self {
            version: VERSION,
            title: title.into(),
            overview,
            ranks,
        }
    }
}

impl RankData {
    /// Collects the page's data.
    pub fn new(name: impl Into<String>, snapshot: &Snapshot, explanation: &Explanation) -> Self {
        let device = explanation.device;
        let lives = Lifetimes::of(snapshot, device);
        let events = snapshot.events_of(device);
        let times = times_of(events);
        let moment = explanation
            .moment
            .event
            .map_or(0, |event| event + 1)
            .min(lives.events);
        let (peak_moment, peak_allocated) = lives.peak_allocated();
        let figures = lives.at(moment);
        let of_blocks = lives.blocks.iter().map(|life| life.stream);
        let of_segments = lives.segments.iter().map(|life| life.stream);
        let streams = names(
            of_blocks
                .chain(of_segments)
                .chain(refused(events).map(|(_, oom)| oom.stream)),
        );
        let stacks = StackTable::new(
            snapshot,
            device,
            &lives,
            times.as_deref(),
            (peak_moment, moment),
        );
        let pools = names(lives.segments.iter().map(|life| life.pool));
        let base = base_address(&lives);
        let config = snapshot.config().unwrap_or_default();
        let notes = explanation.notes.iter().cloned();
        let notes = notes.chain(contradictions(&lives));
        let first_time = events.first().and_then(|event| event.time_us);
        Self(json!({
            "name": name.into(),
            "device": device,
            "headline": explanation.headline,
            "details": explanation.ways.iter().map(|way| &way.why).collect::<Vec<_>>(),
            "device_total": explanation.device_total,
            "device_total_is": explanation.device_total_is,
            "causes": explanation.causes.iter().map(cause).collect::<Vec<_>>(),
            "categories": explanation.categories,
            "suspects": explanation.growing,
            "waits": explanation.stalled_frees.iter().filter_map(wait).collect::<Vec<_>>(),
            "moment": moment,
            "is_oom": explanation.moment.at == MomentKind::Oom,
            "simulated_times": explanation.has_simulated_times(),
            "settings": explanation.conf,
            "notes": notes.collect::<Vec<_>>(),
            "events": lives.events,
            "times": times.map(encode),
            "peak_moment": peak_moment,
            "peak_allocated": peak_allocated,
            "peak_reserved": lives.peak_reserved().1,
            "allocated": figures.allocated,
            "pending": figures.pending,
            "reserved": figures.reserved,
            // The base of all addresses in the columns. A text, because it may need 64 bits.
            "base_address": base.to_string(),
            "streams": streams.iter().map(u64::to_string).collect::<Vec<_>>(),
            "pools": pools.iter().map(|&of| pool(of, &config)).collect::<Vec<_>>(),
            "sites": stacks.sites,
            "frames": stacks.frames,
            "stacks": stacks.stacks,
            "blocks": blocks(&lives.blocks, base, &streams, &stacks.of_blocks),
            "segments": segments(&lives.segments, base, &streams, &pools),
            "ooms": ooms_of(events, &streams, &stacks),
            "phases": phases_of(snapshot, device, first_time.unwrap_or_default()),
        }))
    }
}

fn base_address(lives: &Lifetimes) -> u64 {
    let of_blocks = lives.blocks.iter().map(|life| life.address);
    let of_segments = lives.segments.iter().map(|life| life.address);
    of_blocks.chain(of_segments).min().unwrap_or_default()
}

fn cause(found: &CauseBytes) -> Value {
    let mut cause = json!(found);
    cause["about"] = json!(found.cause.about());
    cause
}

fn wait(wait: &FreeWait) -> Option<Value> {
    let freed = wait.freed_at.map_or(0, |event| event as usize + 1);
    Some(
        json!({ "site": wait.site, "size": wait.size, "freed": freed,
            "end": wait.completed_at? as usize + 1 }),
    )
}

/// A memory pool. `page`: bytes of expandable segments that can be released to the driver at a
/// time.
fn pool(pool: Option<(PoolKind, MempoolId)>, config: &Config) -> Value {
    let name = match pool {
        None => "segments released later".to_owned(),
        Some((kind, MempoolId::DEFAULT)) => format!("{} pool", kind.name()),
        Some((kind, MempoolId(first, second))) => {
            format!("private pool ({first}, {second}), {} blocks", kind.name())
        }
    };
    json!({ "name": name, "page": config.page(pool.map_or(PoolKind::Large, |(kind, _)| kind)) })
}

/// The fields of [`BlockLife`] as columns.
fn blocks(lives: &[BlockLife], base: u64, streams: &[u64], stacks: &[usize]) -> Value {
    let column = |of: &dyn Fn(&BlockLife) -> u64| encode(lives.iter().map(of));
    json!({
        "address": column(&|life| life.address - base),
        "size": column(&|life| life.size.0),
        "requested": column(&|life| life.requested.0),
        "start": column(&|life| life.start as u64),
        // Ends are unique, but lifetimes repeat.
        "freed": column(&|life| (life.freed - life.start) as u64),
        "end": column(&|life| (life.end - life.freed) as u64),
        "stack": encode(stacks.iter().map(|&stack| stack as u64)),
        "stream": column(&|life| position(streams, &life.stream) as u64),
    })
}

/// The fields of [`SegmentLife`] as columns.
fn segments(
    lives: &[SegmentLife],
    base: u64,
    streams: &[u64],
    pools: &[Option<(PoolKind, MempoolId)>],
) -> Value {
    let column = |of: &dyn Fn(&SegmentLife) -> u64| encode(lives.iter().map(of));
    json!({
        "address": column(&|life| life.address - base),
        "size": column(&|life| life.size.0),
        "start": column(&|life| life.start as u64),
        "end": column(&|life| (life.end - life.start) as u64),
        "stream": column(&|life| position(streams, &life.stream) as u64),
        "pool": column(&|life| position(pools, &life.pool) as u64),
        "expandable": column(&|life| u64::from(life.expandable)),
    })
}

fn names<T: Ord>(values: impl Iterator<Item = T>) -> Vec<T> {
    BTreeSet::from_iter(values).into_iter().collect()
}

fn position<T: Ord>(names: &[T], name: &T) -> usize {
    names.binary_search(name).unwrap_or_default()
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct Stack {
    site: usize,
    /// Indices of frames, outermost first.
    frames: Vec<usize>,
    at_peak: Bytes,
    at_moment: Bytes,
    byte_events: f64,
    /// Bytes × seconds, if the events have times.
    byte_seconds: Option<f64>,
}

/// A stack with its site, because stacks without frames may belong to different sites.
type Key = (StackId, SiteId);

/// The stacks of blocks and failed requests, with their sites and frames.
struct StackTable {
    keys: Vec<Key>,
    of_blocks: Vec<usize>,
    of_refused: Vec<usize>,
    stacks: Vec<Stack>,
    sites: Vec<String>,
    frames: Vec<(String, String, u32)>,
}

impl StackTable {
    fn new(
        snapshot: &Snapshot,
        device: u32,
        lives: &Lifetimes,
        times: Option<&[u64]>,
        at: (usize, usize),
    ) -> Self {
        let sites = Sites::new(snapshot, device);
        let events = snapshot.events_of(device);
        let key = |event: Option<usize>, stack| {
            (
                stack,
                sites.of_block(event.and_then(|event| u32::try_from(event).ok()), stack),
            )
        };
        let of_blocks: Vec<Key> = lives
            .blocks
            .iter()
            .map(|life| key(life.start.checked_sub(1), life.stack))
            .collect();
        let of_refused: Vec<Key> = refused(events)
            .map(|(index, event)| key(Some(index), event.stack))
            .collect();
        let keys = names(of_blocks.iter().chain(&of_refused).copied());
        let mut table = Self {
            of_blocks: of_blocks.iter().map(|key| position(&keys, key)).collect(),
            of_refused: of_refused.iter().map(|key| position(&keys, key)).collect(),
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

    fn add_stacks(&mut self, snapshot: &Snapshot, has_times: bool) {
        let mut frames = IndexSet::new();
        for &(stack, _) in &self.keys {
            let frames = snapshot
                .stacks
                .ids(stack)
                .iter()
                .rev()
                .map(|&id| frames.insert_full(id).0)
                .collect();
            self.stacks.push(Stack {
                frames,
                byte_seconds: has_times.then_some(0.0),
                ..Stack::default()
            });
        }
        let of_frame = |frame: &Frame| (frame.name.clone(), frame.file.clone(), frame.line);
        self.frames = frames
            .into_iter()
            .map(|id| of_frame(snapshot.stacks.frame(id)))
            .collect();
    }

    /// Numbers the sites by bytes at the peak, and assigns them to the stacks.
    fn rank_sites(&mut self, sites: &Sites) {
        let mut sums: IndexMap<SiteId, (Bytes, f64)> = IndexMap::new();
        for (stack, &(_, site)) in self.stacks.iter().zip(&self.keys) {
            let sum = sums.entry(site).or_default();
            sum.0 += stack.at_peak;
            sum.1 += stack.byte_events;
        }
        sums.sort_by(|a_site, a, b_site, b| {
            b.0.cmp(&a.0)
                .then(b.1.total_cmp(&a.1))
                .then(a_site.cmp(b_site))
        });
        for (stack, (_, site)) in self.stacks.iter_mut().zip(&self.keys) {
            stack.site = sums.get_index_of(site).unwrap_or_default();
        }
        self.sites = sums
            .into_keys()
            .map(|site| sites.get(site).name.clone())
            .collect();
    }
}

fn refused(events: &[Event]) -> impl Iterator<Item = (usize, &Event)> {
    events
        .iter()
        .enumerate()
        .filter(|(_, event)| event.action == Action::Oom)
}

fn weigh(
    stack: &mut Stack,
    life: &BlockLife,
    times: Option<&[u64]>,
    events: usize,
    (peak, moment): (usize, usize),
) {
    if life.is_allocated(peak) {
        stack.at_peak += life.size;
    }
    if life.is_allocated(moment) {
        stack.at_moment += life.size;
    }
    let until = life.freed.min(events);
    stack.byte_events += life.size.0 as f64 * (until - life.start.min(until)) as f64;
    if let (Some(sum), Some(times)) = (&mut stack.byte_seconds, times) {
        // Moment k + 1 is the state after event k and begins at its time. Earlier blocks begin at
        // the first event.
        let time = |moment: usize| {
            times
                .get(moment.saturating_sub(1))
                .copied()
                .unwrap_or_default()
        };
        *sum += life.size.0 as f64 * time(until).saturating_sub(time(life.start)) as f64 / 1e6;
    }
}

/// Microseconds since the first event. `None` if events have no times. If threads recorded out of
/// order, the later time counts.
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

fn ooms_of(events: &[Event], streams: &[u64], stacks: &StackTable) -> Vec<Value> {
    let oom = |((index, event), stack): ((usize, &Event), &usize)| {
        let stream = position(streams, &event.stream);
        json!({ "moment": index + 1, "size": event.size, "device_free": event.address,
            "stream": stream, "stack": stack })
    };
    refused(events).zip(&stacks.of_refused).map(oom).collect()
}

/// Pairs the starts and ends of phases, in microseconds since the first event. Incomplete phases
/// are omitted.
fn phases_of(snapshot: &Snapshot, device: u32, first_time: u64) -> Vec<Value> {
    let mut open: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    let mut phases = Vec::new();
    for mark in snapshot
        .annotations
        .iter()
        .filter(|mark| mark.device == device)
    {
        let time = mark.time_us.saturating_sub(first_time);
        if mark.begins {
            open.entry(&mark.name).or_default().push(time);
        } else if let Some(begin) = open.get_mut(mark.name.as_str()).and_then(Vec::pop) {
            phases.push((begin, time, &mark.name));
        }
    }
    phases.sort_by_key(|&(begin, end, _)| (begin, end));
    phases
        .into_iter()
        .map(|(begin, end, name)| json!({ "name": name, "begin": begin, "end": end }))
        .collect()
}

fn contradictions(lives: &Lifetimes) -> Vec<String> {
    let Contradictions {
        missing_frees,
        missing_blocks,
        missing_segment_bytes,
    } = lives.contradictions;
    let (frees, blocks, bytes) = (
        count(missing_frees, "free"),
        count(missing_blocks, "block"),
        Bytes(missing_segment_bytes),
    );
    let notes = [
        (
            missing_frees,
            format!(
                "The recording lacks {frees}: an address was allocated again while its block was \
                 live."
            ),
        ),
        (
            missing_blocks,
            format!(
                "Live after all events, but missing from the final state: {blocks}. The page ends \
                 them with the recording."
            ),
        ),
        (
            missing_segment_bytes as usize,
            format!(
                "{bytes} of segments were allocated but are missing from the final state: the \
                 events are incomplete."
            ),
        ),
    ];
    notes
        .into_iter()
        .filter(|(missing, _)| *missing > 0)
        .map(|(_, note)| note)
        .collect()
}
