use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::stats::{MemoryStats, StatKey};
use harness_scenario::{
    GrowthSite, MeasureName, Metric, Number, RankFigure, Readings, ReportKey, StepName,
    VariableName,
};

use super::RunContext;

/// Why a metric has no value. The text goes into the failed expectation.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum LookUpError {
    #[error("{0} is unknown: NVML does not report the memory of this process")]
    Unknown(String),
    #[error("{0} was not reported")]
    NotReported(String),
    #[error(
        "{0} is unknown: no process of the program reported counters of torch; either none \
         imported torch, or it ended without its exit handlers"
    )]
    NotTold(String),
    #[error("{0} is unknown: the program was not run")]
    NotRun(String),
    #[error("{0} has no earlier value to compare with")]
    FirstTime(String),
    #[error("{0} is known only after all allocators have run")]
    OtherArm(String),
}

/// The values that expressions read, besides those of the rig and of processes.
#[derive(Default)]
pub(crate) struct Values {
    pub(super) variables: BTreeMap<VariableName, Number>,
    pub(super) measures: BTreeMap<MeasureName, Readings>,
    /// The bytes of each site at a measure, if sites are tracked. Nothing for the measure `start`.
    pub(crate) sites_at: BTreeMap<MeasureName, Vec<u64>>,
    /// The last value of each `growth(…)`, by its position.
    last_seen: BTreeMap<GrowthSite, u64>,
    pub(crate) reports: BTreeMap<StepName, BTreeMap<ReportKey, u64>>,
    pub(crate) rank_figures: BTreeMap<StepName, Vec<RankFigures>>,
    /// The torch counters of programs, by the name of their step. Empty if no process reported
    /// them.
    pub(crate) torch_stats: BTreeMap<StepName, BTreeMap<StatKey, u64>>,
    /// What storms without a failed request need for one.
    pub(crate) storm_advice: BTreeMap<StepName, String>,
    /// Optional programs that cannot run here.
    pub(crate) not_run: BTreeSet<StepName>,
    pub(crate) figures: Figures,
}

#[derive(Clone, Debug)]
pub(crate) struct RankFigures {
    pub(crate) stats: MemoryStats,
    pub(crate) reports: BTreeMap<ReportKey, u64>,
}

/// The figures of one allocator for the scenario's
/// [comparisons](harness_scenario::Scenario::comparisons), by comparison and by index within it.
pub(crate) type Figures = BTreeMap<(usize, usize), Number>;

impl RunContext {
    /// The value of a metric. Current values come from `now`, so all metrics of one expression
    /// describe the same moment.
    pub(crate) fn look_up(&self, metric: &Metric, now: &Readings) -> Result<Number, LookUpError> {
        let not_reported = || LookUpError::NotReported(metric.to_string());
        let value = match metric {
            Metric::Variable(name, _) => {
                return self
                    .values
                    .variables
                    .get(name)
                    .copied()
                    .ok_or_else(not_reported);
            }
            Metric::Now(account) => now.get(*account),
            Metric::At(name, account) => {
                let readings = self.values.measures.get(name);
                readings.ok_or_else(not_reported)?.get(*account)
            }
            Metric::Program(program, key) => Some(
                self.rig
                    .stats_of(self.handles.programs[program.index()])
                    .get(*key),
            ),
            Metric::Rank(step, rank, figure) => {
                let ranks = self.values.rank_figures.get(step);
                let figures = ranks.and_then(|ranks| ranks.get(*rank));
                let figures = figures.ok_or_else(not_reported)?;
                let value = match figure {
                    RankFigure::Report(key) => figures.reports.get(key).copied(),
                    RankFigure::Stat(key) => Some(figures.stats.get(*key)),
                };
                return value.map(whole).ok_or_else(not_reported);
            }
            Metric::Process(process, account) => {
                let readings = self.processes.readings(process);
                readings.ok_or_else(not_reported)?.get(*account)
            }
            Metric::Growth(site, account) => {
                let value = now
                    .get(*account)
                    .ok_or_else(|| LookUpError::Unknown(metric.to_string()))?;
                let last = self.values.last_seen.get(site);
                let last = last.ok_or_else(|| LookUpError::FirstTime(metric.to_string()))?;
                return Ok(Number::from_integer(i128::from(value) - i128::from(*last)));
            }
            Metric::Report(step, _) | Metric::Torch(step, _)
                if self.values.not_run.contains(step) =>
            {
                return Err(LookUpError::NotRun(metric.to_string()));
            }
            Metric::Report(step, key) => {
                let reports = self.values.reports.get(step);
                let value = reports.and_then(|reports| reports.get(key));
                return value.copied().map(whole).ok_or_else(not_reported);
            }
            Metric::Torch(step, key) => {
                let stats = self.values.torch_stats.get(step).ok_or_else(not_reported)?;
                return stats
                    .get(key)
                    .copied()
                    .map(whole)
                    .ok_or_else(|| LookUpError::NotTold(metric.to_string()));
            }
            Metric::Arm(..) => return Err(LookUpError::OtherArm(metric.to_string())),
        };
        value
            .map(whole)
            .ok_or_else(|| LookUpError::Unknown(metric.to_string()))
    }

    /// Remembers the values that the `growth(…)` metrics of an expectation compare with next
    /// time.
    pub(crate) fn remember<'m>(
        &mut self,
        metrics: impl Iterator<Item = &'m Metric>,
        now: &Readings,
    ) {
        for metric in metrics {
            if let Metric::Growth(site, account) = metric
                && let Some(value) = now.get(*account)
            {
                self.values.last_seen.insert(*site, value);
            }
        }
    }
}

fn whole(value: u64) -> Number {
    Number::from_integer(i128::from(value))
}
