#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

/// Invented figures for these tests.
fn figures() -> Figures {
    let error = FitError {
        median: Share::of(0.03),
        worst: Share::of(0.2),
    };
    fn figure<U: UnitText>(value: u64, error: FitError) -> MeasuredFigure<U> {
        MeasuredFigure::new(value, 21, Spread::of(1.5), error)
    }
    Figures {
        context_overhead: MeasuredFigure::exact(500 << 20),
        malloc: figure(1, error),
        malloc_per_mib: figure(2, error),
        free: figure(3, error),
        free_per_mib: figure(4, error),
        map_page: Some(figure(5, error)),
        unmap_page: Some(figure(6, error)),
        pool_call: Some(figure(7, error)),
        submit: figure(8, error),
        stream_create: figure(9, error),
        event_create: figure(10, error),
        event_record: figure(11, error),
        event_query: figure(12, error),
        synchronize: figure(13, error),
        transfer_per_gib: figure(14, error),
    }
}

fn profile() -> Profile {
    Profile {
        version: Version,
        name: ProfileName::of_device("Test GPU"),
        measured: "2026-11-20".to_owned().try_into().unwrap(),
        harness: "0.1.0".to_owned(),
        device: "Test GPU".to_owned(),
        memory: Bytes::gib(3),
        driver: Some("1.2.3".to_owned()),
        cuda: None,
        contended: vec!["1 other process held memory of the GPU (a \"b\" c, 64 MiB)".to_owned()],
        figures: figures(),
    }
}

fn refusal(text: &str) -> String {
    parse::<Profile>(text, Path::new("p.yaml"))
        .unwrap_err()
        .to_string()
}

#[test]
fn a_profile_round_trips() {
    for profile in [
        profile(),
        Profile {
            figures: Figures {
                map_page: None,
                pool_call: None,
                ..figures()
            },
            contended: vec![],
            ..profile()
        },
    ] {
        assert_eq!(
            parse::<Profile>(&profile.to_yaml(), Path::new("p.yaml")).unwrap(),
            profile
        );
    }
}

proptest! {
    #[test]
    fn any_texts_and_figures_are_read_back(
        device in ".*",
        driver in prop::option::of(".*"),
        value in any::<u64>(),
        spread in any::<f64>(),
        median in 0.0..1e6,
    ) {
        let figure = MeasuredFigure::new(
            value,
            value,
            Spread::of(spread),
            FitError { median: Share::of(median), worst: Share::of(spread) },
        );
        let profile = Profile {
            device,
            driver,
            figures: Figures { malloc: figure, ..figures() },
            ..profile()
        };
        prop_assert_eq!(
            parse::<Profile>(&profile.to_yaml(), Path::new("p.yaml")).unwrap(),
            profile
        );
    }
}

#[test]
fn the_simulated_device_uses_and_cites_the_measured_costs() {
    let config = profile().sim_config();
    assert_eq!(
        (config.total, config.context_overhead),
        (Bytes::gib(3), Bytes::mib(500))
    );
    let cost = config.cost;
    assert!(
        cost.name.starts_with("test-gpu measured 2026-11-20 ("),
        "{}",
        cost.name
    );
    assert_eq!(
        cost.malloc.source,
        "measured on Test GPU, driver 1.2.3, 2026-11-20, fit error 3 %"
    );
    let times = [
        &cost.malloc,
        &cost.malloc_per_mib,
        &cost.free,
        &cost.free_per_mib,
        &cost.map_page,
        &cost.unmap_page,
        &cost.pool_call,
    ];
    assert_eq!(times.map(|figure| figure.value.0), [1, 2, 3, 4, 5, 6, 7]);
    let times = [
        &cost.submit,
        &cost.stream_create,
        &cost.event_create,
        &cost.event_record,
        &cost.event_query,
        &cost.synchronize,
    ];
    assert_eq!(times.map(|figure| figure.value.0), [8, 9, 10, 11, 12, 13]);
    assert_eq!(cost.transfer_per_gib.value.0, 14);
}

#[test]
fn unmeasured_costs_take_published_values() {
    let cost = Profile {
        figures: Figures {
            map_page: None,
            ..figures()
        },
        ..profile()
    }
    .cost_model();
    assert_eq!(cost.map_page, CostModel::PUBLISHED.map_page);
    assert_ne!(cost.unmap_page, CostModel::PUBLISHED.unmap_page);
}

#[test]
fn different_figures_have_different_titles() {
    let other = Profile {
        figures: Figures {
            malloc: MeasuredFigure::exact(77),
            ..figures()
        },
        ..profile()
    };
    assert_ne!(profile().title(), other.title());
    assert_eq!(
        profile().title(),
        Profile {
            contended: vec![],
            ..profile()
        }
        .title()
    );
}

#[test]
fn errors_have_a_position() {
    let good = profile().to_yaml();
    let with = |from: &str, to: &str| {
        assert!(good.contains(from), "{from}");
        refusal(&good.replacen(from, to, 1))
    };
    let errors = [
        with("version: 1", "version: 2"),
        with("harness:", "harnes:"),
        with("2026-11-20", "2026-11-31"),
        with("\"test-gpu\"", "\"../x\""),
        with(
            "malloc: { value: 1, unit: ns,",
            "malloc: { value: 1, unit: us,",
        ),
        with("value: 1,", "value: -1,"),
        with("spread: 1.5", "spread: .nan"),
        with("  malloc_per_mib:", "  # malloc_per_mib:"),
        with("device:", "device"),
        refusal(""),
    ];
    insta::assert_snapshot!(errors.join("\n"));
}

#[test]
fn names_are_derived_from_devices() {
    for (device, name) in [
        ("NVIDIA H200", "nvidia-h200"),
        (
            "NVIDIA RTX PRO 6000 (Blackwell)",
            "nvidia-rtx-pro-6000-blackwell",
        ),
        ("", "unnamed"),
    ] {
        assert_eq!(ProfileName::of_device(device).to_string(), name);
        assert!(name.parse::<ProfileName>().is_ok());
    }
    for name in ["", "-a", ".a", "a b", "a/b", "ä"] {
        assert!(name.parse::<ProfileName>().is_err(), "{name}");
    }
}
