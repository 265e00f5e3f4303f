//! Whether a run may take what it needs of a device that others use too: [`admit`].

use harness_allocator::device::{DeviceError, DeviceMemory};
use harness_allocator::units::Bytes;

/// Below this, device used beside what is known to be ours is taken for the driver's own, not for somebody's work. It is half of what
/// the context alone of another process takes on a large GPU (555 MiB, <https://github.com/ggml-org/llama.cpp/pull/23604>).
const UNNOTICED: Bytes = Bytes::mib(256);

/// Left free on a device that others use: at least this, and at least a twentieth of the device.
const LEAST_MARGIN: Bytes = Bytes::gib(1);

/// Whether a run that takes `need` bytes may start on a device in this state. `others` is the number of other processes on it, where
/// that could be read; `whole_device` says that the user wants to take all of it even if that makes others fail.
///
/// A device counts as used by others where there are other processes, or where noticeably more is used than by this process. Of such
/// a device 1 GiB or 5 %, whichever is more, stays free, because a process that cannot get a few MiB for its next kernel fails.
///
/// # Errors
/// [`DeviceError::Unavailable`], which says what is free, who has the rest, and what would be let in.
pub fn admit(memory: &DeviceMemory, others: Option<u32>, need: Bytes, whole_device: bool) -> Result<(), DeviceError> {
    let DeviceMemory { free, total, .. } = *memory;
    let held = held_by_others(memory);
    let used_by = match others {
        Some(1) => format!("1 other process, {held} held by others"),
        Some(count) => format!("{count} other processes, {held} held by others"),
        None => format!("{held} held by others"),
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
            "others use this device too ({used_by}), and of the {free} that are free {margin} stay free for them; ask for at most {most}, \
             or allow the full device"
        ));
    }
    Ok(())
}

/// Device used that is neither this process nor pressure it made. Where nothing tells what is this process's, its context overhead is
/// taken for it, which may hide what others held before.
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
    fn a_device_of_our_own_is_admitted_to_its_last_byte_and_no_further() {
        let idle = memory(Bytes::gib(80), Bytes::mib(500), Some(Bytes::mib(500)));
        assert_eq!(admit(&idle, Some(0), idle.free, false), Ok(()));
        assert_eq!(admit(&idle, None, idle.free, false), Ok(()));
        let error = admit(&idle, Some(0), Bytes::gib(80), true).expect_err("the context has a part");
        assert_eq!(
            error.to_string(),
            "80 GiB of device memory: only 79.51 GiB of 80 GiB are free (0 other processes, 0 B held by others); ask for less, or free the device"
        );
    }

    #[test]
    fn the_last_of_a_shared_device_is_taken_only_if_the_user_says_so() {
        let shared = memory(Bytes::gib(80), Bytes::gib(40), Some(Bytes::mib(500)));
        let most = Bytes::gib(36);
        assert_eq!(admit(&shared, Some(2), most, false), Ok(()), "all but 5 % of the device");
        assert_eq!(admit(&shared, Some(2), shared.free, true), Ok(()));
        let error = admit(&shared, Some(2), most + Bytes(1), false).expect_err("others need the rest");
        let text = error.to_string();
        assert!(text.contains("2 other processes, 39.51 GiB held by others"), "{text}");
        assert!(text.contains("4 GiB stay free for them; ask for at most 36 GiB, or allow the full device"), "{text}");
    }

    #[test]
    fn a_device_is_shared_where_processes_are_seen_or_memory_is_missing() {
        let small = memory(Bytes::gib(8), Bytes::mib(700), Some(Bytes::mib(500)));
        assert_eq!(admit(&small, Some(0), small.free, false), Ok(()), "200 MiB are the driver's own");
        assert!(admit(&small, Some(1), small.free, false).is_err());
        assert_eq!(admit(&small, Some(1), small.free - Bytes::gib(1), false), Ok(()), "1 GiB is more than 5 %");
        let unseen = memory(Bytes::gib(8), Bytes::gib(3), None);
        assert!(admit(&unseen, None, unseen.free, false).is_err(), "2.5 GiB belong to somebody");
    }
}
