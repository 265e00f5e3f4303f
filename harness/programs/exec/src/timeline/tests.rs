#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn samples_are_read_and_a_truncated_line_is_ignored() {
    let run = tempfile::tempdir().unwrap();
    fs::write(run.path().join("7.attempts"), "").unwrap();
    fs::write(
        run.path().join("samples-7"),
        "0 0 512\n12 1 1024\nnothing\n13 1 20",
    )
    .unwrap();
    let timelines = ProgramTimeline::read_folder(run.path(), run.path()).unwrap();
    let sample = |submitted, device, allocated| Sample {
        submitted,
        device,
        allocated: Bytes(allocated),
    };
    assert_eq!(
        timelines,
        [ProgramTimeline {
            pid: 7,
            samples: vec![sample(0, 0, 512), sample(12, 1, 1024)],
            ..ProgramTimeline::default()
        }]
    );
}
