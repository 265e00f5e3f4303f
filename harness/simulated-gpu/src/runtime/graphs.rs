//! Captures and graphs. A graph has nothing in it that a program could look into: launching it is one piece of work.

use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use crate::code::{Code, remember};
use crate::unmodelled::{delete_object, new_object};
use crate::world::{current_device, machine};

thread_local! {
    static CAPTURE_MODE: Cell<c_int> = const { Cell::new(0) };
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamBeginCapture(stream: usize, _: c_int) -> c_int {
    remember(machine().state().streams.begin_capture(stream, current_device()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamBeginCaptureToGraph(
    stream: usize,
    _: usize,
    _: *const c_void,
    _: *const c_void,
    _: usize,
    mode: c_int,
) -> c_int {
    cudaStreamBeginCapture(stream, mode)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamEndCapture(stream: usize, graph: *mut *mut u8) -> c_int {
    let mut state = machine().state();
    let ended = state.streams.stream(stream, current_device()).and_then(|stream| stream.capture.take().ok_or(Code::InvalidValue));
    // SAFETY: the program passes a pointer to a handle.
    remember(ended.map(|_| unsafe { *graph = new_object() }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamIsCapturing(stream: usize, status: *mut c_int) -> c_int {
    let mut state = machine().state();
    let capture = state.streams.stream(stream, current_device()).map(|stream| stream.capture.is_some());
    // SAFETY: the program passes a pointer to a number.
    remember(capture.map(|capture| unsafe { *status = c_int::from(capture) }))
}

/// The arguments behind `id` differ between CUDA 12 and 13 by one pointer more; they are the graph, its dependencies, and their number.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamGetCaptureInfo(
    stream: usize,
    status: *mut c_int,
    id: *mut c_ulonglong,
    graph: *mut usize,
    dependencies: *mut usize,
    edges: *mut usize,
    count: *mut usize,
) -> c_int {
    let mut state = machine().state();
    let capture = state.streams.stream(stream, current_device()).map(|stream| stream.capture);
    remember(capture.map(|capture| {
        // SAFETY: each argument is null or points to a variable of its type.
        unsafe {
            write(status, c_int::from(capture.is_some()));
            write(id, capture.unwrap_or(0));
            write(graph, 0);
            write(dependencies, 0);
            write(edges, 0);
            write(count, 0);
        }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamGetCaptureInfo_v2(
    stream: usize,
    status: *mut c_int,
    id: *mut c_ulonglong,
    graph: *mut usize,
    dependencies: *mut usize,
    count: *mut usize,
) -> c_int {
    // SAFETY: as for the other function, which has one argument more.
    unsafe { cudaStreamGetCaptureInfo(stream, status, id, graph, dependencies, std::ptr::null_mut(), count) }
}

/// # Safety
/// The pointer is null or may be written.
unsafe fn write<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: as the caller promises.
        unsafe { *to = value };
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { *mode = CAPTURE_MODE.replace(*mode) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGraphCreate(graph: *mut *mut u8, _: c_uint) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    unsafe { *graph = new_object() };
    0
}

/// One node, since a program takes a graph without any for a mistake.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGraphGetNodes(graph: usize, nodes: *mut usize, count: *mut usize) -> c_int {
    // SAFETY: the program passes an array of as many nodes as it says, or none, and a pointer to their number.
    unsafe {
        if !nodes.is_null() && *count > 0 {
            *nodes = graph;
        }
        *count = 1;
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGraphInstantiate(executable: *mut *mut u8, _: usize, _: c_ulonglong) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    unsafe { *executable = new_object() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGraphInstantiateWithFlags(executable: *mut *mut u8, graph: usize, flags: c_ulonglong) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cudaGraphInstantiate(executable, graph, flags) }
}

#[unsafe(no_mangle)]
extern "C" fn cudaGraphLaunch(_: usize, _: usize) -> c_int {
    machine().tick();
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGraphDestroy(graph: *mut u8) -> c_int {
    // SAFETY: the program gives back what a function here made, once.
    unsafe { delete_object(graph) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGraphExecDestroy(executable: *mut u8) -> c_int {
    // SAFETY: the program gives back what a function here made, once.
    unsafe { delete_object(executable) };
    0
}
