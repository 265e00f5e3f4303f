//! A table that any thread reads without a lock. Entries are made on first use and never move; an entry that is not needed any more is kept
//! for the next key.
//!
//! Keys are numbers given out in runs, so the low bits choose the bucket; a bucket is a chain of entries.

use std::sync::OnceLock;

use super::sync::{AtomicU64, Lock, Ordering};

/// The key of an entry that is retired. No caller uses it.
const RETIRED: u64 = u64::MAX;

/// A hash table of chains. `BUCKETS` is a power of two.
pub(super) struct Table<V, const BUCKETS: usize> {
    buckets: Box<[Link<V>; BUCKETS]>,
    /// Held while an entry is made or gets another key. Nothing else is locked by its holder.
    changes: Lock<()>,
}

/// The rest of a chain.
type Link<V> = OnceLock<Box<Entry<V>>>;

/// What a value says of the keys it had before is for the value to know: keys need no ordering of their own.
struct Entry<V> {
    key: AtomicU64,
    value: V,
    next: Link<V>,
}

impl<V> Entry<V> {
    #[inline]
    fn key(&self) -> u64 {
        self.key.load(Ordering::Relaxed)
    }
}

impl<V, const BUCKETS: usize> Default for Table<V, BUCKETS> {
    fn default() -> Self {
        const { assert!(BUCKETS.is_power_of_two(), "the low bits choose the bucket") };
        Self { buckets: Box::new(std::array::from_fn(|_| OnceLock::new())), changes: Lock::new(()) }
    }
}

impl<V, const BUCKETS: usize> Table<V, BUCKETS> {
    /// The value of a key. A few reads, where there are not many more keys than buckets.
    #[inline]
    pub(super) fn get(&self, key: u64) -> Option<&V> {
        self.chain(key).find(|entry| entry.key() == key).map(|entry| &entry.value)
    }

    /// The value of a key, from a retired entry of its bucket or made where there is none. Of several threads that come at once, one makes
    /// it and the others wait for that.
    #[inline]
    pub(super) fn get_or_insert(&self, key: u64, make: impl Fn() -> V) -> &V {
        match self.get(key) {
            Some(value) => value,
            None => self.insert(key, make),
        }
    }

    /// Gives a key up. Its entry keeps the value for another key.
    pub(super) fn retire(&self, key: u64) {
        let _changing = self.changes.lock();
        if let Some(entry) = self.chain(key).find(|entry| entry.key() == key) {
            entry.key.store(RETIRED, Ordering::Relaxed);
        }
    }

    /// Keys and values, in the order of keys.
    pub(super) fn by_key(&self) -> Vec<(u64, &V)> {
        let mut all: Vec<_> = self.entries().map(|entry| (entry.key(), &entry.value)).filter(|&(key, _)| key != RETIRED).collect();
        all.sort_by_key(|&(key, _)| key);
        all
    }

    /// All values, those of retired entries included.
    pub(super) fn values(&self) -> impl Iterator<Item = &V> {
        self.entries().map(|entry| &entry.value)
    }

    #[cold]
    fn insert(&self, key: u64, make: impl Fn() -> V) -> &V {
        let _changing = self.changes.lock();
        // Another thread may have made it meanwhile.
        if let Some(value) = self.get(key) {
            return value;
        }
        if let Some(entry) = self.chain(key).find(|entry| entry.key() == RETIRED) {
            entry.key.store(key, Ordering::Relaxed);
            return &entry.value;
        }
        let mut link = self.bucket(key);
        while let Some(entry) = link.get() {
            link = &entry.next;
        }
        &link.get_or_init(|| Box::new(Entry { key: AtomicU64::new(key), value: make(), next: OnceLock::new() })).value
    }

    fn entries(&self) -> impl Iterator<Item = &Entry<V>> {
        (0..BUCKETS as u64).flat_map(|first| self.chain(first))
    }

    #[inline]
    fn chain(&self, key: u64) -> impl Iterator<Item = &Entry<V>> {
        std::iter::successors(self.bucket(key).get(), |entry| entry.next.get()).map(|entry| &**entry)
    }

    #[inline]
    fn bucket(&self, key: u64) -> &Link<V> {
        &self.buckets[key as usize & (BUCKETS - 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_one_schedule(test: impl Fn() + Send + Sync + 'static) {
        shuttle::check_random(test, 1);
    }

    #[test]
    fn what_was_made_once_stays_and_is_found_by_key() {
        in_one_schedule(|| {
            let table = Table::<u64, 4>::default();
            assert_eq!((table.get(0), table.get(5)), (None, None));
            for key in [9, 1, 5, 1 << 40, 0] {
                assert_eq!(*table.get_or_insert(key, || key * 10), key * 10);
                assert_eq!(*table.get_or_insert(key, || 0), key * 10, "made once");
            }
            assert_eq!((table.get(5), table.get(13)), (Some(&50), None), "of one bucket");
            let keys: Vec<u64> = table.by_key().into_iter().map(|(key, _)| key).collect();
            assert_eq!(keys, [0, 1, 5, 9, 1 << 40]);
        });
    }

    #[test]
    fn a_retired_entry_serves_the_next_key_of_its_bucket() {
        in_one_schedule(|| {
            let table = Table::<u64, 4>::default();
            for key in 0..1000 {
                table.get_or_insert(key, || key);
                table.retire(key);
                assert_eq!(table.get(key), None);
            }
            assert_eq!((table.values().count(), table.by_key().len()), (4, 0));
            assert_eq!(*table.get_or_insert(1001, || 7), 1, "the entry that key 1 made");
        });
    }
}
