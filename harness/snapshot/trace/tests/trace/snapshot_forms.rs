//! Reads one snapshot in all pickle formats (written by `snapshots/make.py`), and files that are
//! not snapshots.

use std::path::{Path, PathBuf};
use std::process::Command;

use harness_allocator::allocator::caching::{Config, TorchVersion};
use harness_allocator::stats::{BlockState, PoolKind};
use harness_allocator::units::Bytes;
use harness_trace::snapshot::{
    Action, Annotation, Block, Event, ExtraId, Frame, MempoolId, RecordedSettings, Recording,
    Segment, Snapshot, SnapshotError, StackId, Value,
};
use proptest::prelude::*;

const START: u64 = 0x7f00_0000_0000;
const MAPPED: u64 = 0x2000_0000_0000;
const SIDE: u64 = 0x5581_a0c0;
const TIME: u64 = 1_795_166_450_042_919;

const FORMS: [&str; 8] = [
    "protocol2.pickle",
    "protocol3.pickle",
    "protocol4.pickle",
    "protocol5.pickle",
    "packed.pickle.gz",
    "cpp.pickle",
    "segments.pickle",
    "old.pickle",
];

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/snapshots")
        .join(name)
}

fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(path(name)).unwrap()
}

fn read(name: &str) -> Snapshot {
    Snapshot::read(&path(name)).unwrap()
}

fn text(text: &str) -> Value {
    Value::Text(text.to_owned())
}

fn key(name: &str, value: Value) -> (String, Value) {
    (name.to_owned(), value)
}

/// The stacks `ALLOCATED` and `OTHER` of `make.py`.
fn stacks(snapshot: &mut Snapshot) -> [StackId; 2] {
    let frame = |name: &str, file: &str, line| Frame {
        name: name.to_owned(),
        file: file.to_owned(),
        line,
        extra: ExtraId::NONE,
    };
    let step = snapshot
        .stacks
        .intern_frame(frame("step", "/srv/modèle.py", 7));
    let main = snapshot
        .stacks
        .intern_frame(frame("<module>", "/srv/train.py", 41));
    let allocated = snapshot.stacks.intern(&[step, main]);
    let compiled = snapshot.extras.intern(vec![
        key("fx_node_op", text("call_function")),
        key("fx_node_name", text("addmm")),
    ]);
    let compiled = snapshot.stacks.intern_frame(Frame {
        extra: compiled,
        ..frame("call", "/tmp/torchinductor/ab.py", 99)
    });
    let library = snapshot
        .extras
        .intern(vec![key("line", Value::Int(1 << 40))]);
    let library = snapshot.stacks.intern_frame(Frame {
        extra: library,
        ..frame("??", "libtorch.so", 0)
    });
    [
        allocated,
        snapshot.stacks.intern(&[compiled, library, main]),
    ]
}

/// Addresses, sizes and states of the segments of `make.py`.
fn segments([allocated, other]: [StackId; 2]) -> Vec<Segment> {
    let block = |address, size, requested, state, stack| Block {
        address,
        size: Bytes(size),
        requested: Bytes(requested),
        state,
        stack,
        extra: ExtraId::NONE,
    };
    let segment = |blocks: Vec<Block>, stream, pool, private_pool, expandable, stack| Segment {
        device: 0,
        address: blocks[0].address,
        size: Bytes(blocks.iter().map(|block| block.size.0).sum()),
        stream,
        pool,
        private_pool,
        expandable,
        stack,
        blocks,
        extra: ExtraId::NONE,
    };
    let mib = |count| Bytes::mib(count).0;
    let (large, graph) = (START + mib(2), START + mib(32));
    let small = vec![
        block(START, 1024, 1000, BlockState::Allocated, allocated),
        block(START + 1024, 512, 4, BlockState::PendingFree, other),
        block(
            START + 1536,
            mib(2) - 1536,
            0,
            BlockState::Inactive,
            StackId::EMPTY,
        ),
    ];
    let large = vec![
        block(
            large,
            mib(12),
            mib(12) - 3,
            BlockState::Inactive,
            StackId::EMPTY,
        ),
        block(
            large + mib(12),
            mib(8),
            mib(8),
            BlockState::Allocated,
            other,
        ),
    ];
    let graph = vec![block(
        graph,
        mib(2),
        5,
        BlockState::Inactive,
        StackId::EMPTY,
    )];
    let mapped = vec![block(
        MAPPED,
        mib(40),
        mib(40) - 9,
        BlockState::Allocated,
        StackId::EMPTY,
    )];
    vec![
        segment(
            small,
            0,
            PoolKind::Small,
            MempoolId::DEFAULT,
            false,
            allocated,
        ),
        segment(
            large,
            SIDE,
            PoolKind::Large,
            MempoolId::DEFAULT,
            false,
            StackId::EMPTY,
        ),
        segment(graph, 0, PoolKind::Small, MempoolId(0, 1), false, other),
        segment(
            mapped,
            0,
            PoolKind::Large,
            MempoolId(3, 0),
            true,
            StackId::EMPTY,
        ),
    ]
}

/// The events of `make.py`, under its names.
fn events(snapshot: &mut Snapshot, [allocated, other]: [StackId; 2]) -> Vec<Event> {
    use Action::{
        Alloc, FreeCompleted, FreeRequested, Oom, SegmentAlloc, SegmentFree, SegmentMap,
        SegmentUnmap,
    };
    let mib = |count| Bytes::mib(count).0;
    let (large, graph, none) = (START + mib(2), START + mib(32), StackId::EMPTY);
    let (default, capture, program) = (MempoolId::DEFAULT, MempoolId(0, 1), MempoolId(3, 0));
    let rows = [
        (SegmentAlloc, START, mib(2), 0, 0, allocated, default),
        (Alloc, START, 1000, 0, 1, allocated, default),
        (SegmentAlloc, large, mib(20), SIDE, 2, none, default),
        (Alloc, large, mib(12) - 3, SIDE, 3, other, default),
        (Alloc, large + mib(12), mib(8), SIDE, 4, other, default),
        (SegmentAlloc, graph, mib(2), 0, 5, other, capture),
        (SegmentMap, MAPPED, mib(40), 0, 6, none, default),
        (Alloc, MAPPED, mib(40) - 9, 0, 7, none, program),
        (Alloc, START + 1024, 4, 0, 8, other, default),
        (FreeRequested, START + 1024, 4, 0, 9, other, default),
        (FreeRequested, large, mib(12) - 3, SIDE, 10, none, default),
        (FreeCompleted, large, mib(12) - 3, SIDE, 10, none, default),
        (Action::Snapshot, 0, 0, 0, 11, none, default),
        (SegmentAlloc, START + mib(99), mib(2), 0, 12, none, default),
        (SegmentFree, START + mib(99), mib(2), 0, 13, none, default),
        (SegmentMap, MAPPED + mib(40), mib(2), 0, 14, none, default),
        (SegmentUnmap, MAPPED + mib(40), mib(2), 0, 15, none, default),
        (Oom, mib(3), 1 << 33, 0, 16, allocated, default),
    ];
    let mut event = |(action, address, size, stream, after, stack, MempoolId(first, second))| {
        let pool = Value::Tuple(vec![
            Value::Int(i128::from(first)),
            Value::Int(i128::from(second)),
        ]);
        let extra = snapshot.extras.intern(vec![
            key("compile_context", text("N/A")),
            key("user_metadata", text("")),
            key("pool_id", pool),
        ]);
        Event {
            action,
            address,
            size: Bytes(size),
            stream,
            time_us: Some(TIME + after),
            stack,
            extra,
        }
    };
    rows.into_iter().map(&mut event).collect()
}

fn settings() -> RecordedSettings {
    let divisions = (0..16)
        .map(|power| (text(&(1 << power).to_string()), Value::Int(0)))
        .collect();
    RecordedSettings::new(vec![
        key(
            "PYTORCH_CUDA_ALLOC_CONF",
            text("max_split_size_mb:128,garbage_collection_threshold:0.8"),
        ),
        key("max_split_size", Value::Int(128 << 20)),
        key(
            "garbage_collection_threshold",
            Value::Float(f64::to_bits(0.8)),
        ),
        key("expandable_segments", Value::Bool(false)),
        key("pinned_num_register_threads", Value::Int(1)),
        key("release_lock_on_cudamalloc", Value::Bool(false)),
        key("pinned_use_cuda_host_register", Value::Bool(false)),
        key("roundup_power2_divisions", Value::Dict(divisions)),
    ])
}

/// The snapshot of `make.py` without keys that a program added.
fn plain() -> Snapshot {
    let mut snapshot = Snapshot::default();
    let stacks = stacks(&mut snapshot);
    snapshot.segments = segments(stacks);
    snapshot.traces = vec![events(&mut snapshot, stacks), Vec::new()];
    snapshot.settings = Some(settings());
    let mark = |begins, after| Annotation {
        begins,
        name: "Optimizer.step#SGD.step".to_owned(),
        device: 0,
        time_us: TIME + after,
        extra: ExtraId::NONE,
    };
    snapshot.annotations = vec![mark(true, 4), mark(false, 9)];
    snapshot
}

#[test]
fn all_pickle_formats_give_the_same_snapshot() {
    let mut expected = plain();
    assert_eq!(read("cpp.pickle"), expected);
    let host = Value::Dict(vec![
        (text("names"), Value::List(vec![text("a"), text("b")])),
        (
            text("load"),
            Value::Tuple(vec![
                Value::Float(f64::to_bits(0.5)),
                Value::None,
                Value::Bool(true),
            ]),
        ),
        (text("big"), Value::Int(1 << 90)),
    ]);
    let mut keys = vec![key("rank", Value::Int(3)), key("host", host)];
    expected.extra = expected.extras.intern(keys.clone());
    for name in ["protocol2.pickle", "protocol3.pickle", "packed.pickle.gz"] {
        assert_eq!(read(name), expected, "{name}");
    }
    let mut newer = plain();
    keys.extend([
        key("tag", Value::Bytes(vec![0, 255])),
        key("kinds", Value::Set(vec![text("x")])),
    ]);
    newer.extra = newer.extras.intern(keys);
    for name in ["protocol4.pickle", "protocol5.pickle"] {
        assert_eq!(read(name), newer, "{name}");
        assert_eq!(Snapshot::parse(&bytes(name)).unwrap(), newer, "{name}");
    }
}

#[test]
fn events_of_new_versions_name_their_private_pool() {
    let snapshot = read("protocol4.pickle");
    let pools: Vec<_> = [0, 5, 7]
        .map(|index| snapshot.pool_of(&snapshot.traces[0][index]))
        .to_vec();
    assert_eq!(
        pools,
        [
            Some(MempoolId(0, 0)),
            Some(MempoolId(0, 1)),
            Some(MempoolId(3, 0))
        ]
    );
    let old = read("old.pickle");
    assert_eq!(old.pool_of(&old.traces[0][0]), None);
}

#[test]
fn a_list_of_segments_is_a_snapshot_without_events() {
    let (list, whole) = (read("segments.pickle"), plain());
    assert_eq!(list.segments, whole.segments);
    assert_eq!((list.traces.len(), list.settings), (0, None));
}

#[test]
fn snapshots_of_pytorch_2_0_have_owners_and_pending_frees() {
    let (old, whole) = (read("old.pickle"), plain());
    let blocks = |snapshot: &Snapshot| -> Vec<_> {
        let frames = |block: &Block| {
            snapshot
                .stacks
                .frames(block.stack)
                .map(|frame| frame.name.clone())
                .collect::<Vec<_>>()
        };
        let in_use = snapshot
            .segments
            .iter()
            .flat_map(|segment| &segment.blocks)
            .filter(|block| block.state != BlockState::Inactive);
        in_use
            .map(|block| {
                (
                    block.address,
                    block.size,
                    block.requested,
                    block.state,
                    frames(block),
                )
            })
            .collect()
    };
    assert_eq!(blocks(&old), blocks(&whole));
    assert_eq!(old.traces[0].len(), whole.traces[0].len());
    assert!(old.traces[0].iter().all(|event| event.time_us.is_none()));
    assert_eq!(
        old.annotations,
        [Annotation {
            begins: true,
            name: "## forward ##".to_owned(),
            device: 0,
            time_us: 5,
            extra: ExtraId::NONE
        }]
    );
    let notes = [
        "Ignored 1 event with the unknown action `defragment`.",
        "Ignored 4 former owners of blocks (`history`).",
    ];
    assert_eq!(old.notes, notes);
}

#[test]
fn gaps_of_a_recording_are_detected() {
    let whole = plain();
    let complete = Recording {
        from_start: true,
        events_lost: false,
        missing: Vec::new(),
    };
    assert_eq!(
        (whole.recording(0), whole.recording(1), whole.recording(2)),
        (Some(complete.clone()), None, None)
    );
    let without = |skip: fn(&Event) -> bool| {
        let mut snapshot = plain();
        snapshot.traces[0].retain(|event| !skip(event));
        snapshot.recording(0).unwrap()
    };
    // The first events are missing, and live blocks have the stacks of their allocations.
    assert_eq!(
        without(|event| event.time_us < Some(TIME + 5)),
        Recording {
            from_start: false,
            events_lost: true,
            missing: Vec::new()
        }
    );
    // A block is allocated again before its earlier free completes; another is freed twice. The
    // same for segments.
    let again = |actions: &[(Action, u64)]| {
        let mut snapshot = plain();
        let events = actions.iter().map(|&(action, address)| Event {
            action,
            address,
            size: Bytes(512),
            ..snapshot.traces[0][0]
        });
        let events: Vec<Event> = events.collect();
        snapshot.traces[0].extend(events);
        snapshot.recording(0).unwrap().missing
    };
    use Action::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc, SegmentFree};
    assert_eq!(again(&[(Alloc, START + 1024)]), [FreeCompleted]);
    assert_eq!(again(&[(Alloc, START)]), [FreeRequested, FreeCompleted]);
    assert_eq!(again(&[(FreeCompleted, START)]), [FreeRequested]);
    assert_eq!(
        again(&[(FreeRequested, START), (FreeRequested, START)]),
        [Alloc]
    );
    assert_eq!(again(&[(SegmentAlloc, START)]), [SegmentFree]);
    assert_eq!(
        again(&[(SegmentFree, 1 << 21), (SegmentFree, 1 << 21)]),
        [SegmentAlloc]
    );
}

#[test]
fn old_settings_are_converted_to_a_string() {
    let conf = |all: &[(&str, Value)]| {
        RecordedSettings::new(
            all.iter()
                .map(|(name, value)| key(name, value.clone()))
                .collect(),
        )
        .conf
    };
    let rounding = |each: [i128; 3]| {
        Value::Dict(
            ["1", "2", "4"]
                .into_iter()
                .map(text)
                .zip(each.map(Value::Int))
                .collect(),
        )
    };
    let all = [
        ("max_split_size", Value::Int(512 << 20)),
        (
            "garbage_collection_threshold",
            Value::Float(f64::to_bits(0.6)),
        ),
        ("expandable_segments", Value::Bool(true)),
        ("roundup_power2_divisions", rounding([8, 8, 8])),
    ];
    assert_eq!(
        conf(&all),
        "max_split_size_mb:512,garbage_collection_threshold:0.6,expandable_segments:True,\
         roundup_power2_divisions:8"
    );
    assert_eq!(
        conf(&[("roundup_power2_divisions", rounding([0, 2, 4]))]),
        "roundup_power2_divisions:[1:0,2:2,4:4]"
    );
    let none = [
        ("max_split_size", Value::Int(-1)),
        ("max_split_size", Value::Int(i128::from(i64::MAX))),
        (
            "garbage_collection_threshold",
            Value::Float(f64::to_bits(0.0)),
        ),
        ("expandable_segments", Value::Bool(false)),
        ("roundup_power2_divisions", rounding([0, 0, 0])),
    ];
    assert_eq!(conf(&none), "");
}

#[test]
fn written_snapshots_are_read_unchanged() {
    for name in FORMS {
        let mut snapshot = read(name);
        snapshot.notes.clear();
        let mut written = Vec::new();
        snapshot.write(&mut written).unwrap();
        let again = Snapshot::parse(&written).unwrap();
        // Writing converts a list of segments into a whole dictionary.
        assert_eq!(again, snapshot, "{name}");
        let mut twice = Vec::new();
        again.write(&mut twice).unwrap();
        assert_eq!(twice, written, "{name}");
    }
}

#[test]
fn pytorch_reads_written_snapshots() {
    let mut written = Vec::new();
    plain().write(&mut written).unwrap();
    // The viewer of PyTorch 2.11 printed the text file for these bytes.
    assert!(
        written == bytes("written.pickle"),
        "the written bytes changed since the viewer read them: see make.py"
    );
    let python = std::env::var_os("HARNESS_TEST_PYTHON").unwrap_or_else(|| "python3".into());
    match Command::new(python)
        .arg(path("viewer.py"))
        .arg(path("written.pickle"))
        .output()
    {
        Ok(output) if output.status.code() != Some(2) => {
            assert_eq!(
                String::from_utf8_lossy(&output.stdout),
                std::fs::read_to_string(path("written.txt")).unwrap()
            )
        }
        _ => {
            eprintln!(
                "partly skipped: without torch 2.11 only the bytes are compared. Set \
                 HARNESS_TEST_PYTHON to a Python that has it"
            )
        }
    }
}

#[test]
fn truncated_files_are_errors() {
    for name in FORMS {
        let whole = bytes(name);
        for length in 0..whole.len() {
            let cut = Snapshot::parse(&whole[..length]);
            assert!(
                cut.is_err(),
                "{name}: {length} bytes of {} are read as whole",
                whole.len()
            );
            if length > 2 && !name.ends_with(".gz") {
                assert!(
                    matches!(cut, Err(SnapshotError::Truncated { offset })
                        if offset == length as u64),
                    "{name}, {length} bytes: {cut:?}"
                );
            }
        }
    }
}

#[test]
fn bytes_after_the_pickle_are_ignored() {
    let mut padded = bytes("protocol4.pickle");
    padded.extend([0, 0, b'c']);
    assert_eq!(Snapshot::parse(&padded).unwrap(), read("protocol4.pickle"));
}

/// The error for a pickle of protocol 4 with this content.
fn refused(content: &[u8]) -> String {
    Snapshot::parse(&[b"\x80\x04", content].concat())
        .unwrap_err()
        .to_string()
}

#[test]
fn opcodes_that_call_code_are_rejected() {
    let calls: [(&[u8], &str); 15] = [
        (b"cos\nsystem\n", "at byte 2 (GLOBAL os.system)"),
        (
            b"\x8c\x02os\x8c\x06system\x93",
            "at byte 14 (STACK_GLOBAL os.system)",
        ),
        (b"}R", "at byte 3 (REDUCE)"),
        (b"}b", "at byte 3 (BUILD)"),
        (b"(ios\nsystem\n", "at byte 3 (INST os.system)"),
        (b"(o", "at byte 3 (OBJ)"),
        (b"}\x81", "at byte 3 (NEWOBJ)"),
        (b"}\x92", "at byte 3 (NEWOBJ_EX)"),
        (b"\x82\x01", "at byte 2 (EXT1)"),
        (b"\x83\x01\x01", "at byte 2 (EXT2)"),
        (b"\x84\x01\x01\x01\x01", "at byte 2 (EXT4)"),
        (b"P0\n", "at byte 2 (PERSID)"),
        (b"K\x00Q", "at byte 4 (BINPERSID)"),
        (b"\x97", "at byte 2 (NEXT_BUFFER)"),
        (b"\x98", "at byte 2 (READONLY_BUFFER)"),
    ];
    for (content, place) in calls {
        let message = refused(content);
        assert!(
            message.starts_with(&format!(
                "calls code {place}, but a memory snapshot is plain data."
            )),
            "{message}"
        );
    }
}

#[test]
fn other_files_are_rejected_with_their_format() {
    let parse = |bytes: &[u8]| Snapshot::parse(bytes).unwrap_err().to_string();
    insta::assert_snapshot!(
        [
            parse(b""),
            parse(b"PK\x03\x04\x14\0"),
            parse(b"{\"segments\": []}"),
            parse(b"<!DOCTYPE html>"),
            parse(b"version https://git-lfs.github.com/spec/v1\n"),
            parse(b"a 1 512 0\nf 1\n"),
            parse(b"\x7fELF\x02\x01"),
            parse(b"\x1f\x8b\x08\x00"),
            parse(b"\x80\x09}."),
            refused(b"K\x05."),
            refused(b"}."),
            refused(b"}(\x8c\x05modelK\x01\x8c\x04stepK\x02u."),
            refused(b"}I5\ns."),
            refused(b"\xff"),
            refused(b"h\x00."),
            refused(b"]e"),
            refused(b"}(K\x01u"),
            refused(b"r\xff\xff\xff\xff"),
            refused(b"}r\xff\xff\xff\x7f"),
            refused(
                b"\x8a\x11\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01."
            ),
            refused(b"]K\x07a."),
        ]
        .join("\n")
    );
}

/// The error for a changed pickle.
fn changed(change: impl FnOnce(&mut Vec<u8>)) -> String {
    let mut content = Vec::new();
    change(&mut content);
    refused(&content)
}

#[test]
fn wrong_types_are_reported_with_their_path() {
    // Handwritten pickles with one segment and one block.
    fn words(content: &mut Vec<u8>, words: &[&str]) {
        for word in words {
            content.extend([0x8c, word.len() as u8]);
            content.extend(word.bytes());
        }
    }
    let segment = |block_size: &'static [u8], total: u8, kind: &'static str| {
        changed(move |content| {
            content.extend(b"](}(");
            words(content, &["address"]);
            content.extend(b"K\x00");
            words(content, &["total_size"]);
            content.extend([b'K', total]);
            words(content, &["segment_type", kind, "blocks"]);
            content.extend(b"](}(");
            words(content, &["size"]);
            content.extend(block_size);
            words(content, &["state", "inactive"]);
            content.extend(b"ueue.");
        })
    };
    let trace = |event: &'static [&'static str]| {
        changed(move |content| {
            content.extend(b"}(");
            words(content, &["segments"]);
            content.push(b']');
            words(content, &["device_traces"]);
            content.extend(b"](](}(");
            words(content, event);
            content.extend(b"ueeu.");
        })
    };
    insta::assert_snapshot!(
        [
            segment(b"N", 4, "large"),
            segment(b"J\xff\xff\xff\xff", 4, "large"),
            segment(b"K\x04", 5, "large"),
            segment(b"K\x04", 4, "huge"),
            trace(&["action", "alloc"]),
            trace(&["action", "alloc", "addr", "here"]),
            trace(&["name", "step", "filename", "a.py"]),
        ]
        .join("\n")
    );
}

#[test]
fn circular_and_often_shared_objects_are_errors() {
    // {"segments": [], "x": l} with a list l that contains itself, then one with nested lists, each
    // twice in the next.
    let around = [
        b"}(\x8c\x08segments]\x8c\x01x".as_slice(),
        b"]\x94h\x00a",
        b"u.",
    ]
    .concat();
    assert!(
        refused(&around)
            .starts_with("contains more than 32 levels of nested lists and dictionaries"),
        "{}",
        refused(&around)
    );
    let mut shared = b"]\x940".to_vec();
    for level in 0..25 {
        shared.extend([b"]\x94(h".as_slice(), &[level], b"h", &[level], b"e0"].concat());
    }
    shared.extend(b"}(\x8c\x08segments]\x8c\x01xh\x19u.");
    assert!(
        refused(&shared).starts_with("takes more than 1 GiB of memory to read"),
        "{}",
        refused(&shared)
    );
}

#[test]
fn deep_lists_do_not_overflow_the_stack() {
    let mut deep = vec![b']'; 200_000];
    deep.extend(vec![b'a'; 199_999]);
    deep.push(b'.');
    assert!(
        refused(&deep).contains("segments[0] should be a segment's dictionary, but is a list"),
        "{}",
        refused(&deep)
    );
}

#[test]
fn wrong_lengths_take_no_memory() {
    for content in [
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f".as_slice(),
        b"X\xff\xff\xff\xff",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x8b\xff\xff\xff\x7f",
    ] {
        assert!(matches!(
            Snapshot::parse(&[b"\x80\x04", content].concat()),
            Err(SnapshotError::Truncated { .. })
        ));
    }
}

#[test]
fn rmm_logs_are_snapshots_of_their_events() {
    let log = "Thread,Time,Action,Pointer,Size,Stream\n\
               1979932,14:21:19.998533,allocate,0x30a000000,256,0x2\n\
               1980043,1634567890.5,allocate,0x30a000400,1024,0\r\n\
               1980043,14:21:32.661875,allocate failure,(nil),34359738368,0x2\n\
               1980043,14:21:32.661875,free,0x30a000000,256,0x2\n\
               1980043,14:21:33,deallocate,0x30a000400,1024,0\n";
    let snapshot = Snapshot::parse(log.as_bytes()).unwrap();
    let events = snapshot.traces[0].iter().map(|event| {
        (
            event.action,
            event.address,
            event.size.0,
            event.stream,
            event.time_us,
        )
    });
    let time =
        |hours: u64, minutes: u64, micros: u64| Some((hours * 60 + minutes) * 60_000_000 + micros);
    use Action::{Alloc, FreeCompleted, FreeRequested, Oom};
    let expected = [
        (Alloc, 0x3_0a00_0000, 256, 2, time(14, 21, 19_998_533)),
        (Alloc, 0x3_0a00_0400, 1024, 0, Some(1_634_567_890_500_000)),
        (Oom, 0, 32 << 30, 2, time(14, 21, 32_661_875)),
        (
            FreeRequested,
            0x3_0a00_0000,
            256,
            2,
            time(14, 21, 32_661_875),
        ),
        (
            FreeCompleted,
            0x3_0a00_0000,
            256,
            2,
            time(14, 21, 32_661_875),
        ),
        (
            FreeRequested,
            0x3_0a00_0400,
            1024,
            0,
            time(14, 21, 33_000_000),
        ),
        (
            FreeCompleted,
            0x3_0a00_0400,
            1024,
            0,
            time(14, 21, 33_000_000),
        ),
    ];
    assert_eq!(events.collect::<Vec<_>>(), expected);
    assert_eq!(
        snapshot.extras.value(snapshot.traces[0][0].extra, "thread"),
        Some(&text("1979932"))
    );
    assert_eq!((snapshot.segments.len(), snapshot.notes.len()), (0, 2));
}

#[test]
fn wrong_lines_of_rmm_logs_are_reported_with_the_accepted_form() {
    let message = |line: &str| {
        let log = format!(
            "Thread,Time,Action,Pointer,Size,Stream\n1,10:00:00.1,allocate,0x100,256,0\n{line}\n"
        );
        Snapshot::parse(log.as_bytes()).unwrap_err().to_string()
    };
    let lines = [
        "1,10:00:00.1,allocate,0x100,256",
        "1,10:00:00.1,grow,0x100,256,0",
        "1,10:00:00.1,free,here,256,0",
        "1,10:00:00.1,free,0x100,-1,0",
        "1,,free,0x1,1,x",
    ];
    insta::assert_snapshot!(lines.map(message).join("\n"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None,
        ..ProptestConfig::default() })]

    /// A damaged file that can be read gives a snapshot that survives writing and reading.
    #[test]
    fn damaged_files_never_panic(
        form in 0..FORMS.len(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 1..6)
    ) {
        let mut damaged = bytes(FORMS[form]);
        for (place, byte, kind) in changes {
            let index = place.index(damaged.len());
            match kind {
                0 => damaged[index] = byte,
                1 => damaged.insert(index, byte),
                _ => drop(damaged.remove(index)),
            }
        }
        if let Ok(mut snapshot) = Snapshot::parse(&damaged) {
            snapshot.notes.clear();
            let _ = snapshot.recording(0);
            let mut written = Vec::new();
            snapshot.write(&mut written).unwrap();
            prop_assert_eq!(Snapshot::parse(&written).unwrap(), snapshot);
        }
    }
}

#[test]
fn the_version_of_pytorch_is_the_given_one_else_the_written_one_else_inferred() {
    let mut snapshot = Snapshot::default();
    assert_eq!(snapshot.torch(), TorchVersion::V2_11);
    snapshot.settings = Some(RecordedSettings::new(vec![(
        "max_round_threshold".to_owned(),
        Value::Int(-1),
    )]));
    assert_eq!(snapshot.torch(), TorchVersion::V2_15);
    let config = Config {
        torch: TorchVersion::V2_9,
        expandable_segments: true,
        ..Config::default()
    };
    snapshot.settings = Some(RecordedSettings::of(&config));
    let mut file = Vec::new();
    snapshot.write(&mut file).unwrap();
    let mut read = Snapshot::parse(&file).unwrap();
    assert_eq!(
        (read.torch(), read.config()),
        (TorchVersion::V2_9, Ok(config))
    );
    read.given_torch = Some(TorchVersion::V2_12);
    assert_eq!(read.config().unwrap().torch, TorchVersion::V2_12);
}
