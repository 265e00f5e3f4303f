//! Recovery: what policies do between a failed attempt and the next one, and whether the next one could succeed.
//! || The scenario declares the policies ([`Policy`]). Each has its own file here; those that change the batch share
//! one.

mod applied;
mod batch;
mod checkpoint_more;
mod empty_cache;
mod evict;
mod free;
mod half_precision;
mod spill_to_host;
mod split_and_accumulate;
mod synchronize;
mod wait;

use std::collections::BTreeMap;

use harness_allocator::allocator::AllocatorError;
use harness_allocator::device::Clock;
use harness_allocator::units::{Bytes, Nanos};
use harness_base::words::count;

use self::applied::Applied;
use crate::between::Between;
use crate::rig::{Finding, MemoryState, Stop};
use crate::world::World;
use harness_record::{Attempt, Invariant, Trained};
use harness_scenario::{BatchRule, Chain, Plan, Policy, PolicyKind, ReportKey};

/// The result of one request or iteration, including recovery.
#[derive(Debug)]
pub(crate) struct Recovered<T> {
    /// The result of the last attempt.
    pub(crate) answer: Result<T, AllocatorError>,
    /// The plan of the last attempt.
    pub(crate) plan: Plan,
    /// The plan of the next iteration.
    pub(crate) next: Plan,
    /// Attempts after the first.
    pub(crate) retries: u64,
}

/// The operation that a policy retries.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tried {
    /// One request of this size, whatever the plan. Its memory state is taken after it fails.
    Request(Bytes),
    /// One iteration of a training. A failed iteration frees its blocks, so its memory state is taken before it begins.
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

/// The recovery of one step: its policies and their effects so far. Policies may use what earlier iterations revealed.
pub(crate) struct Recovery<'p> {
    chain: Option<&'p Chain>,
    known: batch::Known,
    record: harness_record::Recovery,
    lost: Nanos,
    trained: Option<Trained>,
}

/// The attempts at one request or iteration, until one succeeds or the policies give up.
pub(crate) struct Trying {
    /// The plan of the next attempt.
    pub(crate) plan: Plan,
    /// Attempts after the first.
    pub(crate) retries: u64,
    turn: Turn,
    /// The finding to record if the next attempt fails.
    same_again: Option<Finding>,
    /// Attempts abandoned because another rank failed.
    agreed: u64,
}

impl Trying {
    pub(crate) fn new(plan: Plan) -> Self {
        Self { plan, retries: 0, turn: Turn::default(), same_again: None, agreed: 0 }
    }
}

/// The state at the start of an attempt.
pub(crate) struct Begun {
    memory: Option<MemoryState>,
    began: Nanos,
    /// The lost time that was already counted.
    counted: Nanos,
    allocated: Bytes,
}

impl Begun {
    /// Moves the start so that only `own` of the time until now counts.
    pub(crate) fn took(&mut self, world: &mut World, own: Nanos) {
        self.began = world.rig.now().saturating_sub(own);
    }
}

/// The policy that acts next after a failure.
#[derive(Default)]
struct Turn {
    policy: usize,
    /// The number of its retries so far.
    used: u32,
}

/// The next attempt.
struct Next {
    plan: Plan,
    policy: PolicyKind,
    then: String,
}

impl<'p> Recovery<'p> {
    pub(crate) fn new(chain: Option<&'p Chain>) -> Self {
        let policies = chain.map(Chain::to_string).unwrap_or_default();
        let record = harness_record::Recovery { policies, ..harness_record::Recovery::default() };
        Self { chain, known: batch::Known::default(), record, lost: Nanos::ZERO, trained: None }
    }

    /// Retries until an attempt succeeds or the policies give up. `plan` is the plan of the first attempt. `between`
    /// runs while a policy waits.
    /// || A retry makes progress if it succeeds or asks for less. It also makes progress if the allocator's blocks or
    /// the device's free memory have changed since the failed attempt. Other retries violate
    /// [`Invariant::RetryMakesProgress`]; the run continues so that the record shows how it ends. Timed runs do not
    /// query the device's memory, so they skip this check.
    /// || With a policy, each failed attempt takes time linear in the allocator's blocks.
    pub(crate) fn run<T>(
        &mut self,
        world: &mut World,
        tried: Tried,
        plan: Plan,
        between: &mut Between<'_>,
        mut attempt: impl FnMut(&mut World, &Plan) -> Result<Result<T, AllocatorError>, Stop>,
    ) -> Result<Recovered<T>, Stop> {
        let mut trying = Trying::new(plan);
        loop {
            let begun = self.begin(world, tried)?;
            let error = match attempt(world, &trying.plan)? {
                Ok(value) => {
                    let next = self.succeeded(world, tried, &trying, &begun)?;
                    return Ok(Recovered { answer: Ok(value), plan: trying.plan, next, retries: trying.retries });
                }
                Err(error) => error,
            };
            if !self.failed(world, tried, &mut trying, begun, &error, between)? {
                let Trying { plan, retries, .. } = trying;
                return Ok(Recovered { answer: Err(error), next: plan.clone(), plan, retries });
            }
        }
    }

    fn checks_progress(&self, world: &World) -> bool {
        self.chain.is_some() && !world.rig.is_timed()
    }

    /// Starts an attempt.
    pub(crate) fn begin(&self, world: &mut World, tried: Tried) -> Result<Begun, Stop> {
        let looks = self.checks_progress(world) && matches!(tried, Tried::Iteration);
        Ok(Begun {
            memory: if looks { Some(world.rig.memory_state()?) } else { None },
            began: world.rig.now(),
            counted: world.rig.lost_to_retry(),
            allocated: Bytes(world.rig.stats().allocated_bytes.all.current),
        })
    }

    /// Handles a failed attempt: the next policy prepares another one. Returns whether there is another one.
    pub(crate) fn failed(
        &mut self,
        world: &mut World,
        tried: Tried,
        trying: &mut Trying,
        begun: Begun,
        error: &AllocatorError,
        between: &mut Between<'_>,
    ) -> Result<bool, Stop> {
        self.record.attempts += 1;
        let plan = trying.plan.clone();
        self.known.failed(plan.batch);
        if let Tried::Request(_) = tried {
            self.check_left_behind(world, begun.allocated);
        }
        if let Some(finding) = trying.same_again.take() {
            self.record.without_progress += 1;
            world.rig.note(finding);
        }
        let met = match begun.memory {
            Some(before) => Some(before),
            None if self.checks_progress(world) => Some(world.rig.memory_state()?),
            None => None,
        };
        let others = others_may_change_memory(world, between);
        let next = self.prepare(world, &mut trying.turn, &plan, between)?;
        let spent = world.rig.now().saturating_sub(begun.began);
        self.lost += spent;
        let then = next.as_ref().map(|next| next.then.clone());
        self.list(tried, &plan, Some(error.to_string()), then, world.rig.is_timed().then_some(spent));
        let Some(next) = next else {
            self.verify_live(world)?;
            return Ok(false);
        };
        // Requests that the allocator itself retried are already counted.
        let of_these = world.rig.lost_to_retry().saturating_sub(begun.counted);
        world.rig.add_lost_time(spent.saturating_sub(of_these));
        let waited_for_others = next.policy == PolicyKind::Wait && others;
        if let Some(met) = met.filter(|_| !waited_for_others && !next.plan.asks_for_less_than(&plan)) {
            trying.same_again = same_memory(world, &met, tried, &next.plan)?;
        }
        trying.plan = next.plan;
        trying.retries += 1;
        self.record.retries += 1;
        self.check_bound(world, trying.retries);
        Ok(true)
    }

    fn bisects(&self) -> bool {
        self.chain.is_some_and(|chain| chain.policies().iter().any(|policy| policy.kind() == PolicyKind::BisectBatch))
    }

    /// Handles a successful attempt and returns the plan of the next iteration.
    pub(crate) fn succeeded(&mut self, world: &mut World, tried: Tried, trying: &Trying, begun: &Begun) -> Result<Plan, Stop> {
        self.record.attempts += 1;
        let Trying { plan, retries, agreed, .. } = trying;
        if let Tried::Iteration = tried {
            let trained = self.trained.get_or_insert_default();
            (trained.final_batch, trained.effective_batch) = (plan.samples_at_once(), plan.batch);
            trained.samples += plan.batch;
            trained.plan = plan.to_string();
        }
        let next = if self.bisects() { self.known.worked(plan) } else { plan.clone() };
        if retries + agreed > 0 {
            let time = world.rig.is_timed().then(|| world.rig.now().saturating_sub(begun.began));
            self.list(tried, plan, None, None, time);
            self.verify_live(world)?;
        }
        Ok(next)
    }

    /// Handles an iteration that was abandoned because another rank ran out of memory. If training continues, all ranks
    /// use the agreed plan.
    pub(crate) fn given_up(&mut self, world: &mut World, trying: &mut Trying, begun: &Begun, goes_on: bool) {
        self.record.attempts += 1;
        let spent = world.rig.now().saturating_sub(begun.began);
        self.lost += spent;
        let then = goes_on.then(|| "the plan that all ranks agreed on".to_owned());
        let time = world.rig.is_timed().then_some(spent);
        self.list(Tried::Iteration, &trying.plan, Some("another rank ran out of memory".to_owned()), then, time);
        if goes_on {
            trying.agreed += 1;
            self.record.retries += 1;
        }
    }

    /// Records the bytes that failed iterations left allocated, without those that the workload keeps on purpose.
    pub(crate) fn left_behind(&mut self, bytes: Bytes) {
        self.record.retained = self.record.retained.max(bytes);
    }

    /// Checks that a failed request leaves no bytes allocated.
    fn check_left_behind(&mut self, world: &mut World, before: Bytes) {
        let after = Bytes(world.rig.stats().allocated_bytes.all.current);
        self.left_behind(after.saturating_sub(before));
        if after != before {
            world.rig.note(Finding {
                invariant: Invariant::OomChangesOnlyTheCache,
                expected: format!("{} B allocated after a failed attempt, as before it", before.0),
                seen: format!("{} B", after.0),
            });
        }
    }

    /// The loop of attempts is bounded by design; this checks the bound independently.
    fn check_bound(&self, world: &mut World, retries: u64) {
        let most = self.chain.map_or(1, Chain::most_attempts);
        if retries >= most {
            world.rig.note(Finding {
                invariant: Invariant::AttemptsAreBounded,
                expected: format!("at most {} at one request or iteration", count(most, "attempt")),
                seen: format!("attempt {}", retries + 1),
            });
        }
    }

    /// Verifies the contents of the scenario's named buffers after failed attempts.
    fn verify_live(&self, world: &mut World) -> Result<(), Stop> {
        if self.chain.is_some() && !world.rig.is_timed() { world.verify_live() } else { Ok(()) }
    }

    /// Finds the next policy with a retry left and something to do, and applies it. `None`: the policies give up.
    fn prepare(&mut self, world: &mut World, turn: &mut Turn, plan: &Plan, between: &mut Between<'_>) -> Result<Option<Next>, Stop> {
        let Some(chain) = self.chain else { return Ok(None) };
        let is_alone = chain.policies().len() == 1;
        while let Some(policy) = chain.policies().get(turn.policy) {
            if turn.used < policy.retries() {
                let applied = self.apply(world, policy, plan, between, turn.used, is_alone)?;
                self.record.given_back += applied.given_back;
                if applied.did_something || (is_alone && retries_regardless(policy)) {
                    turn.used += 1;
                    let then = applied.then.unwrap_or_else(|| policy.kind().to_string());
                    return Ok(Some(Next { plan: applied.plan, policy: policy.kind(), then }));
                }
            }
            *turn = Turn { policy: turn.policy + 1, used: 0 };
        }
        Ok(None)
    }

    /// Applies a policy before the next attempt.
    fn apply(
        &self,
        world: &mut World,
        policy: &Policy,
        plan: &Plan,
        between: &mut Between<'_>,
        used: u32,
        is_alone: bool,
    ) -> Result<Applied, Stop> {
        let or_nothing = |next: Option<Plan>| next.map_or_else(|| Applied::nothing(plan), Applied::changed);
        Ok(match policy {
            Policy::GiveUp => Applied::nothing(plan),
            Policy::EmptyCache { .. } => empty_cache::apply(world, plan)?,
            Policy::Free { buffers } => free::apply(world, plan, buffers)?,
            Policy::Synchronize { .. } => synchronize::apply(world, plan)?,
            Policy::Batch { rule, floor, empty_cache, .. } => {
                let next = batch::next(*rule, plan, *floor, &self.known);
                let given_back = match (&next, empty_cache) {
                    (Some(_), true) => world.rig.empty_cache()?,
                    (None, true) if is_alone && retries_regardless(policy) => world.rig.empty_cache()?,
                    _ => Bytes::ZERO,
                };
                Applied { given_back, ..or_nothing(next) }
            }
            Policy::SplitAndAccumulate { floor } => or_nothing(split_and_accumulate::next(plan, *floor)),
            Policy::CheckpointMore { most } => or_nothing(checkpoint_more::next(plan, *most)),
            Policy::HalfPrecision => or_nothing(half_precision::next(plan)),
            Policy::SpillToHost { part, memory } => or_nothing(spill_to_host::next(plan, *part, memory)),
            Policy::Evict { buffers } => evict::apply(world, plan, buffers)?,
            Policy::Wait { first, factor, .. } => wait::apply(world, plan, between, (*first, *factor, used))?,
        })
    }

    fn list(&mut self, tried: Tried, plan: &Plan, failed: Option<String>, then: Option<String>, time: Option<Nanos>) {
        if self.chain.is_some() {
            self.record.list(Attempt { asked: tried.describe(plan), failed, then, time });
        }
    }

    pub(crate) fn reports(&self) -> BTreeMap<ReportKey, u64> {
        let record = &self.record;
        let mut reports = BTreeMap::from([
            (ReportKey::Attempts, record.attempts),
            (ReportKey::Retries, record.retries),
            (ReportKey::RetriesWithoutProgress, record.without_progress),
            (ReportKey::RetryTime, self.lost.0),
            (ReportKey::RetainedAfterOom, record.retained.0),
            (ReportKey::GivenBack, record.given_back.0),
        ]);
        if let Some(trained) = &self.trained {
            reports.insert(ReportKey::FinalBatch, trained.final_batch);
            reports.insert(ReportKey::EffectiveBatch, trained.effective_batch);
        }
        reports
    }

    /// The record of a step with policies.
    pub(crate) fn into_record(self, world: &World) -> Option<harness_record::Recovery> {
        self.chain?;
        let lost = world.rig.is_timed().then_some(self.lost);
        Some(harness_record::Recovery { lost, trained: self.trained, ..self.record })
    }
}

/// Whether a policy retries even if it finds nothing to do and is the only policy. Programs that do not check behave
/// like this. The record then shows that the retries make no progress.
const fn retries_regardless(policy: &Policy) -> bool {
    matches!(policy, Policy::EmptyCache { .. } | Policy::Free { .. } | Policy::Batch { rule: BatchRule::Halve, .. })
}

/// Whether memory may change while a policy waits: through `meanwhile` steps, or on a real device through other
/// processes.
fn others_may_change_memory(world: &World, between: &Between<'_>) -> bool {
    between.is_some() || world.rig.info().clock == Clock::Measured
}

/// Returns a finding if a retry asks for no less and the memory state has not changed since the failed attempt.
fn same_memory(world: &mut World, met: &MemoryState, tried: Tried, plan: &Plan) -> Result<Option<Finding>, Stop> {
    let now = world.rig.memory_state()?;
    Ok((now == *met).then(|| Finding {
        invariant: Invariant::RetryMakesProgress,
        expected: "the retry to succeed, to ask for less, or to find memory changed since the failed attempt".to_owned(),
        seen: format!(
            "it asked for {} again and failed again: the allocator's blocks and the {} free on the device were the same",
            tried.describe(plan),
            now.device_free
        ),
    }))
}
