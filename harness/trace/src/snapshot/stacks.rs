//! Call stacks, each kept once: [`Stacks`] holds [`Frame`]s and stacks of them, and names them by [`FrameId`] and [`StackId`].

use std::collections::HashMap;
use std::fmt;

use super::extras::ExtraId;

/// Names a stack of [`Stacks`]. The empty stack is [`StackId::EMPTY`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackId(pub u32);

impl StackId {
    /// No frames were recorded.
    pub const EMPTY: Self = Self(0);
}

/// One frame of a call stack.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Frame {
    pub name: String,
    pub file: String,
    /// Counted from 1; of C++ code that was not symbolized the address in the library. 0 where the file has none.
    pub line: u32,
    /// Further keys of the frame, as `torch.compile` adds them.
    pub extra: ExtraId,
}

/// Names a frame of [`Stacks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrameId(pub u32);

/// Call stacks, each kept once, the innermost frame first.
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
    /// The frames of a stack, the innermost first. None for an id of other [`Stacks`].
    pub fn frames(&self, stack: StackId) -> impl ExactSizeIterator<Item = &Frame> + DoubleEndedIterator + '_ {
        self.ids(stack).iter().map(|&id| self.frame(id))
    }

    /// The ids of a stack's frames, the innermost first. None for an id of other [`Stacks`].
    #[must_use]
    pub fn ids(&self, stack: StackId) -> &[FrameId] {
        self.stacks.get(stack.0 as usize).map_or(&[], |ids| ids)
    }

    /// One frame.
    ///
    /// # Panics
    /// For an id of other [`Stacks`].
    #[must_use]
    pub fn frame(&self, id: FrameId) -> &Frame {
        &self.frames[id.0 as usize]
    }

    /// How many different stacks there are, the empty one included. Their ids are the numbers below.
    #[must_use]
    pub fn len(&self) -> usize {
        self.stacks.len()
    }

    /// Whether there is no stack but the empty one.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 1
    }

    /// How many different frames there are. Their ids are the numbers below.
    #[must_use]
    pub fn frame_count(&self) -> usize {
        self.frames.len()
    }

    /// The id of a frame, which is kept if it is new.
    ///
    /// # Panics
    /// At 2^32 different frames.
    pub fn intern_frame(&mut self, frame: Frame) -> FrameId {
        if let Some(&id) = self.frame_ids.get(&frame) {
            return id;
        }
        let id = FrameId(u32::try_from(self.frames.len()).expect("fewer than 2^32 different frames"));
        self.frames.push(frame.clone());
        self.frame_ids.insert(frame, id);
        id
    }

    /// The id of a stack, the innermost frame first, which is kept if it is new.
    ///
    /// # Panics
    /// At 2^32 different stacks.
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
