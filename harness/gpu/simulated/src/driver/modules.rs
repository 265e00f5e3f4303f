//! Modules, their functions, and launches.

use std::ffi::{OsStr, c_int, c_uint, c_void};
use std::{fs, os::unix::ffi::OsStrExt as _};

use harness_allocator::{device::sim::GRANULARITY, units::Bytes};
use harness_gpu_settings::ffi::{Out, Text, write};
use harness_gpu_settings::{export, gpus::BLOCK_THREADS};

use crate::code::{Code, answer, put, remember};
use crate::context::{Gpu, by_kernel_mode, call, on_gpu, output_by_kernel_mode};
use crate::image::Image;
use crate::libraries::load_module;
use crate::runtime::fat_binary::{code_bytes, image};
use crate::runtime::streams::submit;
use crate::world::{current_device, machine};
use crate::{contents::launched, copied};

/// `CUlaunchConfig`, as far as it is read here.
#[repr(C)]
struct LaunchConfig {
    sizes: [c_uint; 7],
    stream: usize,
}

export! {
    cuModuleLoadData(module: Out<'_, usize>, image: Text<'_>) = output_by_kernel_mode(
        THIS,
        module,
        |module| answer(create(module, image.address())),
        || load(image),
    );
    cuModuleLoadDataEx(
        module: Out<'_, usize>, image: Text<'_>, _: c_uint, _: *const c_int, _: *const c_void
    ) = cuModuleLoadData(module, image);
    cuModuleLoadFatBinary(module: Out<'_, usize>, image: *const c_void) =
        by_kernel_mode(
            THIS,
            || answer(create(module, image.expose_provenance())),
            || Err(Code::NotSupported),
        );
    /// If kernels execute, modules are loaded only from memory.
    cuModuleLoad(module: Out<'_, usize>, file: Text<'_>) =
        by_kernel_mode(THIS, || answer(load_file(module, file)), || Err(Code::NotSupported));
    /// Lazy loading, the driver's default.
    cuModuleGetLoadingMode(mode: Out<'_, c_int>) = answer(put(mode, 2));
    cuModuleUnload(module: usize) = by_kernel_mode(
        THIS,
        || answer(unload(module)),
        || on_gpu(|gpu| gpu.execution.unload(module)),
    );
    cuModuleGetFunction(place: Out<'_, usize>, module: usize, name: Text<'_>) =
        output_by_kernel_mode(
            THIS,
            place,
            |place| answer(put_function(place, module, name)),
            || function(module, name),
        );
    /// The address of a variable, which takes no memory if kernels are no-ops.
    cuModuleGetGlobal_v2(
        address: Out<'_, u64>, size: Out<'_, usize>, module: usize, name: Text<'_>
    ) = call(THIS, || {
        answer(variable(module, name).map(|found| write_variable(address, size, found)))
    });
    cuLibraryGetGlobal, cudaLibraryGetGlobal(
        address: Out<'_, u64>, size: Out<'_, usize>, library: usize, name: Text<'_>
    ) = remember(variable(library, name).map(|found| write_variable(address, size, found)));
    cuFuncSetCacheConfig(_: usize, _: c_int) = 0;
    cuOccupancyMaxActiveClusters(clusters: Out<'_, c_int>, _: usize, _: *const c_void) =
        answer(put(clusters, c_int::try_from(machine().settings.gpu.multiprocessors).unwrap_or(1)));
    cuLaunchKernelEx(config: Option<&LaunchConfig>) =
        config.map_or_else(|| answer(Err(Code::InvalidValue)), |config| launch(config.stream));
    cuLaunchCooperativeKernel(
        _: usize, _: c_uint, _: c_uint, _: c_uint, _: c_uint, _: c_uint, _: c_uint, _: c_uint,
        stream: usize
    ) = launch(stream);
    /// Libraries are modules, and their kernels are functions.
    cuLibraryLoadData(
        library: Out<'_, usize>, image: *const c_void, _: *const c_int, _: *const c_void, _: c_uint,
        _: *const c_int, _: *const c_void, _: c_uint
    ) = by_kernel_mode(
        THIS,
        || answer(create(library, image.expose_provenance())),
        || Err(Code::NotSupported),
    );
    cuLibraryLoadFromFile(
        library: Out<'_, usize>, file: Text<'_>, _: *const c_int, _: *const c_void, _: c_uint,
        _: *const c_int, _: *const c_void, _: c_uint
    ) = by_kernel_mode(THIS, || answer(load_file(library, file)), || Err(Code::NotSupported));
    cudaLibraryLoadData(
        library: Out<'_, usize>, image: *const c_void, _: *const c_int, _: *const c_void, _: c_uint,
        _: *const c_int, _: *const c_void, _: c_uint
    ) = remember(create(library, image.expose_provenance()));
    cudaLibraryLoadFromFile(
        library: Out<'_, usize>, file: Text<'_>, _: *const c_int, _: *const c_void, _: c_uint,
        _: *const c_int, _: *const c_void, _: c_uint
    ) = remember(load_file(library, file));
    cudaLibraryUnload(library: usize) = remember(unload(library));
    cudaLibraryGetKernel(kernel: Out<'_, usize>, library: usize, name: Text<'_>) =
        remember(put_function(kernel, library, name));
    cudaLibraryGetUnifiedFunction(place: Out<'_, usize>, object: usize, _: Text<'_>) =
        remember(put(place, object));
    cuLibraryUnload(library: usize) =
        by_kernel_mode(THIS, || answer(unload(library)), || Err(Code::NotSupported));
    cuLibraryGetKernel(kernel: Out<'_, usize>, library: usize, name: Text<'_>) =
        answer(put_function(kernel, library, name));
    cuLibraryGetModule, cuKernelGetFunction(place: Out<'_, usize>, object: usize) =
        answer(put(place, object));
    cuTensorMapEncodeTiled, cuTensorMapEncodeIm2col() = 0;
}

/// Creates a module whose kernels are no-ops.
fn create(module: Out<'_, usize>, address: usize) -> Result<(), Code> {
    // SAFETY: the program passes an image.
    let (size, image) = unsafe { (code_bytes(address), image(address)) };
    add(module, size, image)
}

fn add(module: Out<'_, usize>, size: Bytes, image: Image) -> Result<(), Code> {
    load_module(size)?;
    put(module, machine().state().loaded.add(image))
}

/// Creates a module from a file.
fn load_file(module: Out<'_, usize>, file: Text<'_>) -> Result<(), Code> {
    let file = file.get().ok_or(Code::InvalidValue)?;
    let bytes = fs::read(OsStr::from_bytes(file.to_bytes())).map_err(|_| Code::FileNotFound)?;
    add(module, Bytes(bytes.len() as u64), Image::of(&bytes))
}

fn unload(module: usize) -> Result<(), Code> {
    let state = &mut *machine().state();
    for (start, size) in state.loaded.remove(module)? {
        state.device_at(start)?.unreserve(start, size)?;
    }
    Ok(())
}

fn put_function(place: Out<'_, usize>, module: usize, name: Text<'_>) -> Result<(), Code> {
    let found = machine().state().loaded.function(module, text(name)?)?;
    put(place, found)
}

/// Either output may be null.
fn write_variable(address: Out<'_, u64>, size: Out<'_, usize>, (start, len): (u64, u64)) {
    write(address, start);
    write(size, len as usize);
}

/// Start and size of a variable.
fn variable(module: usize, name: Text<'_>) -> Result<(u64, u64), Code> {
    let name = text(name)?;
    machine().usable()?;
    if machine().executes_kernels() {
        return on_gpu(|gpu| gpu.execution.variable(module, name));
    }
    // The device of `harness run` checks the results of its kernels, which are no-ops here.
    if name == "harness_findings" {
        return Err(Code::NotFound);
    }
    let state = &mut *machine().state();
    let (len, known) = state.loaded.variable(module, name)?;
    if let Some((start, _)) = known {
        return Ok((start, len));
    }
    let memory = state.devices.get_mut(current_device());
    let space = Bytes(len.max(1).next_multiple_of(GRANULARITY.0));
    let start = memory.ok_or(Code::NoDevice)?.reserve(space)?;
    state.loaded.note(module, name, (start, space));
    Ok((start, len))
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
