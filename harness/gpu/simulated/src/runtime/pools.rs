//! Stream-ordered allocation, as a simple model: allocations and frees take effect immediately. A
//! device has one pool, which caches nothing.

use std::ffi::{c_int, c_void};

use harness_gpu_settings::{export, ffi::Out};

use super::device::device;
use super::memory::{give_back, request};
use super::streams::submit;
use crate::code::{Code, put, put_address, remember};
use crate::{handles::Handles, world::machine};
use harness_gpu_settings::calls::Call;

/// The pools of the devices.
const POOLS: Handles = Handles::starting_at(0x7_0000_0000);

export! {
    cudaMallocAsync(address: Out<'_, usize>, size: usize, stream: usize) = match submit(stream) {
        Ok(_) => request(address, size, Call::MallocAsync),
        Err(refused) => remember(put_address(address, Err(refused))),
    };
    cudaMallocFromPoolAsync(address: Out<'_, usize>, size: usize, _: usize, stream: usize) = cudaMallocAsync(address, size, stream);
    cudaFreeAsync(address: usize, stream: usize) =
        submit(stream).map_or_else(|refused| remember(Err(refused)), |_| give_back(address, Call::FreeAsync));
    cudaDeviceGetDefaultMemPool(pool: Out<'_, usize>, index: c_int) =
        remember(device(index).and_then(|_| put(pool, POOLS.handle(index as usize))));
    cudaMemPoolGetAttribute(pool: usize, attribute: c_int, value: *mut c_void) = remember(write_attribute(pool, attribute, value));
    cudaMemPoolSetAttribute(_: usize, _: c_int, _: *const c_void) = 0;
    cudaMemPoolSetAccess(_: usize, _: *const c_void, _: usize) = 0;
    cudaMemPoolTrimTo(_: usize, _: usize) = 0;
}

/// Attributes 1 to 3 are switches of four bytes. Attributes 5 to 8 are current and peak bytes,
/// reserved and used.
fn write_attribute(pool: usize, attribute: c_int, value: *mut c_void) -> Result<(), Code> {
    let mut state = machine().state();
    let device = POOLS.number(pool).ok();
    let memory = device
        .and_then(|device| state.devices.get_mut(device))
        .filter(|_| !value.is_null())
        .ok_or(Code::InvalidValue)?;
    // SAFETY: the program passes a number of the attribute's size.
    unsafe {
        match attribute {
            1..=3 => value.cast::<c_int>().write(1),
            5..=8 => value.cast::<u64>().write(memory.used().0),
            _ => value.cast::<u64>().write(0),
        }
    }
    Ok(())
}
