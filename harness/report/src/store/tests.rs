#![allow(clippy::unwrap_used)]

use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::tests::examples;
use harness_base::files::TEMPORARY;

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn one_scenario() -> Records {
    Records {
        runs: vec![examples::oom_retry("caching", 0)],
        ..examples::every_ending()
    }
}

/// An error without the folder of this test.
fn told(error: &StoreError, folder: &Path) -> String {
    error.to_string().replace(folder.to_str().unwrap(), "…")
}

#[test]
fn records_read_back_as_they_were_from_the_folder_and_from_the_file() {
    let root = tempfile::tempdir().unwrap();
    let folder = save_new(root.path(), &examples::every_ending()).unwrap();
    assert_eq!(read(&folder).unwrap(), examples::every_ending());
    assert_eq!(
        read(&folder.join(RECORDS)).unwrap(),
        examples::every_ending()
    );
}

#[test]
fn somebody_elses_report_is_left_alone_and_an_earlier_one_of_ours_is_replaced() {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join(REPORT), "mine").unwrap();
    let told = |result: Result<(), StoreError>| {
        result
            .unwrap_err()
            .to_string()
            .replace(&*root.path().to_string_lossy(), "…")
    };
    insta::assert_snapshot!(told(save_into(root.path(), &one_scenario())), @"`…/report.md` \
         already exists and was not written by `harness run`: move it, or choose another place \
         with `--report DIR`.");
    assert_eq!(
        told(check_folder(root.path())),
        told(save_into(root.path(), &one_scenario()))
    );
    assert_eq!(names(root.path()), [REPORT]);
    fs::remove_file(root.path().join(REPORT)).unwrap();
    for _ in 0..2 {
        check_folder(root.path()).unwrap();
        save_into(root.path(), &one_scenario()).unwrap();
    }
    assert_eq!(
        names(root.path()),
        ["oom_retry-simulated.svg", RECORDS, REPORT]
    );
}

#[test]
fn folders_are_numbered_and_named_after_what_ran() {
    let root = tempfile::tempdir().unwrap();
    let measured = Records {
        runs: vec![examples::measured("direct", 0)],
        ..examples::every_ending()
    };
    for records in [examples::every_ending(), one_scenario(), measured] {
        save_new(root.path(), &records).unwrap();
    }
    assert_eq!(
        names(root.path()),
        [
            "0001-5-scenarios-2-devices",
            "0002-oom_retry-sim",
            "0003-oom_retry-example-gpu"
        ]
    );
    assert_eq!(
        names(&root.path().join("0002-oom_retry-sim")),
        ["oom_retry-simulated.svg", RECORDS, REPORT]
    );
    fs::create_dir(root.path().join("9999-x")).unwrap();
    assert!(
        save_new(root.path(), &one_scenario())
            .unwrap()
            .ends_with("10000-oom_retry-sim")
    );
}

#[test]
fn writers_at_the_same_time_get_numbers_of_their_own() {
    let root = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| save_new(root.path(), &one_scenario()).unwrap());
        }
    });
    let expected: Vec<String> = (1..=8)
        .map(|number| format!("{number:04}-oom_retry-sim"))
        .collect();
    assert_eq!(names(root.path()), expected);
}

#[test]
fn files_and_folders_are_as_readable_as_any_other() {
    let root = tempfile::tempdir().unwrap();
    let (plain_folder, plain_file) = (root.path().join("plain"), root.path().join("file"));
    fs::create_dir(&plain_folder).unwrap();
    fs::write(&plain_file, "").unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let folder = save_new(&root.path().join("runs"), &one_scenario()).unwrap();
    save_into(&root.path().join("fixed"), &one_scenario()).unwrap();
    assert_eq!(mode(&folder), mode(&plain_folder));
    assert_eq!(mode(&folder.join(REPORT)), mode(&plain_file));
    assert_eq!(
        mode(&root.path().join("fixed").join(REPORT)),
        mode(&plain_file)
    );
}

#[test]
fn what_a_killed_process_left_is_removed_by_the_next() {
    let root = tempfile::tempdir().unwrap();
    let left = root.path().join(format!("{TEMPORARY}abc"));
    fs::create_dir(&left).unwrap();
    fs::write(left.join(RECORDS), "{\"ver").unwrap();
    fs::write(root.path().join(format!("{TEMPORARY}file")), "half").unwrap();
    let folder = save_new(root.path(), &one_scenario()).unwrap();
    assert_eq!(names(root.path()), ["0001-oom_retry-sim"]);
    fs::write(folder.join(format!("{TEMPORARY}file")), "half").unwrap();
    save_into(&folder, &one_scenario()).unwrap();
    assert_eq!(names(&folder), ["oom_retry-simulated.svg", RECORDS, REPORT]);
}

#[test]
fn a_new_report_replaces_the_earlier_one_and_leaves_other_files_alone() {
    let folder = tempfile::tempdir().unwrap();
    save_into(folder.path(), &examples::every_ending()).unwrap();
    fs::write(folder.path().join("mine.svg"), "mine").unwrap();
    save_into(folder.path(), &one_scenario()).unwrap();
    assert_eq!(
        names(folder.path()),
        ["mine.svg", "oom_retry-simulated.svg", RECORDS, REPORT]
    );
    assert_eq!(read(folder.path()).unwrap(), one_scenario());
}

#[test]
fn a_write_that_fails_half_way_leaves_the_earlier_report_intact() {
    let folder = tempfile::tempdir().unwrap();
    save_into(folder.path(), &one_scenario()).unwrap();
    let before = fs::read(folder.path().join(RECORDS)).unwrap();
    // A folder has the name of one of the later report's pictures, so it cannot be written.
    fs::create_dir(folder.path().join("storm-simulated.svg")).unwrap();
    let error = save_into(folder.path(), &examples::every_ending()).unwrap_err();
    insta::assert_snapshot!(told(&error, folder.path()), @"cannot write to \
         `…/storm-simulated.svg`: is a directory. Make it writable, or choose another place with \
         `--report DIR`.");
    assert_eq!(fs::read(folder.path().join(RECORDS)).unwrap(), before);
    assert_eq!(
        names(folder.path()),
        [
            "oom_retry-simulated.svg",
            RECORDS,
            REPORT,
            "storm-simulated.svg"
        ]
    );
}

#[test]
fn a_place_that_cannot_be_written_to_is_named_with_what_to_do() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("taken");
    fs::write(&file, "a file, not a folder").unwrap();
    let refused = told(&save_new(&file, &one_scenario()).unwrap_err(), root.path());
    insta::assert_snapshot!(refused, @"cannot write to `…/taken`: not a directory. Make it \
         writable, or choose another place with `--report DIR`.");
    let refused = save_into(&file.join("below"), &one_scenario()).unwrap_err();
    insta::assert_snapshot!(told(&refused, root.path()), @"cannot write to `…/taken/below`: Not a \
         directory (os error 20). Make it writable, or choose another place with `--report DIR`.");
    assert_eq!(fs::read_to_string(&file).unwrap(), "a file, not a folder");
}

#[test]
fn records_that_cannot_be_read_are_refused_with_a_sentence() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join(RECORDS);
    let refusal = |text: &str| {
        fs::write(&file, text).unwrap();
        told(&read(root.path()).unwrap_err(), root.path())
    };
    let whole = json::render(&Report::new(&one_scenario()), false);
    insta::assert_snapshot!(refusal(&whole[..whole.len() / 2]), @"`…/records.json` is cut off at \
         line 2: it ends in the middle of a record. Copy it again, or run again.");
    insta::assert_snapshot!(refusal(""), @"`…/records.json` is cut off at line 1: it ends in the \
         middle of a record. Copy it again, or run again.");
    insta::assert_snapshot!(refusal(r#"{"version": 99, "everything": "else"}"#), @"\
         `…/records.json` has version 99, this harness reads up to version 1: use the harness \
         that wrote it, or a newer one.");
    insta::assert_snapshot!(refusal(r#"{"version": 1, "harness": "0.1.0"}"#), @"`…/records.json` \
         does not hold records: missing field `runs` at line 1 column 34. Name a `records.json` \
         that `harness run` wrote, or its folder.");
    insta::assert_snapshot!(refusal("# A report"), @"`…/records.json` does not hold records: \
         expected value at line 1 column 1. Name a `records.json` that `harness run` wrote, or its \
         folder.");
    let missing = read(&root.path().join("missing")).unwrap_err();
    insta::assert_snapshot!(told(&missing, root.path()), @"cannot read `…/missing`: No such file \
         or directory (os error 2)");
}

#[test]
fn records_cut_off_anywhere_are_never_read_as_whole() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join(RECORDS);
    let whole = json::render(&Report::new(&one_scenario()), false);
    for end in (0..whole.trim_end().len())
        .filter(|&end| whole.is_char_boundary(end))
        .step_by(97)
    {
        fs::write(&file, &whole[..end]).unwrap();
        assert!(
            matches!(read(&file), Err(StoreError::Truncated { .. })),
            "cut at byte {end}"
        );
    }
}

#[test]
fn records_without_settings_are_read() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join(RECORDS);
    let mut records = one_scenario();
    let older = json::render(&Report::new(&records), false);
    assert!(
        !older.contains("\"settings\""),
        "an arm without settings has the earlier format"
    );
    fs::write(&file, &older).unwrap();
    assert_eq!(read(&file).unwrap(), records);
    records.runs[0].settings = Some("max_split_size_mb:512".to_owned());
    let newer = json::render(&Report::new(&records), false);
    assert_eq!(
        newer.replace(",\"settings\":\"max_split_size_mb:512\"", ""),
        older
    );
    fs::write(&file, newer).unwrap();
    assert_eq!(read(&file).unwrap(), records);
}

#[test]
fn records_without_cost_figures_are_read() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join(RECORDS);
    let records = Records {
        runs: vec![examples::measured("direct", 0)],
        ..examples::every_ending()
    };
    let text = json::render(&Report::new(&records), false);
    let older = text.replace(",\"cost_figures\":[]", "");
    assert_ne!(older, text);
    fs::write(&file, older).unwrap();
    assert_eq!(read(&file).unwrap(), records);
}
