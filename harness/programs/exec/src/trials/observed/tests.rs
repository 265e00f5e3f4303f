//! Outcomes read from the files of processes.
#![allow(clippy::unwrap_used)]

use super::*;
use harness_gpu_settings::calls::Call;

#[test]
fn errors_belong_to_the_process_with_the_most_attempts_and_truncated_lines_are_ignored() {
    let run = tempfile::tempdir().unwrap();
    let frame = r#"{"file": "/home/me/train.py", "line": 88, "name": "step"}"#;
    let text = format!("{{\"attempts\": 3, \"frames\": [{frame}]}}\n{{\"attempts\": 4, \"fra");
    // Kind 3 is cudaHostAlloc, which is not a device allocation.
    let attempts = |kinds: &[u64]| {
        kinds
            .iter()
            .flat_map(|kind| [*kind, 2 << 20, 0, 0])
            .flat_map(u64::to_le_bytes)
            .collect::<Vec<u8>>()
    };
    // Products can fail only for memory.
    let of_library = [Call::CublasCreate as u64, Call::CublasGemm as u64];
    fs::write(
        run.path().join("7.attempts"),
        attempts(&[&[0, 3, 0, 0], &of_library[..]].concat()),
    )
    .unwrap();
    fs::write(run.path().join("8.attempts"), attempts(&[0, 3, 3, 3, 3])).unwrap();
    fs::write(run.path().join("ooms-7.jsonl"), text).unwrap();
    // A rank, which also requests memory of another's device. It sees its own device 1 as its
    // first, by `CUDA_VISIBLE_DEVICES`.
    fs::write(
        run.path().join("9.attempts"),
        attempts(&[1 << 16, 1 << 32, 1 << 32]),
    )
    .unwrap();
    let ranks = attempts_of_ranks(run.path(), run.path()).unwrap();
    let [of_first, of_second] = &ranks[..] else {
        panic!("{ranks:?}")
    };
    assert_eq!((of_first.attempts.len(), of_first.errors.len()), (3, 1));
    assert_eq!(
        (
            of_first.errors[0].attempts,
            of_first.errors[0].frames[0].short()
        ),
        (2, "train.py:88".to_owned())
    );
    assert_eq!(
        (
            of_second.device,
            of_second.attempts.len(),
            of_second.of_device().map(|all| all.len())
        ),
        (1, 3, [2, 0])
    );
    assert_eq!(
        of_first
            .calls_of_libraries
            .iter()
            .map(|attempt| attempt.call)
            .collect::<Vec<_>>(),
        [Call::CublasCreate]
    );
}

#[test]
fn the_last_lines_omit_empty_ones() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stderr");
    fs::write(&path, format!("{}KeyError: 'x'  \n\n", "line\n".repeat(20))).unwrap();
    let lines = last_lines(&path).unwrap();
    assert_eq!(
        (lines.len(), lines.last().unwrap().as_str()),
        (LAST_LINES, "KeyError: 'x'")
    );
}
