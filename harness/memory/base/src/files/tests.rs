use super::*;

#[test]
fn a_full_disk_is_told_from_other_failures() {
    // `/dev/full` acts as the full disk.
    let full = || {
        File::options()
            .write(true)
            .open("/dev/full")
            .and_then(|file| write_whole(&file, "report"))
    };
    let told = |document| {
        StoreError::writing(
            document,
            Path::new("reports/runs"),
            full().expect_err("writing to /dev/full fails"),
        )
    };
    assert!(matches!(
        told(DocumentKind::RECORDS),
        StoreError::DiskFull { .. }
    ));
    let [records, benchmark] = [DocumentKind::RECORDS, DocumentKind::BENCHMARK].map(told);
    insta::assert_snapshot!(records, @"cannot write to `reports/runs`: the disk is \
         full (No space left on device (os error 28)). Free some space, or choose another place \
         with `--report DIR`.");
    insta::assert_snapshot!(benchmark, @"cannot write to `reports/runs`: the disk \
         is full (No space left on device (os error 28)). Free some space, or choose another \
         place.");
}

#[test]
fn pipes_and_devices_are_written_to_and_links_are_followed() -> io::Result<()> {
    let folder = tempfile::tempdir()?;
    let [real, link, dangling, made] =
        ["real", "link", "dangling", "made"].map(|name| folder.path().join(name));
    fs::write(&real, "before")?;
    std::os::unix::fs::symlink("real", &link)?;
    std::os::unix::fs::symlink("made", &dangling)?;
    write(&link, "after")?;
    write(&dangling, "new")?;
    assert_eq!(
        (fs::read_to_string(&real)?, fs::read_to_string(&made)?),
        ("after".to_owned(), "new".to_owned())
    );
    assert!(link.is_symlink() && dangling.is_symlink());
    write(Path::new("/dev/null"), "nothing")?;
    append(Path::new("/dev/null"), |existing| format!("{existing:?}"))?;
    assert!(!Path::new("/dev/null").metadata()?.is_file());
    for full in [
        write(Path::new("/dev/full"), "x"),
        append(Path::new("/dev/full"), |_| "x".to_owned()),
    ] {
        assert_eq!(
            full.expect_err("writing to /dev/full fails").kind(),
            ErrorKind::StorageFull
        );
    }
    assert_eq!(
        write(folder.path(), "x")
            .expect_err("the path is a folder")
            .kind(),
        ErrorKind::IsADirectory
    );
    Ok(())
}

/// Makes a named pipe, a link to `target`, and a socket.
fn special_files(folder: &Path, target: &str) -> io::Result<[PathBuf; 3]> {
    let made = ["pipe", "link", "socket"].map(|name| folder.join(name));
    let [pipe, link, socket] = &made;
    let status = std::process::Command::new("mkfifo").arg(pipe).status()?;
    assert!(status.success());
    std::os::unix::fs::symlink(target, link)?;
    // The file stays when the listener is closed.
    drop(std::os::unix::net::UnixListener::bind(socket)?);
    Ok(made)
}

#[test]
fn a_pipe_or_device_is_refused_without_a_wait_unless_this_process_has_it_open() -> io::Result<()> {
    let folder = tempfile::tempdir()?;
    let [pipe, link, socket] = special_files(folder.path(), "/dev/zero")?;
    for (path, why) in [
        (pipe.as_path(), "this is a named pipe, not a file"),
        (&link, "this is a device, not a file"),
        (&socket, "this is a socket, not a file"),
        (folder.path(), "is a directory"),
    ] {
        assert_eq!(open(path).expect_err(why).to_string(), why);
        assert_eq!(read_to_string(path).expect_err(why).to_string(), why);
    }
    let (reader, mut writer) = io::pipe()?;
    writer.write_all(b"text")?;
    drop(writer);
    let given = format!("/dev/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&reader));
    assert_eq!(read_to_string(Path::new(&given))?, "text");
    Ok(())
}

#[test]
fn an_output_that_would_wait_is_refused_unless_this_process_has_it_open() -> io::Result<()> {
    let folder = tempfile::tempdir()?;
    let [pipe, link, socket] = special_files(folder.path(), "pipe")?;
    let kept = folder.path().join("kept");
    for (path, why) in [
        (pipe.as_path(), "this is a named pipe, not a file"),
        (&link, "this is a named pipe, not a file"),
        (&socket, "this is a socket, not a file"),
        (folder.path(), "is a directory"),
    ] {
        for refused in [
            check_output(path),
            check_place(path),
            write(path, "x"),
            append(path, |_| "x".to_owned()),
            open_to_append(path).map(drop),
        ] {
            assert_eq!(refused.expect_err(why).to_string(), why);
        }
    }
    let opened = |file: &dyn std::os::fd::AsRawFd| format!("/dev/fd/{}", file.as_raw_fd());
    let (mut reader, writer) = io::pipe()?;
    let link = folder.path().join("to-pipe");
    std::os::unix::fs::symlink(opened(&writer), &link)?;
    // More than a pipe holds at a time: the writer waits for its reader.
    let text = "x".repeat(1 << 20);
    let all = std::thread::spawn(move || io::read_to_string(&mut reader));
    check_output(&link)?;
    write(&link, &text)?;
    append(Path::new(&opened(&writer)), |_| "end".to_owned())?;
    drop(writer);
    assert_eq!(all.join().expect("the reader ends")?, text + "end");
    // A redirected file stays the same file.
    fs::write(&kept, "earlier ")?;
    let file = File::options().append(true).open(&kept)?;
    let link = folder.path().join("to-file");
    std::os::unix::fs::symlink(opened(&file), &link)?;
    write(&link, "later")?;
    assert_eq!(fs::read_to_string(&kept)?, "earlier later");
    Ok(())
}

#[test]
fn a_file_in_shared_memory_is_replaced_like_others() -> io::Result<()> {
    let Ok(file) = tempfile::NamedTempFile::new_in("/dev/shm") else {
        return Ok(());
    };
    write(file.path(), "first")?;
    write(file.path(), "next")?;
    assert_eq!(fs::read_to_string(file.path())?, "next");
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
    assert_eq!(
        (seen, fs::read_to_string(&path)?),
        (
            vec![(0, true), (6, false), (7, true)],
            "# One\n\n# Two".to_owned()
        )
    );
    Ok(())
}

#[test]
fn a_document_that_is_too_large_is_refused() -> io::Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    file.as_file().set_len(MAX_DOCUMENT + 1)?;
    let error = read::<serde_json::Value>(file.path(), DocumentKind::BENCHMARK, 1)
        .expect_err("the file is too large");
    let told = error
        .to_string()
        .replace(&file.path().display().to_string(), "FILE");
    insta::assert_snapshot!(told, @"cannot read `FILE`: it is larger than the limit of 268435456 \
         bytes");
    Ok(())
}

#[test]
fn a_temporary_file_in_use_is_not_taken_for_one_that_a_killed_process_left() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let left = folder.path().join(format!("{TEMPORARY}left"));
    let used = temporary::file_in(folder.path()).expect("a temporary file can be created");
    fs::write(&left, "half").expect("the file can be written");
    Folder::open(folder.path(), DocumentKind::RECORDS).expect("the folder can be opened");
    assert_eq!((left.exists(), used.path().exists()), (false, true));
}

#[test]
fn slugs_are_safe_for_files_and_links() {
    for (text, expected) in [
        ("NVIDIA H200", "nvidia-h200"),
        ("oom_retry", "oom_retry"),
        ("../../etc", "etc"),
        ("µ", "unnamed"),
        ("a--b-", "a-b"),
    ] {
        assert_eq!(slug(text), expected);
    }
    assert_eq!(slug(&"x".repeat(500)).len(), 60);
}
