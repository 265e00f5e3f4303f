//! Calibration against a device whose costs are known: the simulated one, by its virtual clock.

#![allow(clippy::unwrap_used)]

use std::ops::ControlFlow;
use std::path::Path;

use harness::calibrate::{CalibrateError, calibrate};
use harness::date::Date;
use harness::profile::{Figures, Profile, ProfileName};
use harness_allocator::device::Device;
use harness_allocator::device::limited::Limited;
use harness_allocator::device::sim::{CostModel, SimConfig, SimDevice};
use harness_allocator::units::{Bytes, Nanos};
use proptest::prelude::*;

fn device(cost: CostModel) -> SimDevice {
    let context_overhead = cost.context_overhead.value;
    SimDevice::new(SimConfig { total: Bytes::gib(16), context_overhead, cost, ..SimConfig::default() })
}

fn measured(device: &mut dyn Device) -> Figures {
    calibrate(device, 3, |_, _| ControlFlow::Continue(())).unwrap()
}

fn profile_of(device: &mut dyn Device) -> Profile {
    let figures = measured(device);
    let day: Date = "2026-11-20".to_owned().try_into().unwrap();
    Profile::new(ProfileName::of_device("Known costs"), day, device.info(), Vec::new(), figures)
}

/// The figures without names and sources.
fn values(cost: &CostModel) -> [u64; 15] {
    let CostModel { context_overhead, malloc, malloc_per_mib, free, free_per_mib, map_page, unmap_page, pool_call, .. } = cost;
    let CostModel { submit, stream_create, event_create, event_record, event_query, synchronize, transfer_per_gib, .. } = cost;
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

/// A cost model of such times, each with what its field allows: calls below 100 µs, so that three of them are shorter than the head start
/// of a fill.
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
fn calibrating_the_simulated_device_gives_its_cost_model_back() {
    for cost in [CostModel::PUBLISHED, CostModel::FREE_OF_CHARGE] {
        let profile = profile_of(&mut device(cost.clone()));
        assert_eq!(values(&profile.cost_model()), values(&cost), "{}", cost.name);
        let yaml = profile.to_yaml();
        let errors = yaml.lines().filter(|line| line.contains("fit_error"));
        assert!(errors.clone().all(|line| line.ends_with("fit_error: { median: 0, worst: 0 } }")), "{yaml}");
        assert_eq!(errors.count(), 15);
        assert_eq!(Profile::parse(&yaml, Path::new("p.yaml")).unwrap(), profile);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_cost_model_is_found_again(times in prop::collection::vec(0_u64..100_000, 13), transfer in 0_u64..10_000_000) {
        let cost = model(&times, transfer);
        let found = values(&profile_of(&mut device(cost.clone())).cost_model());
        let known = values(&cost);
        prop_assert_eq!(&found[..14], &known[..14]);
        // The device rounds each fill down to whole nanoseconds: one of half a GiB by up to two for each GiB.
        prop_assert!(found[14].abs_diff(known[14]) <= 2, "{} instead of {}", found[14], known[14]);
    }
}

#[test]
fn a_device_that_runs_on_a_profile_has_the_costs_of_the_one_that_was_measured() {
    let first = profile_of(&mut device(CostModel::PUBLISHED));
    let mut simulated = SimDevice::new(first.sim_config());
    assert_eq!(simulated.info().fingerprint.cost_model, Some(first.title()));
    let again = profile_of(&mut simulated);
    assert_eq!((again.figures, again.memory), (first.figures, first.memory));
}

#[test]
fn everything_is_given_back() {
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
    assert_eq!(error, CalibrateError::TooSmall { free: Bytes::mib(127) });
    let mut enough = Limited::new(Box::new(device(CostModel::PUBLISHED)), Bytes::mib(128)).unwrap();
    let figures = measured(&mut enough);
    assert_eq!(figures.malloc.value, CostModel::PUBLISHED.malloc.value.0);
}

#[test]
fn calibration_stops_where_the_user_wants_it_and_tells_each_round() {
    let mut rounds = Vec::new();
    let error = calibrate(&mut device(CostModel::PUBLISHED), 5, |done, all| {
        rounds.push((done, all));
        if done == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert_eq!((error, rounds), (Err(CalibrateError::Interrupted), vec![(1, 7), (2, 7), (3, 7)]));
}
