//! Explains causes of failed requests. [`harness_record::cause`] determines the causes.

use std::collections::BTreeSet;

use harness_allocator::stats::PoolKind;
use harness_allocator::units::Bytes;
use serde::Serialize;

use crate::words::{self, size};
use harness_record::{Cause, FailedRequest, Holder, Pieces, PinnedSegment, RunRecord, StepRecord, causes};

/// Maximum number of holders that a sentence names.
const NAMED: usize = 4;

/// A failed request in the JSON output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct OutOfMemory {
    /// Position of the step in the run.
    pub(super) step: u32,
    /// Line of the step in the scenario.
    pub(super) line: u32,
    /// Iteration of the enclosing loops.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) iteration: Option<String>,
    /// Name of the stream, or its number.
    pub(super) stream: String,
    pub(super) requested: Bytes,
    /// Names of the causes, see [`harness_record::CauseKind`].
    pub(super) causes: Vec<&'static str>,
    /// The causes as sentences.
    pub(super) why: String,
}

/// All requests of recorded steps that failed after all retries.
pub(super) fn of_run(run: &RunRecord) -> impl Iterator<Item = OutOfMemory> {
    failed_requests(run).map(|(step, shortage)| OutOfMemory {
        step: step.number,
        line: step.line,
        iteration: step.iteration.clone(),
        stream: shortage.streams.get(&shortage.stream).cloned().unwrap_or_else(|| shortage.stream.to_string()),
        requested: shortage.requested,
        causes: kinds(shortage),
        why: explain(shortage),
    })
}

/// Steps whose request failed, with the state at that moment.
pub(crate) fn failed_requests(run: &RunRecord) -> impl Iterator<Item = (&StepRecord, &FailedRequest)> {
    run.steps.iter().filter_map(|step| Some((step, step.failed_request.as_ref()?)))
}

/// Distinct names of the causes.
pub(crate) fn kinds(shortage: &FailedRequest) -> Vec<&'static str> {
    let mut kinds: Vec<&str> = causes(shortage).iter().map(|cause| cause.kind().name()).collect();
    kinds.dedup();
    kinds
}

/// The causes without figures, on one line.
pub(crate) fn in_short(shortage: &FailedRequest) -> String {
    let mut clauses: Vec<&str> = causes(shortage).iter().map(|cause| cause.kind().about()).collect();
    clauses.dedup();
    if clauses.is_empty() { "the figures do not show why".to_owned() } else { clauses.join("; ") }
}

/// The heading of [`explain`].
pub(crate) fn title(shortage: &FailedRequest) -> &'static str {
    if shortage.was_enough_free() { "Why free memory did not help" } else { "Why there was too little memory" }
}

/// The request, for example `700 MiB` or `700 MiB for stream side`. The default stream is not named.
pub(crate) fn request(shortage: &FailedRequest) -> String {
    match stream(shortage, shortage.stream).as_str() {
        DEFAULT_STREAM => size(shortage.requested),
        stream => format!("{} for {stream}", size(shortage.requested)),
    }
}

/// The name of the default stream.
const DEFAULT_STREAM: &str = "the default stream";

/// Explains the causes, or gives the figures if no cause is proven.
pub(crate) fn explain(shortage: &FailedRequest) -> String {
    let causes = causes(shortage);
    if !causes.is_empty() {
        return causes.iter().map(|cause| sentence(cause, shortage)).collect::<Vec<_>>().join(" ");
    }
    let unknown = if shortage.lanes.is_none() { ", whose pool does not report its blocks" } else { "" };
    format!(
        "The figures do not show why: {} were requested, {} were free on the device and {} in the allocator{unknown}.",
        size(shortage.requested),
        size(shortage.accounts.device.free),
        size(shortage.cached())
    )
}

/// Explains the causes other than fragmentation.
pub(crate) fn beside_fragmentation(shortage: &FailedRequest) -> String {
    let causes = causes(shortage).into_iter().filter(|cause| !matches!(cause, Cause::Fragmented { .. }));
    causes.map(|cause| sentence(&cause, shortage)).collect::<Vec<_>>().join(" ")
}

/// The stream's name, or its number.
fn stream(shortage: &FailedRequest, number: u32) -> String {
    match shortage.streams.get(&number).map(String::as_str) {
        Some("default") => DEFAULT_STREAM.to_owned(),
        Some(name) => format!("stream {name}"),
        None => format!("stream {number}"),
    }
}

/// Explains one cause with its figures.
fn sentence(cause: &Cause, shortage: &FailedRequest) -> String {
    match *cause {
        Cause::Fraction { limit, held, free } => format!(
            "The memory fraction allows {}, of which {} are in use. So only {} remain, although {} are free on the device.",
            size(limit),
            size(held),
            size(limit.saturating_sub(held)),
            size(free)
        ),
        Cause::Limit { limit, held } => {
            format!("The program limits its own requests to {}, of which {} are in use.", size(limit), size(held))
        }
        Cause::Injected { number } => {
            let refused = shortage.injected.as_ref();
            let call = refused.map_or("call", |refused| &refused.call);
            let process = refused.and_then(|refused| refused.process.as_ref());
            let whose = process.map_or_else(String::new, |process| format!(" of the process `{process}`"));
            format!("The scenario injected this failure into {call} number {number}{whose}.")
        }
        Cause::PendingFree(waiting) => format!(
            "{} were freed but wait for other streams that still use them. The largest block has {}.",
            size(waiting.bytes),
            size(waiting.largest)
        ),
        Cause::OtherPool { pool, largest } => {
            let (holds, request) = match pool {
                PoolKind::Small => ("small", "more than 1 MiB"),
                PoolKind::Large => ("large", "at most 1 MiB"),
            };
            format!("A block of {} is free, but the pool of {holds} blocks does not serve requests of {request}.", size(largest))
        }
        Cause::OtherStream { stream: owner, wanted, largest } => format!(
            "A block of {} is free, but it belongs to {}, and the request is for {}.",
            size(largest),
            stream(shortage, owner),
            stream(shortage, wanted)
        ),
        Cause::Rounding { room, asked } => {
            format!("The driver has {}, but the allocator requests whole segments or pages, here {}.", size(room), size(asked))
        }
        Cause::RoundedUp { largest, asked } => {
            format!("A block of {} is free, but the request is rounded up to {}.", size(largest), size(asked))
        }
        Cause::Fragmented { own, room, elsewhere } => fragmented(shortage, own, room, elsewhere),
        Cause::PrivatePool(pieces) => format!(
            "{} are free in private pools, which serve other requests, for example those of a CUDA graph. Releasing the pool frees them.",
            size(pieces.bytes)
        ),
        Cause::OthersHold { held, asked } => {
            format!("Other processes use {}. Without them, the driver could have allocated the requested {}.", size(held), size(asked))
        }
        Cause::Unaccounted { used, asked } => format!(
            "{} of the device are in use by neither the allocator nor a known process, for example through the driver's rounding. Without them, \
             the driver could have allocated the requested {}.",
            size(used),
            size(asked)
        ),
        Cause::TooLarge { free, cached } => {
            format!("The request is larger than all free memory: {} on the device and {} in the allocator.", size(free), size(cached))
        }
    }
}

fn fragmented(shortage: &FailedRequest, own: Pieces, room: Bytes, elsewhere: Bytes) -> String {
    let mut parts = Vec::new();
    if own.count > 0 {
        let pieces = words::count(own.count, "block");
        let largest = if own.count > 1 { format!(", the largest of {}", size(own.largest)) } else { String::new() };
        parts.push(format!("{} in {pieces} of the right stream and size{largest}", size(own.bytes)));
    }
    let others = [(room, "from the driver"), (elsewhere, "of other streams or sizes")];
    parts.extend(others.iter().filter(|(bytes, _)| *bytes > Bytes::ZERO).map(|(bytes, what)| format!("{} {what}", size(*bytes))));
    format!(
        "Enough memory is free in total, but no free block is large enough: {}. {}",
        parts.join("; "),
        what_pins(shortage, elsewhere > Bytes::ZERO)
    )
}

/// Names the blocks that keep free memory from being released to the driver.
fn what_pins(shortage: &FailedRequest, everywhere: bool) -> String {
    let serves = |segment: &&PinnedSegment| {
        let own_pool = segment.pool.is_none_or(|pool| pool == PoolKind::of_block(shortage.requested));
        everywhere || (own_pool && segment.stream.is_none_or(|stream| stream == shortage.stream))
    };
    let segments: Vec<&PinnedSegment> = shortage.pinned.iter().filter(serves).collect();
    let mut holders: Vec<&Holder> = Vec::new();
    for holder in segments.iter().flat_map(|segment| &segment.holders) {
        if !holders.iter().any(|known| (&known.name, known.line) == (&holder.name, holder.line)) {
            holders.push(holder);
        }
    }
    if holders.is_empty() {
        return "A request needs one contiguous block, and a segment or page with a live block cannot be released to the driver."
            .to_owned();
    }
    let is_whole = shortage.pinned_unlisted.is_empty() && segments.iter().all(|segment| segment.other_blocks == 0);
    let is_one_name = is_whole && holders.iter().all(|holder| holder.name == holders[0].name);
    let verb = if is_one_name { "pins" } else { "pin" };
    let rest = if segments.len() == 1 && shortage.pinned_unlisted.is_empty() {
        "a segment that therefore cannot be released to the driver"
    } else {
        "segments that therefore cannot be released to the driver"
    };
    format!("{} {verb} {rest}.", named(&holders, is_whole))
}

/// Names holders with their lines: `lora1, lora2 and 3 more (lines 12-14)`. If some holders are unlisted, their number is
/// unknown.
fn named(holders: &[&Holder], is_whole: bool) -> String {
    let names = words::distinct(holders.iter().map(|holder| holder.name.as_str()));
    let more = names.len().saturating_sub(NAMED);
    let mut shown: Vec<String> = names.iter().take(NAMED).map(|name| (*name).to_owned()).collect();
    match more {
        _ if !is_whole => shown.push("others".to_owned()),
        0 => {}
        more => shown.push(format!("{more} more")),
    }
    let last = shown.pop().unwrap_or_default();
    let shown = if shown.is_empty() { last } else { format!("{} and {last}", shown.join(", ")) };
    format!("{shown} ({})", lines(&holders.iter().map(|holder| holder.line).collect()))
}

/// Formats lines: `line 12`, `lines 12-14`, `lines 3, 9-11`.
fn lines(lines: &BTreeSet<u32>) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for &line in lines {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == line => *last = line,
            _ => ranges.push((line, line)),
        }
    }
    let ranges = ranges.into_iter().map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") });
    format!("{} {}", if lines.len() == 1 { "line" } else { "lines" }, ranges.collect::<Vec<_>>().join(", "))
}

/// Lists the live buffers of a pinned segment, with line and size.
pub(crate) fn holders_of(segment: &PinnedSegment) -> String {
    let mut parts: Vec<String> = segment
        .holders
        .iter()
        .map(|holder| {
            let blocks = if holder.blocks > 1 { format!(" in {} blocks", holder.blocks) } else { String::new() };
            format!("{} (line {}): {}{blocks}", holder.name, holder.line, size(holder.bytes))
        })
        .collect();
    if segment.other_blocks > 0 {
        parts.push(format!("{} more", words::count(segment.other_blocks, "block")));
    }
    parts.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::examples;
    use harness_record::{CauseKind, RefusedCall, UnlistedSegments};

    const fn mib(count: u64) -> Bytes {
        Bytes::mib(count)
    }

    #[test]
    fn each_cause_is_a_sentence_with_its_figures() {
        let pieces = |count, bytes, largest| Pieces { count, bytes: mib(bytes), largest: mib(largest) };
        let causes = [
            Cause::Fraction { limit: mib(1024), held: mib(400), free: mib(1648) },
            Cause::Limit { limit: mib(200), held: mib(150) },
            Cause::Injected { number: 3 },
            Cause::PendingFree(pieces(2, 12, 8)),
            Cause::Rounding { room: mib(12), asked: mib(20) },
            Cause::RoundedUp { largest: mib(610), asked: mib(640) },
            Cause::Fragmented { own: pieces(2, 200, 100), room: mib(112), elsewhere: mib(0) },
            Cause::Fragmented { own: pieces(1, 54, 54), room: mib(0), elsewhere: mib(80) },
            Cause::OtherStream { stream: 1, wanted: 0, largest: mib(780) },
            Cause::OtherPool { pool: PoolKind::Large, largest: mib(42) },
            Cause::OtherPool { pool: PoolKind::Small, largest: mib(2) },
            Cause::PrivatePool(pieces(1, 600, 600)),
            Cause::OthersHold { held: mib(1000), asked: mib(900) },
            Cause::Unaccounted { used: mib(1000), asked: mib(900) },
            Cause::TooLarge { free: mib(1004), cached: mib(16) },
        ];
        let mut shortage = examples::shortage();
        shortage.streams.insert(1, "side".to_owned());
        shortage.injected = Some(RefusedCall { process: None, call: "cudaMalloc".to_owned(), number: 3 });
        let seen: Vec<CauseKind> = causes.iter().map(Cause::kind).collect();
        assert!(CauseKind::ALL.iter().all(|kind| seen.contains(kind)), "the test lacks a kind");
        let sentences: Vec<String> = causes.iter().map(|cause| format!("{}: {}", cause.kind(), sentence(cause, &shortage))).collect();
        insta::assert_snapshot!(sentences.join("\n"));
    }

    fn holder(name: &str, line: u32, blocks: u64) -> Holder {
        Holder { name: name.to_owned(), line, blocks, bytes: mib(2 * blocks) }
    }

    fn pinned(holders: Vec<Holder>) -> PinnedSegment {
        PinnedSegment { pool: Some(PoolKind::Large), stream: Some(0), size: mib(700), free: mib(604), holders, other_blocks: 0 }
    }

    #[test]
    fn what_pins_a_segment_is_named_with_its_lines() {
        let mut shortage = examples::shortage();
        let mut pins = |segments: Vec<PinnedSegment>| {
            shortage.pinned = segments;
            what_pins(&shortage, false)
        };
        assert!(pins(Vec::new()).starts_with("A request needs one contiguous block"));
        let one = "lora1 (line 12) pins a segment that therefore cannot be released to the driver.";
        assert_eq!(pins(vec![pinned(vec![holder("lora1", 12, 1)])]), one);
        let loras = vec![holder("lora1", 12, 1), holder("lora2", 13, 1), holder("lora3", 14, 1)];
        assert!(pins(vec![pinned(loras.clone())]).starts_with("lora1, lora2 and lora3 (lines 12-14) pin a segment"));
        let many = (0..6).map(|n| holder(&format!("kv[{n}]"), 7 + 2 * (n / 3), 1)).collect();
        assert!(
            pins(vec![pinned(loras), pinned(many)]).starts_with("lora1, lora2, lora3, kv[0] and 5 more (lines 7, 9, 12-14) pin segments")
        );
        // Segments of other streams do not count if the request's own blocks suffice.
        let elsewhere = PinnedSegment { stream: Some(1), ..pinned(vec![holder("a", 3, 1)]) };
        assert!(pins(vec![elsewhere]).starts_with("A request needs one contiguous block"));
    }

    #[test]
    fn the_verb_agrees_with_the_number_of_names() {
        let mut shortage = examples::shortage();
        let mut pins = |segments: Vec<PinnedSegment>| {
            shortage.pinned = segments;
            what_pins(&shortage, false)
        };
        let storm = || pinned(vec![holder("storm", 13, 3)]);
        assert!(pins(vec![storm()]).starts_with("storm (line 13) pins a segment that"));
        assert!(pins(vec![storm(), storm()]).starts_with("storm (line 13) pins segments that"));
        let same_name = vec![holder("kv", 7, 1), holder("kv", 9, 2)];
        assert!(pins(vec![pinned(same_name)]).starts_with("kv (lines 7, 9) pins a segment that"));
        assert!(pins(vec![pinned(vec![holder("a", 3, 1), holder("b", 4, 1)])]).starts_with("a and b (lines 3-4) pin a segment that"));
    }

    #[test]
    fn segments_that_are_not_listed_count() {
        let mut shortage = examples::shortage();
        shortage.pinned = vec![pinned(vec![holder("s", 5, 14)])];
        shortage.pinned_unlisted = UnlistedSegments { count: 3, free: mib(6) };
        assert!(what_pins(&shortage, false).starts_with("s and others (line 5) pin segments"));
        assert_eq!(holders_of(&shortage.pinned[0]), "s (line 5): 28 MiB in 14 blocks");
    }
}
