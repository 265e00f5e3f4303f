use harness_allocator::units::Bytes;
use harness_cuda::machine::{DeviceFound, DriverFound};
use harness_cuda::nvml::Uuid;

use super::*;

fn machine_with(devices: u32) -> Probe {
    let device = |ordinal| DeviceFound {
        ordinal,
        name: "test".to_owned(),
        total: Bytes::gib(1),
        uuid: Uuid([0; 16]),
        compute_capability: (9, 0),
    };
    let driver = DriverFound {
        cuda: "13.0".to_owned(),
        devices: (0..devices).map(device).collect(),
    };
    Probe {
        driver: Ok(driver),
        nvml: Err("none".to_owned()),
    }
}

#[test]
fn every_choice_round_trips() {
    for choice in [
        DeviceChoice::Auto,
        DeviceChoice::Simulated,
        DeviceChoice::Cuda(0),
        DeviceChoice::Cuda(17),
    ] {
        assert_eq!(choice.to_string().parse(), Ok(choice));
    }
    assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
}

#[test]
fn an_invalid_choice_lists_the_accepted_forms() {
    for text in [
        "",
        "gpu",
        "cuda:",
        "cuda:-1",
        "cuda:x",
        "CUDA",
        "cuda:99999999999",
    ] {
        let error = text
            .parse::<DeviceChoice>()
            .expect_err("not a device")
            .to_string();
        assert_eq!(
            error,
            format!(
                "`{text}` is not a device: write `auto`, `sim`, `cuda` (the first CUDA device) or \
                 `cuda:N`, as in `cuda:1`"
            )
        );
    }
}

#[test]
fn auto_chooses_the_first_gpu() {
    assert_eq!(
        DeviceChoice::Auto.resolve(&machine_with(2)),
        Ok(Resolved::Cuda(0))
    );
}

#[test]
fn auto_falls_back_to_the_simulated_device_with_a_reason() {
    let resolved = DeviceChoice::Auto
        .resolve(&machine_with(0))
        .expect("auto always resolves");
    let reason = "no CUDA device can be opened: CUDA device 0: the driver is installed but sees no \
         GPU; see `nvidia-smi -L` and \
                      CUDA_VISIBLE_DEVICES";
    assert_eq!(
        resolved,
        Resolved::Simulated {
            reason: reason.to_owned()
        }
    );
}

#[test]
fn a_requested_cuda_device_must_exist() {
    let error = DeviceChoice::Cuda(2)
        .resolve(&machine_with(2))
        .expect_err("there are two")
        .to_string();
    assert_eq!(
        error,
        "CUDA device 2: the driver has 2 devices, cuda:0 to cuda:1"
    );
    assert_eq!(
        DeviceChoice::Cuda(1).resolve(&machine_with(2)),
        Ok(Resolved::Cuda(1))
    );
}
