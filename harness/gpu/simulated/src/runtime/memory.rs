//! Device memory, managed and page-locked memory, copies.

use std::ffi::{c_int, c_uint, c_void};
use std::{ptr, slice};

use harness_allocator::{device::PooledDevice as _, units::Bytes};
use harness_gpu_settings::{export, ffi::Out};

use super::graph_memory;
use super::ipc::close;
use super::streams::{allow_synchronous, allow_unsafe, submit, submit_in_order, with};
use crate::code::{Code, put, put_address, remember};
use crate::memory::{DeviceMemory, device_of};
use crate::world::{CREATED, Machine, State, current_device, is_device_memory, machine};
use crate::{contents, host::Kind, nccl, reads};
use harness_gpu_settings::calls::Call;
use harness_gpu_settings::settings::{Cuda, Values};

/// Allocates on a device.
pub(crate) fn allocate(
    machine: &Machine,
    state: &mut State,
    index: usize,
    request: (Call, Bytes),
) -> Result<u64, Code> {
    machine.usable()?;
    if index >= state.devices.len() {
        return Err(Code::NoDevice);
    }
    let start = state.request(machine, request, index, |memory| memory.allocate(request.1))?;
    if let Some(context) = CREATED.get() {
        state.contexts.note(context, start);
    }
    Ok(start)
}

/// Allocates managed memory: host memory that is charged to the current device.
pub(crate) fn allocate_managed(
    machine: &Machine,
    state: &mut State,
    size: Bytes,
) -> Result<u64, Code> {
    let charge = allocate(machine, state, current_device(), (Call::Malloc, size))?;
    let allocated = state
        .host
        .allocate(size.0 as usize, Kind::Managed(charge), None);
    if allocated.is_err() {
        free_on_device(machine, state, charge)?;
    }
    allocated.map(|address| address as u64)
}

/// Frees device memory or managed memory.
pub(crate) fn free(start: u64) -> Result<(), Code> {
    free_after(start, None)
}

/// Frees memory after the work of a stream, if there is one.
fn free_after(start: u64, stream: Option<usize>) -> Result<(), Code> {
    let machine = machine();
    machine.usable()?;
    let state = &mut *machine.state();
    if close(state, start).is_ok() {
        return Ok(()); // It belongs to another process.
    }
    if let Some(freed) = graph_memory::free(machine, state, start, stream) {
        return freed;
    }
    let start = state.host.free_managed(start as usize).unwrap_or(start);
    free_on_device(machine, state, start)
}

pub(crate) fn free_on_device(machine: &Machine, state: &mut State, start: u64) -> Result<(), Code> {
    let index = state.device_at(start)?.index();
    let size = state.release(index, |memory| memory.free(start))?;
    count_free(machine, &mut state.devices[index]);
    state.note_free(machine, index);
    if let Some((device, pool)) = state.pools.forget(start) {
        state.release(device, |memory| Ok(memory.sim().destroy_pool(pool)?))?;
    }
    state.contexts.forget(start);
    state.arrays.remove(&(start as usize));
    state.copied.unshare(start);
    state.copied.forget(start, size.0);
    Ok(())
}

/// Counts a free.
pub(crate) fn count_free(machine: &Machine, memory: &mut DeviceMemory) {
    machine
        .counters
        .count_frees(memory.index(), memory.used(), 1);
}

/// Allocates page-locked memory.
pub(crate) fn allocate_on_host(
    machine: &Machine,
    state: &mut State,
    size: usize,
) -> Result<u64, Code> {
    let get = |state: &mut State| {
        let charged = state.pin(machine, size)?;
        let allocated = state.host.allocate(size, Kind::Pinned, charged);
        if let (Err(_), Some(index)) = (&allocated, charged) {
            state.unpin(index, size)?;
        }
        allocated
    };
    let (allocated, injected) =
        state.attempt(machine, (Call::HostAlloc, Bytes(size as u64)), None, get);
    if allocated.is_err() {
        machine
            .counters
            .count_failed_call(Call::HostAlloc, injected);
    }
    allocated.map(|address| address as u64)
}

/// Frees page-locked memory.
pub(crate) fn free_on_host(state: &mut State, address: usize) -> Result<(), Code> {
    match state.host.free(address)? {
        (Some(index), size) => state.unpin(index, size),
        (None, _) => Ok(()),
    }
}

/// Page-locks memory of the program.
pub(crate) fn register_on_host(
    machine: &Machine,
    state: &mut State,
    address: usize,
    size: usize,
) -> Result<(), Code> {
    if state.host.is_registered(address) {
        return Err(Code::HostMemoryAlreadyRegistered);
    }
    let charged = state.pin(machine, size)?;
    state.host.register(address, size, charged);
    state.enter_pinned();
    state.look_at_machine(machine);
    Ok(())
}

/// Ends the effect of [`register_on_host`].
pub(crate) fn unregister_on_host(state: &mut State, address: usize) -> Result<(), Code> {
    match state.host.unregister(address)? {
        (Some(index), size) => state.unpin(index, size),
        (None, _) => Ok(()),
    }
}

export! {
    cudaMalloc(address: Out<'_, usize>, size: usize) = request(address, size);
    cudaMallocManaged(address: Out<'_, usize>, size: usize, _: c_uint) =
        remember(put_address(address, request_managed(size)));
    cudaFree(address: usize) = give_back(address, Call::Free, None);
    cudaMemGetInfo(free: Out<'_, usize>, total: Out<'_, usize>) = with(|_, state| {
        let (left, all) = state.free_and_total()?;
        put(free, left.0 as usize).and(put(total, all.0 as usize))
    });
    cudaHostAlloc(address: Out<'_, usize>, size: usize, _: c_uint) =
        remember(request_on_host(address, size));
    cudaMallocHost(address: Out<'_, usize>, size: usize) = remember(request_on_host(address, size));
    cudaFreeHost(address: usize) = remember(if address == 0 {
        Ok(())
    } else {
        allow_unsafe().and_then(|()| free_on_host(&mut machine().state(), address))
    });
    cudaHostRegister(address: usize, size: usize, _: c_uint) =
        remember(allow_unsafe().and_then(|()| {
            let machine = machine();
            register_on_host(machine, &mut machine.state(), address, size)
        }));
    cudaHostUnregister(address: usize) =
        remember(
            allow_unsafe().and_then(|()| unregister_on_host(&mut machine().state(), address)),
        );
    cudaHostGetDevicePointer(device: Out<'_, usize>, host: usize, _: c_uint) =
        with(|_, state| put(device, state.host.device_pointer(host)?));
}

/// Allocates device memory for a program. Zero bytes give a null pointer.
fn request(address: Out<'_, usize>, size: usize) -> c_int {
    let machine = machine();
    machine.delay(Call::Malloc);
    let request = (Call::Malloc, Bytes(size as u64));
    let allocate = || {
        if size == 0 {
            Ok(0)
        } else {
            allocate(machine, &mut machine.state(), current_device(), request)
        }
    };
    remember(put_address(
        address,
        allow_unsafe().and_then(|()| allocate()),
    ))
}

fn request_managed(size: usize) -> Result<u64, Code> {
    let machine = machine();
    machine.delay(Call::Malloc);
    allow_unsafe()?;
    if size == 0 {
        return Err(Code::InvalidValue);
    }
    allocate_managed(machine, &mut machine.state(), Bytes(size as u64))
}

/// Frees device memory or managed memory of a program. Null is no memory.
pub(super) fn give_back(address: usize, call: Call, stream: Option<usize>) -> c_int {
    machine().delay(call);
    let allowed = || {
        if call == Call::Free {
            allow_unsafe()
        } else {
            Ok(())
        }
    };
    remember(if address == 0 {
        Ok(())
    } else {
        allowed().and_then(|()| free_after(address as u64, stream))
    })
}

fn request_on_host(address: Out<'_, usize>, size: usize) -> Result<(), Code> {
    let machine = machine();
    machine.usable()?;
    machine.delay(Call::HostAlloc);
    allow_unsafe()?;
    put_address(
        address,
        allocate_on_host(machine, &mut machine.state(), size),
    )
}

/// `cudaPointerAttributes`; releases differ only in reserved bytes at the end.
#[repr(C)]
struct PointerAttributes {
    kind: c_int,
    device: c_int,
    on_device: usize,
    on_host: usize,
}

/// Kinds of memory in [`PointerAttributes`].
const UNREGISTERED: c_int = 0;
const HOST: c_int = 1;
const DEVICE: c_int = 2;
const MANAGED: c_int = 3;

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaPointerGetAttributes(into: *mut u8, address: usize) -> c_int {
    let machine = machine();
    let size = if machine.settings.cuda == Cuda::V13 {
        88
    } else {
        24
    };
    let number = |device: usize| c_int::try_from(device).unwrap_or(-2);
    let around = machine.state().host.around(address);
    let (kind, device, on_device, on_host) = match (device_of(address as u64), around) {
        (Some(device), _) => (DEVICE, number(device), address, 0),
        (None, Some((.., Kind::Managed(charge)))) => (
            MANAGED,
            device_of(charge).map_or(-2, number),
            address,
            address,
        ),
        (None, Some(_)) => (HOST, number(current_device()), address, address),
        (None, None) => (UNREGISTERED, -2, 0, address),
    };
    // SAFETY: the program passes a structure of the CUDA release in the settings.
    unsafe {
        into.write_bytes(0, size);
        into.cast::<PointerAttributes>().write(PointerAttributes {
            kind,
            device,
            on_device,
            on_host,
        });
    }
    0
}

/// Copies bytes between host and device. Device memory reads as zeros, or as the bytes of small
/// copies, or as its contents ([`Values`]).
///
/// # Safety
/// Host addresses belong to the program and have `size` bytes.
pub(super) unsafe fn copy(
    machine: &Machine,
    state: &mut State,
    to: u64,
    from: u64,
    size: usize,
) -> Read {
    if machine.settings.values == Values::Cpu {
        // SAFETY: as the caller promises.
        unsafe { contents::copy(state, to, from, size) };
        return Read::Known;
    }
    let stores = machine.settings.values != Values::Zeros;
    let (host_to, host_from) = (
        ptr::with_exposed_provenance_mut::<u8>(to as usize),
        ptr::with_exposed_provenance::<u8>(from as usize),
    );
    // SAFETY: as the caller promises; `ptr::copy` allows both ranges to overlap.
    unsafe {
        match (is_device_memory(to), is_device_memory(from)) {
            (false, false) => ptr::copy(host_from, host_to, size),
            (false, true) => {
                state.host.clear(to as usize, size);
                if stores {
                    state
                        .copied
                        .read(from, slice::from_raw_parts_mut(host_to, size));
                }
                let into = slice::from_raw_parts_mut(host_to, size);
                if stores && !reads::announced(into) && !state.copied.knows_all(from, size as u64) {
                    return Read::Uncomputed;
                }
            }
            (true, false) if stores => state
                .copied
                .write(to, slice::from_raw_parts(host_from, size)),
            (true, true) if stores => state.copied.copy(to, from, size as u64),
            (true, _) => {}
        }
    }
    Read::Known
}

/// Whether a copy has read values that no model has computed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Read {
    Known,
    Uncomputed,
}

/// A copy to the host reads the results of collectives that its stream waits for. Without a stream,
/// it is in the order of the legacy stream.
pub(super) fn settle_before(copy_to: usize, stream: Option<usize>) {
    if !is_device_memory(copy_to as u64) {
        nccl::settle(|streams| streams.before_next(stream.unwrap_or(0), current_device()));
    }
}

/// The program passes ranges of this size. A captured copy to the host is not executed.
fn queue_copy(to: usize, from: usize, size: usize, stream: Option<usize>) -> Result<(), Code> {
    let machine = machine();
    settle_before(to, stream);
    machine.usable()?;
    machine.tick();
    let is_captured = stream.map_or(Ok(false), submit)?;
    if size > 0 && (!is_captured || is_device_memory(to as u64)) {
        // SAFETY: the host addresses belong to the program.
        let read = unsafe { copy(machine, &mut machine.state(), to as u64, from as u64, size) };
        if read == Read::Uncomputed {
            reads::note(machine);
        }
    }
    Ok(())
}

/// Copies and waits for the default stream.
fn copy_and_wait(to: usize, from: usize, size: usize) -> Result<(), Code> {
    allow_synchronous()?;
    queue_copy(to, from, size, None)?;
    machine().state().streams.wait_for(0, current_device())
}

/// The bytes of larger fills are not stored. A program reads them as zeros.
const LARGEST_FILL: usize = 4096;

/// Fills a range with a pattern. The program passes a range of this size.
pub(crate) fn fill(machine: &Machine, to: u64, size: usize, pattern: &[u8]) {
    if size == 0 {
        return;
    }
    if !is_device_memory(to) {
        // SAFETY: the host address belongs to the program.
        let bytes = unsafe {
            slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut::<u8>(to as usize), size)
        };
        return bytes
            .chunks_mut(pattern.len())
            .for_each(|part| part.copy_from_slice(&pattern[..part.len()]));
    }
    let state = &mut *machine.state();
    match machine.settings.values {
        Values::Cpu => contents::fill(state, to, size, pattern),
        Values::Copies if size <= LARGEST_FILL => {
            let bytes: Vec<u8> = pattern.iter().copied().cycle().take(size).collect();
            state.copied.write(to, &bytes);
        }
        Values::Copies | Values::Zeros => state.copied.forget(to, size as u64),
    }
}

/// CUDA uses the low byte of the value.
fn set_bytes(to: usize, value: c_int, size: usize, stream: Option<usize>) -> Result<(), Code> {
    let machine = machine();
    machine.usable()?;
    machine.tick();
    submit_in_order(stream)?;
    fill(machine, to as u64, size, &[value as u8]);
    Ok(())
}

export! {
    cudaMemcpy(to: usize, from: usize, size: usize, _: c_int) =
        remember(copy_and_wait(to, from, size));
    cudaMemcpyAsync(to: usize, from: usize, size: usize, _: c_int, stream: usize) =
        remember(queue_copy(to, from, size, Some(stream)));
    cudaMemcpyPeer(to: usize, _: c_int, from: usize, _: c_int, size: usize) =
        remember(copy_and_wait(to, from, size));
    cudaMemcpyPeerAsync(to: usize, _: c_int, from: usize, _: c_int, size: usize, stream: usize) =
        remember(queue_copy(to, from, size, Some(stream)));
    cudaGetSymbolAddress(address: Out<'_, usize>, symbol: usize) =
        with(|_, state| put_address(address, symbol_address(state, symbol)));
    cudaMemcpyToSymbol(_: *const c_void, _: *const c_void, _: usize, _: usize, _: c_int) = {
        machine().tick();
        remember(allow_synchronous())
    };
    cudaMemset(to: usize, value: c_int, size: usize) = remember(set_bytes(to, value, size, None));
    cudaMemsetAsync(to: usize, value: c_int, size: usize, stream: usize) =
        remember(set_bytes(to, value, size, Some(stream)));
}

/// Addresses for a variable in device code. Its size is unknown, and larger variables do not exist.
const SYMBOL_SIZE: Bytes = Bytes(4 << 30);

/// Returns a device address without memory: kernels are no-ops, and copies to device memory are
/// only stored.
fn symbol_address(state: &mut State, symbol: usize) -> Result<u64, Code> {
    let index = current_device();
    if let Some(known) = state.symbols.get(&(index, symbol)) {
        return Ok(*known);
    }
    let start = state
        .devices
        .get_mut(index)
        .ok_or(Code::NoDevice)?
        .reserve(SYMBOL_SIZE)?;
    state.symbols.insert((index, symbol), start);
    Ok(start)
}
