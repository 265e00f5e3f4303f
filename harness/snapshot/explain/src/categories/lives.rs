//! The allocations of a recording: [`Lives`].

use std::collections::HashMap;

use harness_allocator::{stats::BlockState, units::Bytes};
use harness_trace::snapshot::{Action, Event, StackId};

use super::origin::{Origin, PassKind};
use crate::view::View;

/// The event that allocates a block, or its address if that was before the recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Birth {
    Before(u64),
    Event(usize),
}

pub(super) struct Life<'a> {
    pub(super) birth: Birth,
    pub(super) stack: StackId,
    pub(super) origin: Origin<'a>,
    pub(super) stream: u64,
    pub(super) size: Bytes,
    /// The event that frees the block.
    pub(super) end: Option<usize>,
}

impl Life<'_> {
    pub(super) const fn is_from_before(&self) -> bool {
        matches!(self.birth, Birth::Before(_))
    }
}

/// Consecutive allocations of one kind.
pub(super) struct Pass {
    pub(super) kind: PassKind,
    /// The number of backward passes up to this one.
    pub(super) backward: usize,
    pub(super) last_allocation: usize,
}

/// The blocks of a recording and the passes that allocate them.
#[derive(Default)]
pub(super) struct Lives<'a> {
    pub(super) passes: Vec<Pass>,
    /// The pass of the last allocation up to each event.
    pub(super) pass_of: Vec<u32>,
    /// Ordered by birth.
    pub(super) lives: Vec<Life<'a>>,
    /// The most events between the allocation and the end of a block in the same pass, by pass and
    /// stack.
    pub(super) longest: HashMap<(u32, StackId), usize>,
    /// By the event that allocates: how many earlier allocations of the same pass have its stack.
    pub(super) repetitions: HashMap<usize, u32>,
    /// The allocations of the current pass, by stack.
    in_pass: HashMap<StackId, u32>,
    /// The positions of live blocks in `lives`, by address.
    live: HashMap<u64, usize>,
}

impl<'a> Lives<'a> {
    pub(super) fn of(view: &View<'_>, of_stack: &[Origin<'a>]) -> Self {
        let mut all = Self::default();
        let of = |stack: StackId| of_stack[stack.0 as usize];
        for (index, event) in view.history.events().iter().enumerate() {
            match event.action {
                Action::Alloc => all.allocate(index, event, of(event.stack)),
                Action::FreeRequested => all.free(index, event, of(StackId::EMPTY)),
                _ => {}
            }
            all.pass_of.push(all.last_pass());
        }
        for segment in view.snapshot.segments_of(view.device) {
            let blocks = segment.blocks.iter().filter(|block| {
                block.state == BlockState::Allocated && !all.live.contains_key(&block.address)
            });
            all.lives.extend(blocks.map(|block| Life {
                birth: Birth::Before(block.address),
                stack: block.stack,
                origin: of(block.stack),
                stream: segment.stream,
                size: block.requested,
                end: None,
            }));
        }
        all.lives.sort_by_key(|life| life.birth);
        all
    }

    fn last_pass(&self) -> u32 {
        (self.passes.len() as u32).saturating_sub(1)
    }

    fn allocate(&mut self, index: usize, event: &Event, origin: Origin<'a>) {
        self.enter_pass(index, origin);
        let repetition = self.in_pass.entry(event.stack).or_insert(0);
        self.repetitions.insert(index, *repetition);
        *repetition += 1;
        self.live.insert(event.address, self.lives.len());
        self.lives.push(Life {
            birth: Birth::Event(index),
            stack: event.stack,
            origin,
            stream: event.stream,
            size: event.size,
            end: None,
        });
    }

    /// Begins a pass if the allocation is of another kind than the one before.
    fn enter_pass(&mut self, index: usize, origin: Origin<'a>) {
        let last = self.passes.last();
        let kind = origin
            .pass()
            .or(last.map(|pass| pass.kind))
            .unwrap_or(PassKind::Forward);
        match self.passes.last_mut() {
            Some(last) if last.kind == kind => last.last_allocation = index,
            last => {
                let backward =
                    last.map_or(0, |pass| pass.backward) + usize::from(kind == PassKind::Backward);
                self.passes.push(Pass {
                    kind,
                    backward,
                    last_allocation: index,
                });
                self.in_pass.clear();
            }
        }
    }

    fn free(&mut self, index: usize, event: &Event, without_stack: Origin<'a>) {
        let Some(life) = self.live.remove(&event.address) else {
            self.lives.push(Life {
                birth: Birth::Before(event.address),
                stack: StackId::EMPTY,
                origin: without_stack,
                stream: event.stream,
                size: event.size,
                end: Some(index),
            });
            return;
        };
        let last = self.last_pass();
        let life = &mut self.lives[life];
        life.end = Some(index);
        if let Birth::Event(start) = life.birth
            && self.pass_of[start] == last
        {
            let longest = self.longest.entry((last, life.stack)).or_insert(0);
            *longest = (index - start).max(*longest);
        }
    }
}
