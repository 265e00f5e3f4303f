//! The objects that a pickle builds. They refer to each other by number, so shared and circular
//! objects need no special case.
//!
//! Most objects of a snapshot are events, frames and stacks. They are converted as soon as they are
//! complete, so two million events never exist as two million dictionaries.

use std::{fmt::Display, hash::Hash};

use harness_allocator::units::Bytes;
use indexmap::IndexSet;

use super::super::{
    Action, Event, budget::Budget, error::SnapshotError, extras::ExtraId, stacks::StackId,
};
use super::texts::{TextId, WORDS};

/// The approximate overhead of a table entry: a hash map slot and two pointers.
const ENTRY: usize = 64;

/// A value. Texts, large numbers and byte strings are indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) enum Item {
    None,
    Bool(bool),
    Int(i64),
    /// An index into [`Objects::numbers`].
    Big(u32),
    /// The bits of the number.
    Float(u64),
    Text(TextId),
    /// An index into [`Objects::byte_strings`].
    Bytes(u32),
    /// An index into [`Objects::tuples`].
    Tuple(u32),
    Object(u32),
}

/// The kind of an [`Item::Object`], with an index into the lists of [`Objects`].
#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Object {
    EmptyList,
    EmptyDict,
    List(u32),
    Dict(u32),
    Set(u32),
    /// A dictionary that is an allocator event.
    Event(u32),
    /// A dictionary that is a stack frame.
    Frame(u32),
    /// A list of frames.
    Stack(StackId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct RawFrame {
    pub(in super::super) name: TextId,
    pub(in super::super) file: TextId,
    pub(in super::super) line: u32,
    pub(in super::super) extra: ExtraId,
}

#[derive(Debug)]
pub(in super::super) struct Wrong {
    /// The place of the value, as in `blocks[1].size`. Empty if it is the whole object.
    pub(in super::super) path: String,
    expected: &'static str,
    pub(in super::super) found: String,
}

impl Wrong {
    pub(in super::super) fn new(path: &str, expected: &'static str, found: String) -> Self {
        Self {
            path: path.to_owned(),
            expected,
            found,
        }
    }

    /// Puts a place in front of the path.
    pub(in super::super) fn at(self, place: impl Display) -> Self {
        let path = if self.path.is_empty() {
            place.to_string()
        } else {
            format!("{place}.{}", self.path)
        };
        Self { path, ..self }
    }

    fn missing(key: TextId) -> Self {
        Self::new(key.name(), "present", "missing".to_owned())
    }
}

impl From<Wrong> for SnapshotError {
    fn from(
        Wrong {
            path,
            expected,
            found,
        }: Wrong,
    ) -> Self {
        Self::WrongType {
            path,
            expected,
            found,
        }
    }
}

/// A copy of a dictionary. Reading a key removes it.
pub(in super::super) struct Fields {
    /// The keys that were not read, with their values.
    pub(in super::super) rest: Vec<[Item; 2]>,
}

impl Fields {
    pub(in super::super) fn new(pairs: &[Item]) -> Self {
        Self {
            rest: pairs.as_chunks().0.to_vec(),
        }
    }

    pub(in super::super) fn take(&mut self, key: TextId) -> Option<Item> {
        let mut found = None;
        self.rest.retain(|&[name, value]| {
            let is_other = name != Item::Text(key);
            found = if is_other { found } else { Some(value) };
            is_other
        });
        found
    }

    pub(in super::super) fn read<T>(
        &mut self,
        key: TextId,
        read: impl FnOnce(Item) -> Result<T, Wrong>,
    ) -> Result<Option<T>, Wrong> {
        self.take(key)
            .map(|value| read(value).map_err(|wrong| wrong.at(key.name())))
            .transpose()
    }

    /// Reads a key that every dictionary of this kind has.
    pub(in super::super) fn require<T>(
        &mut self,
        key: TextId,
        read: impl FnOnce(Item) -> Result<T, Wrong>,
    ) -> Result<T, Wrong> {
        self.read(key, read)?.ok_or_else(|| Wrong::missing(key))
    }
}

/// All objects of a pickle. Events and frames refer to its tables of stacks and unknown keys.
#[derive(Default)]
pub(in super::super) struct Objects {
    texts: IndexSet<String>,
    objects: Vec<Object>,
    lists: Vec<Vec<Item>>,
    /// Keys and values alternate.
    dicts: Vec<Vec<Item>>,
    pub(in super::super) tuples: IndexSet<Vec<Item>>,
    pub(in super::super) sets: Vec<Vec<Item>>,
    pub(in super::super) numbers: Vec<i128>,
    pub(in super::super) byte_strings: Vec<Box<[u8]>>,
    pub(in super::super) events: Vec<Event>,
    pub(in super::super) frames: IndexSet<RawFrame>,
    pub(in super::super) stacks: IndexSet<Vec<u32>>,
    /// Alternating keys and values.
    pub(in super::super) extras: IndexSet<Vec<Item>>,
    pub(in super::super) budget: Budget,
}

impl Objects {
    /// Counts the items of a list, dictionary or set. Building the snapshot copies each list once,
    /// so an item counts twice.
    #[inline]
    fn count_items(&mut self, items: usize) {
        self.budget.add(2 * items * size_of::<Item>());
    }

    pub(super) fn new(budget: Budget) -> Self {
        // Number 0 is the empty stack and the empty set of keys.
        let (stacks, extras) = (IndexSet::from([Vec::new()]), IndexSet::from([Vec::new()]));
        Self {
            texts: WORDS.iter().map(|&word| word.to_owned()).collect(),
            stacks,
            extras,
            budget,
            ..Self::default()
        }
    }

    /// Replaces invalid UTF-8: Python writes lone surrogates for such file names.
    pub(super) fn new_text(&mut self, bytes: &[u8]) -> Item {
        let text = String::from_utf8_lossy(bytes);
        let known = self.texts.get_index_of(&*text).map(|known| known as u32);
        let bytes = text.len();
        Item::Text(TextId(known.unwrap_or_else(|| {
            intern(&mut self.texts, text.into_owned(), bytes, &self.budget)
        })))
    }

    #[inline]
    pub(super) fn add(&mut self, object: Object) -> Item {
        let id = self.objects.len() as u32;
        self.objects.push(object);
        self.budget.add(size_of::<Object>());
        Item::Object(id)
    }

    pub(super) fn new_set(&mut self, items: &[Item]) -> Item {
        self.budget.add(ENTRY);
        self.count_items(items.len());
        self.sets.push(items.to_vec());
        self.add(Object::Set(self.sets.len() as u32 - 1))
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> Item {
        self.budget.add(bytes.len() + ENTRY);
        self.byte_strings.push(bytes.into());
        Item::Bytes(self.byte_strings.len() as u32 - 1)
    }

    pub(super) fn number(&mut self, number: i128) -> Item {
        if let Ok(number) = i64::try_from(number) {
            return Item::Int(number);
        }
        self.budget.add(size_of::<i128>());
        self.numbers.push(number);
        Item::Big(self.numbers.len() as u32 - 1)
    }

    /// Tuples are immutable, so equal ones are stored once.
    pub(super) fn new_tuple(&mut self, items: &[Item]) -> Item {
        Item::Tuple(intern(
            &mut self.tuples,
            items.to_vec(),
            size_of_val(items),
            &self.budget,
        ))
    }

    #[inline]
    pub(super) fn set_items(&mut self, dict: u32, pairs: &[Item]) -> Result<(), &'static str> {
        match self.objects[dict as usize] {
            Object::EmptyDict => {
                self.objects[dict as usize] = match self.compact(pairs) {
                    Some(object) => object,
                    None => {
                        self.budget.add(ENTRY);
                        self.count_items(pairs.len());
                        self.dicts.push(pairs.to_vec());
                        Object::Dict(self.dicts.len() as u32 - 1)
                    }
                };
            }
            Object::Dict(index) => {
                self.count_items(pairs.len());
                self.dicts[index as usize].extend_from_slice(pairs);
            }
            Object::Event(_) | Object::Frame(_) if pairs.is_empty() => {}
            Object::Event(_) | Object::Frame(_) => {
                return Err("an opcode adds keys to a complete event or frame");
            }
            _ => return Err("an opcode sets a key, but the target is not a dictionary"),
        }
        Ok(())
    }

    #[inline]
    pub(super) fn append(&mut self, list: u32, items: &[Item]) -> Result<(), &'static str> {
        match self.objects[list as usize] {
            Object::EmptyList if items.is_empty() => {}
            Object::EmptyList => {
                self.objects[list as usize] = match self.as_stack(&[], items) {
                    Some(stack) => Object::Stack(stack),
                    None => {
                        self.budget.add(ENTRY);
                        self.count_items(items.len());
                        self.lists.push(items.to_vec());
                        Object::List(self.lists.len() as u32 - 1)
                    }
                };
            }
            Object::List(index) => {
                self.count_items(items.len());
                self.lists[index as usize].extend_from_slice(items);
            }
            Object::Set(index) => {
                self.count_items(items.len());
                self.sets[index as usize].extend_from_slice(items);
            }
            // A stack of more than a thousand frames is appended in several batches.
            Object::Stack(stack) => {
                let frames = self.stacks[stack.0 as usize].clone();
                let longer = self
                    .as_stack(&frames, items)
                    .ok_or("a call stack contains an item that is not a frame")?;
                self.objects[list as usize] = Object::Stack(longer);
            }
            _ => return Err("an opcode appends, but the target is not a list"),
        }
        Ok(())
    }

    #[inline]
    fn as_stack(&mut self, begin: &[u32], items: &[Item]) -> Option<StackId> {
        let mut frames = Vec::with_capacity(begin.len() + items.len());
        frames.extend_from_slice(begin);
        for &item in items {
            let Some(Object::Frame(frame)) = self.object(item) else {
                return None;
            };
            frames.push(frame);
        }
        Some(self.stack_of(frames))
    }

    fn stack_of(&mut self, frames: Vec<u32>) -> StackId {
        let bytes = size_of_val(&frames[..]);
        StackId(intern(&mut self.stacks, frames, bytes, &self.budget))
    }

    #[inline]
    fn compact(&mut self, pairs: &[Item]) -> Option<Object> {
        let has = |key: TextId| pairs.chunks_exact(2).any(|pair| pair[0] == Item::Text(key));
        if has(TextId::ACTION) {
            let event = self.event_of(pairs).ok()?;
            self.events.push(event);
            self.budget.add(size_of::<Event>());
            Some(Object::Event(self.events.len() as u32 - 1))
        } else if has(TextId::FILENAME) {
            self.frame_of(pairs).ok().map(Object::Frame)
        } else {
            None
        }
    }

    pub(in super::super) fn event_of(&mut self, pairs: &[Item]) -> Result<Event, Wrong> {
        let (mut action, mut address, mut size, mut stream, mut time_us, mut stack) =
            (None, None, None, 0, None, StackId::EMPTY);
        let mut unknown = Vec::new();
        for pair in pairs.chunks_exact(2) {
            let (key, value) = (pair[0], pair[1]);
            match key {
                Item::Text(TextId::ACTION) => action = Some(self.action(value)?),
                Item::Text(TextId::ADDR | TextId::DEVICE_FREE) => {
                    address = Some(self.address(value).map_err(|wrong| wrong.at("addr"))?)
                }
                Item::Text(TextId::SIZE) => {
                    size = Some(self.amount(value).map_err(|wrong| wrong.at("size"))?)
                }
                Item::Text(TextId::STREAM) => {
                    stream = self.address(value).map_err(|wrong| wrong.at("stream"))?
                }
                Item::Text(TextId::TIME_US) => {
                    time_us = Some(self.amount(value).map_err(|wrong| wrong.at("time_us"))?)
                }
                Item::Text(TextId::FRAMES) => {
                    stack = self.stack(value).map_err(|wrong| wrong.at("frames"))?
                }
                _ => unknown.extend([key, value]),
            }
        }
        let action = action.ok_or_else(|| Wrong::missing(TextId::ACTION))?;
        Ok(Event {
            action,
            address: address
                .or((action == Action::Snapshot).then_some(0))
                .ok_or_else(|| Wrong::missing(TextId::ADDR))?,
            size: Bytes(size.ok_or_else(|| Wrong::missing(TextId::SIZE))?),
            stream,
            time_us,
            stack,
            extra: self.keep(&unknown),
        })
    }

    fn action(&self, item: Item) -> Result<Action, Wrong> {
        let known = match item {
            // The table of words lists the actions in the order of `Action::ALL`.
            Item::Text(text) => text
                .0
                .checked_sub(TextId::ALLOC.0)
                .and_then(|index| Action::ALL.get(index as usize)),
            _ => None,
        };
        let wrong = || {
            self.wrong(
                item,
                "one of PyTorch's actions, such as alloc, free_requested or segment_alloc",
            )
            .at("action")
        };
        known.copied().ok_or_else(wrong)
    }

    fn frame_of(&mut self, pairs: &[Item]) -> Result<u32, Wrong> {
        let (mut name, mut file, mut line) = (None, None, None);
        let mut unknown = Vec::new();
        for pair in pairs.chunks_exact(2) {
            let (key, value) = (pair[0], pair[1]);
            match (key, value) {
                (Item::Text(TextId::NAME), Item::Text(text)) => name = Some(text),
                (Item::Text(TextId::FILENAME), Item::Text(text)) => file = Some(text),
                (Item::Text(TextId::NAME), other) => {
                    return Err(self.wrong(other, "a text").at("name"));
                }
                (Item::Text(TextId::FILENAME), other) => {
                    return Err(self.wrong(other, "a text").at("filename"));
                }
                (Item::Text(TextId::LINE), Item::Int(number)) if u32::try_from(number).is_ok() => {
                    line = Some(number as u32)
                }
                // An invalid line number is stored unchanged.
                _ => unknown.extend([key, value]),
            }
        }
        let frame = RawFrame {
            name: name.ok_or_else(|| Wrong::missing(TextId::NAME))?,
            file: file.ok_or_else(|| Wrong::missing(TextId::FILENAME))?,
            line: line.unwrap_or(0),
            extra: self.keep(&unknown),
        };
        Ok(intern(
            &mut self.frames,
            frame,
            size_of::<RawFrame>(),
            &self.budget,
        ))
    }

    pub(in super::super) fn keep(&mut self, pairs: &[Item]) -> ExtraId {
        let known = self.extras.get_index_of(pairs).map(|known| known as u32);
        ExtraId(known.unwrap_or_else(|| {
            intern(
                &mut self.extras,
                pairs.to_vec(),
                size_of_val(pairs),
                &self.budget,
            )
        }))
    }

    pub(in super::super) fn stack(&mut self, item: Item) -> Result<StackId, Wrong> {
        const EXPECTED: &str = "a list of frames with name, filename and line";
        let (object, list) = match (item, self.object(item)) {
            (Item::None, _) | (_, Some(Object::EmptyList)) => return Ok(StackId::EMPTY),
            (_, Some(Object::Stack(stack))) => return Ok(stack),
            (Item::Object(object), Some(Object::List(list))) => (object, list),
            _ => return Err(self.wrong(item, EXPECTED)),
        };
        let mut frames = Vec::new();
        for item in self.lists[list as usize].clone() {
            frames.push(match self.object(item) {
                Some(Object::Frame(frame)) => frame,
                Some(Object::Dict(dict)) => {
                    let pairs = self.dicts[dict as usize].clone();
                    self.frame_of(&pairs)?
                }
                _ => return Err(self.wrong(item, EXPECTED)),
            });
        }
        let stack = self.stack_of(frames);
        // Converts an object once, even if several events share it.
        self.objects[object as usize] = Object::Stack(stack);
        Ok(stack)
    }

    /// Reads an address or handle. C++ writes values from 2^63 as negative numbers.
    #[inline]
    pub(in super::super) fn address(&self, item: Item) -> Result<u64, Wrong> {
        match item {
            Item::Int(number) => Ok(number.cast_unsigned()),
            _ => self.amount(item).map_err(|wrong| Wrong {
                expected: "an address",
                ..wrong
            }),
        }
    }

    #[inline]
    pub(in super::super) fn amount(&self, item: Item) -> Result<u64, Wrong> {
        let number = match item {
            Item::Int(number) => u64::try_from(number).ok(),
            Item::Big(index) => u64::try_from(self.numbers[index as usize]).ok(),
            _ => None,
        };
        number.ok_or_else(|| self.wrong(item, "a non-negative whole number"))
    }

    pub(in super::super) fn bool(&self, item: Item) -> Result<bool, Wrong> {
        match item {
            Item::Bool(is_true) => Ok(is_true),
            _ => Err(self.wrong(item, "True or False")),
        }
    }

    pub(in super::super) fn word<T: Copy>(
        &self,
        item: Item,
        words: &[(TextId, T)],
        expected: &'static str,
    ) -> Result<T, Wrong> {
        let found = words.iter().find(|(word, _)| item == Item::Text(*word));
        found
            .map(|&(_, value)| value)
            .ok_or_else(|| self.wrong(item, expected))
    }

    pub(in super::super) fn text(&self, item: Item) -> Option<&str> {
        match item {
            Item::Text(id) => Some(&self.texts[id.0 as usize]),
            _ => None,
        }
    }

    pub(in super::super) fn object(&self, item: Item) -> Option<Object> {
        match item {
            Item::Object(id) => Some(self.objects[id as usize]),
            _ => None,
        }
    }

    /// The items of a list, except for call stacks.
    pub(in super::super) fn list(&self, item: Item) -> Option<&[Item]> {
        match self.object(item)? {
            Object::EmptyList => Some(&[]),
            Object::List(list) => Some(&self.lists[list as usize]),
            _ => None,
        }
    }

    /// The alternating keys and values of a dictionary, except for events and frames.
    pub(in super::super) fn dict(&self, item: Item) -> Option<&[Item]> {
        match self.object(item)? {
            Object::EmptyDict => Some(&[]),
            Object::Dict(dict) => Some(&self.dicts[dict as usize]),
            _ => None,
        }
    }

    pub(in super::super) fn wrong(&self, item: Item, expected: &'static str) -> Wrong {
        let found = match item {
            Item::None => "None".to_owned(),
            Item::Bool(value) => (if value { "True" } else { "False" }).to_owned(),
            Item::Int(number) => number.to_string(),
            Item::Big(index) => self.numbers[index as usize].to_string(),
            Item::Float(bits) => f64::from_bits(bits).to_string(),
            Item::Text(id) => format!(
                "`{}`",
                self.texts[id.0 as usize]
                    .chars()
                    .take(60)
                    .collect::<String>()
            ),
            Item::Bytes(_) => "bytes".to_owned(),
            Item::Tuple(_) => "a tuple".to_owned(),
            Item::Object(object) => match self.objects[object as usize] {
                Object::EmptyList | Object::List(_) => "a list",
                Object::Stack(_) => "a list of frames",
                Object::EmptyDict | Object::Dict(_) => "a dictionary",
                Object::Event(_) => "an event",
                Object::Frame(_) => "a frame",
                Object::Set(_) => "a set",
            }
            .to_owned(),
        };
        Wrong::new("", expected, found)
    }
}

/// Returns the number of a value in a table, and counts the memory of a new one.
fn intern<T: Eq + Hash>(table: &mut IndexSet<T>, value: T, bytes: usize, budget: &Budget) -> u32 {
    let (index, is_new) = table.insert_full(value);
    if is_new {
        budget.add(bytes + ENTRY);
    }
    index as u32
}
