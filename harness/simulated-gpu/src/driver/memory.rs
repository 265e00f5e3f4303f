//! Device memory: what there is, allocation, copies, setting bytes.

use std::ffi::{c_int, c_uint, c_void};

use harness_allocator::device::AccessKind;
use harness_allocator::units::Bytes;

use super::put;
use crate::code::{Code, answer};
use crate::context::{Gpu, context_of, either, in_context, on_gpu, wait};
use crate::kernels::Work;
use crate::runtime::{allocate, count_free, free, memory as runtime, write_address};
use crate::world::{is_device_memory, machine};
use harness_gpu_settings::calls::{FaultyCall, SlowCall};

/// The directions of a copy.
const HOST_TO_DEVICE: c_int = 1;
const DEVICE_TO_HOST: c_int = 2;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free_bytes: *mut usize, total: *mut usize) -> c_int {
    in_context("cuMemGetInfo_v2", |_, state| {
        let (left, all) = state.free_and_total()?;
        // SAFETY: the program passes pointers to numbers.
        unsafe { put(free_bytes, left.0 as usize).and_then(|()| put(total, all.0 as usize)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut usize, size: usize) -> c_int {
    machine().delay(SlowCall::Malloc);
    in_context("cuMemAlloc_v2", |machine, state| {
        // SAFETY: the program passes a pointer to a pointer.
        unsafe { write_address(address, allocate(machine, state, FaultyCall::Malloc, Bytes(size as u64))) }
    })
}

/// Where kernels are done all work is waited for, as drivers do.
#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: usize) -> c_int {
    machine().delay(SlowCall::Free);
    let start = address as u64;
    let skipped = || answer(if is_device_memory(start) { free(start) } else { Err(Code::InvalidValue) });
    let until = |gpu: &mut Gpu<'_>| {
        if gpu.memory.is_allocation(start) { Ok(gpu.memory.sim().all_done_at()) } else { Err(Code::InvalidValue) }
    };
    let then = |gpu: &mut Gpu<'_>| {
        let size = gpu.memory.free(start)?;
        gpu.execution.bytes.forget(start, size.0);
        count_free(gpu.machine, gpu.memory);
        Ok(())
    };
    either("cuMemFree_v2", skipped, || wait(until, then))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAddressRange_v2(start: *mut usize, size: *mut usize, address: usize) -> c_int {
    let mut state = machine().state();
    let range = state.device_at(address as u64).and_then(|memory| memory.range_of(address as u64).ok_or(Code::InvalidValue));
    answer(range.map(|(first, len)| {
        // SAFETY: each pointer is null or may be written.
        unsafe {
            if !start.is_null() {
                *start = first as usize;
            }
            if !size.is_null() {
                *size = len.0 as usize;
            }
        }
    }))
}

/// The device ordinal is attribute 9, the kind of memory 2, the context 1.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuPointerGetAttribute(value: *mut c_void, number: c_int, address: usize) -> c_int {
    let mut state = machine().state();
    let device = state.device_at(address as u64).map(|memory| memory.index());
    answer(device.map(|device| {
        // SAFETY: the program passes a pointer to a value of the attribute's size.
        unsafe {
            match number {
                1 => value.cast::<usize>().write(context_of(device)),
                2 => value.cast::<c_int>().write(2),
                3 | 4 => value.cast::<usize>().write(address),
                _ => value.cast::<c_int>().write(c_int::try_from(device).unwrap_or(0)),
            }
        }
    }))
}

/// The driver's refusals are counted as those of the runtime.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(address: *mut *mut u8, size: usize, _: c_uint) -> c_int {
    in_context("cuMemHostAlloc", |machine, state| {
        let (allocated, _) = state.attempt(machine, (FaultyCall::HostAlloc, Bytes(size as u64)), None, |state| state.host.allocate(size));
        // SAFETY: the program passes a pointer to a pointer.
        unsafe { put(address, allocated?) }
    })
}

/// Where kernels are done all work is waited for, which may copy there.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFreeHost(address: *mut u8) -> c_int {
    let give_back = || machine().state().host.free(address);
    either(
        "cuMemFreeHost",
        || answer(give_back()),
        || {
            wait(|gpu| Ok(gpu.memory.sim().all_done_at()), |_| Ok(()))?;
            give_back()
        },
    )
}

/// Whether an address is of page-locked memory, with which the device copies by itself.
fn is_pinned(address: usize) -> bool {
    machine().state().host.contains(address)
}

/// Copies to the host: with page-locked memory in the order of the stream, with other memory before the call returns.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: usize, size: usize, stream: usize) -> c_int {
    // SAFETY: the program says that so many bytes can be copied.
    let skipped = || unsafe { runtime::cudaMemcpyAsync(to.expose_provenance(), from, size, DEVICE_TO_HOST, stream) };
    let queued = Work::ToHost { address: from as u64, len: size as u64, to: to.expose_provenance() };
    let then = |gpu: &mut Gpu<'_>| {
        let (id, start, len) = (gpu.stream(stream)?, from as u64, size as u64);
        if to.is_null() || !(gpu.execution.is_variable(start, len) || gpu.memory.is_accessible(start, len)) {
            return Err(Code::InvalidValue);
        }
        gpu.execution.queue_access(gpu.memory, id, (start, len, AccessKind::Read))?;
        // SAFETY: the program has room for `size` bytes; it is not null.
        gpu.execution.bytes.read(start, unsafe { std::slice::from_raw_parts_mut(to.cast(), size) });
        Ok(())
    };
    either("cuMemcpyDtoHAsync_v2", skipped, || match is_pinned(to.addr()) {
        true => on_gpu(|gpu| gpu.submit(stream, queued)),
        false => wait(|gpu| gpu.stream_done_at(stream), then),
    })
}

/// Copies from the host, in the same way.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: usize, from: *const c_void, size: usize, stream: usize) -> c_int {
    // SAFETY: the program says that so many bytes can be copied.
    let skipped = || unsafe { runtime::cudaMemcpyAsync(to, from.expose_provenance(), size, HOST_TO_DEVICE, stream) };
    let queued = Work::ToDevice { address: to as u64, len: size as u64, from: from.expose_provenance() };
    let then = |gpu: &mut Gpu<'_>| {
        let (id, start, len) = (gpu.stream(stream)?, to as u64, size as u64);
        if from.is_null() || !(gpu.execution.is_variable(start, len) || gpu.memory.is_accessible(start, len)) {
            return Err(Code::InvalidValue);
        }
        gpu.execution.queue_access(gpu.memory, id, (start, len, AccessKind::Write))?;
        // SAFETY: the program has `size` bytes there; it is not null.
        gpu.execution.bytes.write(start, unsafe { std::slice::from_raw_parts(from.cast(), size) });
        Ok(())
    };
    either("cuMemcpyHtoDAsync_v2", skipped, || match is_pinned(from.addr()) {
        true => on_gpu(|gpu| gpu.submit(stream, queued)),
        false => wait(|gpu| gpu.stream_done_at(stream), then),
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(to: usize, byte: u8, count: usize, stream: usize) -> c_int {
    let work = Work::Set { address: to as u64, len: count as u64, byte };
    // SAFETY: the program says that so many bytes can be written.
    let skipped = || unsafe { runtime::cudaMemsetAsync(to, c_int::from(byte), count, stream) };
    either("cuMemsetD8Async", skipped, || on_gpu(|gpu| gpu.submit(stream, work)))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD32Async(address: usize, _: c_uint, count: usize, _: usize) -> c_int {
    let machine = machine();
    machine.tick();
    machine.state().contents.forget(address as u64, 4 * count as u64);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWriteValue32_v2(_: usize, address: usize, _: c_uint, _: c_uint) -> c_int {
    cuMemsetD32Async(address, 0, 1, 0)
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWriteValue32(stream: usize, address: usize, value: c_uint, flags: c_uint) -> c_int {
    cuStreamWriteValue32_v2(stream, address, value, flags)
}
