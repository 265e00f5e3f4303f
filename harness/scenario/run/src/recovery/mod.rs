//! Recovery: what policies do between a failed attempt and the next one, and whether the next one
//! could succeed.
//!
//! The scenario declares the policies ([`Policy`]): `applied` and `plans` carry them out, and
//! `batch` those that change the batch.

mod applied;
mod batch;
mod plans;
mod scale;

use std::collections::BTreeMap;

use harness_allocator::units::{Bytes, Nanos};
use harness_allocator::{allocator::AllocatorError, device::Clock};
use harness_base::words::count;

use self::applied::Applied;
use crate::between::{Between, pause};
use crate::context::RunContext;
use crate::rig::{Finding, MemoryState, Stop};
use harness_record::{Attempt, Invariant, Trained};
use harness_scenario::{AttemptPlan, BatchRule, Chain, Policy, PolicyKind, ReportKey};

/// The longest wait, which equals the longest duration that a scenario may contain.
const LONGEST_WAIT: Nanos = Nanos(3_600 * 1_000_000_000);

/// Releases the cache if that is asked for, and returns the bytes.
fn empty_cache_if(ctx: &mut RunContext, is_asked: bool) -> Result<Bytes, Stop> {
    if is_asked {
        ctx.rig.empty_cache()
    } else {
        Ok(Bytes::ZERO)
    }
}

fn wait(ctx: &mut RunContext, between: &mut Between<'_>, duration: Nanos) -> Result<Applied, Stop> {
    let duration = duration.min(LONGEST_WAIT);
    ctx.rig.sleep(duration)?;
    pause(between, ctx)?;
    Ok(Applied::saying(format!("wait {duration}")))
}

#[derive(Debug)]
pub(crate) struct Recovered<T> {
    pub(crate) answer: Result<T, AllocatorError>,
    pub(crate) plan: AttemptPlan,
    pub(crate) next: AttemptPlan,
    pub(crate) retries: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum AttemptKind {
    /// One request of this size, whatever the plan. Its memory state is taken after it fails.
    Request(Bytes),
    /// One iteration of a training. A failed iteration frees its blocks, so its memory state is
    /// taken before it begins.
    Iteration,
}

impl AttemptKind {
    fn describe(self, plan: &AttemptPlan) -> String {
        match self {
            Self::Request(size) => size.to_string(),
            Self::Iteration => plan.to_string(),
        }
    }
}

/// The recovery of one step: its policies and their effects so far. Policies may use what earlier
/// iterations revealed.
pub(crate) struct Recovery<'p> {
    chain: Option<&'p Chain>,
    known: batch::Known,
    scale: Option<scale::Scale>,
    record: harness_record::Recovery,
    lost: Nanos,
    trained: Option<Trained>,
}

pub(crate) struct Attempts {
    kind: AttemptKind,
    pub(crate) plan: AttemptPlan,
    pub(crate) retries: u64,
    turn: Turn,
    /// The finding to record if the next attempt fails.
    same_again: Option<Finding>,
    /// Attempts abandoned because another rank failed.
    agreed: u64,
    start: AttemptStart,
}

impl Attempts {
    pub(crate) fn new(kind: AttemptKind, plan: AttemptPlan) -> Self {
        Self {
            kind,
            plan,
            retries: 0,
            turn: Turn::default(),
            same_again: None,
            agreed: 0,
            start: AttemptStart::default(),
        }
    }

    /// Moves the start of the current attempt so that only `own` of the time until now counts.
    pub(crate) fn took(&mut self, ctx: &mut RunContext, own: Nanos) {
        self.start.began = ctx.rig.now().saturating_sub(own);
    }
}

#[derive(Default)]
struct AttemptStart {
    memory: Option<MemoryState>,
    began: Nanos,
    /// The lost time that was already counted.
    counted: Nanos,
    allocated: Bytes,
}

/// The policy that acts next after a failure.
#[derive(Default)]
struct Turn {
    policy: usize,
    /// The number of its retries so far.
    used: u32,
}

impl<'p> Recovery<'p> {
    pub(crate) fn new(chain: Option<&'p Chain>) -> Self {
        let policies = chain.map(Chain::to_string).unwrap_or_default();
        let record = harness_record::Recovery {
            policies,
            ..harness_record::Recovery::default()
        };
        let scale = chain.and_then(Chain::scales).map(scale::Scale::new);
        Self {
            chain,
            known: batch::Known::default(),
            scale,
            record,
            lost: Nanos::ZERO,
            trained: None,
        }
    }

    /// Retries until an attempt succeeds or the policies give up. `plan` is the plan of the first
    /// attempt. `between` runs while a policy waits.
    ///
    /// A retry makes progress if it succeeds or asks for less. It also makes progress if the
    /// allocator's blocks or the device's free memory have changed since the failed attempt. Other
    /// retries violate [`Invariant::RetryMakesProgress`]; the run continues so that the record
    /// shows how it ends. Timed runs do not query the device's memory, so they skip this check.
    ///
    /// With a policy, each failed attempt takes time linear in the allocator's blocks.
    pub(crate) fn run<T>(
        &mut self,
        ctx: &mut RunContext,
        kind: AttemptKind,
        plan: AttemptPlan,
        between: &mut Between<'_>,
        mut attempt: impl FnMut(
            &mut RunContext,
            &AttemptPlan,
        ) -> Result<Result<T, AllocatorError>, Stop>,
    ) -> Result<Recovered<T>, Stop> {
        let mut attempts = Attempts::new(kind, plan);
        loop {
            self.begin(ctx, &mut attempts)?;
            let error = match attempt(ctx, &attempts.plan)? {
                Ok(value) => {
                    let next = self.succeeded(ctx, &attempts)?;
                    return Ok(Recovered {
                        answer: Ok(value),
                        plan: attempts.plan,
                        next,
                        retries: attempts.retries,
                    });
                }
                Err(error) => error,
            };
            if !self.failed(ctx, &mut attempts, &error, between)? {
                let Attempts { plan, retries, .. } = attempts;
                return Ok(Recovered {
                    answer: Err(error),
                    next: plan.clone(),
                    plan,
                    retries,
                });
            }
        }
    }

    fn checks_progress(&self, ctx: &RunContext) -> bool {
        self.chain.is_some() && !ctx.rig.is_timed()
    }

    pub(crate) fn begin(&self, ctx: &mut RunContext, attempts: &mut Attempts) -> Result<(), Stop> {
        let looks = self.checks_progress(ctx) && matches!(attempts.kind, AttemptKind::Iteration);
        attempts.start = AttemptStart {
            memory: if looks {
                Some(ctx.rig.memory_state()?)
            } else {
                None
            },
            began: ctx.rig.now(),
            counted: ctx.rig.lost_to_retry(),
            allocated: Bytes(ctx.rig.stats().allocated_bytes.all.current),
        };
        Ok(())
    }

    /// A failed request leaves no bytes allocated.
    fn check_left_behind(&mut self, ctx: &mut RunContext, allocated: Bytes) {
        let after = Bytes(ctx.rig.stats().allocated_bytes.all.current);
        self.left_behind(after.saturating_sub(allocated));
        if after != allocated {
            let before = allocated.0;
            let expected = format!("{before} B allocated after a failed attempt, as before it");
            let seen = format!("{} B", after.0);
            let finding = Finding::new(Invariant::OomChangesOnlyTheCache, expected, seen);
            ctx.rig.note(finding);
        }
    }

    /// Handles a failed attempt: the next policy prepares another one. Returns whether there is
    /// another one.
    pub(crate) fn failed(
        &mut self,
        ctx: &mut RunContext,
        attempts: &mut Attempts,
        error: &AllocatorError,
        between: &mut Between<'_>,
    ) -> Result<bool, Stop> {
        let AttemptStart {
            memory,
            began,
            counted,
            allocated,
        } = std::mem::take(&mut attempts.start);
        self.record.attempts += 1;
        self.known.failed(attempts.plan.batch);
        if let AttemptKind::Request(_) = attempts.kind {
            self.check_left_behind(ctx, allocated);
        }
        if let Some(finding) = attempts.same_again.take() {
            self.record.without_progress += 1;
            ctx.rig.note(finding);
        }
        let met = match memory {
            Some(before) => Some(before),
            None if self.checks_progress(ctx) => Some(ctx.rig.memory_state()?),
            None => None,
        };
        // While a policy waits, `meanwhile` steps may change memory, and on a real device other
        // processes.
        let others = between.is_some() || ctx.rig.info().clock == Clock::Measured;
        let next = self.prepare(ctx, attempts, between)?;
        let spent = ctx.rig.now().saturating_sub(began);
        self.lost += spent;
        let then = next
            .as_ref()
            .map(|(policy, applied)| applied.then.clone().unwrap_or_else(|| policy.to_string()));
        self.list(ctx, attempts, Some(error.to_string()), then, spent);
        let Some((policy, applied)) = next else {
            self.verify_live(ctx)?;
            return Ok(false);
        };
        // Requests that the allocator itself retried are already counted.
        let of_these = ctx.rig.lost_to_retry().saturating_sub(counted);
        ctx.rig.add_lost_time(spent.saturating_sub(of_these));
        let waited_for_others = policy == PolicyKind::Wait && others;
        let before = applied
            .plan
            .map(|next| std::mem::replace(&mut attempts.plan, next));
        let asks_for_less = before.is_some_and(|before| attempts.plan.asks_for_less_than(&before));
        if let Some(met) = met.filter(|_| !waited_for_others && !asks_for_less) {
            attempts.same_again = same_memory(ctx, &met, attempts)?;
        }
        attempts.retries += 1;
        self.record.retries += 1;
        // The loop of attempts is bounded by design; this checks the bound independently.
        let most = self.chain.map_or(1, Chain::most_attempts);
        if attempts.retries >= most {
            let most = count(most, "attempt");
            let expected = format!("at most {most} at one request or iteration");
            let seen = format!("attempt {}", attempts.retries + 1);
            let finding = Finding::new(Invariant::AttemptsAreBounded, expected, seen);
            ctx.rig.note(finding);
        }
        Ok(true)
    }

    /// Handles a successful attempt and returns the plan of the next iteration.
    pub(crate) fn succeeded(
        &mut self,
        ctx: &mut RunContext,
        attempts: &Attempts,
    ) -> Result<AttemptPlan, Stop> {
        self.record.attempts += 1;
        let Attempts {
            plan,
            retries,
            agreed,
            ..
        } = attempts;
        if let AttemptKind::Iteration = attempts.kind {
            let trained = self.trained.get_or_insert_default();
            (trained.final_batch, trained.effective_batch) = (plan.samples_at_once(), plan.batch);
            trained.samples += plan.batch;
            trained.plan = plan.to_string();
        }
        let bisects = self.chain.is_some_and(|chain| {
            chain
                .policies()
                .iter()
                .any(|policy| policy.kind() == PolicyKind::BisectBatch)
        });
        let next = match self.scale.as_mut().map(scale::Scale::worked) {
            Some(Some(batch)) => {
                self.record.given_back += ctx.rig.empty_cache()?;
                batch::with_batch(plan, batch)
            }
            _ if bisects => self.known.worked(plan),
            _ => plan.clone(),
        };
        if retries + agreed > 0 {
            let time = ctx.rig.now().saturating_sub(attempts.start.began);
            self.list(ctx, attempts, None, None, time);
            self.verify_live(ctx)?;
        }
        Ok(next)
    }

    /// Handles an iteration that was abandoned because another rank ran out of memory.
    pub(crate) fn given_up(
        &mut self,
        ctx: &mut RunContext,
        attempts: &mut Attempts,
        goes_on: bool,
    ) {
        self.record.attempts += 1;
        let spent = ctx.rig.now().saturating_sub(attempts.start.began);
        self.lost += spent;
        let then = goes_on.then(|| "the plan that all ranks agreed on".to_owned());
        self.list(
            ctx,
            attempts,
            Some("another rank ran out of memory".to_owned()),
            then,
            spent,
        );
        if goes_on {
            attempts.agreed += 1;
            self.record.retries += 1;
        }
    }

    /// Records the bytes that failed iterations left allocated, without those that the workload
    /// keeps on purpose.
    pub(crate) fn left_behind(&mut self, bytes: Bytes) {
        self.record.retained = self.record.retained.max(bytes);
    }

    /// Verifies the contents of the scenario's named buffers after failed attempts.
    fn verify_live(&self, ctx: &mut RunContext) -> Result<(), Stop> {
        if self.chain.is_some() && !ctx.rig.is_timed() {
            ctx.verify_live()
        } else {
            Ok(())
        }
    }

    /// Finds the next policy with a retry left and something to do, and applies it. `None`: the
    /// policies give up.
    fn prepare(
        &mut self,
        ctx: &mut RunContext,
        attempts: &mut Attempts,
        between: &mut Between<'_>,
    ) -> Result<Option<(PolicyKind, Applied)>, Stop> {
        let Some(chain) = self.chain else {
            return Ok(None);
        };
        let Attempts { turn, plan, .. } = attempts;
        while let Some(policy) = chain.policies().get(turn.policy) {
            let regardless = chain.policies().len() == 1 && retries_regardless(policy);
            if turn.used < policy.retries() {
                let applied = self.apply(ctx, policy, plan, between, turn.used, regardless)?;
                self.record.given_back += applied.given_back;
                if applied.did_something || regardless {
                    turn.used += 1;
                    return Ok(Some((policy.kind(), applied)));
                }
            }
            *turn = Turn {
                policy: turn.policy + 1,
                used: 0,
            };
        }
        Ok(None)
    }

    /// The plan with the next smaller batch of `scale_batch`.
    fn scaled_down(&mut self, plan: &AttemptPlan) -> Option<AttemptPlan> {
        let batch = self.scale.as_mut().and_then(scale::Scale::failed)?;
        (batch < plan.batch).then(|| batch::with_batch(plan, batch))
    }

    /// Applies a policy, which was applied `used` times before.
    fn apply(
        &mut self,
        ctx: &mut RunContext,
        policy: &Policy,
        plan: &AttemptPlan,
        between: &mut Between<'_>,
        used: u32,
        regardless: bool,
    ) -> Result<Applied, Stop> {
        Ok(match policy {
            Policy::GiveUp => Applied::default(),
            Policy::EmptyCache { .. } => {
                let given_back = ctx.rig.empty_cache()?;
                Applied {
                    did_something: given_back > Bytes::ZERO,
                    given_back,
                    ..Applied::default()
                }
            }
            Policy::Free { buffers } => applied::free(ctx, buffers)?,
            // Blocks that wait for events can be reused after it. The effect is unknown until the
            // allocator polls its events, so it always counts as progress.
            Policy::Synchronize { .. } => {
                ctx.rig.synchronize()?;
                Applied {
                    did_something: true,
                    ..Applied::default()
                }
            }
            Policy::Batch {
                rule,
                floor,
                empty_cache,
                ..
            } => {
                let next = batch::next(*rule, plan, *floor, &self.known);
                let empties = *empty_cache && (next.is_some() || regardless);
                Applied {
                    given_back: empty_cache_if(ctx, empties)?,
                    ..Applied::replanned(next)
                }
            }
            Policy::ScaleBatch { .. } => {
                let next = self.scaled_down(plan);
                Applied {
                    given_back: empty_cache_if(ctx, next.is_some())?,
                    ..Applied::replanned(next)
                }
            }
            Policy::HalveMicroBatch => Applied::replanned(plans::halve_micro_batch(plan)),
            Policy::SplitAndAccumulate { floor } => {
                Applied::replanned(plans::split_and_accumulate(plan, *floor))
            }
            Policy::CheckpointMore { most } => {
                Applied::replanned(plans::checkpoint_more(plan, *most))
            }
            Policy::HalfPrecision => Applied::replanned(plans::half_precision(plan)),
            Policy::SpillToHost { part, memory } => {
                Applied::replanned(plans::spill_to_host(plan, *part, memory))
            }
            Policy::Evict { buffers } => {
                applied::evict(ctx, buffers)?.map_or_else(Applied::default, Applied::saying)
            }
            Policy::Wait { first, factor, .. } => {
                let factor = u64::from(*factor).saturating_pow(used);
                wait(ctx, between, Nanos(first.0.saturating_mul(factor)))?
            }
        })
    }

    fn list(
        &mut self,
        ctx: &RunContext,
        attempts: &Attempts,
        failed: Option<String>,
        then: Option<String>,
        time: Nanos,
    ) {
        if self.chain.is_some() {
            let asked = attempts.kind.describe(&attempts.plan);
            self.record.list(Attempt {
                asked,
                failed,
                then,
                time: ctx.rig.is_timed().then_some(time),
            });
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

    pub(crate) fn into_record(self, ctx: &RunContext) -> Option<harness_record::Recovery> {
        self.chain?;
        let lost = ctx.rig.is_timed().then_some(self.lost);
        Some(harness_record::Recovery {
            lost,
            trained: self.trained,
            ..self.record
        })
    }
}

/// Returns whether a policy retries even if it finds nothing to do and is the only policy.
const fn retries_regardless(policy: &Policy) -> bool {
    matches!(
        policy,
        Policy::EmptyCache { .. }
            | Policy::Free { .. }
            | Policy::Batch {
                rule: BatchRule::Halve,
                ..
            }
    )
}

/// Returns a finding if a retry asks for no less and the memory state has not changed since the
/// failed attempt.
fn same_memory(
    ctx: &mut RunContext,
    met: &MemoryState,
    attempts: &Attempts,
) -> Result<Option<Finding>, Stop> {
    let now = ctx.rig.memory_state()?;
    let expected =
        "the retry to succeed, to ask for less, or to find memory changed since the failed attempt";
    let (asked, free) = (attempts.kind.describe(&attempts.plan), now.device_free);
    let seen = format!(
        "it asked for {asked} again and failed again: the allocator's blocks and the {free} free \
         on the device were the same"
    );
    Ok((now == *met).then(|| Finding::new(Invariant::RetryMakesProgress, expected, seen)))
}
