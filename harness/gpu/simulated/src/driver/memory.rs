//! Device memory: sizes, allocation, attributes of pointers, copies, setting bytes.

use std::ffi::{c_int, c_uint, c_void};

use harness_allocator::{device::AccessKind, units::Bytes};

use harness_gpu_settings::ffi::{Out, write};
use harness_gpu_settings::{calls::Call, export};

use crate::clock::captures::Caller;
use crate::code::{Code, answer, put, put_address};
use crate::context::{Gpu, by_kernel_mode, call, context_of, in_context, on_gpu, wait};
use crate::driver::streams::cuStreamSynchronize;
use crate::runtime::streams::{allow_synchronous, allow_unsafe, submit};
use crate::runtime::{allocate, count_free, free, memory as runtime, memory::allocate_on_host};
use crate::world::{current_device, machine};
use crate::{host::Kind, kernels::Work, memory::device_of};

/// The directions of a copy.
const HOST_TO_DEVICE: c_int = 1;
const DEVICE_TO_HOST: c_int = 2;
const BY_ADDRESS: c_int = 4;

export! {
    cuMemGetInfo_v2(free_bytes: Out<'_, usize>, total: Out<'_, usize>) =
        in_context(THIS, |_, state| {
            let (left, all) = state.free_and_total()?;
            put(free_bytes, left.0 as usize).and(put(total, all.0 as usize))
        });
    cuMemAlloc_v2(address: Out<'_, usize>, size: usize) = {
        machine().delay(Call::Malloc);
        in_context(THIS, |machine, state| {
            state.streams.allow_unsafe(Caller::current())?;
            put_address(
                address,
                allocate(machine, state, current_device(), (Call::Malloc, Bytes(size as u64))),
            )
        })
    };
    cuMemFree_v2(address: usize) = free_and_wait(address as u64);
    cuMemGetAddressRange_v2(start: Out<'_, usize>, size: Out<'_, usize>, address: usize) =
        answer(range_of(address).map(|(first, len)| {
            write(start, first);
            write(size, len);
        }));
    /// Counts failures like the runtime's function.
    cuMemHostAlloc(address: Out<'_, usize>, size: usize, _: c_uint) =
        in_context(THIS, |machine, state| {
            state.streams.allow_unsafe(Caller::current())?;
            put_address(address, allocate_on_host(machine, state, size))
        });
    /// If kernels execute, waits for all work, because a copy may use the memory.
    cuMemFreeHost(address: usize) = {
        let free = || allow_unsafe()
            .and_then(|()| runtime::free_on_host(&mut machine().state(), address));
        by_kernel_mode(
            THIS,
            || answer(free()),
            || wait(|gpu| Ok(gpu.sim().all_done_at()), |_| Ok(())).and_then(|()| free()),
        )
    };
    cuMemHostRegister, cuMemHostRegister_v2(address: usize, size: usize, _: c_uint) =
        in_context(THIS, |machine, state| {
            state.streams.allow_unsafe(Caller::current())?;
            runtime::register_on_host(machine, state, address, size)
        });
    cuMemHostUnregister(address: usize) = in_context(THIS, |_, state| {
        state.streams.allow_unsafe(Caller::current())?;
        runtime::unregister_on_host(state, address)
    });
    cuMemHostGetDevicePointer_v2(device: Out<'_, usize>, host: usize, _: c_uint) =
        in_context(THIS, |_, state| put(device, state.host.device_pointer(host)?));
    cuMemHostGetFlags(flags: Out<'_, c_uint>, host: usize) = in_context(THIS, |_, state| {
        state.host.device_pointer(host)?;
        put(flags, 0)
    });
    cuMemcpyDtoHAsync_v2(to: usize, from: usize, size: usize, stream: usize) = {
        let (address, len) = (from as u64, size as u64);
        let execute = || {
            transfer(
                Work::ToHost { address, len, to },
                (address, len, AccessKind::Read),
                to,
                stream,
            )
        };
        by_kernel_mode(
            THIS,
            || runtime::cudaMemcpyAsync(to, from, size, DEVICE_TO_HOST, stream),
            execute,
        )
    };
    cuMemcpyHtoDAsync_v2(to: usize, from: usize, size: usize, stream: usize) = {
        let (address, len) = (to as u64, size as u64);
        let execute = || {
            transfer(
                Work::ToDevice { address, len, from },
                (address, len, AccessKind::Write),
                from,
                stream,
            )
        };
        by_kernel_mode(
            THIS,
            || runtime::cudaMemcpyAsync(to, from, size, HOST_TO_DEVICE, stream),
            execute,
        )
    };
    cuMemcpyHtoD_v2(to: usize, from: usize, size: usize) =
        and_wait(|| cuMemcpyHtoDAsync_v2(to, from, size, 0));
    cuMemcpyDtoH_v2(to: usize, from: usize, size: usize) =
        and_wait(|| cuMemcpyDtoHAsync_v2(to, from, size, 0));
    cuMemcpyDtoDAsync_v2, cuMemcpyAsync(to: usize, from: usize, size: usize, stream: usize) =
        by_kernel_mode(
            THIS,
            || runtime::cudaMemcpyAsync(to, from, size, BY_ADDRESS, stream),
            || Err(Code::NotSupported),
        );
    cuMemcpyDtoD_v2, cuMemcpy(to: usize, from: usize, size: usize) =
        and_wait(|| cuMemcpyAsync(to, from, size, 0));
    cuMemcpyPeerAsync(to: usize, _: usize, from: usize, _: usize, size: usize, stream: usize) =
        cuMemcpyAsync(to, from, size, stream);
    cuMemcpyPeer(to: usize, _: usize, from: usize, _: usize, size: usize) =
        cuMemcpy(to, from, size);
    cuMemsetD8Async(to: usize, byte: u8, count: usize, stream: usize) = {
        let work = Work::Set { address: to as u64, len: count as u64, byte };
        by_kernel_mode(
            THIS,
            || runtime::cudaMemsetAsync(to, byte.into(), count, stream),
            || on_gpu(|gpu| gpu.submit(stream, work)),
        )
    };
    cuMemsetD8_v2(to: usize, byte: u8, count: usize) =
        synchronously(|| cuMemsetD8Async(to, byte, count, 0));
    cuMemsetD32Async(address: usize, word: c_uint, count: usize, stream: usize) =
        set_words(address, word, count, stream);
    cuMemsetD32_v2(address: usize, word: c_uint, count: usize) =
        synchronously(|| set_words(address, word, count, 0));
    cuStreamWriteValue32, cuStreamWriteValue32_v2(
        stream: usize, address: usize, word: c_uint, _: c_uint
    ) = set_words(address, word, 1, stream);
}

/// Runs a call in the order of the legacy stream, which no capture takes.
pub(super) fn synchronously(call: impl FnOnce() -> c_int) -> c_int {
    allow_synchronous().map_or_else(|refused| answer(Err(refused)), |()| call())
}

/// Runs a call likewise. If it succeeds, waits for the legacy stream.
pub(super) fn and_wait(call: impl FnOnce() -> c_int) -> c_int {
    match synchronously(call) {
        0 => cuStreamSynchronize(0),
        error => error,
    }
}

/// If kernels execute, waits for all work, as drivers do.
fn free_and_wait(start: u64) -> c_int {
    machine().delay(Call::Free);
    if let refused @ Err(_) = allow_unsafe() {
        return answer(refused);
    }
    if matches!(
        machine().state().host.around(start as usize),
        Some((.., Kind::Managed(_)))
    ) {
        return call("cuMemFree_v2", || answer(free(start)));
    }
    let until = |gpu: &mut Gpu<'_>| {
        if gpu.memory.is_allocation(start) {
            Ok(gpu.sim().all_done_at())
        } else {
            Err(Code::InvalidValue)
        }
    };
    let then = |gpu: &mut Gpu<'_>| {
        let size = gpu.memory.free(start)?;
        gpu.execution.bytes.forget(start, size.0);
        count_free(gpu.machine, gpu.memory);
        Ok(())
    };
    by_kernel_mode("cuMemFree_v2", || answer(free(start)), || wait(until, then))
}

/// Start and size of the device, managed or page-locked memory around an address.
fn range_of(address: usize) -> Result<(usize, usize), Code> {
    let mut state = machine().state();
    if let Some((start, size, _)) = state.host.around(address) {
        return Ok((start, size));
    }
    let range = state.device_at(address as u64)?.range_of(address as u64);
    let range = range.or_else(|| state.graph_memory.around(address as u64));
    range
        .map(|(start, size)| (start as usize, size.0 as usize))
        .ok_or(Code::InvalidValue)
}

/// The value of a pointer attribute, of four or eight bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attribute {
    Word(u32),
    Long(u64),
}

/// An attribute of device, managed or page-locked memory, by the numbers of `CUpointer_attribute`.
fn pointer_attribute(number: c_int, address: usize) -> Result<Attribute, Code> {
    let around = machine().state().host.around(address);
    let is_managed = matches!(around, Some((.., Kind::Managed(_))));
    let device = match around {
        Some((.., Kind::Managed(charge))) => device_of(charge),
        Some(_) => Some(current_device()),
        None => device_of(address as u64).filter(|index| *index < machine().visible.len()),
    };
    let device = device.ok_or(Code::InvalidValue)?;
    let on_host = around.is_some();
    Ok(match number {
        1 => Attribute::Long(context_of(device) as u64),
        // Kinds of memory: 1 is the host's, 2 a device's.
        2 => Attribute::Word(if on_host && !is_managed { 1 } else { 2 }),
        3 => Attribute::Long(address as u64),
        4 if on_host => Attribute::Long(address as u64),
        8 => Attribute::Word(is_managed.into()),
        9 => Attribute::Word(u32::try_from(device).unwrap_or(0)),
        11 => Attribute::Long(range_of(address)?.0 as u64),
        12 => Attribute::Long(range_of(address)?.1 as u64),
        // The address is mapped (13). Not all allocations have a pool (17).
        13 => Attribute::Word(1),
        17 => {
            let start = range_of(address)?.0 as u64;
            let pool = machine().state().pools.of_allocation(start);
            Attribute::Long(pool.unwrap_or(0) as u64)
        }
        _ => return Err(Code::InvalidValue),
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuPointerGetAttribute(
    value: *mut c_void,
    number: c_int,
    address: usize,
) -> c_int {
    let found = pointer_attribute(number, address).and_then(|found| {
        if value.is_null() {
            Err(Code::InvalidValue)
        } else {
            Ok(found)
        }
    });
    // SAFETY: the program passes a value of the attribute's size.
    answer(found.map(|found| unsafe {
        match found {
            Attribute::Word(word) => value.cast::<u32>().write(word),
            Attribute::Long(long) => value.cast::<u64>().write(long),
        }
    }))
}

/// Attributes of the driver with eight bytes: addresses, sizes, identifiers and contexts.
const LONG_ATTRIBUTES: [c_int; 11] = [1, 3, 4, 7, 11, 12, 14, 17, 18, 19, 20];

/// CU_POINTER_ATTRIBUTE_P2P_TOKENS, a structure of two numbers, has no model.
const P2P_TOKENS: c_int = 5;

/// Writes several attributes. Those of an unknown address are zeros.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    numbers: *const c_int,
    values: *const *mut c_void,
    address: usize,
) -> c_int {
    for index in 0..count as usize {
        // SAFETY: the program passes this many numbers, and values of their sizes or null.
        unsafe {
            let (number, value) = (*numbers.add(index), *values.add(index));
            if value.is_null() || number == P2P_TOKENS {
                return Code::InvalidValue as c_int;
            }
            if cuPointerGetAttribute(value, number, address) != 0 {
                if LONG_ATTRIBUTES.contains(&number) {
                    value.cast::<u64>().write(0);
                } else {
                    value.cast::<u32>().write(0);
                }
            }
        }
    }
    0
}

/// Copies from or to a host address: of page-locked memory in the order of the stream, of other
/// memory before the call returns. The program passes host memory of this size.
fn transfer(
    work: Work,
    (start, len, kind): (u64, u64, AccessKind),
    host: usize,
    stream: usize,
) -> Result<(), Code> {
    if machine().state().host.is_pinned(host) {
        return on_gpu(|gpu| gpu.submit(stream, work));
    }
    let then = |gpu: &mut Gpu<'_>| {
        let id = gpu.stream(stream)?;
        if host == 0
            || !(gpu.execution.is_variable(start, len) || gpu.memory.is_accessible(start, len))
        {
            return Err(Code::InvalidValue);
        }
        gpu.execution
            .queue_access(gpu.memory, id, (start, len, kind))?;
        work.run(&mut gpu.execution.bytes, None)
    };
    wait(|gpu| gpu.stream_done_at(stream), then)
}

fn set_words(address: usize, word: c_uint, count: usize, stream: usize) -> c_int {
    let machine = machine();
    machine.tick();
    answer(
        submit(stream)
            .map(|_| runtime::fill(machine, address as u64, 4 * count, &word.to_le_bytes())),
    )
}
