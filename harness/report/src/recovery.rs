//! The recovery table: one row per step with recovery policies, and a rank among trainings of the
//! same workload.

use std::cmp::Ordering;

use harness_allocator::{device::Clock, units::Nanos};

use super::words::{self, Grid};
use super::{ArmGroup, ScenarioOnDevice};
use harness_record::{Attempt, HostUse, Outcome, Recovery, StepRecord, Trained};

const MOST_ROWS: usize = 50;

pub(super) struct Row<'a> {
    pub(super) allocator: &'a str,
    pub(super) step: &'a StepRecord,
    pub(super) recovery: &'a Recovery,
    /// Rank among comparable trainings of the arm, counted from 1, and their number. `None` if
    /// there is no other to compare with.
    rank: Option<(usize, usize)>,
}

pub(super) fn rows<'a>(on_device: &ScenarioOnDevice<'a>) -> Vec<Row<'a>> {
    let rows: Vec<Row<'a>> = on_device.arms.iter().flat_map(of_arm).collect();
    if rows.iter().any(|row| !row.recovery.listed.is_empty()) {
        rows
    } else {
        Vec::new()
    }
}

fn of_arm<'a>(arm: &ArmGroup<'a>) -> Vec<Row<'a>> {
    let steps = arm
        .shown()
        .steps
        .iter()
        .filter_map(|step| Some((step, step.recovery.as_ref()?)));
    let mut rows: Vec<Row<'a>> = steps
        .map(|(step, recovery)| Row {
            allocator: arm.allocator,
            step,
            recovery,
            rank: None,
        })
        .take(MOST_ROWS)
        .collect();
    for index in 0..rows.len() {
        let alternatives: Vec<&Row<'_>> = rows
            .iter()
            .filter(|other| other.is_alternative_to(&rows[index]))
            .collect();
        if alternatives.len() > 1 {
            let better = alternatives
                .iter()
                .filter(|other| other.compare(&rows[index]) == Ordering::Greater)
                .count();
            rows[index].rank = Some((better + 1, alternatives.len()));
        }
    }
    rows
}

fn is_finished_training(step: &StepRecord) -> bool {
    step.kind == "train" && matches!(step.outcome, Outcome::Fits { .. })
}

impl Row<'_> {
    fn trained(&self) -> Option<&Trained> {
        self.recovery.trained.as_ref()
    }

    /// Samples per second over the whole step.
    fn throughput(&self) -> Option<f64> {
        let seconds = self
            .step
            .duration
            .filter(|duration| *duration > Nanos::ZERO)?
            .0 as f64
            / 1e9;
        Some(self.trained()?.samples as f64 / seconds)
    }

    /// Returns whether both completed and trained the same model from the same first batch. They
    /// then differ in their policies only.
    fn is_alternative_to(&self, other: &Self) -> bool {
        let workload = |row: &Self| {
            Some((
                row.recovery.workload.clone(),
                row.recovery.listed.first()?.asked.clone(),
            ))
        };
        [self, other]
            .iter()
            .all(|row| is_finished_training(row.step))
            && workload(self).is_some()
            && workload(self) == workload(other)
    }

    fn compare(&self, other: &Self) -> Ordering {
        let batch = |row: &Self| row.trained().map_or(0, |trained| trained.effective_batch);
        let throughput = |row: &Self| row.throughput().unwrap_or(0.0);
        throughput(self)
            .total_cmp(&throughput(other))
            .then_with(|| batch(self).cmp(&batch(other)))
    }

    fn cells(&self) -> Vec<String> {
        let HostUse { peak, copied } = self.recovery.host;
        let of_training =
            |figure: fn(&Trained) -> u64| words::or_nothing(self.trained().map(figure));
        vec![
            self.allocator.to_owned(),
            words::step_name(self.step),
            self.recovery.policies.clone(),
            words::outcome(&self.step.outcome),
            words::or_nothing(self.rank.map(|(rank, of)| format!("{rank} of {of}"))),
            self.recovery.attempts.to_string(),
            words::or_nothing(self.recovery.lost),
            words::size(self.recovery.given_back),
            words::size(self.recovery.retained),
            of_training(|trained| trained.final_batch),
            of_training(|trained| trained.effective_batch),
            words::or_nothing(
                self.throughput()
                    .map(|samples| format!("{samples:.1} samples/s")),
            ),
            words::or_nothing(self.uses_host().then(|| {
                format!(
                    "{} at the peak, {} copied",
                    words::size(peak),
                    words::size(copied)
                )
            })),
        ]
    }

    fn uses_host(&self) -> bool {
        self.recovery.host != HostUse::default()
    }

    pub(super) fn attempts(&self) -> Grid {
        let cells = |attempt: &Attempt| {
            let failed = attempt.failed.clone().unwrap_or_else(|| "none".to_owned());
            let gave_up = attempt.failed.as_ref().map(|_| "gave up");
            vec![
                attempt.asked.clone(),
                failed,
                words::or_nothing(attempt.then.as_deref().or(gave_up)),
                words::or_nothing(attempt.time),
            ]
        };
        let more = words::count(self.recovery.unlisted, "more attempt");
        let more = (self.recovery.unlisted > 0).then(|| {
            vec![
                format!("… {more} not recorded"),
                String::new(),
                String::new(),
                String::new(),
            ]
        });
        Grid::new(
            "lllr",
            ["request", "error", "next action", "time"],
            self.recovery.listed.iter().map(cells).chain(more),
        )
    }
}

pub(super) fn grid(rows: &[Row<'_>], clock: Clock) -> Grid {
    let model = if clock == Clock::Simulated {
        "model "
    } else {
        ""
    };
    let [lost, throughput] = ["time lost", "throughput"].map(|head| format!("{model}{head}"));
    let heads = [
        "allocator",
        "step",
        "policies",
        "outcome",
        "rank",
        "attempts",
        &lost,
        "cache released",
        "leaked",
    ];
    let heads =
        heads
            .into_iter()
            .chain(["final batch", "effective batch", &throughput, "host memory"]);
    let grid = Grid::new("lllllr", heads, rows.iter().map(Row::cells));
    // Few steps use host memory, so the column is optional.
    grid.with_columns(|head| head != "host memory" || rows.iter().any(Row::uses_host))
}

pub(super) fn brief(rows: &[Row<'_>], clock: Clock) -> Grid {
    grid(rows, clock).with_columns(|head| {
        !["policies", "cache released", "leaked", "final batch"].contains(&head)
    })
}

#[cfg(test)]
mod tests;
