//! The functions of `libcuda.so.1` that the CUDA device calls, with the driver's names, arguments and codes.
#![allow(non_snake_case, reason = "the driver's own names")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::time::{Duration, Instant};

use crate::memory::{GRANULARITY, code};
use crate::work::{Kernel, Work};
use crate::world::{Event, FINDINGS, Gpu, Stream, World, call, synchronize, wait_and, with_context};

/// CUDA version that the double claims to support: 12.8.
const CUDA_VERSION: c_int = 12_080;

/// Flag of `cuStreamCreate`: no implicit synchronization with the default stream.
const STREAM_NON_BLOCKING: c_uint = 1;

/// Writes an answer to the caller's place.
///
/// # Safety
/// `place` is null or valid for a write.
unsafe fn put<T>(place: *mut T, value: T) -> Result<(), u32> {
    if place.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: not null, so valid, as the caller promised.
    unsafe { place.write(value) };
    Ok(())
}

/// The handle `value` as the driver's pointer types.
const fn pointer(value: usize) -> *mut c_void {
    value as *mut c_void
}

/// The UUID of a GPU: the same in every run, another for each ordinal.
pub(crate) fn uuid(ordinal: u8) -> [u8; 16] {
    [0xd0, 0x0b, 0x1e, 0, 0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0, ordinal]
}

/// Initialises the driver; without a device it says so, as the driver does.
#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: c_uint) -> u32 {
    call("cuInit", |world| {
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        if world.gpus.is_empty() {
            return Err(code::NO_DEVICE);
        }
        world.initialised = true;
        Ok(())
    })
}

/// CUDA version; needs no initialisation.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> u32 {
    // SAFETY: the caller's place, as the driver API demands.
    call("cuDriverGetVersion", |_| unsafe { put(version, CUDA_VERSION) })
}

/// Number of devices.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> u32 {
    call("cuDeviceGetCount", |world| {
        if !world.initialised {
            return Err(code::NOT_INITIALIZED);
        }
        // SAFETY: the caller's place, as the driver API demands.
        unsafe { put(count, world.gpus.len() as c_int) }
    })
}

/// A device's handle is its ordinal.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> u32 {
    call("cuDeviceGet", |world| {
        world.gpu(ordinal)?;
        // SAFETY: the caller's place, as the driver API demands.
        unsafe { put(device, ordinal) }
    })
}

/// `Driver double`, cut to the caller's room.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> u32 {
    call("cuDeviceGetName", |world| {
        world.gpu(device)?;
        let room = usize::try_from(len).unwrap_or(0);
        // SAFETY: the caller has room for `len` characters, as the driver API demands.
        unsafe { write_text(name, room, "Driver double") }.ok_or(code::INVALID_VALUE)
    })
}

/// Writes text and NUL into `room` characters, cut where it does not fit. `None` without any room.
///
/// # Safety
/// `to` is null or has room for `room` characters.
pub(crate) unsafe fn write_text(to: *mut c_char, room: usize, text: &str) -> Option<()> {
    let len = text.len().min(room.checked_sub(1)?);
    if to.is_null() {
        return None;
    }
    // SAFETY: `len` characters and a NUL fit the room.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, len);
        to.add(len).write(0);
    }
    Some(())
}

/// The configured capacity.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> u32 {
    call("cuDeviceTotalMem_v2", |world| {
        let capacity = world.config.capacity;
        world.gpu(device)?;
        // SAFETY: the caller's place, as the driver API demands.
        unsafe { put(bytes, capacity as usize) }
    })
}

/// Compute capability 9.0 in its two attributes, 75 and 76; 102, virtual memory management, and 115, pools, as
/// configured; others are refused.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) -> u32 {
    call("cuDeviceGetAttribute", |world| {
        world.gpu(device)?;
        let answer = match attribute {
            75 => 9,
            76 => 0,
            102 => c_int::from(world.config.mapping),
            115 => c_int::from(world.config.pools),
            _ => return Err(code::INVALID_VALUE),
        };
        // SAFETY: the caller's place, as the driver API demands.
        unsafe { put(value, answer) }
    })
}

/// [`uuid`].
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(place: *mut [u8; 16], device: c_int) -> u32 {
    call("cuDeviceGetUuid_v2", |world| {
        world.gpu(device)?;
        // SAFETY: the caller's place of 16 bytes, as the driver API demands.
        unsafe { put(place, uuid(device as u8)) }
    })
}

/// One more reference; a context's handle is its device's ordinal plus one.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> u32 {
    call("cuDevicePrimaryCtxRetain", |world| {
        let gpu = world.gpu(device)?;
        gpu.references += 1;
        // SAFETY: the caller's place, as the driver API demands.
        unsafe { put(context, pointer(device as usize + 1)) }
    })
}

/// One reference less; the last destroys the context and reports what was left in it.
#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> u32 {
    call("cuDevicePrimaryCtxRelease_v2", |world| world.release(device))
}

/// Makes the context the calling thread's.
#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> u32 {
    call("cuCtxSetCurrent", |world| world.set_current(context as usize))
}

/// The calling thread's context, null where it has none.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> u32 {
    // SAFETY: the caller's place, as the driver API demands.
    call("cuCtxGetCurrent", |_| unsafe { put(context, pointer(World::current_context())) })
}

/// Waits for all streams.
#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> u32 {
    synchronize("cuCtxSynchronize", |gpu| Ok(gpu.idle_at()))
}

/// Free and total memory.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32 {
    with_context("cuMemGetInfo_v2", |gpu| {
        // SAFETY: the caller's places, as the driver API demands.
        unsafe { put(free, gpu.free() as usize).and_then(|()| put(total, (gpu.free() + gpu.used()) as usize)) }
    })
}

/// Takes memory, charged in whole 2 MiB.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, size: usize) -> u32 {
    with_context("cuMemAlloc_v2", |gpu| {
        let allocated = gpu.allocate(size as u64)?;
        // SAFETY: the caller's place, as the driver API demands.
        unsafe { put(address, allocated) }
    })
}

/// Waits for all work of the context, as drivers do, and gives the memory back.
#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> u32 {
    let until = |gpu: &mut Gpu| if gpu.is_allocation(address) { Ok(gpu.idle_at()) } else { Err(code::INVALID_VALUE) };
    wait_and("cuMemFree_v2", until, |gpu| gpu.deallocate(address))
}

/// `CUmemLocation` of cuda.h: kind 1 is a device.
#[repr(C)]
struct Location {
    kind: c_uint,
    id: c_int,
}

impl Location {
    const fn is(&self, ordinal: usize) -> bool {
        self.kind == 1 && self.id as usize == ordinal
    }
}

/// `CUmemAllocationProp` of cuda.h. The double makes pinned pages (kind 1) that nobody shares.
#[repr(C)]
struct PageProperty {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    metadata: *mut c_void,
    flags: [u8; 8],
}

impl PageProperty {
    /// Refuses what the double does not make on this GPU.
    fn check(&self, ordinal: usize) -> Result<(), u32> {
        let plain = self.metadata.is_null() && self.flags == [0; 8] && self.handle_types == 0;
        match self.kind == 1 && self.location.is(ordinal) {
            true if plain => Ok(()),
            true => Err(code::NOT_SUPPORTED),
            false => Err(code::INVALID_VALUE),
        }
    }
}

/// `CUmemAccessDesc` of cuda.h: flags 3 are reading and writing.
#[repr(C)]
struct AccessDescription {
    location: Location,
    flags: c_uint,
}

/// As [`with_context`], on a GPU that has virtual memory management.
fn with_mapping(function: &'static str, body: impl FnOnce(&mut Gpu) -> Result<(), u32>) -> u32 {
    with_context(function, |gpu| if gpu.has_mapping { body(gpu) } else { Err(code::NOT_SUPPORTED) })
}

/// 2 MiB, least and recommended, for pages that the double makes.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAllocationGranularity(granularity: *mut usize, property: *const PageProperty, option: c_uint) -> u32 {
    with_mapping("cuMemGetAllocationGranularity", |gpu| {
        // SAFETY: the caller's struct, as the driver API demands; null is refused.
        unsafe { property.as_ref() }.ok_or(code::INVALID_VALUE)?.check(gpu.ordinal)?;
        if option > 1 {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the caller's place, as the driver API demands.
        unsafe { put(granularity, GRANULARITY as usize) }
    })
}

/// Reserves addresses; a wish for some is passed over, as the driver may do.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAddressReserve(address: *mut u64, size: usize, alignment: usize, _wish: u64, flags: u64) -> u32 {
    with_mapping("cuMemAddressReserve", |gpu| {
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        let reserved = gpu.mapping.reserve(size as u64, alignment as u64)?;
        // SAFETY: the caller's place, as the driver API demands.
        unsafe { put(address, reserved) }
    })
}

/// Gives a reservation back.
#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(address: u64, size: usize) -> u32 {
    with_mapping("cuMemAddressFree", |gpu| gpu.mapping.unreserve(address, size as u64))
}

/// Makes a page, charged at once.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemCreate(page: *mut u64, size: usize, property: *const PageProperty, flags: u64) -> u32 {
    with_mapping("cuMemCreate", |gpu| {
        // SAFETY: the caller's struct, as the driver API demands; null is refused.
        unsafe { property.as_ref() }.ok_or(code::INVALID_VALUE)?.check(gpu.ordinal)?;
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        let (handle, free) = (gpu.handle() as u64, gpu.free());
        gpu.mapping.create(handle, size as u64, free)?;
        // SAFETY: the caller's place, as the driver API demands.
        unsafe { put(page, handle) }
    })
}

/// Gives a page back, at once or with its mapping.
#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(page: u64) -> u32 {
    with_mapping("cuMemRelease", |gpu| gpu.mapping.release(page))
}

/// Puts a whole page behind addresses.
#[unsafe(no_mangle)]
extern "C" fn cuMemMap(address: u64, size: usize, offset: usize, page: u64, flags: u64) -> u32 {
    with_mapping("cuMemMap", |gpu| match (offset, flags) {
        (0, 0) => gpu.mapping.map(address, size as u64, page),
        _ => Err(code::INVALID_VALUE),
    })
}

/// Lets the device read and write what is mapped.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemSetAccess(address: u64, size: usize, allowed: *const AccessDescription, count: usize) -> u32 {
    with_mapping("cuMemSetAccess", |gpu| {
        // SAFETY: the caller's struct, as the driver API demands; null is refused.
        let allowed = unsafe { allowed.as_ref() }.filter(|_| count == 1).ok_or(code::INVALID_VALUE)?;
        match allowed.location.is(gpu.ordinal) {
            true if allowed.flags == 3 => gpu.mapping.allow(address, size as u64),
            _ => Err(code::NOT_SUPPORTED),
        }
    })
}

/// Takes mappings away at once: work that comes too late breaks the context.
#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(address: u64, size: usize) -> u32 {
    with_mapping("cuMemUnmap", |gpu| gpu.mapping.unmap(address, size as u64))
}

/// `CUmemPoolProps` of cuda.h.
#[repr(C)]
struct PoolProperty {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    attributes: *mut c_void,
    most: usize,
    usage: u16,
    reserved: [u8; 54],
}

/// As [`with_context`], on a GPU that has pools.
fn with_pools(function: &'static str, body: impl FnOnce(&mut Gpu) -> Result<(), u32>) -> u32 {
    with_context(function, |gpu| if gpu.has_pools { body(gpu) } else { Err(code::NOT_SUPPORTED) })
}

/// Makes a pool of pinned memory (kind 1) that nobody shares, without a limit.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolCreate(pool: *mut *mut c_void, property: *const PoolProperty) -> u32 {
    with_pools("cuMemPoolCreate", |gpu| {
        // SAFETY: the caller's struct, as the driver API demands; null is refused.
        let property = unsafe { property.as_ref() }.ok_or(code::INVALID_VALUE)?;
        let plain = property.attributes.is_null() && property.handle_types == 0 && property.most == 0 && property.usage == 0;
        if property.kind != 1 || !property.location.is(gpu.ordinal) || property.reserved != [0; 54] {
            return Err(code::INVALID_VALUE);
        }
        if !plain {
            return Err(code::NOT_SUPPORTED);
        }
        let handle = gpu.handle();
        gpu.pools.create(handle);
        // SAFETY: the caller's place, as the driver API demands.
        unsafe { put(pool, pointer(handle)) }
    })
}

/// Removes a pool.
#[unsafe(no_mangle)]
extern "C" fn cuMemPoolDestroy(pool: *mut c_void) -> u32 {
    with_pools("cuMemPoolDestroy", |gpu| gpu.pools.destroy(pool as usize))
}

/// Tells what a pool holds: the attributes of 64 bits.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolGetAttribute(pool: *mut c_void, attribute: c_uint, value: *mut c_void) -> u32 {
    with_pools("cuMemPoolGetAttribute", |gpu| {
        let answer = gpu.pools.attribute(pool as usize, attribute)?;
        // SAFETY: the caller's place of 64 bits, as the driver API demands for these attributes.
        unsafe { put(value.cast::<u64>(), answer) }
    })
}

/// Sets the release threshold (4); takes that reuse by chance (2) and by waits of its own (3) are off, and nothing else.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolSetAttribute(pool: *mut c_void, attribute: c_uint, value: *mut c_void) -> u32 {
    with_pools("cuMemPoolSetAttribute", |gpu| {
        if value.is_null() || !gpu.pools.contains(pool as usize) {
            return Err(code::INVALID_VALUE);
        }
        match attribute {
            // SAFETY: the caller's int, as the driver API demands for these attributes; not null, as was just seen.
            2 | 3 if unsafe { value.cast::<c_int>().read() } == 0 => Ok(()),
            2 | 3 => Err(code::NOT_SUPPORTED),
            // SAFETY: the caller's 64 bits, as the driver API demands for this attribute; not null, as was just seen.
            4 => gpu.pools.set_threshold(pool as usize, unsafe { value.cast::<u64>().read() }),
            _ => Err(code::NOT_SUPPORTED),
        }
    })
}

/// Gives unused memory back.
#[unsafe(no_mangle)]
extern "C" fn cuMemPoolTrimTo(pool: *mut c_void, keep: usize) -> u32 {
    with_pools("cuMemPoolTrimTo", |gpu| gpu.pools.trim(pool as usize, keep as u64))
}

/// Takes memory of a pool, which is there at once for work of any stream; a driver promises that for ordered work only.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocFromPoolAsync(address: *mut u64, size: usize, pool: *mut c_void, stream: *mut c_void) -> u32 {
    with_pools("cuMemAllocFromPoolAsync", |gpu| {
        let (ready_at, free) = (gpu.ready_at(stream as usize)?, gpu.free());
        let allocated = gpu.pools.allocate(pool as usize, size as u64, stream as usize, ready_at, free)?;
        // SAFETY: the caller's place, as the driver API demands.
        unsafe { put(address, allocated) }
    })
}

/// Takes memory back when the stream comes to it: later work on the memory breaks the context.
#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: u64, stream: *mut c_void) -> u32 {
    with_pools("cuMemFreeAsync", |gpu| {
        let done_at = gpu.ready_at(stream as usize)?;
        gpu.pools.free(address, stream as usize, done_at)?;
        gpu.submit(stream as usize, Work::Free { address })
    })
}

/// Copies to pageable host memory, which as on a GPU has happened when the call returns.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, size: usize, stream: *mut c_void) -> u32 {
    let copy = |gpu: &mut Gpu| {
        if to.is_null() || !gpu.is_live(from, size as u64) {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the source is live, as was just seen; the caller has room for `size` bytes, as the driver API demands.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.cast(), size) };
        Ok(())
    };
    wait_and("cuMemcpyDtoHAsync_v2", |gpu| gpu.ready_at(stream as usize), copy)
}

/// Queues setting bytes.
#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(to: u64, byte: u8, count: usize, stream: *mut c_void) -> u32 {
    with_context("cuMemsetD8Async", |gpu| gpu.submit(stream as usize, Work::Set { address: to, len: count as u64, byte }))
}

/// Makes a stream that does not synchronize with the default stream; the double has no others.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut *mut c_void, flags: c_uint) -> u32 {
    with_context("cuStreamCreate", |gpu| {
        if flags != STREAM_NON_BLOCKING {
            return Err(code::NOT_SUPPORTED);
        }
        let handle = gpu.handle();
        gpu.streams.insert(handle, Stream { ready_at: Instant::now() });
        // SAFETY: the caller's place, as the driver API demands.
        unsafe { put(stream, pointer(handle)) }
    })
}

/// Removes a stream; its queued work is still done.
#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> u32 {
    with_context("cuStreamDestroy_v2", |gpu| match stream as usize {
        0 => Err(code::INVALID_HANDLE),
        handle => gpu.streams.remove(&handle).map(drop).ok_or(code::INVALID_HANDLE),
    })
}

/// The context that a stream was made in.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamGetCtx(stream: *mut c_void, context: *mut *mut c_void) -> u32 {
    call("cuStreamGetCtx", |world| {
        let found = world.context_of(stream as usize)?;
        // SAFETY: the caller's place, as the driver API demands.
        unsafe { put(context, pointer(found)) }
    })
}

/// Waits for a stream.
#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> u32 {
    synchronize("cuStreamSynchronize", |gpu| gpu.ready_at(stream as usize))
}

/// Later work of the stream starts once the event's last record so far is done; an event never recorded delays nothing.
#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, _flags: c_uint) -> u32 {
    with_context("cuStreamWaitEvent", |gpu| {
        let done_at = gpu.events.get(&(event as usize)).ok_or(code::INVALID_HANDLE)?.done_at;
        let stream = gpu.stream(stream as usize)?;
        stream.ready_at = done_at.map_or(stream.ready_at, |done_at| done_at.max(stream.ready_at));
        Ok(())
    })
}

/// Makes an event, with timing (flags 0) or without (2).
#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut *mut c_void, flags: c_uint) -> u32 {
    with_context("cuEventCreate", |gpu| {
        if ![0, 2].contains(&flags) {
            return Err(code::NOT_SUPPORTED);
        }
        let handle = gpu.handle();
        gpu.events.insert(handle, Event { done_at: None, timing: flags == 0 });
        // SAFETY: the caller's place, as the driver API demands.
        unsafe { put(event, pointer(handle)) }
    })
}

/// Removes an event; waits that are queued were told its time.
#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> u32 {
    with_context("cuEventDestroy_v2", |gpu| gpu.events.remove(&(event as usize)).map(drop).ok_or(code::INVALID_HANDLE))
}

/// The event is done once the stream's work so far is.
#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: *mut c_void, stream: *mut c_void) -> u32 {
    with_context("cuEventRecord", |gpu| {
        let done_at = gpu.ready_at(stream as usize)?;
        gpu.events.get_mut(&(event as usize)).ok_or(code::INVALID_HANDLE)?.done_at = Some(done_at);
        Ok(())
    })
}

/// Success where the event is done or was never recorded, otherwise "not ready".
#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: *mut c_void) -> u32 {
    with_context("cuEventQuery", |gpu| match gpu.events.get(&(event as usize)).ok_or(code::INVALID_HANDLE)?.done_at {
        Some(done_at) if done_at > Instant::now() => Err(code::NOT_READY),
        _ => Ok(()),
    })
}

/// Waits for an event.
#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: *mut c_void) -> u32 {
    synchronize("cuEventSynchronize", |gpu| {
        let event = gpu.events.get(&(event as usize)).ok_or(code::INVALID_HANDLE)?;
        Ok(event.done_at.unwrap_or_else(Instant::now))
    })
}

/// Milliseconds from one event to another; both must be recorded, done and with timing.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime(milliseconds: *mut f32, start: *mut c_void, end: *mut c_void) -> u32 {
    with_context("cuEventElapsedTime", |gpu| {
        let done_at = |event: *mut c_void| {
            gpu.events.get(&(event as usize)).filter(|event| event.timing).and_then(|event| event.done_at).ok_or(code::INVALID_HANDLE)
        };
        let (start, end) = (done_at(start)?, done_at(end)?);
        if start.max(end) > Instant::now() {
            return Err(code::NOT_READY);
        }
        let elapsed = signed_milliseconds(start, end);
        // SAFETY: the caller's place, as the driver API demands.
        unsafe { put(milliseconds, elapsed) }
    })
}

fn signed_milliseconds(start: Instant, end: Instant) -> f32 {
    let milliseconds = |duration: Duration| duration.as_secs_f32() * 1e3;
    end.checked_duration_since(start).map_or_else(|| -milliseconds(start - end), milliseconds)
}

/// Takes PTX text of 64-bit addresses; it is kept to answer for what it holds.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) -> u32 {
    with_context("cuModuleLoadData", |gpu| {
        if image.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: an image of PTX is NUL-terminated text, as the driver API demands.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_str().map_err(|_| code::INVALID_PTX)?;
        if ![".version", ".target", ".address_size 64"].iter().all(|needed| text.contains(needed)) {
            return Err(code::INVALID_PTX);
        }
        let handle = gpu.load(text.to_owned())?;
        // SAFETY: the caller's place, as the driver API demands.
        unsafe { put(module, pointer(handle)) }
    })
}

/// Removes a module.
#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: *mut c_void) -> u32 {
    with_context("cuModuleUnload", |gpu| gpu.unload(module as usize))
}

/// A kernel that is in the text and that the double can stand in for, with as many parameters there as here.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(function: *mut *mut c_void, module: *mut c_void, name: *const c_char) -> u32 {
    with_context("cuModuleGetFunction", |gpu| {
        // SAFETY: a NUL-terminated name, as the driver API demands.
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| code::NOT_FOUND)?;
        let kernel = Kernel::named(name).ok_or(code::NOT_FOUND)?;
        let handle = gpu.handle();
        let module = gpu.modules.get_mut(&(module as usize)).ok_or(code::INVALID_HANDLE)?;
        let entry = module.text.split(&format!(".visible .entry {name}(")).nth(1).and_then(|rest| rest.split(')').next());
        if entry.map(|parameters| parameters.matches(".param .u64").count()) != Some(kernel.parameters()) {
            return Err(code::NOT_FOUND);
        }
        module.kernels.insert(handle, kernel);
        // SAFETY: the caller's place, as the driver API demands.
        unsafe { put(function, pointer(handle)) }
    })
}

/// The findings, if the text declares them.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetGlobal_v2(address: *mut u64, size: *mut usize, module: *mut c_void, name: *const c_char) -> u32 {
    with_context("cuModuleGetGlobal_v2", |gpu| {
        // SAFETY: a NUL-terminated name, as the driver API demands.
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| code::NOT_FOUND)?;
        let module = gpu.modules.get(&(module as usize)).ok_or(code::INVALID_HANDLE)?;
        if name != FINDINGS || module.findings_size == 0 {
            return Err(code::NOT_FOUND);
        }
        // SAFETY: the caller's places, as the driver API demands.
        unsafe { put(address, module.findings).and_then(|()| put(size, module.findings_size as usize)) }
    })
}

/// Queues a kernel.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    _shared_bytes: c_uint,
    stream: *mut c_void,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> u32 {
    with_context("cuLaunchKernel", |gpu| {
        let kernel = gpu.kernel(function as usize)?;
        let block = u64::from(block_x) * u64::from(block_y) * u64::from(block_z);
        let threads = block * u64::from(grid_x) * u64::from(grid_y) * u64::from(grid_z);
        if threads == 0 || block > 1024 || parameters.is_null() || (kernel.is_for_one_thread() && threads != 1) {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: one pointer to a 64-bit value for each parameter, as the driver API demands of a launch of this kernel.
        let values: Vec<u64> = (0..kernel.parameters()).map(|index| unsafe { parameters.add(index).read().cast::<u64>().read() }).collect();
        gpu.submit(stream as usize, kernel.work(&values))
    })
}
