//! The project's suites and their page agree with the code. The tests of harness-schemas compare
//! them with the schema.

use std::path::PathBuf;

use harness_allocator::allocator::AllocatorKind;
use harness_bench::suite::{Suite, schema};

use super::provider::catalogue;

fn files() -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(catalogue())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.retain(|path| path.extension().is_some_and(|ending| ending == "yaml"));
    files.sort();
    files
}

fn suites() -> Vec<Suite> {
    files()
        .iter()
        .map(|path| {
            Suite::load(path).unwrap_or_else(|error| panic!("{:?}", miette::Report::new(error)))
        })
        .collect()
}

#[test]
fn the_projects_suites_contain_the_promised_cases() {
    let suites = suites();
    let named = |name: &str| {
        suites
            .iter()
            .find(|suite| suite.name == name)
            .unwrap_or_else(|| panic!("there is no suite {name}"))
    };
    let latency = named("latency");
    assert_eq!(
        latency.arms.len(),
        AllocatorKind::ALL.len(),
        "every allocator"
    );
    let points = latency
        .cases
        .iter()
        .filter_map(|case| case.point.as_ref().map(|point| point.value));
    assert_eq!(
        (points.clone().min(), points.max()),
        (Some(512), Some(4 << 30))
    );
    assert_eq!(
        named("traces").cases.len(),
        std::fs::read_dir(catalogue().join("traces"))
            .unwrap()
            .count(),
        "every trace"
    );
    for name in [
        "storm",
        "recovery",
        "pipeline",
        "empty_cache",
        "threads",
        "record_stream",
        "start_up",
    ] {
        assert!(!named(name).cases.is_empty());
    }
    let all: u64 = suites.iter().map(|suite| suite.budget.0).sum();
    assert!(
        all <= 150_000_000_000,
        "all suites together take {all} ns at most, far less than three minutes"
    );
}

#[test]
fn every_suite_on_the_page_checks_and_every_measure_is_there() {
    let page = std::fs::read_to_string(catalogue().join("README.md")).unwrap();
    let blocks: Vec<&str> = page
        .split("\n```")
        .skip(1)
        .step_by(2)
        .filter_map(|block| block.strip_prefix("yaml\n"))
        .collect();
    assert!(!blocks.is_empty());
    for block in blocks {
        Suite::parse(block, &catalogue().join("page.yaml"))
            .unwrap_or_else(|error| panic!("{:?}", miette::Report::new(error)));
    }
    let measures = schema()["$defs"]["measure"]["oneOf"]
        .as_array()
        .unwrap()
        .clone();
    assert!(measures.len() >= 8);
    for measure in measures {
        let name = measure["required"][0]
            .as_str()
            .or(measure["const"].as_str())
            .unwrap_or_else(|| panic!("{measure} has no name"))
            .to_owned();
        assert!(
            page.contains(&format!("`{name}`")),
            "{name} is not on the page"
        );
        assert!(
            measure["description"]
                .as_str()
                .is_some_and(|text| text.len() > 20),
            "{name} is not documented"
        );
    }
}

/// The hashes of a suite's cases, by name.
fn hashes(text: &str, path: &std::path::Path) -> Vec<(String, String)> {
    Suite::parse(text, path)
        .unwrap()
        .cases
        .into_iter()
        .map(|case| (case.name(), case.hash))
        .collect()
}

#[test]
fn the_hash_of_a_case_covers_only_its_measurement() {
    let of = |memory: &str, rest: &str, sizes: &str| {
        let text = format!(
            "about: x\nneeds: {{ memory: {memory} }}\n{rest}time: [latency: {{ sizes: [{sizes}], \
             cases: [hit] }}]\n"
        );
        hashes(&text, &catalogue().join("test.yaml"))
    };
    let first = of("1GiB", "arms: [caching]\n", "2MiB");
    let known = [("hit, 2 MiB".to_owned(), "5299959c2684c404".to_owned())];
    assert_eq!(
        first, known,
        "it must not change from version to version: the accepted build would not be compared"
    );
    assert_eq!(
        first,
        of(
            "1024MiB",
            "arms: [direct]\nbudget: 1s\nprecision: 1%\nrounds: { least: 6, most: 7 }\n",
            "2048KiB"
        )
    );
    let more = of("1GiB", "arms: [caching]\n", "2MiB, 4MiB");
    assert_eq!(
        (&more[0], more.len()),
        (&first[0], 2),
        "one more size leaves the others as they are"
    );
    assert_ne!(first, of("2GiB", "arms: [caching]\n", "2MiB"));
}

#[test]
fn the_hash_covers_the_content_of_the_files_that_a_suite_refers_to() {
    let folder = tempfile::tempdir().unwrap();
    let hash = |file: &str, content: &str| {
        std::fs::write(folder.path().join(file), content).unwrap();
        let kind = if file == "t.txt" { "trace" } else { "scenario" };
        let text = format!(
            "about: x\nneeds: {{ memory: 1GiB }}\narms: [caching]\ntime: [{kind}: {{ file: {file} \
             }}]\n"
        );
        hashes(&text, &folder.path().join("suite.yaml")).remove(0)
    };
    assert_eq!(
        hash("t.txt", "a 1 512 0\nf 1\n"),
        hash("t.txt", "# the same\na 1 512 0\n\nf 1\n")
    );
    assert_ne!(
        hash("t.txt", "a 1 512 0\nf 1\n"),
        hash("t.txt", "a 1 1024 0\nf 1\n")
    );
    let scenario =
        "about: One.\nneeds: { memory: 1GiB }\nsteps:\n  - alloc: { buffer: a, size: 1MiB }\n";
    let commented = "# A comment.\nabout: Two.\nneeds:\n  memory: 1GiB   # another\nsteps: [alloc: \
         { buffer: a, size: 1MiB }]\n";
    assert_eq!(hash("s.yaml", scenario), hash("s.yaml", commented));
    assert_ne!(
        hash("s.yaml", scenario),
        hash("s.yaml", &scenario.replace("1MiB", "2MiB"))
    );
}
