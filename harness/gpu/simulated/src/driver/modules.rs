//! Modules, their functions, and launches.

use std::ffi::{c_int, c_uint, c_void};

use harness_allocator::units::Bytes;
use harness_gpu_settings::ffi::{Out, Text};
use harness_gpu_settings::{export, gpus::BLOCK_THREADS};

use crate::code::{Code, answer, put, remember};
use crate::context::{Gpu, by_kernel_mode, on_gpu, output_by_kernel_mode};
use crate::libraries::load_module;
use crate::objects::{delete_object, new_object};
use crate::runtime::fat_binary::code_bytes;
use crate::runtime::streams::submit;
use crate::{contents::launched, copied, world::machine};

/// `CUlaunchConfig`, as far as it is read here.
#[repr(C)]
struct LaunchConfig {
    sizes: [c_uint; 7],
    stream: usize,
}

export! {
    cuModuleLoadData(module: Out<'_, usize>, image: Text<'_>) =
        output_by_kernel_mode(THIS, module, |module| answer(create(module, image.address())), || load(image));
    cuModuleLoadDataEx(module: Out<'_, usize>, image: Text<'_>, _: c_uint, _: *const c_int, _: *const c_void) =
        cuModuleLoadData(module, image);
    cuModuleLoadFatBinary(module: Out<'_, usize>, image: *const c_void) =
        by_kernel_mode(THIS, || answer(create(module, image.expose_provenance())), || Err(Code::NotSupported));
    /// If kernels execute, modules are loaded only from memory.
    cuModuleLoad(module: Out<'_, usize>, _: Text<'_>) = by_kernel_mode(THIS, || answer(create(module, 0)), || Err(Code::NotSupported));
    /// Lazy loading, the driver's default.
    cuModuleGetLoadingMode(mode: Out<'_, c_int>) = answer(put(mode, 2));
    cuModuleUnload(module: *mut u8) = by_kernel_mode(THIS, || delete(module), || on_gpu(|gpu| gpu.execution.unload(module.addr())));
    /// The function of a module without kernels is the module.
    cuModuleGetFunction(place: Out<'_, usize>, module: usize, name: Text<'_>) =
        output_by_kernel_mode(THIS, place, |place| answer(put(place, module)), || function(module, name));
    /// The address of a variable. Modules have no variables if kernels are no-ops.
    cuModuleGetGlobal_v2(address: Out<'_, u64>, size: Out<'_, usize>, module: usize, name: Text<'_>) =
        by_kernel_mode(THIS, || answer(Err(Code::NotFound)), || variable(address, size, module, name));
    /// Functions have 32 registers and blocks of 1024 threads; other attributes are zero.
    cuFuncGetAttribute(value: Out<'_, c_int>, number: c_int, _: usize) = answer(put(value, match number { 0 => 1024, 4 => 32, _ => 0 }));
    cuFuncSetAttribute(_: usize, _: c_int, _: c_int) = 0;
    cuFuncSetCacheConfig(_: usize, _: c_int) = 0;
    cuOccupancyMaxActiveClusters(clusters: Out<'_, c_int>, _: usize, _: *const c_void) =
        answer(put(clusters, c_int::try_from(machine().settings.gpu.multiprocessors).unwrap_or(1)));
    cuLaunchKernelEx(config: Option<&LaunchConfig>) = config.map_or_else(|| answer(Err(Code::InvalidValue)), |config| launch(config.stream));
    cuLaunchCooperativeKernel(
        _: usize, _: c_uint, _: c_uint, _: c_uint, _: c_uint, _: c_uint, _: c_uint, _: c_uint, stream: usize
    ) = launch(stream);
    /// Libraries are modules, and their kernels are functions.
    cuLibraryLoadData(
        library: Out<'_, usize>, image: *const c_void, _: *const c_int, _: *const c_void, _: c_uint, _: *const c_int, _: *const c_void,
        _: c_uint
    ) = by_kernel_mode(THIS, || answer(create(library, image.expose_provenance())), || Err(Code::NotSupported));
    cuLibraryLoadFromFile(
        library: Out<'_, usize>, _: Text<'_>, _: *const c_int, _: *const c_void, _: c_uint, _: *const c_int, _: *const c_void, _: c_uint
    ) = by_kernel_mode(THIS, || answer(create(library, 0)), || Err(Code::NotSupported));
    cudaLibraryLoadData(
        library: Out<'_, usize>, image: *const c_void, _: *const c_int, _: *const c_void, _: c_uint, _: *const c_int, _: *const c_void,
        _: c_uint
    ) = remember(create(library, image.expose_provenance()));
    cudaLibraryLoadFromFile(
        library: Out<'_, usize>, _: Text<'_>, _: *const c_int, _: *const c_void, _: c_uint, _: *const c_int, _: *const c_void, _: c_uint
    ) = remember(create(library, 0));
    cudaLibraryUnload(library: *mut u8) = delete(library);
    cudaLibraryGetKernel, cudaLibraryGetUnifiedFunction(place: Out<'_, usize>, object: usize, _: Text<'_>) = remember(put(place, object));
    cuLibraryUnload(library: *mut u8) = by_kernel_mode(THIS, || delete(library), || Err(Code::NotSupported));
    cuLibraryGetKernel, cuLibraryGetModule, cuKernelGetFunction(place: Out<'_, usize>, object: usize, _: Text<'_>) = answer(put(place, object));
    cuKernelGetAttribute(value: Out<'_, c_int>, number: c_int, kernel: usize, _: c_int) = cuFuncGetAttribute(value, number, kernel);
    cuKernelSetAttribute(_: c_int, _: c_int, _: usize, _: c_int) = 0;
    cuTensorMapEncodeTiled, cuTensorMapEncodeIm2col() = 0;
}

/// Creates a module without kernels. The address of its image is 0 if it is in a file.
fn create(module: Out<'_, usize>, image: usize) -> Result<(), Code> {
    // SAFETY: the program passes an image.
    load_module(unsafe { code_bytes(image) })?;
    put(module, new_object().expose_provenance())
}

fn delete(module: *mut u8) -> c_int {
    // SAFETY: `create` created it, and the program destroys it once.
    unsafe { delete_object(module) };
    0
}

fn load(image: Text<'_>) -> Result<usize, Code> {
    load_module(Bytes::ZERO)?;
    let text = image
        .get()
        .ok_or(Code::InvalidValue)?
        .to_str()
        .map_err(|_| Code::InvalidPtx)?;
    on_gpu(|gpu| gpu.execution.load(text))
}

fn function(module: usize, name: Text<'_>) -> Result<usize, Code> {
    on_gpu(|gpu| gpu.execution.function(module, text(name)?))
}

fn variable(
    address: Out<'_, u64>,
    size: Out<'_, usize>,
    module: usize,
    name: Text<'_>,
) -> Result<(), Code> {
    let (start, len) = on_gpu(|gpu| gpu.execution.variable(module, text(name)?))?;
    put(address, start).and(put(size, len as usize))
}

fn text(name: Text<'_>) -> Result<&str, Code> {
    name.get()
        .ok_or(Code::InvalidValue)?
        .to_str()
        .map_err(|_| Code::NotFound)
}

/// Launches a kernel with unknown parameters. It may write anywhere, so all stored copies are
/// forgotten.
fn launch(stream: usize) -> c_int {
    let machine = machine();
    machine.tick();
    if let refused @ Err(_) = submit(stream) {
        return answer(refused.map(drop));
    }
    launched();
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
    by_kernel_mode(
        "cuLaunchKernel",
        || launch(stream),
        || {
            let shape = [[grid_x, grid_y, grid_z], [block_x, block_y, block_z]]
                .map(|sizes| sizes.into_iter().map(u64::from).product());
            // SAFETY: the program passes a pointer to each parameter of the kernel.
            on_gpu(|gpu| unsafe { execute_kernel(gpu, function, shape, stream, parameters) })
        },
    )
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
    if threads == 0
        || block > u64::from(BLOCK_THREADS)
        || parameters.is_null()
        || (kernel.is_for_one_thread() && threads != 1)
    {
        return Err(Code::InvalidValue);
    }
    // SAFETY: as the caller promises; all parameters of these kernels have 64 bits.
    let values: Vec<u64> = (0..kernel.parameters())
        .map(|index| unsafe { parameters.add(index).read().read() })
        .collect();
    gpu.submit(stream, kernel.work(&values))
}
