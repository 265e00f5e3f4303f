//! Compares recorded runs of PyTorch's, TensorFlow's and RMM's allocators with ours: one test per
//! file in `tests/recordings`. Every column of every row and the final segments must match, or
//! every decision. Other tests falsify a recording and check that the comparison notices.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use flate2::read::GzDecoder;
use harness_trace::replay::{self, Front, RecordingError, ReplayComparison, ReplayDifference};
use libtest_mimic::{Arguments, Failed, Trial};
use serde_json::{Value, json};

/// A test of the comparison with a falsified recording.
type Check = fn(&Path) -> Result<(), Failed>;

fn main() -> ExitCode {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recordings");
    let recordings = match recordings(&folder) {
        Ok(recordings) if !recordings.is_empty() => recordings,
        Ok(_) => {
            eprintln!("{}: no recordings", folder.display());
            return ExitCode::FAILURE;
        }
        Err(error) => {
            eprintln!("{}: {error}", folder.display());
            return ExitCode::FAILURE;
        }
    };
    let (of_libraries, of_torch): (Vec<PathBuf>, Vec<PathBuf>) =
        recordings.into_iter().partition(|path| is_of_library(path));
    let ([sample, ..], [of_library, ..]) = (&of_torch[..], &of_libraries[..]) else {
        eprintln!(
            "{}: recordings of PyTorch and of other libraries are needed",
            folder.display()
        );
        return ExitCode::FAILURE;
    };
    let about_the_comparison: [(&str, Check); 3] = [
        (
            "a_wrong_figure_is_reported_with_its_row_and_column",
            a_wrong_figure,
        ),
        (
            "a_wrong_block_of_the_snapshot_is_reported_with_its_segment",
            a_wrong_block,
        ),
        (
            "another_setting_than_the_recorded_one_is_noticed",
            another_setting,
        ),
    ];
    let about_decisions: [(&str, Check); 4] = [
        (
            "a_wrong_decision_is_reported_with_its_operation",
            a_wrong_decision,
        ),
        (
            "settings_of_pytorch_are_refused_for_another_library",
            settings_of_pytorch,
        ),
        (
            "bins_that_no_block_size_has_are_one_error_of_the_header",
            impossible_bins,
        ),
        (
            "a_missing_setting_is_an_error_of_the_header",
            missing_setting,
        ),
    ];
    let check = |(name, test): (&'static str, Check), sample: &Path| {
        let sample = sample.to_owned();
        Trial::test(name, move || test(&sample))
    };
    let comparison = (about_the_comparison.map(|case| check(case, sample)))
        .into_iter()
        .chain(about_decisions.map(|case| check(case, of_library)));
    let trial = |path: &PathBuf, prefix: &str, front: Front| {
        let name = path
            .file_name()
            .map(|name| name.to_string_lossy().replace(".jsonl.gz", ""))
            .unwrap_or_default();
        let path = path.clone();
        Trial::test(format!("{prefix}::{name}"), move || is_equal(&path, front))
    };
    let fronts = [
        ("equal", Front::Handle),
        ("equal_by_the_shared_front", Front::Shared),
    ];
    let trials = fronts.into_iter().flat_map(|(prefix, front)| {
        let of_libraries = match front {
            Front::Handle => &of_libraries[..],
            Front::Shared => &[],
        };
        (of_torch.iter().chain(of_libraries)).map(move |path| trial(path, prefix, front))
    });
    libtest_mimic::run(&Arguments::from_args(), trials.chain(comparison).collect()).exit_code()
}

/// Returns true unless it records PyTorch: recordings of other libraries begin with the name of our
/// allocator.
fn is_of_library(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    ["bfc-", "cupy_pool-", "ort_arena-", "rmm_", "xla_bfc-"]
        .iter()
        .any(|allocator| name.starts_with(allocator))
}

fn recordings(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut paths = std::fs::read_dir(folder)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<Vec<_>, _>>()?;
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "gz"));
    paths.sort();
    Ok(paths)
}

fn is_equal(path: &Path, front: Front) -> Result<(), Failed> {
    let ReplayComparison {
        operations,
        difference,
    } = replay::verify(path, front, None, None)?;
    match difference {
        None if operations > 0 => Ok(()),
        None => Err("the recording has no operations".into()),
        Some(difference) => Err(format!("{}: {difference}", path.display()).into()),
    }
}

/// The lines of a recording.
fn lines(path: &Path) -> Result<Vec<Value>, Failed> {
    let mut text = String::new();
    GzDecoder::new(std::fs::File::open(path)?).read_to_string(&mut text)?;
    Ok(text
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()?)
}

/// Compares the recording made of these lines.
fn verify(lines: &[Value]) -> Result<Result<ReplayComparison, RecordingError>, Failed> {
    let mut file = tempfile::NamedTempFile::new()?;
    lines.iter().try_for_each(|line| writeln!(file, "{line}"))?;
    file.flush()?;
    Ok(replay::verify(file.path(), Front::Handle, None, None))
}

fn a_wrong_figure(sample: &Path) -> Result<(), Failed> {
    const COLUMN: &str = "reserved_bytes.large_pool.current";
    let mut lines = lines(sample)?;
    let row = lines.len() / 2;
    let names = lines[0]["columns"]
        .as_array()
        .ok_or("a header has columns")?;
    let column = names
        .iter()
        .position(|name| name == COLUMN)
        .ok_or("the column is recorded")?;
    let right = lines[row][column].as_i64().ok_or("a figure")?;
    lines[row][column] = json!(right + 512);
    let Some(ReplayDifference::Row {
        operation, figures, ..
    }) = verify(&lines)??.difference
    else {
        return Err("the wrong figure was not noticed".into());
    };
    let wrong: Vec<_> = figures
        .into_iter()
        .filter(|(_, recorded, replayed)| recorded != replayed)
        .collect();
    if (operation, &wrong[..]) == (row, &[(COLUMN.to_owned(), right + 512, right)]) {
        Ok(())
    } else {
        Err(format!("operation {operation} instead of {row}: {wrong:?}").into())
    }
}

fn a_wrong_block(sample: &Path) -> Result<(), Failed> {
    let mut lines = lines(sample)?;
    let last = lines.len() - 1;
    let segments = lines[last]["snapshot"]
        .as_array_mut()
        .ok_or("the last line is the snapshot")?;
    let wrong = segments.len() - 1;
    segments[wrong][5][0][1] = json!(1);
    match verify(&lines)??.difference {
        Some(ReplayDifference::Snapshot { segment, .. }) if segment == wrong => Ok(()),
        other => Err(format!("segment {wrong} is wrong, but: {other:?}").into()),
    }
}

fn another_setting(sample: &Path) -> Result<(), Failed> {
    let mut lines = lines(sample)?;
    lines[0]["conf"] = json!("large_segment_size_mb:32");
    match verify(&lines)??.difference {
        Some(ReplayDifference::Row { .. }) => Ok(()),
        other => Err(format!("replayed with other settings, but: {other:?}").into()),
    }
}

fn a_wrong_decision(sample: &Path) -> Result<(), Failed> {
    let mut lines = lines(sample)?;
    let row = lines.len() / 2;
    let right = lines[row].clone();
    lines[row] = json!("at 0+1 256");
    match verify(&lines)??.difference {
        Some(ReplayDifference::Decision {
            operation,
            recorded,
            replayed,
            ..
        }) if operation == row && recorded == "at 0+1 256" && right == replayed => Ok(()),
        other => Err(format!("operation {row} is wrong, but: {other:?}").into()),
    }
}

fn settings_of_pytorch(sample: &Path) -> Result<(), Failed> {
    match replay::verify(sample, Front::Shared, None, None) {
        Err(RecordingError::OtherLibrary { .. }) => Ok(()),
        other => Err(format!("{other:?}").into()),
    }
}

fn impossible_bins(sample: &Path) -> Result<(), Failed> {
    let mut lines = lines(sample)?;
    lines[0]["allocator"] = json!("rmm_binning");
    let mut error = |min: u32, max: u32| {
        let pool = json!({ "initial_pool_size": 0, "maximum_pool_size": null });
        lines[0]["settings"] =
            json!({ "pool": pool, "min_size_exponent": min, "max_size_exponent": max });
        Ok::<_, Failed>(verify(&lines)?.err().map(|error| error.to_string()))
    };
    assert_eq!(error(8, 56)?, None, "one difference, and no error");
    for [min, max] in [[7, 22], [18, 57], [64, 64], [22, 18]] {
        let why = error(min, max)?.unwrap_or_default();
        let expected =
            format!("the exponents of the bins rise within 8 to 56, unlike {min} to {max}");
        assert!(why.contains(&expected), "{why}");
    }
    Ok(())
}

fn missing_setting(sample: &Path) -> Result<(), Failed> {
    let mut lines = lines(sample)?;
    for (allocator, settings) in [
        (
            "bfc",
            json!({ "allow_growth": true, "memory_limit": 1, "garbage_collection": true }),
        ),
        ("rmm_pool", json!({ "initial_pool_size": 0 })),
        ("rmm_arena", json!({ "arena_size": 1 })),
        ("xla_bfc", json!({ "preallocate": true, "memory_limit": 1 })),
    ] {
        lines[0]["allocator"] = json!(allocator);
        let names = settings.as_object().into_iter().flatten();
        for name in names.map(|(name, _)| name) {
            lines[0]["settings"] = settings.clone();
            lines[0]["settings"]
                .as_object_mut()
                .map(|all| all.remove(name));
            let why = verify(&lines)?.err().map(|error| error.to_string());
            let why = why.unwrap_or_default();
            let expected = format!("missing field `{name}`");
            assert!(why.contains(&expected), "{allocator}: {why}");
        }
    }
    Ok(())
}
