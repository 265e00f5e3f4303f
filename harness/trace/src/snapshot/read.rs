//! From the objects of a pickle to a [`Snapshot`].

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
use super::values::Values;
use super::{ACTIVE, Annotation, Block, Event, ExtraId, Frame, FrameId, PoolId, Segment, Settings, Snapshot, StackId, rmm};

/// Most bytes of a snapshot, unpacked: some 40 million events.
const MAX_UNPACKED: u64 = 4 << 30;

impl Snapshot {
    /// Reads a file that `torch.cuda.memory._dump_snapshot()` wrote, a pickle of `torch.cuda.memory_snapshot()`, or a log of RMM; packed by gzip or not. The
    /// content tells which it is.
    /// Memory and time are in proportion to the events: some 100 bytes and half a microsecond each.
    ///
    /// # Errors
    /// [`SnapshotError`]: it does not name the file.
    pub fn read(path: &Path) -> Result<Self, SnapshotError> {
        Self::read_unpacked(unpack(File::open(path)?, MAX_UNPACKED)?)
    }

    /// Reads a snapshot from the content of such a file.
    ///
    /// # Errors
    /// [`SnapshotError`]
    pub fn parse(bytes: &[u8]) -> Result<Self, SnapshotError> {
        Self::read_unpacked(unpack(bytes, MAX_UNPACKED)?)
    }
}

impl Snapshot {
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

/// What is not there, or not as it should be, with its place.
fn at(path: impl std::fmt::Display) -> impl FnOnce(Wrong) -> SnapshotError {
    move |Wrong { key, expected, found }| {
        let path = if key.is_empty() { path.to_string() } else { format!("{path}.{key}") };
        SnapshotError::WrongType { path, expected, found }
    }
}

/// Puts a snapshot together. Stacks and further keys are numbered in the order in which segments, blocks, events and annotations name them, so a
/// snapshot that was written and read again is equal to the first.
struct Builder {
    objects: Objects,
    snapshot: Snapshot,
    values: Values,
    /// Ids of the snapshot by ids of the pickle.
    stacks: HashMap<StackId, StackId>,
    frames: HashMap<u32, FrameId>,
    extras: HashMap<ExtraId, ExtraId>,
    /// Actions that are not known, with their number.
    unknown_actions: BTreeMap<String, u64>,
    /// Earlier owners of blocks, which only very old files have.
    earlier_owners: u64,
    /// Sums of segments that their blocks do not add up to.
    other_sums: u64,
}

impl Builder {
    fn new(objects: Objects) -> Self {
        Self {
            objects,
            snapshot: Snapshot::default(),
            values: Values::default(),
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
            return Err(SnapshotError::NotSnapshot { what: format!("it holds {}", self.objects.wrong(top, "").found) });
        };
        let value = |key: TextId| pairs.chunks_exact(2).rev().find_map(|pair| (pair[0] == Item::Text(key)).then_some(pair[1]));
        let Some(segments) = value(TextId::SEGMENTS) else {
            let keys: Vec<&str> = pairs.chunks_exact(2).filter_map(|pair| self.objects.text(pair[0])).take(8).collect();
            let keys = if keys.is_empty() { "nothing".to_owned() } else { keys.join(", ") };
            return Err(SnapshotError::NotSnapshot { what: format!("its dictionary has no key `segments`, but {keys}") });
        };
        self.segments(segments)?;
        if let Some(traces) = value(TextId::DEVICE_TRACES) {
            self.traces(traces)?;
        }
        if let Some(annotations) = value(TextId::EXTERNAL_ANNOTATIONS) {
            self.annotations(annotations)?;
        }
        if let Some(settings) = value(TextId::ALLOCATOR_SETTINGS) {
            let pairs = self
                .objects
                .dict(settings)
                .ok_or_else(|| self.objects.wrong(settings, "a dictionary"))
                .map_err(at("allocator_settings"))?;
            self.snapshot.settings = Some(Settings::new(self.values.pairs(&self.objects, pairs)?));
        }
        const KNOWN: [TextId; 4] = [TextId::SEGMENTS, TextId::DEVICE_TRACES, TextId::EXTERNAL_ANNOTATIONS, TextId::ALLOCATOR_SETTINGS];
        let unknown = pairs.chunks_exact(2).filter(|pair| !KNOWN.iter().any(|&key| pair[0] == Item::Text(key)));
        let unknown: Vec<Item> = unknown.flatten().copied().collect();
        self.snapshot.extra = self.keep(&unknown)?;
        self.note();
        Ok(())
    }

    fn segments(&mut self, segments: Item) -> Result<(), SnapshotError> {
        let list =
            self.objects.list(segments).ok_or_else(|| self.objects.wrong(segments, "a list of segments")).map_err(at("segments"))?.to_vec();
        for (index, item) in list.into_iter().enumerate() {
            let segment = self.segment(item, index)?;
            self.snapshot.segments.push(segment);
        }
        Ok(())
    }

    fn segment(&mut self, item: Item, index: usize) -> Result<Segment, SnapshotError> {
        let place = format!("segments[{index}]");
        let pairs = self.objects.dict(item).ok_or_else(|| self.objects.wrong(item, "a segment's dictionary")).map_err(at(&place))?.to_vec();
        let fields = SegmentFields::read(&mut self.objects, &pairs).map_err(at(&place))?;
        let (stack, extra) = (self.stack(fields.stack)?, self.keep(&fields.unknown)?);
        let blocks = self.blocks(fields.blocks, fields.address, &place)?;
        // The addresses of the blocks did not overflow, so their sizes do not.
        let whole: u64 = blocks.iter().map(|block| block.size.0).sum();
        if whole != fields.size {
            let found = format!("{}, where its blocks add up to {whole}", fields.size);
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
        let list = self
            .objects
            .list(blocks)
            .ok_or_else(|| self.objects.wrong(blocks, "a list of blocks"))
            .map_err(at(format!("{place}.blocks")))?
            .to_vec();
        let mut address = start;
        let mut blocks = Vec::with_capacity(list.len());
        for (index, item) in list.into_iter().enumerate() {
            let path = || format!("{place}.blocks[{index}]");
            let pairs = self
                .objects
                .dict(item)
                .ok_or_else(|| self.objects.wrong(item, "a block's dictionary"))
                .map_err(|wrong| at(path())(wrong))?
                .to_vec();
            let (fields, earlier) = BlockFields::read(&mut self.objects, &pairs).map_err(|wrong| at(path())(wrong))?;
            if fields.address.is_some_and(|said| said != address) {
                let found = format!("{}, where the blocks before it end at {address}", fields.address.unwrap_or_default());
                return Err(SnapshotError::WrongType {
                    path: format!("{}.address", path()),
                    expected: "the end of the block before",
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
        let list = self.objects.list(traces).ok_or_else(|| self.objects.wrong(traces, EXPECTED)).map_err(at("device_traces"))?.to_vec();
        for (device, trace) in list.into_iter().enumerate() {
            let place = format!("device_traces[{device}]");
            let items = self.objects.list(trace).ok_or_else(|| self.objects.wrong(trace, "a list of events")).map_err(at(&place))?.to_vec();
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

    /// `None` for what is told otherwise: the marks of phases that old versions put among the events, and actions that are not known.
    #[inline]
    fn event(&mut self, item: Item, device: usize, place: impl Fn() -> String) -> Result<Option<Event>, SnapshotError> {
        let raw = match self.objects.object(item) {
            Some(Object::Event(index)) => *self.objects.event(index),
            Some(Object::Dict(_)) => {
                let pairs = self.objects.dict(item).unwrap_or_default().to_vec();
                match self.objects.event_of(&pairs) {
                    Ok(event) => event,
                    Err(Wrong { key: "action", .. }) if self.is_other_action(&pairs, device)? => return Ok(None),
                    Err(wrong) => return Err(at(place())(wrong)),
                }
            }
            _ => return Err(at(place())(self.objects.wrong(item, "an event's dictionary"))),
        };
        Ok(Some(Event { stack: self.stack(raw.stack)?, extra: self.extra(raw.extra)?, ..raw }))
    }

    /// Whether it is an event whose action is a text, but none of those that are known; what it tells is then kept or counted.
    fn is_other_action(&mut self, pairs: &[Item], device: usize) -> Result<bool, SnapshotError> {
        let value = |key: TextId| pairs.chunks_exact(2).find_map(|pair| (pair[0] == Item::Text(key)).then_some(pair[1]));
        let Some(Item::Text(action)) = value(TextId::ACTION) else { return Ok(false) };
        // Versions of early 2024 put the marks of phases here: https://github.com/pytorch/pytorch/pull/124179
        if action == TextId::USER_DEFINED {
            let stack = self.objects.stack(value(TextId::FRAMES).unwrap_or(Item::None)).map_err(at("device_traces"))?;
            let frame = self.objects.stack_frames(stack).first().map(|&frame| self.objects.frame(frame));
            let time_us = value(TextId::TIME_US).and_then(|time| self.objects.amount(time).ok());
            if let (Some(frame), Some(time_us)) = (frame, time_us) {
                let name = self.objects.text(Item::Text(frame.file)).unwrap_or_default().to_owned();
                let device = u32::try_from(device).unwrap_or(u32::MAX);
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
        let list = self
            .objects
            .list(annotations)
            .ok_or_else(|| self.objects.wrong(annotations, "a list of annotations"))
            .map_err(at(path))?
            .to_vec();
        for (index, item) in list.into_iter().enumerate() {
            let place = format!("{path}[{index}]");
            let pairs =
                self.objects.dict(item).ok_or_else(|| self.objects.wrong(item, "an annotation's dictionary")).map_err(at(&place))?.to_vec();
            let (annotation, unknown) = annotation(&self.objects, &pairs).map_err(at(&place))?;
            let extra = self.keep(&unknown)?;
            self.snapshot.annotations.push(Annotation { extra, ..annotation });
        }
        Ok(())
    }

    /// The snapshot's id of a stack.
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
        let id = self.snapshot.stacks.intern(&ids);
        self.stacks.insert(raw, id);
        Ok(id)
    }

    fn frame(&mut self, raw: u32) -> Result<FrameId, SnapshotError> {
        let frame = self.objects.frame(raw);
        let extra = self.extra(frame.extra)?;
        let text = |id| self.objects.text(Item::Text(id)).unwrap_or_default().to_owned();
        let id = self.snapshot.stacks.intern_frame(Frame { name: text(frame.name), file: text(frame.file), line: frame.line, extra });
        self.frames.insert(raw, id);
        Ok(id)
    }

    /// The snapshot's id of further keys.
    fn extra(&mut self, raw: ExtraId) -> Result<ExtraId, SnapshotError> {
        if let Some(&known) = self.extras.get(&raw) {
            return Ok(known);
        }
        let set = self.values.pairs(&self.objects, self.objects.extra(raw))?;
        let id = self.snapshot.extras.intern(set);
        self.extras.insert(raw, id);
        Ok(id)
    }

    /// Keeps keys and values, which come in turn.
    fn keep(&mut self, unknown: &[Item]) -> Result<ExtraId, SnapshotError> {
        let raw = self.objects.keep(unknown);
        self.extra(raw)
    }

    /// Says what was left out.
    fn note(&mut self) {
        let notes = &mut self.snapshot.notes;
        for (action, events) in &self.unknown_actions {
            notes.push(format!("Left out: {} with the action `{action}`, which is not known.", count(*events, "event")));
        }
        if self.earlier_owners > 0 {
            notes.push(format!("Left out: {} of blocks (`history`).", count(self.earlier_owners, "earlier owner")));
        }
        if self.other_sums > 0 {
            notes.push(format!("{} of segments differ from what the blocks add up to: the blocks count.", count(self.other_sums, "sum")));
        }
    }
}

/// The values of a segment's dictionary.
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
            size: size.ok_or_else(|| Wrong::missing("total_size"))?,
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

/// The values of a block's dictionary.
struct BlockFields {
    address: Option<u64>,
    size: u64,
    requested: u64,
    state: BlockState,
    stack: StackId,
    unknown: Vec<Item>,
}

impl BlockFields {
    /// The block, and how many owners its `history` has before the present one.
    fn read(objects: &mut Objects, pairs: &[Item]) -> Result<(Self, u64), Wrong> {
        let (mut address, mut size, mut requested, mut state, mut stack) = (None, None, None, None, None);
        let (mut owners, mut unknown) = (Vec::new(), Vec::new());
        for pair in pairs.chunks_exact(2) {
            let value = pair[1];
            match pair[0] {
                Item::Text(TextId::ADDRESS) => address = Some(objects.address(value).map_err(|wrong| wrong.of("address"))?),
                Item::Text(TextId::SIZE) => size = Some(objects.amount(value).map_err(|wrong| wrong.of("size"))?),
                Item::Text(TextId::REQUESTED_SIZE) => requested = Some(objects.amount(value).map_err(|wrong| wrong.of("requested_size"))?),
                Item::Text(TextId::STATE) => state = Some(state_of(objects, value)?),
                Item::Text(TextId::FRAMES) => stack = Some(objects.stack(value).map_err(|wrong| wrong.of("frames"))?),
                Item::Text(TextId::HISTORY) => {
                    owners = objects.list(value).ok_or_else(|| objects.wrong(value, "a list of owners").of("history"))?.to_vec();
                }
                key => unknown.extend([key, value]),
            }
        }
        // Before PyTorch 2.1 a block's last owner is told by the first entry of its `history`.
        if let Some(&owner) = owners.first() {
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
        Ok((block, owners.len().saturating_sub(1) as u64))
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

/// An annotation, and its further keys with their values, in turn.
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
