//! [`RangeMap`]: values for disjoint address ranges. Adjacent ranges of equal value are one entry.

use std::collections::BTreeMap;

/// A map from disjoint, half-open address ranges to values. Each operation costs O(log n) plus the entries it touches.
#[derive(Clone, Debug)]
pub(super) struct RangeMap<V> {
    /// From the start of a range to its end and value.
    entries: BTreeMap<u64, (u64, V)>,
}

impl<V> Default for RangeMap<V> {
    fn default() -> Self {
        Self { entries: BTreeMap::new() }
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
        for (_, (entry_end, found)) in self.entries.extract_if(start..=end, |&from, (_, found)| from < end || *found == value) {
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
        self.entries.get(&start).filter(|(entry_end, _)| *entry_end == end).map(|(_, value)| value)
    }

    /// The same, mutable. If the new value equals a neighbor's, the two entries are not merged.
    pub(super) fn exact_mut(&mut self, start: u64, end: u64) -> Option<&mut V> {
        self.entries.get_mut(&start).filter(|(entry_end, _)| *entry_end == end).map(|(_, value)| value)
    }

    /// Removes every value from `start..end`.
    pub(super) fn remove(&mut self, start: u64, end: u64) {
        let reaching_in = self.entries.range_mut(..start).next_back();
        let mut tail = reaching_in.and_then(|(_, (entry_end, value))| cut(entry_end, value, start, end));
        let inside = self.entries.extract_if(start..end, |_, _| true);
        tail = inside.fold(tail, |tail, (_, entry)| if entry.0 > end { Some(entry) } else { tail });
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
            let next = self.entries.range(cursor..end).next().map_or(end, |(&first, _)| first);
            if cursor < next {
                self.entries.insert(cursor, (next, V::default()));
            }
            let Some((entry_end, value)) = self.entries.get_mut(&cursor) else { break };
            change(value);
            cursor = *entry_end;
        }
    }

    /// The parts of `start..end` that have a value, in address order, as start, end and value.
    pub(super) fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64, &V)> {
        let reaching_in = self.entries.range(..start).next_back().filter(move |(_, (entry_end, _))| *entry_end > start);
        reaching_in
            .into_iter()
            .chain(self.entries.range(start..end))
            .map(move |(&first, (entry_end, value))| (first.max(start), (*entry_end).min(end), value))
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SPACE: usize = 48;

    #[derive(Clone, Debug)]
    enum Change {
        Insert(u64, u64, u8),
        Remove(u64, u64),
        Update(u64, u64, u8),
    }

    fn a_change() -> impl Strategy<Value = Change> {
        let range = (0..SPACE as u64 - 1).prop_flat_map(|start| (Just(start), start + 1..SPACE as u64));
        (0..3, range, 1_u8..4).prop_map(|(kind, (start, end), value)| match kind {
            0 => Change::Insert(start, end, value),
            1 => Change::Remove(start, end),
            _ => Change::Update(start, end, value),
        })
    }

    proptest! {
        #[test]
        fn a_range_map_is_an_array_with_a_value_an_address(changes in prop::collection::vec(a_change(), 1..40)) {
            let mut map = RangeMap::<u8>::default();
            let mut array = [None; SPACE];
            for change in changes {
                match change {
                    Change::Insert(start, end, value) => {
                        map.insert(start, end, value);
                        array[start as usize..end as usize].fill(Some(value));
                    }
                    Change::Remove(start, end) => {
                        map.remove(start, end);
                        array[start as usize..end as usize].fill(None);
                    }
                    Change::Update(start, end, by) => {
                        map.update(start, end, |value| *value = value.wrapping_mul(5).wrapping_add(by));
                        for value in &mut array[start as usize..end as usize] {
                            *value = Some(value.unwrap_or(0).wrapping_mul(5).wrapping_add(by));
                        }
                    }
                }
                let mut seen = [None; SPACE];
                for (start, end, &value) in map.overlapping(0, SPACE as u64) {
                    prop_assert!(seen[start as usize..end as usize].iter().all(Option::is_none), "entries overlap");
                    seen[start as usize..end as usize].fill(Some(value));
                }
                prop_assert_eq!(seen, array);
            }
            for (start, end) in [(0, 7), (5, 6), (13, 40)] {
                let inside: usize = map.overlapping(start, end).map(|(from, to, _)| (to - from) as usize).sum();
                let expected = array[start as usize..end as usize].iter().flatten().count();
                prop_assert_eq!(inside, expected);
            }
        }
    }

    #[test]
    fn neighbours_of_equal_value_are_one_entry() {
        let mut map = RangeMap::default();
        map.insert(0, 8, 'a');
        map.insert(16, 24, 'a');
        map.insert(8, 16, 'b');
        assert_eq!(map.entries.len(), 3);
        map.insert(8, 16, 'a');
        assert_eq!(map.entries.len(), 1);
    }
}
