//! Registration and launches of kernels. Kernels do nothing: a launch is counted, and forgets the copies that its arguments point into.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Mutex;
use std::{collections::BTreeMap, ptr, sync::PoisonError};

use crate::code::{Code, last, name, remember, sentence, take_last};
use crate::values;
use crate::world::{is_device_memory, machine};
use harness_gpu_settings::gpus::{BLOCK_THREADS, REGISTERS};

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
    /// Configurations between the two halves of a launch with `<<<...>>>`.
    static CONFIGURATIONS: RefCell<Vec<Configuration>> = const { RefCell::new(Vec::new()) };
}

/// Names of kernels by the address of their host function: pointers to text in the program.
static KERNELS: Mutex<BTreeMap<usize, Kernel>> = Mutex::new(BTreeMap::new());

#[derive(Clone, Copy)]
struct Kernel {
    name: usize,
    /// The number of parameters, once it was asked for.
    parameters: Option<usize>,
}

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFatBinary(_: *const c_void) -> *mut *mut c_void {
    // Nothing is read from it; its address is what the program hands back.
    static HANDLE: [usize; 2] = [0; 2];
    ptr::from_ref(&HANDLE).cast_mut().cast()
}

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFatBinaryEnd(_: *mut *mut c_void) {}

#[unsafe(no_mangle)]
extern "C" fn __cudaUnregisterFatBinary(_: *mut *mut c_void) {}

#[unsafe(no_mangle)]
extern "C" fn __cudaInitModule(_: *mut *mut c_void) -> c_char {
    1
}

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFunction(
    _: *mut *mut c_void,
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
    let kernel = Kernel { name: name.expose_provenance(), parameters: None };
    KERNELS.lock().unwrap_or_else(PoisonError::into_inner).insert(host_function, kernel);
}

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterVar(
    _: *mut *mut c_void,
    _: *mut c_char,
    _: *mut c_char,
    _: *const c_char,
    _: c_int,
    _: usize,
    _: c_int,
    _: c_int,
) {
}

#[unsafe(no_mangle)]
extern "C" fn __cudaPushCallConfiguration(grid: Dim3, block: Dim3, shared_memory: usize, stream: usize) -> c_uint {
    CONFIGURATIONS.with_borrow_mut(|stack| stack.push((grid, block, shared_memory, stream)));
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __cudaPopCallConfiguration(grid: *mut Dim3, block: *mut Dim3, shared_memory: *mut usize, stream: *mut usize) -> c_int {
    let Some(top) = CONFIGURATIONS.with_borrow_mut(Vec::pop) else { return remember(Err(Code::InvalidConfiguration)) };
    // SAFETY: compilers pass pointers to variables of these types.
    unsafe { (*grid, *block, *shared_memory, *stream) = top };
    0
}

/// What a grid and a block may be (<https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications>).
const fn allowed(grid: Dim3, block: Dim3) -> bool {
    let none = grid.x == 0 || grid.y == 0 || grid.z == 0 || block.x == 0 || block.y == 0 || block.z == 0;
    let threads = block.x as u64 * block.y as u64 * block.z as u64;
    !none && grid.x <= i32::MAX as u32 && grid.y <= 65_535 && grid.z <= 65_535 && threads <= BLOCK_THREADS as u64
}

/// # Safety
/// `arguments` is null, or has a pointer for each parameter of the kernel.
unsafe fn launch(kernel: usize, grid: Dim3, block: Dim3, arguments: *const *const c_void) -> c_int {
    if !allowed(grid, block) {
        return remember(Err(Code::InvalidConfiguration));
    }
    let machine = machine();
    if let unusable @ Err(_) = machine.usable() {
        return remember(unusable);
    }
    machine.tick();
    if values::any() && !arguments.is_null() {
        let count = parameters(kernel);
        // SAFETY: as the caller promises; the count is the kernel's.
        unsafe { forget_arguments(arguments, count) };
    }
    0
}

/// Forgets the copies that arguments of a kernel point into: their first eight bytes are taken for an address.
///
/// # Safety
/// `arguments` has `count` pointers, each to at least one byte of an argument.
unsafe fn forget_arguments(arguments: *const *const c_void, count: usize) {
    let mut state = machine().state();
    for index in 0..count {
        // SAFETY: as the caller promises. Arguments lie on the caller's stack or in its arrays, so that eight bytes from their start can be read
        // even where an argument is shorter.
        let address = unsafe { (*arguments.add(index)).cast::<u64>().read_unaligned() };
        if is_device_memory(address) {
            state.contents.forget_around(address);
        }
    }
}

/// The number of parameters of a registered kernel, by its mangled name. None where the name cannot be read.
fn parameters(kernel: usize) -> usize {
    let mut kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(known) = kernels.get_mut(&kernel) else { return 0 };
    *known.parameters.get_or_insert_with(|| {
        // SAFETY: the program registered a string that lives as long as its code.
        let mangled = unsafe { CStr::from_ptr(ptr::with_exposed_provenance(known.name)) };
        crate::parameters::of_function(mangled.to_bytes()).unwrap_or(0)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __cudaGetKernel(kernel: *mut usize, host_function: usize) -> c_int {
    // SAFETY: the program passes a pointer to a handle. The host function serves as one.
    unsafe { *kernel = host_function };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __cudaLaunchKernel(
    kernel: usize,
    grid: Dim3,
    block: Dim3,
    arguments: *const *const c_void,
    _: usize,
    _: usize,
) -> c_int {
    // SAFETY: the program passes a pointer for each parameter.
    unsafe { launch(kernel, grid, block, arguments) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaLaunchKernel(
    kernel: usize,
    grid: Dim3,
    block: Dim3,
    arguments: *const *const c_void,
    _: usize,
    _: usize,
) -> c_int {
    // SAFETY: the program passes a pointer for each parameter.
    unsafe { launch(kernel, grid, block, arguments) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaLaunchCooperativeKernel(
    kernel: usize,
    grid: Dim3,
    block: Dim3,
    arguments: *const *const c_void,
    _: usize,
    _: usize,
) -> c_int {
    // SAFETY: the program passes a pointer for each parameter.
    unsafe { launch(kernel, grid, block, arguments) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaLaunchKernelExC(config: *const LaunchConfig, kernel: usize, arguments: *const *const c_void) -> c_int {
    // SAFETY: the program passes a configuration and a pointer for each parameter.
    unsafe { launch(kernel, (*config).grid, (*config).block, arguments) }
}

/// Size of `cudaFuncAttributes`.
const FUNCTION_ATTRIBUTES: usize = 144;

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaFuncGetAttributes(attributes: *mut u8, _: usize) -> c_int {
    let gpu = machine().settings.gpu;
    let version = 10 * gpu.capability.0 + gpu.capability.1;
    let figures = [(24, BLOCK_THREADS), (28, 32), (32, version), (36, version), (44, gpu.limits().shared_memory_of_a_block)];
    // SAFETY: the program passes a structure of this size, whose figures lie at these offsets.
    unsafe {
        attributes.write_bytes(0, FUNCTION_ATTRIBUTES);
        figures.into_iter().for_each(|(offset, figure)| attributes.add(offset).cast::<u32>().write_unaligned(figure));
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(
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
unsafe extern "C" fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    blocks: *mut c_int,
    _: usize,
    block: c_int,
    shared_memory: usize,
    _: c_uint,
) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { *blocks = active_blocks(block, shared_memory) };
    0
}

/// Blocks of a kernel with few registers that fit on a multiprocessor.
pub(crate) fn active_blocks(block: c_int, shared_memory: usize) -> c_int {
    let limits = machine().settings.gpu.limits();
    let by_threads = limits.threads / u32::try_from(block).unwrap_or(1).max(1);
    let by_memory =
        (limits.shared_memory as usize).checked_div(shared_memory).map_or(u32::MAX, |blocks| u32::try_from(blocks).unwrap_or(u32::MAX));
    // A thread of a kernel is told to have 32 registers.
    let by_registers = REGISTERS / 32 / u32::try_from(block).unwrap_or(1).max(1);
    c_int::try_from(by_threads.min(by_memory).min(by_registers).min(limits.blocks).max(1)).unwrap_or(1)
}

#[unsafe(no_mangle)]
extern "C" fn cudaFuncSetAttribute(_: usize, _: c_int, _: c_int) -> c_int {
    0
}

/// Calls a function of the program in the order of a stream: at once, since work takes no time.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaLaunchHostFunc(_: usize, function: extern "C" fn(*mut c_void), data: *mut c_void) -> c_int {
    machine().tick();
    function(data);
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamAddCallback(
    stream: usize,
    function: extern "C" fn(usize, c_int, *mut c_void),
    data: *mut c_void,
    _: c_uint,
) -> c_int {
    machine().tick();
    function(stream, 0, data);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetLastError() -> c_int {
    take_last()
}

#[unsafe(no_mangle)]
extern "C" fn cudaPeekAtLastError() -> c_int {
    last()
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorString(number: c_int) -> *const c_char {
    sentence(number).as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorName(number: c_int) -> *const c_char {
    name(number).as_ptr()
}
