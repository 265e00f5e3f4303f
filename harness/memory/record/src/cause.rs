//! Determines why a request failed, from the state at that moment. The result depends on nothing
//! else.
//!
//! A [`Cause`] is reported only if the figures prove it: without the cause, the request would have
//! succeeded. If the figures prove nothing, there is no cause.

use harness_allocator::{stats::PoolKind, units::Bytes};

use crate::{FailedRequest, Pieces, StreamPool};

/// An obstacle between a request and memory, with the figures that prove it. Several can apply at
/// once.
///
/// `asked` is the rounded request, as sent to the driver; `room` is what the driver can allocate;
/// `largest` is the size of a free block; `free` is free on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The memory fraction refused the request before the driver was called. `held` counts against
    /// the fraction.
    Fraction {
        limit: Bytes,
        held: Bytes,
        free: Bytes,
    },
    /// The allocator's own limit refused the request before the driver was called. `held` is
    /// reserved.
    AllocatorLimit {
        limit: Bytes,
        held: Bytes,
        free: Bytes,
    },
    /// The program's own limit on requested bytes refused the request before the allocator was
    /// called. `held` is requested and live.
    Limit { limit: Bytes, held: Bytes },
    /// A fault of the scenario failed the device call: see [`FailedRequest::injected`].
    Injected { number: u64 },
    /// Freed memory waits for events of other streams that still use it.
    PendingFree(Pieces),
    /// A free block is large enough, but its pool serves the other block size.
    OtherPool { pool: PoolKind, largest: Bytes },
    /// A free block is large enough, but it belongs to `stream`, and the request is for the stream
    /// `wanted`.
    OtherStream {
        stream: u32,
        wanted: u32,
        largest: Bytes,
    },
    /// The driver has as much as requested, but allocates whole segments or pages.
    Rounding { room: Bytes, asked: Bytes },
    /// A free block of the right stream and pool is as large as the request, but the allocator
    /// needs more for it: the rounded request, or all blocks that a bin takes at once.
    RoundedUp { largest: Bytes, asked: Bytes },
    /// The free memory is large enough in total, but no single block is. `own`: free blocks of the
    /// request's stream and pool. `elsewhere`: free bytes of other streams and pools; zero if `own`
    /// and `room` suffice.
    Fragmented {
        own: Pieces,
        room: Bytes,
        elsewhere: Bytes,
    },
    /// Free memory in private pools that do not serve the request would have been enough.
    PrivatePool(Pieces),
    /// Other processes use `held` bytes, so the driver had too little.
    OthersHold { held: Bytes, asked: Bytes },
    /// Memory that neither the allocator nor a known process accounts for left the driver too
    /// little.
    Unaccounted { used: Bytes, asked: Bytes },
    /// The request is larger than all free memory together. `cached` is free in the allocator.
    TooLarge { free: Bytes, cached: Bytes },
}

described! {
    /// A [`Cause`] without its figures, as scenarios name it.
    CauseKind, about:
    Fraction = "memory_fraction": "the memory fraction refused the request before the driver was \
         called",
    AllocatorLimit = "allocator_limit": "the allocator's own limit refused the request before the \
         driver was called",
    Limit = "limit": "the program's own limit refused the request before the allocator was called",
    Injected = "injected": "a fault of the scenario failed the device call",
    PendingFree = "pending_free": "enough memory was freed, but it waits for events of streams \
         that still use it",
    Rounding = "rounding": "as much as requested is free, but the allocator needs more than that, \
         for example whole segments or pages",
    Fragmented = "fragmented": "enough memory is free in total, but it is fragmented: no free \
         block is large enough",
    OtherStream = "other_stream": "a free block is large enough, but it belongs to another stream",
    OtherPool = "other_pool": "a free block is large enough, but it is in the pool for the other \
         block size (small or large)",
    PrivatePool = "private_pool": "enough memory is free, but in a private pool that serves other \
         requests",
    OthersHold = "others_hold": "without the memory in use by other processes, the driver would \
         have had enough",
    Unaccounted = "unaccounted": "without device memory that no known process accounts for, the \
         driver would have had enough",
    TooLarge = "too_large": "the request is larger than all free memory, on the device and in the \
         allocator",
}

impl CauseKind {
    pub fn from_name(name: &str) -> Option<Self> {
        let name = if name == "fraction" {
            "memory_fraction"
        } else {
            name
        };
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }
}

impl Cause {
    pub const fn kind(&self) -> CauseKind {
        match self {
            Self::Fraction { .. } => CauseKind::Fraction,
            Self::AllocatorLimit { .. } => CauseKind::AllocatorLimit,
            Self::Limit { .. } => CauseKind::Limit,
            Self::Injected { .. } => CauseKind::Injected,
            Self::PendingFree(_) => CauseKind::PendingFree,
            Self::OtherPool { .. } => CauseKind::OtherPool,
            Self::OtherStream { .. } => CauseKind::OtherStream,
            Self::Rounding { .. } | Self::RoundedUp { .. } => CauseKind::Rounding,
            Self::Fragmented { .. } => CauseKind::Fragmented,
            Self::PrivatePool(_) => CauseKind::PrivatePool,
            Self::OthersHold { .. } => CauseKind::OthersHold,
            Self::Unaccounted { .. } => CauseKind::Unaccounted,
            Self::TooLarge { .. } => CauseKind::TooLarge,
        }
    }
}

/// The names of the [`causes`], each once.
pub fn cause_names(request: &FailedRequest) -> Vec<&'static str> {
    let mut names: Vec<&str> = causes(request)
        .iter()
        .map(|cause| cause.kind().name())
        .collect();
    names.dedup();
    names
}

/// Returns the causes of a failed request in the order in which to read them. Empty if the figures
/// prove none. Linear in [`FailedRequest::lanes`].
pub fn causes(request: &FailedRequest) -> Vec<Cause> {
    if let Some(limit) = request.program_limit {
        return vec![Cause::Limit {
            limit,
            held: request.accounts.requested,
        }];
    }
    let figures = Figures::new(request);
    let (asked, room, free, cached) = (
        request.asked,
        figures.room,
        request.accounts.device.free,
        request.cached(),
    );
    let mut causes = Vec::new();
    causes.extend(request.limit.map(|limit| Cause::Fraction {
        limit,
        held: figures.held,
        free,
    }));
    causes.extend(request.allocator_limit.map(|limit| Cause::AllocatorLimit {
        limit,
        held: request.accounts.reserved,
        free,
    }));
    causes.extend(request.injected.as_ref().map(|refused| Cause::Injected {
        number: refused.number,
    }));
    causes.extend(figures.pending_free());
    let in_other_lanes = figures.in_other_lanes();
    if request.lacking <= room && room < asked {
        causes.push(Cause::Rounding { room, asked });
    }
    causes.extend(figures.rounded_up());
    causes.extend(figures.fragmented(!in_other_lanes.is_empty()));
    causes.extend(in_other_lanes);
    causes.extend(figures.private_pool());
    causes.extend(figures.held_by_others());
    // A request that is too large even without the limit or the fault has this cause as well.
    let explains = |cause: &Cause| {
        !matches!(
            cause,
            Cause::Fraction { .. } | Cause::AllocatorLimit { .. } | Cause::Injected { .. }
        )
    };
    if !request.was_enough_free() && !causes.iter().any(explains) {
        causes.push(Cause::TooLarge { free, cached });
    }
    causes
}

impl FailedRequest {
    /// Free bytes in the allocator: reserved, but neither allocated nor waiting for an event.
    pub const fn cached(&self) -> Bytes {
        self.accounts.reserved.saturating_sub(self.accounts.active)
    }

    /// Returns whether the device and the allocator together had as much free memory as requested.
    pub fn was_enough_free(&self) -> bool {
        self.requested <= self.accounts.device.free + self.cached()
    }
}

struct Figures<'a> {
    request: &'a FailedRequest,
    /// Bytes that count against the memory fraction.
    held: Bytes,
    /// Bytes that the driver can allocate within the memory fraction and the allocator's own limit.
    room: Bytes,
}

impl<'a> Figures<'a> {
    fn new(request: &'a FailedRequest) -> Self {
        let accounts = &request.accounts;
        let free = accounts.device.free;
        // If the driver manages the pool, the fraction limits allocated instead of reserved bytes.
        let held = if request.lanes.is_some() {
            accounts.reserved
        } else {
            accounts.allocated
        };
        let limits = [request.limit, request.allocator_limit];
        let room = limits
            .into_iter()
            .flatten()
            .fold(free, |room, limit| room.min(limit.saturating_sub(held)));
        Self {
            request,
            held,
            room,
        }
    }

    fn lanes(&self) -> impl Iterator<Item = &'a StreamPool> {
        self.request.lanes.iter().flatten()
    }

    fn has_own_pool(&self, lane: &StreamPool) -> bool {
        lane.pool
            .is_none_or(|pool| pool == PoolKind::of_block(self.request.requested))
    }

    fn own(&self) -> Option<&'a StreamPool> {
        self.lanes()
            .find(|lane| lane.stream == self.request.stream && self.has_own_pool(lane))
    }

    fn pending_free(&self) -> Option<Cause> {
        let waiting = self.own()?.waiting;
        let everything = self.room + self.request.cached();
        let is_missing = self.request.requested > everything
            && self.request.requested <= everything + waiting.bytes;
        (waiting.count > 0 && (waiting.largest >= self.request.requested || is_missing))
            .then_some(Cause::PendingFree(waiting))
    }

    fn rounded_up(&self) -> Option<Cause> {
        let (largest, asked) = (self.own()?.free.largest, self.request.asked);
        (self.request.requested <= largest && largest < asked)
            .then_some(Cause::RoundedUp { largest, asked })
    }

    /// Blocks of other pools and streams that are large enough.
    fn in_other_lanes(&self) -> Vec<Cause> {
        let FailedRequest { stream: wanted, .. } = *self.request;
        let large_enough = self
            .lanes()
            .filter(|lane| lane.free.largest >= self.request.requested);
        let cause = |lane: &StreamPool| match *lane {
            StreamPool { stream, free, .. } if stream != wanted => Some(Cause::OtherStream {
                stream,
                wanted,
                largest: free.largest,
            }),
            StreamPool {
                pool: Some(pool),
                free,
                ..
            } if !self.has_own_pool(lane) => Some(Cause::OtherPool {
                pool,
                largest: free.largest,
            }),
            // A large enough block of the right stream and pool: the figures do not show why it was
            // not used.
            _ => None,
        };
        large_enough.filter_map(cause).collect()
    }

    fn fragmented(&self, is_found_elsewhere: bool) -> Option<Cause> {
        let lanes = self.request.lanes.as_ref()?;
        let own = self.own().map(|lane| lane.free).unwrap_or_default();
        if self.room >= self.request.lacking || own.largest >= self.request.requested {
            return None;
        }
        let (requested, room) = (self.request.requested, self.room);
        if own.count > 0 && own.bytes + room >= requested {
            return Some(Cause::Fragmented {
                own,
                room,
                elsewhere: Bytes::ZERO,
            });
        }
        let elsewhere = lanes
            .iter()
            .map(|lane| lane.free.bytes)
            .sum::<Bytes>()
            .saturating_sub(own.bytes);
        (!is_found_elsewhere && own.bytes + elsewhere + room >= requested).then_some(
            Cause::Fragmented {
                own,
                room,
                elsewhere,
            },
        )
    }

    fn private_pool(&self) -> Option<Cause> {
        let FailedRequest {
            other_private_pools: pieces,
            requested,
            asked,
            accounts,
            ..
        } = self.request;
        let free = accounts.device.free;
        let would_do =
            pieces.largest >= *requested || (free < *asked && free + pieces.bytes >= *asked);
        (!pieces.is_empty() && would_do).then_some(Cause::PrivatePool(*pieces))
    }

    /// Memory in use by others, if the driver was called and would have had enough without it.
    fn held_by_others(&self) -> Vec<Cause> {
        let FailedRequest {
            asked, accounts, ..
        } = *self.request;
        let device = &accounts.device;
        let (free, held) = (device.free, device.external_memory);
        let beyond = device
            .used
            .saturating_sub(device.context_overhead + accounts.reserved + held);
        // On a device whose memory is limited, only memory within the limit counts.
        let used = beyond.min(device.total.saturating_sub(accounts.reserved + free + held));
        let is_limited = self
            .request
            .limit
            .or(self.request.allocator_limit)
            .is_some();
        if is_limited || asked <= free || free + held + used < asked {
            return Vec::new();
        }
        let (without_others, without_used) = (free + held >= asked, free + used >= asked);
        let others = (held > Bytes::ZERO && (without_others || !without_used))
            .then_some(Cause::OthersHold { held, asked });
        let unaccounted = (used > Bytes::ZERO && (without_used || !without_others))
            .then_some(Cause::Unaccounted { used, asked });
        others.into_iter().chain(unaccounted).collect()
    }
}

#[cfg(test)]
mod tests;
