//! The frame of driver calls: injected errors, contexts, and waits. [`Gpu`] is the device of a
//! context whose kernels execute.
//!
//! If kernels are no-ops, every thread has a context and no call waits.

use std::{cell::RefCell, ffi::c_int, sync::atomic::Ordering, thread, time::Duration};

use harness_allocator::device::{Device as _, EventId, PoolId, StreamId, sim::SimDevice};
use harness_allocator::units::{Bytes, Nanos};
use harness_gpu_settings::ffi::Out;

use crate::code::{Code, answer, put};
use crate::runtime::memory::free_on_device;
use crate::world::{
    CREATED, CURRENT, FUNCTION, Machine, State, current_device, machine, note_refusal,
    set_current_device,
};
use crate::{
    calls::append, execution::Execution, handles::Handles, kernels::Work, memory::DeviceMemory,
};

/// The handle of a context is this plus the index of its device.
const CONTEXT: usize = 0x8_0000_0000;
/// Handles of streams, events and pools if kernels execute.
const STREAMS: Handles = Handles::starting_at(1 << 44);
const EVENTS: Handles = Handles::starting_at(2 << 44);
const POOLS: Handles = Handles::starting_at(3 << 44);

thread_local! {
    /// Devices and handles of the contexts below the current one, on the thread's stack of
    /// contexts.
    static BELOW: RefCell<Vec<(Option<usize>, Option<usize>)>> = const { RefCell::new(Vec::new()) };
}

pub(crate) struct Gpu<'a> {
    pub(crate) machine: &'static Machine,
    pub(crate) memory: &'a mut DeviceMemory,
    pub(crate) execution: &'a mut Execution,
}

/// Runs a call unless the settings inject an error into it.
pub(crate) fn call(function: &'static str, body: impl FnOnce() -> c_int) -> c_int {
    let outer = FUNCTION.replace(function);
    let result = unless_injected(function, body);
    note_refusal(result);
    FUNCTION.set(outer);
    result
}

/// Runs a call, of NVML too, unless the settings inject an error into it.
pub(crate) fn unless_injected(function: &'static str, body: impl FnOnce() -> c_int) -> c_int {
    let injected = machine().calls.injected_error(function);
    injected.unwrap_or_else(body)
}

pub(crate) fn in_context(
    function: &'static str,
    body: impl FnOnce(&'static Machine, &mut State) -> Result<(), Code>,
) -> c_int {
    call(function, || {
        let machine = machine();
        answer(machine.usable().and_then(|()| {
            let state = &mut *machine.state();
            if machine.executes_kernels() {
                current(machine, state)?;
            }
            body(machine, state)
        }))
    })
}

/// Runs one of two implementations of a call: for kernels that are no-ops, or for kernels that
/// execute.
pub(crate) fn by_kernel_mode(
    function: &'static str,
    no_op: impl FnOnce() -> c_int,
    execute: impl FnOnce() -> Result<(), Code>,
) -> c_int {
    call(function, || match machine().usable() {
        Ok(()) if machine().executes_kernels() => answer(execute()),
        Ok(()) => no_op(),
        unusable => answer(unusable),
    })
}

/// Runs one of two implementations of a call with an output, likewise. `execute` returns the
/// output.
pub(crate) fn output_by_kernel_mode<'a, T>(
    function: &'static str,
    place: Out<'a, T>,
    no_op: impl FnOnce(Out<'a, T>) -> c_int,
    execute: impl FnOnce() -> Result<T, Code>,
) -> c_int {
    call(function, || match machine().usable() {
        Ok(()) if machine().executes_kernels() => {
            answer(execute().and_then(|value| put(place, value)))
        }
        Ok(()) => no_op(place),
        unusable => answer(unusable),
    })
}

pub(crate) fn on_gpu<T>(body: impl FnOnce(&mut Gpu<'_>) -> Result<T, Code>) -> Result<T, Code> {
    let machine = machine();
    let state = &mut *machine.state();
    let result = body(&mut current(machine, state)?);
    if let Some(index) = CURRENT.get() {
        state.enter_held(index);
    }
    result
}

/// Waits until a time without the lock, so other threads can make calls. Then runs `then`.
pub(crate) fn wait(
    until: impl FnOnce(&mut Gpu<'_>) -> Result<Nanos, Code>,
    then: impl FnOnce(&mut Gpu<'_>) -> Result<(), Code>,
) -> Result<(), Code> {
    let end = on_gpu(until)?;
    while let Some(left) = end
        .0
        .checked_sub(machine().host_time().0)
        .filter(|left| *left > 0)
    {
        thread::sleep(Duration::from_nanos(left));
    }
    on_gpu(then)
}

fn current<'a>(machine: &'static Machine, state: &'a mut State) -> Result<Gpu<'a>, Code> {
    let index = CURRENT.get().ok_or(Code::InvalidContext)?;
    let others = machine
        .settings
        .processes
        .then(|| machine.settings.others + state.held_by_others(index));
    let State {
        devices,
        executions,
        ..
    } = state;
    let execution = executions
        .get_mut(index)
        .filter(|execution| execution.references > 0)
        .ok_or(Code::InvalidContext)?;
    let memory = devices.get_mut(index).ok_or(Code::InvalidContext)?;
    if let Some(others) = others {
        memory.set_others(others);
    }
    execution.settle(memory, machine.host_time())?;
    Ok(Gpu {
        machine,
        memory,
        execution,
    })
}

/// Refuses a call before `cuInit`, and in a child with the contexts of its parent.
pub(crate) fn initialized() -> Result<(), Code> {
    let machine = machine();
    machine.usable()?;
    let early = machine.executes_kernels() && !machine.initialized.load(Ordering::Relaxed);
    if early {
        Err(Code::NotInitialized)
    } else {
        Ok(())
    }
}

pub(crate) const fn context_of(index: usize) -> usize {
    CONTEXT + index
}

/// Adds a reference to the primary context of a device, and returns its handle.
pub(crate) fn retain(index: usize) -> usize {
    let state = &mut *machine().state();
    if let Some(execution) = state.executions.get_mut(index) {
        execution.references += 1;
    }
    state.enter_held(index);
    context_of(index)
}

/// Removes a reference. The last one destroys the context and everything in it.
pub(crate) fn release(index: usize) -> Result<(), Code> {
    let machine = machine();
    let state = &mut *machine.state();
    let State {
        devices,
        executions,
        ..
    } = state;
    let Some((memory, execution)) = devices.get_mut(index).zip(executions.get_mut(index)) else {
        return Ok(());
    };
    execution.references = execution
        .references
        .checked_sub(1)
        .ok_or(Code::InvalidContext)?;
    if execution.references == 0 {
        if let Some(path) = &machine.leaks_file {
            append(path, &leaks(index, memory, execution));
        }
        *memory = DeviceMemory::new(index, &machine.settings);
        *execution = Execution::new(index, &machine.settings);
    }
    state.enter_held(index);
    Ok(())
}

/// A line with the resources that leak in a destroyed context.
fn leaks(index: usize, memory: &DeviceMemory, execution: &Execution) -> String {
    let left = memory.left();
    format!(
        "device {index} left: {} allocations, {} reservations, {} pages, {} pools, {} streams, {} \
         events, {} modules, {} pieces of work\n",
        left.allocations,
        left.reservations,
        memory.pages(),
        left.pools,
        execution.streams,
        left.events,
        execution.modules(),
        execution.queued()
    )
}

/// Makes the primary context of a device current.
pub(crate) fn use_primary(index: usize) -> Result<(), Code> {
    set_current_device(index)?;
    CREATED.set(None);
    Ok(())
}

pub(crate) fn current_context() -> usize {
    CREATED.get().unwrap_or_else(|| {
        if machine().executes_kernels() {
            CURRENT.get().map_or(0, context_of)
        } else {
            context_of(current_device())
        }
    })
}

pub(crate) fn set_context(context: usize) -> Result<(), Code> {
    match checked_device(context)? {
        Some(index) => make_current(context, index),
        None if machine().executes_kernels() => CURRENT.set(None),
        None => {}
    }
    Ok(())
}

/// Makes an existing context current.
fn make_current(context: usize, index: usize) {
    CURRENT.set(Some(index));
    CREATED.set(Some(context).filter(|context| *context != context_of(index)));
}

/// Pushes a context on the thread's stack, which makes it current.
pub(crate) fn push_context(context: usize) -> Result<(), Code> {
    let index = checked_device(context)?.ok_or(Code::InvalidContext)?;
    BELOW.with_borrow_mut(|below| below.push((CURRENT.get(), CREATED.get())));
    make_current(context, index);
    Ok(())
}

/// Pops the current context from the thread's stack and returns it.
pub(crate) fn pop_context() -> Result<usize, Code> {
    machine().usable()?;
    let popped = current_context();
    let (device, created) = BELOW.with_borrow_mut(Vec::pop).unwrap_or_default();
    CURRENT.set(device);
    CREATED.set(created);
    if popped == 0 {
        Err(Code::InvalidContext)
    } else {
        Ok(popped)
    }
}

/// Creates a context on a device and pushes it on the thread's stack. The first context of a device
/// takes memory when the device is first used, a further one now.
pub(crate) fn create_context(index: usize) -> Result<usize, Code> {
    let machine = machine();
    if machine.executes_kernels() {
        return Err(Code::NotSupported);
    }
    let state = &mut *machine.state();
    let size = machine.settings.context_overhead;
    let has_context = state
        .devices
        .get(index)
        .is_some_and(DeviceMemory::has_context);
    let is_charged = size > Bytes::ZERO && state.contexts.takes_more(index, has_context);
    if is_charged {
        state.on_device(index, |memory| memory.take_for_library(size))?;
    }
    let context = state.contexts.create(index, is_charged);
    BELOW.with_borrow_mut(|below| below.push((CURRENT.get(), CREATED.get())));
    make_current(context, index);
    Ok(context)
}

/// Destroys a created context and frees its memory. If it is current, pops it.
pub(crate) fn destroy_context(context: usize) -> Result<(), Code> {
    let machine = machine();
    machine.usable()?;
    let state = &mut *machine.state();
    let destroyed = state.contexts.remove(context).ok_or(Code::InvalidContext)?;
    state
        .host
        .free_all_managed(|charge| destroyed.allocations.contains(&charge));
    for start in destroyed.allocations {
        free_on_device(machine, state, start)?;
    }
    if destroyed.is_charged {
        state.release(destroyed.device, |memory| {
            memory.return_of_library(machine.settings.context_overhead);
            Ok(())
        })?;
    }
    if CREATED.get() == Some(context) {
        let (device, created) = BELOW.with_borrow_mut(Vec::pop).unwrap_or_default();
        CURRENT.set(device);
        CREATED.set(created);
    }
    Ok(())
}

/// The device of a context; `None` for null.
pub(crate) fn checked_device(context: usize) -> Result<Option<usize>, Code> {
    let machine = machine();
    machine.usable()?;
    if context == 0 {
        return Ok(None);
    }
    let state = machine.state();
    let is_primary = |index: &usize| {
        let is_retained = |execution: &Execution| execution.references > 0;
        *index < machine.visible.len()
            && (!machine.executes_kernels()
                || state.executions.get(*index).is_some_and(is_retained))
    };
    let primary = context.checked_sub(CONTEXT).filter(is_primary);
    primary
        .or_else(|| state.contexts.device(context))
        .map(Some)
        .ok_or(Code::InvalidContext)
}

/// The device of a stream. The default stream belongs to the thread's context.
pub(crate) fn device_of_stream(stream: usize) -> Result<usize, Code> {
    if stream == 0 {
        return on_gpu(|gpu| Ok(gpu.memory.index()));
    }
    let (index, number) = STREAMS.device_and_number(stream)?;
    let mut state = machine().state();
    state
        .devices
        .get_mut(index)
        .ok_or(Code::InvalidHandle)?
        .sim()
        .stream_done_at(StreamId(number))?;
    Ok(index)
}

impl Gpu<'_> {
    pub(crate) const fn sim(&mut self) -> &mut SimDevice {
        self.memory.sim()
    }

    fn number(&self, handles: Handles, handle: usize) -> Result<u32, Code> {
        let (index, number) = handles.device_and_number(handle)?;
        if index == self.memory.index() {
            Ok(number)
        } else {
            Err(Code::InvalidHandle)
        }
    }

    pub(crate) fn stream(&mut self, stream: usize) -> Result<StreamId, Code> {
        let id = if stream == 0 {
            StreamId::DEFAULT
        } else {
            StreamId(self.number(STREAMS, stream)?)
        };
        self.sim().stream_done_at(id)?;
        Ok(id)
    }

    /// When the submitted work of a stream ends or ended.
    pub(crate) fn stream_done_at(&mut self, stream: usize) -> Result<Nanos, Code> {
        let id = self.stream(stream)?;
        Ok(self.sim().stream_done_at(id)?)
    }

    /// Creates a stream. The simulated device does not own it, because its work continues after its
    /// destruction.
    pub(crate) fn create_stream(&mut self) -> Result<usize, Code> {
        let id = self.sim().borrow_stream()?;
        self.execution.streams += 1;
        Ok(STREAMS.on_device(self.memory.index(), id.0))
    }

    pub(crate) fn destroy_stream(&mut self, stream: usize) -> Result<(), Code> {
        let id = self.stream(stream)?;
        self.sim().release_stream(id)?;
        self.execution.streams -= 1;
        Ok(())
    }

    pub(crate) fn submit(&mut self, stream: usize, work: Work) -> Result<(), Code> {
        let id = self.stream(stream)?;
        self.execution.submit(self.memory, id, work)?;
        self.execution.settle(self.memory, self.machine.host_time())
    }

    pub(crate) fn event(&self, event: usize) -> Result<EventId, Code> {
        self.number(EVENTS, event).map(EventId)
    }

    pub(crate) fn event_handle(&self, event: EventId) -> usize {
        EVENTS.on_device(self.memory.index(), event.0)
    }

    pub(crate) fn pool(&self, pool: usize) -> Result<PoolId, Code> {
        self.number(POOLS, pool)
            .map(PoolId)
            .map_err(|_| Code::InvalidValue)
    }

    pub(crate) fn pool_handle(&self, pool: PoolId) -> usize {
        POOLS.on_device(self.memory.index(), pool.0)
    }
}
