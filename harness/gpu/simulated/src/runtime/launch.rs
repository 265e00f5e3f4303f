//! Registration and launches of kernels. Kernels are no-ops: a launch is counted, and forgets the
//! stored copies that its arguments point into.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{LazyLock, Mutex};
use std::{cell::RefCell, collections::HashMap, ptr};

use harness_allocator::sync::lock;
use harness_gpu_settings::{export, ffi::Out};

use super::fat_binary::{self, chosen_code};
use super::streams::{allow_unsafe, submit};
use crate::code::{Code, last, message, name, put, remember, take_last};
use crate::driver::occupancy::{allow_dynamic, attribute, most_dynamic};
use crate::image;
use crate::mangled::{self, OPERAND_WORDS, Parameter};
use crate::world::{forget_output, machine};
use crate::{contents::launched, copied, stack::words_on_stack};
use harness_gpu_settings::gpus::BLOCK_THREADS;

/// A grid or a block.
#[derive(Clone, Copy)]
#[repr(C)]
struct Dim3 {
    x: c_uint,
    y: c_uint,
    z: c_uint,
}

/// `cudaLaunchConfig_t`, whose layout is the same in CUDA 12 and 13.
#[repr(C)]
struct LaunchConfig {
    grid: Dim3,
    block: Dim3,
    shared_memory: usize,
    stream: usize,
    attributes: *const c_void,
    attribute_count: c_uint,
}

type Configuration = (Dim3, Dim3, usize, usize);

thread_local! {
    /// Configurations of launches with `<<<...>>>`, between their two calls.
    static CONFIGURATIONS: RefCell<Vec<Configuration>> = const { RefCell::new(Vec::new()) };
}

/// Kernels by the address of their host function.
static KERNELS: LazyLock<Mutex<HashMap<usize, Kernel>>> = LazyLock::new(Mutex::default);

struct Kernel {
    /// Address of the fat binary with its code.
    binary: usize,
    /// Address of the mangled name in the program.
    name: usize,
    /// Parsed at the first use and never freed; the inner value is `None` if the name cannot be
    /// parsed.
    parameters: Option<Option<&'static [Parameter]>>,
    /// The limit of dynamic shared memory that the program set.
    dynamic: Option<u32>,
}

/// Returns a handle that contains the address of the fat binary.
#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFatBinary(binary: usize) -> *mut usize {
    // Programs register each binary once, and use the handle until they end.
    Box::into_raw(Box::new(binary))
}

#[unsafe(no_mangle)]
extern "C" fn __cudaInitModule(_: *mut *mut c_void) -> c_char {
    1
}

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFunction(
    handle: Option<&usize>,
    host_function: usize,
    _: *const c_char,
    name: *const c_char,
    _: c_int,
    _: *const c_void,
    _: *const c_void,
    _: *const c_void,
    _: *const c_void,
    _: *const c_int,
) {
    let kernel = Kernel {
        binary: handle.copied().unwrap_or(0),
        name: name.expose_provenance(),
        parameters: None,
        dynamic: None,
    };
    lock(&KERNELS).insert(host_function, kernel);
}

#[unsafe(no_mangle)]
extern "C" fn __cudaPushCallConfiguration(
    grid: Dim3,
    block: Dim3,
    shared_memory: usize,
    stream: usize,
) -> c_uint {
    CONFIGURATIONS.with_borrow_mut(|stack| stack.push((grid, block, shared_memory, stream)));
    0
}

/// Checks the sizes of a grid and a block:
/// <https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications>
const fn allowed(grid: Dim3, block: Dim3) -> bool {
    let none =
        grid.x == 0 || grid.y == 0 || grid.z == 0 || block.x == 0 || block.y == 0 || block.z == 0;
    let threads = block.x as u64 * block.y as u64 * block.z as u64;
    !none
        && grid.x <= i32::MAX as u32
        && grid.y <= 65_535
        && grid.z <= 65_535
        && threads <= BLOCK_THREADS as u64
}

/// The program passes a pointer per parameter of the kernel, or null.
fn launch(
    kernel: usize,
    grid: Dim3,
    block: Dim3,
    arguments: *const *const c_void,
    stream: usize,
) -> c_int {
    if !allowed(grid, block) {
        return remember(Err(Code::InvalidConfiguration));
    }
    let machine = machine();
    if let unusable @ Err(_) = machine.usable() {
        return remember(unusable);
    }
    machine.tick();
    if let refused @ Err(_) = submit(stream) {
        return remember(refused.map(drop));
    }
    launched();
    if copied::any() {
        match parameters(kernel) {
            // SAFETY: there is a pointer per parameter.
            Some(parameters) if !arguments.is_null() => unsafe {
                forget_arguments(arguments, parameters)
            },
            // A kernel with unknown parameters may write anywhere.
            _ => machine.state().copied.forget_all(),
        }
    }
    0
}

/// Forgets the copies that arguments of a kernel point into. Of a class with unknown fields, the
/// words up to the next argument can be pointers, at most [`OPERAND_WORDS`]. Outside of the stack,
/// only its first word counts.
///
/// # Safety
/// `arguments` has a pointer to an argument for each parameter.
unsafe fn forget_arguments(arguments: *const *const c_void, parameters: &[Parameter]) {
    // SAFETY: as the caller promises.
    let starts =
        || (0..parameters.len()).map(|index| unsafe { *arguments.add(index) }.cast::<u8>());
    for (start, parameter) in starts().zip(parameters) {
        let pointers = match parameter {
            Parameter::Scalar => 0,
            Parameter::Pointers(count) => *count,
            // Callers pass them on the stack. The words behind a shorter class may be old pointers,
            // whose copies are forgotten without need.
            Parameter::Operands => words_on_stack(start.addr()).clamp(1, OPERAND_WORDS),
            // It ends before the next argument, and may be shorter than a pointer.
            Parameter::Class => {
                let others = starts().map(|other| other.addr().wrapping_sub(start.addr()));
                let next = others.filter(|distance| *distance > 0).min();
                let most = words_on_stack(start.addr()).clamp(1, OPERAND_WORDS);
                next.map_or(most, |next| most.min(next / 8))
            }
        };
        for index in 0..pointers {
            // SAFETY: the argument has this many pointers, or they are on the stack. The start of a
            // class is readable: arguments are on the stack or in arrays.
            forget_output(unsafe { start.add(8 * index).cast::<u64>().read_unaligned() });
        }
    }
}

/// The parameters of a registered kernel, by its mangled name; `None` if they are unknown.
fn parameters(kernel: usize) -> Option<&'static [Parameter]> {
    let mut kernels = lock(&KERNELS);
    let kernel = kernels.get_mut(&kernel)?;
    *kernel.parameters.get_or_insert_with(|| {
        // SAFETY: the program registered a string that lives as long as its code.
        let name = unsafe { CStr::from_ptr(ptr::with_exposed_provenance(kernel.name)) };
        mangled::parameters(name.to_bytes()).map(|parameters| &*parameters.leak())
    })
}

export! {
    __cudaPopCallConfiguration(
        grid: Out<'_, Dim3>, block: Out<'_, Dim3>, shared_memory: Out<'_, usize>,
        stream: Out<'_, usize>
    ) = {
        let top = CONFIGURATIONS.with_borrow_mut(Vec::pop).ok_or(Code::InvalidConfiguration);
        remember(top.and_then(|top| {
            put(grid, top.0)
                .and(put(block, top.1))
                .and(put(shared_memory, top.2))
                .and(put(stream, top.3))
        }))
    };
    /// The host function identifies the kernel.
    __cudaGetKernel, cudaGetKernel(kernel: Out<'_, usize>, host_function: usize) =
        remember(put(kernel, host_function));
    __cudaLaunchKernel, cudaLaunchKernel, cudaLaunchCooperativeKernel(
        kernel: usize, grid: Dim3, block: Dim3, arguments: *const *const c_void, _: usize,
        stream: usize
    ) = launch(kernel, grid, block, arguments, stream);
    cudaLaunchKernelExC(config: &LaunchConfig, kernel: usize, arguments: *const *const c_void) =
        launch(kernel, config.grid, config.block, arguments, config.stream);
    /// The function of a kernel is its symbol: launches need no other.
    cudaGetFuncBySymbol(function: Out<'_, usize>, symbol: usize) = remember(put(function, symbol));
    /// Calls a function of the program in the order of a stream. Work takes no time, so this is
    /// immediate.
    cudaLaunchHostFunc, cuLaunchHostFunc(
        stream: usize, function: extern "C" fn(*mut c_void), data: *mut c_void
    ) = {
        machine().tick();
        remember(submit(stream).map(|_| function(data)))
    };
    cudaLaunchHostFunc_v2, cuLaunchHostFunc_v2(
        stream: usize, function: extern "C" fn(*mut c_void), data: *mut c_void, _: c_uint
    ) = cudaLaunchHostFunc(stream, function, data);
    cudaStreamAddCallback, cuStreamAddCallback(
        stream: usize, function: extern "C" fn(usize, c_int, *mut c_void), data: *mut c_void,
        _: c_uint
    ) = {
        machine().tick();
        // No stream captures a callback.
        remember(allow_unsafe().and_then(|()| submit(stream)).map(|_| function(stream, 0, data)))
    };
    cudaFuncSetAttribute(kernel: usize, number: c_int, value: c_int) =
        remember(set_attribute(kernel, number, value));
    cudaGetLastError() = take_last();
    cudaPeekAtLastError() = last();
}

/// What the code of a registered kernel needs, and its version.
fn of_code(kernel: usize) -> (image::Kernel, u32) {
    let gpu = machine().settings.gpu;
    let capability = 10 * gpu.capability.0 + gpu.capability.1;
    let (binary, name) = lock(&KERNELS)
        .get(&kernel)
        .map_or((0, 0), |kernel| (kernel.binary, kernel.name));
    // SAFETY: the program registered this binary.
    let version = unsafe { chosen_code(binary, capability) }.unwrap_or(capability);
    // SAFETY: as above, with the name of the kernel.
    let known = (name != 0).then(|| unsafe {
        let name = CStr::from_ptr(ptr::with_exposed_provenance(name));
        fat_binary::kernel(binary, version, name.to_str().ok()?)
    });
    (known.flatten().unwrap_or_default(), version)
}

/// Only the limit of dynamic shared memory has an effect.
fn set_attribute(kernel: usize, number: c_int, value: c_int) -> Result<(), Code> {
    if number != attribute::MAX_DYNAMIC_SHARED {
        return Ok(());
    }
    let dynamic = allow_dynamic(of_code(kernel).0, value)?;
    let mut kernels = lock(&KERNELS);
    if let Some(kernel) = kernels.get_mut(&kernel) {
        kernel.dynamic = Some(dynamic);
    }
    Ok(())
}

/// Size of `cudaFuncAttributes`.
const FUNCTION_ATTRIBUTES: usize = 144;

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaFuncGetAttributes(attributes: *mut u8, kernel: usize) -> c_int {
    let (known, version) = of_code(kernel);
    let kernels = lock(&KERNELS);
    let set = kernels.get(&kernel).and_then(|kernel| kernel.dynamic);
    drop(kernels);
    let limits = machine().settings.gpu.limits();
    let figures = [
        (0, known.shared),
        (8, known.constant),
        (16, known.local),
        (24, known.most_threads(&limits)),
        (28, known.registers),
        (32, version),
        (36, version),
        (44, most_dynamic(known, set)),
    ];
    // SAFETY: the program passes a structure of this size, with numbers at these offsets.
    unsafe {
        attributes.write_bytes(0, FUNCTION_ATTRIBUTES);
        figures.into_iter().for_each(|(offset, figure)| {
            attributes.add(offset).cast::<u32>().write_unaligned(figure)
        });
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorString(number: c_int) -> *const c_char {
    message(number).as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorName(number: c_int) -> *const c_char {
    name(number).as_ptr()
}
