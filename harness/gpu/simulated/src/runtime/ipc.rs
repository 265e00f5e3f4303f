//! Memory and events that processes of a run share. Another process's memory is a range of
//! addresses here: kernels are no-ops, and the process that allocated it is charged for it.

use std::ffi::c_uint;

use harness_allocator::units::Bytes;
use harness_gpu_settings::{export, ffi::Out};

use super::streams::with;
use crate::code::{Code, put, put_address};
use crate::opened::{Handle, Opened};
use crate::world::{Machine, State};

fn handle(object: u64, size: u64, device: u32, contents: u64) -> Handle {
    Handle {
        process: u64::from(std::process::id()),
        object,
        size,
        device: u64::from(device),
        contents,
        reserved: [0; 3],
    }
}

export! {
    cudaIpcGetMemHandle, cuIpcGetMemHandle(into: Out<'_, Handle>, address: usize) =
        with(|machine, state| {
            let memory = state.device_at(address as u64)?;
            let (start, size) = memory.range_of(address as u64).ok_or(Code::InvalidValue)?;
            let number = machine.visible.get(memory.index()).ok_or(Code::InvalidDevice)?;
            let contents = memory.contents().map_or(0, |contents| contents.descriptor());
            put(into, handle(start, size.0, *number, contents))
        });
    cudaIpcOpenMemHandle, cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2(
        address: Out<'_, usize>, handle: Handle, _: c_uint
    ) = with(|machine, state| put_address(address, open(machine, state, handle)));
    cudaIpcCloseMemHandle, cuIpcCloseMemHandle(address: usize) =
        with(|_, state| close(state, address as u64));
    cudaIpcGetEventHandle, cuIpcGetEventHandle(into: Out<'_, Handle>, event: usize) =
        with(|_, _| put(into, handle(event as u64, 0, 0, 0)));
    /// Returns a new event, which is done: work takes no time.
    cudaIpcOpenEventHandle, cuIpcOpenEventHandle(event: Out<'_, usize>, _: Handle) =
        with(|_, state| put(event, state.streams.create_event()));
}

/// The unit of reserved addresses.
const PAGE: u64 = 2 << 20;

/// A process cannot open its own memory, as in CUDA.
fn open(machine: &Machine, state: &mut State, handle: Handle) -> Result<u64, Code> {
    if handle.process == u64::from(std::process::id()) {
        return Err(Code::InvalidContext);
    }
    if let Some(opened) = state.opened.get_mut(&handle) {
        opened.count += 1;
        return Ok(opened.start);
    }
    let index = machine
        .visible
        .iter()
        .position(|number| u64::from(*number) == handle.device)
        .ok_or(Code::InvalidDevice)?;
    let size = Bytes(handle.size.next_multiple_of(PAGE));
    let memory = state.devices.get_mut(index).ok_or(Code::InvalidDevice)?;
    let start = memory.reserve(size)?;
    if let Some(contents) = memory.contents() {
        contents.remove(start);
        contents
            .add_of(
                start,
                handle.size,
                (handle.process, handle.contents, handle.object),
            )
            .map_err(|_| Code::InvalidValue)?;
    }
    state.opened.insert(
        handle,
        Opened {
            start,
            size,
            count: 1,
        },
    );
    Ok(start)
}

fn close(state: &mut State, address: u64) -> Result<(), Code> {
    let (&handle, opened) = state
        .opened
        .iter_mut()
        .find(|(_, opened)| opened.start == address)
        .ok_or(Code::InvalidValue)?;
    opened.count -= 1;
    if opened.count > 0 {
        return Ok(());
    }
    let Opened { start, size, .. } = *opened;
    state.opened.remove(&handle);
    state.device_at(start)?.unreserve(start, size)
}
