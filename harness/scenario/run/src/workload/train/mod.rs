//! Training as a pattern of allocations. Parameters and optimizer state live as long as the
//! training. The forward pass makes activations, the backward pass frees them and makes gradients,
//! and the optimizer reads and writes parameters and state. The training verifies contents along
//! the way, which detects memory that was handed out twice.
//!
//! There is one implementation of an iteration ([`Training::iterate`]). It follows every part of
//! its [`AttemptPlan`].
//!
//! * `training`: long-lived memory and iterations; `pass`: the passes of one micro-batch; `spill`:
//!   memory on the host;
//! * `ranks`: training on several ranks.

mod pass;
mod ranks;
mod spill;
mod training;

use std::hash::{Hash as _, Hasher as _};

use harness_allocator::{allocator::AllocatorError, hash::Mixer, units::Bytes};
use harness_base::words::count;
use harness_record::{FailedRequest, Outcome};

use self::training::{Counts, Training};
use crate::between::{Between, pause};
use crate::recovery::{AttemptKind, Recovery};
use crate::{context::RunContext, leaks::Watch, rig::Stop, step_result::StepResult};
use harness_scenario::steps::train::{Train, TrainedModel};
use harness_scenario::{AttemptPlan, Chain, ReportKey, Step};

pub(crate) fn run(
    ctx: &mut RunContext,
    step: &Step,
    train: &Train,
    between: Between<'_>,
) -> Result<StepResult, Stop> {
    match &step.id {
        Some(id) => ctx.rig.name_buffers(id, step.position.line),
        None => ctx
            .rig
            .name_buffers(&step.action.kind(), step.position.line),
    }
    if let Some(ranks) = &train.ranks {
        return ranks::run(ctx, step, train, ranks, between);
    }
    let mut training = Training::new(train, ctx.stream(&train.stream));
    let mut counts = Counts::default();
    let mut recovery = Recovery::new(train.on_oom.as_ref());
    let mut watch = Watch::begin(ctx, train.leak_check.as_ref(), step.position);
    let built = training.build(ctx);
    let failed = match counts.answer(built)? {
        Ok(()) => iterate(
            ctx,
            &mut training,
            &mut counts,
            &mut recovery,
            watch.as_mut(),
            between,
        )?,
        Err(error) => Some(error),
    };
    let leaks = watch.map(|watch| watch.judge(ctx)).transpose()?;
    counts.host = training.memory.host.usage;
    training.free(ctx)?;
    let mut result = conclude(ctx, step, train, counts, recovery, failed);
    leaks.into_iter().for_each(|leaks| result.append(leaks));
    Ok(result)
}

fn iterate(
    ctx: &mut RunContext,
    training: &mut Training<'_>,
    counts: &mut Counts,
    recovery: &mut Recovery<'_>,
    mut watch: Option<&mut Watch>,
    mut between: Between<'_>,
) -> Result<Option<AllocatorError>, Stop> {
    let train = training.train;
    let mut plan = train.plan.clone();
    // A reduced batch stays: a larger one would only fail again, unless the policy searches for the
    // largest batch.
    let mut most = u64::MAX;
    let scales = train.on_oom.as_ref().and_then(Chain::scales).is_some();
    let began = ctx.rig.now();
    for iteration in 0..train.iterations {
        if !scales || iteration == 0 {
            plan.batch = train.batches[iteration as usize % train.batches.len()].min(most);
        }
        plan.micro_batches = plan.micro_batches.min(plan.batch);
        let asked = plan.batch;
        let length = train.lengths[iteration as usize % train.lengths.len()];
        let attempt =
            |ctx: &mut RunContext, plan: &AttemptPlan| training.iterate(ctx, plan, length, counts);
        let recovered = recovery.run(ctx, AttemptKind::Iteration, plan, &mut between, attempt)?;
        counts.retries += recovered.retries;
        match recovered.answer {
            Ok(()) => {
                counts.samples += recovered.plan.batch;
                counts.final_batch = recovered.plan.batch;
                counts.plan = Some(recovered.plan);
                counts.iterations += 1;
                plan = recovered.next;
                if plan.batch != asked {
                    most = plan.batch;
                }
                if matches!(train.model, TrainedModel::Model(_)) {
                    // A program that reads its loss waits for it.
                    ctx.rig.synchronize_stream(training.memory.stream)?;
                }
                counts.time = ctx.rig.now().saturating_sub(began);
                watch
                    .iter_mut()
                    .for_each(|watch| watch.iteration_ended(ctx));
                pause(&mut between, ctx)?;
            }
            Err(error) => return Ok(Some(error)),
        }
    }
    Ok(None)
}

/// Identifies a training without its name, policies and expectations. Reports rank only equal
/// trainings.
fn workload(train: &Train) -> String {
    let mut hasher = Mixer::default();
    format!(
        "{:?}",
        (
            &train.model,
            &train.batches,
            &train.lengths,
            &train.plan,
            train.iterations,
            train.optimizer,
            train.zero_grad,
            train.retain_graph,
            &train.ranks
        )
    )
    .hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Describes the effect of retries: on the batch, or on the whole plan if the batch is unchanged.
fn what_became(train: &Train, counts: &Counts) -> String {
    let first = train.batches[0];
    match &counts.plan {
        Some(plan) if plan.batch == first && *plan != train.plan => {
            format!("{} became {plan}", train.plan)
        }
        Some(plan) if plan.batch == first => format!("{plan}, as at the start"),
        _ => batch_became(train, counts.final_batch),
    }
}

fn conclude(
    ctx: &RunContext,
    step: &Step,
    train: &Train,
    counts: Counts,
    mut recovery: Recovery<'_>,
    failed: Option<AllocatorError>,
) -> StepResult {
    let mut result = StepResult::default();
    result.reports.extend([
        (ReportKey::Iterations, counts.iterations),
        (ReportKey::FirstBatch, train.batches[0]),
        (ReportKey::FinalBatch, 0),
        (ReportKey::EffectiveBatch, 0),
        (ReportKey::Ooms, counts.ooms),
        (ReportKey::HostPeak, counts.host.peak.0),
        (ReportKey::HostCopied, counts.host.copied.0),
        (
            ReportKey::Throughput,
            (u128::from(counts.samples) * 1_000_000_000 / u128::from(counts.time.0.max(1))) as u64,
        ),
    ]);
    recovery.left_behind(Bytes(counts.retained));
    result.reports.extend(recovery.reports());
    result.recovery = recovery
        .into_record(ctx)
        .map(|record| harness_record::Recovery {
            host: counts.host,
            workload: Some(workload(train)),
            ..record
        });
    let done = (
        counts.iterations,
        counts.retries,
        what_became(train, &counts),
    );
    judge(
        ctx,
        step,
        train,
        done,
        failed.map(|error| (error, counts.failed_request)),
        &mut result,
    );
    result
}

/// Judges the end of a training: its iterations and retries, and a description of the final plan.
pub(super) fn judge(
    ctx: &RunContext,
    step: &Step,
    train: &Train,
    (iterations, retries, became): (u64, u64, String),
    failed: Option<(AllocatorError, Option<FailedRequest>)>,
    result: &mut StepResult,
) {
    let completed = format!("{iterations} of {}", count(train.iterations, "iteration"));
    let expected = train.expect.of(&ctx.setup.arm, ctx.setup.device);
    if failed.is_none() {
        result.outcome = Outcome::Fits {
            retries: retries as u32,
        };
        result
            .notes
            .extend((retries > 0).then(|| format!("{}: {became}", count(retries, "retry"))));
    }
    result.ends(
        step,
        expected,
        ["training to run out of memory", "training to finish"],
        completed,
        failed,
    );
}

pub(super) fn batch_became(train: &Train, batch: u64) -> String {
    match train.batches[0] {
        first if first == batch => format!("the last batch was {batch}, like the first"),
        first => format!("batch {first} became {batch}"),
    }
}

#[cfg(test)]
mod tests;
