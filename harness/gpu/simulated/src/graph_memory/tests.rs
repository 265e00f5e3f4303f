use super::*;

/// Graphs, executable graphs, streams and devices are numbers.
const GRAPH: usize = 0x100;
const OTHER: usize = 0x200;
const RUN: usize = 0x110;
const OTHER_RUN: usize = 0x210;

/// Graph memory that reserves its addresses one after the other.
#[derive(Default)]
struct Memory {
    graphs: GraphMemory,
    reserved: u64,
    nodes: usize,
}

impl Memory {
    fn node(&mut self, after: &[usize]) -> (usize, Position) {
        self.nodes += 1;
        let position = self.graphs.after(self.nodes, after);
        self.graphs.add(position.clone());
        (self.nodes, position)
    }

    /// A node that allocates, and its address.
    fn allocate(&mut self, graph: usize, size: Bytes, after: &[usize]) -> (usize, u64) {
        let (node, position) = self.node(after);
        let next = &mut self.reserved;
        let reserve = |size: Bytes| {
            *next += size.0;
            Ok((1 << 40) + *next - size.0)
        };
        let address = self.graphs.allocate(graph, (0, size), &position, reserve);
        (node, address.expect("addresses are left"))
    }

    fn free(&mut self, graph: usize, address: u64, after: &[usize]) -> Result<usize, Code> {
        let (node, position) = self.node(after);
        self.graphs.free_in(graph, address, position)?;
        Ok(node)
    }

    fn instantiate(&mut self, graph: usize, executable: usize) {
        let instantiated = self.graphs.instantiate(graph, executable, false);
        instantiated.expect("the graph has no executable graph");
    }

    /// Launches into a stream whose work alone ends before the launch. Returns the bytes that the
    /// launch requested.
    fn launch(&mut self, executable: usize, stream: usize) -> Result<Bytes, Code> {
        self.graphs.allow_launch(executable)?;
        let is_ready = |work: &Work| work.keys().all(|of| *of == stream);
        let missing = self.graphs.map(executable, is_ready);
        let size = missing.get(&0).copied().unwrap_or_default();
        self.graphs.grow(0, size);
        assert!(self.graphs.map(executable, is_ready).is_empty());
        let work = Work::from([(stream, 1)]);
        self.graphs.launched(executable, &work);
        Ok(size)
    }

    /// A graph that allocates and frees 64 MiB, or only allocates.
    fn graph(&mut self, graph: usize, executable: usize, frees: bool) -> u64 {
        let (node, address) = self.allocate(graph, Bytes::mib(64), &[]);
        if frees {
            self.free(graph, address, &[node]).expect("frees");
        }
        self.instantiate(graph, executable);
        address
    }

    fn figures(&self) -> [u64; 4] {
        let all = [
            Figure::Used,
            Figure::UsedHigh,
            Figure::Reserved,
            Figure::ReservedHigh,
        ];
        all.map(|figure| self.graphs.figure(0, figure).0 >> 20)
    }
}

#[test]
fn an_address_is_used_again_only_after_a_free_that_comes_before() {
    let mut memory = Memory::default();
    let size = Bytes::mib(40);
    let (first, address) = memory.allocate(GRAPH, size, &[]);
    let free = memory.free(GRAPH, address, &[first]).expect("frees");
    let (kernel, _) = memory.node(&[free]);
    let (_, unordered) = memory.allocate(GRAPH, size, &[first]);
    assert_ne!(unordered, address);
    let (_, ordered) = memory.allocate(GRAPH, size, &[kernel]);
    assert_eq!(ordered, address, "by way of the kernel");
    let (_, next) = memory.allocate(GRAPH, size, &[kernel]);
    assert_ne!(next, address, "it is taken again");
    let (_, small) = memory.allocate(GRAPH, Bytes(1), &[]);
    let (_, beside) = memory.allocate(GRAPH, Bytes(1), &[]);
    assert_eq!((small, beside), (address + size.0, small + 512));
    assert_eq!(memory.graphs.around(beside + 3), Some((beside, ALIGNMENT)));
    assert_eq!(memory.graphs.around(beside + 512), None);
}

#[test]
fn neighbours_that_are_free_make_room_for_a_larger_allocation() {
    let mut memory = Memory::default();
    let pieces = [(); 2].map(|()| memory.allocate(GRAPH, Bytes::mib(12), &[]));
    let frees = pieces.map(|(node, at)| memory.free(GRAPH, at, &[node]).expect("frees"));
    let (_, both) = memory.allocate(GRAPH, Bytes::mib(24), &frees);
    assert_eq!(both, pieces[0].1);
    let (_, end) = memory.allocate(GRAPH, Bytes::mib(8), &[]);
    assert_eq!(end, both + Bytes::mib(24).0);
}

#[test]
fn a_request_that_does_not_fit_has_the_memory_of_what_is_free_before_it() {
    let mut memory = Memory::default();
    let mut after = Vec::new();
    for size in 1..=8 {
        let (node, address) = memory.allocate(GRAPH, Bytes::mib(40 * size), &after);
        after = vec![node];
        let free = memory.free(GRAPH, address, &after).expect("frees");
        after = vec![free];
    }
    memory.instantiate(GRAPH, RUN);
    assert_eq!(memory.launch(RUN, 1), Ok(Bytes::mib(320)), "the largest");
    assert_eq!(memory.launch(RUN, 1), Ok(Bytes::ZERO));
    memory.graphs.destroy(RUN, &[]);
    let (_, address) = memory.allocate(GRAPH, Bytes::mib(400), &[]);
    memory.instantiate(GRAPH, RUN);
    assert_eq!(
        memory.launch(RUN, 1),
        Ok(Bytes::mib(416)),
        "it may run before the frees"
    );
    let none = Work::new();
    assert_eq!(memory.graphs.free(address, &none), Some(Ok(())));
    assert_eq!(memory.graphs.trim(0, |_| true), Bytes::mib(736));
}

#[test]
fn a_refused_call_changes_no_graph() {
    let mut memory = Memory::default();
    let (node, address) = memory.allocate(GRAPH, Bytes::mib(40), &[]);
    let free = memory.free(GRAPH, address, &[node]).expect("frees");
    let position = memory.graphs.after(memory.nodes + 1, &[free]);
    let refused = memory.graphs.free_in(GRAPH, address, position.clone());
    assert_eq!(refused, Err(Code::InvalidValue), "it is free");
    let (_, other) = memory.allocate(GRAPH, Bytes::mib(40), &[]);
    assert_ne!(other, address, "the refused node had the same number");
    let full = |_| Err(Code::OutOfMemory);
    let refused = [
        memory.graphs.free_in(OTHER, 7, position.clone()),
        memory
            .graphs
            .allocate(OTHER, (0, Bytes::mib(1)), &position, full)
            .map(drop),
    ];
    assert_eq!(refused, [Err(Code::InvalidValue), Err(Code::OutOfMemory)]);
    assert!(!memory.graphs.is_in(OTHER));
}

#[test]
fn an_update_cannot_change_the_memory_of_a_graph() {
    let mut memory = Memory::default();
    memory.graph(GRAPH, RUN, true);
    memory.graph(OTHER, OTHER_RUN, true);
    let update = |executable, graph| memory.graphs.allow_update(executable, graph);
    assert_eq!((update(RUN, GRAPH), update(7, 8)), (Ok(()), Ok(())));
    for (executable, graph) in [(RUN, OTHER), (RUN, 8), (7, OTHER)] {
        let refused = update(executable, graph);
        assert_eq!(refused, Err(Code::GraphUpdateFailed), "{graph}");
    }
}

#[test]
fn captured_calls_are_ordered_by_the_work_before_them() {
    let captured = |capture, stream, work: &[(usize, u64)]| Position::Captured {
        capture,
        stream,
        before: work.iter().copied().collect(),
    };
    let free = captured(1, 5, &[(5, 2)]);
    assert!(free.is_before(&captured(1, 5, &[(5, 3)])));
    assert!(free.is_before(&captured(1, 6, &[(5, 2), (6, 1)])), "joined");
    assert!(
        !free.is_before(&captured(1, 6, &[(5, 1), (6, 1)])),
        "forked earlier"
    );
    assert!(!free.is_before(&captured(1, 6, &[(6, 1)])));
    assert!(
        !free.is_before(&captured(2, 5, &[(5, 3)])),
        "another capture"
    );
}

#[test]
fn graphs_share_physical_memory_unless_they_may_run_at_once() {
    let mut memory = Memory::default();
    memory.graph(GRAPH, RUN, true);
    memory.graph(OTHER, OTHER_RUN, true);
    assert_eq!(memory.figures(), [0; 4], "a launch gets the memory");
    assert_eq!(memory.launch(RUN, 1), Ok(Bytes::mib(64)));
    assert_eq!(memory.launch(RUN, 1), Ok(Bytes::ZERO));
    assert_eq!(
        memory.launch(RUN, 2),
        Ok(Bytes::ZERO),
        "it waits for itself"
    );
    assert_eq!(memory.launch(OTHER_RUN, 2), Ok(Bytes::ZERO));
    assert_eq!(memory.figures(), [64; 4]);
    assert_eq!(memory.launch(RUN, 1), Ok(Bytes::mib(64)), "at once");
    assert_eq!(memory.figures(), [128; 4]);
}

#[test]
fn memory_that_no_graph_frees_stays_until_it_is_freed_and_trimmed() {
    let mut memory = Memory::default();
    let kept = memory.graph(GRAPH, RUN, false);
    memory.graph(OTHER, OTHER_RUN, true);
    assert_eq!(memory.launch(RUN, 1), Ok(Bytes::mib(64)));
    assert_eq!(memory.launch(RUN, 1), Err(Code::InvalidValue));
    assert_eq!(memory.launch(OTHER_RUN, 1), Ok(Bytes::mib(64)));
    assert_eq!(memory.graphs.trim(0, |_| false), Bytes::ZERO, "it runs");
    assert_eq!(memory.graphs.trim(0, |_| true), Bytes::mib(64));
    for object in [GRAPH, RUN] {
        memory.graphs.destroy(object, &[]);
    }
    assert_eq!(memory.graphs.take_unused(), [], "it is live");
    let none = Work::new();
    assert_eq!(memory.graphs.free(kept, &none), Some(Ok(())));
    assert_eq!(memory.graphs.take_unused(), [(kept, Bytes::mib(64))]);
    assert_eq!(memory.graphs.free(kept, &none), None);
    assert_eq!(memory.figures(), [0, 128, 64, 128], "the memory is unused");
    assert_eq!(memory.launch(OTHER_RUN, 1), Ok(Bytes::ZERO));
    memory.graphs.trim(0, |_| true);
    let highest = [Figure::UsedHigh, Figure::ReservedHigh];
    let reset = highest.map(|figure| memory.graphs.reset_highest(0, figure));
    assert_eq!((reset, memory.figures()), ([Ok(()); 2], [0; 4]));
}

#[test]
fn a_launch_frees_what_the_launch_before_kept_if_the_program_says_so() {
    let mut memory = Memory::default();
    let (_, kept) = memory.allocate(GRAPH, Bytes::mib(1), &[]);
    assert_eq!(memory.graphs.instantiate(GRAPH, RUN, true), Ok(()));
    assert_eq!(memory.launch(RUN, 1), Ok(CHUNK));
    assert_eq!(memory.launch(RUN, 1), Ok(Bytes::ZERO));
    let none = Work::new();
    assert_eq!(memory.graphs.free(kept, &none), Some(Ok(())));
    let again = memory.graphs.free(kept, &none);
    assert_eq!(again, Some(Err(Code::InvalidValue)), "it is free");
}

#[test]
fn a_graph_frees_once_what_it_or_another_one_allocates() {
    let mut memory = Memory::default();
    let (node, own) = memory.allocate(GRAPH, Bytes::mib(1), &[]);
    let (_, kept) = memory.allocate(GRAPH, Bytes::mib(1), &[]);
    assert!(memory.free(GRAPH, own, &[node]).is_ok());
    for address in [own, kept + 512, 7] {
        let refused = memory.free(GRAPH, address, &[]);
        assert_eq!(refused, Err(Code::InvalidValue), "{address}");
    }
    assert!(memory.free(OTHER, kept, &[]).is_ok());
    for graph in [OTHER, GRAPH] {
        let again = memory.free(graph, kept, &[]);
        assert_eq!(again, Err(Code::InvalidValue), "{graph}");
    }
    memory.instantiate(GRAPH, RUN);
    memory.instantiate(OTHER, OTHER_RUN);
    assert_eq!(
        memory.launch(OTHER_RUN, 1),
        Err(Code::InvalidValue),
        "not yet"
    );
    for _ in 0..2 {
        assert!(memory.launch(RUN, 1).is_ok());
        assert_eq!(memory.launch(OTHER_RUN, 1), Ok(Bytes::ZERO));
    }
}

#[test]
fn at_most_one_executable_graph_of_a_graph_with_memory_exists() {
    let mut memory = Memory::default();
    memory.graph(GRAPH, RUN, true);
    let mut second = || memory.graphs.instantiate(GRAPH, OTHER_RUN, false);
    assert_eq!(second(), Err(Code::InvalidValue));
    memory.graphs.destroy(RUN, &[]);
    assert_eq!(memory.graphs.instantiate(GRAPH, OTHER_RUN, false), Ok(()));
    assert!(memory.graphs.is_in(GRAPH) && memory.graphs.is_in(OTHER_RUN));
    assert!(!memory.graphs.is_in(OTHER) && !memory.graphs.is_in(RUN));
    for executable in [RUN, OTHER] {
        let without = memory.graphs.instantiate(OTHER, executable, false);
        assert_eq!(without, Ok(()), "it has no memory");
    }
}
