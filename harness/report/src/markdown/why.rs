//! Why a request failed though memory was free: a pure function of what was known when it failed.
//!
//! A [`Cause`] is told only where the figures bear it out: it names what stood between the request and memory that was there, and without
//! which the request would have been served, as far as the figures show. Where none is found, the figures stand alone.

use std::fmt;

use harness_allocator::stats::PoolKind;
use harness_allocator::units::Bytes;

use crate::words;
use harness_record::{Lane, Pieces, Shortage};

/// What stood between a request and memory. More than one may hold at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// The memory fraction refused; the driver was not asked.
    Fraction { limit: Bytes, held: Bytes, free: Bytes },
    /// Memory that was freed waits for streams that still use it.
    Waiting(Pieces),
    /// A piece is large enough, but among blocks of the other size.
    OtherPool { pool: PoolKind, largest: Bytes },
    /// A piece is large enough, but for another stream.
    OtherStream { stream: u32, wanted: u32, largest: Bytes },
    /// As much as requested can be had, but the request takes whole segments or pages.
    Rounding { room: Bytes, asked: Bytes },
    /// What is free is enough together, and no piece is alone: pieces of the request's own stream and size, what can still be had from the
    /// driver, and where those two are not enough, what is free for other streams and sizes.
    Fragmented { own: Pieces, room: Bytes, elsewhere: Bytes },
    /// Others hold so much that the driver had too little.
    Others { held: Bytes, asked: Bytes },
    /// So much of the device is in use beyond what is accounted for that the driver had too little.
    Unaccounted { used: Bytes, asked: Bytes },
    /// More than all that is free together.
    LargerThanAll { free: Bytes, cached: Bytes },
}

/// Why it failed, in the order in which the causes are to be looked at; empty where the figures do not tell.
pub(super) fn causes(shortage: &Shortage) -> Vec<Cause> {
    let figures = Figures::new(shortage);
    let Figures { requested, asked, free, room, cached, .. } = figures;
    let mut causes = Vec::new();
    causes.extend(shortage.limit.map(|limit| Cause::Fraction { limit, held: figures.held, free }));
    causes.extend(figures.waiting());
    let in_other_lanes = figures.in_other_lanes();
    if shortage.lacking <= room && room < asked {
        causes.push(Cause::Rounding { room, asked });
    }
    causes.extend(figures.fragmented(!in_other_lanes.is_empty()));
    causes.extend(in_other_lanes);
    causes.extend(figures.held_by_others());
    // The fraction alone does not explain what would not have fitted without it either.
    let explains = |cause: &Cause| !matches!(cause, Cause::Fraction { .. });
    if requested > free + cached && !causes.iter().any(explains) {
        causes.push(Cause::LargerThanAll { free, cached });
    }
    causes
}

/// The figures of a shortage, and those that follow from them.
struct Figures<'a> {
    shortage: &'a Shortage,
    requested: Bytes,
    /// What it would have taken from the driver.
    asked: Bytes,
    /// Free on the device.
    free: Bytes,
    /// What the fraction counts.
    held: Bytes,
    /// What could be had from the driver: what is free there, within the fraction.
    room: Bytes,
    /// Free in the allocator.
    cached: Bytes,
}

impl<'a> Figures<'a> {
    fn new(shortage: &'a Shortage) -> Self {
        let accounts = &shortage.accounts;
        let free = accounts.device.free;
        // Where the driver keeps the memory, the fraction limits what is handed out.
        let held = if shortage.lanes.is_some() { accounts.reserved } else { accounts.allocated };
        let room = shortage.limit.map_or(free, |limit| limit.saturating_sub(held).min(free));
        let cached = accounts.reserved.saturating_sub(accounts.active);
        Self { shortage, requested: shortage.requested, asked: shortage.asked, free, held, room, cached }
    }

    fn lanes(&self) -> impl Iterator<Item = &'a Lane> {
        self.shortage.lanes.iter().flatten()
    }

    fn has_own_pool(&self, lane: &Lane) -> bool {
        lane.pool.is_none_or(|pool| pool == PoolKind::of_block(self.requested))
    }

    fn own(&self) -> Option<&'a Lane> {
        self.lanes().find(|lane| lane.stream == self.shortage.stream && self.has_own_pool(lane))
    }

    fn waiting(&self) -> Option<Cause> {
        let waiting = self.own()?.waiting;
        let everything = self.room + self.cached;
        let is_missing = self.requested > everything && self.requested <= everything + waiting.bytes;
        (waiting.count > 0 && (waiting.largest >= self.requested || is_missing)).then_some(Cause::Waiting(waiting))
    }

    /// Pieces that are large enough, of other pools and streams.
    fn in_other_lanes(&self) -> Vec<Cause> {
        let Shortage { stream: wanted, .. } = *self.shortage;
        let large_enough = self.lanes().filter(|lane| lane.free.largest >= self.requested);
        let cause = |lane: &Lane| match *lane {
            Lane { stream, free, .. } if stream != wanted => Some(Cause::OtherStream { stream, wanted, largest: free.largest }),
            Lane { pool: Some(pool), free, .. } if !self.has_own_pool(lane) => Some(Cause::OtherPool { pool, largest: free.largest }),
            // Of its own stream and pool: why that was not taken, these figures do not tell.
            _ => None,
        };
        large_enough.filter_map(cause).collect()
    }

    fn fragmented(&self, is_found_elsewhere: bool) -> Option<Cause> {
        let lanes = self.shortage.lanes.as_ref()?;
        let own = self.own().map(|lane| lane.free).unwrap_or_default();
        if self.room >= self.shortage.lacking || own.largest >= self.requested {
            return None;
        }
        let Self { requested, room, .. } = *self;
        if own.count > 0 && own.bytes + room >= requested {
            return Some(Cause::Fragmented { own, room, elsewhere: Bytes::ZERO });
        }
        let elsewhere = lanes.iter().map(|lane| lane.free.bytes).sum::<Bytes>().saturating_sub(own.bytes);
        (!is_found_elsewhere && own.bytes + elsewhere + room >= requested).then_some(Cause::Fragmented { own, room, elsewhere })
    }

    /// What others hold, where the driver was asked and would have had enough without them.
    fn held_by_others(&self) -> Vec<Cause> {
        let Self { asked, free, .. } = *self;
        let accounts = &self.shortage.accounts;
        let device = &accounts.device;
        let held = device.pressure;
        let beyond = device.used.saturating_sub(device.context_overhead + accounts.reserved + held);
        // Of a device that is made smaller, only what is neither free nor held in the smaller part matters.
        let used = beyond.min(device.total.saturating_sub(accounts.reserved + free + held));
        if self.shortage.limit.is_some() || asked <= free || free + held + used < asked {
            return Vec::new();
        }
        let (without_others, without_used) = (free + held >= asked, free + used >= asked);
        let others = (held > Bytes::ZERO && (without_others || !without_used)).then_some(Cause::Others { held, asked });
        let unaccounted = (used > Bytes::ZERO && (without_used || !without_others)).then_some(Cause::Unaccounted { used, asked });
        others.into_iter().chain(unaccounted).collect()
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = words::size;
        match *self {
            Self::Fraction { limit, held, free } => write!(
                f,
                "The memory fraction allows {}, of which {} are held already: {} more, whatever the {} free on the device.",
                size(limit),
                size(held),
                size(limit.saturating_sub(held)),
                size(free)
            ),
            Self::Waiting(waiting) => write!(
                f,
                "{} were freed but wait for other streams that still use them, in pieces of at most {}.",
                size(waiting.bytes),
                size(waiting.largest)
            ),
            Self::OtherPool { pool, largest } => {
                let (there, here) = match pool {
                    PoolKind::Small => ("small", "more than 1 MiB"),
                    PoolKind::Large => ("large", "at most 1 MiB"),
                };
                write!(
                    f,
                    "A piece of {} is free, but in the pool of {there} blocks, from which no request of {here} is served.",
                    size(largest)
                )
            }
            Self::OtherStream { stream, wanted, largest } => {
                write!(
                    f,
                    "A piece of {} is free, but it belongs to stream {stream}, and the request is for stream {wanted}.",
                    size(largest)
                )
            }
            Self::Rounding { room, asked } => {
                write!(
                    f,
                    "{} could be had from the driver, but memory is taken in whole segments or pages, here {}.",
                    size(room),
                    size(asked)
                )
            }
            Self::Fragmented { own, room, elsewhere } => {
                let mut parts = Vec::new();
                if own.count > 0 {
                    let pieces = words::count(usize::try_from(own.count).unwrap_or(usize::MAX), "piece");
                    let largest = if own.count > 1 { format!(", the largest of {}", size(own.largest)) } else { String::new() };
                    parts.push(format!("{} for its stream and size in {pieces}{largest}", size(own.bytes)));
                }
                let others = [(room, "to be had from the driver"), (elsewhere, "for other streams or sizes")];
                parts.extend(
                    others.iter().filter(|(bytes, _)| *bytes > Bytes::ZERO).map(|(bytes, what)| format!("{} {what}", size(*bytes))),
                );
                write!(
                    f,
                    "What is free is enough together, but in pieces that are too small: {}. A request needs one piece, and a segment or \
                     page in which something is live cannot go back to the driver.",
                    parts.join("; ")
                )
            }
            Self::Others { held, asked } => {
                write!(
                    f,
                    "Other programs hold {}: without them the driver could have given the {} it was asked for.",
                    size(held),
                    size(asked)
                )
            }
            Self::Unaccounted { used, asked } => write!(
                f,
                "{} of the device are in use beyond what the allocator reserved, by the driver's rounding or by other programs: without that \
                 the driver could have given the {} it was asked for.",
                size(used),
                size(asked)
            ),
            Self::LargerThanAll { free, cached } => write!(
                f,
                "The request is larger than all that is free together: {} on the device and {} in the allocator.",
                size(free),
                size(cached)
            ),
        }
    }
}

/// The causes in words, or the figures where there is none.
pub(super) fn explain(shortage: &Shortage) -> String {
    let Figures { requested, free, cached, .. } = Figures::new(shortage);
    let causes = causes(shortage);
    let title = if requested <= free + cached { "Why free memory did not help" } else { "Why there was too little memory" };
    let told = if causes.is_empty() {
        let unknown = if shortage.lanes.is_none() { ", whose pool does not tell in what pieces" } else { "" };
        let (requested, free, cached) = (words::size(requested), words::size(free), words::size(cached));
        format!(
            "The figures do not tell: {requested} were requested, {free} were free on the device and {cached} in the allocator{unknown}."
        )
    } else {
        causes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    };
    format!("**{title}:** {}", crate::escape::prose(&told))
}

#[cfg(test)]
mod tests;
