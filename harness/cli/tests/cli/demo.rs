//! Tests of `harness demo`, of `--open` where a command writes a page, of `harness.explain` in
//! Python, and of the versions of documents.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
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

/// `tests/torch_programs` compares the recording with a run.
#[test]
fn the_readme_has_the_table_of_the_demo() {
    let folder = TempDir::new().unwrap();
    let demo = text(&harness(folder.path(), "", &["demo"]).stdout);
    let table = demo
        .lines()
        .map(str::trim_end)
        .skip_while(|line| !line.contains("injected failures"))
        .take_while(|line| !line.starts_with("Without "))
        .collect::<Vec<_>>();
    let current = format!("```text\n{}\n```\n", table.join("\n").trim());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let readme = fs::read_to_string(&path).unwrap();
    let [start, end] = ["<!-- excerpt: every fault -->\n", "<!-- end -->"];
    let (before, rest) = readme.split_once(start).unwrap();
    let (excerpt, after) = rest.split_once(end).unwrap();
    if std::env::var_os("UPDATE").is_some() {
        fs::write(path, format!("{before}{start}{current}{end}{after}")).unwrap();
    } else {
        assert_eq!(excerpt, current, "run with UPDATE=1");
    }
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
        let begun = std::time::Instant::now();
        while fs::read(&opened).unwrap_or_default().is_empty() {
            assert!(begun.elapsed().as_secs() < 300, "no browser started");
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
    for browser in ["", "no-such-browser", "no-such-browser:another %s"] {
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
fn open_replaces_no_file_of_the_user() {
    let folder = TempDir::new().unwrap();
    harness(folder.path(), "", &["demo"]);
    let explain = || {
        harness(
            folder.path(),
            "",
            &["explain", "harness-demo/oom.pickle.gz", "--open"],
        )
    };
    let page = folder.path().join("oom.html");
    for _ in 0..2 {
        assert!(explain().status.success());
    }
    fs::write(&page, "mine").unwrap();
    let output = explain();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("oom.html exists, and is no page of `harness explain`"));
    assert_eq!(fs::read(&page).unwrap(), b"mine");
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

#[test]
fn documents_of_commands_begin_with_their_version() {
    let folder = TempDir::new().unwrap();
    harness(folder.path(), "", &["demo"]);
    let snapshot = "harness-demo/oom.pickle.gz";
    let document = |command: &str| {
        let words: Vec<&str> = command.split(' ').collect();
        let output = harness(folder.path(), "", &words);
        assert!(output.status.success(), "{command}: {output:?}");
        let text = text(&output.stdout);
        let document: Value = serde_json::from_str(&text).unwrap();
        let first = text.trim_start_matches(['{', '\n', ' ']).to_owned();
        assert!(first.starts_with("\"version\": "), "{command}: {first}");
        document["version"].as_u64()
    };
    for command in [
        format!("explain {snapshot} --format json"),
        format!("compare {snapshot} {snapshot} --format json"),
        format!("advise {snapshot} --format json"),
        format!("fleet {snapshot} --format json"),
        "doctor --no-open --format json".to_owned(),
    ] {
        assert_eq!(document(&command), Some(1), "{command}");
    }
}

#[test]
fn the_page_of_stable_formats_has_the_versions_of_the_code() {
    let page = include_str!("../../../book/src/stable.md");
    let version = |format: &str| {
        let line = page.lines().find(|line| line.starts_with(format)).unwrap();
        line.split('|')
            .nth(2)
            .unwrap()
            .trim()
            .parse::<u32>()
            .unwrap()
    };
    assert_eq!(
        version("| `benchmark.json`"),
        harness_bench::record::BENCH_VERSION
    );
    assert_eq!(version("| `records.json`"), harness_record::RECORD_VERSION);
    let language = harness_language::fields::LANGUAGE_VERSION;
    assert_eq!(u64::from(version("| scenario, in YAML")), language);
    assert_eq!(
        u64::from(version("| suite of benchmarks, in YAML")),
        language
    );
    assert_eq!(
        version("| GPU or device profile, in YAML"),
        harness_devices::profile::PROFILE_VERSION
    );
    let schema = include_str!("../../../../scenarios/schema.json");
    assert!(schema.contains("\"version\""));
}

/// Skipped without python3.
#[test]
fn python_explains_a_snapshot_as_the_program_does() {
    let folder = TempDir::new().unwrap();
    harness(folder.path(), "", &["demo"]);
    let code = "
import html, json, sys
import harness
found = harness.explain('harness-demo/oom.pickle.gz')
table = found._repr_html_()
assert 'extract_features.py:13 forward' in table and '<script' not in table
assert found.page('page.html').exists()
assert str(found).startswith('harness-demo/oom.pickle.gz: out of memory')
for given in [dict(at='peak'), dict(at=3), dict(memory='80GiB')]:
    other = harness.explain('harness-demo/oom.pickle.gz', **given)
    assert other.headline != found.headline, given
    assert other.headline in html.unescape(other.page('page.html').read_text()), given
for path, reason in [('-x.pickle', 'there is no such file'), ('harness-demo', 'is a folder')]:
    try:
        harness.explain(path)
    except harness.HarnessError as error:
        assert path in str(error) and reason in str(error), error
    else:
        sys.exit('no error')
sums = sum(cause.bytes for cause in found.causes)
print(json.dumps([found.requested, found.allocated, found.device_total, sums, found.headline]))
";
    let program = Path::new(env!("CARGO_BIN_EXE_harness"));
    let path = std::env::var("PATH").unwrap_or_default();
    let python = Command::new("python3")
        .args(["-c", code])
        .current_dir(folder.path())
        .env(
            "PATH",
            format!("{}:{path}", program.parent().unwrap().display()),
        )
        .env("PYTHONPATH", concat!(env!("CARGO_MANIFEST_DIR"), "/python"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output();
    let Ok(python) = python else { return };
    assert!(python.status.success(), "{python:?}");
    let explained = ["explain", "harness-demo/oom.pickle.gz", "--format", "json"];
    let explained = harness(folder.path(), "", &explained).stdout;
    let explained: Value = serde_json::from_str(&text(&explained)).unwrap();
    let total = &explained["device_total"];
    let expected = json!([
        explained["request"]["requested"],
        explained["accounts"]["allocated"],
        total,
        total,
        explained["headline"]
    ]);
    assert_eq!(
        serde_json::from_slice::<Value>(&python.stdout).unwrap(),
        expected
    );
}
