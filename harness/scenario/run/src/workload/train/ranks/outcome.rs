//! The reports of a data-parallel training.

use std::collections::BTreeMap;

use harness_allocator::allocator::AllocatorError;
use harness_allocator::units::{Bytes, Nanos};

use super::matcher::Mismatch;
use super::rank::{End, Rank, RankTotals};
use crate::context::{RankFigures, RunContext};
use crate::workload::train::{batch_became, judge, workload};
use crate::{rig::Finding, step_result::StepResult};
use harness_record::{Attempt, FailedRequest, Invariant, Outcome, Recovery, Table, Trained};
use harness_scenario::{ReportKey, Step, steps::train::Train};

#[derive(Default)]
pub(super) struct Outcomes {
    /// The time of the slowest rank in each iteration, summed.
    pub(super) time: Nanos,
    iterations: u64,
    samples: u64,
    /// Samples of all ranks in the last iteration.
    effective_batch: u64,
    /// The number of iterations with different batches, and a description of the first one.
    unequal: u64,
    first_unequal: Option<String>,
}

impl Outcomes {
    pub(super) fn iteration_ended(&mut self, number: u64, ranks: &[Rank<'_>]) {
        if ranks
            .iter()
            .any(|rank| rank.totals.counts.iterations < number)
        {
            return;
        }
        let batches: Vec<u64> = ranks
            .iter()
            .map(|rank| rank.totals.effective_batch)
            .collect();
        self.iterations += 1;
        self.effective_batch = batches.iter().sum();
        self.samples += self.effective_batch;
        if batches.iter().all(|batch| *batch == batches[0]) {
            return;
        }
        self.unequal += 1;
        self.first_unequal.get_or_insert_with(|| {
            let batches: Vec<String> = batches.iter().map(u64::to_string).collect();
            format!(
                "since iteration {number} the ranks' batches differ ({}): the mean over ranks is \
                 not the mean over samples, because a sample of a smaller batch counts more, \
                 unless the gradients are weighted",
                batches.join(", ")
            )
        });
    }
}

pub(super) fn conclude(
    ctx: &mut RunContext,
    step: &Step,
    train: &Train,
    mut ends: Vec<RankTotals>,
    matched: u64,
    outcomes: &Outcomes,
    mismatch: Option<Mismatch>,
) -> StepResult {
    let mut result = StepResult {
        reports: reports(train, &ends, matched, outcomes),
        tables: vec![table(&ends)],
        ..StepResult::default()
    };
    let recovery = merged(ends.iter_mut().map(|end| end.record.take()).collect());
    result.recovery = recovery.map(|record| Recovery {
        workload: Some(workload(train)),
        ..record
    });
    let failed = first_failure(&mut ends);
    ctx.values
        .rank_figures
        .insert(train.id.clone(), ends.iter().map(figures).collect());
    if let Some(mismatch) = mismatch {
        result.outcome = Outcome::Failed;
        let seen = mismatch.to_string();
        result.notes.extend(seen.lines().map(str::to_owned));
        let expected = "the same collectives in the same order from every rank";
        ctx.rig
            .note(Finding::new(Invariant::CollectivesMatch, expected, seen));
    } else {
        let retries = result.reports[&ReportKey::Retries];
        let became = batch_became(train, result.reports[&ReportKey::FinalBatch]);
        judge(
            ctx,
            step,
            train,
            (outcomes.iterations, retries, became),
            failed,
            &mut result,
        );
    }
    result.notes.extend(outcomes.first_unequal.clone());
    result
}

fn first_failure(ends: &mut [RankTotals]) -> Option<(AllocatorError, Option<FailedRequest>)> {
    ends.iter_mut().find_map(|end| match &end.ended {
        Some(End::GaveUp(error) | End::Refused(error)) => {
            Some((error.clone(), end.counts.failed_request.take()))
        }
        Some(End::Finished | End::Stopped) | None => None,
    })
}

fn reports(
    train: &Train,
    ends: &[RankTotals],
    matched: u64,
    outcomes: &Outcomes,
) -> BTreeMap<ReportKey, u64> {
    let of = |key: ReportKey| {
        ends.iter()
            .filter_map(move |end| end.recovery.get(&key))
            .copied()
    };
    let most = |key| of(key).max().unwrap_or(0);
    let sum = |key| of(key).sum();
    let least_batch = if outcomes.iterations == 0 {
        None
    } else {
        of(ReportKey::FinalBatch).min()
    };
    let throughput =
        u128::from(outcomes.samples) * 1_000_000_000 / u128::from(outcomes.time.0.max(1));
    BTreeMap::from([
        (ReportKey::Iterations, outcomes.iterations),
        (ReportKey::FirstBatch, train.batches[0]),
        (ReportKey::FinalBatch, least_batch.unwrap_or(0)),
        (ReportKey::EffectiveBatch, outcomes.effective_batch),
        (ReportKey::Attempts, most(ReportKey::Attempts)),
        (ReportKey::Retries, most(ReportKey::Retries)),
        (
            ReportKey::RetriesWithoutProgress,
            sum(ReportKey::RetriesWithoutProgress),
        ),
        (ReportKey::RetryTime, most(ReportKey::RetryTime)),
        (
            ReportKey::Ooms,
            ends.iter().map(|end| end.counts.ooms).sum(),
        ),
        (
            ReportKey::RetainedAfterOom,
            most(ReportKey::RetainedAfterOom),
        ),
        (ReportKey::GivenBack, sum(ReportKey::GivenBack)),
        (ReportKey::HostPeak, 0),
        (ReportKey::HostCopied, 0),
        (ReportKey::Throughput, throughput as u64),
        (ReportKey::Collectives, matched),
        (ReportKey::UnequalBatches, outcomes.unequal),
        (
            ReportKey::WaitedForRanks,
            ends.iter().map(|end| end.waited.0).max().unwrap_or(0),
        ),
    ])
}

fn figures(end: &RankTotals) -> RankFigures {
    let mut reports = end.recovery.clone();
    let own = [
        (ReportKey::EffectiveBatch, end.effective_batch),
        (ReportKey::Ooms, end.counts.ooms),
        (ReportKey::Collectives, end.called),
        (ReportKey::WaitedForRanks, end.waited.0),
    ];
    reports.extend(own);
    reports.entry(ReportKey::FinalBatch).or_insert(0);
    RankFigures {
        stats: end.stats,
        reports,
    }
}

fn table(ends: &[RankTotals]) -> Table {
    let columns = [
        "rank",
        "limit",
        "peak allocated",
        "peak reserved",
        "batch",
        "attempts",
        "OOMs",
        "collectives called",
    ];
    let row = |(rank, end): (usize, &RankTotals)| {
        let size = |bytes| Bytes(bytes).to_string();
        vec![
            rank.to_string(),
            end.limit.to_string(),
            size(end.stats.allocated_bytes.all.peak),
            size(end.stats.reserved_bytes.all.peak),
            end.effective_batch.to_string(),
            end.recovery
                .get(&ReportKey::Attempts)
                .copied()
                .unwrap_or(0)
                .to_string(),
            end.counts.ooms.to_string(),
            end.called.to_string(),
        ]
    };
    Table {
        title: "Ranks".to_owned(),
        columns: columns.map(str::to_owned).to_vec(),
        rows: ends.iter().enumerate().map(row).collect(),
    }
}

/// Merges the records of all ranks' policies into one; attempts name their rank.
fn merged(records: Vec<Option<Recovery>>) -> Option<Recovery> {
    let records: Vec<Recovery> = records.into_iter().collect::<Option<_>>()?;
    let most = |of: fn(&Recovery) -> u64| records.iter().map(of).max().unwrap_or(0);
    let mut all = Recovery {
        policies: records.first()?.policies.clone(),
        attempts: most(|record| record.attempts),
        retries: most(|record| record.retries),
        without_progress: records.iter().map(|record| record.without_progress).sum(),
        unlisted: records.iter().map(|record| record.unlisted).sum(),
        lost: records.iter().filter_map(|record| record.lost).max(),
        given_back: records.iter().map(|record| record.given_back).sum(),
        retained: records
            .iter()
            .map(|record| record.retained)
            .max()
            .unwrap_or_default(),
        trained: trained(&records),
        ..Recovery::default()
    };
    for (rank, record) in records.into_iter().enumerate() {
        for attempt in record.listed {
            all.list(Attempt {
                asked: format!("rank {rank}: {}", attempt.asked),
                ..attempt
            });
        }
    }
    Some(all)
}

/// The total over all ranks, with the plan of the rank with the smallest batch.
fn trained(records: &[Recovery]) -> Option<Trained> {
    let all: Vec<&Trained> = records
        .iter()
        .map(|record| record.trained.as_ref())
        .collect::<Option<_>>()?;
    let least = all.iter().min_by_key(|trained| trained.final_batch)?;
    Some(Trained {
        final_batch: least.final_batch,
        effective_batch: all.iter().map(|trained| trained.effective_batch).sum(),
        samples: all.iter().map(|trained| trained.samples).sum(),
        plan: least.plan.clone(),
    })
}
