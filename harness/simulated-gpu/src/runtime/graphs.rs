//! Captures and graphs. Graphs are opaque and empty; a launch is one piece of work.

use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::ptr;

use harness_gpu_settings::ffi::{Out, write};

use crate::code::{Code, put, remember};
use crate::unmodelled::{delete_object, new_object};
use crate::world::{current_device, machine};

thread_local! {
    static CAPTURE_MODE: Cell<c_int> = const { Cell::new(0) };
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaStreamBeginCapture(stream: usize, _: c_int) -> c_int {
    remember(machine().state().streams.begin_capture(stream, current_device()))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamBeginCaptureToGraph(stream: usize, _: usize, _: *const c_void, _: *const c_void, _: usize, mode: c_int) -> c_int {
    cudaStreamBeginCapture(stream, mode)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaStreamEndCapture(stream: usize, graph: Out<'_, *mut u8>) -> c_int {
    let mut state = machine().state();
    let ended = state.streams.stream(stream, current_device()).and_then(|stream| stream.capture.take().ok_or(Code::InvalidValue));
    remember(ended.and_then(|_| put(graph, new_object())))
}

/// The number of a stream's active capture.
fn capture(stream: usize) -> Result<Option<u64>, Code> {
    machine().state().streams.stream(stream, current_device()).map(|stream| stream.capture)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaStreamIsCapturing(stream: usize, status: Out<'_, c_int>) -> c_int {
    remember(capture(stream).and_then(|capture| put(status, c_int::from(capture.is_some()))))
}

/// After `id`, CUDA 13 passes four outputs: graph, dependencies, edges, count. CUDA 12 passes three, without edges.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaStreamGetCaptureInfo(
    stream: usize,
    status: Out<'_, c_int>,
    id: Out<'_, c_ulonglong>,
    graph: Out<'_, usize>,
    dependencies: Out<'_, usize>,
    edges: Out<'_, usize>,
    count: Out<'_, usize>,
) -> c_int {
    remember(capture(stream).map(|capture| {
        write(status, c_int::from(capture.is_some()));
        write(id, capture.unwrap_or(0));
        for output in [graph, dependencies, edges, count] {
            write(output, 0);
        }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaStreamGetCaptureInfo_v2(
    stream: usize,
    status: Out<'_, c_int>,
    id: Out<'_, c_ulonglong>,
    graph: Out<'_, usize>,
    dependencies: Out<'_, usize>,
    count: Out<'_, usize>,
) -> c_int {
    cudaStreamGetCaptureInfo(stream, status, id, graph, dependencies, None, count)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaThreadExchangeStreamCaptureMode(mode: Option<&mut c_int>) -> c_int {
    let Some(mode) = mode else { return remember(Err(Code::InvalidValue)) };
    *mode = CAPTURE_MODE.replace(*mode);
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaGraphCreate(graph: Out<'_, *mut u8>, _: c_uint) -> c_int {
    remember(put(graph, new_object()))
}

/// Returns one node, because programs treat an empty graph as an error.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaGraphGetNodes(graph: usize, nodes: Out<'_, usize>, count: Option<&mut usize>) -> c_int {
    let Some(count) = count else { return remember(Err(Code::InvalidValue)) };
    if *count > 0 {
        write(nodes, graph);
    }
    *count = 1;
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaGraphInstantiate(executable: Out<'_, *mut u8>, _: usize, _: c_ulonglong) -> c_int {
    remember(put(executable, new_object()))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaGraphInstantiateWithFlags(executable: Out<'_, *mut u8>, graph: usize, flags: c_ulonglong) -> c_int {
    cudaGraphInstantiate(executable, graph, flags)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaGraphLaunch(_: usize, _: usize) -> c_int {
    machine().tick();
    0
}

/// Destroys a graph or an executable graph.
fn destroy(object: usize) -> c_int {
    // SAFETY: a function here created the object, and the program destroys it once.
    unsafe { delete_object(ptr::with_exposed_provenance_mut(object)) };
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaGraphDestroy(graph: usize) -> c_int {
    destroy(graph)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaGraphExecDestroy(executable: usize) -> c_int {
    destroy(executable)
}
