//! Recognizes the private pools of captured CUDA graphs in recordings without pools, as PyTorch
//! before 2.12 makes them: [`pools`].
//!
//! Before a capture begins, `torch/cuda/graphs.py` requests memory for the state of random numbers,
//! unless another graph still has it. All later requests on the same stream use the capture's pool
//! until another capture begins there, the pool's segments are released, or a request uses another
//! segment. Another capture also begins if the pool reserves a segment although one of the same
//! size is free.

use std::collections::{BTreeMap, HashMap, HashSet};

use harness_allocator::units::Bytes;

use crate::snapshot::{Action, Event, PoolId, Segment, Snapshot, StackId};

/// Numbers pools that are not in the snapshot, because their graphs were dropped.
const DROPPED: u64 = u64::MAX;
/// Numbers pools that were released before a capture used their name again.
const RELEASED: u64 = u64::MAX - 1;

/// Gives a private pool another name if PyTorch released it and a later capture used its name
/// again. PyTorch ends a pool when it releases the last segment.
pub(super) fn rename_released(
    of_events: &mut [(usize, PoolId)],
    events: &[Event],
    held: &[Segment],
) {
    #[derive(Clone, Copy, Default)]
    struct Life {
        reserved: Bytes,
        /// How often the pool was released.
        released: u64,
    }
    let mut lives: HashMap<PoolId, Life> = HashMap::new();
    held.iter().for_each(|segment| {
        lives.entry(segment.private_pool).or_default().reserved += segment.size
    });
    let mut number = |&(index, pool): &(usize, PoolId)| {
        let (event, life) = (&events[index], lives.entry(pool).or_default());
        let number = life.released;
        if event.action.reserves() {
            life.reserved += event.size;
        } else if event.action.releases() {
            life.reserved = life.reserved.saturating_sub(event.size);
            life.released += u64::from(life.reserved == Bytes::ZERO);
        }
        number
    };
    let numbers: Vec<u64> = of_events.iter().map(&mut number).collect();
    let mut last: HashMap<PoolId, u64> = HashMap::new();
    of_events
        .iter()
        .zip(&numbers)
        .for_each(|(&(_, pool), &number)| _ = last.insert(pool, number));
    let mut names: HashMap<(PoolId, u64), PoolId> = HashMap::new();
    for ((_, pool), number) in of_events.iter_mut().zip(numbers) {
        if !pool.is_default() && number < last[pool] {
            let next = PoolId(RELEASED, names.len() as u64);
            *pool = *names.entry((*pool, number)).or_insert(next);
        }
    }
}

/// A segment of a capture's pool.
struct Reserved {
    end: u64,
    pool: PoolId,
    /// The blocks in use.
    blocks: u64,
}

struct Capture {
    pool: PoolId,
    /// True before the first request of the captured program.
    begins: bool,
}

/// The private pools of events, by index. Empty if the recording contains pools.
pub(super) fn pools(snapshot: &Snapshot, device: u32, events: &[Event]) -> Vec<(usize, PoolId)> {
    if events.iter().any(|event| snapshot.pool_of(event).is_some()) {
        return Vec::new();
    }
    let mut known: HashMap<StackId, bool> = HashMap::new();
    let mut is_begin = |stack: StackId| {
        *known.entry(stack).or_insert_with(|| {
            let begins = |name: &str| matches!(name, "__enter__" | "capture_begin");
            snapshot
                .stacks
                .frames(stack)
                .any(|frame| frame.file.ends_with("torch/cuda/graphs.py") && begins(&frame.name))
        })
    };
    let (mut captures, mut live): (BTreeMap<u64, Capture>, BTreeMap<u64, Reserved>) =
        (BTreeMap::new(), BTreeMap::new());
    let (mut found, mut dropped, mut random_states) = (Vec::new(), 0, HashSet::new());
    for (index, event) in events.iter().enumerate() {
        let around = live
            .range_mut(..=event.address)
            .next_back()
            .filter(|(_, reserved)| event.address < reserved.end);
        let blocks = around.map(|(_, reserved)| reserved);
        let around = blocks.as_ref().map(|reserved| reserved.pool);
        match event.action {
            Action::SegmentFree | Action::SegmentUnmap => {
                let Some(pool) = around else { continue };
                found.push((index, pool));
                live.remove(&event.address);
                if live.values().any(|of| of.pool == pool) {
                    continue;
                }
                if random_states.is_empty() {
                    captures.retain(|_, capture| capture.pool != pool);
                }
                for capture in captures.values_mut().filter(|capture| capture.pool == pool) {
                    dropped += 1;
                    capture.pool = PoolId(DROPPED, dropped);
                }
            }
            Action::SegmentAlloc | Action::SegmentMap | Action::Alloc | Action::Oom => {
                let begins = is_begin(event.stack);
                let capture = captures.get_mut(&event.stream);
                if begins {
                    if event.action == Action::Alloc {
                        random_states.insert(event.address);
                    }
                    // The state of random numbers is allocated in the default pool.
                    if capture.is_none_or(|capture| !capture.begins) {
                        dropped += 1;
                        captures.insert(
                            event.stream,
                            Capture {
                                pool: PoolId(DROPPED, dropped),
                                begins,
                            },
                        );
                    }
                    continue;
                }
                let Some(capture) = capture else { continue };
                capture.begins = false;
                match (event.action, around) {
                    (Action::Alloc, None) => _ = captures.remove(&event.stream),
                    // Several captures can share a pool.
                    (Action::Alloc, Some(pool)) => {
                        capture.pool = pool;
                        found.push((index, pool));
                        blocks.into_iter().for_each(|reserved| reserved.blocks += 1);
                    }
                    (Action::Oom, _) => found.push((index, capture.pool)),
                    _ => {
                        let size = event.size.0;
                        let is_free = |(start, of): (&u64, &Reserved)| {
                            of.pool == capture.pool && of.blocks == 0 && of.end - start == size
                        };
                        if event.action == Action::SegmentAlloc && live.iter().any(is_free) {
                            dropped += 1;
                            capture.pool = PoolId(DROPPED, dropped);
                        }
                        live.insert(
                            event.address,
                            Reserved {
                                end: event.address + size,
                                pool: capture.pool,
                                blocks: 0,
                            },
                        );
                        found.push((index, capture.pool));
                    }
                }
            }
            Action::FreeCompleted => {
                random_states.remove(&event.address);
                blocks
                    .into_iter()
                    .for_each(|reserved| reserved.blocks = reserved.blocks.saturating_sub(1));
            }
            Action::FreeRequested | Action::Snapshot => {}
        }
    }
    // The snapshot contains the pools of the segments that were not released.
    let mut names: HashMap<PoolId, PoolId> = HashMap::new();
    for segment in snapshot.segments_of(device) {
        if let Some(reserved) = live.get(&segment.address) {
            let name = names.entry(reserved.pool).or_insert(segment.private_pool);
            // The inference is wrong if the default pool contains one of the segments.
            *name = if segment.private_pool.is_default() {
                PoolId::DEFAULT
            } else {
                *name
            };
        }
    }
    let named = found
        .into_iter()
        .map(|(index, pool)| (index, names.get(&pool).copied().unwrap_or(pool)));
    named.filter(|(_, pool)| !pool.is_default()).collect()
}
