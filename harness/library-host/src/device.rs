//! Memory, streams and events of the device, shared by the runtime and the driver.

use std::ffi::c_int;

use harness_allocator::allocator::library::wire::{Call, Code};

use crate::connection::ask;
use crate::handles::{Event, Stream, small};

/// CUDA 13.0, in the form of `cudaRuntimeGetVersion`.
pub(crate) const VERSION: c_int = 13_000;

/// Writes a function's output.
///
/// # Safety
/// The pointer is null or writable.
pub(crate) unsafe fn put<T>(into: *mut T, value: T) -> Result<(), Code> {
    if into.is_null() {
        return Err(Code::InvalidValue);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { into.write(value) };
    Ok(())
}

/// Allocates memory. Zero bytes give a null pointer without an error.
pub(crate) fn allocate(size: usize) -> Result<u64, Code> {
    if size == 0 { Ok(0) } else { ask(Call::Allocate(size as u64)) }
}

/// Writes free and total memory.
///
/// # Safety
/// The pointers are null or writable.
pub(crate) unsafe fn memory(free: *mut usize, total: *mut usize) -> Result<(), Code> {
    let (now, all) = (ask(Call::FreeMemory)?, ask(Call::TotalMemory)?);
    // SAFETY: guaranteed by the caller.
    unsafe {
        put(free, now as usize)?;
        put(total, all as usize)
    }
}

/// The only device has index 0.
pub(crate) const fn only_device(device: c_int) -> Result<(), Code> {
    if device == 0 { Ok(()) } else { Err(Code::InvalidValue) }
}

pub(crate) fn create_stream() -> Result<Stream, Code> {
    ask(Call::CreateStream).and_then(small).map(Stream::new)
}

pub(crate) fn destroy_stream(stream: Stream) -> Result<(), Code> {
    ask(Call::DestroyStream(stream.number()?)).map(drop)
}

pub(crate) fn synchronize_stream(stream: Stream) -> Result<(), Code> {
    ask(Call::SynchronizeStream(stream.number()?)).map(drop)
}

pub(crate) fn wait_event(stream: Stream, event: Event) -> Result<(), Code> {
    ask(Call::WaitEvent { stream: stream.number()?, event: event.number()? }).map(drop)
}

pub(crate) fn create_event() -> Result<Event, Code> {
    ask(Call::CreateEvent).and_then(small).map(Event::new)
}

pub(crate) fn destroy_event(event: Event) -> Result<(), Code> {
    ask(Call::DestroyEvent(event.number()?)).map(drop)
}

pub(crate) fn record_event(event: Event, stream: Stream) -> Result<(), Code> {
    ask(Call::RecordEvent { event: event.number()?, stream: stream.number()? }).map(drop)
}

pub(crate) fn query_event(event: Event) -> Result<(), Code> {
    ask(Call::QueryEvent(event.number()?)).map(drop)
}

pub(crate) fn synchronize_event(event: Event) -> Result<(), Code> {
    ask(Call::SynchronizeEvent(event.number()?)).map(drop)
}
