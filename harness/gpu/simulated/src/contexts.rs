//! [`Contexts`]: the contexts that a program creates in addition to the primary one of each device.

use std::collections::{BTreeMap, BTreeSet};

use crate::handles::Handles;

const CONTEXTS: Handles = Handles::starting_at(0x9_0000_0000);

/// The created contexts by handle. Handles are not reused.
#[derive(Debug, Default)]
pub(crate) struct Contexts {
    contexts: BTreeMap<usize, Created>,
    last: usize,
    /// Devices whose first context was created and destroyed. Its memory stays in use for the next
    /// context.
    vacant: BTreeSet<usize>,
}

#[derive(Debug)]
pub(crate) struct Created {
    pub(crate) device: usize,
    /// Whether it takes memory besides that of the device's first context.
    pub(crate) is_charged: bool,
    /// The starts of the allocations that live as long as the context.
    pub(crate) allocations: BTreeSet<u64>,
}

impl Contexts {
    pub(crate) fn create(&mut self, device: usize, is_charged: bool) -> usize {
        self.last += 1;
        let handle = CONTEXTS.handle(self.last);
        if !is_charged {
            self.vacant.remove(&device);
        }
        self.contexts.insert(
            handle,
            Created {
                device,
                is_charged,
                allocations: BTreeSet::new(),
            },
        );
        handle
    }

    /// Returns whether a further context of a device takes memory besides that of its first one.
    pub(crate) fn takes_more(&self, device: usize, has_context: bool) -> bool {
        let has_created = || self.contexts.values().any(|other| other.device == device);
        !self.vacant.contains(&device) && (has_context || has_created())
    }

    pub(crate) fn remove(&mut self, handle: usize) -> Option<Created> {
        let removed = self.contexts.remove(&handle)?;
        if !removed.is_charged {
            self.vacant.insert(removed.device);
        }
        Some(removed)
    }

    /// Removes the contexts of a device.
    pub(crate) fn remove_all(&mut self, device: usize) {
        self.contexts.retain(|_, context| context.device != device);
        self.vacant.remove(&device);
    }

    pub(crate) fn device(&self, handle: usize) -> Option<usize> {
        self.contexts.get(&handle).map(|context| context.device)
    }

    /// Notes memory that a context allocates.
    pub(crate) fn note(&mut self, handle: usize, start: u64) {
        if let Some(context) = self.contexts.get_mut(&handle) {
            context.allocations.insert(start);
        }
    }

    /// Notes that memory is freed.
    pub(crate) fn forget(&mut self, start: u64) {
        for context in self.contexts.values_mut() {
            context.allocations.remove(&start);
        }
    }
}
