//! Streams and events. If kernels are no-ops, they are the runtime's.

use std::cell::Cell;
use std::ffi::{c_float, c_int, c_uint};

use harness_allocator::device::{Device as _, TestDevice as _};
use harness_allocator::units::Nanos;

use harness_gpu_settings::ffi::Out;

use crate::code::{Code, put};
use crate::context::{Gpu, by_kernel_mode, on_gpu, wait};
use crate::runtime::streams as runtime;

/// Flag of a stream that does not synchronize with the default stream.
const NON_BLOCKING: c_uint = 1;
/// Flag of an event without timing.
const WITHOUT_TIMING: c_uint = 2;

/// If kernels execute, only streams that do not synchronize with the default stream are supported.
#[unsafe(no_mangle)]
extern "C" fn cuStreamCreate(stream: Out<'_, usize>, flags: c_uint) -> c_int {
    let place = Cell::new(stream);
    by_kernel_mode(
        "cuStreamCreate",
        || runtime::cudaStreamCreateWithFlags(place.take(), flags),
        || {
            on_gpu(|gpu| {
                if flags != NON_BLOCKING {
                    return Err(Code::NotSupported);
                }
                put(place.take(), gpu.create_stream()?)
            })
        },
    )
}

/// Queued work of the stream still runs.
#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: usize) -> c_int {
    by_kernel_mode("cuStreamDestroy_v2", || runtime::cudaStreamDestroy(stream), || on_gpu(|gpu| gpu.destroy_stream(stream)))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: usize) -> c_int {
    let then = |gpu: &mut Gpu<'_>| {
        let id = gpu.stream(stream)?;
        Ok(gpu.memory.sim().synchronize_stream(id)?)
    };
    by_kernel_mode("cuStreamSynchronize", || runtime::cudaStreamSynchronize(stream), || wait(|gpu| gpu.stream_done_at(stream), then))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> c_int {
    let all = |gpu: &mut Gpu<'_>| Ok(gpu.memory.sim().all_done_at());
    by_kernel_mode("cuCtxSynchronize", || runtime::cudaDeviceSynchronize(), || wait(all, |gpu| Ok(gpu.memory.sim().synchronize()?)))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: usize, event: usize, flags: c_uint) -> c_int {
    by_kernel_mode(
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
extern "C" fn cuEventCreate(event: Out<'_, usize>, flags: c_uint) -> c_int {
    let place = Cell::new(event);
    by_kernel_mode(
        "cuEventCreate",
        || runtime::cudaEventCreateWithFlags(place.take(), flags),
        || {
            on_gpu(|gpu| {
                let id = match flags {
                    0 => gpu.memory.sim().create_timed_event(),
                    WITHOUT_TIMING => gpu.memory.sim().create_event(),
                    _ => return Err(Code::NotSupported),
                }?;
                put(place.take(), gpu.event_handle(id))
            })
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: usize) -> c_int {
    by_kernel_mode(
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
    by_kernel_mode(
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
    by_kernel_mode(
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
    by_kernel_mode("cuEventSynchronize", || runtime::cudaEventSynchronize(event), || wait(until, then))
}

/// If kernels execute, both events must be recorded, done and with timing. The time is negative if the end is earlier than the start.
#[unsafe(no_mangle)]
extern "C" fn cuEventElapsedTime(milliseconds: Out<'_, c_float>, start: usize, end: usize) -> c_int {
    let place = Cell::new(milliseconds);
    by_kernel_mode(
        "cuEventElapsedTime",
        || runtime::cudaEventElapsedTime(place.take(), start, end),
        || {
            on_gpu(|gpu| {
                let (start, end) = (done_at(gpu, start)?, done_at(gpu, end)?);
                if start.max(end) > gpu.machine.host_time() {
                    return Err(Code::NotReady);
                }
                put(place.take(), ((end.0 as f64 - start.0 as f64) / 1e6) as c_float)
            })
        },
    )
}

/// When an event with timing is done.
fn done_at(gpu: &mut Gpu<'_>, event: usize) -> Result<Nanos, Code> {
    let id = gpu.event(event)?;
    let time = gpu.memory.sim().event_time(id)?;
    time.done_at.filter(|_| time.timed).ok_or(Code::InvalidHandle)
}
