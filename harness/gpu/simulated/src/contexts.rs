//! [`Contexts`]: the contexts that a program creates in addition to the primary one of each device.

use std::collections::{BTreeMap, BTreeSet};

use crate::handles::Handles;

const CONTEXTS: Handles = Handles::starting_at(0x9_0000_0000);

/// The created contexts by handle. Handles are not reused.
#[derive(Debug, Default)]
pub(crate) struct Contexts {
    contexts: BTreeMap<usize, Created>,
    last: usize,
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

    pub(crate) fn remove(&mut self, handle: usize) -> Option<Created> {
        self.contexts.remove(&handle)
    }

    /// Removes the contexts of a device.
    pub(crate) fn remove_all(&mut self, device: usize) {
        self.contexts.retain(|_, context| context.device != device);
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
