use super::*;

#[test]
fn a_missing_library_and_an_unloadable_one_have_different_errors() {
    assert!(
        not_loaded(&LoadError::Absent).starts_with("libnvidia-ml.so.1 is not on the loader's path")
    );
    let broken = not_loaded(&LoadError::Unloadable("file too short".to_owned()));
    assert!(
        broken.starts_with("libnvidia-ml.so.1 exists but cannot be loaded: file too short; "),
        "{broken}"
    );
}

#[test]
fn an_error_names_the_function_and_the_remedy() {
    let missing = sentence(
        "nvmlDeviceGetMemoryInfo_v2",
        NvmlError::FailedToLoadSymbol("undefined symbol".to_owned()),
    );
    assert_eq!(
        missing,
        "this libnvidia-ml.so.1 has no nvmlDeviceGetMemoryInfo_v2; install a driver of CUDA 12 or \
         later (525 or newer)"
    );
    let unknown = sentence("nvmlInit_v2", NvmlError::UnexpectedVariant(77));
    assert_eq!(
        unknown,
        "nvmlInit_v2 failed: code 77; look it up under nvmlReturn_t in nvml.h"
    );
    assert_eq!(
        sentence("nvmlDeviceGetMigMode", NvmlError::NotSupported),
        "nvmlDeviceGetMigMode failed: the requested operation is not available on the target device"
    );
}
