//! What a record keeps of a long run: its first and its last steps.

use std::collections::VecDeque;

/// Steps of a run that are recorded, from its beginning and from its end. Those between are counted.
const FIRST_STEPS: usize = 5_000;
/// See [`FIRST_STEPS`].
const LAST_STEPS: usize = 5_000;

/// What is kept of the first and the last steps of a run.
pub(super) struct Steps<T> {
    /// Whether any is kept.
    keeps: bool,
    first: Vec<T>,
    last: VecDeque<T>,
    unrecorded: u64,
}

impl<T> Steps<T> {
    pub(super) const fn new() -> Self {
        Self { keeps: true, first: Vec::new(), last: VecDeque::new(), unrecorded: 0 }
    }

    /// Of a run of which nobody looks at the steps: they are counted.
    pub(super) fn counted() -> Self {
        Self { keeps: false, ..Self::new() }
    }

    /// Whether any is kept.
    pub(super) const fn keeps(&self) -> bool {
        self.keeps
    }

    /// One more, which is not kept.
    pub(super) const fn count(&mut self) {
        self.unrecorded += 1;
    }

    /// Whether the next one is among the first that are kept.
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

    /// Those that are kept, and how many are not.
    pub(super) fn into_parts(self) -> (Vec<T>, u64) {
        (self.first.into_iter().chain(self.last).collect(), self.unrecorded)
    }
}
