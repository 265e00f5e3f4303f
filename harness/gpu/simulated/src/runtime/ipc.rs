//! Memory and events that processes of a run share. Another process's memory is a range of
//! addresses here: kernels are no-ops, and the process that allocated it is charged for it. Without
//! computed values, the contents of shared memory are unknown in each process until it is freed.

use std::ffi::{c_int, c_uint, c_ulonglong};
use std::io::Write as _;
use std::os::fd::{FromRawFd as _, IntoRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::{fs::File, mem::ManuallyDrop};

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
            state.copied.share(start, size.0);
            put(into, handle(start, size.0, *number, contents))
        });
    cudaIpcOpenMemHandle, cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2(
        address: Out<'_, usize>, handle: Handle, _: c_uint
    ) = with(|machine, state| put_address(address, open(machine, state, handle)));
    cudaIpcCloseMemHandle, cuIpcCloseMemHandle(address: usize) =
        with(|_, state| close(state, address as u64));
    /// A descriptor of a file with a [`Handle`] of the pool.
    cudaMemPoolExportToShareableHandle, cuMemPoolExportToShareableHandle(
        into: Out<'_, c_int>, pool: usize, kind: c_uint, _: c_ulonglong
    ) = with(|machine, state| put(into, export_pool(machine, state, pool, kind)?));
    cudaMemPoolImportFromShareableHandle, cuMemPoolImportFromShareableHandle(
        pool: Out<'_, usize>, descriptor: usize, kind: c_uint, _: c_ulonglong
    ) = with(|machine, state| put(pool, import_pool(machine, state, descriptor, kind)?));
    cudaMemPoolExportPointer, cuMemPoolExportPointer(into: Out<'_, Handle>, address: usize) =
        with(|machine, state| put(into, of_pooled(machine, state, address as u64)?));
    cudaMemPoolImportPointer, cuMemPoolImportPointer(
        address: Out<'_, usize>, pool: usize, handle: Option<&Handle>
    ) = with(|machine, state| {
        state.pools.get(pool)?;
        put_address(address, open(machine, state, *handle.ok_or(Code::InvalidValue)?))
    });
    cudaIpcGetEventHandle, cuIpcGetEventHandle(into: Out<'_, Handle>, event: usize) =
        with(|_, _| put(into, handle(event as u64, 0, 0, 0)));
    /// Returns a new event, which is done: work takes no time.
    cudaIpcOpenEventHandle, cuIpcOpenEventHandle(event: Out<'_, usize>, _: Handle) =
        with(|_, state| put(event, state.streams.create_event()));
}

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const FILE_DESCRIPTOR: c_uint = 1;

fn export_pool(
    machine: &Machine,
    state: &mut State,
    pool: usize,
    kind: c_uint,
) -> Result<c_int, Code> {
    let (device, known) = state.pools.get(pool)?;
    if kind != FILE_DESCRIPTOR || known.handle_types & kind == 0 {
        return Err(Code::InvalidValue);
    }
    let number = machine.visible.get(device).ok_or(Code::InvalidDevice)?;
    // SAFETY: the name is a C string, and the descriptor is new.
    let mut file = unsafe {
        match libc::memfd_create(c"simulated-gpu-pool".as_ptr(), libc::MFD_CLOEXEC) {
            -1 => return Err(Code::OutOfMemory),
            descriptor => File::from_raw_fd(descriptor),
        }
    };
    file.write_all(&handle(pool as u64, 0, *number, 0).bytes())
        .map_err(|_| Code::OutOfMemory)?;
    Ok(file.into_raw_fd())
}

fn import_pool(
    machine: &Machine,
    state: &mut State,
    descriptor: usize,
    kind: c_uint,
) -> Result<usize, Code> {
    let descriptor = c_int::try_from(descriptor).map_err(|_| Code::InvalidValue)?;
    if kind != FILE_DESCRIPTOR {
        return Err(Code::InvalidValue);
    }
    // SAFETY: the program passes a descriptor and keeps it.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(descriptor) });
    let mut bytes = [0; 64];
    file.read_exact_at(&mut bytes, 0)
        .map_err(|_| Code::InvalidValue)?;
    let number = Handle::of_bytes(&bytes).device;
    Ok(state.pools.import(index_of(machine, number)?))
}

/// The handle of an allocation of a pool.
fn of_pooled(machine: &Machine, state: &mut State, address: u64) -> Result<Handle, Code> {
    let memory = state.device_at(address)?;
    let (start, size) = memory.pooled_around(address).ok_or(Code::InvalidValue)?;
    let number = machine
        .visible
        .get(memory.index())
        .ok_or(Code::InvalidDevice)?;
    let contents = memory
        .contents()
        .map_or(0, |contents| contents.descriptor());
    state.copied.share(start, size.0);
    Ok(handle(start, size.0, *number, contents))
}

/// The index of the device with a real number.
fn index_of(machine: &Machine, number: u64) -> Result<usize, Code> {
    let mut visible = machine.visible.iter();
    visible
        .position(|visible| u64::from(*visible) == number)
        .ok_or(Code::InvalidDevice)
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
    let index = index_of(machine, handle.device)?;
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
    state.copied.share(start, size.0);
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

/// Closes memory of another process.
pub(super) fn close(state: &mut State, address: u64) -> Result<(), Code> {
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
    state.copied.unshare(start);
    state.device_at(start)?.unreserve(start, size)
}
