//! Virtual memory management: reserved addresses and physical memory.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::ptr::null_mut;

use harness_allocator::units::Bytes;

use harness_gpu_settings::{export, ffi::Out};

use crate::code::{Code, answer, put};
use crate::world::{Machine, State, current_device, machine};
use crate::{context::in_context, kernels::Work, memory::device_of_page};
use harness_gpu_settings::calls::Call;

/// The granularity of mappings.
const GRANULARITY: usize = 2 << 20;
/// The handle type of memory that is shared between machines.
const FABRIC: c_uint = 8;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_AND_WRITE: c_uint = 3;

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
    /// The device of the memory. If kernels execute, only unshared pinned memory (kind 1) of a
    /// device (location kind 1) is supported.
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
        usize::try_from(self.location)
            .ok()
            .filter(|index| *index < machine.visible.len())
            .ok_or(Code::InvalidDevice)
    }
}

#[repr(C)]
struct AccessDescription {
    location_kind: c_uint,
    location: c_int,
    flags: c_uint,
}

/// Runs a call that needs a context and virtual memory management.
fn mapping(
    function: &'static str,
    body: impl FnOnce(&'static Machine, &mut State) -> Result<(), Code>,
) -> c_int {
    in_context(function, |machine, state| {
        if machine.settings.mapping {
            body(machine, state)
        } else {
            Err(Code::NotSupported)
        }
    })
}

export! {
    cuMemGetAllocationGranularity(
        granularity: Out<'_, usize>, properties: Option<&AllocationProperties>, _: c_int
    ) = mapping(THIS, |machine, _| {
        properties.ok_or(Code::InvalidValue)?.device(machine)?;
        put(granularity, GRANULARITY)
    });
    /// Ignores the requested address, as a driver may do.
    cuMemAddressReserve(
        address: Out<'_, usize>, size: usize, alignment: usize, _: usize, flags: c_ulonglong
    ) = mapping(THIS, |machine, state| {
        if flags != 0 || !(alignment == 0 || alignment.is_power_of_two()) {
            return Err(Code::InvalidValue);
        }
        if alignment > GRANULARITY && machine.executes_kernels() {
            return Err(Code::NotSupported);
        }
        let start = state
            .devices
            .get_mut(current_device())
            .ok_or(Code::NoDevice)?
            .reserve(Bytes(size as u64))?;
        put(address, start as usize)
    });
    cuMemAddressFree(address: usize, size: usize) = mapping(THIS, |_, state| {
        state.device_at(address as u64)?.unreserve(address as u64, Bytes(size as u64))
    });
    cuMemCreate(
        handle: Out<'_, u64>, size: usize, properties: Option<&AllocationProperties>,
        flags: c_ulonglong
    ) = {
        machine().delay(Call::Create);
        mapping(THIS, |machine, state| {
            put(handle, create(machine, state, Bytes(size as u64), properties, flags)?)
        })
    };
    cuMemRelease(handle: u64) = mapping(THIS, |machine, state| {
        let index = device_of_page(handle);
        let freed = state.release(index, |memory| memory.release(handle))?;
        note_frees(machine, state, index, u64::from(freed));
        Ok(())
    });
    cuMemMap(address: usize, size: usize, offset: usize, handle: u64, flags: c_ulonglong) =
        mapping(THIS, |_, state| match (offset, flags) {
            (0, 0) => {
                state.device_at(address as u64)?.map(address as u64, Bytes(size as u64), handle)
            }
            _ => Err(Code::InvalidValue),
        });
    /// Does not wait. If kernels execute, pending work that uses the range breaks the context.
    cuMemUnmap(address: usize, size: usize) = {
        machine().delay(Call::Unmap);
        mapping(THIS, |machine, state| unmap(machine, state, address as u64, size as u64))
    };
    cuMemSetAccess(address: usize, size: usize, allowed: *const AccessDescription, count: usize) =
        mapping(THIS, |machine, state| {
            let memory = state.device_at(address as u64)?;
            // SAFETY: the program passes `count` descriptions.
            (0..count).map(|index| unsafe { allowed.add(index).read() }).try_for_each(
                |AccessDescription { location_kind, location, flags }| {
                    let here =
                        location_kind == 1 && usize::try_from(location) == Ok(memory.index());
                    match here && flags == READ_AND_WRITE {
                        true => memory.allow(address as u64, Bytes(size as u64)),
                        false if machine.executes_kernels() => Err(Code::NotSupported),
                        false => Ok(()),
                    }
                },
            )
        });
    /// Sharing memory between processes is not supported.
    cuMemExportToShareableHandle(_: *mut c_void, _: u64, _: c_int, _: c_ulonglong) =
        answer(Err(Code::NotSupported));
    cuMemImportFromShareableHandle(_: *mut u64, _: *mut c_void, _: c_int) =
        answer(Err(Code::NotSupported));
    cuMemRetainAllocationHandle(handle: Out<'_, u64>, address: usize) = {
        let retained = machine()
            .state()
            .device_at(address as u64)
            .and_then(|memory| memory.retain(address as u64));
        answer(retained.and_then(|number| put(handle, number)))
    };
    cuMemGetAllocationPropertiesFromHandle(
        properties: Out<'_, AllocationProperties>, handle: u64
    ) = {
        let location = c_int::try_from(device_of_page(handle)).unwrap_or(0);
        answer(put(
            properties,
            AllocationProperties {
                kind: 1,
                handle_types: 0,
                location_kind: 1,
                location,
                metadata: null_mut(),
                flags: [0; 8],
            },
        ))
    };
}

fn create(
    machine: &Machine,
    state: &mut State,
    size: Bytes,
    properties: Option<&AllocationProperties>,
    flags: c_ulonglong,
) -> Result<u64, Code> {
    let index = properties.ok_or(Code::InvalidValue)?.device(machine)?;
    if flags != 0 {
        return Err(Code::InvalidValue);
    }
    state.request(machine, (Call::Create, size), index, |memory| {
        memory.create(size)
    })
}

fn unmap(machine: &Machine, state: &mut State, address: u64, size: u64) -> Result<(), Code> {
    let index = state.device_at(address)?.index();
    let (pieces, all_done_at, in_use) = state.release(index, |memory| {
        let (pieces, in_use) = memory.unmap(address, Bytes(size))?;
        Ok((pieces, memory.sim().all_done_at(), in_use))
    })?;
    note_frees(machine, state, index, pieces);
    state.copied.unshare(address);
    state.copied.forget(address, size);
    if let Some(execution) = state.executions.get_mut(index) {
        execution.bytes.forget(address, size);
        if in_use {
            execution.queue(all_done_at, Work::Gone);
        }
    }
    Ok(())
}

/// Counts and logs freed pieces of physical memory.
fn note_frees(machine: &Machine, state: &mut State, index: usize, pieces: u64) {
    if pieces > 0 {
        machine
            .counters
            .count_frees(index, state.devices[index].used(), pieces);
        state.note_free(machine, index);
    }
}
