//! [`Requests`]: what an inference serves.

use std::collections::BTreeMap;

use crate::rig::Buffer;

/// A request that is waited for or served.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sequence {
    /// Counted from 1, in the order of arrival.
    pub(crate) number: u64,
    /// The step of decoding in which it comes.
    pub(crate) arrives: u64,
    /// Words that are there: those of the prompt, and of the answer so far.
    pub(crate) words: u64,
    /// Words that are still to be made.
    pub(crate) left: u64,
}

/// A request that is served, and its cache.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) sequence: Sequence,
    /// For a growing cache the keys and the values of each layer, else pages.
    pub(crate) cache: Vec<Buffer>,
    /// The number of its last use.
    used: u64,
}

/// The requests that are served, by their numbers; and those that gave their caches up and are to wait again.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    pub(crate) running: BTreeMap<u64, Running>,
    pub(crate) evicted: Vec<Sequence>,
    /// Uses of caches so far.
    uses: u64,
    /// The one that is trying to get memory: it does not give its own up.
    pub(crate) trying: Option<u64>,
}

impl Requests {
    /// The request whose cache was used longest ago gives it up: its number, and what it held. `None`: there is no other.
    pub(crate) fn evict(&mut self) -> Option<(u64, Vec<Buffer>)> {
        let others = self.running.iter().filter(|(number, _)| Some(**number) != self.trying);
        let oldest = *others.min_by_key(|(_, running)| running.used)?.0;
        let Running { sequence, cache, .. } = self.running.remove(&oldest)?;
        self.evicted.push(sequence);
        Some((oldest, cache))
    }

    pub(crate) fn begin(&mut self, sequence: Sequence, cache: Vec<Buffer>) {
        self.uses += 1;
        self.running.insert(sequence.number, Running { sequence, cache, used: self.uses });
    }

    /// A request has one word more.
    pub(crate) fn grown(&mut self, number: u64) {
        self.uses += 1;
        if let Some(running) = self.running.get_mut(&number) {
            running.sequence.words += 1;
            running.sequence.left -= 1;
            running.used = self.uses;
        }
    }
}
