#![allow(clippy::unwrap_used)]

use super::*;

fn sites(of: &[(&str, u64)]) -> BTreeMap<Place, u64> {
    of.iter()
        .map(|(place, bytes)| (Place::from((*place).to_owned()), *bytes))
        .collect()
}

fn changed(old: &[(&str, u64)], new: &[(&str, u64)]) -> Vec<(String, u64, u64)> {
    changed_sites(&sites(old), &sites(new))
        .into_iter()
        .map(|(place, old, new)| (place.to_string(), old, new))
        .collect()
}

fn baseline(at_peak: &[(&str, u64)]) -> Baseline {
    let figures = Figures {
        peak_allocated: Some(at_peak.iter().map(|(_, bytes)| bytes).sum()),
        at_peak: sites(at_peak),
        ..Figures::default()
    };
    Baseline {
        version: JSON_VERSION,
        settings: vec!["gpu=h100-80".to_owned(), "memory=1".to_owned()],
        libraries: BTreeMap::new(),
        processes: BTreeMap::from([("process 1".to_owned(), figures)]),
    }
}

#[test]
fn call_sites_survive_the_file_in_the_order_of_their_lines() {
    let names = [
        "after a.py:9 step",
        "a.py:9 step",
        "a.py:21",
        "a.py:108 <lambda>",
        "before the recording",
        "no Python frames, after x",
    ];
    let all = sites(&names.map(|name| (name, 1)));
    let text = serde_json::to_string(&all).unwrap();
    assert_eq!(
        serde_json::from_str::<BTreeMap<Place, u64>>(&text).unwrap(),
        all
    );
    let [first, second, third] =
        ["a.py:9 step", "a.py:21", "a.py:108"].map(|name| text.find(&format!("\"{name}")).unwrap());
    assert!(first < second && second < third, "{text}");
}

#[test]
fn lines_that_only_moved_are_no_difference() {
    let old = [("a.py:3 f", 7), ("a.py:5 f", 8), ("a.py:6 g", 9)];
    assert_eq!(
        changed(&old, &[("a.py:4 f", 7), ("a.py:8 f", 8), ("a.py:9 g", 9)]),
        []
    );
    assert_eq!(
        changed(&old, &[("b.py:3 f", 7), ("a.py:5 f", 8), ("a.py:6 g", 9)]).len(),
        2
    );
}

#[test]
fn the_line_that_changed_is_named_also_if_lines_moved() {
    let old = [("a.py:3 f", 7), ("a.py:5 f", 8), ("a.py:6 f", 9)];
    assert_eq!(
        changed(&old, &[("a.py:4 f", 7), ("a.py:6 f", 80), ("a.py:7 f", 9)]),
        [("a.py:6 f".to_owned(), 8, 80)]
    );
    assert_eq!(
        changed(
            &old,
            &[
                ("a.py:4 f", 7),
                ("a.py:6 f", 8),
                ("a.py:7 f", 5),
                ("a.py:8 f", 9)
            ]
        ),
        [("a.py:7 f".to_owned(), 0, 5)]
    );
    assert_eq!(
        changed(&old, &[("a.py:3 f", 7), ("a.py:6 f", 9)]),
        [("a.py:5 f".to_owned(), 8, 0)]
    );
}

#[test]
fn a_new_line_above_and_one_below_leave_the_lines_between_without_a_difference() {
    let old = [("a.py:3 f", 10), ("a.py:4 f", 20), ("a.py:5 f", 30)];
    let new = [
        ("a.py:3 f", 4),
        ("a.py:5 f", 10),
        ("a.py:6 f", 20),
        ("a.py:7 f", 30),
        ("a.py:8 f", 5),
    ];
    let [first, last] = [("a.py:3 f", 0, 4), ("a.py:8 f", 0, 5)]
        .map(|(place, old, new)| (place.to_owned(), old, new));
    assert_eq!(changed(&old, &new), [first, last]);
    // A line that went and another one that came.
    let other = [("a.py:3 f", 20), ("a.py:5 f", 30), ("a.py:6 f", 40)];
    assert_eq!(
        changed(&old, &other),
        [
            ("a.py:3 f".to_owned(), 10, 0),
            ("a.py:6 f".to_owned(), 0, 40)
        ]
    );
}

#[test]
fn lines_that_all_doubled_are_compared_each_with_itself() {
    let old = [("a.py:3 f", 10), ("a.py:4 f", 20), ("a.py:5 f", 40)];
    let new = [("a.py:4 f", 20), ("a.py:5 f", 40), ("a.py:6 f", 80)];
    let bytes: Vec<_> = changed(&old, &new)
        .into_iter()
        .map(|(_, old, new)| (old, new))
        .collect();
    assert_eq!(bytes, [(10, 20), (20, 40), (40, 80)]);
}

#[test]
fn the_lines_of_a_new_process_grew() {
    let (old, mut new) = (baseline(&[]), baseline(&[]));
    let child = baseline(&[("b.py:2", 7)]).processes["process 1"].clone();
    new.processes.insert("process 2".to_owned(), child);
    let grown = old.grown(&new);
    assert_eq!((grown[0].file.as_str(), grown[0].line), ("b.py", 2));
}

#[test]
fn differences_name_figures_sites_and_processes() {
    let (old, new) = (
        baseline(&[("a.py:3 f", 64 << 20), ("after a.py:3 f", 512)]),
        baseline(&[("a.py:3 f", 128 << 20)]),
    );
    let expected = [
        "peak allocated is 64.00 MiB more: 128 MiB instead of 64.00 MiB",
        "a.py:3 f allocates 64 MiB more at the peak: 128 MiB instead of 64 MiB",
        "code after a.py:3 f allocates 512 B less at the peak: 0 B instead of 512 B",
    ];
    assert_eq!(old.differences(&new), expected);
    let mut two = old.clone();
    two.processes
        .insert("rank 1".to_owned(), Figures::default());
    assert_eq!(
        old.differences(&two),
        ["rank 1 uses the GPU, unlike before"]
    );
    assert_eq!(two.differences(&old), ["rank 1 does not use the GPU"]);
}

#[test]
fn lines_that_grew_are_noted_once_and_the_most_grown_first() {
    let old = baseline(&[
        ("a.py:3 f", 5),
        ("b.py:4 f", 9),
        ("after a.py:9", 1),
        ("c.py:5", 3),
    ]);
    let new = [
        ("a.py:3 f", 6),
        ("b.py:4 f", 19),
        ("after a.py:9", 2),
        ("c.py:5", 2),
    ];
    let mut new = baseline(&new);
    let (mut old, second) = (old, new.processes["process 1"].clone());
    old.processes
        .insert("process 2".to_owned(), Figures::default());
    new.processes.insert("process 2".to_owned(), second);
    let grown = old.grown(&new);
    let noted: Vec<(&str, u32)> = grown.iter().map(|it| (it.file.as_str(), it.line)).collect();
    assert_eq!(noted, [("b.py", 4), ("a.py", 3), ("c.py", 5)]);
    assert_eq!(
        grown[0].message,
        "b.py:4 f allocates 19 B more at the peak: 19 B instead of 0 B"
    );
}

#[test]
fn a_figure_that_becomes_unknown_differs_also_from_zero() {
    let of = |peak_allocated, retries| {
        let mut baseline = baseline(&[]);
        let figures = Figures {
            peak_allocated,
            retries,
            ..Figures::default()
        };
        baseline.processes.insert("process 1".to_owned(), figures);
        baseline
    };
    let (known, unknown) = (of(Some(5 << 30), Some(0)), of(None, None));
    assert_eq!(
        known.differences(&unknown),
        [
            "peak allocated: unknown instead of 5 GiB",
            "retries: unknown instead of 0"
        ]
    );
    assert_eq!(
        unknown.differences(&known),
        [
            "peak allocated: 5 GiB instead of unknown",
            "retries: 0 instead of unknown"
        ]
    );
    assert!(unknown.differences(&unknown).is_empty());
}

#[test]
fn the_first_allocation_or_free_that_differs_is_named() {
    let place = |line: u32| Place::from(format!("a.py:{line} f"));
    let observed = |events: Vec<(Action, u64, Place)>, peak: u64| Observed {
        baseline: baseline(&[("a.py:3 f", peak)]),
        events: BTreeMap::from([("process 1".to_owned(), events)]),
    };
    let first = observed(
        vec![
            (Action::Alloc, 512, place(3)),
            (Action::FreeRequested, 512, place(3)),
        ],
        512,
    );
    let second = observed(
        vec![
            (Action::Alloc, 512, place(3)),
            (Action::Alloc, 1024, place(4)),
        ],
        1536,
    );
    let found = "after 1 allocation, process 1 frees 512 B allocated at a.py:3 f; in another \
         run it allocates 1024 B at a.py:4 f";
    assert_eq!(first.first_difference(&second).as_deref(), Some(found));
    assert_eq!(first.first_difference(&first), None);
}

#[test]
fn a_process_whose_allocations_were_not_recorded_is_named_with_the_figure_that_differs() {
    let observed = |driver_allocations: u64| {
        let mut baseline = baseline(&[("a.py:3 f", 512)]);
        let killed = Figures {
            driver_allocations,
            ..Figures::default()
        };
        baseline.processes.insert("process 2".to_owned(), killed);
        let events = ["process 1", "process 2"].map(|name| (name.to_owned(), Events::new()));
        Observed {
            baseline,
            events: BTreeMap::from(events),
        }
    };
    assert_eq!(
        observed(3).first_difference(&observed(5)).as_deref(),
        Some("in another run, process 2: driver allocations: 5 instead of 3")
    );
}

#[test]
fn the_settings_of_a_baseline_name_files_without_their_folders() {
    let of = |machine: &str| settings("2.11.0", machine, Some(""))[2..].join(";");
    assert_eq!(
        of("gpu=h100-80;cudnn_workspace=/venv/lib/nvidia/libcudnn_graph.so.9;cudnn=91900"),
        "gpu=h100-80;cudnn_workspace=libcudnn_graph.so.9;cudnn=91900"
    );
    assert_eq!(of("cudnn_workspace=estimate"), "cudnn_workspace=estimate");
}
