use std::collections::BTreeSet;

use super::*;
use crate::text::{of_variable, to_variable};

/// The size in a name, in GiB: `rtx4090-24` and `a100-40-1g.5gb` end with it.
fn nominal(name: &str) -> u64 {
    let size = name.rsplit(['-', '.']).next().unwrap_or_default();
    size.trim_end_matches("gb")
        .parse()
        .expect("the name ends with a size")
}

#[test]
fn every_row_is_a_plausible_gpu() {
    assert_eq!(
        GPUS.len(),
        rows().count(),
        "a row of gpus.tsv cannot be read: {:?}",
        rows().find(|row| of_row(row).is_none())
    );
    assert!(GPUS.len() >= 40);
    let distinct = |field: fn(&Gpu) -> &str| GPUS.iter().map(field).collect::<BTreeSet<_>>().len();
    assert_eq!(distinct(|gpu| &gpu.name), GPUS.len(), "names are unique");
    assert!(
        distinct(|gpu| &gpu.device) > 80,
        "Jetson modules share names, other GPUs do not"
    );
    for gpu in GPUS.iter() {
        let Gpu {
            name,
            device,
            memory,
            capability,
            multiprocessors,
            l2_cache,
            source,
            ..
        } = gpu;
        assert!(
            name.chars()
                .all(|character| matches!(character, 'a'..='z' | '0'..='9' | '-' | '.')),
            "{name}"
        );
        assert!(Gpu::has_limits(*capability), "{name}: {capability:?}");
        let share = memory.get() as f64 / Bytes::gib(nominal(name)).get() as f64;
        assert!(
            (0.85..1.0).contains(&share),
            "{name}: {memory} is {share} of its nominal size"
        );
        assert!((4..=188).contains(multiprocessors), "{name}");
        assert!((512 << 10..=128 << 20).contains(l2_cache), "{name}");
        assert!(!source.is_empty() && device.len() < 256, "{name}");
        assert!(
            gpu.pcie
                .is_none_or(|generation| (3..=5).contains(&generation)),
            "{name}"
        );
        let parent = name
            .rsplit_once('-')
            .and_then(|(parent, _)| GPUS.iter().find(|gpu| gpu.name == parent));
        if let Some(parent) = parent {
            assert!(
                memory <= &parent.memory
                    && *multiprocessors <= parent.multiprocessors
                    && *l2_cache <= parent.l2_cache,
                "{name}"
            );
            assert!(
                device.starts_with(&parent.device) && *capability == parent.capability,
                "{name}"
            );
        }
        assert_eq!(name.ends_with("gb"), device.contains(" MIG "), "{name}");
        assert_eq!(name.ends_with("gb"), parent.is_some(), "{name}");
    }
}

#[test]
fn professional_gpus_reach_each_others_memory_and_a_file_may_say_otherwise() {
    let reaches = |name| {
        Gpu::named(name)
            .expect("it ships with the program")
            .reaches_peers()
    };
    let professional = [
        "t4-16",
        "a40-48",
        "a100-pcie-80",
        "h100-80",
        "rtxa6000-48",
        "rtx6000ada-48",
        "b200-180",
    ];
    assert_eq!(professional.map(reaches), [true; 7]);
    assert_eq!(
        ["rtx3090-24", "rtx4090-24", "gb10-128", "a100-40-1g.5gb"].map(reaches),
        [false; 4]
    );
    let with_bridge = Gpu {
        peer_access: Some(true),
        ..Gpu::named("rtx3090-24")
            .expect("it ships with the program")
            .clone()
    };
    assert!(with_bridge.reaches_peers());
}

#[test]
fn gpus_of_systems_on_a_chip_share_the_hosts_memory_and_a_file_may_say_otherwise() {
    for gpu in GPUS.iter() {
        let is_of_system = gpu.name.starts_with("jetson-") || gpu.name == "gb10-128";
        assert_eq!(gpu.has_memory_of_host(), is_of_system, "{}", gpu.name);
    }
    let own = Gpu {
        shares_host_memory: Some(false),
        ..Gpu::named("gb10-128")
            .expect("it ships with the program")
            .clone()
    };
    assert!(!own.has_memory_of_host());
}

#[test]
fn a_variable_carries_a_gpu_by_name_or_with_its_properties() {
    let shipped = Gpu::named("rtx4090-24").expect("it ships with the program");
    assert_eq!(to_variable(&shipped), "\"rtx4090-24\"");
    let own: &Gpu = Gpu {
        memory: Bytes::gib(20),
        ..shipped.clone()
    }
    .leak();
    assert_eq!(of_variable::<&Gpu>(&to_variable(&own)), Ok(own));
    assert_eq!(
        of_variable::<&Gpu>("\"rtx4090-25\"").map_err(|error| error.to_string()),
        Err("`rtx4090-25` is not a GPU".to_owned())
    );
}

#[test]
fn a_gpu_is_found_by_its_name_its_aliases_and_unique_beginnings() {
    let found = |text: &str| Gpu::named(text).map(|gpu| &*gpu.name);
    for (text, name) in [
        ("h100-80", "h100-80"),
        ("h100", "h100-80"),
        ("H100", "h100-80"),
        ("h100-pcie", "h100-pcie-80"),
        ("h100-n", "h100-nvl-94"),
        ("h200", "h200-141"),
        ("rtx4090", "rtx4090-24"),
        ("RTX 4090", "rtx4090-24"),
        ("4090", "rtx4090-24"),
        ("3090 Ti", "rtx3090ti-24"),
        ("a6000", "rtxa6000-48"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24"),
        ("NVIDIA H100 80GB HBM3", "h100-80"),
        ("A100-80GB", "a100-80"),
        ("a100-40gb", "a100-40"),
        ("H100 PCIe 80GB", "h100-pcie-80"),
    ] {
        assert_eq!(found(text), Some(name), "{text}");
    }
    for text in [
        "", "-", "a100", "a100-8", "rtx", "nvidia", "h101", "409", "90",
    ] {
        assert_eq!(found(text), None, "{text}");
    }
    for gpu in &*GPUS {
        for alias in gpu.aliases() {
            assert_eq!(found(&alias), Some(&*gpu.name), "{alias}");
        }
    }
}
