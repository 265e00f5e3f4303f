//! Contexts that a program creates, resets of a device, and access between devices.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, Text};

use super::{device_of_context, of_device};
use crate::code::{Code, answer, put, remember};
use crate::context::{
    by_kernel_mode, call, checked_device, create_context, current_context, destroy_context,
};
use crate::device_properties::pci_address;
use crate::runtime::{device, streams as runtime};
use crate::world::{current_device, machine};

/// Attributes of the access between two devices.
const PERFORMANCE_RANK: c_int = 1;
const ACCESS_SUPPORTED: c_int = 2;
const NATIVE_ATOMICS: c_int = 3;
const ARRAY_ACCESS: c_int = 4;

export! {
    cuCtxCreate_v2(context: Out<'_, usize>, _: c_uint, index: c_int) =
        of_device(THIS, index, |_| put(context, create_context(index as usize)?));
    cuCtxCreate_v3(
        context: Out<'_, usize>, _: *const c_void, _: c_int, flags: c_uint, index: c_int
    ) = cuCtxCreate_v2(context, flags, index);
    cuCtxCreate_v4(context: Out<'_, usize>, _: *const c_void, flags: c_uint, index: c_int) =
        cuCtxCreate_v2(context, flags, index);
    cuCtxDestroy, cuCtxDestroy_v2(context: usize) = call(THIS, || answer(destroy_context(context)));
    cuCtxGetId(context: usize, id: Out<'_, c_ulonglong>) = call(THIS, || {
        let checked = if context == 0 {
            Ok(current_context())
        } else {
            checked_device(context).map(|_| context)
        };
        answer(checked.and_then(|context| put(id, context as c_ulonglong)))
    });
    cuCtxGetApiVersion(context: usize, version: Out<'_, c_uint>) =
        call(THIS, || answer(device_of_context(context).and_then(|_| put(version, 3020))));
    /// Synchronizes the device, which has one order of work for all contexts.
    cuCtxSynchronize_v2(context: usize) = by_kernel_mode(
        THIS,
        || {
            checked_device(context)
                .map_or_else(|refused| answer(Err(refused)), |_| runtime::cudaDeviceSynchronize())
        },
        || Err(Code::NotSupported),
    );
    /// Destroys created contexts of the device too.
    cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2(index: c_int) = by_kernel_mode(
        THIS,
        || answer(device(index).and_then(|_| reset(index as usize))),
        || Err(Code::NotSupported),
    );
    cudaDeviceReset() = remember(reset(current_device()));
    cuCtxEnablePeerAccess(context: usize, flags: c_uint) =
        call(THIS, || answer(peer(context).and_then(|peer| enable(peer, flags))));
    cuCtxDisablePeerAccess(context: usize) = call(THIS, || answer(peer(context).and_then(disable)));
    cudaDeviceEnablePeerAccess(index: c_int, flags: c_uint) =
        remember(device(index).and_then(|_| enable(index as usize, flags)));
    cudaDeviceDisablePeerAccess(index: c_int) =
        remember(device(index).and_then(|_| disable(index as usize)));
    cuDeviceGetP2PAttribute, cudaDeviceGetP2PAttribute(
        value: Out<'_, c_int>, attribute: c_int, first: c_int, second: c_int
    ) = remember(device(first).and(device(second)).and_then(|_| match attribute {
        _ if first == second => Err(Code::InvalidDevice),
        PERFORMANCE_RANK => put(value, 0),
        ACCESS_SUPPORTED | NATIVE_ATOMICS | ARRAY_ACCESS => {
            put(value, c_int::from(machine().settings.gpu.reaches_peers()))
        }
        _ => Err(Code::InvalidValue),
    }));
    cuDeviceGetByPCIBusId, cudaDeviceGetByPCIBusId(index: Out<'_, c_int>, address: Text<'_>) =
        remember(named(address).and_then(|found| put(index, found)));
}

fn reset(index: usize) -> Result<(), Code> {
    let machine = machine();
    machine.state().reset(machine, index)
}

/// The device of another context.
fn peer(context: usize) -> Result<usize, Code> {
    checked_device(context)?.ok_or(Code::InvalidContext)
}

/// Allows the current device to access the memory of a peer.
fn enable(peer: usize, flags: c_uint) -> Result<(), Code> {
    let machine = machine();
    let current = current_device();
    machine.usable()?;
    if flags != 0 {
        return Err(Code::InvalidValue);
    }
    if peer == current {
        return Err(Code::InvalidDevice);
    }
    if !machine.settings.gpu.reaches_peers() {
        return Err(Code::PeerAccessUnsupported);
    }
    if machine.state().peers.insert((current, peer)) {
        Ok(())
    } else {
        Err(Code::PeerAccessAlreadyEnabled)
    }
}

fn disable(peer: usize) -> Result<(), Code> {
    if machine().state().peers.remove(&(current_device(), peer)) {
        Ok(())
    } else {
        Err(Code::PeerAccessNotEnabled)
    }
}

/// The domain, bus, device and function of a PCI address; a missing domain or function is 0.
fn numbers(address: &str) -> Option<[u32; 4]> {
    let (place, function) = address.split_once('.').unwrap_or((address, "0"));
    let parts: Vec<&str> = place.split(':').collect();
    let [domain, bus, device] = match parts.as_slice() {
        [domain, bus, device] => [domain, bus, device],
        [bus, device] => [&"0", bus, device],
        _ => return None,
    };
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    Some([
        number(domain)?,
        number(bus)?,
        number(device)?,
        number(function)?,
    ])
}

/// The index of the device with a PCI address in one of CUDA's forms: `0000:0f:00.0`, `0000:0f:00`
/// and `0f:00.0`.
fn named(address: Text<'_>) -> Result<c_int, Code> {
    let address = address.get().ok_or(Code::InvalidValue)?;
    let wanted = numbers(address.to_str().map_err(|_| Code::InvalidDevice)?);
    machine()
        .visible
        .iter()
        .position(|number| wanted.is_some() && numbers(&pci_address(*number)) == wanted)
        .and_then(|index| c_int::try_from(index).ok())
        .ok_or(Code::InvalidDevice)
}
