//! What the metrics of a scenario come to.

use harness_scenario::{Metric, Number, RankFigure, Readings};

use super::World;

/// Why a metric has no value: in words, for the failed expectation.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum LookUpError {
    /// The device cannot tell.
    #[error("{0} is not known: NVML does not tell what belongs to this process")]
    Unknown(String),
    /// The step did not report it.
    #[error("{0} was not reported")]
    NotReported(String),
    /// No process of a program told it.
    #[error("{0} is not known: no process of the program told counters of torch, since none imported it, or it was ended before it could")]
    NotTold(String),
    /// Its step was passed over: the program cannot be run here.
    #[error("{0} is not known: the program was not run")]
    NotRun(String),
    /// A growth has nothing to be compared with yet.
    #[error("{0} is seen for the first time")]
    FirstTime(String),
    /// It is of another arm.
    #[error("{0} is known when all allocators have run")]
    OtherArm(String),
}

impl World {
    /// The value of a metric. Those of the present are taken from `now`, so that all of one expression are of one moment.
    pub(crate) fn look_up(&self, metric: &Metric, now: &Readings) -> Result<Number, LookUpError> {
        let value = match metric {
            Metric::Variable(name, _) => {
                return self.variables.get(name).copied().ok_or_else(|| LookUpError::NotReported(metric.to_string()));
            }
            Metric::Now(account) => now.get(*account),
            Metric::At(name, account) => {
                let readings = self.measures.get(name).ok_or_else(|| LookUpError::NotReported(metric.to_string()))?;
                readings.get(*account)
            }
            Metric::Program(program, key) => Some(self.rig.stats_of(self.programs[program.index()]).get(*key)),
            Metric::Rank(step, rank, figure) => {
                let figures = self.rank_figures.get(step).and_then(|ranks| ranks.get(*rank));
                let figures = figures.ok_or_else(|| LookUpError::NotReported(metric.to_string()))?;
                let value = match figure {
                    RankFigure::Report(key) => figures.reports.get(key).copied(),
                    RankFigure::Stat(key) => Some(figures.stats.get(*key)),
                };
                return value.map(whole).ok_or_else(|| LookUpError::NotReported(metric.to_string()));
            }
            Metric::Process(process, account) => {
                let readings = self.processes.as_ref().and_then(|processes| processes.readings(process));
                readings.ok_or_else(|| LookUpError::NotReported(metric.to_string()))?.get(*account)
            }
            Metric::Growth(site, account) => {
                let value = now.get(*account).ok_or_else(|| LookUpError::Unknown(metric.to_string()))?;
                let last = self.last_seen.get(site).ok_or_else(|| LookUpError::FirstTime(metric.to_string()))?;
                return Ok(Number::from_integer(i128::from(value) - i128::from(*last)));
            }
            Metric::Report(step, _) | Metric::Torch(step, _) if self.not_run.contains(step) => {
                return Err(LookUpError::NotRun(metric.to_string()));
            }
            Metric::Report(step, key) => {
                let value = self.reports.get(step).and_then(|reports| reports.get(key)).copied();
                return value.map(whole).ok_or_else(|| LookUpError::NotReported(metric.to_string()));
            }
            Metric::Torch(step, key) => {
                let stats = self.torch_stats.get(step).ok_or_else(|| LookUpError::NotReported(metric.to_string()))?;
                return stats.get(key).copied().map(whole).ok_or_else(|| LookUpError::NotTold(metric.to_string()));
            }
            Metric::Arm(..) => return Err(LookUpError::OtherArm(metric.to_string())),
        };
        value.map(whole).ok_or_else(|| LookUpError::Unknown(metric.to_string()))
    }

    /// Remembers what the growths of an expectation are to be compared with the next time.
    pub(crate) fn remember<'m>(&mut self, metrics: impl Iterator<Item = &'m Metric>, now: &Readings) {
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
