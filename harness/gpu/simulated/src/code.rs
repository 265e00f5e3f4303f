//! [`Code`]: the error codes of the CUDA driver and runtime, which share their numbers
//! (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html>), and the last error of
//! a thread.

use std::cell::Cell;
use std::ffi::{CStr, c_int};
use std::sync::OnceLock;

use harness_gpu_settings::ffi::{Out, write};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Code {
    InvalidValue = 1,
    OutOfMemory = 2,
    NotInitialized = 3,
    InvalidConfiguration = 9,
    NoDevice = 100,
    InvalidDevice = 101,
    InvalidContext = 201,
    PeerAccessUnsupported = 217,
    InvalidPtx = 218,
    FileNotFound = 301,
    InvalidHandle = 400,
    IllegalState = 401,
    NotFound = 500,
    NotReady = 600,
    IllegalAddress = 700,
    PeerAccessAlreadyEnabled = 704,
    PeerAccessNotEnabled = 705,
    HostMemoryAlreadyRegistered = 712,
    MisalignedAddress = 716,
    LaunchFailed = 719,
    NotPermitted = 800,
    NotSupported = 801,
    CaptureUnsupported = 900,
    CaptureInvalidated = 901,
    CaptureMerge = 902,
    CaptureUnmatched = 903,
    CaptureUnjoined = 904,
    CaptureIsolation = 905,
    CaptureImplicit = 906,
    CapturedEvent = 907,
    CaptureWrongThread = 908,
    GraphUpdateFailed = 910,
}

/// Names in the runtime and in the driver, and messages, by number. The driver has no name for an
/// error of the runtime alone.
const TEXTS: [(i32, &CStr, &CStr, &CStr); 33] = [
    (0, c"cudaSuccess", c"CUDA_SUCCESS", c"no error"),
    (
        1,
        c"cudaErrorInvalidValue",
        c"CUDA_ERROR_INVALID_VALUE",
        c"invalid argument",
    ),
    (
        2,
        c"cudaErrorMemoryAllocation",
        c"CUDA_ERROR_OUT_OF_MEMORY",
        c"out of memory",
    ),
    (
        3,
        c"cudaErrorInitializationError",
        c"CUDA_ERROR_NOT_INITIALIZED",
        c"initialization error",
    ),
    (
        9,
        c"cudaErrorInvalidConfiguration",
        c"",
        c"invalid configuration argument",
    ),
    (
        100,
        c"cudaErrorNoDevice",
        c"CUDA_ERROR_NO_DEVICE",
        c"no CUDA-capable device is detected",
    ),
    (
        101,
        c"cudaErrorInvalidDevice",
        c"CUDA_ERROR_INVALID_DEVICE",
        c"invalid device ordinal",
    ),
    (
        201,
        c"cudaErrorDeviceUninitialized",
        c"CUDA_ERROR_INVALID_CONTEXT",
        c"invalid device context",
    ),
    (
        217,
        c"cudaErrorPeerAccessUnsupported",
        c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
        c"peer access is not supported between these two devices",
    ),
    (
        218,
        c"cudaErrorInvalidPtx",
        c"CUDA_ERROR_INVALID_PTX",
        c"a PTX JIT compilation failed",
    ),
    (
        301,
        c"cudaErrorFileNotFound",
        c"CUDA_ERROR_FILE_NOT_FOUND",
        c"file not found",
    ),
    (
        400,
        c"cudaErrorInvalidResourceHandle",
        c"CUDA_ERROR_INVALID_HANDLE",
        c"invalid resource handle",
    ),
    (
        401,
        c"cudaErrorIllegalState",
        c"CUDA_ERROR_ILLEGAL_STATE",
        c"the operation cannot be performed in the present state",
    ),
    (
        500,
        c"cudaErrorSymbolNotFound",
        c"CUDA_ERROR_NOT_FOUND",
        c"named symbol not found",
    ),
    (
        600,
        c"cudaErrorNotReady",
        c"CUDA_ERROR_NOT_READY",
        c"device not ready",
    ),
    (
        700,
        c"cudaErrorIllegalAddress",
        c"CUDA_ERROR_ILLEGAL_ADDRESS",
        c"an illegal memory access was encountered",
    ),
    (
        704,
        c"cudaErrorPeerAccessAlreadyEnabled",
        c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
        c"peer access is already enabled",
    ),
    (
        705,
        c"cudaErrorPeerAccessNotEnabled",
        c"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED",
        c"peer access has not been enabled",
    ),
    (
        712,
        c"cudaErrorHostMemoryAlreadyRegistered",
        c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        c"part or all of the requested memory range is already mapped",
    ),
    (
        716,
        c"cudaErrorMisalignedAddress",
        c"CUDA_ERROR_MISALIGNED_ADDRESS",
        c"misaligned address",
    ),
    (
        719,
        c"cudaErrorLaunchFailure",
        c"CUDA_ERROR_LAUNCH_FAILED",
        c"unspecified launch failure",
    ),
    (
        800,
        c"cudaErrorNotPermitted",
        c"CUDA_ERROR_NOT_PERMITTED",
        c"operation not permitted",
    ),
    (
        801,
        c"cudaErrorNotSupported",
        c"CUDA_ERROR_NOT_SUPPORTED",
        c"operation not supported",
    ),
    (
        900,
        c"cudaErrorStreamCaptureUnsupported",
        c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        c"operation not permitted when stream is capturing",
    ),
    (
        901,
        c"cudaErrorStreamCaptureInvalidated",
        c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        c"operation failed due to a previous error during capture",
    ),
    (
        902,
        c"cudaErrorStreamCaptureMerge",
        c"CUDA_ERROR_STREAM_CAPTURE_MERGE",
        c"operation would result in a merge of separate capture sequences",
    ),
    (
        903,
        c"cudaErrorStreamCaptureUnmatched",
        c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
        c"capture was not ended in the same stream as it began",
    ),
    (
        904,
        c"cudaErrorStreamCaptureUnjoined",
        c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
        c"capturing stream has unjoined work",
    ),
    (
        905,
        c"cudaErrorStreamCaptureIsolation",
        c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
        c"dependency created on uncaptured work in another stream",
    ),
    (
        906,
        c"cudaErrorStreamCaptureImplicit",
        c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        c"operation would make the legacy stream depend on a capturing blocking stream",
    ),
    (
        907,
        c"cudaErrorCapturedEvent",
        c"CUDA_ERROR_CAPTURED_EVENT",
        c"operation not permitted on an event last recorded in a capturing stream",
    ),
    (
        908,
        c"cudaErrorStreamCaptureWrongThread",
        c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
        c"attempt to terminate a thread-local capture sequence from another thread",
    ),
    (
        910,
        c"cudaErrorGraphExecUpdateFailure",
        c"CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE",
        c"the graph update was not performed because it included changes which violated \
          constraints specific to instantiated graph update",
    ),
];

/// Called with each error that a function of the runtime returns.
static ON_ERROR: OnceLock<fn(c_int)> = OnceLock::new();

pub(crate) fn on_error(act: fn(c_int)) {
    let _ = ON_ERROR.set(act);
}

thread_local! {
    static LAST: Cell<c_int> = const { Cell::new(0) };
}

/// The result of a driver function.
pub(crate) fn answer(result: Result<(), Code>) -> c_int {
    result.map_or_else(|code| code as c_int, |()| 0)
}

/// The result of a runtime function; an error becomes the thread's last error.
pub(crate) fn remember(result: Result<(), Code>) -> c_int {
    let number = answer(result);
    if number != 0 {
        LAST.set(number);
        if let Some(act) = ON_ERROR.get() {
            act(number);
        }
    }
    number
}

pub(crate) fn last() -> c_int {
    LAST.get()
}

pub(crate) fn take_last() -> c_int {
    LAST.replace(0)
}

pub(crate) fn name(number: c_int) -> &'static CStr {
    TEXTS
        .iter()
        .find(|text| text.0 == number)
        .map_or(c"unrecognized error code", |text| text.1)
}

/// The driver's name and its message, or `None` for an unknown number.
pub(crate) fn of_driver(number: c_int) -> Option<(&'static CStr, &'static CStr)> {
    let known = TEXTS.iter().find(|text| text.0 == number)?;
    (!known.2.is_empty()).then_some((known.2, known.3))
}

pub(crate) fn message(number: c_int) -> &'static CStr {
    TEXTS
        .iter()
        .find(|text| text.0 == number)
        .map_or(c"unrecognized error code", |text| text.3)
}

/// Writes an output. A null pointer is an invalid value.
pub(crate) fn put<T>(place: Out<'_, T>, value: T) -> Result<(), Code> {
    if write(place, value) {
        Ok(())
    } else {
        Err(Code::InvalidValue)
    }
}

/// Writes the address of new memory, or null after a failed request.
pub(crate) fn put_address(place: Out<'_, usize>, address: Result<u64, Code>) -> Result<(), Code> {
    put(place, address.map_or(0, |address| address as usize))?;
    address.map(drop)
}
