//! A table that only grows: any thread reads it without a lock, and adds to it what is not there yet.
//!
//! Keys are numbers given out in runs, so the low bits choose the bucket; a bucket is a chain of nodes that are made once and never move.

use std::sync::OnceLock;

/// See the module. `BUCKETS` is a power of two.
pub(super) struct Growing<V, const BUCKETS: usize> {
    buckets: Box<[Link<V>; BUCKETS]>,
}

/// The rest of a chain.
type Link<V> = OnceLock<Box<Node<V>>>;

struct Node<V> {
    key: u64,
    value: V,
    next: Link<V>,
}

impl<V, const BUCKETS: usize> Default for Growing<V, BUCKETS> {
    fn default() -> Self {
        const { assert!(BUCKETS.is_power_of_two(), "the low bits choose the bucket") };
        Self { buckets: Box::new(std::array::from_fn(|_| OnceLock::new())) }
    }
}

impl<V, const BUCKETS: usize> Growing<V, BUCKETS> {
    /// What is there under a key. A few reads, where there are not many more keys than buckets.
    #[inline]
    pub(super) fn get(&self, key: u64) -> Option<&V> {
        self.chain(key).find(|node| node.key == key).map(|node| &node.value)
    }

    /// The same, made where it is not there. Of several threads that come at once, one makes it and the others wait for that.
    #[inline]
    pub(super) fn get_or_insert(&self, key: u64, make: impl Fn() -> V) -> &V {
        match self.get(key) {
            Some(value) => value,
            None => self.insert(key, make),
        }
    }

    /// Everything by key.
    pub(super) fn sorted(&self) -> Vec<(u64, &V)> {
        let mut all: Vec<_> = (0..BUCKETS as u64).flat_map(|first| self.chain(first)).map(|node| (node.key, &node.value)).collect();
        all.sort_by_key(|&(key, _)| key);
        all
    }

    #[cold]
    fn insert(&self, key: u64, make: impl Fn() -> V) -> &V {
        let mut link = self.bucket(key);
        loop {
            let node = link.get_or_init(|| Box::new(Node { key, value: make(), next: OnceLock::new() }));
            if node.key == key {
                return &node.value;
            }
            link = &node.next;
        }
    }

    #[inline]
    fn chain(&self, key: u64) -> impl Iterator<Item = &Node<V>> {
        std::iter::successors(self.bucket(key).get(), |node| node.next.get()).map(|node| &**node)
    }

    #[inline]
    fn bucket(&self, key: u64) -> &Link<V> {
        &self.buckets[key as usize & (BUCKETS - 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::Growing;

    #[test]
    fn what_was_made_once_stays_and_is_found_by_key() {
        let table = Growing::<u64, 4>::default();
        assert_eq!((table.get(0), table.get(5)), (None, None));
        for key in [9, 1, 5, 1 << 40, 0] {
            assert_eq!(*table.get_or_insert(key, || key * 10), key * 10);
            assert_eq!(*table.get_or_insert(key, || 0), key * 10, "made once");
        }
        assert_eq!((table.get(5), table.get(13)), (Some(&50), None), "of one bucket");
        let keys: Vec<u64> = table.sorted().into_iter().map(|(key, _)| key).collect();
        assert_eq!(keys, [0, 1, 5, 9, 1 << 40]);
    }
}
