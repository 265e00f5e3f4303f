//! [`LiveBlocks`]: what a storm or a replay holds.

use std::collections::BTreeMap;

use harness_allocator::device::DevicePtr;
use harness_allocator::units::Bytes;

use crate::rig::Buffer;

/// The live blocks of a storm or a replay, by the operation at which each is due, or by its id in the trace, and the order of their making.
#[derive(Debug)]
pub(crate) struct LiveBlocks<B = Buffer> {
    pub(super) blocks: BTreeMap<(u64, u64), B>,
    bytes: u64,
    made: u64,
}

/// A block that somebody asked for.
pub(crate) trait Block {
    /// How much was asked for.
    fn requested(&self) -> Bytes;
}

impl Block for Buffer {
    fn requested(&self) -> Bytes {
        Self::requested(self)
    }
}

impl<B> Default for LiveBlocks<B> {
    fn default() -> Self {
        Self { blocks: BTreeMap::new(), bytes: 0, made: 0 }
    }
}

impl LiveBlocks {
    /// Where they lie.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = DevicePtr> {
        self.blocks.values().map(|buffer| buffer.range().start)
    }

    /// Takes those out that a condition on their address selects.
    pub(crate) fn take_where(&mut self, select: impl Fn(DevicePtr) -> bool) -> Vec<Buffer> {
        let keys: Vec<(u64, u64)> = self.blocks.iter().filter(|(_, buffer)| select(buffer.range().start)).map(|(&key, _)| key).collect();
        keys.into_iter().filter_map(|key| self.take(key)).collect()
    }
}

impl<B: Block> LiveBlocks<B> {
    /// How many there are.
    pub(crate) fn count(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Requested bytes of all of them.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// All of them, those due first in front.
    pub(crate) fn into_blocks(self) -> impl Iterator<Item = B> {
        self.blocks.into_values()
    }

    pub(crate) fn insert(&mut self, due: u64, buffer: B) {
        self.bytes += buffer.requested().0;
        self.made += 1;
        self.blocks.insert((due, self.made), buffer);
    }

    /// The block due next, if it is due by then.
    pub(crate) fn take_due(&mut self, by: u64) -> Option<B> {
        let key = *self.blocks.first_key_value().filter(|((due, _), _)| *due <= by)?.0;
        self.take(key)
    }

    /// The block with that id.
    pub(crate) fn take_of(&mut self, id: u64) -> Option<B> {
        let (&key, _) = self.blocks.range((id, 0)..=(id, u64::MAX)).next()?;
        self.take(key)
    }

    fn take(&mut self, key: (u64, u64)) -> Option<B> {
        let buffer = self.blocks.remove(&key)?;
        self.bytes -= buffer.requested().0;
        Some(buffer)
    }
}
