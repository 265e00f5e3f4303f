//! Writes a [`Snapshot`] as a pickle for `python -m torch.cuda._memory_viz`,
//! <https://docs.pytorch.org/memory_viz> and [`Snapshot::read`]. Uses protocol 4 without frames,
//! and only opcodes that PyTorch's viewer supports (`torch/utils/viz/MemoryViz.js`).

use std::collections::HashMap;
use std::io::{self, Write};

use harness_allocator::stats::BlockState;

use super::{
    ACTIVE, Action, Annotation, Block, Event, ExtraId, FrameId, MempoolId, Segment, Snapshot,
    StackId, Value, pickle::opcode,
};

/// The number of items per APPENDS, as in Python.
const BATCH: usize = 1000;

impl Snapshot {
    /// Writes an unpacked pickle. Reading it returns an equal snapshot, except for
    /// [`Snapshot::notes`].
    pub fn write(&self, mut out: impl Write) -> io::Result<()> {
        let (texts, frames, stacks) = (HashMap::new(), HashMap::new(), HashMap::new());
        let mut pickle = Pickle {
            snapshot: self,
            out: vec![opcode::PROTO, 4],
            memoized: 0,
            texts,
            frames,
            stacks,
        };
        pickle.snapshot();
        pickle.out.push(opcode::STOP);
        out.write_all(&pickle.out)?;
        out.flush()
    }
}

struct Pickle<'a> {
    snapshot: &'a Snapshot,
    out: Vec<u8>,
    /// The number of memoized objects. The maps hold the numbers of objects that can repeat.
    memoized: u32,
    texts: HashMap<&'a str, u32>,
    frames: HashMap<FrameId, u32>,
    stacks: HashMap<StackId, u32>,
}

impl<'a> Pickle<'a> {
    fn snapshot(&mut self) {
        let snapshot = self.snapshot;
        self.dict(|pickle| {
            pickle.text("segments");
            pickle.list(&snapshot.segments, Self::segment);
            pickle.text("device_traces");
            pickle.list(&snapshot.traces, |pickle, events| {
                pickle.list(events, Self::event)
            });
            if let Some(settings) = &snapshot.settings {
                pickle.text("allocator_settings");
                pickle.dict(|pickle| pickle.pairs(&settings.all));
            }
            pickle.text("external_annotations");
            pickle.list(&snapshot.annotations, Self::annotation);
            pickle.extra(snapshot.extra);
        });
    }

    fn segment(&mut self, segment: &'a Segment) {
        let (allocated, _) = segment.bytes_in(&[BlockState::Allocated]);
        let (active, requested) = segment.bytes_in(&ACTIVE);
        let MempoolId(first, second) = segment.private_pool;
        self.dict(|pickle| {
            pickle.number("device", segment.device.into());
            pickle.number("address", segment.address);
            pickle.number("total_size", segment.size.0);
            pickle.number("allocated_size", allocated.0);
            pickle.number("active_size", active.0);
            pickle.number("requested_size", requested.0);
            pickle.number("stream", segment.stream);
            pickle.word("segment_type", segment.pool.name());
            pickle.text("segment_pool_id");
            pickle.int(first.cast_signed().into());
            pickle.int(second.cast_signed().into());
            pickle.out.push(opcode::TUPLE2);
            pickle.text("is_expandable");
            pickle.bool(segment.expandable);
            pickle.stack(segment.stack);
            pickle.text("blocks");
            pickle.list(&segment.blocks, Self::block);
            pickle.extra(segment.extra);
        });
    }

    fn block(&mut self, block: &'a Block) {
        let state = match block.state {
            BlockState::Inactive => "inactive",
            BlockState::PendingFree => "active_pending_free",
            BlockState::Allocated => "active_allocated",
        };
        self.dict(|pickle| {
            pickle.number("address", block.address);
            pickle.number("size", block.size.0);
            pickle.number("requested_size", block.requested.0);
            pickle.word("state", state);
            pickle.stack(block.stack);
            pickle.extra(block.extra);
        });
    }

    fn event(&mut self, event: &'a Event) {
        self.dict(|pickle| {
            pickle.word("action", event.action.name());
            pickle.number(
                if event.action == Action::Oom {
                    "device_free"
                } else {
                    "addr"
                },
                event.address,
            );
            pickle.number("size", event.size.0);
            pickle.number("stream", event.stream);
            if let Some(time_us) = event.time_us {
                pickle.number("time_us", time_us);
            }
            pickle.extra(event.extra);
            // PyTorch writes no stack for a snapshot event.
            if event.action != Action::Snapshot || event.stack != StackId::EMPTY {
                pickle.stack(event.stack);
            }
        });
    }

    fn annotation(&mut self, annotation: &'a Annotation) {
        self.dict(|pickle| {
            pickle.word("stage", if annotation.begins { "START" } else { "END" });
            pickle.word("name", &annotation.name);
            pickle.number("device", annotation.device.into());
            pickle.number("time_us", annotation.time_us);
            pickle.extra(annotation.extra);
        });
    }

    fn stack(&mut self, stack: StackId) {
        self.text("frames");
        match self.stacks.get(&stack) {
            Some(&number) => self.get(number),
            None => {
                self.list(self.snapshot.stacks.ids(stack), |pickle, &frame| {
                    pickle.frame(frame)
                });
                let number = self.memoize();
                self.stacks.insert(stack, number);
            }
        }
    }

    fn frame(&mut self, id: FrameId) {
        if let Some(&number) = self.frames.get(&id) {
            return self.get(number);
        }
        let frame = self.snapshot.stacks.frame(id);
        self.dict(|pickle| {
            pickle.word("name", &frame.name);
            pickle.word("filename", &frame.file);
            // An invalid line number is stored among the unknown keys.
            if pickle.snapshot.extras.value(frame.extra, "line").is_none() {
                pickle.number("line", frame.line.into());
            }
            pickle.extra(frame.extra);
        });
        let number = self.memoize();
        self.frames.insert(id, number);
    }

    fn extra(&mut self, extra: ExtraId) {
        self.pairs(self.snapshot.extras.get(extra));
    }

    fn pairs(&mut self, pairs: &'a [(String, Value)]) {
        for (key, value) in pairs {
            self.text(key);
            self.value(value);
        }
    }

    fn value(&mut self, value: &'a Value) {
        match value {
            Value::None => self.out.push(opcode::NONE),
            Value::Bool(is_true) => self.bool(*is_true),
            Value::Int(number) => self.int(*number),
            Value::Float(bits) => self.op(opcode::BINFLOAT, &bits.to_be_bytes()),
            Value::Text(text) => self.text(text),
            Value::Bytes(bytes) => {
                self.op(opcode::BINBYTES8, &(bytes.len() as u64).to_le_bytes());
                self.out.extend(bytes);
            }
            Value::List(items) => self.list(items, Self::value),
            Value::Tuple(items) => {
                self.out.push(opcode::MARK);
                items.iter().for_each(|item| self.value(item));
                self.out.push(opcode::TUPLE);
            }
            Value::Set(items) => {
                self.out.extend([opcode::EMPTY_SET, opcode::MARK]);
                items.iter().for_each(|item| self.value(item));
                self.out.push(opcode::ADDITEMS);
            }
            Value::Dict(pairs) => self.dict(|pickle| {
                for (key, value) in pairs {
                    pickle.value(key);
                    pickle.value(value);
                }
            }),
        }
    }

    fn op(&mut self, opcode: u8, operand: &[u8]) {
        self.out.push(opcode);
        self.out.extend(operand);
    }

    fn dict(&mut self, pairs: impl FnOnce(&mut Self)) {
        self.out.extend([opcode::EMPTY_DICT, opcode::MARK]);
        pairs(self);
        self.out.push(opcode::SETITEMS);
    }

    fn list<T>(&mut self, items: &'a [T], mut write: impl FnMut(&mut Self, &'a T)) {
        self.out.push(opcode::EMPTY_LIST);
        for batch in items.chunks(BATCH) {
            self.out.push(opcode::MARK);
            batch.iter().for_each(|item| write(self, item));
            self.out.push(opcode::APPENDS);
        }
    }

    /// Writes a key with a number. Like PyTorch, writes numbers from 2^63 as negative.
    fn number(&mut self, key: &'static str, number: u64) {
        self.text(key);
        self.int(number.cast_signed().into());
    }

    fn word(&mut self, key: &'static str, text: &'a str) {
        self.text(key);
        self.text(text);
    }

    fn bool(&mut self, is_true: bool) {
        self.out.push(if is_true {
            opcode::NEWTRUE
        } else {
            opcode::NEWFALSE
        });
    }

    fn int(&mut self, number: i128) {
        if let Ok(byte) = u8::try_from(number) {
            self.op(opcode::BININT1, &[byte]);
        } else if let Ok(short) = u16::try_from(number) {
            self.op(opcode::BININT2, &short.to_le_bytes());
        } else if let Ok(int) = i32::try_from(number) {
            self.op(opcode::BININT, &int.to_le_bytes());
        } else {
            let bytes = number.to_le_bytes();
            let length = if i64::try_from(number).is_ok() {
                8
            } else {
                bytes.len()
            };
            self.op(opcode::LONG1, &[length as u8]);
            self.out.extend(&bytes[..length]);
        }
    }

    fn text(&mut self, text: &'a str) {
        if let Some(&number) = self.texts.get(text) {
            return self.get(number);
        }
        match u8::try_from(text.len()) {
            Ok(length) => self.op(opcode::SHORT_BINUNICODE, &[length]),
            // No text of a snapshot has 4 GiB.
            Err(_) => self.op(opcode::BINUNICODE, &(text.len() as u32).to_le_bytes()),
        }
        self.out.extend(text.as_bytes());
        let number = self.memoize();
        self.texts.insert(text, number);
    }

    /// Memoizes the last object and returns its number.
    fn memoize(&mut self) -> u32 {
        self.out.push(opcode::MEMOIZE);
        self.memoized += 1;
        self.memoized - 1
    }

    fn get(&mut self, number: u32) {
        match u8::try_from(number) {
            Ok(number) => self.op(opcode::BINGET, &[number]),
            Err(_) => self.op(opcode::LONG_BINGET, &number.to_le_bytes()),
        }
    }
}
