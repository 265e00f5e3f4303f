//! Many runs of one program that differ in one thing: the allocation attempt that fails, the amount
//! of memory, or the allocator's settings.
//!
//! A [`Trial`] describes a run, and [`Observed`] is its outcome. [`runner`] runs trials, as
//! [`copies`] of one start of the program if possible. [`faults`] fails attempts one after the
//! other (selected by [`which`]) and classifies the recovery. [`least`] searches for the least
//! sufficient memory, which [`replay`] predicts. [`settings`] compares settings. A [`Shard`] runs a
//! part of the cases, and [`merge`] combines the parts of one [`identity`].

pub mod copies;
pub mod faults;
pub mod identity;
pub mod largest;
pub mod least;
pub mod merge;
pub mod observed;
pub mod part;
pub mod replay;
pub mod runner;
pub mod settings;
pub mod which;

use harness_allocator::units::Bytes;
use harness_base::shard::Shard;
use harness_gpu_settings::limits::Limits;
use harness_gpu_settings::settings::{AddressOrder, Fault, Settings};

use self::part::Part;
use crate::machine::Machine;
pub use observed::Observed;

/// The files with the output of a run.
const OUTPUTS: [&str; 2] = ["stdout", "stderr"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trial {
    /// Memory of each simulated GPU, or the limit of each process on a real one.
    pub memory: Bytes,
    /// The address order of allocations; `None` on a real GPU, where the driver decides.
    pub addresses: Option<AddressOrder>,
    /// Settings of PyTorch's allocator; `None` for those of the environment.
    pub alloc_conf: Option<String>,
    /// Allocation attempts that fail.
    pub faults: Vec<Fault>,
    /// The only device whose attempts count, which is that of one rank.
    pub faulty_device: Option<u32>,
}

impl Machine {
    pub fn trial(&self, alloc_conf: Option<&str>) -> Trial {
        let addresses = match self {
            Self::Simulated(settings) => Some(settings.addresses),
            Self::Real(..) => None,
        };
        Trial {
            memory: self.memory(),
            addresses,
            alloc_conf: alloc_conf.map(str::to_owned),
            faults: self.injected().0.to_vec(),
            faulty_device: None,
        }
    }

    /// Returns this machine with the parameters of a trial.
    pub(crate) fn of_trial(&self, trial: &Trial) -> Self {
        let (memory, faults) = (trial.memory, trial.faults.clone());
        match self {
            Self::Simulated(settings) => {
                let addresses = trial.addresses.unwrap_or(settings.addresses);
                Self::Simulated(Settings {
                    memory,
                    addresses,
                    faults,
                    faulty_device: trial.faulty_device,
                    ..settings.clone()
                })
            }
            Self::Real(ordinal, limits) => Self::Real(
                *ordinal,
                Limits {
                    memory: Some(memory),
                    faults,
                    ..limits.clone()
                },
            ),
        }
    }
}

/// A program, its first run, and the number of parallel runs. `E` says why it cannot be run.
pub struct TrialProgram<'a, E> {
    /// Runs the program once. Calls may run in parallel. Returns `None` if the user interrupted it.
    pub run: &'a (dyn Fn(&Trial) -> Result<Option<Observed>, E> + Sync),
    pub trial: Trial,
    pub first: &'a Observed,
    /// Predicts a run up to its first out of memory error; `None` if that is unknown.
    pub predict: &'a (dyn Fn(&Trial) -> Option<Observed> + Sync),
    /// Why runs are not predicted, if they should be. The text follows the words "the program".
    pub unpredicted: Option<&'static str>,
    /// Run only the cases of this shard.
    pub shard: Option<Shard>,
    pub jobs: usize,
    /// Called after each run.
    pub progress: &'a (dyn Fn() + Sync),
}

impl<E: Send> TrialProgram<'_, E> {
    /// Splits off the cases of other shards. Returns the part for the report, if there are shards.
    fn keep_shard<C>(&self, cases: &mut Vec<C>, name: impl Fn(&C) -> String) -> Option<Part> {
        let shard = self.shard?;
        let names = cases.iter().map(&name).collect();
        cases.retain(|case| shard.has(&name(case)));
        Some(Part { shard, names })
    }

    /// Runs the trials and returns their outcomes in order; `None` for runs skipped after an
    /// interrupt. If the ranks meet at a port, the first trial runs alone. If it uses the same
    /// port, so do the others: ranks of parallel runs would meet. A run that could not use a port
    /// runs again, alone.
    fn run(&self, trials: &[Trial]) -> Result<Vec<Option<Observed>>, E> {
        let in_order = |jobs, trials| each(jobs, trials, self.progress, self.run);
        let (one, rest) = trials
            .split_at(usize::from(self.jobs > 1 && self.first.port.is_some()).min(trials.len()));
        let mut runs = in_order(1, one)?;
        let is_free =
            |run: &Option<Observed>| run.as_ref().is_none_or(|run| run.port != self.first.port);
        runs.extend(in_order(
            if runs.iter().all(is_free) {
                self.jobs
            } else {
                1
            },
            rest,
        )?);
        if self.jobs > 1 {
            // Some launchers use a port that the hook does not see.
            for (trial, run) in trials.iter().zip(&mut runs) {
                if run.as_ref().is_some_and(Observed::lacks_port) {
                    *run = (self.run)(trial)?;
                }
            }
        }
        Ok(runs)
    }
}

/// Runs each case, at most `jobs` in parallel, and calls `progress` after each. Returns the
/// outcomes in the order of the cases, or the error of the first case that failed to run.
pub fn each<C: Sync, R: Send, E: Send>(
    jobs: usize,
    cases: &[C],
    progress: &(dyn Fn() + Sync),
    run: impl Fn(&C) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    harness_base::parallel::in_parallel_by(jobs, cases, |case| {
        let answer = run(case)?;
        progress();
        Ok(answer)
    })
}
