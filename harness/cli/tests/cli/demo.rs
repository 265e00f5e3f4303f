//! Tests of `harness demo`, and of `--open` where a command writes a page.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// Runs the program in a folder, without a desktop and without other programs.
fn harness(folder: &Path, browser: &str, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_harness"))
        .arg0("harness")
        .args(arguments)
        .current_dir(folder)
        .env_clear()
        .env("BROWSER", browser)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A browser that writes the page's path to a file and ends.
fn browser(folder: &Path) -> (PathBuf, PathBuf) {
    let (program, opened) = (folder.join("browser"), folder.join("opened"));
    fs::write(
        &program,
        format!("#!/bin/sh\necho \"$1\" > '{}'\n", opened.display()),
    )
    .unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    (program, opened)
}

#[test]
fn the_demo_explains_an_error_and_shows_a_broken_recovery_without_other_programs() {
    let folder = TempDir::new().unwrap();
    let output = harness(folder.path(), "", &["demo"]);
    let out = text(&output.stdout);
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{output:?}"
    );
    for shown in [
        "harness-demo/oom.pickle.gz: out of memory",
        "so the 576 MiB asked for at extract_features.py:13 forward did not fit",
        "prevents the error: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "harness-demo/oom.html",
        "Recorded with PyTorch 2.11",
        "The program survives none of 4 injected failures",
        "harness exec --memory 24GiB --every-fault --expect recovers -- python train.py",
    ] {
        assert!(out.contains(shown), "`{shown}` is missing:\n{out}");
    }
    let page = fs::read_to_string(folder.path().join("harness-demo/oom.html")).unwrap();
    assert!(page.contains("extract_features.py"));
}

#[test]
fn the_commands_that_the_demo_prints_for_its_files_run() {
    let folder = TempDir::new().unwrap();
    let out = text(&harness(folder.path(), "", &["demo", "--out", "a b"]).stdout);
    let line = out
        .lines()
        .find_map(|line| line.strip_prefix("More: "))
        .unwrap();
    let commands: Vec<&str> = line.split("; ").collect();
    assert_eq!(commands.len(), 2);
    for command in commands {
        let arguments = command.strip_prefix("harness ").unwrap().replace('\'', "");
        let (name, file) = arguments.split_once(' ').unwrap();
        let output = harness(folder.path(), "", &[name, file]);
        assert!(output.status.success(), "{command}: {output:?}");
    }
}

#[test]
fn open_gives_the_page_of_each_command_to_the_browser() {
    let folder = TempDir::new().unwrap();
    let (browser, opened) = browser(folder.path());
    let browser = browser.display().to_string();
    for (arguments, page) in [
        (["demo", "--open"].as_slice(), "harness-demo/oom.html"),
        (
            &["explain", "harness-demo/oom.pickle.gz", "--open"],
            "oom.html",
        ),
        (
            &["explain", "harness-demo", "--open", "--out", "all.html"],
            "all.html",
        ),
        (&["fleet", "harness-demo", "--open"], "fleet/fleet.html"),
    ] {
        let output = harness(folder.path(), &browser, arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        let page = folder.path().join(page).canonicalize().unwrap();
        // A browser that starts slowly writes its file later.
        while !opened.exists() || fs::read(&opened).unwrap().is_empty() {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        assert_eq!(
            fs::read_to_string(&opened).unwrap().trim(),
            page.display().to_string()
        );
        fs::remove_file(&opened).unwrap();
        assert!(fs::read_to_string(page).unwrap().contains("<html"));
    }
}

#[test]
fn a_missing_browser_is_a_message_with_the_path_of_the_page() {
    let folder = TempDir::new().unwrap();
    for browser in ["", "no-such-browser", "false:no-such-browser %s"] {
        let output = harness(folder.path(), browser, &["demo", "--open"]);
        assert!(output.status.success());
        let message = text(&output.stderr);
        assert!(
            message.starts_with("no browser opened the page; set BROWSER, or open /")
                && message.trim_end().ends_with("harness-demo/oom.html"),
            "{message}"
        );
    }
}

#[test]
fn open_is_refused_with_a_format_that_is_no_page() {
    let folder = TempDir::new().unwrap();
    harness(folder.path(), "", &["demo"]);
    let arguments = ["explain", "harness-demo", "--open", "--format", "json"];
    let output = harness(folder.path(), "", &arguments);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty() && text(&output.stderr).contains("`--open` shows a page"));
}
