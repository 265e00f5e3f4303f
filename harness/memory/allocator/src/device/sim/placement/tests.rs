use super::super::SimConfig;
use super::*;
use crate::device::{Device, MappedDevice};

#[test]
fn memory_is_placed_at_the_requested_address_unless_it_is_in_use() {
    let mut device = SimDevice::new(SimConfig::replay(Bytes::mib(64)));
    let low = DevicePtr(0x8_df91_0000);
    device.place_allocations([low, low, DevicePtr(0x7000_0020_0000)]);
    assert_eq!(device.malloc(Bytes::mib(4)), Ok(low));
    assert_eq!(
        device.malloc(Bytes::mib(2)),
        Ok(DevicePtr(0x7000_0000_0000)),
        "the first address is in use"
    );
    assert_eq!(
        device.malloc(Bytes::mib(2)),
        Ok(DevicePtr(0x7000_0020_0000))
    );
    assert_eq!(
        device.malloc(Bytes::mib(2)),
        Ok(DevicePtr(0x7000_0040_0000)),
        "after the placed allocations"
    );
    device.free(low).expect("it is live");
    device.place_allocations([low]);
    assert_eq!(
        device.malloc(Bytes::mib(2)),
        Ok(low),
        "the address is free again"
    );
    device.place_reservations([low, DevicePtr(0x3_0200_0000)]);
    assert_ne!(device.reserve(Bytes::mib(2)), Ok(low));
    assert_eq!(device.reserve(Bytes::mib(2)), Ok(DevicePtr(0x3_0200_0000)));
}
