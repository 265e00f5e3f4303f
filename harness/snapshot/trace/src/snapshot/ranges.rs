//! Sets of memory: [`AddressRanges`].

use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub struct AddressRanges(pub BTreeMap<u64, u64>);

impl AddressRanges {
    /// Adds a range and merges it with those that it overlaps or touches.
    pub fn insert(&mut self, mut start: u64, mut end: u64) {
        while let Some((&other, &other_end)) = self.0.range(..=end).next_back() {
            if other_end < start {
                break;
            }
            self.0.remove(&other);
            (start, end) = (start.min(other), end.max(other_end));
        }
        self.0.insert(start, end);
    }

    pub fn remove(&mut self, start: u64, end: u64) {
        while let Some((&other, &other_end)) = self.0.range(..end).next_back() {
            if other_end <= start {
                break;
            }
            self.0.remove(&other);
            if other_end > end {
                self.0.insert(end, other_end);
            }
            if other < start {
                self.0.insert(other, start);
            }
        }
    }

    pub fn overlap(&self, start: u64, end: u64) -> bool {
        self.0
            .range(..end)
            .next_back()
            .is_some_and(|(_, &other_end)| other_end > start)
    }

    /// Returns true if one range contains all of these bytes.
    pub fn contain(&self, start: u64, end: u64) -> bool {
        self.0
            .range(..=start)
            .next_back()
            .is_some_and(|(_, &other_end)| end <= other_end)
    }
}
