//! Why a request failed, in words: the causes themselves are found by [`harness_record::cause`].

use harness_allocator::stats::PoolKind;
use harness_allocator::units::Bytes;

use crate::words::{self, size};
use harness_record::{Cause, Pieces, Shortage, causes};

/// The question that [`explain`] answers.
pub(crate) fn title(shortage: &Shortage) -> &'static str {
    if shortage.was_enough_free() { "Why free memory did not help" } else { "Why there was too little memory" }
}

/// The causes in words, or the figures where there is none.
pub(crate) fn explain(shortage: &Shortage) -> String {
    let causes = causes(shortage);
    if !causes.is_empty() {
        return causes.iter().map(sentence).collect::<Vec<_>>().join(" ");
    }
    let unknown = if shortage.lanes.is_none() { ", whose pool does not tell in what pieces" } else { "" };
    format!(
        "The figures do not tell: {} were requested, {} were free on the device and {} in the allocator{unknown}.",
        size(shortage.requested),
        size(shortage.accounts.device.free),
        size(shortage.cached())
    )
}

/// One cause, with its figures, as a sentence.
pub(crate) fn sentence(cause: &Cause) -> String {
    match *cause {
        Cause::Fraction { limit, held, free } => format!(
            "The memory fraction allows {}, of which {} are held already: {} more, whatever the {} free on the device.",
            size(limit),
            size(held),
            size(limit.saturating_sub(held)),
            size(free)
        ),
        Cause::Limit { limit, held } => {
            format!("The program limits its own requests to {}, of which {} are in use.", size(limit), size(held))
        }
        Cause::PendingFree(waiting) => format!(
            "{} were freed but wait for other streams that still use them, in pieces of at most {}.",
            size(waiting.bytes),
            size(waiting.largest)
        ),
        Cause::OtherPool { pool, largest } => {
            let (holds, request) = match pool {
                PoolKind::Small => ("small", "more than 1 MiB"),
                PoolKind::Large => ("large", "at most 1 MiB"),
            };
            format!(
                "A piece of {} is free, but in the pool of {holds} blocks, from which no request of {request} is served.",
                size(largest)
            )
        }
        Cause::OtherStream { stream, wanted, largest } => {
            format!("A piece of {} is free, but it belongs to stream {stream}, and the request is for stream {wanted}.", size(largest))
        }
        Cause::Rounding { room, asked } => {
            format!("{} could be had from the driver, but memory is taken in whole segments or pages, here {}.", size(room), size(asked))
        }
        Cause::Fragmented { own, room, elsewhere } => fragmented(own, room, elsewhere),
        Cause::OthersHold { held, asked } => {
            format!("Other programs hold {}: without them the driver could have given the {} it was asked for.", size(held), size(asked))
        }
        Cause::Unaccounted { used, asked } => format!(
            "{} of the device are in use beyond what the allocator reserved, by the driver's rounding or by other programs: without that the \
             driver could have given the {} it was asked for.",
            size(used),
            size(asked)
        ),
        Cause::TooLarge { free, cached } => format!(
            "The request is larger than all that is free together: {} on the device and {} in the allocator.",
            size(free),
            size(cached)
        ),
    }
}

fn fragmented(own: Pieces, room: Bytes, elsewhere: Bytes) -> String {
    let mut parts = Vec::new();
    if own.count > 0 {
        let pieces = words::count(usize::try_from(own.count).unwrap_or(usize::MAX), "piece");
        let largest = if own.count > 1 { format!(", the largest of {}", size(own.largest)) } else { String::new() };
        parts.push(format!("{} for its stream and size in {pieces}{largest}", size(own.bytes)));
    }
    let others = [(room, "to be had from the driver"), (elsewhere, "for other streams or sizes")];
    parts.extend(others.iter().filter(|(bytes, _)| *bytes > Bytes::ZERO).map(|(bytes, what)| format!("{} {what}", size(*bytes))));
    format!(
        "What is free is enough together, but in pieces that are too small: {}. A request needs one piece, and a segment or page in which \
         something is live cannot go back to the driver.",
        parts.join("; ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use harness_record::CauseKind;

    const fn mib(count: u64) -> Bytes {
        Bytes::mib(count)
    }

    #[test]
    fn each_cause_is_a_sentence_with_its_figures() {
        let pieces = |count, bytes, largest| Pieces { count, bytes: mib(bytes), largest: mib(largest) };
        let causes = [
            Cause::Fraction { limit: mib(1024), held: mib(400), free: mib(1648) },
            Cause::Limit { limit: mib(200), held: mib(150) },
            Cause::PendingFree(pieces(2, 12, 8)),
            Cause::Rounding { room: mib(12), asked: mib(20) },
            Cause::Fragmented { own: pieces(2, 200, 100), room: mib(112), elsewhere: mib(0) },
            Cause::Fragmented { own: pieces(1, 54, 54), room: mib(0), elsewhere: mib(80) },
            Cause::OtherStream { stream: 1, wanted: 0, largest: mib(780) },
            Cause::OtherPool { pool: PoolKind::Large, largest: mib(42) },
            Cause::OtherPool { pool: PoolKind::Small, largest: mib(2) },
            Cause::OthersHold { held: mib(1000), asked: mib(900) },
            Cause::Unaccounted { used: mib(1000), asked: mib(900) },
            Cause::TooLarge { free: mib(1004), cached: mib(16) },
        ];
        let seen: Vec<CauseKind> = causes.iter().map(Cause::kind).collect();
        assert!(CauseKind::ALL.iter().all(|kind| seen.contains(kind)), "a kind is missing here");
        let sentences: Vec<String> = causes.iter().map(|cause| format!("{}: {}", cause.kind(), sentence(cause))).collect();
        insta::assert_snapshot!(sentences.join("\n"));
    }
}
