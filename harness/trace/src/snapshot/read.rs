//! Converts the objects of a pickle into a [`Snapshot`].

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Cursor, ErrorKind, Read};
use std::path::Path;

use harness_allocator::stats::{BlockState, PoolKind};
use harness_allocator::units::Bytes;
use harness_base::packed::unpack;
use harness_base::words::count;

use super::error::SnapshotError;
use super::pickle::{self, Item, Object, Objects, TextId, Wrong};
use super::{ACTIVE, Action, Annotation, Block, Event, ExtraId, Frame, FrameId, PoolId, Segment, Settings, Snapshot, StackId, Value, rmm};
use super::{budget, values};

/// Maximum size of a file after unpacking.
const MAX_UNPACKED: u64 = 4 << 30;

impl Snapshot {
    /// Reads a file written by `torch.cuda.memory._dump_snapshot()`, a pickle of `torch.cuda.memory_snapshot()`, or an RMM log.
    /// Detects the format and gzip from the content. Takes about 170 bytes of memory and half a microsecond per event.
    pub fn read(path: &Path) -> Result<Self, SnapshotError> {
        Self::read_unpacked(unpack(File::open(path)?, MAX_UNPACKED)?)
    }

    /// Reads a snapshot from the content of a file.
    pub fn parse(bytes: &[u8]) -> Result<Self, SnapshotError> {
        Self::read_unpacked(unpack(bytes, MAX_UNPACKED)?)
    }

    fn read_unpacked(mut source: impl Read) -> Result<Self, SnapshotError> {
        let mut first = Vec::new();
        match source.by_ref().take(rmm::HEADER.len() as u64).read_to_end(&mut first) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Err(SnapshotError::Truncated { offset: first.len() as u64 }),
            read => read?,
        };
        let is_log = first == rmm::HEADER.as_bytes();
        let whole = Cursor::new(first).chain(source);
        if is_log {
            return rmm::read(whole);
        }
        let (top, objects) = pickle::read(whole)?;
        let mut builder = Builder::new(objects);
        builder.top(top)?;
        Ok(builder.snapshot)
    }
}

/// Adds the place to an error.
fn at(path: impl std::fmt::Display) -> impl FnOnce(Wrong) -> SnapshotError {
    move |Wrong { key, expected, found }| {
        let path = if key.is_empty() { path.to_string() } else { format!("{path}.{key}") };
        SnapshotError::WrongType { path, expected, found }
    }
}

/// Builds a snapshot. Numbers stacks and unknown keys in the order in which segments, blocks, events and annotations use them.
/// Reading a written snapshot therefore gives an equal one.
struct Builder {
    objects: Objects,
    snapshot: Snapshot,
    /// Maps ids of the pickle to ids of the snapshot.
    stacks: HashMap<StackId, StackId>,
    frames: HashMap<u32, FrameId>,
    extras: HashMap<ExtraId, ExtraId>,
    /// The number of events with each unknown action.
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
        let Some(pairs) = self.objects.dict(top).map(<[Item]>::to_vec) else {
            return Err(SnapshotError::NotSnapshot { what: format!("it contains {}", self.objects.wrong(top, "").found) });
        };
        let value = |key: TextId| pairs.chunks_exact(2).rev().find_map(|pair| (pair[0] == Item::Text(key)).then_some(pair[1]));
        let Some(segments) = value(TextId::SEGMENTS) else {
            let keys: Vec<&str> = pairs.chunks_exact(2).filter_map(|pair| self.objects.text(pair[0])).take(8).collect();
            let keys = if keys.is_empty() { "(none)".to_owned() } else { keys.join(", ") };
            return Err(SnapshotError::NotSnapshot { what: format!("its dictionary has the keys {keys}, but not `segments`") });
        };
        self.segments(segments)?;
        if let Some(traces) = value(TextId::DEVICE_TRACES) {
            self.traces(traces)?;
        }
        if let Some(annotations) = value(TextId::EXTERNAL_ANNOTATIONS) {
            self.annotations(annotations)?;
        }
        if let Some(settings) = value(TextId::ALLOCATOR_SETTINGS) {
            let pairs = self.dict(settings, "a dictionary", "allocator_settings")?;
            self.snapshot.settings = Some(Settings::new(self.convert(&pairs)?));
        }
        const KNOWN: [TextId; 4] = [TextId::SEGMENTS, TextId::DEVICE_TRACES, TextId::EXTERNAL_ANNOTATIONS, TextId::ALLOCATOR_SETTINGS];
        let unknown = pairs.chunks_exact(2).filter(|pair| !KNOWN.iter().any(|&key| pair[0] == Item::Text(key)));
        let unknown: Vec<Item> = unknown.flatten().copied().collect();
        self.snapshot.extra = self.keep(&unknown)?;
        self.note();
        Ok(())
    }

    /// Copies the items of a list.
    fn list(&mut self, item: Item, expected: &'static str, path: impl std::fmt::Display) -> Result<Vec<Item>, SnapshotError> {
        self.objects.list(item).map(<[Item]>::to_vec).ok_or_else(|| self.objects.wrong(item, expected)).map_err(at(path))
    }

    /// Copies the keys and values of a dictionary. Counts the copy, because many items can share a large dictionary.
    fn dict(&mut self, item: Item, expected: &'static str, path: impl std::fmt::Display) -> Result<Vec<Item>, SnapshotError> {
        let pairs = self.objects.dict(item).ok_or_else(|| self.objects.wrong(item, expected)).map_err(at(path))?.to_vec();
        self.take(size_of_val(&pairs[..]))?;
        Ok(pairs)
    }

    /// Counts memory that the snapshot is about to take.
    fn take(&mut self, bytes: usize) -> Result<(), SnapshotError> {
        self.objects.budget.take(bytes)
    }

    fn segments(&mut self, segments: Item) -> Result<(), SnapshotError> {
        let list = self.list(segments, "a list of segments", "segments")?;
        self.take(list.len() * size_of::<Segment>())?;
        for (index, item) in list.into_iter().enumerate() {
            let segment = self.segment(item, index)?;
            self.snapshot.segments.push(segment);
        }
        Ok(())
    }

    fn segment(&mut self, item: Item, index: usize) -> Result<Segment, SnapshotError> {
        let place = format!("segments[{index}]");
        let pairs = self.dict(item, "a segment's dictionary", &place)?;
        let fields = SegmentFields::read(&mut self.objects, &pairs).map_err(at(&place))?;
        let (stack, extra) = (self.stack(fields.stack)?, self.keep(&fields.unknown)?);
        let blocks = self.blocks(fields.blocks, fields.address, &place)?;
        // The addresses of the blocks did not overflow, so their sum does not either.
        let whole: u64 = blocks.iter().map(|block| block.size.0).sum();
        if whole != fields.size {
            let found = format!("{}, while its blocks add up to {whole}", fields.size);
            return Err(SnapshotError::WrongType { path: format!("{place}.total_size"), expected: "the sum of its blocks", found });
        }
        let segment = Segment {
            device: fields.device,
            address: fields.address,
            size: Bytes(fields.size),
            stream: fields.stream,
            pool: fields.pool,
            private_pool: fields.private_pool,
            expandable: fields.expandable,
            stack,
            blocks,
            extra,
        };
        let (allocated, _) = segment.bytes_in(&[BlockState::Allocated]);
        let (active, requested) = segment.bytes_in(&ACTIVE);
        let sums = fields.sums.iter().zip([allocated, active, requested]);
        self.other_sums += sums.filter(|(said, sum)| said.is_some_and(|said| said != sum.0)).count() as u64;
        Ok(segment)
    }

    fn blocks(&mut self, blocks: Item, start: u64, place: &str) -> Result<Vec<Block>, SnapshotError> {
        let list = self.list(blocks, "a list of blocks", format_args!("{place}.blocks"))?;
        self.take(list.len() * size_of::<Block>())?;
        let mut address = start;
        let mut blocks = Vec::with_capacity(list.len());
        for (index, item) in list.into_iter().enumerate() {
            let path = || format!("{place}.blocks[{index}]");
            let pairs = self.dict(item, "a block's dictionary", format_args!("{place}.blocks[{index}]"))?;
            let (fields, earlier) = BlockFields::read(&mut self.objects, &pairs).map_err(|wrong| at(path())(wrong))?;
            if fields.address.is_some_and(|said| said != address) {
                let found = format!("{}, while the previous block ends at {address}", fields.address.unwrap_or_default());
                return Err(SnapshotError::WrongType {
                    path: format!("{}.address", path()),
                    expected: "the end of the previous block",
                    found,
                });
            }
            self.earlier_owners += earlier;
            let (stack, extra) = (self.stack(fields.stack)?, self.keep(&fields.unknown)?);
            blocks.push(Block { address, size: Bytes(fields.size), requested: Bytes(fields.requested), state: fields.state, stack, extra });
            let end = address.checked_add(fields.size);
            address = end
                .ok_or_else(|| Wrong { key: "size", expected: "within the address space", found: fields.size.to_string() })
                .map_err(|wrong| at(path())(wrong))?;
        }
        Ok(blocks)
    }

    fn traces(&mut self, traces: Item) -> Result<(), SnapshotError> {
        const EXPECTED: &str = "a list of events for each device";
        let list = self.list(traces, EXPECTED, "device_traces")?;
        self.take(list.len() * size_of::<Vec<Event>>())?;
        for (device, trace) in list.into_iter().enumerate() {
            let place = format!("device_traces[{device}]");
            let items = self.list(trace, "a list of events", &place)?;
            self.take(items.len() * size_of::<Event>())?;
            let mut events = Vec::with_capacity(items.len());
            for (index, item) in items.into_iter().enumerate() {
                if let Some(event) = self.event(item, device, || format!("{place}[{index}]"))? {
                    events.push(event);
                }
            }
            self.snapshot.traces.push(events);
        }
        Ok(())
    }

    /// Returns `None` for events that are stored elsewhere: phase marks of old versions, and unknown actions.
    #[inline]
    fn event(&mut self, item: Item, device: usize, place: impl Fn() -> String) -> Result<Option<Event>, SnapshotError> {
        let raw = match self.objects.object(item) {
            Some(Object::Event(index)) => *self.objects.event(index),
            Some(Object::Dict(_)) => {
                let pairs = self.dict(item, "an event's dictionary", "")?;
                match self.objects.event_of(&pairs) {
                    Ok(event) => event,
                    Err(Wrong { key: "action", .. }) if self.is_other_action(&pairs, device)? => return Ok(None),
                    Err(wrong) => return Err(at(place())(wrong)),
                }
            }
            _ => return Err(at(place())(self.objects.wrong(item, "an event's dictionary"))),
        };
        check_event(&raw).map_err(|wrong| at(place())(wrong))?;
        Ok(Some(Event { stack: self.stack(raw.stack)?, extra: self.extra(raw.extra)?, ..raw }))
    }

    /// Stores a phase mark, or counts an unknown action. Returns whether the event is one of these.
    fn is_other_action(&mut self, pairs: &[Item], device: usize) -> Result<bool, SnapshotError> {
        let value = |key: TextId| pairs.chunks_exact(2).find_map(|pair| (pair[0] == Item::Text(key)).then_some(pair[1]));
        let Some(Item::Text(action)) = value(TextId::ACTION) else { return Ok(false) };
        // PyTorch versions of early 2024 store phase marks here: https://github.com/pytorch/pytorch/pull/124179
        if action == TextId::USER_DEFINED {
            let stack = self.objects.stack(value(TextId::FRAMES).unwrap_or(Item::None)).map_err(at("device_traces"))?;
            let frame = self.objects.stack_frames(stack).first().map(|&frame| self.objects.frame(frame));
            let time_us = value(TextId::TIME_US).and_then(|time| self.objects.amount(time).ok());
            if let (Some(frame), Some(time_us)) = (frame, time_us) {
                let name = self.objects.text(Item::Text(frame.file)).unwrap_or_default().to_owned();
                let device = u32::try_from(device).unwrap_or(u32::MAX);
                self.objects.budget.take(size_of::<Annotation>() + name.len())?;
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
        *self.unknown_actions.entry(self.objects.text(Item::Text(action)).unwrap_or_default().to_owned()).or_default() += 1;
        Ok(true)
    }

    fn annotations(&mut self, annotations: Item) -> Result<(), SnapshotError> {
        let path = "external_annotations";
        let list = self.list(annotations, "a list of annotations", path)?;
        for (index, item) in list.into_iter().enumerate() {
            let place = format!("{path}[{index}]");
            let pairs = self.dict(item, "an annotation's dictionary", &place)?;
            let (annotation, unknown) = annotation(&self.objects, &pairs).map_err(at(&place))?;
            self.take(size_of::<Annotation>() + annotation.name.len())?;
            let extra = self.keep(&unknown)?;
            self.snapshot.annotations.push(Annotation { extra, ..annotation });
        }
        Ok(())
    }

    /// Returns the snapshot's id of a stack.
    fn stack(&mut self, raw: StackId) -> Result<StackId, SnapshotError> {
        if let Some(&known) = self.stacks.get(&raw) {
            return Ok(known);
        }
        let frames = self.objects.stack_frames(raw).to_vec();
        let mut ids = Vec::with_capacity(frames.len());
        for frame in frames {
            ids.push(match self.frames.get(&frame) {
                Some(&known) => known,
                None => self.frame(frame)?,
            });
        }
        self.take(2 * size_of_val(&ids[..]))?;
        let id = self.snapshot.stacks.intern(&ids);
        self.stacks.insert(raw, id);
        Ok(id)
    }

    fn frame(&mut self, raw: u32) -> Result<FrameId, SnapshotError> {
        let frame = self.objects.frame(raw);
        let extra = self.extra(frame.extra)?;
        let text = |id| self.objects.text(Item::Text(id)).unwrap_or_default().to_owned();
        let frame = Frame { name: text(frame.name), file: text(frame.file), line: frame.line, extra };
        self.take(2 * (size_of::<Frame>() + frame.name.len() + frame.file.len()))?;
        let id = self.snapshot.stacks.intern_frame(frame);
        self.frames.insert(raw, id);
        Ok(id)
    }

    /// Returns the snapshot's id of a set of unknown keys.
    fn extra(&mut self, raw: ExtraId) -> Result<ExtraId, SnapshotError> {
        if let Some(&known) = self.extras.get(&raw) {
            return Ok(known);
        }
        let pairs = self.objects.extra(raw).to_vec();
        let set = self.convert(&pairs)?;
        let id = self.snapshot.extras.intern(set);
        self.extras.insert(raw, id);
        Ok(id)
    }

    /// Converts keys and values, which alternate in `pairs`.
    fn convert(&mut self, pairs: &[Item]) -> Result<Vec<(String, Value)>, SnapshotError> {
        let mut budget = std::mem::take(&mut self.objects.budget);
        let set = values::pairs(&self.objects, pairs, &mut budget);
        self.objects.budget = budget;
        set
    }

    /// Stores keys and values, which alternate in `unknown`.
    fn keep(&mut self, unknown: &[Item]) -> Result<ExtraId, SnapshotError> {
        let raw = self.objects.keep(unknown);
        self.extra(raw)
    }

    /// Adds notes about data that was left out.
    fn note(&mut self) {
        let notes = &mut self.snapshot.notes;
        for (action, events) in &self.unknown_actions {
            notes.push(format!("Ignored {} with the unknown action `{action}`.", count(*events, "event")));
        }
        if self.earlier_owners > 0 {
            notes.push(format!("Ignored {} of blocks (`history`).", count(self.earlier_owners, "former owner")));
        }
        if self.other_sums > 0 {
            notes.push(format!("{} of segments contradict their blocks. The blocks are used.", count(self.other_sums, "sum")));
        }
    }
}

/// Refuses sizes and addresses that no device has: replaying them would not end. A request that ran out of memory may have any size.
fn check_event(event: &Event) -> Result<(), Wrong> {
    match event.action {
        Action::Oom => check_size(event.address, "device_free").map(drop),
        Action::Snapshot => Ok(()),
        _ => {
            let size = check_size(event.size.0, "size")?;
            let end = event.address.checked_add(size);
            end.map(drop).ok_or_else(|| Wrong { key: "size", expected: "within the address space", found: size.to_string() })
        }
    }
}

fn check_size(size: u64, key: &'static str) -> Result<u64, Wrong> {
    let found = || format!("{size}, more than any device has");
    if size > budget::DEVICE.0 { Err(Wrong { key, expected: "at most 1 TiB", found: found() }) } else { Ok(size) }
}

/// The known keys of a segment.
struct SegmentFields {
    device: u32,
    address: u64,
    size: u64,
    stream: u64,
    pool: PoolKind,
    private_pool: PoolId,
    expandable: bool,
    stack: StackId,
    blocks: Item,
    /// `allocated_size`, `active_size`, `requested_size`.
    sums: [Option<u64>; 3],
    unknown: Vec<Item>,
}

impl SegmentFields {
    fn read(objects: &mut Objects, pairs: &[Item]) -> Result<Self, Wrong> {
        let (mut address, mut size, mut pool, mut blocks) = (None, None, None, None);
        let (mut device, mut stream, mut private_pool, mut expandable) = (0, 0, PoolId::DEFAULT, false);
        let (mut stack, mut sums, mut unknown) = (StackId::EMPTY, [None; 3], Vec::new());
        for pair in pairs.chunks_exact(2) {
            let value = pair[1];
            match pair[0] {
                Item::Text(TextId::DEVICE) => device = device_of(objects, value)?,
                Item::Text(TextId::ADDRESS) => address = Some(objects.address(value).map_err(|wrong| wrong.of("address"))?),
                Item::Text(TextId::TOTAL_SIZE) => size = Some(objects.amount(value).map_err(|wrong| wrong.of("total_size"))?),
                Item::Text(TextId::STREAM) => stream = objects.address(value).map_err(|wrong| wrong.of("stream"))?,
                Item::Text(TextId::SEGMENT_TYPE) => pool = Some(pool_of(objects, value)?),
                Item::Text(TextId::SEGMENT_POOL_ID) => private_pool = private_pool_of(objects, value)?,
                Item::Text(TextId::IS_EXPANDABLE) => {
                    expandable = match value {
                        Item::Bool(value) => value,
                        _ => return Err(objects.wrong(value, "True or False").of("is_expandable")),
                    }
                }
                Item::Text(TextId::FRAMES) => stack = objects.stack(value).map_err(|wrong| wrong.of("frames"))?,
                Item::Text(TextId::BLOCKS) => blocks = Some(value),
                Item::Text(TextId::ALLOCATED_SIZE) => sums[0] = Some(objects.amount(value).map_err(|wrong| wrong.of("allocated_size"))?),
                Item::Text(TextId::ACTIVE_SIZE) => sums[1] = Some(objects.amount(value).map_err(|wrong| wrong.of("active_size"))?),
                Item::Text(TextId::REQUESTED_SIZE) => sums[2] = Some(objects.amount(value).map_err(|wrong| wrong.of("requested_size"))?),
                key => unknown.extend([key, value]),
            }
        }
        Ok(Self {
            device,
            address: address.ok_or_else(|| Wrong::missing("address"))?,
            size: check_size(size.ok_or_else(|| Wrong::missing("total_size"))?, "total_size")?,
            stream,
            pool: pool.ok_or_else(|| Wrong::missing("segment_type"))?,
            private_pool,
            expandable,
            stack,
            blocks: blocks.ok_or_else(|| Wrong::missing("blocks"))?,
            sums,
            unknown,
        })
    }
}

fn device_of(objects: &Objects, value: Item) -> Result<u32, Wrong> {
    let device = objects.amount(value).ok().and_then(|device| u32::try_from(device).ok());
    device.ok_or_else(|| objects.wrong(value, "a device's index").of("device"))
}

fn pool_of(objects: &Objects, value: Item) -> Result<PoolKind, Wrong> {
    match value {
        Item::Text(TextId::LARGE) => Ok(PoolKind::Large),
        Item::Text(TextId::SMALL) => Ok(PoolKind::Small),
        _ => Err(objects.wrong(value, "`large` or `small`").of("segment_type")),
    }
}

fn private_pool_of(objects: &Objects, value: Item) -> Result<PoolId, Wrong> {
    let wrong = || objects.wrong(value, "a pair of numbers").of("segment_pool_id");
    let parts = match value {
        Item::Tuple(tuple) => objects.tuple(tuple),
        _ => objects.list(value).ok_or_else(wrong)?,
    };
    match *parts {
        [first, second] => Ok(PoolId(objects.address(first).map_err(|_| wrong())?, objects.address(second).map_err(|_| wrong())?)),
        _ => Err(wrong()),
    }
}

/// The known keys of a block.
struct BlockFields {
    address: Option<u64>,
    size: u64,
    requested: u64,
    state: BlockState,
    stack: StackId,
    unknown: Vec<Item>,
}

impl BlockFields {
    /// Reads a block, and the number of former owners in its `history`.
    fn read(objects: &mut Objects, pairs: &[Item]) -> Result<(Self, u64), Wrong> {
        let (mut address, mut size, mut requested, mut state, mut stack) = (None, None, None, None, None);
        let (mut owner, mut owners, mut unknown) = (None, 0, Vec::new());
        for pair in pairs.chunks_exact(2) {
            let value = pair[1];
            match pair[0] {
                Item::Text(TextId::ADDRESS) => address = Some(objects.address(value).map_err(|wrong| wrong.of("address"))?),
                Item::Text(TextId::SIZE) => size = Some(objects.amount(value).map_err(|wrong| wrong.of("size"))?),
                Item::Text(TextId::REQUESTED_SIZE) => requested = Some(objects.amount(value).map_err(|wrong| wrong.of("requested_size"))?),
                Item::Text(TextId::STATE) => state = Some(state_of(objects, value)?),
                Item::Text(TextId::FRAMES) => stack = Some(objects.stack(value).map_err(|wrong| wrong.of("frames"))?),
                Item::Text(TextId::HISTORY) => {
                    let list = objects.list(value).ok_or_else(|| objects.wrong(value, "a list of owners").of("history"))?;
                    (owner, owners) = (list.first().copied(), list.len());
                }
                key => unknown.extend([key, value]),
            }
        }
        // Before PyTorch 2.1, the first entry of `history` describes the block's last owner.
        if let Some(owner) = owner {
            let pairs = objects.dict(owner).ok_or_else(|| objects.wrong(owner, "a dictionary").of("history[0]"))?.to_vec();
            for pair in pairs.chunks_exact(2) {
                match pair[0] {
                    Item::Text(TextId::REAL_SIZE) if requested.is_none() => {
                        requested = Some(objects.amount(pair[1]).map_err(|wrong| wrong.of("history[0].real_size"))?);
                    }
                    Item::Text(TextId::FRAMES) if stack.is_none() => {
                        stack = Some(objects.stack(pair[1]).map_err(|wrong| wrong.of("history[0].frames"))?);
                    }
                    _ => {}
                }
            }
        }
        let size = size.ok_or_else(|| Wrong::missing("size"))?;
        let block = Self {
            address,
            size,
            requested: requested.unwrap_or(size),
            state: state.ok_or_else(|| Wrong::missing("state"))?,
            stack: stack.unwrap_or(StackId::EMPTY),
            unknown,
        };
        Ok((block, owners.saturating_sub(1) as u64))
    }
}

fn state_of(objects: &Objects, value: Item) -> Result<BlockState, Wrong> {
    match value {
        Item::Text(TextId::ACTIVE_ALLOCATED) => Ok(BlockState::Allocated),
        Item::Text(TextId::ACTIVE_PENDING_FREE | TextId::ACTIVE_AWAITING_FREE) => Ok(BlockState::PendingFree),
        Item::Text(TextId::INACTIVE) => Ok(BlockState::Inactive),
        _ => Err(objects.wrong(value, "`active_allocated`, `active_pending_free`, `active_awaiting_free` or `inactive`").of("state")),
    }
}

/// Reads an annotation. Also returns its unknown keys and values, which alternate.
fn annotation(objects: &Objects, pairs: &[Item]) -> Result<(Annotation, Vec<Item>), Wrong> {
    let (mut begins, mut name, mut device, mut time_us, mut unknown) = (None, None, 0, None, Vec::new());
    for pair in pairs.chunks_exact(2) {
        let value = pair[1];
        match pair[0] {
            Item::Text(TextId::STAGE) => {
                begins = Some(match value {
                    Item::Text(TextId::START) => true,
                    Item::Text(TextId::END) => false,
                    _ => return Err(objects.wrong(value, "`START` or `END`").of("stage")),
                });
            }
            Item::Text(TextId::NAME) => {
                name = Some(objects.text(value).ok_or_else(|| objects.wrong(value, "a text").of("name"))?.to_owned())
            }
            Item::Text(TextId::DEVICE) => device = device_of(objects, value)?,
            Item::Text(TextId::TIME_US) => time_us = Some(objects.amount(value).map_err(|wrong| wrong.of("time_us"))?),
            key => unknown.extend([key, value]),
        }
    }
    let annotation = Annotation {
        begins: begins.ok_or_else(|| Wrong::missing("stage"))?,
        name: name.ok_or_else(|| Wrong::missing("name"))?,
        device,
        time_us: time_us.ok_or_else(|| Wrong::missing("time_us"))?,
        extra: ExtraId::NONE,
    };
    Ok((annotation, unknown))
}
