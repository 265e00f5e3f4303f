//! Stores each distinct value once: [`Unique`].

use std::borrow::Borrow;
use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::ops::Index;
use std::sync::Arc;

/// Distinct values, numbered in the order of their first use. In a table of lists, number 0 is the empty list.
pub(super) struct Unique<T: ?Sized> {
    all: Vec<Arc<T>>,
    ids: HashMap<Arc<T>, u32>,
    /// The result of the last lookup, which often repeats.
    last: u32,
}

impl<T: ?Sized> Clone for Unique<T> {
    fn clone(&self) -> Self {
        Self { all: self.all.clone(), ids: self.ids.clone(), last: self.last }
    }
}

impl<T> Default for Unique<T> {
    fn default() -> Self {
        Self { all: Vec::new(), ids: HashMap::new(), last: 0 }
    }
}

impl<T: Eq + Hash> Default for Unique<[T]> {
    fn default() -> Self {
        let empty: Arc<[T]> = Arc::new([]);
        Self { all: vec![Arc::clone(&empty)], ids: HashMap::from([(empty, 0)]), last: 0 }
    }
}

impl Default for Unique<str> {
    fn default() -> Self {
        Self { all: Vec::new(), ids: HashMap::new(), last: 0 }
    }
}

impl<T: fmt::Debug + ?Sized> fmt::Debug for Unique<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.all).finish()
    }
}

impl<T: PartialEq + ?Sized> PartialEq for Unique<T> {
    fn eq(&self, other: &Self) -> bool {
        self.all == other.all
    }
}

impl<T: Eq + ?Sized> Eq for Unique<T> {}

impl<T: ?Sized> Index<u32> for Unique<T> {
    type Output = T;

    fn index(&self, id: u32) -> &T {
        &self.all[id as usize]
    }
}

impl<T: Eq + Hash + ?Sized> Unique<T> {
    /// The number of a value, and whether the value is new.
    ///
    /// # Panics
    /// Panics at 2^32 distinct values.
    #[inline]
    pub(super) fn add(&mut self, value: impl Borrow<T> + Into<Arc<T>>) -> (u32, bool) {
        let wanted: &T = value.borrow();
        if self.all.get(self.last as usize).is_some_and(|last| **last == *wanted) {
            return (self.last, false);
        }
        if let Some(&known) = self.ids.get(wanted) {
            self.last = known;
            return (known, false);
        }
        self.last = u32::try_from(self.all.len()).expect("fewer than 2^32 different values");
        let value: Arc<T> = value.into();
        self.all.push(Arc::clone(&value));
        self.ids.insert(value, self.last);
        (self.last, true)
    }

    pub(super) fn get(&self, id: u32) -> Option<&T> {
        self.all.get(id as usize).map(|value| &**value)
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }
}
