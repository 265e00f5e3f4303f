//! Captures and graphs: the runtime's functions under the driver's names.

use std::ffi::{c_int, c_uint, c_ulonglong};

use harness_gpu_settings::ffi::Out;

use crate::runtime::graphs as runtime;

/// Exports driver functions that are equal to functions of the runtime.
macro_rules! exports {
    ($($driver:ident = $runtime:ident($($argument:ident: $type:ty),*);)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $driver($($argument: $type),*) -> c_int {
            runtime::$runtime($($argument),*)
        }
    )*};
}

exports! {
    cuStreamBeginCapture_v2 = cudaStreamBeginCapture(stream: usize, mode: c_int);
    cuStreamEndCapture = cudaStreamEndCapture(stream: usize, graph: Out<'_, *mut u8>);
    cuStreamIsCapturing = cudaStreamIsCapturing(stream: usize, status: Out<'_, c_int>);
    cuStreamGetCaptureInfo_v2 = cudaStreamGetCaptureInfo_v2(
        stream: usize, status: Out<'_, c_int>, id: Out<'_, c_ulonglong>, graph: Out<'_, usize>, dependencies: Out<'_, usize>, count: Out<'_, usize>
    );
    cuStreamGetCaptureInfo_v3 = cudaStreamGetCaptureInfo(
        stream: usize, status: Out<'_, c_int>, id: Out<'_, c_ulonglong>, graph: Out<'_, usize>, dependencies: Out<'_, usize>, edges: Out<'_, usize>,
        count: Out<'_, usize>
    );
    cuThreadExchangeStreamCaptureMode = cudaThreadExchangeStreamCaptureMode(mode: Option<&mut c_int>);
    cuGraphCreate = cudaGraphCreate(graph: Out<'_, *mut u8>, flags: c_uint);
    cuGraphGetNodes = cudaGraphGetNodes(graph: usize, nodes: Out<'_, usize>, count: Option<&mut usize>);
    cuGraphInstantiateWithFlags = cudaGraphInstantiateWithFlags(executable: Out<'_, *mut u8>, graph: usize, flags: c_ulonglong);
    cuGraphLaunch = cudaGraphLaunch(executable: usize, stream: usize);
    cuGraphDestroy = cudaGraphDestroy(graph: usize);
    cuGraphExecDestroy = cudaGraphExecDestroy(executable: usize);
}
