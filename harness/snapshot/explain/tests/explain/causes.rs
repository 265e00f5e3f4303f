//! Tests that every command names the same cause for a recording, and that `harness advise` tests
//! the change that removes it. The recordings are of small programs on the simulated GPU.

use std::path::Path;

use harness_allocator::units::Bytes;
use harness_explain::causes::{self, ByteCause, Explanation, Options};
use harness_explain::fidelity;
use harness_explain::grid::{Configuration, Grid, UNLIMITED};
use harness_explain::program_advice::{self, ProgramAdvice, Unchanged};
use harness_trace::snapshot::{MempoolId, Snapshot};
use harness_trace::{program::RecordedProgram, trace::TraceEvent};

fn read(name: &str) -> Snapshot {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded_causes");
    Snapshot::read(&folder.join(format!("{name}.pickle.gz")))
        .expect("the recording is part of the project")
}

/// The explanation and the advice, which agree on the headline.
fn explained(snapshot: &Snapshot) -> (Explanation, Vec<ProgramAdvice>) {
    let explanation = causes::explain(snapshot, 0, Options::default()).expect("there is a moment");
    assert!(
        explanation
            .fidelity
            .as_ref()
            .is_some_and(|fidelity| fidelity.faithful),
        "{:?}",
        explanation.fidelity
    );
    assert_eq!(
        causes::headline(snapshot, 0).as_ref(),
        Ok(&explanation.headline)
    );
    let program = RecordedProgram::recover(snapshot, 0).expect("a program");
    let own = Configuration::grid(&program.config).remove(0);
    let (prepared, memory) = (
        program.prepare().expect("it can run"),
        program.memory.unwrap_or(UNLIMITED),
    );
    let grid = Grid::new(&prepared, memory);
    let (least, _) = grid.least(&own).expect("it can run");
    let replayed = grid.replay(&own, memory).expect("it can run");
    let reserved = replayed
        .oom
        .is_none()
        .then_some(Bytes(replayed.stats.reserved_bytes.all.peak));
    let without = Unchanged {
        memory,
        least: least.enough,
        reserved,
    };
    let advice = program_advice::program_advice(&program, snapshot, &own, without, &|| {})
        .expect("it can run");
    (explanation, advice)
}

fn sentences(advice: &[ProgramAdvice]) -> Vec<&str> {
    advice
        .iter()
        .map(|advice| advice.sentence.as_str())
        .collect()
}

/// PyTorch 2.11 does not record the pool of the request.
#[test]
fn a_private_pool_is_the_cause_and_its_release_is_the_change() {
    for (name, probably) in [
        ("private-pool-2.15", ""),
        ("private-pool-2.11", "probably "),
    ] {
        let (explanation, advice) = explained(&read(name));
        let headline = format!(
            "2.00 GiB are cached in private pools that {probably}serve other requests, so the 3 \
             GiB asked for at mempool-advice.py:17 did not fit, with \
             2.00 GiB free on the device."
        );
        assert_eq!(
            (explanation.headline, explanation.why),
            (headline, vec!["private_pool"])
        );
        let request = explanation.request.expect("it failed");
        assert_eq!(
            (request.private_pool.is_default(), request.is_pool_inferred),
            (true, !probably.is_empty())
        );
        let [change] = sentences(&advice)[..] else {
            panic!("{name}: {:?}", sentences(&advice))
        };
        assert_eq!(
            change,
            "releasing private pool (0, 1) of mempool-advice.py:13 <listcomp> after its last \
             allocation, unless a CUDA graph needs it, reduces the \
             required memory from 5.00 GiB to 3.02 GiB"
        );
    }
}

/// Another request for that pool would have released the cached memory of the default pool. PyTorch
/// 2.11 does not record the pool of the request.
#[test]
fn a_request_that_left_memory_cached_used_the_private_pool_of_the_one_before() {
    let snapshot = read("request-in-private-pool-2.11");
    let request = causes::explain(&snapshot, 0, Options::default())
        .expect("it can be explained")
        .request
        .expect("it failed");
    assert_eq!(
        (request.private_pool, request.is_pool_inferred),
        (MempoolId(0, 1), true)
    );
}

/// A kept graph has the state of random numbers, so later captures do not request it.
#[test]
fn recordings_of_kept_and_dropped_cuda_graphs_are_replayed_to_the_byte() {
    for name in ["kept-captures-2.11", "graphed-callables-2.11"] {
        let (_, fidelity) = fidelity::recover(&read(name), 0, None).expect("it can be replayed");
        assert!(fidelity.faithful, "{name}: {fidelity:?}");
    }
}

/// PyTorch ends the pool with its last segment, and the next capture begins a new one of the same
/// name.
#[test]
fn a_pool_that_is_released_between_captures_is_replayed() {
    let (program, fidelity) =
        fidelity::recover(&read("shared-pool-dropped-2.15"), 0, None).expect("it can be replayed");
    assert!(fidelity.faithful, "{fidelity:?}");
    assert_eq!(
        program
            .operations
            .iter()
            .filter(|operation| matches!(operation, TraceEvent::ReleasePool(_)))
            .count(),
        1
    );
}

/// PyTorch 2.11 does not record the pools, and allocates a few bytes in each.
#[test]
fn recordings_of_dropped_cuda_graphs_are_replayed_to_the_byte() {
    for (name, allocations, segments) in [
        ("discarded-captures-2.11", 124, 39),
        ("discarded-captures-2.15", 118, 36),
    ] {
        let snapshot = read(name);
        let (program, fidelity) =
            fidelity::recover(&snapshot, 0, None).expect("it can be replayed");
        assert!(fidelity.faithful, "{name}: {fidelity:?}");
        assert_eq!(
            (fidelity.at_recorded_address, fidelity.segments_as_recorded),
            (allocations, segments),
            "{name}"
        );
        let released = program
            .operations
            .iter()
            .filter(|operation| matches!(operation, TraceEvent::ReleasePool(_)))
            .count();
        assert_eq!(released, 3, "{name}");
        let settings = Configuration::of_settings(program.config.torch, "max_split_size_mb:32")
            .expect("valid settings");
        let prepared = program.prepare().expect("it can run");
        let (least, _) = Grid::new(&prepared, UNLIMITED)
            .least(&settings)
            .expect("it can run");
        assert_eq!(least.enough.to_string(), "1.73 GiB", "{name}");
    }
}

/// The program also reserves twice as much as it needs without an out-of-memory error.
#[test]
fn memory_cached_for_a_stream_that_no_longer_allocates_is_named_and_its_removal_tested() {
    let (explanation, advice) = explained(&read("side-stream-2.15"));
    let [idle] = &explanation.idle_streams[..] else {
        panic!("{:?}", explanation.idle_streams)
    };
    assert_eq!(
        (idle.cached, idle.reserved_since),
        (Bytes::gib(3), Bytes::mib(2560))
    );
    assert_eq!(idle.site, "side-stream-reserved.py:14 <listcomp>");
    assert_eq!(explanation.bytes(ByteCause::OtherStream), Bytes::gib(3));
    let told = "3 GiB are cached for stream 0x500000010, which last allocated at \
         side-stream-reserved.py:14 <listcomp>, and other streams, which cannot \
                use them, reserved 2.50 GiB since.";
    assert!(
        explanation.headline.ends_with(told),
        "{}",
        explanation.headline
    );
    assert_eq!(
        sentences(&advice),
        [
            "allocating on the default stream what stream 0x500000010 allocates, last at \
             side-stream-reserved.py:14 <listcomp>, reduces the reserved \
             memory from 5.88 GiB to 3.38 GiB",
            "torch.cuda.empty_cache() once, before side-stream-reserved.py:17 <listcomp> first \
             reserves memory, reduces the reserved memory from 5.88 \
             GiB to 3.38 GiB",
        ]
    );
}
