//! Device memory, page-locked host memory, copies.

use std::ffi::{c_int, c_uint, c_void};
use std::{ptr, slice};

use harness_allocator::units::Bytes;

use crate::code::{Code, remember};
use crate::memory::{DeviceMemory, device_of};
use crate::world::{Machine, State, current_device, is_device_memory, machine};
use harness_gpu_settings::calls::{FaultyCall, SlowCall};
use harness_gpu_settings::counters::Figure;
use harness_gpu_settings::settings::{Cuda, Values};

/// Allocates on the current device.
pub(crate) fn allocate(machine: &Machine, state: &mut State, call: FaultyCall, size: Bytes) -> Result<u64, Code> {
    machine.usable()?;
    let index = current_device();
    if index >= state.devices.len() {
        return Err(Code::NoDevice);
    }
    let (allocated, injected) =
        state.attempt(machine, (call, size), Some(index), |state| state.on_device(index, |memory| memory.allocate(size)));
    machine.counters.count_allocation(index, state.devices[index].used(), injected, allocated.is_err());
    allocated
}

/// Gives an allocation back.
pub(crate) fn free(start: u64) -> Result<(), Code> {
    let machine = machine();
    machine.usable()?;
    let state = &mut *machine.state();
    let index = state.device_at(start)?.index();
    let size = state.give_back(index, |memory| memory.free(start))?;
    count_free(machine, &mut state.devices[index]);
    state.note_free(machine, index);
    state.contents.forget(start, size.0);
    Ok(())
}

/// Counts that an allocation was given back.
pub(crate) fn count_free(machine: &Machine, memory: &mut DeviceMemory) {
    let (index, used) = (memory.index(), memory.used());
    machine.counters.add(index, Figure::Frees);
    machine.counters.set_used(index, used);
}

/// Writes an address, or null where there is none.
///
/// # Safety
/// The pointer may be written.
pub(crate) unsafe fn write_address(into: *mut usize, address: Result<u64, Code>) -> Result<(), Code> {
    // SAFETY: as the caller promises.
    unsafe { *into = address.map_or(0, |address| address as usize) };
    address.map(drop)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMalloc(address: *mut usize, size: usize) -> c_int {
    let machine = machine();
    machine.delay(SlowCall::Malloc);
    let allocated = if size == 0 { Ok(0) } else { allocate(machine, &mut machine.state(), FaultyCall::Malloc, Bytes(size as u64)) };
    // SAFETY: the program passes a pointer to a pointer.
    remember(unsafe { write_address(address, allocated) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMallocManaged(address: *mut usize, size: usize, _: c_uint) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cudaMalloc(address, size) }
}

#[unsafe(no_mangle)]
extern "C" fn cudaFree(address: usize) -> c_int {
    machine().delay(SlowCall::Free);
    remember(if address == 0 { Ok(()) } else { free(address as u64) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemGetInfo(free: *mut usize, total: *mut usize) -> c_int {
    let memory = machine().usable().and_then(|()| machine().state().free_and_total());
    // SAFETY: the program passes pointers to numbers.
    remember(memory.map(|(free_bytes, all)| unsafe { (*free, *total) = (free_bytes.0 as usize, all.0 as usize) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaHostAlloc(address: *mut *mut u8, size: usize, _: c_uint) -> c_int {
    let machine = machine();
    if let unusable @ Err(_) = machine.usable() {
        return remember(unusable);
    }
    machine.delay(SlowCall::HostAlloc);
    let state = &mut *machine.state();
    let (allocated, _) = state.attempt(machine, (FaultyCall::HostAlloc, Bytes(size as u64)), None, |state| state.host.allocate(size));
    // SAFETY: the program passes a pointer to a pointer.
    unsafe { *address = allocated.unwrap_or(ptr::null_mut()) };
    remember(allocated.map(drop))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMallocHost(address: *mut *mut u8, size: usize) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cudaHostAlloc(address, size, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaFreeHost(address: *mut u8) -> c_int {
    remember(if address.is_null() { Ok(()) } else { machine().state().host.free(address) })
}

#[unsafe(no_mangle)]
extern "C" fn cudaHostRegister(address: usize, size: usize, _: c_uint) -> c_int {
    machine().state().host.register(address, size);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaHostUnregister(address: usize) -> c_int {
    remember(machine().state().host.unregister(address))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaHostGetDevicePointer(device: *mut usize, host: usize, _: c_uint) -> c_int {
    // SAFETY: the program passes a pointer to a pointer.
    unsafe { *device = host };
    0
}

/// Kinds of memory in `cudaPointerAttributes`.
const UNREGISTERED: c_int = 0;
const HOST: c_int = 1;
const DEVICE: c_int = 2;

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaPointerGetAttributes(into: *mut u8, address: usize) -> c_int {
    let machine = machine();
    let size = if machine.settings.cuda == Cuda::V13 { 88 } else { 24 };
    let (kind, device, on_device, on_host) = match device_of(address as u64) {
        Some(device) => (DEVICE, device, address, 0),
        None if machine.state().host.contains(address) => (HOST, current_device(), address, address),
        None => (UNREGISTERED, usize::MAX, 0, address),
    };
    // SAFETY: the program passes a structure of its CUDA release, which the settings tell; the fields lie at these offsets in both.
    unsafe {
        into.write_bytes(0, size);
        into.cast::<c_int>().write(kind);
        into.add(4).cast::<c_int>().write(c_int::try_from(device).unwrap_or(-2));
        into.add(8).cast::<usize>().write(on_device);
        into.add(16).cast::<usize>().write(on_host);
    }
    0
}

/// Moves bytes between host and device. Device memory holds zeros, or with other [`Values`] what small copies wrote.
///
/// # Safety
/// Addresses that are not on a device are the program's, with `size` bytes that may be read or written.
unsafe fn copy(machine: &Machine, state: &mut State, to: u64, from: u64, size: usize) {
    let remembers = machine.settings.values != Values::Zeros;
    let (host_to, host_from) = (ptr::with_exposed_provenance_mut::<u8>(to as usize), ptr::with_exposed_provenance::<u8>(from as usize));
    match (is_device_memory(to), is_device_memory(from)) {
        // SAFETY: as the caller promises; `copy` allows both to overlap.
        (false, false) => unsafe { ptr::copy(host_from, host_to, size) },
        // SAFETY: as the caller promises.
        (false, true) if remembers => state.contents.read(from, unsafe { slice::from_raw_parts_mut(host_to, size) }),
        // SAFETY: as the caller promises.
        (false, true) => unsafe { host_to.write_bytes(0, size) },
        // SAFETY: as the caller promises.
        (true, false) if remembers => state.contents.write(to, unsafe { slice::from_raw_parts(host_from, size) }),
        (true, true) if remembers => state.contents.copy(to, from, size as u64),
        (true, _) => {}
    }
}

/// Copies between two places on a device.
pub(crate) fn copy_on_device(to: usize, from: usize, size: usize) {
    if is_device_memory(to as u64) && is_device_memory(from as u64) {
        let machine = machine();
        // SAFETY: no address is of the host.
        unsafe { copy(machine, &mut machine.state(), to as u64, from as u64, size) };
    }
}

/// # Safety
/// As [`copy`].
unsafe fn queue_copy(to: usize, from: usize, size: usize) -> c_int {
    let machine = machine();
    if let unusable @ Err(_) = machine.usable() {
        return remember(unusable);
    }
    machine.tick();
    if size > 0 {
        // SAFETY: as the caller promises.
        unsafe { copy(machine, &mut machine.state(), to as u64, from as u64, size) };
    }
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cudaMemcpyAsync(to: usize, from: usize, size: usize, _: c_int, _: usize) -> c_int {
    // SAFETY: the program says that so many bytes can be copied.
    unsafe { queue_copy(to, from, size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemcpyPeerAsync(to: usize, _: c_int, from: usize, _: c_int, size: usize, _: usize) -> c_int {
    // SAFETY: the program says that so many bytes can be copied.
    unsafe { queue_copy(to, from, size) }
}

/// Waits for the default stream, as a copy from pageable memory does.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemcpy(to: usize, from: usize, size: usize, _: c_int) -> c_int {
    // SAFETY: the program says that so many bytes can be copied.
    let copied = unsafe { queue_copy(to, from, size) };
    if copied != 0 {
        return copied;
    }
    let machine = machine();
    remember(machine.state().streams.wait_for(0, current_device(), machine.now()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemcpy2DAsync(
    to: usize,
    to_pitch: usize,
    from: usize,
    from_pitch: usize,
    width: usize,
    height: usize,
    _: c_int,
    _: usize,
) -> c_int {
    let machine = machine();
    machine.tick();
    let mut state = machine.state();
    for row in 0..if width > 0 { height } else { 0 } {
        // SAFETY: the program says that so many rows of so many bytes can be copied.
        unsafe { copy(machine, &mut state, (to + row * to_pitch) as u64, (from + row * from_pitch) as u64, width) };
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemcpy2D(
    to: usize,
    to_pitch: usize,
    from: usize,
    from_pitch: usize,
    width: usize,
    height: usize,
    kind: c_int,
) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, 0) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cudaMemsetAsync(to: usize, value: c_int, size: usize, _: usize) -> c_int {
    let machine = machine();
    if let unusable @ Err(_) = machine.usable() {
        return remember(unusable);
    }
    machine.tick();
    if is_device_memory(to as u64) {
        machine.state().contents.forget(to as u64, size as u64);
    } else {
        // SAFETY: the program says that so many bytes of host memory can be written. The value is taken as a byte.
        unsafe { ptr::with_exposed_provenance_mut::<u8>(to).write_bytes(value as u8, size) };
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemset(to: usize, value: c_int, size: usize) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cudaMemsetAsync(to, value, size, 0) }
}

/// A place for a variable of a kernel, which nobody reads.
static SYMBOL: [u64; 8] = [0; 8];

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetSymbolAddress(address: *mut usize, _: *const c_void) -> c_int {
    // SAFETY: the program passes a pointer to a pointer.
    unsafe { *address = ptr::from_ref(&SYMBOL).expose_provenance() };
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemcpyToSymbol(_: *const c_void, _: *const c_void, _: usize, _: usize, _: c_int) -> c_int {
    machine().tick();
    0
}

/// Memory and events are not shared between processes: a function that would do that says so.
macro_rules! not_shared {
    ($($name:ident)+) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> c_int {
            remember(Err(Code::NotSupported))
        }
    )+};
}

not_shared! { cudaIpcGetMemHandle cudaIpcOpenMemHandle cudaIpcCloseMemHandle cudaIpcGetEventHandle cudaIpcOpenEventHandle }
