use harness_scenario::{Metric, Number, RankFigure, Readings};

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
         imported torch, or it was killed before it could"
    )]
    NotTold(String),
    #[error("{0} is unknown: the program was not run")]
    NotRun(String),
    #[error("{0} has no earlier value to compare with")]
    FirstTime(String),
    #[error("{0} is known only after all allocators have run")]
    OtherArm(String),
}

impl RunContext {
    /// The value of a metric. Current values come from `now`, so all metrics of one expression
    /// describe the same moment.
    pub(crate) fn look_up(&self, metric: &Metric, now: &Readings) -> Result<Number, LookUpError> {
        let not_reported = || LookUpError::NotReported(metric.to_string());
        let value = match metric {
            Metric::Variable(name, _) => {
                return self.variables.get(name).copied().ok_or_else(not_reported);
            }
            Metric::Now(account) => now.get(*account),
            Metric::At(name, account) => self
                .measures
                .get(name)
                .ok_or_else(not_reported)?
                .get(*account),
            Metric::Program(program, key) => {
                Some(self.rig.stats_of(self.programs[program.index()]).get(*key))
            }
            Metric::Rank(step, rank, figure) => {
                let figures = self
                    .rank_figures
                    .get(step)
                    .and_then(|ranks| ranks.get(*rank));
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
                let last = self
                    .last_seen
                    .get(site)
                    .ok_or_else(|| LookUpError::FirstTime(metric.to_string()))?;
                return Ok(Number::from_integer(i128::from(value) - i128::from(*last)));
            }
            Metric::Report(step, _) | Metric::Torch(step, _) if self.not_run.contains(step) => {
                return Err(LookUpError::NotRun(metric.to_string()));
            }
            Metric::Report(step, key) => {
                let value = self
                    .reports
                    .get(step)
                    .and_then(|reports| reports.get(key))
                    .copied();
                return value.map(whole).ok_or_else(not_reported);
            }
            Metric::Torch(step, key) => {
                let stats = self.torch_stats.get(step).ok_or_else(not_reported)?;
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
                self.last_seen.insert(*site, value);
            }
        }
    }
}

fn whole(value: u64) -> Number {
    Number::from_integer(i128::from(value))
}
