//! Captures and graphs, of the runtime and of the driver. Graphs are opaque and empty; a launch is
//! one piece of work.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{collections::BTreeMap, ptr};

use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, again, write};

use super::streams::submit;
use crate::clock::captures::{Caller, Status, exchange_mode};
use crate::code::{Code, put, remember};
use crate::contents::{capture_begins, launched};
use crate::copied;
use crate::objects::{delete_object, new_object};
use crate::world::{current_device, machine};

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
    cudaGraphGetNodes, cuGraphGetNodes, cudaGraphGetRootNodes, cuGraphGetRootNodes(
        graph: usize, nodes: Out<'_, usize>, count: Option<&mut usize>
    ) = remember(one_node(graph, nodes, count));
    // The kinds of nodes are the numbers of `CUgraphNodeType`.
    cuGraphAddKernelNode, cuGraphAddKernelNode_v2(node: Out<'_, *mut u8>, graph: usize) =
        remember(add_node(node, graph, Some(&0)));
    cuGraphAddMemcpyNode(node: Out<'_, *mut u8>, graph: usize) =
        remember(add_node(node, graph, Some(&1)));
    cuGraphAddMemsetNode(node: Out<'_, *mut u8>, graph: usize) =
        remember(add_node(node, graph, Some(&2)));
    cuGraphAddChildGraphNode(node: Out<'_, *mut u8>, graph: usize) =
        remember(add_node(node, graph, Some(&4)));
    cuGraphAddEmptyNode(node: Out<'_, *mut u8>, graph: usize) =
        remember(add_node(node, graph, Some(&5)));
    cuGraphNodeGetType(node: Option<&c_int>, kind: Out<'_, c_int>) =
        remember(node.ok_or(Code::InvalidValue).and_then(|of| put(kind, *of)));
    cuGraphAddNode(
        node: Out<'_, *mut u8>, graph: usize, _: *const c_void, _: usize, kind: Option<&c_int>
    ) = remember(add_node(node, graph, kind));
    cuGraphAddNode_v2(
        node: Out<'_, *mut u8>, graph: usize, _: *const c_void, _: *const c_void, _: usize,
        kind: Option<&c_int>
    ) = remember(add_node(node, graph, kind));
    cudaGraphInstantiate, cudaGraphInstantiateWithFlags, cuGraphInstantiateWithFlags(
        executable: Out<'_, *mut u8>, _: usize, _: c_ulonglong
    ) = remember(put(executable, new_object()));
    cudaGraphInstantiateWithParams, cuGraphInstantiateWithParams(
        executable: Out<'_, *mut u8>, _: usize, parameters: Option<&mut InstantiateParameters>
    ) = remember(parameters.ok_or(Code::InvalidValue).and_then(|parameters| {
        (parameters.failed_node, parameters.result) = (0, 0);
        put(executable, new_object())
    }));
    cudaGraphLaunch, cuGraphLaunch(_: usize, stream: usize) = {
        let machine = machine();
        machine.tick();
        launched();
        if copied::any() {
            machine.state().copied.forget_all(); // The kernels of the graph may write anywhere.
        }
        remember(submit(stream).map(drop))
    };
    cudaGraphDestroy, cuGraphDestroy, cudaGraphExecDestroy, cuGraphExecDestroy(object: usize) = {
        for object in nodes().remove(&object).unwrap_or_default().into_iter().chain([object]) {
            // SAFETY: a function here created the graph, its nodes or the executable graph. The
            // program destroys a graph once, and nodes are only in the list of theirs.
            unsafe { delete_object(ptr::with_exposed_provenance_mut(object)) };
        }
        0
    };
}

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
    NODES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins a capture into a new graph or one of the program.
fn begin_capture(stream: usize, mode: c_int, graph: Option<usize>) -> Result<(), Code> {
    capture_begins();
    let (current, caller) = (current_device(), Caller::current());
    let streams = &mut machine().state().streams;
    streams.begin_capture(stream, current, mode, caller)?;
    let graph = graph.unwrap_or_else(|| new_object().expose_provenance());
    streams.capture_to(stream, current, graph);
    Ok(())
}

/// Ends a capture. The graph of a failed one is null.
fn end_capture(stream: usize, mut graph: Out<'_, *mut u8>) -> Result<(), Code> {
    put(again(&mut graph), ptr::null_mut())?;
    let given =
        machine()
            .state()
            .streams
            .end_capture(stream, current_device(), Caller::current())?;
    put(
        graph,
        given.map_or_else(new_object, ptr::with_exposed_provenance_mut),
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

/// The kinds of nodes that allocate and free memory, at the start of a node's parameters, and that
/// contain other graphs, which a program reads from the parameters.
const UNSUPPORTED_NODES: [c_int; 3] = [10, 11, 13];

/// Adds a node that does nothing, with its kind at its start. No node allocates memory.
fn add_node(node: Out<'_, *mut u8>, graph: usize, kind: Option<&c_int>) -> Result<(), Code> {
    match kind {
        None => Err(Code::InvalidValue),
        Some(kind) if UNSUPPORTED_NODES.contains(kind) => Err(Code::NotSupported),
        Some(kind) => {
            let object = new_object();
            // SAFETY: objects are larger and aligned to 16 bytes, and nobody else has this one yet.
            unsafe { object.cast::<c_int>().write(*kind) };
            nodes()
                .entry(graph)
                .or_default()
                .push(object.expose_provenance());
            put(node, object)
        }
    }
}

/// Returns one node, because programs treat an empty graph as an error.
fn one_node(graph: usize, nodes: Out<'_, usize>, count: Option<&mut usize>) -> Result<(), Code> {
    let count = count.ok_or(Code::InvalidValue)?;
    if *count > 0 {
        write(nodes, graph);
    }
    *count = 1;
    Ok(())
}
