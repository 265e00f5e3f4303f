use super::*;

#[test]
fn the_codes_are_sorted_and_each_has_a_name_and_advice() {
    assert!(CODES.windows(2).all(|pair| pair[0].0 < pair[1].0));
    for (code, name, advice) in CODES {
        assert!(name.starts_with("CUDA_"), "{code}");
        assert!(!advice.ends_with('.') && advice.len() > 10, "{code}");
        assert_eq!(describe(*code), (*name, *advice));
    }
}

#[test]
fn a_known_code_has_a_name_and_advice() {
    let error = DeviceError::from(Refusal {
        call: "cuInit",
        code: 100,
    });
    assert_eq!(
        error.to_string(),
        "cuInit failed: CUDA_ERROR_NO_DEVICE (100). No GPU is visible: see `nvidia-smi -L` and \
         CUDA_VISIBLE_DEVICES, and give the \
             container access to the GPU"
    );
}

#[test]
fn an_unknown_code_is_reported_as_unknown() {
    let error = DeviceError::from(Refusal {
        call: "cuMemAlloc_v2",
        code: 9999,
    });
    assert!(
        error
            .to_string()
            .starts_with("cuMemAlloc_v2 failed: unknown driver code (9999). "),
        "{error}"
    );
}

/// cudarc uses the same names for these codes.
#[test]
fn names_agree_with_cudarc() {
    use cudarc::driver::sys::CUresult;
    let known = [
        CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        CUresult::CUDA_ERROR_STUB_LIBRARY,
        CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE,
        CUresult::CUDA_ERROR_NO_DEVICE,
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
        CUresult::CUDA_ERROR_INVALID_PTX,
        CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
        CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED,
        CUresult::CUDA_ERROR_OPERATING_SYSTEM,
        CUresult::CUDA_ERROR_INVALID_HANDLE,
        CUresult::CUDA_ERROR_NOT_READY,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
        CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
        CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
        CUresult::CUDA_ERROR_LAUNCH_FAILED,
        CUresult::CUDA_ERROR_SYSTEM_NOT_READY,
        CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE,
        CUresult::CUDA_ERROR_EXTERNAL_DEVICE,
        CUresult::CUDA_ERROR_UNKNOWN,
    ];
    for code in known {
        assert_eq!(describe(code as u32).0, format!("{code:?}"));
    }
}
