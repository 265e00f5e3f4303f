use super::*;
use crate::allocator::AllocatorKind;
use crate::device::sim::{SimConfig, SimDevice};

/// A device without memory mapping and pools.
struct Plain<D>(D);

impl<D: Device> DeviceWrapper for Plain<D> {
    type Inner = D;

    fn inner(&self) -> &D {
        &self.0
    }

    fn inner_mut(&mut self) -> &mut D {
        &mut self.0
    }

    fn mapped(&mut self) -> Option<&mut dyn MappedDevice> {
        None
    }

    fn pooled(&mut self) -> Option<&mut dyn PooledDevice> {
        None
    }
}

impl<D: TestDevice> TestDeviceWrapper for Plain<D> {}

#[test]
fn an_allocator_refuses_a_device_without_a_required_feature() {
    let mut whole = SimDevice::new(SimConfig::default());
    let mut plain = Plain(SimDevice::new(SimConfig::default()));
    for kind in AllocatorKind::ALL {
        assert_eq!(
            kind.build().check_device(&mut whole),
            Ok(()),
            "{}",
            kind.name()
        );
        let lacks = matches!(kind, AllocatorKind::Expandable | AllocatorKind::AsyncPool);
        let answer = kind.build().check_device(&mut plain);
        assert_eq!(
            matches!(answer, Err(DeviceError::Unavailable { .. })),
            lacks,
            "{}: {answer:?}",
            kind.name()
        );
    }
}

#[test]
fn methods_that_a_wrapper_does_not_override_reach_the_inner_device() -> Result<(), DeviceError> {
    let mut device: Box<dyn TestDevice> =
        Box::new(Plain(Box::new(Plain(SimDevice::new(SimConfig::default())))));
    let total = TestDevice::memory(&mut *device)?.free;
    let ptr = Device::malloc(&mut *device, Bytes::mib(2))?;
    let range = MemoryRange::new(ptr, Bytes::mib(2));
    TestDevice::fill(&mut *device, StreamId::DEFAULT, range, Tag(7))?;
    TestDevice::verify(&mut *device, StreamId::DEFAULT, range, Tag(7))?;
    assert!(TestDevice::verify(&mut *device, StreamId::DEFAULT, range, Tag(8)).is_err());
    assert_eq!(Device::free_memory(&mut *device)?, total - Bytes::mib(2));
    assert_eq!(
        (
            TestDevice::calls(&*device).malloc,
            TestDevice::leaks(&*device).allocations
        ),
        (1, 1)
    );
    assert!(
        !TestDevice::cost_figures(&*device).is_empty(),
        "a method with a default is passed on too"
    );
    Device::free(&mut *device, ptr)
}
