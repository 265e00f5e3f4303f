use std::collections::BTreeMap;

use harness_allocator::{device::DevicePtr, units::Bytes};

use crate::rig::Buffer;

/// The live blocks of a storm, by the operation that frees them, or of a replay, by their id in the
/// trace. Equal keys keep their order of creation.
#[derive(Debug)]
pub(crate) struct LiveBlocks<B = Buffer> {
    pub(super) blocks: BTreeMap<(u64, u64), B>,
    bytes: u64,
    made: u64,
}

pub(crate) trait Block {
    fn requested(&self) -> Bytes;
}

impl Block for Buffer {
    fn requested(&self) -> Bytes {
        Self::requested(self)
    }
}

impl<B> Default for LiveBlocks<B> {
    fn default() -> Self {
        Self {
            blocks: BTreeMap::new(),
            bytes: 0,
            made: 0,
        }
    }
}

impl LiveBlocks {
    pub(crate) fn addresses(&self) -> impl Iterator<Item = DevicePtr> {
        self.blocks.values().map(|buffer| buffer.range().start)
    }

    pub(crate) fn take_where(&mut self, select: impl Fn(DevicePtr) -> bool) -> Vec<Buffer> {
        let keys: Vec<(u64, u64)> = self
            .blocks
            .iter()
            .filter(|(_, buffer)| select(buffer.range().start))
            .map(|(&key, _)| key)
            .collect();
        keys.into_iter().filter_map(|key| self.take(key)).collect()
    }
}

impl<B: Block> LiveBlocks<B> {
    pub(crate) fn count(&self) -> u64 {
        self.blocks.len() as u64
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// All blocks, in the order in which they are due.
    pub(crate) fn into_blocks(self) -> impl Iterator<Item = B> {
        self.blocks.into_values()
    }

    pub(crate) fn insert(&mut self, due: u64, buffer: B) {
        self.bytes += buffer.requested().0;
        self.made += 1;
        self.blocks.insert((due, self.made), buffer);
    }

    /// Removes the block that is due next, if its operation is at most `by`.
    pub(crate) fn take_due(&mut self, by: u64) -> Option<B> {
        let key = *self
            .blocks
            .first_key_value()
            .filter(|((due, _), _)| *due <= by)?
            .0;
        self.take(key)
    }

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
