//! Checks the errors for unusable drivers.

use super::*;

unsafe extern "C" fn never_called() {}

/// Looks up every function in a library that lacks some.
fn look_up_without(missing: &[&str]) -> Driver {
    Driver::look_up(|name| (!missing.contains(&name)).then_some(never_called))
}

#[test]
fn every_missing_function_is_named() {
    assert_eq!(look_up_without(&[]).missing(false), [""; 0]);
    let driver = look_up_without(&["cuInit", "cuDeviceGetUuid_v2", "cuLaunchKernel"]);
    let missing = driver.missing(false);
    assert_eq!(missing, ["cuInit", "cuDeviceGetUuid_v2", "cuLaunchKernel"]);
    assert_eq!(driver.missing(true), ["cuInit", "cuDeviceGetUuid_v2"]);
    assert_eq!(
        cuda!(driver, cuInit(0)),
        Err(Refusal {
            call: "cuInit",
            code: library::MISSING
        })
    );
    let sentence = missing_functions(&missing).to_string();
    assert_eq!(
        sentence,
        "CUDA driver (libcuda.so.1): it lacks cuInit, cuDeviceGetUuid_v2, cuLaunchKernel: the \
         driver is too old, install one for \
         CUDA 12 or later (525 or newer)"
    );
}

#[test]
fn a_missing_driver_and_an_unloadable_one_have_different_errors() {
    let absent = not_loaded(&LoadError::Absent).to_string();
    assert!(
        absent.starts_with(
            "CUDA driver (libcuda.so.1): no such library is on the loader's \
         path, so no GPU can be used"
        ),
        "{absent}"
    );
    let broken = not_loaded(&LoadError::Unloadable(
        "libcuda.so.1: file too short".to_owned(),
    ))
    .to_string();
    assert!(
        broken.starts_with(
            "CUDA driver (libcuda.so.1): the library exists but cannot be loaded: \
             libcuda.so.1: file too short; "
        ),
        "{broken}"
    );
}
