//! Modules, their functions, and launches.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;

use super::put;
use crate::code::{Code, answer};
use crate::context::{Gpu, either, on_gpu};
use crate::runtime::active_blocks;
use crate::unmodelled::{delete_object, new_object};
use crate::values;
use crate::world::machine;
use harness_gpu_settings::gpus::BLOCK_THREADS;

/// A module and its functions are objects without contents where kernels are skipped.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut *mut u8, image: *const c_void) -> c_int {
    let skipped = || {
        // SAFETY: the program passes a pointer to a handle.
        answer(unsafe { put(module, new_object()) })
    };
    either("cuModuleLoadData", skipped, || {
        on_gpu(|gpu| {
            if image.is_null() {
                return Err(Code::InvalidValue);
            }
            // SAFETY: an image of PTX is text with its end; other images are none that can be done.
            let text = unsafe { CStr::from_ptr(image.cast()) }.to_str().map_err(|_| Code::InvalidPtx)?;
            let handle = gpu.execution.load(text)?;
            // SAFETY: the program passes a pointer to a handle.
            unsafe { put(module.cast::<usize>(), handle) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadDataEx(module: *mut *mut u8, image: *const c_void, _: c_uint, _: *const c_int, _: *const c_void) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cuModuleLoadData(module, image) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoad(module: *mut *mut u8, _: *const c_char) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cuModuleLoadData(module, ptr::null()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleUnload(module: *mut u8) -> c_int {
    let skipped = || {
        // SAFETY: the program gives back what a function here made, once.
        unsafe { delete_object(module) };
        0
    };
    either("cuModuleUnload", skipped, || on_gpu(|gpu| gpu.execution.unload(module.addr())))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(function_out: *mut usize, module: usize, name: *const c_char) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    let skipped = || answer(unsafe { put(function_out, module) });
    either("cuModuleGetFunction", skipped, || {
        on_gpu(|gpu| {
            // SAFETY: the program passes a name.
            let function = gpu.execution.function(module, unsafe { text(name) }?)?;
            // SAFETY: the program passes a pointer to a handle.
            unsafe { put(function_out, function) }
        })
    })
}

/// Where a variable of a module lies. Where kernels are skipped modules have none.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetGlobal_v2(address: *mut u64, size: *mut usize, module: usize, name: *const c_char) -> c_int {
    either(
        "cuModuleGetGlobal_v2",
        || answer(Err(Code::NotFound)),
        || {
            on_gpu(|gpu| {
                // SAFETY: the program passes a name.
                let (start, len) = gpu.execution.variable(module, unsafe { text(name) }?)?;
                // SAFETY: the program passes pointers to an address and a size.
                unsafe { put(address, start).and_then(|()| put(size, len as usize)) }
            })
        },
    )
}

/// # Safety
/// `name` is a string that lives as long as the caller needs the text.
unsafe fn text<'a>(name: *const c_char) -> Result<&'a str, Code> {
    // SAFETY: as the caller promises.
    unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| Code::NotFound)
}

/// Functions have 32 registers and blocks of 1024 threads; everything else is zero.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuFuncGetAttribute(value: *mut c_int, number: c_int, _: usize) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe {
        *value = match number {
            0 => 1024,
            4 => 32,
            _ => 0,
        }
    };
    0
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
unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut c_int,
    _: usize,
    block: c_int,
    shared_memory: usize,
) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { *blocks = active_blocks(block, shared_memory) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuOccupancyMaxActiveClusters(clusters: *mut c_int, _: usize, _: *const c_void) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { *clusters = c_int::try_from(machine().settings.gpu.multiprocessors).unwrap_or(1) };
    0
}

/// A launch of a kernel whose parameters nobody knows: it may write to anything, so that no copy is remembered any longer.
fn launch() -> c_int {
    let machine = machine();
    machine.tick();
    if values::any() {
        machine.state().contents.forget_all();
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
    either("cuLaunchKernel", launch, || {
        let shape = [[grid_x, grid_y, grid_z], [block_x, block_y, block_z]].map(|sizes| sizes.into_iter().map(u64::from).product());
        // SAFETY: the program passes a pointer to each parameter of the kernel.
        on_gpu(|gpu| unsafe { do_kernel(gpu, function, shape, stream, parameters) })
    })
}

/// Queues a kernel that is really done.
///
/// # Safety
/// There is a pointer to each parameter of the kernel.
unsafe fn do_kernel(
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
