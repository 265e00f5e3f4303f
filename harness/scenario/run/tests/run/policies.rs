//! Recovery policies in whole runs: the effect of each policy between attempts, the order within a
//! chain, and the record.

use std::{path::Path, sync::Arc};

use harness_allocator::allocator::AllocatorKind;
use harness_devices::DeviceSource;
use harness_record::{Outcome, Recovery, RunRecord, Verdict};
use harness_report::text::step_table;
use harness_run::session::{ArmRun, Plan, Selection};
use harness_scenario::Scenario;

/// The steps begin at line 6.
fn passes(steps: &str) -> RunRecord {
    passes_with("programs: [other]", steps)
}

/// The same with another line before the steps.
fn passes_with(line: &str, steps: &str) -> RunRecord {
    let text = format!(
        "about: A test.\nneeds: {{ memory: 64MiB }}\nstreams: [side]\n{line}\nsteps:\n{steps}\n"
    );
    let scenario = Scenario::parse(&text, Path::new("test.yaml"))
        .unwrap_or_else(|error| panic!("{error}\n{text}"));
    let (selection, program) = (Selection::default(), "harness".to_owned());
    let plan = Plan {
        scenarios: vec![scenario.clone()],
        selection,
        seed: None,
        memory: None,
        repetitions: 1,
        audit: true,
        fail_fast: false,
        program,
    };
    let arm = ArmRun {
        scenario: &scenario,
        allocator: &AllocatorKind::Caching.into(),
        repetition: 0,
    };
    let run = plan
        .run_arm(&arm, &DeviceSource::simulated(), &Arc::default())
        .unwrap();
    assert_eq!(run.verdict, Verdict::Passed, "{}", step_table(&run));
    run
}

/// The record of the only step with policies.
fn recovery(run: &RunRecord) -> &Recovery {
    let mut all = run.steps.iter().filter_map(|step| step.recovery.as_ref());
    let recovery = all.next().unwrap();
    assert!(all.next().is_none());
    recovery
}

/// The request of each attempt, and the action after it.
fn tries(run: &RunRecord) -> Vec<(&str, Option<&str>)> {
    recovery(run)
        .listed
        .iter()
        .map(|attempt| (attempt.asked.as_str(), attempt.then.as_deref()))
        .collect()
}

fn training(batch: u64, iterations: u64, policies: &str, expect: &str) -> String {
    format!(
        "  - train: {{ id: t, parameters: 2MiB, layers: 4, activations_per_sample: 1MiB, batch: \
         {batch}, iterations: {iterations}, expect: {expect}, on_oom: {policies} }}"
    )
}

#[test]
fn giving_up_is_one_try() {
    let run = passes(
        "  - alloc: { buffer: w, size: 40MiB }\n  - alloc: { buffer: x, size: 30MiB, expect: oom, \
         on_oom: give_up, id: x }\n  - expect: x.attempts == 1",
    );
    assert_eq!(tries(&run), [("30 MiB", None)]);
    assert!(
        recovery(&run).listed[0]
            .failed
            .as_ref()
            .unwrap()
            .contains("out of memory")
    );
}

#[test]
fn evicting_frees_the_least_recently_used_buffers_until_it_fits() {
    let run = passes(
        "  - for: { i: 1..4 }
    steps:
      - alloc: { buffer: \"kv[i]\", size: 10MiB }
      - fill: \"kv[i]\"
  - alloc: { buffer: w, size: 10MiB }
  - read_async: \"kv[1]\"
  - alloc: { buffer: x, size: 40MiB, on_oom: [ { evict: { buffers: [kv, w] } } , give_up ], id: x }
  - expect: [ x.retries == 3, allocated == 60MiB, x.retained_after_oom == 0 ]
  - free: kv
  - free: w",
    );
    let then: Vec<Option<&str>> = tries(&run).into_iter().map(|(_, then)| then).collect();
    assert_eq!(
        then,
        [
            Some("evict kv[2]"),
            Some("evict kv[3]"),
            Some("evict kv[4]"),
            None
        ]
    );
}

#[test]
fn a_chain_skips_policies_without_anything_to_do() {
    let run = passes(
        "  - alloc: { buffer: w, size: 20MiB }
  - alloc: { buffer: v, size: 20MiB }
  - alloc: { buffer: x, size: 30MiB, on_oom: [ empty_cache, { free: { buffers: [v] } } ], id: x }
  - expect: [ x.retries == 1, x.given_back == 0 ]
  - free: v",
    );
    assert_eq!(tries(&run), [("30 MiB", Some("free v")), ("30 MiB", None)]);
}

#[test]
fn a_chain_that_is_at_its_end_ends_in_the_failure() {
    let run = passes(&training(
        64,
        1,
        "[ { shrink_batch: { floor: 60 } }, { halve_batch: { floor: 59 } } ]",
        "oom",
    ));
    let asked: Vec<&str> = tries(&run).into_iter().map(|(asked, _)| asked).collect();
    assert_eq!(asked, ["a batch of 64", "a batch of 60", "a batch of 59"]);
}

#[test]
fn shrinking_goes_down_by_a_tenth_until_it_fits() {
    let run = passes(&training(64, 3, "shrink_batch", "fits"));
    let recovery = recovery(&run);
    let trained = recovery.trained.as_ref().unwrap();
    assert_eq!(
        tries(&run)[..3],
        [
            ("a batch of 64", Some("shrink_batch")),
            ("a batch of 57", Some("shrink_batch")),
            ("a batch of 51", Some("shrink_batch"))
        ]
    );
    assert_eq!(
        (recovery.attempts, recovery.retained.0),
        (recovery.retries + 3, 0)
    );
    assert_eq!(trained.samples, 3 * trained.effective_batch);
}

#[test]
fn bisecting_ends_at_the_largest_batch_that_fits_and_stays_there() {
    let batch = |policies: &str| {
        recovery(&passes(&training(64, 20, policies, "fits")))
            .trained
            .clone()
            .unwrap()
            .final_batch
    };
    let (bisected, shrunk, halved) = (
        batch("bisect_batch"),
        batch("shrink_batch"),
        batch("{ halve_batch: { retries: 9 } }"),
    );
    assert!(
        bisected >= shrunk && shrunk >= halved,
        "{bisected} {shrunk} {halved}"
    );
    let one_more = passes(&training(bisected + 1, 1, "give_up", "oom"));
    assert_eq!(one_more.steps[0].outcome, Outcome::OutOfMemory);
}

#[test]
fn scaling_doubles_from_two_until_a_batch_fails_and_goes_on_with_half_of_it() {
    let run = passes(&training(10, 30, "scale_batch", "fits"));
    let found = recovery(&run).trained.as_ref().unwrap().final_batch;
    let failed: Vec<&str> = tries(&run)
        .into_iter()
        .filter(|(_, then)| then.is_some())
        .map(|(asked, _)| asked)
        .collect();
    assert_eq!(failed, [format!("a batch of {}", 2 * found)]);
    assert!(found.is_power_of_two() && found > 10, "{found}");
    let fits = recovery(&passes(&training(64, 20, "bisect_batch", "fits")))
        .trained
        .clone()
        .unwrap()
        .final_batch;
    let searched = recovery(&passes(&training(
        10,
        60,
        "{ scale_batch: { mode: binsearch } }",
        "fits",
    )))
    .trained
    .clone()
    .unwrap();
    assert!(
        (found * 95 / 100..=fits).contains(&searched.final_batch),
        "{} of {fits}",
        searched.final_batch
    );
}

#[test]
fn waiting_lets_others_give_memory_back() {
    let run = passes(
        "  - external_memory: 40MiB
  - alloc: { buffer: x, size: 30MiB, on_oom: { wait: { first: 1ms, retries: 4 } }, id: x }
    meanwhile:
      - external_memory: 36MiB
      - external_memory: 20MiB
      - external_memory: 0
  - expect: [ x.retries == 2, x.retry_time >= 3ms, x.retries_without_progress == 0 ]",
    );
    let then: Vec<Option<&str>> = tries(&run).into_iter().map(|(_, then)| then).collect();
    assert_eq!(then, [Some("wait 1.00 ms"), Some("wait 2.00 ms"), None]);
}

#[test]
fn waiting_without_other_users_makes_no_progress() {
    passes(
        "  - external_memory: 40MiB
  - alloc: { buffer: x, size: 30MiB, expect: oom, on_oom: { wait: { retries: 2 } }, id: x }
  - expect: x.retries_without_progress == 2
expect_violation: retry_makes_progress",
    );
}

#[test]
fn what_was_given_back_and_lost_is_told() {
    let run = passes(
        "  - for: { i: 1..3 }
    steps:
      - alloc: { buffer: \"p[i]\", size: 16MiB, stream: side }
  - free: p
  - train: { id: t, parameters: 2MiB, layers: 1, activations_per_sample: 20MiB, batch: 4,
        iterations: 1, on_oom: { halve_batch: { retries: 2, empty_cache: true } } }
  - expect: [ t.retry_time > 0, t.effective_batch == 1, t.final_batch == 1 ]",
    );
    let recovery = recovery(&run);
    assert_eq!(recovery.retries, 2);
    assert_eq!(
        recovery.lost.unwrap().0,
        run.steps
            .iter()
            .find(|step| step.kind == "train")
            .unwrap()
            .reports["retry_time"]
    );
    assert!(
        recovery.listed.iter().all(|attempt| attempt.time.is_some()),
        "{recovery:?}"
    );
}

/// In 64 MiB, a batch of 32 with 2 MiB per sample does not fit.
fn saved_by(policies: &str) -> Recovery {
    let steps = format!(
        "  - train: {{ id: t, parameters: 1MiB, layers: 16, activations_per_sample: 2MiB, batch: 32,
        iterations: 3, on_oom: {policies} }}
  - expect: [ t.iterations == 3, t.retained_after_oom == 0, t.retries_without_progress == 0 ]"
    );
    recovery(&passes(&steps)).clone()
}

#[test]
fn splitting_keeps_the_effective_batch() {
    let recovery = saved_by("split_and_accumulate");
    let trained = recovery.trained.unwrap();
    assert_eq!(
        (
            trained.effective_batch,
            trained.final_batch,
            trained.samples
        ),
        (32, 16, 96)
    );
    assert_eq!(recovery.retries, 1);
}

#[test]
fn checkpointing_and_smaller_numbers_keep_the_batch() {
    for (policies, plan) in [
        (
            "checkpoint_more",
            "a batch of 32, checkpointed every 2 layers",
        ),
        ("[ half_precision, checkpoint_more ]", "mixed precision"),
    ] {
        let recovery = saved_by(policies);
        let trained = recovery.trained.unwrap();
        assert_eq!(
            (trained.effective_batch, trained.final_batch),
            (32, 32),
            "{policies}"
        );
        assert!(trained.plan.contains(plan), "{policies}: {}", trained.plan);
    }
}

#[test]
fn spilling_to_the_host_keeps_the_batch_and_reports_its_bytes() {
    for (policies, plan) in [
        (
            "spill_to_host",
            "a batch of 32, saved activations in pinned host memory",
        ),
        (
            "{ spill_to_host: { memory: pageable } }",
            "a batch of 32, saved activations in pageable host memory",
        ),
        (
            "{ spill_to_host: { what: activations, memory: mapped_file } }",
            "a batch of 32, saved activations in a mapped file",
        ),
    ] {
        let recovery = saved_by(policies);
        let trained = recovery.trained.unwrap();
        assert_eq!(
            (
                trained.effective_batch,
                trained.final_batch,
                recovery.retries
            ),
            (32, 32, 1),
            "{policies}"
        );
        assert_eq!(trained.plan, plan);
        assert!(
            recovery.host.peak.0 > 0 && recovery.host.copied.0 >= 3 * 2 * recovery.host.peak.0,
            "{policies}: {:?}",
            recovery.host
        );
    }
}

/// A failed allocation of host memory counts as a failed attempt and names the call. The next
/// policy uses another kind of memory.
#[test]
fn where_there_is_no_host_memory_the_next_policy_is_tried() {
    let policies = "[ spill_to_host, { spill_to_host: { memory: pageable } }, { spill_to_host: { \
         memory: mapped_file } } ]";
    let steps = training(64, 2, policies, "fits");
    let run = passes_with(
        "faults: [ { call: cuMemHostAlloc }, { call: mmap, skip: 1, count: 1 } ]",
        &steps,
    );
    let failed: Vec<String> = recovery(&run)
        .listed
        .iter()
        .filter_map(|attempt| attempt.failed.clone())
        .collect();
    assert_eq!(failed.len(), 3, "{failed:?}");
    assert!(failed[0].contains("out of memory"), "{failed:?}");
    assert!(
        failed[1].starts_with("cuMemHostAlloc of 16 MiB failed: ")
            && failed[2].starts_with("mmap of 16 MiB failed: "),
        "{failed:?}"
    );
    assert_eq!(
        recovery(&run).trained.as_ref().unwrap().plan,
        "a batch of 64, saved activations in a mapped file"
    );
    assert_eq!(
        (recovery(&run).without_progress, recovery(&run).retained.0),
        (0, 0)
    );
}

#[test]
fn every_policy_recovers_the_same_way_again() {
    for policies in [
        "shrink_batch",
        "bisect_batch",
        "scale_batch",
        "split_and_accumulate",
        "halve_micro_batch",
        "[ half_precision, checkpoint_more, split_and_accumulate ]",
        "[ { spill_to_host: { what: optimizer_state } }, spill_to_host ]",
    ] {
        assert_eq!(
            saved_by(policies).decisions(),
            saved_by(policies).decisions(),
            "{policies}"
        );
    }
}

/// The check on the buffer's own stream skips contents of another stream, because the streams are
/// not ordered.
#[test]
fn verifying_live_buffers_after_a_failure_is_no_race() {
    passes(
        "  - alloc: { buffer: w, size: 40MiB }
  - record: { event: made }
  - wait: { event: made, stream: side }
  - fill: { buffer: w, stream: side }
  - alloc: { buffer: v, size: 20MiB }
  - fill: v
  - alloc: { buffer: x, size: 30MiB, expect: oom, on_oom: [ give_up ] }
  - synchronize: device",
    );
}

#[test]
fn a_training_that_keeps_its_batch_reports_the_changed_plan() {
    let run = passes(&training(64, 1, "split_and_accumulate", "fits"));
    let note = &run.steps[0].notes[0];
    assert_eq!(
        note,
        "1 retry: a batch of 64 became a batch of 64 in 2 parts"
    );
    let smaller = passes(&training(64, 1, "{ halve_batch: { retries: 9 } }", "fits"));
    assert!(
        smaller.steps[0].notes[0].starts_with("1 retry: batch 64 became "),
        "{:?}",
        smaller.steps[0].notes
    );
}

#[test]
fn requests_that_were_used_longest_ago_are_evicted_until_the_others_fit() {
    let serving = |policies: &str, expect: &str| {
        format!(
            "  - infer: {{ id: i, layers: 8, kv_heads: 8, head_dim: 64, requests: 20, prompt: {{ \
             min: 50, max: 100 }}, output: {{ min: 200, max: 400 }}, page: 16, expect: {expect}, \
             on_oom: {policies} }}\n"
        )
    };
    let run = passes(
        &(serving("evict", "fits")
            + "  - expect: [ i.served == 20, i.evicted > 0, i.evicted < 100, i.recomputed_tokens > \
                 0 ]"),
    );
    let then: Vec<&str> = tries(&run)
        .into_iter()
        .filter_map(|(_, then)| then)
        .collect();
    assert!(
        !then.is_empty() && then.iter().all(|then| then.starts_with("evict request ")),
        "{then:?}"
    );
    assert!(
        run.steps[0].reports["evicted"] >= then.len() as u64,
        "{:?}",
        run.steps[0].reports
    );
    let ends =
        passes(&(serving("give_up", "oom") + "  - expect: [ i.served < 20, i.evicted == 0 ]"));
    assert_eq!(ends.steps[0].outcome, Outcome::OutOfMemory);
    // The policy evicts buffers of the scenario before requests.
    let buffer_first = "  - alloc: { buffer: prefix, size: 8MiB }\n".to_owned()
        + &serving("[ { evict: { buffers: [prefix] } }, evict, wait ]", "fits")
        + "  - free: prefix";
    let run = passes(&buffer_first);
    assert_eq!(tries(&run)[0].1, Some("evict prefix"));
}
