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

use crate::snapshot::{Action, Event, MempoolId, Segment, Snapshot, StackId};

/// Numbers pools that are not in the snapshot, because their graphs were dropped.
const DROPPED: u64 = u64::MAX;
/// Numbers pools that were released before a capture used their name again.
const RELEASED: u64 = u64::MAX - 1;

/// Gives a private pool another name if PyTorch released it and a later capture used its name
/// again. PyTorch ends a pool when it releases the last segment.
pub(super) fn rename_released(
    of_events: &mut [(usize, MempoolId)],
    events: &[Event],
    held: &[Segment],
) {
    #[derive(Clone, Copy, Default)]
    struct Life {
        reserved: Bytes,
        /// How often the pool was released.
        released: u64,
    }
    let mut lives: HashMap<MempoolId, Life> = HashMap::new();
    held.iter().for_each(|segment| {
        lives.entry(segment.private_pool).or_default().reserved += segment.size
    });
    let mut number = |&(index, pool): &(usize, MempoolId)| {
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
    let mut last: HashMap<MempoolId, u64> = HashMap::new();
    of_events
        .iter()
        .zip(&numbers)
        .for_each(|(&(_, pool), &number)| _ = last.insert(pool, number));
    let mut names: HashMap<(MempoolId, u64), MempoolId> = HashMap::new();
    for ((_, pool), number) in of_events.iter_mut().zip(numbers) {
        if !pool.is_default() && number < last[pool] {
            let next = MempoolId(RELEASED, names.len() as u64);
            *pool = *names.entry((*pool, number)).or_insert(next);
        }
    }
}

/// A segment of a capture's pool.
struct Reserved {
    end: u64,
    pool: MempoolId,
    blocks: u64,
}

struct Capture {
    pool: MempoolId,
    /// True before the first request of the captured program.
    begins: bool,
}

/// The private pools of events, by index. Empty if the recording contains pools.
pub(super) fn pools(snapshot: &Snapshot, device: u32, events: &[Event]) -> Vec<(usize, MempoolId)> {
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
    let mut captures = Captures::default();
    let mut found = Vec::new();
    for (index, event) in events.iter().enumerate() {
        let pool = match event.action {
            Action::SegmentFree | Action::SegmentUnmap => captures.release(event),
            Action::SegmentAlloc | Action::SegmentMap | Action::Alloc | Action::Oom => {
                if is_begin(event.stack) {
                    captures.begin(event);
                    None
                } else {
                    captures.request(event)
                }
            }
            Action::FreeCompleted => {
                captures.free(event);
                None
            }
            Action::FreeRequested | Action::Snapshot => None,
        };
        found.extend(pool.map(|pool| (index, pool)));
    }
    let names = captures.names(snapshot, device);
    let named = found
        .into_iter()
        .map(|(index, pool)| (index, names.get(&pool).copied().unwrap_or(pool)));
    named.filter(|(_, pool)| !pool.is_default()).collect()
}

#[derive(Default)]
struct Captures {
    /// By stream.
    of_stream: BTreeMap<u64, Capture>,
    /// The segments that are not released, by address.
    live: BTreeMap<u64, Reserved>,
    /// The number of names that were given.
    dropped: u64,
    random_states: HashSet<u64>,
}

impl Captures {
    fn next_name(dropped: &mut u64) -> MempoolId {
        *dropped += 1;
        MempoolId(DROPPED, *dropped)
    }

    fn around(live: &mut BTreeMap<u64, Reserved>, address: u64) -> Option<&mut Reserved> {
        let (_, reserved) = live.range_mut(..=address).next_back()?;
        Some(reserved).filter(|reserved| address < reserved.end)
    }

    fn release(&mut self, event: &Event) -> Option<MempoolId> {
        let pool = Self::around(&mut self.live, event.address)?.pool;
        self.live.remove(&event.address);
        if self.live.values().any(|of| of.pool == pool) {
            return Some(pool);
        }
        if self.random_states.is_empty() {
            self.of_stream.retain(|_, capture| capture.pool != pool);
        }
        for capture in self.of_stream.values_mut() {
            if capture.pool == pool {
                capture.pool = Self::next_name(&mut self.dropped);
            }
        }
        Some(pool)
    }

    /// Begins a capture. The state of random numbers is allocated in the default pool.
    fn begin(&mut self, event: &Event) {
        if event.action == Action::Alloc {
            self.random_states.insert(event.address);
        }
        let capture = self.of_stream.get(&event.stream);
        if capture.is_none_or(|capture| !capture.begins) {
            let pool = Self::next_name(&mut self.dropped);
            let begins = true;
            self.of_stream
                .insert(event.stream, Capture { pool, begins });
        }
    }

    /// Returns the pool of a request. `None`: the default pool.
    fn request(&mut self, event: &Event) -> Option<MempoolId> {
        let capture = self.of_stream.get_mut(&event.stream)?;
        capture.begins = false;
        match event.action {
            Action::Alloc => match Self::around(&mut self.live, event.address) {
                // Several captures can share a pool.
                Some(reserved) => {
                    capture.pool = reserved.pool;
                    reserved.blocks += 1;
                }
                None => {
                    self.of_stream.remove(&event.stream);
                    return None;
                }
            },
            Action::Oom => {}
            _ => {
                let size = event.size.0;
                let is_free = |(start, of): (&u64, &Reserved)| {
                    of.pool == capture.pool && of.blocks == 0 && of.end - start == size
                };
                if event.action == Action::SegmentAlloc && self.live.iter().any(is_free) {
                    capture.pool = Self::next_name(&mut self.dropped);
                }
                self.live.insert(
                    event.address,
                    Reserved {
                        end: event.address + size,
                        pool: capture.pool,
                        blocks: 0,
                    },
                );
            }
        }
        Some(capture.pool)
    }

    fn free(&mut self, event: &Event) {
        self.random_states.remove(&event.address);
        if let Some(reserved) = Self::around(&mut self.live, event.address) {
            reserved.blocks = reserved.blocks.saturating_sub(1);
        }
    }

    /// The snapshot contains the pools of the segments that were not released.
    fn names(&self, snapshot: &Snapshot, device: u32) -> HashMap<MempoolId, MempoolId> {
        let mut names: HashMap<MempoolId, MempoolId> = HashMap::new();
        for segment in snapshot.segments_of(device) {
            if let Some(reserved) = self.live.get(&segment.address) {
                let name = names.entry(reserved.pool).or_insert(segment.private_pool);
                // The inference is wrong if the default pool contains one of the segments.
                if segment.private_pool.is_default() {
                    *name = MempoolId::DEFAULT;
                }
            }
        }
        names
    }
}
