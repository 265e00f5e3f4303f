use harness_allocator::units::Bytes;
use harness_record::Cause;

use crate::byte_cause::ByteCause;
use crate::explanation::Explanation;
use crate::pins::{self, PinnedBySite, SegmentPin};
use crate::view::{RefusedRequest, TotalKnown};
use crate::{attempts, state::MomentKind};

/// A device is nearly full if less than one twentieth is cached but unusable.
const NEARLY_FULL: u64 = 20;

/// The summary of a moment. After an OOM, it names the largest cause without which the request
/// would fit.
pub(crate) fn of(explanation: &Explanation) -> String {
    match &explanation.request {
        Some(request) => of_refusal(explanation, request),
        None => of_state(explanation),
    }
}

/// The main reason why a request failed: the first of its causes, with the figures of a sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    Fraction {
        limit: Bytes,
        held: Bytes,
    },
    /// The missing bytes.
    TooLarge(Bytes),
    Rounding {
        available: Bytes,
        asked: Bytes,
    },
    /// Fragmentation, with few cached bytes.
    NearlyFull(Bytes),
    /// The driver had enough memory.
    Unproven,
    Unusable(ByteCause),
}

impl Reason {
    pub(crate) fn of(explanation: &Explanation, request: &RefusedRequest) -> Self {
        let accounts = &explanation.accounts;
        let cached = accounts.reserved.saturating_sub(accounts.active);
        let lacking = request
            .requested
            .saturating_sub(accounts.device_free.unwrap_or_default() + cached);
        let causes = explanation
            .failed_request
            .as_ref()
            .map(harness_record::causes)
            .unwrap_or_default();
        match causes.first() {
            Some(&Cause::Fraction { limit, held, .. }) => Self::Fraction { limit, held },
            Some(Cause::PendingFree(_)) => Self::Unusable(ByteCause::PendingFree),
            Some(Cause::OtherStream { .. }) => Self::Unusable(ByteCause::OtherStream),
            Some(Cause::OtherPool { .. }) => Self::Unusable(ByteCause::OtherPool),
            Some(Cause::PrivatePool(_)) => Self::Unusable(ByteCause::PrivatePool),
            Some(
                &Cause::Rounding {
                    room: available,
                    asked,
                }
                | &Cause::RoundedUp {
                    largest: available,
                    asked,
                },
            ) => Self::Rounding { available, asked },
            // In explanations, memory in use by others is what the device has beyond the reserved
            // and the free memory.
            _ if lacking > Bytes::ZERO => Self::TooLarge(lacking),
            None if explanation.failed_request.is_some()
                && request.asked <= accounts.device_free.unwrap_or_default() =>
            {
                Self::Unproven
            }
            _ if cached.get() < explanation.device_total.get() / NEARLY_FULL => {
                Self::NearlyFull(cached)
            }
            _ => {
                let unusable = ByteCause::ALL.into_iter().map(|(cause, ..)| cause);
                let unusable = unusable.filter(|cause| {
                    (ByteCause::PendingFree..=ByteCause::WholeSegments).contains(cause)
                });
                Self::Unusable(
                    unusable
                        .max_by_key(|&cause| explanation.bytes(cause))
                        .unwrap_or(ByteCause::WholeSegments),
                )
            }
        }
    }
}

fn of_refusal(explanation: &Explanation, request: &RefusedRequest) -> String {
    let accounts = &explanation.accounts;
    let free = accounts.device_free.unwrap_or_default();
    let wanted = explanation.sites[&request.id].with_verb(&format!("{} asked for", request.asked));
    let allocated = format!(
        "{} are allocated{}",
        accounts.allocated,
        most_by(explanation, ByteCause::Allocated)
    );
    let failed = format!("so the {wanted} did not fit, with {free} free on the device");
    let cause = match Reason::of(explanation, request) {
        Reason::Fraction { limit, held } => {
            return format!(
                "The memory fraction allows {limit}, of which {held} are in use: {allocated}, \
                 {failed}."
            );
        }
        Reason::TooLarge(lacking) => {
            let everything = request.requested - lacking;
            return format!(
                "The program is too large by {lacking}: {allocated}, and the {wanted} did not fit \
                 into the {everything} that are free in total."
            );
        }
        Reason::Rounding { available, asked } => {
            return format!(
                "{available} are available, but the request is rounded up to {asked}, {failed}."
            );
        }
        Reason::NearlyFull(rest) => {
            return format!(
                "Nearly all memory is in use, and the rest is fragmented: {allocated}, and {rest} \
                 are cached, {failed}."
            );
        }
        Reason::Unproven => {
            let why = "so either the program's own memory fraction refused the request, or the \
                 memory became free after the driver was asked";
            return format!(
                "The {wanted} did not fit, although {free} were free on the device, {why}: \
                 {allocated}."
            );
        }
        Reason::Unusable(cause) => cause,
    };
    of_unusable(explanation, request, cause, &failed)
}

fn of_unusable(
    explanation: &Explanation,
    request: &RefusedRequest,
    cause: ByteCause,
    failed: &str,
) -> String {
    let bytes = explanation.bytes(cause);
    match cause {
        ByteCause::PendingFree => format!(
            "{bytes} were freed but wait for other streams{}, {failed}.",
            most_by(explanation, cause)
        ),
        ByteCause::OtherStream => {
            let (own, by) = (
                attempts::stream(request.stream),
                pinned_by(explanation, cause),
            );
            format!("{bytes} are cached for other streams than {own}{by}, {failed}.")
        }
        ByteCause::OtherPool => format!(
            "{bytes} are cached for blocks of the other size{}, {failed}.",
            pinned_by(explanation, cause)
        ),
        ByteCause::PrivatePool => {
            let probably = if request.is_pool_inferred {
                "probably "
            } else {
                ""
            };
            format!(
                "{bytes} are cached in private pools that {probably}serve other requests, {failed}."
            )
        }
        ByteCause::InactiveSplit => format!(
            "{bytes} are reserved but pinned{}, {failed}.",
            pinned(explanation)
        ),
        _ => format!("{bytes} are free in whole segments, {failed}."),
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
    let is_much = unused > Bytes::ZERO && unused.get() >= accounts.reserved.get() / NEARLY_FULL;
    let pinned = if is_much {
        format!("; {unused} are reserved but pinned{}", pinned(explanation))
    } else {
        String::new()
    };
    let idle = explanation
        .idle_streams
        .first()
        .filter(|idle| idle.cached.get() >= accounts.reserved.get() / NEARLY_FULL);
    let idle = idle.map_or_else(String::new, |idle| {
        let last = explanation.sites[&idle.id].with_verb("last allocated");
        let (stream, since) = (attempts::stream(idle.stream), idle.reserved_since);
        format!(
            "; {} are cached for {stream}, which {last}, and other streams, which cannot use \
             them, reserved {since} since",
            idle.cached
        )
    });
    let of = match explanation.device_total_is {
        TotalKnown::ReservedOnly => String::new(),
        _ => format!(" on a device of {}", explanation.device_total),
    };
    format!(
        "{when} {} are reserved{of}, and {} are allocated{}{idle}{pinned}.",
        accounts.reserved,
        accounts.allocated,
        most_by(explanation, ByteCause::Allocated)
    )
}

/// For example `, most of it (2 GiB) at model.py:41`.
fn most_by(explanation: &Explanation, cause: ByteCause) -> String {
    let Some(site) = explanation.largest_site(cause) else {
        return String::new();
    };
    let most = if 2 * site.bytes.get() > explanation.bytes(cause).get() {
        "most of it"
    } else {
        "the most"
    };
    format!(
        ", {}",
        explanation.sites[&site.id].with_verb(&format!("{most} ({})", site.bytes))
    )
}

/// For example `, the most (2 GiB) in segments pinned by blocks allocated at model.py:41`.
fn pinned_by(explanation: &Explanation, cause: ByteCause) -> String {
    explanation
        .largest_site(cause)
        .map_or_else(String::new, |site| {
            format!(
                ", the most ({}) in segments pinned by blocks {}",
                site.bytes,
                explanation.sites[&site.id].with_verb("allocated")
            )
        })
}

/// For example `: 212 segments are each held by one block of 2 MiB allocated at model.py:41`.
fn pinned(explanation: &Explanation) -> String {
    let is_own = |segment: &&SegmentPin| match &explanation.request {
        Some(request) => {
            (segment.pool, segment.stream, segment.private_pool)
                == (request.pool, request.stream, request.private_pool)
        }
        None => segment.private_pool.is_default(),
    };
    let own: Vec<&SegmentPin> = explanation.pinned.iter().filter(is_own).collect();
    let count = own.len();
    let groups = pins::by_site(own);
    let Some(most) = groups.first() else {
        return String::new();
    };
    let (bytes, held) = (
        explanation.bytes(ByteCause::InactiveSplit),
        held(most, explanation),
    );
    if 2 * most.free.get() > bytes.get() {
        let part = if most.free < bytes {
            format!(" {} of it,", most.free)
        } else {
            String::new()
        };
        return format!(":{part} {held}");
    }
    let unit = if most.segments[0].expandable {
        "pieces"
    } else {
        "segments"
    };
    format!(
        " in {count} {unit}, the most ({}) by one site: {held}",
        most.free
    )
}

fn held(most: &PinnedBySite<'_>, explanation: &Explanation) -> String {
    let first = most.segments[0];
    let (count, allocated) = (
        most.segments.len(),
        explanation.sites[&first.by.id].with_verb("allocated"),
    );
    if first.expandable {
        let pieces = if count == 1 {
            "1 piece lies".to_owned()
        } else {
            format!("{count} pieces lie")
        };
        return format!("{pieces} in pages shared with live blocks {allocated}");
    }
    let one = most.one_block();
    let are_single = most.are_single();
    match (count, are_single) {
        (1, true) => format!("1 segment of {} is held by {one} {allocated}", first.size),
        (_, true) => format!("{count} segments are each held by {one} {allocated}"),
        (1, false) => format!(
            "1 segment of {} is held by {} blocks, the oldest {allocated}",
            first.size, first.live_blocks
        ),
        (_, false) => {
            format!("{count} segments are held by live blocks, the oldest of each {allocated}")
        }
    }
}
