//! Undoing events from the final state must give the allocator's earlier states.

use harness_allocator::allocator::caching::{CachingAllocator, Config};
use harness_allocator::allocator::{Allocation, Allocator, AllocatorError, Request};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::stats::{BlockState, PoolKind, SegmentInfo};
use harness_allocator::units::Bytes;
use harness_explain::causes::{self, ExplainError, Options};
use harness_explain::compare::Whole;
use harness_explain::state::{At, History};
use harness_trace::snapshot::{
    Action, Block, Event, ExtraId, MempoolId, Segment, Snapshot, StackId,
};
use proptest::prelude::*;

/// A program that records events like PyTorch's allocator.
struct Recorder {
    device: SimDevice,
    allocator: CachingAllocator,
    live: Vec<Allocation>,
    events: Vec<Event>,
    /// The state after each operation, with the number of events before it.
    states: Vec<(usize, Vec<SegmentInfo>)>,
}

impl Recorder {
    fn new(config: Config) -> Self {
        let device = SimDevice::new(SimConfig::replay(Bytes::mib(512)));
        Self {
            device,
            allocator: CachingAllocator::new(config),
            live: Vec::new(),
            events: Vec::new(),
            states: Vec::new(),
        }
    }

    fn event(&mut self, action: Action, address: u64, size: Bytes) {
        let event = Event {
            action,
            address,
            size,
            stream: 0,
            time_us: None,
            stack: StackId::EMPTY,
            extra: ExtraId::default(),
        };
        self.events.push(event);
    }

    /// Records the segments that were reserved or released.
    fn segments(&mut self, before: &[SegmentInfo]) {
        let after = self.allocator.snapshot();
        let is_in = |segments: &[SegmentInfo], one: &SegmentInfo| {
            segments.iter().any(|other| other.address == one.address)
        };
        for gone in before.iter().filter(|one| !is_in(&after, one)) {
            self.event(Action::SegmentFree, gone.address.0, gone.size);
        }
        for new in after.iter().filter(|one| !is_in(before, one)) {
            self.event(Action::SegmentAlloc, new.address.0, new.size);
        }
    }

    fn allocate(&mut self, size: Bytes) {
        let before = self.allocator.snapshot();
        let result = self
            .allocator
            .allocate(&mut self.device, Request::new(size));
        self.segments(&before);
        match result {
            Ok(allocation) => {
                self.event(Action::Alloc, allocation.ptr().0, size);
                self.live.push(allocation);
            }
            Err(AllocatorError::OutOfMemory(_)) => self.event(Action::Oom, 0, size),
            Err(error) => panic!("{error}"),
        }
        self.states
            .push((self.events.len(), self.allocator.snapshot()));
    }

    fn free(&mut self, index: usize) {
        if self.live.is_empty() {
            return;
        }
        let allocation = self.live.remove(index % self.live.len());
        let (address, size) = (allocation.ptr().0, allocation.requested());
        self.allocator
            .free(&mut self.device, allocation)
            .expect("the block is live");
        self.event(Action::FreeRequested, address, size);
        self.event(Action::FreeCompleted, address, size);
        self.states
            .push((self.events.len(), self.allocator.snapshot()));
    }

    fn empty_cache(&mut self) {
        let before = self.allocator.snapshot();
        self.allocator
            .empty_cache(&mut self.device)
            .expect("the device is well");
        self.segments(&before);
        self.states
            .push((self.events.len(), self.allocator.snapshot()));
    }

    fn snapshot(&self, conf: &str) -> Snapshot {
        let block = |block: &harness_allocator::stats::BlockInfo| Block {
            address: block.address.0,
            size: block.size,
            requested: block.requested,
            state: block.state,
            stack: StackId::EMPTY,
            extra: ExtraId::default(),
        };
        let segment = |segment: &SegmentInfo| Segment {
            device: 0,
            address: segment.address.0,
            size: segment.size,
            stream: 0,
            pool: segment.pool,
            private_pool: MempoolId::DEFAULT,
            expandable: false,
            stack: StackId::EMPTY,
            blocks: segment.blocks.iter().map(block).collect(),
            extra: ExtraId::default(),
        };
        let segments = self.allocator.snapshot().iter().map(segment).collect();
        let settings = harness_trace::snapshot::RecordedSettings {
            conf: conf.to_owned(),
            ..Default::default()
        };
        Snapshot {
            segments,
            traces: vec![self.events.clone()],
            settings: Some(settings),
            ..Snapshot::default()
        }
    }
}

/// The compared part of a state: segments, and blocks with address, size and whether they are free.
type Shape = Vec<(u64, Bytes, Vec<(u64, Bytes, bool)>)>;

fn shape_of_segments(segments: &[Segment]) -> Shape {
    let blocks = |segment: &Segment| {
        segment
            .blocks
            .iter()
            .map(|block| {
                (
                    block.address,
                    block.size,
                    block.state == BlockState::Inactive,
                )
            })
            .collect()
    };
    segments
        .iter()
        .map(|segment| (segment.address, segment.size, blocks(segment)))
        .collect()
}

fn shape_of_allocator(segments: &[SegmentInfo]) -> Shape {
    let blocks = |segment: &SegmentInfo| {
        segment
            .blocks
            .iter()
            .map(|block| {
                (
                    block.address.0,
                    block.size,
                    block.state == BlockState::Inactive,
                )
            })
            .collect()
    };
    let mut shape: Shape = segments
        .iter()
        .map(|segment| (segment.address.0, segment.size, blocks(segment)))
        .collect();
    shape.sort();
    shape
}

#[derive(Clone, Debug)]
enum Operation {
    Allocate(u64),
    Free(usize),
    EmptyCache,
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        4 => (1_u64..3_000).prop_map(|size| Operation::Allocate(size * 512)),
        4 => (1_u64..90_000_000).prop_map(Operation::Allocate),
        6 => (0_usize..64).prop_map(Operation::Free),
        1 => Just(Operation::EmptyCache),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_state_of_a_program_is_reconstructed(
        operations in prop::collection::vec(operation(), 1..120),
        conf in prop_oneof![Just(""), Just("max_split_size_mb:32"),
            Just("roundup_power2_divisions:4")]
    ) {
        let mut recorder = Recorder::new(Config::parse(conf).expect("these settings are valid"));
        for operation in operations {
            match operation {
                Operation::Allocate(size) => recorder.allocate(Bytes(size)),
                Operation::Free(index) => recorder.free(index),
                Operation::EmptyCache => recorder.empty_cache(),
            }
        }
        let snapshot = recorder.snapshot(conf);
        let history = History::new(&snapshot, 0, causes::config(&snapshot));
        for (events, expected) in &recorder.states {
            let state = history.state(events.checked_sub(1));
            prop_assert_eq!(
                shape_of_segments(&state.segments),
                shape_of_allocator(expected),
                "behind {} events",
                events
            );
        }
        let highest = recorder
            .states
            .iter()
            .map(|(_, segments)| allocated(segments))
            .max()
            .unwrap_or_default();
        if !recorder.events.is_empty() {
            let peak = causes::explain(&snapshot, 0, Options { memory: None, at: At::Peak })
                .expect("there are events");
            prop_assert_eq!(peak.accounts.allocated, highest);
        }
    }
}

fn allocated(segments: &[SegmentInfo]) -> Bytes {
    let blocks = segments.iter().flat_map(|segment| &segment.blocks);
    blocks
        .filter(|block| block.state != BlockState::Inactive)
        .map(|block| block.size)
        .sum()
}

#[test]
fn memory_that_the_first_events_release_counts_for_the_peaks() {
    let mut recorder = Recorder::new(Config::default());
    let size = Bytes::mib(30);
    recorder.event(Action::FreeRequested, 1 << 40, size);
    recorder.event(Action::FreeCompleted, 1 << 40, size);
    recorder.event(Action::SegmentFree, 1 << 40, size);
    let snapshot = recorder.snapshot("");
    let options = Options {
        memory: None,
        at: At::Peak,
    };
    let peak = causes::explain(&snapshot, 0, options).expect("there are events");
    assert_eq!(peak.moment.event, None);
    assert_eq!(peak.accounts.allocated, size);
    let history = History::new(&snapshot, 0, causes::config(&snapshot));
    let whole = Whole::of(&history).expect("there are events");
    assert_eq!((whole.peak_allocated, whole.peak_reserved), (size, size));
}

#[test]
fn an_unmapped_range_of_the_small_pool_returns_to_the_small_pool() {
    let mut recorder = Recorder::new(Config::default());
    let pages = Bytes::mib(4);
    recorder.event(Action::SegmentMap, 1 << 40, pages);
    recorder.event(Action::Alloc, 1 << 40, Bytes(1000));
    recorder.event(Action::FreeRequested, 1 << 40, Bytes(1000));
    recorder.event(Action::FreeCompleted, 1 << 40, Bytes(1000));
    recorder.event(Action::SegmentUnmap, 1 << 40, pages);
    let snapshot = recorder.snapshot("expandable_segments:True");
    let state = History::new(&snapshot, 0, causes::config(&snapshot)).state(Some(3));
    let pools: Vec<(Bytes, PoolKind)> = state
        .segments
        .iter()
        .map(|segment| (segment.size, segment.pool))
        .collect();
    assert_eq!(pools, [(pages, PoolKind::Small)]);
}

#[test]
fn contradictory_recordings_are_errors() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots");
    for name in ["features", "kept-features", "streams"] {
        let snapshot =
            Snapshot::read(&folder.join(format!("{name}.pickle.gz"))).expect("a snapshot");
        let explain =
            |snapshot: &Snapshot| causes::explain(snapshot, 0, Options::default()).map(drop);
        assert_eq!(explain(&snapshot), Ok(()), "{name}");
        let is_contradiction = |changed: &Snapshot| {
            matches!(
                explain(changed),
                Err(ExplainError::Contradiction { device: 0, .. })
            )
        };
        let events = &snapshot.traces[0];
        // The later half of the trace is missing.
        let mut cut = snapshot.clone();
        cut.traces[0].truncate(events.len() / 2);
        assert!(is_contradiction(&cut), "{name}, truncated");
        // A block is freed before it is allocated.
        let free_of = |alloc: usize, address: u64| {
            events[alloc..]
                .iter()
                .position(|event| event.action == Action::FreeRequested && event.address == address)
        };
        let allocs = events
            .iter()
            .enumerate()
            .filter(|(_, event)| event.action == Action::Alloc);
        let mut freed = allocs
            .filter_map(|(alloc, event)| Some((alloc, alloc + free_of(alloc, event.address)?)));
        let (alloc, free) = freed.next().expect("a freed block");
        let mut swapped = snapshot.clone();
        swapped.traces[0].swap(alloc, free);
        assert!(
            is_contradiction(&swapped),
            "{name}, swapped {alloc} and {free}"
        );
        // A block is allocated before its segment.
        let segment = events.windows(2).position(|pair| {
            matches!(pair[0].action, Action::SegmentAlloc | Action::SegmentMap)
                && pair[1].action == Action::Alloc
        });
        let mut early = snapshot.clone();
        let segment = segment.expect("a segment for a request");
        early.traces[0].swap(segment, segment + 1);
        assert!(
            is_contradiction(&early),
            "{name}, swapped {segment} and the next event"
        );
    }
}
