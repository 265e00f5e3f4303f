use super::*;

#[test]
fn settings_are_parsed_as_they_are_shown() {
    let mut settings = Settings::new(Gpu::named("a100-80").expect("find the GPU"), Bytes::gib(24));
    assert_eq!(settings.to_string().parse(), Ok(settings.clone()));
    settings = Settings {
        devices: 4,
        context_overhead: Bytes::mib(500),
        events: Events::Lag(64),
        addresses: AddressOrder::Reuse,
        cudnn_workspace: CudnnWorkspace::None,
        values: Values::Copies,
        cuda: Cuda::V12,
        cudnn: 90_100,
        faults: vec![
            "cudaMalloc:40:2".parse().expect("parse a fault"),
            "cuMemCreate:1:1:20MiB".parse().expect("parse a fault"),
            "any:3:2".parse().expect("parse a fault"),
        ],
        latencies: vec!["cudaFree:3ms".parse().expect("parse a latency")],
        kernels: Kernels::Execute,
        mapping: false,
        mig: true,
        others: Bytes::mib(7),
        sensors: Sensors { power_mw: 250_000, celsius: 40, reasons: 4 },
        list_calls: true,
        wrong_write: Some(WrongWrite { nth: 2, offset: 77 }),
        blind_verify: true,
        ..settings
    }
    .failing("cuMemAlloc_v2", 3, 9999)
    .hanging("cuInit", 1);
    assert_eq!(settings.to_string().parse(), Ok(settings));
}

#[test]
fn errors_list_the_accepted_settings() {
    let message = |text: &str| text.parse::<Settings>().expect_err("reject the text").to_string();
    assert_eq!(message("events=late"), "`late` is not a model of events: write instant, synchronize, lag:N");
    assert_eq!(message("colour=red"), "`colour` is not a setting of the simulated GPU");
    assert_eq!(message("devices=17"), "`17` devices: a simulated machine has at most 16");
    assert_eq!(
        message("fail=cudaFree:1"),
        "`cudaFree` is not a call that can fail: write cudaMalloc, cuMemCreate, cudaMallocAsync, cudaHostAlloc, any"
    );
    assert_eq!(message("mapping=on"), "`on` is not a switch: write 0, 1");
    assert_eq!(message("refuse=cuInit"), "`cuInit` is not FUNCTION:NTH:CODE, as in `cuInit:1:999`, or FUNCTION:NTH:hangs");
    assert_eq!(message("wrong_write=1"), "`1` is not NTH:OFFSET");
    assert_eq!(message("sensors=1:2"), "`1:2` is not MILLIWATTS:CELSIUS:REASONS");
    assert_eq!(message("fail=cudaMalloc:0"), "`cudaMalloc:0` is not CALL:FIRST[:COUNT][:MIN_SIZE], as in `cudaMalloc:40:2`");
}
