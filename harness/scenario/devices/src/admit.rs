//! [`admit`] decides whether a run may take its memory from a device that others may use too.

use harness_allocator::device::{DeviceError, DeviceMemory};
use harness_allocator::units::Bytes;

/// Smaller unexplained use counts as the driver's own. Half of what another process's context takes
/// on a large GPU (555 MiB, <https://github.com/ggml-org/llama.cpp/pull/23604>).
const UNNOTICED: Bytes = Bytes::mib(256);

/// Memory left free on a shared device: at least this, and at least 5 % of the device.
const LEAST_MARGIN: Bytes = Bytes::gib(1);

/// Checks that a run may take `need` bytes of a device in this state. `others` is the number of
/// other processes, if known. `whole_device` allows taking all memory, even if other processes then
/// fail.
///
/// A device counts as shared if it has other processes, or if noticeably more is used than this
/// process uses. On a shared device, 1 GiB or 5 % stays free, whichever is more, because a process
/// that cannot get a few MiB for its next kernel fails. Fails with [`DeviceError::Unavailable`],
/// which names the free memory, its other users, and the amount that would be admitted.
pub fn admit(
    memory: &DeviceMemory,
    others: Option<u32>,
    need: Bytes,
    whole_device: bool,
) -> Result<(), DeviceError> {
    let DeviceMemory { free, total, .. } = *memory;
    let held = held_by_others(memory);
    let used_by = match others {
        Some(1) => format!("1 other process, {held} in use by other processes"),
        Some(count) => format!("{count} other processes, {held} in use by them"),
        None => format!("{held} in use by other processes"),
    };
    let refuse = |why| {
        Err(DeviceError::Unavailable {
            what: format!("{need} of device memory"),
            why,
        })
    };
    if need > free {
        return refuse(format!(
            "only {free} of {total} are free ({used_by}); ask for less, or free the device"
        ));
    }
    let shared = others.is_some_and(|count| count > 0) || held > UNNOTICED;
    let margin = LEAST_MARGIN.max(Bytes(total.0 / 20));
    if shared && !whole_device && need > free.saturating_sub(margin) {
        let most = free.saturating_sub(margin);
        return refuse(format!(
            "other processes use this device ({used_by}); {free} are free, and {margin} stay free \
             for them; ask for at most {most}, or allow \
             the full device"
        ));
    }
    Ok(())
}

/// Returns the memory used by neither this process nor its external memory. If this process's
/// memory is unknown, its context overhead stands for it, which may hide earlier use by others.
fn held_by_others(memory: &DeviceMemory) -> Bytes {
    memory
        .used
        .saturating_sub(memory.process.unwrap_or(memory.context_overhead))
        .saturating_sub(memory.external_memory)
}

#[cfg(test)]
mod tests;
