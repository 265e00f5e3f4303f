//! The environment of a program, and the folder of its run.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use harness_allocator::units::Bytes;
use harness_gpu_settings::gpus::GPUS;

use super::*;

/// Returns the variables set for a program that inherits these.
fn environment(
    interposition: Interposition,
    alloc_conf: Option<&str>,
    snapshot: bool,
    inherited: &[(&str, &str)],
) -> BTreeMap<&'static str, String> {
    let inherited: BTreeMap<&str, &str> = inherited.iter().copied().collect();
    let libraries = Libraries { folder: "/d".into(), core: CORE.to_owned(), stubs: vec!["libcuda.so.1".into(), "libcudart.so.13".into()] };
    let settings = Settings::new(&GPUS[0], Bytes::gib(1));
    let launch = Launch { command: &[], settings: &settings, libraries: &libraries, interposition, alloc_conf, snapshot, ledger: None };
    let set = launch.environment(Path::new("/run"), |name| inherited.get(name).map(OsString::from));
    set.into_iter().map(|(name, value)| (name, value.into_string().unwrap())).collect()
}

#[test]
fn the_users_libraries_are_loaded_first_and_the_hook_precedes_the_users_modules() {
    let users = [("LD_AUDIT", "/mine.so"), ("LD_PRELOAD", "/malloc.so"), ("PYTHONPATH", "src:lib")];
    let audit = environment(Interposition::Audit, None, false, &users);
    assert_eq!(audit["LD_AUDIT"], format!("/mine.so:/d/{CORE}"));
    assert!(!audit.contains_key("LD_PRELOAD"));
    assert_eq!(audit["PYTHONPATH"], "/run/python:src:lib");
    let preload = environment(Interposition::Preload, None, false, &users);
    assert_eq!(preload["LD_PRELOAD"], "/malloc.so:/d/libcuda.so.1:/d/libcudart.so.13");
    assert!(!preload.contains_key("LD_AUDIT"));
    // An empty entry would name the current folder.
    assert_eq!(environment(Interposition::Audit, None, false, &[("PYTHONPATH", "")])["PYTHONPATH"], "/run/python");
}

#[test]
fn compiled_kernels_are_cached_in_the_folder_of_the_run() {
    let set = environment(Interposition::Audit, None, false, &[("TRITON_CACHE_DIR", "/home/x/.triton")]);
    for cache in KERNEL_CACHES {
        assert!(set[cache].starts_with("/run/caches/"), "{cache}");
    }
    assert_eq!(
        (set["HARNESS_GPU_LIBRARIES"].as_str(), set["HARNESS_GPU_RUN"].as_str(), set["TRITON_LIBCUDA_PATH"].as_str()),
        ("/d", "/run", "/d")
    );
    assert!(set["HARNESS_GPU"].parse::<Settings>().is_ok());
}

#[test]
fn allocator_settings_and_snapshots_are_set_on_request_only() {
    let names = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "HARNESS_GPU_SNAPSHOT"];
    let values = |set: &BTreeMap<&str, String>| names.map(|name| set.get(name).cloned().unwrap_or_default());
    assert_eq!(values(&environment(Interposition::Audit, None, false, &[("PYTORCH_ALLOC_CONF", "users")])), ["", "", ""]);
    let conf = "expandable_segments:True";
    assert_eq!(values(&environment(Interposition::Audit, Some(conf), true, &[])), [conf, conf, "1"]);
}

#[test]
fn auditing_requires_a_new_enough_c_library() {
    let methods = [(2, 17), (2, 34), (2, 35), (2, 41), (3, 0)].map(Interposition::of_libc);
    assert_eq!(methods, [Interposition::Preload, Interposition::Preload, Interposition::Audit, Interposition::Audit, Interposition::Audit]);
}

#[test]
fn the_folder_of_a_run_contains_the_hook_and_the_caches_and_the_library_paths_for_preloading() {
    let folder = tempfile::tempdir().unwrap();
    let libraries = Libraries { folder: folder.path().to_owned(), core: CORE.to_owned(), stubs: Vec::new() };
    let settings = Settings::new(&GPUS[0], Bytes::gib(1));
    for interposition in [Interposition::Audit, Interposition::Preload] {
        let run = tempfile::tempdir().unwrap();
        let launch = Launch {
            command: &[],
            settings: &settings,
            libraries: &libraries,
            interposition,
            alloc_conf: None,
            snapshot: false,
            ledger: None,
        };
        launch.fill(run.path()).unwrap();
        assert!(run.path().join("python/sitecustomize.py").is_file());
        assert!(run.path().join("caches/pytorch_kernel_cache_path").is_dir());
        let linked = ["cu13", "cudnn"].map(|package| run.path().join("python/nvidia").join(package).join("lib").read_link().ok());
        let expected = (interposition == Interposition::Preload).then(|| folder.path().to_owned());
        assert_eq!(linked, [expected.clone(), expected]);
    }
}

#[test]
fn the_error_for_a_missing_library_names_its_installers() {
    for (error, variable) in [(LaunchError::NoCore, CORE_VARIABLE), (LaunchError::NoLimiter, LIMITER_VARIABLE)] {
        let text = error.to_string();
        assert!(["`ci/install`", "`ci/wheel`", "`cargo build --release`", variable].iter().all(|name| text.contains(name)), "{text}");
    }
}
