use super::*;

#[test]
fn a_gpu_is_found_by_name_or_file() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../scenarios/devices/my-gpu.yaml");
    for (profile, memory) in [
        (Path::new("l4-24"), Bytes(23_570_219_008)),
        (&file, Bytes::mib(24_112)),
    ] {
        let source = DeviceSource::simulated()
            .with_profile(profile)
            .expect("the GPU is known");
        let device = source.open().expect("a simulated device opens");
        assert_eq!(device.info().total, memory, "{}", profile.display());
        assert!(
            device
                .info()
                .fingerprint
                .cost_model
                .as_ref()
                .is_some_and(|model| model.contains("costs not measured"))
        );
        assert_eq!(
            source.arguments().last(),
            Some(&profile.into()),
            "the reproducing command"
        );
    }
    let unknown = DeviceSource::simulated()
        .with_profile(Path::new("l4-25"))
        .expect_err("there is none");
    assert_eq!(unknown.to_string(), "l4-25: there is no such file");
}

#[test]
fn a_simulated_device_grows_to_the_memory_asked_for_unless_it_has_a_profile() {
    for gib in [1, 80, 141, 192] {
        let source = DeviceSource::simulated().with_room_for(Bytes::gib(gib));
        let mut device = source.open().expect("a simulated device opens");
        source
            .admit(&mut *device, Bytes::gib(gib))
            .expect("it has room");
        let same = DeviceSource::of_arguments(&source.arguments())
            .expect("the arguments are its own")
            .open()
            .expect("it opens");
        assert_eq!(same.info().total, device.info().total);
    }
    let profiled = DeviceSource::simulated()
        .with_profile(Path::new("l4-24"))
        .expect("it comes with the program");
    let device = profiled
        .with_room_for(Bytes::gib(80))
        .open()
        .expect("a simulated device opens");
    assert_eq!(device.info().total, Bytes(23_570_219_008));
}

#[test]
fn a_too_small_simulated_device_recommends_a_profile() {
    let refusal = |need| {
        let source = DeviceSource::simulated();
        let mut device = source.open().expect("a simulated device opens");
        source
            .admit(&mut *device, need)
            .expect_err("the device has 80 GiB")
            .to_string()
    };
    assert_eq!(
        refusal(Bytes::gib(100)),
        "100 GiB of device memory: the simulated device has 79.46 GiB of 80 GiB free; \
         `--device-profile h200-141` simulates a device of \
             139.80 GiB, and `--memory` reduces the scenario's requirement"
    );
    assert!(refusal(Bytes::gib(500)).ends_with(
        "no GPU that harness knows has this much memory; \
             `--memory` reduces the scenario's requirement"
    ));
}
