//! Converts the objects of a pickle into a [`Snapshot`].

use std::collections::{BTreeMap, HashMap};
use std::io::{Cursor, ErrorKind, Read};
use std::path::Path;

use harness_allocator::stats::{BlockState, PoolKind};
use harness_allocator::units::Bytes;
use harness_base::{files, packed::unpack, words::count};

use super::pickle::{self, Fields, Item, Object, Objects, TextId, Wrong};
use super::{
    ACTIVE, Action, Annotation, Block, Event, ExtraId, Frame, FrameId, MempoolId, RecordedSettings,
    Segment, Snapshot, StackId,
    budget::{self, Budget},
    error::SnapshotError,
    rmm,
};

const MAX_UNPACKED: u64 = 4 << 30;

impl Snapshot {
    /// Reads a file written by `torch.cuda.memory._dump_snapshot()`, a pickle of
    /// `torch.cuda.memory_snapshot()`, or an RMM log. Detects the format and gzip from the content.
    /// Takes about 170 bytes of memory and half a microsecond per event.
    pub fn read(path: &Path) -> Result<Self, SnapshotError> {
        Self::read_from(files::open(path)?)
    }

    /// Fails if the file cannot be read, or if its first bytes are those of another format. Reads
    /// nothing else.
    pub fn check_format(path: &Path) -> Result<(), SnapshotError> {
        let mut source = unpack(files::open(path)?, MAX_UNPACKED)?;
        let mut first = Vec::new();
        source
            .by_ref()
            .take(rmm::HEADER.len() as u64)
            .read_to_end(&mut first)?;
        if first == rmm::HEADER.as_bytes() {
            Ok(())
        } else {
            pickle::check_format(&first)
        }
    }

    pub fn parse(bytes: &[u8]) -> Result<Self, SnapshotError> {
        Self::parse_within(bytes, budget::MEMORY)
    }

    /// Fails if reading takes more than `limit` of memory. The limit of the other functions is 1
    /// GiB.
    pub fn parse_within(bytes: &[u8], limit: Bytes) -> Result<Self, SnapshotError> {
        Self::read_unpacked(unpack(bytes, MAX_UNPACKED)?, limit)
    }

    /// Like [`Self::read`], from an open file. Reads it to its end.
    pub fn read_from(source: impl Read) -> Result<Self, SnapshotError> {
        Self::read_unpacked(unpack(source, MAX_UNPACKED)?, budget::MEMORY)
    }

    fn read_unpacked(mut source: impl Read, limit: Bytes) -> Result<Self, SnapshotError> {
        let mut first = Vec::new();
        match source
            .by_ref()
            .take(rmm::HEADER.len() as u64)
            .read_to_end(&mut first)
        {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                return Err(SnapshotError::Truncated {
                    offset: first.len() as u64,
                });
            }
            read => read?,
        };
        let is_log = first == rmm::HEADER.as_bytes();
        let whole = Cursor::new(first).chain(source);
        if is_log {
            return rmm::read(whole, &Budget::new(limit));
        }
        let (top, objects) = pickle::read(whole, Budget::new(limit))?;
        let mut builder = Builder::new(objects);
        builder.top(top)?;
        Ok(builder.snapshot)
    }
}

/// Builds a snapshot. Numbers stacks and unknown keys in the order in which segments, blocks,
/// events and annotations use them. Reading a written snapshot therefore gives an equal one.
struct Builder {
    objects: Objects,
    snapshot: Snapshot,
    /// Maps ids of the pickle to ids of the snapshot.
    stacks: HashMap<StackId, StackId>,
    frames: HashMap<u32, FrameId>,
    extras: HashMap<ExtraId, ExtraId>,
    unknown_actions: BTreeMap<String, u64>,
    /// The number of former owners of blocks, which only very old files list.
    earlier_owners: u64,
    /// The number of sizes in segments that contradict their blocks.
    other_sums: u64,
}

impl Builder {
    fn new(objects: Objects) -> Self {
        Self {
            objects,
            snapshot: Snapshot::default(),
            stacks: HashMap::from([(StackId::EMPTY, StackId::EMPTY)]),
            frames: HashMap::new(),
            extras: HashMap::from([(ExtraId::NONE, ExtraId::NONE)]),
            unknown_actions: BTreeMap::new(),
            earlier_owners: 0,
            other_sums: 0,
        }
    }

    fn top(&mut self, top: Item) -> Result<(), SnapshotError> {
        if self.objects.list(top).is_some() {
            self.segments(top)?;
            self.note();
            return Ok(());
        }
        let Some(pairs) = self.objects.dict(top) else {
            return Err(SnapshotError::NotSnapshot {
                what: format!("it contains {}", self.objects.wrong(top, "").found),
            });
        };
        let mut fields = Fields::new(pairs);
        let Some(segments) = fields.take(TextId::SEGMENTS) else {
            let keys: Vec<&str> = fields
                .rest
                .iter()
                .filter_map(|pair| self.objects.text(pair[0]))
                .take(8)
                .collect();
            let keys = if keys.is_empty() {
                "(none)".to_owned()
            } else {
                keys.join(", ")
            };
            return Err(SnapshotError::NotSnapshot {
                what: format!("its dictionary has the keys {keys}, but not `segments`"),
            });
        };
        self.segments(segments)?;
        if let Some(traces) = fields.take(TextId::DEVICE_TRACES) {
            self.traces(traces)?;
        }
        if let Some(annotations) = fields.take(TextId::EXTERNAL_ANNOTATIONS) {
            self.annotations(annotations)?;
        }
        if let Some(settings) = fields.take(TextId::ALLOCATOR_SETTINGS) {
            let settings = self.objects.dict(settings).ok_or_else(|| {
                self.objects
                    .wrong(settings, "a dictionary")
                    .at("allocator_settings")
            })?;
            self.snapshot.settings = Some(RecordedSettings::new(self.objects.values(settings)?));
        }
        self.snapshot.extra = self.keep(&fields)?;
        self.note();
        Ok(())
    }

    fn list(&mut self, item: Item, expected: &'static str) -> Result<Vec<Item>, Wrong> {
        self.objects
            .list(item)
            .map(<[Item]>::to_vec)
            .ok_or_else(|| self.objects.wrong(item, expected))
    }

    /// Copies the keys and values of a dictionary. Counts the copy, because many items can share a
    /// large dictionary.
    fn fields(
        &mut self,
        item: Item,
        expected: &'static str,
        place: &str,
    ) -> Result<Fields, SnapshotError> {
        let pairs = self
            .objects
            .dict(item)
            .ok_or_else(|| self.objects.wrong(item, expected).at(place))?;
        self.objects.budget.take(size_of_val(pairs))?;
        Ok(Fields::new(pairs))
    }

    fn segments(&mut self, segments: Item) -> Result<(), SnapshotError> {
        let list = self
            .list(segments, "a list of segments")
            .map_err(|wrong| wrong.at("segments"))?;
        self.objects
            .budget
            .take(list.len() * size_of::<Segment>())?;
        for (index, item) in list.into_iter().enumerate() {
            let segment = self.segment(item, &format!("segments[{index}]"))?;
            self.snapshot.segments.push(segment);
        }
        Ok(())
    }

    fn segment(&mut self, item: Item, place: &str) -> Result<Segment, SnapshotError> {
        let mut fields = self.fields(item, "a segment's dictionary", place)?;
        let (segment, blocks, sums) =
            segment(&mut self.objects, &mut fields).map_err(|wrong| wrong.at(place))?;
        let (stack, extra) = (self.stack(segment.stack)?, self.keep(&fields)?);
        let blocks = self.blocks(blocks, segment.address, place)?;
        // The addresses of the blocks did not overflow, so their sum does not either.
        let whole: Bytes = blocks.iter().map(|block| block.size).sum();
        if whole != segment.size {
            let found = format!("{}, while its blocks add up to {}", segment.size.0, whole.0);
            return Err(Wrong::new("total_size", "the sum of its blocks", found)
                .at(place)
                .into());
        }
        let segment = Segment {
            stack,
            extra,
            blocks,
            ..segment
        };
        let (allocated, _) = segment.bytes_in(&[BlockState::Allocated]);
        let (active, requested) = segment.bytes_in(&ACTIVE);
        let sums = sums.iter().zip([allocated, active, requested]);
        self.other_sums += sums
            .filter(|(said, sum)| said.is_some_and(|said| said != sum.0))
            .count() as u64;
        Ok(segment)
    }

    fn blocks(
        &mut self,
        blocks: Item,
        start: u64,
        place: &str,
    ) -> Result<Vec<Block>, SnapshotError> {
        let list = self
            .list(blocks, "a list of blocks")
            .map_err(|wrong| wrong.at("blocks").at(place))?;
        self.objects.budget.take(list.len() * size_of::<Block>())?;
        let mut address = start;
        let mut blocks = Vec::with_capacity(list.len());
        for (index, item) in list.into_iter().enumerate() {
            let place = format!("{place}.blocks[{index}]");
            let mut fields = self.fields(item, "a block's dictionary", &place)?;
            let (block, owners) =
                block(&mut self.objects, &mut fields, address).map_err(|wrong| wrong.at(&place))?;
            self.earlier_owners += owners.saturating_sub(1) as u64;
            blocks.push(Block {
                stack: self.stack(block.stack)?,
                extra: self.keep(&fields)?,
                ..block
            });
            address += block.size.0;
        }
        Ok(blocks)
    }

    fn traces(&mut self, traces: Item) -> Result<(), SnapshotError> {
        let list = self
            .list(traces, "a list of events for each device")
            .map_err(|wrong| wrong.at("device_traces"))?;
        self.objects
            .budget
            .take(list.len() * size_of::<Vec<Event>>())?;
        // All devices can share one long list, so the events are counted before any of them is
        // copied.
        let events: usize = list
            .iter()
            .filter_map(|&trace| self.objects.list(trace))
            .map(<[Item]>::len)
            .sum();
        self.objects
            .budget
            .take(events.saturating_mul(size_of::<Event>()))?;
        for (device, trace) in list.into_iter().enumerate() {
            let place = format!("device_traces[{device}]");
            let items = self
                .list(trace, "a list of events")
                .map_err(|wrong| wrong.at(&place))?;
            let mut events = Vec::with_capacity(items.len());
            for (index, item) in items.into_iter().enumerate() {
                events.extend(self.event(item, device, || format!("{place}[{index}]"))?);
            }
            self.snapshot.traces.push(events);
        }
        Ok(())
    }

    /// Returns `None` for events that are stored elsewhere: phase marks of old versions, and
    /// unknown actions.
    #[inline]
    fn event(
        &mut self,
        item: Item,
        device: usize,
        place: impl Fn() -> String,
    ) -> Result<Option<Event>, SnapshotError> {
        let raw = match self.objects.object(item) {
            Some(Object::Event(index)) => self.objects.events[index as usize],
            _ => {
                let mut fields = self.fields(item, "an event's dictionary", &place())?;
                match self.objects.event_of(fields.rest.as_flattened()) {
                    Ok(event) => event,
                    Err(wrong)
                        if wrong.path == "action"
                            && self.is_other_action(&mut fields, device)? =>
                    {
                        return Ok(None);
                    }
                    Err(wrong) => return Err(wrong.at(place()).into()),
                }
            }
        };
        check_event(&raw).map_err(|wrong| wrong.at(place()))?;
        Ok(Some(Event {
            stack: self.stack(raw.stack)?,
            extra: self.extra(raw.extra)?,
            ..raw
        }))
    }

    /// Stores a phase mark, or counts an unknown action. Returns whether the event is one of these.
    fn is_other_action(
        &mut self,
        fields: &mut Fields,
        device: usize,
    ) -> Result<bool, SnapshotError> {
        let Some(Item::Text(action)) = fields.take(TextId::ACTION) else {
            return Ok(false);
        };
        // PyTorch versions of early 2024 store phase marks here:
        // https://github.com/pytorch/pytorch/pull/124179
        if action == TextId::USER_DEFINED {
            let stack = self
                .objects
                .stack(fields.take(TextId::FRAMES).unwrap_or(Item::None))
                .map_err(|wrong| wrong.at("device_traces"))?;
            let frame = self.objects.stacks[stack.0 as usize]
                .first()
                .map(|&frame| self.objects.frames[frame as usize]);
            let time_us = fields
                .take(TextId::TIME_US)
                .and_then(|time| self.objects.amount(time).ok());
            if let (Some(frame), Some(time_us)) = (frame, time_us) {
                let name = self
                    .objects
                    .text(Item::Text(frame.file))
                    .unwrap_or_default()
                    .to_owned();
                let device = u32::try_from(device).unwrap_or(u32::MAX);
                self.objects
                    .budget
                    .take(size_of::<Annotation>() + name.len())?;
                self.snapshot.annotations.push(Annotation {
                    begins: frame.name == TextId::START,
                    name,
                    device,
                    time_us,
                    extra: ExtraId::NONE,
                });
                return Ok(true);
            }
        }
        *self
            .unknown_actions
            .entry(
                self.objects
                    .text(Item::Text(action))
                    .unwrap_or_default()
                    .to_owned(),
            )
            .or_default() += 1;
        Ok(true)
    }

    fn annotations(&mut self, annotations: Item) -> Result<(), SnapshotError> {
        let path = "external_annotations";
        let list = self
            .list(annotations, "a list of annotations")
            .map_err(|wrong| wrong.at(path))?;
        for (index, item) in list.into_iter().enumerate() {
            let place = format!("{path}[{index}]");
            let mut fields = self.fields(item, "an annotation's dictionary", &place)?;
            let annotation =
                annotation(&self.objects, &mut fields).map_err(|wrong| wrong.at(&place))?;
            self.objects
                .budget
                .take(size_of::<Annotation>() + annotation.name.len())?;
            let extra = self.keep(&fields)?;
            self.snapshot.annotations.push(Annotation {
                extra,
                ..annotation
            });
        }
        Ok(())
    }

    fn stack(&mut self, raw: StackId) -> Result<StackId, SnapshotError> {
        if let Some(&known) = self.stacks.get(&raw) {
            return Ok(known);
        }
        let frames = self.objects.stacks[raw.0 as usize].clone();
        let mut ids = Vec::with_capacity(frames.len());
        for frame in frames {
            ids.push(match self.frames.get(&frame) {
                Some(&known) => known,
                None => self.frame(frame)?,
            });
        }
        self.objects.budget.take(2 * size_of_val(&ids[..]))?;
        let id = self.snapshot.stacks.intern(&ids);
        self.stacks.insert(raw, id);
        Ok(id)
    }

    fn frame(&mut self, raw: u32) -> Result<FrameId, SnapshotError> {
        let frame = self.objects.frames[raw as usize];
        let extra = self.extra(frame.extra)?;
        let text = |id| {
            self.objects
                .text(Item::Text(id))
                .unwrap_or_default()
                .to_owned()
        };
        let frame = Frame {
            name: text(frame.name),
            file: text(frame.file),
            line: frame.line,
            extra,
        };
        self.objects
            .budget
            .take(2 * (size_of::<Frame>() + frame.name.len() + frame.file.len()))?;
        let id = self.snapshot.stacks.intern_frame(frame);
        self.frames.insert(raw, id);
        Ok(id)
    }

    fn extra(&mut self, raw: ExtraId) -> Result<ExtraId, SnapshotError> {
        if let Some(&known) = self.extras.get(&raw) {
            return Ok(known);
        }
        let set = self.objects.values(&self.objects.extras[raw.0 as usize])?;
        let id = self.snapshot.extras.intern(set);
        self.extras.insert(raw, id);
        Ok(id)
    }

    fn keep(&mut self, unknown: &Fields) -> Result<ExtraId, SnapshotError> {
        let raw = self.objects.keep(unknown.rest.as_flattened());
        self.extra(raw)
    }

    fn note(&mut self) {
        let notes = &mut self.snapshot.notes;
        for (action, events) in &self.unknown_actions {
            notes.push(format!(
                "Ignored {} with the unknown action `{action}`.",
                count(*events, "event")
            ));
        }
        if self.earlier_owners > 0 {
            notes.push(format!(
                "Ignored {} of blocks (`history`).",
                count(self.earlier_owners, "former owner")
            ));
        }
        if self.other_sums > 0 {
            notes.push(format!(
                "{} of segments contradict their blocks. The blocks are used.",
                count(self.other_sums, "sum")
            ));
        }
    }
}

/// Refuses sizes and addresses that no device has: replaying them would not end. A request that ran
/// out of memory may have any size.
fn check_event(event: &Event) -> Result<(), Wrong> {
    match event.action {
        Action::Oom => check_size(event.address)
            .map(drop)
            .map_err(|wrong| wrong.at("device_free")),
        Action::Snapshot => Ok(()),
        _ => {
            let size = check_size(event.size.0).map_err(|wrong| wrong.at("size"))?;
            check_end(event.address, size)
        }
    }
}

fn check_size(size: u64) -> Result<Bytes, Wrong> {
    if size <= budget::DEVICE.0 {
        Ok(Bytes(size))
    } else {
        Err(Wrong::new(
            "",
            "at most 1 TiB",
            format!("{size}, more than any device has"),
        ))
    }
}

fn check_end(address: u64, size: Bytes) -> Result<(), Wrong> {
    let end = address.checked_add(size.0);
    end.map(drop)
        .ok_or_else(|| Wrong::new("size", "within the address space", size.0.to_string()))
}

/// Reads a segment without its blocks. Also returns its list of blocks, and `allocated_size`,
/// `active_size` and `requested_size`.
fn segment(
    objects: &mut Objects,
    fields: &mut Fields,
) -> Result<(Segment, Item, [Option<u64>; 3]), Wrong> {
    const POOLS: [(TextId, PoolKind); 2] = [
        (TextId::LARGE, PoolKind::Large),
        (TextId::SMALL, PoolKind::Small),
    ];
    let segment = Segment {
        device: fields
            .read(TextId::DEVICE, |item| device(objects, item))?
            .unwrap_or_default(),
        address: fields.require(TextId::ADDRESS, |item| objects.address(item))?,
        size: fields.require(TextId::TOTAL_SIZE, |item| check_size(objects.amount(item)?))?,
        stream: fields
            .read(TextId::STREAM, |item| objects.address(item))?
            .unwrap_or_default(),
        pool: fields.require(TextId::SEGMENT_TYPE, |item| {
            objects.word(item, &POOLS, "`large` or `small`")
        })?,
        private_pool: fields
            .read(TextId::SEGMENT_POOL_ID, |item| private_pool(objects, item))?
            .unwrap_or_default(),
        expandable: fields
            .read(TextId::IS_EXPANDABLE, |item| objects.bool(item))?
            .unwrap_or_default(),
        stack: fields
            .read(TextId::FRAMES, |item| objects.stack(item))?
            .unwrap_or_default(),
        blocks: Vec::new(),
        extra: ExtraId::NONE,
    };
    let mut sums = [None; 3];
    for (sum, key) in sums.iter_mut().zip([
        TextId::ALLOCATED_SIZE,
        TextId::ACTIVE_SIZE,
        TextId::REQUESTED_SIZE,
    ]) {
        *sum = fields.read(key, |item| objects.amount(item))?;
    }
    Ok((segment, fields.require(TextId::BLOCKS, Ok)?, sums))
}

fn device(objects: &Objects, item: Item) -> Result<u32, Wrong> {
    let device = objects
        .amount(item)
        .ok()
        .and_then(|device| u32::try_from(device).ok());
    device.ok_or_else(|| objects.wrong(item, "a device's index"))
}

fn private_pool(objects: &Objects, item: Item) -> Result<MempoolId, Wrong> {
    let parts = match item {
        Item::Tuple(tuple) => Some(objects.tuples[tuple as usize].as_slice()),
        _ => objects.list(item),
    };
    let id = match parts {
        Some(&[first, second]) => objects
            .address(first)
            .ok()
            .zip(objects.address(second).ok()),
        _ => None,
    };
    id.map(|(first, second)| MempoolId(first, second))
        .ok_or_else(|| objects.wrong(item, "a pair of numbers"))
}

/// Reads a block at an address. Also returns the number of owners in its `history`.
fn block(
    objects: &mut Objects,
    fields: &mut Fields,
    address: u64,
) -> Result<(Block, usize), Wrong> {
    const STATES: [(TextId, BlockState); 4] = [
        (TextId::ACTIVE_ALLOCATED, BlockState::Allocated),
        (TextId::ACTIVE_PENDING_FREE, BlockState::PendingFree),
        (TextId::ACTIVE_AWAITING_FREE, BlockState::PendingFree),
        (TextId::INACTIVE, BlockState::Inactive),
    ];
    const STATE: &str =
        "`active_allocated`, `active_pending_free`, `active_awaiting_free` or `inactive`";
    if let Some(said) = fields
        .read(TextId::ADDRESS, |item| objects.address(item))?
        .filter(|&said| said != address)
    {
        let found = format!("{said}, while the previous block ends at {address}");
        return Err(Wrong::new(
            "address",
            "the end of the previous block",
            found,
        ));
    }
    let size = fields.require(TextId::SIZE, |item| objects.amount(item))?;
    check_end(address, Bytes(size))?;
    let state = fields.require(TextId::STATE, |item| objects.word(item, &STATES, STATE))?;
    let mut requested = fields.read(TextId::REQUESTED_SIZE, |item| objects.amount(item))?;
    let mut stack = fields.read(TextId::FRAMES, |item| objects.stack(item))?;
    let mut owners = 0;
    if let Some(history) = fields.take(TextId::HISTORY) {
        let list = objects
            .list(history)
            .ok_or_else(|| objects.wrong(history, "a list of owners").at("history"))?;
        owners = list.len();
        // Before PyTorch 2.1, the first entry of `history` describes the block's last owner.
        if let Some(&owner) = list.first() {
            let owner = objects
                .dict(owner)
                .ok_or_else(|| objects.wrong(owner, "a dictionary").at("history[0]"))?;
            let mut owner = Fields::new(owner);
            let of_owner = |wrong: Wrong| wrong.at("history[0]");
            requested = requested.or(owner
                .read(TextId::REAL_SIZE, |item| objects.amount(item))
                .map_err(of_owner)?);
            stack = stack.or(owner
                .read(TextId::FRAMES, |item| objects.stack(item))
                .map_err(of_owner)?);
        }
    }
    let (requested, stack) = (Bytes(requested.unwrap_or(size)), stack.unwrap_or_default());
    Ok((
        Block {
            address,
            size: Bytes(size),
            requested,
            state,
            stack,
            extra: ExtraId::NONE,
        },
        owners,
    ))
}

fn annotation(objects: &Objects, fields: &mut Fields) -> Result<Annotation, Wrong> {
    const STAGES: [(TextId, bool); 2] = [(TextId::START, true), (TextId::END, false)];
    let name = |item| {
        objects
            .text(item)
            .map(str::to_owned)
            .ok_or_else(|| objects.wrong(item, "a text"))
    };
    Ok(Annotation {
        begins: fields.require(TextId::STAGE, |item| {
            objects.word(item, &STAGES, "`START` or `END`")
        })?,
        name: fields.require(TextId::NAME, name)?,
        device: fields
            .read(TextId::DEVICE, |item| device(objects, item))?
            .unwrap_or_default(),
        time_us: fields.require(TextId::TIME_US, |item| objects.amount(item))?,
        extra: ExtraId::NONE,
    })
}
