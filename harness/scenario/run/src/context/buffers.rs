use std::collections::BTreeMap;

use harness_scenario::{BufferName, Scenario};

use super::needs::evicts;
use crate::rig::Buffer;

/// A buffer's name and, for a numbered one, its number.
pub(crate) type BufferKey = (BufferName, Option<i64>);

pub(crate) fn buffer_name((name, index): &BufferKey) -> String {
    index.map_or_else(|| name.to_string(), |index| format!("{name}[{index}]"))
}

/// The live buffers of the steps.
pub(crate) struct Buffers {
    named: BTreeMap<BufferKey, Buffer>,
    /// Buffers that lost their name to a later one.
    leaked: Vec<Buffer>,
    /// The number of each buffer's last use. Entries of freed buffers stay until their name is
    /// reused.
    last_used: BTreeMap<BufferKey, u64>,
    uses: u64,
    /// True if a policy evicts the least recently used buffer. Otherwise uses are not counted.
    evicts: bool,
}

impl Buffers {
    pub(super) fn new(scenario: &Scenario) -> Self {
        Self {
            named: BTreeMap::new(),
            leaked: Vec::new(),
            last_used: BTreeMap::new(),
            uses: 0,
            evicts: evicts(scenario),
        }
    }

    /// Stores a buffer under a name. An older buffer of that name stays allocated without a name.
    pub(crate) fn keep(&mut self, key: BufferKey, buffer: Buffer) {
        self.used(&key);
        self.leaked.extend(self.named.insert(key, buffer));
    }

    pub(crate) fn is_live(&self, key: &BufferKey) -> bool {
        self.named.contains_key(key)
    }

    pub(super) fn live(&self) -> impl Iterator<Item = &Buffer> {
        self.named.values()
    }

    pub(super) fn use_of(&mut self, key: &BufferKey) -> Option<&mut Buffer> {
        self.used(key);
        self.named.get_mut(key)
    }

    /// Removes a buffer; `None` if a recovery policy has already freed it.
    pub(crate) fn take(&mut self, key: &BufferKey) -> Option<Buffer> {
        self.named.remove(key)
    }

    pub(super) fn take_all(&mut self) -> impl Iterator<Item = Buffer> + use<> {
        let named = std::mem::take(&mut self.named).into_values();
        named.chain(std::mem::take(&mut self.leaked))
    }

    /// The numbers of the live buffers of a name, in ascending order.
    pub(crate) fn elements(&self, name: &BufferName) -> Vec<i64> {
        let all = self
            .named
            .range((name.clone(), None)..)
            .take_while(|((other, _), _)| other == name);
        all.filter_map(|((_, index), _)| *index).collect()
    }

    fn used(&mut self, key: &BufferKey) {
        if self.evicts {
            self.uses += 1;
            self.last_used.insert(key.clone(), self.uses);
        }
    }

    pub(crate) fn least_recently_used(&self, names: &[BufferName]) -> Option<BufferKey> {
        let keys = names.iter().flat_map(|name| {
            let numbered = self
                .elements(name)
                .into_iter()
                .map(|index| (name.clone(), Some(index)));
            std::iter::once((name.clone(), None)).chain(numbered)
        });
        keys.filter(|key| self.is_live(key))
            .min_by_key(|key| self.last_used.get(key).copied().unwrap_or(0))
    }
}
