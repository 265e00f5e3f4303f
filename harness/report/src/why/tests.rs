use super::*;
use crate::tests::examples;
use harness_record::{CauseKind, RefusedCall, UnlistedSegments};

const fn mib(count: u64) -> Bytes {
    Bytes::mib(count)
}

#[test]
fn each_cause_is_a_sentence_with_its_figures() {
    let pieces = |count, bytes, largest| Pieces {
        count,
        bytes: mib(bytes),
        largest: mib(largest),
    };
    let causes = [
        Cause::Fraction {
            limit: mib(1024),
            held: mib(400),
            free: mib(1648),
        },
        Cause::AllocatorLimit {
            limit: mib(512),
            held: mib(500),
            free: mib(512),
        },
        Cause::Limit {
            limit: mib(200),
            held: mib(150),
        },
        Cause::Injected { number: 3 },
        Cause::PendingFree(pieces(2, 12, 8)),
        Cause::Rounding {
            room: mib(12),
            asked: mib(20),
        },
        Cause::RoundedUp {
            largest: mib(610),
            asked: mib(640),
        },
        Cause::Fragmented {
            own: pieces(2, 200, 100),
            room: mib(112),
            elsewhere: mib(0),
        },
        Cause::Fragmented {
            own: pieces(1, 54, 54),
            room: mib(0),
            elsewhere: mib(80),
        },
        Cause::OtherStream {
            stream: 1,
            wanted: 0,
            largest: mib(780),
        },
        Cause::OtherPool {
            pool: PoolKind::Large,
            largest: mib(42),
        },
        Cause::OtherPool {
            pool: PoolKind::Small,
            largest: mib(2),
        },
        Cause::PrivatePool(pieces(1, 600, 600)),
        Cause::OthersHold {
            held: mib(1000),
            asked: mib(900),
        },
        Cause::Unaccounted {
            used: mib(1000),
            asked: mib(900),
        },
        Cause::TooLarge {
            free: mib(1004),
            cached: mib(16),
        },
    ];
    let mut failed_request = examples::failed_request();
    failed_request.streams.insert(1, "side".to_owned());
    failed_request.injected = Some(RefusedCall {
        process: None,
        call: "cudaMalloc".to_owned(),
        number: 3,
    });
    let seen: Vec<CauseKind> = causes.iter().map(Cause::kind).collect();
    assert!(
        CauseKind::ALL.iter().all(|kind| seen.contains(kind)),
        "the test lacks a kind"
    );
    let sentences: Vec<String> = causes
        .iter()
        .map(|cause| format!("{}: {}", cause.kind(), sentence(cause, &failed_request)))
        .collect();
    insta::assert_snapshot!(sentences.join("\n"));
}

fn holder(name: &str, line: u32, blocks: u64) -> Holder {
    Holder {
        name: name.to_owned(),
        line,
        blocks,
        bytes: mib(2 * blocks),
    }
}

fn pinned(holders: Vec<Holder>) -> PinnedSegment {
    PinnedSegment {
        pool: Some(PoolKind::Large),
        stream: Some(0),
        size: mib(700),
        free: mib(604),
        holders,
        other_blocks: 0,
    }
}

#[test]
fn what_pins_a_segment_is_named_with_its_lines() {
    let mut failed_request = examples::failed_request();
    let mut pins = |segments: Vec<PinnedSegment>| {
        failed_request.pinned = segments;
        what_pins(&failed_request, false)
    };
    assert!(pins(Vec::new()).starts_with("A request needs one contiguous block"));
    let one = "lora1 (line 12) pins a segment that therefore cannot be released to the driver.";
    assert_eq!(pins(vec![pinned(vec![holder("lora1", 12, 1)])]), one);
    let loras = vec![
        holder("lora1", 12, 1),
        holder("lora2", 13, 1),
        holder("lora3", 14, 1),
    ];
    assert!(
        pins(vec![pinned(loras.clone())])
            .starts_with("lora1, lora2 and lora3 (lines 12-14) pin a segment")
    );
    let many = (0..6)
        .map(|n| holder(&format!("kv[{n}]"), 7 + 2 * (n / 3), 1))
        .collect();
    assert!(
        pins(vec![pinned(loras), pinned(many)])
            .starts_with("lora1, lora2, lora3, kv[0] and 5 more (lines 7, 9, 12-14) pin segments")
    );
    // Segments of other streams do not count if the request's own blocks suffice.
    let elsewhere = PinnedSegment {
        stream: Some(1),
        ..pinned(vec![holder("a", 3, 1)])
    };
    assert!(pins(vec![elsewhere]).starts_with("A request needs one contiguous block"));
}

#[test]
fn the_verb_agrees_with_the_number_of_names() {
    let mut failed_request = examples::failed_request();
    let mut pins = |segments: Vec<PinnedSegment>| {
        failed_request.pinned = segments;
        what_pins(&failed_request, false)
    };
    let storm = || pinned(vec![holder("storm", 13, 3)]);
    assert!(pins(vec![storm()]).starts_with("storm (line 13) pins a segment that"));
    assert!(pins(vec![storm(), storm()]).starts_with("storm (line 13) pins segments that"));
    let same_name = vec![holder("kv", 7, 1), holder("kv", 9, 2)];
    assert!(pins(vec![pinned(same_name)]).starts_with("kv (lines 7, 9) pins a segment that"));
    assert!(
        pins(vec![pinned(vec![holder("a", 3, 1), holder("b", 4, 1)])])
            .starts_with("a and b (lines 3-4) pin a segment that")
    );
}

#[test]
fn segments_that_are_not_listed_count() {
    let mut failed_request = examples::failed_request();
    failed_request.pinned = vec![pinned(vec![holder("s", 5, 14)])];
    failed_request.pinned_unlisted = UnlistedSegments {
        count: 3,
        free: mib(6),
    };
    assert!(what_pins(&failed_request, false).starts_with("s and others (line 5) pin segments"));
    assert_eq!(
        holders_of(&failed_request.pinned[0]),
        "s (line 5): 28 MiB in 14 blocks"
    );
}

#[test]
fn an_allocator_that_keeps_free_segments_does_not_blame_live_blocks() {
    let mut failed_request = examples::failed_request();
    failed_request.pinned = vec![pinned(vec![holder("s", 5, 14)])];
    failed_request.keeps_free_segments = true;
    assert_eq!(
        what_pins(&failed_request, false),
        "The allocator releases no free segment to the driver for a request."
    );
}
