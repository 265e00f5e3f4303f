//! The index of free blocks. It finds the best fit: the smallest block that is large enough, and
//! the lowest address among equal sizes.
//!
//! [`FreeBlocks`] has the free blocks of one pool and one stream, in bins by size: below 8192 units
//! every multiple of the unit has its own bin; above, each doubling has 4096 bins. PyTorch's unit
//! is 512 B, so sizes below 4 MiB have their own bin. A hierarchy of bitmaps finds the next
//! non-empty bin in three steps. A bin is a short chain of *heaps*, one for each size, the smallest
//! first. A heap orders blocks of one size by rank ([`Block::rank`]).
//!
//! The heaps are pairing heaps (Fredman, Sedgewick, Sleator and Tarjan,
//! <https://doi.org/10.1007/BF01840439>). An insertion is one comparison. A removal is logarithmic
//! in the blocks of that size, amortized. The links are block numbers inside the blocks
//! ([`HeapLinks`]), so a free allocates no memory and touches no second cache line. A chain is as
//! long as the number of sizes in its bin: one below 8192 units, and above limited by the device's
//! memory to a few dozen.
//!
//! The most recently freed block is kept outside the bins, because programs tend to take it next,
//! or to free its neighbor. Then no bin is touched. It takes part in the order like any other.
//!
//! Invariants: a bit is set exactly if its bin has a block; the sizes of a chain increase; all
//! blocks of a heap have its size; a parent has a lower rank than its children. A block's size and
//! rank do not change while it is in the index.

use super::bins::{Bin, ROW, ROWS};
use super::blocks::{Block, HeapLinks};
use super::ids::BlockId;

/// Words per bitmap of a row.
const WORDS: usize = ROW / 64;

#[derive(Clone, Debug, Default)]
pub(super) struct FreeBlocks<const UNIT: u64> {
    /// The most recently freed block, unless it was taken.
    last: BlockId,
    /// The rows that have a block.
    occupied: u64,
    /// Row 0 has sizes below 4096 units; each later row has those up to twice as many. Made on
    /// first use.
    rows: Rows,
}

#[derive(Clone, Debug)]
struct Rows([Option<Box<Row>>; ROWS]);

impl Default for Rows {
    fn default() -> Self {
        Self([const { None }; ROWS])
    }
}

#[derive(Clone, Debug)]
struct Row {
    /// Bit N is set if word N is not zero.
    summary: u64,
    words: [u64; WORDS],
    /// The root of the smallest size of each bin. Valid only if its bit is set.
    heads: [BlockId; ROW],
}

impl<const UNIT: u64> FreeBlocks<UNIT> {
    #[inline(always)]
    pub(super) fn insert(&mut self, blocks: &mut [Block], id: BlockId) {
        let before = std::mem::replace(&mut self.last, id);
        if !before.is_none() {
            self.insert_into_bin(blocks, before);
        }
    }

    #[inline(always)]
    pub(super) fn remove(&mut self, blocks: &mut [Block], id: BlockId) {
        if id == self.last {
            self.last = BlockId::NONE;
        } else {
            self.remove_from_bin(blocks, id);
        }
    }

    /// The best fit for a size (not zero).
    #[inline(always)]
    pub(super) fn best_fit(&self, blocks: &[Block], size: u64) -> Option<BlockId> {
        let best = if self.occupied == 0 {
            BlockId::NONE
        } else {
            self.best_in_bins(blocks, size)
        };
        // Slot 0 means none. Its size is zero: too small as the most recent block, and after all
        // others in the order.
        let (last_key, best_key) = (key(blocks, self.last), key(blocks, best));
        let last_is_best = (blocks[self.last].size >= size)
            & (last_key.wrapping_sub(1) < best_key.wrapping_sub(1));
        let found = if last_is_best { self.last } else { best };
        (!found.is_none()).then_some(found)
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.last.is_none() && self.occupied == 0
    }

    /// All blocks by size, then rank. It sorts them, so it is for rare use.
    pub(super) fn in_order(&self, blocks: &[Block]) -> Vec<BlockId> {
        let mut all: Vec<BlockId> = Some(self.last)
            .filter(|last| !last.is_none())
            .into_iter()
            .collect();
        for row in self.rows.0.iter().flatten() {
            let mut from = 0;
            while let Some(index) = row.next(from) {
                from = index + 1;
                let mut root = row.heads[index];
                while !root.is_none() {
                    collect(blocks, root, &mut all);
                    root = blocks[root].heap.sibling;
                }
            }
        }
        all.sort_unstable_by_key(|&id| key(blocks, id));
        all
    }

    pub(super) fn largest(&self, blocks: &[Block]) -> u64 {
        self.in_order(blocks)
            .last()
            .map_or(0, |&id| blocks[id].size)
    }

    #[inline(never)]
    fn insert_into_bin(&mut self, blocks: &mut [Block], id: BlockId) {
        let block = &mut blocks[id];
        let bin = Bin::of(block.size, UNIT);
        block.heap = HeapLinks {
            bin,
            ..HeapLinks::ALONE
        };
        let (row, index) = (bin.row(), bin.index());
        let bins = self.rows.0[row].get_or_insert_with(Row::empty);
        let (word, bit) = (index / 64, 1 << (index % 64));
        if bins.words[word] & bit == 0 {
            bins.words[word] |= bit;
            bins.summary |= 1 << word;
            self.occupied |= 1 << row;
            bins.heads[index] = id;
        } else {
            insert_into_chain(blocks, &mut bins.heads[index], id);
        }
    }

    #[inline(never)]
    fn remove_from_bin(&mut self, blocks: &mut [Block], id: BlockId) {
        let HeapLinks {
            child,
            sibling: next_size,
            bin,
            ..
        } = blocks[id].heap;
        let (row, index) = (bin.row(), bin.index());
        let Some(bins) = &mut self.rows.0[row] else {
            return;
        };
        let head = &mut bins.heads[index];
        if *head != id || child.0 | next_size.0 != 0 {
            remove_from_chain(blocks, head, id);
            return;
        }
        // Each step is always computed, because a mispredicted branch costs more.
        let word = index / 64;
        bins.words[word] &= !(1 << (index % 64));
        bins.summary &= !(u64::from(bins.words[word] == 0) << word);
        self.occupied &= !(u64::from(bins.summary == 0) << row);
    }

    #[inline(always)]
    fn best_in_bins(&self, blocks: &[Block], size: u64) -> BlockId {
        let bin = Bin::of(size, UNIT);
        let row = bin.row();
        if let Some(bins) = &self.rows.0[row] {
            let mut from = bin.index();
            if row > Bin::LAST_EXACT_ROW && bins.has(from) {
                // Only this bin can also have smaller blocks.
                let (_, fitting) = find_size(blocks, bins.heads[from], size);
                if !fitting.is_none() {
                    return fitting;
                }
                from += 1;
            }
            if let Some(index) = bins.next(from) {
                return bins.heads[index];
            }
        }
        let larger = self.occupied >> row >> 1;
        if larger == 0 {
            return BlockId::NONE;
        }
        let bins = self.rows.0[(row + 1 + larger.trailing_zeros() as usize) % ROWS].as_ref();
        bins.map_or(BlockId::NONE, |bins| bins.first())
    }
}

impl Row {
    #[cold]
    fn empty() -> Box<Self> {
        Box::new(Self {
            summary: 0,
            words: [0; WORDS],
            heads: [BlockId::NONE; ROW],
        })
    }

    #[inline(always)]
    fn has(&self, index: usize) -> bool {
        self.words[index / 64 % WORDS] >> (index % 64) & 1 == 1
    }

    /// The first bin with a block from `index`, which is at most the number of bins.
    ///
    /// The branch predictor cannot predict whether the first word has one. So the code always reads
    /// the next word too and selects one of them without a branch.
    #[inline(always)]
    fn next(&self, index: usize) -> Option<usize> {
        let word = index / 64;
        let here = if word < WORDS {
            self.words[word] >> (index % 64)
        } else {
            0
        };
        let later = if word < WORDS {
            self.summary >> word >> 1
        } else {
            0
        };
        let next_word = (word + 1 + later.trailing_zeros() as usize) % WORDS;
        let there = self.words[next_word];
        if here | later == 0 {
            return None;
        }
        let (start, bits) = if here != 0 {
            (index, here)
        } else {
            (next_word * 64, there)
        };
        Some((start + bits.trailing_zeros() as usize) % ROW)
    }

    /// The first bin's block of a row that has one.
    #[inline(always)]
    fn first(&self) -> BlockId {
        let word = self.summary.trailing_zeros() as usize % WORDS;
        self.heads[(word * 64 + self.words[word].trailing_zeros() as usize) % ROW]
    }
}

/// The order of free blocks: size, then rank, in one number.
#[inline(always)]
fn key(blocks: &[Block], id: BlockId) -> u128 {
    let block = &blocks[id];
    u128::from(block.size) << 64 | u128::from(block.rank)
}

fn collect(blocks: &[Block], root: BlockId, all: &mut Vec<BlockId>) {
    let mut waiting = vec![root];
    while let Some(id) = waiting.pop() {
        all.push(id);
        let mut child = blocks[id].heap.child;
        while !child.is_none() {
            waiting.push(child);
            child = blocks[child].heap.sibling;
        }
    }
}

#[inline(never)]
fn insert_into_chain(blocks: &mut [Block], head: &mut BlockId, id: BlockId) {
    let size = blocks[id].size;
    let (before, root) = find_size(blocks, *head, size);
    let new_root = if !root.is_none() && blocks[root].size == size {
        let next = blocks[root].heap.sibling;
        let melded = meld(blocks, root, id);
        blocks[melded].heap.sibling = next;
        melded
    } else {
        blocks[id].heap.sibling = root;
        id
    };
    put_behind(blocks, head, before, new_root);
}

#[inline(never)]
fn remove_from_chain(blocks: &mut [Block], head: &mut BlockId, id: BlockId) {
    let (before, root) = find_size(blocks, *head, blocks[id].size);
    let next = blocks[root].heap.sibling;
    let rest = remove_from_heap(blocks, root, id);
    let new_root = if rest.is_none() {
        next
    } else {
        blocks[rest].heap.sibling = next;
        rest
    };
    put_behind(blocks, head, before, new_root);
}

/// Links `root` after `before`, or as the first if that is none.
#[inline]
fn put_behind(blocks: &mut [Block], head: &mut BlockId, before: BlockId, root: BlockId) {
    if before.is_none() {
        *head = root;
    } else {
        blocks[before].heap.sibling = root;
    }
}

/// The root of the first size of at least `size` in a chain, and the one before it.
#[inline]
fn find_size(blocks: &[Block], head: BlockId, size: u64) -> (BlockId, BlockId) {
    let (mut before, mut root) = (BlockId::NONE, head);
    while !root.is_none() && blocks[root].size < size {
        (before, root) = (root, blocks[root].heap.sibling);
    }
    (before, root)
}

fn remove_from_heap(blocks: &mut [Block], root: BlockId, id: BlockId) -> BlockId {
    let HeapLinks {
        child,
        sibling,
        previous,
        ..
    } = blocks[id].heap;
    let orphans = meld_siblings(blocks, child);
    if id == root {
        return orphans;
    }
    if blocks[previous].heap.child == id {
        blocks[previous].heap.child = sibling;
    } else {
        blocks[previous].heap.sibling = sibling;
    }
    blocks[sibling].heap.previous = previous;
    if orphans.is_none() {
        root
    } else {
        meld(blocks, root, orphans)
    }
}

/// Melds two heaps, given and returned by their roots.
#[inline]
fn meld(blocks: &mut [Block], left: BlockId, right: BlockId) -> BlockId {
    let (parent, child) = if blocks[left].rank < blocks[right].rank {
        (left, right)
    } else {
        (right, left)
    };
    let links = &mut blocks[parent].heap;
    links.sibling = BlockId::NONE;
    links.previous = BlockId::NONE;
    let first = std::mem::replace(&mut links.child, child);
    let links = &mut blocks[child].heap;
    links.sibling = first;
    links.previous = parent;
    blocks[first].heap.previous = child;
    parent
}

/// Melds a list of siblings into one heap: in pairs from the left, then together from the right.
/// This keeps the costs logarithmic.
fn meld_siblings(blocks: &mut [Block], first: BlockId) -> BlockId {
    let mut pairs = BlockId::NONE;
    let mut next = first;
    while !next.is_none() {
        let left = next;
        let right = blocks[left].heap.sibling;
        let pair = if right.is_none() {
            next = BlockId::NONE;
            left
        } else {
            next = blocks[right].heap.sibling;
            meld(blocks, left, right)
        };
        // The list of pairs runs backward through the sibling links.
        blocks[pair].heap.sibling = pairs;
        pairs = pair;
    }
    let mut root = BlockId::NONE;
    while !pairs.is_none() {
        let pair = pairs;
        let links = &mut blocks[pair].heap;
        pairs = std::mem::replace(&mut links.sibling, BlockId::NONE);
        links.previous = BlockId::NONE;
        root = if root.is_none() {
            pair
        } else {
            meld(blocks, root, pair)
        };
    }
    root
}

#[cfg(test)]
mod tests;
