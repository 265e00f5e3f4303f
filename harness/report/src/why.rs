use std::collections::BTreeSet;

use harness_allocator::{stats::PoolKind, units::Bytes};
use serde::Serialize;

use crate::words::{self, size};
use harness_record::{
    Cause, FailedRequest, Holder, Pieces, PinnedSegment, RunRecord, StepRecord, cause_names, causes,
};

const NAMED: usize = 4;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct OutOfMemory {
    pub(super) step: u32,
    pub(super) line: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) iteration: Option<String>,
    pub(super) stream: String,
    pub(super) requested: Bytes,
    /// Names of the causes, see [`harness_record::CauseKind`].
    pub(super) causes: Vec<&'static str>,
    pub(super) why: String,
}

/// All requests of recorded steps that failed after all retries.
pub(super) fn of_run(run: &RunRecord) -> impl Iterator<Item = OutOfMemory> {
    failed_requests(run).map(|(step, failed_request)| OutOfMemory {
        step: step.number,
        line: step.line,
        iteration: step.iteration.clone(),
        stream: failed_request
            .streams
            .get(&failed_request.stream)
            .cloned()
            .unwrap_or_else(|| failed_request.stream.to_string()),
        requested: failed_request.requested,
        causes: cause_names(failed_request),
        why: explain(failed_request),
    })
}

/// Steps whose request failed, with the state at that moment.
pub(crate) fn failed_requests(
    run: &RunRecord,
) -> impl Iterator<Item = (&StepRecord, &FailedRequest)> {
    run.steps
        .iter()
        .filter_map(|step| Some((step, step.failed_request.as_ref()?)))
}

/// The causes without figures, on one line.
pub(crate) fn in_short(failed_request: &FailedRequest) -> String {
    let mut clauses: Vec<&str> = causes(failed_request)
        .iter()
        .map(|cause| cause.kind().about())
        .collect();
    clauses.dedup();
    if clauses.is_empty() {
        "the figures do not show why".to_owned()
    } else {
        clauses.join("; ")
    }
}

pub(crate) fn title(failed_request: &FailedRequest) -> &'static str {
    if failed_request.was_enough_free() {
        "Why free memory did not help"
    } else {
        "Why there was too little memory"
    }
}

/// The request, for example `700 MiB` or `700 MiB for stream side`. The default stream is not
/// named.
pub(crate) fn request(failed_request: &FailedRequest) -> String {
    match stream(failed_request, failed_request.stream).as_str() {
        DEFAULT_STREAM => size(failed_request.requested),
        stream => format!("{} for {stream}", size(failed_request.requested)),
    }
}

const DEFAULT_STREAM: &str = "the default stream";

/// Explains the causes, or gives the figures if no cause is proven.
pub(crate) fn explain(failed_request: &FailedRequest) -> String {
    let causes = causes(failed_request);
    if !causes.is_empty() {
        return causes
            .iter()
            .map(|cause| sentence(cause, failed_request))
            .collect::<Vec<_>>()
            .join(" ");
    }
    let unknown = if failed_request.lanes.is_none() {
        ", whose pool does not report its blocks"
    } else {
        ""
    };
    format!(
        "The figures do not show why: {} were requested, {} were free on the device and {} in the \
         allocator{unknown}.",
        size(failed_request.requested),
        size(failed_request.accounts.device.free),
        size(failed_request.cached())
    )
}

pub(crate) fn beside_fragmentation(failed_request: &FailedRequest) -> String {
    let causes = causes(failed_request)
        .into_iter()
        .filter(|cause| !matches!(cause, Cause::Fragmented { .. }));
    causes
        .map(|cause| sentence(&cause, failed_request))
        .collect::<Vec<_>>()
        .join(" ")
}

fn stream(failed_request: &FailedRequest, number: u32) -> String {
    match failed_request.streams.get(&number).map(String::as_str) {
        Some("default") => DEFAULT_STREAM.to_owned(),
        Some(name) => format!("stream {name}"),
        None => format!("stream {number}"),
    }
}

fn allocator_limit(limit: Bytes, held: Bytes, free: Bytes) -> String {
    format!(
        "The allocator's own limit is {}, of which {} are reserved. {} are free on the device.",
        size(limit),
        size(held),
        size(free)
    )
}

fn unaccounted(used: Bytes, asked: Bytes) -> String {
    format!(
        "{} of the device are in use by neither the allocator nor a known process, for example \
         through the driver's rounding. Without them, the driver could have allocated the \
         requested {}.",
        size(used),
        size(asked)
    )
}

fn sentence(cause: &Cause, failed_request: &FailedRequest) -> String {
    match *cause {
        Cause::Fraction { limit, held, free } => format!(
            "The memory fraction allows {}, of which {} are in use. So only {} remain, although {} \
             are free on the device.",
            size(limit),
            size(held),
            size(limit.saturating_sub(held)),
            size(free)
        ),
        Cause::AllocatorLimit { limit, held, free } => allocator_limit(limit, held, free),
        Cause::Limit { limit, held } => format!(
            "The program limits its own requests to {}, of which {} are in use.",
            size(limit),
            size(held)
        ),
        Cause::Injected { number } => injected(failed_request, number),
        Cause::PendingFree(waiting) => format!(
            "{} were freed but wait for other streams that still use them. The largest block has \
             {}.",
            size(waiting.bytes),
            size(waiting.largest)
        ),
        Cause::OtherPool { pool, largest } => other_pool(pool, largest),
        Cause::OtherStream {
            stream: owner,
            wanted,
            largest,
        } => other_stream(failed_request, owner, wanted, largest),
        Cause::Rounding { room, asked } => format!(
            "The driver has {}, but the least that the allocator requests from it is {}.",
            size(room),
            size(asked)
        ),
        Cause::RoundedUp { largest, asked } => format!(
            "A block of {} is free, but the allocator needs {} for the request.",
            size(largest),
            size(asked)
        ),
        Cause::Fragmented {
            own,
            room,
            elsewhere,
        } => fragmented(failed_request, own, room, elsewhere),
        Cause::PrivatePool(pieces) => private_pools(failed_request, pieces.bytes),
        Cause::OthersHold { held, asked } => format!(
            "Other processes use {}. Without them, the driver could have allocated the \
             requested {}.",
            size(held),
            size(asked)
        ),
        Cause::Unaccounted { used, asked } => unaccounted(used, asked),
        Cause::TooLarge { free, cached } => format!(
            "The request is larger than all free memory: {} on the device and {} in the \
             allocator.",
            size(free),
            size(cached)
        ),
    }
}

fn injected(failed_request: &FailedRequest, number: u64) -> String {
    let refused = failed_request.injected.as_ref();
    let call = refused.map_or("call", |refused| &refused.call);
    let process = refused.and_then(|refused| refused.process.as_ref());
    let whose = process.map_or_else(String::new, |process| {
        format!(" of the process `{process}`")
    });
    format!("The scenario injected this failure into {call} number {number}{whose}.")
}

fn other_pool(pool: PoolKind, largest: Bytes) -> String {
    let (holds, request) = match pool {
        PoolKind::Small => ("small", "more than 1 MiB"),
        PoolKind::Large => ("large", "at most 1 MiB"),
    };
    format!(
        "A block of {} is free, but the pool of {holds} blocks does not serve requests of \
         {request}.",
        size(largest)
    )
}

fn other_stream(failed_request: &FailedRequest, owner: u32, wanted: u32, largest: Bytes) -> String {
    format!(
        "A block of {} is free, but it belongs to {}, and the request is for {}.",
        size(largest),
        stream(failed_request, owner),
        stream(failed_request, wanted)
    )
}

fn private_pools(failed_request: &FailedRequest, free: Bytes) -> String {
    let probably = if failed_request.is_pool_inferred {
        "probably "
    } else {
        ""
    };
    format!(
        "{} are free in private pools, which {probably}serve other requests, for example those of \
         a CUDA graph. Releasing the pool frees them.",
        size(free)
    )
}

fn fragmented(
    failed_request: &FailedRequest,
    own: Pieces,
    room: Bytes,
    elsewhere: Bytes,
) -> String {
    let mut parts = Vec::new();
    if own.count > 0 {
        let pieces = words::count(own.count, "block");
        let largest = if own.count > 1 {
            format!(", the largest of {}", size(own.largest))
        } else {
            String::new()
        };
        parts.push(format!(
            "{} in {pieces} of the right stream and size{largest}",
            size(own.bytes)
        ));
    }
    let others = [
        (room, "from the driver"),
        (elsewhere, "of other streams or sizes"),
    ];
    parts.extend(
        others
            .iter()
            .filter(|(bytes, _)| *bytes > Bytes::ZERO)
            .map(|(bytes, what)| format!("{} {what}", size(*bytes))),
    );
    format!(
        "Enough memory is free in total, but no free block is large enough: {}. {}",
        parts.join("; "),
        what_pins(failed_request, elsewhere > Bytes::ZERO)
    )
}

/// Names the blocks that keep free memory from being released to the driver.
fn what_pins(failed_request: &FailedRequest, everywhere: bool) -> String {
    let serves = |segment: &&PinnedSegment| {
        let own_pool = segment
            .pool
            .is_none_or(|pool| pool == PoolKind::of_block(failed_request.requested));
        everywhere
            || (own_pool
                && segment
                    .stream
                    .is_none_or(|stream| stream == failed_request.stream))
    };
    let segments: Vec<&PinnedSegment> = failed_request.pinned.iter().filter(serves).collect();
    let mut holders: Vec<&Holder> = Vec::new();
    for holder in segments.iter().flat_map(|segment| &segment.holders) {
        if !holders
            .iter()
            .any(|known| (&known.name, known.line) == (&holder.name, holder.line))
        {
            holders.push(holder);
        }
    }
    if failed_request.keeps_free_segments {
        return "The allocator releases no free segment to the driver for a request.".to_owned();
    }
    if holders.is_empty() {
        return "A request needs one contiguous block, and a segment or page with a live block \
             cannot be released to the driver."
            .to_owned();
    }
    let is_whole = failed_request.pinned_unlisted.count == 0
        && segments.iter().all(|segment| segment.other_blocks == 0);
    let is_one_name = is_whole && holders.iter().all(|holder| holder.name == holders[0].name);
    let verb = if is_one_name { "pins" } else { "pin" };
    let rest = if segments.len() == 1 && failed_request.pinned_unlisted.count == 0 {
        "a segment that therefore cannot be released to the driver"
    } else {
        "segments that therefore cannot be released to the driver"
    };
    format!("{} {verb} {rest}.", named(&holders, is_whole))
}

/// Names holders with their lines: `lora1, lora2 and 3 more (lines 12-14)`. If some holders are
/// unlisted, their number is unknown.
fn named(holders: &[&Holder], is_whole: bool) -> String {
    let names = words::distinct(holders.iter().map(|holder| holder.name.as_str()));
    let more = names.len().saturating_sub(NAMED);
    let mut shown: Vec<String> = names
        .iter()
        .take(NAMED)
        .map(|name| (*name).to_owned())
        .collect();
    match more {
        _ if !is_whole => shown.push("others".to_owned()),
        0 => {}
        more => shown.push(format!("{more} more")),
    }
    let last = shown.pop().unwrap_or_default();
    let shown = if shown.is_empty() {
        last
    } else {
        format!("{} and {last}", shown.join(", "))
    };
    format!(
        "{shown} ({})",
        lines(&holders.iter().map(|holder| holder.line).collect())
    )
}

/// Formats lines: `line 12`, `lines 12-14`, `lines 3, 9-11`.
fn lines(lines: &BTreeSet<u32>) -> String {
    let sorted: Vec<u32> = lines.iter().copied().collect();
    let ranges = sorted
        .chunk_by(|line, next| line + 1 == *next)
        .map(|range| match range {
            [first, .., last] => format!("{first}-{last}"),
            one => one[0].to_string(),
        });
    format!(
        "{} {}",
        if lines.len() == 1 { "line" } else { "lines" },
        words::joined(ranges, ", ")
    )
}

/// Lists the live buffers of a pinned segment, with line and size.
pub(crate) fn holders_of(segment: &PinnedSegment) -> String {
    let mut parts: Vec<String> = segment
        .holders
        .iter()
        .map(|holder| {
            let blocks = if holder.blocks > 1 {
                format!(" in {} blocks", holder.blocks)
            } else {
                String::new()
            };
            format!(
                "{} (line {}): {}{blocks}",
                holder.name,
                holder.line,
                size(holder.bytes)
            )
        })
        .collect();
    if segment.other_blocks > 0 {
        parts.push(format!(
            "{} more",
            words::count(segment.other_blocks, "block")
        ));
    }
    parts.join("; ")
}

#[cfg(test)]
mod tests;
