//! Streams and events.

use std::ffi::{c_float, c_int, c_uint};
use std::sync::atomic::{AtomicBool, Ordering};

use harness_gpu_settings::{export, ffi::Out, settings::Events};

use crate::clock::captures::{Caller, is_any_active};
use crate::clock::{Streams, work::Work};
use crate::code::{Code, put, remember};
use crate::nccl;
use crate::world::{Machine, State, current_device, machine};
use crate::{polls, torch_history};

/// The time of a kernel or another piece of work between two events, in milliseconds. It decides
/// how long autotuners take: Triton's repeats each kernel until the events say 100 ms.
const WORK: c_float = 0.1;

/// Runs a call that needs the state of the machine.
pub(super) fn with(body: impl FnOnce(&'static Machine, &mut State) -> Result<(), Code>) -> c_int {
    let machine = machine();
    remember(
        machine
            .usable()
            .and_then(|()| body(machine, &mut machine.state())),
    )
}

/// Submits work to a stream. Returns whether a capture takes it instead. Without captures this
/// needs no lock.
pub(crate) fn submit(stream: usize) -> Result<bool, Code> {
    let (machine, device) = (machine(), current_device());
    let is_captured = is_any_active() && machine.state().streams.submit(stream, device)?;
    if !is_captured {
        machine.submitted.add(stream, device);
    }
    Ok(is_captured)
}

/// Submits work to a stream. Without one, the work is in the order of the legacy stream, and no
/// stream captures it.
pub(crate) fn submit_in_order(stream: Option<usize>) -> Result<bool, Code> {
    stream.map_or_else(
        || {
            allow_synchronous()?;
            machine().submitted.add(0, current_device());
            Ok(false)
        },
        submit,
    )
}

/// Refuses a call that is potentially unsafe while a stream captures.
pub(crate) fn allow_unsafe() -> Result<(), Code> {
    if is_any_active() {
        machine().state().streams.allow_unsafe(Caller::current())
    } else {
        Ok(())
    }
}

/// Refuses a call that copies or writes in the order of the legacy stream and waits: no stream
/// captures it.
pub(crate) fn allow_synchronous() -> Result<(), Code> {
    if !is_any_active() {
        return Ok(());
    }
    let streams = &mut machine().state().streams;
    streams
        .allow_wait(0, current_device())
        .and_then(|()| streams.allow_unsafe(Caller::current()))
}

/// Runs a call in which the host waits for work, and so for the collectives in it.
fn with_settled(
    work: impl FnOnce(&Streams) -> Work,
    body: impl FnOnce(&'static Machine, &mut State) -> Result<(), Code>,
) -> c_int {
    nccl::settle(work);
    with(|machine, state| body(machine, state).and_then(|()| state.release_pools(machine)))
}

/// Counts a query that found pending work. A host that only asks has waited for it in the end.
fn not_ready(machine: &Machine, state: &mut State) -> Code {
    if state.streams.has_polled(machine.now()) {
        machine.tick();
        state.streams.end_work();
    }
    Code::NotReady
}

export! {
    cudaStreamCreateWithPriority, cuStreamCreateWithPriority(
        stream: Out<'_, usize>, flags: c_uint, priority: c_int
    ) = {
        let code = with(|_, state| {
            put(stream, state.streams.create(current_device(), priority, flags))
        });
        torch_history::begin();
        code
    };
    cudaStreamCreateWithFlags(stream: Out<'_, usize>, flags: c_uint) =
        cudaStreamCreateWithPriority(stream, flags, 0);
    cudaStreamCreate(stream: Out<'_, usize>) = cudaStreamCreateWithPriority(stream, 0, 0);
    cudaStreamDestroy(stream: usize) = with(|_, state| state.streams.destroy(stream));
    cudaStreamQuery, cuStreamQuery(stream: usize) = {
        let mut is_modelled = false;
        let code = with(|machine, state| {
            is_modelled = !state.streams.is_idle(stream, current_device())?;
            if is_modelled && machine.settings.events != Events::Instant {
                Err(not_ready(machine, state))
            } else {
                Ok(())
            }
        });
        if polls::note(is_modelled) && code == 0 {
            machine().state().streams.see_stream(stream, current_device());
        }
        code
    };
    cudaStreamSynchronize(stream: usize) = with_settled(
        |streams| streams.before_idle(stream, current_device()),
        |_, state| state.streams.wait_for(stream, current_device()),
    );
    cudaDeviceSynchronize() = with_settled(
        |streams| streams.before_idle_device(current_device()),
        |_, state| state.streams.wait_for_device(current_device()),
    );
    cudaStreamWaitEvent(stream: usize, event: usize, flags: c_uint) =
        remember(machine().state().streams.wait_in_stream(stream, current_device(), event, flags));
    cudaStreamGetPriority, cuStreamGetPriority(stream: usize, priority: Out<'_, c_int>) =
        with(|_, state| put(priority, state.streams.stream(stream, current_device())?.priority));
    cudaStreamGetFlags, cuStreamGetFlags(stream: usize, flags: Out<'_, c_uint>) =
        with(|_, state| put(flags, state.streams.stream(stream, current_device())?.flags));
    cudaEventCreateWithFlags(event: Out<'_, usize>, _: c_uint) =
        with(|_, state| put(event, state.streams.create_event()));
    cudaEventCreate(event: Out<'_, usize>) = cudaEventCreateWithFlags(event, 0);
    cudaEventRecord(event: usize, stream: usize) = cudaEventRecordWithFlags(event, stream, 0);
    cudaEventRecordWithFlags, cuEventRecordWithFlags(event: usize, stream: usize, flags: c_uint) =
        with(|machine, state| {
            state.streams.record(
                event,
                stream,
                current_device(),
                flags,
                (machine.tick(), machine.late_by()),
            )
        });
    /// Potentially unsafe during a capture, also for events outside of it.
    cudaEventQuery(event: usize) = {
        let (code, is_modelled) = query(event);
        if polls::note(is_modelled) && code == 0 {
            machine().state().streams.see_event(event);
        }
        code
    };
    cudaEventSynchronize(event: usize) = with_settled(
        |streams| streams.before_event(event),
        |_, state| state.streams.wait_for_event(event),
    );
    cudaEventDestroy(event: usize) = with(|_, state| state.streams.destroy_event(event));
    /// Returns a model: [`WORK`] per piece of work between the events, plus injected latencies.
    /// Never zero, because programs divide by it.
    cudaEventElapsedTime, cudaEventElapsedTime_v2(
        milliseconds: Out<'_, c_float>, start: usize, end: usize
    ) = with(|_, state| {
        let (start, early) = state.streams.recorded_at(start)?.ok_or(Code::InvalidHandle)?;
        let (end, late) = state.streams.recorded_at(end)?.ok_or(Code::InvalidHandle)?;
        put(
            milliseconds,
            end.saturating_sub(start).max(1) as c_float * WORK
                + late.saturating_sub(early).0 as c_float / 1e6,
        )
    });
}

/// Answers a query of an event, and returns whether the model decided it.
fn query(event: usize) -> (c_int, bool) {
    let mut is_modelled = false;
    let code = with(|machine, state| {
        state.streams.allow_event(event)?;
        state.streams.allow_unsafe(Caller::current())?;
        is_modelled = state.streams.pending_since(event)?.is_some();
        let answer = state
            .streams
            .query(event, machine.settings.events, machine.now());
        answer.map_err(|code| match code {
            Code::NotReady => not_ready(machine, state),
            code => code,
        })
    });
    (code, is_modelled)
}

/// `cudaEventQuery` for PyTorch's library, which asks whether the blocks that it frees are still in
/// use by another stream.
pub(super) extern "C" fn query_of_torch(event: usize) -> c_int {
    static IS_PENDING: AtomicBool = AtomicBool::new(false);
    let (code, is_modelled) = query(event);
    // A block that is still in use is counted once, and one whose use has ended is not.
    if !IS_PENDING.swap(code != 0, Ordering::Relaxed) && is_modelled {
        machine().counters.count_wait_of_free();
    }
    if is_modelled && machine().settings.events == Events::Instant {
        machine().state().streams.defer(event);
    }
    code
}

/// `cudaEventRecord` for PyTorch's library, which records an event in each stream that uses a block
/// when it frees the block.
pub(super) extern "C" fn record_of_torch(event: usize, stream: usize) -> c_int {
    let code = cudaEventRecord(event, stream);
    if code == 0 {
        machine().state().streams.note_free(event, current_device());
    }
    code
}
