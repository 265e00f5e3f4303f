//! Recommends changes of the program itself. Each change is tested by a replay of the changed
//! program.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::allocator::{MemoryFraction, PrivatePoolId};
use harness_allocator::units::Bytes;
use harness_base::{parallel::in_parallel, words::count};
use harness_trace::program::{ProgramError, RecordedEnd, RecordedProgram};
use harness_trace::snapshot::{Event, MempoolId, Snapshot};
use harness_trace::trace::TraceEvent;

use crate::grid::{Configuration, Grid};
use crate::sites::{SiteId, SiteKind, Sites};
use crate::{attempts, idle, least::Least};

/// Maximum number of sites to try changes for. The sites with the most live bytes are chosen.
const SITES: usize = 8;
/// Maximum number of streams to try changes for.
const STREAMS: usize = 4;
const WORTH_PERCENT: u64 = 2;
/// Changes that are tested in parallel.
const GROUP: usize = 4;
/// Maximum number of `empty_cache` calls that a change may add.
const MOST_TIMES_EMPTIED: usize = 1000;

#[derive(Clone, Debug)]
pub struct ProgramAdvice {
    /// The change and its saving, as a sentence without a full stop.
    pub sentence: String,
    pub least: Least,
    pub saves: Bytes,
    pub program: RecordedProgram,
}

/// The program's figures with its recorded settings, without a change.
#[derive(Clone, Copy, Debug)]
pub struct Unchanged {
    /// The device's memory.
    pub memory: Bytes,
    pub least: Bytes,
    /// The most reserved memory on that device. `None` if a request fails.
    pub reserved: Option<Bytes>,
}

/// The figures with a change.
struct With {
    least: Least,
    reserved: Option<Bytes>,
}

/// Tests changes with the recorded settings on all cores. The largest saving comes first; equal
/// savings are sorted by fewer `empty_cache` calls. Calls `progress` after each change.
///
/// Each change has a copy of the program, so only a group of them exists at a time.
pub fn program_advice(
    program: &RecordedProgram,
    snapshot: &Snapshot,
    own: &Configuration,
    without: Unchanged,
    progress: &(dyn Fn() + Sync),
) -> Result<Vec<ProgramAdvice>, ProgramError> {
    let (mut group, mut advice): (Vec<Change>, Vec<_>) = (Vec::new(), Vec::new());
    let mut tested: Result<(), ProgramError> = Ok(());
    let mut test = |group: &mut Vec<Change>| {
        let results = in_parallel(group, |change| {
            let prepared = change.program.prepare()?;
            let grid = Grid::new(&prepared, without.memory);
            let (least, _) = grid.least(own)?;
            let reserved = change
                .of_stream
                .then(|| grid.replay(own, without.memory))
                .transpose()?;
            progress();
            Ok::<_, ProgramError>(With {
                least,
                reserved: reserved.map(|replayed| Bytes(replayed.stats.reserved_bytes.all.peak)),
            })
        })?;
        advice.extend(
            group
                .drain(..)
                .zip(results)
                .filter_map(|(change, with)| change.advice(with, without)),
        );
        Ok(())
    };
    each_change(program, snapshot, |change| {
        group.push(change);
        if group.len() >= GROUP && tested.is_ok() {
            tested = test(&mut group);
        }
    });
    tested.and_then(|()| test(&mut group))?;
    // The sort is stable, so equal changes keep their order.
    advice.sort_by_key(|(advice, times_emptied): &(ProgramAdvice, usize)| {
        (Reverse(advice.saves), *times_emptied)
    });
    Ok(advice.into_iter().map(|(advice, _)| advice).collect())
}

#[derive(Clone, Debug)]
pub(crate) struct Change {
    what: String,
    /// The change without figures of this recording.
    pub(crate) kind: String,
    times_emptied: usize,
    /// True if the change is about the cache of a stream. A stream's cache is released before a
    /// request fails, so such a change can save reserved memory although the program needs no less.
    of_stream: bool,
    pub(crate) program: RecordedProgram,
}

impl Change {
    /// Returns the change as advice if it saves enough, with the number of `empty_cache` calls.
    fn advice(self, with: With, without: Unchanged) -> Option<(ProgramAdvice, usize)> {
        let required = (without.least, with.least.enough, "required");
        let reserved = without
            .reserved
            .zip(with.reserved)
            .map(|(before, after)| (before, after, "reserved"));
        let is_worth_it = |&(before, after, _): &(Bytes, Bytes, _)| {
            let saves = before.saturating_sub(after);
            saves.0 >= before.0 / 100 * WORTH_PERCENT && saves > Bytes::ZERO
        };
        let (before, after, which) = [Some(required), reserved]
            .into_iter()
            .flatten()
            .find(is_worth_it)?;
        let price = match self.times_emptied {
            0 | 1 => String::new(),
            times => format!(", with {times} calls of empty_cache"),
        };
        let sentence = format!(
            "{} reduces the {which} memory from {before} to {after}{price}",
            self.what
        );
        let (least, saves) = (with.least, before.saturating_sub(after));
        Some((
            ProgramAdvice {
                sentence,
                least,
                saves,
                program: self.program,
            },
            self.times_emptied,
        ))
    }
}

/// Recommends a memory fraction with which the program still succeeds, for users who share the
/// device. `None` if the fraction is 1, or if a replay with it fails.
pub fn fraction_advice(
    program: &RecordedProgram,
    own: &Configuration,
    own_least: Bytes,
    memory: Bytes,
) -> Result<Option<String>, ProgramError> {
    let share = (own_least.0 as f64 / memory.0 as f64 * 100.0).ceil() / 100.0;
    let Some(fraction) = MemoryFraction::new(share).filter(|_| share < 1.0) else {
        return Ok(None);
    };
    let limited = changed(program, |edit, operation, _| {
        if operation == 0 {
            edit.add(TraceEvent::SetFraction(fraction), operation);
        }
        edit.keep(operation);
    });
    let replayed = Grid::new(&limited.prepare()?, memory).replay(own, memory)?;
    let kept = fraction.limit(memory).unwrap_or(memory);
    Ok(replayed.oom.is_none().then(|| {
        format!(
            "torch.cuda.set_per_process_memory_fraction({share}) at the start limits it to \
             {kept} of {memory}, and every request still succeeds"
        )
    }))
}

/// Calls `act` with each change. Each contains a copy of the program.
pub(crate) fn each_change(program: &RecordedProgram, snapshot: &Snapshot, act: impl FnMut(Change)) {
    let sites = Sites::new(snapshot, program.device);
    let mut changes = Changes {
        program,
        by_site: BySite::new(program, &sites),
        sites: &sites,
        act,
    };
    changes.of_pools();
    changes.of_streams(snapshot.events_of(program.device));
    changes.of_sites();
}

struct Changes<'a, F> {
    program: &'a RecordedProgram,
    sites: &'a Sites,
    by_site: BySite,
    act: F,
}

impl<'a, F: FnMut(Change)> Changes<'a, F> {
    fn add(
        &mut self,
        what: String,
        kind: String,
        of_stream: bool,
        (program, times_emptied): (RecordedProgram, usize),
    ) {
        (self.act)(Change {
            what,
            kind,
            times_emptied,
            of_stream,
            program,
        });
    }

    fn name(&self, id: u64) -> &'a str {
        let event = self.program.origin[self.by_site.made[&id]];
        &self.sites.get(self.sites.of_event(event as usize)).name
    }

    fn of_pools(&mut self) {
        for (number, &MempoolId(first, second)) in self.program.pools.iter().enumerate() {
            let pool = PrivatePoolId(number as u32);
            if let (Some(released), Some(largest)) = (
                released(self.program, pool),
                self.by_site.largest_in(self.program, pool),
            ) {
                let name = self.name(largest);
                let what = |pool: String| {
                    format!(
                        "releasing {pool} of {name} after its last allocation, unless a CUDA graph \
                         needs it,"
                    )
                };
                self.add(
                    what(format!("private pool ({first}, {second})")),
                    what("the private pool".to_owned()),
                    false,
                    (released, 0),
                );
            }
        }
    }

    /// The block outside of private pools that an event allocates.
    fn id_at(&self, event: usize) -> Option<u64> {
        let program = self.program;
        let of_event = program
            .operations
            .iter()
            .zip(&program.origin)
            .filter(|(_, origin)| **origin as usize == event);
        let id = |(operation, _): (&TraceEvent, _)| {
            if let TraceEvent::Allocate { id, .. } = *operation {
                Some(id)
            } else {
                None
            }
        };
        of_event
            .filter_map(id)
            .find(|id| !self.by_site.in_pools.contains_key(id))
    }

    fn of_streams(&mut self, events: &[Event]) {
        for idle in idle::streams(events).into_iter().take(STREAMS) {
            let (Some(last), Some(next)) = (self.id_at(idle.last), self.id_at(idle.next)) else {
                continue;
            };
            let [own, other] = [idle.stream, events[idle.next].stream];
            let (to, of) = (attempts::stream(other), attempts::stream(own));
            let (last, name) = (self.name(last), self.name(next));
            self.add(
                format!("allocating on {to} what {of} allocates, last at {last},"),
                format!(
                    "allocating on the stream of {name} what another stream allocates, last at \
                     {last},"
                ),
                true,
                (on_stream(self.program, own, other), 0),
            );
            let what =
                format!("torch.cuda.empty_cache() once, before {name} first reserves memory,");
            self.add(
                what.clone(),
                what,
                true,
                (emptied_once(self.program, next), 1),
            );
        }
    }

    fn of_sites(&mut self) {
        for site in self.by_site.largest() {
            let (program, name) = (self.program, &self.sites.get(site).name);
            let ids = self.by_site.ids[&site].clone();
            let blocks = count(ids.len(), "block");
            self.add(
                format!("a separate pool (torch.cuda.MemPool) for the {blocks} of {name}"),
                format!("a separate pool (torch.cuda.MemPool) for {name}"),
                false,
                (own_pool(program, &ids), 0),
            );
            let kept = self.by_site.kept(program, &ids);
            if !kept.is_empty() {
                let what = format!(
                    "allocating the {} that {name} keeps first, in order of falling size,",
                    count(kept.len(), "block")
                );
                self.add(
                    what,
                    format!("allocating what {name} keeps first"),
                    false,
                    (before_all(program, &kept), 0),
                );
            }
            if let Some(earlier) = self.by_site.freed_before_the_next(program, &ids) {
                let what = format!("freeing each block of {name} before it allocates the next one");
                self.add(what.clone(), what, false, (earlier, 0));
            }
            let in_pools = &self.by_site.in_pools;
            let outside: Vec<u64> = ids
                .into_iter()
                .filter(|id| !in_pools.contains_key(id))
                .collect();
            if let Some(emptied) = emptied_before(program, &outside) {
                let what = format!("torch.cuda.empty_cache() before {name}");
                self.add(what.clone(), what, false, emptied);
            }
        }
    }
}

#[derive(Default)]
struct BySite {
    ids: BTreeMap<SiteId, Vec<u64>>,
    peaks: BTreeMap<SiteId, Bytes>,
    /// For each id, the operations that allocate and free it.
    made: BTreeMap<u64, usize>,
    freed: BTreeMap<u64, usize>,
    in_pools: BTreeMap<u64, PrivatePoolId>,
}

impl BySite {
    fn new(program: &RecordedProgram, sites: &Sites) -> Self {
        let mut all = Self::default();
        let mut open = Vec::new();
        let (mut live, mut site_of): (BTreeMap<SiteId, Bytes>, BTreeMap<u64, (SiteId, Bytes)>) =
            (BTreeMap::new(), BTreeMap::new());
        for (operation, &event) in program.operations.iter().enumerate() {
            match event {
                TraceEvent::Allocate { id, size, .. } => {
                    let site = sites.of_event(program.origin[operation] as usize);
                    all.made.insert(id, operation);
                    open.last().map(|&pool| all.in_pools.insert(id, pool));
                    // A change needs a known line.
                    if sites.get(site).kind == SiteKind::Frame && size > Bytes::ZERO {
                        all.ids.entry(site).or_default().push(id);
                        site_of.insert(id, (site, size));
                        let now = live.entry(site).or_default();
                        *now += size;
                        let peak = all.peaks.entry(site).or_default();
                        *peak = (*peak).max(*now);
                    }
                }
                TraceEvent::Free { id } => {
                    all.freed.insert(id, operation);
                    if let Some((site, size)) = site_of.get(&id) {
                        *live.entry(*site).or_default() -= *size;
                    }
                }
                TraceEvent::BeginPool(pool) => open.push(pool),
                TraceEvent::EndPool(pool) => open.retain(|&known| known != pool),
                _ => {}
            }
        }
        all
    }

    fn largest(&self) -> Vec<SiteId> {
        let mut sites: Vec<SiteId> = self.ids.keys().copied().collect();
        sites.sort_by_key(|site| (Reverse(self.peaks[site]), *site));
        sites.truncate(SITES);
        sites
    }

    /// Blocks of the default pool that are never freed, or if the recording reaches the end of the
    /// program, live for more than half of it. Excludes failed requests.
    fn kept(&self, program: &RecordedProgram, ids: &[u64]) -> BTreeSet<u64> {
        let (all, is_complete) = (program.operations.len(), program.ended == RecordedEnd::Well);
        let lives_long = |id: &&u64| {
            self.freed
                .get(id)
                .is_none_or(|freed| is_complete && freed - self.made[*id] > all / 2)
        };
        let is_movable = |id: &&u64| {
            !program.allocations[**id as usize].refused && !self.in_pools.contains_key(*id)
        };
        ids.iter()
            .filter(lives_long)
            .filter(is_movable)
            .copied()
            .collect()
    }

    /// The largest block that a private pool serves.
    fn largest_in(&self, program: &RecordedProgram, pool: PrivatePoolId) -> Option<u64> {
        let of_pool = self
            .in_pools
            .iter()
            .filter(|&(_, &of)| of == pool)
            .map(|(&id, _)| id);
        of_pool.max_by_key(|&id| (program.allocations[id as usize].requested, Reverse(id)))
    }

    /// Frees each block before the next one of its site is allocated. `None` if more than two are
    /// live at a time, because the program needs them, or if two never are.
    fn freed_before_the_next(
        &self,
        program: &RecordedProgram,
        ids: &[u64],
    ) -> Option<RecordedProgram> {
        if ids.windows(3).any(|three| {
            self.freed
                .get(&three[0])
                .is_none_or(|&freed| freed > self.made[&three[2]])
        }) {
            return None;
        }
        let overlaps = ids.windows(2).map(|pair| (self.made[&pair[1]], pair[0]));
        let is_live =
            |(next, id): &(usize, u64)| self.freed.get(id).is_some_and(|freed| freed > next);
        let moved: BTreeMap<usize, u64> = overlaps.filter(is_live).collect();
        if moved.is_empty() {
            return None;
        }
        let gone: BTreeSet<u64> = moved.values().copied().collect();
        Some(changed(program, |edit, operation, event| {
            if let Some(&id) = moved.get(&operation) {
                edit.add(TraceEvent::Free { id }, operation);
            }
            let is_moved = matches!(event, TraceEvent::Free { id } if gone.contains(&id));
            if !is_moved {
                edit.keep(operation);
            }
        }))
    }
}

/// A copy of a program in which `write` writes the operations. It is called with each original
/// operation in order.
fn changed(
    program: &RecordedProgram,
    mut write: impl FnMut(&mut Edit<'_>, usize, TraceEvent),
) -> RecordedProgram {
    let mut edit = Edit::new(program);
    for (operation, &event) in program.operations.iter().enumerate() {
        write(&mut edit, operation, event);
    }
    edit.changed
}

struct Edit<'a> {
    program: &'a RecordedProgram,
    changed: RecordedProgram,
}

impl<'a> Edit<'a> {
    fn new(program: &'a RecordedProgram) -> Self {
        Self {
            program,
            changed: RecordedProgram {
                operations: Vec::new(),
                origin: Vec::new(),
                ..program.clone()
            },
        }
    }

    /// Adds an operation at an original one.
    fn add(&mut self, event: TraceEvent, at: usize) {
        self.changed.operations.push(event);
        self.changed.origin.push(self.program.origin[at]);
    }

    fn keep(&mut self, kept: usize) {
        if let (
            RecordedEnd::Oom {
                operation: fatal, ..
            },
            RecordedEnd::Oom { operation, .. },
        ) = (self.program.ended, &mut self.changed.ended)
            && fatal == kept
        {
            *operation = self.changed.operations.len();
        }
        self.add(self.program.operations[kept], kept);
    }
}

/// Releases a private pool after its last allocation. `None` if the program does so, or does not
/// use the pool.
fn released(program: &RecordedProgram, pool: PrivatePoolId) -> Option<RecordedProgram> {
    let place = |sought: TraceEvent| {
        program
            .operations
            .iter()
            .rposition(|&event| event == sought)
    };
    let last = place(TraceEvent::EndPool(pool))
        .filter(|_| place(TraceEvent::ReleasePool(pool)).is_none())?;
    Some(changed(program, |edit, operation, _| {
        edit.keep(operation);
        if operation == last {
            edit.add(TraceEvent::ReleasePool(pool), operation);
        }
    }))
}

/// Allocates on one stream what another one allocates.
fn on_stream(program: &RecordedProgram, from: u64, to: u64) -> RecordedProgram {
    let [from, to] = [from, to].map(|handle| program.stream_number(handle));
    let mut changed = program.clone();
    for operation in &mut changed.operations {
        if let TraceEvent::Allocate { stream, .. } = operation
            && *stream == from
        {
            *stream = to;
        }
    }
    changed
}

fn emptied_once(program: &RecordedProgram, before: u64) -> RecordedProgram {
    changed(program, |edit, operation, event| {
        if matches!(event, TraceEvent::Allocate { id, .. } if id == before) {
            edit.add(TraceEvent::EmptyCache, operation);
        }
        edit.keep(operation);
    })
}

/// Moves these blocks to a private pool.
fn own_pool(program: &RecordedProgram, ids: &[u64]) -> RecordedProgram {
    let ids: BTreeSet<u64> = ids.iter().copied().collect();
    let pool = PrivatePoolId(program.pools.len() as u32);
    let mut open = 0_usize;
    let mut changed = changed(program, |edit, operation, event| {
        match event {
            TraceEvent::BeginPool(_) => open += 1,
            TraceEvent::EndPool(_) => open = open.saturating_sub(1),
            _ => {}
        }
        let is_own =
            open == 0 && matches!(event, TraceEvent::Allocate { id, .. } if ids.contains(&id));
        if is_own {
            edit.add(TraceEvent::BeginPool(pool), operation);
        }
        edit.keep(operation);
        if is_own {
            edit.add(TraceEvent::EndPool(pool), operation);
        }
    });
    changed.pools.push(MempoolId(0, u64::MAX));
    changed
}

/// Allocates these blocks first, largest first.
fn before_all(program: &RecordedProgram, ids: &BTreeSet<u64>) -> RecordedProgram {
    let mut order: Vec<usize> = (0..program.operations.len()).collect();
    // The sort is stable, so the other operations keep their order.
    order.sort_by_key(|&operation| match program.operations[operation] {
        TraceEvent::Allocate { id, size, .. } if ids.contains(&id) => (0, Reverse(size)),
        _ => (1, Reverse(Bytes::ZERO)),
    });
    let mut edit = Edit::new(program);
    order.into_iter().for_each(|operation| edit.keep(operation));
    edit.changed
}

/// Empties the cache before the largest allocations of a site, unless these are too many. Also
/// returns the number of calls.
fn emptied_before(program: &RecordedProgram, ids: &[u64]) -> Option<(RecordedProgram, usize)> {
    let requested = |id: &u64| program.allocations[*id as usize].requested;
    let largest = ids.iter().map(requested).max()?;
    let before: BTreeSet<u64> = ids
        .iter()
        .filter(|id| requested(id) >= Bytes(largest.0 / 2))
        .copied()
        .collect();
    if before.len() > MOST_TIMES_EMPTIED {
        return None;
    }
    let emptied = changed(program, |edit, operation, event| {
        if matches!(event, TraceEvent::Allocate { id, .. } if before.contains(&id)) {
            edit.add(TraceEvent::EmptyCache, operation);
        }
        edit.keep(operation);
    });
    Some((emptied, before.len()))
}
