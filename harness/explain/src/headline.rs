//! The one sentence that matters first: [`of`].

use std::collections::BTreeMap;

use harness_allocator::units::Bytes;

use crate::causes::{ByteCause, Explanation, Refused, TotalKnown};
use crate::pins::PinnedSegment;
use crate::sites::SiteId;
use crate::state::MomentKind;
use crate::ways;

/// The sentence about a moment. Where a request was refused, it names the largest of the causes without which there would have been room.
pub(crate) fn of(explanation: &Explanation) -> String {
    match &explanation.request {
        Some(request) => of_refusal(explanation, request),
        None => of_state(explanation),
    }
}

fn of_refusal(explanation: &Explanation, request: &Refused) -> String {
    let accounts = &explanation.accounts;
    let free = accounts.device_free.unwrap_or_default();
    let cached = accounts.reserved.saturating_sub(accounts.active);
    let waiting = explanation.bytes(ByteCause::PendingFree);
    let wanted = format!("{} for {}", request.asked, request.site);
    if request.requested > free + cached + waiting {
        let lacking = request.requested.saturating_sub(free + cached + waiting);
        return format!(
            "The program is too large by {lacking}: {} are allocated{}, {} are free in all, and {wanted} did not fit.",
            accounts.allocated,
            most_by(explanation, ByteCause::Allocated),
            free + cached + waiting,
        );
    }
    let stuck = [
        ByteCause::PendingFree,
        ByteCause::OtherStream,
        ByteCause::OtherPool,
        ByteCause::PrivatePool,
        ByteCause::InactiveSplit,
        ByteCause::WholeSegments,
    ];
    let largest = stuck.into_iter().max_by_key(|&cause| (explanation.bytes(cause), cause));
    let (cause, bytes) = largest.map_or((ByteCause::Free, free), |cause| (cause, explanation.bytes(cause)));
    let failed = format!("so {wanted} did not fit, with {free} free on the device");
    match cause {
        ByteCause::PendingFree => {
            format!("{bytes} were freed but wait for other streams{}, {failed}.", most_by(explanation, cause))
        }
        ByteCause::OtherStream => {
            format!(
                "{bytes} are cached for other streams than {}{}, {failed}.",
                ways::stream(request.stream),
                pinned_by(explanation, cause)
            )
        }
        ByteCause::OtherPool => {
            format!("{bytes} are cached for blocks of the other size{}, {failed}.", pinned_by(explanation, cause))
        }
        ByteCause::PrivatePool => format!("{bytes} are cached in private pools that serve other requests, {failed}."),
        ByteCause::InactiveSplit => format!("{bytes} are reserved but pinned: {}, {failed}.", pins(explanation)),
        _ if bytes > Bytes::ZERO => format!("{bytes} are free in whole segments, {failed}."),
        _ => format!("{} are allocated{}, {failed}.", accounts.allocated, most_by(explanation, ByteCause::Allocated)),
    }
}

fn of_state(explanation: &Explanation) -> String {
    let accounts = &explanation.accounts;
    let when = match explanation.moment.at {
        MomentKind::Peak => "When the most was allocated",
        MomentKind::Oom | MomentKind::End => "At the end of the recording",
        MomentKind::Event => "At this moment",
    };
    let unused = explanation.bytes(ByteCause::InactiveSplit);
    let pinned = if unused > Bytes::ZERO && unused.get() >= accounts.reserved.get() / 20 {
        format!("; {unused} are reserved but pinned: {}", pins(explanation))
    } else {
        String::new()
    };
    let of = if explanation.device_total_is == TotalKnown::ReservedOnly {
        String::new()
    } else {
        format!(" on a device of {}", explanation.device_total)
    };
    format!(
        "{when}, {} are allocated{} and {} are reserved{of}{pinned}.",
        accounts.allocated,
        most_by(explanation, ByteCause::Allocated),
        accounts.reserved
    )
}

/// `, most of it by model.py:41 (2 GiB)`.
fn most_by(explanation: &Explanation, cause: ByteCause) -> String {
    let largest = explanation.causes.iter().find(|of| of.cause == cause).and_then(|of| of.sites.first().map(|site| (of.bytes, site)));
    match largest {
        Some((bytes, site)) if 2 * site.bytes.get() > bytes.get() => format!(", most of it ({}) by {}", site.bytes, site.site),
        Some((_, site)) => format!(", the most ({}) by {}", site.bytes, site.site),
        None => String::new(),
    }
}

/// `, pinned by blocks of model.py:41`.
fn pinned_by(explanation: &Explanation, cause: ByteCause) -> String {
    let of = explanation.causes.iter().find(|of| of.cause == cause).and_then(|of| of.sites.first());
    of.map_or_else(String::new, |site| format!(", the most ({}) in segments pinned by blocks of {}", site.bytes, site.site))
}

/// What one site pins in the pool and stream of the request.
#[derive(Default)]
struct PinnedBySite<'a> {
    segments: Vec<&'a PinnedSegment>,
    free: Bytes,
}

/// `212 segments are each held by one block of 2 MiB allocated at model.py:41`.
fn pins(explanation: &Explanation) -> String {
    let is_own = |segment: &&PinnedSegment| match &explanation.request {
        Some(request) => (segment.pool, segment.stream, segment.private_pool) == (request.pool, request.stream, request.private_pool),
        None => segment.private_pool.is_none(),
    };
    let mut by_site: BTreeMap<SiteId, PinnedBySite<'_>> = BTreeMap::new();
    for segment in explanation.pinned.iter().filter(is_own) {
        let of_site = by_site.entry(segment.by.id).or_default();
        of_site.segments.push(segment);
        of_site.free += segment.free;
    }
    let largest = by_site.into_values().max_by(|a, b| a.free.cmp(&b.free).then_with(|| b.segments[0].by.site.cmp(&a.segments[0].by.site)));
    largest.map_or_else(|| "something is live in each segment".to_owned(), |most| held(&most, explanation))
}

fn held(most: &PinnedBySite<'_>, explanation: &Explanation) -> String {
    let first = most.segments[0];
    let (count, site) = (most.segments.len(), &first.by.site);
    let of_all = if most.free < explanation.bytes(ByteCause::InactiveSplit) { format!("{} of it: ", most.free) } else { String::new() };
    let allocated = if site.starts_with("no Python frames") { format!("allocated with {site}") } else { format!("allocated at {site}") };
    let allocated = if site == "before the recording" { format!("allocated {site}") } else { allocated };
    if first.expandable {
        let pieces = if count == 1 { "1 piece lies".to_owned() } else { format!("{count} pieces lie") };
        return format!("{of_all}{pieces} in pages beside live blocks {allocated}");
    }
    let sizes: Vec<Bytes> = most.segments.iter().map(|segment| segment.by.size).collect();
    let one = match (sizes.iter().min(), sizes.iter().max()) {
        (Some(least), Some(largest)) if least == largest => format!("one block of {largest}"),
        (_, Some(largest)) => format!("one block of at most {largest}"),
        _ => "one block".to_owned(),
    };
    let are_single = most.segments.iter().all(|segment| segment.live_blocks == 1);
    match (count, are_single) {
        (1, true) => format!("{of_all}1 segment of {} is held by {one} {allocated}", first.size),
        (_, true) => format!("{of_all}{count} segments are each held by {one} {allocated}"),
        (1, false) => format!("{of_all}1 segment of {} is held by {} blocks, the oldest {allocated}", first.size, first.live_blocks),
        (_, false) => format!("{of_all}in each of {count} segments something is live, the oldest block {allocated}"),
    }
}
