//! Captures and graphs, of the runtime and of the driver. A launch is one piece of work. Of the
//! nodes only those that allocate and free memory, or record and wait for events, have effects.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::{Mutex, MutexGuard, Once};
use std::{collections::BTreeMap, ptr, slice};

use harness_allocator::sync::lock;
use harness_allocator::units::Bytes;
use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, again, write};
use harness_gpu_settings::settings::Cuda;

use super::device::device;
use super::graph_memory;
use super::pools::PoolProperties;
use super::streams::{submit, with};
use crate::clock::captures::{Caller, Position, Status, exchange_mode};
use crate::code::{Code, put, remember};
use crate::contents::{capture_begins, launched};
use crate::copied;
use crate::graph_memory::Figure;
use crate::objects::{delete_object, new_object};
use crate::world::{State, current_device, machine};

export! {
    cudaStreamBeginCapture, cuStreamBeginCapture_v2(stream: usize, mode: c_int) =
        remember(begin_capture(stream, mode, None));
    cudaStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph(
        stream: usize, graph: usize, _: *const c_void, _: *const c_void, _: usize, mode: c_int
    ) = remember(begin_capture(stream, mode, Some(graph)));
    cudaStreamEndCapture, cuStreamEndCapture(stream: usize, graph: Out<'_, *mut u8>) =
        remember(end_capture(stream, graph));
    cudaStreamIsCapturing, cuStreamIsCapturing(stream: usize, status: Out<'_, c_int>) =
        remember(self::status(stream).and_then(|(number, _)| put(status, number)));
    /// After `id`, CUDA 13 passes four outputs: graph, dependencies, edges, count. CUDA 12 passes
    /// three, without edges.
    cudaStreamGetCaptureInfo, cuStreamGetCaptureInfo_v3(
        stream: usize, status: Out<'_, c_int>, id: Out<'_, c_ulonglong>, graph: Out<'_, usize>,
        dependencies: Out<'_, usize>, edges: Out<'_, usize>, count: Out<'_, usize>
    ) = remember(capture_info(stream, status, id, [graph, dependencies, edges, count]));
    cudaStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2(
        stream: usize, status: Out<'_, c_int>, id: Out<'_, c_ulonglong>, graph: Out<'_, usize>,
        dependencies: Out<'_, usize>, count: Out<'_, usize>
    ) = remember(capture_info(stream, status, id, [graph, dependencies, None, count]));
    cudaThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode(
        mode: Option<&mut c_int>
    ) = remember(mode.ok_or(Code::InvalidValue).and_then(exchange_mode));
    cudaGraphCreate, cuGraphCreate(graph: Out<'_, *mut u8>, _: c_uint) =
        remember(put(graph, new_object()));
    cudaGraphGetNodes, cuGraphGetNodes(
        graph: usize, nodes: *mut usize, count: Option<&mut usize>
    ) = remember(write_nodes(graph, |_| true, nodes, count));
    cudaGraphGetRootNodes, cuGraphGetRootNodes(
        graph: usize, nodes: *mut usize, count: Option<&mut usize>
    ) = remember(write_nodes(graph, |node| node.is_root, nodes, count));
    // The kinds of nodes are the numbers of `CUgraphNodeType`.
    cudaGraphAddKernelNode, cuGraphAddKernelNode, cuGraphAddKernelNode_v2(
        node: Out<'_, *mut u8>, graph: usize, after: *const usize, count: usize
    ) = remember(add_node(node, (graph, after, count), Node::Other(0)));
    cudaGraphAddMemcpyNode, cudaGraphAddMemcpyNode1D, cuGraphAddMemcpyNode(
        node: Out<'_, *mut u8>, graph: usize, after: *const usize, count: usize
    ) = remember(add_node(node, (graph, after, count), Node::Other(1)));
    cudaGraphAddMemsetNode, cuGraphAddMemsetNode(
        node: Out<'_, *mut u8>, graph: usize, after: *const usize, count: usize
    ) = remember(add_node(node, (graph, after, count), Node::Other(2)));
    cudaGraphAddChildGraphNode, cuGraphAddChildGraphNode(
        node: Out<'_, *mut u8>, graph: usize, after: *const usize, count: usize, child: usize
    ) = remember(add_node(node, (graph, after, count), Node::Child(child)));
    cudaGraphAddEmptyNode, cuGraphAddEmptyNode(
        node: Out<'_, *mut u8>, graph: usize, after: *const usize, count: usize
    ) = remember(add_node(node, (graph, after, count), Node::Other(5)));
    cudaGraphAddMemAllocNode, cuGraphAddMemAllocNode(
        node: Out<'_, *mut u8>, graph: usize, after: *const usize, count: usize,
        parameters: Option<&mut Allocation>
    ) = remember(parameters.ok_or(Code::InvalidValue).and_then(|parameters| {
        add_node(node, (graph, after, count), Node::Allocate(parameters))
    }));
    cudaGraphAddMemFreeNode, cuGraphAddMemFreeNode(
        node: Out<'_, *mut u8>, graph: usize, after: *const usize, count: usize, address: usize
    ) = remember(add_node(node, (graph, after, count), Node::Free(address)));
    cudaGraphAddEventWaitNode, cuGraphAddEventWaitNode(
        node: Out<'_, *mut u8>, graph: usize, after: *const usize, count: usize, event: usize
    ) = remember(add_node(node, (graph, after, count), Node::Event(WAIT_EVENT, event)));
    cudaGraphAddEventRecordNode, cuGraphAddEventRecordNode(
        node: Out<'_, *mut u8>, graph: usize, after: *const usize, count: usize, event: usize
    ) = remember(add_node(node, (graph, after, count), Node::Event(RECORD_EVENT, event)));
    cudaGraphMemAllocNodeGetParams, cuGraphMemAllocNodeGetParams(
        node: Option<&NodeObject>, parameters: Out<'_, Allocation>
    ) = remember(parameters_of(node, ALLOCATE).and_then(|of| put(parameters, of)));
    cudaGraphMemFreeNodeGetParams, cuGraphMemFreeNodeGetParams(
        node: Option<&NodeObject>, address: Out<'_, usize>
    ) = remember(parameters_of(node, FREE).and_then(|of| put(address, of.address)));
    cudaGraphNodeGetType, cuGraphNodeGetType(node: Option<&c_int>, kind: Out<'_, c_int>) =
        remember(node.ok_or(Code::InvalidValue).and_then(|of| put(kind, *of)));
    cuGraphAddNode(
        node: Out<'_, *mut u8>, graph: usize, after: *const usize, count: usize,
        parameters: *mut NodeParameters
    ) = remember(add_described(node, (graph, after, count), parameters));
    cuGraphAddNode_v2, cudaGraphAddNode_v2(
        node: Out<'_, *mut u8>, graph: usize, after: *const usize, _: *const c_void, count: usize,
        parameters: *mut NodeParameters
    ) = remember(add_described(node, (graph, after, count), parameters));
    /// Before CUDA 13, without the edges after the dependencies.
    cudaGraphAddNode(
        node: Out<'_, *mut u8>, graph: usize, after: *const usize, third: usize, fourth: usize,
        fifth: usize
    ) = {
        let (count, parameters) = match machine().settings.cuda {
            Cuda::V12 => (third, fourth),
            Cuda::V13 => (fourth, fifth),
        };
        let parameters = ptr::with_exposed_provenance_mut(parameters);
        remember(add_described(node, (graph, after, count), parameters))
    };
    cudaGraphClone, cuGraphClone(clone: Out<'_, *mut u8>, graph: usize) =
        remember(without_memory(graph).and_then(|()| put(clone, new_object())));
    cudaGraphInstantiate, cudaGraphInstantiateWithFlags, cuGraphInstantiateWithFlags(
        executable: Out<'_, *mut u8>, graph: usize, flags: c_ulonglong
    ) = remember(instantiate(executable, graph, flags).map(drop));
    cudaGraphInstantiateWithParams, cuGraphInstantiateWithParams(
        executable: Out<'_, *mut u8>, graph: usize, parameters: Option<&mut InstantiateParameters>
    ) = remember(parameters.ok_or(Code::InvalidValue).and_then(|parameters| {
        (parameters.failed_node, parameters.result) = (0, 0);
        let instantiated = instantiate(executable, graph, parameters.flags);
        // `cudaGraphInstantiateError` says only that the returned error has the reason.
        parameters.result = instantiated.is_err().into();
        let upload = |executable| {
            if parameters.flags & UPLOAD == 0 {
                Ok(())
            } else {
                graph_memory::upload(executable, parameters.stream)
            }
        };
        instantiated.and_then(upload)
    }));
    cudaGraphExecUpdate, cuGraphExecUpdate_v2(
        executable: usize, graph: usize, result: Out<'_, UpdateResult>
    ) = {
        let updated = machine().state().graph_memory.allow_update(executable, graph);
        if updated.is_ok() {
            events().insert(executable, events_of(graph));
        }
        let kind = updated.map_or(UPDATE_NOT_SUPPORTED, |()| 0);
        write(result, UpdateResult { kind, nodes: [0; 2] });
        remember(updated)
    };
    cudaGraphUpload, cuGraphUpload(executable: usize, stream: usize) =
        remember(graph_memory::upload(executable, stream));
    cudaDeviceGraphMemTrim, cuDeviceGraphMemTrim(index: c_int) = with(|machine, state| {
        device(index).and_then(|_| graph_memory::trim(machine, state, index as usize))
    });
    cudaDeviceGetGraphMemAttribute, cuDeviceGetGraphMemAttribute(
        index: c_int, attribute: c_int, value: Out<'_, u64>
    ) = with(|_, state| {
        device(index)?;
        put(value, state.graph_memory.figure(index as usize, Figure::of(attribute)?).0)
    });
    /// The highest bytes can only be set to zero, which makes them the current ones.
    cudaDeviceSetGraphMemAttribute, cuDeviceSetGraphMemAttribute(
        index: c_int, attribute: c_int, value: Option<&u64>
    ) = with(|_, state| {
        device(index)?;
        value.filter(|value| **value == 0).ok_or(Code::InvalidValue)?;
        state.graph_memory.reset_highest(index as usize, Figure::of(attribute)?)
    });
    cudaGraphLaunch, cuGraphLaunch(executable: usize, stream: usize) =
        remember(launch(executable, stream));
    cudaGraphDestroy, cuGraphDestroy, cudaGraphExecDestroy, cuGraphExecDestroy(object: usize) =
        remember(destroy(object));
}

/// Destroys a graph with its nodes, or an executable graph.
fn destroy(object: usize) -> Result<(), Code> {
    let bodies = bodies().remove(&object).unwrap_or_default();
    for body in bodies.into_iter().flatten() {
        destroy(body)?;
    }
    events().remove(&object);
    let nodes = nodes().remove(&object).unwrap_or_default();
    let destroyed = graph_memory::destroy(object, &nodes);
    for object in nodes.into_iter().chain([object]) {
        // SAFETY: a function here created the graph, its nodes or the executable graph. The
        // program destroys a graph once, and nodes are only in the list of theirs.
        unsafe { delete_object(ptr::with_exposed_provenance_mut(object)) };
    }
    destroyed
}

/// Destroys the graphs of captures that failed.
fn destroy_failed() -> Result<(), Code> {
    let failed = machine().state().streams.take_failed();
    failed.into_iter().try_for_each(destroy)
}

/// `CUgraphExecUpdateResultInfo`.
#[repr(C)]
pub(crate) struct UpdateResult {
    kind: c_int,
    nodes: [usize; 2],
}

/// `CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED`.
const UPDATE_NOT_SUPPORTED: c_int = 6;

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`, with the outputs at its end.
#[repr(C)]
pub(crate) struct InstantiateParameters {
    flags: u64,
    stream: usize,
    failed_node: usize,
    result: c_int,
}

/// The nodes of each graph. They are destroyed with it.
static NODES: Mutex<BTreeMap<usize, Vec<usize>>> = Mutex::new(BTreeMap::new());

fn nodes() -> MutexGuard<'static, BTreeMap<usize, Vec<usize>>> {
    lock(&NODES)
}

/// The bodies of the conditional nodes of each graph, an array for each node, which the program
/// reads until the graph is destroyed.
static BODIES: Mutex<BTreeMap<usize, Vec<Box<[usize]>>>> = Mutex::new(BTreeMap::new());

fn bodies() -> MutexGuard<'static, BTreeMap<usize, Vec<Box<[usize]>>>> {
    lock(&BODIES)
}

/// A node that waits for an event or records it: its kind, the event, and whether it comes after no
/// other node.
#[derive(Clone, Copy)]
struct EventNode {
    kind: c_int,
    event: usize,
    is_root: bool,
}

/// The nodes with events of each executable graph.
static EVENTS: Mutex<BTreeMap<usize, Vec<EventNode>>> = Mutex::new(BTreeMap::new());

fn events() -> MutexGuard<'static, BTreeMap<usize, Vec<EventNode>>> {
    lock(&EVENTS)
}

fn events_of(graph: usize) -> Vec<EventNode> {
    let all = nodes();
    let objects = all.get(&graph).into_iter().flatten();
    objects
        // SAFETY: nodes live as long as their graph, and their objects have this start.
        .map(|node| unsafe { &*ptr::with_exposed_provenance::<NodeObject>(*node) })
        .filter(|node| matches!(node.kind, WAIT_EVENT | RECORD_EVENT))
        .map(|node| EventNode {
            kind: node.kind,
            event: node.parameters.address,
            is_root: node.is_root,
        })
        .collect()
}

/// Launches an executable graph. Its nodes with events that come after no other act before its
/// work, the others after it.
fn launch(executable: usize, stream: usize) -> Result<(), Code> {
    let machine = machine();
    let events = events().get(&executable).cloned().unwrap_or_default();
    let is_captured = status(stream)?.0 != 0;
    let act = |is_root| {
        let nodes = events.iter().filter(|node| node.is_root == is_root);
        nodes.filter(|_| !is_captured).try_for_each(|node| {
            let (streams, current) = (&mut machine.state().streams, current_device());
            if node.kind == WAIT_EVENT {
                return streams.wait_in_stream(stream, current, node.event, 0);
            }
            let now = (machine.tick(), machine.late_by());
            streams.record(node.event, stream, current, 0, now)
        })
    };
    act(true)?;
    machine.tick();
    launched();
    if copied::any() {
        machine.state().copied.forget_all(); // The kernels of the graph may write anywhere.
    }
    if submit(stream)? {
        // It becomes a child graph.
        without_memory(executable)?;
    } else {
        graph_memory::launch(executable, stream)?;
    }
    act(false)
}

/// Begins a capture into a new graph or one of the program.
fn begin_capture(stream: usize, mode: c_int, graph: Option<usize>) -> Result<(), Code> {
    capture_begins();
    destroy_failed()?;
    let (current, caller) = (current_device(), Caller::current());
    let streams = &mut machine().state().streams;
    streams.begin_capture(stream, current, mode, caller)?;
    let to = graph.unwrap_or_else(|| new_object().expose_provenance());
    streams.capture_to(stream, current, to, graph.is_none());
    Ok(())
}

/// Ends a capture. The graph of a failed one is null.
fn end_capture(stream: usize, mut graph: Out<'_, *mut u8>) -> Result<(), Code> {
    put(again(&mut graph), ptr::null_mut())?;
    let ended = machine()
        .state()
        .streams
        .end_capture(stream, current_device(), Caller::current());
    destroy_failed()?;
    put(
        graph,
        ended?.map_or_else(new_object, ptr::with_exposed_provenance_mut),
    )
}

/// The number of `cudaStreamCaptureStatus`, and the number of the capture.
fn status(stream: usize) -> Result<(c_int, u64), Code> {
    Ok(
        match machine()
            .state()
            .streams
            .capture_status(stream, current_device())?
        {
            Status::None => (0, 0),
            Status::Active(id) => (1, id),
            Status::Invalidated(id) => (2, id),
        },
    )
}

fn capture_info(
    stream: usize,
    status: Out<'_, c_int>,
    id: Out<'_, c_ulonglong>,
    outputs: [Out<'_, usize>; 4],
) -> Result<(), Code> {
    let (number, capture) = self::status(stream)?;
    write(status, number);
    write(id, capture);
    let [graph, dependencies, edges, count] = outputs;
    write(
        graph,
        machine().state().streams.graph_of(capture).unwrap_or(0),
    );
    for output in [dependencies, edges, count] {
        write(output, 0);
    }
    Ok(())
}

/// Kinds of nodes. The bodies of conditional ones never run: no kernel sets their condition.
const CHILD: c_int = 4;
const WAIT_EVENT: c_int = 6;
const RECORD_EVENT: c_int = 7;
const ALLOCATE: c_int = 10;
const FREE: c_int = 11;
const CONDITIONAL: c_int = 13;

/// `CUDA_MEM_ALLOC_NODE_PARAMS`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Allocation {
    properties: PoolProperties,
    access: *const c_void,
    access_count: usize,
    size: usize,
    address: usize,
}

/// `CUgraphNodeParams`. A program may pass the kind alone for nodes without effects.
#[repr(C)]
pub(crate) struct NodeParameters {
    kind: c_int,
    reserved: [c_int; 3],
    of: OfKind,
}

#[repr(C)]
union OfKind {
    allocation: Allocation,
    /// The address to free, or the event.
    word: usize,
    child: Child,
    conditional: Conditional,
}

/// `CUDA_CONDITIONAL_NODE_PARAMS`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Conditional {
    handle: u64,
    kind: c_int,
    size: c_uint,
    /// The output: an array of this size.
    bodies: *const usize,
}

/// `CUgraphConditionalNodeType`.
const IF: c_int = 0;
const WHILE: c_int = 1;
const SWITCH: c_int = 2;

#[derive(Clone, Copy)]
#[repr(C)]
struct Child {
    graph: usize,
    /// `CUgraphChildGraphNodeOwnership`.
    ownership: c_int,
}

/// `CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE`.
const MOVE: c_int = 1;

/// Lists that a program moves a graph into another one, which has no model.
fn note_move() {
    static LISTED: Once = Once::new();
    LISTED.call_once(|| {
        let counters = &machine().counters;
        counters.note_unmodelled(b"cudaGraphChildGraphOwnershipMove");
    });
}

/// The start of the object of a node.
#[repr(C)]
pub(crate) struct NodeObject {
    kind: c_int,
    /// It comes after no other node.
    is_root: bool,
    parameters: Allocation,
}

/// A node to add.
enum Node<'a> {
    Allocate(&'a mut Allocation),
    Free(usize),
    Child(usize),
    /// A node that waits for an event or records it, by its kind.
    Event(c_int, usize),
    /// A node that does nothing, by its kind.
    Other(c_int),
}

/// The parameters of a node of this kind.
fn parameters_of(node: Option<&NodeObject>, kind: c_int) -> Result<Allocation, Code> {
    let of_kind = node.filter(|node| node.kind == kind);
    of_kind
        .map(|node| node.parameters)
        .ok_or(Code::InvalidValue)
}

/// Adds a node that the program describes.
fn add_described(
    node: Out<'_, *mut u8>,
    place: (usize, *const usize, usize),
    parameters: *mut NodeParameters,
) -> Result<(), Code> {
    if parameters.is_null() {
        return Err(Code::InvalidValue);
    }
    // SAFETY: the program passes parameters, whose kind says which fields they have.
    let described = unsafe {
        match (&raw const (*parameters).kind).read() {
            CONDITIONAL => return add_conditional(node, place, &mut (*parameters).of.conditional),
            ALLOCATE => Node::Allocate(&mut (*parameters).of.allocation),
            FREE => Node::Free((*parameters).of.word),
            kind @ (WAIT_EVENT | RECORD_EVENT) => Node::Event(kind, (*parameters).of.word),
            CHILD if (*parameters).of.child.ownership == MOVE => {
                note_move();
                return Err(Code::NotSupported);
            }
            CHILD => Node::Child((*parameters).of.child.graph),
            kind => Node::Other(kind),
        }
    };
    add_node(node, place, described)
}

/// Adds a node with empty graphs as bodies: one, or two for an if with an else, or as many as a
/// switch has cases.
fn add_conditional(
    node: Out<'_, *mut u8>,
    place: (usize, *const usize, usize),
    parameters: &mut Conditional,
) -> Result<(), Code> {
    match (parameters.kind, parameters.size) {
        (IF, 1 | 2) | (WHILE, 1) | (SWITCH, 1..) => {}
        _ => return Err(Code::InvalidValue),
    }
    add_node(node, place, Node::Other(CONDITIONAL))?;
    let graphs: Box<[usize]> = (0..parameters.size)
        .map(|_| new_object().expose_provenance())
        .collect();
    parameters.bodies = graphs.as_ptr();
    bodies().entry(place.0).or_default().push(graphs);
    Ok(())
}

/// Adds a node after others to a graph. The kind is at the start of its object.
fn add_node(
    place: Out<'_, *mut u8>,
    (graph, after, count): (usize, *const usize, usize),
    node: Node<'_>,
) -> Result<(), Code> {
    let after = if after.is_null() || count == 0 {
        &[]
    } else {
        // SAFETY: the program passes an array of this length.
        unsafe { slice::from_raw_parts(after, count) }
    };
    let place = place.ok_or(Code::InvalidValue)?;
    let object = new_object();
    let added = describe(object.expose_provenance(), graph, after, node);
    let Ok(description) = added else {
        // SAFETY: only this call has the object.
        unsafe { delete_object(object) };
        return added.map(drop);
    };
    // SAFETY: objects are larger and aligned to 16 bytes, and only this call has this one.
    unsafe { object.cast::<NodeObject>().write(description) };
    nodes()
        .entry(graph)
        .or_default()
        .push(object.expose_provenance());
    place.write(object);
    Ok(())
}

/// Applies the effects of a new node. Returns what its object contains.
fn describe(
    object: usize,
    graph: usize,
    after: &[usize],
    node: Node<'_>,
) -> Result<NodeObject, Code> {
    let state = &mut *machine().state();
    let position = state.graph_memory.after(object, after);
    let mut parameters = Allocation::NONE;
    let kind = match node {
        Node::Allocate(wanted) => {
            wanted.address = allocate(state, graph, wanted, &position)? as usize;
            parameters = Allocation {
                access: ptr::null(),
                access_count: 0,
                ..*wanted
            };
            ALLOCATE
        }
        Node::Free(address) => {
            let graphs = &mut state.graph_memory;
            graphs.free_in(graph, address as u64, position.clone())?;
            parameters.address = address;
            FREE
        }
        Node::Child(child) if state.graph_memory.is_in(child) => return Err(Code::InvalidValue),
        Node::Child(_) => CHILD,
        Node::Event(kind, event) => {
            state.streams.pending_since(event)?; // It exists.
            parameters.address = event;
            kind
        }
        Node::Other(kind) => kind,
    };
    state.graph_memory.add(position);
    let is_root = after.is_empty();
    Ok(NodeObject {
        kind,
        is_root,
        parameters,
    })
}

impl Allocation {
    const NONE: Self = Self {
        properties: PoolProperties::NONE,
        access: ptr::null(),
        access_count: 0,
        size: 0,
        address: 0,
    };
}

/// Allocates pinned memory (kind 1) of a device (location kind 1), which other processes cannot
/// open.
fn allocate(
    state: &mut State,
    graph: usize,
    wanted: &Allocation,
    position: &Position,
) -> Result<u64, Code> {
    let of = &wanted.properties;
    if of.kind != 1 || of.handle_types != 0 {
        return Err(Code::InvalidValue);
    }
    if of.location_kind != 1 {
        return Err(Code::NotSupported);
    }
    device(of.location)?;
    let request = (of.location as usize, Bytes(wanted.size as u64));
    graph_memory::allocate(state, graph, request, position)
}

fn without_memory(graph: usize) -> Result<(), Code> {
    if machine().state().graph_memory.is_in(graph) {
        Err(Code::InvalidValue)
    } else {
        Ok(())
    }
}

/// Flags of an instantiation.
const AUTO_FREE_ON_LAUNCH: u64 = 1;
const UPLOAD: u64 = 2;
const DEVICE_LAUNCH: u64 = 4;

/// Instantiates a graph. Returns the executable graph.
fn instantiate(place: Out<'_, *mut u8>, graph: usize, flags: u64) -> Result<usize, Code> {
    let place = place.ok_or(Code::InvalidValue)?;
    let frees = flags & AUTO_FREE_ON_LAUNCH != 0;
    if frees && flags & DEVICE_LAUNCH != 0 {
        return Err(Code::InvalidValue);
    }
    let object = new_object();
    let executable = object.expose_provenance();
    let instantiated = machine()
        .state()
        .graph_memory
        .instantiate(graph, executable, frees);
    if instantiated.is_err() {
        // SAFETY: only this call has the object.
        unsafe { delete_object(object) };
    } else {
        events().insert(executable, events_of(graph));
        place.write(object);
    }
    instantiated.map(|()| executable)
}

/// Writes nodes of a graph up to the given count, then zeros. Without an array, writes the number.
/// Captured work is one node, whose handle is that of the graph, because programs treat an empty
/// graph as an error.
fn write_nodes(
    graph: usize,
    is_wanted: impl Fn(&NodeObject) -> bool,
    places: *mut usize,
    count: Option<&mut usize>,
) -> Result<(), Code> {
    let count = count.ok_or(Code::InvalidValue)?;
    let added = nodes().get(&graph).cloned().unwrap_or_default();
    let is_wanted = |node: &usize| {
        // SAFETY: nodes live as long as their graph, and their objects have this start.
        is_wanted(unsafe { &*ptr::with_exposed_provenance::<NodeObject>(*node) })
    };
    let captured = added.is_empty().then_some(graph);
    let wanted: Vec<usize> = captured
        .into_iter()
        .chain(added.into_iter().filter(is_wanted))
        .collect();
    if !places.is_null() {
        for index in 0..*count {
            let node = wanted.get(index).copied().unwrap_or(0);
            // SAFETY: the program passes an array of this length.
            unsafe { places.add(index).write(node) };
        }
    }
    if places.is_null() || *count > wanted.len() {
        *count = wanted.len();
    }
    Ok(())
}
