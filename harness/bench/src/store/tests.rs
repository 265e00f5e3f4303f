#![allow(clippy::unwrap_used)]

use super::*;
use crate::examples::{self, Sampled};
use crate::record::{Quantity, Shard};

/// Renders only its arguments.
const RENDERER: Renderer = Renderer {
    run: |run, earlier| {
        vec![(
            "report.md".to_owned(),
            format!("{} after {}", run.started, earlier.len()),
        )]
    },
    index: |runs| {
        vec![(
            "README.md".to_owned(),
            runs.iter()
                .map(|(folder, _)| format!("{folder}\n"))
                .collect(),
        )]
    },
};

fn run(day: u32) -> BenchRun {
    examples::run(
        day,
        &[
            Sampled::noisy("caching", 20_000.0, 0.01),
            Sampled::exact("direct", Quantity::Memory, 4096.0),
        ],
    )
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.starts_with('.'))
        .collect();
    names.sort();
    names
}

fn index(root: &Path) -> String {
    fs::read_to_string(root.join(INDEX)).unwrap()
}

/// A root with runs of these days.
fn root(days: impl IntoIterator<Item = u32>) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for day in days {
        save(root.path(), run(day), RENDERER).unwrap();
    }
    root
}

#[test]
fn runs_read_back_as_they_were_in_the_order_of_their_beginning() {
    let root = root([12, 10, 11]);
    let runs = load(root.path()).unwrap();
    let started: Vec<&str> = runs
        .whole
        .iter()
        .map(|(_, run)| &run.started[..10])
        .collect();
    assert_eq!(started, ["2026-11-10", "2026-11-11", "2026-11-12"]);
    let saved = save(root.path(), run(13), RENDERER).unwrap();
    assert_eq!(read(&saved.folder).unwrap(), saved.run);
    assert_eq!(read(&saved.folder.join(RECORD)).unwrap(), saved.run);
    assert_eq!(
        fs::read_to_string(saved.folder.join("report.md")).unwrap(),
        "2026-11-13T02:00:00Z after 3"
    );
}

#[test]
fn folders_are_named_by_date_device_and_shard_and_numbered_where_taken() {
    let root = root([10, 10, 11]);
    let mut gpu = run(10);
    gpu.machine.device = "NVIDIA H200".to_owned();
    gpu.machine.clock = Clock::Measured;
    gpu.shard = Some(Shard { index: 1, count: 2 });
    save(root.path(), gpu, RENDERER).unwrap();
    assert_eq!(
        names(&root.path().join(NIGHTLY)),
        [
            "2026-11-10-nvidia-h200-1of2",
            "2026-11-10-sim",
            "2026-11-10-sim-2",
            "2026-11-11-sim"
        ]
    );
    assert_eq!(index(root.path()).lines().count(), 4);
    assert_eq!(
        names(&root.path().join("nightly/2026-11-10-sim")),
        [RECORD, "report.md"]
    );
}

#[test]
fn a_broken_run_is_told_and_the_others_are_used() {
    let root = root([10, 11, 12, 13]);
    let file = |day| {
        root.path()
            .join(format!("nightly/2026-11-{day}-sim"))
            .join(RECORD)
    };
    let whole = fs::read_to_string(file(11)).unwrap();
    fs::write(file(11), &whole[..whole.len() / 2]).unwrap();
    fs::write(file(12), r#"{"version": 99}"#).unwrap();
    fs::remove_file(file(13)).unwrap();
    std::os::unix::fs::symlink("/dev/zero", file(13)).unwrap();
    let saved = save(root.path(), run(14), RENDERER).unwrap();
    let told: Vec<String> = saved
        .broken
        .iter()
        .map(|error| {
            error
                .to_string()
                .replace(root.path().to_str().unwrap(), "…")
        })
        .collect();
    let expected = [
        "2026-11-11-sim/benchmark.json` is cut off at line 2",
        "has version 99, this harness reads up to version 4",
        "benchmark.json`: this is a device, not a file",
    ];
    assert_eq!(told.len(), expected.len(), "{told:#?}");
    assert!(
        told.iter()
            .zip(expected)
            .all(|(told, expected)| told.contains(expected)),
        "{told:#?}"
    );
    assert_eq!(
        fs::read_to_string(saved.folder.join("report.md")).unwrap(),
        "2026-11-14T02:00:00Z after 1"
    );
    assert_eq!(
        index(root.path()),
        "nightly/2026-11-10-sim\nnightly/2026-11-14-sim\n"
    );
}

#[test]
fn an_index_that_cannot_be_written_leaves_the_old_one_and_the_next_puts_it_right() {
    let root = root([10]);
    let before = index(root.path());
    // The index cannot be written, because a folder has its name.
    fs::create_dir(root.path().join("trend.svg")).unwrap();
    let with_trend = |runs: &[(String, BenchRun)]| {
        let trend = ("trend.svg".to_owned(), String::new());
        (RENDERER.index)(runs).into_iter().chain([trend]).collect()
    };
    save(
        root.path(),
        run(11),
        Renderer {
            index: with_trend,
            ..RENDERER
        },
    )
    .unwrap_err();
    assert_eq!(index(root.path()), before);
    assert!(save_index(root.path(), RENDERER).unwrap().is_empty());
    assert_eq!(
        index(root.path()),
        "nightly/2026-11-10-sim\nnightly/2026-11-11-sim\n"
    );
}

#[test]
fn a_run_rendered_again_keeps_its_record() {
    let root = root([10, 11]);
    let runs = load(root.path()).unwrap().whole;
    let (folder, run) = &runs[1];
    let folder = root.path().join(folder);
    let before = fs::read(folder.join(RECORD)).unwrap();
    fs::write(folder.join("report.md"), "spoiled").unwrap();
    render_again(&folder, run, &runs, RENDERER).unwrap();
    assert_eq!(
        fs::read_to_string(folder.join("report.md")).unwrap(),
        "2026-11-11T02:00:00Z after 1"
    );
    assert_eq!(fs::read(folder.join(RECORD)).unwrap(), before);
}
