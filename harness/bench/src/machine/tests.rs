use harness_allocator::device::sim::{SimConfig, SimDevice};

use super::*;

fn simulated() -> SimDevice {
    SimDevice::new(SimConfig::default())
}

fn process(pid: u32, name: Option<&str>, used: Option<Bytes>) -> ProcessUse {
    ProcessUse {
        pid,
        name: name.map(str::to_owned),
        used,
    }
}

#[test]
fn the_machine_is_the_same_each_time_and_names_what_it_is() {
    let here = machine(&simulated(), "rustc");
    assert_eq!(here, machine(&simulated(), "rustc"));
    assert_eq!(
        (here.device.as_str(), here.clock, here.uuid_hash.as_deref()),
        ("simulated", Clock::Simulated, None)
    );
    assert!(here.cores >= 1 && here.cost_model.is_some(), "{here:?}");
}

#[test]
fn each_fact_that_differs_is_said() {
    let here = machine(&simulated(), "rustc");
    assert_eq!(here.differences(&here.clone()), Vec::<String>::new());
    let others = [
        (
            MachineInfo {
                driver: Some("580.65.06".to_owned()),
                ..here.clone()
            },
            "driver: unknown against 580.65.06",
        ),
        (
            MachineInfo {
                mig: Some(false),
                ..here.clone()
            },
            "multi-instance mode: unknown against off",
        ),
        (
            MachineInfo {
                clock: Clock::Measured,
                ..here.clone()
            },
            "clock: virtual against real",
        ),
        (
            MachineInfo {
                device: "NVIDIA H200".to_owned(),
                ..here.clone()
            },
            "device: simulated against NVIDIA H200",
        ),
    ];
    for (other, said) in others {
        assert_eq!(here.differences(&other), [said]);
    }
}

#[test]
fn a_simulated_device_has_cost_figures_and_no_gpu() {
    let mut device = simulated();
    let mut monitor = Monitor::start(&mut device);
    monitor.observe();
    let conditions = monitor.finish();
    assert_eq!(conditions.gpu, []);
    assert_eq!(conditions.cost_figures, device.cost_figures());
    assert_eq!(
        conditions.free_at_start,
        device.memory().ok().map(|memory| memory.free)
    );
}

/// Readings of an undisturbed GPU.
fn quiet() -> Reading {
    Reading {
        throttled: Some(Vec::new()),
        ..Reading::default()
    }
}

#[test]
fn other_processes_are_named_with_the_most_that_they_held() {
    let mut watch = GpuWatch::default();
    assert_eq!(
        watch.contended(Duration::from_secs(1)),
        Vec::<String>::new()
    );
    for used in [Bytes::gib(1), Bytes::mib(3277), Bytes::mib(1)] {
        let others = Some(vec![process(7, Some("/usr/bin/python3"), Some(used))]);
        watch.note(Duration::ZERO, Reading { others, ..quiet() });
    }
    assert_eq!(
        watch.contended(Duration::from_secs(1)),
        ["1 other process held memory of the GPU (python3, 3.20 GiB)"]
    );
    watch.note(
        Duration::ZERO,
        Reading {
            others: Some(vec![process(9, None, None)]),
            ..quiet()
        },
    );
    let told =
        "2 other processes held memory of the GPU (python3, 3.20 GiB; a process without a name)";
    assert_eq!(watch.contended(Duration::from_secs(1)), [told]);
    let counts: Vec<_> = watch
        .states
        .iter()
        .map(|state| state.other_processes)
        .collect();
    assert_eq!(counts, [Some(1); 4]);
}

#[test]
fn only_clocks_that_were_held_down_or_are_unknown_are_told_and_once() {
    let (cap, set) = (
        Throttle {
            words: "power cap",
            chosen: false,
        },
        Throttle {
            words: "application clocks are set",
            chosen: true,
        },
    );
    let mut watch = GpuWatch::default();
    watch.note(
        Duration::ZERO,
        Reading {
            throttled: Some(vec![set]),
            ..quiet()
        },
    );
    assert_eq!(
        watch.contended(Duration::from_secs(1)),
        Vec::<String>::new()
    );
    assert_eq!(
        watch.states[0].throttle_reasons,
        ["application clocks are set"]
    );
    for _ in 0..2 {
        watch.note(
            Duration::ZERO,
            Reading {
                throttled: Some(vec![cap]),
                ..quiet()
            },
        );
    }
    assert_eq!(
        watch.contended(Duration::from_secs(1)),
        ["clocks were held down: power cap"]
    );
    let mut unknown = GpuWatch::default();
    unknown.note(
        Duration::ZERO,
        Reading {
            throttled: None,
            ..quiet()
        },
    );
    assert_eq!(unknown.states[0].throttle_reasons, [NOT_KNOWN]);
    assert_eq!(
        unknown.contended(Duration::from_secs(1)),
        ["NVML does not report throttling"]
    );
}

#[test]
fn what_held_clocks_down_between_two_readings_is_known_by_its_length() {
    let mut watch = GpuWatch::default();
    for (power, heat) in [(500, 7), (540, 7), (590, 7)] {
        let [held_by_power, held_by_heat] = [power, heat].map(|length| Some(Nanos::millis(length)));
        watch.note(
            Duration::ZERO,
            Reading {
                held_by_power,
                held_by_heat,
                ..quiet()
            },
        );
    }
    assert_eq!(
        watch.contended(Duration::from_secs(10)),
        Vec::<String>::new(),
        "90 ms of 10 s are less than 1 %"
    );
    assert_eq!(
        watch.contended(Duration::from_secs(1)),
        ["clocks were held down: power, for 9 % of the time"]
    );
}
