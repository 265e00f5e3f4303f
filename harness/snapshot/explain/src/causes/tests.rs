mod examples;

use harness_allocator::stats::PoolKind;
use harness_trace::snapshot::{MempoolId, Segment};

use self::examples::{Example, MIB};
use super::*;

fn explained(example: &Example, memory: Option<u64>) -> Explanation {
    let explanation = explain(
        &example.snapshot,
        0,
        Options {
            memory: memory.map(Bytes),
            at: At::Automatic,
        },
    )
    .expect("there is such a moment");
    let sum: Bytes = explanation.causes.iter().map(|cause| cause.bytes).sum();
    assert_eq!(sum, explanation.device_total);
    explanation
}

fn bytes(explanation: &Explanation) -> Vec<(&'static str, u64)> {
    explanation
        .causes
        .iter()
        .map(|cause| (cause.cause.name(), cause.bytes.get() / MIB))
        .collect()
}

#[test]
fn each_byte_counts_once_for_its_first_cause() {
    let mut example = Example::new("");
    example.segment(&[('a', 30 * MIB, 41), ('.', 70 * MIB, 0)]);
    example.segment(&[('a', MIB, 43), ('.', MIB, 0)]);
    example.segment(&[('p', 20 * MIB, 44), ('a', 20 * MIB, 41)]);
    example.segment(&[('.', 60 * MIB, 0)]).stream = 7;
    example.segment(&[('.', 80 * MIB, 0)]).private_pool = MempoolId(0, 1);
    example
        .segment(&[('a', 10 * MIB, 42), ('.', 15 * MIB, 0)])
        .stream = 7;
    example.segment(&[('.', 40 * MIB, 0)]);
    example.snapshot.segments[0].blocks[0].requested = Bytes(28 * MIB);
    example.oom(100 * MIB, 50 * MIB);
    let explanation = explained(&example, Some(1024 * MIB));
    assert_eq!(
        bytes(&explanation),
        [
            ("allocated", 59),
            ("rounding", 2),
            ("pending_free", 20),
            ("other_stream", 75),
            ("other_pool", 1),
            ("private_pool", 80),
            ("inactive_split", 70),
            ("whole_segments", 40),
            ("others_hold", 1024 - 347 - 50),
            ("free", 50),
        ]
    );
    let allocated: Vec<(&str, u64)> = explanation.causes[0]
        .sites
        .iter()
        .map(|site| (site.site.as_str(), site.bytes.get() / MIB))
        .collect();
    assert_eq!(
        allocated,
        [
            ("model.py:41 forward", 48),
            ("model.py:42 forward", 10),
            ("model.py:43 forward", 1)
        ]
    );
    let pins: Vec<(&str, u64, u64)> = explanation
        .pinned
        .iter()
        .map(|pin| (pin.by.site.as_str(), pin.free.get() / MIB, pin.live_blocks))
        .collect();
    assert_eq!(
        pins,
        [
            ("model.py:41 forward", 70, 1),
            ("model.py:42 forward", 15, 1),
            ("model.py:43 forward", 1, 1)
        ]
    );
}

#[test]
fn similar_pinned_segments_share_a_sentence() {
    let mut example = Example::new("");
    for _ in 0..12 {
        example.segment(&[('a', 2 * MIB, 41), ('.', 98 * MIB, 0)]);
    }
    example.segment(&[('a', 100 * MIB, 40)]);
    example.oom(700 * MIB, 500 * MIB);
    let explanation = explained(&example, None);
    assert_eq!(
        explanation.headline,
        "1.15 GiB are reserved but pinned: 12 segments are each held by one block of 2 MiB \
         allocated at model.py:41 forward, so the 700 MiB \
         asked for at model.py:99 forward did not fit, with 500 MiB free on the device."
    );
    assert_eq!(
        (explanation.device_total, explanation.device_total_is),
        (Bytes(1800 * MIB), TotalKnown::AtOom)
    );
    assert_eq!(explanation.why, ["fragmented"]);
    let ways: Vec<&str> = explanation
        .ways
        .iter()
        .map(|way| way.why.as_str())
        .collect();
    assert_eq!(
        ways,
        [
            "1.15 GiB are free in the large pool on the default stream, in 12 blocks, the largest \
             of 98 MiB, but one block of 700 MiB is needed.",
            "The driver was asked for 700 MiB, but had only 500 MiB free.",
            "No cached memory could be released. The other 1.15 GiB of cached memory are in \
             segments with live blocks, which cannot be \
             released."
        ]
    );
}

#[test]
fn the_largest_cause_makes_the_headline() {
    let told = |change: fn(&mut Segment), kind: char| {
        let mut example = Example::new("");
        example.segment(&[('a', 100 * MIB, 41)]);
        change(example.segment(&[(kind, 600 * MIB, if kind == 'p' { 42 } else { 0 })]));
        example.oom(500 * MIB, 100 * MIB);
        let explanation = explained(&example, None);
        (
            explanation
                .headline
                .split(',')
                .next()
                .unwrap_or_default()
                .to_owned(),
            explanation.why,
        )
    };
    assert_eq!(
        told(|_| (), 'p'),
        (
            "600 MiB were freed but wait for other streams".to_owned(),
            vec!["pending_free"]
        )
    );
    let other_stream = told(|segment| segment.stream = 0x20, '.');
    assert_eq!(
        other_stream,
        (
            "600 MiB are cached for other streams than the default stream".to_owned(),
            vec!["other_stream"]
        )
    );
    let private = told(|segment| segment.private_pool = MempoolId(0, 3), '.');
    assert_eq!(
        private,
        (
            "600 MiB are cached in private pools that probably serve other requests".to_owned(),
            vec!["private_pool"]
        )
    );
    let small = told(|segment| segment.pool = PoolKind::Small, '.');
    assert_eq!(
        small,
        (
            "600 MiB are cached for blocks of the other size".to_owned(),
            vec!["other_pool"]
        )
    );
}

#[test]
fn a_too_large_program_is_reported_with_its_excess() {
    let mut example = Example::new("");
    example.segment(&[('a', 900 * MIB, 41)]);
    example.oom(500 * MIB, 124 * MIB);
    let explanation = explained(&example, None);
    assert_eq!(
        explanation.headline,
        "The program is too large by 376 MiB: 900 MiB are allocated, most of it (900 MiB) at \
         model.py:41 forward, and the 500 MiB asked for at \
         model.py:99 forward did not fit into the 124 MiB that are free in total."
    );
    assert_eq!(explanation.why, ["too_large"]);
}

#[test]
fn a_refusing_memory_fraction_is_named() {
    let mut example = Example::new("per_process_memory_fraction:0.5");
    example.segment(&[('a', 400 * MIB, 41)]);
    example.oom(200 * MIB, 600 * MIB);
    let explanation = explained(&example, Some(1000 * MIB));
    assert_eq!(explanation.why, ["memory_fraction"]);
    assert!(
        explanation.ways[1]
            .why
            .starts_with("The memory fraction allows 500 MiB, and 400 MiB are already reserved"),
        "{:?}",
        explanation.ways
    );
}

#[test]
fn a_refusal_with_enough_free_memory_is_not_called_a_full_device() {
    let mut example = Example::new("");
    example.segment(&[('a', 300 * MIB, 41)]);
    example.oom(300 * MIB, 724 * MIB);
    let explanation = explained(&example, None);
    assert!(explanation.why.is_empty(), "{:?}", explanation.why);
    let told = "The 300 MiB asked for at model.py:99 forward did not fit, although 724 MiB were \
         free on the device, so either the program's own memory \
                fraction refused the request, ";
    assert!(
        explanation.headline.starts_with(told),
        "{}",
        explanation.headline
    );
}

#[test]
fn without_an_oom_the_total_is_the_known_memory() {
    let mut example = Example::new("");
    example.segment(&[('a', 60 * MIB, 41), ('.', 40 * MIB, 0)]);
    let known = explained(&example, None);
    assert_eq!(
        (known.device_total, known.device_total_is),
        (Bytes(100 * MIB), TotalKnown::ReservedOnly)
    );
    assert!(known.notes.iter().any(|note| note.contains("--memory")));
    let given = explained(&example, Some(1024 * MIB));
    assert_eq!(
        bytes(&given),
        [
            ("allocated", 60),
            ("inactive_split", 40),
            ("free_or_others_hold", 924)
        ]
    );
    let too_small = explain(
        &example.snapshot,
        0,
        Options {
            memory: Some(Bytes(99 * MIB)),
            at: At::End,
        },
    );
    assert!(
        matches!(
            too_small,
            Err(ExplainError::MemoryTooSmall {
                least: Bytes(104_857_600),
                ..
            })
        ),
        "{too_small:?}"
    );
}

#[test]
fn survived_ooms_are_not_explained() {
    let mut example = Example::new("");
    example.oom(500 * MIB, 100 * MIB);
    example.segment(&[('a', 60 * MIB, 41), ('.', 40 * MIB, 0)]);
    let explanation = explained(&example, None);
    assert_eq!(
        (explanation.moment.at, explanation.survived_ooms),
        (MomentKind::End, 1)
    );
    let at_oom = explain(
        &example.snapshot,
        0,
        Options {
            memory: None,
            at: At::Oom,
        },
    )
    .expect("there is one");
    assert_eq!(
        (
            at_oom.moment.event,
            at_oom.accounts.reserved,
            at_oom.device_total
        ),
        (Some(0), Bytes::ZERO, Bytes(100 * MIB))
    );
}

#[test]
fn a_first_request_that_failed_is_a_complete_recording() {
    let mut example = Example::new("");
    example.oom(10 << 30, 1 << 30);
    let explanation = explained(&example, Some(1 << 30));
    assert!(
        !explanation
            .notes
            .iter()
            .any(|note| note.contains("nothing was recorded")),
        "{:?}",
        explanation.notes
    );
}

#[test]
fn segments_without_a_recording_are_explained_too() {
    let mut example = Example::new("");
    example.segment(&[('a', 60 * MIB, 41), ('.', 40 * MIB, 0)]);
    example.snapshot.traces.clear();
    let explanation = explained(&example, None);
    assert_eq!(
        explanation.causes[0].sites[0].site, "model.py:41 forward",
        "blocks have stacks of their own"
    );
    let peak = explain(
        &example.snapshot,
        0,
        Options {
            memory: None,
            at: At::Peak,
        },
    );
    assert!(matches!(
        peak,
        Err(ExplainError::Moment(MomentError::NoEvents { device: 0 }))
    ));
}

#[test]
fn pages_of_expandable_segments_are_pinned_by_the_older_neighbour() {
    let mut example = Example::new("expandable_segments:True");
    let pages = [
        ('a', 2 * MIB, 41),
        ('.', 58 * MIB, 0),
        ('a', 20 * MIB, 42),
        ('.', 20 * MIB, 0),
    ];
    example.segment(&pages).expandable = true;
    example.snapshot.traces[0][0].action = Action::SegmentMap;
    example.oom(300 * MIB, 40 * MIB);
    let explanation = explained(&example, None);
    assert_eq!(
        bytes(&explanation),
        [
            ("allocated", 22),
            ("inactive_split", 18),
            ("whole_segments", 60),
            ("free", 40)
        ]
    );
    let by = &explanation.pinned[0];
    assert_eq!(
        (by.free.get() / MIB, by.by.site.as_str()),
        (18, "model.py:41 forward")
    );
}

#[test]
fn growing_sites_are_leak_suspects_next_to_large_blocks_that_live_long() {
    for is_cached in [false, true] {
        let mut example = Example::new("");
        let (other, cache) = (example.line(8), example.line(9));
        let at = example.segment(&[('.', 40_000 * MIB, 0)]).address;
        if is_cached {
            example.event(Action::Alloc, at, 40_000 * MIB, cache);
        }
        for _ in 0..20 {
            let address = example
                .segment(&[('a', MIB, 7), ('.', 60 * MIB, 0)])
                .address;
            example.event(Action::Alloc, address + 8 * MIB, 50 * MIB, other);
            example.event(Action::FreeRequested, address + 8 * MIB, 50 * MIB, other);
            example.event(Action::FreeCompleted, address + 8 * MIB, 50 * MIB, other);
        }
        if is_cached {
            example.event(Action::FreeRequested, at, 40_000 * MIB, cache);
            example.event(Action::FreeCompleted, at, 40_000 * MIB, cache);
        }
        let growing = explained(&example, None).growing;
        assert_eq!(
            growing
                .iter()
                .map(|growth| growth.site.as_str())
                .collect::<Vec<_>>(),
            ["model.py:7 forward"]
        );
        assert!(growing[0].grown >= Bytes(10 * MIB), "{growing:?}");
    }
}

#[test]
fn pending_frees_are_reported_with_their_age() {
    let mut example = Example::new("");
    example.segment(&[('p', 20 * MIB, 44), ('.', 30 * MIB, 0)]);
    let line = example.line(1);
    for _ in 0..5 {
        example.event(Action::Snapshot, 0, 0, line);
    }
    let waits = explained(&example, None).stalled_frees;
    assert_eq!(waits.len(), 1);
    assert_eq!(
        (waits[0].events, waits[0].time_us, waits[0].completed_at),
        (5, Some(5_000), None)
    );
    assert_eq!(waits[0].site, "model.py:44 forward");
}

/// The notes that say what a recording leaves out.
fn left_out(snapshot: &Snapshot) -> Vec<String> {
    let explanation = explain(snapshot, 0, Options::default()).expect("there is an end");
    explanation
        .notes
        .into_iter()
        .filter(|note| note.contains("is incomplete"))
        .collect()
}

#[test]
fn gaps_of_a_recording_are_one_note() {
    let read = |name: &str| {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests")
            .join(name);
        Snapshot::read(&path).expect("the recording is part of the project")
    };
    let whole = read("snapshots/kept-features.pickle.gz");
    assert_eq!(left_out(&whole), Vec::<String>::new());
    let mut overwritten = whole;
    overwritten.traces[0].drain(..2000);
    let [note] = &left_out(&overwritten)[..] else {
        panic!("one line")
    };
    assert!(
        note.starts_with(
            "the recording is incomplete: its first events are missing, because later \
             ones overwrote them (`max_entries`)"
        ),
        "{note}"
    );
    let [note] = &left_out(&read("real_gpus/forward_late_start.pickle.gz"))[..] else {
        panic!("one line")
    };
    assert!(
        note.starts_with(
            "the recording is incomplete: it began after the program had allocated memory: "
        ),
        "{note}"
    );
}
