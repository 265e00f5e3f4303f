//! Why a request failed: a pure function of what was known when it failed.
//!
//! A [`Cause`] is given only where the figures bear it out: it names what stood between the request and memory, and without which the request
//! would have been served, as far as the figures show. Where the figures do not tell, there is none.

use std::fmt;

use harness_allocator::stats::PoolKind;
use harness_allocator::units::Bytes;

use crate::{Lane, Pieces, Shortage};

/// What stood between a request and memory, with the figures that show it. More than one may hold at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The memory fraction refused, and the driver was not asked.
    Fraction {
        /// The most that the fraction allows.
        limit: Bytes,
        /// What counts against it.
        held: Bytes,
        /// Free on the device.
        free: Bytes,
    },
    /// A limit that the program has set on what it requests refused; neither the allocator nor the driver was asked.
    Limit {
        /// The most that may be requested at one time.
        limit: Bytes,
        /// Requested bytes of what is live.
        held: Bytes,
    },
    /// A fault of the scenario refused the call of the device.
    Injected {
        /// Which call of its kind, counted from 1; [`Shortage::injected`] has its name.
        number: u64,
    },
    /// Memory that was freed waits for events of other streams that still use it.
    PendingFree(Pieces),
    /// A piece is large enough, but among blocks of the other size.
    OtherPool {
        /// The pool that the piece is in.
        pool: PoolKind,
        /// The size of the piece.
        largest: Bytes,
    },
    /// A piece is large enough, but belongs to another stream.
    OtherStream {
        /// The stream that the piece belongs to.
        stream: u32,
        /// The stream that the request is for.
        wanted: u32,
        /// The size of the piece.
        largest: Bytes,
    },
    /// As much as requested can be had, but the driver is asked for whole segments or pages.
    Rounding {
        /// What can be had from the driver.
        room: Bytes,
        /// What it was asked for.
        asked: Bytes,
    },
    /// A piece of the request's own stream and size is as large as requested, but the request is rounded up beyond it.
    RoundedUp {
        /// The size of the piece.
        largest: Bytes,
        /// What the request was rounded up to, as the driver was asked for it.
        asked: Bytes,
    },
    /// What is free is enough together, but no piece alone is.
    Fragmented {
        /// Free pieces for the request's own stream and size.
        own: Pieces,
        /// What can still be had from the driver.
        room: Bytes,
        /// Free for other streams and sizes; zero where the other two are enough together.
        elsewhere: Bytes,
    },
    /// What is free in private pools that the request is not served from would have been enough.
    PrivatePool(Pieces),
    /// Others hold so much that the driver had too little.
    OthersHold {
        /// What is held by others.
        held: Bytes,
        /// What the driver was asked for.
        asked: Bytes,
    },
    /// So much of the device is in use beyond all accounts that the driver had too little.
    Unaccounted {
        /// Device used beyond what is reserved and what others hold.
        used: Bytes,
        /// What the driver was asked for.
        asked: Bytes,
    },
    /// The request is larger than all that is free together.
    TooLarge {
        /// Free on the device.
        free: Bytes,
        /// Free in the allocator.
        cached: Bytes,
    },
}

/// Declares the kinds once: variant, name in scenarios and records, and one sentence about it.
macro_rules! kinds {
    ($($variant:ident = $name:literal: $about:literal,)*) => {
        /// A [`Cause`] without its figures, as scenarios name it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[allow(missing_docs, reason = "each variant is described by `CauseKind::about`")]
        pub enum CauseKind { $($variant,)* }

        impl CauseKind {
            /// Every kind, in the order in which [`causes`] looks for them.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The name in scenarios, records and reports.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// What it says of a request, as one clause without a full stop.
            #[must_use]
            pub const fn about(self) -> &'static str {
                match self { $(Self::$variant => $about),* }
            }
        }
    };
}

kinds! {
    Fraction = "fraction": "the memory fraction refused the request before the driver was asked",
    Limit = "limit": "a limit that the program set on its own requests refused it before the allocator was asked",
    Injected = "injected": "a fault of the scenario made the call to the device fail",
    PendingFree = "pending_free": "memory that would have been enough was freed, but waits for events of streams that still use it",
    Rounding = "rounding": "as much as requested is there, but the request is rounded up: to whole segments or pages, or by a setting",
    Fragmented = "fragmented": "what is free is enough together, but each piece is too small",
    OtherStream = "other_stream": "a free piece is large enough, but belongs to another stream",
    OtherPool = "other_pool": "a free piece is large enough, but is among blocks of the other size (small or large)",
    PrivatePool = "private_pool": "memory that would have been enough is free, but in a private pool that serves other requests",
    OthersHold = "others_hold": "without what others hold on the device, the driver would have had enough",
    Unaccounted = "unaccounted": "without what is in use on the device beyond all accounts, the driver would have had enough",
    TooLarge = "too_large": "the request is larger than all that is free together, on the device and in the allocator",
}

impl CauseKind {
    /// The kind of that name, if there is one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for CauseKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Cause {
    /// Which cause it is, without the figures.
    #[must_use]
    pub const fn kind(&self) -> CauseKind {
        match self {
            Self::Fraction { .. } => CauseKind::Fraction,
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

/// Why a request failed, in the order in which the causes are to be looked at; empty where the figures do not tell. Linear in
/// [`Shortage::lanes`].
#[must_use]
pub fn causes(shortage: &Shortage) -> Vec<Cause> {
    if let Some(limit) = shortage.program_limit {
        return vec![Cause::Limit { limit, held: shortage.accounts.requested }];
    }
    let figures = Figures::new(shortage);
    let Figures { requested, asked, free, room, cached, .. } = figures;
    let mut causes = Vec::new();
    causes.extend(shortage.limit.map(|limit| Cause::Fraction { limit, held: figures.held, free }));
    causes.extend(shortage.injected.as_ref().map(|refused| Cause::Injected { number: refused.number }));
    causes.extend(figures.pending_free());
    let in_other_lanes = figures.in_other_lanes();
    if shortage.lacking <= room && room < asked {
        causes.push(Cause::Rounding { room, asked });
    }
    causes.extend(figures.rounded_up());
    causes.extend(figures.fragmented(!in_other_lanes.is_empty()));
    causes.extend(in_other_lanes);
    causes.extend(figures.private_pool());
    causes.extend(figures.held_by_others());
    // The fraction alone does not explain what would not have fitted without it either, and no more does a fault.
    let explains = |cause: &Cause| !matches!(cause, Cause::Fraction { .. } | Cause::Injected { .. });
    if requested > free + cached && !causes.iter().any(explains) {
        causes.push(Cause::TooLarge { free, cached });
    }
    causes
}

impl Shortage {
    /// What was free in the allocator: reserved, and neither allocated nor waiting for an event.
    #[must_use]
    pub const fn cached(&self) -> Bytes {
        self.accounts.reserved.saturating_sub(self.accounts.active)
    }

    /// Whether as much as requested was free, on the device and in the allocator together.
    #[must_use]
    pub fn was_enough_free(&self) -> bool {
        self.requested <= self.accounts.device.free + self.cached()
    }
}

/// The figures of a shortage, and those that follow from them.
struct Figures<'a> {
    shortage: &'a Shortage,
    requested: Bytes,
    /// What it would have taken from the driver.
    asked: Bytes,
    /// Free on the device.
    free: Bytes,
    /// What counts against the fraction.
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
        Self { shortage, requested: shortage.requested, asked: shortage.asked, free, held, room, cached: shortage.cached() }
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

    fn pending_free(&self) -> Option<Cause> {
        let waiting = self.own()?.waiting;
        let everything = self.room + self.cached;
        let is_missing = self.requested > everything && self.requested <= everything + waiting.bytes;
        (waiting.count > 0 && (waiting.largest >= self.requested || is_missing)).then_some(Cause::PendingFree(waiting))
    }

    fn rounded_up(&self) -> Option<Cause> {
        let (largest, asked) = (self.own()?.free.largest, self.asked);
        (self.requested <= largest && largest < asked).then_some(Cause::RoundedUp { largest, asked })
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

    /// What is free in private pools that are closed to the request, where one piece or all of it together would have done.
    fn private_pool(&self) -> Option<Cause> {
        let pieces = self.shortage.other_private_pools;
        let would_do = pieces.largest >= self.requested || (self.free < self.asked && self.free + pieces.bytes >= self.asked);
        (!pieces.is_empty() && would_do).then_some(Cause::PrivatePool(pieces))
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
        let others = (held > Bytes::ZERO && (without_others || !without_used)).then_some(Cause::OthersHold { held, asked });
        let unaccounted = (used > Bytes::ZERO && (without_used || !without_others)).then_some(Cause::Unaccounted { used, asked });
        others.into_iter().chain(unaccounted).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use harness_allocator::device::DeviceMemory;

    use super::*;
    use crate::{Accounts, RefusedCall, UnlistedSegments};

    const fn mib(count: u64) -> Bytes {
        Bytes::mib(count)
    }

    fn memory(total: Bytes, free: Bytes, used: Bytes) -> DeviceMemory {
        DeviceMemory { total, free, used, process: None, context_overhead: Bytes::ZERO, pressure: Bytes::ZERO, processes: Bytes::ZERO }
    }

    /// A request of that size on a device of 1 GiB, of which the allocator holds 20 MiB and has 16 MiB free.
    fn shortage(requested: Bytes) -> Shortage {
        let accounts = Accounts {
            requested: mib(4),
            allocated: mib(4),
            active: mib(4),
            reserved: mib(20),
            peak_allocated: mib(4),
            peak_reserved: mib(20),
            retries: 1,
            ooms: 1,
            device: memory(mib(1024), mib(1004), mib(20)),
        };
        let free = Pieces { count: 1, bytes: mib(16), largest: mib(16) };
        Shortage {
            requested,
            stream: 0,
            lacking: requested,
            asked: requested,
            limit: None,
            program_limit: None,
            injected: None,
            accounts,
            inactive_split: mib(16),
            lanes: Some(vec![Lane { pool: Some(PoolKind::Large), stream: 0, free, waiting: Pieces::default() }]),
            other_private_pools: Pieces::default(),
            streams: BTreeMap::new(),
            pinned: Vec::new(),
            pinned_unlisted: UnlistedSegments::default(),
        }
    }

    #[test]
    fn every_kind_has_a_name_of_its_own_that_is_read_back() {
        for &kind in CauseKind::ALL {
            assert_eq!(CauseKind::from_name(kind.name()), Some(kind));
        }
        assert_eq!(CauseKind::from_name("bad luck"), None);
    }

    #[test]
    fn what_waits_for_other_streams_is_a_cause_where_it_would_have_been_enough() {
        // The allocators wait for events before they give up, so only figures show it.
        let waiting = Pieces { count: 1, bytes: mib(8), largest: mib(8) };
        let with = |requested| {
            let lanes = Some(vec![Lane { pool: Some(PoolKind::Large), stream: 0, free: Pieces::default(), waiting }]);
            causes(&Shortage { lanes, ..shortage(requested) })
        };
        assert_eq!(with(mib(1028)), [Cause::PendingFree(waiting)]);
        assert_eq!(with(mib(1029)), [Cause::TooLarge { free: mib(1004), cached: mib(16) }]);
    }

    #[test]
    fn what_is_in_use_beyond_the_accounts_is_a_cause_where_the_driver_lacks_it() {
        let mut shortage = shortage(mib(900));
        shortage.accounts.device = memory(mib(1024), mib(104), mib(920));
        assert_eq!(causes(&shortage), [Cause::Unaccounted { used: mib(900), asked: mib(900) }]);
        // The same memory, held by somebody who is known.
        shortage.accounts.device.pressure = mib(900);
        assert_eq!(causes(&shortage), [Cause::OthersHold { held: mib(900), asked: mib(900) }]);
        // A larger device is used beyond what its smaller part holds: that takes nothing from it.
        shortage.accounts.device.pressure = Bytes::ZERO;
        shortage.accounts.device.total = mib(124);
        assert_eq!(causes(&shortage), [Cause::TooLarge { free: mib(104), cached: mib(16) }]);
    }

    #[test]
    fn a_piece_of_its_own_that_was_not_taken_is_no_cause() {
        let mut shortage = shortage(mib(250));
        shortage.accounts.device.free = mib(100);
        (shortage.accounts.reserved, shortage.accounts.device.total) = (mib(404), mib(504));
        let free = Pieces { count: 2, bytes: mib(400), largest: mib(300) };
        shortage.lanes = Some(vec![Lane { pool: Some(PoolKind::Large), stream: 0, free, waiting: Pieces::default() }]);
        assert_eq!(causes(&shortage), []);
        // Unless the request was rounded up beyond it.
        shortage.asked = mib(320);
        assert_eq!(causes(&shortage), [Cause::RoundedUp { largest: mib(300), asked: mib(320) }]);
    }

    #[test]
    fn what_is_free_in_a_private_pool_is_a_cause_where_it_would_have_been_enough() {
        let mut shortage = shortage(mib(600));
        (shortage.accounts.reserved, shortage.accounts.device.free) = (mib(620), mib(404));
        shortage.accounts.device.used = mib(620);
        let pieces = |count: u64, each: u64| Pieces { count, bytes: mib(count * each), largest: mib(each) };
        shortage.other_private_pools = pieces(1, 600);
        assert_eq!(causes(&shortage), [Cause::PrivatePool(pieces(1, 600))]);
        // In pieces: what the driver would have had without the pool.
        shortage.other_private_pools = pieces(20, 10);
        assert_eq!(causes(&shortage), [Cause::PrivatePool(pieces(20, 10))]);
        shortage.other_private_pools = pieces(10, 10);
        assert_eq!(causes(&shortage), []);
    }

    #[test]
    fn a_refusal_that_was_injected_is_a_cause_beside_those_that_the_figures_show() {
        let injected = Some(RefusedCall { process: None, call: "cudaMalloc".to_owned(), number: 2 });
        assert_eq!(causes(&Shortage { injected: injected.clone(), ..shortage(mib(20)) }), [Cause::Injected { number: 2 }]);
        let too_large = Cause::TooLarge { free: mib(1004), cached: mib(16) };
        assert_eq!(causes(&Shortage { injected, ..shortage(mib(2048)) }), [Cause::Injected { number: 2 }, too_large]);
    }

    #[test]
    fn a_limit_of_the_program_is_the_only_cause_where_it_refused() {
        let mut shortage = shortage(mib(250));
        (shortage.program_limit, shortage.accounts.requested) = (Some(mib(200)), mib(3));
        assert_eq!(causes(&shortage), [Cause::Limit { limit: mib(200), held: mib(3) }]);
    }

    #[test]
    fn a_request_that_no_state_of_the_device_could_serve_is_too_large() {
        let too_large = [Cause::TooLarge { free: mib(1004), cached: mib(16) }];
        assert_eq!(causes(&shortage(Bytes(u64::MAX))), too_large);
        // Whatever the fraction.
        let mut shortage = shortage(Bytes(u64::MAX - 511));
        shortage.limit = Some(mib(512));
        assert_eq!(causes(&shortage).last(), too_large.last());
    }
}
