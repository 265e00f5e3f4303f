//! What criterion measured, as a suite of the night: read from the folder that `cargo bench` leaves behind.
//!
//! Criterion writes `<benchmark>/new/` with `benchmark.json` (its names), `estimates.json` (medians and their confidence intervals) and
//! `sample.json` (what was timed); other files are left alone. Its figures are wall-clock times of this machine in nanoseconds.
//! Source: <https://github.com/criterion-rs/criterion.rs>, `src/report.rs` and `src/estimate.rs` of version 0.8.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use harness_allocator::allocator::AllocatorKind;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::drift::code_of;
use super::record::{Entry, EntryOutcome, EntrySummary, Measured, Quantity, Stopped, SuiteRecord};
use harness_base::statistics::{LEAST_FOR_P99, median, median_absolute_deviation, nearest_rank};

/// The name of the suite.
pub const SUITE: &str = "criterion";

/// A change smaller than this is never flagged: criterion takes all samples of a benchmark in one go, so that what drifts on the machine
/// is in none of its intervals.
const THRESHOLD: f64 = 0.05;

/// Deeper folders hold no benchmarks: a group, a function, a parameter, and a few more.
const DEEPEST: usize = 8;

/// Why criterion's results could not be read.
#[derive(Debug, thiserror::Error)]
pub enum CriterionError {
    /// The folder or a file in it could not be read. Check the path and its rights.
    #[error("cannot read `{}`: {source}", path.display())]
    Unreadable {
        /// What was to be read.
        path: PathBuf,
        /// Why it was not.
        source: io::Error,
    },
    /// A file is not what criterion writes. Run `cargo bench` again, or remove the benchmark's folder.
    #[error("`{}` is not what criterion 0.8 writes: {source}. Run `cargo bench` again, or remove that folder.", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Where and what.
        source: serde_json::Error,
    },
    /// The folder has no results. Run `cargo bench` first, or name `target/criterion`.
    #[error("`{}` holds no results of criterion: run `cargo bench` first, and name the folder `target/criterion`.", path.display())]
    Empty {
        /// The folder.
        path: PathBuf,
    },
    /// A benchmark has samples without iterations or without time. Run `cargo bench` again.
    #[error("`{}` holds no samples: run `cargo bench` again.", path.display())]
    NoSamples {
        /// The file.
        path: PathBuf,
    },
}

/// Reads all benchmarks below a folder, by name. An entry's arm is the last part of the benchmark's name where that is an allocator, and
/// `criterion` otherwise. Takes time in proportion to the samples.
///
/// # Errors
/// Each kind of [`CriterionError`], with what the user can do.
pub fn read(folder: &Path) -> Result<SuiteRecord, CriterionError> {
    let mut places = Vec::new();
    find(folder, 0, &mut places)?;
    places.sort();
    let mut entries = places.iter().map(|place| entry(place)).collect::<Result<Vec<Entry>, CriterionError>>()?;
    // By case, arms next to each other.
    entries.sort_by(|a, b| (&a.group, &a.arm).cmp(&(&b.group, &b.arm)));
    if entries.is_empty() {
        return Err(CriterionError::Empty { path: folder.to_owned() });
    }
    let rounds = entries.iter().filter_map(|entry| match &entry.outcome {
        EntryOutcome::Measured(measured) => u32::try_from(measured.rounds.len()).ok(),
        EntryOutcome::Failed { .. } | EntryOutcome::Skipped { .. } => None,
    });
    Ok(SuiteRecord {
        name: SUITE.to_owned(),
        about: "The benchmarks of `cargo bench`, as criterion measured them.".to_owned(),
        // Criterion knows benchmarks by their names, and so do we.
        hash: SUITE.to_owned(),
        threshold: THRESHOLD,
        rounds: rounds.max().unwrap_or_default(),
        stopped: Stopped::Budget,
        overhead_ps: 0,
        yardstick_ps: Vec::new(),
        allocators: entries
            .iter()
            .filter_map(|entry| Some((entry.arm.clone(), code_of(AllocatorKind::from_name(&entry.arm)?).to_owned())))
            .collect(),
        entries,
    })
}

/// Folders named `new` that hold estimates. Links are not followed.
fn find(folder: &Path, depth: usize, places: &mut Vec<PathBuf>) -> Result<(), CriterionError> {
    let unreadable = |source| CriterionError::Unreadable { path: folder.to_owned(), source };
    for item in fs::read_dir(folder).map_err(unreadable)? {
        let item = item.map_err(unreadable)?;
        if !item.file_type().map_err(unreadable)?.is_dir() {
            continue;
        }
        let path = item.path();
        if item.file_name() == "new" && path.join("estimates.json").is_file() {
            places.push(path);
        } else if depth < DEEPEST {
            find(&path, depth + 1, places)?;
        }
    }
    Ok(())
}

/// `benchmark.json`
#[derive(Deserialize)]
struct Benchmark {
    group_id: String,
    function_id: Option<String>,
    value_str: Option<String>,
}

/// `estimates.json`
#[derive(Deserialize)]
struct Estimates {
    median: Estimate,
}

#[derive(Deserialize)]
struct Estimate {
    confidence_interval: Interval,
    point_estimate: f64,
}

#[derive(Deserialize)]
struct Interval {
    lower_bound: f64,
    upper_bound: f64,
}

/// `sample.json`: how many iterations each sample did, and the nanoseconds that all of them took.
#[derive(Deserialize)]
struct Sample {
    iters: Vec<f64>,
    times: Vec<f64>,
}

fn entry(place: &Path) -> Result<Entry, CriterionError> {
    let benchmark: Benchmark = json(&place.join("benchmark.json"))?;
    let Estimates { median } = json(&place.join("estimates.json"))?;
    let sample: Sample = json(&place.join("sample.json"))?;
    let samples = sample.iters.iter().zip(&sample.times).filter(|(iterations, _)| **iterations > 0.0);
    let samples: Vec<u64> = samples.map(|(iterations, nanoseconds)| picoseconds(nanoseconds / iterations)).collect();
    let summary = summary(&median, &samples).ok_or_else(|| CriterionError::NoSamples { path: place.join("sample.json") })?;
    let (group, arm) = named(benchmark);
    let mut iterations: Vec<u64> = sample.iters.iter().map(|&iterations| iterations.round() as u64).collect();
    // Samples follow each other in time: each is a round of its own.
    let rounds = samples.into_iter().map(|sample| vec![sample]).collect();
    let measured = Measured { batch: self::median(&mut iterations).unwrap_or(1), rounds, yardstick_ps: Vec::new(), summary };
    Ok(Entry { group, point: None, arm, quantity: Quantity::HostTime, outcome: EntryOutcome::Measured(measured) })
}

/// Criterion's median and interval, and the rest from the samples; `None` where there are none.
fn summary(estimate: &Estimate, samples: &[u64]) -> Option<EntrySummary> {
    let middle = picoseconds(estimate.point_estimate);
    let mut sorted = samples.to_vec();
    Some(EntrySummary {
        count: samples.len() as u64,
        median: middle,
        mad: median_absolute_deviation(samples, middle)?,
        p99: if samples.len() < LEAST_FOR_P99 { None } else { nearest_rank(&mut sorted, 99) },
        min: samples.iter().copied().min()?,
        max: samples.iter().copied().max()?,
        low: picoseconds(estimate.confidence_interval.lower_bound).min(middle),
        high: picoseconds(estimate.confidence_interval.upper_bound).max(middle),
    })
}

/// Criterion's nanoseconds as whole picoseconds.
fn picoseconds(nanoseconds: f64) -> u64 {
    (nanoseconds * 1_000.0).round() as u64
}

/// The case, and who did it.
fn named(benchmark: Benchmark) -> (String, String) {
    let Benchmark { group_id, function_id, value_str } = benchmark;
    let mut parts: Vec<String> = std::iter::once(group_id).chain(function_id).chain(value_str).collect();
    let is_arm = parts.len() > 1 && parts.last().is_some_and(|last| AllocatorKind::from_name(last).is_some());
    let arm = if is_arm { parts.pop() } else { None };
    (parts.join(" / "), arm.unwrap_or_else(|| SUITE.to_owned()))
}

fn json<T: DeserializeOwned>(path: &Path) -> Result<T, CriterionError> {
    let text = fs::read_to_string(path).map_err(|source| CriterionError::Unreadable { path: path.to_owned(), source })?;
    serde_json::from_str(&text).map_err(|source| CriterionError::Malformed { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use tempfile::TempDir;

    use super::*;

    /// What criterion 0.8.2 wrote, with fewer samples.
    fn write(folder: &Path, name: &str, ids: &str) {
        let place = folder.join(name).join("new");
        fs::create_dir_all(&place).unwrap();
        fs::write(
            place.join("benchmark.json"),
            format!("{{{ids},\"throughput\":null,\"full_id\":\"x\",\"directory_name\":\"x\",\"title\":\"x\"}}"),
        )
        .unwrap();
        let estimate = |value: f64| {
            format!(
                "{{\"confidence_interval\":{{\"confidence_level\":0.95,\"lower_bound\":{},\"upper_bound\":{}}},\"point_estimate\":{value},\"standard_error\":0.1}}",
                value - 1.0,
                value + 2.0
            )
        };
        fs::write(place.join("estimates.json"), format!("{{\"mean\":{},\"median\":{},\"slope\":null}}", estimate(31.0), estimate(30.25)))
            .unwrap();
        fs::write(place.join("sample.json"), "{\"sampling_mode\":\"Linear\",\"iters\":[5.0,10.0,15.0],\"times\":[150.0,302.5,480.0]}")
            .unwrap();
        fs::write(place.join("tukey.json"), "[1.0,2.0,3.0,4.0]").unwrap();
    }

    fn folder() -> TempDir {
        let folder = TempDir::new().unwrap();
        write(folder.path(), "hit/allocate/direct", "\"group_id\":\"hit\",\"function_id\":\"allocate\",\"value_str\":\"direct\"");
        write(folder.path(), "hit/allocate/caching", "\"group_id\":\"hit\",\"function_id\":\"allocate\",\"value_str\":\"caching\"");
        write(folder.path(), "catalogue", "\"group_id\":\"catalogue\",\"function_id\":null,\"value_str\":null");
        fs::create_dir_all(folder.path().join("report")).unwrap();
        fs::write(folder.path().join("report/index.html"), "<html>").unwrap();
        folder
    }

    #[test]
    fn benchmarks_become_entries_with_their_samples() {
        let suite = read(folder().path()).unwrap();
        let names: Vec<(String, &str)> = suite.entries.iter().map(|entry| (entry.case(), entry.arm.as_str())).collect();
        let expected = [("catalogue", "criterion"), ("hit / allocate", "caching"), ("hit / allocate", "direct")];
        assert_eq!(names, expected.map(|(case, arm)| (case.to_owned(), arm)));
        let EntryOutcome::Measured(measured) = &suite.entries[0].outcome else { unreachable!("it was measured") };
        assert_eq!((measured.batch, measured.rounds.as_slice()), (10, [vec![30_000], vec![30_250], vec![32_000]].as_slice()));
        let summary = EntrySummary { count: 3, median: 30_250, mad: 250, p99: None, min: 30_000, max: 32_000, low: 29_250, high: 32_250 };
        assert_eq!(measured.summary, summary);
        assert_eq!((suite.rounds, suite.name.as_str()), (3, "criterion"));
    }

    #[test]
    fn the_same_folder_gives_the_same_suite() {
        let folder = folder();
        assert_eq!(read(folder.path()).unwrap(), read(folder.path()).unwrap());
    }

    #[test]
    fn a_folder_that_is_none_of_criterions_gets_a_clear_error() {
        let empty = TempDir::new().unwrap();
        let error = read(empty.path()).unwrap_err().to_string();
        assert!(
            error.ends_with("holds no results of criterion: run `cargo bench` first, and name the folder `target/criterion`."),
            "{error}"
        );
        let error = read(&empty.path().join("nothing")).unwrap_err().to_string();
        assert!(error.starts_with("cannot read `") && error.contains("nothing"), "{error}");
    }

    #[test]
    fn a_damaged_file_is_named() {
        let folder = folder();
        let sample = folder.path().join("catalogue/new/sample.json");
        fs::write(&sample, "{\"iters\":[1.0],").unwrap();
        let error = read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("catalogue/new/sample.json` is not what criterion 0.8 writes: EOF"), "{error}");
        fs::write(&sample, "{\"iters\":[],\"times\":[]}").unwrap();
        assert!(read(folder.path()).unwrap_err().to_string().contains("holds no samples"));
        fs::remove_file(&sample).unwrap();
        assert!(matches!(read(folder.path()).unwrap_err(), CriterionError::Unreadable { path, .. } if path == sample));
    }
}
