//! Whether a smaller trace still fails as the one given did: [`Trial`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::ControlFlow;

use harness_allocator::allocator::MemoryFraction;
use harness_allocator::allocator::caching::{CachingAllocator, Config, Quirks};
use harness_allocator::device::sim::{GRANULARITY, SimConfig, SimDevice};
use harness_allocator::units::Bytes;
use harness_record::Invariant;
use harness_trace::execute::{ByHandle, Executor, Kind, Observer, Outcome, Stopped, Target};
use harness_trace::trace::TraceEvent;

use super::audited::Audited;
use super::candidate::Candidate;
use super::{Case, Goal, ShrinkError};
use crate::Progress;
use crate::scenario::Engine;

/// Blocks are multiples of this.
const BLOCK_UNIT: Bytes = Bytes(512);

/// What stood between the refused request and memory, in the order in which it is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// As much as requested was free, but not in one piece: at least half of it in segments that are partly used.
    Fragmented,
    /// As much as requested was free, most of it on the device, which alone had too little for the segment that was asked of it.
    DeviceShort,
    /// The device alone had as much free as requested, but the request was rounded up to more.
    Rounding,
    /// It would have been, with what was freed and waits for events.
    PendingFree,
    /// It would have been without the memory fraction.
    Fraction,
    /// Less was free than requested: the program is too large for the device.
    TooLarge,
    /// The request alone is larger than the device.
    NeverFits,
    /// An always-checked invariant does not hold while the trace is replayed by a scenario.
    Violates(Invariant),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self {
            Self::Violates(invariant) => return write!(f, "the invariant {invariant} does not hold: {}", invariant.promise()),
            Self::Fragmented => "memory enough is free, but in pieces that are too small for it",
            Self::DeviceShort => {
                "memory enough is free, part of it on the device and part in the allocator, but in neither a piece that is large enough"
            }
            Self::Rounding => "the device has enough free, but the request is rounded up to more",
            Self::PendingFree => "memory that would be enough was freed, but waits for events of other streams",
            Self::Fraction => "the memory fraction refuses it",
            Self::TooLarge => "less memory is free than it asks for",
            Self::NeverFits => "it asks for more than the device has",
        };
        f.write_str(what)
    }
}

/// What is kept while a trace becomes smaller.
pub(super) struct Trial<'a> {
    /// How the last request is refused.
    pub(super) failure: Failure,
    /// Whether it is refused under the case's own settings, or under those it is compared with.
    pub(super) own_fails: bool,
    compares: bool,
    /// Requests that were refused before the last one from the beginning.
    pub(super) refused_before: BTreeSet<u64>,
    pub(super) replays: u64,
    /// Where an invariant is to be violated: how that is seen.
    audited: Option<Audited<'a>>,
}

impl<'a> Trial<'a> {
    /// Finds out which invariant is violated while a scenario replays the trace.
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

    /// Whether the failure is that of the last operation.
    pub(super) const fn ends_with_failure(&self) -> bool {
        self.audited.is_none()
    }

    /// Finds out how the trace fails, and cuts off what comes behind that.
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

    /// Takes the candidate for the best one where it fails as it should, on the smallest device on which it is seen to. Whether it does.
    pub(super) fn accept(
        &mut self,
        best: &mut Candidate,
        mut candidate: Candidate,
        watch: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> ControlFlow<(), bool> {
        let events = &candidate.case.events;
        // A program that is too large for its device may have any device.
        let is_too_large = matches!(self.failure, Failure::TooLarge | Failure::NeverFits);
        let needed = if is_too_large { GRANULARITY } else { needed(events) };
        let gone = live_at_end(&best.case.events).saturating_sub(live_at_end(&candidate.case.events));
        let without = Bytes(best.case.memory.saturating_sub(gone).0.next_multiple_of(GRANULARITY.0)).max(needed);
        let mut tried = None;
        for memory in [needed, without, best.case.memory] {
            if memory > best.case.memory || tried.replace(memory) == Some(memory) {
                continue;
            }
            candidate.case.memory = memory;
            if self.fails_alike(&candidate, watch)? {
                *best = candidate;
                return ControlFlow::Continue(true);
            }
        }
        ControlFlow::Continue(false)
    }

    /// Whether the candidate fails as it should, by a replay under each setting.
    pub(super) fn fails_alike(
        &mut self,
        candidate: &Candidate,
        watch: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> ControlFlow<(), bool> {
        let Case { events, config, memory } = &candidate.case;
        watch(&Progress { operations: events.len(), memory: *memory, runs: self.replays })?;
        if let Some(audited) = &self.audited {
            self.replays += 1;
            return ControlFlow::Continue(audited.violated(&candidate.case).map(Failure::Violates) == Some(self.failure));
        }
        let (failing, serving) = if self.own_fails { (config, &candidate.other) } else { (&candidate.other, config) };
        self.replays += 1;
        let last = events.len().saturating_sub(1);
        let mut may_fail = |operation: usize, id: u64| operation == last || self.refused_before.contains(&id);
        let Ok(refused) = run(events, failing, *memory, &mut may_fail) else { return ControlFlow::Continue(false) };
        let fails = refused.last().is_some_and(|refused| refused.operation == last && refused.failure == self.failure);
        if !fails || !self.compares {
            return ControlFlow::Continue(fails);
        }
        self.replays += 1;
        ControlFlow::Continue(run(events, serving, *memory, &mut |_, _| false).is_ok())
    }
}

/// A refused request.
#[derive(Clone, Copy, Debug)]
struct Refused {
    /// Counted from 0.
    operation: usize,
    failure: Failure,
}

/// Why a replay ended early.
enum Early {
    /// A request was refused that may not be.
    Refused,
    /// Why the trace cannot be replayed, in words.
    Trace(String),
}

/// Replays a trace on a device of that memory, and tells which requests are refused. `may_fail` is given the operation and the id of each.
fn run(events: &[TraceEvent], config: &Config, memory: Bytes, may_fail: &mut dyn FnMut(usize, u64) -> bool) -> Result<Vec<Refused>, Early> {
    let mut device = SimDevice::new(SimConfig::replay(memory));
    let mut executor = Executor::new(events, &mut device).map_err(|error| Early::Trace(error.to_string()))?;
    let config = Config { quirks: Quirks::Torch211, ..config.clone() };
    let mut watch = Watch { events, fraction: config.memory_fraction, memory, refused: Vec::new(), may_fail };
    let mut allocator = CachingAllocator::new(config);
    match executor.run(&mut ByHandle { device: &mut device, allocator: &mut allocator }, &mut watch) {
        Ok(_) => Ok(watch.refused),
        Err(Stopped::Device { operation, source }) => Err(Early::Trace(format!("operation {operation}: {source}"))),
        Err(Stopped::Observer(RefusedToo)) => Err(Early::Refused),
    }
}

/// Notes the requests that are refused.
struct Watch<'a> {
    events: &'a [TraceEvent],
    fraction: MemoryFraction,
    memory: Bytes,
    refused: Vec<Refused>,
    may_fail: &'a mut dyn FnMut(usize, u64) -> bool,
}

/// A request was refused that may not be.
struct RefusedToo;

impl<T: Target> Observer<T> for Watch<'_> {
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

/// How a request was refused just now.
fn failure(target: &mut impl Target, requested: Bytes, memory: Bytes, limit: Option<Bytes>) -> Failure {
    let stats = target.stats();
    // The simulated device always answers.
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

/// The least memory in which the trace could be served if nothing were lost to fragments: the most that is live at once.
fn needed(events: &[TraceEvent]) -> Bytes {
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
    most.checked_round_up(GRANULARITY).unwrap_or(most).max(GRANULARITY)
}

/// What is live when the last request comes.
fn live_at_end(events: &[TraceEvent]) -> Bytes {
    let mut live = BTreeMap::new();
    for event in events {
        match *event {
            TraceEvent::Allocate { id, size, .. } => {
                live.insert(id, block(size));
            }
            TraceEvent::Free { id } => {
                live.remove(&id);
            }
            _ => {}
        }
    }
    live.into_values().sum()
}

/// The block that serves a request, without settings that round it further.
fn block(requested: Bytes) -> Bytes {
    requested.checked_round_up(BLOCK_UNIT).unwrap_or(requested)
}
