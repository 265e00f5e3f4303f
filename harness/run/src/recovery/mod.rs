//! Recovery: what a policy does between a failed request and the next try, and whether that try could succeed at all.
//!
//! Policies are data of the scenario ([`Policy`]). Each has a file of its own here.

mod empty_cache;
mod free;
mod halve_batch;
mod synchronize;

use std::collections::BTreeMap;

use harness_allocator::allocator::AllocatorError;
use harness_allocator::units::{Bytes, Nanos};

use crate::rig::{Finding, MemoryState, Stop};
use crate::world::World;
use harness_record::Invariant;
use harness_scenario::{Plan, Policy, ReportKey};

/// How something that can run out of memory ended, recovery included.
#[derive(Debug)]
pub(crate) struct Recovered<T> {
    /// The answer of the last try.
    pub(crate) answer: Result<T, AllocatorError>,
    /// How the last try was done.
    pub(crate) plan: Plan,
    /// Tries after the first.
    pub(crate) retries: u64,
    /// Retries that failed because nothing had changed since the try before.
    pub(crate) without_progress: u64,
    /// Time of the failed tries, and of what the policy did after them.
    pub(crate) lost: Nanos,
}

impl<T> Recovered<T> {
    /// The figures that the step reports.
    pub(crate) fn reports(&self) -> BTreeMap<ReportKey, u64> {
        BTreeMap::from([
            (ReportKey::Attempts, self.retries + 1),
            (ReportKey::Retries, self.retries),
            (ReportKey::RetriesWithoutProgress, self.without_progress),
            (ReportKey::RetryTime, self.lost.0),
        ])
    }
}

/// What a policy tries again.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tried {
    /// One request of this size, whatever the plan. The memory that it met is what was there after it failed.
    Request(Bytes),
    /// An iteration by the plan. It frees what it made when it fails, so the memory that it met is what was there before it began.
    Iteration,
}

impl Tried {
    fn describe(self, plan: &Plan) -> String {
        match self {
            Self::Request(size) => size.to_string(),
            Self::Iteration => plan.to_string(),
        }
    }
}

/// Tries until it succeeds or the policy gives up. `plan` is how the first try is done.
///
/// A retry makes progress if it succeeds, if it asks for less, or if the allocator's blocks or the free memory of the device differ from what
/// the failed try met. One that does not is a violation of [`Invariant::RetryMakesProgress`]; the run goes on all the same, so that the record
/// shows how it ends. A timed run does not ask the device for its memory, so it does not check for progress.
///
/// With a policy, each failed try costs time linear in the allocator's blocks.
pub(crate) fn recover<T>(
    world: &mut World,
    policy: Option<&Policy>,
    tried: Tried,
    mut plan: Plan,
    mut attempt: impl FnMut(&mut World, &Plan) -> Result<Result<T, AllocatorError>, Stop>,
) -> Result<Recovered<T>, Stop> {
    let checks_progress = policy.is_some() && !world.rig.is_timed();
    let (mut retries, mut without_progress, mut lost) = (0, 0, Nanos::ZERO);
    // The violation that the next try is, if it fails.
    let mut same_again: Option<Finding> = None;
    loop {
        let before = if checks_progress && matches!(tried, Tried::Iteration) { Some(world.rig.memory_state()?) } else { None };
        let (began, counted) = (world.rig.now(), world.rig.lost_to_retry());
        let error = match attempt(world, &plan)? {
            Ok(value) => return Ok(Recovered { answer: Ok(value), plan, retries, without_progress, lost }),
            Err(error) => error,
        };
        if let Some(finding) = same_again.take() {
            without_progress += 1;
            world.rig.note(finding);
        }
        let met = match before {
            Some(before) => Some(before),
            None if checks_progress => Some(world.rig.memory_state()?),
            None => None,
        };
        let policy = policy.filter(|policy| retries < u64::from(policy.retries()));
        let next = policy.map(|policy| prepare(world, policy, &plan)).transpose()?;
        let spent = world.rig.now().saturating_sub(began);
        lost += spent;
        let Some(next) = next else {
            return Ok(Recovered { answer: Err(error), plan, retries, without_progress, lost });
        };
        // Requests of this try that the allocator itself tried again are counted already.
        let of_these = world.rig.lost_to_retry().saturating_sub(counted);
        world.rig.add_lost_time(spent.saturating_sub(of_these));
        if let Some(met) = met.filter(|_| !next.asks_for_less_than(&plan)) {
            same_again = same_memory(world, &met, tried, &next)?;
        }
        plan = next;
        retries += 1;
    }
}

/// What is to be said of a retry that asks for no less, where it meets the memory that the failed try met. `None`: it meets other memory.
fn same_memory(world: &mut World, met: &MemoryState, tried: Tried, plan: &Plan) -> Result<Option<Finding>, Stop> {
    let now = world.rig.memory_state()?;
    Ok((now == *met).then(|| Finding {
        invariant: Invariant::RetryMakesProgress,
        expected: "the retry to succeed, to ask for less, or to meet other memory than the failed try".to_owned(),
        seen: format!(
            "it asked for {} again and failed again: the allocator's blocks and the {} free on the device were the same",
            tried.describe(plan),
            now.device_free
        ),
    }))
}

/// Does what the policy says before the next try, and returns how that try is done.
fn prepare(world: &mut World, policy: &Policy, plan: &Plan) -> Result<Plan, Stop> {
    match policy {
        Policy::EmptyCache { .. } => empty_cache::prepare(world)?,
        Policy::Free { buffers } => free::prepare(world, buffers)?,
        Policy::Synchronize { .. } => synchronize::prepare(world)?,
        Policy::HalveBatch { floor, empty_cache, .. } => return halve_batch::prepare(world, plan, *floor, *empty_cache),
    }
    Ok(plan.clone())
}
