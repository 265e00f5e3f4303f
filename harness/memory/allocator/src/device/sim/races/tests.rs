use proptest::prelude::*;

use super::*;
use crate::device::{CallSite, StreamId};

const STREAMS: usize = 4;
const EVENTS: usize = 3;

/// One step of a program; streams and events by index.
#[derive(Clone, Copy, Debug)]
enum Step {
    Access {
        stream: usize,
        kind: AccessKind,
        start: u64,
        end: u64,
    },
    Record {
        event: usize,
        stream: usize,
    },
    Wait {
        stream: usize,
        event: usize,
    },
    HostWaitsForEvent(usize),
    HostWaitsForStream(usize),
    HostWaitsForAll,
    ReplaceStream(usize),
}

fn a_step() -> impl Strategy<Value = Step> {
    let (stream, event) = (0..STREAMS, 0..EVENTS);
    let kind = prop_oneof![Just(AccessKind::Write), Just(AccessKind::Read)];
    let range = (0_u64..12, 1_u64..6);
    prop_oneof![
        10 => (stream.clone(), kind, range)
            .prop_map(|(stream, kind, (start, len))| {
                Step::Access { stream, kind, start, end: start + len }
            }),
        6 => (event.clone(), stream.clone())
            .prop_map(|(event, stream)| Step::Record { event, stream }),
        6 => (stream.clone(), event.clone())
            .prop_map(|(stream, event)| Step::Wait { stream, event }),
        2 => event.prop_map(Step::HostWaitsForEvent),
        2 => stream.clone().prop_map(Step::HostWaitsForStream),
        1 => Just(Step::HostWaitsForAll),
        1 => stream.prop_map(Step::ReplaceStream),
    ]
}

/// The explicit happens-before graph: each node has the set of nodes before it, including itself,
/// as bits.
#[derive(Default)]
struct Graph {
    nodes: usize,
    host: u128,
    streams: [u128; STREAMS],
    events: [u128; EVENTS],
    accesses: Vec<(u128, Step)>,
}

impl Graph {
    fn node(&mut self, before: u128) -> u128 {
        self.nodes += 1;
        before | 1 << (self.nodes - 1)
    }

    fn submit(&mut self, stream: usize) -> u128 {
        let node = self.node(self.streams[stream] | self.host);
        self.streams[stream] = node;
        1 << (self.nodes - 1)
    }

    /// The earlier accesses that race with this one.
    fn races_with(&self, stream: usize, kind: AccessKind, start: u64, end: u64) -> Vec<Step> {
        let before = self.streams[stream] | self.host;
        let racing = |&&(node, earlier): &&(u128, Step)| match earlier {
            Step::Access {
                kind: other,
                start: from,
                end: to,
                ..
            } => {
                let conflicting = kind == AccessKind::Write || other == AccessKind::Write;
                conflicting && from < end && start < to && before & node == 0
            }
            _ => false,
        };
        self.accesses
            .iter()
            .filter(racing)
            .map(|&(_, step)| step)
            .collect()
    }
}

/// The detector and the graph.
struct Checked {
    races: Races,
    slots: [Slot; STREAMS],
    clocks: [VectorClock; EVENTS],
    graph: Graph,
}

impl Checked {
    fn new() -> Self {
        let mut races = Races::default();
        let slots = std::array::from_fn(|_| races.add_stream());
        Self {
            races,
            slots,
            clocks: Default::default(),
            graph: Graph::default(),
        }
    }

    /// Applies the step to both. For an access, returns both answers.
    fn step(&mut self, step: Step) -> Option<(Result<(), Conflict>, Vec<Step>)> {
        match step {
            Step::Access {
                stream,
                kind,
                start,
                end,
            } => {
                let expected = self.graph.races_with(stream, kind, start, end);
                let access = Access {
                    kind,
                    stream: StreamId(stream as u32),
                    place: CallSite(0),
                };
                let range = MemoryRange::new(DevicePtr(start), Bytes(end - start));
                let result = self.races.access(self.slots[stream], range, access);
                if result.is_ok() {
                    let node = self.graph.submit(stream);
                    self.graph.accesses.push((node, step));
                }
                return Some((result.map(drop), expected));
            }
            Step::Record { event, stream } => {
                self.races
                    .record(self.slots[stream], &mut self.clocks[event]);
                self.graph.submit(stream);
                self.graph.events[event] = self.graph.streams[stream];
            }
            Step::Wait { stream, event } => {
                self.races
                    .stream_joins(self.slots[stream], &self.clocks[event]);
                self.graph.submit(stream);
                self.graph.streams[stream] |= self.graph.events[event];
            }
            Step::HostWaitsForEvent(event) => {
                self.races.host_joins(&self.clocks[event]);
                self.graph.host |= self.graph.events[event];
            }
            Step::HostWaitsForStream(stream) => {
                self.races.host_joins_stream(self.slots[stream]);
                self.graph.host |= self.graph.streams[stream];
            }
            Step::HostWaitsForAll => {
                self.races.host_joins_all();
                self.graph.host = self
                    .graph
                    .streams
                    .iter()
                    .fold(self.graph.host, |all, stream| all | stream);
            }
            Step::ReplaceStream(stream) => {
                self.races.remove_stream(self.slots[stream]);
                self.slots[stream] = self.races.add_stream();
                self.graph.host |= self.graph.streams[stream];
                self.graph.streams[stream] = 0;
            }
        }
        None
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]
    #[test]
    fn verdicts_agree_with_reachability_in_the_happens_before_graph(
        program in prop::collection::vec(a_step(), 1..80)
    ) {
        let mut checked = Checked::new();
        for step in program {
            let Some((result, expected)) = checked.step(step) else { continue };
            match result {
                Ok(()) => prop_assert!(expected.is_empty(), "{step:?} races with {expected:?}"),
                Err(Conflict { range, first }) => prop_assert!(
                    expected.iter().any(|earlier| matches!(
                        *earlier,
                        Step::Access { stream, kind, start, end }
                            if (stream as u32, kind) == (first.stream.0, first.kind)
                                && start <= range.start.0
                                && range.end().0 <= end
                    )),
                    "the detector reports a race of {step:?} with {first:?} on {range}, expected \
                     {expected:?}"
                ),
            }
        }
    }
}

#[test]
fn clocks_are_as_long_as_the_peak_number_of_streams() {
    let mut races = Races::default();
    for _ in 0..1000 {
        let (a, b) = (races.add_stream(), races.add_stream());
        races.remove_stream(a);
        races.remove_stream(b);
    }
    assert_eq!(races.streams.len(), 2);
}
