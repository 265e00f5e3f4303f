//! The order of all work: a happens-before race detector with vector clocks for the streams and the
//! host.
//!
//! Each stream has a clock with one entry per stream: the amount of that stream's work that is
//! complete before this stream's next work. Queued work first joins the host's clock into its
//! stream's clock and then increments the stream's own entry. Recording an event copies the
//! stream's clock. Waiting for the event joins the copy into the clock of the waiter, a stream or
//! the host. One access is ordered before another exactly if the other's clock has reached its
//! entry. This is the scheme of Flanagan and Freund, "FastTrack: Efficient and Precise Dynamic Race
//! Detection", PLDI 2009, <https://doi.org/10.1145/1542476.1542490>.
//!
//! The host waits for a stream before it is destroyed, so all later work is ordered after it. The
//! next stream reuses its slot in the clocks and continues its count. Clocks are as long as the
//! largest number of streams alive together.

use super::ranges::RangeMap;
use crate::device::{Access, AccessKind, DevicePtr, MemoryRange};
use crate::units::Bytes;

/// The index of a stream in every clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot(usize);

/// For each slot, the amount of its work known to be complete.
#[derive(Clone, Debug, Default)]
pub(super) struct VectorClock(Vec<u64>);

impl VectorClock {
    fn get(&self, slot: Slot) -> u64 {
        self.0.get(slot.0).copied().unwrap_or(0)
    }

    fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }

    fn tick(&mut self, slot: Slot) -> u64 {
        if self.0.len() <= slot.0 {
            self.0.resize(slot.0 + 1, 0);
        }
        self.0[slot.0] += 1;
        self.0[slot.0]
    }

    /// Becomes a copy of `other` and reuses its own memory.
    fn copy_from(&mut self, other: &Self) {
        self.0.clone_from(&other.0);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Epoch {
    slot: Slot,
    tick: u64,
    access: Access,
}

impl Epoch {
    fn is_before(&self, clock: &VectorClock) -> bool {
        clock.get(self.slot) >= self.tick
    }
}

/// The access history of a range: its last write (a free counts as one) and the mutually unordered
/// reads after it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct History {
    write: Option<Epoch>,
    reads: Vec<Epoch>,
}

impl History {
    /// Returns an earlier access that conflicts with one of this kind.
    fn conflict(&self, kind: AccessKind, clock: &VectorClock) -> Option<Access> {
        let unordered = |epoch: &&Epoch| !epoch.is_before(clock);
        let write = self.write.iter().find(unordered);
        let first = match kind {
            AccessKind::Read => write,
            AccessKind::Write | AccessKind::Free => {
                write.or_else(|| self.reads.iter().find(unordered))
            }
        };
        first.map(|epoch| epoch.access)
    }

    /// Records an access without conflicts.
    fn add(&mut self, epoch: Epoch, clock: &VectorClock) {
        // An access ordered after a write is ordered after everything before that write, and
        // likewise for reads.
        match epoch.access.kind {
            AccessKind::Write | AccessKind::Free => {
                self.write = Some(epoch);
                self.reads.clear();
            }
            AccessKind::Read => {
                self.reads.retain(|earlier| !earlier.is_before(clock));
                self.reads.push(epoch);
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Conflict {
    pub(super) range: MemoryRange,
    /// The earlier access in program order.
    pub(super) first: Access,
}

/// The order of all work, and the access history of memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Races {
    host: VectorClock,
    streams: Vec<VectorClock>,
    unused: Vec<Slot>,
    /// Slots of released streams with work that the host may not have waited for.
    leaving: Vec<Slot>,
    history: RangeMap<History>,
}

impl Races {
    pub(super) fn add_stream(&mut self) -> Slot {
        self.reclaim();
        self.unused.pop().unwrap_or_else(|| {
            self.streams.push(VectorClock::default());
            Slot(self.streams.len() - 1)
        })
    }

    /// Releases a stream without a wait. Its slot is reused when the host has waited for all of its
    /// work.
    pub(super) fn release_stream(&mut self, slot: Slot) {
        self.leaving.push(slot);
    }

    /// Frees the slots of released streams that the host has waited for.
    fn reclaim(&mut self) {
        let Self {
            host,
            streams,
            unused,
            leaving,
            ..
        } = self;
        leaving.retain(|&slot| {
            let seen = host.get(slot) >= streams[slot.0].get(slot);
            if seen {
                // Not more than the host knows: the stream may have waited for others after its
                // last work.
                streams[slot.0].copy_from(host);
                unused.push(slot);
            }
            !seen
        });
    }

    /// Removes a destroyed stream. The host has waited for all of its work.
    pub(super) fn remove_stream(&mut self, slot: Slot) {
        self.host_joins_stream(slot);
        self.unused.push(slot);
    }

    /// Queues an access on the stream and returns its entry. Fails with the first bytes, in address
    /// order, that race with an earlier access. The call has then changed nothing.
    pub(super) fn access(
        &mut self,
        slot: Slot,
        range: MemoryRange,
        access: Access,
    ) -> Result<u64, Conflict> {
        let (start, end) = (range.start.0, range.end().0);
        let clock = &mut self.streams[slot.0];
        clock.join(&self.host);
        let conflict = |from: u64, to: u64, first| Conflict {
            range: MemoryRange::new(DevicePtr(from), Bytes(to - from)),
            first,
        };
        // Most accesses have the same range as the access before.
        if let Some(history) = self.history.exact_mut(start, end) {
            if let Some(first) = history.conflict(access.kind, clock) {
                return Err(conflict(start, end, first));
            }
            let tick = clock.tick(slot);
            history.add(Epoch { slot, tick, access }, clock);
            return Ok(tick);
        }
        for (from, to, history) in self.history.overlapping(start, end) {
            if let Some(first) = history.conflict(access.kind, clock) {
                return Err(conflict(from, to, first));
            }
        }
        let tick = clock.tick(slot);
        let epoch = Epoch { slot, tick, access };
        match access.kind {
            AccessKind::Write | AccessKind::Free => self.history.insert(
                start,
                end,
                History {
                    write: Some(epoch),
                    reads: Vec::new(),
                },
            ),
            AccessKind::Read => self
                .history
                .update(start, end, |history| history.add(epoch, clock)),
        }
        Ok(tick)
    }

    /// Queues an event: copies the work that is complete when the event is into `record`, and
    /// returns the event's own entry.
    pub(super) fn record(&mut self, slot: Slot, record: &mut VectorClock) -> u64 {
        let clock = &mut self.streams[slot.0];
        clock.join(&self.host);
        let tick = clock.tick(slot);
        record.copy_from(clock);
        tick
    }

    /// Orders all later work of the stream after a recorded event.
    pub(super) fn stream_joins(&mut self, slot: Slot, record: &VectorClock) {
        self.streams[slot.0].join(record);
    }

    /// Orders the host, and all work it submits later, after a recorded event.
    pub(super) fn host_joins(&mut self, record: &VectorClock) {
        self.host.join(record);
    }

    /// Orders the host after all work of the stream.
    pub(super) fn host_joins_stream(&mut self, slot: Slot) {
        self.host.join(&self.streams[slot.0]);
    }

    /// Orders the host after all work of all streams.
    pub(super) fn host_joins_all(&mut self) {
        for stream in &self.streams {
            self.host.join(stream);
        }
    }

    /// Returns true if the host has waited for this entry of the stream or a later one.
    pub(super) fn host_has_seen(&self, slot: Slot, tick: u64) -> bool {
        self.host.get(slot) >= tick
    }

    /// The first access in the range, in address order, that the host has not waited for.
    pub(super) fn unseen_by_host(&self, range: MemoryRange) -> Option<Conflict> {
        self.history
            .overlapping(range.start.0, range.end().0)
            .find_map(|(from, to, history)| {
                // A write ordered after everything that the host has waited for would race with it.
                let first = history.conflict(AccessKind::Write, &self.host)?;
                Some(Conflict {
                    range: MemoryRange::new(DevicePtr(from), Bytes(to - from)),
                    first,
                })
            })
    }

    /// Returns true if the stream's next work is ordered after this entry.
    pub(super) fn is_ordered(&self, slot: Slot, behind: Slot, tick: u64) -> bool {
        self.streams[slot.0].get(behind) >= tick || self.host_has_seen(behind, tick)
    }

    pub(super) fn last_write(&self, at: DevicePtr) -> Option<Access> {
        let (_, _, history) = self.history.overlapping(at.0, at.0 + 1).next()?;
        history.write.map(|epoch| epoch.access)
    }

    pub(super) fn forget(&mut self, range: MemoryRange) {
        self.history.remove(range.start.0, range.end().0);
    }
}

#[cfg(test)]
mod tests;
