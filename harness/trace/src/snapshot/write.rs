//! Writes a [`Snapshot`] as a pickle for `python -m torch.cuda._memory_viz`, <https://docs.pytorch.org/memory_viz> and
//! [`Snapshot::read`]. Uses protocol 4 without frames, and only opcodes that PyTorch's viewer supports
//! (`torch/utils/viz/MemoryViz.js`).

use std::collections::HashMap;
use std::io::{self, BufWriter, Write};

use harness_allocator::stats::{BlockState, PoolKind};

use super::pickle::opcode;
use super::{ACTIVE, Action, Annotation, Block, Event, ExtraId, FrameId, PoolId, Segment, Snapshot, StackId, Value};

/// The number of items per APPENDS, as in Python.
const BATCH: usize = 1000;

impl Snapshot {
    /// Writes an unpacked pickle. Reading it returns an equal snapshot, except for [`Snapshot::notes`].
    pub fn write(&self, out: impl Write) -> io::Result<()> {
        let out = BufWriter::with_capacity(1 << 16, out);
        let mut pickle = Pickle { snapshot: self, out, memoized: 0, texts: HashMap::new(), frames: HashMap::new(), stacks: HashMap::new() };
        pickle.out.write_all(&[opcode::PROTO, 4])?;
        pickle.snapshot()?;
        pickle.out.write_all(&[opcode::STOP])?;
        pickle.out.flush()
    }
}

struct Pickle<'a, W> {
    snapshot: &'a Snapshot,
    out: W,
    /// The number of memoized objects. The maps hold the numbers of objects that can repeat.
    memoized: u32,
    texts: HashMap<&'a str, u32>,
    frames: HashMap<FrameId, u32>,
    stacks: HashMap<StackId, u32>,
}

impl<'a, W: Write> Pickle<'a, W> {
    fn snapshot(&mut self) -> io::Result<()> {
        let snapshot = self.snapshot;
        self.dict(|pickle| {
            pickle.text("segments")?;
            pickle.list(&snapshot.segments, Self::segment)?;
            pickle.text("device_traces")?;
            pickle.list(&snapshot.traces, |pickle, events| pickle.list(events, Self::event))?;
            if let Some(settings) = &snapshot.settings {
                pickle.text("allocator_settings")?;
                pickle.dict(|pickle| pickle.pairs(&settings.all))?;
            }
            pickle.text("external_annotations")?;
            pickle.list(&snapshot.annotations, Self::annotation)?;
            pickle.extra(snapshot.extra)
        })
    }

    fn segment(&mut self, segment: &'a Segment) -> io::Result<()> {
        let (allocated, _) = segment.bytes_in(&[BlockState::Allocated]);
        let (active, requested) = segment.bytes_in(&ACTIVE);
        self.dict(|pickle| {
            pickle.number("device", segment.device.into())?;
            pickle.number("address", segment.address)?;
            pickle.number("total_size", segment.size.0)?;
            pickle.number("allocated_size", allocated.0)?;
            pickle.number("active_size", active.0)?;
            pickle.number("requested_size", requested.0)?;
            pickle.number("stream", segment.stream)?;
            pickle.text("segment_type")?;
            pickle.text(match segment.pool {
                PoolKind::Small => "small",
                PoolKind::Large => "large",
            })?;
            pickle.text("segment_pool_id")?;
            let PoolId(first, second) = segment.private_pool;
            pickle.int(first.cast_signed().into())?;
            pickle.int(second.cast_signed().into())?;
            pickle.op(opcode::TUPLE2)?;
            pickle.text("is_expandable")?;
            pickle.op(if segment.expandable { opcode::NEWTRUE } else { opcode::NEWFALSE })?;
            pickle.stack(segment.stack)?;
            pickle.text("blocks")?;
            pickle.list(&segment.blocks, Self::block)?;
            pickle.extra(segment.extra)
        })
    }

    fn block(&mut self, block: &'a Block) -> io::Result<()> {
        self.dict(|pickle| {
            pickle.number("address", block.address)?;
            pickle.number("size", block.size.0)?;
            pickle.number("requested_size", block.requested.0)?;
            pickle.text("state")?;
            pickle.text(match block.state {
                BlockState::Inactive => "inactive",
                BlockState::PendingFree => "active_pending_free",
                BlockState::Allocated => "active_allocated",
            })?;
            pickle.stack(block.stack)?;
            pickle.extra(block.extra)
        })
    }

    fn event(&mut self, event: &'a Event) -> io::Result<()> {
        self.dict(|pickle| {
            pickle.text("action")?;
            pickle.text(event.action.name())?;
            pickle.number(if event.action == Action::Oom { "device_free" } else { "addr" }, event.address)?;
            pickle.number("size", event.size.0)?;
            pickle.number("stream", event.stream)?;
            if let Some(time_us) = event.time_us {
                pickle.number("time_us", time_us)?;
            }
            pickle.extra(event.extra)?;
            // PyTorch writes no stack for a snapshot event.
            if event.action == Action::Snapshot && event.stack == StackId::EMPTY { Ok(()) } else { pickle.stack(event.stack) }
        })
    }

    fn annotation(&mut self, annotation: &'a Annotation) -> io::Result<()> {
        self.dict(|pickle| {
            pickle.text("stage")?;
            pickle.text(if annotation.begins { "START" } else { "END" })?;
            pickle.text("name")?;
            pickle.text(&annotation.name)?;
            pickle.number("device", annotation.device.into())?;
            pickle.number("time_us", annotation.time_us)?;
            pickle.extra(annotation.extra)
        })
    }

    /// Writes the key `frames` and the stack.
    fn stack(&mut self, stack: StackId) -> io::Result<()> {
        self.text("frames")?;
        if let Some(&number) = self.stacks.get(&stack) {
            return self.get(number);
        }
        self.list(self.snapshot.stacks.ids(stack), |pickle, &frame| pickle.frame(frame))?;
        let number = self.memoize()?;
        self.stacks.insert(stack, number);
        Ok(())
    }

    fn frame(&mut self, id: FrameId) -> io::Result<()> {
        if let Some(&number) = self.frames.get(&id) {
            return self.get(number);
        }
        let frame = self.snapshot.stacks.frame(id);
        self.dict(|pickle| {
            pickle.text("name")?;
            pickle.text(&frame.name)?;
            pickle.text("filename")?;
            pickle.text(&frame.file)?;
            // An invalid line number is stored among the unknown keys.
            if pickle.snapshot.extras.value(frame.extra, "line").is_none() {
                pickle.number("line", frame.line.into())?;
            }
            pickle.extra(frame.extra)
        })?;
        let number = self.memoize()?;
        self.frames.insert(id, number);
        Ok(())
    }

    /// Writes unknown keys and their values.
    fn extra(&mut self, extra: ExtraId) -> io::Result<()> {
        self.pairs(self.snapshot.extras.get(extra))
    }

    fn pairs(&mut self, pairs: &'a [(String, Value)]) -> io::Result<()> {
        for (key, value) in pairs {
            self.text(key)?;
            self.value(value)?;
        }
        Ok(())
    }

    fn value(&mut self, value: &'a Value) -> io::Result<()> {
        match value {
            Value::None => self.op(opcode::NONE),
            Value::Bool(is_true) => self.op(if *is_true { opcode::NEWTRUE } else { opcode::NEWFALSE }),
            Value::Int(number) => self.int(*number),
            Value::Float(bits) => {
                self.op(opcode::BINFLOAT)?;
                self.out.write_all(&bits.to_be_bytes())
            }
            Value::Text(text) => self.text(text),
            Value::Bytes(bytes) => {
                self.op(opcode::BINBYTES8)?;
                self.out.write_all(&(bytes.len() as u64).to_le_bytes())?;
                self.out.write_all(bytes)
            }
            Value::List(items) => self.list(items, Self::value),
            Value::Tuple(items) => {
                self.op(opcode::MARK)?;
                items.iter().try_for_each(|item| self.value(item))?;
                self.op(opcode::TUPLE)
            }
            Value::Set(items) => {
                self.op(opcode::EMPTY_SET)?;
                self.op(opcode::MARK)?;
                items.iter().try_for_each(|item| self.value(item))?;
                self.op(opcode::ADDITEMS)
            }
            Value::Dict(pairs) => self.dict(|pickle| {
                pairs.iter().try_for_each(|(key, value)| {
                    pickle.value(key)?;
                    pickle.value(value)
                })
            }),
        }
    }

    fn op(&mut self, opcode: u8) -> io::Result<()> {
        self.out.write_all(&[opcode])
    }

    fn dict(&mut self, pairs: impl FnOnce(&mut Self) -> io::Result<()>) -> io::Result<()> {
        self.out.write_all(&[opcode::EMPTY_DICT, opcode::MARK])?;
        pairs(self)?;
        self.op(opcode::SETITEMS)
    }

    fn list<T>(&mut self, items: &'a [T], mut write: impl FnMut(&mut Self, &'a T) -> io::Result<()>) -> io::Result<()> {
        self.op(opcode::EMPTY_LIST)?;
        for batch in items.chunks(BATCH) {
            self.op(opcode::MARK)?;
            batch.iter().try_for_each(|item| write(self, item))?;
            self.op(opcode::APPENDS)?;
        }
        Ok(())
    }

    /// Writes a key with a number. Like PyTorch, writes numbers from 2^63 as negative.
    fn number(&mut self, key: &'static str, number: u64) -> io::Result<()> {
        self.text(key)?;
        self.int(number.cast_signed().into())
    }

    fn int(&mut self, number: i128) -> io::Result<()> {
        if let Ok(byte) = u8::try_from(number) {
            self.out.write_all(&[opcode::BININT1, byte])
        } else if let Ok(short) = u16::try_from(number) {
            self.op(opcode::BININT2)?;
            self.out.write_all(&short.to_le_bytes())
        } else if let Ok(int) = i32::try_from(number) {
            self.op(opcode::BININT)?;
            self.out.write_all(&int.to_le_bytes())
        } else {
            let bytes = number.to_le_bytes();
            let length = if i64::try_from(number).is_ok() { 8 } else { bytes.len() };
            self.out.write_all(&[opcode::LONG1, length as u8])?;
            self.out.write_all(&bytes[..length])
        }
    }

    fn text(&mut self, text: &'a str) -> io::Result<()> {
        if let Some(&number) = self.texts.get(text) {
            return self.get(number);
        }
        match u8::try_from(text.len()) {
            Ok(length) => self.out.write_all(&[opcode::SHORT_BINUNICODE, length])?,
            Err(_) => {
                let length =
                    u32::try_from(text.len()).map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "a text of more than 4 GiB"))?;
                self.op(opcode::BINUNICODE)?;
                self.out.write_all(&length.to_le_bytes())?;
            }
        }
        self.out.write_all(text.as_bytes())?;
        let number = self.memoize()?;
        self.texts.insert(text, number);
        Ok(())
    }

    /// Memoizes the last object and returns its number.
    fn memoize(&mut self) -> io::Result<u32> {
        self.op(opcode::MEMOIZE)?;
        self.memoized += 1;
        Ok(self.memoized - 1)
    }

    fn get(&mut self, number: u32) -> io::Result<()> {
        match u8::try_from(number) {
            Ok(number) => self.out.write_all(&[opcode::BINGET, number]),
            Err(_) => {
                self.op(opcode::LONG_BINGET)?;
                self.out.write_all(&number.to_le_bytes())
            }
        }
    }
}
