//! Recovery: what policies do between a failed request and the next try, and whether that try could succeed at all.
//!
//! Policies are data of the scenario ([`Policy`]). Each has a file of its own here; those that change the batch share one.

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

/// What one request or one iteration came to, recovery included.
#[derive(Debug)]
pub(crate) struct Recovered<T> {
    /// The answer of the last try.
    pub(crate) answer: Result<T, AllocatorError>,
    /// How the last try was done.
    pub(crate) plan: Plan,
    /// How the next iteration is to be done.
    pub(crate) next: Plan,
    /// Tries after the first.
    pub(crate) retries: u64,
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

/// The recovery of one step: its policies, and what they did so far. Policies may remember what earlier iterations told.
pub(crate) struct Recovery<'p> {
    chain: Option<&'p Chain>,
    known: batch::Known,
    record: harness_record::Recovery,
    lost: Nanos,
    trained: Option<Trained>,
}

/// How a request or an iteration is tried, until a try succeeds or there is no other.
pub(crate) struct Trying {
    /// How the next try is done.
    pub(crate) plan: Plan,
    /// Tries after the first.
    pub(crate) retries: u64,
    turn: Turn,
    /// The violation that the next try is, if it fails.
    same_again: Option<Finding>,
    /// Tries that were given up for others.
    agreed: u64,
}

impl Trying {
    pub(crate) fn new(plan: Plan) -> Self {
        Self { plan, retries: 0, turn: Turn::default(), same_again: None, agreed: 0 }
    }
}

/// What a try began with.
pub(crate) struct Begun {
    memory: Option<MemoryState>,
    began: Nanos,
    /// What was counted as lost then.
    counted: Nanos,
    allocated: Bytes,
}

impl Begun {
    /// Of the time since it began, only so much was its own, up to now.
    pub(crate) fn took(&mut self, world: &mut World, own: Nanos) {
        self.began = world.rig.now().saturating_sub(own);
    }
}

/// Whose turn it is after a failure.
#[derive(Default)]
struct Turn {
    policy: usize,
    /// Its retries so far.
    used: u32,
}

/// The next try.
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

    /// Tries until it succeeds or the policies give up. `plan` is how the first try is done. `between` is done while a policy waits.
    ///
    /// A retry makes progress if it succeeds, if it asks for less, or if the allocator's blocks or the free memory of the device differ from what
    /// the failed try met. One that does not is a violation of [`Invariant::RetryMakesProgress`]; the run goes on all the same, so that the record
    /// shows how it ends. A timed run does not ask the device for its memory, so it does not check for progress.
    ///
    /// With a policy, each failed try costs time linear in the allocator's blocks.
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

    /// A try begins.
    pub(crate) fn begin(&self, world: &mut World, tried: Tried) -> Result<Begun, Stop> {
        let looks = self.checks_progress(world) && matches!(tried, Tried::Iteration);
        Ok(Begun {
            memory: if looks { Some(world.rig.memory_state()?) } else { None },
            began: world.rig.now(),
            counted: world.rig.lost_to_retry(),
            allocated: Bytes(world.rig.stats().allocated_bytes.all.current),
        })
    }

    /// A try failed: lets a policy prepare the next one, and tells whether there is one.
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
        // Requests of this try that the allocator itself tried again are counted already.
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

    /// A try succeeded. Tells how the next iteration is to be done.
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

    /// A try of an iteration was given up because another rank ran out of memory. Where training goes on, all agree on how.
    pub(crate) fn given_up(&mut self, world: &mut World, trying: &mut Trying, begun: &Begun, goes_on: bool) {
        self.record.attempts += 1;
        let spent = world.rig.now().saturating_sub(begun.began);
        self.lost += spent;
        let then = goes_on.then(|| "the plan that all agreed on".to_owned());
        let time = world.rig.is_timed().then_some(spent);
        self.list(Tried::Iteration, &trying.plan, Some("another rank ran out of memory".to_owned()), then, time);
        if goes_on {
            trying.agreed += 1;
            self.record.retries += 1;
        }
    }

    /// What failed tries of iterations left allocated, which their workload knows: what it keeps on purpose is no part of it.
    pub(crate) fn left_behind(&mut self, bytes: Bytes) {
        self.record.retained = self.record.retained.max(bytes);
    }

    /// A failed request leaves nothing allocated behind.
    fn check_left_behind(&mut self, world: &mut World, before: Bytes) {
        let after = Bytes(world.rig.stats().allocated_bytes.all.current);
        self.left_behind(after.saturating_sub(before));
        if after != before {
            world.rig.note(Finding {
                invariant: Invariant::OomChangesOnlyTheCache,
                expected: format!("{} B allocated after a failed try as before it", before.0),
                seen: format!("{} B", after.0),
            });
        }
    }

    /// The loop of tries ends by itself; this counts on its own that it does.
    fn check_bound(&self, world: &mut World, retries: u64) {
        let most = self.chain.map_or(1, Chain::most_attempts);
        if retries >= most {
            world.rig.note(Finding {
                invariant: Invariant::AttemptsAreBounded,
                expected: format!("at most {} of one request or iteration", count(most, "try")),
                seen: format!("try {}", retries + 1),
            });
        }
    }

    /// What the scenario holds by name still has its contents, after tries that failed.
    fn verify_live(&self, world: &mut World) -> Result<(), Stop> {
        if self.chain.is_some() && !world.rig.is_timed() { world.verify_live() } else { Ok(()) }
    }

    /// Lets the next policy that has a retry left and something to do prepare the next try; `None`: there is none.
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

    /// Does what the policy says before the next try, and tells how that try is done.
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

    /// The figures that the step reports.
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

    /// What a record keeps of a step with policies.
    pub(crate) fn into_record(self, world: &World) -> Option<harness_record::Recovery> {
        self.chain?;
        let lost = world.rig.is_timed().then_some(self.lost);
        Some(harness_record::Recovery { lost, trained: self.trained, ..self.record })
    }
}

/// Whether a policy that finds nothing to do, and has no other behind it, tries again all the same, as programs do that do not look: the
/// record then shows that it makes no progress.
const fn retries_regardless(policy: &Policy) -> bool {
    matches!(policy, Policy::EmptyCache { .. } | Policy::Free { .. } | Policy::Batch { rule: BatchRule::Halve, .. })
}

/// Whether memory may change while a policy waits: by what goes on meanwhile, or on a device that others use.
fn others_may_change_memory(world: &World, between: &Between<'_>) -> bool {
    between.is_some() || world.rig.info().clock == Clock::Measured
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
