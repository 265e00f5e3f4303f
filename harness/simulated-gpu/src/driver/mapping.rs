//! Virtual memory management: reserved addresses and physical memory.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use harness_allocator::units::Bytes;

use harness_gpu_settings::export;
use harness_gpu_settings::ffi::Out;

use crate::code::{Code, answer, put};
use crate::context::in_context;
use crate::kernels::Work;
use crate::memory::device_of_page;
use crate::world::{Machine, State, current_device, machine};
use harness_gpu_settings::calls::Call;

/// The granularity of mappings.
const GRANULARITY: usize = 2 << 20;
/// The handle type of memory that is shared between machines.
const FABRIC: c_uint = 8;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_AND_WRITE: c_uint = 3;

/// `CUmemAllocationProp`.
#[repr(C)]
struct AllocationProperties {
    kind: c_uint,
    handle_types: c_uint,
    location_kind: c_uint,
    location: c_int,
    metadata: *mut c_void,
    flags: [u8; 8],
}

impl AllocationProperties {
    /// The device of the memory. If kernels execute, only unshared pinned memory (kind 1) of a device (location kind 1) is supported.
    fn device(&self, machine: &Machine) -> Result<usize, Code> {
        if machine.executes_kernels() {
            if self.kind != 1 || self.location_kind != 1 {
                return Err(Code::InvalidValue);
            }
            if self.handle_types != 0 || !self.metadata.is_null() || self.flags != [0; 8] {
                return Err(Code::NotSupported);
            }
        }
        if self.handle_types == FABRIC {
            return Err(Code::NotPermitted);
        }
        usize::try_from(self.location).ok().filter(|index| *index < machine.visible.len()).ok_or(Code::InvalidDevice)
    }
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct AccessDescription {
    location_kind: c_uint,
    location: c_int,
    flags: c_uint,
}

/// Runs a call that needs a context and virtual memory management.
fn mapping(function: &'static str, body: impl FnOnce(&'static Machine, &mut State) -> Result<(), Code>) -> c_int {
    in_context(function, |machine, state| if machine.settings.mapping { body(machine, state) } else { Err(Code::NotSupported) })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAllocationGranularity(granularity: Out<'_, usize>, properties: Option<&AllocationProperties>, _: c_int) -> c_int {
    mapping("cuMemGetAllocationGranularity", |machine, _| {
        properties.ok_or(Code::InvalidValue)?.device(machine)?;
        put(granularity, GRANULARITY)
    })
}

/// Ignores the requested address, as a driver may do.
#[unsafe(no_mangle)]
extern "C" fn cuMemAddressReserve(address: Out<'_, usize>, size: usize, alignment: usize, _: usize, flags: c_ulonglong) -> c_int {
    mapping("cuMemAddressReserve", |machine, state| {
        if flags != 0 || !(alignment == 0 || alignment.is_power_of_two()) {
            return Err(Code::InvalidValue);
        }
        if alignment > GRANULARITY && machine.executes_kernels() {
            return Err(Code::NotSupported);
        }
        let start = state.devices.get_mut(current_device()).ok_or(Code::NoDevice)?.reserve(Bytes(size as u64))?;
        put(address, start as usize)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(address: usize, size: usize) -> c_int {
    mapping("cuMemAddressFree", |_, state| state.device_at(address as u64)?.unreserve(address as u64, Bytes(size as u64)))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemCreate(handle: Out<'_, u64>, size: usize, properties: Option<&AllocationProperties>, flags: c_ulonglong) -> c_int {
    machine().delay(Call::Create);
    mapping("cuMemCreate", |machine, state| {
        let index = properties.ok_or(Code::InvalidValue)?.device(machine)?;
        if flags != 0 {
            return Err(Code::InvalidValue);
        }
        let size = Bytes(size as u64);
        let create = |state: &mut State| state.on_device(index, |memory| memory.create(size));
        let (created, injected) = state.attempt(machine, (Call::Create, size), Some(index), create);
        machine.counters.count_allocation(index, state.devices[index].used(), injected, created.is_err());
        put(handle, created?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(handle: u64) -> c_int {
    mapping("cuMemRelease", |machine, state| {
        let index = device_of_page(handle);
        let freed = state.release(index, |memory| memory.release(handle))?;
        note_frees(machine, state, index, u64::from(freed));
        Ok(())
    })
}

/// Counts and logs freed pieces of physical memory.
fn note_frees(machine: &Machine, state: &mut State, index: usize, pieces: u64) {
    if pieces > 0 {
        machine.counters.count_frees(index, state.devices[index].used(), pieces);
        state.note_free(machine, index);
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(address: usize, size: usize, offset: usize, handle: u64, flags: c_ulonglong) -> c_int {
    mapping("cuMemMap", |_, state| {
        if offset != 0 || flags != 0 {
            return Err(Code::InvalidValue);
        }
        state.device_at(address as u64)?.map(address as u64, Bytes(size as u64), handle)
    })
}

/// Does not wait. If kernels execute, pending work that uses the range breaks the context.
#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(address: usize, size: usize) -> c_int {
    machine().delay(Call::Unmap);
    mapping("cuMemUnmap", |machine, state| {
        let index = state.device_at(address as u64)?.index();
        let (pieces, all_done_at, in_use) = state.release(index, |memory| {
            let (pieces, in_use) = memory.unmap(address as u64, Bytes(size as u64))?;
            Ok((pieces, memory.sim().all_done_at(), in_use))
        })?;
        note_frees(machine, state, index, pieces);
        state.copied.forget(address as u64, size as u64);
        if let Some(execution) = state.executions.get_mut(index) {
            execution.bytes.forget(address as u64, size as u64);
            if in_use {
                execution.queue(all_done_at, Work::Gone);
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemSetAccess(address: usize, size: usize, allowed: *const AccessDescription, count: usize) -> c_int {
    mapping("cuMemSetAccess", |machine, state| {
        let memory = state.device_at(address as u64)?;
        for index in 0..count {
            // SAFETY: the program passes `count` descriptions.
            let AccessDescription { location_kind, location, flags } = unsafe { allowed.add(index).read() };
            let here = location_kind == 1 && usize::try_from(location) == Ok(memory.index());
            if here && flags == READ_AND_WRITE {
                memory.allow(address as u64, Bytes(size as u64))?;
            } else if machine.executes_kernels() {
                return Err(Code::NotSupported);
            }
        }
        Ok(())
    })
}

export! {
    /// Sharing memory between processes is not supported.
    cuMemExportToShareableHandle(_: *mut c_void, _: u64, _: c_int, _: c_ulonglong) = answer(Err(Code::NotSupported));
    cuMemImportFromShareableHandle(_: *mut u64, _: *mut c_void, _: c_int) = answer(Err(Code::NotSupported));
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRetainAllocationHandle(handle: Out<'_, u64>, address: usize) -> c_int {
    let mut state = machine().state();
    let retained = state.device_at(address as u64).and_then(|memory| memory.retain(address as u64));
    answer(retained.and_then(|number| put(handle, number)))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAllocationPropertiesFromHandle(properties: Out<'_, AllocationProperties>, handle: u64) -> c_int {
    let location = c_int::try_from(device_of_page(handle)).unwrap_or(0);
    let pinned =
        AllocationProperties { kind: 1, handle_types: 0, location_kind: 1, location, metadata: std::ptr::null_mut(), flags: [0; 8] };
    answer(put(properties, pinned))
}
