//! What the audit reads: counted, not timed.

use std::sync::atomic::Ordering;

use harness_allocator::units::Bytes;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::lying::{Lie, Lying, TOLD};
use crate::program::{Machine, Op};

const OPERATIONS: u64 = 20_000;
const SLOTS: usize = 400;

#[test]
fn a_hit_costs_the_audit_the_one_segment_that_it_touches() {
    let (allocator, reads) = Lying::new(Lie::Nothing);
    let mut machine = Machine::new(Box::new(allocator));
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let (mut hits, mut misses, mut blocks_of_hits) = (0, 0, 0);
    let counts = || [&reads.snapshots, &reads.segments, &reads.blocks].map(|count| count.load(Ordering::Relaxed));
    let mut live = [false; SLOTS];
    for _ in 0..OPERATIONS {
        let slot = rng.random_range(0..SLOTS);
        // Kept to about half of the memory, so that the storm goes on without an out-of-memory.
        let op = if live[slot] { Op::Free(slot) } else { Op::Alloc(slot, Bytes(TOLD.0 + 1 + rng.random_range(0..160_000)), 0) };
        live[slot] = !live[slot];
        let calls = machine.rig.calls().memory_calls();
        let [snapshots, segments, blocks] = counts();
        machine.op(op).unwrap();
        let [snapshots_now, segments_now, blocks_now] = counts();
        assert_eq!((snapshots_now - snapshots, segments_now - segments), (0, 1), "{op:?}");
        if machine.rig.calls().memory_calls() == calls {
            hits += 1;
            blocks_of_hits += blocks_now - blocks;
        } else {
            misses += 1;
        }
    }
    let [before, ..] = counts();
    let structure = machine.rig.snapshot();
    assert_eq!(counts()[0], before + 1);
    assert_eq!((hits + misses, machine.ooms), (OPERATIONS, 0));
    assert!(hits > misses * 100, "{hits} hits and {misses} misses: this storm shows nothing about hits");
    // One segment of 2 MiB has a small part of all blocks, and that part is what a hit costs.
    let all: usize = structure.iter().map(|segment| segment.blocks.len()).sum();
    let mean = blocks_of_hits / hits;
    assert!(structure.len() >= 8 && mean * 4 < all as u64, "{mean} of {all} blocks in {} segments", structure.len());
    machine.finish().unwrap();
}
