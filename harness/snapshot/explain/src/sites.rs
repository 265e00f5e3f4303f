//! Finds the [`AllocationSite`] of every event of one device: the program's line that allocated
//! memory.
//!
//! A site is the innermost frame outside PyTorch and Python's standard library. For a stack that
//! starts in `torch/nn/modules/conv.py`, it is the line of the model that calls the convolution.
//! Autograd allocates in C++ threads without Python frames. Such events get the site of the last
//! event that has one, with [`SiteKind::After`]. During `loss.backward()`, that is the end of the
//! forward pass.

use std::collections::{BTreeMap, HashMap};

use harness_trace::snapshot::{Annotation, Event, ExtraId, Frame, Snapshot, StackId};
use indexmap::IndexMap;
use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct SiteId(pub u32);

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AllocationSite {
    /// The name in reports, unique in the snapshot: `model.py:41 forward`.
    pub name: String,
    pub kind: SiteKind,
    /// The full path, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Counted from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function: Option<String>,
    /// The first recorded stack of this site, innermost frame first: `/srv/model.py:41 forward`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SiteKind {
    Frame,
    /// No Python frame was recorded. The frame is that of the last earlier event that has one.
    After,
    /// No Python frame was recorded, nor before it. The name contains the annotated phase or the
    /// requested size.
    NoFrames,
    /// Allocated before the recording, or not recorded.
    BeforeRecording,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    kind: SiteKind,
    frame: Option<Frame>,
    /// For [`SiteKind::NoFrames`]: the phase or size.
    words: String,
}

#[derive(Clone, Debug)]
pub struct Sites {
    list: Vec<AllocationSite>,
    of_event: Vec<SiteId>,
    of_stack: Vec<Option<SiteId>>,
    before_recording: SiteId,
}

impl Sites {
    /// Finds the sites of a device's events and blocks. Linear in events, stacks and frames.
    pub fn new(snapshot: &Snapshot, device: u32) -> Self {
        let events = snapshot.events_of(device);
        let mut finder = Finder::new(snapshot);
        let of_stack: Vec<Option<SiteId>> = snapshot
            .stacks
            .all()
            .map(|stack| finder.of_frames(stack))
            .collect();
        let of_event = finder.of_events(events, &of_stack, &phases(&snapshot.annotations, device));
        let before = Key {
            kind: SiteKind::BeforeRecording,
            frame: None,
            words: String::new(),
        };
        let before_recording = finder.id(before, StackId::EMPTY);
        Self {
            list: finder.named(),
            of_event,
            of_stack,
            before_recording,
        }
    }

    /// The site of an event. Panics if the device has no such event.
    pub fn of_event(&self, event: usize) -> SiteId {
        self.of_event[event]
    }

    /// The site of a block, from the event that allocated it or else from its own stack.
    pub fn of_block(&self, allocated_by: Option<u32>, stack: StackId) -> SiteId {
        let by_stack = || self.of_stack.get(stack.0 as usize).copied().flatten();
        allocated_by
            .map(|event| self.of_event(event as usize))
            .or_else(by_stack)
            .unwrap_or(self.before_recording)
    }

    pub fn get(&self, id: SiteId) -> &AllocationSite {
        &self.list[id.0 as usize]
    }

    pub fn all(&self) -> &[AllocationSite] {
        &self.list
    }
}

/// Returns true if a frame belongs to the program or a scenario, not to compiled code, PyTorch or
/// Python's standard library.
pub fn is_of_program(frame: &Frame) -> bool {
    // The last three are traces and RMM logs.
    const ENDINGS: [&str; 8] = [
        ".py",
        ".pyx",
        ".ipynb",
        ".yaml",
        ".yml",
        ".trace",
        ".trace.gz",
        ".csv",
    ];
    let file = frame.file.as_str();
    // Python names code without a file `<string>`, `<stdin>` or `<ipython-input-3-…>`.
    let is_source = ENDINGS.iter().any(|ending| file.ends_with(ending))
        || (file.starts_with('<') && !file.starts_with("<frozen "));
    is_source && !is_of_torch(file) && !is_of_python(file)
}

fn is_of_torch(file: &str) -> bool {
    ["site-packages", "dist-packages"].iter().any(|packages| {
        file.split_once(packages)
            .is_some_and(|(_, rest)| rest.starts_with("/torch/") || rest.starts_with("\\torch\\"))
    })
}

/// Python's standard library is next to `site-packages`: `/usr/lib/python3.11/contextlib.py`.
fn is_of_python(file: &str) -> bool {
    let Some((_, rest)) = file.rsplit_once("/lib/python3") else {
        return false;
    };
    rest.starts_with('.') && !rest.contains("/site-packages/") && !rest.contains("/dist-packages/")
}

/// The innermost open phase after each change, oldest first.
fn phases(annotations: &[Annotation], device: u32) -> Vec<(u64, Option<&str>)> {
    let mut open: Vec<&str> = Vec::new();
    let mut phases = Vec::new();
    for annotation in annotations
        .iter()
        .filter(|annotation| annotation.device == device)
    {
        if annotation.begins {
            open.push(&annotation.name);
        } else if let Some(index) = open.iter().rposition(|name| *name == annotation.name) {
            open.remove(index);
        }
        phases.push((annotation.time_us, open.last().copied()));
    }
    phases.sort_by_key(|&(time, _)| time);
    phases
}

struct Finder<'a> {
    snapshot: &'a Snapshot,
    /// By the id of the frame.
    is_of_program: Vec<bool>,
    /// Sites in the order of their ids, with their first stacks.
    found: IndexMap<Key, StackId>,
    /// Maps each site to the [`SiteKind::After`] site for events without frames that follow it.
    after: HashMap<SiteId, SiteId>,
}

impl<'a> Finder<'a> {
    fn new(snapshot: &'a Snapshot) -> Self {
        let is_of_program = snapshot.stacks.all_frames().map(is_of_program).collect();
        Self {
            snapshot,
            is_of_program,
            found: IndexMap::new(),
            after: HashMap::new(),
        }
    }

    fn id(&mut self, key: Key, stack: StackId) -> SiteId {
        let entry = self.found.entry(key);
        let id = SiteId(entry.index() as u32);
        entry.or_insert(stack);
        id
    }

    fn of_frames(&mut self, stack: StackId) -> Option<SiteId> {
        let stacks = &self.snapshot.stacks;
        let frame = stacks
            .ids(stack)
            .iter()
            .find(|id| self.is_of_program[id.0 as usize])?;
        let frame = Frame {
            extra: ExtraId::NONE,
            ..stacks.frame(*frame).clone()
        };
        Some(self.id(
            Key {
                kind: SiteKind::Frame,
                frame: Some(frame),
                words: String::new(),
            },
            stack,
        ))
    }

    fn of_events(
        &mut self,
        events: &[Event],
        of_stack: &[Option<SiteId>],
        phases: &[(u64, Option<&str>)],
    ) -> Vec<SiteId> {
        let mut last = None;
        let site_of = |event: &Event| {
            let own = of_stack.get(event.stack.0 as usize).copied().flatten();
            last = own.or(last);
            match (own, last) {
                (Some(site), _) => site,
                (None, Some(before)) => self.after(before),
                (None, None) => self.without_frames(event, phases),
            }
        };
        events.iter().map(site_of).collect()
    }

    /// The site of events without frames that follow `site`.
    fn after(&mut self, site: SiteId) -> SiteId {
        if let Some(&after) = self.after.get(&site) {
            return after;
        }
        let after = match self.found.get_index(site.0 as usize) {
            Some((key, &stack)) if key.kind == SiteKind::Frame => self.id(
                Key {
                    kind: SiteKind::After,
                    ..key.clone()
                },
                stack,
            ),
            _ => site,
        };
        self.after.insert(site, after);
        after
    }

    fn without_frames(&mut self, event: &Event, phases: &[(u64, Option<&str>)]) -> SiteId {
        let phase = event.time_us.and_then(|time| {
            let later = phases.partition_point(|&(begin, _)| begin <= time);
            phases[..later].last()?.1
        });
        let words = match phase {
            Some(name) => format!("in {name}"),
            // The name is unspecific if the stack has no frame of the program, or if there are very
            // many sizes.
            None if event.size.get() < 1 << 20 => "requests below 1 MiB".to_owned(),
            None => format!("requests of {} ({} B)", event.size, event.size.get()),
        };
        self.id(
            Key {
                kind: SiteKind::NoFrames,
                frame: None,
                words,
            },
            event.stack,
        )
    }

    fn named(self) -> Vec<AllocationSite> {
        let files = ShortFiles::new(
            self.found
                .keys()
                .filter_map(|key| Some(&*key.frame.as_ref()?.file)),
        );
        let site = |(key, &stack): (&Key, &StackId)| {
            let frames = if key.kind == SiteKind::After {
                StackId::EMPTY
            } else {
                stack
            };
            let stack = self
                .snapshot
                .stacks
                .frames(frames)
                .map(|frame| format!("{}:{} {}", frame.file, frame.line, frame.name));
            AllocationSite {
                name: key.name(&files),
                kind: key.kind,
                file: key.frame.as_ref().map(|frame| frame.file.clone()),
                line: key.frame.as_ref().map(|frame| frame.line),
                function: key.frame.as_ref().map(|frame| frame.name.clone()),
                stack: stack.collect(),
            }
        };
        self.found.iter().map(site).collect()
    }
}

impl AllocationSite {
    /// Appends the site to a verb: `allocated at model.py:41 forward`, `allocated by code with no
    /// Python frames, after model.py:41 forward`, `allocated before the recording`.
    pub fn with_verb(&self, verb: &str) -> String {
        match self.kind {
            SiteKind::Frame => format!("{verb} at {}", self.name),
            SiteKind::After | SiteKind::NoFrames => format!("{verb} by code with {}", self.name),
            SiteKind::BeforeRecording => format!("{verb} {}", self.name),
        }
    }
}

impl Key {
    fn name(&self, files: &ShortFiles<'_>) -> String {
        let place = self.frame.as_ref().map_or_else(
            String::new,
            |Frame {
                 file, line, name, ..
             }| {
                let function = if name.is_empty() || name == "<module>" {
                    String::new()
                } else {
                    format!(" {name}")
                };
                let line = if *line == 0 {
                    String::new()
                } else {
                    format!(":{line}")
                };
                format!("{}{line}{function}", files.short(file))
            },
        );
        match self.kind {
            SiteKind::Frame => place,
            SiteKind::After => format!("no Python frames, after {place}"),
            SiteKind::NoFrames => format!("no Python frames, {}", self.words),
            SiteKind::BeforeRecording => "before the recording".to_owned(),
        }
    }
}

/// The shortest unique path endings: `model.py`, or `gpt/model.py` if there are two.
struct ShortFiles<'a>(BTreeMap<&'a str, &'a str>);

impl<'a> ShortFiles<'a> {
    fn new(files: impl Iterator<Item = &'a str>) -> Self {
        let mut short: BTreeMap<&str, &str> = files.map(|file| (file, ending(file, 1))).collect();
        for parts in 2..16 {
            let mut owners: BTreeMap<&str, u32> = BTreeMap::new();
            short
                .values()
                .for_each(|ending| *owners.entry(*ending).or_default() += 1);
            if owners.values().all(|&count| count == 1) {
                break;
            }
            short
                .iter_mut()
                .filter(|(_, short)| owners[**short] > 1)
                .for_each(|(file, short)| *short = ending(file, parts));
        }
        Self(short)
    }

    fn short(&self, file: &'a str) -> &'a str {
        self.0.get(file).copied().unwrap_or(file)
    }
}

fn ending(file: &str, parts: usize) -> &str {
    file.rmatch_indices(['/', '\\'])
        .nth(parts - 1)
        .map_or(file, |(at, _)| &file[at + 1..])
}

#[cfg(test)]
mod tests;
