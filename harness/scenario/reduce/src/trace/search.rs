//! Keeps the smallest trace so far and tries smaller ones: [`Search`].

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::device::{StreamId, sim::GRANULARITY};
use harness_allocator::{allocator::caching::Config, units::Bytes};
use harness_record::CauseKind;
use harness_trace::trace::TraceEvent;

use super::failure::{Early, Refused, TraceFailure, run};
use super::{ShrinkError, Shrunk, TraceCase, TraceGoal, audited::Audited};
use crate::delta::{self, Flow, SETTINGS};
use crate::{ReductionProgress, Watch, scenario::Engine};

/// Block sizes are multiples of this.
const BLOCK_UNIT: Bytes = Bytes(512);

pub(super) struct Search<'a, 'w> {
    /// A candidate is a copy with a smaller case, fewer origins or simpler settings to compare
    /// with.
    best: Shrunk,
    /// Detects a violated invariant, if that is the failure.
    audited: Option<Audited<'a>>,
    replays: u64,
    watch: &'a mut Watch<'w>,
}

impl<'a, 'w> Search<'a, 'w> {
    /// Determines how the trace runs out of memory and cuts it off after the failure.
    pub(super) fn of_oom(
        case: TraceCase,
        goal: &TraceGoal,
        watch: &'a mut Watch<'w>,
    ) -> Result<Self, ShrinkError> {
        let (mut case, mut origins) = settled(case);
        let replay = |config: &Config| match run(&case, config, &|_, _| true) {
            Err(Early::Trace(why)) => Err(ShrinkError::Trace(why)),
            refused => Ok(refused.unwrap_or_default()),
        };
        let own = replay(&case.config)?;
        let (refused, fails_under_its_own, other) = match goal {
            TraceGoal::Oom => (own, true, None),
            TraceGoal::ConfDiffers(other) => {
                let (others, fails) = (replay(other)?, !own.is_empty());
                if fails != others.is_empty() {
                    return Err(ShrinkError::EndsAlike { both_fail: fails });
                }
                (
                    if fails { own } else { others },
                    fails,
                    Some((**other).clone()),
                )
            }
        };
        let Some((last, before)) = refused.split_last() else {
            return Err(ShrinkError::Fits {
                memory: case.memory,
            });
        };
        case.events.truncate(last.operation + 1);
        origins.truncate(last.operation + 1);
        let id_of = |refused: &Refused| match case.events[refused.operation] {
            TraceEvent::Allocate { id, .. } => Some(id),
            _ => None,
        };
        let may_fail = before.iter().filter_map(id_of).collect();
        let best = Shrunk {
            other,
            fails_under_its_own,
            may_fail,
            ..Shrunk::new(case, last.failure, origins)
        };
        Ok(Self {
            best,
            audited: None,
            replays: 0,
            watch,
        })
    }

    /// Determines which invariant a scenario's replay of the trace violates.
    pub(super) fn of_violation(
        case: TraceCase,
        engine: &'a dyn Engine,
        watch: &'a mut Watch<'w>,
    ) -> Result<Self, ShrinkError> {
        let (case, origins) = settled(case);
        let audited = Audited::new(&case, engine)?;
        let invariant = audited.violated(&case).ok_or(ShrinkError::Holds {
            memory: case.memory,
        })?;
        Ok(Self {
            best: Shrunk::new(case, TraceFailure::Violates(invariant), origins),
            audited: Some(audited),
            replays: 0,
            watch,
        })
    }

    pub(super) fn finish(mut self) -> Shrunk {
        let is_stopped = self.reduce().is_break();
        Shrunk {
            replays: self.replays,
            is_stopped,
            ..self.best
        }
    }

    /// Repeats all passes until none makes progress.
    fn reduce(&mut self) -> Flow {
        // Settings come first, because a later removal could make a setting matter.
        self.reset_settings()?;
        loop {
            let before = self.best.case.events.len();
            self.leave_out_units()?;
            self.less_memory()?;
            self.make_streams_one()?;
            self.simpler_sizes()?;
            self.reset_settings()?;
            if self.best.case.events.len() == before {
                return Flow::Continue(());
            }
        }
    }

    fn leave_out_units(&mut self) -> Flow {
        let (mut unit_of, count) = self.units();
        delta::leave_out(count, &mut |range| {
            let is_kept =
                |event: &usize| !unit_of[*event].is_some_and(|unit| range.contains(&unit));
            let kept: Vec<usize> = (0..unit_of.len()).filter(is_kept).collect();
            let mut candidate = self.best.clone();
            candidate.case.events = kept
                .iter()
                .map(|&event| self.best.case.events[event])
                .collect();
            candidate.origins = kept.iter().map(|&event| self.best.origins[event]).collect();
            if !self.accept(candidate)? {
                return Flow::Continue(None);
            }
            let count;
            (unit_of, count) = self.units();
            Flow::Continue(Some(count))
        })
    }

    /// Assigns each event to a unit and returns the number of units. A failing last event belongs
    /// to none.
    ///
    /// A unit is an allocation with its free and its uses on other streams, both ends of a private
    /// pool's context, or any other single operation.
    fn units(&self) -> (Vec<Option<usize>>, usize) {
        let events = &self.best.case.events;
        let request = if self.audited.is_none() {
            events.len().checked_sub(1)
        } else {
            None
        };
        let (mut of_ids, mut of_pools) = (BTreeMap::new(), BTreeMap::new());
        let mut count = 0;
        let mut fresh = || {
            count += 1;
            count - 1
        };
        let unit = |(index, event): (usize, &TraceEvent)| {
            if Some(index) == request {
                return None;
            }
            Some(match *event {
                TraceEvent::Allocate { id, .. }
                | TraceEvent::Free { id }
                | TraceEvent::RecordStream { id, .. } => {
                    *of_ids.entry(id).or_insert_with(&mut fresh)
                }
                TraceEvent::BeginPool(pool) => {
                    let unit = fresh();
                    of_pools.insert(pool.0, unit);
                    unit
                }
                TraceEvent::EndPool(pool) => of_pools.remove(&pool.0).unwrap_or_else(&mut fresh),
                _ => fresh(),
            })
        };
        let unit_of = events.iter().enumerate().map(unit).collect();
        (unit_of, count)
    }

    /// Finds the least memory with which the trace still fails the same way, by bisection.
    fn less_memory(&mut self) -> Flow {
        let given = self.best.case.memory.0 / GRANULARITY.0;
        let least = delta::least(0, given, &mut |units| {
            let mut candidate = self.best.clone();
            candidate.case.memory = Bytes(units * GRANULARITY.0);
            self.take(candidate)
        });
        least.map_continue(drop)
    }

    /// Moves the work of each stream to the default stream.
    fn make_streams_one(&mut self) -> Flow {
        let mut events = self.best.case.events.clone();
        let named: BTreeSet<StreamId> = events
            .iter_mut()
            .filter_map(TraceEvent::stream_mut)
            .map(|stream| *stream)
            .collect();
        for stream in named
            .into_iter()
            .filter(|&stream| stream != StreamId::DEFAULT)
        {
            let mut candidate = self.best.clone();
            let uses = candidate
                .case
                .events
                .iter_mut()
                .filter_map(TraceEvent::stream_mut);
            uses.filter(|there| **there == stream)
                .for_each(|there| *there = StreamId::DEFAULT);
            self.accept(candidate)?;
        }
        Flow::Continue(())
    }

    fn simpler_sizes(&mut self) -> Flow {
        let size_of = |event: &TraceEvent| match *event {
            TraceEvent::Allocate { id, size, .. } => Some((Reverse(size), id)),
            _ => None,
        };
        let sizes: BTreeSet<(Reverse<Bytes>, u64)> =
            self.best.case.events.iter().filter_map(size_of).collect();
        for (Reverse(size), id) in sizes {
            let mut now = size;
            delta::simpler_size(size, &mut |new| {
                let resized = self.resized(id, new);
                // A round size may be larger and need more memory than before.
                let mut with_more = resized.clone();
                with_more.case.memory +=
                    Bytes(new.saturating_sub(now).0.next_multiple_of(GRANULARITY.0));
                let is_taken = self.accept(resized)? || (new > now && self.take(with_more)?);
                now = if is_taken { new } else { now };
                Flow::Continue(is_taken)
            })?;
        }
        Flow::Continue(())
    }

    fn resized(&self, of: u64, new: Bytes) -> Shrunk {
        let mut candidate = self.best.clone();
        for event in &mut candidate.case.events {
            match event {
                TraceEvent::Allocate { id, size, .. } if *id == of => *size = new,
                _ => {}
            }
        }
        candidate
    }

    fn reset_settings(&mut self) -> Flow {
        for reset in SETTINGS {
            for is_other in [false, true] {
                let mut candidate = self.best.clone();
                let config = if is_other {
                    candidate.other.as_mut()
                } else {
                    Some(&mut candidate.case.config)
                };
                config.map(reset);
                if candidate != self.best {
                    self.accept(candidate)?;
                }
            }
        }
        Flow::Continue(())
    }

    /// Accepts the candidate if it fails the same way, on the smallest device for which a replay
    /// shows it.
    fn accept(&mut self, mut candidate: Shrunk) -> Flow<bool> {
        let (needed, live) = needed_and_live(&candidate.case.events);
        // A program that is too large for its device can have any device.
        let is_too_large = matches!(
            self.best.failure,
            TraceFailure::Refused {
                cause: Some(CauseKind::TooLarge),
                ..
            }
        );
        let needed = if is_too_large { GRANULARITY } else { needed };
        let most = self.best.case.memory;
        let gone = needed_and_live(&self.best.case.events)
            .1
            .saturating_sub(live);
        let without =
            Bytes(most.saturating_sub(gone).0.next_multiple_of(GRANULARITY.0)).max(needed);
        let mut tried = None;
        for memory in [needed, without, most] {
            if memory > most || tried.replace(memory) == Some(memory) {
                continue;
            }
            candidate.case.memory = memory;
            if self.fails_alike(&candidate)? {
                self.best = candidate;
                return Flow::Continue(true);
            }
        }
        Flow::Continue(false)
    }

    /// Accepts the candidate with its own memory if it fails the same way.
    fn take(&mut self, candidate: Shrunk) -> Flow<bool> {
        let fails = self.fails_alike(&candidate)?;
        if fails {
            self.best = candidate;
        }
        Flow::Continue(fails)
    }

    /// Returns true if the candidate fails the same way, from a replay with each setting.
    fn fails_alike(&mut self, candidate: &Shrunk) -> Flow<bool> {
        let Shrunk {
            case,
            other,
            failure,
            fails_under_its_own,
            may_fail,
            ..
        } = candidate;
        (self.watch)(&ReductionProgress {
            operations: case.events.len(),
            memory: case.memory,
            runs: self.replays,
        })?;
        self.replays += 1;
        if let Some(audited) = &self.audited {
            return Flow::Continue(
                audited.violated(case).map(TraceFailure::Violates) == Some(*failure),
            );
        }
        let (failing, serving) = match other {
            None => (&case.config, None),
            Some(other) if *fails_under_its_own => (&case.config, Some(other)),
            Some(other) => (other, Some(&case.config)),
        };
        let last = case.events.len().saturating_sub(1);
        let Ok(refused) = run(case, failing, &|operation, id| {
            operation == last || may_fail.contains(&id)
        }) else {
            return Flow::Continue(false);
        };
        let fails = refused
            .last()
            .is_some_and(|refused| refused.operation == last && refused.failure == *failure);
        let Some(serving) = serving.filter(|_| fails) else {
            return Flow::Continue(fails);
        };
        self.replays += 1;
        Flow::Continue(run(case, serving, &|_, _| false).is_ok())
    }
}

/// Removes operations without effect: peak resets, and uses of dead blocks. Also returns the
/// original index of each event.
fn settled(case: TraceCase) -> (TraceCase, Vec<usize>) {
    let mut live = BTreeSet::new();
    let mut does_something = |event: &TraceEvent| match *event {
        TraceEvent::Allocate { id, .. } => live.insert(id),
        TraceEvent::Free { id } => live.remove(&id),
        TraceEvent::RecordStream { id, .. } => live.contains(&id),
        TraceEvent::ResetPeaks => false,
        _ => true,
    };
    let kept = case
        .events
        .into_iter()
        .enumerate()
        .filter(|(_, event)| does_something(event));
    let (origins, events) = kept.unzip();
    (TraceCase { events, ..case }, origins)
}

/// A lower bound of the memory that the trace needs, from its peak of live bytes; and the live
/// bytes at its end.
fn needed_and_live(events: &[TraceEvent]) -> (Bytes, Bytes) {
    let (mut live, mut now, mut most) = (BTreeMap::new(), Bytes::ZERO, Bytes::ZERO);
    for event in events {
        match *event {
            TraceEvent::Allocate { id, size, .. } => {
                let size = size.checked_round_up(BLOCK_UNIT).unwrap_or(size);
                live.insert(id, size);
                now += size;
                most = most.max(now);
            }
            TraceEvent::Free { id } => now -= live.remove(&id).unwrap_or_default(),
            _ => {}
        }
    }
    (
        most.checked_round_up(GRANULARITY)
            .unwrap_or(most)
            .max(GRANULARITY),
        now,
    )
}
