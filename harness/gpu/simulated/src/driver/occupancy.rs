//! Attributes of functions, and the blocks that a multiprocessor runs at once. Those of kernels
//! with metadata follow from it; others have 32 registers, a model.

use std::ffi::{c_int, c_uint};

use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, write};
use harness_gpu_settings::gpus::SHARED_MEMORY;

use crate::code::{Code, answer, put, remember};
use crate::device_properties::attribute as of_device;
use crate::image::Kernel;
use crate::world::machine;

/// Numbers of `CUfunction_attribute`.
pub(crate) mod attribute {
    use std::ffi::c_int;

    pub(super) const MAX_THREADS: c_int = 0;
    pub(super) const SHARED: c_int = 1;
    pub(super) const CONSTANT: c_int = 2;
    pub(super) const LOCAL: c_int = 3;
    pub(super) const REGISTERS: c_int = 4;
    pub(super) const PTX_VERSION: c_int = 5;
    pub(super) const BINARY_VERSION: c_int = 6;
    pub(crate) const MAX_DYNAMIC_SHARED: c_int = 8;
    pub(super) const CARVEOUT: c_int = 9;
}

fn kernel(function: usize) -> Kernel {
    machine().state().loaded.kernel(function)
}

/// Shared memory that the system reserves in each block.
fn reserved() -> u32 {
    of_device(&machine().settings, 111, 0)
}

/// The most dynamic shared memory of a launch: what the program set, or what the default limit
/// leaves beside a kernel's own.
pub(crate) fn most_dynamic(kernel: Kernel, set: Option<u32>) -> u32 {
    set.unwrap_or_else(|| SHARED_MEMORY.saturating_sub(kernel.shared))
}

/// Refuses more dynamic shared memory than the GPU has beside a kernel's own.
pub(crate) fn allow_dynamic(kernel: Kernel, value: c_int) -> Result<u32, Code> {
    let most = machine().settings.gpu.limits().shared_memory_of_a_block;
    let bytes = u32::try_from(value).map_err(|_| Code::InvalidValue)?;
    if bytes.saturating_add(kernel.shared) > most {
        return Err(Code::InvalidValue);
    }
    Ok(bytes)
}

fn function_attribute(number: c_int, function: usize) -> c_int {
    let gpu = machine().settings.gpu;
    let kernel = kernel(function);
    let dynamic = || {
        let mut state = machine().state();
        let set = state
            .loaded
            .get_mut(function)
            .and_then(|known| known.dynamic);
        most_dynamic(kernel, set)
    };
    let value = match number {
        attribute::MAX_THREADS => kernel.most_threads(&gpu.limits()),
        attribute::SHARED => kernel.shared,
        attribute::CONSTANT => kernel.constant,
        attribute::LOCAL => kernel.local,
        attribute::REGISTERS => kernel.registers,
        attribute::PTX_VERSION | attribute::BINARY_VERSION => {
            10 * gpu.capability.0 + gpu.capability.1
        }
        attribute::MAX_DYNAMIC_SHARED => dynamic(),
        // The driver's choice.
        attribute::CARVEOUT => return -1,
        _ => 0,
    };
    c_int::try_from(value).unwrap_or(c_int::MAX)
}

/// Only the limit of dynamic shared memory has an effect.
fn set_function_attribute(number: c_int, value: c_int, function: usize) -> Result<(), Code> {
    if number != attribute::MAX_DYNAMIC_SHARED {
        return Ok(());
    }
    let mut state = machine().state();
    let Some(known) = state.loaded.get_mut(function) else {
        return Ok(());
    };
    known.dynamic = Some(allow_dynamic(known.kernel, value)?);
    Ok(())
}

/// Offset and size of the parameters of a function with metadata.
fn parameters(function: usize) -> Result<Vec<(usize, usize)>, Code> {
    let mut state = machine().state();
    let known = state
        .loaded
        .get_mut(function)
        .and_then(|known| known.parameters.clone());
    known.ok_or(Code::NotSupported)
}

fn active_blocks(function: usize, block: c_int, dynamic: usize) -> c_int {
    let limits = machine().settings.gpu.limits();
    let block = u32::try_from(block).unwrap_or(0);
    let blocks = kernel(function).active_blocks(&limits, reserved(), block, dynamic);
    c_int::try_from(blocks).unwrap_or(c_int::MAX)
}

/// The size of the blocks with which most threads run at once, the largest of equal ones, and the
/// blocks that then run on the device.
fn potential(function: usize, dynamic: impl Fn(c_int) -> usize, limit: c_int) -> (c_int, c_int) {
    let gpu = machine().settings.gpu;
    let most = kernel(function).most_threads(&gpu.limits());
    let most = c_int::try_from(most).unwrap_or(c_int::MAX);
    let most = if limit > 0 { most.min(limit) } else { most };
    let sizes = std::iter::once(most).chain((1..most).rev().filter(|size| size % 32 == 0));
    let (mut best, mut chosen) = (0, (0, 0));
    for block in sizes {
        let blocks = active_blocks(function, block, dynamic(block));
        if blocks * block > best {
            best = blocks * block;
            let all = u32::try_from(blocks).unwrap_or(0) * gpu.multiprocessors;
            chosen = (c_int::try_from(all).unwrap_or(c_int::MAX), block);
        }
    }
    chosen
}

/// The dynamic shared memory of each of several blocks on a multiprocessor.
fn available(function: usize, blocks: c_int, block: c_int) -> Result<usize, Code> {
    let limits = machine().settings.gpu.limits();
    let kernel = kernel(function);
    let count = u32::try_from(blocks).ok().filter(|count| *count > 0);
    let block = u32::try_from(block).map_err(|_| Code::InvalidValue)?;
    let count = count.ok_or(Code::InvalidValue)?;
    if count > kernel.active_blocks(&limits, reserved(), block, 0) {
        return Err(Code::InvalidValue);
    }
    let of_block = (limits.shared_memory / count / 128 * 128).saturating_sub(reserved());
    let most = of_block.min(limits.shared_memory_of_a_block);
    Ok(most.saturating_sub(kernel.shared) as usize)
}

type SharedMemoryOf = Option<extern "C" fn(c_int) -> usize>;

export! {
    cuFuncGetAttribute(value: Out<'_, c_int>, number: c_int, function: usize) =
        answer(put(value, function_attribute(number, function)));
    cuKernelGetAttribute(value: Out<'_, c_int>, number: c_int, kernel: usize, _: c_int) =
        cuFuncGetAttribute(value, number, kernel);
    cuFuncGetParamCount, cuKernelGetParamCount(function: usize, count: Out<'_, usize>) =
        answer(parameters(function).and_then(|known| put(count, known.len())));
    /// The size may have no place.
    cuFuncGetParamInfo, cuKernelGetParamInfo(
        function: usize, index: usize, offset: Out<'_, usize>, size: Out<'_, usize>
    ) = answer(parameters(function).and_then(|known| {
        let (start, len) = *known.get(index).ok_or(Code::InvalidValue)?;
        write(size, len);
        put(offset, start)
    }));
    cuFuncSetAttribute(function: usize, number: c_int, value: c_int) =
        answer(set_function_attribute(number, value, function));
    cuKernelSetAttribute(number: c_int, value: c_int, kernel: usize, _: c_int) =
        cuFuncSetAttribute(kernel, number, value);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor, cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: Out<'_, c_int>, function: usize, block: c_int, dynamic: usize
    ) = remember(put(blocks, active_blocks(function, block, dynamic)));
    cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: Out<'_, c_int>, function: usize, block: c_int, dynamic: usize, _: c_uint
    ) = remember(put(blocks, active_blocks(function, block, dynamic)));
    cuOccupancyMaxPotentialBlockSize(
        grid: Out<'_, c_int>, block: Out<'_, c_int>, function: usize, size: SharedMemoryOf,
        dynamic: usize, limit: c_int
    ) = {
        let (all, chosen) =
            potential(function, |block| size.map_or(dynamic, |size| size(block)), limit);
        answer(put(grid, all).and(put(block, chosen)))
    };
    cuOccupancyMaxPotentialBlockSizeWithFlags(
        grid: Out<'_, c_int>, block: Out<'_, c_int>, function: usize, size: SharedMemoryOf,
        dynamic: usize, limit: c_int, _: c_uint
    ) = cuOccupancyMaxPotentialBlockSize(grid, block, function, size, dynamic, limit);
    cudaOccupancyAvailableDynamicSMemPerBlock, cuOccupancyAvailableDynamicSMemPerBlock(
        bytes: Out<'_, usize>, function: usize, blocks: c_int, block: c_int
    ) = remember(available(function, blocks, block).and_then(|free| put(bytes, free)));
}
