//! Explains why each attempt of the caching allocator to serve a request failed. The allocator
//! tries a free block, then a new segment, then a new segment after releasing cached memory:
//! <https://github.com/pytorch/pytorch/blob/v2.11.0/c10/cuda/CUDACachingAllocator.cpp>
//! (`DeviceCachingAllocator::malloc`).

use harness_allocator::{stats::BlockState, units::Bytes};
use harness_base::words::count;
use harness_record::Pieces;
use harness_trace::snapshot::{Action, Block, Event, MempoolId, Segment};
use serde::Serialize;

use crate::pins;
use crate::view::{DeviceSize, RefusedRequest, Totals, View, pool_mismatch};

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FailedAttempt {
    pub way: AttemptKind,
    pub why: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AttemptKind {
    FreeBlock,
    PendingFree,
    NewSegment,
    /// Another attempt after releasing cached memory.
    Retry,
}

impl AttemptKind {
    pub const fn about(self) -> &'static str {
        match self {
            Self::FreeBlock => "a free block",
            Self::PendingFree => "a block that waits for other streams",
            Self::NewSegment => "new memory from the driver",
            Self::Retry => "another attempt after releasing cached memory",
        }
    }
}

pub(crate) struct Missing {
    /// The part of the request that no free block covers.
    pub(crate) bytes: Bytes,
    /// The memory to reserve for it, in whole segments or pages.
    pub(crate) from_driver: Bytes,
}

/// Computes the lacking memory if no free block is sufficient. New pages of an expandable segment
/// extend the free memory before them. The allocator uses the first place where both together are
/// sufficient.
pub(crate) fn missing(view: &View<'_>, request: &RefusedRequest) -> Missing {
    if !view.config.expandable_segments {
        return Missing {
            bytes: request.requested,
            from_driver: request.asked,
        };
    }
    let page = view.config.page(request.pool);
    let own: Vec<&Segment> = own_segments(view, request)
        .filter(|segment| segment.expandable)
        .collect();
    let end = |segment: &Segment| segment.address + segment.size.get();
    for (index, range) in own.iter().enumerate() {
        // Unmapped addresses follow each range, up to the next range or the end of the reservation.
        // Reservations are large enough.
        let tail = free_at(range.blocks.last());
        let next = own
            .get(index + 1)
            .filter(|next| next.address - end(range) < RESERVATION);
        let hole = next.map_or(RESERVATION, |next| next.address - end(range));
        let wanted = request.rounded.get();
        let behind = next.map_or(0, |next| free_at(next.blocks.first()));
        if tail + hole + behind >= wanted {
            let missing = wanted.saturating_sub(tail).min(hole);
            return Missing {
                bytes: Bytes(missing),
                from_driver: Bytes(missing.next_multiple_of(page)),
            };
        }
    }
    Missing {
        bytes: request.rounded,
        from_driver: Bytes(request.rounded.get().next_multiple_of(page)),
    }
}

/// More than any device has, so ranges further apart belong to different reservations.
const RESERVATION: u64 = 1 << 40;

fn free_at(block: Option<&Block>) -> u64 {
    block
        .filter(|block| block.state == BlockState::Inactive)
        .map_or(0, |block| block.size.get())
}

fn own_segments<'a>(
    view: &'a View<'_>,
    request: &'a RefusedRequest,
) -> impl Iterator<Item = &'a Segment> {
    view.state
        .segments
        .iter()
        .filter(move |segment| pool_mismatch(segment, request).is_none())
}

/// The limit of the memory fraction, if it refused the request.
pub(crate) fn limit(
    view: &View<'_>,
    totals: Totals,
    size: &DeviceSize,
    asked: Bytes,
) -> Option<Bytes> {
    let limit = view.config.memory_fraction.limit(size.total)?;
    (totals.reserved + asked > limit).then_some(limit)
}

pub(crate) fn of(
    view: &View<'_>,
    request: &RefusedRequest,
    totals: Totals,
    size: &DeviceSize,
) -> Vec<FailedAttempt> {
    let missing = missing(view, request);
    let mut ways = vec![FailedAttempt {
        way: AttemptKind::FreeBlock,
        why: free_block(view, request),
    }];
    ways.extend(pending(view, request).map(|why| FailedAttempt {
        way: AttemptKind::PendingFree,
        why,
    }));
    ways.push(FailedAttempt {
        way: AttemptKind::NewSegment,
        why: new_segment(view, request, &missing, totals, size),
    });
    ways.push(FailedAttempt {
        way: AttemptKind::Retry,
        why: retry(view, request),
    });
    ways
}

fn lane(request: &RefusedRequest) -> String {
    let MempoolId(first, second) = request.private_pool;
    let private = if request.private_pool.is_default() {
        String::new()
    } else {
        format!(" of private pool ({first}, {second})")
    };
    format!(
        "the {} pool{private} on {}",
        request.pool.name(),
        stream(request.stream)
    )
}

pub(crate) fn stream(handle: u64) -> String {
    if handle == 0 {
        "the default stream".to_owned()
    } else {
        format!("stream {handle:#x}")
    }
}

fn in_state(view: &View<'_>, request: &RefusedRequest, state: BlockState) -> Pieces {
    let blocks = own_segments(view, request).flat_map(|segment| &segment.blocks);
    blocks
        .filter(|block| block.state == state)
        .map(|block| block.size)
        .collect()
}

fn free_block(view: &View<'_>, request: &RefusedRequest) -> String {
    let pieces = in_state(view, request, BlockState::Inactive);
    let (lane, needed) = (lane(request), request.rounded);
    if pieces.is_empty() {
        return format!("Nothing is free in {lane}.");
    }
    let free = match pieces.count {
        1 => format!("{} are free in {lane}, in one block", pieces.bytes),
        count => format!(
            "{} are free in {lane}, in {count} blocks, the largest of {}",
            pieces.bytes, pieces.largest
        ),
    };
    if pieces.largest < needed {
        return format!("{free}, but one block of {needed} is needed.");
    }
    let is_kept = !view.config.accepts(needed.get(), pieces.largest.get());
    match view.config.max_split_size.filter(|_| is_kept) {
        Some(max) => format!(
            "{free}. That is enough, but with max_split_size_mb a block of {max} or more serves \
             only requests of about its own size, and \
             {needed} are needed."
        ),
        None => format!(
            "{free}. That is enough for {needed}; the snapshot does not show why the allocator did \
             not use it."
        ),
    }
}

fn pending(view: &View<'_>, request: &RefusedRequest) -> Option<String> {
    let waiting = in_state(view, request, BlockState::PendingFree);
    let blocks = count(waiting.count, "block");
    (!waiting.is_empty()).then(|| {
        format!(
            "{} in {blocks} were freed, but other streams still used them.",
            waiting.bytes
        )
    })
}

fn new_segment(
    view: &View<'_>,
    request: &RefusedRequest,
    missing: &Missing,
    totals: Totals,
    size: &DeviceSize,
) -> String {
    let (asked, reserved, free) = (
        missing.from_driver,
        totals.reserved,
        totals.device_free.unwrap_or_default(),
    );
    let joins = view.config.expandable_segments && missing.bytes < request.rounded;
    let what = if joins {
        format!("{asked} of new pages after free memory")
    } else {
        asked.to_string()
    };
    match limit(view, totals, size, asked) {
        Some(limit) => format!(
            "The memory fraction allows {limit}, and {reserved} are already reserved. {what} would \
             exceed it, so the driver was not asked."
        ),
        None if asked > free => {
            format!("The driver was asked for {what}, but had only {free} free.")
        }
        None => format!(
            "{what} were needed, and the driver had {free} free. So either the program's own \
             memory fraction refused the request, or the memory \
             became free after the driver was asked."
        ),
    }
}

/// The memory returned to the driver directly before the OOM.
pub(crate) fn given_back(view: &View<'_>) -> Pieces {
    let before = view
        .oom()
        .map_or(&[][..], |(oom, _)| &view.history.events()[..oom])
        .iter()
        .rev();
    let is_part = |event: &&Event| {
        !matches!(
            event.action,
            Action::Alloc | Action::SegmentAlloc | Action::Snapshot | Action::Oom
        )
    };
    before
        .take_while(is_part)
        .filter(|event| event.action.releases())
        .map(|event| event.size)
        .collect()
}

fn retry(view: &View<'_>, request: &RefusedRequest) -> String {
    if !request.private_pool.is_default() {
        return "A request for a private pool releases no cached memory.".to_owned();
    }
    let gone = given_back(view);
    let what = match gone.count {
        0 => "No cached memory could be released".to_owned(),
        1 => format!(
            "{} were released to the driver, which was not enough",
            gone.bytes
        ),
        count => format!(
            "{} were released to the driver in {count} parts, which was not enough",
            gone.bytes
        ),
    };
    let kept: Bytes = view
        .state
        .segments
        .iter()
        .flat_map(|segment| pins::pieces(segment, view.config))
        .map(|piece| piece.pinned)
        .sum();
    if kept == Bytes::ZERO {
        return format!("{what}.");
    }
    let unit = if view.config.expandable_segments {
        "pages"
    } else {
        "segments"
    };
    format!(
        "{what}. The other {kept} of cached memory are in {unit} with live blocks, which cannot be \
         released."
    )
}
