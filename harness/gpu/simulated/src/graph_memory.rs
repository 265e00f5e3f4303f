//! [`GraphMemory`]: the memory that graphs allocate with their nodes.
//!
//! Sources: the CUDA Programming Guide, section "Graph Memory Nodes"
//! (<https://docs.nvidia.com/cuda/cuda-programming-guide/04-special-topics/cuda-graphs.html#graph-memory-nodes>),
//! and the graph functions in the manuals of driver and runtime. A node gets its address when it is
//! added. In a graph, an address is used again after a free that comes before. A launch or an
//! upload gets physical memory, which graphs of a device share if one ends before the other
//! begins. An allocation that is not freed keeps its memory. Unused memory stays reserved until a
//! trim.
//!
//! Assumed: addresses and physical memory grow by multiples of [`CHUNK`], as in pools, and pieces
//! are cut first fit, in multiples of [`ALIGNMENT`]. A request that does not fit gets other
//! addresses, and the physical memory of those in its graph that are free before it.

use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::units::Bytes;

use crate::clock::{captures::Position, work::Work};
use crate::code::Code;

const CHUNK: Bytes = Bytes::mib(32);
const ALIGNMENT: Bytes = Bytes(512);

/// A range of addresses that a graph has reserved, by its start.
type Start = u64;
/// A chunk of a segment.
type Place = (Start, usize);

/// The memory of all graphs of a process.
#[derive(Debug, Default)]
pub(crate) struct GraphMemory {
    /// Graphs with nodes for memory, and what is instantiated from them, by handle.
    graphs: BTreeMap<usize, Graph>,
    executables: BTreeMap<usize, Executable>,
    segments: BTreeMap<Start, Segment>,
    /// By node, if it is a free or comes after frees: the frees that end before its end.
    frees: BTreeMap<usize, BTreeSet<usize>>,
    /// Addresses of allocations that a launch has begun and nothing has freed.
    live: BTreeSet<u64>,
    /// By device.
    physical: BTreeMap<usize, Physical>,
}

/// What the nodes of a graph allocate and free.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Contents {
    segments: BTreeSet<Start>,
    /// Allocations without a free in the graph.
    kept: BTreeMap<u64, Bytes>,
    /// Frees of other graphs' allocations.
    freed: BTreeSet<u64>,
}

#[derive(Debug, Default)]
struct Graph {
    contents: Contents,
    /// At most one may exist.
    executable: Option<usize>,
}

#[derive(Debug)]
struct Executable {
    contents: Contents,
    /// A launch first frees the memory that the previous launch left allocated.
    frees_on_launch: bool,
}

#[derive(Debug)]
struct Segment {
    device: usize,
    pieces: BTreeMap<u64, Piece>,
    /// The physical memory of each chunk.
    mapped: Vec<Option<u64>>,
    /// The chunks of earlier segments, free by then, whose physical memory the first chunks have.
    shared: Vec<Place>,
}

#[derive(Clone, Debug)]
struct Piece {
    size: Bytes,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    New,
    Taken,
    Freed(Position),
}

impl Piece {
    fn is_available(&self, position: &Position) -> bool {
        match &self.state {
            State::New => true,
            State::Taken => false,
            State::Freed(free) => free.is_before(position),
        }
    }
}

/// The physical memory of a device for graphs.
#[derive(Debug, Default)]
struct Physical {
    chunks: BTreeMap<u64, Chunk>,
    last: u64,
    reserved_high: Bytes,
    used_high: Bytes,
}

#[derive(Debug, Default)]
struct Chunk {
    /// The segments to which it is mapped, and which of their chunks it is.
    mappings: BTreeSet<Place>,
    live: BTreeSet<u64>,
    /// The executable graph that used it last, and the work that must end before another may.
    user: usize,
    until: Work,
}

/// The numbers of `CUgraphMem_attribute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Figure {
    Used,
    UsedHigh,
    Reserved,
    ReservedHigh,
}

impl Figure {
    pub(crate) fn of(number: i32) -> Result<Self, Code> {
        Ok(match number {
            0 => Self::Used,
            1 => Self::UsedHigh,
            2 => Self::Reserved,
            3 => Self::ReservedHigh,
            _ => return Err(Code::InvalidValue),
        })
    }
}

impl Physical {
    fn reserved(&self) -> Bytes {
        Bytes(self.chunks.len() as u64 * CHUNK.0)
    }

    /// What is mapped by at least one graph.
    fn used(&self) -> Bytes {
        let mapped = self
            .chunks
            .values()
            .filter(|chunk| !chunk.mappings.is_empty());
        Bytes(mapped.count() as u64 * CHUNK.0)
    }

    fn note_highest(&mut self) {
        self.reserved_high = self.reserved_high.max(self.reserved());
        self.used_high = self.used_high.max(self.used());
    }
}

impl Segment {
    const fn size(&self) -> Bytes {
        Bytes(self.mapped.len() as u64 * CHUNK.0)
    }

    fn new(
        device: usize,
        (start, size): (Start, Bytes),
        chunks: Bytes,
        shared: Vec<Place>,
        position: &Position,
    ) -> Self {
        let state = State::New;
        let whole = Piece {
            size: chunks,
            state,
        };
        let mut segment = Self {
            device,
            pieces: BTreeMap::from([(start, whole)]),
            mapped: vec![None; (chunks.0 / CHUNK.0) as usize],
            shared,
        };
        segment.take(size, position);
        segment
    }

    /// The chunks with their own physical memory, or that of the earlier chunks.
    fn places(&self, start: Start) -> impl Iterator<Item = Place> {
        let own = (self.shared.len()..self.mapped.len()).map(move |index| (start, index));
        self.shared.iter().copied().chain(own)
    }

    /// Cuts a piece from the first available run of pieces that is large enough.
    fn take(&mut self, size: Bytes, position: &Position) -> Option<u64> {
        let mut run: Option<(u64, Bytes)> = None;
        for (&start, piece) in &self.pieces {
            run = match run {
                _ if !piece.is_available(position) => None,
                None => Some((start, piece.size)),
                Some((first, len)) => Some((first, len + piece.size)),
            };
            if run.is_some_and(|(_, len)| len >= size) {
                break;
            }
        }
        let (start, _) = run.filter(|(_, len)| *len >= size)?;
        let end = start + size.0;
        let covered: Vec<u64> = self.pieces.range(start..end).map(|(at, _)| *at).collect();
        for at in covered {
            let piece = self.pieces.remove(&at)?;
            let piece_end = at + piece.size.0;
            if piece_end > end {
                let size = Bytes(piece_end - end);
                self.pieces.insert(end, Piece { size, ..piece });
            }
        }
        let state = State::Taken;
        self.pieces.insert(start, Piece { size, state });
        Some(start)
    }
}

impl GraphMemory {
    /// Returns whether a graph or an executable graph allocates or frees memory: then it cannot be
    /// cloned or contained in another one.
    pub(crate) fn is_in(&self, graph: usize) -> bool {
        self.graphs.contains_key(&graph) || self.executables.contains_key(&graph)
    }

    /// The position of a new node after others.
    pub(crate) fn after(&self, node: usize, dependencies: &[usize]) -> Position {
        let before = dependencies
            .iter()
            .filter_map(|other| self.frees.get(other));
        let after = before.flatten().copied().collect();
        Position::Node { node, after }
    }

    /// Notes the order of a node that a graph has got.
    pub(crate) fn add(&mut self, position: Position) {
        if let Position::Node { node, after } = position
            && !after.is_empty()
        {
            self.frees.entry(node).or_default().extend(after);
        }
    }

    /// Refuses to update an executable graph to a graph with other memory, which is not modelled.
    pub(crate) fn allow_update(&self, executable: usize, graph: usize) -> Result<(), Code> {
        let before = self.executables.get(&executable).map(|of| &of.contents);
        let after = self.graphs.get(&graph).map(|of| &of.contents);
        if before == after {
            Ok(())
        } else {
            Err(Code::GraphUpdateFailed)
        }
    }

    /// Allocates for a graph. `reserve` gets addresses of the device.
    pub(crate) fn allocate(
        &mut self,
        graph: usize,
        (device, size): (usize, Bytes),
        position: &Position,
        reserve: impl FnOnce(Bytes) -> Result<u64, Code>,
    ) -> Result<u64, Code> {
        let rounded = |to: Bytes| size.checked_round_up(to).ok_or(Code::OutOfMemory);
        let (size, chunks) = (rounded(ALIGNMENT)?, rounded(CHUNK)?);
        if size == Bytes::ZERO {
            return Err(Code::InvalidValue);
        }
        let known = self.graphs.get(&graph);
        let known = known.into_iter().flat_map(|of| &of.contents.segments);
        let found = known.clone().find_map(|start| {
            let segment = self.segments.get_mut(start)?;
            (segment.device == device).then(|| segment.take(size, position))?
        });
        let start = if let Some(start) = found {
            start
        } else {
            let start = reserve(chunks)?;
            let known: Vec<Start> = known.copied().collect();
            let shared = self.share(&known, (device, size), position);
            let segment = Segment::new(device, (start, size), chunks, shared, position);
            self.segments.insert(start, segment);
            start
        };
        let contents = &mut self.graphs.entry(graph).or_default().contents;
        if found.is_none() {
            contents.segments.insert(start);
        }
        contents.kept.insert(start, size);
        Ok(start)
    }

    /// Gives the chunks of segments that are free before a position to a new segment, as many as
    /// an allocation fills. The addresses of those segments are not used again.
    fn share(
        &mut self,
        known: &[Start],
        (device, size): (usize, Bytes),
        position: &Position,
    ) -> Vec<Place> {
        let most = (size.0 / CHUNK.0) as usize;
        let mut shared = Vec::new();
        for start in known {
            let Some(segment) = self.segments.get_mut(start) else {
                continue;
            };
            let mut pieces = segment.pieces.values();
            if shared.len() < most
                && segment.device == device
                && pieces.all(|piece| piece.is_available(position))
            {
                shared.extend(segment.places(*start));
                let pieces = segment.pieces.values_mut();
                pieces.for_each(|piece| piece.state = State::Taken);
            }
        }
        shared.truncate(most);
        shared
    }

    /// Frees an allocation in a graph: its own, or once what another graph allocates.
    pub(crate) fn free_in(
        &mut self,
        graph: usize,
        address: u64,
        position: Position,
    ) -> Result<(), Code> {
        let of_graph = self.graphs.get(&graph).map(|graph| &graph.contents);
        let is_own = of_graph.is_some_and(|own| own.kept.contains_key(&address));
        let is_kept = self.live.contains(&address)
            || self.contents().any(|of| of.kept.contains_key(&address));
        let is_freed = if is_own {
            self.contents().any(|of| of.freed.contains(&address))
        } else {
            of_graph.is_some_and(|own| own.freed.contains(&address))
        };
        if !is_kept || is_freed {
            return Err(Code::InvalidValue);
        }
        if let Position::Node { node, .. } = &position {
            self.frees.entry(*node).or_default().insert(*node);
        }
        let contents = &mut self.graphs.entry(graph).or_default().contents;
        if is_own {
            contents.kept.remove(&address);
            let around = self.segments.range_mut(..=address).next_back();
            if let Some(piece) = around.and_then(|(_, of)| of.pieces.get_mut(&address)) {
                piece.state = State::Freed(position);
            }
        } else {
            contents.freed.insert(address);
        }
        Ok(())
    }

    fn contents(&self) -> impl Iterator<Item = &Contents> {
        let of_graphs = self.graphs.values().map(|graph| &graph.contents);
        of_graphs.chain(
            self.executables
                .values()
                .map(|executable| &executable.contents),
        )
    }

    /// Instantiates a graph, of which at most one executable graph may exist.
    pub(crate) fn instantiate(
        &mut self,
        graph: usize,
        executable: usize,
        frees_on_launch: bool,
    ) -> Result<(), Code> {
        let Some(of) = self.graphs.get_mut(&graph) else {
            return Ok(());
        };
        if of.executable.is_some() {
            return Err(Code::InvalidValue);
        }
        of.executable = Some(executable);
        let contents = of.contents.clone();
        self.executables.insert(
            executable,
            Executable {
                contents,
                frees_on_launch,
            },
        );
        Ok(())
    }

    /// Refuses a launch that would allocate what is not freed, or free what is not allocated.
    pub(crate) fn allow_launch(&self, executable: usize) -> Result<(), Code> {
        let Some(executable) = self.executables.get(&executable) else {
            return Ok(());
        };
        let contents = &executable.contents;
        let is_live = |address: &u64| self.live.contains(address);
        let keeps = !executable.frees_on_launch && contents.kept.keys().any(is_live);
        if keeps || !contents.freed.iter().all(is_live) {
            return Err(Code::InvalidValue);
        }
        Ok(())
    }

    /// Maps physical memory for a launch. `is_ready` returns whether work ends before the launch.
    /// Without enough unused memory, maps nothing and returns what is missing, by device.
    pub(crate) fn map(
        &mut self,
        executable: usize,
        is_ready: impl Fn(&Work) -> bool,
    ) -> BTreeMap<usize, Bytes> {
        let (mut taken, mut missing) = (BTreeMap::new(), BTreeMap::new());
        let mut numbers = BTreeSet::new();
        let Some(Executable { contents, .. }) = self.executables.get(&executable) else {
            return missing;
        };
        let is_usable = |chunk: &Chunk| {
            chunk
                .live
                .iter()
                .all(|live| contents.kept.contains_key(live))
                && (chunk.user == executable || is_ready(&chunk.until))
        };
        for start in &contents.segments {
            let Some(segment) = self.segments.get(start) else {
                continue;
            };
            let device = segment.device;
            let chunks = &self.physical.entry(device).or_default().chunks;
            let own = segment.mapped.iter().enumerate();
            for (index, mapped) in own.skip(segment.shared.len()) {
                let same = mapped
                    .iter()
                    .filter_map(|number| chunks.get_key_value(number));
                let mut candidates = same.chain(chunks);
                let found = candidates.find(|(number, chunk)| {
                    is_usable(chunk) && !numbers.contains(&(device, **number))
                });
                match found {
                    Some((&number, _)) => {
                        numbers.insert((device, number));
                        taken.insert((*start, index), (device, number));
                    }
                    None => *missing.entry(device).or_default() += CHUNK,
                }
            }
        }
        if missing.is_empty() {
            for start in contents.segments.clone() {
                let segment = self.segments.get(&start);
                let places: Vec<Place> = segment
                    .map(|of| of.places(start).collect())
                    .unwrap_or_default();
                for (index, place) in places.iter().enumerate() {
                    if let Some(&(device, number)) = taken.get(place) {
                        self.map_chunk(device, number, (start, index));
                    }
                }
            }
        }
        missing
    }

    fn map_chunk(&mut self, device: usize, number: u64, (start, index): Place) {
        let physical = self.physical.entry(device).or_default();
        let mapped = self.segments.get_mut(&start);
        let Some(mapped) = mapped.and_then(|segment| segment.mapped.get_mut(index)) else {
            return;
        };
        let before = mapped.replace(number);
        if let Some(chunk) = before.and_then(|before| physical.chunks.get_mut(&before)) {
            chunk.mappings.remove(&(start, index));
        }
        if let Some(chunk) = physical.chunks.get_mut(&number) {
            chunk.mappings.insert((start, index));
        }
        physical.note_highest();
    }

    /// Adds physical memory, of whole chunks.
    pub(crate) fn grow(&mut self, device: usize, by: Bytes) {
        let physical = self.physical.entry(device).or_default();
        for _ in 0..by.0 / CHUNK.0 {
            physical.last += 1;
            physical.chunks.insert(physical.last, Chunk::default());
        }
        physical.note_highest();
    }

    /// Notes a launch, after which `work` must end before other graphs may use its memory.
    pub(crate) fn launched(&mut self, executable: usize, work: &Work) {
        let Some(Executable { contents, .. }) = self.executables.get(&executable) else {
            return;
        };
        let Contents {
            segments,
            kept,
            freed,
        } = contents.clone();
        for address in freed {
            self.release(address, work);
        }
        for start in segments {
            let Some(segment) = self.segments.get(&start) else {
                continue;
            };
            let Some(physical) = self.physical.get_mut(&segment.device) else {
                continue;
            };
            for (at, number) in (start..).step_by(CHUNK.0 as usize).zip(&segment.mapped) {
                let chunk = number.and_then(|number| physical.chunks.get_mut(&number));
                let Some(chunk) = chunk else { continue };
                (chunk.user, chunk.until) = (executable, work.clone());
                let reaches = |(address, size): &(&u64, &Bytes)| **address + size.0 > at;
                let inside = kept.range(..at + CHUNK.0).filter(reaches);
                chunk.live.extend(inside.map(|(address, _)| *address));
            }
        }
        self.live.extend(kept.into_keys());
    }

    /// Ends the lifetime of an allocation, after other work.
    fn release(&mut self, address: u64, work: &Work) {
        self.live.remove(&address);
        let chunks = self
            .physical
            .values_mut()
            .flat_map(|of| of.chunks.values_mut());
        for chunk in chunks {
            if chunk.live.remove(&address) {
                for (stream, number) in work {
                    let until = chunk.until.entry(*stream).or_default();
                    *until = (*until).max(*number);
                }
            }
        }
    }

    /// Frees an allocation outside of a graph, after the work of a stream. `None` if no graph
    /// allocates the address.
    pub(crate) fn free(&mut self, address: u64, work: &Work) -> Option<Result<(), Code>> {
        if self.live.contains(&address) {
            self.release(address, work);
            return Some(Ok(()));
        }
        self.around(address).map(|_| Err(Code::InvalidValue))
    }

    /// Removes the physical memory of a device that nothing uses. Returns its size.
    pub(crate) fn trim(&mut self, device: usize, has_ended: impl Fn(&Work) -> bool) -> Bytes {
        let Some(physical) = self.physical.get_mut(&device) else {
            return Bytes::ZERO;
        };
        let before = physical.reserved();
        let segments = &mut self.segments;
        physical.chunks.retain(|_, chunk| {
            let is_used = !chunk.live.is_empty() || !has_ended(&chunk.until);
            for (start, index) in chunk.mappings.iter().filter(|_| !is_used) {
                if let Some(segment) = segments.get_mut(start) {
                    segment.mapped[*index] = None;
                }
            }
            is_used
        });
        before - physical.reserved()
    }

    /// Destroys a graph with its nodes, or an executable graph.
    pub(crate) fn destroy(&mut self, object: usize, nodes: &[usize]) {
        for node in nodes {
            self.frees.remove(node);
        }
        self.graphs.remove(&object);
        if self.executables.remove(&object).is_some() {
            for graph in self.graphs.values_mut() {
                graph.executable = graph.executable.filter(|of| *of != object);
            }
        }
    }

    /// Removes the addresses without a graph and without a live allocation. Returns them.
    pub(crate) fn take_unused(&mut self) -> Vec<(u64, Bytes)> {
        let of_graphs = self.contents().flat_map(|contents| &contents.segments);
        let known: BTreeSet<Start> = of_graphs.copied().collect();
        let is_unused = |(start, segment): &(&Start, &Segment)| {
            let end = **start + segment.size().0;
            !known.contains(start) && self.live.range(**start..end).next().is_none()
        };
        let unused = self.segments.iter().filter(is_unused);
        let unused: Vec<(u64, Bytes)> = unused.map(|(start, of)| (*start, of.size())).collect();
        for (start, _) in &unused {
            self.segments.remove(start);
        }
        let chunks = self
            .physical
            .values_mut()
            .flat_map(|of| of.chunks.values_mut());
        for chunk in chunks {
            chunk
                .mappings
                .retain(|(start, _)| self.segments.contains_key(start));
        }
        unused
    }

    /// Start and size of the allocation around an address.
    pub(crate) fn around(&self, address: u64) -> Option<(u64, Bytes)> {
        let (_, segment) = self.segments.range(..=address).next_back()?;
        let (start, piece) = segment.pieces.range(..=address).next_back()?;
        let is_around = address - start < piece.size.0 && !matches!(piece.state, State::New);
        is_around.then_some((*start, piece.size))
    }

    pub(crate) fn figure(&self, device: usize, figure: Figure) -> Bytes {
        self.physical
            .get(&device)
            .map_or(Bytes::ZERO, |of| match figure {
                Figure::Used => of.used(),
                Figure::UsedHigh => of.used_high,
                Figure::Reserved => of.reserved(),
                Figure::ReservedHigh => of.reserved_high,
            })
    }

    /// Makes the highest bytes the current ones.
    pub(crate) fn reset_highest(&mut self, device: usize, figure: Figure) -> Result<(), Code> {
        let physical = self.physical.entry(device).or_default();
        match figure {
            Figure::UsedHigh => physical.used_high = physical.used(),
            Figure::ReservedHigh => physical.reserved_high = physical.reserved(),
            Figure::Used | Figure::Reserved => return Err(Code::InvalidValue),
        }
        Ok(())
    }

    /// Forgets the memory of a device.
    pub(crate) fn reset(&mut self, device: usize, is_elsewhere: impl Fn(u64) -> bool) {
        self.segments.retain(|start, _| is_elsewhere(*start));
        self.live.retain(|address| is_elsewhere(*address));
        self.physical.remove(&device);
        let graphs = self.graphs.values_mut().map(|graph| &mut graph.contents);
        let executables = self.executables.values_mut().map(|of| &mut of.contents);
        for contents in graphs.chain(executables) {
            contents.segments.retain(|start| is_elsewhere(*start));
            contents.kept.retain(|address, _| is_elsewhere(*address));
            contents.freed.retain(|address| is_elsewhere(*address));
        }
    }
}

#[cfg(test)]
mod tests;
