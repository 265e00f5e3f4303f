//! Stores each distinct call stack once. [`Stacks`] holds [`Frame`]s, identified by [`FrameId`],
//! and stacks, identified by [`StackId`].

use indexmap::IndexSet;

use super::extras::ExtraId;

/// Identifies a stack in [`Stacks`]. The empty stack is [`StackId::EMPTY`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackId(pub u32);

impl StackId {
    pub const EMPTY: Self = Self(0);
}

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frame {
    pub name: String,
    pub file: String,
    /// Counted from 1; 0 if the file has none. For unsymbolized C++ code, the address in the
    /// library.
    pub line: u32,
    /// Unknown keys, for example from `torch.compile`.
    pub extra: ExtraId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrameId(pub u32);

/// The distinct call stacks, innermost frame first.
#[derive(Clone, Debug)]
pub struct Stacks {
    frames: IndexSet<Frame>,
    stacks: IndexSet<Vec<FrameId>>,
}

impl Default for Stacks {
    fn default() -> Self {
        Self {
            frames: IndexSet::new(),
            stacks: IndexSet::from([Vec::new()]),
        }
    }
}

/// Equal stacks have equal ids.
impl PartialEq for Stacks {
    fn eq(&self, other: &Self) -> bool {
        self.frames.as_slice() == other.frames.as_slice()
            && self.stacks.as_slice() == other.stacks.as_slice()
    }
}

impl Stacks {
    /// The frames of a stack, innermost first. Empty for an unknown id.
    pub fn frames(
        &self,
        stack: StackId,
    ) -> impl ExactSizeIterator<Item = &Frame> + DoubleEndedIterator + '_ {
        self.ids(stack).iter().map(|&id| self.frame(id))
    }

    /// The ids of a stack's frames, innermost first. Empty for an unknown id.
    pub fn ids(&self, stack: StackId) -> &[FrameId] {
        self.stacks
            .get_index(stack.0 as usize)
            .map_or(&[], Vec::as_slice)
    }

    pub fn frame(&self, id: FrameId) -> &Frame {
        &self.frames[id.0 as usize]
    }

    pub fn all(&self) -> impl Iterator<Item = StackId> {
        (0..self.stacks.len() as u32).map(StackId)
    }

    /// The distinct frames in the order of their ids.
    pub fn all_frames(&self) -> impl Iterator<Item = &Frame> {
        self.frames.iter()
    }

    pub fn intern_frame(&mut self, frame: Frame) -> FrameId {
        FrameId(self.frames.insert_full(frame).0 as u32)
    }

    /// Stores a stack, innermost frame first, if it is new, and returns its id.
    pub fn intern(&mut self, frames: &[FrameId]) -> StackId {
        StackId(self.stacks.insert_full(frames.to_vec()).0 as u32)
    }
}
