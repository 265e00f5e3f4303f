//! Recognizes the private pools of captured CUDA graphs in recordings without pools, as PyTorch before 2.12 makes them: [`pools`].
//!
//! Before a capture begins, `torch/cuda/graphs.py` requests memory for the state of random numbers. All later requests on the same stream use the
//! capture's pool until another capture begins there, the pool's segments are released, or a request uses another segment.

use std::collections::{BTreeMap, HashMap};

use crate::snapshot::{Action, Event, PoolId, Snapshot, StackId};

/// Numbers pools that are not in the snapshot, because their graphs were dropped.
const DROPPED: u64 = u64::MAX;

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
            snapshot.stacks.frames(stack).any(|frame| frame.file.ends_with("torch/cuda/graphs.py") && begins(&frame.name))
        })
    };
    let (mut captures, mut live): (BTreeMap<u64, Capture>, BTreeMap<u64, (u64, PoolId)>) = (BTreeMap::new(), BTreeMap::new());
    let (mut found, mut dropped) = (Vec::new(), 0);
    for (index, event) in events.iter().enumerate() {
        let around = live.range(..=event.address).next_back().filter(|&(_, &(end, _))| event.address < end);
        let around = around.map(|(_, &(_, pool))| pool);
        match event.action {
            Action::SegmentFree | Action::SegmentUnmap => {
                let Some(pool) = around else { continue };
                found.push((index, pool));
                live.remove(&event.address);
                if !live.values().any(|&(_, of)| of == pool) {
                    captures.retain(|_, capture| capture.pool != pool);
                }
            }
            Action::SegmentAlloc | Action::SegmentMap | Action::Alloc | Action::Oom => {
                let begins = is_begin(event.stack);
                let capture = captures.get_mut(&event.stream);
                if begins {
                    // The state of random numbers is allocated in the default pool.
                    if capture.is_none_or(|capture| !capture.begins) {
                        dropped += 1;
                        captures.insert(event.stream, Capture { pool: PoolId(DROPPED, dropped), begins });
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
                    }
                    (Action::Oom, _) => found.push((index, capture.pool)),
                    _ => {
                        live.insert(event.address, (event.address + event.size.0, capture.pool));
                        found.push((index, capture.pool));
                    }
                }
            }
            Action::FreeRequested | Action::FreeCompleted | Action::Snapshot => {}
        }
    }
    // The snapshot contains the pools of the segments that were not released.
    let mut names: HashMap<PoolId, PoolId> = HashMap::new();
    for segment in snapshot.segments_of(device) {
        if let Some(&(_, pool)) = live.get(&segment.address) {
            let name = names.entry(pool).or_insert(segment.private_pool);
            // The inference is wrong if the default pool contains one of the segments.
            *name = if segment.private_pool.is_default() { PoolId::DEFAULT } else { *name };
        }
    }
    let named = found.into_iter().map(|(index, pool)| (index, names.get(&pool).copied().unwrap_or(pool)));
    named.filter(|(_, pool)| !pool.is_default()).collect()
}
