use super::*;

#[test]
fn a_full_disk_is_told_from_other_failures() {
    // `/dev/full` acts as the full disk.
    let full = || File::options().write(true).open("/dev/full").and_then(|file| write_whole(&file, "report"));
    let told = |document| StoreError::writing(document, Path::new("reports/runs"), full().expect_err("writing to /dev/full fails"));
    assert!(matches!(told(Document::RECORDS), StoreError::DiskFull { .. }));
    insta::assert_snapshot!(told(Document::RECORDS), @"cannot write to `reports/runs`: the disk is full (No space left on device (os error 28)). Free some space, or choose another place with `--report DIR`.");
    insta::assert_snapshot!(told(Document::BENCHMARK), @"cannot write to `reports/runs`: the disk is full (No space left on device (os error 28)). Free some space, or choose another place.");
}

#[test]
fn pipes_and_devices_are_written_to_and_links_are_followed() -> io::Result<()> {
    let folder = tempfile::tempdir()?;
    let [real, link, dangling, made] = ["real", "link", "dangling", "made"].map(|name| folder.path().join(name));
    fs::write(&real, "before")?;
    std::os::unix::fs::symlink("real", &link)?;
    std::os::unix::fs::symlink("made", &dangling)?;
    write(&link, "after")?;
    write(&dangling, "new")?;
    assert_eq!((fs::read_to_string(&real)?, fs::read_to_string(&made)?), ("after".to_owned(), "new".to_owned()));
    assert!(link.is_symlink() && dangling.is_symlink());
    write(Path::new("/dev/null"), "nothing")?;
    append(Path::new("/dev/null"), |existing| format!("{existing:?}"))?;
    assert!(!Path::new("/dev/null").metadata()?.is_file());
    for full in [write(Path::new("/dev/full"), "x"), append(Path::new("/dev/full"), |_| "x".to_owned())] {
        assert_eq!(full.expect_err("writing to /dev/full fails").kind(), ErrorKind::StorageFull);
    }
    assert_eq!(write(folder.path(), "x").expect_err("the path is a folder").kind(), ErrorKind::IsADirectory);
    Ok(())
}

#[test]
fn what_is_added_knows_what_stands_before_it() -> io::Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("new/summary.md");
    let mut seen = Vec::new();
    for text in ["# One\n", "\n", "# Two"] {
        append(&path, |existing| {
            seen.push((existing.length, existing.ends_with_empty_line));
            text.to_owned()
        })?;
    }
    assert_eq!((seen, fs::read_to_string(&path)?), (vec![(0, true), (6, false), (7, true)], "# One\n\n# Two".to_owned()));
    Ok(())
}

#[test]
fn a_document_without_end_is_refused() {
    let error = read::<serde_json::Value>(Path::new("/dev/zero"), Document::BENCHMARK, 1).expect_err("/dev/zero never ends");
    insta::assert_snapshot!(error, @"cannot read `/dev/zero`: it is larger than the limit of 268435456 bytes");
}

#[test]
fn a_temporary_file_in_use_is_not_taken_for_one_that_a_killed_process_left() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let left = folder.path().join(format!("{TEMPORARY}left"));
    let used = temporary::file_in(folder.path()).expect("a temporary file can be created");
    fs::write(&left, "half").expect("the file can be written");
    Folder::open(folder.path(), Document::RECORDS).expect("the folder can be opened");
    assert_eq!((left.exists(), used.path().exists()), (false, true));
}

#[test]
fn slugs_are_safe_for_files_and_links() {
    for (text, expected) in
        [("NVIDIA H200", "nvidia-h200"), ("oom_retry", "oom_retry"), ("../../etc", "etc"), ("µ", "unnamed"), ("a--b-", "a-b")]
    {
        assert_eq!(slug(text), expected);
    }
    assert_eq!(slug(&"x".repeat(500)).len(), 60);
}
