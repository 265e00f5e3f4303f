//! Stream-ordered allocation, as a simple model: allocations and frees take effect immediately. A device has one pool, which caches nothing.

use std::ffi::{c_int, c_void};

use harness_allocator::units::Bytes;

use harness_gpu_settings::ffi::Out;

use super::memory::{allocate, free};
use crate::code::{Code, put, put_address, remember};
use crate::handles::Handles;
use crate::world::machine;
use harness_gpu_settings::calls::Call;

/// The pools of the devices.
const POOLS: Handles = Handles::starting_at(0x7_0000_0000);

#[unsafe(no_mangle)]
extern "C" fn cudaMallocAsync(address: Out<'_, usize>, size: usize, _: usize) -> c_int {
    let machine = machine();
    machine.delay(Call::MallocAsync);
    let allocated = if size == 0 { Ok(0) } else { allocate(machine, &mut machine.state(), Call::MallocAsync, Bytes(size as u64)) };
    remember(put_address(address, allocated))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaMallocFromPoolAsync(address: Out<'_, usize>, size: usize, _: usize, stream: usize) -> c_int {
    cudaMallocAsync(address, size, stream)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaFreeAsync(address: usize, _: usize) -> c_int {
    machine().delay(Call::FreeAsync);
    remember(if address == 0 { Ok(()) } else { free(address as u64) })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaDeviceGetDefaultMemPool(pool: Out<'_, usize>, device: c_int) -> c_int {
    remember(super::device::device(device).and_then(|_| put(pool, POOLS.handle(device as usize))))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaMemPoolSetAttribute(_: usize, _: c_int, _: *const c_void) -> c_int {
    0
}

/// Attributes 1 to 3 are switches of four bytes. Attributes 5 to 8 are current and peak bytes, reserved and used.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cudaMemPoolGetAttribute(pool: usize, attribute: c_int, value: *mut c_void) -> c_int {
    let mut state = machine().state();
    let device = POOLS.number(pool).ok();
    let memory = device.and_then(|device| state.devices.get_mut(device)).filter(|_| !value.is_null()).ok_or(Code::InvalidValue);
    remember(memory.map(|memory| {
        // SAFETY: the program passes a number of the attribute's size.
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
