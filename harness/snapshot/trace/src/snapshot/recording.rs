//! Finds which events a snapshot's trace lacks: [`Recording`].

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::{ACTIVE, Action, AddressRanges, Event, Segment, Snapshot, StackId};

/// The completeness of a trace, inferred from its events and final state, because PyTorch does not
/// store it. Some gaps leave no evidence: a late start while nothing was reserved, or a skipped
/// action that happened only once per address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recording {
    /// The trace contains the allocation of everything that was freed in it or is live at its end.
    pub from_start: bool,
    /// Earlier events are missing: a live block has an allocation stack but no event. Later events
    /// overwrote them (`max_entries`), or an earlier recording was stopped.
    pub events_lost: bool,
    /// Actions that happened but were not recorded (`skip_actions`).
    pub missing: Vec<Action>,
}

impl Snapshot {
    /// Examines the trace of a device. Returns `None` if nothing was recorded. Takes linear time.
    pub fn recording(&self, device: u32) -> Option<Recording> {
        let events = self.traces.get(device as usize)?;
        if events
            .iter()
            .all(|event| matches!(event.action, Action::Snapshot | Action::Oom))
        {
            return None;
        }
        let mut seen = Seen::default();
        events.iter().for_each(|event| seen.event(event));
        seen.end(self.segments_of(device));
        Some(Recording {
            from_start: !seen.before,
            events_lost: seen.events_lost,
            missing: seen.missing.into_iter().collect(),
        })
    }
}

/// The state of a block after the last event at its address.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Life {
    Allocated,
    FreeRequested,
    Freed,
}

#[derive(Default)]
struct Seen {
    blocks: HashMap<u64, Life>,
    /// Sizes of segments that were allocated and not freed, by address.
    made: BTreeMap<u64, u64>,
    mapped: AddressRanges,
    given_back: HashSet<u64>,
    /// Something was allocated before the trace begins.
    before: bool,
    events_lost: bool,
    missing: BTreeSet<Action>,
}

impl Seen {
    fn event(&mut self, event: &Event) {
        let (address, end) = (event.address, event.address.saturating_add(event.size.0));
        match event.action {
            Action::Alloc => match self.blocks.insert(address, Life::Allocated) {
                Some(Life::Allocated) => self
                    .missing
                    .extend([Action::FreeRequested, Action::FreeCompleted]),
                Some(Life::FreeRequested) => self.missing.extend([Action::FreeCompleted]),
                Some(Life::Freed) | None => {}
            },
            Action::FreeRequested => match self.blocks.insert(address, Life::FreeRequested) {
                Some(Life::FreeRequested | Life::Freed) => self.missing.extend([Action::Alloc]),
                Some(Life::Allocated) => {}
                None => self.before = true,
            },
            Action::FreeCompleted => match self.blocks.insert(address, Life::Freed) {
                Some(Life::Allocated) => self.missing.extend([Action::FreeRequested]),
                Some(Life::Freed) => self.missing.extend([Action::Alloc]),
                Some(Life::FreeRequested) => {}
                None => self.before = true,
            },
            Action::SegmentAlloc => {
                if self.made.insert(address, event.size.0).is_some() {
                    self.missing.extend([Action::SegmentFree]);
                }
            }
            Action::SegmentFree => {
                if self.made.remove(&address).is_none() {
                    self.before = true;
                    if !self.given_back.insert(address) {
                        self.missing.extend([Action::SegmentAlloc]);
                    }
                }
            }
            Action::SegmentMap => self.mapped.insert(address, end),
            Action::SegmentUnmap => {
                self.before |= !self.mapped.contain(address, end);
                self.mapped.remove(address, end);
            }
            Action::Snapshot | Action::Oom => {}
        }
    }

    /// Compares the state after the last event with the final segments.
    fn end<'s>(&mut self, segments: impl Iterator<Item = &'s Segment> + Clone) {
        let held: HashSet<u64> = segments.clone().map(|segment| segment.address).collect();
        if self.made.keys().any(|address| !held.contains(address)) {
            self.missing.extend([Action::SegmentFree]);
        }
        for segment in segments {
            let is_made = match segment.expandable {
                true => self.mapped.contain(
                    segment.address,
                    segment.address.saturating_add(segment.size.0),
                ),
                false => self.made.contains_key(&segment.address),
            };
            self.held(is_made, segment.stack, Action::SegmentAlloc);
            for block in segment
                .blocks
                .iter()
                .filter(|block| ACTIVE.contains(&block.state))
            {
                let is_allocated = matches!(
                    self.blocks.get(&block.address),
                    Some(Life::Allocated | Life::FreeRequested)
                );
                self.held(is_allocated, block.stack, Action::Alloc);
            }
        }
    }

    fn held(&mut self, in_trace: bool, stack: StackId, made_by: Action) {
        self.before |= !in_trace;
        self.events_lost |=
            !in_trace && stack != StackId::EMPTY && !self.missing.contains(&made_by);
    }
}
