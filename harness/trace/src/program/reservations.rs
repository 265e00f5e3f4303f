//! The addresses reserved for expandable segments before the recording. A snapshot tells mapped memory only.
//!
//! A reservation belongs to a *pool*: one pool on one stream. It is an eighth larger than the device's memory. New memory is mapped at the first place
//! in it that is large enough. So where the recording maps memory below all that a pool had, the reservation begins there; where it maps elsewhere for
//! a request that one page would have served, nothing in front was free, and the reservation begins with its first mapped page.
//! Where no such event tells, the beginning is bounded by the reservation that follows, and otherwise taken to be the first mapped page.

use std::collections::{BTreeMap, HashMap};

use harness_allocator::allocator::caching::Config;
use harness_allocator::device::sim::GRANULARITY;
use harness_allocator::device::{DevicePtr, MemoryRange};
use harness_allocator::stats::PoolKind;
use harness_allocator::units::Bytes;

use crate::snapshot::{Action, Event, PoolId, Segment};

/// One pool on one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct StreamPool {
    stream: u64,
    kind: PoolKind,
    pool: PoolId,
}

/// What is known of the reservations.
#[derive(Debug, Default)]
pub(super) struct Reservations {
    /// Those at the start, in address order.
    pub(super) at_start: Vec<MemoryRange>,
    /// The most memory that a device can have on which reservations lie so near to each other. `None` where there are not two of them.
    pub(super) memory_at_most: Option<Bytes>,
    /// How many of those at the start may begin earlier.
    pub(super) unsure: usize,
}

/// One reservation, as far as the recording has shown it.
#[derive(Debug)]
struct Reservation {
    pool: StreamPool,
    start: u64,
    /// The end of the last memory that was mapped in it.
    end: u64,
    mapped: u64,
    /// Whether it may begin earlier.
    unsure: bool,
    /// Whether it was there before the recording.
    at_start: bool,
    /// The event that gave its last memory back, and with it the addresses.
    gone: usize,
    /// The event that made it.
    made: usize,
}

impl Reservation {
    const fn is_open(&self) -> bool {
        self.gone == usize::MAX
    }
}

/// Follows what is mapped and unmapped.
struct Search<'a> {
    config: &'a Config,
    memory: Option<Bytes>,
    /// In address order of their first memory.
    found: Vec<Reservation>,
    held: u64,
    most_held: u64,
}

/// Finds the reservations. `pool_of` tells the private pool of an address, given an event.
pub(super) fn find(
    start: &[Segment],
    events: &[Event],
    config: &Config,
    memory: Option<Bytes>,
    pool_of: impl Fn(usize, &Event) -> PoolId,
) -> Reservations {
    let held = start.iter().map(|segment| segment.size.0).sum();
    let mut search = Search { config, memory, found: Vec::new(), held, most_held: held };
    start.iter().filter(|segment| segment.expandable).for_each(|segment| search.add_at_start(segment));
    for (index, event) in events.iter().enumerate() {
        match event.action {
            Action::SegmentMap => {
                let pool = StreamPool { stream: event.stream, kind: kind_of_map(event.size), pool: pool_of(index, event) };
                search.map(index, event, pool, request_behind(events, index, config));
            }
            Action::SegmentUnmap => search.unmap(index, event),
            _ => {}
        }
        search.follow_held(event);
    }
    search.finish()
}

/// The pool that mapped memory is for: the small one maps one page at a time.
fn kind_of_map(size: Bytes) -> PoolKind {
    if size == GRANULARITY { PoolKind::Small } else { PoolKind::Large }
}

/// For each refused request the place where memory is mapped next for its pool.
pub(super) fn mapped_next(events: &[Event], config: &Config, pool_of: impl Fn(usize, &Event) -> PoolId) -> HashMap<usize, DevicePtr> {
    let mut next: BTreeMap<StreamPool, u64> = BTreeMap::new();
    let mut found = HashMap::new();
    for (index, event) in events.iter().enumerate().rev() {
        match event.action {
            Action::SegmentMap => {
                next.insert(StreamPool { stream: event.stream, kind: kind_of_map(event.size), pool: pool_of(index, event) }, event.address);
            }
            Action::Oom => {
                let kind = config.round(event.size.0).map_or(PoolKind::Large, |size| PoolKind::of_block(Bytes(size)));
                let pool = StreamPool { stream: event.stream, kind, pool: pool_of(index, event) };
                found.extend(next.get(&pool).map(|&address| (index, DevicePtr(address))));
            }
            _ => {}
        }
    }
    found
}

/// What the request asked for that memory was mapped for, rounded.
fn request_behind(events: &[Event], index: usize, config: &Config) -> Option<u64> {
    let request = events[index..].iter().find(|event| matches!(event.action, Action::Alloc | Action::Oom))?;
    config.round(request.size.0)
}

impl Search<'_> {
    fn add_at_start(&mut self, segment: &Segment) {
        let pool = StreamPool { stream: segment.stream, kind: segment.pool, pool: segment.private_pool };
        let end = segment.address + segment.size.0;
        let size = self.size(pool.kind).unwrap_or(u64::MAX);
        // Between two stretches of one reservation there is nothing of another.
        match self.found.last_mut().filter(|last| last.pool == pool && end - last.start <= size) {
            Some(last) => {
                last.end = end;
                last.mapped += segment.size.0;
            }
            None => {
                let (start, mapped) = (segment.address, segment.size.0);
                self.found.push(Reservation { pool, start, end, mapped, unsure: true, at_start: true, gone: usize::MAX, made: 0 });
            }
        }
    }

    /// The size of a reservation, where the device's memory is known.
    fn size(&self, kind: PoolKind) -> Option<u64> {
        self.memory.map(|memory| reservation_size(memory, kind, self.config))
    }

    fn map(&mut self, index: usize, event: &Event, pool: StreamPool, request: Option<u64>) {
        let (start, end) = (event.address, event.address + event.size.0);
        let size = self.size(pool.kind).unwrap_or(u64::MAX);
        let open = |found: &Reservation| found.is_open();
        let behind = self.found.iter().position(|found| open(found) && found.start > start).unwrap_or(self.found.len());
        let before = self.found[..behind].iter().rposition(open);
        if let Some(around) = before.filter(|&before| self.found[before].pool == pool && end - self.found[before].start <= size) {
            let fits_one_page = request.is_some_and(|request| request <= self.config.page(pool.kind));
            let found = &mut self.found[around];
            (found.end, found.mapped) = (found.end.max(end), found.mapped + event.size.0);
            found.unsure &= !fits_one_page;
        } else if let Some(found) =
            self.found.get_mut(behind).filter(|found| found.pool == pool && found.unsure && found.end - start <= size)
        {
            (found.start, found.mapped, found.unsure) = (start, found.mapped + event.size.0, false);
        } else {
            let (mapped, gone) = (event.size.0, usize::MAX);
            self.found.insert(behind, Reservation { pool, start, end, mapped, unsure: false, at_start: false, gone, made: index });
        }
    }

    fn unmap(&mut self, index: usize, event: &Event) {
        let around = self.found.iter_mut().rfind(|found| found.is_open() && found.start <= event.address);
        if let Some(found) = around {
            found.mapped = found.mapped.saturating_sub(event.size.0);
            if found.mapped == 0 {
                found.gone = index;
            }
        }
    }

    fn follow_held(&mut self, event: &Event) {
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap => self.held += event.size.0,
            Action::SegmentFree | Action::SegmentUnmap => self.held = self.held.saturating_sub(event.size.0),
            _ => {}
        }
        self.most_held = self.most_held.max(self.held);
    }

    fn finish(mut self) -> Reservations {
        let memory_at_most = if self.memory.is_some() { None } else { self.memory_at_most() };
        if self.memory.is_some() {
            self.make_room();
        }
        let memory = self.memory.or(memory_at_most).unwrap_or(super::UNKNOWN_MEMORY);
        let at_start: Vec<&Reservation> = self.found.iter().filter(|found| found.at_start).collect();
        let ends = at_start.iter().skip(1).map(|next| next.start).chain([u64::MAX]);
        let range = |(found, end): (&&Reservation, u64)| {
            let size = reservation_size(memory, found.pool.kind, self.config).min(end - found.start);
            MemoryRange::new(DevicePtr(found.start), Bytes(size))
        };
        let unsure = at_start.iter().filter(|found| found.unsure).count();
        Reservations { at_start: at_start.iter().zip(ends).map(range).collect(), memory_at_most, unsure }
    }

    /// Moves the beginning of each reservation to where it ends in front of the next.
    fn make_room(&mut self) {
        for index in (0..self.found.len()).rev() {
            let Reservation { pool, start, unsure, gone, .. } = self.found[index];
            let next = self.found[index + 1..].iter().filter(|next| next.made < gone).map(|next| next.start).min();
            let (Some(next), Some(size), true) = (next, self.size(pool.kind), unsure) else { continue };
            let missing = (start + size).saturating_sub(next).next_multiple_of(self.config.page(pool.kind));
            let floor = self.found[..index].iter().map(|before| before.end).max().unwrap_or_default();
            if missing > 0 && start.saturating_sub(missing) >= floor {
                self.found[index].start = start - missing;
            }
            // Reservations that lie side by side to the byte begin where they seem to.
            self.found[index].unsure = self.found[index].start + size != next;
        }
    }

    fn memory_at_most(&self) -> Option<Bytes> {
        let mut starts: BTreeMap<u64, ()> = BTreeMap::new();
        starts.extend(self.found.iter().map(|found| (found.start, ())));
        let starts: Vec<u64> = starts.into_keys().collect();
        let nearest = starts.windows(2).map(|pair| pair[1] - pair[0]).min()?;
        let page = self.config.large_segment_size.0;
        Some(Bytes((nearest / page * page / 9 * 8 / GRANULARITY.0 * GRANULARITY.0).max(self.most_held)))
    }
}

/// The size of PyTorch's reservations for a pool: an eighth more than the device has, in whole pages.
fn reservation_size(memory: Bytes, kind: PoolKind, config: &Config) -> u64 {
    (memory.0 + memory.0 / 8).next_multiple_of(config.page(kind))
}
