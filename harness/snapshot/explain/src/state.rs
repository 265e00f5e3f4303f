//! Reconstructs the allocator's state at one moment of a recording: [`History`].
//!
//! A snapshot contains the final segments and the events before them, so undoing the later events
//! gives an earlier [`State`]. Events contain the requested size of a block, not its actual size.
//! The actual size depends on the rounding settings and on the memory after the block: a remainder
//! that is too small is not split off.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use harness_allocator::stats::{BlockState, PoolKind};
use harness_allocator::{allocator::caching::Config, units::Bytes};
use harness_base::words::count;
use harness_trace::program::{EarlierSegments, LARGEST_REMAINDER, UnmappedPools};
use harness_trace::snapshot::{
    Action, Block, Event, ExtraId, MempoolId, Segment, Snapshot, StackId,
};
use serde::Serialize;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum At {
    /// The OOM that ended the program, or else the end: see [`History::moment`].
    #[default]
    Automatic,
    Oom,
    Peak,
    End,
    /// Directly after this event of the device's trace, counted from 0.
    Event(usize),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Moment {
    pub at: MomentKind,
    /// The last event before the moment, counted from 0. `None` before the first event.
    pub event: Option<usize>,
    pub events: usize,
    /// Microseconds since 1970 on the recording machine's clock, if recorded.
    pub time_us: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MomentKind {
    Oom,
    Peak,
    End,
    Event,
}

/// The segments of a device at a moment.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// In address order. The blocks of each segment cover it.
    pub segments: Vec<Segment>,
    origins: HashMap<u64, StateOrigin>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateOrigin {
    /// The event that allocated it. `None` if that was before the recording.
    pub allocated: Option<u32>,
    /// The event that freed it, if it waits for other streams.
    pub freed: Option<u32>,
}

impl State {
    /// The events of an allocated or pending block, by address.
    pub fn origin(&self, address: u64) -> StateOrigin {
        self.origins.get(&address).copied().unwrap_or_default()
    }

    pub fn reserved(&self) -> Bytes {
        self.segments.iter().map(|segment| segment.size).sum()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MomentError {
    #[error(
        "event {event} does not exist: the recording of device {device} has {}, counted from 0; \
         choose an earlier one, or `end`",
        count(*events, "event")
    )]
    NoSuchEvent {
        event: usize,
        device: u32,
        events: usize,
    },
    #[error("no request failed in the recording of device {device}: use `peak` or `end`")]
    NoOom { device: u32 },
    #[error(
        "nothing was recorded on device {device}, so only the end is known: use `end`, or call \
         `torch.cuda.memory._record_memory_history()` before the program begins"
    )]
    NoEvents { device: u32 },
}

#[derive(Clone, Debug)]
pub struct History<'a> {
    device: u32,
    events: &'a [Event],
    last: Vec<&'a Segment>,
    config: Config,
    /// Maps each event that frees a block, by number, to the events of that block.
    freed: Vec<StateOrigin>,
    /// The events of the blocks at the end.
    origins: HashMap<u64, StateOrigin>,
    unmapped_pools: UnmappedPools,
}

impl<'a> History<'a> {
    /// Prepares a device's recording. `config` are the recorded settings. Linear in events and
    /// blocks.
    pub fn new(snapshot: &'a Snapshot, device: u32, config: Config) -> Self {
        let events = snapshot.events_of(device);
        let mut last: Vec<&Segment> = snapshot.segments_of(device).collect();
        last.sort_by_key(|segment| segment.address);
        let (freed, origins) = pair(events);
        let unmapped_pools = UnmappedPools::find(events, &config);
        Self {
            device,
            events,
            last,
            config,
            freed,
            origins,
            unmapped_pools,
        }
    }

    pub const fn events(&self) -> &'a [Event] {
        self.events
    }

    /// The events of the block that this event frees. For [`Action::FreeCompleted`] this includes
    /// the request to free it.
    pub fn freed(&self, event: usize) -> StateOrigin {
        self.freed[event]
    }

    pub fn moment(&self, at: At) -> Result<Moment, MomentError> {
        let (device, events) = (self.device, self.events.len());
        let last_oom = || {
            self.events
                .iter()
                .rposition(|event| event.action == Action::Oom)
        };
        let (at, event) = match at {
            At::Automatic => match fatal_oom(self.events) {
                Some(oom) => (MomentKind::Oom, Some(oom)),
                None => (MomentKind::End, events.checked_sub(1)),
            },
            At::End => (MomentKind::End, events.checked_sub(1)),
            At::Oom | At::Peak | At::Event(_) if events == 0 => {
                return Err(MomentError::NoEvents { device });
            }
            At::Oom => (
                MomentKind::Oom,
                Some(last_oom().ok_or(MomentError::NoOom { device })?),
            ),
            At::Peak => (MomentKind::Peak, self.peak()),
            At::Event(event) if event >= events => {
                return Err(MomentError::NoSuchEvent {
                    event,
                    device,
                    events,
                });
            }
            At::Event(event) => {
                let is_oom = self.events[event].action == Action::Oom;
                (
                    if is_oom {
                        MomentKind::Oom
                    } else {
                        MomentKind::Event
                    },
                    Some(event),
                )
            }
        };
        let time_us = event.and_then(|event| self.events[event].time_us);
        Ok(Moment {
            at,
            event,
            events,
            time_us,
        })
    }

    /// The state directly after an event, or before the first one. Takes `n log n` time for `n`
    /// blocks and later events.
    pub fn state(&self, after: Option<usize>) -> State {
        let kept = after.map_or(0, |event| event + 1);
        let later = &self.events[kept..];
        if later
            .iter()
            .all(|event| matches!(event.action, Action::Snapshot | Action::Oom))
        {
            return State {
                segments: self.last.iter().map(|&segment| segment.clone()).collect(),
                origins: self.origins.clone(),
            };
        }
        let mut rewind = Rewind::new(self, self.sizes());
        (kept..self.events.len())
            .rev()
            .for_each(|event| rewind.undo(event));
        rewind.state()
    }

    /// The reserved memory before each event, and at the end. Linear.
    pub fn reserved(&self) -> Vec<Bytes> {
        let mut current = self.last.iter().map(|segment| segment.size).sum::<Bytes>();
        let mut reserved = vec![current; self.events.len() + 1];
        for (before, event) in reserved.iter_mut().zip(self.events).rev() {
            if event.action.reserves() {
                current = current.saturating_sub(event.size);
            } else if event.action.releases() {
                current += event.size;
            }
            *before = current;
        }
        reserved
    }

    /// The allocated memory before each event, and at the end.
    pub fn allocated(&self) -> Vec<Bytes> {
        let sizes = self.sizes();
        let blocks = self.last.iter().flat_map(|segment| &segment.blocks);
        let mut current = blocks
            .filter(|block| block.state == BlockState::Allocated)
            .map(|block| block.size)
            .sum::<Bytes>();
        let mut allocated = vec![current; self.events.len() + 1];
        for (index, event) in self.events.iter().enumerate().rev() {
            match event.action {
                Action::Alloc => {
                    current =
                        current.saturating_sub(sizes.allocated_by(index).unwrap_or(event.size))
                }
                Action::FreeRequested => {
                    let known = sizes.known(self.freed(index).allocated, event.address);
                    current += known.unwrap_or_else(|| self.rounded(event.size));
                }
                _ => {}
            }
            allocated[index] = current;
        }
        allocated
    }

    /// The event after which the most is allocated, or `None` if that is before the first event.
    fn peak(&self) -> Option<usize> {
        let allocated = self.allocated();
        let highest = allocated.iter().max()?;
        let before = allocated.iter().position(|bytes| bytes == highest)?;
        before.checked_sub(1)
    }

    /// The sizes of all blocks: from the final segments, or else the rounded requests.
    pub fn sizes(&self) -> Sizes {
        let mut rewind = Rewind::new(
            self,
            Sizes {
                of_event: vec![0; self.events.len()],
                before: HashMap::new(),
            },
        );
        (0..self.events.len())
            .rev()
            .for_each(|event| rewind.undo(event));
        let before = rewind
            .live
            .iter()
            .map(|(&address, live)| (address, rewind.size_of(live).get()))
            .collect();
        Sizes {
            before,
            ..rewind.sizes
        }
    }

    fn rounded(&self, requested: Bytes) -> Bytes {
        self.config.round(requested.get()).map_or(requested, Bytes)
    }
}

/// The OOM that ended the program: no allocation follows it. Programs catch many OOMs, for example
/// of cuDNN.
fn fatal_oom(events: &[Event]) -> Option<usize> {
    events
        .iter()
        .rposition(|event| matches!(event.action, Action::Oom | Action::Alloc))
        .filter(|&last| events[last].action == Action::Oom)
}

/// One of several devices: one that ran out of memory at its end, else the one with the most
/// reserved memory. Also returns whether it ran out of memory.
pub fn main_device(snapshot: &Snapshot, devices: &[u32]) -> Option<(u32, bool)> {
    let has_failed = |device| fatal_oom(snapshot.events_of(device)).is_some();
    let reserved = |device| {
        snapshot
            .segments_of(device)
            .map(|segment| segment.size)
            .sum::<Bytes>()
    };
    let main = devices
        .iter()
        .copied()
        .max_by_key(|&device| (has_failed(device), reserved(device), Reverse(device)))?;
    Some((main, has_failed(main)))
}

fn pair(events: &[Event]) -> (Vec<StateOrigin>, HashMap<u64, StateOrigin>) {
    let mut freed = vec![StateOrigin::default(); events.len()];
    let mut origins: HashMap<u64, StateOrigin> = HashMap::new();
    for (index, event) in (0_u32..).zip(events) {
        match event.action {
            Action::Alloc => {
                origins.insert(
                    event.address,
                    StateOrigin {
                        allocated: Some(index),
                        freed: None,
                    },
                );
            }
            Action::FreeRequested => {
                let origin = origins.entry(event.address).or_default();
                origin.freed = Some(index);
                freed[index as usize] = *origin;
            }
            Action::FreeCompleted => {
                freed[index as usize] = origins.remove(&event.address).unwrap_or_default()
            }
            _ => {}
        }
    }
    (freed, origins)
}

/// The sizes of all blocks of a recording: [`History::sizes`].
pub struct Sizes {
    /// By the event that allocated the block. 0 if unknown.
    of_event: Vec<u64>,
    /// By address: blocks from before the first event.
    before: HashMap<u64, u64>,
}

impl Sizes {
    pub fn allocated_by(&self, event: usize) -> Option<Bytes> {
        self.of_event
            .get(event)
            .filter(|&&size| size > 0)
            .map(|&size| Bytes(size))
    }

    pub fn before(&self, address: u64) -> Option<Bytes> {
        self.before
            .get(&address)
            .filter(|&&size| size > 0)
            .map(|&size| Bytes(size))
    }

    /// The size of a block, by the event that allocated it, or else by its address before the first
    /// event.
    fn known(&self, allocated: Option<u32>, address: u64) -> Option<Bytes> {
        allocated.map_or_else(
            || self.before(address),
            |event| self.allocated_by(event as usize),
        )
    }
}

#[derive(Clone, Copy)]
struct Live {
    block: Block,
    origin: StateOrigin,
    /// True if the size of the block is known, false if it is the rounded request.
    is_exact: bool,
}

struct Rewind<'h, 'a> {
    history: &'h History<'a>,
    sizes: Sizes,
    earlier: EarlierSegments,
    live: BTreeMap<u64, Live>,
}

impl<'h, 'a> Rewind<'h, 'a> {
    fn new(history: &'h History<'a>, sizes: Sizes) -> Self {
        let earlier = EarlierSegments::new(history.device, history.last.iter().copied());
        let blocks = history
            .last
            .iter()
            .flat_map(|segment| &segment.blocks)
            .filter(|block| block.state != BlockState::Inactive);
        let live = blocks.map(|block| {
            let origin = history
                .origins
                .get(&block.address)
                .copied()
                .unwrap_or_default();
            (
                block.address,
                Live {
                    block: *block,
                    origin,
                    is_exact: true,
                },
            )
        });
        Self {
            history,
            sizes,
            earlier,
            live: live.collect(),
        }
    }

    fn undo(&mut self, index: usize) {
        let event = &self.history.events[index];
        match event.action {
            Action::Alloc => {
                if let Some(live) = self.live.remove(&event.address) {
                    self.sizes.of_event[index] = self.size_of(&live).get();
                }
            }
            Action::FreeCompleted => self.bring_back(index, event, BlockState::PendingFree),
            Action::FreeRequested => self.bring_back(index, event, BlockState::Allocated),
            _ => self
                .earlier
                .undo(event, &self.history.unmapped_pools, MempoolId::default),
        }
    }

    fn size_of(
        &self,
        Live {
            block, is_exact, ..
        }: &Live,
    ) -> Bytes {
        if *is_exact {
            block.size
        } else {
            block.size + self.unsplit_remainder(block.address, block.size)
        }
    }

    /// The small remainder that the allocator did not split off a block, from the blocks that were
    /// live at its allocation.
    fn unsplit_remainder(&self, address: u64, size: Bytes) -> Bytes {
        let Some((&start, segment)) = self.earlier.by_address.range(..=address).next_back() else {
            return Bytes::ZERO;
        };
        let end = address + size.get();
        let segment_end = start + segment.size.get();
        if segment.expandable || segment.pool == PoolKind::Small || end > segment_end {
            return Bytes::ZERO;
        }
        let next = self
            .live
            .range(address + 1..segment_end)
            .next()
            .map_or(segment_end, |(&next, _)| next);
        let rest = next.saturating_sub(end);
        let is_oversize = self
            .history
            .config
            .max_split_size
            .is_some_and(|max| size >= max);
        if rest <= LARGEST_REMAINDER || is_oversize {
            Bytes(rest)
        } else {
            Bytes::ZERO
        }
    }

    fn bring_back(&mut self, index: usize, event: &Event, state: BlockState) {
        let history = self.history;
        let StateOrigin { allocated, freed } = history.freed(index);
        let known = self.sizes.known(allocated, event.address);
        let freed = freed.filter(|_| state == BlockState::PendingFree);
        let stack = allocated.map_or(StackId::EMPTY, |alloc| history.events[alloc as usize].stack);
        let live = self.live.entry(event.address).or_insert_with(|| {
            let size = known.unwrap_or_else(|| history.rounded(event.size));
            let block = Block {
                address: event.address,
                size,
                requested: event.size,
                state,
                stack,
                extra: ExtraId::NONE,
            };
            Live {
                block,
                origin: StateOrigin { allocated, freed },
                is_exact: known.is_some(),
            }
        });
        live.block.state = state;
        live.origin.freed = freed;
    }

    fn state(self) -> State {
        let Self {
            earlier:
                EarlierSegments {
                    by_address: mut segments,
                    ..
                },
            live,
            ..
        } = self;
        let origins = live
            .iter()
            .map(|(&address, block)| (address, block.origin))
            .collect();
        for segment in segments.values_mut() {
            let inside = live.range(segment.address..segment.address + segment.size.get());
            segment.fill(inside.map(|(_, live)| Block {
                extra: ExtraId::NONE,
                ..live.block
            }));
        }
        State {
            segments: segments.into_values().collect(),
            origins,
        }
    }
}
