#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;

use harness_allocator::allocator::AllocatorKind;
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_record::{Invariant, Outcome};
use harness_scenario::{ReportKey, Scenario, steps::Action};

use crate::rig::{Rig, RigOptions};
use crate::{context::RunContext, step_result::StepResult, workload::train};

/// Trains on three ranks with 128 MiB each; rank 1 has `less` MiB less. Checks that everything is
/// freed. Returns the result and whether the ranks hung.
fn trained(less: u64, options: &str, ranks: &str) -> (StepResult, bool) {
    let text = format!(
        "about: A test.\nneeds: {{ memory: 384MiB }}\nsteps:\n  - train: {{ id: t, parameters: \
         12MiB, layers: 6, activations_per_sample: 3MiB, batch: 12, iterations: 3, expect: any, \
         {options}, ranks: {{ count: 3, memory: 128MiB, memory_override: {{ 1: {}MiB }}, {ranks} \
         }} }}\n",
        128 - less
    );
    let scenario = Scenario::parse(&text, Path::new("test.yaml"))
        .unwrap_or_else(|error| panic!("{error}\n{text}"));
    let config = SimConfig::default();
    let config = SimConfig {
        total: config.context_overhead + scenario.needs.memory,
        ..config
    };
    let rig = Rig::new(
        Box::new(SimDevice::new(config)),
        AllocatorKind::Caching.build(),
        &RigOptions::default(),
    )
    .unwrap();
    let mut ctx = RunContext::new(rig, &scenario, &AllocatorKind::Caching.into(), 1).unwrap();
    let Action::Train(training) = &scenario.steps[0].action else {
        panic!("{text}")
    };
    let result = train::run(&mut ctx, &scenario.steps[0], training, None)
        .unwrap_or_else(|stop| panic!("{stop:?}: {text}"));
    for program in ctx.rig.programs() {
        assert_eq!(
            ctx.rig.stats_of(program).allocated_bytes.all.current,
            0,
            "{program:?}: {text}"
        );
    }
    let findings = ctx.rig.take_findings();
    assert!(
        findings
            .iter()
            .all(|finding| finding.invariant == Invariant::CollectivesMatch),
        "{findings:?}: {text}"
    );
    ctx.rig.finish().unwrap();
    (result, !findings.is_empty())
}

const POLICIES: [&str; 3] = [
    "on_oom: { halve_batch: { retries: 4 } }",
    "on_oom: split_and_accumulate",
    "zero_grad: zero, optimizer: momentum",
];

#[test]
fn a_failing_rank_frees_everything_and_a_failure_without_agreement_hangs() {
    for reduce in ["ddp", "hooks", "after_backward"] {
        for agree in [false, true] {
            let (mut hangs, mut ends) = (0, Vec::new());
            for (less, policy) in (1..126)
                .step_by(7)
                .flat_map(|less| POLICIES.map(|policy| (less, policy)))
            {
                let (result, hangs_now) = trained(
                    less,
                    policy,
                    &format!("reduce: {reduce}, sync_batch: {agree}"),
                );
                assert_eq!(hangs_now, result.outcome == Outcome::Failed);
                hangs += u32::from(hangs_now);
                ends.push(result.outcome);
            }
            assert!(
                ends.contains(&Outcome::Fits { retries: 0 }) && hangs > 0,
                "{reduce}, sync_batch: {agree}: {ends:?}"
            );
        }
    }
}

/// After the backward pass, nothing can fail: an optimizer with state allocates nothing.
#[test]
fn ranks_that_agree_after_the_backward_pass_never_hang() {
    let mut recovered = 0;
    for (less, policy) in (1..80)
        .step_by(4)
        .flat_map(|less| POLICIES.map(|policy| (less, policy)))
    {
        let (result, hangs) = trained(less, policy, "reduce: after_backward, sync_batch: true");
        assert!(!hangs, "{less} MiB less, {policy}: {:?}", result.notes);
        assert_eq!(result.reports[&ReportKey::UnequalBatches], 0);
        recovered += u32::from(matches!(result.outcome, Outcome::Fits { retries: 1.. }));
    }
    assert!(recovered > 0);
}

#[test]
fn ranks_with_equal_memory_behave_equally() {
    for ranks in [
        "sync_batch: false",
        "sync_batch: true",
        "reduce: hooks",
        "reduce: after_backward",
    ] {
        let (result, hangs) = trained(1, "optimizer: sgd", ranks);
        let of = |row: usize, column: usize| result.tables[0].rows[row][column].clone();
        assert!(
            !hangs
                && (2..8)
                    .all(|column| of(0, column) == of(2, column) && of(0, column) == of(1, column)),
            "{ranks}: {:?}",
            result.tables
        );
    }
}
