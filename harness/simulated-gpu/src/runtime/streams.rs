//! Streams and events.

use std::ffi::{c_float, c_int, c_uint};

use harness_gpu_settings::ffi::Out;

use crate::code::{Code, put, remember};
use crate::world::{Machine, State, current_device, machine};

/// Runs a call that needs the state of the machine.
fn with(body: impl FnOnce(&'static Machine, &mut State) -> Result<(), Code>) -> c_int {
    let machine = machine();
    remember(machine.usable().and_then(|()| body(machine, &mut machine.state())))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamCreateWithPriority(stream: Out<'_, usize>, flags: c_uint, priority: c_int) -> c_int {
    with(|_, state| put(stream, state.streams.create(current_device(), priority, flags)))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaStreamCreateWithFlags(stream: Out<'_, usize>, flags: c_uint) -> c_int {
    cudaStreamCreateWithPriority(stream, flags, 0)
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamCreate(stream: Out<'_, usize>) -> c_int {
    cudaStreamCreateWithPriority(stream, 0, 0)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaStreamDestroy(stream: usize) -> c_int {
    with(|_, state| state.streams.destroy(stream))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamQuery(stream: usize) -> c_int {
    with(|machine, state| {
        let idle = state.streams.is_idle(stream, current_device(), machine.settings.events)?;
        if idle { Ok(()) } else { Err(not_ready(machine, state)) }
    })
}

/// Counts a query that found pending work.
fn not_ready(machine: &Machine, state: &mut State) -> Code {
    if state.streams.has_polled(machine.now()) {
        machine.tick();
    }
    Code::NotReady
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaStreamSynchronize(stream: usize) -> c_int {
    with(|machine, state| state.streams.wait_for(stream, current_device(), machine.now()))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaDeviceSynchronize() -> c_int {
    with(|machine, state| {
        state.streams.wait_for_device(current_device(), machine.now());
        Ok(())
    })
}

/// Work takes no time, so waits between streams have no effect.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaStreamWaitEvent(_: usize, _: usize, _: c_uint) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamGetPriority(stream: usize, priority: Out<'_, c_int>) -> c_int {
    with(|_, state| put(priority, state.streams.stream(stream, current_device())?.priority))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamGetFlags(stream: usize, flags: Out<'_, c_uint>) -> c_int {
    with(|_, state| put(flags, state.streams.stream(stream, current_device())?.flags))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaEventCreateWithFlags(event: Out<'_, usize>, _: c_uint) -> c_int {
    with(|_, state| put(event, state.streams.create_event()))
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventCreate(event: Out<'_, usize>) -> c_int {
    cudaEventCreateWithFlags(event, 0)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaEventRecord(event: usize, stream: usize) -> c_int {
    with(|machine, state| state.streams.record(event, stream, current_device(), (machine.tick(), machine.late_by())))
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventRecordWithFlags(event: usize, stream: usize, _: c_uint) -> c_int {
    cudaEventRecord(event, stream)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaEventQuery(event: usize) -> c_int {
    with(|machine, state| {
        let answer = state.streams.query(event, machine.settings.events, machine.now());
        answer.map_err(|code| if code == Code::NotReady { not_ready(machine, state) } else { code })
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaEventSynchronize(event: usize) -> c_int {
    with(|_, state| state.streams.wait_for_event(event))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaEventDestroy(event: usize) -> c_int {
    with(|_, state| state.streams.destroy_event(event))
}

/// Returns a model: one microsecond per piece of work between the events, plus injected latencies. Never zero, because programs divide by it.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaEventElapsedTime(milliseconds: Out<'_, c_float>, start: usize, end: usize) -> c_int {
    with(|_, state| {
        let (Some((start, early)), Some((end, late))) = (state.streams.recorded_at(start)?, state.streams.recorded_at(end)?) else {
            return Err(Code::InvalidHandle);
        };
        put(milliseconds, end.saturating_sub(start).max(1) as c_float / 1e3 + late.saturating_sub(early).0 as c_float / 1e6)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventElapsedTime_v2(milliseconds: Out<'_, c_float>, start: usize, end: usize) -> c_int {
    cudaEventElapsedTime(milliseconds, start, end)
}
