//! Memory of graphs: captured calls, nodes, launches and trims.

use std::mem;

use harness_allocator::units::Bytes;
use harness_gpu_settings::calls::Call;

use crate::clock::captures::Position;
use crate::code::Code;
use crate::memory::device_of;
use crate::world::{Machine, State, current_device, machine};

/// Returns unused memory of graphs. Work of which the host has not waited may use it.
pub(super) fn trim(machine: &Machine, state: &mut State, index: usize) -> Result<(), Code> {
    let State {
        graph_memory,
        streams,
        ..
    } = state;
    let size = graph_memory.trim(index, |work| streams.has_ended(work));
    state.release(index, |memory| {
        memory.sim().release_page(size);
        Ok(())
    })?;
    let used = state.devices[index].used();
    machine.counters.count_frees(index, used, 0);
    Ok(())
}

/// Allocates for a graph, with addresses of a device.
pub(super) fn allocate(
    state: &mut State,
    graph: usize,
    (device, size): (usize, Bytes),
    position: &Position,
) -> Result<u64, Code> {
    let mut graphs = mem::take(&mut state.graph_memory);
    let start = graphs.allocate(graph, (device, size), position, |size| {
        state.on_device(device, |memory| memory.reserve(size))
    });
    state.graph_memory = graphs;
    start
}

/// Allocates in the capture of a stream.
pub(super) fn allocate_captured(
    state: &mut State,
    stream: usize,
    request: (usize, Bytes),
) -> Result<u64, Code> {
    let (graph, position) = position(state, stream)?;
    allocate(state, graph, request, &position)
}

fn position(state: &State, stream: usize) -> Result<(usize, Position), Code> {
    let position = state.streams.position(stream, current_device());
    position.ok_or(Code::IllegalState)
}

/// Frees memory of a graph in the capture of a stream.
pub(super) fn free_captured(address: u64, stream: usize) -> Result<(), Code> {
    let state = &mut *machine().state();
    let (graph, position) = position(state, stream)?;
    state.graph_memory.free_in(graph, address, position)
}

/// Frees memory of a graph that is live, after the work of a stream if there is one. `None` if no
/// graph allocates the address.
pub(super) fn free(
    machine: &Machine,
    state: &mut State,
    address: u64,
    stream: Option<usize>,
) -> Option<Result<(), Code>> {
    let work = stream.map(|stream| state.streams.submitted_by(stream, current_device()));
    let (_, size) = state.graph_memory.around(address)?;
    let freed = state
        .graph_memory
        .free(address, &work.unwrap_or_default())?;
    if let (Ok(()), Some(index)) = (freed, device_of(address)) {
        let used = state.devices[index].used();
        machine.counters.count_frees(index, used, 1);
        state.note_free(machine, index);
        state.copied.forget(address, size.0);
    }
    Some(freed.and_then(|()| release_unused(state)))
}

fn release_unused(state: &mut State) -> Result<(), Code> {
    for (start, size) in state.graph_memory.take_unused() {
        state.device_at(start)?.unreserve(start, size)?;
    }
    Ok(())
}

/// Destroys a graph with its nodes, or an executable graph. Memory that is live stays.
pub(super) fn destroy(object: usize, nodes: &[usize]) -> Result<(), Code> {
    let state = &mut *machine().state();
    state.graph_memory.destroy(object, nodes);
    release_unused(state)
}

/// Gets the physical memory of an executable graph.
pub(super) fn upload(executable: usize, stream: usize) -> Result<(), Code> {
    let machine = machine();
    loop {
        let missing = {
            let State {
                graph_memory,
                streams,
                ..
            } = &mut *machine.state();
            let current = current_device();
            graph_memory.map(executable, |work| {
                streams.ends_before_next(work, stream, current)
            })
        };
        if missing.is_empty() {
            return Ok(());
        }
        machine.delay(Call::GraphLaunch);
        let state = &mut *machine.state();
        for (device, size) in missing {
            state.request(machine, (Call::GraphLaunch, size), device, |memory| {
                memory.sim().create_page(size)?;
                Ok(0)
            })?;
            machine.counters.count_graph_request();
            state.graph_memory.grow(device, size);
        }
    }
}

/// Launches an executable graph, whose work the stream has got.
pub(super) fn launch(executable: usize, stream: usize) -> Result<(), Code> {
    machine().state().graph_memory.allow_launch(executable)?;
    upload(executable, stream)?;
    let State {
        graph_memory,
        streams,
        ..
    } = &mut *machine().state();
    let work = streams.submitted_by(stream, current_device());
    graph_memory.launched(executable, &work);
    Ok(())
}
