//! The free blocks of all pools, found by best fit: the smallest that is large enough, and among equals the one at the lowest address.
//!
//! A *lane* holds the free blocks of one pool and one stream. Its blocks lie in bins by size: below 4 MiB every multiple of 512 B has a bin
//! of its own; above, each doubling has 4096 bins. A hierarchy of bitmaps finds the next bin that is not empty in three steps. A bin is a
//! short chain of *heaps*, one for each size in it, the smallest first; a heap orders blocks of one size by address.
//!
//! The heaps are pairing heaps (Fredman, Sedgewick, Sleator and Tarjan, <https://doi.org/10.1007/BF01840439>): an insertion is one
//! comparison; taking the lowest, or any other, is logarithmic in the blocks of that size, amortized. Links are block numbers in one table,
//! so nothing is allocated for a block that becomes free. The chain of a bin is as long as there are different sizes in it: one below 4 MiB,
//! and never more than the device's memory has room for, some dozens at most.
//!
//! The block that became free last is kept apart, in front of the bins: programs tend to take it, or to free its neighbour, next, and then no
//! bin is touched at all. It takes part in the order like any other.
//!
//! Invariants: a bit is set exactly where its bin has a block; a chain's sizes rise; every block of a heap has that heap's size; a parent
//! lies at a lower address than its children.

use super::config::UNIT;
use super::ids::{BlockId, LaneId};

/// No block.
const NONE: u32 = u32::MAX;
/// Bins of a row, as a power of two.
const ROW_BITS: u32 = 12;
/// Bins of a row.
const ROW: usize = 1 << ROW_BITS;
/// Words of a row's bitmap.
const WORDS: usize = ROW / 64;

/// A free block, found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Free {
    pub(super) id: BlockId,
    pub(super) size: u64,
    pub(super) address: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct FreeIndex {
    /// By block number; meaningful for free blocks only.
    nodes: Vec<Node>,
    lanes: Vec<Lane>,
}

/// A free block's place in its heap.
#[derive(Clone, Copy, Debug)]
struct Node {
    address: u64,
    size: u64,
    child: u32,
    sibling: u32,
    /// The parent of a first child, the left sibling of another, nothing for a root.
    previous: u32,
    /// Of a root: the root of the next larger size in the same bin.
    next_size: u32,
}

const NO_BLOCK: Free = Free { id: BlockId(NONE), size: 0, address: 0 };

const VACANT: Node = Node { address: 0, size: 0, child: NONE, sibling: NONE, previous: NONE, next_size: NONE };

#[derive(Debug)]
struct Lane {
    /// The block that became free last, unless it was taken; its number is [`NONE`] then.
    last: Free,
    /// Which rows have a block.
    occupied: u64,
    /// Row 0 holds sizes below 2 MiB; row n those from 2ⁿ MiB up to twice that. Made when they are first needed.
    rows: Vec<Option<Box<Row>>>,
}

#[derive(Debug)]
struct Row {
    /// Which words have a bit.
    summary: u64,
    words: [u64; WORDS],
    /// The root of the smallest size of each bin; meaningful where its bit is set.
    heads: [u32; ROW],
}

/// A bin of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bin {
    row: usize,
    index: usize,
}

impl Bin {
    fn of(size: u64) -> Self {
        let units = size / UNIT;
        if units < ROW as u64 {
            return Self { row: 0, index: units as usize };
        }
        let row = units.ilog2() - ROW_BITS + 1;
        Self { row: row as usize, index: (units >> (row - 1)) as usize & (ROW - 1) }
    }
}

impl FreeIndex {
    /// A new lane, empty.
    pub(super) fn add_lane(&mut self) -> LaneId {
        self.lanes.push(Lane { last: NO_BLOCK, occupied: 0, rows: Vec::new() });
        LaneId(self.lanes.len() as u32 - 1)
    }

    /// Adds a block.
    #[inline]
    pub(super) fn insert(&mut self, lane: LaneId, free: Free) {
        let before = std::mem::replace(&mut self.lanes[lane.0 as usize].last, free);
        if before.id.0 != NONE {
            self.insert_into_bin(lane, before);
        }
    }

    /// Removes a block.
    #[inline]
    pub(super) fn remove(&mut self, lane: LaneId, id: BlockId) {
        let last = &mut self.lanes[lane.0 as usize].last;
        if last.id == id {
            *last = NO_BLOCK;
        } else {
            self.remove_from_bin(lane, id);
        }
    }

    /// The best fit for that size.
    #[inline]
    pub(super) fn best_fit(&self, lane: LaneId, size: u64) -> Option<Free> {
        let lane = &self.lanes[lane.0 as usize];
        let last = (lane.last.id.0 != NONE && lane.last.size >= size).then_some(lane.last);
        if lane.occupied == 0 {
            return last;
        }
        match (last, self.best_in_bins(lane, size)) {
            (Some(last), Some(best)) => Some(if (last.size, last.address) < (best.size, best.address) { last } else { best }),
            (last, best) => last.or(best),
        }
    }

    fn insert_into_bin(&mut self, lane: LaneId, free: Free) {
        let Free { id, size, address } = free;
        let slot = id.0 as usize;
        if slot >= self.nodes.len() {
            self.nodes.resize(slot + 1, VACANT);
        }
        self.nodes[slot] = Node { address, size, ..VACANT };
        let Bin { row, index } = Bin::of(size);
        let lane = &mut self.lanes[lane.0 as usize];
        if row >= lane.rows.len() {
            lane.rows.resize_with(row + 1, || None);
        }
        let row_bins = lane.rows[row].get_or_insert_with(|| Box::new(Row { summary: 0, words: [0; WORDS], heads: [NONE; ROW] }));
        let (word, bit) = (index / 64, 1 << (index % 64));
        if row_bins.words[word] & bit == 0 {
            row_bins.words[word] |= bit;
            row_bins.summary |= 1 << word;
            lane.occupied |= 1 << row;
            row_bins.heads[index] = id.0;
            return;
        }
        insert_into_chain(&mut self.nodes, &mut row_bins.heads[index], id.0);
    }

    fn remove_from_bin(&mut self, lane: LaneId, id: BlockId) {
        let node = self.nodes[id.0 as usize];
        let Bin { row, index } = Bin::of(node.size);
        let lane = &mut self.lanes[lane.0 as usize];
        let Some(Some(row_bins)) = lane.rows.get_mut(row) else { return };
        let alone = row_bins.heads[index] == id.0 && node.child == NONE && node.next_size == NONE;
        if !alone {
            remove_from_chain(&mut self.nodes, &mut row_bins.heads[index], id.0);
            return;
        }
        let word = index / 64;
        row_bins.words[word] &= !(1 << (index % 64));
        if row_bins.words[word] == 0 {
            row_bins.summary &= !(1 << word);
            if row_bins.summary == 0 {
                lane.occupied &= !(1 << row);
            }
        }
    }

    fn best_in_bins(&self, lane: &Lane, size: u64) -> Option<Free> {
        let bin = Bin::of(size);
        if let Some(Some(row)) = lane.rows.get(bin.row) {
            if row.has(bin.index) {
                // Only here can there be smaller ones in the same bin.
                let mut root = row.heads[bin.index];
                while root != NONE {
                    let node = &self.nodes[root as usize];
                    if node.size >= size {
                        return Some(self.free(root));
                    }
                    root = node.next_size;
                }
            }
            if let Some(index) = row.next(bin.index + 1) {
                return Some(self.free(row.heads[index]));
            }
        }
        let larger = lane.occupied.checked_shr(bin.row as u32 + 1).unwrap_or(0);
        if larger == 0 {
            return None;
        }
        let row = lane.rows[bin.row + 1 + larger.trailing_zeros() as usize].as_ref()?;
        row.next(0).map(|index| self.free(row.heads[index]))
    }

    /// All blocks of a lane by size, then address. Sorts them: for rare use.
    pub(super) fn in_order(&self, lane: LaneId) -> Vec<Free> {
        let lane = &self.lanes[lane.0 as usize];
        let mut all: Vec<Free> = Some(lane.last).filter(|last| last.id.0 != NONE).into_iter().collect();
        for row in lane.rows.iter().flatten() {
            let mut from = 0;
            while let Some(index) = row.next(from) {
                let mut root = row.heads[index];
                while root != NONE {
                    self.collect(root, &mut all);
                    root = self.nodes[root as usize].next_size;
                }
                from = index + 1;
            }
        }
        all.sort_unstable_by_key(|free| (free.size, free.address));
        all
    }

    /// The largest block of a lane.
    pub(super) fn largest(&self, lane: LaneId) -> u64 {
        self.in_order(lane).last().map_or(0, |free| free.size)
    }

    fn free(&self, slot: u32) -> Free {
        let node = &self.nodes[slot as usize];
        Free { id: BlockId(slot), size: node.size, address: node.address }
    }

    fn collect(&self, root: u32, all: &mut Vec<Free>) {
        let mut waiting = vec![root];
        while let Some(slot) = waiting.pop() {
            all.push(self.free(slot));
            let mut child = self.nodes[slot as usize].child;
            while child != NONE {
                waiting.push(child);
                child = self.nodes[child as usize].sibling;
            }
        }
    }
}

impl Row {
    fn has(&self, index: usize) -> bool {
        self.words[index / 64] >> (index % 64) & 1 == 1
    }

    /// The first bin with a block, from `index` on.
    fn next(&self, index: usize) -> Option<usize> {
        if index >= ROW {
            return None;
        }
        let word = index / 64;
        let here = self.words[word] >> (index % 64);
        if here != 0 {
            return Some(index + here.trailing_zeros() as usize);
        }
        let later = self.summary.checked_shr(word as u32 + 1).unwrap_or(0);
        if later == 0 {
            return None;
        }
        let word = word + 1 + later.trailing_zeros() as usize;
        Some(word * 64 + self.words[word].trailing_zeros() as usize)
    }
}

/// Adds a block to the chain of a bin that is not empty.
fn insert_into_chain(nodes: &mut [Node], head: &mut u32, slot: u32) {
    let size = nodes[slot as usize].size;
    let (before, root) = find_size(nodes, *head, size);
    let new_root = if root != NONE && nodes[root as usize].size == size {
        let next = nodes[root as usize].next_size;
        let melded = meld(nodes, root, slot);
        nodes[melded as usize].next_size = next;
        melded
    } else {
        nodes[slot as usize].next_size = root;
        slot
    };
    match before {
        NONE => *head = new_root,
        before => nodes[before as usize].next_size = new_root,
    }
}

/// Takes a block out of the chain of its bin.
fn remove_from_chain(nodes: &mut [Node], head: &mut u32, slot: u32) {
    let (before, root) = find_size(nodes, *head, nodes[slot as usize].size);
    let next = nodes[root as usize].next_size;
    let rest = remove_from_heap(nodes, root, slot);
    let new_root = if rest == NONE {
        next
    } else {
        nodes[rest as usize].next_size = next;
        rest
    };
    match before {
        NONE => *head = new_root,
        before => nodes[before as usize].next_size = new_root,
    }
}

/// The root of the first size of at least `size` in a chain, and the one before it.
fn find_size(nodes: &[Node], head: u32, size: u64) -> (u32, u32) {
    let (mut before, mut root) = (NONE, head);
    while root != NONE && nodes[root as usize].size < size {
        (before, root) = (root, nodes[root as usize].next_size);
    }
    (before, root)
}

/// The root of a heap without one of its blocks.
fn remove_from_heap(nodes: &mut [Node], root: u32, slot: u32) -> u32 {
    let Node { child, sibling, previous, .. } = nodes[slot as usize];
    let orphans = meld_siblings(nodes, child);
    if slot == root {
        return orphans;
    }
    if nodes[previous as usize].child == slot {
        nodes[previous as usize].child = sibling;
    } else {
        nodes[previous as usize].sibling = sibling;
    }
    if sibling != NONE {
        nodes[sibling as usize].previous = previous;
    }
    if orphans == NONE { root } else { meld(nodes, root, orphans) }
}

/// One heap of two, given and returned by their roots.
fn meld(nodes: &mut [Node], left: u32, right: u32) -> u32 {
    let (parent, child) = if nodes[left as usize].address < nodes[right as usize].address { (left, right) } else { (right, left) };
    let first = nodes[parent as usize].child;
    nodes[child as usize].sibling = first;
    nodes[child as usize].previous = parent;
    if first != NONE {
        nodes[first as usize].previous = child;
    }
    nodes[parent as usize].child = child;
    nodes[parent as usize].sibling = NONE;
    nodes[parent as usize].previous = NONE;
    parent
}

/// One heap of a list of siblings: melded in pairs from the left, then together from the right, which is what keeps the costs logarithmic.
fn meld_siblings(nodes: &mut [Node], first: u32) -> u32 {
    let mut pairs = NONE;
    let mut next = first;
    while next != NONE {
        let left = next;
        let right = nodes[left as usize].sibling;
        let pair = if right == NONE {
            next = NONE;
            left
        } else {
            next = nodes[right as usize].sibling;
            meld(nodes, left, right)
        };
        // The list of pairs runs backwards through the sibling links.
        nodes[pair as usize].sibling = pairs;
        pairs = pair;
    }
    let mut root = NONE;
    while pairs != NONE {
        let pair = pairs;
        pairs = nodes[pair as usize].sibling;
        nodes[pair as usize].sibling = NONE;
        nodes[pair as usize].previous = NONE;
        root = if root == NONE { pair } else { meld(nodes, root, pair) };
    }
    root
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Sizes that share bins, sizes that do not, and many equal ones.
    fn sizes() -> impl Strategy<Value = u64> {
        let units = prop_oneof![1_u64..20, 4090_u64..4110, 8180_u64..8200, (0_u64..40).prop_map(|n| (1 << 20) + n), 1_u64..1 << 30];
        units.prop_map(|units| units * UNIT)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn it_finds_what_an_ordered_set_finds(operations in prop::collection::vec((sizes(), any::<prop::sample::Index>(), 0..10_u32), 1..300)) {
            let mut index = FreeIndex::default();
            let (lane, other) = (index.add_lane(), index.add_lane());
            let mut model = BTreeSet::new();
            let mut vacant: Vec<u32> = (0..300).rev().collect();
            for (step, (size, choice, kind)) in operations.into_iter().enumerate() {
                if kind < 6 || model.is_empty() {
                    // Addresses in no order.
                    let (id, address) = (vacant.pop().expect("enough"), (step as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20);
                    index.insert(lane, Free { id: BlockId(id), size, address });
                    model.insert((size, address, id));
                } else if kind < 9 {
                    let entry = **choice.get(&model.iter().collect::<Vec<_>>());
                    index.remove(lane, BlockId(entry.2));
                    model.remove(&entry);
                    vacant.push(entry.2);
                }
                let best = model.range((size, 0, 0)..).next().map(|&(size, address, id)| Free { id: BlockId(id), size, address });
                prop_assert_eq!(index.best_fit(lane, size), best);
                prop_assert_eq!(index.best_fit(other, 0), None);
            }
            let all: Vec<_> = model.iter().map(|&(size, address, id)| Free { id: BlockId(id), size, address }).collect();
            prop_assert_eq!(index.largest(lane), all.last().map_or(0, |free| free.size));
            prop_assert_eq!(index.in_order(lane), all);
        }
    }

    #[test]
    fn sizes_below_four_mebibytes_have_a_bin_of_their_own() {
        let bins: Vec<Bin> = (0..8192).map(|units| Bin::of(units * UNIT)).collect();
        assert!(bins.windows(2).all(|pair| pair[0] != pair[1]));
        assert_eq!(Bin::of(u64::MAX - UNIT + 1), Bin { row: 43, index: ROW - 1 });
    }
}
