//! A trace as a step of a scenario.

use std::{path::Path, sync::Arc};

use harness_allocator::units::Bytes;
use harness_devices::DeviceSource;
use harness_record::{Outcome, RunRecord, Verdict};
use harness_run::session::{Plan, Selection};
use harness_scenario::Scenario;

/// Runs a scenario with a trace next to it.
fn run(trace: &str, memory: Bytes, steps: &str, allocators: &str) -> Vec<RunRecord> {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("job.trace"), trace).expect("a file");
    let text = format!(
        "about: A test.\nneeds: {{ memory: {}B }}\nallocators: [{allocators}]\nsteps:\n{steps}",
        memory.0
    );
    let scenario = Scenario::parse(&text, &folder.path().join("test.yaml"))
        .unwrap_or_else(|error| panic!("{error}\n{text}"));
    plan(vec![scenario])
        .run(&DeviceSource::simulated(), &Arc::default())
        .expect("a simulated device")
        .runs
}

fn plan(scenarios: Vec<Scenario>) -> Plan {
    let (selection, program) = (Selection::default(), "harness".to_owned());
    Plan {
        scenarios,
        selection,
        seed: None,
        memory: None,
        repetitions: 1,
        audit: true,
        fail_fast: false,
        program,
    }
}

const REPLAY: &str = "  - replay: { id: job, trace: job.trace }\n";
const PINNED: &str = "\
a 1 41943040 0 # model.py:10
f 1
a 2 4194304 0 # model.py:20
a 3 67108864 0 # model.py:30
";

#[test]
fn a_replay_reports_its_operations() {
    let expect = "  - expect: [ job.ooms == 0, job.operations == 4, job.allocations == 3, \
         job.frees == 1, job.live_blocks == 2, allocated == 68MiB ]\n";
    let more = "  - free: job\n  - expect: allocated == 0B\n";
    for record in run(
        PINNED,
        Bytes::gib(1),
        &format!("{REPLAY}{expect}{more}"),
        "caching, expandable, bfc, direct",
    ) {
        assert_eq!(record.verdict, Verdict::Passed, "{}", record.allocator);
    }
}

#[test]
fn a_refused_request_fails_the_step_and_is_explained_by_the_comments_of_the_trace() {
    let records = run(PINNED, Bytes::mib(88), REPLAY, "caching, expandable");
    let Verdict::Failed { first, .. } = &records[0].verdict else {
        panic!("{:?}", records[0].verdict)
    };
    assert_eq!(first.expected, "every request of the trace to be served");
    let step = &records[0].steps[0];
    assert_eq!(step.outcome, Outcome::OutOfMemory);
    let failed_request = step.failed_request.as_ref().expect("it is explained");
    assert_eq!(failed_request.pinned[0].holders[0].name, "model.py:20");
    assert_eq!(
        records[1].verdict,
        Verdict::Passed,
        "expandable segments are served"
    );
}

#[test]
fn a_replay_can_expect_an_end_per_allocator_and_by_cause() {
    let ending =
        |ending: &str| format!("  - replay: {{ id: job, trace: job.trace, expect: {ending} }}\n");
    let passes =
        |ending: &str| run(PINNED, Bytes::mib(88), ending, "caching")[0].verdict == Verdict::Passed;
    assert!(
        passes(&ending("oom")) && passes(&ending("{ oom: fragmented }")) && passes(&ending("any"))
    );
    assert!(!passes(&ending("{ oom: fraction }")));
    let records = run(
        PINNED,
        Bytes::mib(88),
        &ending("{ caching: oom, expandable: fits }"),
        "caching, expandable",
    );
    assert!(
        records
            .iter()
            .all(|record| record.verdict == Verdict::Passed)
    );
    assert!(!passes(&format!("{}  - free: job\n", ending("fits"))));
    let fits = run(PINNED, Bytes::gib(1), &ending("oom"), "caching");
    let Verdict::Failed { first, .. } = &fits[0].verdict else {
        panic!("it fits")
    };
    assert_eq!(first.seen, "all 3 are served");
}

#[test]
fn private_pools_are_used_if_supported_and_misuse_is_reported() {
    let pools = "g+ 4\na 1 1048576 0\ng- 4\nf 1\na 2 1048576 0\n";
    let steps =
        format!("{REPLAY}  - expect: {{ caching: segment.all.current == 2, others: any }}\n");
    let records = run(pools, Bytes::mib(64), &steps, "caching, bfc");
    assert!(
        records
            .iter()
            .all(|record| record.verdict == Verdict::Passed),
        "{:?}",
        records.iter().map(|run| &run.verdict).collect::<Vec<_>>()
    );
    let records = run(
        "g+ 4\ng+ 4\na 2 1048576 0\n",
        Bytes::mib(64),
        REPLAY,
        "caching",
    );
    let Verdict::Failed { first, .. } = &records[0].verdict else {
        panic!("misuse")
    };
    assert!(
        first.seen.starts_with("operation 2: private pool "),
        "{}",
        first.seen
    );
}

#[test]
fn an_error_in_a_trace_is_reported_at_its_name() {
    let parse = |text: &str| {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("job.trace"), text).expect("a file");
        let text = format!("about: A test.\nneeds: {{ memory: 1GiB }}\nsteps:\n{REPLAY}");
        Scenario::parse(&text, &folder.path().join("test.yaml"))
            .expect_err("the trace is wrong")
            .to_string()
    };
    assert!(
        parse("a 1\n")
            .contains("job.trace: line 1: `a 1` is not an operation of an allocation trace"),
        "{}",
        parse("a 1\n")
    );
    let many: String = (1..300)
        .map(|stream| format!("a {stream} 512 {stream}\n"))
        .collect();
    assert!(
        parse(&many).contains("this trace has 299 streams, so the scenario has more than 255"),
        "{}",
        parse(&many)
    );
    let text = format!("about: A test.\nneeds: {{ memory: 1GiB }}\nsteps:\n{REPLAY}");
    let missing = Scenario::parse(&text, Path::new("nowhere/test.yaml"))
        .expect_err("there is no trace")
        .to_string();
    assert!(missing.contains("job.trace: cannot be read: "), "{missing}");
}
