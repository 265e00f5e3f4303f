use super::*;
use crate::device::Device;
use crate::device::sim::{SimConfig, SimDevice};
use crate::{allocator::Request, stats::PoolKind};

type OnSim = Faulty<SimDevice>;

fn fault(calls: Calls, effect: Effect) -> Fault {
    Fault {
        calls,
        skip: 0,
        count: Some(1),
        probability: None,
        min_size: Bytes::ZERO,
        stream: None,
        pool: None,
        effect,
    }
}

fn failing(text: &str) -> Fault {
    text.parse().expect("a fault")
}

fn with(faults: &[Fault]) -> (OnSim, Injector) {
    let injector = Injector::new(faults, 7);
    (
        Faulty::new(SimDevice::new(SimConfig::default()), injector.clone()),
        injector,
    )
}

/// For each allocation, whether it fails.
fn failed(device: &mut OnSim, sizes: &[u64]) -> Vec<bool> {
    sizes
        .iter()
        .map(|mib| device.malloc(Bytes::mib(*mib)).is_err())
        .collect()
}

#[test]
fn only_the_planned_calls_fail() {
    let (mut device, injector) = with(&[failing("cudaMalloc:2:2:4MiB")]);
    assert_eq!(
        failed(&mut device, &[4, 1, 4, 1, 8, 4]),
        [false, false, true, false, true, false]
    );
    let struck: Vec<String> = injector
        .take_injected()
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        struck,
        [
            "cudaMalloc 3 (4 MiB) fails with out_of_memory",
            "cudaMalloc 5 (8 MiB) fails with out_of_memory"
        ]
    );
    assert_eq!(
        injector.injected_by(0),
        (2, 4),
        "all matching calls are counted"
    );
    assert_eq!(
        (
            device.calls().malloc,
            device.calls().malloc_failures,
            device.leaks().allocations
        ),
        (6, 2, 4)
    );
}

#[test]
fn a_fault_can_match_the_stream_or_pool_of_a_request() -> Result<(), DeviceError> {
    let out_of_memory = Effect::Fails {
        error: InjectedError::OutOfMemory,
        sticky: false,
    };
    let of_stream = Fault {
        stream: Some(1),
        ..fault(Calls::AnyMemory, out_of_memory)
    };
    let of_pool = Fault {
        pool: Some(PoolKind::Small),
        ..fault(Calls::Of(DeviceCall::Malloc), out_of_memory)
    };
    let (mut device, injector) = with(&[of_stream, of_pool]);
    let side = device.create_stream()?;
    injector.set_request(Some(Request::new(Bytes::mib(8))));
    assert!(device.malloc(Bytes::mib(8)).is_ok());
    injector.set_request(Some(Request::new(Bytes::mib(8)).on(side)));
    assert!(device.malloc(Bytes::mib(8)).is_err());
    injector.set_request(Some(Request::new(Bytes::kib(4))));
    assert!(device.malloc(Bytes::mib(2)).is_err());
    injector.set_request(None);
    assert!(device.malloc(Bytes::mib(2)).is_ok());
    Ok(())
}

#[test]
fn a_probability_affects_the_expected_share_of_calls_reproducibly() {
    let some = Fault {
        probability: Some(0.25),
        count: None,
        ..failing("cudaMalloc:1")
    };
    let draw = || failed(&mut with(&[some]).0, &[2; 400]);
    let first = draw();
    let struck = first.iter().filter(|failed| **failed).count();
    assert!((70..130).contains(&struck), "{struck} of 400");
    assert_eq!(first, draw());
    let certain = Fault {
        probability: Some(1.0),
        ..some
    };
    assert_eq!(failed(&mut with(&[certain]).0, &[2; 5]), [true; 5]);
}

#[test]
fn a_sticky_error_fails_every_later_call() -> Result<(), DeviceError> {
    let lost = fault(
        Calls::Of(DeviceCall::Free),
        Effect::Fails {
            error: InjectedError::DeviceLost,
            sticky: true,
        },
    );
    let (mut device, injector) = with(&[lost]);
    let ptr = device.malloc(Bytes::mib(2))?;
    let told =
        |answer: Result<(), DeviceError>| answer.expect_err("the device is lost").to_string();
    let first = told(device.free(ptr));
    assert_eq!(
        first,
        "cudaFree failed: CUDA_ERROR_DEVICE_UNAVAILABLE (46). The failure was injected: neither \
         driver nor GPU is at fault"
    );
    assert_eq!(device.leaks().allocations, 1);
    let range = MemoryRange::new(ptr, Bytes::mib(2));
    let event = EventId(0);
    let calls: [(&str, Result<(), DeviceError>); 9] = [
        ("cudaMalloc", device.malloc(Bytes::mib(2)).map(drop)),
        ("cudaMemGetInfo", device.free_memory().map(drop)),
        ("cudaStreamCreate", device.create_stream().map(drop)),
        ("cudaEventQuery", device.event_done(event).map(drop)),
        ("cudaDeviceSynchronize", device.synchronize()),
        (
            "cudaLaunchKernel",
            device.fill(StreamId::DEFAULT, range, Tag(1)),
        ),
        ("nvmlDeviceGetMemoryInfo", device.memory().map(drop)),
        (
            "cuMemAddressReserve",
            device
                .mapped()
                .map_or(Ok(()), |mapped| mapped.reserve(Bytes::mib(2)).map(drop)),
        ),
        (
            "cudaMemPoolCreate",
            device
                .pooled()
                .map_or(Ok(()), |pooled| pooled.create_pool(Bytes::ZERO).map(drop)),
        ),
    ];
    for (name, answer) in calls {
        let error = answer.expect_err(name);
        assert!(
            error.to_string().starts_with(&format!("{name} failed: ")),
            "{error}"
        );
        assert_eq!(injector.cause_of(&error), Some(0), "{error}");
    }
    assert!(injector.is_broken());
    Ok(())
}

#[test]
fn latency_and_wrong_figures_can_be_injected() -> Result<(), DeviceError> {
    let slow = Fault {
        count: None,
        ..fault(
            Calls::Of(DeviceCall::Malloc),
            Effect::Takes(Nanos::millis(5)),
        )
    };
    let wrong = Fault {
        count: None,
        ..fault(Calls::Of(DeviceCall::MemGetInfo), Effect::OffBy(-(1 << 20)))
    };
    let lying = fault(Calls::Of(DeviceCall::NvmlMemory), Effect::OffBy(3 << 20));
    let (mut device, _) = with(&[slow, wrong, lying]);
    let before = device.now();
    device.malloc(Bytes::mib(2))?;
    assert!(device.now().saturating_sub(before) >= Nanos::millis(5));
    let (lied, true_figures) = (device.memory()?, device.memory()?);
    assert_eq!(device.free_memory()?, true_figures.free - Bytes::mib(1));
    assert_eq!(
        (lied.used - true_figures.used, lied.free),
        (Bytes::mib(3), true_figures.free),
        "only once, and only the used bytes"
    );
    Ok(())
}

#[test]
fn an_event_that_never_completes_blocks_only_its_waiters() -> Result<(), DeviceError> {
    let (mut device, injector) = with(&[fault(
        Calls::Of(DeviceCall::RecordEvent),
        Effect::NeverCompletes,
    )]);
    let (side, other, third) = (
        device.create_stream()?,
        device.create_stream()?,
        device.create_stream()?,
    );
    let (event, later) = (device.create_event()?, device.create_event()?);
    device.record_event(event, side)?;
    device.record_event(later, other)?;
    device.synchronize_event(later)?;
    assert_eq!(
        (device.event_done(event)?, device.event_done(later)?),
        (false, true)
    );
    device.wait_event(other, event)?;
    device.record_event(later, other)?;
    assert!(!device.event_done(later)?, "it is ordered after the wait");
    device.synchronize_stream(third)?;
    let waits = [
        ("cudaEventSynchronize", device.synchronize_event(event)),
        ("cudaStreamSynchronize", device.synchronize_stream(other)),
        ("cudaDeviceSynchronize", device.synchronize()),
        ("cudaStreamDestroy", device.destroy_stream(side)),
    ];
    for (call, answer) in waits {
        assert_eq!(
            answer,
            Err(DeviceError::NeverReturns { call }),
            "told at once"
        );
    }
    assert_eq!(
        injector.cause_of(&DeviceError::NeverReturns { call: "cudaFree" }),
        Some(0)
    );
    Ok(())
}

#[test]
fn a_refused_page_leaks_no_pages() -> Result<(), DeviceError> {
    let (mut device, _) = with(&[failing("cuMemCreate:3")]);
    let page = Bytes::mib(2);
    let free = device.free_memory()?;
    let start = device
        .mapped()
        .map_or(Ok(DevicePtr::NULL), |mapped| mapped.reserve(Bytes::mib(16)))?;
    let range = MemoryRange::new(start, Bytes::mib(8));
    let map = |device: &mut OnSim| {
        device
            .mapped()
            .map_or(Ok(()), |mapped| mapped.map(range, page))
    };
    assert_eq!(
        map(&mut device),
        Err(DeviceError::OutOfMemory {
            requested: Bytes::mib(8),
            free
        })
    );
    assert_eq!(
        (
            device.free_memory()?,
            device.calls().create,
            device.calls().release
        ),
        (free, 3, 2)
    );
    map(&mut device)?;
    assert_eq!(device.free_memory()?, free - Bytes::mib(8));
    Ok(())
}

#[test]
fn paused_calls_are_not_counted_and_endless_calls_are_stopped() {
    let injector = Injector::new(&[failing("cudaMalloc:1")], 0)
        .logging()
        .with_budget(2);
    let mut device = Faulty::new(SimDevice::new(SimConfig::default()), injector.clone());
    injector.pause();
    assert!(device.malloc(Bytes::mib(2)).is_ok());
    injector.resume();
    assert!(device.malloc(Bytes::mib(2)).is_err());
    assert!(device.malloc(Bytes::mib(2)).is_ok());
    let error = device
        .malloc(Bytes::mib(2))
        .expect_err("the third call is one too many")
        .to_string();
    assert_eq!(
        error,
        "the device: stopped after 2 calls: the program seems to call it forever"
    );
    let made: Vec<String> = injector
        .calls_made()
        .iter()
        .map(|noted| noted.made.to_string())
        .collect();
    assert_eq!(
        made,
        [
            "cudaMalloc 1 (2 MiB)",
            "cudaMalloc 2 (2 MiB)",
            "cudaMalloc 3 (2 MiB)"
        ]
    );
}

#[test]
fn a_fault_is_parsed_or_refused_with_the_form() {
    let why = |text: &str| text.parse::<Fault>().expect_err("this is none").to_string();
    assert_eq!(
        failing("cudaFree:3").effect,
        Effect::Fails {
            error: InjectedError::Unknown,
            sticky: false
        }
    );
    assert_eq!(
        failing("any:3:2").effect,
        Effect::Fails {
            error: InjectedError::OutOfMemory,
            sticky: false
        }
    );
    assert!(why("cudaMaloc:3").starts_with(
        "`cudaMaloc` is not a call that can fail: write any, cudaMalloc, cuMemCreate"
    ));
    for text in [
        "cudaMalloc",
        "cudaMalloc:0",
        "cudaMalloc:x",
        "cudaMalloc:1:2:3:4",
    ] {
        assert_eq!(
            why(text),
            format!("`{text}` is not CALL:FIRST[:COUNT][:MIN_SIZE], as in `cudaMalloc:40:2`")
        );
    }
    for call in DeviceCall::ALL {
        assert_eq!(DeviceCall::from_name(call.name()), Some(*call));
    }
}

#[test]
fn calls_for_host_memory_and_copies_can_fail() -> Result<(), DeviceError> {
    let faults = [
        "cuMemHostAlloc:1",
        "mmap:1",
        "cuMemcpyDtoHAsync:1",
        "cuMemcpyHtoDAsync:1",
        "cuMemFreeHost:1",
    ];
    let (mut device, injector) = with(&faults.map(failing));
    for memory in [HostMemory::Pinned, HostMemory::Pageable] {
        let refused = device.host_alloc(Bytes::mib(1), &memory);
        assert!(
            matches!(refused, Err(DeviceError::HostMemory { call, .. }) if call == memory.call()),
            "{refused:?}"
        );
    }
    let (ptr, host) = (
        device.malloc(Bytes::mib(2))?,
        device.host_alloc(Bytes::mib(1), &HostMemory::Pinned)?,
    );
    let range = MemoryRange::new(ptr, Bytes::mib(1));
    let named = |refused: Result<(), DeviceError>, name: &str| {
        assert!(
            matches!(&refused, Err(DeviceError::Driver { call, .. }) if *call == name),
            "{refused:?}"
        );
    };
    named(
        device.copy_to_host(StreamId::DEFAULT, range, host),
        "cuMemcpyDtoHAsync",
    );
    named(
        device.copy_to_device(StreamId::DEFAULT, host, range),
        "cuMemcpyHtoDAsync",
    );
    named(device.host_free(host), "cuMemFreeHost");
    assert_eq!(
        (injector.take_injected().len(), device.leaks().host),
        (5, 1),
        "a call that fails changes nothing"
    );
    device.copy_to_host(StreamId::DEFAULT, range, host)?;
    device.host_free(host)
}

#[test]
fn fault_counts_continue_in_the_next_process() -> Result<(), serde_json::Error> {
    let asking = Injector::new(
        &[
            failing("cudaMalloc:3:2"),
            Fault {
                probability: Some(0.5),
                count: None,
                ..failing("cudaFree:1")
            },
        ],
        7,
    )
    .logging();
    let send = |state: &InjectorState| serde_json::from_str(&serde_json::to_string(state)?);
    for strikes in [[false, false], [true, true], [false, false]] {
        let making = Injector::from_state(send(&asking.state_of_new_process())?);
        let mut device = Faulty::new(SimDevice::new(SimConfig::default()), making.clone());
        for strikes in strikes {
            assert_eq!(failed(&mut device, &[2]), [strikes]);
            asking.take_over(send(&making.take_state())?);
        }
        asking.take_over(send(&making.take_state())?);
    }
    let struck: Vec<String> = asking
        .take_injected()
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        struck,
        [
            "cudaMalloc 3 (2 MiB) fails with out_of_memory",
            "cudaMalloc 4 (2 MiB) fails with out_of_memory"
        ]
    );
    let numbers: Vec<u64> = asking
        .calls_made()
        .iter()
        .map(|noted| noted.made.number)
        .collect();
    assert_eq!(
        (numbers, asking.injected_by(0)),
        ((1..=6).collect(), (2, 6))
    );
    Ok(())
}

#[test]
fn a_sticky_error_ends_with_its_process() {
    let illegal = Effect::Fails {
        error: InjectedError::IllegalAddress,
        sticky: true,
    };
    let asking = Injector::new(&[fault(Calls::Of(DeviceCall::Malloc), illegal)], 7);
    let making = Injector::from_state(asking.state_of_new_process());
    assert_eq!(
        failed(
            &mut Faulty::new(SimDevice::new(SimConfig::default()), making.clone()),
            &[2, 2]
        ),
        [true, true]
    );
    asking.take_over(making.take_state());
    assert!(asking.is_broken());
    let next = Injector::from_state(asking.state_of_new_process());
    assert_eq!(
        failed(
            &mut Faulty::new(SimDevice::new(SimConfig::default()), next.clone()),
            &[2]
        ),
        [false]
    );
    assert!(!next.is_broken());
}
