//! [`Code`]: the error codes of the CUDA driver and runtime, which share their numbers
//! (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html>), and the last error of
//! a thread.

use std::cell::Cell;
use std::ffi::{CStr, c_int};
use std::sync::OnceLock;

use harness_gpu_settings::ffi::{Out, write};

/// Declares [`Code`] and [`TEXTS`], one code per row: its number, its names in the runtime and in
/// the driver without `cudaError` and `CUDA_ERROR_`, and its message. An error of the runtime alone
/// has no name in the driver.
macro_rules! codes {
    ($($code:ident = $number:literal, $runtime:literal, $driver:literal, $message:literal;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(i32)]
        pub(crate) enum Code { $($code = $number,)* }

        const TEXTS: &[(i32, &CStr, &CStr, &CStr)] = &[
            (0, c"cudaSuccess", c"CUDA_SUCCESS", c"no error"),
            $((
                $number,
                text(concat!("cudaError", $runtime, "\0")),
                text(concat!("CUDA_ERROR_", $driver, "\0")),
                text(concat!($message, "\0")),
            ),)*
        ];
    };
}

const fn text(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("only the end of a text is a NUL byte"),
    }
}

codes! {
    InvalidValue = 1, "InvalidValue", "INVALID_VALUE", "invalid argument";
    OutOfMemory = 2, "MemoryAllocation", "OUT_OF_MEMORY", "out of memory";
    NotInitialized = 3, "InitializationError", "NOT_INITIALIZED", "initialization error";
    InvalidConfiguration = 9, "InvalidConfiguration", "", "invalid configuration argument";
    NoDevice = 100, "NoDevice", "NO_DEVICE", "no CUDA-capable device is detected";
    InvalidDevice = 101, "InvalidDevice", "INVALID_DEVICE", "invalid device ordinal";
    InvalidContext = 201, "DeviceUninitialized", "INVALID_CONTEXT", "invalid device context";
    PeerAccessUnsupported = 217, "PeerAccessUnsupported", "PEER_ACCESS_UNSUPPORTED",
        "peer access is not supported between these two devices";
    InvalidPtx = 218, "InvalidPtx", "INVALID_PTX", "a PTX JIT compilation failed";
    FileNotFound = 301, "FileNotFound", "FILE_NOT_FOUND", "file not found";
    InvalidHandle = 400, "InvalidResourceHandle", "INVALID_HANDLE", "invalid resource handle";
    IllegalState = 401, "IllegalState", "ILLEGAL_STATE",
        "the operation cannot be performed in the present state";
    NotFound = 500, "SymbolNotFound", "NOT_FOUND", "named symbol not found";
    NotReady = 600, "NotReady", "NOT_READY", "device not ready";
    IllegalAddress = 700, "IllegalAddress", "ILLEGAL_ADDRESS",
        "an illegal memory access was encountered";
    PeerAccessAlreadyEnabled = 704, "PeerAccessAlreadyEnabled", "PEER_ACCESS_ALREADY_ENABLED",
        "peer access is already enabled";
    PeerAccessNotEnabled = 705, "PeerAccessNotEnabled", "PEER_ACCESS_NOT_ENABLED",
        "peer access has not been enabled";
    HostMemoryAlreadyRegistered = 712, "HostMemoryAlreadyRegistered",
        "HOST_MEMORY_ALREADY_REGISTERED",
        "part or all of the requested memory range is already mapped";
    MisalignedAddress = 716, "MisalignedAddress", "MISALIGNED_ADDRESS", "misaligned address";
    LaunchFailed = 719, "LaunchFailure", "LAUNCH_FAILED", "unspecified launch failure";
    NotPermitted = 800, "NotPermitted", "NOT_PERMITTED", "operation not permitted";
    NotSupported = 801, "NotSupported", "NOT_SUPPORTED", "operation not supported";
    CaptureUnsupported = 900, "StreamCaptureUnsupported", "STREAM_CAPTURE_UNSUPPORTED",
        "operation not permitted when stream is capturing";
    CaptureInvalidated = 901, "StreamCaptureInvalidated", "STREAM_CAPTURE_INVALIDATED",
        "operation failed due to a previous error during capture";
    CaptureMerge = 902, "StreamCaptureMerge", "STREAM_CAPTURE_MERGE",
        "operation would result in a merge of separate capture sequences";
    CaptureUnmatched = 903, "StreamCaptureUnmatched", "STREAM_CAPTURE_UNMATCHED",
        "capture was not ended in the same stream as it began";
    CaptureUnjoined = 904, "StreamCaptureUnjoined", "STREAM_CAPTURE_UNJOINED",
        "capturing stream has unjoined work";
    CaptureIsolation = 905, "StreamCaptureIsolation", "STREAM_CAPTURE_ISOLATION",
        "dependency created on uncaptured work in another stream";
    CaptureImplicit = 906, "StreamCaptureImplicit", "STREAM_CAPTURE_IMPLICIT",
        "operation would make the legacy stream depend on a capturing blocking stream";
    CapturedEvent = 907, "CapturedEvent", "CAPTURED_EVENT",
        "operation not permitted on an event last recorded in a capturing stream";
    CaptureWrongThread = 908, "StreamCaptureWrongThread", "STREAM_CAPTURE_WRONG_THREAD",
        "attempt to terminate a thread-local capture sequence from another thread";
    GraphUpdateFailed = 910, "GraphExecUpdateFailure", "GRAPH_EXEC_UPDATE_FAILURE",
        "the graph update was not performed because it included changes which violated \
         constraints specific to instantiated graph update";
}

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

fn known(number: c_int) -> Option<&'static (i32, &'static CStr, &'static CStr, &'static CStr)> {
    TEXTS.iter().find(|text| text.0 == number)
}

pub(crate) fn name(number: c_int) -> &'static CStr {
    known(number).map_or(c"unrecognized error code", |text| text.1)
}

/// The driver's name and its message, or `None` for an unknown number.
pub(crate) fn of_driver(number: c_int) -> Option<(&'static CStr, &'static CStr)> {
    let known = known(number)?;
    (known.2 != c"CUDA_ERROR_").then_some((known.2, known.3))
}

pub(crate) fn message(number: c_int) -> &'static CStr {
    known(number).map_or(c"unrecognized error code", |text| text.3)
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
