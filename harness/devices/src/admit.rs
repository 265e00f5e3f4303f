//! [`admit`] decides whether a run may take its memory from a device that others may use too.

use harness_allocator::device::{DeviceError, DeviceMemory};
use harness_allocator::units::Bytes;

/// Smaller unexplained use counts as the driver's own. Half of what another process's context takes on a large GPU (555 MiB,
/// <https://github.com/ggml-org/llama.cpp/pull/23604>).
const UNNOTICED: Bytes = Bytes::mib(256);

/// Memory left free on a shared device: at least this, and at least 5 % of the device.
const LEAST_MARGIN: Bytes = Bytes::gib(1);

/// Checks that a run may take `need` bytes of a device in this state. `others` is the number of other processes, if known.
/// `whole_device` allows taking all memory, even if other processes then fail.
///
/// A device counts as shared if it has other processes, or if noticeably more is used than this process uses. On a shared device,
/// 1 GiB or 5 % stays free, whichever is more, because a process that cannot get a few MiB for its next kernel fails.
/// Fails with [`DeviceError::Unavailable`], which names the free memory, its other users, and the amount that would be admitted.
pub fn admit(memory: &DeviceMemory, others: Option<u32>, need: Bytes, whole_device: bool) -> Result<(), DeviceError> {
    let DeviceMemory { free, total, .. } = *memory;
    let held = held_by_others(memory);
    let used_by = match others {
        Some(1) => format!("1 other process, {held} in use by other processes"),
        Some(count) => format!("{count} other processes, {held} in use by them"),
        None => format!("{held} in use by other processes"),
    };
    let refuse = |why| Err(DeviceError::Unavailable { what: format!("{need} of device memory"), why });
    if need > free {
        return refuse(format!("only {free} of {total} are free ({used_by}); ask for less, or free the device"));
    }
    let shared = others.is_some_and(|count| count > 0) || held > UNNOTICED;
    let margin = LEAST_MARGIN.max(Bytes(total.0 / 20));
    if shared && !whole_device && need > free.saturating_sub(margin) {
        let most = free.saturating_sub(margin);
        return refuse(format!(
            "other processes use this device ({used_by}); {free} are free, and {margin} stay free for them; ask for at most {most}, or allow \
             the full device"
        ));
    }
    Ok(())
}

/// Returns the memory used by neither this process nor its external memory. If this process's memory is unknown, its context
/// overhead stands for it, which may hide earlier use by others.
fn held_by_others(memory: &DeviceMemory) -> Bytes {
    memory.used.saturating_sub(memory.process.unwrap_or(memory.context_overhead)).saturating_sub(memory.pressure)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(total: Bytes, used: Bytes, process: Option<Bytes>) -> DeviceMemory {
        let context_overhead = Bytes::mib(500);
        DeviceMemory { total, free: total - used, used, process, context_overhead, pressure: Bytes::ZERO, processes: Bytes::ZERO }
    }

    #[test]
    fn an_unshared_device_is_admitted_to_its_last_byte() {
        let idle = memory(Bytes::gib(80), Bytes::mib(500), Some(Bytes::mib(500)));
        assert_eq!(admit(&idle, Some(0), idle.free, false), Ok(()));
        assert_eq!(admit(&idle, None, idle.free, false), Ok(()));
        let error = admit(&idle, Some(0), Bytes::gib(80), true).expect_err("the context takes a part");
        assert_eq!(
            error.to_string(),
            "80 GiB of device memory: only 79.51 GiB of 80 GiB are free (0 other processes, 0 B in use by them); ask for less, or free the device"
        );
    }

    #[test]
    fn the_margin_of_a_shared_device_requires_permission() {
        let shared = memory(Bytes::gib(80), Bytes::gib(40), Some(Bytes::mib(500)));
        let most = Bytes::gib(36);
        assert_eq!(admit(&shared, Some(2), most, false), Ok(()), "all but 5 % of the device");
        assert_eq!(admit(&shared, Some(2), shared.free, true), Ok(()));
        let error = admit(&shared, Some(2), most + Bytes(1), false).expect_err("others need the rest");
        let text = error.to_string();
        assert!(text.contains("2 other processes, 39.51 GiB in use by them"), "{text}");
        assert!(text.contains("4 GiB stay free for them; ask for at most 36 GiB, or allow the full device"), "{text}");
    }

    #[test]
    fn processes_or_unexplained_memory_make_a_device_shared() {
        let small = memory(Bytes::gib(8), Bytes::mib(700), Some(Bytes::mib(500)));
        assert_eq!(admit(&small, Some(0), small.free, false), Ok(()), "200 MiB count as the driver's own");
        assert!(admit(&small, Some(1), small.free, false).is_err());
        assert_eq!(admit(&small, Some(1), small.free - Bytes::gib(1), false), Ok(()), "1 GiB is more than 5 %");
        let unseen = memory(Bytes::gib(8), Bytes::gib(3), None);
        assert!(admit(&unseen, None, unseen.free, false).is_err(), "2.5 GiB are in use by others");
    }
}
