use harness_allocator::units::Bytes;
use harness_trace::snapshot::{Action, FrameId};

use super::*;

const TORCH: &str = "/env/lib/python3.11/site-packages/torch/nn/modules/conv.py";

fn stack(snapshot: &mut Snapshot, frames: &[(&str, u32, &str)]) -> StackId {
    let frames: Vec<FrameId> = frames
        .iter()
        .map(|&(file, line, name)| {
            snapshot.stacks.intern_frame(Frame {
                name: name.to_owned(),
                file: file.to_owned(),
                line,
                ..Frame::default()
            })
        })
        .collect();
    snapshot.stacks.intern(&frames)
}

fn alloc(stack: StackId, size: u64, time_us: u64) -> Event {
    Event {
        action: Action::Alloc,
        address: 0,
        size: Bytes(size),
        stream: 0,
        time_us: Some(time_us),
        stack,
        extra: Default::default(),
    }
}

fn names(snapshot: &Snapshot) -> Vec<String> {
    let sites = Sites::new(snapshot, 0);
    (0..snapshot.traces[0].len())
        .map(|event| sites.get(sites.of_event(event)).name.clone())
        .collect()
}

#[test]
fn a_site_is_the_innermost_frame_of_the_program() {
    let mut snapshot = Snapshot::default();
    let deep = stack(
        &mut snapshot,
        &[
            ("??", 0, "at::empty"),
            (
                "/env/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so",
                107_658_604,
                "at::native::conv",
            ),
            ("/env/bin/python3.11", 4224, "_start"),
            ("thread48.o", 0, "execute_native_thread_routine"),
            (TORCH, 548, "_conv_forward"),
            ("/usr/lib/python3.11/contextlib.py", 81, "inner"),
            (
                "/env/lib/python3.11/site-packages/torchvision/models/resnet.py",
                154,
                "forward",
            ),
            ("/srv/train.py", 9, "<module>"),
        ],
    );
    let plain = stack(&mut snapshot, &[("/srv/train.py", 9, "<module>")]);
    snapshot.traces = vec![vec![alloc(deep, 512, 1), alloc(plain, 512, 2)]];
    assert_eq!(names(&snapshot), ["resnet.py:154 forward", "train.py:9"]);
    let sites = Sites::new(&snapshot, 0);
    assert_eq!(
        sites.get(sites.of_event(0)).stack.len(),
        8,
        "the full stack is kept"
    );
}

#[test]
fn events_without_frames_get_the_site_before_them() {
    let mut snapshot = Snapshot::default();
    let loss = stack(&mut snapshot, &[("/srv/train.py", 7, "step")]);
    let library = stack(&mut snapshot, &[(TORCH, 548, "_conv_forward")]);
    snapshot.traces = vec![vec![
        alloc(StackId::EMPTY, 512, 1),
        alloc(StackId::EMPTY, 2 << 20, 3),
        alloc(StackId::EMPTY, 512, 6),
        alloc(loss, 512, 7),
        alloc(StackId::EMPTY, 512, 8),
        alloc(library, 512, 9),
    ]];
    let annotation = |begins, time_us| Annotation {
        begins,
        name: "warm-up".to_owned(),
        device: 0,
        time_us,
        extra: Default::default(),
    };
    snapshot.annotations = vec![annotation(true, 5), annotation(false, 6_000_000)];
    assert_eq!(
        names(&snapshot),
        [
            "no Python frames, requests below 1 MiB",
            "no Python frames, requests of 2 MiB (2097152 B)",
            "no Python frames, in warm-up",
            "train.py:7 step",
            "no Python frames, after train.py:7 step",
            "no Python frames, after train.py:7 step",
        ]
    );
}

#[test]
fn files_of_the_same_name_show_their_folders() {
    let files = [
        "/a/gpt/model.py",
        "/a/bert/model.py",
        "/a/train.py",
        "/b/gpt/model.py",
    ];
    let short = ShortFiles::new(files.into_iter());
    assert_eq!(
        files.map(|file| short.short(file)),
        [
            "a/gpt/model.py",
            "bert/model.py",
            "train.py",
            "b/gpt/model.py"
        ]
    );
}

#[test]
fn blocks_from_before_the_recording_are_marked() {
    let snapshot = Snapshot {
        traces: vec![Vec::new()],
        ..Snapshot::default()
    };
    let sites = Sites::new(&snapshot, 0);
    assert_eq!(
        sites.get(sites.of_block(None, StackId::EMPTY)).kind,
        SiteKind::BeforeRecording
    );
}
