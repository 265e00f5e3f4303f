//! Captures and graphs, of the runtime and of the driver. Graphs are opaque and empty; a launch is one piece of work.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::{cell::Cell, ptr};

use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, write};

use crate::code::{Code, put, remember};
use crate::contents::{capture_begins, launched};
use crate::copied;
use crate::unmodelled::{delete_object, new_object};
use crate::world::{current_device, machine};

thread_local! {
    static CAPTURE_MODE: Cell<c_int> = const { Cell::new(0) };
}

export! {
    cudaStreamBeginCapture, cuStreamBeginCapture_v2(stream: usize, _: c_int) = {
        capture_begins();
        remember(machine().state().streams.begin_capture(stream, current_device()))
    };
    cudaStreamBeginCaptureToGraph(stream: usize, _: usize, _: *const c_void, _: *const c_void, _: usize, mode: c_int) =
        cudaStreamBeginCapture(stream, mode);
    cudaStreamEndCapture, cuStreamEndCapture(stream: usize, graph: Out<'_, *mut u8>) = remember(end_capture(stream, graph));
    cudaStreamIsCapturing, cuStreamIsCapturing(stream: usize, status: Out<'_, c_int>) =
        remember(capture(stream).and_then(|capture| put(status, c_int::from(capture.is_some()))));
    /// After `id`, CUDA 13 passes four outputs: graph, dependencies, edges, count. CUDA 12 passes three, without edges.
    cudaStreamGetCaptureInfo, cuStreamGetCaptureInfo_v3(
        stream: usize, status: Out<'_, c_int>, id: Out<'_, c_ulonglong>, graph: Out<'_, usize>, dependencies: Out<'_, usize>, edges: Out<'_, usize>,
        count: Out<'_, usize>
    ) = remember(capture_info(stream, status, id, [graph, dependencies, edges, count]));
    cudaStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2(
        stream: usize, status: Out<'_, c_int>, id: Out<'_, c_ulonglong>, graph: Out<'_, usize>, dependencies: Out<'_, usize>, count: Out<'_, usize>
    ) = remember(capture_info(stream, status, id, [graph, dependencies, None, count]));
    cudaThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode(mode: Option<&mut c_int>) =
        remember(mode.map(|mode| *mode = CAPTURE_MODE.replace(*mode)).ok_or(Code::InvalidValue));
    cudaGraphCreate, cuGraphCreate(graph: Out<'_, *mut u8>, _: c_uint) = remember(put(graph, new_object()));
    cudaGraphGetNodes, cuGraphGetNodes(graph: usize, nodes: Out<'_, usize>, count: Option<&mut usize>) = remember(one_node(graph, nodes, count));
    cudaGraphInstantiate, cudaGraphInstantiateWithFlags, cuGraphInstantiateWithFlags(executable: Out<'_, *mut u8>, _: usize, _: c_ulonglong) =
        remember(put(executable, new_object()));
    cudaGraphLaunch, cuGraphLaunch(_: usize, _: usize) = {
        let machine = machine();
        machine.tick();
        launched();
        if copied::any() {
            machine.state().copied.forget_all(); // The kernels of the graph may write anywhere.
        }
        0
    };
    cudaGraphDestroy, cuGraphDestroy, cudaGraphExecDestroy, cuGraphExecDestroy(object: usize) = {
        // SAFETY: a function here created the graph or executable graph, and the program destroys it once.
        unsafe { delete_object(ptr::with_exposed_provenance_mut(object)) };
        0
    };
}

fn end_capture(stream: usize, graph: Out<'_, *mut u8>) -> Result<(), Code> {
    machine().state().streams.stream(stream, current_device())?.capture.take().ok_or(Code::InvalidValue)?;
    put(graph, new_object())
}

/// The number of a stream's active capture.
fn capture(stream: usize) -> Result<Option<u64>, Code> {
    machine().state().streams.stream(stream, current_device()).map(|stream| stream.capture)
}

fn capture_info(stream: usize, status: Out<'_, c_int>, id: Out<'_, c_ulonglong>, outputs: [Out<'_, usize>; 4]) -> Result<(), Code> {
    let capture = capture(stream)?;
    write(status, c_int::from(capture.is_some()));
    write(id, capture.unwrap_or(0));
    for output in outputs {
        write(output, 0);
    }
    Ok(())
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
