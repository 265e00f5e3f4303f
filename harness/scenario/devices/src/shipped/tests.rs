use super::*;

/// The example in `scenarios/devices`.
const EXAMPLE: &str = include_str!("../../../../../scenarios/devices/my-gpu.yaml");

fn error(text: &str) -> String {
    of_text(text, Path::new("gpu.yaml"))
        .expect_err("the file has an error")
        .to_string()
}

#[test]
fn a_file_describes_a_gpu() {
    let gpu = of_text(EXAMPLE, Path::new("my-gpu.yaml")).expect("the example is valid");
    assert_eq!(
        (gpu.name.as_str(), gpu.device.as_str()),
        ("my-gpu", "NVIDIA Example 24GB")
    );
    assert_eq!(
        (gpu.memory, gpu.capability, gpu.multiprocessors),
        (Bytes::mib(24_112), (12, 0), 170)
    );
    assert_eq!(
        (gpu.l2_cache, gpu.clock_khz, gpu.memory_bus_bits, gpu.pcie),
        (96 << 20, 2_407_000, 384, Some(5))
    );
    assert!(gpu.reaches_peers());
    let optional = [
        "clock_mhz",
        "memory_clock_mhz",
        "memory_bus_bits",
        "pcie",
        "peer_access",
        "shares_host_memory",
        "source",
    ];
    let short: String = EXAMPLE
        .lines()
        .filter(|line| !optional.iter().any(|key| line.starts_with(key)))
        .map(|line| format!("{line}\n"))
        .collect();
    let gpu = of_text(&short, Path::new("my-gpu.yaml")).expect("these keys are optional");
    assert_eq!(
        (
            gpu.clock_khz,
            gpu.memory_clock_khz,
            gpu.memory_bus_bits,
            gpu.pcie
        ),
        (0, 0, 0, None)
    );
}

#[test]
fn errors_name_the_line_and_column() {
    let with = |old: &str, new: &str| {
        assert!(EXAMPLE.contains(old), "{old}");
        error(&EXAMPLE.replace(old, new))
    };
    let texts = [
        with("12.0", "12.7"),
        with("24112MiB", "24GB"),
        with("multiprocessors: 170", "multiprocessors: 0"),
        with("multiprocessors: 170", "sms: 170"),
        with("pcie: 5", "pcie: 7"),
        with("device: NVIDIA Example 24GB ", "gpu: NVIDIA "),
    ];
    insta::assert_snapshot!(texts.join("\n"));
}

#[test]
fn a_simulated_device_has_the_memory_of_each_gpu() {
    for gpu in GPUS.iter() {
        let config = sim_config(gpu);
        assert_eq!(config.total, gpu.memory);
        assert!(
            config.cost.name.contains("costs not measured"),
            "{}",
            config.cost.name
        );
    }
}

#[test]
fn the_smallest_sufficient_gpu_is_found() {
    let name = |need| with_room_for(need).map(|gpu| gpu.name.as_str());
    assert_eq!(name(Bytes::gib(10)), Some("rtx2080ti-11"));
    assert_eq!(name(Bytes::gib(100)), Some("h200-141"));
    assert_eq!(name(Bytes::gib(500)), None);
}
