//! [`RangeMap`]: values for disjoint address ranges. Adjacent ranges of equal value are one entry.

use std::collections::BTreeMap;

#[derive(Clone, Debug)]
pub(super) struct RangeMap<V> {
    /// From the start of a range to its end and value.
    entries: BTreeMap<u64, (u64, V)>,
}

impl<V> Default for RangeMap<V> {
    fn default() -> Self {
        Self {
            entries: BTreeMap::new(),
        }
    }
}

impl<V: Clone + PartialEq> RangeMap<V> {
    /// Sets one value for all of `start..end`.
    pub(super) fn insert(&mut self, start: u64, end: u64, value: V) {
        debug_assert!(start < end, "the range is not empty");
        let (mut first, mut last) = (start, end);
        let mut tail = None;
        if let Some((&before, (entry_end, found))) = self.entries.range_mut(..start).next_back()
            && *entry_end >= start
        {
            if *found == value {
                (first, last) = (before, end.max(*entry_end));
            } else {
                tail = cut(entry_end, found, start, end);
            }
        }
        for (_, (entry_end, found)) in self.entries.extract_if(start..=end, |&from, (_, found)| {
            from < end || *found == value
        }) {
            if found == value {
                last = end.max(entry_end);
            } else if entry_end > end {
                tail = Some((entry_end, found));
            }
        }
        self.entries.insert(first, (last, value));
        self.entries.extend(tail.map(|tail| (end, tail)));
    }

    /// The value of `start..end` if that is exactly one entry.
    pub(super) fn exact(&self, start: u64, end: u64) -> Option<&V> {
        self.entries
            .get(&start)
            .filter(|(entry_end, _)| *entry_end == end)
            .map(|(_, value)| value)
    }

    /// The same, mutable. If the new value equals a neighbor's, the two entries are not merged.
    pub(super) fn exact_mut(&mut self, start: u64, end: u64) -> Option<&mut V> {
        self.entries
            .get_mut(&start)
            .filter(|(entry_end, _)| *entry_end == end)
            .map(|(_, value)| value)
    }

    /// Removes every value from `start..end`.
    pub(super) fn remove(&mut self, start: u64, end: u64) {
        let reaching_in = self.entries.range_mut(..start).next_back();
        let mut tail =
            reaching_in.and_then(|(_, (entry_end, value))| cut(entry_end, value, start, end));
        let inside = self.entries.extract_if(start..end, |_, _| true);
        tail = inside.fold(
            tail,
            |tail, (_, entry)| if entry.0 > end { Some(entry) } else { tail },
        );
        self.entries.extend(tail.map(|tail| (end, tail)));
    }

    /// Updates the values of `start..end`. Parts without a value get the default first.
    pub(super) fn update(&mut self, start: u64, end: u64, mut change: impl FnMut(&mut V))
    where
        V: Default,
    {
        if let Some(value) = self.exact_mut(start, end) {
            change(value);
            return;
        }
        self.split(start);
        self.split(end);
        let mut cursor = start;
        while cursor < end {
            let next = self
                .entries
                .range(cursor..end)
                .next()
                .map_or(end, |(&first, _)| first);
            if cursor < next {
                self.entries.insert(cursor, (next, V::default()));
            }
            let Some((entry_end, value)) = self.entries.get_mut(&cursor) else {
                break;
            };
            change(value);
            cursor = *entry_end;
        }
    }

    /// The parts of `start..end` that have a value, in address order, as start, end and value.
    pub(super) fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64, &V)> {
        let reaching_in = self
            .entries
            .range(..start)
            .next_back()
            .filter(move |(_, (entry_end, _))| *entry_end > start);
        reaching_in
            .into_iter()
            .chain(self.entries.range(start..end))
            .map(move |(&first, (entry_end, value))| {
                (first.max(start), (*entry_end).min(end), value)
            })
    }

    /// Splits the entry that contains `at`.
    fn split(&mut self, at: u64) {
        if let Some((_, (end, value))) = self.entries.range_mut(..at).next_back()
            && *end > at
        {
            let tail = (std::mem::replace(end, at), value.clone());
            self.entries.insert(at, tail);
        }
    }
}

/// Cuts the entry that extends past `start` there. Its part after `end` becomes a separate entry.
fn cut<V: Clone>(entry_end: &mut u64, value: &V, start: u64, end: u64) -> Option<(u64, V)> {
    if *entry_end <= start {
        return None;
    }
    let before = std::mem::replace(entry_end, start);
    (before > end).then(|| (before, value.clone()))
}

#[cfg(test)]
mod tests;
