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
        let fitting = self
            .0
            .iter()
            .filter(|(_, piece)| piece.size >= size && usable(piece.state));
        let (&start, &piece) = fitting.min_by_key(|(start, piece)| (piece.size, **start))?;
        self.0.insert(
            start,
            Piece {
                size,
                state: State::Live,
            },
        );
        if piece.size > size {
            self.0.insert(
                start + size.0,
                Piece {
                    size: piece.size - size,
                    state: piece.state,
                },
            );
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
            let last = settled
                .last_entry()
                .filter(|last| *last.key() + last.get().size.0 == start);
            match last.and_then(|last| Some((joined(last.get().state, piece.state)?, last))) {
                Some((state, mut last)) => {
                    *last.get_mut() = Piece {
                        size: last.get().size + piece.size,
                        state,
                    }
                }
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
    fn pieces_are_taken_and_joined_as_by_looking_at_all_of_them(
        program in prop::collection::vec(a_step(), 1..120)
    ) {
        let mut races = Races::default();
        let slots: [Slot; STREAMS] = std::array::from_fn(|_| races.add_stream());
        let (mut pieces, mut plain, mut record) =
            (Pieces::default(), Plain::default(), VectorClock::default());
        let (mut live, mut chunks) = (Vec::new(), 0);
        for step in program {
            match step {
                Step::Take { size, stream } => {
                    let taken = pieces.take(Bytes(size), slots[stream], &races);
                    prop_assert_eq!(
                        taken,
                        plain.take(Bytes(size), slots[stream], &races),
                        "{:?}",
                        step
                    );
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
