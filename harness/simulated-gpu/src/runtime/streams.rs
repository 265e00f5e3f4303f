//! Streams and events.

use std::ffi::{c_float, c_int, c_uint};

use crate::code::{Code, remember};
use crate::world::{Machine, State, current_device, machine};

/// A call that needs the state.
fn with(body: impl FnOnce(&'static Machine, &mut State) -> Result<(), Code>) -> c_int {
    let machine = machine();
    remember(machine.usable().and_then(|()| body(machine, &mut machine.state())))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamCreateWithPriority(stream: *mut usize, flags: c_uint, priority: c_int) -> c_int {
    with(|_, state| {
        // SAFETY: the program passes a pointer to a handle.
        unsafe { *stream = state.streams.create(current_device(), priority, flags) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cudaStreamCreateWithFlags(stream: *mut usize, flags: c_uint) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cudaStreamCreateWithPriority(stream, flags, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamCreate(stream: *mut usize) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cudaStreamCreateWithPriority(stream, 0, 0) }
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

/// The answer to a query that found work not done.
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

/// Work takes no time, so that waits between streams change nothing.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaStreamWaitEvent(_: usize, _: usize, _: c_uint) -> c_int {
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamGetPriority(stream: usize, priority: *mut c_int) -> c_int {
    with(|_, state| {
        // SAFETY: the program passes a pointer to a number.
        unsafe { *priority = state.streams.stream(stream, current_device())?.priority };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamGetFlags(stream: usize, flags: *mut c_uint) -> c_int {
    with(|_, state| {
        // SAFETY: the program passes a pointer to a number.
        unsafe { *flags = state.streams.stream(stream, current_device())?.flags };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cudaEventCreateWithFlags(event: *mut usize, _: c_uint) -> c_int {
    with(|_, state| {
        // SAFETY: the program passes a pointer to a handle.
        unsafe { *event = state.streams.create_event() };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaEventCreate(event: *mut usize) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cudaEventCreateWithFlags(event, 0) }
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

/// A made-up time: a thousandth of a millisecond for each piece of work between the two, and never zero, by which programs divide. By what calls between
/// them took longer because that was asked for, it is longer.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cudaEventElapsedTime(milliseconds: *mut c_float, start: usize, end: usize) -> c_int {
    with(|_, state| {
        let (Some((start, early)), Some((end, late))) = (state.streams.recorded_at(start)?, state.streams.recorded_at(end)?) else {
            return Err(Code::InvalidHandle);
        };
        // SAFETY: the program passes a pointer to a number.
        unsafe { *milliseconds = end.saturating_sub(start).max(1) as c_float / 1e3 + late.saturating_sub(early).0 as c_float / 1e6 };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaEventElapsedTime_v2(milliseconds: *mut c_float, start: usize, end: usize) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cudaEventElapsedTime(milliseconds, start, end) }
}
