//! Stores each distinct call stack once. [`Stacks`] holds [`Frame`]s, identified by [`FrameId`], and stacks, identified by
//! [`StackId`].

use std::collections::HashMap;
use std::fmt;

use super::extras::ExtraId;

/// Identifies a stack in [`Stacks`]. The empty stack is [`StackId::EMPTY`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackId(pub u32);

impl StackId {
    /// The stack without frames.
    pub const EMPTY: Self = Self(0);
}

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frame {
    pub name: String,
    pub file: String,
    /// Counted from 1; 0 if the file has none. For unsymbolized C++ code, the address in the library.
    pub line: u32,
    /// Unknown keys, for example from `torch.compile`.
    pub extra: ExtraId,
}

/// Identifies a frame in [`Stacks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrameId(pub u32);

/// The distinct call stacks, innermost frame first.
#[derive(Clone)]
pub struct Stacks {
    frames: Vec<Frame>,
    stacks: Vec<Box<[FrameId]>>,
    frame_ids: HashMap<Frame, FrameId>,
    stack_ids: HashMap<Box<[FrameId]>, StackId>,
}

impl Default for Stacks {
    fn default() -> Self {
        let mut stacks = Self { frames: Vec::new(), stacks: Vec::new(), frame_ids: HashMap::new(), stack_ids: HashMap::new() };
        stacks.intern(&[]);
        stacks
    }
}

impl fmt::Debug for Stacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stacks").field("frames", &self.frames).field("stacks", &self.stacks).finish()
    }
}

impl PartialEq for Stacks {
    fn eq(&self, other: &Self) -> bool {
        (&self.frames, &self.stacks) == (&other.frames, &other.stacks)
    }
}

impl Eq for Stacks {}

impl Stacks {
    /// The frames of a stack, innermost first. Empty for an unknown id.
    pub fn frames(&self, stack: StackId) -> impl ExactSizeIterator<Item = &Frame> + DoubleEndedIterator + '_ {
        self.ids(stack).iter().map(|&id| self.frame(id))
    }

    /// The ids of a stack's frames, innermost first. Empty for an unknown id.
    #[must_use]
    pub fn ids(&self, stack: StackId) -> &[FrameId] {
        self.stacks.get(stack.0 as usize).map_or(&[], |ids| ids)
    }

    /// # Panics
    /// Panics for an unknown id.
    #[must_use]
    pub fn frame(&self, id: FrameId) -> &Frame {
        &self.frames[id.0 as usize]
    }

    /// The number of distinct stacks, including the empty one. Ids are smaller than this.
    #[must_use]
    pub fn len(&self) -> usize {
        self.stacks.len()
    }

    /// Returns true if only the empty stack exists.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 1
    }

    /// The number of distinct frames. Ids are smaller than this.
    #[must_use]
    pub fn frame_count(&self) -> usize {
        self.frames.len()
    }

    /// Stores a frame if it is new, and returns its id.
    ///
    /// # Panics
    /// Panics at 2^32 distinct frames.
    pub fn intern_frame(&mut self, frame: Frame) -> FrameId {
        if let Some(&id) = self.frame_ids.get(&frame) {
            return id;
        }
        let id = FrameId(u32::try_from(self.frames.len()).expect("fewer than 2^32 different frames"));
        self.frames.push(frame.clone());
        self.frame_ids.insert(frame, id);
        id
    }

    /// Stores a stack, innermost frame first, if it is new, and returns its id.
    ///
    /// # Panics
    /// Panics at 2^32 distinct stacks.
    pub fn intern(&mut self, frames: &[FrameId]) -> StackId {
        if let Some(&id) = self.stack_ids.get(frames) {
            return id;
        }
        let id = StackId(u32::try_from(self.stacks.len()).expect("fewer than 2^32 different stacks"));
        self.stacks.push(frames.into());
        self.stack_ids.insert(frames.into(), id);
        id
    }
}
