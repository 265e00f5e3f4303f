//! Finds the addresses reserved for expandable segments, because a snapshot contains only mapped
//! memory.
//!
//! Each reservation serves one pool on one stream and is an eighth larger than the device memory.
//! The allocator maps new memory at the first sufficient gap. So if the recording maps memory below
//! all other memory of a pool, the reservation starts there. If it maps memory elsewhere for a
//! request that fits one page, nothing in front was free, and the reservation starts with its first
//! mapped page. Otherwise the next reservation bounds the start, and the first mapped page is
//! assumed.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use harness_allocator::device::{DevicePtr, MemoryRange, sim::GRANULARITY};
use harness_allocator::{allocator::caching::Config, stats::PoolKind, units::Bytes};

use super::Note;
use crate::snapshot::{Action, Event, MempoolId, Segment};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct StreamPool {
    stream: u64,
    kind: PoolKind,
    pool: MempoolId,
}

impl StreamPool {
    /// The pool of mapped memory. The small pool maps single pages.
    fn of_map(event: &Event, pool: MempoolId) -> Self {
        let kind = if event.size == GRANULARITY {
            PoolKind::Small
        } else {
            PoolKind::Large
        };
        Self {
            stream: event.stream,
            kind,
            pool,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Reservations {
    /// Reservations before the recording, in address order.
    pub(super) at_start: Vec<MemoryRange>,
    /// The largest device memory that allows two neighboring reservations this close. `None` with
    /// fewer than two reservations.
    pub(super) memory_at_most: Option<Bytes>,
    /// The number of reservations in `at_start` that may start earlier.
    unsure: usize,
}

impl Reservations {
    pub(super) fn note(&self) -> Option<Note> {
        let segments = self.unsure;
        (segments > 0).then_some(Note::ReservationsUnknown { segments })
    }
}

#[derive(Debug)]
struct Reservation {
    pool: StreamPool,
    start: u64,
    /// The end of the memory that was mapped last.
    end: u64,
    mapped: u64,
    /// True if it may start earlier.
    unsure: bool,
    at_start: bool,
    /// The event that unmapped its last page and released the addresses.
    gone: usize,
    made: usize,
}

impl Reservation {
    const fn is_open(&self) -> bool {
        self.gone == usize::MAX
    }
}

struct Search<'a> {
    config: &'a Config,
    memory: Option<Bytes>,
    /// In order of their first mapped address.
    found: Vec<Reservation>,
    held: u64,
    most_held: u64,
}

pub(super) fn find(
    start: &[Segment],
    events: &[Event],
    config: &Config,
    memory: Option<Bytes>,
    pool_of: impl Fn(usize, &Event) -> MempoolId,
) -> Reservations {
    let held = start.iter().map(|segment| segment.size.0).sum();
    let mut search = Search {
        config,
        memory,
        found: Vec::new(),
        held,
        most_held: held,
    };
    start
        .iter()
        .filter(|segment| segment.expandable)
        .for_each(|segment| search.add_at_start(segment));
    for (index, event) in events.iter().enumerate() {
        match event.action {
            Action::SegmentMap => {
                let request = events[index..]
                    .iter()
                    .find(|event| matches!(event.action, Action::Alloc | Action::Oom));
                let rounded = request.and_then(|request| config.round(request.size.0));
                search.map(
                    index,
                    event,
                    StreamPool::of_map(event, pool_of(index, event)),
                    rounded,
                );
            }
            Action::SegmentUnmap => search.unmap(index, event),
            _ => {}
        }
        search.follow_held(event);
    }
    search.finish()
}

/// For each failed request, the address of the next mapping for its pool.
pub(super) fn mapped_next(
    events: &[Event],
    config: &Config,
    pool_of: impl Fn(usize, &Event) -> MempoolId,
) -> HashMap<usize, DevicePtr> {
    let mut next: BTreeMap<StreamPool, u64> = BTreeMap::new();
    let mut found = HashMap::new();
    for (index, event) in events.iter().enumerate().rev() {
        match event.action {
            Action::SegmentMap => {
                _ = next.insert(
                    StreamPool::of_map(event, pool_of(index, event)),
                    event.address,
                )
            }
            Action::Oom => {
                let kind = config
                    .round(event.size.0)
                    .map_or(PoolKind::Large, |size| PoolKind::of_block(Bytes(size)));
                let pool = StreamPool {
                    stream: event.stream,
                    kind,
                    pool: pool_of(index, event),
                };
                found.extend(next.get(&pool).map(|&address| (index, DevicePtr(address))));
            }
            _ => {}
        }
    }
    found
}

impl Search<'_> {
    fn add_at_start(&mut self, segment: &Segment) {
        let pool = StreamPool {
            stream: segment.stream,
            kind: segment.pool,
            pool: segment.private_pool,
        };
        let end = segment.address + segment.size.0;
        let size = self.size(pool.kind).unwrap_or(u64::MAX);
        // Ranges of one reservation have no other reservation between them.
        match self
            .found
            .last_mut()
            .filter(|last| last.pool == pool && end - last.start <= size)
        {
            Some(last) => {
                last.end = end;
                last.mapped += segment.size.0;
            }
            None => {
                let (start, mapped) = (segment.address, segment.size.0);
                self.found.push(Reservation {
                    pool,
                    start,
                    end,
                    mapped,
                    unsure: true,
                    at_start: true,
                    gone: usize::MAX,
                    made: 0,
                });
            }
        }
    }

    /// The size of a reservation, if the device memory is known.
    fn size(&self, kind: PoolKind) -> Option<u64> {
        self.memory
            .map(|memory| reservation_size(memory, kind, self.config))
    }

    fn map(&mut self, index: usize, event: &Event, pool: StreamPool, request: Option<u64>) {
        let (start, end) = (event.address, event.address + event.size.0);
        let size = self.size(pool.kind).unwrap_or(u64::MAX);
        let behind = self
            .found
            .iter()
            .position(|found| found.is_open() && found.start > start)
            .unwrap_or(self.found.len());
        let before = self.found[..behind].iter().rposition(Reservation::is_open);
        if let Some(around) = before.filter(|&before| {
            self.found[before].pool == pool && end - self.found[before].start <= size
        }) {
            let fits_one_page =
                request.is_some_and(|request| request <= self.config.page(pool.kind));
            let found = &mut self.found[around];
            (found.end, found.mapped) = (found.end.max(end), found.mapped + event.size.0);
            found.unsure &= !fits_one_page;
        } else if let Some(found) = self
            .found
            .get_mut(behind)
            .filter(|found| found.pool == pool && found.unsure && found.end - start <= size)
        {
            (found.start, found.mapped, found.unsure) = (start, found.mapped + event.size.0, false);
        } else {
            let (mapped, gone) = (event.size.0, usize::MAX);
            self.found.insert(
                behind,
                Reservation {
                    pool,
                    start,
                    end,
                    mapped,
                    unsure: false,
                    at_start: false,
                    gone,
                    made: index,
                },
            );
        }
    }

    fn unmap(&mut self, index: usize, event: &Event) {
        let around = self
            .found
            .iter_mut()
            .rfind(|found| found.is_open() && found.start <= event.address);
        if let Some(found) = around {
            found.mapped = found.mapped.saturating_sub(event.size.0);
            if found.mapped == 0 {
                found.gone = index;
            }
        }
    }

    fn follow_held(&mut self, event: &Event) {
        if event.action.reserves() {
            self.held += event.size.0;
        } else if event.action.releases() {
            self.held = self.held.saturating_sub(event.size.0);
        }
        self.most_held = self.most_held.max(self.held);
    }

    fn finish(mut self) -> Reservations {
        let memory_at_most = if self.memory.is_some() {
            None
        } else {
            self.memory_at_most()
        };
        if self.memory.is_some() {
            self.make_room();
        }
        let memory = self
            .memory
            .or(memory_at_most)
            .unwrap_or(super::UNKNOWN_MEMORY);
        let at_start: Vec<&Reservation> =
            self.found.iter().filter(|found| found.at_start).collect();
        let ends = at_start
            .iter()
            .skip(1)
            .map(|next| next.start)
            .chain([u64::MAX]);
        let range = |(found, end): (&&Reservation, u64)| {
            let size =
                reservation_size(memory, found.pool.kind, self.config).min(end - found.start);
            MemoryRange::new(DevicePtr(found.start), Bytes(size))
        };
        let unsure = at_start.iter().filter(|found| found.unsure).count();
        Reservations {
            at_start: at_start.iter().zip(ends).map(range).collect(),
            memory_at_most,
            unsure,
        }
    }

    /// Moves each uncertain start so that the reservation ends directly before the next one.
    fn make_room(&mut self) {
        for index in (0..self.found.len()).rev() {
            let Reservation {
                pool,
                start,
                unsure,
                gone,
                ..
            } = self.found[index];
            let next = self.found[index + 1..]
                .iter()
                .filter(|next| next.made < gone)
                .map(|next| next.start)
                .min();
            let (Some(next), Some(size), true) = (next, self.size(pool.kind), unsure) else {
                continue;
            };
            let missing = (start + size)
                .saturating_sub(next)
                .next_multiple_of(self.config.page(pool.kind));
            let floor = self.found[..index]
                .iter()
                .map(|before| before.end)
                .max()
                .unwrap_or_default();
            if missing > 0 && start.saturating_sub(missing) >= floor {
                self.found[index].start = start - missing;
            }
            // Reservations that touch start at their first mapped page.
            self.found[index].unsure = self.found[index].start + size != next;
        }
    }

    fn memory_at_most(&self) -> Option<Bytes> {
        let starts: BTreeSet<u64> = self.found.iter().map(|found| found.start).collect();
        let nearest = starts
            .iter()
            .zip(starts.iter().skip(1))
            .map(|(start, next)| next - start)
            .min()?;
        let page = self.config.large_segment_size.0;
        Some(Bytes(
            (nearest / page * page / 9 * 8 / GRANULARITY.0 * GRANULARITY.0).max(self.most_held),
        ))
    }
}

/// The size of PyTorch's reservations: 9/8 of the device memory, in whole pages.
fn reservation_size(memory: Bytes, kind: PoolKind, config: &Config) -> u64 {
    (memory.0 + memory.0 / 8).next_multiple_of(config.page(kind))
}
