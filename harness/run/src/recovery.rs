//! Recovery: what happens between a failed request and the next try, and whether the next try can end otherwise.
//!
//! Policies are data of the scenario ([`Policy`]); the match in [`act`] is the checklist of what they do.

use std::collections::BTreeMap;

use harness_allocator::allocator::AllocatorError;
use harness_allocator::units::{Bytes, Nanos};

use crate::rig::{Finding, Halt};
use crate::world::World;
use harness_record::Invariant;
use harness_scenario::{Policy, ReportKey};

/// How something that can run out of memory ended, recovery included.
#[derive(Debug)]
pub(crate) struct Recovered<T> {
    /// The last try's answer.
    pub(crate) answer: Result<T, AllocatorError>,
    /// What the last try asked for.
    pub(crate) ask: u64,
    /// Tries after the first.
    pub(crate) retries: u64,
    /// Those of them that could not end otherwise than the try before.
    pub(crate) without_progress: u64,
    /// Time of the failed tries and of the recovery.
    pub(crate) lost: Nanos,
}

impl<T> Recovered<T> {
    /// The figures, as a step reports them.
    pub(crate) fn reports(&self) -> BTreeMap<ReportKey, u64> {
        BTreeMap::from([
            (ReportKey::Attempts, self.retries + 1),
            (ReportKey::Retries, self.retries),
            (ReportKey::RetriesWithoutProgress, self.without_progress),
            (ReportKey::RetryTime, self.lost.0),
        ])
    }
}

/// What a policy has done before the next try.
struct Prepared {
    /// What the next try asks for.
    ask: u64,
    /// Whether blocks that waited for events can be reused now.
    events_done: bool,
}

/// Tries until it succeeds or the policy gives up. `ask` is what the first try asks for, in the step's own unit, which `describe` puts in
/// words.
///
/// A retry makes progress if it asks for less, or if there is more room than the failed try began with, or if blocks that waited for events
/// have become free. One that does not is noted as a violation, and done all the same, so that the record shows how it ends.
pub(crate) fn recover<T>(
    world: &mut World,
    policy: Option<&Policy>,
    ask: u64,
    describe: fn(u64) -> String,
    mut attempt: impl FnMut(&mut World, u64) -> Result<Result<T, AllocatorError>, Halt>,
) -> Result<Recovered<T>, Halt> {
    let mut ask = ask;
    let (mut retries, mut without_progress, mut lost) = (0, 0, Nanos::ZERO);
    loop {
        let room = if policy.is_some() { world.rig.room()? } else { Bytes::ZERO };
        let (began, counted) = (world.rig.scenario_clock(), world.rig.lost_to_retry());
        let error = match attempt(world, ask)? {
            Ok(value) => return Ok(Recovered { answer: Ok(value), ask, retries, without_progress, lost }),
            Err(error) => error,
        };
        let prepared = match policy {
            Some(policy) if retries < u64::from(policy.retries()) => Some(act(world, policy, ask)?),
            _ => None,
        };
        let spent = world.rig.scenario_clock().saturating_sub(began);
        lost += spent;
        // Requests of this try that the allocator itself had to try again are counted already.
        let of_these = world.rig.lost_to_retry().saturating_sub(counted);
        world.rig.count_lost(spent.saturating_sub(of_these));
        let Some(next) = prepared else {
            return Ok(Recovered { answer: Err(error), ask, retries, without_progress, lost });
        };
        let room_now = world.rig.room()?;
        if next.ask >= ask && room_now <= room && !next.events_done {
            without_progress += 1;
            world.rig.note(Finding {
                invariant: Invariant::RetryMakesProgress,
                expected: "the retry to ask for less, or for the same with more room".to_owned(),
                seen: format!("a retry without progress: it asks for {} again with {room_now} of room, {room} before", describe(next.ask)),
            });
        }
        ask = next.ask;
        retries += 1;
    }
}

/// Does what the policy says before the next try.
fn act(world: &mut World, policy: &Policy, ask: u64) -> Result<Prepared, Halt> {
    let mut prepared = Prepared { ask, events_done: false };
    match policy {
        Policy::EmptyCache { .. } => {
            world.rig.empty_cache()?;
        }
        Policy::Free { buffers } => {
            for name in buffers {
                if let Some(buffer) = world.take(name) {
                    world.rig.free(buffer)?;
                }
            }
        }
        Policy::Synchronize { .. } => {
            let stats = world.rig.stats();
            prepared.events_done = stats.active_bytes.all.current > stats.allocated_bytes.all.current;
            world.rig.synchronize()?;
        }
        Policy::HalveBatch { floor, empty_cache, .. } => {
            prepared.ask = (ask / 2).max(*floor);
            if *empty_cache {
                world.rig.empty_cache()?;
            }
        }
    }
    Ok(prepared)
}
