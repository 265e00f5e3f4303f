//! Errors for invalid suites: one per suite, with file, line, column and the accepted forms.

use std::{fmt::Write, path::Path};

use harness_bench::suite::Suite;
use harness_scenario::FileError;
use miette::{GraphicalReportHandler, GraphicalTheme};

/// The error as the command line prints it, without colours.
fn shown(error: &FileError, folder: &Path) -> String {
    let mut text = String::new();
    let handler = GraphicalReportHandler::new_themed(GraphicalTheme::unicode_nocolor())
        .with_width(140)
        .with_links(false);
    handler.render_report(&mut text, error).unwrap();
    text.replace(&format!("{}/", folder.display()), "")
        .lines()
        .map(str::trim_end)
        .collect::<Vec<_>>()
        .join("\n")
}

/// The errors for all of these texts.
fn all(cases: &[(&str, &str)]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("empty.txt", "# nothing\n");
    write("wrong.txt", "a 1 512 0\nb 2\n");
    write(
        "large.yaml",
        "about: x\nneeds: { memory: 4GiB }\nsteps: [empty_cache]\n",
    );
    let storm = "storm: { id: s, threads: 2, operations: 9, sizes: 1MiB, live: 4MiB, lifetime: { \
         min: 1, max: 3 } }";
    write(
        "threads.yaml",
        &format!("about: x\nneeds: {{ memory: 1GiB }}\nsteps:\n  - {storm}\n"),
    );
    write(
        "wrong.yaml",
        "about: x\nneeds: { memory: 1GiB }\nsteps: [free: a]\n",
    );
    let mut text = String::new();
    for (name, source) in cases {
        let error = Suite::parse(source, &folder.path().join("bad.yaml"))
            .map(|_| panic!("this was accepted:\n{source}"))
            .unwrap_err();
        let _ = write!(text, "──── {name}\n{}\n\n", shown(&error, folder.path()));
    }
    text
}

/// A suite that times these measures.
fn timing(cases: &[(&'static str, &str)]) -> String {
    let texts: Vec<(&str, String)> = cases
        .iter()
        .map(|(name, time)| {
            (
                *name,
                format!(
                    "about: x\nneeds: {{ memory: 1GiB }}\narms: [caching]\ntime:\n  - {time}\n"
                ),
            )
        })
        .collect();
    all(&texts
        .iter()
        .map(|(name, text)| (*name, text.as_str()))
        .collect::<Vec<_>>())
}

#[test]
fn the_error_for_a_file_that_is_no_suite_describes_suites() {
    insta::assert_snapshot!(all(&[
        ("empty file", ""),
        ("not YAML", "about: ["),
        (
            "a scenario",
            "about: x\nneeds: { memory: 1GiB }\nsteps: [empty_cache]\n"
        ),
        (
            "no arms",
            "about: x\nneeds: { memory: 1GiB }\ntime: [start_up]\n"
        ),
        (
            "arms names none",
            "about: x\nneeds: { memory: 1GiB }\narms: []\ntime: [start_up]\n"
        ),
        (
            "an empty suite",
            "about: x\nneeds: { memory: 1GiB }\narms: [caching]\ntime: []\n"
        ),
        (
            "no such allocator",
            "about: x\nneeds: { memory: 1GiB }\narms: [cachign]\ntime: [start_up]\n"
        ),
        (
            "an arm twice",
            "about: x\nneeds: { memory: 1GiB }\narms: [direct, direct]\ntime: [start_up]\n"
        ),
        (
            "no such key",
            "about: x\nneeds: { memory: 1GiB }\narms: [direct]\nbugdet: 1s\ntime: [start_up]\n"
        ),
        (
            "a share without a sign",
            "about: x\nneeds: { memory: 1GiB }\narms: [direct]\nprecision: 2\ntime: [start_up]\n"
        ),
        (
            "too large a share",
            "about: x\nneeds: { memory: 1GiB }\narms: [direct]\nthreshold: 200%\ntime: [start_up]\n"
        ),
        (
            "rounds the wrong way round",
            "about: x\nneeds: { memory: 1GiB }\narms: [direct]\nrounds: { least: 9, most: 3 \
             }\ntime: [start_up]\n"
        ),
        (
            "no rounds",
            "about: x\nneeds: { memory: 1GiB }\narms: [direct]\nrounds: { least: 0, most: 3 \
             }\ntime: [start_up]\n"
        ),
        (
            "no time",
            "about: x\nneeds: { memory: 1GiB }\narms: [direct]\nbudget: 0s\ntime: [start_up]\n"
        ),
    ]));
}

#[test]
fn the_error_for_a_wrong_measure_lists_the_measures() {
    insta::assert_snapshot!(timing(&[
        ("no such measure", "latancy: { sizes: [1MiB] }"),
        ("a measure without fields", "latency"),
        ("fields for one that has none", "start_up: { times: 3 }"),
        ("no such case", "latency: { sizes: [1MiB], cases: [hitt] }"),
        ("no sizes", "latency: { sizes: [] }"),
        ("a size of nothing", "latency: { sizes: [0] }"),
        ("a decimal size", "latency: { sizes: [1MB] }"),
        ("a size that does not fit", "latency: { sizes: [2GiB] }"),
        ("the same size twice", "latency: { sizes: [1MiB, 1024KiB] }"),
        (
            "too many segments for the memory",
            "empty_cache: { segments: [1, 1000] }"
        ),
        ("no threads", "threads: { counts: [0] }"),
        ("too many streams", "record_stream: { streams: [1000] }"),
        ("requests that are too small", "recovery: { sizes: [1KiB] }"),
        ("no such trace", "trace: { file: nothing.txt }"),
        ("a trace of nothing", "trace: { file: empty.txt }"),
        ("not a trace", "trace: { file: wrong.txt }"),
        ("no such scenario", "scenario: { file: nothing.yaml }"),
        (
            "a scenario that is wrong itself",
            "scenario: { file: wrong.yaml }"
        ),
        (
            "a scenario that needs more",
            "scenario: { file: large.yaml }"
        ),
        (
            "a scenario whose threads are not timed",
            "scenario: { file: threads.yaml }"
        ),
    ]));
}

#[test]
fn the_error_for_a_missing_suite_contains_advice() {
    let error = Suite::load(Path::new("nothing.yaml"))
        .map(|_| ())
        .unwrap_err();
    insta::assert_snapshot!(shown(&error, Path::new("/nowhere")));
}
