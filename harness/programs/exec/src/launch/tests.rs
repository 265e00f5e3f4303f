//! The environment of a program, and the folder of its run.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use harness_allocator::units::Bytes;
use harness_gpu_settings::{gpus::GPUS, limits::Limits, settings::Settings, text::of_variable};

use super::*;
use crate::own_libraries::{CORE, CORE_VARIABLE, LIMITER, LIMITER_VARIABLE, limiter};
use crate::tests::fixture::setup;

/// Versions of the C library, without auditing and with it.
const PRELOAD: (u32, u32) = (2, 34);
const AUDIT: (u32, u32) = (2, 35);

/// Returns the variables set for a program that inherits these.
fn environment(
    libc: (u32, u32),
    alloc_conf: Option<&str>,
    snapshot: bool,
    inherited: &[(&str, &str)],
) -> BTreeMap<&'static str, String> {
    let setup = setup(Path::new("/d"), &["libcuda.so.1", "libcudart.so.13"], libc);
    let machine = Machine::Simulated(Settings::new(&GPUS[0], Bytes::gib(1)));
    of_launch(
        &Launch {
            command: &[],
            machine: &machine,
            setup: &setup,
            alloc_conf,
            snapshot,
            ledger: None,
        },
        inherited,
    )
}

fn of_launch(launch: &Launch<'_>, inherited: &[(&str, &str)]) -> BTreeMap<&'static str, String> {
    let inherited: BTreeMap<&str, &str> = inherited.iter().copied().collect();
    let set = launch.environment(Path::new("/run"), |name| {
        inherited.get(name).map(OsString::from)
    });
    set.into_iter()
        .map(|(name, value)| (name, value.into_string().unwrap()))
        .collect()
}

#[test]
fn the_users_libraries_are_loaded_first_and_the_hook_precedes_the_users_modules() {
    let users = [
        ("LD_AUDIT", "/mine.so"),
        ("LD_PRELOAD", "/malloc.so"),
        ("PYTHONPATH", "src:lib"),
        ("GLIBC_TUNABLES", "glibc.a=1"),
    ];
    let audit = environment(AUDIT, None, false, &users);
    assert_eq!(audit["LD_AUDIT"], format!("/mine.so:/d/{CORE}"));
    assert!(!audit.contains_key("LD_PRELOAD"));
    assert_eq!(audit["GLIBC_TUNABLES"], format!("{STATIC_TLS}:glibc.a=1"));
    assert_eq!(audit["PYTHONPATH"], "/run/python:src:lib");
    let preload = environment(PRELOAD, None, false, &users);
    assert_eq!(
        preload["LD_PRELOAD"],
        "/malloc.so:/d/libcuda.so.1:/d/libcudart.so.13"
    );
    assert!(!preload.contains_key("LD_AUDIT"));
    // An empty entry would name the current folder.
    assert_eq!(
        environment(AUDIT, None, false, &[("PYTHONPATH", "")])["PYTHONPATH"],
        "/run/python"
    );
}

#[test]
fn compiled_kernels_are_cached_in_the_folder_of_the_run() {
    let set = environment(
        AUDIT,
        None,
        false,
        &[("TRITON_CACHE_DIR", "/home/x/.triton")],
    );
    for cache in KERNEL_CACHES {
        assert!(set[cache].starts_with("/run/caches/"), "{cache}");
    }
    assert_eq!(
        (
            set["HARNESS_GPU_LIBRARIES"].as_str(),
            set["HARNESS_GPU_RUN"].as_str(),
            set["TRITON_LIBCUDA_PATH"].as_str()
        ),
        ("/d", "/run", "/run/link")
    );
    assert!(of_variable::<Settings>(&set["HARNESS_GPU"]).is_ok());
}

#[test]
fn allocator_settings_and_snapshots_are_set_on_request_only() {
    let names = [
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "HARNESS_GPU_SNAPSHOT",
    ];
    let values =
        |set: &BTreeMap<&str, String>| names.map(|name| set.get(name).cloned().unwrap_or_default());
    assert_eq!(
        values(&environment(
            AUDIT,
            None,
            false,
            &[("PYTORCH_ALLOC_CONF", "users")]
        )),
        ["", "", ""]
    );
    let conf = "expandable_segments:True";
    assert_eq!(
        values(&environment(AUDIT, Some(conf), true, &[])),
        [conf, conf, "1"]
    );
}

#[test]
fn auditing_and_limits_require_a_new_enough_c_library() {
    for (libc, variable) in [
        ((2, 17), "LD_PRELOAD"),
        (PRELOAD, "LD_PRELOAD"),
        (AUDIT, "LD_AUDIT"),
        ((2, 41), "LD_AUDIT"),
        ((3, 0), "LD_AUDIT"),
    ] {
        assert!(
            environment(libc, None, false, &[]).contains_key(variable),
            "{libc:?}"
        );
    }
    let error = limiter(PRELOAD)
        .expect_err("the library is too old")
        .to_string();
    assert_eq!(
        error,
        "the program's GNU C library has version 2.34; limiting programs on a real GPU requires \
         2.35 or later"
    );
}

#[test]
fn the_folder_of_a_run_contains_the_hook_and_the_caches_and_the_library_paths_for_preloading() {
    let folder = tempfile::tempdir().unwrap();
    let machine = Machine::Simulated(Settings::new(&GPUS[0], Bytes::gib(1)));
    for libc in [PRELOAD, AUDIT] {
        let run = tempfile::tempdir().unwrap();
        let (setup, command) = (setup(folder.path(), &[], libc), [OsString::from("/bin/sh")]);
        let launch = Launch {
            command: &command,
            machine: &machine,
            setup: &setup,
            alloc_conf: None,
            snapshot: false,
            ledger: None,
        };
        launch.fill(run.path()).unwrap();
        assert!(run.path().join("python/sitecustomize.py").is_file());
        assert!(run.path().join("caches/pytorch_kernel_cache_path").is_dir());
        assert_eq!(run.path().join(UNLOADED).exists(), libc == AUDIT);
        let linked = ["cu13", "cudnn"].map(|package| {
            run.path()
                .join("python/nvidia")
                .join(package)
                .join("lib")
                .read_link()
                .ok()
        });
        let expected = (libc == PRELOAD).then(|| folder.path().to_owned());
        assert_eq!(linked, [expected.clone(), expected]);
    }
}

#[test]
fn a_program_with_a_limit_sees_one_gpu_and_keeps_its_own_libraries() {
    let limits = Limits {
        device: Bytes::gib(80),
        memory: Some(Bytes::gib(24)),
        faults: Vec::new(),
        latencies: Vec::new(),
    };
    let setup = Setup {
        libraries: Libraries {
            folder: "/lib".into(),
            core: "limits.so".to_owned(),
            stubs: Vec::new(),
        },
        ..setup(Path::new("/lib"), &[], AUDIT)
    };
    let launch = Launch {
        command: &[],
        machine: &Machine::Real(1, limits),
        setup: &setup,
        alloc_conf: Some("a:b"),
        snapshot: false,
        ledger: Some(Path::new("/ledger")),
    };
    let set = of_launch(&launch, &[("LD_AUDIT", "/mine.so"), (VISIBLE, "3, GPU-5")]);
    let expected = BTreeMap::from(
        [
            ("CUDA_VISIBLE_DEVICES", "GPU-5"),
            ("GLIBC_TUNABLES", STATIC_TLS),
            ("HARNESS_GPU_EXPECTED", "limits.so"),
            (
                "HARNESS_GPU_LIMITS",
                r#"{"device":85899345920,"memory":25769803776,"faults":[],"latencies":[]}"#,
            ),
            ("HARNESS_GPU_LIMITS_LEDGER", "/ledger"),
            ("HARNESS_GPU_LIMITS_RUN", "/run/limits"),
            ("HARNESS_GPU_RUN", "/run"),
            ("HARNESS_GPU_SPARE", ""),
            ("LD_AUDIT", "/lib/limits.so:/mine.so"),
            ("PYTHONPATH", "/run/python"),
            ("PYTORCH_ALLOC_CONF", "a:b"),
            ("PYTORCH_CUDA_ALLOC_CONF", "a:b"),
        ]
        .map(|(name, value)| (name, value.to_owned())),
    );
    assert_eq!(set, expected);
    assert_eq!(visible(2, None), "2");
}

#[test]
fn the_error_for_a_missing_library_names_its_installers() {
    for (file, variable) in [(CORE, CORE_VARIABLE), (LIMITER, LIMITER_VARIABLE)] {
        let error = LaunchError::Missing { file, variable };
        let text = error.to_string();
        assert!(
            [
                "`ci/install`",
                "`ci/wheel`",
                "`cargo build --release`",
                variable
            ]
            .iter()
            .all(|name| text.contains(name)),
            "{text}"
        );
    }
}

#[test]
fn a_process_that_ends_while_its_files_are_read_does_not_lack_our_library() {
    let setup = setup(Path::new("/d"), &[], AUDIT);
    let watch = Watch {
        folder: RunFolder::new().unwrap(),
        libraries: setup.libraries,
        detector: Mutex::default(),
    };
    let nvidia = "7f0000000000-7f0000001000 r-xp 00000000 fe:00 42 /usr/lib/libcuda.so.1\n";
    let ours = format!("7f0000002000-7f0000003000 r-xp 00000000 fe:00 43 /d/{CORE}\n");
    let lacks = |reads: [&str; 2]| {
        let reads = Mutex::new(reads.into_iter());
        watch.lacks_ours_in(|| reads.lock().unwrap().next().unwrap().to_owned())
    };
    assert!(lacks([nvidia, nvidia]));
    assert!(!lacks([nvidia, ""]));
    assert!(!lacks([nvidia, &format!("{nvidia}{ours}")]));
    assert!(!lacks([&format!("{nvidia}{ours}"), nvidia]));
}
