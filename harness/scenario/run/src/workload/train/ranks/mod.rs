//! Data-parallel training: each rank trains on its own samples, and the ranks average their
//! gradients.
//!
//! The ranks take turns. Each has its own program on the rig's device with a memory limit, as in
//! `programs:`. A rank's allocations do not depend on other ranks, except for the decision to
//! retry. So each rank runs its iteration with all attempts to the end, and its calls are matched
//! with the others' afterward. Real host code does not wait for an all-reduce either; it waits when
//! it reads the loss.
//!
//! * `rank`: one rank, and the parts of an attempt;
//! * `reducer`: the collectives that a rank calls, and DDP's buckets;
//! * `matcher`: matches the collectives of the ranks;
//! * `outcome`: the reports.

mod matcher;
mod outcome;
mod rank;
mod reducer;

use harness_allocator::allocator::AllocatorError;

use self::rank::{Attempt, AttemptResult, End, Rank};
use self::{matcher::Matcher, outcome::Outcomes};
use crate::between::{Between, pause};
use crate::{context::RunContext, rig::Stop, step_result::StepResult};
use harness_scenario::steps::{ranks::Ranks, train::Train};
use harness_scenario::{AttemptPlan, Step};

struct Group<'a> {
    train: &'a Train,
    agrees: bool,
    ranks: Vec<Rank<'a>>,
    matcher: Matcher,
    /// The reduced batch of each rank.
    most: Vec<u64>,
    plans: Vec<AttemptPlan>,
    outcomes: Outcomes,
}

pub(super) fn run(
    ctx: &mut RunContext,
    step: &Step,
    train: &Train,
    ranks: &Ranks,
    mut between: Between<'_>,
) -> Result<StepResult, Stop> {
    let home = ctx.rig.entered();
    let mut programs = vec![home];
    programs.extend(ctx.handles.ranks.get(&train.id).into_iter().flatten());
    let new = |(number, program)| Rank::new(number, program, train, ranks, step.position.line, ctx);
    let mut group = Group {
        train,
        agrees: ranks.sync_batch,
        ranks: programs.into_iter().enumerate().map(new).collect(),
        matcher: Matcher::new(ranks.count()),
        most: vec![u64::MAX; ranks.count()],
        plans: vec![train.plan.clone(); ranks.count()],
        outcomes: Outcomes::default(),
    };
    group.build(ctx)?;
    let mut mismatch = group.matcher.advance();
    for iteration in 0..train.iterations {
        // If a rank has ended, the others continue until they wait for it.
        if mismatch.is_some() || group.active().is_empty() {
            break;
        }
        group.iterate(ctx, iteration)?;
        mismatch = group.matcher.advance();
        if mismatch.is_none() {
            group.outcomes.iteration_ended(iteration + 1, &group.ranks);
        }
        ctx.rig.enter(home);
        pause(&mut between, ctx)?;
    }
    for rank in group
        .ranks
        .iter_mut()
        .filter(|rank| rank.totals.ended.is_none() && !rank.is_astray)
    {
        rank.end(End::Finished, &mut group.matcher);
    }
    let mismatch = mismatch.or_else(|| group.matcher.advance());
    let Group {
        ranks,
        matcher,
        outcomes,
        ..
    } = group;
    let ends = ranks
        .into_iter()
        .map(|rank| rank.free(ctx))
        .collect::<Result<Vec<_>, _>>()?;
    ctx.rig.enter(home);
    Ok(outcome::conclude(
        ctx,
        step,
        train,
        ends,
        matcher.matched,
        &outcomes,
        mismatch,
    ))
}

impl<'a> Group<'a> {
    fn build(&mut self, ctx: &mut RunContext) -> Result<(), Stop> {
        for (number, rank) in self.ranks.iter_mut().enumerate() {
            let matcher = &mut self.matcher;
            rank.within(ctx, |rank, ctx| {
                if number > 0 {
                    ctx.rig.reset_peaks();
                }
                rank.build(ctx, matcher)
            })?;
        }
        meet(
            &mut self.ranks.iter_mut().collect::<Vec<_>>(),
            &mut self.outcomes,
        );
        Ok(())
    }

    /// Runs an iteration, counted from 0, with all attempts on each rank.
    fn iterate(&mut self, ctx: &mut RunContext, iteration: u64) -> Result<(), Stop> {
        let of = |list: &[u64]| list[iteration as usize % list.len()];
        let (batch, length) = (of(&self.train.batches), of(&self.train.lengths));
        for ((rank, plan), most) in self.ranks.iter_mut().zip(&mut self.plans).zip(&self.most) {
            plan.batch = batch.min(*most);
            plan.micro_batches = plan.micro_batches.min(plan.batch);
            rank.begin_iteration(iteration + 1, plan.clone());
        }
        let asked: Vec<u64> = self.plans.iter().map(|plan| plan.batch).collect();
        let done = if self.agrees {
            self.together(ctx, length)?
        } else {
            self.alone(ctx, length)?
        };
        meet(
            &mut self.ranks.iter_mut().collect::<Vec<_>>(),
            &mut self.outcomes,
        );
        for ((number, next), asked) in done.into_iter().enumerate().zip(asked) {
            let Some(next) = next else { continue };
            if next.batch != asked {
                self.most[number] = next.batch;
            }
            self.plans[number] = next;
        }
        Ok(())
    }

    fn active(&self) -> Vec<usize> {
        self.ranks
            .iter()
            .filter(|rank| rank.is_active())
            .map(|rank| rank.number)
            .collect()
    }

    /// Each rank retries independently. Returns the next plan of each rank that succeeded.
    fn alone(
        &mut self,
        ctx: &mut RunContext,
        length: u64,
    ) -> Result<Vec<Option<AttemptPlan>>, Stop> {
        let mut all = vec![None; self.ranks.len()];
        for number in self.active() {
            while let Some((_, result)) = self.attempt(ctx, &[number], length)?.pop() {
                match result {
                    AttemptResult::Succeeded => all[number] = Some(self.succeeded(ctx, number)?),
                    AttemptResult::Failed(error) if self.failed(ctx, number, &error)? => continue,
                    AttemptResult::Failed(_) | AttemptResult::GivenUp => {}
                }
                break;
            }
        }
        Ok(all)
    }

    /// The ranks retry together until no rank runs out of memory before the agreement.
    fn together(
        &mut self,
        ctx: &mut RunContext,
        length: u64,
    ) -> Result<Vec<Option<AttemptPlan>>, Stop> {
        loop {
            let results = self.attempt(ctx, &self.active(), length)?;
            if !results
                .iter()
                .any(|(_, result)| matches!(result, AttemptResult::Succeeded))
            {
                if self.try_again(ctx, results)? {
                    continue;
                }
                return Ok(Vec::new());
            }
            let mut nexts = Vec::new();
            for (number, result) in results {
                match result {
                    AttemptResult::Succeeded => nexts.push(self.succeeded(ctx, number)?),
                    // Too late: the others have finished the iteration or wait in one of its
                    // all-reduces.
                    AttemptResult::Failed(error) => {
                        if self.failed(ctx, number, &error)? {
                            self.ranks[number].go_astray(&mut self.matcher);
                        }
                    }
                    AttemptResult::GivenUp => {}
                }
            }
            let next = smallest(nexts);
            return Ok(vec![next; self.ranks.len()]);
        }
    }

    fn try_again(
        &mut self,
        ctx: &mut RunContext,
        results: Vec<(usize, AttemptResult)>,
    ) -> Result<bool, Stop> {
        let (mut plans, mut given_up, mut goes_on) = (Vec::new(), Vec::new(), true);
        for (number, result) in results {
            match result {
                AttemptResult::Failed(error) => {
                    goes_on &= self.failed(ctx, number, &error)?;
                    plans.push(self.ranks[number].attempts.plan.clone());
                }
                AttemptResult::GivenUp | AttemptResult::Succeeded => given_up.push(number),
            }
        }
        let agreed = smallest(plans).filter(|_| goes_on);
        given_up
            .into_iter()
            .for_each(|number| self.ranks[number].gave_up_attempt(ctx, agreed.is_some()));
        for rank in self.ranks.iter_mut().filter(|rank| rank.is_active()) {
            match &agreed {
                Some(plan) => rank.attempts.plan = plan.clone(),
                None => rank.end(End::Stopped, &mut self.matcher),
            }
        }
        Ok(agreed.is_some())
    }

    /// Runs one attempt on some ranks, and returns the number and the result of each.
    fn attempt(
        &mut self,
        ctx: &mut RunContext,
        numbers: &[usize],
        length: u64,
    ) -> Result<Vec<(usize, AttemptResult)>, Stop> {
        let Self {
            ranks,
            matcher,
            agrees,
            outcomes,
            ..
        } = self;
        let mut ranks: Vec<&mut Rank<'_>> = ranks
            .iter_mut()
            .filter(|rank| numbers.contains(&rank.number))
            .collect();
        let mut first = |rank: &mut &mut Rank<'_>| {
            rank.within(ctx, |rank, ctx| rank.first_part(ctx, length, matcher))
        };
        let tries: Vec<Attempt> = ranks.iter_mut().map(&mut first).collect::<Result<_, _>>()?;
        let give_up = *agrees && tries.iter().any(|one| one.done.is_err());
        if *agrees {
            ranks.iter_mut().for_each(|rank| rank.agree(matcher));
            meet(&mut ranks, outcomes);
        }
        let second = |(rank, one): (&mut Rank<'_>, Attempt)| {
            Ok((
                rank.number,
                rank.within(ctx, |rank, ctx| {
                    rank.second_part(ctx, one, give_up, matcher)
                })?,
            ))
        };
        ranks.into_iter().zip(tries).map(second).collect()
    }

    fn succeeded(&mut self, ctx: &mut RunContext, number: usize) -> Result<AttemptPlan, Stop> {
        self.ranks[number].within(ctx, Rank::succeeded)
    }

    fn failed(
        &mut self,
        ctx: &mut RunContext,
        number: usize,
        error: &AllocatorError,
    ) -> Result<bool, Stop> {
        self.ranks[number].within(ctx, |rank, ctx| rank.failed(ctx, error, &mut self.matcher))
    }
}

/// All ranks wait for the slowest one.
fn meet(ranks: &mut [&mut Rank<'_>], outcomes: &mut Outcomes) {
    let slowest = ranks.iter().map(|rank| rank.busy).max().unwrap_or_default();
    outcomes.time += slowest;
    for rank in ranks {
        rank.totals.waited += slowest.saturating_sub(std::mem::take(&mut rank.busy));
    }
}

fn smallest(plans: Vec<AttemptPlan>) -> Option<AttemptPlan> {
    plans.into_iter().reduce(|least, plan| {
        if plan.asks_for_less_than(&least) {
            plan
        } else {
            least
        }
    })
}

#[cfg(test)]
mod tests;
