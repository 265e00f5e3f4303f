#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use harness_allocator::stats::{BlockState, PoolKind};
use harness_allocator::units::Bytes;
use harness_explain::causes::{Options, explain};
use harness_trace::snapshot::{
    Action, Block, Event, ExtraId, Frame, MempoolId, RecordedSettings, Segment, Snapshot, StackId,
};
use proptest::prelude::*;
use serde_json::Value;

use super::lifetimes::{Contradictions, LifeFigures, Lifetimes};
use super::{columns::decode, *};

fn event(action: Action, address: u64, size: u64) -> Event {
    Event {
        action,
        address,
        size: Bytes(size),
        stream: 0,
        time_us: Some(1_000_000),
        stack: StackId::EMPTY,
        extra: ExtraId::default(),
    }
}

fn block(address: u64, size: u64, state: BlockState) -> Block {
    Block {
        address,
        size: Bytes(size),
        requested: Bytes(size),
        state,
        stack: StackId::EMPTY,
        extra: ExtraId::default(),
    }
}

fn segment(address: u64, size: u64, expandable: bool, blocks: Vec<Block>) -> Segment {
    Segment {
        device: 0,
        address,
        size: Bytes(size),
        stream: 0,
        // Blocks of the large pool exceed the request if the remainder is not split off.
        pool: PoolKind::Small,
        private_pool: MempoolId::DEFAULT,
        expandable,
        stack: StackId::EMPTY,
        blocks,
        extra: ExtraId::default(),
    }
}

fn snapshot(segments: Vec<Segment>, events: Vec<Event>) -> Snapshot {
    Snapshot {
        segments,
        traces: vec![events],
        ..Snapshot::default()
    }
}

fn figures(allocated: u64, pending: u64, reserved: u64) -> LifeFigures {
    LifeFigures {
        allocated: Bytes(allocated),
        pending: Bytes(pending),
        reserved: Bytes(reserved),
    }
}

/// The page's data for a snapshot of one device.
fn data_of(snapshot: &Snapshot) -> PageData {
    let explanation = explain(snapshot, 0, Options::default()).unwrap();
    PageData::new(
        "one.pickle",
        Vec::new(),
        vec![RankData::new("one.pickle", snapshot, &explanation)],
    )
}

fn json_in(page: &str) -> Value {
    let (_, rest) = page.split_once("id=\"data\">").unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

#[test]
fn what_was_there_before_a_late_recording_is_there_from_the_first_moment() {
    use Action::{Alloc, FreeCompleted, FreeRequested, SegmentFree};
    let blocks = vec![
        block(0, 1024, BlockState::Allocated),
        block(1024, 512, BlockState::Allocated),
        block(1536, 512, BlockState::Inactive),
    ];
    let events = vec![
        event(FreeCompleted, 9000, 512),
        event(FreeRequested, 1024, 500),
        event(FreeCompleted, 1024, 500),
        event(Alloc, 1024, 512),
        event(SegmentFree, 8192, 2 << 20),
    ];
    let lifetimes = Lifetimes::of(&snapshot(vec![segment(0, 2048, false, blocks)], events), 0);
    let seen: Vec<LifeFigures> = (0..=5).map(|moment| lifetimes.at(moment)).collect();
    assert_eq!(
        seen,
        [
            figures(1536, 512, (2 << 20) + 2048),
            figures(1536, 0, (2 << 20) + 2048),
            figures(1024, 512, (2 << 20) + 2048),
            figures(1024, 0, (2 << 20) + 2048),
            figures(1536, 0, (2 << 20) + 2048),
            figures(1536, 0, 2048)
        ]
    );
    assert_eq!(lifetimes.contradictions, Contradictions::default());
    assert_eq!(
        (lifetimes.peak_allocated(), lifetimes.peak_reserved()),
        ((0, Bytes(1536)), (0, Bytes((2 << 20) + 2048)))
    );
}

#[test]
fn pages_of_an_expandable_segment_come_and_go() {
    use Action::{SegmentMap, SegmentUnmap};
    let events = vec![
        event(SegmentMap, 0, 100),
        event(SegmentMap, 100, 300),
        event(SegmentUnmap, 50, 200),
        event(SegmentMap, 50, 100),
    ];
    let held = vec![
        segment(0, 150, true, Vec::new()),
        segment(250, 150, true, Vec::new()),
    ];
    let lifetimes = Lifetimes::of(&snapshot(held, events), 0);
    let reserved: Vec<u64> = (0..=4)
        .map(|moment| lifetimes.at(moment).reserved.0)
        .collect();
    assert_eq!(reserved, [0, 100, 400, 200, 300]);
    assert_eq!(lifetimes.contradictions, Contradictions::default());
}

#[test]
fn events_that_contradict_the_final_state_are_counted() {
    use Action::{Alloc, FreeCompleted, SegmentAlloc};
    let events = vec![
        event(SegmentAlloc, 0, 1024),
        event(SegmentAlloc, 4096, 512),
        event(Alloc, 0, 512),
        event(Alloc, 0, 1024),
        event(Alloc, 4096, 512),
    ];
    let held = vec![segment(
        0,
        1024,
        false,
        vec![block(0, 1024, BlockState::Allocated)],
    )];
    let lifetimes = Lifetimes::of(&snapshot(held, events), 0);
    assert_eq!(
        lifetimes.contradictions,
        Contradictions {
            missing_frees: 1,
            missing_blocks: 1,
            missing_segment_bytes: 512
        }
    );
    assert_eq!(lifetimes.at(5), figures(1024, 0, 1024));
    // Such a recording has no explanation of its own.
    let explanation = explain(
        &snapshot(Vec::new(), vec![event(FreeCompleted, 0, 512)]),
        0,
        Options::default(),
    )
    .unwrap();
    let rank = RankData::new(
        "one.pickle",
        &snapshot(Vec::new(), vec![event(Alloc, 0, 512)]),
        &explanation,
    );
    let notes =
        json_in(&page(&PageData::new("one.pickle", Vec::new(), vec![rank])))["ranks"][0]["notes"]
            .to_string();
    assert!(
        notes.contains("Live after all events, but missing from the final state: 1 block."),
        "{notes}"
    );
}

proptest! {
    /// Random programs on four segments of four slots that lose their first events have the figures
    /// of a plain count.
    #[test]
    fn every_moment_has_the_figures_of_a_plain_count(
        steps in prop::collection::vec((0..4_u64, 0..4_u64), 0..200), lost in 0..100_usize
    ) {
        let mut held: BTreeMap<u64, [BlockState; 4]> = BTreeMap::new();
        let (mut events, mut expected) = (Vec::new(), vec![figures(0, 0, 0)]);
        for (place, slot) in steps {
            let (start, address) = (place << 22, (place << 22) + slot * 1024);
            let action = match held.get_mut(&start) {
                None => {
                    held.insert(start, [BlockState::Inactive; 4]);
                    Action::SegmentAlloc
                }
                Some(slots)
                    if slot == 0 && slots.iter().all(|state| *state == BlockState::Inactive) =>
                {
                    held.remove(&start);
                    Action::SegmentFree
                }
                Some(slots) => {
                    let (next, action) = match slots[slot as usize] {
                        BlockState::Inactive => (BlockState::Allocated, Action::Alloc),
                        BlockState::Allocated => (BlockState::PendingFree, Action::FreeRequested),
                        BlockState::PendingFree => (BlockState::Inactive, Action::FreeCompleted),
                    };
                    slots[slot as usize] = next;
                    action
                }
            };
            let is_segment = matches!(action, Action::SegmentAlloc | Action::SegmentFree);
            events.push(if is_segment {
                event(action, start, 2 << 20)
            } else {
                event(action, address, 1024)
            });
            let count = |state| {
                1024 * held.values().flatten().filter(|slot| **slot == state).count() as u64
            };
            expected.push(figures(
                count(BlockState::Allocated),
                count(BlockState::PendingFree),
                (2 << 20) * held.len() as u64,
            ));
        }
        let lost = lost.min(events.len());
        let blocks = |start: u64, slots: &[BlockState; 4]| {
            (0..4).map(|slot| block(start + 1024 * slot, 1024, slots[slot as usize])).collect()
        };
        let segments = held
            .iter()
            .map(|(&start, slots)| segment(start, 2 << 20, false, blocks(start, slots)))
            .collect();
        let lifetimes = Lifetimes::of(&snapshot(segments, events.split_off(lost)), 0);
        let seen: Vec<LifeFigures> =
            (0..=lifetimes.events).map(|moment| lifetimes.at(moment)).collect();
        prop_assert_eq!(&seen, &expected[lost..]);
        prop_assert_eq!(lifetimes.contradictions, Contradictions::default());
        prop_assert_eq!(
            lifetimes.peak_allocated().1,
            seen.iter().map(|at| at.allocated).max().unwrap()
        );
        prop_assert_eq!(
            lifetimes.peak_reserved().1,
            seen.iter().map(|at| at.reserved).max().unwrap()
        );
    }
}

/// A snapshot whose texts contain markup.
fn hostile() -> Snapshot {
    let actions = [Action::Alloc, Action::FreeRequested, Action::FreeCompleted];
    let mut hostile = snapshot(
        Vec::new(),
        actions.map(|action| event(action, 0, 512)).to_vec(),
    );
    let text = "</script><img src=x onerror=alert(1)>{{style}}\u{2028}".to_owned();
    let frame = hostile.stacks.intern_frame(Frame {
        name: text.clone(),
        file: text.clone(),
        line: 7,
        ..Frame::default()
    });
    hostile.traces[0][0].stack = hostile.stacks.intern(&[frame]);
    hostile.settings = Some(RecordedSettings {
        conf: text,
        ..RecordedSettings::default()
    });
    hostile
}

#[test]
fn texts_that_look_like_markup_stay_texts() {
    let snapshot = hostile();
    let text = snapshot.settings.as_ref().unwrap().conf.clone();
    let mut explanation = explain(&snapshot, 0, Options::default()).unwrap();
    explanation.headline.clone_from(&text);
    explanation.notes = vec![text.clone()];
    let page = page(&PageData::new(
        &text,
        vec![text.clone()],
        vec![RankData::new(&text, &snapshot, &explanation)],
    ));
    assert_eq!(
        page.matches("</script").count(),
        2,
        "the data's and the script's own"
    );
    assert!(!page.contains("<img"));
    let json = json_in(&page);
    for place in [
        "/title",
        "/overview/0",
        "/ranks/0/name",
        "/ranks/0/headline",
        "/ranks/0/notes/0",
        "/ranks/0/settings",
        "/ranks/0/frames/0/0",
        "/ranks/0/frames/0/1",
    ] {
        assert_eq!(json.pointer(place).unwrap(), &text, "{place}");
    }
}

#[test]
fn the_page_asks_for_nothing_from_outside() {
    let page = page(&data_of(&Snapshot::default()));
    for way in [
        "http:",
        "https:",
        "//cdn",
        "src=",
        "@import",
        "url(",
        "fetch(",
        "XMLHttpRequest",
        "import(",
    ] {
        assert!(!page.contains(way), "{way}");
    }
    assert!(page.contains("default-src 'none'"));
    assert!(!page.contains("{{"), "every slot is filled");
}

#[test]
fn the_columns_of_the_page_are_the_lives_of_blocks_and_segments() {
    use Action::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc};
    let base = 0x7000_0000_0000;
    let events = vec![
        event(SegmentAlloc, base + 4096, 8192),
        event(Alloc, base + 4096, 1000),
        event(Alloc, base + 5120, 512),
        event(FreeRequested, base + 4096, 1000),
        Event {
            time_us: Some(1_000_250),
            ..event(FreeCompleted, base + 4096, 1000)
        },
    ];
    let blocks = vec![
        block(base + 4096, 1024, BlockState::Inactive),
        block(base + 5120, 1024, BlockState::Allocated),
        block(base + 6144, 6144, BlockState::Inactive),
    ];
    let other = segment(
        base,
        2048,
        false,
        vec![block(base, 2048, BlockState::PendingFree)],
    );
    let snapshot = snapshot(
        vec![other, segment(base + 4096, 8192, false, blocks)],
        events,
    );
    let json = json_in(&page(&data_of(&snapshot)));
    let rank = &json["ranks"][0];
    let column = |place: &str| decode(rank.pointer(place).unwrap().as_str().unwrap());
    assert_eq!(rank["base_address"], base.to_string());
    assert_eq!(column("/times"), [0, 0, 0, 0, 250]);
    assert_eq!(column("/blocks/address"), [0, 4096, 5120]);
    assert_eq!(column("/blocks/size"), [2048, 1024, 1024]);
    assert_eq!(column("/blocks/requested"), [2048, 1000, 1024]);
    assert_eq!(column("/blocks/start"), [0, 2, 3]);
    assert_eq!(
        column("/blocks/freed"),
        [0, 2, 3],
        "moments from start to free"
    );
    assert_eq!(
        column("/blocks/end"),
        [6, 1, 0],
        "moments from the free to the end"
    );
    assert_eq!(column("/segments/address"), [0, 4096]);
    assert_eq!(column("/segments/start"), [0, 1]);
    assert_eq!(
        (&rank["allocated"], &rank["pending"], &rank["reserved"]),
        (&1024.into(), &2048.into(), &10240.into())
    );
    assert_eq!(
        (&rank["peak_moment"], &rank["peak_allocated"]),
        (&3.into(), &2048.into())
    );
    assert_eq!(
        rank["stacks"][0]["byte_events"],
        1024.0 * 2.0 + 1024.0 * 2.0
    );
    assert_eq!(rank["stacks"][0]["byte_seconds"], (1024.0 + 0.0) * 0.00025);
}
