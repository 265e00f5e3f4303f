//! The environment of a program, and the folder of its run.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use harness_allocator::units::Bytes;
use harness_gpu_settings::gpus::GPUS;

use super::*;

/// The variables by name, for a program that would have these.
fn environment(way: Way, alloc_conf: Option<&str>, snapshot: bool, inherited: &[(&str, &str)]) -> BTreeMap<&'static str, String> {
    let inherited: BTreeMap<&str, &str> = inherited.iter().copied().collect();
    let libraries =
        Libraries { folder: "/d".into(), core: CORE.to_owned(), doubles: vec!["libcuda.so.1".into(), "libcudart.so.13".into()] };
    let settings = Settings::new(&GPUS[0], Bytes::gib(1));
    let launch = Launch { command: &[], settings: &settings, libraries: &libraries, way, alloc_conf, snapshot, ledger: None };
    let set = launch.environment(Path::new("/run"), |name| inherited.get(name).map(OsString::from));
    set.into_iter().map(|(name, value)| (name, value.into_string().unwrap())).collect()
}

#[test]
fn the_doubles_come_behind_what_the_user_has_loaded_and_the_hook_before_the_users_modules() {
    let users = [("LD_AUDIT", "/mine.so"), ("LD_PRELOAD", "/malloc.so"), ("PYTHONPATH", "src:lib")];
    let audit = environment(Way::Audit, None, false, &users);
    assert_eq!(audit["LD_AUDIT"], format!("/mine.so:/d/{CORE}"));
    assert!(!audit.contains_key("LD_PRELOAD"));
    assert_eq!(audit["PYTHONPATH"], "/run/python:src:lib");
    let preload = environment(Way::Preload, None, false, &users);
    assert_eq!(preload["LD_PRELOAD"], "/malloc.so:/d/libcuda.so.1:/d/libcudart.so.13");
    assert!(!preload.contains_key("LD_AUDIT"));
    // An empty entry would be the current folder.
    assert_eq!(environment(Way::Audit, None, false, &[("PYTHONPATH", "")])["PYTHONPATH"], "/run/python");
}

#[test]
fn kernels_are_cached_in_the_folder_of_the_run_whatever_the_user_says() {
    let set = environment(Way::Audit, None, false, &[("TRITON_CACHE_DIR", "/home/x/.triton")]);
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
fn allocator_settings_and_snapshots_are_set_only_where_they_are_wanted() {
    let names = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "HARNESS_GPU_SNAPSHOT"];
    let values = |set: &BTreeMap<&str, String>| names.map(|name| set.get(name).cloned().unwrap_or_default());
    assert_eq!(values(&environment(Way::Audit, None, false, &[("PYTORCH_ALLOC_CONF", "users")])), ["", "", ""]);
    let conf = "expandable_segments:True";
    assert_eq!(values(&environment(Way::Audit, Some(conf), true, &[])), [conf, conf, "1"]);
}

#[test]
fn auditing_is_used_from_the_c_library_on_in_which_it_works() {
    let ways = [(2, 17), (2, 34), (2, 35), (2, 41), (3, 0)].map(Way::of_libc);
    assert_eq!(ways, [Way::Preload, Way::Preload, Way::Audit, Way::Audit, Way::Audit]);
}

#[test]
fn the_folder_of_a_run_has_the_hook_the_caches_and_for_preloading_the_paths_that_torch_tries() {
    let folder = tempfile::tempdir().unwrap();
    let libraries = Libraries { folder: folder.path().to_owned(), core: CORE.to_owned(), doubles: Vec::new() };
    let settings = Settings::new(&GPUS[0], Bytes::gib(1));
    for way in [Way::Audit, Way::Preload] {
        let run = tempfile::tempdir().unwrap();
        let launch =
            Launch { command: &[], settings: &settings, libraries: &libraries, way, alloc_conf: None, snapshot: false, ledger: None };
        launch.fill(run.path()).unwrap();
        assert!(run.path().join("python/sitecustomize.py").is_file());
        assert!(run.path().join("caches/pytorch_kernel_cache_path").is_dir());
        let linked = ["cu13", "cudnn"].map(|package| run.path().join("python/nvidia").join(package).join("lib").read_link().ok());
        let expected = (way == Way::Preload).then(|| folder.path().to_owned());
        assert_eq!(linked, [expected.clone(), expected]);
    }
}

#[test]
fn a_missing_library_of_ours_says_what_installs_it() {
    for (error, variable) in [(LaunchError::NoCore, CORE_VARIABLE), (LaunchError::NoLimiter, LIMITER_VARIABLE)] {
        let text = error.to_string();
        assert!(["`ci/install`", "`ci/wheel`", "`cargo build --release`", variable].iter().all(|name| text.contains(name)), "{text}");
    }
}
