use super::*;

fn memory(total: Bytes, used: Bytes, process: Option<Bytes>) -> DeviceMemory {
    let context_overhead = Bytes::mib(500);
    DeviceMemory {
        total,
        free: total - used,
        used,
        process,
        context_overhead,
        ..DeviceMemory::default()
    }
}

#[test]
fn an_unshared_device_is_admitted_to_its_last_byte() {
    let idle = memory(Bytes::gib(80), Bytes::mib(500), Some(Bytes::mib(500)));
    assert_eq!(admit(&idle, Some(0), idle.free, false), Ok(()));
    assert_eq!(admit(&idle, None, idle.free, false), Ok(()));
    let error = admit(&idle, Some(0), Bytes::gib(80), true).expect_err("the context takes a part");
    assert_eq!(
        error.to_string(),
        "80 GiB of device memory: only 79.51 GiB of 80 GiB are free (0 other processes, 0 B in use \
         by them); ask for less, or free the device"
    );
}

#[test]
fn the_margin_of_a_shared_device_requires_permission() {
    let shared = memory(Bytes::gib(80), Bytes::gib(40), Some(Bytes::mib(500)));
    let most = Bytes::gib(36);
    assert_eq!(
        admit(&shared, Some(2), most, false),
        Ok(()),
        "all but 5 % of the device"
    );
    assert_eq!(admit(&shared, Some(2), shared.free, true), Ok(()));
    let error = admit(&shared, Some(2), most + Bytes(1), false).expect_err("others need the rest");
    let text = error.to_string();
    assert!(
        text.contains("2 other processes, 39.51 GiB in use by them"),
        "{text}"
    );
    assert!(
        text.contains("4 GiB stay free for them; ask for at most 36 GiB, or allow the full device"),
        "{text}"
    );
}

#[test]
fn processes_or_unexplained_memory_make_a_device_shared() {
    let small = memory(Bytes::gib(8), Bytes::mib(700), Some(Bytes::mib(500)));
    assert_eq!(
        admit(&small, Some(0), small.free, false),
        Ok(()),
        "200 MiB count as the driver's own"
    );
    assert!(admit(&small, Some(1), small.free, false).is_err());
    assert_eq!(
        admit(&small, Some(1), small.free - Bytes::gib(1), false),
        Ok(()),
        "1 GiB is more than 5 %"
    );
    let unseen = memory(Bytes::gib(8), Bytes::gib(3), None);
    assert!(
        admit(&unseen, None, unseen.free, false).is_err(),
        "2.5 GiB are in use by others"
    );
}
