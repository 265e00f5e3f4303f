#![allow(clippy::unwrap_used, reason = "a test fails if a call fails")]

use super::*;

#[test]
fn without_reuse_freed_addresses_are_used_last() {
    let mut addresses = Addresses::new(100..130, Bytes(2), AddressOrder::Up);
    assert_eq!(
        (addresses.take(Bytes(8)), addresses.take(Bytes(8))),
        (Some(100), Some(110))
    );
    addresses.give_back(100, Bytes(8));
    assert_eq!(
        (addresses.take(Bytes(9)), addresses.take(Bytes(8))),
        (None, Some(120))
    );
    assert_eq!(
        (addresses.take(Bytes(8)), addresses.take(Bytes(1))),
        (Some(100), None)
    );
}

#[test]
fn downward_order_starts_at_the_highest_address() {
    let mut addresses = Addresses::new(100..130, Bytes(2), AddressOrder::Down);
    assert_eq!(
        (addresses.take(Bytes(8)), addresses.take(Bytes(8))),
        (Some(120), Some(110))
    );
    addresses.give_back(120, Bytes(8));
    assert_eq!(
        (
            addresses.take(Bytes(8)),
            addresses.take(Bytes(8)),
            addresses.take(Bytes(1))
        ),
        (Some(100), Some(120), None)
    );
    let mut addresses = Addresses::new(100..130, Bytes::ZERO, AddressOrder::Down);
    addresses.take_at(110, Bytes(10));
    assert_eq!(
        (addresses.take(Bytes(4)), addresses.take(Bytes(8))),
        (Some(106), None)
    );
}

#[test]
fn a_given_stretch_is_used_once() {
    let mut addresses = Addresses::new(100..200, Bytes::ZERO, AddressOrder::Reuse);
    addresses.take_at(110, Bytes(10));
    assert_eq!(
        (addresses.take(Bytes(10)), addresses.take(Bytes(5))),
        (Some(100), Some(120)),
        "the lowest free addresses"
    );
    addresses.give_back(110, Bytes(10));
    addresses.take_at(112, Bytes(4));
    let starts: Vec<_> = (0..3).filter_map(|_| addresses.take(Bytes(2))).collect();
    assert_eq!(starts, [110, 116, 118]);
    addresses.take_at(50, Bytes(10));
    addresses.take_at(300, Bytes(10));
    assert_eq!(
        addresses.take(Bytes(75)),
        Some(125),
        "a stretch outside the range uses no part of it"
    );
}

#[test]
fn freed_addresses_are_merged_and_the_lowest_fitting_ones_reused() {
    let mut addresses = Addresses::new(100..200, Bytes(2), AddressOrder::Reuse);
    let starts: Vec<_> = (0..4).filter_map(|_| addresses.take(Bytes(8))).collect();
    assert_eq!(starts, [100, 110, 120, 130]);
    for start in [110, 130, 120] {
        addresses.give_back(start, Bytes(8));
    }
    assert_eq!(
        addresses.take(Bytes(28)),
        Some(110),
        "three adjacent stretches"
    );
    addresses.give_back(110, Bytes(28));
    assert_eq!(
        (
            addresses.take(Bytes(8)),
            addresses.take(Bytes(18)),
            addresses.take(Bytes(8))
        ),
        (Some(110), Some(120), Some(140))
    );
    assert_eq!(addresses.take(Bytes(u64::MAX)), None);
}

/// Segments of a recorded inference on Linux: 100 MiB take regions of 128 MiB downward, and 26 MiB
/// the rest of these, the lowest first.
#[test]
fn linux_fills_the_lowest_gap_and_adds_regions_downward() {
    let mut addresses = Addresses::new(
        0x7000_0000_0000..0x76ec_7e00_0000,
        Bytes::ZERO,
        AddressOrder::Linux,
    );
    let recorded = [
        (100, 0x76ec_7600_0000_u64),
        (100, 0x76ec_6e00_0000),
        (100, 0x76ec_6600_0000),
        (26, 0x76ec_6c40_0000),
        (26, 0x76ec_7440_0000),
        (26, 0x76ec_7c40_0000),
        (26, 0x76ec_6400_0000),
        (100, 0x76ec_5c00_0000),
        (100, 0x76ec_5400_0000),
        (100, 0x76ec_4c00_0000),
        (26, 0x76ec_5240_0000),
        (26, 0x76ec_5a40_0000),
        (26, 0x76ec_6240_0000),
        (26, 0x76ec_4a00_0000),
    ];
    for (size, address) in recorded {
        assert_eq!(addresses.take(Bytes::mib(size)), Some(address));
    }
}

#[test]
fn linux_reuses_the_addresses_of_empty_regions_from_the_top() {
    let mut addresses = Addresses::new(0..1 << 40, Bytes::ZERO, AddressOrder::Linux);
    let starts: Vec<u64> = (0..4)
        .filter_map(|_| addresses.take(Bytes::mib(20)))
        .collect();
    assert!(
        starts.is_sorted_by(|one, next| one - next == REGION),
        "{starts:?}"
    );
    addresses.give_back(starts[0], Bytes::mib(20));
    addresses.give_back(starts[1], Bytes::mib(20));
    addresses.give_back(starts[2], Bytes::mib(20));
    assert_eq!(
        addresses.take(Bytes::mib(40)),
        Some(starts[1]),
        "a region of 64 MiB at the top of 96 free ones"
    );
    assert_eq!(
        addresses.take(Bytes::mib(20)),
        Some(starts[1] + (40 << 20)),
        "the rest of that region"
    );
    assert_eq!(
        addresses.take(Bytes::mib(30)),
        Some(starts[3] - REGION),
        "a free region is too small to align another one in it"
    );
    addresses.give_back(starts[3] - REGION, Bytes::mib(30));
    addresses.give_back(starts[3], Bytes::mib(20));
    assert_eq!(
        addresses.take(Bytes::mib(30)),
        Some(starts[2]),
        "all addresses below it are free"
    );
}

/// Replays the segments of a real GPU. Returns the share of pairs of equal segments, both live,
/// that have the recorded order, by order of addresses.
fn agreement(recorded: &str, order: AddressOrder) -> f64 {
    const UNIT: u64 = 2 << 20;
    let mut addresses = Addresses::new(0..1 << 46, Bytes::ZERO, order);
    let mut live: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    let (mut agree, mut pairs) = (0, 0);
    for line in recorded.lines().filter(|line| !line.starts_with('#')) {
        let (size, address) = line.split_once(' ').unwrap();
        let (size, address) = (
            size.parse::<u64>().unwrap() * UNIT,
            address.parse().unwrap(),
        );
        if size == 0 {
            let (start, size) = live.remove(&address).unwrap();
            addresses.give_back(start, Bytes(size));
            continue;
        }
        let start = addresses.take(Bytes(size)).unwrap();
        for (&other_address, &(other_start, other_size)) in &live {
            if other_size == size {
                pairs += 1;
                agree += u64::from((other_address < address) == (other_start < start));
            }
        }
        live.insert(address, (start, size));
    }
    assert!(pairs > 100);
    agree as f64 / pairs as f64
}

/// PyTorch takes the lowest of equal blocks, so the order of segments decides which block it takes.
/// The driver places host memory in the same address space, which recordings do not show: a server
/// that frees often agrees less.
#[test]
fn the_orders_of_drivers_agree_with_recordings_of_real_gpus() {
    let [inference, fragmentation, server, training] = [
        "linux-inference",
        "linux-fragmentation",
        "linux-server",
        "wsl-training",
    ]
    .map(|name| {
        let path = format!(
            "{}/src/device/sim/addresses/recorded/{name}.txt",
            env!("CARGO_MANIFEST_DIR")
        );
        std::fs::read_to_string(path).unwrap()
    });
    let percent = |recorded: &str, orders: [AddressOrder; 2]| {
        orders.map(|order| (100.0 * agreement(recorded, order)).round())
    };
    assert_eq!(
        percent(&inference, [AddressOrder::Linux, AddressOrder::Up]),
        [100.0, 1.0]
    );
    assert_eq!(
        percent(&fragmentation, [AddressOrder::Linux, AddressOrder::Up]),
        [100.0, 21.0]
    );
    assert_eq!(
        percent(&server, [AddressOrder::Linux, AddressOrder::Up]),
        [94.0, 30.0]
    );
    assert_eq!(
        percent(&training, [AddressOrder::Reuse, AddressOrder::Linux]),
        [100.0, 7.0]
    );
}
