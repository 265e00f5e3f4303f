//! Counts the blocks that the audit reads.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use harness_allocator::allocator::{Allocator, AllocatorKind, wrapper};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{DevicePtr, faulty::Injector};
use harness_allocator::{stats::SegmentInfo, units::Bytes};
use harness_record::Verdict;
use harness_run::{faults::Faults, rig::CheckedFrom, run::Run};
use harness_scenario::Scenario;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::lying::{Lie, Lying, TOLD};
use crate::program::{Machine, Op, request};

const OPERATIONS: u64 = 20_000;
const SLOTS: usize = 400;

#[test]
fn a_hit_costs_the_audit_the_one_segment_that_it_touches() {
    let (allocator, reads) = Lying::new(Lie::Nothing);
    let mut machine = Machine::new(Box::new(allocator));
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let (mut hits, mut misses, mut blocks_of_hits) = (0, 0, 0);
    let counts = || {
        [&reads.snapshots, &reads.segments, &reads.blocks]
            .map(|count| count.load(Ordering::Relaxed))
    };
    let mut live = [false; SLOTS];
    for _ in 0..OPERATIONS {
        let slot = rng.random_range(0..SLOTS);
        // Uses about half of the memory, so the storm never runs out.
        let op = if live[slot] {
            Op::Free(slot)
        } else {
            Op::Alloc(slot, Bytes(TOLD.0 + 1 + rng.random_range(0..160_000)), 0)
        };
        live[slot] = !live[slot];
        let calls = machine.rig.calls().memory_calls();
        let [snapshots, segments, blocks] = counts();
        machine.op(op).unwrap();
        let [snapshots_now, segments_now, blocks_now] = counts();
        assert_eq!(
            (snapshots_now - snapshots, segments_now - segments),
            (0, 1),
            "{op:?}"
        );
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
    assert!(
        hits > misses * 100,
        "{hits} hits and {misses} misses: this storm shows nothing about hits"
    );
    // A segment of 2 MiB holds a small part of all blocks, and a hit costs only that part.
    let all: usize = structure.iter().map(|segment| segment.blocks.len()).sum();
    let mean = blocks_of_hits / hits;
    assert!(
        structure.len() >= 8 && mean * 4 < all as u64,
        "{mean} of {all} blocks in {} segments",
        structure.len()
    );
    machine.finish().unwrap();
}

/// An allocator that counts the blocks that are read.
struct Counted(Box<dyn Allocator>, Arc<AtomicU64>);

impl Counted {
    fn count<'a>(&self, segments: impl IntoIterator<Item = &'a SegmentInfo>) {
        let blocks: usize = segments
            .into_iter()
            .map(|segment| segment.blocks.len().max(1))
            .sum();
        self.1.fetch_add(blocks as u64, Ordering::Relaxed);
    }
}

impl wrapper::AllocatorWrapper for Counted {
    type Inner = dyn Allocator;

    fn inner(&self) -> &Self::Inner {
        &*self.0
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.0
    }

    fn snapshot(&self) -> Vec<SegmentInfo> {
        let segments = self.inner().snapshot();
        self.count(&segments);
        segments
    }

    fn segment_at(&self, address: DevicePtr) -> Option<SegmentInfo> {
        let segment = self.inner().segment_at(address);
        self.count(&segment);
        segment
    }
}

/// A storm with many live blocks: the audit reads a bounded number of blocks per operation,
/// whatever the segments.
#[test]
fn a_storm_costs_the_audit_the_same_with_every_allocator() {
    const LIVE: usize = 3_000;
    for &kind in AllocatorKind::ALL {
        let read = Arc::<AtomicU64>::default();
        let mut machine = Machine::new(Box::new(Counted(kind.build(), Arc::clone(&read))));
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        let mut live = [false; LIVE];
        // These programs have little memory, so their blocks are small. There is room for fewer of
        // them if each takes pages of its own.
        let slots = match kind {
            AllocatorKind::Direct | AllocatorKind::AsyncPool | AllocatorKind::CupyPool => 30,
            AllocatorKind::Caching
            | AllocatorKind::Expandable
            | AllocatorKind::Bfc
            | AllocatorKind::OrtArena
            | AllocatorKind::XlaBfc
            | AllocatorKind::RmmPool
            | AllocatorKind::RmmArena
            | AllocatorKind::RmmBinning => LIVE,
        };
        for _ in 0..OPERATIONS {
            let slot = rng.random_range(0..slots);
            let op = if live[slot] {
                Op::Free(slot)
            } else {
                Op::Alloc(slot, Bytes(TOLD.0 + 1 + rng.random_range(0..20_000)), 0)
            };
            live[slot] = !live[slot];
            machine.op(op).unwrap();
        }
        machine.op(Op::EndStep).unwrap();
        assert_eq!(machine.ooms, 0, "{}", kind.name());
        let each = read.load(Ordering::Relaxed) / OPERATIONS;
        assert!(each <= 80, "{}: {each} blocks an operation", kind.name());
        machine.finish().unwrap();
    }
}

/// Each step makes one buffer. At its end, everything is checked if the budget allows it.
#[test]
fn steps_with_many_live_buffers_cost_the_audit_time_linear_in_their_number() {
    const STEPS: usize = 8_000;
    let read = Arc::<AtomicU64>::default();
    let mut machine = Machine::new(Box::new(Counted(
        AllocatorKind::Caching.build(),
        Arc::clone(&read),
    )));
    for slot in 0..STEPS {
        machine
            .op(Op::Alloc(slot, Bytes(1 + slot as u64 % 4_096), 0))
            .unwrap();
        machine.op(Op::EndStep).unwrap();
    }
    let each = read.load(Ordering::Relaxed) / STEPS as u64;
    assert!(each <= 64 + 1_024 + 100, "{each} blocks a step");
    machine.finish().unwrap();
}

/// After a recovered failure, the bound per step is much smaller. The record keeps no steps, so
/// forked copies stay small.
#[test]
fn steps_after_a_failed_call_take_linear_time_and_no_memory() {
    const STEPS: u64 = 8_000;
    let text = format!(
        "about: A test.\nneeds: {{ memory: 64MiB }}\nsteps:\n  - for: {{ i: 1..{STEPS} }}\n    \
         steps:\n      - alloc: {{ buffer: \"a[i]\", size: 4KiB }}\n"
    );
    let scenario = Scenario::parse(&text, Path::new("test.yaml")).unwrap();
    let spec = AllocatorKind::Caching.into();
    let request = request(&scenario, &spec);
    let read = Arc::<AtomicU64>::default();
    let allocator = Box::new(Counted(AllocatorKind::Caching.build(), Arc::clone(&read)));
    let faults = Faults::each_by(&scenario, |_| {
        Injector::new(&["cudaMalloc:1".parse().unwrap()], 0)
    });
    let device = Box::new(SimDevice::new(SimConfig::default()));
    let run = Run::new(&request, device)
        .with_allocator(allocator)
        .faulted(faults, CheckedFrom::Operation(1))
        .unwrap()
        .record;
    assert_eq!(
        (run.verdict, run.stats.num_alloc_retries),
        (Verdict::Passed, 1)
    );
    assert_eq!((run.steps.len(), run.unrecorded_steps), (0, STEPS));
    let each = read.load(Ordering::Relaxed) / STEPS;
    // An operation and a step add 64 blocks each. Everything is read at least twice: at the first
    // step and at the end.
    assert!((2..=2 * 64 + 10).contains(&each), "{each} blocks a step");
}
