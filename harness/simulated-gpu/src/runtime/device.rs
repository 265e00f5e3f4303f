//! Devices, their properties, versions, and functions of the driver by name.

use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;

use harness_gpu_settings::ffi::{Out, Text, write};

use crate::code::{Code, put, remember};
use crate::device_properties::{attribute, pci_address, pci_bus, properties};
use crate::entry_points;
use crate::world::{current_device, machine, set_current_device};

/// The real number of the device with an index.
pub(crate) fn device(index: c_int) -> Result<u32, Code> {
    let index = usize::try_from(index).map_err(|_| Code::InvalidDevice)?;
    machine().visible.get(index).copied().ok_or(Code::InvalidDevice)
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetDeviceCount(count: Out<'_, c_int>) -> c_int {
    let usable = machine().usable();
    let devices = if usable.is_ok() { machine().visible.len() } else { 0 };
    let written = put(count, c_int::try_from(devices).unwrap_or(0));
    remember(usable.and(written).and(if devices == 0 { Err(Code::NoDevice) } else { Ok(()) }))
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetDevice(index: Out<'_, c_int>) -> c_int {
    remember(put(index, c_int::try_from(current_device()).unwrap_or(0)))
}

#[unsafe(no_mangle)]
extern "C" fn cudaSetDevice(index: c_int) -> c_int {
    let index = usize::try_from(index).map_err(|_| Code::InvalidDevice);
    remember(machine().usable().and(index).and_then(set_current_device))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDeviceProperties(into: *mut u8, index: c_int) -> c_int {
    remember(device(index).map(|number| {
        let bytes = properties(&machine().settings, number);
        // SAFETY: the program passes a structure of the CUDA release in the settings.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), into, bytes.len()) };
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDeviceProperties_v2(into: *mut u8, index: c_int) -> c_int {
    // SAFETY: the functions have the same parameters.
    unsafe { cudaGetDeviceProperties(into, index) }
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceGetAttribute(value: Out<'_, c_int>, number: c_int, index: c_int) -> c_int {
    remember(device(index).and_then(|device| {
        let found = attribute(&machine().settings, number, pci_bus(device));
        put(value, c_int::try_from(found).unwrap_or(c_int::MAX))
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaDeviceGetPCIBusId(text: *mut c_char, len: c_int, index: c_int) -> c_int {
    remember(device(index).and_then(|number| {
        let address = CString::new(pci_address(number)).map_err(|_| Code::InvalidValue)?;
        let bytes = address.as_bytes_with_nul();
        if usize::try_from(len).is_ok_and(|len| len >= bytes.len()) {
            // SAFETY: the program passes an array of `len` characters.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), text.cast(), bytes.len()) };
            return Ok(());
        }
        Err(Code::InvalidValue)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceGetStreamPriorityRange(least: Out<'_, c_int>, greatest: Out<'_, c_int>) -> c_int {
    // Either may be null.
    write(least, 0);
    write(greatest, -5);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceCanAccessPeer(can: Out<'_, c_int>, _: c_int, _: c_int) -> c_int {
    remember(put(can, 0))
}

#[unsafe(no_mangle)]
extern "C" fn cudaDriverGetVersion(version: Out<'_, c_int>) -> c_int {
    remember(put(version, machine().settings.cuda.driver_version()))
}

#[unsafe(no_mangle)]
extern "C" fn cudaRuntimeGetVersion(version: Out<'_, c_int>) -> c_int {
    cudaDriverGetVersion(version)
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetDriverEntryPoint(name: Text<'_>, function: Out<'_, *mut c_void>, _: c_ulonglong, status: Out<'_, c_int>) -> c_int {
    remember(name.get().ok_or(Code::InvalidValue).and_then(|name| {
        let found = entry_points::function(name);
        write(status, c_int::from(found.is_null()));
        put(function, found)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetDriverEntryPointByVersion(
    name: Text<'_>,
    function: Out<'_, *mut c_void>,
    _: c_uint,
    flags: c_ulonglong,
    status: Out<'_, c_int>,
) -> c_int {
    cudaGetDriverEntryPoint(name, function, flags, status)
}
