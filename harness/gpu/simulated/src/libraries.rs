//! The handles, plans and modules of NVIDIA's libraries: the functions that create them can fail,
//! and take memory if the settings say so.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_longlong, c_void};
use std::sync::{Mutex, MutexGuard};

use harness_allocator::sync::lock;
use harness_gpu_settings::ffi::{Out, write};
use harness_gpu_settings::{calls::Call, context_overhead::LibraryContext, export};

use harness_allocator::{device::sim::GRANULARITY, units::Bytes};

use crate::code::Code;
use crate::hook::Hook;
use crate::objects::new_object;
use crate::world::{State, current_device, machine};

/// `CUBLAS_STATUS_ALLOC_FAILED`.
pub(crate) const CUBLAS_ALLOC_FAILED: c_int = 3;
/// `CUSOLVER_STATUS_ALLOC_FAILED`, `CUSPARSE_STATUS_ALLOC_FAILED` and `CUFFT_ALLOC_FAILED`.
const ALLOC_FAILED: c_int = 2;
/// `CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED` of cuDNN 9, which version 8 called
/// `CUDNN_STATUS_ALLOC_FAILED`.
pub(crate) const CUDNN_ALLOC_FAILED: c_int = 4004;
const CUDNN_8_ALLOC_FAILED: c_int = 2;

static HOOK: Hook = Hook::new();

/// Sets the function that is called after such a call has failed on request.
#[unsafe(no_mangle)]
extern "C" fn harness_failures_hook(hook: Option<extern "C" fn() -> bool>) {
    HOOK.set(hook);
}

/// Makes a call of a library that takes memory of the current device at its first use: that of a
/// part, or none.
pub(crate) fn open(call: Call, part: Option<LibraryContext>) -> Result<(), Code> {
    let is_new =
        |state: &State, index: usize, part: LibraryContext| !state.parts.contains(&(index, part));
    take(call, |state, index| {
        part.filter(|part| is_new(state, index, *part))
            .map_or(Bytes::ZERO, LibraryContext::memory)
    })?;
    machine()
        .state()
        .parts
        .extend(part.map(|part| (current_device(), part)));
    Ok(())
}

/// Loads a module with this size of machine code, which fills pages one module after the other.
/// Unloading keeps them.
pub(crate) fn load_module(code: Bytes) -> Result<(), Code> {
    let pages = |bytes: Bytes| bytes.checked_round_up(GRANULARITY).unwrap_or(bytes);
    let before = |state: &State, index: usize| state.code.get(&index).copied().unwrap_or_default();
    take(Call::ModuleLoad, |state, index| {
        let loaded = before(state, index);
        pages(loaded + code) - pages(loaded)
    })?;
    *machine().state().code.entry(current_device()).or_default() += code;
    Ok(())
}

/// Makes a call that takes memory of the current device, if the settings say so.
fn take(call: Call, size: impl FnOnce(&State, usize) -> Bytes) -> Result<(), Code> {
    let machine = machine();
    machine.usable()?;
    let (index, mut state) = (current_device(), machine.state());
    let size = if machine.settings.memory_of_libraries {
        size(&state, index)
    } else {
        Bytes::ZERO
    };
    let get = |state: &mut State| {
        if size > Bytes::ZERO {
            state.on_device(index, |memory| memory.take_for_library(size))
        } else {
            Ok(())
        }
    };
    let (taken, injected) = state.attempt(machine, (call, size), Some(index), get);
    drop(state);
    if taken.is_err() {
        machine.counters.count_failed_call(call, injected);
    }
    if injected {
        HOOK.call();
    }
    taken
}

/// Takes memory for the first product of 16-bit numbers. Returns the status of cuBLAS.
pub(crate) fn half_product() -> c_int {
    let machine = machine();
    let is_known = || {
        machine
            .state()
            .parts
            .contains(&(current_device(), LibraryContext::CublasHalf))
    };
    if !machine.settings.memory_of_libraries || is_known() {
        return 0;
    }
    open(Call::CublasGemm, Some(LibraryContext::CublasHalf)).map_or(CUBLAS_ALLOC_FAILED, |()| 0)
}

/// Creates the object of a handle.
fn create(
    call: Call,
    part: Option<LibraryContext>,
    handle: Out<'_, *mut u8>,
    failed: c_int,
) -> c_int {
    match open(call, part) {
        Ok(()) => {
            let object = new_object();
            streams().remove(&object.expose_provenance());
            write(handle, object);
            0
        }
        Err(_) => failed,
    }
}

/// The streams of handles and plans that are not the default stream, which a new handle has.
fn streams() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    static STREAMS: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());
    lock(&STREAMS)
}

pub(crate) fn stream_of(handle: usize) -> usize {
    streams().get(&handle).copied().unwrap_or_default()
}

/// Sets the stream of a handle. Returns whether it is one.
pub(crate) fn set_stream(handle: usize, stream: usize) -> bool {
    streams().insert(handle, stream);
    handle != 0
}

export! {
    cusolverDnSetStream, cusparseSetStream(handle: usize, stream: usize) = {
        set_stream(handle, stream);
        0
    };
    /// The number of a plan can be zero.
    cufftSetStream(plan: c_int, stream: usize) = {
        set_stream(plan as usize, stream);
        0
    };
    cublasCreate_v2, cublasLtCreate(handle: Out<'_, *mut u8>) =
        create(Call::CublasCreate, Some(LibraryContext::Cublas), handle, CUBLAS_ALLOC_FAILED);
    cudnnCreate(handle: Out<'_, *mut u8>) = {
        let failed = if machine().settings.cudnn < 90_000 {
            CUDNN_8_ALLOC_FAILED
        } else {
            CUDNN_ALLOC_FAILED
        };
        create(Call::CudnnCreate, Some(LibraryContext::Cudnn), handle, failed)
    };
    cusolverDnCreate(handle: Out<'_, *mut u8>) =
        create(Call::CusolverCreate, Some(LibraryContext::Cusolver), handle, ALLOC_FAILED);
    cusparseCreate(handle: Out<'_, *mut u8>) =
        create(Call::CusparseCreate, None, handle, ALLOC_FAILED);
    /// Plans need no work area.
    cufftXtMakePlanMany(
        _: c_int, _: c_int, _: *const c_void, _: *const c_void, _: c_longlong, _: c_longlong,
        _: c_int, _: *const c_void, _: c_longlong, _: c_longlong, _: c_int, _: c_longlong,
        bytes: Out<'_, usize>, _: c_int
    ) = {
        write(bytes, 0);
        open(Call::CufftPlan, None).map_or(ALLOC_FAILED, |()| 0)
    };
    cusparseGetErrorName(status: c_int) -> *const c_char = match status {
        0 => c"CUSPARSE_STATUS_SUCCESS",
        ALLOC_FAILED => c"CUSPARSE_STATUS_ALLOC_FAILED",
        _ => c"CUSPARSE_STATUS_UNKNOWN",
    }.as_ptr();
    cusparseGetErrorString(status: c_int) -> *const c_char = match status {
        0 => c"success",
        ALLOC_FAILED => c"insufficient resources",
        _ => c"unknown error",
    }.as_ptr();
}
