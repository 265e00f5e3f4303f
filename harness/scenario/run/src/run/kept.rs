//! Limits the steps of a long run in its record to the first and the last ones.

use std::collections::VecDeque;

/// The record keeps this many of the first steps. It only counts the steps between these and the
/// last ones.
const FIRST_STEPS: usize = 5_000;
/// The number of last steps in the record.
const LAST_STEPS: usize = 5_000;

pub(super) struct Steps<T> {
    keeps: bool,
    first: Vec<T>,
    last: VecDeque<T>,
    unrecorded: u64,
}

impl<T> Steps<T> {
    pub(super) const fn new() -> Self {
        Self {
            keeps: true,
            first: Vec::new(),
            last: VecDeque::new(),
            unrecorded: 0,
        }
    }

    /// Counts the steps without keeping any.
    pub(super) fn counted() -> Self {
        Self {
            keeps: false,
            ..Self::new()
        }
    }

    pub(super) const fn keeps(&self) -> bool {
        self.keeps
    }

    pub(super) const fn count(&mut self) {
        self.unrecorded += 1;
    }

    pub(super) fn has_room_in_front(&self) -> bool {
        self.first.len() < FIRST_STEPS
    }

    pub(super) fn push(&mut self, step: T) {
        if self.has_room_in_front() {
            self.first.push(step);
            return;
        }
        if self.last.len() == LAST_STEPS {
            self.last.pop_front();
            self.unrecorded += 1;
        }
        self.last.push_back(step);
    }

    pub(super) fn into_parts(self) -> (Vec<T>, u64) {
        (
            self.first.into_iter().chain(self.last).collect(),
            self.unrecorded,
        )
    }
}
