//! Devices: how many there are, which one a thread uses, what they are like; versions; functions of the driver by name.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;

use crate::code::{Code, remember};
use crate::device_figures::{attribute, pci_address, pci_bus, properties};
use crate::entry_points;
use crate::world::{current_device, machine, set_current_device};

/// The device with an index, as its real number.
pub(crate) fn device(index: c_int) -> Result<u32, Code> {
    let index = usize::try_from(index).map_err(|_| Code::InvalidDevice)?;
    machine().visible.get(index).copied().ok_or(Code::InvalidDevice)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDeviceCount(count: *mut c_int) -> c_int {
    let usable = machine().usable();
    let devices = if usable.is_ok() { machine().visible.len() } else { 0 };
    // SAFETY: the program passes a pointer to a number.
    unsafe { *count = c_int::try_from(devices).unwrap_or(0) };
    remember(usable.and(if devices == 0 { Err(Code::NoDevice) } else { Ok(()) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDevice(index: *mut c_int) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { *index = c_int::try_from(current_device()).unwrap_or(0) };
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaSetDevice(index: c_int) -> c_int {
    let known = usize::try_from(index).map_err(|_| Code::InvalidDevice);
    remember(machine().usable().and(known).and_then(set_current_device))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDeviceProperties(into: *mut u8, index: c_int) -> c_int {
    remember(device(index).map(|number| {
        let bytes = properties(&machine().settings, number);
        // SAFETY: the program passes a structure of its CUDA release, which the settings tell.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), into, bytes.len()) };
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDeviceProperties_v2(into: *mut u8, index: c_int) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cudaGetDeviceProperties(into, index) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaDeviceGetAttribute(value: *mut c_int, number: c_int, index: c_int) -> c_int {
    remember(device(index).map(|device| {
        let figure = attribute(&machine().settings, number, pci_bus(device));
        // SAFETY: the program passes a pointer to a number.
        unsafe { *value = c_int::try_from(figure).unwrap_or(c_int::MAX) };
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
unsafe extern "C" fn cudaDeviceGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> c_int {
    // SAFETY: the program passes pointers to numbers.
    unsafe { (*least, *greatest) = (0, -5) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaDeviceCanAccessPeer(can: *mut c_int, _: c_int, _: c_int) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { *can = 0 };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaDriverGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { *version = machine().settings.cuda.driver_version() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaRuntimeGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { *version = machine().settings.cuda.driver_version() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDriverEntryPoint(name: *const c_char, function: *mut *mut c_void, _: c_ulonglong, status: *mut c_int) -> c_int {
    // SAFETY: the program passes a name and pointers to results, of which the status may be null.
    unsafe {
        *function = entry_points::function(CStr::from_ptr(name));
        if !status.is_null() {
            *status = c_int::from((*function).is_null());
        }
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDriverEntryPointByVersion(
    name: *const c_char,
    function: *mut *mut c_void,
    _: c_uint,
    flags: c_ulonglong,
    status: *mut c_int,
) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cudaGetDriverEntryPoint(name, function, flags, status) }
}
