use super::*;

const SUCCESSOR: Refusal = Refusal { call: "new", code: 3 };

#[test]
fn the_older_function_is_called_only_if_the_newer_one_fails() {
    assert_eq!(newer_first(Ok(1), || panic!("the older function must not be called")), Ok(1));
    assert_eq!(newer_first(Err(SUCCESSOR), || Ok(2)), Ok(2));
    for code in [MISSING, nvmlReturn_enum_NVML_ERROR_DEPRECATED] {
        assert_eq!(
            newer_first::<u32>(Err(SUCCESSOR), || Err(Refusal { call: "old", code })),
            Err(SUCCESSOR),
            "the older function is missing"
        );
    }
    let failed = Refusal { call: "old", code: 999 };
    assert_eq!(newer_first::<u32>(Err(SUCCESSOR), || Err(failed)), Err(failed));
}

#[test]
fn a_missing_library_and_an_unloadable_one_have_different_errors() {
    assert!(not_loaded(&LoadError::Absent).starts_with("libnvidia-ml.so.1 is not on the loader's path"));
    let broken = not_loaded(&LoadError::Unloadable("file too short".to_owned()));
    assert!(broken.starts_with("libnvidia-ml.so.1 exists but cannot be loaded: file too short; "), "{broken}");
}

#[test]
fn an_error_names_the_function_and_the_remedy() {
    let missing = sentence(Refusal { call: "nvmlDeviceGetMemoryInfo_v2", code: MISSING });
    assert_eq!(missing, "this libnvidia-ml.so.1 has no nvmlDeviceGetMemoryInfo_v2; install a driver of CUDA 12 or later (525 or newer)");
    let unknown = sentence(Refusal { call: "nvmlInit_v2", code: 77 });
    assert_eq!(unknown, "nvmlInit_v2 failed with code 77: look the code up under nvmlReturn_t in nvml.h");
}
