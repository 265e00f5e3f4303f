//! Tests whether a smaller trace still fails like the original: [`Trial`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use harness_allocator::allocator::MemoryFraction;
use harness_allocator::allocator::caching::{CachingAllocator, Config, Quirks};
use harness_allocator::device::sim::{GRANULARITY, SimConfig, SimDevice};
use harness_allocator::units::Bytes;
use harness_record::Invariant;
use harness_trace::execute::{ByHandle, Executor, Kind, Observer, Outcome, Stopped, Target};
use harness_trace::trace::TraceEvent;

use super::audited::Audited;
use super::candidate::Candidate;
use super::{Case, Goal, ShrinkError, Watch};
use crate::Progress;
use crate::delta::Flow;
use crate::scenario::Engine;

/// Block sizes are multiples of this.
const BLOCK_UNIT: Bytes = Bytes(512);

/// Why a request failed, in the order in which the reasons are tested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Enough memory was free, but fragmented; at least half of it was in partly used segments.
    Fragmented,
    /// Enough memory was free, mostly on the device, which alone had too little for a new segment.
    DeviceShort,
    /// The device had enough free memory for the request, but not for its rounded size.
    Rounding,
    /// Pending frees would have provided enough memory.
    PendingFree,
    /// The memory fraction refused it.
    Fraction,
    /// Less memory was free than requested: the program is too large for the device.
    TooLarge,
    /// The request is larger than the device.
    NeverFits,
    /// An always-checked invariant is violated when a scenario replays the trace.
    Violates(Invariant),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self {
            Self::Violates(invariant) => return write!(f, "the invariant {invariant} does not hold: {}", invariant.promise()),
            Self::Fragmented => "enough memory is free, but it is fragmented",
            Self::DeviceShort => "enough memory is free in total, but neither the device nor the allocator has a large enough part",
            Self::Rounding => "the device has enough free memory, but not for the rounded size of the request",
            Self::PendingFree => "enough memory was freed, but it waits for events of other streams",
            Self::Fraction => "the memory fraction refuses it",
            Self::TooLarge => "less memory is free than requested",
            Self::NeverFits => "the request exceeds the device memory",
        };
        f.write_str(what)
    }
}

/// The properties that a smaller trace preserves.
pub(super) struct Trial<'a> {
    /// How the last request fails.
    pub(super) failure: Failure,
    /// True if it fails with the case's own settings or with those to compare with.
    pub(super) own_fails: bool,
    compares: bool,
    /// The number of earlier requests that failed in the original.
    pub(super) refused_before: BTreeSet<u64>,
    pub(super) replays: u64,
    /// Detects a violated invariant, if that is the failure.
    audited: Option<Audited<'a>>,
}

impl<'a> Trial<'a> {
    /// Determines which invariant a scenario's replay of the trace violates.
    pub(super) fn of_violation(case: Case, origins: Vec<usize>, engine: &'a dyn Engine) -> Result<(Candidate, Self), ShrinkError> {
        let audited = Audited::new(&case, engine)?;
        let invariant = audited.violated(&case).ok_or(ShrinkError::Holds { memory: case.memory })?;
        let trial = Self {
            failure: Failure::Violates(invariant),
            own_fails: true,
            compares: false,
            refused_before: BTreeSet::new(),
            replays: 0,
            audited: Some(audited),
        };
        Ok((Candidate { case, origins, other: Config::default() }, trial))
    }

    /// Returns true if the last operation is the one that fails.
    pub(super) const fn ends_with_failure(&self) -> bool {
        self.audited.is_none()
    }

    /// Determines how the trace fails and cuts it off after the failure.
    pub(super) fn new(case: Case, mut origins: Vec<usize>, goal: &Goal) -> Result<(Candidate, Self), ShrinkError> {
        let replay = |config: &Config| match run(&case.events, config, case.memory, &mut |_, _| true) {
            Ok(refused) => Ok(refused),
            Err(Early::Trace(why)) => Err(ShrinkError::Trace(why)),
            Err(Early::Refused) => Ok(Vec::new()),
        };
        let own = replay(&case.config)?;
        let (refused, own_fails, other) = match goal {
            Goal::Oom => (own, true, Config::default()),
            Goal::ConfDiffers(other) => match (own, replay(other)?) {
                (own, others) if own.is_empty() == others.is_empty() => {
                    return Err(ShrinkError::EndsAlike { both_fail: !own.is_empty() });
                }
                (own, others) if own.is_empty() => (others, false, other.clone()),
                (own, _) => (own, true, other.clone()),
            },
        };
        let Some((&last, before)) = refused.split_last() else { return Err(ShrinkError::Fits { memory: case.memory }) };
        let mut case = case;
        case.events.truncate(last.operation + 1);
        origins.truncate(last.operation + 1);
        let id = |refused: &Refused| match case.events[refused.operation] {
            TraceEvent::Allocate { id, .. } => Some(id),
            _ => None,
        };
        let refused_before = before.iter().filter_map(id).collect();
        let compares = matches!(goal, Goal::ConfDiffers(_));
        let trial = Self { failure: last.failure, own_fails, compares, refused_before, replays: 0, audited: None };
        Ok((Candidate { case, origins, other }, trial))
    }

    /// Accepts the candidate if it fails the same way, on the smallest device for which a replay shows it. Returns whether it
    /// did.
    pub(super) fn accept(&mut self, best: &mut Candidate, mut candidate: Candidate, watch: &mut Watch<'_>) -> Flow<bool> {
        let (needed, live) = needed_and_live(&candidate.case.events);
        // A program that is too large for its device can have any device.
        let is_too_large = matches!(self.failure, Failure::TooLarge | Failure::NeverFits);
        let needed = if is_too_large { GRANULARITY } else { needed };
        let gone = needed_and_live(&best.case.events).1.saturating_sub(live);
        let without = Bytes(best.case.memory.saturating_sub(gone).0.next_multiple_of(GRANULARITY.0)).max(needed);
        let mut tried = None;
        for memory in [needed, without, best.case.memory] {
            if memory > best.case.memory || tried.replace(memory) == Some(memory) {
                continue;
            }
            candidate.case.memory = memory;
            if self.fails_alike(&candidate, watch)? {
                *best = candidate;
                return Flow::Continue(true);
            }
        }
        Flow::Continue(false)
    }

    /// Returns true if the candidate fails the same way, from a replay with each setting.
    pub(super) fn fails_alike(&mut self, candidate: &Candidate, watch: &mut Watch<'_>) -> Flow<bool> {
        let Case { events, config, memory } = &candidate.case;
        watch(&Progress { operations: events.len(), memory: *memory, runs: self.replays })?;
        if let Some(audited) = &self.audited {
            self.replays += 1;
            return Flow::Continue(audited.violated(&candidate.case).map(Failure::Violates) == Some(self.failure));
        }
        let (failing, serving) = if self.own_fails { (config, &candidate.other) } else { (&candidate.other, config) };
        self.replays += 1;
        let last = events.len().saturating_sub(1);
        let mut may_fail = |operation: usize, id: u64| operation == last || self.refused_before.contains(&id);
        let Ok(refused) = run(events, failing, *memory, &mut may_fail) else { return Flow::Continue(false) };
        let fails = refused.last().is_some_and(|refused| refused.operation == last && refused.failure == self.failure);
        if !fails || !self.compares {
            return Flow::Continue(fails);
        }
        self.replays += 1;
        Flow::Continue(run(events, serving, *memory, &mut |_, _| false).is_ok())
    }
}

/// A failed request.
#[derive(Clone, Copy, Debug)]
struct Refused {
    /// Counted from 0.
    operation: usize,
    failure: Failure,
}

/// Why a replay ended early.
enum Early {
    /// A request failed that must succeed.
    Refused,
    /// Why the trace cannot be replayed.
    Trace(String),
}

/// Replays a trace with this memory and returns the failed requests. `may_fail` decides by operation and id.
fn run(events: &[TraceEvent], config: &Config, memory: Bytes, may_fail: &mut dyn FnMut(usize, u64) -> bool) -> Result<Vec<Refused>, Early> {
    let mut device = SimDevice::new(SimConfig::replay(memory));
    let mut executor = Executor::new(events, &mut device).map_err(|error| Early::Trace(error.to_string()))?;
    let config = Config { quirks: Quirks::Torch211, ..config.clone() };
    let mut watch = Refusals { events, fraction: config.memory_fraction, memory, refused: Vec::new(), may_fail };
    let mut allocator = CachingAllocator::new(config);
    match executor.run(&mut ByHandle { device: &mut device, allocator: &mut allocator }, &mut watch) {
        Ok(_) => Ok(watch.refused),
        Err(Stopped::Device { operation, source }) => Err(Early::Trace(format!("operation {operation}: {source}"))),
        Err(Stopped::Observer(RefusedToo)) => Err(Early::Refused),
    }
}

/// Records failed requests.
struct Refusals<'a> {
    events: &'a [TraceEvent],
    fraction: MemoryFraction,
    memory: Bytes,
    refused: Vec<Refused>,
    may_fail: &'a mut dyn FnMut(usize, u64) -> bool,
}

/// A request failed that must succeed.
struct RefusedToo;

impl<T: Target> Observer<T> for Refusals<'_> {
    type Error = RefusedToo;

    fn after(&mut self, operation: usize, _: Kind, outcome: Outcome, target: &mut T) -> Result<(), RefusedToo> {
        match self.events[operation] {
            TraceEvent::SetFraction(fraction) => self.fraction = fraction,
            TraceEvent::Allocate { id, size, .. } if outcome == Outcome::OutOfMemory => {
                let failure = failure(target, size, self.memory, self.fraction.limit(self.memory));
                self.refused.push(Refused { operation, failure });
                return if (self.may_fail)(operation, id) { Ok(()) } else { Err(RefusedToo) };
            }
            _ => {}
        }
        Ok(())
    }
}

/// How the last request failed.
fn failure(target: &mut impl Target, requested: Bytes, memory: Bytes, limit: Option<Bytes>) -> Failure {
    let stats = target.stats();
    // The simulated device never fails this query.
    let free = target.with_device(|device| device.free_memory().unwrap_or_default());
    let [reserved, active, allocated] =
        [stats.reserved_bytes, stats.active_bytes, stats.allocated_bytes].map(|pooled| Bytes(pooled.all.current));
    let room = limit.map_or(free, |limit| limit.saturating_sub(reserved).min(free));
    let cached = reserved.saturating_sub(active);
    let waiting = active.saturating_sub(allocated);
    match requested {
        _ if requested <= room => Failure::Rounding,
        _ if requested <= room + cached => {
            if cached >= room {
                Failure::Fragmented
            } else {
                Failure::DeviceShort
            }
        }
        _ if requested <= room + cached + waiting => Failure::PendingFree,
        _ if requested <= free + cached => Failure::Fraction,
        _ if requested <= memory => Failure::TooLarge,
        _ => Failure::NeverFits,
    }
}

/// A lower bound of the memory that the trace needs, from its peak of live bytes; and the live bytes at its end.
fn needed_and_live(events: &[TraceEvent]) -> (Bytes, Bytes) {
    let (mut live, mut now, mut most) = (BTreeMap::new(), Bytes::ZERO, Bytes::ZERO);
    for event in events {
        match *event {
            TraceEvent::Allocate { id, size, .. } => {
                let size = block(size);
                live.insert(id, size);
                now += size;
                most = most.max(now);
            }
            TraceEvent::Free { id } => now -= live.remove(&id).unwrap_or_default(),
            _ => {}
        }
    }
    (most.checked_round_up(GRANULARITY).unwrap_or(most).max(GRANULARITY), now)
}

/// The block size of a request, without settings that round it further.
fn block(requested: Bytes) -> Bytes {
    requested.checked_round_up(BLOCK_UNIT).unwrap_or(requested)
}
