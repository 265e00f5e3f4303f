//! Detects recordings that contradict themselves: [`Contradiction`]. Undoing the events from the
//! final state must never free memory twice.

use harness_allocator::stats::BlockState;
use harness_trace::snapshot::{Action, AddressRanges, Event, Segment, Snapshot};

/// An event that cannot have happened before the later events and the final state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("event {event} ({}) at {address:#x} contradicts the later events and the final segments: \
     {why}", action.name())]
pub struct Contradiction {
    pub event: usize,
    pub action: Action,
    pub address: u64,
    pub why: &'static str,
}

/// Finds the last contradictory event of a device. Takes `n log n` time for `n` events and blocks.
pub(crate) fn contradiction(snapshot: &Snapshot, device: u32) -> Option<Contradiction> {
    let events = snapshot.traces.get(device as usize)?;
    // Without the events of a skipped action (`skip_actions`), blocks seem to overlap.
    let has = |action: Action| events.iter().any(|event| event.action == action);
    if snapshot
        .recording(device)?
        .missing
        .into_iter()
        .any(|action| !has(action))
    {
        return None;
    }
    let segments: Vec<&Segment> = snapshot.segments_of(device).collect();
    let in_use = segments
        .iter()
        .flat_map(|segment| &segment.blocks)
        .filter(|block| block.state != BlockState::Inactive);
    let mut undo = Undo {
        blocks: AddressRanges(
            in_use
                .map(|block| (block.address, block.address + block.size.0))
                .collect(),
        ),
        mapped: AddressRanges::default(),
        segments: AddressRanges::default(),
    };
    for segment in &segments {
        let ranges = if segment.expandable {
            &mut undo.mapped
        } else {
            &mut undo.segments
        };
        ranges
            .0
            .insert(segment.address, segment.address + segment.size.0);
    }
    // RMM logs have neither segments nor segment events.
    let has_segments =
        !segments.is_empty() || has(Action::SegmentFree) || has(Action::SegmentUnmap);
    let mut backwards = events.iter().enumerate().rev();
    backwards.find_map(|(index, event)| {
        let why = undo.event(event, has_segments).err()?;
        Some(Contradiction {
            event: index,
            action: event.action,
            address: event.address,
            why,
        })
    })
}

/// The memory in use before the events that were not undone yet.
struct Undo {
    blocks: AddressRanges,
    segments: AddressRanges,
    mapped: AddressRanges,
}

impl Undo {
    fn event(&mut self, event: &Event, has_segments: bool) -> Result<(), &'static str> {
        let (start, end) = (
            event.address,
            event.address.saturating_add(event.size.0.max(1)),
        );
        let is_reserved = |undo: &Self| {
            !has_segments || undo.segments.contain(start, end) || undo.mapped.contain(start, end)
        };
        match event.action {
            Action::Alloc => {
                let is_reserved = is_reserved(self);
                self.blocks
                    .0
                    .remove(&start)
                    .ok_or("the block is not in use after it")?;
                is_reserved
                    .then_some(())
                    .ok_or("no segment contains the block")
            }
            Action::FreeCompleted if self.blocks.overlap(start, end) => {
                Err("another block is in use there")
            }
            Action::FreeCompleted => {
                self.blocks.0.insert(start, end);
                is_reserved(self)
                    .then_some(())
                    .ok_or("no segment contains the block")
            }
            Action::FreeRequested => self
                .blocks
                .0
                .contains_key(&start)
                .then_some(())
                .ok_or("the block was never freed"),
            Action::SegmentAlloc | Action::SegmentMap if self.blocks.overlap(start, end) => {
                Err("a block is already in use there")
            }
            Action::SegmentAlloc => self
                .segments
                .0
                .remove(&start)
                .map(drop)
                .ok_or("the segment does not exist after it"),
            Action::SegmentMap if !self.mapped.contain(start, end) => {
                Err("the range is not mapped after it")
            }
            Action::SegmentMap => {
                self.mapped.remove(start, end);
                Ok(())
            }
            Action::SegmentFree | Action::SegmentUnmap
                if self.segments.overlap(start, end) || self.mapped.overlap(start, end) =>
            {
                Err("the segment still exists after it")
            }
            Action::SegmentFree => {
                self.segments.0.insert(start, end);
                Ok(())
            }
            Action::SegmentUnmap => {
                self.mapped.insert(start, end);
                Ok(())
            }
            Action::Snapshot | Action::Oom => Ok(()),
        }
    }
}
