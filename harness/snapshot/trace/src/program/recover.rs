//! Recovers a program from a snapshot. Follows the recording event by event, with PyTorch's
//! allocator next to it ([`super::shadow`]).
//!
//! A recording contains the allocator's actions. The program's actions are inferred from them:
//!
//! * A segment is released after a failed request, because of its age, or by `empty_cache`. The
//!   shadow allocator tries each; the recorded driver calls decide.
//! * A free that completes late waited for another stream (see [`super::pending`]). It completes
//!   when the next request checks its events, or when the allocator synchronizes.
//! * A request uses the private pool whose segment contains its block. Pools of dropped CUDA graphs
//!   are in no segment: see [`super::captures`].

use std::collections::{BTreeMap, BTreeSet, HashMap};

use harness_allocator::allocator::{PrivatePoolId, Request, caching::Config};
use harness_allocator::device::{DeviceError, DevicePtr, StreamId, sim::GRANULARITY};
use harness_allocator::{stats::BlockState, units::Bytes};

use super::shadow::{Recorded, ShadowAllocator};
use super::{
    DriverRange, Note, ProgramError, RecordedAllocation, RecordedEnd, RecordedProgram, captures,
    pending::PendingFrees, reservations, start::Start, watch::DriverCall,
};
use crate::snapshot::{Action, Event, MempoolId, Segment, Snapshot};
use crate::trace::TraceEvent;

impl RecordedProgram {
    pub fn recover(snapshot: &Snapshot, device: u32) -> Result<Self, ProgramError> {
        Self::recover_with(snapshot, device, None)
    }

    /// Recovers the program of one device. `memory` is the memory available to it, used if the
    /// recording contains no OOM. Known memory also shows which requests failed at first.
    pub fn recover_with(
        snapshot: &Snapshot,
        device: u32,
        memory: Option<Bytes>,
    ) -> Result<Self, ProgramError> {
        let events = snapshot.events_of(device);
        let known = snapshot.devices();
        if !known.contains(&device) {
            return Err(ProgramError::NoSuchDevice { device, known });
        }
        let config = snapshot.config().map_err(|source| {
            let settings = snapshot.settings.as_ref();
            let conf = settings.map_or(String::new(), |settings| settings.conf.clone());
            ProgramError::Settings { conf, source }
        })?;
        let follow_by = |memory, captures: &[(usize, MempoolId)]| {
            let start = Start::find(snapshot, device, events, &config)?;
            let mut recovery = Recovery::new(
                snapshot,
                device,
                events,
                config.clone(),
                start,
                memory,
                captures,
            )?;
            recovery.follow()?;
            Ok::<_, ProgramError>(recovery)
        };
        let captures = captures::pools(snapshot, device, events);
        let follow = |memory| {
            // Captures are inferred, so they count only if they explain the recording.
            let with_captures = if captures.is_empty() {
                None
            } else {
                Some(follow_by(memory, &captures)?)
            };
            if let Some(recovery) = with_captures.filter(|recovery| recovery.shadow.is_some()) {
                return Ok::<_, ProgramError>(recovery);
            }
            let mut without = follow_by(memory, &[])?;
            if without.shadow.is_none() && !captures.is_empty() {
                without
                    .program
                    .notes
                    .retain(|note| !matches!(note, Note::UnexplainedFree { .. }));
                without.program.notes.push(Note::CapturesUnknown);
            }
            Ok(without)
        };
        let recovery = follow(memory)?;
        // Requests that failed at first bound the program's memory.
        let at_least = recovery.most_reserved;
        let at_most = recovery
            .refused_at
            .map(|refused| refused.saturating_sub(GRANULARITY))
            .filter(|&at_most| at_least <= at_most);
        let Some(at_most) = at_most else {
            return Ok(recovery.program);
        };
        let mut again = follow(Some(at_most))?;
        if again.shadow.is_none() {
            return Ok(recovery.program);
        }
        again
            .program
            .notes
            .push(Note::MemoryInferred { at_least, at_most });
        Ok(again.program)
    }
}

struct PrivatePools {
    /// The end and the pool of each segment, and the event that reserved it, by its start address.
    of_segments: BTreeMap<u64, (u64, PrivatePoolId, usize)>,
    /// By event index, if the file records the pool: a private one, or `None` for the default one.
    told: HashMap<usize, Option<PrivatePoolId>>,
}

impl PrivatePools {
    /// The private pool of an event: the recorded one, or the pool of the segment at its address.
    fn at(&self, address: u64, event: usize) -> Option<PrivatePoolId> {
        let around = || {
            self.of_segments
                .range(..=address)
                .next_back()
                .filter(|&(_, &(end, _, since))| address < end && since <= event)
        };
        self.told
            .get(&event)
            .copied()
            .unwrap_or_else(|| around().map(|(_, &(_, pool, _))| pool))
    }

    fn last_uses(&self, events: &[Event]) -> BTreeMap<PrivatePoolId, usize> {
        let is_alloc = |(_, event): &(usize, &Event)| event.action == Action::Alloc;
        let allocations = events.iter().enumerate().filter(is_alloc);
        allocations
            .filter_map(|(index, event)| Some((self.at(event.address, index)?, index)))
            .collect()
    }
}

struct Recovery<'a> {
    events: &'a [Event],
    program: RecordedProgram,
    /// Present while it matches the recording.
    shadow: Option<ShadowAllocator>,
    pending: PendingFrees,
    ids: HashMap<u64, u64>,
    private: PrivatePools,
    /// By failed request, which may have reserved addresses: the address of the next mapping for
    /// its pool and stream.
    mapped_next: HashMap<usize, DevicePtr>,
    last_use: BTreeMap<PrivatePoolId, usize>,
    open: Option<PrivatePoolId>,
    memory_is_known: bool,
    /// The last request event, successful or not.
    last_request: usize,
    reserved: Bytes,
    most_reserved: Bytes,
    /// The smallest amount that did not fit: the program had less memory.
    refused_at: Option<Bytes>,
    taken_for_empty_cache: usize,
}

/// Driver calls and completed frees since the last operation.
#[derive(Default)]
struct Group {
    frees: Vec<usize>,
    takes: Vec<usize>,
    /// Synthetic streams that completed, each with its first event.
    completed: BTreeMap<StreamId, usize>,
}

#[derive(Clone, Copy, Debug)]
struct Plan {
    seen_before: bool,
    empty_cache: bool,
    /// The driver's first attempt failed, although its memory is unknown.
    refused: bool,
}

impl<'a> Recovery<'a> {
    fn new(
        snapshot: &Snapshot,
        device: u32,
        events: &'a [Event],
        config: Config,
        mut start: Start,
        memory: Option<Bytes>,
        captures: &[(usize, MempoolId)],
    ) -> Result<Self, ProgramError> {
        let (streams, pools, private) =
            number_all(snapshot, device, events, &start.segments, captures);
        if let Some(first) = events.first()
            && first.action == Action::FreeCompleted
        {
            // The free waited for nothing, so it happens here. Its first half was not recorded.
            start.pending.remove(&first.address);
        }
        let pending = PendingFrees::find(events, &start.pending, streams.len() as u32);
        let known = memory_at_oom(snapshot, device, events).or(memory);
        let pool_of = |index: usize, event: &Event| {
            let pool = private.at(event.address, index);
            pool.map_or(MempoolId::DEFAULT, |pool| pools[pool.0 as usize])
        };
        let reservations = reservations::find(&start.segments, events, &config, known, pool_of);
        let mapped_next = reservations::mapped_next(events, &config, pool_of);
        let mut program = RecordedProgram {
            device,
            start: start.segments,
            operations: Vec::with_capacity(events.len()),
            origin: Vec::with_capacity(events.len()),
            notes: reservations.note().into_iter().collect(),
            reserved_at_start: reservations.at_start,
            streams,
            pools,
            config,
            memory: known,
            memory_at_most: reservations.memory_at_most,
            ..RecordedProgram::default()
        };
        let is_request = |event: &Event| matches!(event.action, Action::Alloc | Action::Oom);
        let held = program.reserved_at_start();
        if let Some(memory) = known.filter(|&memory| memory < held) {
            return Err(ProgramError::TooLittleMemory { memory, held });
        }
        let ids = program.add_start();
        let shadow = ShadowAllocator::new(
            &program,
            &program.start_for_allocator(),
            program.device_memory(),
            pending.streams,
        )?;
        Ok(Self {
            events,
            program,
            shadow: Some(shadow),
            pending,
            ids,
            mapped_next,
            last_use: private.last_uses(events),
            private,
            open: None,
            memory_is_known: known.is_some(),
            last_request: events.iter().rposition(is_request).unwrap_or_default(),
            reserved: held,
            most_reserved: held,
            refused_at: None,
            taken_for_empty_cache: 0,
        })
    }

    fn follow(&mut self) -> Result<(), ProgramError> {
        self.free_pending_blocks()?;
        let mut group = Group::default();
        for (index, event) in self.events.iter().enumerate() {
            match event.action {
                Action::SegmentFree | Action::SegmentUnmap => {
                    group.frees.push(index);
                    self.reserved -= event.size;
                }
                Action::SegmentAlloc | Action::SegmentMap => {
                    group.takes.push(index);
                    let (address, size) = (event.address, event.size);
                    self.reserved += size;
                    self.most_reserved = self.most_reserved.max(self.reserved);
                    self.program.driver.push(DriverRange {
                        address,
                        size,
                        event: index as u32,
                    });
                }
                Action::FreeCompleted => {
                    if let Some(&stream) = self.pending.completed.get(&index) {
                        group.completed.entry(stream).or_insert(index);
                    } else if index == 0 {
                        self.free(index)?;
                    }
                }
                Action::FreeRequested => {
                    self.explain_without_request(std::mem::take(&mut group))?;
                    self.free(index)?;
                }
                Action::Alloc | Action::Oom => {
                    self.explain_request(index, std::mem::take(&mut group))?
                }
                Action::Snapshot => {}
            }
        }
        self.explain_without_request(group)?;
        self.leave_pool(self.events.len().saturating_sub(1));
        self.finish();
        Ok(())
    }

    fn free_pending_blocks(&mut self) -> Result<(), ProgramError> {
        let mut waiting: Vec<(u64, StreamId)> = self
            .ids
            .iter()
            .filter_map(|(&address, &id)| Some((id, *self.pending.before.get(&address)?)))
            .collect();
        waiting.sort_unstable();
        for (id, stream) in waiting {
            self.add(TraceEvent::RecordStream { id, stream }, 0);
            self.add(TraceEvent::Free { id }, 0);
            self.compare(|shadow| shadow.free(id, Some(stream)).map(|()| true))?;
            let address = self.program.allocations[id as usize].address;
            address.map(|address| self.ids.remove(&address));
        }
        Ok(())
    }

    fn free(&mut self, index: usize) -> Result<(), ProgramError> {
        let address = self.events[index].address;
        let Some(id) = self.ids.remove(&address) else {
            self.program.notes.push(Note::UnknownFree {
                event: index as u32,
                address,
            });
            return Ok(());
        };
        let waits_for = self.pending.requested.get(&index).copied();
        if let Some(stream) = waits_for {
            self.leave_pool(index);
            self.add(TraceEvent::RecordStream { id, stream }, index);
        }
        self.add(TraceEvent::Free { id }, index);
        self.compare(|shadow| shadow.free(id, waits_for).map(|()| true))
    }

    fn explain_without_request(&mut self, group: Group) -> Result<(), ProgramError> {
        let frees = self.release_pools(&group.frees)?;
        self.empty_cache(&frees)?;
        for (&stream, &event) in &group.completed {
            self.add_synchronize(stream, event);
            self.compare(|shadow| shadow.synchronize(stream).map(|()| true))?;
        }
        if !group.takes.is_empty() {
            // The recording lacks the request that took this memory.
            self.shadow = None;
        }
        Ok(())
    }

    fn empty_cache(&mut self, frees: &[usize]) -> Result<(), ProgramError> {
        let Some(&first) = frees.first() else {
            return Ok(());
        };
        self.leave_pool(first);
        self.add(TraceEvent::EmptyCache, first);
        let recorded = self.driver_calls(frees);
        self.compare(|shadow| shadow.empty_cache(&recorded))
    }

    fn explain_request(&mut self, index: usize, mut group: Group) -> Result<(), ProgramError> {
        let event = self.events[index];
        // `empty_cache` releases memory of the default pool before that of dropped graphs.
        let is_of_pool = |&free: &usize| self.private.at(self.events[free].address, free).is_some();
        if let Some(first) = group
            .frees
            .iter()
            .position(is_of_pool)
            .filter(|&first| first > 0)
        {
            let of_default: Vec<usize> = group.frees.drain(..first).collect();
            self.empty_cache(&of_default)?;
        }
        let frees = self.release_pools(&group.frees)?;
        let served = event.action == Action::Alloc;
        if served && let Some(id) = self.ids.remove(&event.address) {
            self.program.notes.push(Note::Overlap {
                event: index as u32,
                address: event.address,
            });
            self.add(TraceEvent::Free { id }, index);
            self.shadow = None;
        }
        let id = self.program.allocations.len() as u64;
        let stream = self.program.stream_number(event.stream);
        let request = Request {
            size: event.size,
            stream,
        };
        let pool = self.pool_of(index);
        let plans = self.plans(
            !frees.is_empty(),
            !group.takes.is_empty() || !served,
            !group.completed.is_empty(),
        );
        let plan = self.choose(&plans, &group, &frees, index, |shadow, recorded| {
            shadow.allocate(id, request, pool, recorded)
        })?;
        if plan.refused {
            let wanted = self
                .shadow
                .as_ref()
                .and_then(|shadow| shadow.device.refused);
            self.refused_at = self.refused_at.into_iter().chain(wanted).min();
        }
        if plan.empty_cache && !group.takes.is_empty() && !self.memory_is_known {
            self.taken_for_empty_cache += 1;
        }
        let synchronized = |recovery: &mut Self| {
            group
                .completed
                .iter()
                .for_each(|(&stream, &event)| recovery.add_synchronize(stream, event))
        };
        if plan.seen_before {
            synchronized(self);
        }
        if plan.empty_cache {
            self.leave_pool(frees[0]);
            self.add(TraceEvent::EmptyCache, frees[0]);
        }
        self.add_request(index, id, request, pool);
        if !plan.seen_before {
            // The allocator waited for these frees itself. Other settings may not require that, so
            // they complete here at the latest.
            synchronized(self);
        }
        self.note_reservations();
        Ok(())
    }

    /// Adds a request to the program. If it failed, the program continued without the block, or
    /// ended.
    fn add_request(
        &mut self,
        index: usize,
        id: u64,
        request: Request,
        pool: Option<PrivatePoolId>,
    ) {
        let event = self.events[index];
        let served = event.action == Action::Alloc;
        let stream = request.stream;
        self.enter_pool(pool, index);
        self.program.allocations.push(RecordedAllocation {
            address: served.then_some(event.address),
            refused: !served,
            requested: event.size,
            stream,
            stack: event.stack,
        });
        self.add(
            TraceEvent::Allocate {
                id,
                size: event.size,
                stream,
            },
            index,
        );
        if served {
            self.ids.insert(event.address, id);
        } else if index < self.last_request {
            // The program continued without the block, so a replay frees it if the request
            // succeeds.
            self.add(TraceEvent::Free { id }, index);
        } else {
            let (operation, device_free) =
                (self.program.operations.len() - 1, Bytes(event.address));
            self.program.ended = RecordedEnd::Oom {
                operation,
                event: index as u32,
                requested: event.size,
                device_free,
            };
        }
    }

    /// Notes where the shadow has reserved segments since the last request.
    fn note_reservations(&mut self) {
        if let Some(shadow) = &self.shadow {
            let known = self.program.reservations.len();
            self.program.reservations.extend(
                shadow
                    .device
                    .reserved
                    .iter()
                    .skip(known)
                    .map(|start| start.0),
            );
        }
    }

    /// The possible explanations of a request, most likely first.
    fn plans(&self, frees: bool, asked_driver: bool, completed: bool) -> Vec<Plan> {
        let ways: &[(bool, bool)] = match (frees, asked_driver) {
            // Returning memory to the driver can be sufficient: the request then uses a free block.
            (true, _) if self.memory_is_known => &[(false, false), (true, false)],
            (true, _) => &[(false, false), (true, false), (false, true)],
            (false, _) => &[(false, false)],
        };
        let seen = if completed && (asked_driver || frees) {
            &[true, false][..]
        } else {
            &[true]
        };
        let plans = |&(empty_cache, refused): &(bool, bool)| {
            seen.iter().map(move |&seen_before| Plan {
                seen_before,
                empty_cache,
                refused,
            })
        };
        ways.iter().flat_map(plans).collect()
    }

    /// Returns the first hypothesis that reproduces the recording, or the most likely one if none
    /// does.
    fn choose(
        &mut self,
        plans: &[Plan],
        group: &Group,
        frees: &[usize],
        index: usize,
        mut allocate: impl FnMut(&mut ShadowAllocator, &Recorded) -> Result<bool, DeviceError>,
    ) -> Result<Plan, ProgramError> {
        let likely_emptied = !self.memory_is_known || group.takes.is_empty();
        let likely = *plans
            .iter()
            .find(|plan| plan.empty_cache == likely_emptied)
            .unwrap_or(&plans[0]);
        let event = self.events[index];
        let address = (event.action == Action::Alloc).then_some(DevicePtr(event.address));
        let (freed, taken) = (self.driver_calls(frees), self.driver_calls(&group.takes));
        let size_taken = group
            .takes
            .iter()
            .map(|&index| self.events[index].size)
            .sum();
        let mapped_next = self.mapped_next.get(&index).copied();
        for (number, &plan) in plans.iter().enumerate() {
            let Some(shadow) = &mut self.shadow else {
                return Ok(likely);
            };
            let last = number + 1 == plans.len();
            let checkpoint = (!last).then(|| shadow.checkpoint());
            let mut follow = |shadow: &mut ShadowAllocator| {
                if plan.seen_before {
                    group
                        .completed
                        .keys()
                        .try_for_each(|&stream| shadow.synchronize(stream))?;
                }
                let emptied = !plan.empty_cache || shadow.empty_cache(&freed)?;
                let driver = if plan.empty_cache {
                    taken.clone()
                } else {
                    [&freed[..], &taken[..]].concat()
                };
                shadow.refuse(plan.refused.then_some(size_taken));
                Ok(allocate(
                    shadow,
                    &Recorded {
                        driver,
                        address,
                        mapped_next,
                    },
                )? && emptied)
            };
            let operation = self.program.operations.len() + 1;
            if follow(shadow).map_err(|source| ProgramError::Replay { operation, source })? {
                return Ok(plan);
            }
            checkpoint
                .into_iter()
                .for_each(|checkpoint| shadow.go_back(checkpoint));
        }
        self.shadow = None;
        Ok(likely)
    }

    /// Records released private pools. Returns the events that free other memory.
    fn release_pools(&mut self, frees: &[usize]) -> Result<Vec<usize>, ProgramError> {
        let mut of_pools: BTreeMap<PrivatePoolId, Vec<usize>> = BTreeMap::new();
        let mut others = Vec::new();
        for &free in frees {
            match self.private.at(self.events[free].address, free) {
                Some(pool) => of_pools.entry(pool).or_default().push(free),
                None => others.push(free),
            }
        }
        for (pool, frees) in of_pools {
            self.leave_pool(frees[0]);
            if self
                .last_use
                .get(&pool)
                .is_some_and(|&last| last > frees[0])
            {
                self.program.notes.push(Note::UnexplainedFree {
                    event: frees[0] as u32,
                });
                self.shadow = None;
                continue;
            }
            self.add(TraceEvent::ReleasePool(pool), frees[0]);
            let recorded = self.driver_calls(&frees);
            self.compare(|shadow| Ok(shadow.release_pool(pool, &recorded)))?;
        }
        Ok(others)
    }

    fn add_synchronize(&mut self, stream: StreamId, event: usize) {
        self.leave_pool(event);
        self.add(TraceEvent::SynchronizeStream(stream), event);
    }

    /// Runs an action on the shadow allocator, and drops the allocator if the action does not match
    /// the recording.
    fn compare(
        &mut self,
        what: impl FnOnce(&mut ShadowAllocator) -> Result<bool, DeviceError>,
    ) -> Result<(), ProgramError> {
        let operation = self.program.operations.len();
        let same = self
            .shadow
            .as_mut()
            .map_or(Ok(true), what)
            .map_err(|source| ProgramError::Replay { operation, source })?;
        if !same {
            self.shadow = None;
        }
        Ok(())
    }

    fn add(&mut self, operation: TraceEvent, origin: usize) {
        self.program.operations.push(operation);
        self.program.origin.push(origin as u32);
    }

    fn enter_pool(&mut self, pool: Option<PrivatePoolId>, event: usize) {
        if self.open != pool {
            self.leave_pool(event);
            if let Some(pool) = pool {
                self.add(TraceEvent::BeginPool(pool), event);
            }
            self.open = pool;
        }
    }

    fn leave_pool(&mut self, event: usize) {
        if let Some(open) = self.open.take() {
            self.add(TraceEvent::EndPool(open), event);
        }
    }

    fn pool_of(&self, index: usize) -> Option<PrivatePoolId> {
        let event = self.events[index];
        match event.action {
            Action::Alloc => self.private.at(event.address, index),
            _ => self.private.told.get(&index).copied().flatten(),
        }
    }

    fn driver_calls(&self, events: &[usize]) -> Vec<DriverCall> {
        events
            .iter()
            .filter_map(|&index| DriverCall::of(&self.events[index]))
            .collect()
    }

    fn finish(&mut self) {
        let program = &mut self.program;
        if self
            .events
            .iter()
            .all(|event| matches!(event.action, Action::Snapshot))
        {
            program.notes.push(Note::NothingRecorded);
        } else if !program.start.is_empty() {
            program.notes.push(Note::StartsLate {
                segments: program.start.len(),
                blocks: program.live_at_start() as usize,
            });
        }
        if program.config.garbage_collection_threshold.is_some() && !program.start.is_empty() {
            program.notes.push(Note::AgesUnknown);
        }
        if self.taken_for_empty_cache > 0 {
            program.notes.push(Note::TakenForEmptyCache {
                times: self.taken_for_empty_cache,
            });
        }
        program.notes.sort();
    }
}

/// Returns the streams and private pools of a recording, both in order, and the pool of each event.
fn number_all(
    snapshot: &Snapshot,
    device: u32,
    events: &[Event],
    held: &[Segment],
    captures: &[(usize, MempoolId)],
) -> (Vec<u64>, Vec<MempoolId>, PrivatePools) {
    let segments = || snapshot.segments_of(device).chain(held);
    let of_events = events
        .iter()
        .filter(|event| !matches!(event.action, Action::Snapshot))
        .map(|event| event.stream);
    let streams: BTreeSet<u64> = of_events
        .chain(segments().map(|segment| segment.stream))
        .chain([0])
        .collect();
    let told = |(index, event): (usize, &Event)| Some((index, snapshot.pool_of(event)?));
    let told = events.iter().enumerate().filter_map(told);
    let mut told: Vec<(usize, MempoolId)> = told.chain(captures.iter().copied()).collect();
    captures::rename_released(&mut told, events, held);
    let of_segments = segments()
        .map(|segment| segment.private_pool)
        .filter(|&pool| pool != MempoolId::DEFAULT);
    let of_events = told
        .iter()
        .map(|&(_, pool)| pool)
        .filter(|&pool| pool != MempoolId::DEFAULT);
    let pools: BTreeSet<MempoolId> = of_segments.chain(of_events).collect();
    let pools: Vec<MempoolId> = pools.into_iter().collect();
    let number = |pool: MempoolId| {
        pools
            .binary_search(&pool)
            .ok()
            .map(|number| PrivatePoolId(number as u32))
    };
    // Others can have had the address before.
    let reserved: HashMap<u64, usize> = events
        .iter()
        .enumerate()
        .filter(|(_, event)| event.action == Action::SegmentAlloc)
        .map(|(index, event)| (event.address, index))
        .collect();
    let of_segment = |segment: &Segment, since: usize| {
        Some((
            segment.address,
            (
                segment.address + segment.size.0,
                number(segment.private_pool)?,
                since,
            ),
        ))
    };
    let at_end = snapshot.segments_of(device).filter_map(|segment| {
        of_segment(
            segment,
            reserved.get(&segment.address).copied().unwrap_or(0),
        )
    });
    let private = PrivatePools {
        of_segments: at_end
            .chain(held.iter().filter_map(|segment| of_segment(segment, 0)))
            .collect(),
        told: told
            .into_iter()
            .map(|(index, pool)| (index, number(pool)))
            .collect(),
    };
    (streams.into_iter().collect(), pools, private)
}

/// The program's memory at its last OOM: the reserved memory plus the device's free memory.
fn memory_at_oom(snapshot: &Snapshot, device: u32, events: &[Event]) -> Option<Bytes> {
    let last = events
        .iter()
        .rposition(|event| event.action == Action::Oom)?;
    let at_end: Bytes = snapshot
        .segments_of(device)
        .map(|segment| segment.size)
        .sum();
    let since = |moved: fn(Action) -> bool| {
        events[last..]
            .iter()
            .filter(move |event| moved(event.action))
            .map(|event| event.size)
    };
    let held =
        (at_end + since(Action::releases).sum()).saturating_sub(since(Action::reserves).sum());
    Some(held + Bytes(events[last].address))
}

impl RecordedProgram {
    fn add_start(&mut self) -> HashMap<u64, u64> {
        let mut ids = HashMap::new();
        for segment in &self.start {
            let stream = self.stream_number(segment.stream);
            for block in segment
                .blocks
                .iter()
                .filter(|block| block.state == BlockState::Allocated)
            {
                ids.insert(block.address, self.allocations.len() as u64);
                let (address, requested, stack) =
                    (Some(block.address), block.requested, block.stack);
                self.allocations.push(RecordedAllocation {
                    address,
                    refused: false,
                    requested,
                    stream,
                    stack,
                });
            }
        }
        ids
    }
}
