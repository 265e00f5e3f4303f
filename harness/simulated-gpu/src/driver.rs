//! The functions of the CUDA driver (<https://docs.nvidia.com/cuda/cuda-driver-api/>) that PyTorch, its compilers and its caches call.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;

use harness_allocator::units::Bytes;

use crate::code::{Code, answer, name, sentence};
use crate::device_figures::{attribute, pci_bus, uuid};
use crate::entry_points::function;
use crate::memory::device_of_page;
use crate::runtime::{active_blocks, allocate, device, free, free_and_total, write_address};
use crate::unmodelled::{delete_object, new_object};
use crate::values;
use crate::world::{current_device, is_device_memory, machine, set_current_device};
use harness_gpu_settings::counters::Figure;
use harness_gpu_settings::settings::FaultyCall;

/// The only unit in which memory can be mapped.
const GRANULARITY: usize = 2 << 20;
/// What a context is handed out as: programs only compare it and hand it back.
const CONTEXT: usize = 0x8_0000_0000;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    function_out: *mut *mut c_void,
    _: c_int,
    _: c_ulonglong,
    status: *mut c_int,
) -> c_int {
    // SAFETY: the program passes a name and pointers to results, of which the status may be null.
    let found = unsafe {
        *function_out = function(CStr::from_ptr(name));
        let found = !(*function_out).is_null();
        if !status.is_null() {
            *status = c_int::from(!found);
        }
        found
    };
    answer(if found { Ok(()) } else { Err(Code::NotFound) })
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_: c_uint) -> c_int {
    answer(if machine().visible.is_empty() { Err(Code::NoDevice) } else { Ok(()) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { *version = machine().settings.cuda.driver_version() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { *count = c_int::try_from(machine().visible.len()).unwrap_or(0) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(handle: *mut c_int, index: c_int) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    answer(device(index).map(|_| unsafe { *handle = index }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(text: *mut u8, len: c_int, index: c_int) -> c_int {
    answer(device(index).map(|_| {
        let device_name = machine().settings.gpu.device.as_bytes();
        let len = usize::try_from(len).unwrap_or(0).saturating_sub(1).min(device_name.len());
        // SAFETY: the program passes an array of more than `len` characters.
        unsafe {
            ptr::copy_nonoverlapping(device_name.as_ptr(), text, len);
            *text.add(len) = 0;
        }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, number: c_int, index: c_int) -> c_int {
    answer(device(index).map(|device| {
        let figure = attribute(&machine().settings, number, pci_bus(device));
        // SAFETY: the program passes a pointer to a number.
        unsafe { *value = c_int::try_from(figure).unwrap_or(c_int::MAX) };
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _: c_int) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { *bytes = machine().settings.memory.0 as usize };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(into: *mut [u8; 16], index: c_int) -> c_int {
    // SAFETY: the program passes a pointer to sixteen bytes.
    answer(device(index).map(|number| unsafe { *into = uuid(number) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxGetState(_: c_int, flags: *mut c_uint, active: *mut c_int) -> c_int {
    // SAFETY: the program passes pointers to numbers.
    unsafe { (*flags, *active) = (0, 1) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, index: c_int) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    answer(device(index).map(|_| unsafe { *context = CONTEXT + index as usize }))
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(_: c_int) -> c_int {
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut usize) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    unsafe { *context = CONTEXT + current_device() };
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: usize) -> c_int {
    answer(context.checked_sub(CONTEXT).map_or(Ok(()), set_current_device))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: usize) -> c_int {
    cuCtxSetCurrent(context)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut usize) -> c_int {
    // SAFETY: the pointer is null or points to a handle.
    if context.is_null() { 0 } else { unsafe { cuCtxGetCurrent(context) } }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetDevice(handle: *mut c_int) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    unsafe { *handle = c_int::try_from(current_device()).unwrap_or(0) };
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> c_int {
    let machine = machine();
    machine.state().streams.wait_for_device(current_device(), machine.now());
    0
}

/// Limits are asked for and set by compilers; any serves.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetLimit(value: *mut usize, _: c_int) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { *value = 1 << 10 };
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetLimit(_: c_int, _: usize) -> c_int {
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free_bytes: *mut usize, total: *mut usize) -> c_int {
    // SAFETY: the program passes pointers to numbers.
    answer(free_and_total().map(|(left, all)| unsafe { (*free_bytes, *total) = (left.0 as usize, all.0 as usize) }))
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
                1 => value.cast::<usize>().write(CONTEXT + device),
                2 => value.cast::<c_int>().write(2),
                3 | 4 => value.cast::<usize>().write(address),
                _ => value.cast::<c_int>().write(c_int::try_from(device).unwrap_or(0)),
            }
        }
    }))
}

/// `CUmemAllocationProp`, as far as it matters.
#[repr(C)]
struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    location: c_int,
}

/// The handle type of memory that machines of a cluster share.
const FABRIC: c_int = 8;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAllocationGranularity(granularity: *mut usize, _: *const AllocationProperties, _: c_int) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { *granularity = GRANULARITY };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAddressReserve(address: *mut usize, size: usize, _: usize, _: usize, _: c_ulonglong) -> c_int {
    let mut state = machine().state();
    let start = state.devices.get_mut(current_device()).ok_or(Code::NoDevice).and_then(|memory| memory.reserve(Bytes(size as u64)));
    // SAFETY: the program passes a pointer to a pointer.
    answer(start.map(|start| unsafe { *address = start as usize }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(address: usize, _: usize) -> c_int {
    let mut state = machine().state();
    answer(state.device_at(address as u64).and_then(|memory| memory.unreserve(address as u64)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemCreate(handle: *mut u64, size: usize, properties: *const AllocationProperties, _: c_ulonglong) -> c_int {
    // SAFETY: the program passes properties.
    let (handle_types, location) = unsafe { ((*properties).handle_types, (*properties).location) };
    if handle_types == FABRIC {
        return answer(Err(Code::NotPermitted));
    }
    let machine = machine();
    let state = &mut *machine.state();
    let size = Bytes(size as u64);
    let index = usize::try_from(location).unwrap_or(usize::MAX);
    if index >= state.devices.len() {
        return answer(Err(Code::InvalidDevice));
    }
    let (created, injected) =
        state.attempt(machine, (FaultyCall::Create, size), Some(index), |state| state.on_device(index, |memory| memory.create(size)));
    machine.counters.count_allocation(index, state.devices[index].used(), injected, created.is_err());
    // SAFETY: the program passes a pointer to a handle.
    answer(created.map(|number| unsafe { *handle = number }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(handle: u64) -> c_int {
    let machine = machine();
    let mut state = machine.state();
    answer(state.give_back(device_of_page(handle), |memory| {
        let given_back = memory.release(handle)?;
        note_given_back(memory.index(), u64::from(given_back), memory.used());
        Ok(())
    }))
}

/// Counts pieces of physical memory that were given back.
fn note_given_back(device: usize, pieces: u64, used: Bytes) {
    let counters = machine().counters;
    (0..pieces).for_each(|_| counters.add(device, Figure::Frees));
    counters.set_used(device, used);
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(address: usize, size: usize, offset: usize, handle: u64, _: c_ulonglong) -> c_int {
    if offset != 0 {
        return answer(Err(Code::InvalidValue));
    }
    let mut state = machine().state();
    answer(state.device_at(address as u64).and_then(|memory| memory.map(address as u64, Bytes(size as u64), handle)))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(address: usize, size: usize) -> c_int {
    let state = &mut *machine().state();
    let index = state.device_at(address as u64).map(|memory| memory.index());
    let unmapped = index.and_then(|index| {
        state.give_back(index, |memory| {
            let pieces = memory.unmap(address as u64, Bytes(size as u64))?;
            note_given_back(memory.index(), pieces, memory.used());
            Ok(())
        })
    });
    if unmapped.is_ok() {
        state.contents.forget(address as u64, size as u64);
    }
    answer(unmapped)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemSetAccess(_: usize, _: usize, _: *const c_void, _: usize) -> c_int {
    0
}

/// Memory is not shared between processes.
#[unsafe(no_mangle)]
extern "C" fn cuMemExportToShareableHandle(_: *mut c_void, _: u64, _: c_int, _: c_ulonglong) -> c_int {
    answer(Err(Code::NotSupported))
}

/// As [`cuMemExportToShareableHandle`].
#[unsafe(no_mangle)]
extern "C" fn cuMemImportFromShareableHandle(_: *mut u64, _: *mut c_void, _: c_int) -> c_int {
    answer(Err(Code::NotSupported))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemRetainAllocationHandle(handle: *mut u64, address: usize) -> c_int {
    let mut state = machine().state();
    let retained = state.device_at(address as u64).and_then(|memory| memory.retain(address as u64));
    // SAFETY: the program passes a pointer to a handle.
    answer(retained.map(|number| unsafe { *handle = number }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAllocationPropertiesFromHandle(properties: *mut AllocationProperties, handle: u64) -> c_int {
    let location = c_int::try_from(device_of_page(handle)).unwrap_or(0);
    // SAFETY: the program passes a pointer to a structure, which begins with these fields. The kind is pinned memory, the location a device.
    unsafe { *properties = AllocationProperties { kind: 1, handle_types: 0, location_kind: 1, location } };
    0
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

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(number: c_int, text: *mut *const c_char) -> c_int {
    // SAFETY: the program passes a pointer to a string.
    unsafe { *text = sentence(number).as_ptr() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(number: c_int, text: *mut *const c_char) -> c_int {
    // SAFETY: the program passes a pointer to a string.
    unsafe { *text = name(number).as_ptr() };
    0
}

/// A module and its functions are objects without contents: their kernels do nothing.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut *mut u8, _: *const c_void) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    unsafe { *module = new_object() };
    0
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
    // SAFETY: the program gives back what a function here made, once.
    unsafe { delete_object(module) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(function_out: *mut usize, module: usize, _: *const c_char) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    unsafe { *function_out = module };
    0
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
extern "C" fn cuLaunchKernel() -> c_int {
    launch()
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

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: usize) -> c_int {
    answer(if is_device_memory(address as u64) { free(address as u64) } else { Err(Code::InvalidValue) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut usize, size: usize) -> c_int {
    // SAFETY: the program passes a pointer to a pointer.
    answer(unsafe { write_address(address, allocate(FaultyCall::Malloc, Bytes(size as u64))) })
}
