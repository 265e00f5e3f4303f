use std::io::Read;

use super::super::budget::{self, Budget};
use super::super::error::{SnapshotError, not_pickle};
use super::objects::{Item, Object, Objects};
use super::{input::Input, opcode};

/// Reads one pickle to its end. Fails if it is not a pickle, is damaged or truncated, or calls
/// code.
pub(in super::super) fn read(
    source: impl Read,
    budget: Budget,
) -> Result<(Item, Objects), SnapshotError> {
    let mut machine = Machine {
        input: Input::new(source),
        objects: Objects::new(budget),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
        scratch: Vec::new(),
    };
    check_format(machine.input.peek()?)?;
    let top = machine.run()?;
    machine.input.finish()?;
    Ok((top, machine.objects))
}

/// Fails if a file with these first bytes is not a pickle. A pickle starts with its protocol or, in
/// protocol 1, with its outermost object.
pub(in super::super) fn check_format(first: &[u8]) -> Result<(), SnapshotError> {
    match first.first() {
        Some(&(opcode::PROTO | opcode::EMPTY_DICT | opcode::EMPTY_LIST | opcode::MARK)) => Ok(()),
        _ => Err(not_pickle(first)),
    }
}

struct Machine<R> {
    input: Input<R>,
    objects: Objects,
    stack: Vec<Item>,
    marks: Vec<usize>,
    memo: Vec<Option<Item>>,
    scratch: Vec<u8>,
}

impl<R: Read> Machine<R> {
    fn run(&mut self) -> Result<Item, SnapshotError> {
        loop {
            let opcode = self.input.byte()?;
            if opcode == opcode::STOP {
                return self.pop();
            }
            self.execute(opcode)?;
        }
    }

    #[inline]
    fn execute(&mut self, opcode: u8) -> Result<(), SnapshotError> {
        let item = match opcode {
            opcode::BINGET => {
                let index = self.input.byte()?;
                self.get(index.into())?
            }
            opcode::LONG_BINGET => {
                let index = u32::from_le_bytes(self.input.array()?);
                self.get(index)?
            }
            opcode::MEMOIZE => return self.put(self.memo.len()),
            opcode::BINPUT => {
                let index = self.input.byte()?;
                return self.put(index.into());
            }
            opcode::LONG_BINPUT => {
                let index = u32::from_le_bytes(self.input.array()?);
                return self.put(index as usize);
            }
            opcode::MARK => {
                self.marks.push(self.stack.len());
                return self.check_size();
            }
            opcode::BININT1 => Item::Int(self.input.byte()?.into()),
            opcode::BININT2 => Item::Int(u16::from_le_bytes(self.input.array()?).into()),
            opcode::BININT => Item::Int(i32::from_le_bytes(self.input.array()?).into()),
            opcode::LONG1 => {
                let length = self.input.byte()?;
                self.long(length.into())?
            }
            opcode::EMPTY_DICT => self.objects.add(Object::EmptyDict),
            opcode::EMPTY_LIST => self.objects.add(Object::EmptyList),
            opcode::SETITEMS => return self.put_items(true),
            opcode::APPENDS => return self.put_items(false),
            opcode::SETITEM => return self.put_last(2, true),
            opcode::APPEND => return self.put_last(1, false),
            opcode::SHORT_BINUNICODE
            | opcode::BINUNICODE
            | opcode::BINUNICODE8
            | opcode::BINSTRING
            | opcode::SHORT_BINSTRING => {
                self.read_sized(opcode)?;
                self.objects.new_text(&self.scratch)
            }
            opcode::NONE => Item::None,
            opcode::NEWTRUE => Item::Bool(true),
            opcode::NEWFALSE => Item::Bool(false),
            _ => return self.execute_rare(opcode),
        };
        self.push(item)
    }

    fn execute_rare(&mut self, opcode: u8) -> Result<(), SnapshotError> {
        let item = match opcode {
            opcode::PROTO => match self.input.byte()? {
                0..=5 => return Ok(()),
                newer => {
                    return Err(self.damaged(format!(
                        "pickle protocol {newer} is unknown (protocols 1 to 5 are supported)"
                    )));
                }
            },
            // Frames do not change the meaning of a pickle.
            opcode::FRAME => return self.input.array::<8>().map(drop),
            opcode::LONG4 => {
                let length = u32::from_le_bytes(self.input.array()?);
                self.long(length)?
            }
            opcode::BINFLOAT => Item::Float(u64::from_be_bytes(self.input.array()?)),
            opcode::BINBYTES | opcode::SHORT_BINBYTES | opcode::BINBYTES8 | opcode::BYTEARRAY8 => {
                self.read_sized(opcode)?;
                self.objects.bytes(&self.scratch)
            }
            opcode::EMPTY_TUPLE => self.objects.new_tuple(&[]),
            opcode::TUPLE | opcode::FROZENSET => {
                let start = self.pop_mark()?;
                self.collect(start, opcode == opcode::FROZENSET)
            }
            opcode::TUPLE1 | opcode::TUPLE2 | opcode::TUPLE3 => {
                let start = self.below(usize::from(opcode - opcode::TUPLE1) + 1)?;
                self.collect(start, false)
            }
            opcode::EMPTY_SET => self.objects.new_set(&[]),
            opcode::ADDITEMS => return self.put_items(false),
            opcode::POP => match self.marks.last() {
                Some(&mark) if mark == self.stack.len() => return self.pop_mark().map(drop),
                _ => return self.pop().map(drop),
            },
            opcode::POP_MARK => {
                let start = self.pop_mark()?;
                self.stack.truncate(start);
                return Ok(());
            }
            opcode::DUP => self.stack[self.below(1)?],
            _ => return Err(self.refused(opcode)),
        };
        self.push(item)
    }

    fn refused(&mut self, opcode: u8) -> SnapshotError {
        let offset = self.input.offset() - 1;
        if let Some(name) = opcode::calls_code(opcode) {
            return SnapshotError::CallsCode {
                opcode: name,
                name: self.called(opcode),
                offset,
            };
        }
        let what = if opcode::is_text(opcode) {
            "it uses pickle protocol 0, which PyTorch never writes; use protocol 2 or newer"
                .to_owned()
        } else {
            format!("{opcode:#04x} is not a pickle opcode")
        };
        SnapshotError::Damaged { offset, what }
    }

    /// The name of the function that would be called: the next two lines, or the two texts on the
    /// stack. Empty if unknown.
    fn called(&mut self, opcode: u8) -> String {
        let mut parts = Vec::new();
        if matches!(opcode, opcode::GLOBAL | opcode::INST) {
            while parts.len() < 2 && self.input.line(&mut self.scratch).is_ok() {
                parts.push(String::from_utf8_lossy(&self.scratch).into_owned());
            }
        } else {
            let names = self.stack.iter().rev().take(2).rev();
            parts.extend(
                names
                    .filter_map(|item| self.objects.text(*item))
                    .map(str::to_owned),
            );
        }
        let printable =
            |part: &String| part.chars().take(100).filter(|c| !c.is_control()).collect();
        let parts: Vec<String> = parts.iter().map(printable).collect();
        if parts.is_empty() {
            String::new()
        } else {
            format!(" {}", parts.join("."))
        }
    }

    fn damaged(&self, what: impl Into<String>) -> SnapshotError {
        SnapshotError::Damaged {
            offset: self.input.offset(),
            what: what.into(),
        }
    }

    #[inline]
    fn push(&mut self, item: Item) -> Result<(), SnapshotError> {
        self.stack.push(item);
        self.check_size()
    }

    fn pop(&mut self) -> Result<Item, SnapshotError> {
        let start = self.below(1)?;
        let item = self.stack[start];
        self.stack.truncate(start);
        Ok(item)
    }

    /// The position of the last `count` items, which must be above the last mark.
    #[inline]
    fn below(&self, count: usize) -> Result<usize, SnapshotError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len().checked_sub(count) {
            Some(start) if start >= floor => Ok(start),
            _ => Err(self.damaged("an opcode needs more items than the stack has")),
        }
    }

    #[inline]
    fn pop_mark(&mut self) -> Result<usize, SnapshotError> {
        self.marks
            .pop()
            .ok_or_else(|| self.damaged("an opcode needs a mark, but the stack has none"))
    }

    #[inline]
    fn get(&self, index: u32) -> Result<Item, SnapshotError> {
        let known = self.memo.get(index as usize).copied().flatten();
        known.ok_or_else(|| {
            self.damaged(format!("it refers to object {index}, which does not exist"))
        })
    }

    #[inline]
    fn put(&mut self, index: usize) -> Result<(), SnapshotError> {
        let top = self.below(1)?;
        let item = self.stack[top];
        if index == self.memo.len() {
            self.memo.push(Some(item));
            return self.check_size();
        }
        // Writers number objects without gaps, so no number exceeds the offset.
        if index as u64 >= self.input.offset() {
            return Err(self.damaged(format!(
                "it assigns the impossible number {index} to an object"
            )));
        }
        if index >= self.memo.len() {
            self.objects
                .budget
                .check((index + 1) * size_of::<Option<Item>>())?;
            self.memo.resize(index + 1, None);
        }
        self.memo[index] = Some(item);
        Ok(())
    }

    #[inline]
    fn check_size(&self) -> Result<(), SnapshotError> {
        let items = self.stack.len() + self.memo.len();
        self.objects
            .budget
            .check(items * size_of::<Item>() + self.marks.len() * size_of::<usize>())
    }

    /// Moves the items above the mark into the object below it: a dictionary, or a list or set.
    #[inline]
    fn put_items(&mut self, into_dict: bool) -> Result<(), SnapshotError> {
        let start = self.pop_mark()?;
        if into_dict && (self.stack.len() - start) % 2 == 1 {
            return Err(self.damaged("a dictionary has a key without a value"));
        }
        let done = match start.checked_sub(1).map(|below| self.stack[below]) {
            Some(Item::Object(dict)) if into_dict => {
                self.objects.set_items(dict, &self.stack[start..])
            }
            Some(Item::Object(list)) => self.objects.append(list, &self.stack[start..]),
            _ if into_dict => Err("an opcode sets a key, but the target is not a dictionary"),
            _ => Err("an opcode appends, but the target is not a list"),
        };
        self.stack.truncate(start);
        done.map_err(|what| self.damaged(what))?;
        self.check_size()
    }

    /// Like [`Self::put_items`], with the last `items` ones instead of those above a mark.
    fn put_last(&mut self, items: usize, into_dict: bool) -> Result<(), SnapshotError> {
        let start = self.below(items)?;
        self.marks.push(start);
        self.put_items(into_dict)
    }

    /// Moves the items from `start` into a set or a tuple.
    fn collect(&mut self, start: usize, into_set: bool) -> Item {
        let items = &self.stack[start..];
        let item = if into_set {
            self.objects.new_set(items)
        } else {
            self.objects.new_tuple(items)
        };
        self.stack.truncate(start);
        item
    }

    /// Reads the length of a text or byte string, and its bytes.
    #[inline]
    fn read_sized(&mut self, opcode: u8) -> Result<(), SnapshotError> {
        let length = match opcode {
            opcode::SHORT_BINUNICODE | opcode::SHORT_BINSTRING | opcode::SHORT_BINBYTES => {
                u64::from(self.input.byte()?)
            }
            opcode::BINUNICODE8 | opcode::BINBYTES8 | opcode::BYTEARRAY8 => {
                u64::from_le_bytes(self.input.array()?)
            }
            _ => u64::from(u32::from_le_bytes(self.input.array()?)),
        };
        self.read_text(length)
    }

    fn read_text(&mut self, length: u64) -> Result<(), SnapshotError> {
        self.input
            .bytes(length.min(budget::TEXT + 1), &mut self.scratch)?;
        if length > budget::TEXT {
            return Err(SnapshotError::TooLarge {
                what: "bytes in one text",
                limit: budget::TEXT,
            });
        }
        Ok(())
    }

    #[inline]
    fn long(&mut self, length: u32) -> Result<Item, SnapshotError> {
        if length == 8 {
            return Ok(Item::Int(i64::from_le_bytes(self.input.array()?)));
        }
        self.read_text(length.into())?;
        if self.scratch.len() > 16 {
            return Err(self.damaged("it contains a whole number of more than 128 bits"));
        }
        let is_negative = self.scratch.last().is_some_and(|byte| byte & 0x80 != 0);
        let mut bytes = [if is_negative { 0xff } else { 0 }; 16];
        bytes[..self.scratch.len()].copy_from_slice(&self.scratch);
        Ok(self.objects.number(i128::from_le_bytes(bytes)))
    }
}
