//! A snapshot and its job as an allocation trace: the operations in the words of [`crate::trace`], and every other fact of the snapshot in lines that
//! begin with `#:`, which readers of plain traces pass over. [`write()`] and [`read`].
//!
//! What was live before the recording is allocated first, in the order of addresses, so that a plain reader has the whole program. Lines of facts:
//!
//! ```text
//! #: snapshot 1 EXTRA                     the first line; 1 is the version of this form
//! #: extra JSON                           further keys: sets of them, counted from 1; 0 has none
//! #: frame ["NAME", "FILE", LINE, EXTRA]  counted from 0
//! #: stack FRAME…                         the innermost first; counted from 1, 0 is the empty one
//! #: settings JSON                        the settings, as text and one by one
//! #: annotation JSON
//! #: note JSON                            what was left out when the snapshot was read
//! #: segment DEVICE ADDRESS SIZE STREAM small|large POOL POOL EXPANDABLE STACK EXTRA
//! #: block ADDRESS SIZE REQUESTED active|pending|inactive STACK EXTRA     of the segment in front of it
//! #: device NUMBER                        whose events follow
//! #: ACTION ADDRESS SIZE STREAM TIME STACK EXTRA                          an event; TIME is - where it is not known
//! ```
//!
//! Operations stand behind the events that they were recovered from. Facts count: a file with `#: snapshot` is read by them alone, and its operations
//! are found anew. To change a trace by hand, take the lines of facts out.

use std::io::{self, Write};
use std::str::{FromStr, SplitAsciiWhitespace};

use harness_allocator::allocator::PrivatePoolId;
use harness_allocator::stats::{BlockState, PoolKind};
use harness_allocator::units::Bytes;

use super::Job;
use crate::snapshot::{Action, Annotation, Block, Event, ExtraId, Frame, FrameId, PoolId, Segment, Settings, Snapshot, StackId, Value};
use crate::trace::TraceEvent;

/// The version of the form.
const VERSION: u32 = 1;
/// What a line of facts begins with.
const MARK: &str = "#:";

const ACTIONS: [(Action, &str); 9] = [
    (Action::Alloc, "alloc"),
    (Action::FreeRequested, "free_requested"),
    (Action::FreeCompleted, "free_completed"),
    (Action::SegmentAlloc, "segment_alloc"),
    (Action::SegmentFree, "segment_free"),
    (Action::SegmentMap, "segment_map"),
    (Action::SegmentUnmap, "segment_unmap"),
    (Action::Snapshot, "snapshot_taken"),
    (Action::Oom, "oom"),
];
const STATES: [(BlockState, &str); 3] =
    [(BlockState::Allocated, "active"), (BlockState::PendingFree, "pending"), (BlockState::Inactive, "inactive")];
const POOLS: [(PoolKind, &str); 2] = [(PoolKind::Small, "small"), (PoolKind::Large, "large")];

/// A line of facts that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {why}; take the lines that begin with `#:` out to read the operations alone")]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct TextError {
    /// Counted from 1.
    pub line: usize,
    pub why: &'static str,
}

/// Writes a snapshot, with the operations of the job that was recovered from it.
///
/// # Errors
/// Of the writer.
pub fn write(snapshot: &Snapshot, job: &Job, mut out: impl Write) -> io::Result<()> {
    writeln!(out, "{MARK} snapshot {VERSION} {}", snapshot.extra.0)?;
    write_tables(snapshot, &mut out)?;
    for segment in &snapshot.segments {
        write_segment(segment, &mut out)?;
    }
    write_start(job, &mut out)?;
    for (device, events) in (0_u32..).zip(&snapshot.traces) {
        writeln!(out, "{MARK} device {device}")?;
        let none = (&[][..], &[][..]);
        let (mut operations, mut origin) = if device == job.device { (&job.operations[..], &job.origin[..]) } else { none };
        for (index, event) in (0_u32..).zip(events) {
            write_event(event, &mut out)?;
            // Operations are in the order of the program; their events nearly are.
            while let (Some((operation, later)), Some((_, later_origin))) =
                (operations.split_first(), origin.split_first().filter(|(from, _)| **from <= index))
            {
                writeln!(out, "{operation}")?;
                (operations, origin) = (later, later_origin);
            }
        }
        for operation in operations {
            writeln!(out, "{operation}")?;
        }
    }
    Ok(())
}

fn write_tables(snapshot: &Snapshot, out: &mut impl Write) -> io::Result<()> {
    for id in 1..snapshot.extras.len() as u32 {
        writeln!(out, "{MARK} extra {}", serde_json::to_string(snapshot.extras.get(ExtraId(id)))?)?;
    }
    for id in 0..snapshot.stacks.frame_count() as u32 {
        let Frame { name, file, line, extra } = snapshot.stacks.frame(FrameId(id));
        writeln!(out, "{MARK} frame {}", serde_json::to_string(&(name, file, line, extra.0))?)?;
    }
    for id in 1..snapshot.stacks.len() as u32 {
        write!(out, "{MARK} stack")?;
        snapshot.stacks.ids(StackId(id)).iter().try_for_each(|frame| write!(out, " {}", frame.0))?;
        writeln!(out)?;
    }
    if let Some(Settings { conf, all }) = &snapshot.settings {
        writeln!(out, "{MARK} settings {}", serde_json::to_string(&(conf, all))?)?;
    }
    for Annotation { begins, name, device, time_us, extra } in &snapshot.annotations {
        writeln!(out, "{MARK} annotation {}", serde_json::to_string(&(begins, name, device, time_us, extra.0))?)?;
    }
    for note in &snapshot.notes {
        writeln!(out, "{MARK} note {}", serde_json::to_string(note)?)?;
    }
    Ok(())
}

fn write_segment(segment: &Segment, out: &mut impl Write) -> io::Result<()> {
    let Segment { device, address, size, stream, pool, private_pool: PoolId(first, second), expandable, stack, blocks, extra } = segment;
    let (pool, expandable) = (name(&POOLS, *pool), u8::from(*expandable));
    writeln!(out, "{MARK} segment {device} {address} {} {stream} {pool} {first} {second} {expandable} {} {}", size.0, stack.0, extra.0)?;
    for Block { address, size, requested, state, stack, extra } in blocks {
        writeln!(out, "{MARK} block {address} {} {} {} {} {}", size.0, requested.0, name(&STATES, *state), stack.0, extra.0)?;
    }
    Ok(())
}

/// What was live before the recording, as operations.
fn write_start(job: &Job, out: &mut impl Write) -> io::Result<()> {
    let mut id = 0;
    for segment in &job.start {
        let pool = job.pools.iter().position(|&pool| pool == segment.private_pool).map(|pool| PrivatePoolId(pool as u32));
        if let Some(pool) = pool {
            writeln!(out, "{}", TraceEvent::BeginPool(pool))?;
        }
        for block in segment.blocks.iter().filter(|block| block.state == BlockState::Allocated) {
            writeln!(out, "{}", TraceEvent::Allocate { id, size: block.requested, stream: job.stream_number(segment.stream) })?;
            id += 1;
        }
        if let Some(pool) = pool {
            writeln!(out, "{}", TraceEvent::EndPool(pool))?;
        }
    }
    Ok(())
}

fn write_event(event: &Event, out: &mut impl Write) -> io::Result<()> {
    let Event { action, address, size, stream, time_us, stack, extra } = event;
    write!(out, "{MARK} {} {address} {} {stream} ", name(&ACTIONS, *action), size.0)?;
    match time_us {
        Some(time) => write!(out, "{time}")?,
        None => write!(out, "-")?,
    }
    writeln!(out, " {} {}", stack.0, extra.0)
}

fn name<T: PartialEq>(names: &[(T, &'static str)], of: T) -> &'static str {
    names.iter().find(|(value, _)| *value == of).map_or("", |&(_, name)| name)
}

/// Reads the snapshot that [`write()`] wrote; `None` where the text is a plain trace.
///
/// # Errors
/// [`TextError`] with the first line of facts that cannot be read.
pub fn read(text: &str) -> Result<Option<Snapshot>, TextError> {
    let facts = |line: &'_ str| line.strip_prefix(MARK).map(str::trim_start).map(str::to_owned);
    let mut lines = (1..).zip(text.lines()).filter_map(|(number, line)| Some((number, facts(line)?))).peekable();
    if !lines.peek().is_some_and(|(_, first)| first.starts_with("snapshot ")) {
        return Ok(None);
    }
    let mut snapshot = Snapshot::default();
    for (line, facts) in lines {
        read_line(&mut snapshot, &facts).ok_or(TextError { line, why: "not a fact of a snapshot" })?;
    }
    Ok(Some(snapshot))
}

/// Adds one line of facts; `None` where it is none.
fn read_line(snapshot: &mut Snapshot, facts: &str) -> Option<()> {
    let (kind, rest) = facts.split_once(' ').unwrap_or((facts, ""));
    let mut words = Words(rest.split_ascii_whitespace());
    match kind {
        "snapshot" => {
            (words.number::<u32>()? == VERSION).then_some(())?;
            snapshot.extra = ExtraId(words.number()?);
        }
        "extra" => {
            let set: Vec<(String, Value)> = serde_json::from_str(rest).ok()?;
            let expected = snapshot.extras.len();
            return (snapshot.extras.intern(set).0 as usize == expected).then_some(());
        }
        "frame" => {
            let (name, file, line, extra) = serde_json::from_str(rest).ok()?;
            let expected = snapshot.stacks.frame_count();
            let id = snapshot.stacks.intern_frame(Frame { name, file, line, extra: ExtraId(extra) });
            return (id.0 as usize == expected).then_some(());
        }
        "stack" => {
            let frames = words.0.map(|word| word.parse().ok().map(FrameId)).collect::<Option<Vec<FrameId>>>()?;
            let known = |frame: &FrameId| (frame.0 as usize) < snapshot.stacks.frame_count();
            frames.iter().all(known).then_some(())?;
            let expected = snapshot.stacks.len();
            return (snapshot.stacks.intern(&frames).0 as usize == expected).then_some(());
        }
        "settings" => {
            let (conf, all) = serde_json::from_str(rest).ok()?;
            snapshot.settings = Some(Settings { conf, all });
            return Some(());
        }
        "annotation" => {
            let (begins, name, device, time_us, extra) = serde_json::from_str(rest).ok()?;
            snapshot.annotations.push(Annotation { begins, name, device, time_us, extra: ExtraId(extra) });
            return Some(());
        }
        "note" => {
            snapshot.notes.push(serde_json::from_str(rest).ok()?);
            return Some(());
        }
        "segment" => snapshot.segments.push(read_segment(&mut words)?),
        "block" => snapshot.segments.last_mut()?.blocks.push(read_block(&mut words)?),
        "device" => {
            (words.number::<usize>()? == snapshot.traces.len()).then_some(())?;
            snapshot.traces.push(Vec::new());
        }
        action => snapshot.traces.last_mut()?.push(read_event(action, &mut words)?),
    }
    words.0.next().is_none().then_some(())
}

fn read_block(words: &mut Words<'_>) -> Option<Block> {
    Some(Block {
        address: words.number()?,
        size: Bytes(words.number()?),
        requested: Bytes(words.number()?),
        state: words.one_of(&STATES)?,
        stack: StackId(words.number()?),
        extra: ExtraId(words.number()?),
    })
}

fn read_event(action: &str, words: &mut Words<'_>) -> Option<Event> {
    Some(Event {
        action: ACTIONS.iter().find(|(_, name)| *name == action)?.0,
        address: words.number()?,
        size: Bytes(words.number()?),
        stream: words.number()?,
        time_us: words.number_or_none()?,
        stack: StackId(words.number()?),
        extra: ExtraId(words.number()?),
    })
}

fn read_segment(words: &mut Words<'_>) -> Option<Segment> {
    Some(Segment {
        device: words.number()?,
        address: words.number()?,
        size: Bytes(words.number()?),
        stream: words.number()?,
        pool: words.one_of(&POOLS)?,
        private_pool: PoolId(words.number()?, words.number()?),
        expandable: words.number::<u8>()? == 1,
        stack: StackId(words.number()?),
        blocks: Vec::new(),
        extra: ExtraId(words.number()?),
    })
}

/// The words of a line.
struct Words<'a>(SplitAsciiWhitespace<'a>);

impl Words<'_> {
    fn number<T: FromStr>(&mut self) -> Option<T> {
        self.0.next()?.parse().ok()
    }

    fn number_or_none<T: FromStr>(&mut self) -> Option<Option<T>> {
        match self.0.next()? {
            "-" => Some(None),
            word => word.parse().ok().map(Some),
        }
    }

    fn one_of<T: Copy>(&mut self, names: &[(T, &'static str)]) -> Option<T> {
        let word = self.0.next()?;
        names.iter().find(|(_, name)| *name == word).map(|&(value, _)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace;

    fn example() -> Snapshot {
        let mut snapshot = Snapshot::default();
        let values = vec![
            Value::None,
            Value::Bool(true),
            Value::Int(-(1 << 100)),
            Value::Float(f64::NAN),
            Value::Text("two\nlines # \"quoted\"".to_owned()),
            Value::Bytes(vec![0, 255]),
            Value::Tuple(vec![Value::Dict(vec![(Value::Int(1), Value::Set(vec![]))])]),
        ];
        let extra = snapshot.extras.intern(vec![("a key".to_owned(), Value::List(values))]);
        let frame = snapshot.stacks.intern_frame(Frame { name: "f".to_owned(), file: "a b.py".to_owned(), line: 3, extra });
        let stack = snapshot.stacks.intern(&[frame, frame]);
        let event = |action, address, size| Event { action, address, size: Bytes(size), stream: 0, time_us: Some(5), stack, extra };
        let mib = 2 << 20;
        let events = vec![
            Event { time_us: None, ..event(Action::FreeCompleted, 4096, 600) },
            event(Action::SegmentAlloc, mib, mib),
            event(Action::Alloc, mib, 700),
            event(Action::Snapshot, 0, 0),
        ];
        snapshot.traces = vec![Vec::new(), events];
        let block = |address, size, state| Block { address, size: Bytes(size), requested: Bytes(size - 7), state, stack, extra };
        let (in_use, free) = (BlockState::Allocated, BlockState::Inactive);
        let segment = |address, size, blocks| Segment {
            device: 1,
            address,
            size: Bytes(size),
            stream: 0,
            pool: PoolKind::Small,
            private_pool: PoolId(0, 9),
            expandable: false,
            stack,
            blocks,
            extra,
        };
        snapshot.segments = vec![
            segment(4096, 2048, vec![block(4096, 1024, free), block(5120, 512, in_use), block(5632, 512, free)]),
            segment(mib, mib, vec![block(mib, 1024, in_use), block(mib + 1024, mib - 1024, free)]),
        ];
        snapshot.settings = Some(Settings { conf: String::new(), all: vec![("x".to_owned(), Value::Float(0.1))] });
        snapshot.annotations.push(Annotation { begins: true, name: "step 1".to_owned(), device: 1, time_us: 4, extra });
        snapshot.notes.push("a note".to_owned());
        snapshot
    }

    fn written(snapshot: &Snapshot) -> String {
        let job = Job::recover(snapshot, 1).expect("a job");
        let mut text = Vec::new();
        write(snapshot, &job, &mut text).expect("memory can be written");
        String::from_utf8(text).expect("it is text")
    }

    #[test]
    fn a_snapshot_written_as_a_trace_reads_back_with_every_fact() {
        let snapshot = example();
        let text = written(&snapshot);
        let read = read(&text).expect("it was written here").expect("it has facts");
        // The number that is none is not equal to itself.
        assert_eq!(format!("{read:?}").len(), format!("{snapshot:?}").len());
        assert_eq!(written(&read), text);
        assert_eq!((&read.traces, &read.segments, &read.annotations), (&snapshot.traces, &snapshot.segments, &snapshot.annotations));
    }

    #[test]
    fn a_plain_reader_finds_the_whole_program_in_it() {
        let operations: Vec<String> = trace::parse(&written(&example())).expect("a trace").iter().map(TraceEvent::to_string).collect();
        let expected = ["g+ 0", "a 0 600 0", "a 1 505 0", "g- 0", "f 0", "g+ 0", "a 2 700 0", "g- 0"];
        assert_eq!(operations, expected);
        assert_eq!(read("# a comment\na 1 2 0\n"), Ok(None));
    }

    #[test]
    fn a_line_of_facts_that_is_damaged_is_named() {
        let text = written(&example());
        for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| line.starts_with(MARK)) {
            let cut = line.rsplit_once([' ', ',']).map_or("", |(front, _)| front);
            let damaged = text.replacen(line, &format!("{cut} ?"), 1);
            let error = read(&damaged).map(|read| read.is_some());
            let first = text.lines().position(|same| same == line).map_or(0, |index| index + 1);
            assert!(error == Err(TextError { line: first, why: "not a fact of a snapshot" }) || number == 1, "{line}: {error:?}");
        }
    }
}
