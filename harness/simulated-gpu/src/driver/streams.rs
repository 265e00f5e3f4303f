//! Streams and events. Where kernels are skipped they are those of the runtime.

use std::ffi::{c_float, c_int, c_uint};

use harness_allocator::device::{Device as _, TestDevice as _};
use harness_allocator::units::Nanos;

use super::put;
use crate::code::Code;
use crate::context::{Gpu, either, on_gpu, wait};
use crate::runtime::streams as runtime;

/// Flag of a stream that does not synchronize with the default stream.
const NON_BLOCKING: c_uint = 1;
/// Flag of an event that keeps no time.
const WITHOUT_TIMING: c_uint = 2;

/// Where kernels are done there are only streams that do not synchronize with the default stream.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut usize, flags: c_uint) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    either(
        "cuStreamCreate",
        || unsafe { runtime::cudaStreamCreateWithFlags(stream, flags) },
        || {
            on_gpu(|gpu| {
                if flags != NON_BLOCKING {
                    return Err(Code::NotSupported);
                }
                let handle = gpu.create_stream()?;
                // SAFETY: as above.
                unsafe { put(stream, handle) }
            })
        },
    )
}

/// Work that is queued on the stream is still done.
#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: usize) -> c_int {
    either("cuStreamDestroy_v2", || runtime::cudaStreamDestroy(stream), || on_gpu(|gpu| gpu.destroy_stream(stream)))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: usize) -> c_int {
    let then = |gpu: &mut Gpu<'_>| {
        let id = gpu.stream(stream)?;
        Ok(gpu.memory.sim().synchronize_stream(id)?)
    };
    either("cuStreamSynchronize", || runtime::cudaStreamSynchronize(stream), || wait(|gpu| gpu.stream_done_at(stream), then))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> c_int {
    let all = |gpu: &mut Gpu<'_>| Ok(gpu.memory.sim().all_done_at());
    either("cuCtxSynchronize", || runtime::cudaDeviceSynchronize(), || wait(all, |gpu| Ok(gpu.memory.sim().synchronize()?)))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: usize, event: usize, flags: c_uint) -> c_int {
    either(
        "cuStreamWaitEvent",
        || runtime::cudaStreamWaitEvent(stream, event, flags),
        || {
            on_gpu(|gpu| {
                let (stream, event) = (gpu.stream(stream)?, gpu.event(event)?);
                Ok(gpu.memory.sim().wait_event(stream, event)?)
            })
        },
    )
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut usize, flags: c_uint) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    either(
        "cuEventCreate",
        || unsafe { runtime::cudaEventCreateWithFlags(event, flags) },
        || {
            on_gpu(|gpu| {
                let id = match flags {
                    0 => gpu.memory.sim().create_timed_event(),
                    WITHOUT_TIMING => gpu.memory.sim().create_event(),
                    _ => return Err(Code::NotSupported),
                }?;
                // SAFETY: as above.
                unsafe { put(event, gpu.event_handle(id)) }
            })
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: usize) -> c_int {
    either(
        "cuEventDestroy_v2",
        || runtime::cudaEventDestroy(event),
        || {
            on_gpu(|gpu| {
                let id = gpu.event(event)?;
                Ok(gpu.memory.sim().destroy_event(id)?)
            })
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: usize, stream: usize) -> c_int {
    either(
        "cuEventRecord",
        || runtime::cudaEventRecord(event, stream),
        || {
            on_gpu(|gpu| {
                let (event, stream) = (gpu.event(event)?, gpu.stream(stream)?);
                Ok(gpu.memory.sim().record_event(event, stream)?)
            })
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: usize) -> c_int {
    either(
        "cuEventQuery",
        || runtime::cudaEventQuery(event),
        || {
            on_gpu(|gpu| {
                let id = gpu.event(event)?;
                if gpu.memory.sim().event_done(id)? { Ok(()) } else { Err(Code::NotReady) }
            })
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: usize) -> c_int {
    let until = |gpu: &mut Gpu<'_>| {
        let id = gpu.event(event)?;
        Ok(gpu.memory.sim().event_time(id)?.done_at.unwrap_or(Nanos::ZERO))
    };
    let then = |gpu: &mut Gpu<'_>| {
        let id = gpu.event(event)?;
        Ok(gpu.memory.sim().synchronize_event(id)?)
    };
    either("cuEventSynchronize", || runtime::cudaEventSynchronize(event), || wait(until, then))
}

/// Where kernels are done both events must be recorded, done and with timing; an end in front of its start is a negative time.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime(milliseconds: *mut c_float, start: usize, end: usize) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    either(
        "cuEventElapsedTime",
        || unsafe { runtime::cudaEventElapsedTime(milliseconds, start, end) },
        || {
            on_gpu(|gpu| {
                let (start, end) = (done_at(gpu, start)?, done_at(gpu, end)?);
                if start.max(end) > gpu.machine.host_time() {
                    return Err(Code::NotReady);
                }
                // SAFETY: as above.
                unsafe { put(milliseconds, ((end.0 as f64 - start.0 as f64) / 1e6) as c_float) }
            })
        },
    )
}

/// When an event that keeps time is done.
fn done_at(gpu: &mut Gpu<'_>, event: usize) -> Result<Nanos, Code> {
    let id = gpu.event(event)?;
    let time = gpu.memory.sim().event_time(id)?;
    time.done_at.filter(|_| time.timed).ok_or(Code::InvalidHandle)
}
