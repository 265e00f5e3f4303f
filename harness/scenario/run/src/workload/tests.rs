#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;

use harness_allocator::allocator::{AllocatorKind, Request};
use harness_allocator::device::TestDevice;
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::units::Bytes;
use harness_record::Outcome;
use harness_scenario::Scenario;
use harness_scenario::steps::{Action, Step};

use super::*;
use crate::rig::{ProgramId, Rig, RigOptions, Stop};
use crate::{between::Between, context::RunContext, step_result::StepResult};

const STORM: &str = "storm: { id: s, operations: 200, sizes: { min: 1KiB, max: 1MiB }, live: 8MiB, \
     lifetime: { min: 5, max: 50 }, fill: true }";
const TRAIN: &str = "train: { id: t, parameters: 8MiB, layers: 4, activations_per_sample: 16MiB, \
     batch: 4, iterations: 10, expect: { caching: oom } }";

const INFER: &str = "infer: { id: i, layers: 2, kv_heads: 4, head_dim: 64, requests: 5, prompt: { \
     min: 10, max: 90 }, output: { min: 4, max: 9 } }";

fn scenario(step: &str) -> Scenario {
    scenario_in("256MiB", step)
}

pub(super) fn scenario_in(memory: &str, step: &str) -> Scenario {
    let text = format!("about: A test.\nneeds: {{ memory: {memory} }}\nsteps:\n  - {step}\n");
    Scenario::parse(&text, Path::new("test.yaml")).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn ctx(scenario: &Scenario) -> RunContext {
    context_on(
        Box::new(simulated(scenario)),
        scenario,
        &RigOptions::default(),
    )
}

/// A device with the memory that the scenario needs.
pub(super) fn simulated(scenario: &Scenario) -> SimDevice {
    let config = SimConfig::default();
    SimDevice::new(SimConfig {
        total: config.context_overhead + scenario.needs.memory,
        ..config
    })
}

pub(super) fn context_on(
    device: Box<dyn TestDevice>,
    scenario: &Scenario,
    options: &RigOptions,
) -> RunContext {
    let rig = Rig::new(device, AllocatorKind::Caching.build(), options).unwrap();
    let ctx = RunContext::new(rig, scenario, &AllocatorKind::Caching.into(), 1);
    ctx.unwrap_or_else(|failed| panic!("{failed:?}"))
}

fn run(ctx: &mut RunContext, step: &Step, between: Between<'_>) -> Result<StepResult, Stop> {
    match &step.action {
        Action::Storm(storm) => storm::run(ctx, step, storm, between),
        Action::Train(train) => train::run(ctx, step, train, between),
        Action::Infer(infer) => infer::run(ctx, step, infer, between),
        action => panic!("{action}"),
    }
}

#[test]
fn a_storm_calls_between_after_each_operation_and_does_the_same_without() {
    let scenario = scenario(STORM);
    let mut pauses = 0;
    let mut count = |_: &mut RunContext| {
        pauses += 1;
        Ok(())
    };
    let (mut with, mut without) = (ctx(&scenario), ctx(&scenario));
    let with = run(&mut with, &scenario.steps[0], Some(&mut count)).unwrap();
    let without = run(&mut without, &scenario.steps[0], None).unwrap();
    assert_eq!((pauses, with.reports), (200, without.reports));
}

#[test]
fn a_callback_between_operations_can_stop_a_workload() {
    for step in [STORM, TRAIN, INFER] {
        let scenario = scenario(step);
        let mut left = 3;
        let mut stop_at_third = |_: &mut RunContext| {
            left -= 1;
            if left == 0 {
                Err(Stop::Interrupted)
            } else {
                Ok(())
            }
        };
        let stopped = run(
            &mut ctx(&scenario),
            &scenario.steps[0],
            Some(&mut stop_at_third),
        );
        assert_eq!(
            (stopped.map(drop), left),
            (Err(Stop::Interrupted), 0),
            "{step}"
        );
    }
}

/// A failing iteration leaves nothing allocated, wherever it fails and whatever its plan is.
/// Neither does the training.
#[test]
fn a_training_frees_everything_wherever_it_fails() {
    let options = [
        "",
        "checkpoint_every: 2, ",
        "accumulate: 3, zero_grad: zero, ",
        "precision: mixed, optimizer: sgd, checkpoint_every: 3, accumulate: 2, ",
        "retain_graph: true, ",
        "on_oom: [ spill_to_host, { spill_to_host: { what: optimizer_state } } ], ",
        "checkpoint_every: 2, zero_grad: zero, on_oom: [ { spill_to_host: { memory: pageable } }, \
         split_and_accumulate ], ",
        "retain_graph: true, on_oom: { spill_to_host: { memory: mapped_file } }, ",
    ];
    for options in options {
        let mut ends = Vec::new();
        for memory in (24..220).step_by(7) {
            let step = format!(
                "train: {{ id: t, parameters: 8MiB, layers: 6, activations_per_sample: 12MiB, \
                 batch: 11, {options}iterations: 4, expect: any }}"
            );
            let scenario = scenario_in(&format!("{memory}MiB"), &step);
            let mut ctx = ctx(&scenario);
            let result = run(&mut ctx, &scenario.steps[0], None).unwrap();
            assert_eq!(
                ctx.rig.stats().allocated_bytes.all.current,
                0,
                "{options} in {memory} MiB"
            );
            assert_eq!(ctx.rig.take_findings(), [], "{options} in {memory} MiB");
            assert_eq!(
                result.reports[&harness_scenario::ReportKey::RetainedAfterOom],
                0,
                "{options} in {memory} MiB"
            );
            ends.push(result.outcome);
            ctx.rig.finish().unwrap();
        }
        assert!(ends.contains(&Outcome::OutOfMemory), "{options}: {ends:?}");
    }
}

/// The peak of allocated bytes of a training that spills these parts from the start.
fn peak_of(fields: &str, spilled: harness_scenario::Spilled) -> u64 {
    let text = format!(
        "about: A test.\nneeds: {{ memory: 16GiB }}\nsteps:\n  - train: {{ id: t, {fields} }}\n"
    );
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../scenarios/test.yaml");
    let scenario = Scenario::parse(&text, &path).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let Action::Train(train) = &scenario.steps[0].action else {
        panic!("{fields}")
    };
    let mut train = train.clone();
    train.plan.spilled = spilled;
    let mut ctx = ctx(&scenario);
    train::run(&mut ctx, &scenario.steps[0], &train, None).unwrap();
    assert_eq!(ctx.rig.take_findings(), [], "{fields}");
    // The end of a run allocates all free memory, so the peak is read first.
    let peak = ctx.rig.stats().allocated_bytes.all.peak;
    ctx.rig.finish().unwrap();
    peak
}

/// The expected values are `torch.cuda.max_memory_allocated()` in MiB for the same models. They
/// were measured with PyTorch 2.11 on a simulated H100, with and without `save_on_cpu`, over two
/// iterations with SGD. Pinned and pageable memory gave the same values.
#[test]
fn with_saved_activations_on_the_host_the_peak_matches_pytorch() {
    use harness_scenario::{Spilled, SpilledPart};
    let on_host = Spilled::from([(
        SpilledPart::Activations,
        harness_allocator::device::HostMemory::Pinned,
    )]);
    // The programs sum the outputs of the MLPs. The gradients of that sum take one or two
    // activations of 64 MiB, which the models without a loss omit: an eighth of the smallest total.
    for (model, batch, plain, saved, most) in [
        ("mlp_8x2048", 16384, 1509.1, 833.1, 0.1),
        ("mlp_16x1024", 16384, 2373.1, 509.1, 0.13),
        ("gpt2", 4, 5304.6, 2898.5, 0.1),
    ] {
        for (spilled, pytorch) in [(Spilled::new(), plain), (on_host.clone(), saved)] {
            let fields = format!(
                "model: models/{model}.yaml, batch: {batch}, iterations: 2, optimizer: sgd"
            );
            let ours = peak_of(&fields, spilled.clone()) as f64 / (1 << 20) as f64;
            let off = ours / pytorch - 1.0;
            println!(
                "{model} {spilled:?}: {ours:.1} MiB, PyTorch {pytorch} MiB, {:+.1} %",
                off * 100.0
            );
            assert!(
                off.abs() < most,
                "{model} {spilled:?}: {ours:.1} MiB instead of {pytorch} MiB"
            );
        }
    }
}

const DEEP: &str =
    "parameters: 64MiB, layers: 8, activations_per_sample: 8MiB, batch: 64, iterations: 3";

/// There are 8 layers of 64 MiB. In the forward pass, the device holds a layer's input and output.
/// In the backward pass, it holds a fetched activation and its gradient, and then the gradients of
/// all parameters.
#[test]
fn with_saved_activations_on_the_host_one_layer_is_on_the_device() {
    use harness_allocator::device::HostMemory;
    use harness_scenario::{Spilled, SpilledPart};
    let mib = |bytes: u64| bytes >> 20;
    let spilled = |part, memory: HostMemory| Spilled::from([(part, memory)]);
    assert_eq!(mib(peak_of(DEEP, Spilled::new())), 192 + 512 + 64 + 8);
    for memory in [
        HostMemory::Pinned,
        HostMemory::Pageable,
        HostMemory::MappedFile { folder: None },
    ] {
        assert_eq!(
            mib(peak_of(
                DEEP,
                spilled(SpilledPart::Activations, memory.clone())
            )),
            192 + 64 + 64 + 64,
            "{memory}"
        );
        assert_eq!(
            mib(peak_of(
                &format!("{DEEP}, checkpoint_every: 2"),
                spilled(SpilledPart::Activations, memory.clone())
            )),
            192 + 3 * 64 + 64 + 5 * 8
        );
        assert_eq!(
            mib(peak_of(
                &DEEP.replace("batch: 64", "batch: 128"),
                spilled(SpilledPart::Activations, memory)
            )),
            192 + 128 + 128 + 64
        );
    }
    // The state is spilled before the first forward pass, so only its creation peaks on the device.
    let state = spilled(SpilledPart::OptimizerState, HostMemory::Pinned);
    assert_eq!(mib(peak_of(DEEP, state)), 64 + 512 + 64 + 8);
}

#[test]
fn cache_growth_and_evictions_do_not_change_the_served_requests() {
    let served = |memory: &str, fields: &str| {
        let step = format!(
            "infer: {{ id: i, layers: 4, kv_heads: 8, head_dim: 64, requests: 20, prompt: {{ min: \
             50, max: 400 }}, output: {{ min: 5, max: 50 }}{fields} }}"
        );
        let scenario = scenario_in(memory, &step);
        let mut ctx = ctx(&scenario);
        let result = run(&mut ctx, &scenario.steps[0], None).unwrap();
        assert_eq!(ctx.rig.stats().allocated_bytes.all.current, 0);
        ctx.rig.finish().unwrap();
        use harness_scenario::ReportKey::{Evicted, PeakRunning, RecomputedTokens, Served};
        [Served, Evicted, PeakRunning, RecomputedTokens].map(|key| result.reports[&key])
    };
    assert_eq!(served("256MiB", ""), [20, 0, 20, 0]);
    assert_eq!(
        served("256MiB", ", page: 16, max_running: 7"),
        [20, 0, 7, 0]
    );
    let [done, evicted, running, again] = served("24MiB", ", page: 16");
    assert!(
        done == 20 && evicted > 0 && running < 20 && again >= evicted * 50,
        "{done} {evicted} {running} {again}"
    );
}

/// Another program takes more memory after each iteration, until the training runs out.
#[test]
fn another_program_can_grow_while_a_training_runs() {
    let scenario = scenario(TRAIN);
    let mut ctx = ctx(&scenario);
    let other = ctx.rig.add_program(AllocatorKind::Caching.build());
    let (mut held, mut live) = (Vec::new(), Vec::new());
    let mut grow = |ctx: &mut RunContext| {
        live.push(ctx.rig.stats().allocated_bytes.all.current);
        ctx.rig.empty_cache()?;
        ctx.rig.enter(other);
        held.extend(ctx.rig.allocate(Request::new(Bytes::mib(48)))?.ok());
        ctx.rig.enter(ProgramId::FIRST);
        Ok(())
    };
    let result = run(&mut ctx, &scenario.steps[0], Some(&mut grow)).unwrap();
    assert_eq!(result.outcome, Outcome::OutOfMemory);
    assert!(
        live.len() < 10 && live.iter().all(|bytes| *bytes == live[0] && *bytes > 0),
        "only parameters and optimizer state: {live:?}"
    );
    let failed_request = result.failed_request.unwrap();
    let others: Bytes = held.iter().map(crate::rig::Buffer::size).sum();
    assert_eq!(failed_request.accounts.device.external_memory, others);
    held.into_iter()
        .for_each(|buffer| ctx.rig.free(buffer).unwrap());
    ctx.rig.finish().unwrap();
}
