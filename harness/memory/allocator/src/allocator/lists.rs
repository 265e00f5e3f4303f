//! The lists of free chunks of [`super::regions`].

use std::collections::BTreeMap;

use super::blocks::{Blocks, CHUNK_UNIT};
use super::free_index::FreeBlocks;
use super::ids::{BlockId, StreamPoolId};
use crate::device::StreamId;

/// Which free chunks a request searches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum FreeList {
    /// The chunks that a stream may reuse without a wait. A request gets the best fit.
    Stream(StreamId),
    /// The blocks of a bin that a stream may reuse without a wait. They have one size, never merge,
    /// and leave the list in the order of their frees.
    Bin(usize, StreamId),
    /// The chunks of the superblock at this address, and the stream whose arena has it. The global
    /// arena has the others. A request gets the lowest chunk that fits.
    Superblock(u64, Option<StreamId>),
}

impl From<StreamId> for FreeList {
    fn from(stream: StreamId) -> Self {
        Self::Stream(stream)
    }
}

impl FreeList {
    /// The stream that may reuse its chunks.
    pub(super) fn stream(self) -> StreamId {
        match self {
            Self::Stream(stream) | Self::Bin(_, stream) => stream,
            Self::Superblock(_, owner) => owner.unwrap_or(StreamId::DEFAULT),
        }
    }

    /// The list for a chunk that this stream allocates. A chunk of a superblock gets its list when
    /// it is freed.
    pub(super) const fn of(self, stream: StreamId) -> Self {
        match self {
            Self::Stream(_) | Self::Superblock(..) => Self::Stream(stream),
            Self::Bin(bin, _) => Self::Bin(bin, stream),
        }
    }

    pub(super) const fn merges(self) -> bool {
        !matches!(self, Self::Bin(..))
    }
}

/// The free chunks of one list.
#[derive(Debug)]
enum Chunks {
    BestFit(Box<FreeBlocks<{ CHUNK_UNIT.0 }>>),
    /// By rank: the first one that fits.
    FirstFit(BTreeMap<u64, BlockId>),
}

#[derive(Debug)]
struct List {
    key: FreeList,
    chunks: Chunks,
}

/// All lists. A list is made on first use; that of a superblock is removed with it.
#[derive(Debug)]
pub(super) struct Lists {
    ids: BTreeMap<FreeList, StreamPoolId>,
    lists: Vec<List>,
    vacant: Vec<StreamPoolId>,
    /// The list found last. Most programs use one stream.
    recent: (FreeList, StreamPoolId),
    /// The number of chunks that bins got so far: the rank of the next one.
    queued: u64,
}

impl Default for Lists {
    fn default() -> Self {
        let stream = FreeList::Stream(StreamId::DEFAULT);
        let mut lists = Self {
            ids: BTreeMap::new(),
            lists: Vec::new(),
            vacant: Vec::new(),
            recent: (stream, StreamPoolId(0)),
            queued: 0,
        };
        lists.make(stream);
        lists
    }
}

impl Lists {
    #[inline(always)]
    pub(super) fn key(&self, id: StreamPoolId) -> FreeList {
        self.lists[id.0 as usize].key
    }

    /// The list, if it exists. Logarithmic in lists, and constant for the list found last.
    #[inline(always)]
    pub(super) fn find(&mut self, key: FreeList) -> Option<StreamPoolId> {
        if self.recent.0 == key {
            return Some(self.recent.1);
        }
        let id = *self.ids.get(&key)?;
        self.recent = (key, id);
        Some(id)
    }

    #[inline(always)]
    pub(super) fn get(&mut self, key: FreeList) -> StreamPoolId {
        match self.find(key) {
            Some(id) => id,
            None => self.make(key),
        }
    }

    #[cold]
    fn make(&mut self, key: FreeList) -> StreamPoolId {
        let chunks = match key {
            FreeList::Stream(_) => Chunks::BestFit(Box::default()),
            FreeList::Bin(..) | FreeList::Superblock(..) => Chunks::FirstFit(BTreeMap::new()),
        };
        let list = List { key, chunks };
        let new = StreamPoolId(self.lists.len() as u32);
        let id = self.vacant.pop().unwrap_or(new);
        if id == new {
            self.lists.push(list);
        } else {
            self.lists[id.0 as usize] = list;
        }
        self.ids.insert(key, id);
        id
    }

    /// Gives a list another key. Nothing has this key yet.
    pub(super) fn rename(&mut self, from: FreeList, to: FreeList) {
        let Some(id) = self.ids.remove(&from) else {
            return;
        };
        self.ids.insert(to, id);
        self.lists[id.0 as usize].key = to;
        self.recent = (to, id);
    }

    /// Releases the memory of an empty list. It stays, because live chunks may belong to it.
    pub(super) fn shrink(&mut self, key: FreeList) {
        if let Some(&id) = self.ids.get(&key)
            && let Chunks::BestFit(chunks) = &mut self.lists[id.0 as usize].chunks
            && chunks.is_empty()
        {
            **chunks = FreeBlocks::default();
        }
    }

    /// Removes an empty list, to which no chunk belongs.
    pub(super) fn remove(&mut self, key: FreeList) {
        if let Some(id) = self.ids.remove(&key) {
            self.vacant.push(id);
            let stream = FreeList::Stream(StreamId::DEFAULT);
            self.recent = (stream, self.ids[&stream]);
        }
    }

    /// The chunk of at least `size` (not zero) that comes first in the order of the list.
    #[inline(always)]
    pub(super) fn fit(&self, id: StreamPoolId, blocks: &Blocks, size: u64) -> Option<BlockId> {
        match &self.lists[id.0 as usize].chunks {
            Chunks::BestFit(chunks) => chunks.best_fit(blocks, size),
            Chunks::FirstFit(chunks) => {
                let fits = |id: &BlockId| blocks[*id].size >= size;
                chunks.values().copied().find(fits)
            }
        }
    }

    /// Adds a free chunk to its list. A bin gives it its rank.
    #[inline(always)]
    pub(super) fn insert(&mut self, blocks: &mut Blocks, id: BlockId) {
        let List { key, chunks } = &mut self.lists[blocks[id].stream_pool.0 as usize];
        match chunks {
            Chunks::BestFit(chunks) => chunks.insert(blocks, id),
            Chunks::FirstFit(chunks) => {
                if let FreeList::Bin(..) = key {
                    blocks[id].rank = self.queued;
                    self.queued += 1;
                }
                chunks.insert(blocks[id].rank, id);
            }
        }
    }

    #[inline(always)]
    pub(super) fn take(&mut self, blocks: &mut Blocks, id: BlockId) {
        match &mut self.lists[blocks[id].stream_pool.0 as usize].chunks {
            Chunks::BestFit(chunks) => chunks.remove(blocks, id),
            Chunks::FirstFit(chunks) => {
                let removed = chunks.remove(&blocks[id].rank);
                debug_assert_eq!(removed, Some(id), "the chunk is in its list");
            }
        }
    }

    /// The chunks of a list in its order. It sorts them, so it is for rare use.
    pub(super) fn in_order(&self, id: StreamPoolId, blocks: &Blocks) -> Vec<BlockId> {
        match &self.lists[id.0 as usize].chunks {
            Chunks::BestFit(chunks) => chunks.in_order(blocks),
            Chunks::FirstFit(chunks) => chunks.values().copied().collect(),
        }
    }

    /// The streams that have chunks, in ascending order.
    pub(super) fn streams(&self) -> impl Iterator<Item = StreamId> {
        self.ids.iter().filter_map(|(key, id)| {
            let chunks = &self.lists[id.0 as usize].chunks;
            match (key, chunks) {
                (&FreeList::Stream(stream), Chunks::BestFit(chunks)) => {
                    (!chunks.is_empty()).then_some(stream)
                }
                _ => None,
            }
        })
    }
}
