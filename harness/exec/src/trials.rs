//! Many runs of one program, on simulated GPUs or a real one, that differ in one thing: in which attempt to get memory fails, in how much memory there is, or in
//! the settings of PyTorch's allocator.
//!
//! A [`Trial`] is what differs, and [`Observed`] is what was seen of its run. [`runner`] makes the one from the other; the rest takes it as a function:
//! [`faults`] lets attempts fail one after the other (those of [`which`]) and judges how the program recovers, [`least`] looks for the least memory, and
//! [`settings`] compares settings.

pub mod faults;
pub mod least;
pub mod observed;
pub mod runner;
pub mod settings;
pub mod which;

#[cfg(test)]
mod made_up;

use harness_allocator::units::Bytes;
use harness_gpu_settings::settings::{AddressOrder, Fault};

pub use observed::Observed;

/// What runs of one program differ in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trial {
    /// Memory of each simulated GPU; what each process gets of a real one.
    pub memory: Bytes,
    /// Which addresses allocations get; `None` on a real GPU, where its driver decides.
    pub addresses: Option<AddressOrder>,
    /// Settings of PyTorch's allocator; `None` for those of the environment.
    pub alloc_conf: Option<String>,
    /// Attempts to get memory that fail.
    pub faults: Vec<Fault>,
}

/// Runs the program once and tells what was seen; `None` where the user interrupted. Several calls may be under way at one time.
pub trait Run: Sync {
    /// Why the program cannot be run at all.
    type Error: Send;

    /// Runs the program once.
    ///
    /// # Errors
    /// That it cannot be run.
    fn run(&self, trial: &Trial) -> Result<Option<Observed>, Self::Error>;
}

/// A program, how it is run first, and how many of its runs are made at one time.
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Program<'a, R: Run> {
    pub runner: &'a R,
    /// The first run, from which the others differ.
    pub trial: Trial,
    /// What was seen of the first run.
    pub first: &'a Observed,
    /// Runs at one time.
    pub jobs: usize,
    /// Told after each run.
    pub progress: &'a (dyn Fn() + Sync),
}

impl<R: Run> Program<'_, R> {
    /// What is seen of trials, in their order; `None` for those that an interrupt left out.
    fn run(&self, trials: &[Trial]) -> Result<Vec<Option<Observed>>, R::Error> {
        each(self.jobs, trials, self.progress, |trial| self.runner.run(trial))
    }
}

/// Makes a run for each of some cases, at most so many at one time, and tells `progress` of each that is done. What came of them stands in
/// the order of the cases.
///
/// # Errors
/// What `run` says of the first case that it cannot run.
pub fn each<C: Sync, R: Send, E: Send>(
    jobs: usize,
    cases: &[C],
    progress: &(dyn Fn() + Sync),
    run: impl Fn(&C) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    harness_explain::grid::in_parallel_by(jobs, cases, |case| {
        let answer = run(case)?;
        progress();
        Ok(answer)
    })
}
