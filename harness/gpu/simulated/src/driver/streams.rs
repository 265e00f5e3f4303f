//! Streams and events. If kernels are no-ops, they are the runtime's.

use std::ffi::{c_float, c_uint};

use harness_allocator::device::{Device as _, DeviceError, EventId, TestDevice as _};
use harness_allocator::units::Nanos;

use harness_gpu_settings::{export, ffi::Out};

use crate::context::{Gpu, by_kernel_mode, on_gpu, output_by_kernel_mode, wait};
use crate::{code::Code, runtime::streams as runtime};

/// Flag of a stream that does not synchronize with the default stream.
const NON_BLOCKING: c_uint = 1;
/// Flag of an event without timing.
const WITHOUT_TIMING: c_uint = 2;

export! {
    cuCtxSynchronize() = by_kernel_mode(THIS, || runtime::cudaDeviceSynchronize(), synchronize);
    cuStreamCreate(stream: Out<'_, usize>, flags: c_uint) = output_by_kernel_mode(
        THIS,
        stream,
        |stream| runtime::cudaStreamCreateWithFlags(stream, flags),
        || create_stream(flags),
    );
    /// Queued work of the stream still runs.
    cuStreamDestroy, cuStreamDestroy_v2(stream: usize) = by_kernel_mode(
        THIS,
        || runtime::cudaStreamDestroy(stream),
        || on_gpu(|gpu| gpu.destroy_stream(stream)),
    );
    cuStreamSynchronize(stream: usize) = by_kernel_mode(
        THIS,
        || runtime::cudaStreamSynchronize(stream),
        || synchronize_stream(stream),
    );
    cuStreamWaitEvent(stream: usize, event: usize, flags: c_uint) = by_kernel_mode(
        THIS,
        || runtime::cudaStreamWaitEvent(stream, event, flags),
        || wait_event(stream, event),
    );
    cuEventCreate(event: Out<'_, usize>, flags: c_uint) = output_by_kernel_mode(
        THIS,
        event,
        |event| runtime::cudaEventCreateWithFlags(event, flags),
        || create_event(flags),
    );
    cuEventDestroy, cuEventDestroy_v2(event: usize) = by_kernel_mode(
        THIS,
        || runtime::cudaEventDestroy(event),
        || with_event(event, |gpu, id| gpu.sim().destroy_event(id)),
    );
    cuEventRecord(event: usize, stream: usize) = by_kernel_mode(
        THIS,
        || runtime::cudaEventRecord(event, stream),
        || record_event(event, stream),
    );
    cuEventQuery(event: usize) =
        by_kernel_mode(THIS, || runtime::cudaEventQuery(event), || query_event(event));
    cuEventSynchronize(event: usize) =
        by_kernel_mode(THIS, || runtime::cudaEventSynchronize(event), || synchronize_event(event));
    /// If kernels execute, both events must be recorded, done and with timing. The time is negative
    /// if the end is earlier than the start.
    cuEventElapsedTime, cuEventElapsedTime_v2(
        milliseconds: Out<'_, c_float>, start: usize, end: usize
    ) = output_by_kernel_mode(
        THIS,
        milliseconds,
        |milliseconds| runtime::cudaEventElapsedTime(milliseconds, start, end),
        || elapsed_time(start, end),
    );
}

fn synchronize() -> Result<(), Code> {
    wait(
        |gpu| Ok(gpu.sim().all_done_at()),
        |gpu| Ok(gpu.sim().synchronize()?),
    )
}

/// Only streams that do not synchronize with the default stream are supported.
fn create_stream(flags: c_uint) -> Result<usize, Code> {
    on_gpu(|gpu| {
        if flags == NON_BLOCKING {
            gpu.create_stream()
        } else {
            Err(Code::NotSupported)
        }
    })
}

fn synchronize_stream(stream: usize) -> Result<(), Code> {
    let then = |gpu: &mut Gpu<'_>| {
        let id = gpu.stream(stream)?;
        Ok(gpu.sim().synchronize_stream(id)?)
    };
    wait(|gpu| gpu.stream_done_at(stream), then)
}

fn wait_event(stream: usize, event: usize) -> Result<(), Code> {
    on_gpu(|gpu| {
        let (stream, event) = (gpu.stream(stream)?, gpu.event(event)?);
        Ok(gpu.sim().wait_event(stream, event)?)
    })
}

fn create_event(flags: c_uint) -> Result<usize, Code> {
    on_gpu(|gpu| {
        let id = match flags {
            0 => gpu.sim().create_timed_event(),
            WITHOUT_TIMING => gpu.sim().create_event(),
            _ => return Err(Code::NotSupported),
        }?;
        Ok(gpu.event_handle(id))
    })
}

fn with_event<T>(
    event: usize,
    call: impl FnOnce(&mut Gpu<'_>, EventId) -> Result<T, DeviceError>,
) -> Result<T, Code> {
    on_gpu(|gpu| {
        let id = gpu.event(event)?;
        Ok(call(gpu, id)?)
    })
}

fn record_event(event: usize, stream: usize) -> Result<(), Code> {
    on_gpu(|gpu| {
        let (event, stream) = (gpu.event(event)?, gpu.stream(stream)?);
        Ok(gpu.sim().record_event(event, stream)?)
    })
}

fn query_event(event: usize) -> Result<(), Code> {
    let is_done = with_event(event, |gpu, id| gpu.sim().event_done(id))?;
    if is_done { Ok(()) } else { Err(Code::NotReady) }
}

fn synchronize_event(event: usize) -> Result<(), Code> {
    let until = |gpu: &mut Gpu<'_>| {
        let id = gpu.event(event)?;
        Ok(gpu.sim().event_time(id)?.done_at.unwrap_or(Nanos::ZERO))
    };
    let then = |gpu: &mut Gpu<'_>| {
        let id = gpu.event(event)?;
        Ok(gpu.sim().synchronize_event(id)?)
    };
    wait(until, then)
}

fn elapsed_time(start: usize, end: usize) -> Result<c_float, Code> {
    on_gpu(|gpu| {
        let (start, end) = (done_at(gpu, start)?, done_at(gpu, end)?);
        if start.max(end) > gpu.machine.host_time() {
            return Err(Code::NotReady);
        }
        Ok(((end.0 as f64 - start.0 as f64) / 1e6) as c_float)
    })
}

fn done_at(gpu: &mut Gpu<'_>, event: usize) -> Result<Nanos, Code> {
    let id = gpu.event(event)?;
    let time = gpu.sim().event_time(id)?;
    time.done_at
        .filter(|_| time.timed)
        .ok_or(Code::InvalidHandle)
}
