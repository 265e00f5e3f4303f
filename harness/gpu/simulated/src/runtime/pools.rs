//! Stream-ordered allocation: allocations and frees take effect immediately. Each device has its
//! default pool and those of the program.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use harness_allocator::device::{PooledDevice as _, StreamId};
use harness_allocator::units::Bytes;
use harness_gpu_settings::{export, ffi::Out};

use super::device::device;
use super::graph_memory::{allocate_captured, free_captured};
use super::memory::give_back;
use super::streams::{allow_unsafe, submit, with};
use crate::clock::captures::Caller;
use crate::code::{Code, put, put_address, remember};
use crate::pools::Pools;
use crate::world::{Machine, State, current_device, machine};
use harness_gpu_settings::calls::Call;

/// `cudaMemLocationTypeDevice`.
const ON_DEVICE: c_uint = 1;
/// `cudaMemAccessFlagsProtReadWrite`.
const READ_AND_WRITE: c_int = 3;

export! {
    cudaMallocAsync(address: Out<'_, usize>, size: usize, stream: usize) = {
        let pool = machine().state().pools.current(current_device());
        allocate_from(address, size, pool, stream)
    };
    cudaMallocFromPoolAsync(address: Out<'_, usize>, size: usize, pool: usize, stream: usize) =
        allocate_from(address, size, pool, stream);
    cudaFreeAsync(address: usize, stream: usize) = match submit(stream) {
        Err(refused) => remember(Err(refused)),
        Ok(true) if address != 0 => remember(free_captured(address as u64, stream)),
        Ok(_) => give_back(address, Call::FreeAsync, Some(stream)),
    };
    cudaDeviceGetDefaultMemPool(pool: Out<'_, usize>, index: c_int) =
        remember(device(index).and_then(|_| put(pool, Pools::of_device(index as usize))));
    cudaDeviceGetMemPool(pool: Out<'_, usize>, index: c_int) = remember(
        device(index).and_then(|_| put(pool, machine().state().pools.current(index as usize))),
    );
    cudaDeviceSetMemPool(index: c_int, pool: usize) =
        with(|_, state| device(index).and_then(|_| state.pools.choose(index as usize, pool)));
    /// CUDA 13: the pools of a place, which are supported for devices.
    cudaMemGetDefaultMemPool(pool: Out<'_, usize>, place: Option<&Location>, kind: c_int) =
        of_place(place, kind, |device| cudaDeviceGetDefaultMemPool(pool, device));
    cudaMemGetMemPool(pool: Out<'_, usize>, place: Option<&Location>, kind: c_int) =
        of_place(place, kind, |device| cudaDeviceGetMemPool(pool, device));
    cudaMemSetMemPool(place: Option<&Location>, kind: c_int, pool: usize) =
        of_place(place, kind, |device| cudaDeviceSetMemPool(device, pool));
    cudaMemPoolCreate(pool: Out<'_, usize>, properties: Option<&PoolProperties>) =
        with(|_, state| put(pool, create(state, properties.ok_or(Code::InvalidValue)?)?));
    cudaMemPoolDestroy(pool: usize) =
        remember(allow_unsafe().and_then(|()| destroy(&mut machine().state(), pool)));
    cudaMemPoolGetAttribute(pool: usize, attribute: c_int, value: *mut c_void) =
        with(|_, state| attribute_of(state, pool, attribute, value));
    cudaMemPoolSetAttribute(pool: usize, attribute: c_int, value: *const c_void) =
        with(|_, state| set_attribute(state, pool, attribute, value));
    cudaMemPoolSetAccess(pool: usize, _: *const c_void, _: usize) =
        with(|_, state| state.pools.get(pool).map(drop));
    /// A device can access the pools of all devices that it reaches.
    cudaMemPoolGetAccess(flags: Out<'_, c_int>, pool: usize, _: *const c_void) =
        with(|_, state| state.pools.get(pool).and_then(|_| put(flags, READ_AND_WRITE)));
    /// Frees of which the host has not waited count as used.
    cudaMemPoolTrimTo(pool: usize, keep: usize) =
        with(|machine, state| trim(machine, state, pool, Bytes(keep as u64)));
}

/// `cudaMemPoolProps` and `CUmemPoolProps`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct PoolProperties {
    pub(crate) kind: c_uint,
    pub(crate) handle_types: c_uint,
    pub(crate) location_kind: c_uint,
    pub(crate) location: c_int,
    pub(crate) attributes: *mut c_void,
    pub(crate) most: usize,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 54],
}

impl PoolProperties {
    pub(super) const NONE: Self = Self {
        kind: 0,
        handle_types: 0,
        location_kind: 0,
        location: 0,
        attributes: ptr::null_mut(),
        most: 0,
        usage: 0,
        reserved: [0; 54],
    };
}

/// `cudaMemLocation`.
#[repr(C)]
pub(crate) struct Location {
    kind: c_uint,
    number: c_int,
}

/// Runs a call for a device, with pools of pinned memory (kind 1).
fn of_place(place: Option<&Location>, kind: c_int, call: impl FnOnce(c_int) -> c_int) -> c_int {
    match place {
        Some(place) if place.kind == ON_DEVICE && kind == 1 => call(place.number),
        Some(_) => remember(Err(Code::NotSupported)),
        None => remember(Err(Code::InvalidValue)),
    }
}

fn create(state: &mut State, wanted: &PoolProperties) -> Result<usize, Code> {
    state.streams.allow_unsafe(Caller::current())?;
    if wanted.location_kind != ON_DEVICE {
        return Err(Code::NotSupported);
    }
    device(wanted.location)?;
    let most = Bytes(wanted.most as u64);
    let pools = &mut state.pools;
    Ok(pools.create(wanted.location as usize, most, wanted.handle_types))
}

fn destroy(state: &mut State, pool: usize) -> Result<(), Code> {
    match state.pools.destroy(pool)? {
        Some((device, id)) => state.release(device, |memory| Ok(memory.sim().destroy_pool(id)?)),
        None => Ok(()),
    }
}

fn trim(machine: &Machine, state: &mut State, pool: usize, keep: Bytes) -> Result<(), Code> {
    let (device, pool) = state.pools.get(pool)?;
    let Some(id) = pool.id() else { return Ok(()) };
    state.release(device, |memory| Ok(memory.sim().trim_pool(id, keep)?))?;
    let used = state.devices[device].used();
    machine.counters.count_frees(device, used, 0);
    Ok(())
}

/// Allocates for a program from a pool, on the pool's device. Zero bytes give a null pointer.
fn allocate_from(address: Out<'_, usize>, size: usize, pool: usize, stream: usize) -> c_int {
    let machine = machine();
    machine.delay(Call::MallocAsync);
    let size = Bytes(size as u64);
    let submitted = if machine.visible.is_empty() {
        Err(Code::NoDevice)
    } else {
        submit(stream)
    };
    let allocated = submitted.and_then(|is_captured| {
        let state = &mut *machine.state();
        let (device, known) = state.pools.get(pool)?;
        if size == Bytes::ZERO {
            return Ok(0);
        }
        if is_captured {
            return allocate_captured(state, stream, (device, size));
        }
        let memory = state.devices.get_mut(device).ok_or(Code::InvalidDevice)?;
        let id = known.open(memory.sim())?;
        let start = state.request(machine, (Call::MallocAsync, size), device, |memory| {
            memory.allocate_in_order(size, id, StreamId::DEFAULT)
        })?;
        state.pools.note(pool, start);
        Ok(start)
    });
    remember(put_address(address, allocated))
}

/// Attributes 1 to 3 are switches of four bytes. Attribute 4 is the release threshold. Attributes 5
/// to 8 are current and highest bytes, reserved and used.
fn attribute_of(
    state: &mut State,
    pool: usize,
    attribute: c_int,
    value: *mut c_void,
) -> Result<(), Code> {
    let (device, pool) = state.pools.get(pool)?;
    if value.is_null() {
        return Err(Code::InvalidValue);
    }
    let memory = state.devices.get_mut(device).ok_or(Code::InvalidDevice)?;
    let memory = pool.memory(memory.sim())?;
    let figure = match attribute {
        // SAFETY: the program passes a number of this size.
        1..=3 => unsafe {
            value
                .cast::<c_int>()
                .write(pool.reuse[attribute as usize - 1]);
            return Ok(());
        },
        4 => pool.release_threshold,
        5 => memory.reserved.0,
        6 => memory.reserved_high.0,
        7 => memory.used.0,
        8 => memory.used_high.0,
        _ => return Err(Code::InvalidValue),
    };
    // SAFETY: the program passes a number of this size.
    unsafe { value.cast::<u64>().write(figure) };
    Ok(())
}

/// The highest bytes can only be set to zero, which makes them the current ones.
fn set_attribute(
    state: &mut State,
    pool: usize,
    attribute: c_int,
    value: *const c_void,
) -> Result<(), Code> {
    let (device, pool) = state.pools.get(pool)?;
    if value.is_null() {
        return Err(Code::InvalidValue);
    }
    if let 1..=3 = attribute {
        // SAFETY: the program passes a number of this size.
        pool.reuse[attribute as usize - 1] = unsafe { value.cast::<c_int>().read() };
        return Ok(());
    }
    // SAFETY: the other attributes have this size.
    let wanted = unsafe { value.cast::<u64>().read() };
    let memory = state.devices.get_mut(device).ok_or(Code::InvalidDevice)?;
    let sim = memory.sim();
    match (attribute, wanted, pool.id()) {
        (4, threshold, _) => pool.set_threshold(sim, threshold)?,
        (6, 0, Some(id)) => sim.reset_reserved_high(id)?,
        (8, 0, Some(id)) => sim.reset_used_high(id)?,
        (6 | 8, 0, None) => {}
        _ => return Err(Code::InvalidValue),
    }
    Ok(())
}
