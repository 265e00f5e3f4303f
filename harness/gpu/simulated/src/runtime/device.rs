//! Devices, their properties, versions, and functions of the driver by name.

use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;

use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, Text, write};

use super::streams::{query_of_torch, record_of_torch};
use crate::code::{Code, put, remember};
use crate::context::use_primary;
use crate::device_properties::{attribute, pci_address, pci_bus, properties};
use crate::entry_points;
use crate::torch_allocator::keep_statistics;
use crate::world::{current_device, machine};

/// The real number of the device with an index.
pub(crate) fn device(index: c_int) -> Result<u32, Code> {
    let index = usize::try_from(index).map_err(|_| Code::InvalidDevice)?;
    machine()
        .visible
        .get(index)
        .copied()
        .ok_or(Code::InvalidDevice)
}

/// Writes an attribute of a device, which has this real number.
pub(crate) fn put_attribute(value: Out<'_, c_int>, number: c_int, device: u32) -> Result<(), Code> {
    let found = attribute(&machine().settings, number, pci_bus(device));
    put(value, c_int::try_from(found).unwrap_or(c_int::MAX))
}

export! {
    cudaGetDeviceCount(count: Out<'_, c_int>) = remember(count_devices(count));
    cudaGetDevice(index: Out<'_, c_int>) =
        remember(put(index, c_int::try_from(current_device()).unwrap_or(0)));
    cudaSetDevice(index: c_int) = remember(set_device(index));
    cudaGetDeviceProperties, cudaGetDeviceProperties_v2(into: *mut u8, index: c_int) =
        remember(write_properties(into, index));
    cudaDeviceGetAttribute(value: Out<'_, c_int>, number: c_int, index: c_int) =
        remember(device(index).and_then(|device| put_attribute(value, number, device)));
    cudaDeviceCanAccessPeer, cuDeviceCanAccessPeer(can: Out<'_, c_int>, index: c_int, peer: c_int) =
        remember(device(index).and_then(|first| {
            put(can, c_int::from(device(peer)? != first && machine().settings.gpu.reaches_peers()))
        }));
    cudaDeviceGetPCIBusId, cuDeviceGetPCIBusId(text: *mut c_char, len: c_int, index: c_int) =
        remember(write_pci_address(text, len, index));
    /// Either output may be null.
    cudaDeviceGetStreamPriorityRange, cuCtxGetStreamPriorityRange(
        least: Out<'_, c_int>, greatest: Out<'_, c_int>
    ) = {
        write(least, 0);
        write(greatest, -5);
        0
    };
    /// No profiler is attached.
    cudaProfilerStart, cudaProfilerStop, cuProfilerStart, cuProfilerStop() = 0;
    cudaDriverGetVersion, cudaRuntimeGetVersion(version: Out<'_, c_int>) =
        remember(put(version, machine().settings.cuda.driver_version()));
    cudaGetDriverEntryPoint(
        name: Text<'_>, function: Out<'_, *mut c_void>, flags: c_ulonglong, status: Out<'_, c_int>
    ) = remember(
        entry_points::find(name, machine().settings.cuda.driver_version(), flags, function, status)
            .map(drop),
    );
    cudaGetDriverEntryPointByVersion(
        name: Text<'_>, function: Out<'_, *mut c_void>, version: c_uint, flags: c_ulonglong,
        status: Out<'_, c_int>
    ) = remember(
        entry_points::find(name, version.cast_signed(), flags, function, status).map(drop),
    );
}

fn count_devices(count: Out<'_, c_int>) -> Result<(), Code> {
    let usable = machine().usable();
    let devices = if usable.is_ok() {
        machine().visible.len()
    } else {
        0
    };
    keep_statistics(devices, query_of_torch, record_of_torch);
    let written = put(count, c_int::try_from(devices).unwrap_or(0));
    usable.and(written).and(if devices == 0 {
        Err(Code::NoDevice)
    } else {
        Ok(())
    })
}

fn set_device(index: c_int) -> Result<(), Code> {
    machine().usable()?;
    use_primary(usize::try_from(index).map_err(|_| Code::InvalidDevice)?)
}

/// The program passes a structure of the CUDA release in the settings.
fn write_properties(into: *mut u8, index: c_int) -> Result<(), Code> {
    let machine = machine();
    // The properties contain it.
    let _ = machine.memory();
    let bytes = properties(&machine.settings, device(index)?);
    // SAFETY: the structure has this size.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), into, bytes.len()) };
    Ok(())
}

/// The program passes an array of `len` characters.
fn write_pci_address(text: *mut c_char, len: c_int, index: c_int) -> Result<(), Code> {
    let address = CString::new(pci_address(device(index)?)).map_err(|_| Code::InvalidValue)?;
    let bytes = address.as_bytes_with_nul();
    if usize::try_from(len).is_ok_and(|len| len >= bytes.len()) {
        // SAFETY: the array is long enough.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), text.cast(), bytes.len()) };
        return Ok(());
    }
    Err(Code::InvalidValue)
}
