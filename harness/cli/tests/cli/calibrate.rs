//! Calibration of a device with known costs, which is the simulated device with its virtual clock;
//! and the command on the simulated GPU, whose times do not apply to real GPUs.

use std::os::unix::{fs::PermissionsExt, process::CommandExt};
use std::path::{Path, PathBuf};
use std::{fs, ops::ControlFlow, process::Command};

use harness_allocator::device::sim::{CostModel, SimConfig, SimDevice};
use harness_allocator::device::{Clock, Device, TestDevice, limited::Limited};
use harness_allocator::units::{Bytes, Nanos};
use harness_base::date::Date;
use harness_devices::calibrate::{CalibrateError, calibrate};
use harness_devices::profile::{Figures, Profile, ProfileName, parse};
use harness_gpu_settings::settings::Settings;
use harness_record::Records;
use harness_staging::{Staging, strict};
use proptest::prelude::*;
use tempfile::TempDir;

fn device(cost: CostModel) -> SimDevice {
    let context_overhead = cost.context_overhead.value;
    SimDevice::new(SimConfig {
        total: Bytes::gib(16),
        context_overhead,
        cost,
        ..SimConfig::default()
    })
}

fn measured(device: &mut dyn TestDevice) -> Figures {
    calibrate(device, 3, |_, _| ControlFlow::Continue(())).unwrap()
}

fn profile_of(device: &mut dyn TestDevice) -> Profile {
    let figures = measured(device);
    let day: Date = "2026-11-20".to_owned().try_into().unwrap();
    Profile::new(
        ProfileName::of_device("Known costs"),
        day,
        device.info(),
        Vec::new(),
        figures,
    )
}

/// Returns the figures without names and sources.
fn values(cost: &CostModel) -> [u64; 15] {
    let CostModel {
        context_overhead,
        malloc,
        malloc_per_mib,
        free,
        free_per_mib,
        map_page,
        unmap_page,
        pool_call,
        ..
    } = cost;
    let CostModel {
        submit,
        stream_create,
        event_create,
        event_record,
        event_query,
        synchronize,
        transfer_per_gib,
        ..
    } = cost;
    [
        context_overhead.value.0,
        malloc.value.0,
        malloc_per_mib.value.0,
        free.value.0,
        free_per_mib.value.0,
        map_page.value.0,
        unmap_page.value.0,
        pool_call.value.0,
        submit.value.0,
        stream_create.value.0,
        event_create.value.0,
        event_record.value.0,
        event_query.value.0,
        synchronize.value.0,
        transfer_per_gib.value.0,
    ]
}

/// A cost model with times in the range of each field. Calls take less than 100 µs, so three calls
/// are shorter than the head start of a fill.
fn model(times: &[u64], transfer: u64) -> CostModel {
    let mut model = CostModel::PUBLISHED;
    let fields = [
        &mut model.malloc,
        &mut model.malloc_per_mib,
        &mut model.free,
        &mut model.free_per_mib,
        &mut model.map_page,
        &mut model.unmap_page,
        &mut model.pool_call,
        &mut model.submit,
        &mut model.stream_create,
        &mut model.event_create,
        &mut model.event_record,
        &mut model.event_query,
        &mut model.synchronize,
    ];
    for (field, time) in fields.into_iter().zip(times) {
        field.value = Nanos(*time);
    }
    model.transfer_per_gib.value = Nanos(transfer);
    model
}

#[test]
fn calibrating_the_simulated_device_returns_its_cost_model() {
    for cost in [CostModel::PUBLISHED, CostModel::FREE_OF_CHARGE] {
        let profile = profile_of(&mut device(cost.clone()));
        assert_eq!(
            values(&profile.cost_model()),
            values(&cost),
            "{}",
            cost.name
        );
        let yaml = profile.to_yaml();
        let errors = yaml.lines().filter(|line| line.contains("fit_error"));
        assert!(
            errors
                .clone()
                .all(|line| line.ends_with("fit_error: { median: 0, worst: 0 } }")),
            "{yaml}"
        );
        assert_eq!(errors.count(), 15);
        assert_eq!(
            parse::<Profile>(&yaml, Path::new("p.yaml")).unwrap(),
            profile
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_cost_model_is_found_again(
        times in prop::collection::vec(0_u64..100_000, 13), transfer in 0_u64..10_000_000
    ) {
        let cost = model(&times, transfer);
        let found = values(&profile_of(&mut device(cost.clone())).cost_model());
        let known = values(&cost);
        prop_assert_eq!(&found[..14], &known[..14]);
        // The device rounds each fill down to whole nanoseconds, so half a GiB is off by up to two
        // nanoseconds per GiB.
        prop_assert!(found[14].abs_diff(known[14]) <= 2, "{} instead of {}", found[14], known[14]);
    }
}

#[test]
fn a_device_with_a_profile_has_the_measured_costs() {
    let first = profile_of(&mut device(CostModel::PUBLISHED));
    let mut simulated = SimDevice::new(first.sim_config());
    assert_eq!(simulated.info().fingerprint.cost_model, Some(first.title()));
    let again = profile_of(&mut simulated);
    assert_eq!((again.figures, again.memory), (first.figures, first.memory));
}

#[test]
fn calibration_leaks_nothing() {
    let mut device = device(CostModel::PUBLISHED);
    let free = device.memory().unwrap().free;
    measured(&mut device);
    assert!(device.leaks().is_empty(), "{}", device.leaks());
    assert_eq!(device.memory().unwrap().free, free);
}

#[test]
fn a_device_with_too_little_memory_is_refused() {
    let mut small = Limited::new(Box::new(device(CostModel::PUBLISHED)), Bytes::mib(127)).unwrap();
    let error = calibrate(&mut small, 1, |_, _| ControlFlow::Continue(())).unwrap_err();
    assert_eq!(
        error,
        CalibrateError::TooSmall {
            free: Bytes::mib(127)
        }
    );
    let mut enough = Limited::new(Box::new(device(CostModel::PUBLISHED)), Bytes::mib(128)).unwrap();
    let figures = measured(&mut enough);
    assert_eq!(figures.malloc.value, CostModel::PUBLISHED.malloc.value.0);
}

#[test]
fn calibration_reports_each_round_and_can_be_stopped() {
    let mut rounds = Vec::new();
    let error = calibrate(&mut device(CostModel::PUBLISHED), 5, |done, all| {
        rounds.push((done, all));
        if done == 3 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    assert_eq!(
        (error, rounds),
        (
            Err(CalibrateError::Interrupted),
            vec![(1, 7), (2, 7), (3, 7)]
        )
    );
}

/// A folder and a machine.
struct World {
    folder: TempDir,
    staging: Staging,
}

/// A small GPU, because the simulated GPU really writes its memory.
fn small_gpu() -> Settings {
    Settings {
        memory: Bytes::mib(512),
        context_overhead: Bytes::mib(100),
        ..strict()
    }
}

const SCENARIO: &str = "about: One allocation.\nneeds: { memory: 64MiB }\nsteps:\n  - alloc: { \
     buffer: a, size: 2MiB }\n  - free: a\n";

impl World {
    fn with_gpu(config: &Settings) -> Self {
        let world = Self {
            folder: TempDir::new().unwrap(),
            staging: Staging::new(config).unwrap(),
        };
        fs::write(world.path("one.yaml"), SCENARIO).unwrap();
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the exit code, standard output and standard error.
    fn harness(&self, arguments: &str) -> (Option<i32>, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
        command
            .arg0("harness")
            .args(arguments.split(' '))
            .current_dir(self.folder.path())
            .env_remove("HARNESS_DEVICE")
            .env_remove("CARGO");
        self.staging.apply(&mut command);
        let output = command.output().unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stdout).unwrap(),
            String::from_utf8(output.stderr).unwrap(),
        )
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = entries.filter(|name| name != "one.yaml").collect();
        names.sort();
        names
    }
}

#[test]
fn the_simulated_device_uses_the_profile_of_a_calibrated_gpu() {
    let world = World::with_gpu(&small_gpu());
    let (code, out, err) = world.harness("calibrate --rounds 3");
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(
        out.ends_with("profile: scenarios/devices/simulated-gpu.yaml\n"),
        "{out}"
    );
    assert_eq!(
        err.lines().next(),
        Some("warning: the figures may be wrong: clocks were held down: power cap")
    );
    let profile = Profile::load(&world.path("scenarios/devices/simulated-gpu.yaml")).unwrap();
    assert_eq!(
        (profile.memory, profile.figures.context_overhead.value),
        (Bytes::mib(512), 100 << 20)
    );
    assert_eq!(
        (profile.device.as_str(), profile.driver.as_deref()),
        ("Simulated GPU", Some("simulated"))
    );
    assert_eq!(profile.figures.malloc.samples, 3 * 6, "2 MiB to 64 MiB");
    assert!(
        profile.figures.malloc.value > 0 && profile.figures.event_query.value > 0,
        "calls take time"
    );

    let (code, out, err) = world.harness(
        "run one.yaml --device sim --device-profile \
         scenarios/devices/simulated-gpu.yaml --report r",
    );
    assert_eq!(code, Some(0), "{out}{err}");
    let report = fs::read_to_string(world.path("r/report.md")).unwrap();
    assert!(report.contains(&profile.title()), "{report}");
    assert!(
        report.contains("measured on Simulated GPU, driver simulated"),
        "{report}"
    );
    let records: Records =
        serde_json::from_str(&fs::read_to_string(world.path("r/records.json")).unwrap()).unwrap();
    let device = &records.runs[0].device;
    assert_eq!(
        (device.clock, device.fingerprint.cost_model.as_ref()),
        (Clock::Simulated, Some(&profile.title()))
    );
    assert!(
        records.runs[0]
            .reproduce
            .contains(" --device sim --device-profile scenarios/devices/simulated-gpu.yaml ")
    );
}

#[test]
fn a_profile_omits_features_that_the_gpu_lacks() {
    let world = World::with_gpu(&Settings {
        mapping: false,
        pools: false,
        ..small_gpu()
    });
    let (code, out, err) =
        world.harness("calibrate --rounds 3 --quiet --output p.yaml --name plain");
    assert_eq!((code, out.as_str()), (Some(0), ""), "{err}");
    let profile = Profile::load(&world.path("p.yaml")).unwrap();
    assert_eq!(
        (
            profile.figures.map_page,
            profile.figures.unmap_page,
            profile.figures.pool_call
        ),
        (None, None, None)
    );
    assert!(
        profile.title().starts_with("plain measured "),
        "{}",
        profile.title()
    );
}

#[test]
fn calibration_requires_a_gpu() {
    let world = World::with_gpu(&Settings {
        devices: 0,
        ..strict()
    });
    let (code, _, err) = world.harness("calibrate --device sim");
    assert_eq!(code, Some(2), "{err}");
    assert!(
        err.contains("the simulated device cannot be measured"),
        "{err}"
    );
    for device in [
        "calibrate",
        "calibrate --device auto",
        "calibrate --device cuda:1",
    ] {
        let (code, _, err) = world.harness(device);
        assert_eq!(code, Some(3), "{err}");
        assert!(err.contains("sees no GPU"), "{err}");
    }
    assert_eq!(world.names(), Vec::<String>::new());
}

#[test]
fn a_broken_or_full_gpu_writes_no_profile() {
    for config in [
        small_gpu().failing("cuMemAlloc_v2", 9, 2),
        Settings {
            others: Bytes::mib(300),
            ..small_gpu()
        },
    ] {
        let world = World::with_gpu(&config);
        let (code, out, err) = world.harness("calibrate --rounds 3 --output p.yaml");
        assert_eq!(
            (code, world.names()),
            (Some(3), Vec::<String>::new()),
            "{out}{err}"
        );
    }
}

#[test]
fn a_profile_that_cannot_be_written_is_an_error_and_leaves_the_old_file() {
    let world = World::with_gpu(&small_gpu());
    fs::create_dir(world.path("p.yaml")).unwrap();
    let (code, _, err) = world.harness("calibrate --rounds 3 --output p.yaml");
    assert_eq!(
        (code, world.names()),
        (Some(2), vec!["p.yaml".to_owned()]),
        "{err}"
    );
    assert!(
        err.contains("'p.yaml' for '--output <FILE>': is a directory"),
        "{err}"
    );
}

#[test]
fn an_invalid_profile_is_refused_with_its_position_and_a_gpu_takes_none() {
    let world = World::with_gpu(&small_gpu());
    fs::write(world.path("bad.yaml"), "version: 1\nnme: x\n").unwrap();
    let told = [
        (
            "run one.yaml --device sim --device-profile bad.yaml",
            "bad.yaml:2:1: unknown field `nme`",
        ),
        (
            "run one.yaml --device sim --device-profile none.yaml",
            "none.yaml: there is no such file",
        ),
        (
            "run one.yaml --device cuda --device-profile bad.yaml",
            "a device profile is for the simulated device, but the device is cuda:0",
        ),
    ];
    for (arguments, sentence) in told {
        let (code, _, err) = world.harness(&format!("{arguments} --no-report"));
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains(sentence), "{err}");
    }
}

#[test]
fn workspaces_are_measured_by_a_python_with_torch() {
    let world = World::with_gpu(&small_gpu());
    let table = "operator\tinput_shapes\tdtypes\tbytes\nforward\t[[2, 64, 8, 8], [64, 64, 3, \
         3]]\ttorch.float32\t4096\n";
    fs::write(world.path("estimates.tsv"), table).unwrap();
    let python = world.path("python");
    fs::write(
        &python,
        "#!/bin/sh\n[ \"$1\" = -c ] && [ \"$4\" = 0 ] && sed s/4096/512/ \"$3\"\n",
    )
    .unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    let measure = |rest: &str| {
        world.harness(&format!(
            "calibrate --workspaces {rest} --python {}",
            python.display()
        ))
    };
    assert_eq!(
        measure("estimates.tsv"),
        (
            Some(0),
            "workspaces: measured.tsv\n".to_owned(),
            String::new()
        )
    );
    assert_eq!(
        fs::read_to_string(world.path("measured.tsv")).unwrap(),
        table.replace("4096", "512")
    );

    fs::write(
        world.path("broken.tsv"),
        table.replace("forward", "backward"),
    )
    .unwrap();
    let (code, _, err) = measure("broken.tsv");
    assert!(
        code == Some(2) && err.contains("broken.tsv:2:1: `backward` is not"),
        "{err}"
    );
    fs::write(&python, "#!/bin/sh\nexit 3\n").unwrap();
    let (code, _, err) = measure("estimates.tsv");
    assert!(
        code == Some(2) && err.contains("the measurement ended with exit status: 3"),
        "{err}"
    );
}
