use std::collections::BTreeMap;

use crate::rig::Buffer;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Sequence {
    /// Counted from 1 in the order of arrival.
    pub(crate) number: u64,
    pub(crate) arrives: u64,
    /// Tokens in its cache: the prompt and the answer so far.
    pub(crate) words: u64,
    /// Tokens still to generate.
    pub(crate) left: u64,
}

#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) sequence: Sequence,
    /// The keys and values of each layer for a growing cache, otherwise pages.
    pub(crate) cache: Vec<Buffer>,
    /// The number of its last use.
    used: u64,
}

/// The running requests by number, and the evicted requests that wait to run again.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    pub(crate) running: BTreeMap<u64, Running>,
    pub(crate) evicted: Vec<Sequence>,
    uses: u64,
    /// The request that is allocating; it is never evicted itself.
    pub(crate) trying: Option<u64>,
}

impl Requests {
    /// Evicts the least recently used other request and returns its number and cache.
    pub(crate) fn evict(&mut self) -> Option<(u64, Vec<Buffer>)> {
        let others = self
            .running
            .iter()
            .filter(|(number, _)| Some(**number) != self.trying);
        let oldest = *others.min_by_key(|(_, running)| running.used)?.0;
        let Running {
            sequence, cache, ..
        } = self.running.remove(&oldest)?;
        self.evicted.push(sequence);
        Some((oldest, cache))
    }

    pub(crate) fn begin(&mut self, sequence: Sequence, cache: Vec<Buffer>) {
        self.uses += 1;
        self.running.insert(
            sequence.number,
            Running {
                sequence,
                cache,
                used: self.uses,
            },
        );
    }

    pub(crate) fn grown(&mut self, number: u64) {
        self.uses += 1;
        if let Some(running) = self.running.get_mut(&number) {
            running.sequence.words += 1;
            running.sequence.left -= 1;
            running.used = self.uses;
        }
    }
}
