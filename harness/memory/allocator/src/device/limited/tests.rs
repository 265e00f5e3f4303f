use super::*;
use crate::device::sim::{SimConfig, SimDevice};
use crate::units::Nanos;

fn limited(limit: Bytes) -> Result<Limited<SimDevice>, DeviceError> {
    Limited::new(
        SimDevice::new(SimConfig {
            total: Bytes::gib(2),
            ..SimConfig::default()
        }),
        limit,
    )
}

fn why(result: Result<Limited<SimDevice>, DeviceError>) -> String {
    result.err().expect("the limit is invalid").to_string()
}

#[test]
fn an_impossible_limit_is_refused_with_the_figures() -> Result<(), DeviceError> {
    assert_eq!(
        why(limited(Bytes::ZERO)),
        "a limit of 0 B: memory is allocated in units of 2 MiB, so the limit must be at least that"
    );
    assert!(limited(Bytes(Bytes::mib(2).0 - 1)).is_err());
    let mut device = SimDevice::new(SimConfig {
        total: Bytes::gib(2),
        context_overhead: Bytes::ZERO,
        ..SimConfig::default()
    });
    device.set_external_memory(Bytes::gib(1))?;
    assert_eq!(
        why(Limited::new(device, Bytes::mib(1536))),
        "a limit of 1.50 GiB: only 1 GiB of 2 GiB are free; lower the limit or free device memory"
    );
    Ok(())
}

#[test]
fn a_refused_mapping_costs_the_time_of_the_fitting_pages() -> Result<(), DeviceError> {
    let mut device = limited(Bytes::mib(64))?;
    let mapped = device.mapped().expect("the simulated device maps");
    let start = mapped.reserve(Bytes::mib(128))?;
    let page = Bytes::mib(2);
    let mut taken = |pages: u64| -> Result<(bool, Nanos, DeviceCalls), DeviceError> {
        let (before, calls) = (device.now(), device.calls());
        let range = MemoryRange::new(start, Bytes(pages * page.0));
        let mapped = device.mapped().expect("the simulated device maps");
        let served = mapped.map(range, page).is_ok();
        if served {
            mapped.unmap(range)?;
        }
        let after = device.calls();
        let calls = DeviceCalls {
            create: after.create - calls.create,
            release: after.release - calls.release,
            ..DeviceCalls::default()
        };
        Ok((served, device.now().saturating_sub(before), calls))
    };
    let (fits, made, _) = taken(32)?;
    let (too_large, refused, calls) = taken(33)?;
    assert_eq!((fits, too_large, refused), (true, false, made));
    assert_eq!(
        (calls.create, calls.release),
        (33, 32),
        "one more was requested"
    );
    assert!(made > Nanos::ZERO);
    assert_eq!(device.memory()?.free, Bytes::mib(64));
    Ok(())
}

#[test]
fn memory_ends_at_the_limit_to_the_byte() -> Result<(), DeviceError> {
    let mut device = limited(Bytes::mib(9))?;
    assert_eq!(device.info().name, "simulated");
    let used = device.memory()?.used;
    device.malloc(Bytes(1))?;
    let last = device.malloc(Bytes::mib(6))?;
    let full = DeviceError::OutOfMemory {
        requested: Bytes(1),
        free: Bytes::mib(1),
    };
    assert_eq!(
        device.malloc(Bytes(1)),
        Err(full),
        "half a granule is free, too little for any allocation"
    );
    assert_eq!(device.memory()?.used - used, Bytes::mib(8));
    device.free(last)?;
    assert!(device.free(last).is_err());
    assert_eq!(
        device.memory()?.free,
        Bytes::mib(7),
        "an invalid free releases nothing"
    );
    let calls = device.calls();
    assert_eq!(
        (calls.malloc, calls.malloc_failures),
        (3, 1),
        "refusals are calls too"
    );
    Ok(())
}

#[test]
fn external_memory_counts_against_the_limit() -> Result<(), DeviceError> {
    let mut device = limited(Bytes::mib(16))?;
    let used = device.memory()?.used;
    device.malloc(Bytes::mib(4))?;
    assert_eq!(device.set_external_memory(Bytes::gib(1))?, Bytes::mib(12));
    let memory = device.memory()?;
    assert_eq!(
        (memory.free, memory.external_memory, memory.used - used),
        (Bytes::ZERO, Bytes::mib(12), Bytes::mib(16))
    );
    assert_eq!(device.set_external_memory(Bytes::mib(2))?, Bytes::mib(2));
    assert_eq!(device.memory()?.free, Bytes::mib(10));
    Ok(())
}
