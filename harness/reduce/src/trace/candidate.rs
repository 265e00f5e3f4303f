//! A smaller trace: [`Candidate`].

use harness_allocator::allocator::caching::Config;

use super::Case;

/// A smaller trace that may fail like the original.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) case: Case,
    /// The index of each event in the original trace.
    pub(super) origins: Vec<usize>,
    /// The settings to compare with.
    pub(super) other: Config,
}

impl Candidate {
    /// A copy without some units.
    pub(super) fn without(&self, left_out: impl Fn(usize) -> bool, unit_of: &[Option<usize>]) -> Self {
        let is_kept = |event: usize| !unit_of[event].is_some_and(&left_out);
        let kept = || (0..self.case.events.len()).filter(|&event| is_kept(event));
        let events = kept().map(|event| self.case.events[event]).collect();
        let case = Case { events, ..self.case.clone() };
        Self { case, origins: kept().map(|event| self.origins[event]).collect(), other: self.other.clone() }
    }
}
