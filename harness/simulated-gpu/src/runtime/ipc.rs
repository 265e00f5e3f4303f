//! Memory and events that processes of a run share. Another process's memory is a range of addresses here: kernels are no-ops, and the process that
//! allocated it is charged for it.

use std::ffi::{c_int, c_uint};

use harness_allocator::units::Bytes;
use harness_gpu_settings::ffi::Out;

use crate::code::{Code, put, put_address, remember};
use crate::world::{State, machine};

/// `cudaIpcMemHandle_t` and `cudaIpcEventHandle_t`: 64 bytes, which processes only pass around.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(C)]
pub(crate) struct Handle {
    process: u64,
    /// The start of the allocation, or the event, in its process.
    object: u64,
    size: u64,
    /// The real number of the device.
    device: u64,
    reserved: [u64; 4],
}

/// Memory of another process that this one has opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opened {
    start: u64,
    size: Bytes,
    /// The number of opens without a close.
    count: u32,
}

fn handle(object: u64, size: u64, device: u32) -> Handle {
    Handle { process: u64::from(std::process::id()), object, size, device: u64::from(device), reserved: [0; 4] }
}

#[unsafe(no_mangle)]
extern "C" fn cudaIpcGetMemHandle(into: Out<'_, Handle>, address: usize) -> c_int {
    let machine = machine();
    let of_memory = |state: &mut State| {
        let memory = state.device_at(address as u64)?;
        let (start, size) = memory.range_of(address as u64).ok_or(Code::InvalidValue)?;
        let number = machine.visible.get(memory.index()).ok_or(Code::InvalidDevice)?;
        put(into, handle(start, size.0, *number))
    };
    remember(machine.usable().and_then(|()| of_memory(&mut machine.state())))
}

/// A process cannot open its own memory, as in CUDA.
#[unsafe(no_mangle)]
extern "C" fn cudaIpcOpenMemHandle(address: Out<'_, usize>, handle: Handle, _: c_uint) -> c_int {
    let machine = machine();
    let open = |state: &mut State| {
        if handle.process == u64::from(std::process::id()) {
            return Err(Code::InvalidContext);
        }
        if let Some(opened) = state.opened.get_mut(&handle) {
            opened.count += 1;
            return Ok(opened.start);
        }
        let index = machine.visible.iter().position(|number| u64::from(*number) == handle.device).ok_or(Code::InvalidDevice)?;
        let size = Bytes(handle.size);
        let start = state.devices.get_mut(index).ok_or(Code::InvalidDevice)?.reserve(size)?;
        state.opened.insert(handle, Opened { start, size, count: 1 });
        Ok(start)
    };
    remember(put_address(address, machine.usable().and_then(|()| open(&mut machine.state()))))
}

#[unsafe(no_mangle)]
extern "C" fn cudaIpcCloseMemHandle(address: usize) -> c_int {
    let machine = machine();
    let close = |state: &mut State| {
        let mut opened = state.opened.iter_mut();
        let (&handle, opened) = opened.find(|(_, opened)| opened.start == address as u64).ok_or(Code::InvalidValue)?;
        opened.count -= 1;
        if opened.count > 0 {
            return Ok(());
        }
        let Opened { start, size, .. } = *opened;
        state.opened.remove(&handle);
        state.device_at(start)?.unreserve(start, size)
    };
    remember(machine.usable().and_then(|()| close(&mut machine.state())))
}

#[unsafe(no_mangle)]
extern "C" fn cudaIpcGetEventHandle(into: Out<'_, Handle>, event: usize) -> c_int {
    remember(machine().usable().and_then(|()| put(into, handle(event as u64, 0, 0))))
}

/// Returns a new event, which is done: work takes no time.
#[unsafe(no_mangle)]
extern "C" fn cudaIpcOpenEventHandle(event: Out<'_, usize>, _: Handle) -> c_int {
    remember(machine().usable().and_then(|()| put(event, machine().state().streams.create_event())))
}
