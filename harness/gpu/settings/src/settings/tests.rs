use super::*;
use crate::text::{of_variable, to_variable};

#[test]
fn a_variable_carries_all_settings() {
    let mut settings = Settings::new(Gpu::named("a100-80").expect("find the GPU"), Bytes::gib(24));
    assert_eq!(of_variable(&to_variable(&settings)), Ok(settings.clone()));
    settings = Settings {
        devices: 4,
        context_overhead: Bytes::mib(500),
        memory_of_libraries: true,
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
        sensors: Sensors {
            power_mw: 250_000,
            celsius: 40,
            reasons: 4,
        },
        list_calls: true,
        wrong_write: Some(WrongWrite { nth: 2, offset: 77 }),
        blind_verify: true,
        ..settings
    }
    .failing("cuMemAlloc_v2", 3, 9999)
    .hanging("cuInit", 1);
    assert_eq!(of_variable(&to_variable(&settings)), Ok(settings));
}

#[test]
fn errors_list_the_accepted_settings() {
    let error = |error: SettingsError| error.to_string();
    assert_eq!(
        "late".parse::<Events>().map_err(error),
        Err("`late` is not a model of events: write instant, synchronize, lag:N".to_owned())
    );
    let message = |text: &str| {
        text.parse::<Fault>()
            .map_err(error)
            .expect_err("reject the text")
    };
    assert_eq!(
        message("cudaFree:1"),
        "`cudaFree` is not a call that can fail: write cudaMalloc, cuMemCreate, cudaMallocAsync, \
         cudaHostAlloc, \
         cublasCreate, cudnnCreate, cusolverDnCreate, cusparseCreate, cufftXtMakePlanMany, \
         cuModuleLoadData, cudaGraphLaunch, any"
    );
    assert_eq!(
        message("cudaMalloc:0"),
        "`cudaMalloc:0` is not CALL:FIRST[:COUNT][:MIN_SIZE], as in `cudaMalloc:40:2`"
    );
}

#[test]
fn a_file_for_another_process_appears_with_all_of_its_text() {
    let folder = tempfile::tempdir().expect("create a folder");
    let file = folder.path().join("reason");
    let text = "a reason".repeat(1 << 10);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..64).for_each(|_| publish(&file, &text).expect("publish")));
        }
        for _ in 0..256 {
            match fs::read_to_string(&file) {
                Ok(read) => assert!(read == text, "{} bytes", read.len()),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::NotFound),
            }
        }
    });
}
