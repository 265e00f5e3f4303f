//! Stream-ordered allocation, by the simplest model: an allocation takes memory of the device at once, and a free gives it back at once. A
//! device has one pool, which keeps nothing.

use std::ffi::{c_int, c_void};

use harness_allocator::units::Bytes;

use super::memory::{allocate, free, write_address};
use crate::code::{Code, remember};
use crate::world::machine;
use harness_gpu_settings::calls::{FaultyCall, SlowCall};

/// The first handle of a device's pool.
const POOLS: usize = 0x7_0000_0000;

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMallocAsync(address: *mut usize, size: usize, _: usize) -> c_int {
    let machine = machine();
    machine.delay(SlowCall::MallocAsync);
    let allocated = if size == 0 { Ok(0) } else { allocate(machine, &mut machine.state(), FaultyCall::MallocAsync, Bytes(size as u64)) };
    // SAFETY: the program passes a pointer to a pointer.
    remember(unsafe { write_address(address, allocated) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cudaMallocFromPoolAsync(address: *mut usize, size: usize, _: usize, stream: usize) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cudaMallocAsync(address, size, stream) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaFreeAsync(address: usize, _: usize) -> c_int {
    machine().delay(SlowCall::FreeAsync);
    remember(if address == 0 { Ok(()) } else { free(address as u64) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cudaDeviceGetDefaultMemPool(pool: *mut usize, device: c_int) -> c_int {
    let known = super::device::device(device);
    // SAFETY: the program passes a pointer to a handle.
    remember(known.map(|_| unsafe { *pool = POOLS + device as usize }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaMemPoolSetAttribute(_: usize, _: c_int, _: *const c_void) -> c_int {
    0
}

/// Attributes 5 to 8 are the bytes that a pool has reserved and used, now and at most; 1 to 3 are switches of four bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cudaMemPoolGetAttribute(pool: usize, attribute: c_int, value: *mut c_void) -> c_int {
    let mut state = machine().state();
    let memory = pool.checked_sub(POOLS).and_then(|device| state.devices.get_mut(device)).ok_or(Code::InvalidValue);
    remember(memory.map(|memory| {
        // SAFETY: the program passes a pointer to a number of the attribute's size.
        unsafe {
            match attribute {
                1..=3 => value.cast::<c_int>().write(1),
                5..=8 => value.cast::<u64>().write(memory.used().0),
                _ => value.cast::<u64>().write(0),
            }
        }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemPoolSetAccess(_: usize, _: *const c_void, _: usize) -> c_int {
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaMemPoolTrimTo(_: usize, _: usize) -> c_int {
    0
}
