use derive_more::Display;
use harness_language::error::{Problem, choices};
use harness_language::located::{Located, Position};
use harness_language::text::{BufferText, NameText};

use super::{Checker, names::Id};
use crate::metric::{BufferName, BufferRef, Expression, StepName};

/// Most names of buffers in one scenario. Every step checks all live buffers, so more of them would
/// take minutes.
pub const MAX_BUFFERS: usize = 10_000;

/// What is known of a buffer. A recovery policy may have freed a [`MaybeLive`](Buffer::MaybeLive)
/// one, or its request may have failed. The scenario expects the request of a
/// [`Refused`](Buffer::Refused) one to fail.
#[derive(Clone, Copy)]
pub(super) enum Buffer {
    Live { filled: bool },
    MaybeLive { since: Position },
    Freed { at: Position },
    Refused { at: Position },
}

/// The numbered buffers of one name. Only the run knows which of them are live.
pub(super) struct Elements {
    name: BufferName,
    at: Position,
    /// `true` if a request for one of them may fail.
    may_be_missing: bool,
}

/// What a step of `free` returns to the allocator.
#[derive(Clone, Debug, PartialEq, Display)]
pub enum FreeTarget {
    #[display("{buffer}")]
    Buffer {
        buffer: BufferRef,
        /// `true` if a recovery policy may have freed it, or its request may have failed.
        may_be_gone: bool,
    },
    Elements(BufferName),
    Storm(StepName),
}

/// The result of a request, as far as the check knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    Always,
    Never,
    Perhaps,
}

impl Checker<'_> {
    /// The name before the brackets, and the index in them. Records that the name is used here.
    fn parts(&mut self, text: &Located<String>) -> Result<(NameText, Option<Expression>), Problem> {
        let (name, index) = text
            .value
            .split_once('[')
            .map_or((text.value.as_str(), None), |(name, index)| {
                (name, Some(index))
            });
        let inside = index.map(|index| {
            index
                .strip_suffix(']')
                .filter(|index| !index.trim().is_empty())
        });
        if inside == Some(None) {
            return Err(
                Problem::new(text.at, format!("`{}` is not a buffer", text.value)).help(
                    "a numbered buffer is a name with a number in brackets, as in `kv[3]` or \
                     `\"kv[i]\"`",
                ),
            );
        }
        let index = inside
            .flatten()
            .map(|index| self.index(text, index, name.chars().count() + 1));
        let name = NameText(text.with(name.to_owned()));
        self.named.insert(name.checked()?.to_owned());
        Ok((name, index.transpose()?))
    }

    /// Declares a buffer. With `again`, the buffer may be live already and is then leaked.
    pub(crate) fn make_buffer(
        &mut self,
        text: &BufferText,
        served: Served,
        again: bool,
    ) -> Result<BufferRef, Problem> {
        let (name, index) = self.parts(text)?;
        self.is_no_storm(&name)?;
        let name = if index.is_some() {
            self.make_element(&name, served)?
        } else {
            self.make_named(&name, served, again)?
        };
        Ok(BufferRef { name, index })
    }

    fn is_no_storm(&self, name: &NameText) -> Result<(), Problem> {
        let text = name.text();
        match self.names.ids.get(text).filter(|id| id.storm.is_some()) {
            None => Ok(()),
            Some(id) => {
                let message =
                    format!("`{text}` is already a storm, so `free: {text}` would be ambiguous");
                Err(Problem::new(name.at, message)
                    .see(id.at, "the storm")
                    .help("choose another name for the buffer"))
            }
        }
    }

    fn make_element(&mut self, name: &NameText, served: Served) -> Result<BufferName, Problem> {
        if self.names.buffers.contains_key(name.text()) {
            let message = format!("`{}` is already a buffer without a number", name.text());
            return Err(
                Problem::new(name.at, message).help("choose another name for the numbered buffers")
            );
        }
        let number = self.new_buffer_number(name)?;
        let new = || Elements {
            name: BufferName::new(number, name.text()),
            at: name.at,
            may_be_missing: false,
        };
        let elements = self
            .names
            .elements
            .entry(name.text().to_owned())
            .or_insert_with(new);
        elements.may_be_missing |= served != Served::Always;
        Ok(elements.name.clone())
    }

    fn new_buffer_number(&self, name: &NameText) -> Result<usize, Problem> {
        let number = self.names.buffers.len() + self.names.elements.len();
        let is_known = self.names.buffers.contains_key(name.text())
            || self.names.elements.contains_key(name.text());
        if is_known || number < MAX_BUFFERS {
            return Ok(number);
        }
        let message = format!("the scenario has more than {MAX_BUFFERS} buffers");
        Err(Problem::new(name.at, message)
            .help("use numbered buffers, as in `kv[i]`, or `storm` for many blocks"))
    }

    fn make_named(
        &mut self,
        name: &NameText,
        served: Served,
        again: bool,
    ) -> Result<BufferName, Problem> {
        let (text, at) = (name.text(), name.at);
        if let Some(elements) = self.names.elements.get(text) {
            let message = format!("`{text}` is the name of numbered buffers");
            return Err(Problem::new(at, message)
                .see(elements.at, "made here")
                .help(format!("give it a number, as in `{text}[1]`")));
        }
        let number = self.new_buffer_number(name)?;
        let state = match served {
            Served::Always => Buffer::Live { filled: false },
            Served::Never => Buffer::Refused { at },
            Served::Perhaps => Buffer::MaybeLive { since: at },
        };
        match self.names.buffers.get_mut(text) {
            None => {
                let buffer = BufferName::new(number, text);
                self.names
                    .buffers
                    .insert(text.to_owned(), (buffer.clone(), state));
                Ok(buffer)
            }
            Some((_, Buffer::Live { .. })) if !again => {
                Err(
                    Problem::new(at, format!("buffer `{text}` is already live")).help(format!(
                        "free it first with `- free: {text}`, choose another name, or leak \
                     the old one with `leak: true`"
                    )),
                )
            }
            Some((_, Buffer::MaybeLive { since })) if !again && *since != at => {
                let message = format!("buffer `{text}` may still be live");
                Err(Problem::new(at, message)
                    .see(*since, "may be freed from here on")
                    .help(format!(
                        "add `- free: {text}` before this step; it does nothing if the \
                         buffer is freed already"
                    )))
            }
            Some((_, Buffer::MaybeLive { .. })) if !again => {
                let message = format!("buffer `{text}` may be live from the previous iteration");
                Err(Problem::new(at, message).help(format!(
                    "free it at the end of the loop, number it, as in `{text}[i]`, \
                         or set `leak: true`"
                )))
            }
            Some((buffer, old)) => {
                *old = state;
                Ok(buffer.clone())
            }
        }
    }

    pub(crate) fn live_buffer(&mut self, text: &BufferText) -> Result<BufferRef, Problem> {
        let (name, index) = self.parts(text)?;
        Ok(BufferRef {
            name: if index.is_some() {
                self.element(&name)?
            } else {
                self.live_named(&name)?
            },
            index,
        })
    }

    fn element(&self, name: &NameText) -> Result<BufferName, Problem> {
        let elements = self.names.elements.get(name.text());
        elements
            .map(|elements| elements.name.clone())
            .ok_or_else(|| self.no_such_buffer(name.text(), name.at))
    }

    pub(crate) fn live_named(&mut self, name: &NameText) -> Result<BufferName, Problem> {
        let text = name.checked()?;
        self.named.insert(text.to_owned());
        match self.names.buffers.get(text) {
            Some((buffer, Buffer::Live { .. })) => Ok(buffer.clone()),
            Some((_, Buffer::MaybeLive { since })) => {
                let message = format!("buffer `{text}` may be freed already");
                Err(Problem::new(name.at, message)
                    .see(*since, "may be freed from here on")
                    .help("only `free` may name it now"))
            }
            Some((_, dead)) => Err(dead_buffer(text, name.at, dead)),
            None => Err(self.no_such_buffer(text, name.at)),
        }
    }

    pub(crate) fn live_or_numbered(&mut self, name: &NameText) -> Result<BufferName, Problem> {
        match self.names.elements.get(name.text()) {
            Some(elements) => {
                self.named.insert(name.text().to_owned());
                Ok(elements.name.clone())
            }
            None => self.live_named(name),
        }
    }

    fn no_such_buffer(&self, text: &str, at: Position) -> Problem {
        if let Some(elements) = self.names.elements.get(text) {
            return Problem::new(at, format!("`{text}` is the name of numbered buffers"))
                .see(elements.at, "made here")
                .help(format!(
                    "name one of them, as in `{text}[1]`; `free: {text}` frees all of them"
                ));
        }
        let names = self
            .names
            .buffers
            .keys()
            .chain(self.names.elements.keys())
            .map(String::as_str);
        Problem::new(at, format!("no earlier step makes a buffer `{text}`"))
            .help(choices(text, "buffers", names))
    }

    pub(crate) fn free(&mut self, text: &Located<String>) -> Result<FreeTarget, Problem> {
        let ((name, index), at) = (self.parts(text)?, text.at);
        if index.is_some() {
            let may_be_gone = self
                .names
                .elements
                .get(name.text())
                .is_some_and(|elements| elements.may_be_missing);
            return Ok(FreeTarget::Buffer {
                buffer: BufferRef {
                    name: self.element(&name)?,
                    index,
                },
                may_be_gone,
            });
        }
        let text = name.text();
        if let Some(Id {
            name,
            at: storm_at,
            storm: Some(live),
            ..
        }) = self.names.ids.get_mut(text)
        {
            return match std::mem::take(live) {
                true => Ok(FreeTarget::Storm(name.clone())),
                false => Err(
                    Problem::new(at, format!("the blocks of `{text}` are already freed"))
                        .see(*storm_at, "the storm"),
                ),
            };
        }
        if let Some(elements) = self.names.elements.get(text) {
            return Ok(FreeTarget::Elements(elements.name.clone()));
        }
        match self.names.buffers.get_mut(text) {
            Some((buffer, state @ (Buffer::Live { .. } | Buffer::MaybeLive { .. }))) => {
                let may_be_gone = matches!(state, Buffer::MaybeLive { .. });
                *state = Buffer::Freed { at };
                Ok(FreeTarget::Buffer {
                    buffer: BufferRef {
                        name: buffer.clone(),
                        index: None,
                    },
                    may_be_gone,
                })
            }
            Some((_, dead)) => Err(dead_buffer(text, at, dead)),
            None => Err(self.no_such_buffer(text, at)),
        }
    }

    /// Marks a buffer, or the numbered buffers of a name, as possibly freed.
    pub(crate) fn may_be_gone(&mut self, buffer: &BufferName, since: Position) {
        if let Some(elements) = self.names.elements.get_mut(buffer.name()) {
            elements.may_be_missing = true;
        }
        if let Some((_, state)) = self.names.buffers.get_mut(buffer.name()) {
            *state = Buffer::MaybeLive { since };
        }
    }

    pub(crate) fn fill(&mut self, text: &BufferText) -> Result<BufferRef, Problem> {
        let buffer = self.live_buffer(text)?;
        if let Some((_, state)) = self.names.buffers.get_mut(buffer.name.name()) {
            *state = Buffer::Live { filled: true };
        }
        Ok(buffer)
    }

    pub(crate) fn verify(&mut self, text: &BufferText) -> Result<BufferRef, Problem> {
        let buffer = self.live_buffer(text)?;
        match self.names.buffers.get(buffer.name.name()) {
            Some((_, Buffer::Live { filled: false })) => Err(Problem::new(
                text.at,
                format!("buffer `{buffer}` has not been filled, so there is nothing to verify"),
            )
            .help(format!("add `- fill: {buffer}` before this step"))),
            _ => Ok(buffer),
        }
    }
}

fn dead_buffer(text: &str, at: Position, state: &Buffer) -> Problem {
    match state {
        Buffer::Freed { at: first } => Problem::new(
            at,
            format!("buffer `{text}` is already freed, at line {}", first.line),
        )
        .see(*first, "freed here"),
        Buffer::Refused { at: first } => {
            let message = format!(
                "buffer `{text}` does not exist: line {} expects its request to fail",
                first.line
            );
            Problem::new(at, message).see(*first, "`expect: oom`")
        }
        Buffer::Live { .. } | Buffer::MaybeLive { .. } => {
            Problem::new(at, format!("buffer `{text}` is live"))
        }
    }
}
