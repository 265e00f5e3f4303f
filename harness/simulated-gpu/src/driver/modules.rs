//! Modules, their functions, and launches.

use std::ffi::{c_int, c_uint, c_void};

use harness_gpu_settings::ffi::{Out, Text};
use harness_gpu_settings::gpus::BLOCK_THREADS;

use crate::code::{Code, answer, put};
use crate::context::{Gpu, by_kernel_mode, call, on_gpu};
use crate::copied;
use crate::runtime::active_blocks;
use crate::unmodelled::{delete_object, new_object};
use crate::world::machine;

/// Loads PTX text if kernels execute. Otherwise the image is not read, and modules and functions are opaque objects.
#[unsafe(no_mangle)]
extern "C" fn cuModuleLoadData(module: Out<'_, usize>, image: Text<'_>) -> c_int {
    let load = || {
        machine().usable()?;
        if !machine().executes_kernels() {
            return Ok(new_object().expose_provenance());
        }
        let text = image.get().ok_or(Code::InvalidValue)?.to_str().map_err(|_| Code::InvalidPtx)?;
        let mut handle = 0;
        on_gpu(|gpu| {
            handle = gpu.execution.load(text)?;
            Ok(())
        })?;
        Ok(handle)
    };
    call("cuModuleLoadData", || answer(load().and_then(|handle| put(module, handle))))
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleLoadDataEx(module: Out<'_, usize>, image: Text<'_>, _: c_uint, _: *const c_int, _: *const c_void) -> c_int {
    cuModuleLoadData(module, image)
}

/// If kernels execute, modules are loaded only from memory.
#[unsafe(no_mangle)]
extern "C" fn cuModuleLoad(module: Out<'_, usize>, _: Text<'_>) -> c_int {
    by_kernel_mode("cuModuleLoad", || answer(put(module, new_object().expose_provenance())), || Err(Code::NotSupported))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleUnload(module: *mut u8) -> c_int {
    let no_op = || {
        // SAFETY: a function here created the object, and the program destroys it once.
        unsafe { delete_object(module) };
        0
    };
    by_kernel_mode("cuModuleUnload", no_op, || on_gpu(|gpu| gpu.execution.unload(module.addr())))
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleGetFunction(function_out: Out<'_, usize>, module: usize, name: Text<'_>) -> c_int {
    let find = || {
        machine().usable()?;
        let mut function = module;
        if machine().executes_kernels() {
            on_gpu(|gpu| {
                function = gpu.execution.function(module, text(name)?)?;
                Ok(())
            })?;
        }
        Ok(function)
    };
    call("cuModuleGetFunction", || answer(find().and_then(|function| put(function_out, function))))
}

/// The address of a variable. Modules have no variables if kernels are no-ops.
#[unsafe(no_mangle)]
extern "C" fn cuModuleGetGlobal_v2(address: Out<'_, u64>, size: Out<'_, usize>, module: usize, name: Text<'_>) -> c_int {
    let execute = || {
        on_gpu(|gpu| {
            let (start, len) = gpu.execution.variable(module, text(name)?)?;
            put(address, start).and(put(size, len as usize))
        })
    };
    by_kernel_mode("cuModuleGetGlobal_v2", || answer(Err(Code::NotFound)), execute)
}

fn text(name: Text<'_>) -> Result<&str, Code> {
    name.get().ok_or(Code::InvalidValue)?.to_str().map_err(|_| Code::NotFound)
}

/// Functions have 32 registers and blocks of 1024 threads; other attributes are zero.
#[unsafe(no_mangle)]
extern "C" fn cuFuncGetAttribute(value: Out<'_, c_int>, number: c_int, _: usize) -> c_int {
    let found = match number {
        0 => 1024,
        4 => 32,
        _ => 0,
    };
    answer(put(value, found))
}

#[unsafe(no_mangle)]
extern "C" fn cuFuncSetAttribute(_: usize, _: c_int, _: c_int) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuFuncSetCacheConfig(_: usize, _: c_int) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: Out<'_, c_int>, _: usize, block: c_int, shared_memory: usize) -> c_int {
    answer(put(blocks, active_blocks(block, shared_memory)))
}

#[unsafe(no_mangle)]
extern "C" fn cuOccupancyMaxActiveClusters(clusters: Out<'_, c_int>, _: usize, _: *const c_void) -> c_int {
    answer(put(clusters, c_int::try_from(machine().settings.gpu.multiprocessors).unwrap_or(1)))
}

/// Launches a kernel with unknown parameters. It may write anywhere, so all stored copies are forgotten.
fn launch() -> c_int {
    let machine = machine();
    machine.tick();
    if copied::any() {
        machine.state().copied.forget_all();
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: usize,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    _: c_uint,
    stream: usize,
    parameters: *const *const u64,
    _: *const *const c_void,
) -> c_int {
    by_kernel_mode("cuLaunchKernel", launch, || {
        let shape = [[grid_x, grid_y, grid_z], [block_x, block_y, block_z]].map(|sizes| sizes.into_iter().map(u64::from).product());
        // SAFETY: the program passes a pointer to each parameter of the kernel.
        on_gpu(|gpu| unsafe { execute_kernel(gpu, function, shape, stream, parameters) })
    })
}

/// Queues a kernel.
///
/// # Safety
/// There is a pointer to each parameter of the kernel.
unsafe fn execute_kernel(
    gpu: &mut Gpu<'_>,
    function: usize,
    [blocks, block]: [u64; 2],
    stream: usize,
    parameters: *const *const u64,
) -> Result<(), Code> {
    let kernel = gpu.execution.kernel(function)?;
    let threads = blocks * block;
    if threads == 0 || block > u64::from(BLOCK_THREADS) || parameters.is_null() || (kernel.is_for_one_thread() && threads != 1) {
        return Err(Code::InvalidValue);
    }
    // SAFETY: as the caller promises; all parameters of these kernels have 64 bits.
    let values: Vec<u64> = (0..kernel.parameters()).map(|index| unsafe { parameters.add(index).read().read() }).collect();
    gpu.submit(stream, kernel.work(&values))
}

#[unsafe(no_mangle)]
extern "C" fn cuLaunchKernelEx() -> c_int {
    launch()
}

#[unsafe(no_mangle)]
extern "C" fn cuLaunchCooperativeKernel() -> c_int {
    launch()
}

#[unsafe(no_mangle)]
extern "C" fn cuTensorMapEncodeTiled() -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuTensorMapEncodeIm2col() -> c_int {
    0
}
