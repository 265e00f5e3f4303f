//! A table of reused slots with constant-time insertion, removal and access.

use std::ops::{Index, IndexMut};

use super::Allocation;
use crate::device::{CallSite, DeviceError};

/// Values by slot number. The most recently vacated slot is reused first.
#[derive(Debug)]
pub(super) struct Slab<T> {
    slots: Vec<Option<T>>,
    vacant: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            vacant: Vec::new(),
        }
    }
}

impl<T> Slab<T> {
    pub(super) fn insert(&mut self, value: T) -> u32 {
        if let Some(slot) = self.vacant.pop() {
            self.slots[slot as usize] = Some(value);
            return slot;
        }
        let slot = u32::try_from(self.slots.len())
            .expect("4 billion blocks of at least 512 B exceed the memory of any device");
        self.slots.push(Some(value));
        slot
    }

    /// Removes a value. Panics if the slot is empty.
    pub(super) fn remove(&mut self, slot: u32) -> T {
        let value = self.slots[slot as usize]
            .take()
            .expect("the slot has a value");
        self.vacant.push(slot);
        value
    }

    /// Fails with [`DeviceError::InvalidFree`] for a foreign allocation.
    pub(super) fn slot_of(
        &self,
        allocation: &Allocation,
        is_ours: impl FnOnce(&T) -> bool,
    ) -> Result<u32, DeviceError> {
        let slot = allocation.handle().slot();
        let error = || DeviceError::InvalidFree {
            ptr: allocation.ptr(),
            place: CallSite::default(),
        };
        if self.get(slot).is_some_and(is_ours) {
            Ok(slot)
        } else {
            Err(error())
        }
    }

    fn get(&self, slot: u32) -> Option<&T> {
        self.slots.get(slot as usize)?.as_ref()
    }
}

impl<T> Index<u32> for Slab<T> {
    type Output = T;
    fn index(&self, slot: u32) -> &T {
        self.slots[slot as usize]
            .as_ref()
            .expect("the slot has a value")
    }
}

impl<T> IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, slot: u32) -> &mut T {
        self.slots[slot as usize]
            .as_mut()
            .expect("the slot has a value")
    }
}
