use harness_gpu_settings::{gpus::GPUS, settings::MOST_DEVICES};

use super::*;

#[test]
fn physical_memory_is_freed_with_its_last_handle_and_mapping() {
    let mut memory = DeviceMemory::new(0, &Settings::new(&GPUS[0], Bytes::mib(64)));
    let (start, page) = (
        memory.reserve(Bytes::mib(4)).expect("reserve"),
        memory.create(Bytes::mib(2)).expect("create"),
    );
    memory.map(start, Bytes::mib(2), page).expect("map");
    assert_eq!(memory.release(page), Ok(false), "a mapping is left");
    assert_eq!(
        memory.release(page),
        Err(Code::InvalidValue),
        "no handle is left"
    );
    assert_eq!(
        memory.map(start + (2 << 20), Bytes::mib(2), page),
        Err(Code::InvalidValue),
        "the handle is released"
    );
    assert_eq!(
        memory.allow(start, Bytes::mib(4)),
        Err(Code::InvalidValue),
        "half of it is not mapped"
    );
    assert_eq!(
        memory.unreserve(start, Bytes::mib(4)),
        Err(Code::InvalidValue),
        "a mapping is left"
    );
    assert_eq!(
        (memory.used(), memory.unmap(start, Bytes::mib(2))),
        (Bytes::mib(2), Ok((1, false)))
    );
    assert_eq!(memory.used(), Bytes::ZERO);
    assert_eq!(
        memory.unreserve(start, Bytes::mib(2)),
        Err(Code::InvalidValue),
        "the reservation is larger"
    );
    assert_eq!(memory.unreserve(start, Bytes::mib(4)), Ok(()));
}

#[test]
fn every_address_order_works_with_and_without_expandable_segments() {
    for &addresses in AddressOrder::ALL {
        for index in [0, MOST_DEVICES as usize - 1] {
            let settings = Settings {
                addresses,
                ..Settings::new(&GPUS[0], Bytes::gib(8))
            };
            let mut memory = DeviceMemory::new(index, &settings);
            for expandable in [false, true, true] {
                let start = if expandable {
                    let start = memory.reserve(Bytes::gib(9)).expect("reserve");
                    let page = memory.create(Bytes::mib(2)).expect("create");
                    memory.map(start, Bytes::mib(2), page).expect("map");
                    memory.allow(start, Bytes::mib(2)).expect("allow access");
                    assert_eq!(
                        device_of(start + (9 << 30) - 1),
                        Some(index),
                        "{addresses}: the last address"
                    );
                    start
                } else {
                    memory.allocate(Bytes::mib(2)).expect("allocate")
                };
                assert_eq!(
                    device_of(start),
                    Some(index),
                    "{addresses}, expandable: {expandable}"
                );
                assert!(memory.is_accessible(start, 2 << 20));
            }
        }
    }
}

#[test]
fn a_refused_reservation_leaves_no_addresses_reserved() {
    let mut memory = DeviceMemory::new(0, &Settings::new(&GPUS[0], Bytes::mib(64)));
    let before = memory.sim.leaks().reservations;
    assert_eq!(memory.reserve(Bytes(1 << 57)), Err(Code::OutOfMemory));
    assert_eq!(
        (memory.left().reservations, memory.sim.leaks().reservations),
        (0, before)
    );
}

#[test]
fn a_handle_is_retained_only_inside_of_a_mapping() {
    let mut memory = DeviceMemory::new(0, &Settings::new(&GPUS[0], Bytes::mib(64)));
    let (start, page) = (
        memory.reserve(Bytes::mib(4)).expect("reserve"),
        memory.create(Bytes::mib(2)).expect("create"),
    );
    memory.map(start, Bytes::mib(2), page).expect("map");
    assert_eq!(memory.retain(start + (2 << 20) - 1), Ok(page));
    assert_eq!(
        memory.retain(start + (2 << 20)),
        Err(Code::InvalidValue),
        "the address is after the mapping"
    );
}
