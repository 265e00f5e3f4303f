//! The pieces of a simulated pool. An allocation takes the smallest that fits, the lowest of equal ones.

use std::collections::{BTreeMap, BTreeSet};

use super::races::{Races, Slot};
use crate::units::Bytes;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    size: Bytes,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Live,
    /// Free for any work.
    Free,
    /// Free for work that is ordered after this entry of a stream.
    FreeBehind(Slot, u64),
}

/// All pieces of all chunks. Chunks never touch, so adjacent pieces belong to one chunk.
///
/// Allocation and free take time logarithmic in the number of pieces, plus a scan of fitting pieces that the stream may not use
/// yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Pieces {
    pieces: BTreeMap<u64, Piece>,
    /// Free pieces, by size and address.
    free: BTreeSet<(Bytes, u64)>,
    /// Pieces that are free after an entry of a stream, by that entry and address. There are few streams.
    behind: Vec<(Slot, BTreeSet<(u64, u64)>)>,
    /// Pieces that may have a neighbor to merge with.
    changed: Vec<u64>,
}

impl Pieces {
    /// Adds a chunk that is free for any work.
    pub(super) fn add_chunk(&mut self, start: u64, size: Bytes) {
        self.insert(start, Piece { size, state: State::Free });
    }

    /// Returns true if the chunk is one piece that is free for any work.
    pub(super) fn is_unused(&self, start: u64, size: Bytes) -> bool {
        self.pieces.get(&start) == Some(&Piece { size, state: State::Free })
    }

    /// Removes an unused chunk.
    pub(super) fn remove_chunk(&mut self, start: u64) {
        self.remove(start);
    }

    /// Allocates a piece for work of the stream in `slot`.
    pub(super) fn take(&mut self, size: Bytes, slot: Slot, races: &Races) -> Option<u64> {
        let is_usable = |start: u64| match self.pieces.get(&start)?.state {
            State::Live => None,
            State::Free => Some(()),
            State::FreeBehind(behind, tick) => races.is_ordered(slot, behind, tick).then_some(()),
        };
        let start = self.free.range((size, 0)..).map(|&(_, start)| start).find(|&start| is_usable(start).is_some())?;
        let Piece { size: whole, state } = self.remove(start)?;
        self.insert(start, Piece { size, state: State::Live });
        if whole > size {
            self.insert(start + size.0, Piece { size: whole - size, state });
            self.changed.push(start + size.0);
        }
        Some(start)
    }

    /// Frees a live piece before this entry of a stream and returns its size, or `None` if no live piece starts there.
    pub(super) fn give_back(&mut self, start: u64, slot: Slot, tick: u64) -> Option<Bytes> {
        let piece = self.pieces.get(&start).copied().filter(|piece| piece.state == State::Live)?;
        self.insert(start, Piece { state: State::FreeBehind(slot, tick), ..piece });
        self.changed.push(start);
        Some(piece.size)
    }

    /// Marks pieces as free for any work if the host has waited for their free, and merges neighbors.
    pub(super) fn settle(&mut self, races: &Races) {
        for index in 0..self.behind.len() {
            let (slot, waiting) = &self.behind[index];
            let seen: Vec<u64> =
                waiting.iter().take_while(|(tick, _)| races.host_has_seen(*slot, *tick)).map(|(_, start)| *start).collect();
            for start in seen {
                if let Some(piece) = self.remove(start) {
                    self.insert(start, Piece { state: State::Free, ..piece });
                    self.changed.push(start);
                }
            }
        }
        for start in std::mem::take(&mut self.changed) {
            self.join_around(start);
        }
    }

    /// Merges a piece with its neighbors if they are free for the same work.
    fn join_around(&mut self, mut start: u64) {
        while let Some((&before, _)) = self.pieces.range(..start).next_back()
            && self.join(before, start)
        {
            start = before;
        }
        while let Some((&after, _)) = self.pieces.range(start + 1..).next()
            && self.join(start, after)
        {}
    }

    /// Merges two pieces if they touch and are free for the same work.
    fn join(&mut self, first: u64, second: u64) -> bool {
        let (Some(&before), Some(&after)) = (self.pieces.get(&first), self.pieces.get(&second)) else { return false };
        let touches = first + before.size.0 == second;
        let Some(state) = joined(before.state, after.state).filter(|_| touches) else { return false };
        self.remove(first);
        self.remove(second);
        self.insert(first, Piece { size: before.size + after.size, state });
        true
    }

    fn insert(&mut self, start: u64, piece: Piece) {
        self.pieces.insert(start, piece);
        if piece.state != State::Live {
            self.free.insert((piece.size, start));
        }
        if let State::FreeBehind(slot, tick) = piece.state {
            match self.behind.iter_mut().find(|(known, _)| *known == slot) {
                Some((_, waiting)) => drop(waiting.insert((tick, start))),
                None => self.behind.push((slot, BTreeSet::from([(tick, start)]))),
            }
        }
    }

    fn remove(&mut self, start: u64) -> Option<Piece> {
        let piece = self.pieces.remove(&start)?;
        self.free.remove(&(piece.size, start));
        if let State::FreeBehind(slot, tick) = piece.state
            && let Some((_, waiting)) = self.behind.iter_mut().find(|(known, _)| *known == slot)
        {
            waiting.remove(&(tick, start));
        }
        Some(piece)
    }
}

/// The state of two merged neighbors, or `None` if they are free for different work.
fn joined(before: State, after: State) -> Option<State> {
    match (before, after) {
        (State::Free, State::Free) => Some(State::Free),
        (State::FreeBehind(first, earlier), State::FreeBehind(second, tick)) if first == second => {
            Some(State::FreeBehind(first, tick.max(earlier)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::device::sim::races::VectorClock;

    const STREAMS: usize = 3;
    const CHUNK: u64 = 4096;

    /// A plain model that scans all pieces for each operation.
    #[derive(Default)]
    struct Plain(BTreeMap<u64, Piece>);

    impl Plain {
        fn take(&mut self, size: Bytes, slot: Slot, races: &Races) -> Option<u64> {
            let usable = |state| match state {
                State::Live => false,
                State::Free => true,
                State::FreeBehind(behind, tick) => races.is_ordered(slot, behind, tick),
            };
            let fitting = self.0.iter().filter(|(_, piece)| piece.size >= size && usable(piece.state));
            let (&start, &piece) = fitting.min_by_key(|(start, piece)| (piece.size, **start))?;
            self.0.insert(start, Piece { size, state: State::Live });
            if piece.size > size {
                self.0.insert(start + size.0, Piece { size: piece.size - size, state: piece.state });
            }
            Some(start)
        }

        fn settle(&mut self, races: &Races) {
            let mut settled: BTreeMap<u64, Piece> = BTreeMap::new();
            for (start, mut piece) in std::mem::take(&mut self.0) {
                if let State::FreeBehind(slot, tick) = piece.state
                    && races.host_has_seen(slot, tick)
                {
                    piece.state = State::Free;
                }
                let last = settled.last_entry().filter(|last| *last.key() + last.get().size.0 == start);
                match last.and_then(|last| Some((joined(last.get().state, piece.state)?, last))) {
                    Some((state, mut last)) => *last.get_mut() = Piece { size: last.get().size + piece.size, state },
                    None => drop(settled.insert(start, piece)),
                }
            }
            self.0 = settled;
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Take {
            size: u64,
            stream: usize,
        },
        /// The n-th live piece, modulo their number.
        GiveBack {
            nth: usize,
            stream: usize,
        },
        Settle,
        AddChunk,
        /// The host waits for a stream, or for the work before its last record.
        HostWaits(usize),
        Record(usize),
        HostWaitsForRecord,
        StreamWaitsForRecord(usize),
    }

    fn a_step() -> impl Strategy<Value = Step> {
        let stream = 0..STREAMS;
        prop_oneof![
            8 => (1_u64..CHUNK, stream.clone()).prop_map(|(size, stream)| Step::Take { size, stream }),
            6 => (0_usize..64, stream.clone()).prop_map(|(nth, stream)| Step::GiveBack { nth, stream }),
            6 => Just(Step::Settle),
            1 => Just(Step::AddChunk),
            1 => stream.clone().prop_map(Step::HostWaits),
            2 => stream.clone().prop_map(Step::Record),
            1 => Just(Step::HostWaitsForRecord),
            1 => stream.prop_map(Step::StreamWaitsForRecord),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1024))]
        #[test]
        fn pieces_are_taken_and_joined_as_by_looking_at_all_of_them(program in prop::collection::vec(a_step(), 1..120)) {
            let mut races = Races::default();
            let slots: [Slot; STREAMS] = std::array::from_fn(|_| races.add_stream());
            let (mut pieces, mut plain, mut record) = (Pieces::default(), Plain::default(), VectorClock::default());
            let (mut live, mut chunks) = (Vec::new(), 0);
            for step in program {
                match step {
                    Step::Take { size, stream } => {
                        let taken = pieces.take(Bytes(size), slots[stream], &races);
                        prop_assert_eq!(taken, plain.take(Bytes(size), slots[stream], &races), "{:?}", step);
                        live.extend(taken);
                    }
                    Step::GiveBack { nth, stream } if !live.is_empty() => {
                        let start = live.swap_remove(nth % live.len());
                        // An entry of the stream, as each access has one.
                        let tick = races.record(slots[stream], &mut VectorClock::default());
                        let piece = plain.0.get_mut(&start).expect("it is live");
                        prop_assert_eq!(pieces.give_back(start, slots[stream], tick), Some(piece.size));
                        piece.state = State::FreeBehind(slots[stream], tick);
                    }
                    Step::GiveBack { .. } => {}
                    Step::Settle => {
                        pieces.settle(&races);
                        plain.settle(&races);
                        prop_assert_eq!(&pieces.pieces, &plain.0);
                    }
                    Step::AddChunk => {
                        let start = chunks * 2 * CHUNK;
                        chunks += 1;
                        pieces.add_chunk(start, Bytes(CHUNK));
                        plain.0.insert(start, Piece { size: Bytes(CHUNK), state: State::Free });
                    }
                    Step::HostWaits(stream) => races.host_joins_stream(slots[stream]),
                    Step::Record(stream) => drop(races.record(slots[stream], &mut record)),
                    Step::HostWaitsForRecord => races.host_joins(&record),
                    Step::StreamWaitsForRecord(stream) => races.stream_joins(slots[stream], &record),
                }
            }
        }
    }
}
