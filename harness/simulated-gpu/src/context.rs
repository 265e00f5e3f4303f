//! Calls of the driver: those that are refused, those that need a context, and those that wait. [`Gpu`] is the device of a context where kernels
//! are really done.
//!
//! Where kernels are skipped every thread has a context, and nothing waits.

use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use harness_allocator::device::{Device as _, EventId, PoolId, StreamId};
use harness_allocator::units::Nanos;

use crate::calls::append;
use crate::code::{Code, answer};
use crate::execution::Execution;
use crate::kernels::Work;
use crate::memory::DeviceMemory;
use crate::world::{Machine, State, choose_no_device, chosen_device, current_device, machine, set_current_device};

/// What a context is handed out as, plus the index of its device.
const CONTEXT: usize = 0x8_0000_0000;
/// The first handles of streams, events and pools where kernels are done: a device has 2^36 of each, and every number has 16.
const STREAMS: usize = 1 << 44;
const EVENTS: usize = 2 << 44;
const POOLS: usize = 3 << 44;

/// The device of a context, for one call.
pub(crate) struct Gpu<'a> {
    pub(crate) machine: &'static Machine,
    pub(crate) memory: &'a mut DeviceMemory,
    pub(crate) execution: &'a mut Execution,
}

/// Answers a call, unless it is one of those that are refused.
pub(crate) fn call(function: &'static str, body: impl FnOnce() -> c_int) -> c_int {
    machine().calls.refusal(function).unwrap_or_else(body)
}

/// Answers a call that needs a context, with all state.
pub(crate) fn in_context(function: &'static str, body: impl FnOnce(&'static Machine, &mut State) -> Result<(), Code>) -> c_int {
    call(function, || {
        let machine = machine();
        let state = &mut *machine.state();
        let usable = if machine.does_kernels() { current(machine, state).map(drop) } else { machine.usable() };
        answer(usable.and_then(|()| body(machine, state)))
    })
}

/// Answers a call where kernels are skipped, or where they are done.
pub(crate) fn either(function: &'static str, skipped: impl FnOnce() -> c_int, done: impl FnOnce() -> Result<(), Code>) -> c_int {
    call(function, || match machine().usable() {
        Ok(()) if machine().does_kernels() => answer(done()),
        Ok(()) => skipped(),
        unusable => answer(unusable),
    })
}

/// Does something on the device of the thread's context.
pub(crate) fn on_gpu(body: impl FnOnce(&mut Gpu<'_>) -> Result<(), Code>) -> Result<(), Code> {
    let machine = machine();
    let state = &mut *machine.state();
    let done = body(&mut current(machine, state)?);
    if let Some(index) = chosen_device() {
        state.enter_held(index);
    }
    done
}

/// Waits until a time without the lock, so that other threads may call, and then does something.
pub(crate) fn wait(
    until: impl FnOnce(&mut Gpu<'_>) -> Result<Nanos, Code>,
    then: impl FnOnce(&mut Gpu<'_>) -> Result<(), Code>,
) -> Result<(), Code> {
    let mut end = Nanos::ZERO;
    on_gpu(|gpu| {
        end = until(gpu)?;
        Ok(())
    })?;
    while let Some(left) = end.0.checked_sub(machine().host_time().0).filter(|left| *left > 0) {
        thread::sleep(Duration::from_nanos(left));
    }
    on_gpu(then)
}

/// The device of the thread's context, whose due work is done first.
fn current<'a>(machine: &'static Machine, state: &'a mut State) -> Result<Gpu<'a>, Code> {
    let index = chosen_device().ok_or(Code::InvalidContext)?;
    let others = machine.settings.processes.then(|| machine.others() + state.held_by_others(index));
    let State { devices, executions, .. } = state;
    let execution = executions.get_mut(index).filter(|execution| execution.references > 0).ok_or(Code::InvalidContext)?;
    let memory = devices.get_mut(index).ok_or(Code::InvalidContext)?;
    if let Some(others) = others {
        memory.set_others(others);
    }
    execution.settle(memory, machine.host_time())?;
    Ok(Gpu { machine, memory, execution })
}

/// Refuses a call before `cuInit`, and where that cannot be.
pub(crate) fn initialised() -> Result<(), Code> {
    let machine = machine();
    machine.usable()?;
    let early = machine.does_kernels() && !machine.initialised.load(Ordering::Relaxed);
    if early { Err(Code::NotInitialized) } else { Ok(()) }
}

/// The handle of a device's context.
pub(crate) const fn context_of(index: usize) -> usize {
    CONTEXT + index
}

/// One more reference to the context of a device.
pub(crate) fn retain(index: usize) {
    let state = &mut *machine().state();
    if let Some(execution) = state.executions.get_mut(index) {
        execution.references += 1;
    }
    state.enter_held(index);
}

/// One reference less; the last one ends the context, with all that is left in it.
pub(crate) fn release(index: usize) -> Result<(), Code> {
    let machine = machine();
    let state = &mut *machine.state();
    let State { devices, executions, .. } = state;
    let Some((memory, execution)) = devices.get_mut(index).zip(executions.get_mut(index)) else { return Ok(()) };
    execution.references = execution.references.checked_sub(1).ok_or(Code::InvalidContext)?;
    if execution.references == 0 {
        if let Some(path) = &machine.left {
            append(path, &left(index, memory, execution));
        }
        *memory = DeviceMemory::new(index, &machine.settings);
        *execution = Execution::new(index, &machine.settings);
    }
    state.enter_held(index);
    Ok(())
}

/// What is left in a context that ends, as a line.
fn left(index: usize, memory: &DeviceMemory, execution: &Execution) -> String {
    let left = memory.left();
    format!(
        "device {index} left: {} allocations, {} reservations, {} pages, {} pools, {} streams, {} events, {} modules, {} pieces of work\n",
        left.allocations,
        left.reservations,
        left.pages,
        left.pools,
        execution.streams,
        left.events,
        execution.modules(),
        execution.queued()
    )
}

/// The context of the calling thread, or null.
pub(crate) fn current_context() -> usize {
    if machine().does_kernels() { chosen_device().map_or(0, context_of) } else { context_of(current_device()) }
}

/// Makes a context the calling thread's, or none.
pub(crate) fn set_context(context: usize) -> Result<(), Code> {
    let machine = machine();
    machine.usable()?;
    let Some(index) = context.checked_sub(CONTEXT) else {
        if machine.does_kernels() {
            choose_no_device();
        }
        return Ok(());
    };
    if machine.does_kernels() && machine.state().executions.get(index).is_none_or(|execution| execution.references == 0) {
        return Err(Code::InvalidContext);
    }
    set_current_device(index)
}

/// The device that a stream is of; the default stream is of the thread's context.
pub(crate) fn device_of_stream(stream: usize) -> Result<usize, Code> {
    if stream == 0 {
        let mut index = 0;
        on_gpu(|gpu| {
            index = gpu.memory.index();
            Ok(())
        })?;
        return Ok(index);
    }
    let index = stream.checked_sub(STREAMS).ok_or(Code::InvalidHandle)? >> 36;
    let mut state = machine().state();
    let memory = state.devices.get_mut(index).ok_or(Code::InvalidHandle)?;
    let number = number(STREAMS, index, stream)?;
    memory.sim().stream_done_at(StreamId(number))?;
    Ok(index)
}

/// The handle of something that a device numbers.
const fn handle(first: usize, index: usize, number: u32) -> usize {
    first + (index << 36) + (number as usize + 1) * 16
}

/// The number that a handle stands for on a device.
fn number(first: usize, index: usize, handle: usize) -> Result<u32, Code> {
    let offset = handle.checked_sub(first + (index << 36)).filter(|offset| offset.is_multiple_of(16)).ok_or(Code::InvalidHandle)?;
    (offset / 16).checked_sub(1).and_then(|number| u32::try_from(number).ok()).ok_or(Code::InvalidHandle)
}

impl Gpu<'_> {
    /// The stream with a handle, null being the default stream.
    pub(crate) fn stream(&mut self, stream: usize) -> Result<StreamId, Code> {
        let id = if stream == 0 { StreamId::DEFAULT } else { StreamId(number(STREAMS, self.memory.index(), stream)?) };
        self.memory.sim().stream_done_at(id)?;
        Ok(id)
    }

    /// When the work of a stream so far is done: now, or later.
    pub(crate) fn stream_done_at(&mut self, stream: usize) -> Result<Nanos, Code> {
        let id = self.stream(stream)?;
        Ok(self.memory.sim().stream_done_at(id)?)
    }

    /// Makes a stream. Its work goes on when it is destroyed, so it is one that the simulated device does not own.
    pub(crate) fn create_stream(&mut self) -> Result<usize, Code> {
        let id = self.memory.sim().borrow_stream()?;
        self.execution.streams += 1;
        Ok(handle(STREAMS, self.memory.index(), id.0))
    }

    pub(crate) fn destroy_stream(&mut self, stream: usize) -> Result<(), Code> {
        let id = self.stream(stream)?;
        self.memory.sim().release_stream(id)?;
        self.execution.streams -= 1;
        Ok(())
    }

    /// Queues work on a stream.
    pub(crate) fn submit(&mut self, stream: usize, work: Work) -> Result<(), Code> {
        let id = self.stream(stream)?;
        self.execution.submit(self.memory, id, work)?;
        self.execution.settle(self.memory, self.machine.host_time())
    }

    pub(crate) fn event(&self, event: usize) -> Result<EventId, Code> {
        Ok(EventId(number(EVENTS, self.memory.index(), event)?))
    }

    pub(crate) fn event_handle(&self, event: EventId) -> usize {
        handle(EVENTS, self.memory.index(), event.0)
    }

    pub(crate) fn pool(&self, pool: usize) -> Result<PoolId, Code> {
        Ok(PoolId(number(POOLS, self.memory.index(), pool).map_err(|_| Code::InvalidValue)?))
    }

    pub(crate) fn pool_handle(&self, pool: PoolId) -> usize {
        handle(POOLS, self.memory.index(), pool.0)
    }
}
