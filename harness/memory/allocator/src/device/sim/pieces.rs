//! The pieces of a simulated pool. An allocation takes the smallest that fits, the lowest of equal
//! ones.

use std::collections::{BTreeMap, BTreeSet};

use super::races::{Races, Slot};
use crate::units::Bytes;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    size: Bytes,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Live,
    Free,
    /// Free for work that is ordered after this entry of a stream.
    FreeBehind(Slot, u64),
}

/// All pieces of all chunks. Chunks never touch, so adjacent pieces belong to one chunk.
///
/// Allocation and free take time logarithmic in the number of pieces, plus a scan of fitting pieces
/// that the stream may not use yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Pieces {
    pieces: BTreeMap<u64, Piece>,
    /// Free pieces, by size and address.
    free: BTreeSet<(Bytes, u64)>,
    /// Pieces that are free after an entry of a stream, by that entry and address. There are few
    /// streams.
    behind: Vec<(Slot, BTreeSet<(u64, u64)>)>,
    /// Pieces that may have a neighbor to merge with.
    changed: Vec<u64>,
}

impl Pieces {
    /// Adds a chunk that is free for any work.
    pub(super) fn add_chunk(&mut self, start: u64, size: Bytes) {
        self.insert(
            start,
            Piece {
                size,
                state: State::Free,
            },
        );
    }

    /// Returns true if the chunk is one piece that is free for any work.
    pub(super) fn is_unused(&self, start: u64, size: Bytes) -> bool {
        self.pieces.get(&start)
            == Some(&Piece {
                size,
                state: State::Free,
            })
    }

    /// Allocates a piece for work of the stream in `slot`.
    pub(super) fn take(&mut self, size: Bytes, slot: Slot, races: &Races) -> Option<u64> {
        let is_usable = |start: u64| match self.pieces.get(&start)?.state {
            State::Live => None,
            State::Free => Some(()),
            State::FreeBehind(behind, tick) => races.is_ordered(slot, behind, tick).then_some(()),
        };
        let start = self
            .free
            .range((size, 0)..)
            .map(|&(_, start)| start)
            .find(|&start| is_usable(start).is_some())?;
        let Piece { size: whole, state } = self.remove(start)?;
        self.insert(
            start,
            Piece {
                size,
                state: State::Live,
            },
        );
        if whole > size {
            self.insert(
                start + size.0,
                Piece {
                    size: whole - size,
                    state,
                },
            );
            self.changed.push(start + size.0);
        }
        Some(start)
    }

    /// Frees a live piece before this entry of a stream and returns its size, or `None` if no live
    /// piece starts there.
    pub(super) fn give_back(&mut self, start: u64, slot: Slot, tick: u64) -> Option<Bytes> {
        let piece = self
            .pieces
            .get(&start)
            .copied()
            .filter(|piece| piece.state == State::Live)?;
        self.insert(
            start,
            Piece {
                state: State::FreeBehind(slot, tick),
                ..piece
            },
        );
        self.changed.push(start);
        Some(piece.size)
    }

    /// Marks pieces as free for any work if the host has waited for their free, and merges
    /// neighbors.
    pub(super) fn settle(&mut self, races: &Races) {
        for index in 0..self.behind.len() {
            let (slot, waiting) = &self.behind[index];
            let seen: Vec<u64> = waiting
                .iter()
                .take_while(|(tick, _)| races.host_has_seen(*slot, *tick))
                .map(|(_, start)| *start)
                .collect();
            for start in seen {
                if let Some(piece) = self.remove(start) {
                    self.insert(
                        start,
                        Piece {
                            state: State::Free,
                            ..piece
                        },
                    );
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

    fn join(&mut self, first: u64, second: u64) -> bool {
        let (Some(&before), Some(&after)) = (self.pieces.get(&first), self.pieces.get(&second))
        else {
            return false;
        };
        let touches = first + before.size.0 == second;
        let Some(state) = joined(before.state, after.state).filter(|_| touches) else {
            return false;
        };
        self.remove(first);
        self.remove(second);
        self.insert(
            first,
            Piece {
                size: before.size + after.size,
                state,
            },
        );
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

    /// Removes a piece, or an unused chunk.
    pub(super) fn remove(&mut self, start: u64) -> Option<Piece> {
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
mod tests;
